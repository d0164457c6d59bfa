"""A training step beside TRL's and beside a length-sorted loop, on CPU: time, tokens, FLOPs, memory."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness import flops, machine, ours, peers, results, timing, workload
from harness.lockstep import Session, Worker
from rewardlab.core.types import TokenGroup
from rewardlab.training.cost.memory import resident
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
PEAK_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained on what."""

    data: str
    pairs: int
    layers: int | None
    """None for all."""
    repeats: int
    lora: bool
    precision: str
    max_seq_len: int = 1024
    sha256: str | None = None
    """Of the rows, which recorded results are of."""

    @property
    def label(self) -> str:
        """In words."""
        depth = "all layers" if self.layers is None else f"the first {self.layers} layers"
        kind = "LoRA" if self.lora else "full fine-tuning"
        return f"{kind}, {self.precision}, {depth}, {self.pairs} pairs of {self.data}"


HEADLINE = Cell(
    data="hh_helpful.train",
    pairs=64,
    layers=None,
    repeats=5,
    lora=False,
    precision="fp32",
    sha256="93488caebc8f366f3710929739a847ec13ec7225d2b8941c2cbb25b98f10ad75",
)
SMALL = replace(
    HEADLINE,
    pairs=16,
    layers=8,
    repeats=3,
    sha256="0bffb73012a38a3121076634746132b12e245ec52c0e88687ee30f43223defb5",
)
QA = replace(  # at 1024 tokens half of these prompts would be cut, each reply's at another place
    SMALL,
    data="qa_feedback.train",
    max_seq_len=2048,
    sha256="c7752d32c9cf08fc654096ea78a256248db770a266823db6e656f0b20e0e90cb",
)
ALPACA = replace(
    SMALL,
    data="alpaca_eval_v1.train",
    sha256="c33b29a54941262d9b6d3eff2f582f95b7e23093fef14b1ed52610166fe4b0d3",
)
CELLS: Mapping[str, Cell] = {
    "headline-fp32": HEADLINE,
    "headline-bf16": replace(HEADLINE, precision="bf16"),
    "hh-lora": replace(SMALL, lora=True),
    "qa-full": QA,
    "qa-lora": replace(QA, lora=True),
    "alpaca-full": ALPACA,
    "alpaca-lora": replace(ALPACA, lora=True),
    "hh-full-bf16": replace(SMALL, precision="bf16"),
    "hh-lora-bf16": replace(SMALL, lora=True, precision="bf16"),
    "qa-full-bf16": replace(QA, precision="bf16"),
    "qa-lora-bf16": replace(QA, lora=True, precision="bf16"),
    # A step of the quickstart: short rows, made on the spot.
    "quickstart-bf16": replace(HEADLINE, data=workload.GENERATED, pairs=16, precision="bf16", sha256=None),
}
VARIANTS: Mapping[str, str] = {
    "trl": "TRL's RewardTrainer, 8 pairs a device, gradients accumulated over the step, its defaults otherwise "
    "(gradient checkpointing, random order)",
    "trl-best": "the same without gradient checkpointing and grouped by length",
    "sorted": "a plain loop over padded micro-batches of pairs sorted by length",
    "packed": "rewardlab without sharing prompts: packed rows, each reply with its own prompt",
    "ours": "rewardlab: packed rows, each prompt once",
}
COMPARED = (("sorted", "ours"), ("trl-best", "ours"), ("trl", "ours"), ("packed", "ours"), ("sorted", "packed"))
"""(slower, faster): the ratios of the page."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a variant's process is given."""

    folder: str
    config: RewardTrainerConfig
    groups: Sequence[TokenGroup]
    pad: int
    threads: int
    sharing: bool = True
    best: bool = False
    per_device: int
    sorted_budget: int
    quiet: bool
    keep_memory: bool = False
    warm: bool = False

    @property
    def half(self) -> bool:
        """Whether the arithmetic is bf16."""
        return self.config.model.precision == "bf16"


def run_ours(session: Session, job: Job) -> None:
    """A variant of lockstep: RewardTrainer as a run builds it."""
    torch.set_num_threads(job.threads)
    trainer = ours.build_trainer(job.config, job.groups, sharing=job.sharing, device=CPU)
    session.optimizer, session.keeps_memory = trainer.optimizer, job.keep_memory
    step = ours.step_of(trainer)
    while session.wait():
        if job.warm:
            step()
            session.start()
        facts = dict(step())
        if (now := resident()) is not None:
            facts["resident_gb"] = now / 2**30
        session.done(facts)


def run_peer(session: Session, job: Job) -> None:
    """A variant of lockstep: the sorted loop."""
    torch.set_num_threads(job.threads)
    ours.quiet()
    peers.run_sorted(session, job)


