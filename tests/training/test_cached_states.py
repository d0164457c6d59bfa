"""`--cache-states`: the same run without the forward passes; every state is that of its own tokens and weights."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import rewardlab.training.states as states_room
import runs
from common import CONFIGS, GROUPED, SIZES, make_groups, make_model, make_tokenizer, write_base_model, write_pairs
from resuming import interrupted, weights_of
from rewardlab.artifact.load import load
from rewardlab.core.errors import ArtifactError, ConfigError, ModelError
from rewardlab.core.files import read_json, read_jsonl, sha256_file, write_summed_json
from rewardlab.distributed.ranks import Ranks
from rewardlab.model.reward import RewardModel
from rewardlab.probing.cached import cached_states
from rewardlab.serve.verifying.folder import verify
from rewardlab.training.run import train
from rewardlab.training.start import require_sharding
from rewardlab.training.states import FIRST, Check, require_same_in_training
from runs import history_of

COST = ("tokens", "padding_share", "sharing_ratio")
"""Columns of metrics.csv about tokens, of which none are computed."""
CLOSE = 2e-5
"""How far a number of the record may be off: the last bits of float32 states depend on what is computed beside."""
config_for = partial(
    runs.config_for, train_head_only=True, steps=6, log_every=2, eval_every=3, lr=1e-2, save_dtype="float32"
)


@pytest.fixture(autouse=True)
def _here(verified_here, monkeypatch, tmp_path):
    """Verify in this process, and keep states in a folder of the test."""
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def passes(monkeypatch) -> list[tuple[bool, int]]:
    """(whether in training mode, replies) of every forward pass that computed rows of data: others, such as those of
    canaries and of trials of the layout, are not of numbered groups, or of one reply."""
    found: list[tuple[bool, int]] = []
    read = RewardModel.read

    def counts(model, hidden, batch):
        if batch.indices:
            found.append((model.training, batch.num_replies))
        return read(model, hidden, batch)

    monkeypatch.setattr(RewardModel, "read", counts)
    return found


def kept(tmp_path: Path) -> set[str]:
    """The folders of states and the lists of conversations."""
    return {str(path.relative_to(tmp_path)) for path in (tmp_path / "cache/states").rglob("*.*")}


def same_record(one: Path, other: Path) -> None:
    """All rows and columns but those of the cost, up to rounding."""
    pairs = zip(history_of(one), history_of(other), strict=True)
    for row, again in pairs:
        assert row.keys() == again.keys()
        for name in row.keys() - {*COST}:
            assert bool(row[name]) == bool(again[name]), name
            if row[name]:
                assert math.isclose(float(row[name]), float(again[name]), rel_tol=CLOSE, abs_tol=CLOSE), name


def record_of_cut(folder: Path) -> int:
    """Conversations that were cut, by the manifest."""
    manifest = read_json(folder / "manifest.json")
    return sum(part["truncated_replies"] for part in manifest["tokens"].values())


WAYS = {
    "plain": {},
    "several epochs": {"steps": None, "epochs": 2.0},
    "no smoothing, regularised": {"label_smoothing": 0.0, "score_regularization_lambda": 0.01, "center_lambda": 0.01},
    "early stopping": {"early_stopping_patience": 1, "early_stopping_min_delta": 0.5, "eval_every": 2},
    "padded": {"attention": "padded"},
    "small micro-batches": {"micro_token_budget": 90},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_states_looked_up_is_the_run_that_computes_them(base_model, pairs_file, tmp_path, way):
    test = write_pairs(tmp_path / "test.jsonl", 12, offset=100)
    settings = {"test_dataset": (str(test),), "train_eval_limit": 5, **WAYS[way]}
    plain = train(config_for(base_model, pairs_file, tmp_path / "plain", **settings))
    cached = train(config_for(base_model, pairs_file, tmp_path / "cached", cache_states=True, **settings))
    same_record(tmp_path / "plain", tmp_path / "cached")
    assert (plain.best_step, plain.last_step) == (cached.best_step, cached.last_step)
    for name in ("baseline", "selected", "test_baseline", "test"):
        rows = [getattr(result, name).rows for result in (plain, cached)]
        assert [row.score for row in rows[0]] == pytest.approx([row.score for row in rows[1]], abs=CLOSE)
        assert len({row.score for row in rows[0]}) > 2
    verify(cached.model)
    rows = history_of(tmp_path / "cached")
    assert {row["tokens"] for row in rows if row["train_loss"]} == {"0"}
    assert {(row["padding_share"], row["sharing_ratio"]) for row in rows} == {("", "")}


@pytest.mark.slow
@pytest.mark.parametrize("kwise", ["pairs", "plackett-luce"])
def test_rows_of_several_replies_look_up_each_of_them(base_model, tmp_path, kwise):
    answers = ["Water it every morning.", "Give it light.", "no", "Certainly, here is more."]
    rows = [
        {"prompt": f"Soil {n}?", "responses": answers[: 3 + n % 2], "scores": [2, 3, 1, 0][: 3 + n % 2]}
        for n in range(30)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"kwise_loss": kwise, "batch_size": 4, "micro_token_budget": 512}
    train(config_for(base_model, data, tmp_path / "plain", **settings))
    train(config_for(base_model, data, tmp_path / "cached", cache_states=True, **settings))
    same_record(tmp_path / "plain", tmp_path / "cached")


@pytest.mark.slow
def test_every_number_is_the_score_of_the_saved_folder(base_model, pairs_file, tmp_path):
    test = write_pairs(tmp_path / "test.jsonl", 12, offset=100)
    result = train(config_for(base_model, pairs_file, tmp_path / "run", test_dataset=(str(test),), cache_states=True))
    again = load(result.model).score(
        [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for _, row in read_jsonl(test)
            for side in ("chosen", "rejected")
        ]
    )
    assert [row.score for row in result.test.rows] == pytest.approx(again, abs=CLOSE)
    record = json.loads((tmp_path / "run/evals/states.json").read_text())
    assert record["replies"]["of_the_folder"] == {"looked_up": 8 * 2 + 12 * 2, "computed": 0}
    assert record["checks"]["folder"]["replies"] == 16
    assert record["checks"]["folder"]["largest"] <= CLOSE


@pytest.mark.slow
def test_another_seed_and_rate_compute_nothing_but_the_two_checks(base_model, pairs_file, tmp_path, passes):
    config = config_for(base_model, pairs_file, tmp_path / "a", cache_states=True)
    train(config)
    assert sum(replies for trains, replies in passes if not trains) >= 80
    before = kept(tmp_path)
    passes.clear()
    train(config.replace(output_dir=tmp_path / "b", seed=1, lr=1e-3, steps=8, label_smoothing=0.0, batch_size=4))
    record = json.loads((tmp_path / "b/evals/states.json").read_text())
    assert record["replies"] == {
        "of_the_run": {"looked_up": 80, "computed": 0},
        "of_the_folder": {"looked_up": 16, "computed": 0},
    }
    # Other rows are held out with another seed, and are found all the same.
    assert {row["preference_id"] for _, row in read_jsonl(tmp_path / "a/evals/step_0.scores.jsonl")} != {
        row["preference_id"] for _, row in read_jsonl(tmp_path / "b/evals/step_0.scores.jsonl")
    }
    assert sum(replies for trains, replies in passes if trains) == 2 * FIRST
    assert sum(replies for trains, replies in passes if not trains) == 16
    assert kept(tmp_path) == before


@pytest.mark.slow
def test_more_data_compute_only_what_is_new_and_a_probe_leaves_its_states(base_model, tmp_path):
    few, more = write_pairs(tmp_path / "few.jsonl", 30), write_pairs(tmp_path / "more.jsonl", 44)
    train(config_for(base_model, few, tmp_path / "a", cache_states=True))
    train(config_for(base_model, more, tmp_path / "b", cache_states=True))
    record = json.loads((tmp_path / "b/evals/states.json").read_text())
    assert record["replies"]["of_the_run"] == {"looked_up": 60, "computed": 28}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["model", "template", "limit"])
def test_another_model_template_or_limit_gets_states_of_its_own(base_model, pairs_file, tmp_path, change):
    train(config_for(base_model, pairs_file, tmp_path / "a", cache_states=True, steps=2))
    other, settings = base_model, {}
    if change == "model":
        model = AutoModelForCausalLM.from_pretrained(base_model)
        with torch.no_grad():
            next(model.parameters())[5] += 1e-3
        model.save_pretrained(other := tmp_path / "other")
        make_tokenizer(write_base_model.__kwdefaults__["template"]).save_pretrained(other)
    settings = {"template": {"chat_template": "plain"}, "limit": {"max_seq_len": 30, "max_drop_fraction": 0.5}}.get(
        change, {}
    )
    train(config_for(other, pairs_file, tmp_path / "b", cache_states=True, steps=2, **settings))
    record = json.loads((tmp_path / "b/evals/states.json").read_text())
    # With another limit, conversations that are not cut are the same, and so are their states.
    assert record["replies"]["of_the_run"]["computed"] == (record_of_cut(tmp_path / "b") if change == "limit" else 80)
    train(config_for(other, pairs_file, tmp_path / "c", steps=2, **settings))
    same_record(tmp_path / "b", tmp_path / "c")


@pytest.mark.slow
def test_a_model_with_dropout_trains_as_it_would_without_the_cache(pairs_file, tmp_path):
    config = CONFIGS["gpt_neox"]()
    config.attention_dropout = config.hidden_dropout = 0.5
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    make_tokenizer(write_base_model.__kwdefaults__["template"]).save_pretrained(tmp_path / "base")
    train(config_for(tmp_path / "base", pairs_file, tmp_path / "plain"))
    train(config_for(tmp_path / "base", pairs_file, tmp_path / "cached", cache_states=True))
    same_record(tmp_path / "plain", tmp_path / "cached")


def test_a_model_that_draws_noise_while_it_trains_is_refused(tmp_path):
    groups = make_groups(9)
    for jitter in (0.0, 0.01):
        config = MixtralConfig(**SIZES, **GROUPED, num_local_experts=4, router_jitter_noise=jitter)
        model = make_model(config=config)
        model.known_states = cached_states(model, {"training": groups}, budget=64, cache=tmp_path)
        if not jitter:
            assert require_same_in_training(model, groups).largest < 1e-6
            assert not model.training
    with pytest.raises(ModelError, match="noise while it trains, such as a router's jitter"):
        require_same_in_training(model, groups)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_and_without_looking_up(base_model, pairs_file, tmp_path, monkeypatch):
    settings = {"train_head_only": True, "lr": 1e-2, "save_dtype": "float32"}
    whole = train(runs.config_for(base_model, pairs_file, tmp_path / "whole", steps=8, eval_every=2, **settings))
    for folder, first, then in (("a", True, True), ("b", True, False), ("c", False, True)):
        config = interrupted(base_model, pairs_file, tmp_path / folder, monkeypatch, cache_states=first, **settings)
        resumed = train(config.replace(cache_states=then))
        ours, theirs = weights_of(resumed.last)["score.weight"], weights_of(whole.last)["score.weight"]
        assert torch.allclose(ours, theirs, atol=CLOSE)
        evaluated = [row for row in history_of(tmp_path / folder) if row["eval_loss"]]
        expected = [row for row in history_of(tmp_path / "whole") if row["eval_loss"]]
        for row, again in zip(evaluated, expected, strict=True):
            assert float(row["eval_loss"]) == pytest.approx(float(again["eval_loss"]), abs=CLOSE)
    manifest = read_json(tmp_path / "b/manifest.json")
    assert manifest["resumed"][0]["changed"] == [
        "--cache-states False, it was True (equal up to rounding from here on)"
    ]


@pytest.mark.slow
def test_a_run_in_half_precision_judges_the_folder_by_its_own_states(base_model, pairs_file, tmp_path):
    settings = {"precision": "bf16", "save_dtype": "bfloat16"}
    plain = train(config_for(base_model, pairs_file, tmp_path / "plain", **settings))
    cached = train(config_for(base_model, pairs_file, tmp_path / "cached", cache_states=True, **settings))
    # The folder is computed in float32, so here too the numbers agree as float32 does, if training did.
    assert [row.score for row in plain.selected.rows] == pytest.approx(
        [row.score for row in cached.selected.rows], abs=0.02
    )
    assert cached.live is not None
    assert cached.card is not None
    record = json.loads((tmp_path / "cached/evals/states.json").read_text())
    assert record["replies"]["of_the_folder"] == {"looked_up": 0, "computed": 16}
    assert record["checks"]["before_training"]["allowed"] == 0.15
    assert record["checks"]["folder"]["allowed"] == 1e-4
    again = train(
        config_for(base_model, pairs_file, tmp_path / "again", cache_states=True, seed=0, lr=1e-3, **settings)
    )
    assert again.selected is not None
    record = json.loads((tmp_path / "again/evals/states.json").read_text())
    assert record["replies"]["of_the_folder"] == {"looked_up": 16, "computed": 0}


@pytest.mark.slow
def test_without_data_to_judge_on_training_rows_go_through_the_folder(base_model, pairs_file, tmp_path):
    result = train(config_for(base_model, pairs_file, tmp_path / "run", cache_states=True, eval_fraction=0.0))
    assert result.selected is None
    record = json.loads((tmp_path / "run/evals/states.json").read_text())
    assert record["checks"]["folder"]["replies"] == 16


@pytest.mark.slow
def test_states_of_another_model_under_its_name_are_refused(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run", cache_states=True, overwrite=True, steps=2)
    train(config)
    for path in (tmp_path / "cache/states").rglob("layer_2.npy"):
        np.save(path, np.load(path) * np.float32(1.01))
        write_summed_json(path.with_suffix(".json"), {"states": sha256_file(path)})
    with pytest.raises(
        ModelError, match="away from the states that were computed once, in training mode, on 8 replies"
    ):
        train(config)
    assert (tmp_path / "run/step_2").exists(), "nothing was overwritten"
    monkeypatch.setattr(states_room, "require_same_in_training", lambda *_args: Check(replies=0, largest=0, allowed=1))
    with pytest.raises(ArtifactError, match="away from the states that its head was trained on, on 16 replies"):
        train(config)


def test_ranks_and_backbones_that_train_are_refused(base_model, pairs_file, tmp_path):
    with pytest.raises(ConfigError, match="--cache-states: the states stay the same only if the backbone does"):
        config_for(base_model, pairs_file, tmp_path / "run", cache_states=True, train_head_only=False)
    config = config_for(base_model, pairs_file, tmp_path / "run", cache_states=True)
    with pytest.raises(ConfigError, match="--cache-states is for one process"):
        require_sharding(config, Ranks(size=2), goes_on=False)


def test_the_budget_needs_no_trial(base_model, pairs_file, tmp_path, monkeypatch):
    monkeypatch.setattr("rewardlab.training.run.choose_budget", lambda *_args, **_settings: pytest.fail("a trial"))
    config = config_for(base_model, pairs_file, tmp_path / "run", cache_states=True, micro_token_budget="auto", steps=1)
    train(config)
    assert read_json(tmp_path / "run/config.json")["micro_token_budget"] == 8192
