"""How often the intervals of statistics that are no means hold the truth: AUC, spreads, slopes, correlations and so on.

    scripts/bench coverage_measures --draws 2000

As coverage.py does it for shares and means. Pairs are drawn from a model of scores whose truth is found once from a
sample of 200,000 prompts. Each cell is a statistic, a kind of pairs (plain, scores with ties, several pairs a prompt)
and a number of prompts. Percentiles are also found of values with few levels, whose distribution jumps near the
percentile, where the truth is known and several equal values may be of one prompt. `--kinds parts` has accuracies of
which small parts decide: a source of few rows, few replies that are preferred though shorter, few certain labels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, ndtri

from coverage import Cell, as_dict, judge, limits_of, outside_wanted, summary_row
from harness import results, simulated
from harness.simulation import SUMMARY, Simulation, parser_of
from rewardlab.analysis.distributions import quantile, standard_deviation
from rewardlab.analysis.influence import antisymmetric_correlations, area_under_curve, correlations
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.judgement import macro_accuracy, weighted_accuracy
from rewardlab.analysis.lengths import length_coefficients, length_controlled_accuracy
from rewardlab.analysis.logistic import calibration_intercept, calibration_slope
from rewardlab.analysis.reliability import reliability
from rewardlab.analysis.score_table import Pairs
from rewardlab.core.types import Estimate

PROMPTS = (15, 40, 200)


@dataclass(frozen=True, kw_only=True)
class Design:
    """How pairs are drawn."""

    name: str
    sizes: str = "1 each"
    alike: float = 0.0
    """Part of the variance that pairs of a prompt have in common: of scores, of the model's errors, of lengths."""
    grid: float = 0.0
    """Scores are rounded to its multiples, which makes ties; 0 for none."""
    sharpness: float = 1.0
    """How well scores follow the labels."""
    scale: float = 1.0
    """Factor of all scores: above 1 the model is too sure."""
    soft: bool = False
    long_tails: bool = False
    """Whether differences of length have the tails of Student's distribution with 3 degrees of freedom."""


DESIGNS = (
    Design(name="plain"),
    Design(name="plain, sharp model", sharpness=4.0),
    Design(name="plain, too sure", scale=3.0),
    Design(name="ties", grid=1.0),
    Design(name="soft labels", soft=True),
    Design(name="long tails of length", long_tails=True),
    Design(name="4 pairs a prompt, alike 0.5", sizes="4 each", alike=0.5),
    Design(name="4 pairs a prompt, alike 0.5, ties", sizes="4 each", alike=0.5, grid=1.0),
    Design(name="4 pairs a prompt, alike 0.5, soft labels", sizes="4 each", alike=0.5, soft=True),
    Design(name="1 to 60 pairs a prompt, alike 0.2", sizes=simulated.UNEVEN, alike=0.2),
    Design(name="20 pairs a prompt, alike 0.8", sizes="20 each", alike=0.8),
)


def draw_pairs(design: Design, prompts: int, generator: np.random.Generator) -> Pairs:
    """Pairs of `prompts` prompts with labels that follow σ(difference of utilities)."""
    sizes = simulated.sizes(design.sizes, 1, prompts, generator)[0]
    prompt = np.repeat(np.arange(prompts), sizes)

    def normal() -> FloatArray:
        own = generator.normal(size=prompt.size)
        if not design.alike:
            return own
        shared = generator.normal(size=prompts)[prompt]
        mixed: FloatArray = np.sqrt(design.alike) * shared + np.sqrt(1 - design.alike) * own
        return mixed

    difference, length = 1.5 * normal(), 100 * normal()
    if design.long_tails:
        length = length / np.sqrt(generator.chisquare(3, size=prompt.size))
    chance = expit(design.sharpness * difference + 0.003 * length)
    label = chance if design.soft else (generator.random(prompt.size) < chance).astype(np.float64)
    judged = difference + 0.004 * length + 0.7 * normal()
    level = 1.5 * normal()
    first, second = design.scale * (level + judged / 2), design.scale * (level - judged / 2)
    if design.grid:
        first, second = (np.round(score / design.grid) * design.grid for score in (first, second))
    lengths = 300 + length / 2, 300 - length / 2
    swapped = label < 0.5
    preferred, other = np.where(swapped, second, first), np.where(swapped, first, second)
    return Pairs(
        difference=preferred - other,
        label=np.where(swapped, 1 - label, label),
        preferred=preferred,
        other=other,
        length_preferred=np.where(swapped, lengths[1], lengths[0]),
        length_other=np.where(swapped, lengths[0], lengths[1]),
        truncated=np.zeros(prompt.size, dtype=bool),
        prompt=prompt,
        source=(prompt % 3 > 0).astype(np.int64),
        preference=np.arange(prompt.size),
    )


