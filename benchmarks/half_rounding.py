"""Training in bf16 beside float32: weights rounded stochastically once a step, and to the nearest, as autocast does.

    scripts/bench half_rounding --lr 5e-6 2e-5 --seeds 3

Every arm of a seed starts from the same weights and head and sees the same rows in the same order, at a constant rate.
The trained float32 weights are then judged in float32 on the same test pairs, so differences between arms are paired.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import machine, ours, results, workload
from rewardlab.analysis import stats
from rewardlab.analysis.metrics import oriented
from rewardlab.core.types import Estimate, ScoreRow, TokenGroup, join_comparisons
from rewardlab.training.evaluate import evaluate_groups
from rewardlab.training.reward_trainer import RewardTrainer

CPU = torch.device("cpu")
ARMS: Mapping[str, Mapping[str, str]] = {
    "float32": {"precision": "fp32"},
    "bf16, stochastic": {"precision": "bf16", "half_rounding": "stochastic"},
    "bf16, nearest": {"precision": "bf16", "half_rounding": "nearest"},
}


def train_arm(
    folder: str, train: Sequence[TokenGroup], test: Sequence[TokenGroup], settings: Mapping[str, object], steps: int
) -> dict[str, Any]:
    """Losses of the steps, and score rows of the test data: as it computes while it trains, and in float32."""
    config = ours.settings(folder, settings)
    trainer = ours.build_trainer(config, train, sharing=True, device=CPU)
    step = ours.step_of(trainer)
    losses = [step()["loss"] for _ in range(steps)]
    model, judged = trainer.reward_model, {}
    for arithmetic in ("live", "float32"):
        if arithmetic == "float32":
            in_float32(trainer)
        judged[arithmetic] = evaluate_groups(model, test, beta=1.0, budget=config.token_budget, progress="judging").rows
    return {"losses": losses, **judged}


def in_float32(trainer: RewardTrainer) -> None:
    """From now on the model computes by its float32 weights."""
    model = trainer.reward_model
    if model.half_weights is not None:
        model.half_weights.drop()
        model.half_weights = None
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    model.compute_dtype = torch.float32
    model.attention_backend = "segments"


def columns(rows: Sequence[ScoreRow]) -> dict[str, np.ndarray]:
    """Of each test pair: margin, whether it is ordered as judged, and NLL."""
    pairs = oriented(join_comparisons(rows))
    return {"margin": pairs.difference, "accuracy": pairs.outcome, "NLL": pairs.nll(beta=1.0)}


def compare(arms: Mapping[str, Sequence[Mapping[str, np.ndarray]]], name: str, metric: str) -> Estimate:
    """How far an arm is from float32 on the same pairs, averaged over seeds first: the pair is the unit."""
    differences = [mine[metric] - exact[metric] for mine, exact in zip(arms[name], arms["float32"], strict=True)]
    return stats.mean(np.mean(differences, axis=0))


def shown(estimate: Estimate) -> str:
    """With its interval."""
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every arm for every rate and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument("--data", default=workload.GENERATED)
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--test-pairs", type=int, default=300, help="the rows after those trained on")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load, found, tables = machine.load_average(), {}, []
    count = options.steps * options.batch_size
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        rows = workload.read_rows(options.data, count + options.test_pairs, folder=options.data_folder)
        groups = workload.to_groups(rows, folder, max_seq_len=1024)
        train, test = groups[:count], groups[count:]
        for lr in options.lr:
            arms: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
            for seed in range(options.seeds):
                for name, arm in ARMS.items():
                    fixed = {
                        "lr": lr,
                        "seed": seed,
                        "batch_size": options.batch_size,
                        "lr_scheduler": "constant",
                        "warmup_steps": 0,
                        "lora": options.lora,
                    }
                    arms[name].append(train_arm(folder, train, test, fixed | arm, options.steps))
                    print(f"lr {lr:g}, seed {seed}, {name}: last loss {arms[name][-1]['losses'][-1]:.3f}", flush=True)
            tables.append((lr, table_of(arms)))
            found[f"{lr:g}"] = {name: [one["losses"] for one in runs] for name, runs in arms.items()}
    kind = "LoRA" if options.lora else "all weights"
    page = [
        f"# bf16 that learns like float32: {kind}, {rows.name}",
        "",
        f"{Path(options.model).name}, {options.steps} steps of {options.batch_size} pairs at a constant rate, "
        f"{options.seeds} seeds; judged in float32 on {len(test)} test pairs. Differences are from float32 on the same "
        f"pairs, averaged over seeds, with t intervals over pairs. `live` is the model as it computes while it trains: "
        f"the distance of its margins from those of the same weights in float32, in units of their standard deviation.",
        "",
        *(line for lr, text in tables for line in (f"## lr {lr:g}", "", text)),
    ]
    results.write(
        "half_rounding",
        f"{rows.name}.{'lora' if options.lora else 'full'}",
        page=page,
        data={"losses": found},
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return 0


def table_of(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One line an arm."""
    judged = {name: [columns(run["float32"]) for run in runs] for name, runs in arms.items()}
    lines = []
    for name, runs in arms.items():
        last = [np.mean(run["losses"][-5:]) for run in runs]
        live = []
        for run, exact in zip(runs, judged[name], strict=True):
            margin = columns(run["live"])["margin"]
            live.append(float(np.sqrt(np.mean((margin - exact["margin"]) ** 2)) / exact["margin"].std()))
        accuracy, nll, margin = (np.mean([one[metric].mean() for one in judged[name]]) for metric in METRICS)
        lines.append(
            [
                name,
                f"{np.mean(last):.3f}",
                f"{accuracy:.3f}",
                "–" if name == "float32" else shown(compare(judged, name, "accuracy")),
                f"{nll:.3f}",
                "–" if name == "float32" else shown(compare(judged, name, "NLL")),
                f"{margin:+.3f}",
                "–" if name == "float32" else shown(compare(judged, name, "margin")),
                f"{np.mean(live):.1%}",
            ]
        )
    return results.table(
        ["arm", "loss, last 5 steps", "accuracy", "difference", "NLL", "difference", "margin", "difference", "live"],
        lines,
    )


METRICS = ("accuracy", "NLL", "margin")

if __name__ == "__main__":
    sys.exit(main())
