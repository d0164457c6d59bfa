"""How often each kind of interval holds the truth, and how wide it is, on data whose truth is known.

    scripts/bench coverage --draws 4000

Every cell is a kind of data of one size, drawn so often; the intervals are those that rewardlab prints. Beside them
stands Student's interval (by prompt where prompts repeat, cut to the range): what one would do without thought.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binom

from harness import results, simulated
from harness.simulated import Totals
from harness.simulation import SUMMARY, WANTED, Simulation, outside, parser_of, rounded, summary
from rewardlab.analysis import stats
from rewardlab.analysis.calibration import ece, ece_estimate, null_band
from rewardlab.analysis.intervals import FloatArray, Limits, loss_limits, mean_limits, share_limits, wilson_limits
from rewardlab.analysis.precision import relative_size
from rewardlab.core.types import Estimate

LEVEL = 0.95
PROMPTS = (10, 15, 25, 40, 200)
SHARES = (0.5, 0.7, 0.9, 0.97)
ALIKE = (0.0, 0.2, 0.8)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one kind of data showed."""

    case: str
    coverage: float
    width: float
    """Mean width."""
    student: float | None = None
    """Coverage of Student's interval."""
    student_width: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether the coverage is what the interval says, to two points."""
        return WANTED[0] <= self.coverage <= WANTED[1]


Cells = Iterator[Cell]
Kind = Callable[[int, np.random.Generator], Cells]


def judge(case: str, truth: float, limits: Limits, student: Limits | None = None) -> Cell:
    """Coverage and width of limits [draws]."""
    return Cell(
        case=case,
        coverage=_coverage(truth, limits),
        width=float(np.mean(limits.high - limits.low)),
        student=None if student is None else _coverage(truth, student),
        student_width=None if student is None else float(np.mean(student.high - student.low)),
    )


def _coverage(truth: float, limits: Limits) -> float:
    # At the end of a range (a share of 1, an ECE of 0) rounding must not decide.
    return float(np.mean((limits.low <= truth + 1e-12) & (truth - 1e-12 <= limits.high)))


def student_limits(totals: Totals, *, share: bool = False) -> Limits:
    """Student's interval on the residuals of the ratio, with C − 1 degrees of freedom."""
    count, total = totals.sizes.shape[-1], totals.sizes.sum(-1)
    value = totals.sums.sum(-1) / total
    squares = np.square(totals.sums - value[:, None] * totals.sizes).sum(-1)
    reach = stdtrit(count - 1, (1 + LEVEL) / 2) * np.sqrt(count / (count - 1) * squares) / total
    low, high = value - reach, value + reach
    return Limits(value, np.maximum(low, 0.0), np.minimum(high, 1.0)) if share else Limits(value, low, high)


def limits_of(estimates: Sequence[Estimate]) -> Limits:
    """Of one estimate a draw."""
    value, low, high = np.array([(found.value, found.low, found.high) for found in estimates]).T
    return Limits(value, low, high)


# --- kinds -----------------------------------------------------------------------------------------------------


def plain_accuracy(draws: int, generator: np.random.Generator) -> Cells:
    """Wilson's interval of independent 0/1 outcomes: exact, by all counts that can be."""
    for n in (*PROMPTS, 1000):
        wins = np.arange(n + 1)
        share = wins / n
        limits = wilson_limits(share, np.full(len(share), float(n)), level=LEVEL)
        for truth in SHARES:
            weight = binom.pmf(wins, n, truth)
            held = (limits.low <= truth) & (truth <= limits.high)
            yield Cell(
                case=f"n {n}, accuracy {truth:g}",
                coverage=float(weight[held].sum()),
                width=float((weight * (limits.high - limits.low)).sum()),
            )


def average_accuracy(draws: int, generator: np.random.Generator) -> Cells:
    """The same over accuracies from ½ to 1: what holds for a model of which nothing more is known."""
    truths = np.linspace(0.5, 1, 501)[:-1]
    for n in PROMPTS:
        wins = np.arange(n + 1)
        share = wins / n
        limits = wilson_limits(share, np.full(len(share), float(n)), level=LEVEL)
        held = (limits.low <= truths[:, None]) & (truths[:, None] <= limits.high)
        weight = binom.pmf(wins, n, truths[:, None])
        widths = weight @ (limits.high - limits.low)
        yield Cell(
            case=f"n {n}, accuracy ½ to 1", coverage=float((weight * held).sum(-1).mean()), width=float(widths.mean())
        )


