"""Many clients at once, and models that change meanwhile: nobody gets another one's answer or a mixture."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaded_engines import LONG, NEAR, answer, request_of, save_model, score, token_ids
from rewardlab.artifact.load import load
from rewardlab.artifact.seal import recorded_digest
from rewardlab.core.errors import ArtifactError
from rewardlab.serve.engine import slots
from rewardlab.serve.engine.api import UnknownModelError, WrongDigestError
from rewardlab.serve.engine.local import LocalEngine

REQUEST: dict[str, Any] = {"prompt": LONG, "replies": ["Paris", "Paris is light."]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    place = tmp_path_factory.mktemp("swap")
    return [save_model(place / str(seed), seed=seed) for seed in (1, 2)]


def some_request(draw: random.Random, scorer) -> dict[str, Any]:
    """A request of any form."""
    prompts = [LONG, LONG + "Why?", "How?", "Human: Why?\n\nAssistant:", "Tell me. " * draw.randrange(1, 9)]
    replies = ["Paris", "So.", "no " * draw.randrange(1, 9), "Water it when the soil is dry."]
    form = draw.randrange(4)
    some = [draw.choice(replies) for _ in range(draw.randrange(1, 5))]
    if form == 0:
        return {"prompt": draw.choice(prompts), "replies": some}
    if form == 1:
        return {"groups": [{"prompt": draw.choice(prompts), "replies": some} for _ in range(2)]}
    if form == 2:
        return {
            "conversations": [
                [{"role": "user", "content": draw.choice(prompts)}, {"role": "assistant", "content": reply}]
                for reply in some
            ]
        }
    return {"token_ids": [token_ids(scorer, draw.choice(prompts), reply) for reply in some]}


@pytest.mark.slow
def test_two_hundred_requests_at_once_get_the_answers_they_get_alone(folders):
    draw, scorer = random.Random(1), load(folders[0])
    asked = [some_request(draw, scorer) for _ in range(200)]
    alone = LocalEngine.load({"mine": folders[0]}, cache_tokens=0)
    together = LocalEngine.load({"mine": folders[0]}, token_budget=700, cache_tokens=600, max_batch_wait_ms=2.0)
    try:
        wanted = [score(alone, **request) for request in asked]
        with ThreadPoolExecutor(32) as pool:
            got = list(pool.map(lambda request: score(together, **request), asked))
        for ours, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), atol=NEAR)
        stats = together.stats()
        assert stats.batches < 200
        assert stats.cached_tokens > 0
        assert 0 < stats.cache_tokens <= 600
        assert stats.computed_tokens + stats.cached_tokens <= alone.stats().computed_tokens
        assert stats.waiting_requests == stats.waiting_tokens == 0
    finally:
        alone.close()
        together.close()


def test_no_answer_mixes_models_when_they_are_swapped_under_load(folders):
    engine = LocalEngine.load({"mine": folders[0]}, token_budget=300)
    wanted = {}
    for folder in folders:
        scorer = load(folder)
        scores = scorer.score_replies(REQUEST["prompt"], REQUEST["replies"])
        wanted[read_digest(folder)] = [*scores, *scorer.score_replies("How?", ["So."])]
    request = {"groups": [REQUEST, {"prompt": "How?", "replies": ["So."]}]}
    stop = threading.Event()
    seen: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            got = answer(engine, **request)
            seen.append(got.digest)
            np.testing.assert_allclose(
                np.concatenate([group.scores for group in got.groups]), wanted[got.digest], atol=NEAR
            )

    try:
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            for number in (1, 0, 1):
                served = engine.swap("mine", folders[number])
                assert served.digest == engine.served()[0].digest == read_digest(folders[number])
                assert answer(engine, **request).digest == served.digest
            stop.set()
            for future in asking:
                future.result(timeout=60)
        assert set(seen) == set(wanted)
        assert engine.stats().swaps == 3
    finally:
        stop.set()
        engine.close()


def read_digest(folder: Path) -> str:
    digest = recorded_digest(folder)
    assert digest is not None
    return digest


@pytest.mark.slow
def test_what_was_prepared_before_is_scored_by_the_old_model_which_is_then_freed(folders):
    engine = LocalEngine.load({"mine": folders[0]})
    try:
        score(engine, **REQUEST)
        before = engine.prepare(request_of(REQUEST))
        old = weakref.ref(before.slot.scorer.model)
        engine.swap("mine", folders[1])
        new = answer(engine, **REQUEST)
        late = engine.submit(before).result(timeout=60)
        assert late.digest == before.digest == read_digest(folders[0])
        for got, folder in ((late, folders[0]), (new, folders[1])):
            wanted = load(folder).score_replies(REQUEST["prompt"], REQUEST["replies"])
            np.testing.assert_allclose(got.groups[0].scores, wanted, atol=NEAR)
        with pytest.raises(WrongDigestError):
            engine.prepare(request_of(REQUEST | {"digest": late.digest}))
        held = engine.stats().cache_tokens
        del before
        assert engine.drain(60)
        gc.collect()
        assert old() is None
        assert 0 < held <= len(token_ids(load(folders[1]), LONG, "")), "only the new model's prompt"
    finally:
        engine.close()


@pytest.mark.slow
def test_a_folder_that_is_replaced_while_it_is_loaded_is_refused(folders, tmp_path, monkeypatch):
    best = Path(shutil.copytree(folders[0], tmp_path / "best"))
    own = slots._load

    def racing(folder: Path, config: slots.EngineConfig) -> Any:
        scorer = own(folder, config)
        shutil.rmtree(best)
        shutil.copytree(folders[1], best)
        return scorer

    engine = LocalEngine.load({"mine": folders[1]})
    try:
        monkeypatch.setattr(slots, "_load", racing)
        with pytest.raises(ArtifactError, match=f"{best}: another model was put there while it was loaded"):
            engine.swap("mine", best)
        assert engine.stats().swaps == 0
        monkeypatch.undo()
        assert engine.swap("mine", best).digest == read_digest(folders[1])
    finally:
        engine.close()


def test_a_swap_that_fails_leaves_the_old_model(folders, tmp_path):
    engine = LocalEngine.load({"mine": folders[0]})
    try:
        before = score(engine, **REQUEST)
        damaged = Path(shutil.copytree(folders[1], tmp_path / "damaged"))
        weights = damaged / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(ArtifactError, match="was changed after the model was saved"):
            engine.swap("mine", damaged)
        with pytest.raises(UnknownModelError):
            engine.swap("other", folders[1])
        np.testing.assert_allclose(score(engine, **REQUEST), before, atol=NEAR)
        assert engine.stats().swaps == 0
    finally:
        engine.close()


@pytest.mark.slow
def test_several_models_are_served_by_name(folders):
    engine = LocalEngine.load({"first": folders[0], "second": folders[1]})
    try:
        assert [served.name for served in engine.served()] == ["first", "second"]
        for name, folder in zip(("first", "second"), folders, strict=True):
            wanted = load(folder).score_replies(REQUEST["prompt"], REQUEST["replies"])
            for _ in range(2):
                got = answer(engine, model=name, **REQUEST)
                assert got.model == name
                np.testing.assert_allclose(got.groups[0].scores, wanted, atol=NEAR)
        assert answer(engine, **REQUEST).model == "first"
    finally:
        engine.close()
