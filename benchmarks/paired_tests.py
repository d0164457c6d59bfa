"""How often the tests of `rewardlab compare` are wrong, and right, on paired data whose truth is known.

    scripts/bench paired_tests --draws 2000

Every cell is a kind of data of one size, drawn so often: the size of the sign-flip test where two models are equally
good, its power at the difference that `compare` says it can show, the error of non-inferiority and TOST at their
margin, how often the set of models that may be the best holds the best one, and how often correlations with gold
scores lie in their interval.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, ndtri

from harness import results, simulated
from harness.simulated import IntArray
from harness.simulation import Rate, Simulation, outside, parser_of, rounded, summary
from rewardlab.analysis.agreement import CORRELATIONS, correlation
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.multiple import standings
from rewardlab.analysis.paired import equivalence, significance_of, significance_of_means
from rewardlab.analysis.power import POWER, smallest_difference
from rewardlab.analysis.signflip import attainable_size
from rewardlab.analysis.stats import cluster_totals

ALPHA = 0.05
SHAPES = ("2 each", "8 each", simulated.UNEVEN)
SLOW = 500
"""Most draws of a kind whose draws take long."""
ATTAINABLE = "attainable"
"""Name of the size that an exact test can have on the same data, which is below 5 % where few prompts differ."""


Cells = Iterator[Rate]
Kind = Callable[[int, np.random.Generator], Cells]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Paired changes of outcomes of one data set, with the keys of its prompts."""

    changes: FloatArray
    keys: tuple[str, ...]


def prompts_of(shape: str | int, prompts: int, generator: np.random.Generator) -> IntArray:
    """The number of the prompt of every comparison: `shape` as in harness/simulated.py, or 1 each."""
    sizes = np.ones(prompts, int) if shape == 1 else simulated.sizes(str(shape), 1, prompts, generator)[0]
    return np.repeat(np.arange(prompts), sizes)


def draw(
    index: IntArray, disagreeing: float, difference: float, generator: np.random.Generator, *, alike: float = 0.0
) -> Data:
    """Changes of −1, 0 and 1 with this mean; those of one prompt are correlated by about `alike`."""
    latent = math.sqrt(alike) * generator.normal(size=int(index[-1]) + 1)[index]
    latent = latent + math.sqrt(1 - alike) * generator.normal(size=len(index))
    low, high = ndtri((disagreeing - difference) / 2), -ndtri((disagreeing + difference) / 2)
    changes = np.where(latent < low, -1.0, np.where(latent > high, 1.0, 0.0))
    return Data(changes=changes, keys=tuple(map(str, index)))


def rejected(data: Data) -> bool:
    """Whether the sign-flip test finds a difference."""
    return significance_of(data.changes, data.keys).p <= ALPHA


def attainable(data: Data) -> float:
    """How often the exact test would reject if all signs were random, with the sizes of these totals."""
    return attainable_size(cluster_totals(data.changes[:, None], data.keys)[:, 0], alpha=ALPHA)


# --- kinds -----------------------------------------------------------------------------------------------------


def size_of_accuracy(draws: int, generator: np.random.Generator) -> Cells:
    """Two equally good models: how often a difference of accuracy is found."""
    for shape, prompts, alike in _shapes():
        index = prompts_of(shape, prompts, generator)
        for disagreeing in (0.1, 0.3):
            drawn = [draw(index, disagreeing, 0.0, generator, alike=alike) for _ in range(draws)]
            yield Rate(
                case=_name(shape, prompts, alike, disagreeing),
                rate=float(np.mean([rejected(data) for data in drawn])),
                low=0.03,
                high=0.07,
                beside={ATTAINABLE: float(np.mean([attainable(data) for data in drawn]))},
            )


