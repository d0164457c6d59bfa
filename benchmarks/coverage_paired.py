"""How often the intervals of `compare`, `eval --perturb` and `gold match` hold the truth, with several pairs a prompt.

    scripts/bench coverage_paired --draws 1000

As coverage.py does it for shares and means. Each kind of data is drawn at 15, 40 and 200 prompts, with one pair (or
group of replies) a prompt, with four that are alike, and with 1 to 60. The truth is that of a very large sample.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coverage_judged import Cells, Found, Kind, covered, run_kinds
from harness import simulated
from harness.simulated import IntArray
from harness.simulation import Simulation, parser_of
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.matching import Replies, regret_of, slope_of, spread_of, within_rows
from rewardlab.analysis.metrics import OrientedComparisons
from rewardlab.analysis.paired import difference_of, margin_values
from rewardlab.analysis.robustness import ReplyKey, effect_of
from rewardlab.analysis.stats import mean_share
from rewardlab.core.types import Comparison, ScoreRow

PROMPTS = (15, 40, 200)
SHAPES = ("1 each", "4 each", simulated.UNEVEN)
"""Pairs of a prompt."""
ALIKE = 0.5
"""Part of the variance that pairs of a prompt have in common."""
MOST_SLOW = 600
"""Most draws of changed texts and of proxies, which take long."""
Measure = Callable[[IntArray, np.random.Generator], Found]
"""([N] prompts of pairs or groups, generator) -> what is estimated from data drawn with them"""


def common(prompt_N: IntArray, generator: np.random.Generator) -> FloatArray:
    """Normal values [N], of which those of a prompt are alike."""
    shared = generator.normal(size=int(prompt_N[-1]) + 1)[prompt_N]
    mixed: FloatArray = np.sqrt(ALIKE) * shared + np.sqrt(1 - ALIKE) * generator.normal(size=prompt_N.size)
    return mixed


def cells(designs: Mapping[str, Measure], draws: int, generator: np.random.Generator, large: int) -> Cells:
    """A cell for each statistic, design, number of prompts and shape."""
    for name, measure in designs.items():
        truth = {one: estimate.value for one, estimate in measure(np.arange(large), generator).items()}
        for shape, prompts in itertools.product(SHAPES, PROMPTS):

            def draw(shape: str = shape, prompts: int = prompts, measure: Measure = measure) -> Found:
                sizes = simulated.sizes(shape, 1, prompts, generator)[0]
                return measure(np.repeat(np.arange(prompts), sizes), generator)

            yield from covered(draw, truth, f"{prompts} prompts, {shape}, {name}", draws)


# --- two models on the same pairs ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TwoModels:
    """How far two models are from the truth, and from each other."""

    name: str
    own: tuple[float, float]
    """Standard deviations of the errors that one model makes alone; both make one of 0.8."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Factor of all scores of a model."""
    grid: float = 0.0
    """Scores are rounded to its multiples, which makes ties; 0 for none."""

    def __call__(self, prompt_N: IntArray, generator: np.random.Generator) -> Found:
        """Second less first, for each metric."""
        right = 0.7 + common(prompt_N, generator) + 0.8 * common(prompt_N, generator)
        margins = [
            scale * (right + own * common(prompt_N, generator)) for own, scale in zip(self.own, self.scale, strict=True)
        ]
        if self.grid:
            margins = [np.round(margin / self.grid) * self.grid for margin in margins]
        keys = tuple(map(str, prompt_N.tolist()))
        first, second = (
            OrientedComparisons(difference=margin, label=np.ones(margin.size), prompt_keys=keys) for margin in margins
        )
        return {
            "difference of accuracies": difference_of("accuracy", second.outcome - first.outcome, keys),
            "difference of NLL": difference_of("nll", second.nll(beta=1.0) - first.nll(beta=1.0), keys),
            "difference of margins": difference_of(
                "margin", margin_values(second.difference) - margin_values(first.difference), keys
            ),
        }


MODELS = (
    TwoModels(name="much alike", own=(0.2, 0.1)),
    TwoModels(name="one better", own=(1.5, 0.3)),
    TwoModels(name="the second too sure", own=(0.5, 0.5), scale=(1.0, 4.0)),
    TwoModels(name="ties of scores", own=(1.0, 0.5), grid=1.0),
)