Found = Mapping[str, Estimate]


def quick(pairs: Pairs) -> Found:
    """Every statistic whose interval is a formula."""
    margin, prompt, outcome = pairs.difference, pairs.prompt, pairs.outcome
    both = correlations(pairs.preferred, pairs.length_preferred, prompt)
    differences = antisymmetric_correlations(margin, pairs.length_difference, prompt)
    slope, length = length_coefficients(pairs, beta=1.0)
    # Of wins and losses alone it is plain accuracy, and a judgement gives it the interval of that.
    soft = (pairs.label < 1).any()
    weighted = {"accuracy, soft": weighted_accuracy(outcome, 2 * pairs.label - 1, pairs)} if soft else {}
    return {
        **weighted,
        "AUC": area_under_curve(pairs.preferred, pairs.other, prompt),
        "accuracy, macro": macro_accuracy(outcome, pairs),
        "accuracy, length controlled": length_controlled_accuracy(pairs),
        "standard deviation": standard_deviation(margin, prompt),
        "median": quantile(margin, prompt, share=0.5),
        "5th percentile": quantile(margin, prompt, share=0.05),
        "95th percentile": quantile(margin, prompt, share=0.95),
        "calibration slope": calibration_slope(margin, pairs.label, prompt),
        "calibration intercept": calibration_intercept(margin, pairs.label, prompt),
        "slope, length held": slope,
        "length coefficient": length,
        "Pearson": both[0],
        "Spearman": both[1],
        "Pearson of differences": differences[0],
        "Spearman of differences": differences[1],
    }


def slow(pairs: Pairs) -> Found:
    """Parts of the Brier score, with many draws for each interval."""
    found = reliability(pairs.logit(beta=1.0), pairs.label, pairs.prompt, draws=200)
    return {
        "Brier, miscalibration": found.miscalibration,
        "Brier, discrimination": found.discrimination,
    }


@dataclass(frozen=True, kw_only=True)
class Jump:
    """Values of few levels and a percentile near a jump of their distribution."""

    name: str
    levels: tuple[float, ...]
    chances: tuple[float, ...]
    share: float


JUMPS = (
    Jump(name="0 with 0.48, 1", levels=(0, 1), chances=(0.48, 0.52), share=0.5),
    Jump(name="-1 with 0.52, 0", levels=(-1, 0), chances=(0.52, 0.48), share=0.5),
    Jump(name="five levels, 0.49 below", levels=(1, 2, 3, 4, 5), chances=(0.08, 0.15, 0.26, 0.31, 0.2), share=0.5),
    Jump(name="five levels, 0.51 below", levels=(1, 2, 3, 4, 5), chances=(0.08, 0.15, 0.28, 0.31, 0.18), share=0.5),
    Jump(name="five levels, 0.24 below", levels=(1, 2, 3, 4, 5), chances=(0.08, 0.16, 0.26, 0.31, 0.19), share=0.25),
    Jump(name="five levels, 0.89 below", levels=(1, 2, 3, 4, 5), chances=(0.3, 0.3, 0.2, 0.09, 0.11), share=0.9),
)


def jump_cells(draws: int, generator: np.random.Generator) -> dict[str, list[Cell]]:
    """A cell for each distribution with a jump, number of prompts, and number of equal values a prompt."""
    found = []
    for jump, prompts, each in itertools.product(JUMPS, (20, *PROMPTS[1:], 1000), (1, 5)):
        truth = jump.levels[int(np.searchsorted(np.cumsum(jump.chances), jump.share))]
        estimates = [
            quantile(values.repeat(each), np.arange(prompts).repeat(each), share=jump.share)
            for values in generator.choice(
                np.array(jump.levels, dtype=np.float64), size=(draws, prompts), p=jump.chances
            )
        ]
        case = f"{prompts} prompts of {each}, {jump.name}, quantile {jump.share:g}, truth {truth:.3g}"
        found += cell_of(case, truth, estimates)
    return {"percentile near a jump": found}


