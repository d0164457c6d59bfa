"""What `check` says that a run takes: the formulas of docs/scaling.md where the model's widths are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from rewardlab.core.spec import SPEC_FILE
from rewardlab.experiments import lengths
from rewardlab.experiments.checking import check
from rewardlab.experiments.costs import Cost, weights_of
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.words import check_report
from study_folders import PLAN, write_plan

QWEN_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
LORA_BYTES = 2.81e6 * 8192
"""Of Qwen2.5-3B with LoRA at the default budget, as docs/scaling.md has it."""


@pytest.mark.parametrize(
    ("model", "weights"),
    [("org/some-7b", 7e9), ("org/some-7b@0a3b5c", 7e9), ("org/some-135M@refs/pr/1", 135e6), ("org/some@0a3b5c", None)],
)
def test_the_size_in_a_name_is_not_read_from_its_revision(model: str, weights: float | None) -> None:
    assert weights_of(model) == weights


def test_test_data_of_a_plan_whose_arms_are_all_programs_are_counted(tmp_path: Path) -> None:
    """Test data that the plan names are known, whoever reads them."""
    named = PLAN.replace("hypotheses:", "assume: {seed_sd: 0.01}\nhypotheses:")
    for arm in ("plain", "smooth", "harsh"):
        named = named.replace(f"  {arm}: {{says", f'  {arm}: {{program: ["{{python}}", "{arm}.py"], says')
    report = check_report(check(read_plan(write_plan(tmp_path, named))))
    assert "power: 20 comparisons of 20 test prompts (counted, a row as one comparison)" in report


def test_a_plan_without_hypotheses_has_no_heading_of_power(tmp_path: Path) -> None:
    report = check_report(check(read_plan(write_plan(tmp_path, PLAN.partition("hypotheses:")[0]))))
    assert "power:" not in report
    assert "power:" in check_report(check(read_plan(write_plan(tmp_path))))


def checked(folder: Path, **settings: Any) -> tuple[Cost, str]:
    """The cost of a run, and the whole report."""
    base = {"model": "org/some-model", "dataset": ["org/d"], "test_dataset": ["org/t"], "eval_fraction": 0.1}
    plan = {"question": "q", "base": base | {"steps": 10, "batch_size": 16} | settings, "arms": {"a": {}}}
    (folder / "plan.yaml").write_text(json.dumps(plan), encoding="utf-8")
    found = check(read_plan(folder / "plan.yaml"))
    return found.costs["a"], check_report(found)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"lora": True, "lora_rank": 4}, 1.0),
        ({"lora": True, "lora_rank": 4, "precision": "fp32"}, 2.0),
        ({"lora": True, "lora_rank": 4, "micro_token_budget": 4096}, 0.5),
        ({}, 3.39 / 2.81),
        ({"activation_checkpointing": "full"}, 0.41 / 2.81),
        ({"train_head_only": True}, 0.0),
    ],
)
def test_activations_are_those_of_the_formulas(tmp_path: Path, settings: dict[str, Any], share: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B), encoding="utf-8")
    cost, report = checked(tmp_path, model=str(tmp_path), **settings)
    assert cost.gib is not None
    assert cost.activations_gib is not None
    assert cost.activations_gib * 2**30 == pytest.approx(share * LORA_BYTES, rel=0.03)
    assert f"{cost.gib + cost.activations_gib:.3g}" in report
    assert "activations come on top" not in report


def test_a_config_in_the_cache_of_the_hub_will_do_and_without_one_the_table_says_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost, report = checked(tmp_path, model="org/some-3b", lora=True)
    assert (cost.gib is not None, cost.activations_gib) == (True, None)
    assert "The activations come on top, and may be more: config.json of the model is not on this machine" in report

    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B), encoding="utf-8")
    cached = {("org/some-3b", None): str(tmp_path / "config.json"), ("org/b", "v1"): str(tmp_path / "config.json")}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda model, name, revision: cached.get((model, revision))
    )
    for model, known in (("org/some-3b", True), ("org/b@v1", True), ("org/b@v2", False)):
        cost, report = checked(tmp_path, model=model, lora=True)
        assert (cost.activations_gib is not None) == known
    cost, report = checked(tmp_path, model="org/some-3b", lora=True, micro_token_budget="auto")
    assert cost.activations_gib is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": "org/some-7b", "lora": True}, True),
        ({"model": "org/some-7b", "lora": True, "lr": 5e-5}, True),
        ({"model": "org/some-7b", "preset": "7b-lora-shp"}, False),
        ({"model": "org/some-7b"}, False),
        ({"model": "org/some-3b", "lora": True, "lr": 1e-4}, False),
        ({"model": "org/some-model", "lora": True}, False),
    ],
)
def test_adapters_of_a_large_model_at_the_rate_of_a_small_one_are_told(
    tmp_path: Path, settings: dict[str, Any], told: bool
) -> None:
    _, report = checked(tmp_path, **settings)
    assert ("warning: a: 7 billion weights, and adapters with --lr 5e-05" in report) == told


def test_rows_of_a_prompt_that_come_together_are_forecast_with_one_prompt(tmp_path: Path) -> None:
    prompt, replies = "p" * 400, ["a" * 100, "b" * 100, "c" * 100]
    rows = [
        {"prompt": f"{number}{prompt}", "chosen": f"{number}{one}", "rejected": f"{number}{other}"}
        for one, other in (replies[:2], replies[1:], replies[::2])
        for number in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"dataset": [str(tmp_path / "pairs.jsonl")], "max_seq_len": 10_000}
    tokens = {most: checked(tmp_path, rows_per_prompt=most, **data)[0].tokens for most in (1, 2, 3, 16)}
    alone = tokens[1]
    assert alone == pytest.approx(10 * 16 * 609 / 4)
    # Of three rows with 600 characters each, two have three of the replies and one prompt; the third has one more.
    assert tokens[2] == pytest.approx(alone * (700 + 600) / 1800, rel=0.01)
    assert tokens[3] == tokens[16] == pytest.approx(alone * 700 / 1800, rel=0.01)


@pytest.mark.parametrize(
    ("config", "spec", "asked", "length"),
    [
        ({"max_position_embeddings": 512}, None, "auto", 512),
        ({"n_positions": 512}, None, "auto", 512),
        ({"text_config": {"max_position_embeddings": 512}}, None, "auto", 512),
        ({"max_position_embeddings": 4096}, None, "auto", 1024),
        ({"max_position_embeddings": 4096}, None, "model", 4096),
        ({"max_position_embeddings": 4096}, 2048, "auto", 2048),
        ({"max_position_embeddings": 4096}, 2048, 100, 100),
        ({}, None, "auto", 1024),
        (None, None, "model", None),
    ],
)
def test_a_length_that_a_run_decides_is_forecast_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, spec: Any, asked: Any, length: int | None
) -> None:
    model, long = tmp_path / "model", 40_000
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if spec is not None:
        (model / SPEC_FILE).touch()
        monkeypatch.setattr(
            lengths, "read_spec", lambda folder: SimpleNamespace(renderer=SimpleNamespace(max_length=spec))
        )
    row = {"prompt": "", "chosen": "a" * long, "rejected": ""}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    data = {"dataset": [str(tmp_path / "pairs.jsonl")], "model": str(model), "max_seq_len": asked}
    tokens = checked(tmp_path, steps=1, batch_size=16, **data)[0].tokens
    assert tokens == pytest.approx(16 * (long / 4 if length is None else 2 * length), rel=1e-3)


def test_steps_of_an_epoch_are_those_of_the_rows_that_are_not_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "chosen": "a", "rejected": "b"} for number in range(100)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"dataset": [str(tmp_path / "pairs.jsonl")], "steps": None, "batch_size": 16}
    assert checked(tmp_path, eval_fraction=0.2, epochs=2, **data)[0].steps == 10
    other = {"eval_dataset": [str(tmp_path / "pairs.jsonl")], "eval_fraction": 0.2, "epochs": 1}
    assert checked(tmp_path, **other, **data)[0].steps == 7