def tied_accuracy(draws: int, generator: np.random.Generator) -> Cells:
    """Independent outcomes of 0, ½ and 1."""
    for n in PROMPTS:
        for ties in (0.1, 0.5):
            for won in SHARES:
                chances = [(1 - won) * (1 - ties), ties, won * (1 - ties)]
                values = generator.choice([0.0, 0.5, 1.0], p=chances, size=(draws, n))
                truth = ties / 2 + won * (1 - ties)
                yield _independent_share(f"n {n}, ties {ties:g}, accuracy without them {won:g}", truth, values)


def soft_shares(draws: int, generator: np.random.Generator) -> Cells:
    """Shares that are means themselves, such as those of a learning curve over three draws."""
    for n in PROMPTS:
        for truth in SHARES:
            chance = generator.beta(2 * truth, 2 * (1 - truth), size=(draws, n))
            values = generator.binomial(3, chance) / 3
            yield _independent_share(f"n {n}, mean of three, accuracy {truth:g}", truth, values)


def paired_accuracy(draws: int, generator: np.random.Generator) -> Cells:
    """Difference of two models' accuracies on the same pairs, as ½ + half of it."""
    for n in PROMPTS:
        for differ in (0.05, 0.3):
            for first_wins in (0.5, 0.8):
                chances = [differ * (1 - first_wins), 1 - differ, differ * first_wins]
                values = generator.choice([0.0, 0.5, 1.0], p=chances, size=(draws, n))
                truth = 0.5 + differ * (first_wins - 0.5)
                case = f"n {n}, {differ:.0%} differ, of which the first wins {first_wins:.0%}"
                yield _independent_share(case, truth, values)


def _independent_share(case: str, truth: float, values: FloatArray) -> Cell:
    return _share(case, truth, Totals.alone(values))


def _share(case: str, truth: float, totals: Totals) -> Cell:
    limits = share_limits(totals.sums, totals.squares, totals.sizes, level=LEVEL)
    return judge(case, truth, limits, student_limits(totals, share=True))


def accuracy_by_prompt(draws: int, generator: np.random.Generator) -> Cells:
    """0/1 outcomes on prompts that differ in difficulty; `alike` is the correlation of two outcomes of a prompt."""
    for shape in simulated.SIZES:
        for prompts in PROMPTS:
            for alike in ALIKE:
                for truth in SHARES:
                    sizes = simulated.sizes(shape, draws, prompts, generator)
                    totals = simulated.outcomes(sizes, truth, alike, generator)
                    yield _share(f"{prompts} prompts, {shape}, alike {alike:g}, accuracy {truth:g}", truth, totals)


def accuracy_of_rankings(draws: int, generator: np.random.Generator) -> Cells:
    """All pairs of 2 to 7 ranked replies: pairs of a prompt share replies, and prompts have 1 to 21 of them."""
    for prompts in PROMPTS:
        for noise in (0.07, 0.25, 1.0, np.inf):
            totals, truth = simulated.rankings(draws, prompts, noise, generator)
            yield _share(f"{prompts} prompts, 2 to 7 replies, accuracy {truth:.2f}", truth, totals)


def losses(draws: int, generator: np.random.Generator) -> Cells:
    """NLL and Brier score."""
    yield from _means(simulated.LOSSES, loss_limits, draws, generator)


def margins(draws: int, generator: np.random.Generator) -> Cells:
    """Margins, score shifts, differences of NLL: of any shape."""
    yield from _means(simulated.MARGINS, mean_limits, draws, generator)


def _means(
    shapes: Mapping[str, simulated.Shape], formula: Callable[..., Limits], draws: int, generator: np.random.Generator
) -> Cells:
    for name, shape in shapes.items():
        for prompts in (*PROMPTS[:-1], 100, 200):
            totals = Totals.alone(shape.draw(generator.normal(size=(draws, prompts))))
            yield _mean(f"{name}, n {prompts}", shape.mean, formula, totals)
        for spread in ("4 each", simulated.UNEVEN, simulated.ONE_LARGE):
            for prompts in PROMPTS:
                for alike in ALIKE:
                    sizes = simulated.sizes(spread, draws, prompts, generator)
                    totals = simulated.values(sizes, shape, alike, generator)
                    case = f"{name}, {prompts} prompts, {spread}, alike {alike:g}"
                    yield _mean(case, shape.mean, formula, totals)


