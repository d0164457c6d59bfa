"""Several adapters on one backbone: each scores as its merged folder does, and one of another base is refused."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import write_base_model
from loaded_engines import LONG, NEAR, answer, request_of, save_adapter, save_model, score
from rewardlab.artifact.load import load
from rewardlab.artifact.seal import recorded_digest
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.serve.engine.local import LocalEngine

REQUEST: dict[str, Any] = {"prompt": LONG, "replies": ["Paris", "Paris is light."]}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def folders(place) -> dict[str, Path]:
    base = write_base_model(place / "base")
    return {
        "plain": save_adapter(place / "plain", base, seed=1),
        "wider": save_adapter(place / "wider", base, seed=2, lora_rank=5, rslora=True),
        "narrow": save_adapter(place / "narrow", base, seed=3, lora_target_modules=("q_proj", "down_proj")),
    }


@pytest.fixture(scope="module")
def engine(folders) -> Iterator[LocalEngine]:
    engine = LocalEngine.load({}, adapters=folders, token_budget=500)
    yield engine
    engine.close()


def scores_of(folder: Path) -> list[float]:
    return load(folder).score_replies(REQUEST["prompt"], REQUEST["replies"])


def test_each_adapter_scores_as_its_merged_folder_whatever_is_asked_beside_it(engine, folders):
    assert [served.name for served in engine.served()] == list(folders)
    wanted = {name: scores_of(folder) for name, folder in folders.items()}
    assert min(abs(wanted[a][0] - wanted[b][0]) for a in wanted for b in wanted if a < b) > 1e-2
    asked = [list(folders)[n % 3] for n in range(60)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda name: answer(engine, model=name, **REQUEST), asked))
    for name, one in zip(asked, got, strict=True):
        assert one.model == name
        np.testing.assert_allclose(one.groups[0].scores, wanted[name], atol=5 * NEAR)
    assert len({one.digest for one in got}) == 3
    assert engine.stats().cached_tokens > 0


def test_the_backbone_is_in_memory_once(engine, folders):
    from safetensors.torch import load_file

    models = [slot.scorer.model for slot in engine._slots.values()]
    assert len({id(model.backbone) for model in models}) == 1
    assert len({model.head.weight.data_ptr() for model in models}) == 3
    held = {name: tensor for name, tensor in models[0].backbone.named_parameters() if ".lora_" not in name}
    saved = load_file(folders["plain"] / "model.safetensors")
    assert sum(tensor.numel() for tensor in held.values()) == sum(
        tensor.numel() for name, tensor in saved.items() if not name.startswith("score.")
    )


@pytest.fixture
def swapping(folders) -> Iterator[LocalEngine]:
    engine = LocalEngine.load({}, adapters={name: folders[name] for name in ("plain", "wider")})
    yield engine
    engine.close()


def test_an_adapter_whose_folder_is_replaced_after_its_check_is_taken_off_again(swapping, folders):
    family, batcher = swapping._family, swapping._batcher
    layer = swapping._slots["plain"].scorer.model.backbone.layers[0].self_attn.q_proj
    adapter, digest = family.check(folders["plain"])
    assert digest == recorded_digest(folders["plain"])
    before = len(layer.lora_A)
    with pytest.raises(ArtifactError, match="another model was put there while it was loaded"):
        batcher.call(lambda: family.install("plain", adapter, "0" * 64)).result(timeout=60)
    assert len(layer.lora_A) == before


@pytest.mark.slow
def test_an_adapter_is_swapped_under_load_and_the_old_one_freed(swapping, folders, place):
    engine = swapping
    other = save_adapter(place / "other", place / "base", seed=9)
    wanted = {engine.served()[0].digest: scores_of(folders["plain"])}
    beside = scores_of(folders["wider"])
    stop = threading.Event()

    def ask() -> set[str]:
        seen = set()
        while not stop.is_set():
            got = answer(engine, model="plain", **REQUEST)
            seen.add(got.digest)
            np.testing.assert_allclose(got.groups[0].scores, wanted[got.digest], atol=5 * NEAR)
            np.testing.assert_allclose(score(engine, model="wider", **REQUEST), [beside], atol=5 * NEAR)
        return seen

    wanted[str(recorded_digest(other))] = scores_of(other)
    before = engine.prepare(request_of(REQUEST | {"model": "plain"}))
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            served = engine.swap("plain", other)
            assert answer(engine, model="plain", **REQUEST).digest == served.digest == recorded_digest(other)
        finally:
            stop.set()
        assert served.digest in set().union(*(future.result(timeout=60) for future in asking)) | {served.digest}
    late = engine.submit(before).result(timeout=60)
    np.testing.assert_allclose(late.groups[0].scores, wanted[late.digest], atol=5 * NEAR)
    backbone = engine._slots["plain"].scorer.model.backbone
    layer = backbone.layers[0].self_attn.q_proj
    assert len(layer.lora_A) == 3
    del before, late
    assert engine.drain(60)
    gc.collect()
    engine._batcher.call(lambda: None).result(timeout=60)
    assert len(layer.lora_A) == 2


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: save_adapter(place / "x", _other_base(place), seed=1), "was trained from another base"),
        (lambda place: save_adapter(place / "x", place / "base", seed=1, dora=True), "DoRA scales whole rows"),
        (
            lambda place: save_adapter(place / "x", place / "base", seed=1, lora_modules_to_save=("norm",)),
            "was trained whole",
        ),
        (
            lambda place: save_adapter(
                place / "x", place / "base", seed=1, lora_target_modules=("embed_tokens", "q_proj")
            ),
            "it adapts the embedding model.embed_tokens ",
        ),
        (lambda place: save_model(place / "x"), "was not trained with --lora"),
    ],
    ids=["another base", "DoRA", "whole modules", "an embedding", "no adapter"],
)
def test_what_cannot_share_the_backbone_is_refused(folders, place, make, said):
    folder = make(place)
    try:
        with pytest.raises(ArtifactError, match=said):
            LocalEngine.load({}, adapters={"plain": folders["plain"], "x": folder})
    finally:
        shutil.rmtree(folder)


def _other_base(place: Path) -> Path:
    """The base with one weight a little off."""
    from safetensors.torch import load_file, save_file

    folder = place / "base2"
    if not folder.exists():
        shutil.copytree(place / "base", folder)
        state = load_file(folder / "model.safetensors")
        state["model.layers.1.mlp.up_proj.weight"][0, 0] += 0.01
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_failed_swap_leaves_the_old_adapter_and_the_others(engine, folders, place):
    another = save_adapter(place / "another", _other_base(place), seed=4)
    with pytest.raises(ArtifactError, match="from another base"):
        engine.swap("plain", another)
    for name, folder in folders.items():
        np.testing.assert_allclose(score(engine, model=name, **REQUEST), [scores_of(folder)], atol=5 * NEAR)


@pytest.mark.slow
def test_adapters_stand_beside_models_and_names_are_given_once(folders, place):
    model = save_model(place / "model")
    engine = LocalEngine.load({"whole": model}, adapters={"plain": folders["plain"]})
    try:
        assert [served.name for served in engine.served()] == ["whole", "plain"]
        np.testing.assert_allclose(score(engine, **REQUEST), [scores_of(model)], atol=NEAR)
        np.testing.assert_allclose(
            score(engine, model="plain", **REQUEST), [scores_of(folders["plain"])], atol=5 * NEAR
        )
    finally:
        engine.close()
    with pytest.raises(ConfigError, match="a model and an adapter have this name"):
        LocalEngine.load({"plain": model}, adapters={"plain": folders["plain"]})
    with pytest.raises(ConfigError, match="computed in fp32"):
        LocalEngine.load({}, adapters={"plain": folders["plain"]}, precision="bf16")
