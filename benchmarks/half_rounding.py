"""Training in bf16 or fp16 beside float32: weights rounded stochastically once a step, and to the nearest.

    scripts/bench half_rounding --lr 5e-6 2e-5 --seeds 3 --trl-seeds 1 --drift
    scripts/bench half_rounding --device cuda --half fp16 --drift --exports float16
    scripts/bench half_rounding --folders runs/probe0/best runs/probe1/best    # saved models, one a seed: drift alone

Rounding to the nearest is what autocast does.
Every arm of a seed starts from the same weights and head and sees the same rows in the same order, at a constant rate.
The trained float32 weights are then judged in float32 on the same test pairs, so differences between arms are paired.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import machine, ours, results, workload
from harness.half_models import (
    DTYPES,
    EXACT,
    LIVE,
    ROUNDINGS,
    SHORT,
    Columns,
    Distance,
    Machinery,
    Rows,
    Trained,
    distance,
    read_folder,
    train_arm,
    train_trl,
)
from rewardlab.analysis import stats
from rewardlab.core.types import Estimate

FOLDERS = "folders"
TRL = "TRL, bf16"
KINDS: Mapping[str, Mapping[str, bool]] = {"full": {}, "lora": {"lora": True}, "head": {"train_head_only": True}}
METRICS = ("accuracy", "NLL", "margin")
TOO_FEW = 10
"""Prompts below which a mean has no interval that takes the prompt for its unit."""


def difference(runs: Sequence[Trained], others: Sequence[Trained], metric: str) -> str:
    """How far an arm is from another on the same pairs, averaged over seeds first."""
    moved = [mine.exact[metric] - other.exact[metric] for mine, other in zip(runs, others, strict=False)]
    found: Estimate = stats.mean(np.mean(moved, axis=0), units_of(others[0].exact))
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def units_of(columns: Columns) -> list[str] | None:
    """The prompt of each pair, or None for each pair by itself where so few prompts have no interval."""
    prompts = columns["prompt"].tolist()
    return prompts if len(set(prompts)) >= TOO_FEW else None


def arms_table(arms: Mapping[str, Sequence[Trained]], half: str) -> str:
    """One line an arm."""
    shadow, nearest = (arms[f"{half}, {rounding}"] for rounding in ROUNDINGS)
    lines = []
    for name, runs in arms.items():
        if not runs:
            continue
        cells = []
        for metric in METRICS:
            cells.append(f"{np.mean([run.exact[metric].mean() for run in runs]):.3f}")
            cells.append("–" if name == EXACT else difference(runs, arms[EXACT], metric))
        loss = np.mean([np.mean(run.losses[-5:]) for run in runs])
        live = " ".join(f"{distance(run.others[LIVE], run.exact).margins:.1%}" for run in runs)
        lines.append([name, len(runs), f"{loss:.3f}", *cells, live])
    apart = (cell for metric in METRICS for cell in ("", difference(shadow, nearest, metric)))
    lines.append([f"{half}, stochastic – nearest", len(shadow), "", *apart, ""])
    head = ["arm", "seeds", "loss, last 5 steps"]
    return results.table([*head, *(cell for metric in METRICS for cell in (metric, "difference")), "live"], lines)


def drift_table(runs: Sequence[Trained]) -> str:
    """Who computes a model, and how far that is from its float32 weights: margins and scores, a column a seed."""
    lines = []
    for name in runs[0].others:
        far = [distance(run.others[name], run.exact) for run in runs]
        lines.append([name, *(f"{one:.1%}" for part in zip(*far, strict=True) for one in part)])
    head = [f"{part}, seed {seed}" for part in Distance._fields for seed in range(len(runs))]
    return results.table(["computed by", *head], lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument("--data", default=workload.GENERATED)
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--test-data", default=None, help="rows to judge on; by default those after the trained ones")
    parser.add_argument("--test-pairs", type=int, default=300)
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trl-seeds", type=int, default=0, help="of which TRL trains so many too")
    parser.add_argument("--drift", action="store_true", help="save and export the models trained in bf16, and compare")
    parser.add_argument(
        "--exports", nargs="+", choices=list(SHORT), help="dtypes that they are exported to; by default that of --half"
    )
    parser.add_argument("--kind", default="full", choices=list(KINDS))
    parser.add_argument(
        "--folders", type=Path, nargs="+", default=[], help="reward-model folders whose drift is measured; none trains"
    )
    parser.add_argument("--half", default="bf16", choices=list(DTYPES), help="the half precision that is trained in")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    if options.test_data == options.data:
        parser.error(f"--test-data {options.test_data}: its first rows are trained on. Leave it out for later ones")
    if options.exports and not (options.drift or options.folders):
        parser.error("--exports needs --drift or --folders: nothing is exported without")
    options.exports = options.exports or [DTYPES[options.half]]
    if len(set(options.exports)) < len(options.exports):
        parser.error("--exports names a dtype twice")
    if options.trl_seeds and (options.half, options.device) != ("bf16", "cpu"):
        parser.error("--trl-seeds: TRL is trained in bf16 on the CPU alone. Leave out --half and --device, or it")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every arm for every rate and seed; the result is written again after each seed."""
    options = parse(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load_before = machine.load_average()
    found: dict[float, dict[str, list[Trained]]] = {}
    with tempfile.TemporaryDirectory() as work:
        model = options.model if not options.folders else str(options.folders[0].resolve())
        folder = workload.model_folder(model, Path(work), layers=options.layers)
        rows = read_rows(folder, options)
        tag = f"{rows.name}.{options.kind}" + (f".{options.layers}-layers" if options.layers else "")
        tag += ("" if options.half == "bf16" else f".{options.half}") + ("" if options.device == "cpu" else ".cuda")
        if options.folders:
            tag, options.lr = f"{rows.name}.folders", [0.0]
        for lr in options.lr:
            so_far = [judge_folders(rows, options)] if options.folders else run_rate(rows, lr, options, Path(work))
            for seed, arms in enumerate(so_far):
                found[lr] = arms
                results.write(
                    "half_rounding",
                    tag,
                    page=page_of(found, rows.name, options),
                    data=record_of(found),
                    options=options,
                    device=torch.device(options.device),
                    load=(load_before, machine.load_average()),
                    say=lr == options.lr[-1] and (bool(options.folders) or seed == options.seeds - 1),
                )
    return 0


def read_rows(folder: str, options: argparse.Namespace) -> Rows:
    """The rows that the flags name, by the template of the model in `folder`."""
    count, more = options.steps * options.batch_size, options.test_pairs if options.test_data is None else 0
    data = workload.read_rows(options.data, count + more, folder=options.data_folder)
    groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
    if options.test_data is not None:
        held_out = workload.read_rows(options.test_data, options.test_pairs, folder=options.data_folder)
        groups += workload.to_groups(held_out, folder, max_seq_len=options.max_seq_len)
    renderer = workload.renderer_of(folder, max_seq_len=options.max_seq_len)
    return Rows(name=data.name, folder=folder, renderer=renderer, train=groups[:count], test=groups[count:])


def judge_folders(rows: Rows, options: argparse.Namespace) -> dict[str, list[Trained]]:
    """The models of `--folders`, none of them trained here."""
    found = []
    for folder in options.folders:
        with tempfile.TemporaryDirectory() as place:
            found.append(read_folder(folder, rows, Path(place), machinery_of(options)))
    return {FOLDERS: found}


def machinery_of(options: argparse.Namespace) -> Machinery:
    """What the flags say of devices and precisions."""
    return Machinery(device=torch.device(options.device), half=options.half, exports=options.exports)


def run_rate(rows: Rows, lr: float, options: argparse.Namespace, work: Path) -> Iterator[dict[str, list[Trained]]]:
    """Every arm at one learning rate: what there is after each seed."""
    machinery = machinery_of(options)
    own = machinery.arms()
    arms: dict[str, list[Trained]] = {name: [] for name in (*own, TRL)}
    for seed in range(options.seeds):
        fixed = {
            "lr": lr,
            "seed": seed,
            "batch_size": options.batch_size,
            "max_seq_len": options.max_seq_len,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "label_smoothing": 0.0,
            **KINDS[options.kind],
        }
        for name in (*own, *([TRL] if seed < options.trl_seeds else [])):
            with tempfile.TemporaryDirectory(dir=work) as place:
                if name == TRL:
                    trained = train_trl(rows, fixed, options.steps, Path(place))
                else:
                    saved = Path(place) if options.drift and name == machinery.arm("stochastic") else None
                    trained = train_arm(rows, fixed | own[name], options.steps, work=saved, machinery=machinery)
            arms[name].append(trained)
            print(f"lr {lr:g}, seed {seed}, {name}: loss {np.mean(trained.losses[-5:]):.3f}", flush=True)
        yield arms


def record_of(found: Mapping[float, Mapping[str, Sequence[Trained]]]) -> dict[str, Any]:
    """For the record: the test pairs once, then losses, each seed's means, and every margin in the order of the pairs.

    From label and margin the metrics of a pair follow, so any difference between arms and seeds can be made again.
    """
    first = next(run for arms in found.values() for runs in arms.values() for run in runs).exact
    return {
        "pairs": {name: first[name].tolist() for name in ("prompt", "label")},
        "rates": {
            f"{rate:g}": {name: [facts_of(run) for run in runs] for name, runs in arms.items()}
            for rate, arms in found.items()
        },
    }


def facts_of(run: Trained) -> dict[str, Any]:
    """What a seed of an arm came to, as computed in float32 and by others."""
    return {
        "losses": run.losses,
        **{metric: float(run.exact[metric].mean()) for metric in METRICS},
        "margins": digits(run.exact["margin"]),
        "computed_by": {
            who: {**distance(one, run.exact)._asdict(), "margins_of_pairs": digits(one["margin"])}
            for who, one in run.others.items()
        },
    }


def digits(values: np.ndarray) -> list[float]:
    """The numbers as float32 has them: seven digits."""
    return [float(f"{value:.7g}") for value in values]


def page_of(
    found: Mapping[float, Mapping[str, Sequence[Trained]]], data: str, options: argparse.Namespace
) -> list[str]:
    """The page so far."""
    depth = f", the first {options.layers} layers" if options.layers else ""
    judged_on = "pairs after them" if options.test_data is None else f"pairs of {options.test_data}"
    what = {"full": "all weights", "lora": "LoRA", "head": "the head alone"}[options.kind]
    far = (
        "Distances of margins and scores are from those of the same weights in float32: root mean squares, in standard "
        "deviations of a margin and of a score."
    )
    if options.folders:
        names = ", ".join(f"`{folder.resolve().parent.name}/{folder.name}`" for folder in options.folders)
        ((_, runs),) = found[0.0].items()
        judged = f"{names}, one a seed, judged on {options.test_pairs} {judged_on}."
        return [f"# Saved models by who computes them: {data}", "", f"{judged} {far}", "", drift_table(runs)]
    tables = []
    first = next(run for arms in found.values() for runs in arms.values() for run in runs).exact
    unit = (
        "clustered by prompt (they say nothing of other seeds)"
        if units_of(first)
        else f"for other pairs of the same {len(set(first['prompt'].tolist()))} prompts (they say nothing of other "
        f"prompts and seeds)"
    )
    for lr, arms in found.items():
        tables += [f"## lr {lr:g}", "", arms_table(arms, options.half)]
        if options.drift:
            shadow = machinery_of(options).arm("stochastic")
            tables += [f"The models of `{shadow}`, by who computes them:", "", drift_table(arms[shadow])]
    return [
        f"# {options.half} that learns like float32: {what}, {data}",
        "",
        f"{Path(options.model).name}{depth}, {options.steps} steps of {options.batch_size} pairs at a constant rate; "
        f"judged in float32 on {options.test_pairs} {judged_on}. Differences are from float32, in the last row between "
        f"the two roundings, on the same pairs and seeds, averaged over seeds, with 95 % intervals over pairs, "
        f"{unit}. `live` is the model as it computes while it trains, the distance of its margins a seed. {far}",
        "",
        *tables,
    ]


if __name__ == "__main__":
    sys.exit(main())
