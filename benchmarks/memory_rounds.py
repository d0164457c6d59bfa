"""Peak memory of a run from step to step: whether it stays where it is, or grows.

    scripts/bench memory_rounds --layers 8 --precision fp32

Each arm trains in a process of its own, one step a round. The peak is that of the process up to the end of a round, so
it can only rise; a run whose memory is flat has the peak of its first steps at the end. Ends with an error if the peak
of a run over the same rows grows by more than a twentieth after its second step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness import machine, ours, results, workload
from harness.lockstep import Session, Worker
from rewardlab.core.types import TokenGroup
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
SAME, OTHER, SYSTEM, GIVEN = "same rows", "other rows", "other rows, system", "same rows, given back"
ARMS: Mapping[str, str] = {
    SAME: "a run over the same rows in every step, `--allocator keep`",
    OTHER: "other rows in every step, as in a run",
    SYSTEM: "the same with `--allocator system`",
    GIVEN: "the same rows, but between two steps freed memory and the optimiser's moments are given back to the "
    "system, as the timing benchmarks do to fit several trainers into one machine",
}
FROM = 2
"""The step after which nothing should grow: in the first the optimiser makes its state."""
MOST_GROWTH = 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an arm's process is given."""

    config: RewardTrainerConfig
    groups: Sequence[TokenGroup]
    threads: int
    gives_back: bool


def run_arm(session: Session, job: Job) -> None:
    """An arm of lockstep."""
    torch.set_num_threads(job.threads)
    trainer = ours.build_trainer(job.config, job.groups, sharing=True, device=CPU)
    session.optimizer, session.keeps_memory = trainer.optimizer, not job.gives_back
    step = ours.step_of(trainer)
    while session.wait():
        session.done({**step(), **machine.memory()})


def growth(peaks: Sequence[float]) -> float:
    """How much larger the last peak is than that after step FROM, as a part of it."""
    return peaks[-1] / peaks[FROM - 1] - 1


def measure(jobs: Mapping[str, Job], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Arm -> seconds, resident and peak memory of each round; the arms one after the other."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, job in jobs.items():
        worker = Worker(name, run_arm, job)
        worker.ready()
        samples = [worker.step() for _ in range(rounds)]
        worker.close()
        found[name] = {
            "seconds": [sample.wall for sample in samples],
            "now_gb": [sample.facts["now_gb"] for sample in samples],
            "peak_gb": [sample.facts["peak_gb"] for sample in samples],
            "tokens": [sample.facts["tokens"] for sample in samples],
        }
        print(f"{name}: {results.show(growth(found[name]['peak_gb']))}", flush=True)
    return found


def page_of(found: Mapping[str, Mapping[str, Sequence[float]]], options: argparse.Namespace, what: str) -> list[str]:
    """The page."""
    shown = sorted({1, FROM, 5, 10, options.rounds} & set(range(1, options.rounds + 1)))
    rows = [
        [
            f"`{name}`",
            *(f"{arm['peak_gb'][number - 1]:.2f}" for number in shown),
            f"**{growth(arm['peak_gb']):.1%}**",
            f"{sum(arm['seconds'][FROM:]) / max(1, len(arm['seconds'][FROM:])):.2f}",
        ]
        for name, arm in found.items()
    ]
    head = ["arm", *(f"after step {number}" for number in shown), f"growth from step {FROM}", "seconds a step"]
    return [
        "# Peak memory from step to step",
        "",
        f"{what}. Peak memory of the process in GB (2^30). One process an arm, one after the other, so seconds are "
        f"a hint only.",
        "",
        results.table(head, rows),
        *(f"- `{name}`: {text}." for name, text in ARMS.items() if name in found),
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every arm, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="the first ones; 0 for all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    ours.add_step_flags(parser, pairs=16)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    if options.rounds <= FROM:
        parser.error(f"--rounds {options.rounds}: more than {FROM}, after which growth is counted")
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    fixed = ours.step_settings(options)
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers or None)
        data = workload.read_rows(options.data, options.pairs * options.rounds, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        keep = ours.settings(folder, fixed)
        job = Job(config=keep, groups=groups, threads=options.threads, gives_back=False)
        same = replace(job, groups=groups[: options.pairs])
        jobs = {
            SAME: same,
            OTHER: job,
            SYSTEM: replace(job, config=ours.settings(folder, fixed | {"allocator": "system"})),
            GIVEN: replace(same, gives_back=True),
        }
        found = measure({name: jobs[name] for name in options.arms}, options.rounds)
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    what = (
        f"{Path(options.model).name}, {depth}, all weights, {options.precision}, {options.pairs} pairs of {data.name} "
        f"a step, {options.rounds} steps, {' '.join(options.set)}"
    )
    results.write(
        "memory_rounds",
        f"{data.name}.{options.layers or 'all'}-layers.{options.precision}",
        page=page_of(found, options, what),
        data={"arms": found},
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    grown = {name: growth(found[name]["peak_gb"]) for name in (SAME,) if name in found}
    for name, share in grown.items():
        if share > MOST_GROWTH:
            print(f"{name}: peak memory grew by {share:.1%}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
