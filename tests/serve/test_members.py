"""Members of `--ensemble` that were trained with LoRA from one base share it, in `eval` and in `score`."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rewardlab
from common import write_base_model, write_pairs
from loaded_engines import NEAR, save_adapter, save_model
from rewardlab.artifact import calibrated as calibrated_module
from rewardlab.artifact.adapters import Members
from rewardlab.artifact.calibrated import store_calibration
from rewardlab.artifact.load import load
from rewardlab.artifact.shared_backbone import NotSharedError, read_adapter
from rewardlab.core.spec import CalibrationSpec
from rewardlab.evaluation import saved
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.models import Judged, judge_folders
from rewardlab.score import Scorer
from rewardlab.serve.file_scoring.ensemble import score_ensemble

REPLIES = ("How do I keep basil?", ["In the light.", "no", "Certainly, here is more on basil."])
ROUNDING = 5 * NEAR
"""How far a score may move where an adapter is taken off the merged weights and put on again."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of one base, with calibrations, and a model that is none."""
    place = tmp_path_factory.mktemp("members")
    base = write_base_model(place / "base")
    made = [
        save_adapter(place / "first", base, seed=1),
        save_adapter(place / "second", base, seed=2, lora_rank=5, lora_target_modules=("q_proj", "down_proj")),
        save_model(place / "whole"),
    ]
    record = CalibrationSpec(
        reward_mean=0.5, reward_std=2.0, num_replies=9, num_comparisons=9, precision="fp32", data={}, judged={}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated_module, "verify_in_clean_process", rewardlab.verify)
        for folder in made:
            store_calibration(folder, temperature=1.0, affine=(1.0, 0.0), calibration=record)
    return made


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.jsonl", 12)


def judged(folders: list[Path], pairs: Path, out: Path, **more: object) -> Judged:
    settings = {"reuse": False, **more}
    return judge_folders(
        EvalConfig.of(ensemble=tuple(map(str, folders)), dataset=str(pairs), output_dir=out, **settings)
    )


def test_members_of_one_base_have_its_weights_in_memory_once_and_score_as_they_do_alone(folders):
    members, loaded = Members(folders[:2], precision="fp32"), []
    places = []
    for folder in (*folders[:2], folders[0]):
        scorer = members.open(folder, lambda one: loaded.append(one) or load(one))
        assert scorer.score_replies(*REPLIES) == pytest.approx(load(folder).score_replies(*REPLIES), abs=ROUNDING)
        weights = dict(scorer.model.backbone.named_parameters())
        places.append({name: w.data_ptr() for name, w in weights.items() if ".lora_" not in name})
        assert sum(".lora_A." in name for name in weights) == sum(
            name.endswith("lora_A.weight") for name in _adapter_names(folder)
        ), "the adapter of the member before is gone"
    assert loaded == [folders[0]]
    assert places[0].keys() >= {"norm.weight"}
    embeddings = {one["embed_tokens.weight"] for one in places}
    assert len(embeddings) == 1
    base = [{at for name, at in one.items() if "base_layer" in name or "proj" in name} for one in places]
    assert base[0] == base[1] == base[2]


def _adapter_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter/adapter_model.safetensors", framework="pt") as file:
        return list(file.keys())


@pytest.mark.slow
def test_eval_loads_one_backbone_for_all_members(folders, pairs_file, tmp_path, monkeypatch, caplog):
    loaded: list[Path] = []
    held: list[weakref.ref[Any]] = []

    def load_alone(folder: Path, **settings: Any) -> Any:
        gc.collect()
        assert [one for one in held if one() is not None] == [], "no two models are in memory"
        scorer = load(folder, **settings)
        held.append(weakref.ref(scorer.model.backbone))
        loaded.append(folder)
        return scorer

    monkeypatch.setattr(saved, "load", load_alone)
    alone = {}
    for folder in folders[:2]:
        config = EvalConfig.of(
            model=str(folder), dataset=str(pairs_file), output_dir=tmp_path / folder.name, reuse=False
        )
        alone[folder.name] = rewardlab.evaluate_folder(config)[0]
    loaded.clear()
    kept = {"reuse": True, "cache_dir": str(tmp_path / "cache")}
    with caplog.at_level(logging.INFO, "rewardlab"):
        found = judged(folders[:2], pairs_file, tmp_path / "together", precision_card=True, **kept)
    assert loaded == [folders[0], *folders[:2]], "the backbone, then for each precision card the member that it rounds"
    assert all((tmp_path / "together" / folder.name / "precision.json").is_file() for folder in folders[:2])
    assert "2 members are adapters of one base, which is in memory once" in caplog.text
    for name, result in alone.items():
        rows = found.models[name].result.rows
        assert [row.score for row in rows] == pytest.approx([row.score for row in result.rows], abs=ROUNDING)
        assert found.models[name].result.card is not None
    for card in (tmp_path / "cache/cards").iterdir():
        card.unlink()
    loaded.clear()
    judged(folders[:2], pairs_file, tmp_path / "again", precision_card=True, **kept)
    assert loaded == folders[:2], "with scores that were kept, the cards alone have something to compute"