def cell_of(case: str, truth: float, estimates: Sequence[Estimate]) -> list[Cell]:
    """The cell of these draws; none where more than half of them have no interval."""
    given, draws = [one for one in estimates if not np.isnan(one.low)], len(estimates)
    if len(given) < draws / 2:
        return []
    refused = f", refused {1 - len(given) / draws:.0%}" if len(given) < draws else ""
    return [judge(case + refused, truth, limits_of(given))]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Pairs that are ranked as labelled with the same chance."""

    prompts: int
    accuracy: float
    each: int = 1
    """Pairs of a prompt."""

    @property
    def pairs(self) -> int:
        """How many pairs it has."""
        return self.prompts * self.each

    def __str__(self) -> str:
        of = f" of {self.each} pairs" if self.each > 1 else ""
        return f"{self.prompts} prompts{of} at {self.accuracy:g}"


ALIKE = 0.8
"""Part of the variance that pairs of a prompt have in common, where a prompt has several."""
UNSURE = 0.52
"""Label of the pairs beside the certain ones: of weight 0.04."""
Parts = tuple[Part, ...]


def _beside(small: Sequence[int], large: Sequence[int], accuracies: Sequence[tuple[float, float]]) -> list[Parts]:
    """A small part beside a large one, of all these sizes and accuracies."""
    return [
        (Part(prompts=few, accuracy=own), Part(prompts=many, accuracy=others))
        for few, many, (own, others) in itertools.product(small, large, accuracies)
    ]


def _alike(small: Sequence[int]) -> list[Parts]:
    """A few prompts of ten pairs that are alike beside 40."""
    return [tuple(Part(prompts=count, accuracy=0.9, each=10) for count in (few, 40)) for few in small]


SAME = ((0.8, 0.8), (0.95, 0.95))
SOURCES = [*_beside((5, 10, 20, 50), (1000, 2000), SAME), (Part(prompts=10, accuracy=0.95),) * 10, *_alike((5, 8, 10))]
SIDES = [*_beside((10, 20, 50), (1000,), (*SAME, (0.9, 0.95))), *_alike((5, 8, 10))]
CERTAIN = _beside((5, 10, 20, 50), (500, 1000), ((0.95, 0.95), (0.97, 0.8), (0.8, 0.95)))


def draw_parts(parts: Parts, generator: np.random.Generator, *, unsure: bool = False) -> Pairs:
    """Pairs of parts that are sources, the first of which prefers longer replies, all others shorter ones; with
    `unsure`, the labels of the others are `UNSURE`."""
    part = np.repeat(np.arange(len(parts)), [one.pairs for one in parts])
    each = np.concatenate([np.full(one.prompts, one.each) for one in parts])
    prompt, size = np.repeat(np.arange(each.size), each), part.size
    shared = np.where(each > 1, ALIKE, 0.0)[prompt]
    level = np.sqrt(shared) * generator.normal(size=each.size)[prompt]
    level = level + np.sqrt(1 - shared) * generator.normal(size=size)
    margin = np.where(level < ndtri(np.array([one.accuracy for one in parts]))[part], 1.0, -1.0)
    length = generator.uniform(10, 200, size=size) * np.where(part == 0, 1, -1)
    return Pairs(
        difference=margin,
        label=np.where((part > 0) & unsure, UNSURE, 1.0),
        preferred=margin / 2,
        other=-margin / 2,
        length_preferred=300 + length / 2,
        length_other=300 - length / 2,
        truncated=np.zeros(size, dtype=bool),
        prompt=prompt,
        source=part,
        preference=np.arange(size),
    )


def part_cells(draws: int, generator: np.random.Generator) -> dict[str, list[Cell]]:
    """Accuracies over sources, with length controlled and by soft labels, by shapes with small parts."""
    found: dict[str, list[Cell]] = {}
    statistics: list[tuple[str, list[Parts], Callable[[Pairs], Estimate]]] = [
        ("accuracy, macro, small sources", SOURCES, lambda pairs: macro_accuracy(pairs.outcome, pairs)),
        ("accuracy, length controlled, a small side", SIDES, length_controlled_accuracy),
        (
            "accuracy, soft, few certain labels",
            CERTAIN,
            lambda pairs: weighted_accuracy(pairs.outcome, 2 * pairs.label - 1, pairs),
        ),
    ]
    for name, shapes, statistic in statistics:
        for parts in shapes:
            unsure = shapes is CERTAIN
            weights = [one.pairs * (1 if number == 0 else 2 * UNSURE - 1) for number, one in enumerate(parts)]
            accuracies = [one.accuracy for one in parts]
            truth = float(np.average(accuracies, weights=weights if unsure else None))
            estimates = [statistic(draw_parts(parts, generator, unsure=unsure)) for _ in range(draws)]
            several = len(set(parts)) == 1 and len(parts) > 2
            words = f"{len(parts)} parts of {parts[0]}" if several else " beside ".join(map(str, parts))
            found.setdefault(name, []).extend(cell_of(f"{words}, truth {truth:.3g}", truth, estimates))
        print(name, "done", flush=True)
    return found


JUMP_KIND, PARTS_KIND = "jumps", "parts"
KINDS: Mapping[str, Callable[[Pairs], Found]] = {"quick": quick, "slow": slow}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A design and a kind of statistics, drawn with a generator of its own, so that tasks may be done side by side."""

    kind: str
    draws: int
    design: Design
    truth_prompts: int
    generator: np.random.Generator


