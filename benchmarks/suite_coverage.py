"""How often the intervals of public suites hold the truth, and how often their test against length rejects by chance.

    scripts/bench suite_coverage --draws 1000

Suites are simulated with items of uneven difficulty and replies whose scores share it. The truth is what the rule gives
on a suite so large that its own error does not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness import results
from harness.simulation import SUMMARY, Simulation, parser_of, summary
from rewardlab.analysis.suites.draws import Resampled, difference, estimate, judge, significance
from rewardlab.analysis.suites.outcomes import Outcome, RuleRow, Scores
from rewardlab.analysis.suites.registry import SUITES
from rewardlab.core.suites import SuiteItem, all_pairs

LARGE = 40_000
"""Prompts of the suite that gives the truth, of each subset."""
SIZES = (12, 25, 50, 200)
BOOTSTRAP = 400
Sample = tuple[list[SuiteItem], dict[str, Scores]]
"""Items, and scores of the model and of a rival that sees as much less as `gap` says."""
Make = Callable[[int, np.random.Generator], Sample]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one kind of suite of one size showed."""

    case: str
    row: str
    coverage: float
    width: float
    paired: float
    """Coverage of the paired difference."""
    size: float | None
    """Share of tests with p < 0.05 where the two scorers are equally good."""


def _item(id: str, subset: str, pairs: Sequence[tuple[int, int]], replies: int, cluster: str) -> SuiteItem:
    return SuiteItem(id=id, subset=subset, cluster=cluster, prompt=(), replies=("",) * replies, pairs=tuple(pairs))


