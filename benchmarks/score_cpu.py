"""Scoring groups of replies to one prompt (best-of-n): prompts shared, packed without sharing, padded batches."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import flops, machine, ours, peers, results, timing, workload
from harness.lockstep import Session, Worker
from rewardlab.core.types import TokenGroup
from rewardlab.score import score_groups
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
PEAK_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How many groups of how many replies."""

    data: str
    groups: int
    replies: int
    rows: int
    """Rows that replies are drawn from; 0 if the file's rows have several replies of their own."""

    @property
    def label(self) -> str:
        """In words."""
        source = (
            f"prompts of {self.data}, two replies of the row and {self.replies - 2} drawn from other rows"
            if self.rows
            else f"{self.data}, its own replies"
        )
        return f"{self.groups} groups of {self.replies} replies; {source}"


CELLS: Mapping[str, Cell] = {
    "labels-of-4": Cell(data="hh_helpful.train", groups=24, replies=4, rows=64),
    "best-of-8": Cell(data="hh_helpful.train", groups=12, replies=8, rows=64),
    "best-of-64": Cell(data="hh_helpful.train", groups=2, replies=64, rows=64),
    "own-replies-8": Cell(data="kwise.alpaca_eval_v2.train", groups=6, replies=8, rows=0),
}
VARIANTS: Mapping[str, str] = {
    "padded": "transformers' classifier, one padded batch a prompt (at most --padded-rows replies at a time)",
    "packed": "rewardlab's scoring path without sharing: packed rows, each reply with its own prompt",
    "ours": "rewardlab's scoring path: packed rows, each prompt once",
}
COMPARED = (("padded", "ours"), ("packed", "ours"), ("padded", "packed"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a variant's process is given."""

    folder: str
    config: RewardTrainerConfig
    groups: Sequence[TokenGroup]
    pad: int
    threads: int
    variant: str
    padded_rows: int
    scores_file: str
    head: np.ndarray
    """[1, W], so that all variants score with the same one."""

    @property
    def half(self) -> bool:
        """Whether the arithmetic is bf16."""
        return self.config.model.precision == "bf16"


def run(session: Session, job: Job) -> None:
    """A variant of lockstep; its last scores lie in `scores_file`."""
    torch.set_num_threads(job.threads)
    ours.quiet()
    score = padded_scores(job) if job.variant == "padded" else our_scores(job)
    while session.wait():
        found, work = score()
        session.done(work.facts())
        np.save(job.scores_file, np.concatenate(found))


def our_scores(job: Job) -> Any:
    """rewardlab's one scoring path."""
    model = ours.build_model(job.config, sharing=job.variant != "packed", device=CPU)
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(job.head))
    work = flops.useful_work(job.groups, sharing=job.variant != "packed")

    def score() -> tuple[list[np.ndarray], flops.Work]:
        return score_groups(model, job.groups, budget=job.config.run.micro_token_budget), work

    return score


def padded_scores(job: Job) -> Any:
    """What a user of transformers writes."""
    model = peers.load_classifier(job.folder, pad=job.pad).eval()
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(job.head))

    def score() -> tuple[list[np.ndarray], flops.Work]:
        found, work = [], flops.Work()
        with torch.no_grad():
            for group in job.groups:
                rows = [group.conversation(n) for n in range(group.num_replies)]
                for start in range(0, len(rows), job.padded_rows):
                    batch = peers.pad_rows(rows[start : start + job.padded_rows], job.pad)
                    work += flops.padded_work(*batch["input_ids"].shape)
                    found.append(peers.scores(model, batch, half=job.half).numpy())
        return found, work

    return score


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=["best-of-8", "best-of-64"], choices=list(CELLS))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of ours and of packed")
    parser.add_argument("--also", nargs="+", action="append", default=[], metavar=("LABEL", "NAME=VALUE"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--data", default=None, help=f"in place of the cell's; {workload.GENERATED} needs no file")
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--groups", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before the first that counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--padded-rows", type=int, default=8, help="replies of a padded batch")
    parser.add_argument("--in-process", action="store_true", help="threads, no processes: for trials, not for numbers")
    parser.add_argument("--peak-seconds", type=float, default=0.4, help="for each matrix product of the peak")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    if options.precision == "bf16" and not machine.has_bf16(CPU):
        raise SystemExit("this processor has no bf16 arithmetic; use --precision fp32.")
    for name in options.cells:
        changed = {key: getattr(options, key) for key in ("data", "groups") if getattr(options, key) is not None}
        run_cell(name, replace(CELLS[name], **changed), options)
    return 0


def groups_of(cell: Cell, folder: str, options: argparse.Namespace) -> tuple[workload.Rows, list[TokenGroup]]:
    """The groups of a cell and the rows that they are made of."""
    rows = workload.read_rows(cell.data, cell.rows or cell.groups, folder=options.data_folder)
    groups = workload.to_groups(rows, folder, max_seq_len=options.max_seq_len)
    if cell.rows:
        return rows, workload.best_of(groups, count=cell.groups, replies=cell.replies, seed=0)
    short = [group.num_replies for group in groups if group.num_replies < cell.replies]
    if short:
        raise SystemExit(f"{cell.data}: a row has {short[0]} replies, wanted {cell.replies}.")
    cut = [replace(group, suffixes=group.suffixes[: cell.replies], comparisons=(), ranking=None) for group in groups]
    return rows, cut


def run_cell(name: str, cell: Cell, options: argparse.Namespace) -> None:
    """Measure one cell and write its result."""
    print(f"{name}: {cell.label}", flush=True)
    load = machine.load_average()
    fixed = {"max_seq_len": options.max_seq_len, "precision": options.precision}
    chosen = ours.parse_settings(options.set)
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        rows, groups = groups_of(cell, folder, options)
        config = ours.config_of(folder)
        shape = flops.shape_of(config)
        dtype = machine.PRECISION[options.precision]
        peak = machine.matmul_peak(shape.products, dtype, CPU, rows=PEAK_ROWS, seconds=options.peak_seconds)
        job = Job(
            folder=folder,
            config=ours.settings(folder, fixed | chosen),
            groups=groups,
            pad=workload.pad_token(folder),
            threads=options.threads,
            variant="ours",
            padded_rows=options.padded_rows,
            scores_file="",
            head=np.random.default_rng(0)
            .normal(size=(1, config.hidden_size), scale=config.hidden_size**-0.5)
            .astype("f4"),
        )
        jobs = {label: replace(job, variant=label) for label in VARIANTS}
        for label, *more in options.also:
            jobs[label] = replace(job, config=ours.settings(folder, fixed | chosen | ours.parse_settings(more)))
        jobs = {
            label: replace(one, scores_file=str(Path(work) / f"{n}.npy")) for n, (label, one) in enumerate(jobs.items())
        }
        workers: dict[str, Worker] = {}
        for label, one in jobs.items():
            workers[label] = Worker(label, run, one, processes=not options.in_process)
            workers[label].ready()
        found = timing.interleave(
            {label: worker.step for label, worker in workers.items()}, repeats=options.repeats, warmup=options.warmup
        )
        memory = {label: worker.close().get("peak_gb") for label, worker in workers.items()}
        scores = {label: np.load(one.scores_file) for label, one in jobs.items()}
    peak = machine.better(
        peak, machine.matmul_peak(shape.products, dtype, CPU, rows=PEAK_ROWS, seconds=options.peak_seconds)
    )
    measured = {
        label: variant_facts(timing.Timing.of(samples), cell, shape, peak, scores[label] - scores["padded"])
        | {"peak_memory_gb": memory[label]}
        for label, samples in found.samples.items()
    }
    write_cell(name, cell, options, rows, found, measured, peak, load)


def variant_facts(
    time: timing.Timing, cell: Cell, shape: flops.Shape, peak: machine.Peak, apart: np.ndarray
) -> dict[str, Any]:
    """Rates of a variant, and how far its scores are from the padded batch's."""
    computed = flops.Work.of(time.facts)
    rate = shape.score_flops(computed) / time.wall / 1e9
    return {
        **asdict(time),
        "replies_per_second": cell.groups * cell.replies / time.wall,
        "tokens_per_group": computed.tokens / cell.groups,
        "gflops_computed": rate,
        "share_of_peak": rate / peak.gflops,
        "max_difference": float(np.abs(apart).max()),
        "mean_difference": float(np.abs(apart).mean()),
    }


def write_cell(
    name: str,
    cell: Cell,
    options: argparse.Namespace,
    rows: workload.Rows,
    found: timing.Interleaved,
    measured: Mapping[str, Mapping[str, Any]],
    peak: machine.Peak,
    load: float,
) -> None:
    """The page and its data."""
    pairs = [*COMPARED, *((label, "ours") for label in measured if label not in VARIANTS)]
    ratios, tokens = results.compare(
        pairs, found.samples, {name: facts["tokens_per_group"] for name, facts in measured.items()}
    )
    show = results.show
    page = [
        f"# Scoring: {cell.label}",
        "",
        f"{Path(options.model).name}{f', its first {options.layers} layers' if options.layers else ''}, "
        f"{options.precision}; {found.rounds} interleaved rounds, each variant in its own process, one working at a "
        f"time; medians, the first {options.warmup} left out.",
        "",
        results.ratio_rows(ratios, tokens),
        results.table(
            [
                "variant",
                "seconds (range)",
                "CPU-s",
                "replies/s",
                "tokens a group",
                "GF/s computed",
                "of matmul peak",
                "largest score difference",
                "mean",
                "peak memory, GB",
            ],
            [
                [
                    label,
                    results.spread(facts),
                    show(facts["cpu"]),
                    show(facts["replies_per_second"]),
                    show(facts["tokens_per_group"]),
                    show(facts["gflops_computed"]),
                    f"{facts['share_of_peak']:.0%}",
                    f"{facts['max_difference']:.1e}",
                    f"{facts['mean_difference']:.1e}",
                    show(facts["peak_memory_gb"]),
                ]
                for label, facts in measured.items()
            ],
        ),
        *(f"- `{label}`: {text}." for label, text in VARIANTS.items()),
        *(f"- `{label}`: ours with {' '.join(chosen)}." for label, *chosen in options.also),
        *([f"- `ours` and `packed` with {' '.join(options.set)}."] if options.set else []),
        "",
        "Score differences are to the padded batch; all variants have the same random head. Replies drawn from other "
        "rows vary more in length than samples of one model would, which costs the padded batch more."
        if cell.rows
        else "Score differences are to the padded batch; all variants have the same random head.",
        "",
        f"Rows: the first {rows.rows} of {rows.name}, {rows.fixed_by}. Matmul peak of this run: "
        f"{show(peak.gflops)} GF/s ({peak.kernel}, {'×'.join(map(str, peak.shape))}, {options.precision}).",
        "",
    ]
    results.write(
        "score_cpu",
        name if options.precision == "fp32" else f"{name}-{options.precision}",
        page=page,
        data={
            "cell": asdict(cell),
            "rows_sha256": rows.sha256,
            "ratios": {label: asdict(value) for label, value in ratios.items()},
            "token_ratios": tokens,
            "variants": measured,
            "samples": {label: [asdict(one) for one in samples] for label, samples in found.samples.items()},
            "matmul_peak": asdict(peak),
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )


if __name__ == "__main__":
    sys.exit(main())