def _mean(case: str, truth: float, formula: Callable[..., Limits], totals: Totals) -> Cell:
    limits = formula(totals.sums, totals.squares, totals.sizes, level=LEVEL)
    return judge(case, truth, limits, student_limits(totals))


def gaps(draws: int, generator: np.random.Generator) -> Cells:
    """Difference of two independent estimates: training rows and evaluation data."""
    for first, second in ((25, 25), (200, 60), (1000, 300)):
        for one, other in ((0.7, 0.7), (0.97, 0.7)):
            wins = [generator.binomial(n, share, size=draws) for n, share in ((first, one), (second, other))]
            found = [
                stats.difference(stats.wilson(int(a), first), stats.wilson(int(b), second))
                for a, b in zip(*wins, strict=True)
            ]
            yield judge(f"accuracy {one:g} of {first} − {other:g} of {second}", one - other, limits_of(found))
        shapes = simulated.LOSSES["NLL, overconfident"], simulated.LOSSES["NLL, calibrated"]
        rows = [shape.draw(generator.normal(size=(draws, n))) for shape, n in zip(shapes, (first, second), strict=True)]
        found = [stats.difference(stats.mean_loss(a), stats.mean_loss(b)) for a, b in zip(*rows, strict=True)]
        yield judge(f"NLL of {first} − NLL of {second}", shapes[0].mean - shapes[1].mean, limits_of(found))


def calibration(draws: int, generator: np.random.Generator) -> Cells:
    """ECE with probabilities σ(sharpness · d) where σ(d) is right and d is normal, and with one for all comparisons."""
    for spread, sharpness in ((1.5, 1.0), (1.5, 1.3), (1.5, 2.0), (1.5, 0.5), (3.0, 1.0), (3.0, 2.0), (0.3, 1.0)):
        truth = simulated.true_ece(spread, sharpness)
        for n in (20, 40, 100, 200, 500):
            found = []
            for _ in range(draws):
                p, y = simulated.judged(n, spread, sharpness, generator)
                found.append(ece_estimate(p, y))
            yield judge(f"n {n}, spread {spread:g}, sharpness {sharpness:g}, ECE {truth:.3f}", truth, limits_of(found))
    for said, right in ((0.95, 0.97), (0.95, 0.95), (0.95, 0.9), (0.98, 0.99), (0.995, 0.97), (0.9, 0.8)):
        for n in (20, 40, 100, 400):
            wins_R = generator.binomial(n, right, size=draws)
            found = [ece_estimate(np.full(n, said), (np.arange(n) < wins).astype(np.float64)) for wins in wins_R]
            yield judge(f"n {n}, always sure by {said:g}, right in {right:g}", abs(said - right), limits_of(found))
    for prompts in (10, 40):
        for sharpness in (1.0, 2.0):
            truth = simulated.true_ece(1.5, sharpness)
            keys = [f"{row // 4}" for row in range(4 * prompts)]
            found = []
            for _ in range(draws):
                p, y = simulated.judged(4 * prompts, 1.5, sharpness, generator, each=4, alike=0.5)
                found.append(ece_estimate(p, y, keys))
            yield judge(f"{prompts} prompts of 4, sharpness {sharpness:g}, ECE {truth:.3f}", truth, limits_of(found))


def null_bands(draws: int, generator: np.random.Generator) -> Cells:
    """The ECE of a calibrated model inside its null band."""
    for n in (20, 100, 500):
        inside, width = 0, 0.0
        for _ in range(draws):
            p, y = simulated.judged(n, 1.5, 1.0, generator)
            low, high = null_band(p, seed=int(generator.integers(1 << 30)), draws=400)
            inside += low <= ece(p, y) <= high
            width += high - low
        yield Cell(case=f"n {n}, calibrated", coverage=inside / draws, width=width / draws)


