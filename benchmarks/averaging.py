"""What averaging the weights of reward models is worth: beside its members, and beside the mean of their scores.

    scripts/bench averaging
    scripts/bench averaging --data gsm8k --kind lora --swapped 0

A head is trained alone; several models begin from that head, with seeds of their own, and `rewardlab average` makes one
of them. The same is done with models that each drew a head of their own. All are judged on the same test pairs, so
differences are paired. `--swapped 0 0.25` does all of it for each of these shares of training labels turned round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from harness import machine, ours, results, workload
from harness.half_models import Columns, columns
from rewardlab import RewardTrainerConfig, train
from rewardlab.analysis import stats
from rewardlab.artifact.load import load
from rewardlab.core.types import Preference, ScoreRow
from rewardlab.evaluation.evaluate import evaluate_groups
from rewardlab.serve.folders.average import average

KINDS: Mapping[str, Mapping[str, object]] = {"full": {}, "lora": {"lora": True}}
SAME, OWN = "one head", "heads of their own"
METRICS = ("accuracy", "NLL")
MEMBER, SCORES, WEIGHTS = "a member (mean)", "mean of scores", "average of weights"


def swapped(preferences: Sequence[Preference], share: float, seed: int) -> list[Preference]:
    """The same preferences with the labels of that share of them turned round."""
    turned = np.random.default_rng(seed).permutation(len(preferences))[: round(share * len(preferences))]
    found = list(preferences)
    for place in turned:
        one = found[place]
        found[place] = replace(
            one,
            comparisons=tuple(replace(pair, label=1.0 - pair.label) for pair in one.comparisons),
            ranking=one.ranking and one.ranking[::-1],
        )
    return found


def trained(model: str, preferences: Sequence[Preference], place: Path, flags: Mapping[str, object]) -> Path:
    """Train, and return the folder of the model as it is after the last step."""
    config = RewardTrainerConfig.of(
        **{
            "model": model,
            "output_dir": str(place),
            "eval_fraction": 0.0,
            "report_to": ("none",),
            "precision": "fp32",
            **flags,
        }
    )
    return train(config, preferences=preferences).last


def judged(folder: Path, rows: workload.Rows, options: argparse.Namespace) -> Sequence[ScoreRow]:
    """A row for every reply of the test pairs, in float32."""
    groups = workload.to_groups(rows, str(folder), max_seq_len=options.max_seq_len)
    return evaluate_groups(load(folder).model, groups, beta=1.0, budget=8192, progress="judging").rows


def mean_of(members: Sequence[Sequence[ScoreRow]]) -> list[ScoreRow]:
    """The mean of the members' scores, each in its own standard deviations, times the mean of these."""
    scores = np.array([[row.score for row in rows] for rows in members])
    spread = scores.std(axis=1, ddof=1, keepdims=True)
    combined = ((scores - scores.mean(axis=1, keepdims=True)) / spread).mean(0) * spread.mean()
    return [replace(row, score=float(score)) for row, score in zip(members[0], combined, strict=True)]


def mean_member(members: Sequence[Columns]) -> Columns:
    """Of each pair the members' mean accuracy and NLL; no model has these numbers."""
    return {**members[0], **{metric: np.mean([one[metric] for one in members], axis=0) for metric in METRICS}}