def _scores(
    strengths_n: np.ndarray, better: int, replies: int, n: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Scores of n items: the first `better` replies are better by a strength that differs from item to item."""
    own = generator.normal(size=(n, replies))
    own[:, :better] += strengths_n[:, None] + generator.normal(size=(n, 1))
    return list(np.round(own, 1))  # rounded, so that some are tied


class _Maker:
    """Collects the items of a simulated suite, and the scores of two scorers of them."""

    def __init__(self, n: int, gap: float, generator: np.random.Generator) -> None:
        self.n, self.gap, self.generator = n, gap, generator
        self.items: list[SuiteItem] = []
        self.model: list[np.ndarray] = []
        self.rival: list[np.ndarray] = []

    def add(self, subset: str, better: int, worse: int, strengths: object, *, id: str = "", cluster: str = "") -> None:
        """Add n items whose first `better` replies are better by `strengths`."""
        id, cluster = id or f"{subset} ", cluster or f"{subset} "
        pairs = all_pairs(better, worse)
        replies = better + worse
        self.items += [_item(f"{id}{k}", subset, pairs, replies, f"{cluster}{k}") for k in range(self.n)]
        strengths_n = np.broadcast_to(np.asarray(strengths, dtype=np.float64), self.n)
        self.model += _scores(strengths_n, better, replies, self.n, self.generator)
        self.rival += _scores(strengths_n - self.gap, better, replies, self.n, self.generator)

    def turn(self, count: int) -> None:
        """List the two replies of the last `count` pairs in the other order."""
        self.items[-count:] = [replace(item, pairs=((1, 0),)) for item in self.items[-count:]]
        for scores in (self.model, self.rival):
            scores[-count:] = [own[::-1] for own in scores[-count:]]

    def add_whole(self, rows: Sequence[tuple[str, int, int, str]], cluster: str, share: float) -> None:
        """Add n prompts with rows (subset, better, worse, id): a prompt is wholly right, or fails as a whole.

        Only the `share` fails. The rival fails `gap` times as often in addition, and half of its failures are its own.
        """
        own_n, common_n, others_n = self.generator.random((3, self.n))
        fails_n = np.where(common_n < 0.5, own_n, others_n) < share * (1 + self.gap)
        for subset, better, worse, id in rows:
            pairs, replies = all_pairs(better, worse), better + worse
            self.items += [_item(f"{id}{k}", subset, pairs, replies, f"{cluster}{k}") for k in range(self.n)]
            right_K = (np.arange(replies) < better).astype(np.float64)
            self.model += [1 - right_K if failed else right_K for failed in own_n < share]
            self.rival += [1 - right_K if failed else right_K for failed in fails_n]


def _rewardbench(maker: _Maker, strength: float) -> None:
    for number, subset in enumerate(("alpacaeval-easy", "mt-bench-hard", "donotanswer", "math-prm", "hep-go")):
        maker.add(subset, 1, 1, strength + number / 4)


def _rewardbench2(maker: _Maker, strength: float) -> None:
    for number, subset in enumerate(("Factuality", "Math", "Safety", "Focus")):
        maker.add(subset, 1, 3, strength + number / 2)
    for kind, correct in (("ref", 1), ("tied", 3)):
        maker.add("Ties", correct, 3, 2 * strength + 1, id=f"{kind}:", cluster="t")


def _rm_bench(maker: _Maker, strength: float) -> None:
    for number, domain in enumerate(("chat", "math", "code", "safety")):
        maker.add(domain, 3, 3, strength + number / 4)


def _ppe(maker: _Maker, strength: float) -> None:
    """Four rows of each question, drawn together."""
    for benchmark in ("MATH", "GPQA"):
        shared = strength + maker.generator.normal(size=maker.n)
        for model in range(4):
            maker.add(benchmark, 1, 2, shared, id=f"{benchmark} {model} ")


def _judgebench(maker: _Maker, strength: float) -> None:
    """Pairs of which the first reply is the better one, and as many turned round: ties go to the second."""
    for number, subset in enumerate(("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")):
        for better in (0, 1):
            maker.add(subset, 1, 1, strength + number / 4, id=f"{subset} {better} ", cluster=f"{subset} {better} ")
            if better == 1:
                maker.turn(maker.n)


def _rmb(maker: _Maker, strength: float) -> None:
    for number, goal in enumerate(("Helpfulness", "Harmlessness")):
        maker.add(f"{goal} BoN", 1, 4, strength + number / 2 + 1)
        maker.add(f"{goal} pairwise", 1, 1, strength + number / 2)


def _llmbar(maker: _Maker, strength: float) -> None:
    for number, subset in enumerate(("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")):
        maker.add(subset, 1, 1, strength + 1 - number / 4)


def _hhh(maker: _Maker, strength: float) -> None:
    for number, subset in enumerate(("harmless", "helpful", "honest", "other")):
        maker.add(subset, 1, 1, strength + number / 4)


def _rm_bench_whole(maker: _Maker, share: float) -> None:
    maker.add_whole([("chat", 3, 3, "chat ")], "chat ", share)


def _ties_whole(maker: _Maker, share: float) -> None:
    maker.add_whole([("Ties", 1, 3, "ref:"), ("Ties", 3, 3, "tied:")], "t", share)


FILL = {"rewardbench": _rewardbench, "rewardbench2": _rewardbench2, "rm-bench": _rm_bench, "ppe": _ppe}
FILL_MORE = {"judgebench": _judgebench, "rmb": _rmb, "llmbar": _llmbar, "hhh": _hhh}
"""Further suites. Their kinds come last, so that the numbers of the others stay: a kind is drawn by its place."""


WHOLE = {"rm-bench": _rm_bench_whole, "rewardbench2": _ties_whole}
"""Suites whose shares are of the same prompts."""


def suite_of(fill: Callable[[_Maker, float], None], strength: float, *, gap: float = 0.0) -> Make:
    """Return a maker of suites; a subset gets a strength of its own."""

    def make(n: int, generator: np.random.Generator) -> Sample:
        maker = _Maker(n, gap, generator)
        fill(maker, strength)
        return maker.items, {"model": maker.model, "rival": maker.rival}

    return make


def _kinds(
    fills: Mapping[str, Callable[[_Maker, float], None]], numbers: Sequence[float], words: str
) -> dict[str, tuple[str, Make, Make]]:
    return {
        f"{name}, {words.format(number)}": (name, suite_of(fill, number), suite_of(fill, number, gap=0.5))
        for name, fill in fills.items()
        for number in numbers
    }


STRENGTHS = (0.5, 2.0)
KINDS: dict[str, tuple[str, Make, Make]] = {
    **_kinds(FILL, STRENGTHS, "strength {}"),
    **_kinds(WHOLE, (0.02, 0.1), "{:.0%} of prompts fail as a whole"),
    **_kinds(FILL_MORE, STRENGTHS, "strength {}"),
}
"""Kind -> (suite, maker of two scorers that are equally good, maker of two that are not)."""


def outcomes_of(name: str, sample: Sample) -> dict[str, Outcome]:
    """Return the outcome of each scorer under the rule."""
    items, scores = sample
    return {scorer: SUITES[name].rule(items, own, False) for scorer, own in scores.items()}


def cells(kind: str, draws: int, generator: np.random.Generator, *, large: int = LARGE) -> Iterator[Cell]:
    """Yield a cell for each size, and each row of interest: the first subset, the last, and the totals."""
    name, equal, unequal = KINDS[kind]
    truth = {row.name: _values(outcomes_of(name, unequal(large, generator)), row.name) for row in _rows(name, unequal)}
    for n in SIZES:
        held: dict[str, list[tuple[bool, float, bool]]] = {row: [] for row in truth}
        rejected: dict[str, list[bool]] = {row: [] for row in truth}
        for _ in range(draws):
            sample = unequal(n, generator)
            outcomes = outcomes_of(name, sample)
            resampled = Resampled.of(sample[0], outcomes["model"], seed=int(generator.integers(1 << 31)))
            judged = judge(outcomes, resampled, num_draws=BOOTSTRAP)
            for row in outcomes["model"].rows:
                if row.name in truth:
                    own = estimate(judged["model"], row, resampled)
                    gain = difference(judged["model"], judged["rival"], row, resampled)
                    model, rival = truth[row.name]
                    held[row.name].append(
                        (own.low <= model <= own.high, own.high - own.low, gain.low <= model - rival <= gain.high)
                    )
            sample = equal(n, generator)
            outcomes = outcomes_of(name, sample)
            resampled = Resampled.of(sample[0], outcomes["model"], seed=0)
            judged = judge(outcomes, resampled, num_draws=1)
            for row in outcomes["model"].rows:
                if row.name in truth:
                    p = significance(judged["model"], judged["rival"], row, seed=int(generator.integers(1 << 31)))
                    rejected[row.name].append(p < 0.05)
        for label, found in held.items():
            covered, width, paired = np.array(found, dtype=float).mean(0)
            size = float(np.mean(rejected[label]))
            yield Cell(case=f"{kind}, {n} prompts", row=label, coverage=covered, width=width, paired=paired, size=size)


def _rows(name: str, make: Make) -> list[RuleRow]:
    rows = outcomes_of(name, make(12, np.random.default_rng(0)))["model"].rows
    subsets = [row for row in rows if row.kind == "subset"]
    ends = subsets if len(subsets) < 2 else [subsets[0], subsets[-1]]
    return [*ends, *(row for row in rows if row.kind == "total")]


def _values(outcomes: dict[str, Outcome], row: str) -> tuple[float, float]:
    model, rival = (
        next(outcome.value(one) for one in outcome.rows if one.name == row) for outcome in outcomes.values()
    )
    return model, rival


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data."""
    parser = parser_of(__doc__, list(KINDS), draws=1000)
    parser.add_argument("--large", type=int, default=LARGE, help="prompts of the suite that gives the truth")
    run = Simulation("suite_coverage", parser, arguments)
    found: list[Cell] = []
    for number, kind in enumerate(KINDS):
        if kind in run.options.kinds:
            found += cells(kind, run.options.draws, run.generator(number), large=run.options.large)
            print(kind, f"{run.seconds:.0f} s", flush=True)
    columns = {"interval": [c.coverage for c in found], "paired difference": [c.paired for c in found]}
    page = [
        "# How often the intervals of suites hold the truth",
        "",
        f"Intervals of 95 % on suites whose truth is known; {run.options.draws:,} suites a cell, so a coverage is "
        f"known to {1.96 * (0.05 * 0.95 / run.options.draws) ** 0.5:.1%}; {run.minutes}.",
        "",
        results.table(["", *SUMMARY], [[name, *summary(values)] for name, values in columns.items()]),
        results.table(
            ["suite", "row", "coverage", "mean width", "paired difference", "rejected at 5 % by chance"],
            [[c.case, c.row, f"{c.coverage:.1%}", f"{c.width:.3f}", f"{c.paired:.1%}", f"{c.size:.1%}"] for c in found],
        ),
    ]
    tag = "all" if len(run.options.kinds) == len(KINDS) else "some"
    return run.record(tag, page=page, cells=[vars(cell) for cell in found])


if __name__ == "__main__":
    sys.exit(main())
