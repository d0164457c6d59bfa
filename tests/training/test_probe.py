"""`probe` from data to a verified reward model: one answer, honest folds, states computed once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rewardlab.training.probe as probe_module
import rewardlab.training.states as states_module
from conftest import make_groups, make_model, write_base_model, write_pairs
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import read_jsonl
from rewardlab.core.types import Comparison, ScoreRow
from rewardlab.score import score_groups
from rewardlab.serve.verify import verify
from rewardlab.training.config import ProbeConfig
from rewardlab.training.heads import fit_heads, fit_layer, learning_curve, uncertainty
from rewardlab.training.probe import probe
from rewardlab.training.states import fingerprint, states_of


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    """Verify in this process, and keep states in a folder of the test."""
    monkeypatch.setattr(probe_module, "verify_in_clean_process", verify)
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


def config_for(base_model: Path, pairs: Path, folder: Path, **changes) -> ProbeConfig:
    settings = {
        "model": str(base_model),
        "dataset": (str(pairs),),
        "output_dir": folder,
        "max_seq_len": 128,
        "precision": "fp32",
        "bootstrap": 50,
        "micro_token_budget": 512,
    }
    return ProbeConfig(**{**settings, **changes})


def planted(count: int, *, width: int = 12, seed: int = 0, noise: float = 0.5, replies: int = 2):
    """(groups, states) whose preferences follow a known head."""
    draw = np.random.default_rng(seed)
    truth = np.random.default_rng(99).normal(size=width)
    groups = make_groups(count, seed=seed, replies=replies)
    states = draw.normal(size=(sum(group.num_replies for group in groups), width)) + 30.0
    scores = states @ truth + draw.gumbel(size=len(states)) * noise
    made, row = [], 0
    for group in groups:
        own = scores[row : row + group.num_replies]
        made.append(
            replace(
                group,
                comparisons=tuple(
                    Comparison(first=c.first, second=c.second, label=float(own[c.first] > own[c.second]))
                    for c in group.comparisons
                ),
            )
        )
        row += group.num_replies
    return made, states, truth


# --- heads ---------------------------------------------------------------------------------------------------


def test_a_planted_head_is_found_and_its_scores_are_held_out():
    groups, states, truth = planted(400, replies=3)
    found = fit_layer(groups, states, layer=7, num_folds=5, seed=0)
    heads = fit_heads(groups, states, penalty=found.penalty, num_draws=40, seed=0)
    cosine = heads.head_W @ truth / np.linalg.norm(heads.head_W) / np.linalg.norm(truth)
    assert cosine > 0.97
    assert found.result.overall.sums.accuracy > 0.85
    shuffled = [
        replace(group, comparisons=tuple(replace(c, label=float(flip)) for c in group.comparisons))
        for group, flip in zip(groups, np.random.default_rng(1).integers(0, 2, len(groups)), strict=True)
    ]
    blind = fit_layer(shuffled, np.random.default_rng(2).normal(size=(len(states), 300)), layer=1, num_folds=5, seed=0)
    assert 0.4 < blind.result.overall.sums.accuracy < 0.6, "300 features of noise learn nothing that is held out"


def test_bootstrap_heads_spread_as_the_data_do():
    spread = []
    for count in (60, 600):
        groups, states, _ = planted(count)
        heads = fit_heads(groups, states, penalty=0.1, num_draws=60, seed=0)
        assert heads.bootstrap_WB.shape == (12, 60)
        spread.append((heads.bootstrap_WB.std(1) / np.abs(heads.head_W).mean()).mean())
    assert spread[0] > 1.5 * spread[1]


def test_the_curve_rises_and_its_end_is_the_cross_validation():
    groups, states, _ = planted(400, width=30)
    found = fit_layer(groups, states, layer=1, num_folds=5, seed=0)
    curve = learning_curve(groups, states, penalty=found.penalty, num_folds=5, seed=0)
    assert [point.share for point in curve] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]
    assert [point.loss.value for point in curve] == sorted((point.loss.value for point in curve), reverse=True)
    assert curve[-1].accuracy.value == pytest.approx(found.result.overall.sums.accuracy, abs=0.004)
    assert curve[-1].loss.value == pytest.approx(found.result.overall.sums.mean_nll, abs=2e-3)
    assert curve[-1].comparisons == pytest.approx(0.8 * sum(len(group.comparisons) for group in groups))


def test_where_the_heads_agree_the_head_is_more_often_right():
    groups, states, _ = planted(300, noise=2.0)
    heads = fit_heads(groups, states, penalty=0.1, num_draws=100, seed=0)
    test, test_states, _ = planted(400, seed=5, noise=2.0)
    found = uncertainty(test, test_states, heads)
    assert found.sure.value > found.unsure.value + 0.1
    assert found.sure.n + found.unsure.n == found.over_heads.n == 400
    assert found.over_heads.low < found.over_heads.value + 0.02
    assert found.over_heads.high > found.over_heads.value - 0.02
    assert len(found.comparisons) == 400
    assert {row["heads_that_agree"] for row in found.comparisons} != {1.0}


# --- states --------------------------------------------------------------------------------------------------


def test_states_are_computed_once_and_only_for_layers_that_are_missing(tmp_path, monkeypatch):
    model, groups = make_model(), make_groups(9, replies=3)
    computed = []
    original = states_module.layer_states
    monkeypatch.setattr(
        states_module, "layer_states", lambda *args: (computed.append(list(args[2])), original(*args))[1]
    )
    settings = {"budget": 64, "cache": tmp_path, "name": "training"}
    first = {layer: np.array(of) for layer, of in states_of(model, groups, [2], **settings).items()}
    num_batches = len(computed)
    assert num_batches > 1
    again = states_of(model, groups, [1, 2], **settings)
    assert all(layers == [1] for layers in computed[num_batches:])
    np.testing.assert_array_equal(first[2], again[2])
    count = len(computed)
    states_of(model, groups, [1, 2], **settings)
    assert len(computed) == count
    uncached = states_of(model, groups, [1, 2], budget=4096, cache=None, name="training")
    np.testing.assert_allclose(uncached[1], again[1], atol=1e-5)
    scores = np.concatenate(score_groups(model, groups, budget=4096))
    with torch.no_grad():
        np.testing.assert_allclose(again[2] @ model.head.weight.numpy()[0], scores, atol=1e-4)


def test_anything_that_could_change_a_state_names_another_folder():
    model, groups = make_model(), make_groups(4)
    name = fingerprint(model, groups)
    assert fingerprint(make_model(), make_groups(4)) == name
    assert fingerprint(model, groups[:3]) != name
    longer = replace(groups[0], suffixes=(np.append(groups[0].suffixes[0], np.int32(7)), *groups[0].suffixes[1:]))
    assert fingerprint(model, [longer, *groups[1:]]) != name
    model.compute_dtype = torch.bfloat16
    assert fingerprint(model, groups) != name
    model.compute_dtype = torch.float32
    with torch.no_grad():
        next(model.backbone.parameters())[0, 0] += 1
    assert fingerprint(model, groups) != name


def test_an_interrupted_computation_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    model, groups = make_model(), make_groups(9)

    def stops(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(states_module, "layer_states", stops)
    with pytest.raises(KeyboardInterrupt):
        states_of(model, groups, [2], budget=64, cache=tmp_path, name="training")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# --- the whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [("last",), ("1",), ("all",)])
def test_a_probe_is_a_reward_model_that_knows_what_it_was_fitted_to(base_model, pairs_file, tmp_path, layers):
    test = write_pairs(tmp_path / "test.jsonl", 30, offset=100)
    result = probe(config_for(base_model, pairs_file, tmp_path / "run", layers=layers, test_dataset=(str(test),)))
    assert result.test.overall.sums.accuracy > 0.9
    assert result.chosen.result.overall.sums.accuracy > 0.9
    assert set(result.baselines) == {"length only", "bag of words"}
    scorer = load(result.model)
    assert scorer.model.config.num_hidden_layers == result.chosen.layer
    rows = [ScoreRow.from_dict(row) for _, row in read_jsonl(tmp_path / "run" / "evals" / "test.scores.jsonl")]
    written = [json.loads(line) for line in test.read_text().splitlines()]
    scored = [scorer.score_replies([{"role": "user", "content": row["prompt"]}], [row["chosen"], row["rejected"]])
              for row in written]  # fmt: skip
    by_id = {(row.preference_id, row.reply): row.score for row in rows}
    for number, pair in enumerate(scored):
        for reply, score in enumerate(pair):
            key = next(key for key in by_id if key[0].endswith(f":{number + 1}") and key[1] == reply)
            assert score == pytest.approx(by_id[key], abs=1e-3, rel=1e-4)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"best", "evals", "config.json", "manifest.json", "probe.json", "heads.npz"}
    heads = np.load(tmp_path / "run" / "heads.npz")
    assert heads["bootstrap"].shape == (50, 32)
    assert heads["layer"] == result.chosen.layer
    evals = {path.name for path in (tmp_path / "run" / "evals").iterdir()}
    assert {"cross_validated.scores.jsonl", "test.uncertainty.jsonl", "test_length_only.metrics.json"} <= evals


def test_a_second_probe_reads_its_states_and_gives_the_same_numbers(base_model, pairs_file, tmp_path, monkeypatch):
    first = probe(config_for(base_model, pairs_file, tmp_path / "one"))
    monkeypatch.setattr(states_module, "layer_states", lambda *_: pytest.fail("computed again"))
    second = probe(config_for(base_model, pairs_file, tmp_path / "two"))
    reports = [json.loads((run.output_dir / "probe.json").read_text()) | {"seconds": 0} for run in (first, second)]
    assert reports[0] == reports[1]
    assert (first.model / "model.safetensors").read_bytes() == (second.model / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run"):
        probe(config_for(base_model, pairs_file, tmp_path / "two"))
    probe(config_for(base_model, pairs_file, tmp_path / "two", overwrite=True, bootstrap=0))


def test_a_model_that_already_has_a_head_gets_a_fitted_one(base_model, pairs_file, tmp_path):
    first = probe(config_for(base_model, pairs_file, tmp_path / "one"))
    again = probe(config_for(first.model, pairs_file, tmp_path / "two"))
    assert again.chosen.result.overall.sums.accuracy == first.chosen.result.overall.sums.accuracy


def test_one_prompt_is_too_few_and_a_folder_with_other_scores_is_refused(base_model, tmp_path, monkeypatch):
    rows = [{"prompt": "Say it.", "chosen": f"Gladly {n}.", "rejected": f"no {n}"} for n in range(20)]
    lone = tmp_path / "lone.jsonl"
    lone.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="one prompt; cross-validation needs at least two"):
        probe(config_for(base_model, lone, tmp_path / "run"))
    monkeypatch.setattr(probe_module, "score_groups", lambda model, groups, budget: [np.ones(2) for _ in groups])
    with pytest.raises(ArtifactError, match="away from the head on the states it was fitted to"):
        probe(config_for(base_model, write_pairs(tmp_path / "pairs.jsonl", 40), tmp_path / "other"))


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3"])
def test_other_families_are_probed_layer_by_layer(family, tmp_path):
    base = write_base_model(tmp_path / "base", family=family)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 40)
    result = probe(config_for(base, pairs, tmp_path / "run", layers=("1", "2"), bootstrap=10))
    assert [found.layer for found in result.layers] == [1, 2]
    assert load(result.model).model.config.num_hidden_layers == result.chosen.layer


def test_the_command_prints_layers_curve_baselines_and_where_the_model_is(base_model, pairs_file, tmp_path, capsys):
    test = write_pairs(tmp_path / "test.jsonl", 30, offset=100)
    main(
        f"probe --model {base_model} --dataset {pairs_file} --test-dataset {test} --max-seq-len 128 --layers all "
        f"--bootstrap 40 --no-cache --output-dir {tmp_path / 'run'}".split()
    )
    text = capsys.readouterr().out
    report = (tmp_path / "run" / "report.txt").read_text()
    assert report.strip() in text
    for piece in (
        "(chosen)",
        "Learning curve",
        "length only",
        "bag of words",
        "probe, layer",
        "Where 95% of them agree",
    ):
        assert piece in report
    tables = [line for line in report.splitlines() if str(tmp_path) not in line]
    assert max(map(len, tables)) <= 100
    assert not (tmp_path / "cache" / "states").exists()
