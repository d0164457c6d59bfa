"""Scoring the rollouts of a step of GRPO: by `RewardScorer` in this process and over HTTP, and as TRL does it.

    scripts/bench rl_scorer
    scripts/bench rl_scorer --model tiny-llama --data generated

Sixteen prompts with eight replies each, which come shuffled, as the ways below are given them:

- grouped: one call of a `RewardScorer`, which computes each prompt once;
- tasks: a call for each reply, all at the same time, as loops do that reward each rollout when it is done;
- one by one: a call for each reply, one after the other;
- server: grouped, over HTTP from `rewardlab serve` on the same machine;
- TRL: what `reward_funcs=FOLDER` makes of the same rollouts, in one padded batch.

Ends with an error if a score is further from the grouped one than float32 explains.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import engine_process, machine, ours, results, timing, workload
from harness.command import trained
from harness.trl_rewards import rewards_of, trainer_with
from rewardlab.rl import RewardScorer

TOLERANCE = 2e-4
"""In float32, in units of max(1, |score|)."""
COMPARED = (("TRL", "grouped"), ("one by one", "grouped"), ("tasks", "grouped"), ("server", "grouped"))
Talk = list[dict[str, str]]


def rollouts_of(rows: workload.Rows, prompts: int, replies: int, seed: int) -> list[Talk]:
    """The first rows' prompts with their own two replies and others drawn from all rows, in an order that is drawn
    too."""
    generator = np.random.default_rng(seed)
    preferences = rows.preferences
    found = []
    for number, preference in enumerate(preferences[:prompts]):
        others = [n for n in generator.permutation(len(preferences)) if n != number][: replies - 2]
        turns = [*preference.replies[:2], *(preferences[n].replies[0] for n in others)]
        found += [[message.as_dict() for message in (*preference.prompt, *reply)] for reply in turns]
    return [found[n] for n in generator.permutation(len(found))]


def ways(scorer: RewardScorer, there: RewardScorer, talks: Sequence[Talk]) -> dict[str, Callable[[], Any]]:
    """How rewardlab is asked, by name: each a coroutine function of nothing."""

    async def tasks() -> list[float]:
        return [score for (score,) in await asyncio.gather(*(scorer.score([talk]) for talk in talks))]

    async def one_by_one() -> list[float]:
        return [score for talk in talks for score in await scorer.score([talk])]

    return {
        "grouped": lambda: scorer.score(talks),
        "tasks": tasks,
        "one by one": one_by_one,
        "server": lambda: there.score(talks),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare, write. Returns 1 if scores differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what the reward model is trained from")
    parser.add_argument("--data", default="hh_helpful.train", help=f"or {workload.GENERATED}, which needs no file")
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-seq-len", type=int, default=2048)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    rows = workload.read_rows(options.data, options.prompts + options.replies, folder=options.data_folder)
    talks = rollouts_of(rows, options.prompts, options.replies, seed=0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        work = Path(folder)
        _, model = trained(options.model, work, steps=1, max_seq_len=options.max_seq_len)
        served = running.enter_context(
            engine_process.ours(str(model), precision="fp32", log=work / "server.log", threads=options.threads)
        )
        trainer = trainer_with(str(model), talks[0][:-1], work, half=False)
        found, scores = measure(str(model), served.url, talks, trainer, options)
    differences = {name: _apart(scores["grouped"], own) for name, own in scores.items()}
    write(found, differences, rows, options, (load, machine.load_average()))
    wrong = {name: apart for name, apart in differences.items() if apart > TOLERANCE}
    if wrong:
        print(f"scores differ by more than rounding: {wrong}", file=sys.stderr)
    return int(bool(wrong))


def measure(
    folder: str, url: str, talks: Sequence[Talk], trainer: Any, options: argparse.Namespace
) -> tuple[timing.Interleaved, dict[str, list[float]]]:
    """Samples of every way, and its last scores."""
    scores: dict[str, list[float]] = {}
    with asyncio.Runner() as runner:
        scorer, there = RewardScorer(folder), RewardScorer(url)
        calls = {
            name: (lambda way=way: runner.run(_awaited(way))) for name, way in ways(scorer, there, talks).items()
        } | {"TRL": lambda: rewards_of(trainer, talks)}

        def stepper(name: str) -> timing.Stepper:
            def step() -> timing.Sample:
                def work() -> Mapping[str, float]:
                    scores[name] = calls[name]()
                    return {}

                return timing.timed(work)

            return step

        found = timing.interleave({name: stepper(name) for name in calls}, repeats=options.repeats)
        runner.run(scorer.aclose())
        runner.run(there.aclose())
    return found, scores


async def _awaited(way: Callable[[], Any]) -> list[float]:
    return list(await way())


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    a, b = np.array(one), np.array(other)
    return float((np.abs(a - b) / np.maximum(1, np.abs(a))).max())


def write(
    found: timing.Interleaved,
    differences: Mapping[str, float],
    rows: workload.Rows,
    options: argparse.Namespace,
    load: tuple[float, float],
) -> None:
    """The page and its data."""
    count = options.prompts * options.replies
    times = {name: timing.Timing.of(samples) for name, samples in found.samples.items()}
    ratios, _ = results.compare(COMPARED, found.samples, dict.fromkeys(times, 1.0))
    show = results.show
    page = [
        f"# Rewards of a step: {options.prompts} prompts with {options.replies} replies each",
        "",
        f"{Path(options.model).name}, float32; {found.rounds} interleaved rounds, medians, the first left out.",
        "",
        results.table(
            ["grouped is faster by", "wall (median)", "rounds, low to high"],
            [[name, f"**{show(one.value)}**", f"{show(one.low)} to {show(one.high)}"] for name, one in ratios.items()],
        ),
        results.table(
            ["way", "seconds (range)", "replies/s", "largest score difference"],
            [
                [name, results.spread(asdict(time)), show(count / time.wall), f"{differences[name]:.1e}"]
                for name, time in times.items()
            ],
        ),
        "Differences are to the grouped scores, in units of max(1, |score|). The server computes in a process of its "
        "own on the same cores. Replies are drawn from other rows, and vary more in length than samples of one policy.",
        "",
        f"Rows: the first {rows.rows} of {rows.name}, {rows.fixed_by}.",
        "",
    ]
    results.write(
        "rl_scorer",
        "all",
        page=page,
        data={
            "ratios": {label: asdict(value) for label, value in ratios.items()},
            "ways": {name: asdict(time) for name, time in times.items()},
            "differences": dict(differences),
            "samples": {label: [asdict(one) for one in samples] for label, samples in found.samples.items()},
        },
        options=options,
        device=torch.device("cpu"),
        load=load,
    )


if __name__ == "__main__":
    sys.exit(main())