def size_of_means(draws: int, generator: np.random.Generator) -> Cells:
    """Two equally good models: how often a difference of margin or NLL is found, by the shape of the differences."""
    shapes = {
        "normal": lambda size: generator.normal(size=size),
        "Student, 3 degrees of freedom": lambda size: generator.standard_t(3, size=size),
        "skewed to one side (exponential)": lambda size: generator.exponential(size=size) - 1,
        "NLL of models that fail in different ways": lambda size: _failing_apart(size, generator),
    }
    for name, values in shapes.items():
        for prompts in (15, 40, 200):
            keys = tuple(str(number // 2) for number in range(2 * prompts))
            found = [significance_of_means(values(2 * prompts), keys).p <= ALPHA for _ in range(min(draws, SLOW * 2))]
            yield Rate(case=f"{prompts} prompts, 2 each, {name}", rate=float(np.mean(found)), low=0.03, high=0.07)


def _failing_apart(size: int, generator: np.random.Generator) -> FloatArray:
    """Differences of NLL of an overconfident and an underconfident model, with logits 2.8 and 0.25 times the true ones.

    Both have an NLL of 0.441 (to 0.0002) where true logits have the sizes of normal values times 4.
    """
    logit = 4 * np.abs(generator.normal(size=size))
    signed = np.where(generator.random(size) < expit(logit), logit, -logit)
    found: FloatArray = np.logaddexp(0, -2.8 * signed) - np.logaddexp(0, -0.25 * signed)
    return found


def power(draws: int, generator: np.random.Generator) -> Cells:
    """A true difference of the size that `compare` names: how often it is found; wanted 80 %, give or take a tenth."""
    for shape, prompts, alike in _shapes():
        index = prompts_of(shape, prompts, generator)
        for disagreeing in (0.2, 0.4):
            named = [
                smallest_difference(data.changes, data.keys).value
                for data in (draw(index, disagreeing, 0.0, generator, alike=alike) for _ in range(25))
            ]
            known = [value for value in named if not math.isnan(value)]
            if len(known) < len(named) / 2 or (difference := float(np.median(known))) >= disagreeing:
                continue
            found = [rejected(draw(index, disagreeing, difference, generator, alike=alike)) for _ in range(draws)]
            yield Rate(
                case=f"{_name(shape, prompts, alike, disagreeing)}, difference {difference:.3f}",
                rate=float(np.mean(found)),
                low=0.9 * POWER,
                high=1.1 * POWER,
            )


def error_of_not_worse(draws: int, generator: np.random.Generator) -> Cells:
    """A model that is worse by exactly the margin: how often it is found to be less than the margin worse."""
    for shape, prompts, alike in _shapes():
        index = prompts_of(shape, prompts, generator)
        margin, found = 0.05, []
        for _ in range(min(draws, SLOW)):
            data = draw(index, 0.2, -margin, generator, alike=alike)
            found.append(equivalence("accuracy", data.changes, data.keys, margin=margin).is_not_worse)
        yield Rate(
            case=f"{_name(shape, prompts, alike, 0.2)}, margin {margin:g}", rate=float(np.mean(found)), low=0, high=0.07
        )


def error_of_tost(draws: int, generator: np.random.Generator) -> Cells:
    """Two models that are exactly the margin apart: how often they are found to be less than that apart."""
    for disagreeing, margin, prompts in ((0.1, 0.03, 1000), (0.2, 0.05, 1000), (0.3, 0.05, 2000)):
        found = []
        for _ in range(min(draws, SLOW)):
            data = draw(np.arange(prompts), disagreeing, margin, generator)
            found.append(equivalence("accuracy", data.changes, data.keys, margin=margin).is_equivalent)
        yield Rate(
            case=f"{_name(1, prompts, 0.0, disagreeing)}, margin {margin:g}",
            rate=float(np.mean(found)),
            low=0,
            high=0.07,
        )


def holds_the_best(draws: int, generator: np.random.Generator) -> Cells:
    """Several models on the same pairs: how often the set that may be the best holds the best, or all that are."""
    for shape, prompts in ((1, 150), (1, 1000), ("8 each", 40)):
        for models in (3, 8):
            for ahead in (0.0, 0.03):
                held = [_holds_best(shape, prompts, models, ahead, generator) for _ in range(min(draws, SLOW))]
                yield Rate(
                    case=f"{_name(shape, prompts, 0.3, None)}, {models} models, the best {ahead:g} ahead",
                    rate=float(np.mean(held)),
                    low=0.93,
                    high=1.0,
                )


def _holds_best(shape: str | int, prompts: int, models: int, ahead: float, generator: np.random.Generator) -> bool:
    index = prompts_of(shape, prompts, generator)
    shared = math.sqrt(0.5) * generator.normal(size=len(index)) + math.sqrt(0.2) * generator.normal(size=prompts)[index]
    gains = {}
    for model in range(models):
        right = ndtri(0.7 + (ahead if model == 0 else 0.0))
        gains[str(model)] = (shared + math.sqrt(0.3) * generator.normal(size=len(index)) < right).astype(float)
    found = standings(gains, index, draws=10, flips=499, seed=int(generator.integers(2**31)))
    # Where all are equally good, each of them is the best, and a good set loses none.
    best = list(found.values())[: 1 if ahead else models]
    return all(own.p_best >= ALPHA for own in best)


def correlations(draws: int, generator: np.random.Generator) -> Cells:
    """Scores and gold scores of 4 replies a prompt: how often the correlation lies in its interval."""
    for prompts in (15, 40, 200):
        keys = tuple(str(number // 4) for number in range(4 * prompts))
        for truth in (0.3, 0.9):
            limits: dict[str, list[bool]] = {name: [] for name in CORRELATIONS}
            # Of two normal columns with correlation ρ: Spearman (6/π) asin(ρ/2), Kendall (2/π) asin ρ.
            truths = {
                "Pearson": truth,
                "Spearman": 6 / math.pi * math.asin(truth / 2),
                "Kendall": 2 / math.pi * math.asin(truth),
            }
            for _ in range(min(draws, 2 * SLOW)):
                gold, noise = (_clustered(prompts, 4, 0.3, generator) for _ in range(2))
                ours = truth * gold + math.sqrt(1 - truth**2) * noise
                for name, measure in CORRELATIONS.items():
                    estimate = correlation(ours, gold, keys, measure=measure)
                    limits[name].append(estimate.low <= truths[name] <= estimate.high)
            for name, held in limits.items():
                yield Rate(
                    case=f"{name} of {truth:g}, {prompts} prompts", rate=float(np.mean(held)), low=0.93, high=0.97
                )


def _clustered(prompts: int, each: int, alike: float, generator: np.random.Generator) -> FloatArray:
    own = np.repeat(generator.normal(size=prompts), each)
    return math.sqrt(alike) * own + math.sqrt(1 - alike) * generator.normal(size=prompts * each)


def _shapes() -> Iterator[tuple[str | int, int, float]]:
    """(comparisons of a prompt, prompts, correlation of the comparisons of a prompt)."""
    for prompts in (40, 200, 1000):
        yield 1, prompts, 0.0
    for shape in SHAPES:
        for prompts in (15, 40, 200):
            yield shape, prompts, 0.3


def _name(shape: str | int, prompts: int, alike: float, disagreeing: float | None) -> str:
    who = f"{prompts} independent pairs" if shape == 1 else f"{prompts} prompts, {shape}, alike {alike:g}"
    return who if disagreeing is None else f"{who}, disagreeing {disagreeing:g}"


KINDS: dict[str, tuple[str, Kind]] = {
    "size": ("sign flips, accuracy: found where there is none (5 %)", size_of_accuracy),
    "size_means": ("sign flips, margins and NLL: found where there is none (5 %)", size_of_means),
    "power": ("sign flips: found where it has the size that `compare` names (80 %)", power),
    "not_worse": ("“not worse” at the margin (at most 5 %)", error_of_not_worse),
    "tost": ("TOST at the margin (at most 5 %)", error_of_tost),
    "best": ("set of models that may be the best holds the best (at least 95 %)", holds_the_best),
    "correlations": ("correlations with gold scores in their interval (95 %)", correlations),
}


def summary_row(title: str, cells: Sequence[Rate]) -> list[str]:
    """One line of the page for a kind."""
    wanted = [cell.low for cell in cells], [cell.high for cell in cells]
    return [title, *summary([cell.rate for cell in cells], *wanted)]


def page_of(found: Mapping[str, Sequence[Rate]], run: Simulation) -> list[str]:
    """The lines of the page: a row a kind, then every cell outside what is wanted."""
    return [
        "# How often the tests of a comparison are wrong",
        "",
        f"Paired data whose truth is known; at most {run.options.draws:,} draws a cell; {run.minutes}.",
        "",
        results.table(
            ["kind", "cells", "as wanted", "below", "above", "least to most"],
            [summary_row(title, cells) for title, cells in found.items()],
        ),
        "Cells outside what is wanted:",
        "",
        outside(found, {"rate": "{cell.rate:.1%}", "wanted": "{cell.low:.0%} to {cell.high:.0%}"}),
        "",
        "Exact tests, beside the size that they can have on the same data:",
        "",
        results.table(
            ["data", "rate", ATTAINABLE, "difference"],
            [
                [cell.case, f"{cell.rate:.1%}", f"{size:.1%}", f"{100 * (cell.rate - size):+.1f} points"]
                for cell in (one for cells in found.values() for one in cells if one.beside)
                for size in (cell.beside or {}).values()
            ],
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data."""
    run = Simulation("paired_tests", parser_of(__doc__, list(KINDS), draws=2000), arguments)
    found: dict[str, list[Rate]] = {}
    for number, (kind, (title, draw)) in enumerate(KINDS.items()):
        if kind in run.options.kinds:
            found[kind] = list(draw(run.options.draws, run.generator(number)))
            print(*summary_row(title, found[kind]), f"{run.seconds:.0f} s", sep="  ", flush=True)
    return run.record(
        "all" if len(found) == len(KINDS) else "_".join(found),
        page=page_of({KINDS[kind][0]: cells for kind, cells in found.items()}, run),
        cells={kind: [as_dict(cell) for cell in cells] for kind, cells in found.items()},
    )


def as_dict(cell: Rate) -> dict[str, Any]:
    """For the record, to four digits."""
    return {
        "case": cell.case,
        **rounded({"rate": cell.rate, **(cell.beside or {})}),
        "low": cell.low,
        "high": cell.high,
    }


if __name__ == "__main__":
    sys.exit(main())
