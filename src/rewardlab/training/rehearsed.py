"""What a run would take, by a rehearsal, and the text of it that `rewardlab train --dry-run` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rewardlab.core.terminal import number_of, visible
from rewardlab.report.sections import duration
from rewardlab.report.tables import report_width
from rewardlab.training.by_heart import ByHeart
from rewardlab.training.cost.throughput import GIB
from rewardlab.training.settings.config import RewardTrainerConfig

GROWTH_ON_CPU: Final = (1.2, 1.4)
"""Peak memory of runs of 20 steps over that of their dry runs, on a CPU: in float32 and, the second, in bf16."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal measured, and what the run would take."""

    config: RewardTrainerConfig
    """The settings of the run, with every default decided."""
    preferences: Mapping[str, int]
    """`training`, `training rows evaluated`, `evaluation`, `test` -> preferences."""
    num_steps: int
    """Of the run."""
    steps_taken: int
    train_seconds: tuple[float, float] | None
    """Of all training steps, by the fastest and by the slowest of the timed steps, for each token; None where no token
    is computed."""
    steps_timed: int
    by_heart: ByHeart | None
    """How a few preferences alone were learned; None if none of those trained on can be."""
    evaluations: int
    eval_seconds: float | None
    """Of all evaluations and of the tests before and after, by one evaluation; None without any."""
    peak_bytes: int
    """The most memory: of tensors on a GPU, else of the process."""
    on_cpu: bool
    """Whether it trains on the CPU, where memory grows after the first steps."""
    memory_bytes: int | None
    """What could be had, that already in use included; None where the system does not say."""
    model_bytes: int
    """Of a saved model."""
    checkpoint_bytes: int
    """Of what resuming needs; 0 without checkpoints."""
    disk_bytes: int
    """The most that models and checkpoints of the run take at a time."""
    free_disk_bytes: int


def dry_run_report(tried: Rehearsal) -> str:
    """Return what was tried, and what the run would take: a line for data, time, memory and disk."""
    width = report_width()
    said = (
        f"Dry run: all from the data to the saved model was gone through, with {tried.steps_taken} of "
        f"{number_of(tried.num_steps, 'step')}; nothing is kept. The whole run:"
    )
    lines = [textwrap.fill(said, width=width), ""]
    named = [f"{count:,} {name}" for name, count in tried.preferences.items() if count]
    for name, text in {
        "preferences": ", ".join(named),
        "training": _training(tried),
        "learning": _learning(tried),
        "evaluation": _evaluation(tried),
        "memory": _memory(tried),
        "disk": _disk(tried),
    }.items():
        lines.append(
            textwrap.fill(f"{name:<13}{text}", width=width, subsequent_indent=" " * 13, break_on_hyphens=False)
        )
    lines += ["", "The same command without --dry-run begins it."]
    return "\n".join(lines)


def _training(tried: Rehearsal) -> str:
    steps = number_of(tried.num_steps, "step")
    if tried.train_seconds is None:
        return f"{steps} that look states up, next to nothing; computing the states before them is not measured"
    low, high = (duration(seconds) for seconds in tried.train_seconds)
    if tried.steps_timed == 1:
        prepared = ", which prepared the kernels too" if tried.steps_taken == 1 else ""
        return f"{steps}, about {high} by the pace of one{prepared}"
    between = low if low == high else f"{low} to {high}"
    return f"{steps}, {between} by the fastest and the slowest of {tried.steps_timed} steps"


def _learning(tried: Rehearsal) -> str:
    if tried.by_heart is None:
        return "not tried: none of the preferences seen says which of two different replies is better"
    return tried.by_heart.line(tried.config.learning_rate)


def _evaluation(tried: Rehearsal) -> str:
    tests = ", and the test data twice" if tried.preferences.get("test") else ""
    if not tried.evaluations:
        return f"none without evaluation data{tests and tests + ', not timed here'}"
    seconds = "" if tried.eval_seconds is None else f": about {duration(tried.eval_seconds)} by the pace of one"
    return f"{number_of(tried.evaluations, 'time')}, the saved model once more{tests}{seconds}"


def _memory(tried: Rehearsal) -> str:
    of = "" if tried.memory_bytes is None else f", of {tried.memory_bytes / GIB:.1f} GiB that could be had"
    if not tried.on_cpu:
        return f"{tried.peak_bytes / GIB:.1f} GiB at the peak{of}"
    low, high = GROWTH_ON_CPU
    return (
        f"{tried.peak_bytes / GIB:.1f} GiB at the peak of these steps{of}. On a CPU it grows: 20 steps of two runs "
        f"took {low} and {high} times as much"
    )


def _disk(tried: Rehearsal) -> str:
    kept = f"a model takes {_size(tried.model_bytes)}"
    if tried.checkpoint_bytes:
        kept += f", a checkpoint {_size(tried.checkpoint_bytes)}"
    where = visible(str(tried.config.run.output_dir))
    text = f"at most {_size(tried.disk_bytes)} in {where} ({kept}); {_size(tried.free_disk_bytes)} are free"
    if tried.disk_bytes > tried.free_disk_bytes:
        text += ". That is too little: make room, or lower --save-total-limit or --checkpoint-limit"
    return text


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
