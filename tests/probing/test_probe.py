"""`probe` from data to a verified reward model: one answer, honest folds, states computed once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from transformers import AutoModelForCausalLM, OPTConfig

import rewardlab.probing.heads as heads_module
import rewardlab.probing.run as probe_module
import rewardlab.probing.states as states_module
from conftest import make_groups, make_model, make_tokenizer, stored, write_base_model, write_pairs
from harming import HARMS
from rewardlab.analysis.linear import compare
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import read_jsonl
from rewardlab.core.types import Comparison, ScoreRow
from rewardlab.probing.config import ProbeConfig
from rewardlab.probing.heads import Features, fit_heads, fit_layer, learning_curve, uncertainty
from rewardlab.probing.run import probe
from rewardlab.probing.states import fingerprint, states_of
from rewardlab.score import score_groups
from rewardlab.serve.verify import verify


@pytest.fixture(autouse=True)
def _here(verified_here, monkeypatch, tmp_path):
    """Verify in this process, and keep states in a folder of the test."""
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
    return ProbeConfig.of(**{**settings, **changes})


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


def fitted(groups, states, *, num_folds=5, num_draws=0, seed=0):
    """(layer fit, heads, features)."""
    features = Features.of(groups, states)
    found = fit_layer(features, layer=7, num_folds=num_folds, seed=seed)
    return found, fit_heads(features, found, num_draws=num_draws, seed=seed), features


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_a_planted_head_is_found_and_its_scores_are_held_out():
    groups, states, truth = planted(400, replies=3)
    found, heads, _ = fitted(groups, states)
    assert cosine(heads.head_W, truth) > 0.97
    assert found.result.overall.sums.accuracy > 0.85
    shuffled = [
        replace(group, comparisons=tuple(replace(c, label=float(flip)) for c in group.comparisons))
        for group, flip in zip(groups, np.random.default_rng(1).integers(0, 2, len(groups)), strict=True)
    ]
    blind, _, _ = fitted(shuffled, np.random.default_rng(2).normal(size=(len(states), 300)))
    assert 0.4 < blind.result.overall.sums.accuracy < 0.6, "300 features of noise learn nothing that is held out"


def test_the_head_is_that_of_a_direct_fit_on_the_states():
    groups, states, _ = planted(200)
    groups = [
        replace(group, comparisons=tuple(replace(c, weight=3.0 if n % 2 else 0.5) for c in group.comparisons))
        for n, group in enumerate(groups)
    ]
    found, heads, _ = fitted(groups, states)
    scale = np.sqrt((compare(groups, states).differences ** 2).mean(0))
    data = compare(groups, states / scale)
    sign = 2 * data.labels - 1

    def objective(theta):
        losses = np.logaddexp(0, -sign * (data.differences @ theta))
        return (data.weights * losses).sum() / data.weights.sum() + found.penalty * 0.8 / 2 * theta @ theta

    best = minimize(objective, np.zeros(12), tol=1e-12)
    np.testing.assert_allclose(heads.head_W * scale, best.x, atol=5e-3)
    unweighted = [replace(g, comparisons=tuple(replace(c, weight=1.0) for c in g.comparisons)) for g in groups]
    other = fit_heads(Features.of(unweighted, states), found, num_draws=0, seed=0)
    assert np.abs(other.head_W - heads.head_W).max() > 0.02 * np.abs(heads.head_W).max()


def test_a_dimension_that_differs_by_rounding_alone_is_left_out():
    groups, states, _ = planted(200)
    noise = np.random.default_rng(4).normal(size=len(states))
    states[:, 3] = (3000 + 1e-4 * noise).astype(np.float32)
    states[:, 5] = 1.0
    _, heads, _ = fitted(groups, states)
    assert heads.head_W[3] == heads.head_W[5] == 0.0
    assert np.isfinite(heads.head_W).all()


def test_far_from_zero_scores_are_not_rounded_to_ties():
    groups, states, _ = planted(200)
    far = states + 1e5
    one, other = (fitted(groups, of)[0].result.overall for of in (states, far))
    assert other.sums.score_ties == 0
    assert other.sums.accuracy == one.sums.accuracy


def test_bootstrap_heads_spread_as_fresh_samples_do():
    def accuracy(groups, states, heads):
        return uncertainty(groups, states, heads).over_heads.value

    test, test_states, _ = planted(1500, width=60, seed=1000, noise=3.0)
    chosen = replace(fitted(*planted(150, width=60, noise=3.0)[:2])[0], penalty=0.2)
    fresh, ranges = [], []
    for seed in range(12):
        groups, states, _ = planted(150, width=60, seed=seed, noise=3.0)
        heads = fit_heads(Features.of(groups, states), chosen, num_draws=60, seed=0)
        fresh.append(accuracy(test, test_states, heads))
        found = uncertainty(test, test_states, heads)
        assert found.over_heads.low < found.over_heads.value < found.over_heads.high
        assert found.bias < 0, "each bootstrap head has seen fewer prompts"
        ranges.append(found.over_heads.high - found.over_heads.low)
    assert 0.5 < np.mean(ranges) / (2 * 1.96 * np.std(fresh)) < 2


def test_the_curve_rises_and_its_end_is_the_cross_validation():
    groups, states, _ = planted(400, width=30)
    weighted = [replace(g, comparisons=tuple(replace(c, weight=2.0) for c in g.comparisons)) for g in groups]
    found, _, features = fitted(groups, states)
    curve = learning_curve(features, found, seed=0)
    assert [point.share for point in curve] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]
    assert [point.loss.value for point in curve] == sorted((point.loss.value for point in curve), reverse=True)
    end, judged = curve[-1].accuracy, found.result.overall.estimates["eval_accuracy"]
    assert (end.value, end.low, end.high) == pytest.approx((judged.value, judged.low, judged.high), abs=1e-9)
    assert curve[-1].loss.value == pytest.approx(found.result.overall.sums.mean_nll, abs=1e-4)
    assert curve[-1].comparisons == pytest.approx(0.8 * sum(len(group.comparisons) for group in groups))
    again = learning_curve(Features.of(weighted, states), found, seed=0)
    assert [point.loss.value for point in again] == pytest.approx([point.loss.value for point in curve], abs=1e-4)


def test_the_small_ends_of_the_curve_are_means_over_different_draws(monkeypatch):
    groups, states, _ = planted(120, width=30)
    found, _, features = fitted(groups, states)
    three = learning_curve(features, found, seed=0)
    monkeypatch.setattr("rewardlab.probing.heads.DRAWS", 1)
    one = learning_curve(features, found, seed=0)
    assert one[0].accuracy.value != three[0].accuracy.value
    assert one[-1] == three[-1]
    assert 0 <= one[0].accuracy.low < one[0].accuracy.high <= 1


def test_a_smaller_share_is_fitted_with_a_stronger_penalty_of_the_mean(monkeypatch):
    seen = []
    groups, states, _ = planted(120)
    found, _, features = fitted(groups, states)
    original = heads_module.fit
    monkeypatch.setattr(
        heads_module,
        "fit",
        lambda data, weights, penalties: (seen.append(penalties), original(data, weights, penalties))[1],
    )
    learning_curve(features, found, seed=0)
    means = [penalties.mean() for penalties in seen]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(found.penalty, rel=0.05)
    assert means[0] == pytest.approx(16 * found.penalty, rel=0.3)


def test_where_the_heads_agree_the_head_is_more_often_right():
    groups, states, _ = planted(300, noise=2.0)
    _, heads, _ = fitted(groups, states, num_draws=100)
    test, test_states, _ = planted(400, seed=5, noise=2.0)
    found = uncertainty(test, test_states, heads)
    assert found.sure.value > found.unsure.value + 0.1
    assert found.num_sure + found.num_unsure == found.over_heads.n == 400
    offset = np.cumsum([0, *(group.num_replies for group in test)])
    difference = np.array([test_states[n] - test_states[n + 1] for n in offset[:-1]])
    margins = difference @ heads.bootstrap_WB
    own = difference @ heads.head_W
    rows = found.comparisons
    np.testing.assert_allclose([row["margin"] for row in rows], own, atol=1e-9)
    np.testing.assert_allclose([row["margin_sd"] for row in rows], margins.std(1), rtol=1e-9)
    agree = (np.sign(margins) == np.sign(own)[:, None]).mean(1)
    np.testing.assert_allclose([row["heads_that_agree"] for row in rows], agree)
    assert found.num_sure == (agree >= 0.95).sum()


def remembered(conversations: int, *, each: int = 4, width: int = 80):
    """(groups, states) of which nothing can be learnt, but what was preferred in each conversation be remembered."""
    draw = np.random.default_rng(0)
    groups, states = [], []
    for number, group in enumerate(make_groups(conversations * each)):
        if number % each == 0:
            own, label = draw.normal(size=width), float(draw.integers(2))
        groups.append(replace(group, comparisons=(Comparison(first=0, second=1, label=label),)))
        states += [own + 0.1 * draw.normal(size=width), -own + 0.1 * draw.normal(size=width)]
    return groups, np.array(states)


def test_no_prompt_is_scored_by_a_head_that_saw_its_conversation():
    groups, states = remembered(40)
    by_prompt, _, _ = fitted(groups, states)
    assert by_prompt.result.overall.sums.accuracy > 0.9, "what is remembered of a conversation gives it away"
    found, heads, features = fitted(stored(groups, together=4), states, num_draws=20)
    assert 0.25 < found.result.overall.sums.accuracy < 0.75
    curve = learning_curve(features, found, seed=0)
    assert all(0.2 < point.accuracy.value < 0.8 for point in curve)
    assert curve[-1].accuracy.value == pytest.approx(found.result.overall.sums.accuracy)
    assert features.data.num_roots == 40
    assert heads.bootstrap_WB.shape == (80, 20)


def test_where_prompts_share_nothing_the_numbers_are_those_by_prompt():
    groups, states, _ = planted(60, replies=3)
    with_texts = stored(groups)
    (found, heads, features), (other, others, other_features) = (
        fitted(given, states, num_draws=10) for given in (list(with_texts), with_texts)
    )
    assert found.penalty == other.penalty
    assert [row.score for row in found.result.rows] == [row.score for row in other.result.rows]
    np.testing.assert_array_equal(heads.head_W, others.head_W)
    np.testing.assert_array_equal(heads.bootstrap_WB, others.bootstrap_WB)
    curves = (learning_curve(of, chosen, seed=0) for of, chosen in ((features, found), (other_features, other)))
    one, another = (
        [(point.comparisons, point.accuracy.value, point.loss.value) for point in curve] for curve in curves
    )
    assert one == another


def test_ties_alone_say_nothing_about_certainty():
    groups, states, _ = planted(30)
    tied = [replace(g, comparisons=tuple(replace(c, label=0.5) for c in g.comparisons)) for g in groups]
    _, heads, _ = fitted(groups, states, num_draws=10)
    assert uncertainty(tied, states, heads) is None


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


def test_no_group_is_built_to_know_how_many_states_there_will_be(monkeypatch, built):
    groups, asked = make_groups(9, replies=3), []

    def full(*arguments: object) -> None:
        asked.append((arguments[-1], len(built)))
        raise OSError("the disk is full")

    monkeypatch.setattr(states_module, "_compute", full)
    for given in (groups, stored(groups)):
        with pytest.raises(OSError, match="full"):
            states_of(make_model(), given, [2], budget=64, cache=None, name="training")
    assert asked == [((sum(group.num_replies for group in groups), 32), 0)] * 2


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


@pytest.mark.parametrize("how", [how for how in HARMS if "link" not in how and how != "gone"])
@pytest.mark.parametrize("name", ["layer_2.npy", "layer_2.json"])
def test_damaged_states_are_computed_again(tmp_path, caplog, name, how):
    model, groups = make_model(), make_groups(9)
    settings = {"budget": 64, "cache": tmp_path, "name": "training"}
    before = np.array(states_of(model, groups, [2], **settings)[2])
    (path,) = tmp_path.rglob(name)
    HARMS[how](path)
    left_over = path.with_name(".layer_2.999999999.npy")
    left_over.write_bytes(b"half")
    np.testing.assert_array_equal(states_of(model, groups, [2], **settings)[2], before)
    assert "computed again" in caplog.text
    assert not left_over.exists()
    caplog.clear()
    np.testing.assert_array_equal(states_of(model, groups, [2], **settings)[2], before)
    assert caplog.text == ""


def test_groups_of_other_sizes_name_another_folder():
    a, b = make_groups(2)
    tokens = [a.shared, *a.suffixes, b.shared, *b.suffixes]
    first = [replace(a, suffixes=tuple(tokens[1:4])), replace(b, shared=tokens[4], suffixes=(tokens[5],))]
    second = [replace(a, suffixes=(tokens[1],)), replace(b, shared=tokens[2], suffixes=tuple(tokens[3:6]))]
    assert fingerprint(make_model(), first) != fingerprint(make_model(), second)


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
    assert names == {"best", "evals", "config.json", "manifest.json", "probe.json", "heads.npz", ".lock"}
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
    original = probe_module.score_groups
    monkeypatch.setattr(
        probe_module,
        "score_groups",
        lambda model, groups, budget: [
            scores + np.array([0, 0.1]) for scores in original(model, groups, budget=budget)
        ],
    )
    with pytest.raises(ArtifactError, match="away from the head on the states it was fitted to"):
        probe(config_for(base_model, write_pairs(tmp_path / "pairs.jsonl", 40), tmp_path / "other"))


def test_a_failure_leaves_the_run_that_would_be_replaced(base_model, pairs_file, tmp_path, monkeypatch):
    first = probe(config_for(base_model, pairs_file, tmp_path / "run"))
    monkeypatch.setattr(probe_module, "learning_curve", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(config_for(base_model, pairs_file, tmp_path / "run", overwrite=True))
    assert (first.output_dir / "probe.json").is_file()
    verify(first.model)


@pytest.mark.parametrize("changes", [{"save_dtype": "bfloat16"}, {"precision": "bf16"}])
def test_where_something_is_rounded_the_saved_folder_is_what_is_judged(base_model, pairs_file, tmp_path, changes):
    test = write_pairs(tmp_path / "test.jsonl", 20, offset=100)
    result = probe(config_for(base_model, pairs_file, tmp_path / "run", test_dataset=(str(test),), **changes))
    scorer = load(result.model)
    row = json.loads(test.read_text().splitlines()[0])
    scores = scorer.score_replies([{"role": "user", "content": row["prompt"]}], [row["chosen"], row["rejected"]])
    assert [found.score for found in result.test.rows[:2]] == pytest.approx(scores, abs=1e-4)


def test_a_nested_backbone_is_probed_too(tmp_path):
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=384, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                       max_position_embeddings=512, word_embed_proj_dim=32)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 40)
    result = probe(config_for(tmp_path / "base", pairs, tmp_path / "run", layers=("2", "last"), bootstrap=5))
    assert load(result.model).model.config.num_hidden_layers == result.chosen.layer


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