def precisions(draws: int, generator: np.random.Generator) -> Cells:
    """Root mean square of the differences of margins, in standard deviations of a margin."""
    for n in (40, 60, 200):
        for each in (1, 4):
            keys = [f"{row // each}" for row in range(n * each)]
            for name, freedom in (("normal", np.inf), ("heavy-tailed", 6.0)):
                found = []
                for _ in range(draws):
                    margin = generator.normal(1, 2, size=n).repeat(each) + generator.normal(size=n * each)
                    noise = generator.normal(size=n * each)
                    if np.isfinite(freedom):
                        noise *= np.sqrt((freedom - 2) / generator.chisquare(freedom, size=n).repeat(each))
                    found.append(relative_size(0.1 * noise, margin, keys, centred=False))
                yield judge(f"{n} prompts of {each}, {name} differences", 0.1 / np.sqrt(5), limits_of(found))


KINDS: Mapping[str, tuple[str, Kind]] = {
    "accuracy": ("Accuracy, independent pairs (exact)", plain_accuracy),
    "average": ("Accuracy, independent pairs, over accuracies (exact)", average_accuracy),
    "ties": ("Accuracy with ties", tied_accuracy),
    "soft": ("Shares that are means", soft_shares),
    "paired": ("Paired difference of accuracies", paired_accuracy),
    "by-prompt": ("Accuracy by prompt", accuracy_by_prompt),
    "rankings": ("Accuracy of rankings, by prompt", accuracy_of_rankings),
    "losses": ("NLL and Brier score", losses),
    "margins": ("Margins and other means", margins),
    "gaps": ("Train–evaluation gap", gaps),
    "ece": ("ECE", calibration),
    "null-band": ("ECE of a calibrated model in its null band", null_bands),
    "precision": ("Margin error of a precision card", precisions),
}
SLOW = ("ece", "null-band", "precision")
"""Drawn at most `MOST_SLOW` times: one interval at a time."""
MOST_SLOW = 2000


# --- the page --------------------------------------------------------------------------------------------------


def summary_row(title: str, cells: Sequence[Cell]) -> list[str]:
    """One kind in numbers."""
    student = [cell.student for cell in cells if cell.student is not None]
    ratio = [cell.width / cell.student_width for cell in cells if cell.student_width]
    own = summary(student) if student else ["–"] * len(SUMMARY)
    return [
        title,
        *summary([cell.coverage for cell in cells]),
        own[1].strip("*"),
        own[-1],
        f"{np.exp(np.mean(np.log(ratio))):.2f}" if ratio else "–",
    ]


def page_of(found: Mapping[str, Sequence[Cell]], run: Simulation) -> list[str]:
    """Kinds, then every cell outside what is wanted."""
    head = ["kind", *SUMMARY, "Student: 93 to 97 %", "Student: least to most", "width over Student's"]
    return [
        "# How often intervals hold the truth",
        "",
        f"Intervals of 95 % on data whose truth is known; {run.options.draws:,} draws a cell, at most {MOST_SLOW:,} "
        f"where an interval is found one at a time, so a coverage is known to about a point; {run.minutes}.",
        "",
        results.table(head, [summary_row(title, cells) for title, cells in found.items()]),
        *outside_wanted(found),
    ]


def outside_wanted(found: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Every cell whose coverage is not as wanted, the lowest of its kind first."""
    by_coverage = {kind: sorted(cells, key=lambda cell: cell.coverage) for kind, cells in found.items()}
    columns = {"coverage": "{cell.coverage:.1%}", "mean width": "{cell.width:.3g}"}
    return ["Cells outside 93 to 97 %:", "", outside(by_coverage, columns)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data."""
    run = Simulation("coverage", parser_of(__doc__, list(KINDS), draws=4000), arguments)
    found: dict[str, list[Cell]] = {}
    for number, (kind, (title, draw)) in enumerate(KINDS.items()):
        if kind in run.options.kinds:
            draws = min(run.options.draws, MOST_SLOW) if kind in SLOW else run.options.draws
            found[kind] = list(draw(draws, run.generator(number)))
            print(*summary_row(title, found[kind]), f"{run.seconds:.0f} s", sep="  ", flush=True)
    return run.record(
        "all" if len(found) == len(KINDS) else "_".join(found),
        page=page_of({KINDS[kind][0]: cells for kind, cells in found.items()}, run),
        cells={kind: [as_dict(cell) for cell in cells] for kind, cells in found.items()},
    )


def as_dict(cell: Cell) -> dict[str, Any]:
    """For the record, to four digits."""
    names = ("coverage", "width", "student", "student_width")
    return {"case": cell.case, **rounded({name: getattr(cell, name) for name in names})}


if __name__ == "__main__":
    sys.exit(main())
