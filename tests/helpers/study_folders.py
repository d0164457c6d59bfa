"""Studies as `rewardlab plan run` leaves them: frozen and done for real, with runs written by hand and not trained."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from helpers.run_folders import prompt_of, write_model
from rewardlab.core.files import sha256_file, write_json, write_jsonl, write_summed_json
from rewardlab.core.types import Comparison, ScoreRow, prompt_key
from rewardlab.experiments.checking import check
from rewardlab.experiments.one_run import do
from rewardlab.experiments.plan import Run
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.study import Study, freeze, open_study

STEPS = (0, 100, 200, 300, 400)
PLAN = """\
title: What smoothing does
question: Does label smoothing calibrate without costing accuracy?
base: {model: a-model-3b, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
seeds: [0, 1, 2]
arms:
  plain: {says: nothing added, label_smoothing: 0.0}
  smooth: {says: smoothing, label_smoothing: 0.05}
  harsh: {says: smoothing and a high rate, label_smoothing: 0.05, lr: 0.01}
baseline: plain
waterfall: [plain, smooth, harsh]
bands:
  accuracy(smooth): {failure: 0.58, success: 0.63}
hypotheses:
  keeps: {claim: accuracy(smooth) >= accuracy(plain) - 0.05, expects: smoothing moves no ranks, would_change: a loss}
  harms: accuracy(harsh) > accuracy(plain)
  close: accuracy(smooth) > accuracy(plain)
"""
SKILLS = {"plain": 0.75, "smooth": 0.76, "harsh": 0.60}


def write_plan(folder: Path, text: str = PLAN) -> Path:
    """A plan file with the data that it names; run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        rows = [{"prompt": f"{name} {number}", "chosen": "a", "rejected": "b"} for number in range(20)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    text = text.replace("train.jsonl", str(folder / "train.jsonl")).replace("test.jsonl", str(folder / "test.jsonl"))
    (folder / "plan.yaml").write_text(text, encoding="utf-8")
    return folder / "plan.yaml"


def told(folder: Path, text: str, level: str) -> list[str]:
    """What `plan check` says of a plan at one level, but for the size of its margins."""
    found = check(read_plan(write_plan(folder, text))).problems
    return [one.text for one in found if one.level == level and "with a chance of" not in one.text]


def with_arm(settings: str) -> str:
    """The plan with other settings of its arm `smooth`."""
    return PLAN.replace("label_smoothing: 0.05}\n  harsh", f"label_smoothing: 0.05, {settings}}}\n  harsh")


def frozen_study(folder: Path, text: str = PLAN) -> Study:
    """A study that is frozen, and of which nothing is done."""
    return freeze(write_plan(folder, text), folder / "study")


def finished_study(folder: Path, text: str = PLAN, *, skills: Mapping[str, float] = SKILLS, **how: Any) -> Study:
    """A study all of whose runs are done; `how` goes to `train_by_hand`."""
    study = frozen_study(folder, text)
    do_all(study, study.runs, skills=skills, **how)
    return open_study(study.folder)


def do_all(study: Study, runs: Sequence[Run], *, skills: Mapping[str, float] = SKILLS, **how: Any) -> None:
    """Do runs by hand, each recorded as it would be."""
    for run in runs:
        do(study, run, train_by_hand(run.arm, skills.get(run.arm, 0.7), **how))


def train_by_hand(
    arm: str,
    accuracy: float,
    *,
    prompts: int = 200,
    gap: float = 0.02,
    sign: str = "",
    noise: float = 0.2,
    last_step: int = STEPS[-1],
    strength: float | None = None,
) -> Callable[[Sequence[str]], None]:
    """What `rewardlab train` leaves, for an arm that ranks so many pairs right; prompts are hard for all arms alike."""

    def train(arguments: Sequence[str]) -> None:
        settings = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
        folder = Path(settings["output_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        own = np.random.default_rng([settings["seed"], sum(map(ord, arm))])
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", settings)
        kept = {"training": {"kept": 1_800}, "evaluation": {"kept": 200}}
        counts = {"parameters": {"trainable": 1_000, "total": 50_000}, "tokens": kept}
        write_summed_json(folder / "manifest.json", counts)
        _metrics(folder, accuracy + float(own.normal(scale=0.01)), gap, last_step)
        if sign:
            told = {"step": 200, "name": sign, "text": "It was seen.", "advice": "Try less."}
            (folder / "warnings.jsonl").write_text(json.dumps(told) + "\n", encoding="utf-8")
        for number, name in enumerate(("selection", "test")):
            if name == "test" and not settings.get("test_dataset"):
                continue
            _evaluation(folder / "evals", name, _margins(own, number, accuracy, prompts, noise), strength)
        write_model(folder / "best")
        spec = json.loads((folder / "best/reward_spec.json").read_text(encoding="utf-8"))
        write_json(folder / "best/reward_spec.json", {**spec, "provenance": {"step": 300}})

    return train


def _margins(own: np.random.Generator, data: int, accuracy: float, prompts: int, noise: float) -> list[float]:
    hard_C = np.random.default_rng(99 + data).normal(size=prompts)
    latent_C = 0.9 * hard_C + noise * own.normal(size=prompts)
    limit = NormalDist(sigma=math.hypot(0.9, noise)).inv_cdf(accuracy)
    return (limit - latent_C).tolist()


def _evaluation(folder: Path, name: str, margins: Sequence[float], strength: float | None) -> None:
    rows = [
        ScoreRow(
            preference_id=f"{name}.jsonl:{number}",
            source="preferences",
            prompt_key=prompt_key(prompt_of(number, name)),
            reply=reply,
            score=margin * (1 - reply),
            num_tokens=20,
            prompt_tokens=10,
            truncated_tokens=0,
            comparisons=(Comparison(first=0, second=1, strength=strength),) if reply == 0 else (),
        )
        for number, margin in enumerate(margins)
        for reply in range(2)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    scores = folder / f"{name}.scores.jsonl"
    write_jsonl(scores, (row.as_dict() for row in rows))
    values = {"all": {"estimates": {}, "sums": {}}, "scores_sha256": sha256_file(scores)}
    write_json(folder / f"{name}.metrics.json", values)


def _metrics(folder: Path, accuracy: float, gap: float, last_step: int) -> None:
    rows: list[dict[str, object]] = []
    for step in (step for step in STEPS if step <= last_step):
        reached = 0.5 + (accuracy - 0.5) * min(step / 300, 1)
        gap += (accuracy - 0.7) / 100
        row: dict[str, object] = {"step": step, "eval_accuracy": reached, "eval_loss": 0.69 - (reached - 0.5) / 2}
        row |= {"gap_accuracy": gap * step / 300, "gap_loss": gap * step / 300, "peak_memory_gib": 1.5}
        if step:
            row |= {"tokens_per_second": 1000 * (1 + accuracy), "pairs_per_second": 4.0, "seconds": 20.0}
        rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def edit(folder: Path, before: str, after: str) -> None:
    """Replace a text in the plan of a study."""
    path = folder / "plan.yaml"
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