def run_trl(session: Session, job: Job) -> None:
    """A variant of lockstep: TRL."""
    torch.set_num_threads(job.threads)
    ours.quiet()
    peers.run_trl(session, job)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=["headline-fp32"], choices=list(CELLS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of ours and of packed")
    parser.add_argument(
        "--also",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "NAME=VALUE"),
        help="another variant of ours: its label and its settings, on top of --set; may be repeated",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", default=None, help=f"in place of the cell's; {workload.GENERATED} needs no file")
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--any-rows", action="store_true", help="whatever their hash")
    parser.add_argument("--pairs", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before the first that counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-seq-len", type=int, default=None)
    parser.add_argument("--per-device", type=int, default=8, help="pairs of TRL's micro-batch")
    parser.add_argument(
        "--sorted-budget",
        type=int,
        default=None,
        help="padded tokens of the sorted loop's micro-batch; by default the micro-token-budget of ours",
    )
    parser.add_argument(
        "--keep-memory",
        nargs="+",
        default=[],
        metavar="LABEL",
        help="variants of ours that keep freed memory between turns, as in a run; others give it back, to fit together",
    )
    parser.add_argument(
        "--warm",
        nargs="+",
        default=[],
        metavar="LABEL",
        help="variants of ours that take a step which is not counted before each that is, to have their memory again",
    )
    parser.add_argument("--in-process", action="store_true", help="threads, no processes: for trials, not for numbers")
    parser.add_argument("--peak-seconds", type=float, default=0.4, help="for each matrix product of the peak")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    for name in options.cells:
        if CELLS[name].precision == "bf16" and not machine.has_bf16(CPU):
            print(f"{name}: left out, since this processor has no bf16 arithmetic")
            results.write(
                "train_cpu",
                name,
                page=[f"# {name}", "", "Not measured: this processor has no bf16 arithmetic (avx512_bf16 or AMX).", ""],
                data={"measured": False},
                options=options,
                device=CPU,
                load=(machine.load_average(),) * 2,
            )
            continue
        run_cell(name, cell_of(name, options), options)
    return 0


def cell_of(name: str, options: argparse.Namespace) -> Cell:
    """The cell with what the flags say."""
    given = {key: getattr(options, key) for key in ("data", "pairs", "layers", "repeats", "max_seq_len")}
    changed = {key: value for key, value in given.items() if value is not None}
    cell = replace(CELLS[name], **changed)
    same_rows = (cell.data, cell.pairs) == (CELLS[name].data, CELLS[name].pairs)
    return cell if same_rows and not options.any_rows else replace(cell, sha256=None)


def jobs_of(cell: Cell, folder: str, groups: Sequence[TokenGroup], options: argparse.Namespace) -> dict[str, tuple]:
    """(target, job) of every variant asked for that can run here."""
    fixed = {
        "batch_size": len(groups),
        "max_seq_len": cell.max_seq_len,
        "precision": cell.precision,
        "lora": cell.lora,
    }
    plain = ours.settings(folder, fixed)
    chosen = ours.parse_settings(options.set)
    mine = ours.settings(folder, fixed | chosen)
    job = Job(
        folder=folder,
        config=plain,
        groups=groups,
        pad=workload.pad_token(folder),
        threads=options.threads,
        per_device=options.per_device,
        sorted_budget=options.sorted_budget or mine.run.token_budget,
        quiet=not options.in_process,
    )
    job_of_ours = replace(job, config=mine)
    found = {
        "trl": (run_trl, job),
        "trl-best": (run_trl, replace(job, best=True)),
        "sorted": (run_peer, job),
        "packed": (run_ours, replace(job_of_ours, sharing=False)),
        "ours": (run_ours, job_of_ours),
    }
    found = {name: found[name] for name in VARIANTS if name in options.variants}
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed and left out: pip install 'rewardlab[bench]'")
        found = {name: value for name, value in found.items() if not name.startswith("trl")}
    for label, *more in options.also:
        extra = ours.settings(folder, fixed | chosen | ours.parse_settings(more))
        found[label] = (run_ours, replace(job_of_ours, config=extra))
    return {
        label: (target, replace(job, keep_memory=label in options.keep_memory, warm=label in options.warm))
        for label, (target, job) in found.items()
    }


def budget_of(target: Callable[..., None], job: Job) -> int | None:
    """Tokens that a micro-batch of a variant may have; None where pairs are counted."""
    if target is run_trl:
        return None
    return job.sorted_budget if target is run_peer else job.config.run.token_budget


def start(jobs: Mapping[str, tuple], *, processes: bool) -> tuple[dict[str, Worker], dict[str, Mapping[str, float]]]:
    """The workers, built one after the other, and their memory by then."""
    workers, built = {}, {}
    for label, (target, job) in jobs.items():
        workers[label] = Worker(label, target, job, processes=processes)
        built[label] = workers[label].ready()
    return workers, built


def run_cell(name: str, cell: Cell, options: argparse.Namespace) -> None:
    """Measure one cell and write its result."""
    print(f"{name}: {cell.label}", flush=True)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=cell.layers)
        rows = workload.read_rows(cell.data, cell.pairs, folder=options.data_folder, expected=cell.sha256)
        groups = workload.to_groups(rows, folder, max_seq_len=cell.max_seq_len)
        jobs = jobs_of(cell, folder, groups, options)
        any_job = next(iter(jobs.values()))[1]
        shape = flops.shape_of(ours.config_of(folder), lora_rank=any_job.config.model.lora_rank if cell.lora else 0)
        dtype = machine.PRECISION[cell.precision]
        peak = machine.matmul_peak(shape.products, dtype, CPU, rows=PEAK_ROWS, seconds=options.peak_seconds)
        workers, built = start(jobs, processes=not options.in_process)
        found = timing.interleave(
            {label: worker.step for label, worker in workers.items()}, repeats=cell.repeats, warmup=options.warmup
        )
        memory = {label: worker.close() for label, worker in workers.items()}
    peak = machine.better(
        peak, machine.matmul_peak(shape.products, dtype, CPU, rows=PEAK_ROWS, seconds=options.peak_seconds)
    )
    measured = {
        label: variant_facts(
            timing.Timing.of(samples),
            cell=cell,
            shape=shape,
            peak=peak,
            groups=groups,
            sharing=jobs[label][1].sharing and jobs[label][0] is run_ours,
        )
        | {"peak_memory_gb": memory[label].get("peak_gb"), "memory_built_gb": built[label].get("now_gb")}
        | {"micro_token_budget": budget_of(*jobs[label])}
        for label, samples in found.samples.items()
    }
    write_cell(name, cell, options, rows, found, measured, peak, load)


def variant_facts(
    time: timing.Timing,
    *,
    cell: Cell,
    shape: flops.Shape,
    peak: machine.Peak,
    groups: Sequence[TokenGroup],
    sharing: bool,
) -> dict[str, Any]:
    """Rates of a variant."""
    useful = flops.useful_work(groups, sharing=sharing)
    computed = flops.Work.of(time.facts)
    rate = shape.train_flops(useful) / time.wall / 1e9
    return {
        **asdict(time),
        "pairs_per_second": cell.pairs / time.wall,
        "tokens_computed": computed.tokens,
        "tokens_useful": useful.tokens,
        "gflops_useful": rate,
        "mfu": rate / peak.gflops,
        "gflops_computed": shape.train_flops(computed) / time.wall / 1e9,
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
    others = [label for label in measured if label not in VARIANTS]
    names = [*COMPARED, *((slow, label) for label in others for slow in ("sorted", "trl-best", "trl", "ours"))]
    ratios, tokens = results.compare(
        names, found.samples, {label: facts["tokens_computed"] for label, facts in measured.items()}
    )
    page = [
        f"# Training step: {cell.label}",
        "",
        f"{Path(options.model).name}; {found.rounds} interleaved rounds, each variant in its own process, one working "
        f"at a time; medians, the first {options.warmup} left out. A step is forward, backward, clipping and fused "
        f"AdamW over all {cell.pairs} pairs.",
        "",
        results.ratio_rows(ratios, tokens),
        results.table(
            [
                "variant",
                "seconds (range)",
                "CPU-s",
                "pairs/s",
                "tokens computed",
                "useful",
                "GF/s useful",
                "MFU",
                "GF/s computed",
                "peak memory, GB",
            ],
            [
                [
                    label,
                    results.spread(facts),
                    results.show(facts["cpu"]),
                    results.show(facts["pairs_per_second"]),
                    results.show(facts["tokens_computed"]),
                    results.show(facts["tokens_useful"]),
                    results.show(facts["gflops_useful"]),
                    f"{facts['mfu']:.0%}",
                    results.show(facts["gflops_computed"]),
                    results.show(facts["peak_memory_gb"]),
                ]
                for label, facts in measured.items()
            ],
        ),
        *(f"- `{label}`: {text}." for label, text in VARIANTS.items() if label in measured),
        *(f"- `{label}`: ours with {' '.join(chosen)}." for label, *chosen in options.also),
        *([f"- `ours` and `packed` with {' '.join(options.set)}."] if options.set else []),
        *(f"- `{label}` keeps its memory from round to round." for label in options.keep_memory),
        *(f"- `{label}` takes a step that is not counted before each that is." for label in options.warm),
        "",
        results.micro_batches(measured),
        "",
        f"Rows: the first {rows.rows} of {rows.name}, {rows.fixed_by}. MFU is useful model FLOPs (no padding, "
        f"nothing computed twice) over the best matrix product of this run, {results.show(peak.gflops)} GF/s "
        f"({peak.kernel}, {'×'.join(map(str, peak.shape))}, {cell.precision}).",
        "",
    ]
    results.write(
        "train_cpu",
        name,
        page=page,
        data={
            "measured": True,
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
