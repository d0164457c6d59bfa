"""Whole runs on two ranks beside the same runs on one: every weight has moved as it did there, and scores are equal."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

import runs
from common import GROUPED, SIZES, make_tokenizer, write_base_model
from rewardlab.training.run import train
from runs import history_of, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified_here")]
config_for = partial(
    runs.config_for,
    steps=3,
    lr=1e-3,
    log_every=1,
    eval_every=3,
    **runs.RANKS,
)
FP16: dict[str, Any] = {"precision": "fp16"}
BF16: dict[str, Any] = {"precision": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora in fp16": ("llama", FP16 | {"lora": True, "lora_rank": 2, "dora": True}),
    "adapters, whole on each of two nodes": ("llama", {"lora": True, "lora_rank": 2, "sharding": "hybrid"}),
    "upper layers in fp16": ("llama", FP16 | {"freeze_layers": 1}),
    "the head alone in bf16": ("llama", BF16 | {"train_head_only": True, "lr": 1e-2}),
    "windows in bf16, rounded to the nearest": ("gemma3", BF16 | {"half_rounding": "nearest"}),
    "experts in bf16": ("mixtral", BF16),
    "rankings, clipped, in fp16": ("llama", FP16 | {"kwise_loss": "plackett-luce", "max_grad_norm": 0.1}),
    "ties, weights and margins": ("qwen2", {"center_lambda": 0.01, "label_smoothing": 0.1, "optimizer": "sgd"}),
}
BOUND = 1e-3
"""How far a weight may have moved otherwise, as a share of its way; stochastic rounding may fall otherwise in a few."""
PACKED = {"tokens", "padding_share", "sharing_ratio"}
"""Columns that depend on how rows are packed."""


def base_of(family: str, folder: Path) -> Path:
    if family != "mixtral":
        return write_base_model(folder, family=family)
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, **GROUPED, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def rows_for(path: Path, *, ranked: bool) -> Path:
    """Prompts with two or three replies: all comparisons, ranked, or soft, tied and weighted with margins."""
    rows = []
    for n in range(30):
        replies = [f"Certainly, light {n}.", "no " * (1 + n % 4), f"water {n % 7}"][: 2 + n % 2]
        pairs = [(first, second) for first in range(len(replies)) for second in range(first + 1, len(replies))]
        told: dict[str, Any] = {"label": (1.0, 0.5, 0.8)[n % 3], "weight": 0.5 + n % 2, "margin": 0.5 * (n % 2)}
        comparisons = [{"first": first, "second": second, **({} if ranked else told)} for first, second in pairs]
        row = {"prompt": f"How do I keep basil number {n}?", "replies": replies, "comparisons": comparisons}
        rows.append(row | ({"ranking": list(range(len(replies)))} if ranked else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("case", CASES)
def test_every_weight_moves_on_two_ranks_as_it_does_on_one(case, tmp_path, on_ranks):
    family, settings = CASES[case]
    base = base_of(family, tmp_path / "base")
    data = rows_for(tmp_path / "rows.jsonl", ranked="kwise_loss" in settings)
    config = config_for(base, data, tmp_path / "alone", **settings)
    train(config)
    many = config.replace(output_dir=tmp_path / "many")
    per_node = 1 if config.run.sharding == "hybrid" else 2
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=settings_of(many), per_node=per_node)
    assert set(ends.values()) == {0}, said[-3000:]
    require_same_way(tmp_path, load_file(base / "model.safetensors"))
    for row, other in zip(history_of(tmp_path / "many"), history_of(tmp_path / "alone"), strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - PACKED:
            assert bool(row[name]) == bool(other[name]), name
            if row[name]:
                assert float(row[name]) == pytest.approx(float(other[name]), rel=BOUND, abs=BOUND), name
    scores = [scores_of(tmp_path / kind) for kind in ("many", "alone")]
    assert scores[0] == pytest.approx(scores[1], rel=BOUND, abs=BOUND)


def require_same_way(folder: Path, start: dict[str, torch.Tensor]) -> None:
    ours, theirs = (load_file(folder / kind / "step_3/model.safetensors") for kind in ("many", "alone"))
    assert ours.keys() == theirs.keys()
    for name, end in theirs.items():
        begin = start.get(name, torch.zeros_like(end))
        way, other = ours[name] - begin, end - begin
        assert bool(way.any()) == bool(other.any()), f"{name} trained in one of the two runs alone"
        assert float((way - other).norm()) <= BOUND * float(other.norm()), name


def scores_of(run: Path) -> list[float]:
    lines = (run / "evals/step_0.scores.jsonl").read_text() + (run / "evals/step_3.scores.jsonl").read_text()
    return [json.loads(line)["score"] for line in lines.splitlines()]


def test_the_head_alone_trains_in_the_only_process_that_torchrun_started(base_model, pairs_file, tmp_path, on_ranks):
    config = config_for(base_model, pairs_file, tmp_path / "alone", train_head_only=True, save_every=2)
    train(config)
    many = config.replace(output_dir=tmp_path / "many")
    ends, said, _ = on_ranks("whole_run", 1, tmp_path, config=settings_of(many))
    assert set(ends.values()) == {0}, said[-3000:]
    require_same_way(tmp_path, load_file(base_model / "model.safetensors"))