def compared(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """Paired differences of `rewardlab compare`."""
    return cells({design.name: design for design in MODELS}, draws, generator, 20 * large)


# --- changed texts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a perturbation does to scores whose standard deviation is about 1.4."""

    name: str
    mean: float
    spread: float
    share: float = 1.0
    """Share of replies whose score moves at all, though all texts change."""

    def __call__(self, prompt_N: IntArray, generator: np.random.Generator) -> Found:
        """Every number of `effect_of`."""
        level, half = common(prompt_N, generator), 0.5 + 0.6 * common(prompt_N, generator)
        before_N2 = np.stack([level + half, level - half], axis=1)
        spread_N2 = np.stack([common(prompt_N, generator) for _ in range(2)], axis=1)
        moves_N2 = generator.random(before_N2.shape) < self.share
        after_N2 = before_N2 + moves_N2 * (self.mean + self.spread * spread_N2)
        before, after = (_rows(prompt_N, scores_N2) for scores_N2 in (before_N2, after_N2))
        changed: set[ReplyKey] = {(row.source, row.preference_id, row.reply) for row in before}
        found = effect_of(before, after, changed, not_applicable=0, lost=0).estimates
        return {f"changed texts: {name}": estimate for name, estimate in found.items()}


def _rows(prompt_N: IntArray, scores_N2: FloatArray) -> list[ScoreRow]:
    """Score rows of pairs of which the first reply is preferred."""
    plain = ScoreRow(
        preference_id="", source="s", prompt_key="", reply=0, score=0.0, num_tokens=4, prompt_tokens=2,
        truncated_tokens=0, comparisons=(),
    )  # fmt: skip
    first = (Comparison(first=0, second=1, label=1.0),)
    return [
        replace(
            plain,
            preference_id=str(number),
            prompt_key=str(prompt),
            reply=reply,
            score=score,
            comparisons=() if reply else first,
        )
        for number, (prompt, scores) in enumerate(zip(prompt_N.tolist(), scores_N2.tolist(), strict=True))
        for reply, score in enumerate(scores)
    ]


CHANGES = (
    Change(name="all move, up and down", mean=0.1, spread=0.7),
    Change(name="all move far the same way", mean=1.2, spread=0.3),
    Change(name="a tenth moves", mean=1.0, spread=0.5, share=0.1),
)


def perturbed(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """What changed texts do, by `rewardlab eval --perturb`."""
    return cells({design.name: design for design in CHANGES}, min(draws, MOST_SLOW), generator, 2 * large)


# --- a proxy against gold --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """Groups of replies with gold scores, and a proxy's scores of them."""

    name: str
    replies: int
    noise: float
    grid: float = 0.0
    scales: float = 0.0
    """Standard deviation of the logarithm of a prompt's own scale: few prompts have most of the variance."""

    def __call__(self, prompt_N: IntArray, generator: np.random.Generator) -> Found:
        """Match rate, correlations inside rows, slope, spread and what choosing gains."""
        gold_NK = generator.normal(size=(prompt_N.size, self.replies))
        if self.scales:
            gold_NK *= np.exp(self.scales * generator.normal(size=int(prompt_N[-1]) + 1))[prompt_N, None]
        noise_N = self.noise * np.exp(0.5 * common(prompt_N, generator))
        scores_NK = gold_NK + noise_N[:, None] * generator.normal(size=gold_NK.shape)
        if self.grid:
            scores_NK = np.round(scores_NK / self.grid) * self.grid
        row_R = np.arange(prompt_N.size, dtype=np.intp).repeat(self.replies)
        replies = Replies.of(row_R, [str(prompt) for prompt in prompt_N.tolist()], gold_NK.ravel())
        scores_R = scores_NK.ravel()
        margins = replies.margins(scores_R), replies.gold_N, replies.prompt_L[replies.row_N]
        return {
            "gold: match rate": mean_share(replies.outcomes(scores_R), replies.decided_keys),
            **{f"gold: {name} in a row": one for name, one in within_rows(replies, scores_R)[0].items()},
            "gold: slope of margins": slope_of(*margins),
            "gold: spread of margins": spread_of(*margins),
            "gold: share gained by choosing": regret_of(replies, scores_R).share,
        }


PROXIES = (
    Proxy(name="2 replies", replies=2, noise=1.0),
    Proxy(name="4 replies", replies=4, noise=1.0),
    Proxy(name="4 replies, good proxy", replies=4, noise=0.15),
    Proxy(name="4 replies, ties", replies=4, noise=0.5, grid=1.0),
    Proxy(name="4 replies, scales of prompts", replies=4, noise=0.5, scales=0.7),
)


def matched(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """How far a proxy follows gold scores, by `rewardlab gold match`."""
    return cells({design.name: design for design in PROXIES}, min(draws, MOST_SLOW), generator, 2 * large)


KINDS: Mapping[str, Kind] = {
    "compare": compared,
    "perturb": perturbed,
    "match": matched,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data."""
    parser = parser_of(__doc__, list(KINDS), draws=1000)
    parser.add_argument("--large", type=int, default=20_000, help="the sample that is the truth has twice as many "
                        "prompts, that of two models twenty times")  # fmt: skip
    run = Simulation("coverage_paired", parser, arguments)
    return run_kinds(
        run,
        KINDS,
        "How often intervals of comparisons, changed texts and matches hold the truth",
        note=f"Changed texts and what is found by gold: at most {MOST_SLOW} draws. ",
    )


if __name__ == "__main__":
    sys.exit(main())