@pytest.mark.slow
def test_members_of_other_kinds_are_loaded_one_after_the_other(folders, pairs_file, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "rewardlab"):
        found = judged([folders[0], folders[2]], pairs_file, tmp_path / "out")
    assert "one member is in memory at a time" in caplog.text
    assert f"{folders[2]}: no adapter/, so it was not trained with --lora." in caplog.text
    exact = load(folders[0]).score_replies("How do I keep basil number 0?", ["Certainly, here is more on basil."])
    assert [row.score for row in found.models["first"].result.rows if row.reply == 0][:1] == pytest.approx(exact)
    caplog.clear()
    with caplog.at_level(logging.INFO, "rewardlab"):
        judged(folders[:2], pairs_file, tmp_path / "half", precision="bf16")
    assert "computed in fp32, not bf16" in caplog.text


@pytest.mark.slow
def test_scores_from_a_shared_backbone_are_not_taken_for_those_of_a_member_alone(folders, pairs_file, tmp_path, caplog):
    kept = {"reuse": True, "cache_dir": str(tmp_path / "cache"), "precision_card": False}
    first = judged(folders[:2], pairs_file, tmp_path / "1", **kept)
    with caplog.at_level(logging.INFO, "rewardlab"):
        again = judged(folders[:2], pairs_file, tmp_path / "2", **kept)
    assert caplog.text.count("kept scores: ") == 2
    assert [row.score for row in again.models["first"].result.rows] == [
        row.score for row in first.models["first"].result.rows
    ]
    caplog.clear()
    config = EvalConfig.of(model=str(folders[0]), dataset=str(pairs_file), output_dir=tmp_path / "3", **kept)
    with caplog.at_level(logging.INFO, "rewardlab"):
        rewardlab.evaluate_folder(config)
    assert "kept scores: " not in caplog.text


@pytest.mark.slow
def test_score_takes_one_backbone_for_all_members(folders, tmp_path, monkeypatch, caplog):
    prompt, replies = REPLIES
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": prompt, "responses": replies}) + "\n")
    with caplog.at_level(logging.INFO, "rewardlab"):
        score_ensemble([str(folder) for folder in folders[:2]], source, tmp_path / "out.jsonl")
    assert "2 members are adapters of one base, which is in memory once" in caplog.text
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    scaled = [(np.array(load(folder).score_replies(prompt, replies)) - 0.5) / 2 for folder in folders[:2]]
    assert row["scores"] == pytest.approx(np.mean(scaled, axis=0), abs=ROUNDING)
    assert row["score_stds"] == pytest.approx(np.std(scaled, axis=0, ddof=1), abs=ROUNDING)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "FileNotFoundError"),
        (lambda adapter: _cut(adapter / "adapter_model.safetensors"), "SafetensorError"),
        (lambda adapter: _cut(adapter / "adapter_config.json"), "adapter_config.json: not valid JSON"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[]"), "adapter_config.json: expected an object"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{}"), "KeyError: 'r'"),
        (lambda adapter: _change(adapter, lambda held: held.pop(next(iter(held)))), "not every A has its B"),
        (lambda adapter: _change(adapter, _narrow), "are not of rank 5"),
    ],
)
def test_members_with_a_damaged_adapter_are_loaded_one_after_the_other(folders, tmp_path, caplog, damage, told):
    copy = Path(shutil.copytree(folders[1], tmp_path / "damaged"))
    damage(copy / "adapter")
    members, loaded = Members([folders[0], copy], precision="fp32"), []
    with caplog.at_level(logging.INFO, "rewardlab"):
        members.open(copy, lambda one: loaded.append(one) or Mock(spec=Scorer))
    assert not members.is_shared
    assert loaded == [copy]
    assert f"{copy}: its adapter/ " in caplog.text
    assert told in caplog.text


def test_an_adapter_of_another_shape_than_its_model_is_named(folders, tmp_path):
    copy = Path(shutil.copytree(folders[0], tmp_path / "damaged"))
    _change(copy / "adapter", _shorten)
    sound, adapter = read_adapter(folders[0]), read_adapter(copy)
    layer = next(layer for layer, own in adapter.up.items() if own.shape != sound.up[layer].shape)
    with pytest.raises(NotSharedError, match="is damaged: the update of .* has shape"):
        adapter.update(layer, sound.up[layer] @ sound.down[layer])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _change(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(adapter / "adapter_model.safetensors")
    change(held)
    save_file(held, adapter / "adapter_model.safetensors")


def _narrow(held: dict[str, torch.Tensor]) -> None:
    name = next(name for name in held if name.endswith("lora_A.weight"))
    held[name] = held[name][1:].clone()


def _shorten(held: dict[str, torch.Tensor]) -> None:
    name = next(name for name in held if name.endswith("lora_B.weight"))
    held[name] = held[name][1:].clone()


def test_a_member_whose_files_were_changed_is_refused_and_not_scored_in_another_way(folders, tmp_path):
    copy = Path(shutil.copytree(folders[1], tmp_path / "copy"))
    with (copy / "tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(rewardlab.RewardlabError, match=r"tokenizer.json was changed"):
        Members([folders[0], copy], precision="fp32").open(folders[0], load)