def cell(values: np.ndarray, prompts: Sequence[str], sign: str = "", mark: str = "") -> str:
    """A mean with its interval by prompt."""
    found = stats.mean(values, prompts)
    return f"{mark}{found.value:{sign}.3f}{mark} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def table(arms: Mapping[str, Mapping[str, Columns]]) -> str:
    """A line for each way of starting and each use of its members."""
    lines = []
    for start, ways in arms.items():
        prompts = ways[MEMBER]["prompt"].tolist()
        for name, found in ways.items():
            line = [start, name]
            for metric in METRICS:
                line.append(cell(found[metric], prompts, mark="**" if name == WEIGHTS else ""))
                for other in (MEMBER, SCORES):
                    same = name == other or (name, other) == (MEMBER, SCORES)
                    line.append("" if same else cell(found[metric] - ways[other][metric], prompts, "+"))
            lines.append(line)
    head = ["members begin with", "judged"]
    for metric in METRICS:
        head += [metric, "minus a member", "minus the mean of scores"]
    return results.table(head, lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=8, help="the first ones alone; 0 for all")
    parser.add_argument("--data", default="truthfulqa", help="NAME.train and NAME.test are read")
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--pairs", type=int, default=2376, help="to train on")
    parser.add_argument("--test-pairs", type=int, default=464)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--kind", default="full", choices=list(KINDS))
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--head-steps", type=int, default=50, help="steps in which the common head is trained alone")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--swapped", type=float, nargs="+", default=[0.0, 0.25], help="shares of labels turned round")
    parser.add_argument("--threads", type=int, default=2)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    if options.members < 2:
        parser.error("--members: an average needs two or more")
    if not all(0 <= share < 0.5 for share in options.swapped):
        parser.error("--swapped: each is a share of the labels, from 0 to below 0.5")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, average and judge for each share of swapped labels; the result is written again after each."""
    options = parse(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load_before = machine.load_average()
    train_rows, test_rows = (
        workload.read_rows(f"{options.data}.{part}", count, folder=options.data_folder)
        for part, count in (("train", options.pairs), ("test", options.test_pairs))
    )
    found: dict[float, dict[str, dict[str, Columns]]] = {}
    for share in options.swapped:
        with tempfile.TemporaryDirectory() as work:
            preferences = swapped(train_rows.preferences, share, seed=0)
            found[share] = measure(preferences, test_rows, Path(work), options)
        results.write(
            "averaging",
            f"{options.data}.{options.kind}" + (f".{options.layers}-layers" if options.layers else ""),
            page=page_of(found, train_rows, test_rows, options),
            data={"found": record_of(found), "train": train_rows.sha256, "test": test_rows.sha256},
            options=options,
            device=torch.device("cpu"),
            load=(load_before, machine.load_average()),
            say=share == options.swapped[-1],
        )
    return 0


def measure(
    preferences: Sequence[Preference], test: workload.Rows, work: Path, options: argparse.Namespace
) -> dict[str, dict[str, Columns]]:
    """Train the members that begin from one head and those with heads of their own; judge what is made of them."""
    base = workload.model_folder(options.model, work, layers=options.layers or None)
    common = {"batch_size": options.batch_size, "max_seq_len": options.max_seq_len}
    head = {**common, "train_head_only": True, "steps": options.head_steps, "lr": 1e-3}
    start = trained(base, preferences, work / "head", head)
    whole = {**common, **KINDS[options.kind], "steps": options.steps, "lr": options.lr}
    found = {}
    for name, model in ((SAME, str(start)), (OWN, base)):
        folders, rows = [], []
        for seed in range(1, options.members + 1):
            folders.append(trained(model, preferences, work / f"{name} {seed}", {**whole, "seed": seed}))
            rows.append(judged(folders[-1], test, options))
        average(folders, work / f"{name} average")
        found[name] = {
            MEMBER: mean_member([columns(one) for one in rows]),
            SCORES: columns(mean_of(rows)),
            WEIGHTS: columns(judged(work / f"{name} average", test, options)),
        }
    return found


def page_of(
    found: Mapping[float, Mapping[str, Mapping[str, Columns]]],
    train_rows: workload.Rows,
    test_rows: workload.Rows,
    options: argparse.Namespace,
) -> list[str]:
    """The page."""
    prompts = len({one.key for one in test_rows.preferences})
    layers = f"the first {options.layers} layers of " if options.layers else ""
    lines = [
        f"{options.members} members, {options.kind}, {layers}{options.model}, {options.steps} steps of "
        f"{options.batch_size} of {train_rows.rows:,} pairs at {options.lr:g} in float32, seeds 1 to "
        f"{options.members}. A common head was trained alone for {options.head_steps} steps before. Judged on "
        f"{test_rows.rows} test pairs on {prompts} prompts, in float32; means with 95 % intervals by prompt, "
        f"differences on the same pairs. The intervals are of these members: other seeds would give others.",
    ]
    for share, arms in found.items():
        lines += ["", f"## {share:.0%} of the training labels turned round".replace("%", " %"), "", table(arms)]
    return lines


def record_of(found: Mapping[float, Mapping[str, Mapping[str, Columns]]]) -> dict[str, object]:
    """The record: of each pair whether it is ordered as judged, and its NLL."""
    return {
        f"{share:g}": {
            start: {name: {metric: one[metric].tolist() for metric in METRICS} for name, one in ways.items()}
            for start, ways in arms.items()
        }
        for share, arms in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
