"""A training step on cores that other work uses too: threads that spin while they wait for each other, or sleep.

    scripts/bench shared_cores

OpenMP's threads meet at the end of every operation. By default the first to arrive spins, which is quickest where each
has a core of its own. Where other work takes a core, the one that spins holds up what it waits for. With
OMP_WAIT_POLICY=passive, which must be set before Python starts, it sleeps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from harness import machine, ours, results, timing, workload
from harness.lockstep import Session, Worker
from rewardlab.core.types import TokenGroup
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
POLICY: Final = "OMP_WAIT_POLICY"
WAITS: Final[Mapping[str, str | None]] = {"spins": None, "sleeps": "passive"}
"""How threads wait -> the value of `POLICY`; None leaves it unset."""
BUSY: Final = "while True: pass"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process that trains is given."""

    config: RewardTrainerConfig
    groups: Sequence[TokenGroup]
    threads: int


def run_arm(session: Session, job: Job) -> None:
    """An arm of lockstep."""
    torch.set_num_threads(job.threads)
    trainer = ours.build_trainer(job.config, job.groups, sharing=True, device=CPU)
    session.optimizer, session.keeps_memory = trainer.optimizer, True
    step = ours.step_of(trainer)
    while session.wait():
        session.done(step())


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that each keep one core busy."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def worker_of(name: str, policy: str | None, job: Job) -> Worker:
    """A process that trains under this policy."""
    before = os.environ.pop(POLICY, None)
    try:
        if policy is not None:
            os.environ[POLICY] = policy
        return Worker(name, run_arm, job)
    finally:
        os.environ.pop(POLICY, None)
        if before is not None:
            os.environ[POLICY] = before


def beside(worker: Worker, count: int) -> timing.Sample:
    """A step beside so many busy processes."""
    with busy(count):
        return worker.step()


def label(wait: str, count: int) -> str:
    """What a variant is called."""
    return f"{wait}, {'alone' if not count else f'beside {count} busy'}"


def page_of(found: timing.Interleaved, counts: Sequence[int], what: str) -> list[str]:
    """The page."""
    rows = []
    for count in counts:
        spins, sleeps = (found.samples[label(wait, count)] for wait in WAITS)
        ratio = timing.ratio(spins, sleeps)
        rows.append(
            [
                "none" if not count else str(count),
                *(f"{timing.Timing.of(samples).wall:.2f}" for samples in (spins, sleeps)),
                f"**{ratio.value:.2f}** ({ratio.low:.2f} to {ratio.high:.2f})",
            ]
        )
    head = ["busy processes beside it", "threads spin, s a step", "threads sleep, s a step", "ratio"]
    return [
        "# A training step on cores that other work uses too",
        "",
        f"{what}. Medians of {found.rounds} rounds, interleaved; the ratio is of medians, with the smallest and the "
        f"largest of single rounds. Threads spin by default and sleep with `{POLICY}=passive`.",
        "",
        results.table(head, rows),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="the first ones; 0 for all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="processes that each keep a core busy")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    ours.add_step_flags(parser, pairs=8)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers or None)
        data = workload.read_rows(options.data, options.pairs, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        job = Job(config=ours.settings(folder, ours.step_settings(options)), groups=groups, threads=options.threads)
        workers = {wait: worker_of(wait, policy, job) for wait, policy in WAITS.items()}
        for worker in workers.values():
            worker.ready()
        steppers = {
            label(wait, count): partial(beside, worker, count)
            for count in options.busy
            for wait, worker in workers.items()
        }
        found = timing.interleave(steppers, repeats=options.repeats)
        for worker in workers.values():
            worker.close()
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    name = Path(options.model).name
    what = (
        f"{name}, {depth}, all weights, {options.precision}, {options.threads} threads, {options.pairs} pairs of "
        f"{data.name}"
    )
    results.write(
        "shared_cores",
        f"{name}.{options.precision}",
        page=page_of(found, options.busy, what),
        data={
            "seconds": {name: [sample.wall for sample in samples] for name, samples in found.samples.items()},
            "cpu_seconds": {name: [sample.cpu for sample in samples] for name, samples in found.samples.items()},
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
