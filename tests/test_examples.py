"""The examples do what they say, as far as a machine without a cluster can tell."""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import rewardlab
from common import write_base_model, write_pairs
from pages import module_at, promised_and_printed, read
from rewardlab.artifact.seal import recorded_digest
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_jsonl, write_jsonl
from rewardlab.report.tables import format_estimate
from rewardlab.rl import RolloutError, RolloutRow, Scored

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("status", "queued"), [(75, True), (138, True), (0, False), (2, False), (137, False)])
def test_the_batch_script_queues_a_run_again_if_work_is_left_and_only_then(status, queued, tmp_path):
    stand_in(
        tmp_path,
        "scontrol",
        f'if [ "$1" = show ]; then echo node7; echo node8; else echo "$*" >> {tmp_path}/queued; fi',
    )
    stand_in(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_PROCID=3 SLURM_LOCALID=1 exec "$@"')
    stand_in(
        tmp_path, "python", f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $*"; exit {status}'
    )
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
    answer = subprocess.run(
        ["bash", str(SBATCH), "--model", "m", "--system-prompt", "Be kind."],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    line = answer.stdout.splitlines()[0]
    assert line == "3 1 4 2 node7 -P -m rewardlab train --model m --system-prompt Be kind. --resume auto", answer.stderr
    told = tmp_path / "queued"
    assert (told.read_text().split() if told.exists() else None) == (["requeue", "4711"] if queued else None)
    assert answer.returncode == (0 if queued else status)


# --- programs ------------------------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """An example as a module."""
    return module_at(EXAMPLES / f"{name}.py")


@pytest.fixture(scope="module", autouse=True)
def _verified_here() -> Iterator[None]:
    """The last check of a run, made in this process, where it is quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewardlab.training.run.verify_in_clean_process", rewardlab.verify)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the first example leaves, on a tiny model."""
    folder = tmp_path_factory.mktemp("examples")
    base = write_base_model(folder / "base")
    arguments = ["--model", str(base), "--output-dir", str(folder / "run"), "--steps", "12", "--lr", "1e-2"]
    return load("train_from_memory").main(arguments)


def test_every_program_among_the_examples_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "train_from_memory",
        "best_of_n",
        "compare_models",
        "rejection_sampling",
        "grpo_with_reward_model",
    }


def test_a_model_trained_from_memory_learns_on_what_it_was_given(trained):
    assert trained.test.overall.sums.comparisons == 60
    assert trained.test.overall.estimates["eval_accuracy"].low > 0.5
    assert (trained.model / "reward_spec.json").is_file()


def test_best_of_n_ranks_replies_by_their_score(trained, capsys):
    replies = ["No idea.", "Certainly: basil wants light, and water once the soil is dry.", "No idea..."]
    ranked = load("best_of_n").main([str(trained.model), "How do I keep basil alive?", *replies])
    assert ranked == sorted(ranked, reverse=True)
    assert {reply for _, reply in ranked} == set(replies)
    assert ranked[0][1] == replies[1]
    assert f"{ranked[0][0]:+8.3f}  {replies[1]}" in capsys.readouterr().out


def write_samples(path: Path, *, num: int = 12) -> list[dict[str, Any]]:
    """Four replies to each prompt, of which two are the same, with what they are worth."""
    rows = [
        {
            "prompt": f"Question {number}: how do I keep ivy alive?",
            "replies": [
                "No idea.",
                "Certainly: ivy wants light.",
                "No idea.",
                "Certainly: ivy wants light, and water.",
            ],
            "gold": [0, 2, 0, 1],
        }
        for number in range(num)
    ]
    write_jsonl(path, rows)
    return rows


@pytest.mark.slow
def test_the_curve_of_a_file_is_that_of_its_scores_and_is_written(trained, tmp_path, capsys):
    rows = write_samples(tmp_path / "samples.jsonl")
    arguments = ["--file", str(tmp_path / "samples.jsonl"), "--output", str(tmp_path / "curve.csv")]
    points = load("best_of_n").main([str(trained.model), *arguments])
    model = rewardlab.load(trained.model)
    scores = [model.score_replies(row["prompt"], row["replies"]) for row in rows]
    assert [point.n for point in points] == [1, 2, 3, 4]
    assert points[0].proxy.value == pytest.approx(np.mean(scores))
    assert points[-1].proxy.value == pytest.approx(np.mean([max(own) for own in scores]))
    best = [row["gold"][int(np.argmax(own))] for row, own in zip(rows, scores, strict=True)]
    assert points[-1].gold.value == pytest.approx(np.mean(best))
    with (tmp_path / "curve.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [float(row["gold_gain"]) for row in written] == [point.gold_gain.value for point in points]
    assert [float(row["proxy_low"]) for row in written] == [point.proxy.low for point in points]
    out = capsys.readouterr().out
    assert f"    4  {format_estimate(points[-1].proxy)}" in out
    assert "at most 0.64 nats" in out
    assert "    3 " not in out[: out.index("    4 ")]


@pytest.mark.parametrize(
    "arguments", [["prompt"], ["prompt", "reply", "--file", "f"], ["prompt", "r", "--output", "o"]]
)
def test_best_of_n_wants_replies_or_a_file(trained, arguments):
    with pytest.raises(SystemExit):
        load("best_of_n").main([str(trained.model), *arguments])


@pytest.mark.slow
def test_rejection_sampling_keeps_the_best_of_each_prompt_with_where_it_is_from(trained, tmp_path, capsys):
    samples = tmp_path / "samples.jsonl"
    rows = write_samples(samples, num=70)
    counts = load("rejection_sampling").main([str(trained.model), str(samples), str(tmp_path / "sft.jsonl")])
    written = [row for _, row in read_jsonl(tmp_path / "sft.jsonl")]
    model, digest = rewardlab.load(trained.model), recorded_digest(trained.model)
    assert len(written) == len(rows)
    for number, (row, own) in enumerate(zip(rows, written, strict=True), start=1):
        scores = model.score_replies(row["prompt"], row["replies"])
        best = int(np.argmax(scores))
        assert [turn["content"] for turn in own["messages"]] == [row["prompt"], row["replies"][best]]
        assert [turn["role"] for turn in own["messages"]] == ["user", "assistant"]
        assert own["score"] == pytest.approx(scores[best], abs=own["noise"])
        assert (own["model_digest"], own["source"], own["num_replies"]) == (digest, f"{samples}:{number}", 4)
    assert (counts["replies"], counts["kept"], counts["repeated"], counts["not chosen"]) == (280, 70, 70, 140)
    assert "Dropped: 140 not chosen, 70 that repeat another reply to their prompt." in capsys.readouterr().out


@pytest.mark.slow
def test_rejection_sampling_keeps_a_share_or_from_a_score_on(trained, tmp_path, capsys):
    samples = tmp_path / "samples.jsonl"
    write_samples(samples)
    rejection = load("rejection_sampling")
    half = rejection.main([str(trained.model), str(samples), str(tmp_path / "half.jsonl"), "--top-share", "0.5"])
    assert (half["kept"], half["not chosen"]) == (24, 12)
    none = rejection.main([str(trained.model), str(samples), str(tmp_path / "none.jsonl"), "--from-score", "1e9"])
    assert "12 prompts have no reply in the file." in capsys.readouterr().out
    assert (none["kept"], none["not chosen"], none["prompts of which none is kept"]) == (0, 36, 12)
    with pytest.raises(ConfigError, match=r"half\.jsonl is there already"):
        rejection.main([str(trained.model), str(samples), str(tmp_path / "half.jsonl")])
    with pytest.raises(ConfigError, match="--top-share"):
        rejection.main([str(trained.model), str(samples), str(tmp_path / "more.jsonl"), "--top-share", "1.5"])


def test_a_reply_without_a_score_is_named_by_file_and_line(trained, tmp_path):
    samples = tmp_path / "samples.jsonl"
    write_jsonl(
        samples, [{"prompt": "Why?", "replies": ["So."]}, {"prompt": "Why?", "replies": ["So.", "long " * 999]}]
    )
    with pytest.raises(RolloutError, match=r"samples\.jsonl:2: reply 1 has no score"):
        load("rejection_sampling").main([str(trained.model), str(samples), str(tmp_path / "sft.jsonl")])
    assert not (tmp_path / "sft.jsonl").exists()


@pytest.mark.parametrize(
    ("asked", "scores", "kept", "close"),
    [
        ({}, [0.0, 1.0, 0.5], [1], False),
        ({}, [0.9, 1.0, 0.5], [1], True),
        ({}, [3.0], [0], False),
        ({"top_share": 0.5}, [0.0, 1.0, 2.0, 1.9], [2, 3], False),
        ({"top_share": 0.5}, [1.8, 1.0, 2.0, 1.9], [2, 3], True),
        ({"top_share": 0.1}, [float(number) for number in range(30)], [29, 28, 27], False),
        ({"from_score": 1.0}, [0.0, 1.2, 2.0], [2, 1], False),
        ({"from_score": 1.0}, [0.0, 0.95, 2.0], [2], True),
    ],
)
def test_a_choice_is_close_if_scores_within_their_noise_could_make_another_one(asked, scores, kept, close):
    """Every score has a noise of 0.1, so two of them may come 0.2 nearer to each other."""
    settings = argparse.Namespace(**{"top_share": None, "from_score": None, **asked})
    scored = [Scored(score=score, noise=0.1) for score in scores]
    assert load("rejection_sampling").kept_of(scored, settings) == (kept, close)


@pytest.mark.slow
def test_close_prompts_are_left_out_if_asked(trained, tmp_path, capsys):
    samples = tmp_path / "samples.jsonl"
    write_samples(samples)
    rejection = load("rejection_sampling")
    rejection.kept_of = lambda scored, asked: ([0], True)
    counts = rejection.main([str(trained.model), str(samples), str(tmp_path / "sft.jsonl"), "--skip-close"])
    assert (counts["kept"], counts["of close prompts"], counts["close prompts"]) == (0, 36, 12)
    assert "Dropped: 36 of prompts that are close." in capsys.readouterr().out
    counts = rejection.main([str(trained.model), str(samples), str(tmp_path / "all.jsonl")])
    assert (counts["kept"], counts["not chosen"], counts["close prompts"]) == (12, 24, 12)
    assert all(row["close"] for _, row in read_jsonl(tmp_path / "all.jsonl"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")  # TRL's own
def test_grpo_goes_from_preferences_to_an_audit_that_finds_the_flattery(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = load("grpo_with_reward_model").main(["--smoke", "--output-dir", str(tmp_path / "grpo")])
    assert (result.audit_status, result.exit_status) == (1, 0)
    assert len(result.rows) == 80 * 64
    assert result.largest_difference < 1e-4
    assert {row.digest for row in result.rows} == {recorded_digest(result.reward_model)}
    steps = {
        name: [row for row in result.rows if row.step in kept]
        for name, kept in {"first": range(8), "last": range(72, 80)}.items()
    }
    reward = {name: np.mean([row.reward for row in rows]) for name, rows in steps.items()}
    gold = {name: np.mean([row.evidence["gold"] for row in rows]) for name, rows in steps.items()}
    assert reward["last"] > reward["first"] + 2
    assert gold["last"] < gold["first"] - 2
    out = capsys.readouterr().out
    assert "EXPLOITED: the reward rose while the evidence fell." in out
    assert (tmp_path / "grpo" / "policy" / "model.safetensors").is_file()


@pytest.mark.slow
def test_rewards_that_are_not_the_scores_of_the_folder_end_the_program(trained, capsys):
    grpo = load("grpo_with_reward_model")
    turns = (rewardlab.Message("user", "Why?"), rewardlab.Message("assistant", "So."))
    (score,) = rewardlab.load(trained.model).score([turns])
    row = RolloutRow(step=0, prompt_key="why", conversation=turns, reward=score)
    assert grpo.check_rewards([row], trained.model) < 1e-4
    with pytest.raises(SystemExit, match="not the scores of this folder"):
        grpo.check_rewards([row, replace(row, reward=score + 0.01)], trained.model)


def test_grpo_says_what_is_missing_before_it_begins(tmp_path, capsys):
    grpo = load("grpo_with_reward_model")
    with pytest.raises(SystemExit):
        grpo.main(["--model", "m"])
    assert "--policy" in capsys.readouterr().err
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(ConfigError, match="is of an earlier run"):
        grpo.main(["--smoke", "--output-dir", str(tmp_path)])
    prompts = tmp_path / "prompts.jsonl"
    write_jsonl(prompts, [{"prompt": "Why?"}, {"chosen": "So."}])
    some = ["--model", "m", "--policy", "p", "--output-dir", str(tmp_path / "new")]
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: no `prompt`"):
        grpo.main([*some, "--data", str(prompts)])
    write_jsonl(prompts, [{"prompt": "Why?"}])
    with pytest.raises(ConfigError, match="m is no reward-model folder, so --data has to name preferences"):
        grpo.main([*some, "--prompts", str(prompts)])
    with pytest.raises(ConfigError, match="whose folder is --model; m is none"):
        grpo.main([*some, "--data", str(prompts), "--url", "http://127.0.0.1:1"])


def test_the_page_names_every_flag_of_its_programs_and_no_other():
    page = read("rl-examples.md")
    programs = ("grpo_with_reward_model", "best_of_n", "rejection_sampling")
    sources = [(EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in programs]
    flags = {flag for source in sources for flag in re.findall(r'add_argument\("(--[\w-]+)"', source)}
    assert len(flags) > 12
    of_commands = {"--pick", "--truncation", "--max-seq-len"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page)) == flags | of_commands


def test_the_example_on_the_page_runs_and_prints_what_it_says():
    promised, printed = promised_and_printed("rl-examples.md")
    assert printed == promised
    assert len(printed) == 2


@pytest.mark.slow
def test_two_models_are_compared_pair_by_pair(trained, tmp_path, capsys):
    data = write_pairs(tmp_path / "pairs.jsonl", 40)
    compare = load("compare_models")
    arguments = [str(data), "--output-dir", str(tmp_path / "compared")]
    same = compare.main([str(trained.model), str(trained.model), *arguments])
    assert (same.value, same.n) == (0.0, 40)
    assert same.low < 0 < same.high
    assert "paired" in capsys.readouterr().out


def test_the_paired_difference_is_that_of_the_accuracies_and_narrower_than_both():
    """Of 40 pairs the models agree on all but four, which the second gets right."""
    compare = load("compare_models")

    def rows(wrong: Collection[int]) -> list[rewardlab.ScoreRow]:
        return [
            rewardlab.ScoreRow(
                preference_id=f"pair {number}",
                source="made up",
                prompt_key=f"prompt {number}",
                reply=reply,
                score=float((reply == 0) != (number in wrong)),
                num_tokens=2,
                prompt_tokens=1,
                truncated_tokens=0,
                comparisons=(rewardlab.Comparison(first=0, second=1),) if reply == 0 else (),
            )
            for number in range(40)
            for reply in range(2)
        ]

    first, second = rows(range(14)), rows(range(10))
    change = compare.paired_difference(first, second)
    accuracies = [rewardlab.evaluate(some, beta=1.0).estimates["eval_accuracy"] for some in (first, second)]
    assert change.value == pytest.approx(accuracies[1].value - accuracies[0].value)
    assert change.high - change.low < min(one.high - one.low for one in accuracies)
