"""How often `data mislabels --worth` claims an effect, and how often its intervals hold it, on simulated pairs.

    scripts/bench mislabels_worth --draws 200

Pairs have features; the label prefers the side that scores higher by a linear function of them and a logistic term, by
which people disagree. Two heads see most of the features each and are the witnesses. The kinds:

    nothing to learn    labels have nothing to do with features: whatever is flagged, removing it changes nothing
    disagreement        labels are those of people who disagree, and none is turned round besides
    a tenth wrong       a tenth of the labels are turned round by chance
    three tenths wrong  three tenths are

Of the first kind the true effect is exactly 0, so every verdict is a false one. Of the others it is not known, and is
taken to be the mean over all draws; the intervals are made for other held-out conversations with what was drawn to be
fitted on, and draws differ in both.
"""

from __future__ import annotations

import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from harness import results
from harness.simulation import Simulation, parser_of
from harness.wrongly_labelled import RULE, simulated
from rewardlab.curation.mislabels.worth import Effect, measure_worth

PAIRS = (300, 1000)
SEEDS = 2
"""Divisions into folds of each draw."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How pairs are drawn and flagged."""

    noise: float
    """Scale of the disagreement, where scores have a spread of about 4."""
    wrong: float = 0.0
    below: float = RULE.below
    """Probability below which both witnesses have to be."""
    is_null: bool = False
    """Whether the true effect is 0."""


KINDS: Mapping[str, Kind] = {
    "nothing to learn": Kind(noise=1e6, below=0.5, is_null=True),
    "disagreement": Kind(noise=2.0),
    "a tenth wrong": Kind(noise=0.5, wrong=0.1),
    "three tenths wrong": Kind(noise=0.5, wrong=0.3, below=0.4),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one comparison of arms showed, of pairs of one kind and so many of them."""

    case: str
    against: str
    removed: float
    """Share of the rows removed, on average."""
    effect: float
    """Mean change of accuracy."""
    spread: float
    """Standard deviation of it from draw to draw."""
    truth: float
    better: float
    worse: float
    """Shares of the verdicts."""
    coverage: float
    """Share of the intervals that hold the truth."""
    width: float


def draw(name: str, pairs: int, seed: int) -> tuple[float, Sequence[Effect]]:
    """Draw pairs of a kind; return (share of the rows removed, what removing them is worth)."""
    kind = KINDS[name]
    own, heads, _ = simulated(pairs, noise=kind.noise, wrong=kind.wrong, seed=seed)
    worth = measure_worth(heads, own, replace(RULE, below=kind.below), num_seeds=SEEDS)
    return worth.removed / worth.trained_on, worth.effects


def judge(name: str, pairs: int, each: Callable[..., Iterable], options: Namespace) -> list[Cell]:
    """Return what many draws of pairs of a kind come to. `each` is `map`, or one that does the same elsewhere."""
    seeds = range(options.seed, options.seed + options.draws)
    removed, found = zip(*each(partial(draw, name, pairs), seeds), strict=True)
    case = f"{pairs:,} pairs"
    return [_cell(KINDS[name], case, float(np.mean(removed)), effects) for effects in zip(*found, strict=True)]


def _cell(kind: Kind, case: str, removed: float, effects: Sequence[Effect]) -> Cell:
    values = np.array([one.accuracy.value for one in effects])
    truth = 0.0 if kind.is_null else float(values.mean())
    verdicts = [one.verdict for one in effects]
    return Cell(
        case=case,
        against=effects[0].against,
        removed=removed,
        effect=float(values.mean()),
        spread=float(values.std(ddof=1)),
        truth=truth,
        better=verdicts.count("better") / len(verdicts),
        worse=verdicts.count("worse") / len(verdicts),
        coverage=float(np.mean([one.accuracy.low <= truth <= one.accuracy.high for one in effects])),
        width=float(np.mean([one.accuracy.high - one.accuracy.low for one in effects])),
    )


def page(found: Mapping[str, Sequence[Cell]], simulation: Simulation) -> list[str]:
    """What was found, as Markdown."""
    draws = simulation.options.draws
    table = results.table(
        [
            "labels",
            "pairs",
            "against",
            "removed",
            "effect, points",
            "its spread",
            "better",
            "worse",
            "coverage",
            "width, points",
        ],
        [
            [
                kind,
                cell.case,
                cell.against,
                f"{cell.removed:.1%}",
                f"{100 * cell.effect:+.2f} ± {100 * cell.spread / np.sqrt(draws):.2f}",
                f"{100 * cell.spread:.2f}",
                f"**{cell.better:.1%}**",
                f"**{cell.worse:.1%}**",
                f"{cell.coverage:.1%}",
                f"{100 * cell.width:.1f}",
            ]
            for kind, cells in found.items()
            for cell in cells
        ],
    )
    return [
        f"{draws:,} sets of pairs a row of the table, {SEEDS} divisions into folds of each; {simulation.minutes}. ± is "
        f"a standard error over the draws. Shares of 200 draws have standard errors of up to 3.5 points; at a true 5 % "
        f"and 95 % it is 1.5 points.",
        table,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation."""
    parser = parser_of(__doc__, list(KINDS), draws=200)
    parser.add_argument("--pairs", type=int, nargs="+", default=list(PAIRS))
    parser.add_argument("--processes", type=int, default=1, help="that draw at the same time")
    simulation = Simulation("mislabels_worth", parser, arguments)
    options = simulation.options
    with ExitStack() as held:
        each: Callable[..., Iterable] = map
        if options.processes > 1:
            # New ones: a process that is forked off has none of the threads for which what it holds may wait.
            context = multiprocessing.get_context("spawn")
            each = partial(held.enter_context(ProcessPoolExecutor(options.processes, context)).map, chunksize=5)
        found = {
            name: [cell for pairs in options.pairs for cell in judge(name, pairs, each, options)]
            for name in KINDS
            if name in options.kinds
        }
    cells = {kind: [asdict(cell) for cell in own] for kind, own in found.items()}
    return simulation.record("all" if len(found) == len(KINDS) else "some", page=page(found, simulation), cells=cells)


if __name__ == "__main__":
    sys.exit(main())