def cells(task: Task) -> dict[str, list[Cell]]:
    """Statistic -> a cell for each number of prompts."""
    found: dict[str, list[Cell]] = {}
    function, design, generator = KINDS[task.kind], task.design, task.generator
    whole = function(draw_pairs(design, task.truth_prompts, generator))
    truth = {name: estimate.value for name, estimate in whole.items()}
    for prompts in PROMPTS:
        drawn = [function(draw_pairs(design, prompts, generator)) for _ in range(task.draws)]
        for name, value in truth.items():
            estimates = [one[name] for one in drawn]
            if own := cell_of(f"{prompts} prompts, {design.name}, truth {value:.3g}", value, estimates):
                found.setdefault(name, []).extend(own)
    print(task.kind, design.name, "done", flush=True)
    return found


def page_of(found: Mapping[str, Sequence[Cell]], run: Simulation) -> list[str]:
    """Statistics, then every cell outside what is wanted."""
    head = ["statistic", *SUMMARY]
    slow = f" (parts of the Brier score {run.options.slow_draws:,}, with 200 draws of the null)"
    return [
        "# How often intervals of statistics that are no means hold the truth",
        "",
        f"Intervals of 95 % on simulated pairs; {run.options.draws:,} draws a cell"
        f"{slow if 'slow' in run.options.kinds else ''}, so a coverage is known to about a point; "
        f"{run.minutes}. A cell is left out where more than half of the draws get no interval.",
        "",
        results.table(head, [summary_row(name, own)[: len(head)] for name, own in found.items()]),
        *outside_wanted(found),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Every statistic, the page and the data."""
    parser = parser_of(__doc__, [*KINDS, JUMP_KIND, PARTS_KIND], draws=2000)
    parser.add_argument("--slow-draws", type=int, default=500)
    parser.add_argument("--truth-prompts", type=int, default=200_000, help="prompts of the sample that is the truth")
    parser.add_argument("--designs", nargs="+", default=[design.name for design in DESIGNS])
    parser.add_argument("--processes", type=int, default=1, help="which change no number")
    run = Simulation("coverage_measures", parser, arguments)
    options = run.options
    tasks = [
        Task(
            kind=kind,
            draws=options.slow_draws if kind == "slow" else options.draws,
            design=design,
            truth_prompts=options.truth_prompts,
            generator=run.generator(100 * number + place),
        )
        for number, kind in enumerate(KINDS, 1)
        for place, design in enumerate(DESIGNS)
        if kind in options.kinds and design.name in options.designs
    ]
    found: dict[str, list[Cell]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for own in pool.map(cells, tasks) if options.processes > 1 else map(cells, tasks):
            for name, more in own.items():
                found.setdefault(name, []).extend(more)
    if JUMP_KIND in options.kinds:
        found |= jump_cells(options.draws, run.generator(len(KINDS)))
    if PARTS_KIND in options.kinds:
        found |= part_cells(options.draws, run.generator(len(KINDS) + 1))
    for name, own in found.items():
        print(*summary_row(name, own)[: 1 + len(SUMMARY)], sep="  ", flush=True)
    return run.record(
        "all" if len(options.kinds) == len(KINDS) + 2 else "_".join(options.kinds),
        page=page_of(found, run),
        cells={name: [as_dict(cell) for cell in own] for name, own in found.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
