"""`probe` from data to a verified reward model: one answer, honest folds, states computed once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

import rewardlab.probing.run as probe_module
import rewardlab.probing.states as states_module
from common import make_groups, make_model, make_tokenizer, stored, write_base_model, write_pairs
from harming import HARMS
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError, DataError, ModelError
from rewardlab.core.files import read_jsonl
from rewardlab.core.spec import read_spec
from rewardlab.core.types import ScoreRow
from rewardlab.probing.config import ProbeConfig
from rewardlab.probing.run import probe
from rewardlab.probing.states import fingerprint, states_of
from rewardlab.score import score_groups
from rewardlab.serve.verifying.folder import verify


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


@pytest.mark.parametrize("layers", [("all",), *(pytest.param((one,), marks=pytest.mark.slow) for one in ("last", "1"))])
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
    assert heads["canaries"].tolist() == [canary.score for canary in read_spec(result.model).canaries]
    assert heads["layer"] == result.chosen.layer
    trained = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    turns = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
             for row in trained for name in ("chosen", "rejected")]  # fmt: skip
    scale = float(heads["head"] @ heads["centre"]), float(heads["std"])
    own = scorer.score(turns)
    assert scale == pytest.approx((np.mean(own), np.std(own, ddof=1)), abs=1e-3, rel=1e-3)
    evals = {path.name for path in (tmp_path / "run" / "evals").iterdir()}
    assert {"cross_validated.scores.jsonl", "test.uncertainty.jsonl", "test_length_only.metrics.json"} <= evals


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_model_that_already_has_a_head_gets_a_fitted_one(base_model, pairs_file, tmp_path):
    first = probe(config_for(base_model, pairs_file, tmp_path / "one"))
    again = probe(config_for(first.model, pairs_file, tmp_path / "two"))
    assert again.chosen.result.overall.sums.accuracy == first.chosen.result.overall.sums.accuracy


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_failure_leaves_the_run_that_would_be_replaced(base_model, pairs_file, tmp_path, monkeypatch):
    first = probe(config_for(base_model, pairs_file, tmp_path / "run"))
    monkeypatch.setattr(probe_module, "learning_curve", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(config_for(base_model, pairs_file, tmp_path / "run", overwrite=True))
    assert (first.output_dir / "probe.json").is_file()
    verify(first.model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("changes", [{"save_dtype": "bfloat16"}, {"precision": "bf16"}])
def test_where_something_is_rounded_the_saved_folder_is_what_is_judged(base_model, pairs_file, tmp_path, changes):
    test = write_pairs(tmp_path / "test.jsonl", 20, offset=100)
    result = probe(config_for(base_model, pairs_file, tmp_path / "run", test_dataset=(str(test),), **changes))
    scorer = load(result.model)
    row = json.loads(test.read_text().splitlines()[0])
    scores = scorer.score_replies([{"role": "user", "content": row["prompt"]}], [row["chosen"], row["rejected"]])
    assert [found.score for found in result.test.rows[:2]] == pytest.approx(scores, abs=1e-4)


@pytest.mark.slow
def test_a_probe_ends_with_a_precision_card_of_its_model_on_the_test_data(
    base_model, pairs_file, tmp_path, monkeypatch
):
    test = write_pairs(tmp_path / "test.jsonl", 60, offset=100)
    config = config_for(base_model, pairs_file, tmp_path / "run", test_dataset=(str(test),))
    result = probe(config)
    assert result.card is not None
    assert list(result.card.measures) == ["float32", "bf16", "nearest bf16"]
    assert (result.card.num_preferences, result.card.num_available) == (60, 60)
    assert result.card.measures["bf16"]["margin error"].value > 0, "computed, not looked up"
    accuracy = result.card.measures["float32"]["accuracy"].value
    assert accuracy == result.test.overall.estimates["eval_accuracy"].value
    written = json.loads((tmp_path / "run/evals/precision.json").read_text())
    assert [one["precision"] for one in written["verdicts"]] == ["bf16", "nearest bf16"]
    verify(result.model)
    without = probe(config.replace(overwrite=True, precision_card=False))
    assert without.card is None
    assert not (tmp_path / "run/evals/precision.json").exists()
    monkeypatch.setattr(probe_module, "judge_precisions", Mock(side_effect=ModelError("no room")))
    assert probe(config.replace(overwrite=True)).card is None, "a probe is complete without"


@pytest.mark.slow
def test_a_probe_without_test_data_has_no_card(base_model, pairs_file, tmp_path):
    assert probe(config_for(base_model, pairs_file, tmp_path / "run")).card is None


@pytest.mark.slow
def test_a_nested_backbone_is_probed_too(tmp_path):
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=384, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                       max_position_embeddings=512, word_embed_proj_dim=32)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 40)
    result = probe(config_for(tmp_path / "base", pairs, tmp_path / "run", layers=("2", "last"), bootstrap=5))
    assert load(result.model).model.config.num_hidden_layers == result.chosen.layer


@pytest.mark.slow
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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["prompt_only", "label_shuffle"])
def test_a_control_changes_what_a_probe_is_fitted_to_and_is_written_down(mode, base_model, tmp_path):
    pairs, folder = write_pairs(tmp_path / "pairs.jsonl", 24), tmp_path / "probe"
    words = ["--model", str(base_model), "--dataset", str(pairs), "--output-dir", str(folder), "--bootstrap", "0"]
    words += ["--max-seq-len", "128", "--precision", "fp32", "--diagnostic-mode", mode]
    main(["probe", *words])
    (counts,) = json.loads((folder / "manifest.json").read_text())["data"]["control"]["counts"]["train"]
    assert (counts["rows"], counts["kept"]) == (24, 24)
    spec = json.loads((folder / "best/reward_spec.json").read_text())
    assert spec["provenance"]["control"]["mode"] == mode
    scores = [row["score"] for _, row in read_jsonl(folder / "evals" / "cross_validated.scores.jsonl")]
    ties = [first == second for first, second in zip(scores[::2], scores[1::2], strict=True)]
    # Both replies of a prompt are the same empty one, so no head can tell them apart.
    assert all(ties) if mode == "prompt_only" else not any(ties)
