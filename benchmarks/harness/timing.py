"""Interleaved repeats: every round runs every variant once, so that whatever the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed unit of work."""

    wall: float
    """Seconds on the wall."""
    cpu: float
    """Seconds of the process's threads, the kernel's work for them included."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the work says of itself: tokens computed, say."""


Stepper = Callable[[], Sample]


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """Samples of every variant, the warm-up left out, and what could not run."""

    samples: Mapping[str, Sequence[Sample]]
    failed: Mapping[str, str]
    rounds: int


def timed(work: Callable[[], Mapping[str, float]], *, wait: Callable[[], None] = lambda: None) -> Sample:
    """One sample; `wait` returns when the device has done what it was told."""
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    facts = work()
    wait()
    return Sample(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, facts=facts)


def interleave(
    steppers: Mapping[str, Stepper],
    *,
    repeats: int,
    warmup: int = 1,
    until: float | None = None,
    tolerate: tuple[type[Exception], ...] = (),
    say: Callable[[str], None] = print,
) -> Interleaved:
    """Run all variants `warmup` + `repeats` times in turn, another one first in every round.

    `until` (of time.monotonic) ends it after the round in which it passes, at least one round being measured. A
    variant that raises one of `tolerate` is left out from then on.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in steppers}
    failed: dict[str, str] = {}
    rounds = 0
    for number in range(warmup + repeats):
        if rounds and until is not None and time.monotonic() > until:
            break
        names = list(steppers)
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            try:
                sample = steppers[name]()
            except tolerate as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                say(f"  {name}: {failed[name]}")
                continue
            if number >= warmup:
                samples[name].append(sample)
            label = "warm-up" if number < warmup else f"round {number - warmup + 1}/{repeats}"
            say(f"  {label:<10} {name:<10} {sample.wall:9.3f} s, {sample.cpu:9.3f} CPU-s")
        rounds += number >= warmup
    kept = {name: found for name, found in samples.items() if name not in failed}
    return Interleaved(samples=kept, failed=failed, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A variant's samples, summed up."""

    wall: float
    """Median of seconds."""
    wall_low: float
    wall_high: float
    cpu: float
    """Median of CPU seconds."""
    facts: Mapping[str, float]
    """Means."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Timing:
        """Of at least one sample."""
        walls = [sample.wall for sample in samples]
        names = samples[0].facts
        return cls(
            wall=statistics.median(walls),
            wall_low=min(walls),
            wall_high=max(walls),
            cpu=statistics.median(sample.cpu for sample in samples),
            facts={name: statistics.fmean(sample.facts[name] for sample in samples) for name in names},
        )


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times longer one variant takes than another."""

    value: float
    """Median over median, of wall seconds."""
    low: float
    """Smallest of the rounds, each against the same round."""
    high: float
    cpu: float
    """Median over median, of CPU seconds."""


def ratio(slow: Sequence[Sample], fast: Sequence[Sample]) -> Ratio:
    """`slow` over `fast`, round by round."""
    rounds = [a.wall / b.wall for a, b in zip(slow, fast, strict=True)]
    one, other = Timing.of(slow), Timing.of(fast)
    return Ratio(value=one.wall / other.wall, low=min(rounds), high=max(rounds), cpu=one.cpu / max(other.cpu, 1e-9))
