"""How often `rewardlab gold curve` is right about where gold turns over, on simulated prompts with a known curve.

    scripts/bench gold_turnover

Each reply has a proxy score s, normal within its prompt, and gold a·s − b·max(s, 0)² and noise, whose a, b and size
differ from prompt to prompt. The expected curve is then a quadrature, and b decides where it is highest: nowhere (flat,
gold knows nothing of the proxy), beyond the largest n (rising), at the largest n with the next one as high (edge), at
n = 4, or at n = 1 (falling). Ends with an error if more than 5 % of the curves that do not turn over are called so, if
fewer than 93 % of the intervals of the highest n hold it, or a limit of the fall of curves that do turn over fails in
more than 7 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from harness import results
from harness.simulation import Simulation, parser_of
from rewardlab.analysis import stats
from rewardlab.analysis.best_of_n import Candidates, curves_of
from rewardlab.analysis.overoptimisation import fit_gain, sizes_of
from rewardlab.analysis.turnover import ALPHA, turn_over
from rewardlab.report.tables import format_estimate

FloatArray = npt.NDArray[np.float64]
KINDS = ("flat", "rising", "edge", "turning", "falling")
HONEST = ("flat", "rising", "edge")
"""Kinds that do not turn over."""
PROMPTS = (20, 50, 200)
REACHES = ((16, 32), (64, 128))
"""(largest n, replies to a prompt)."""
NOISES = ("normal", "long tail up", "long tail down")
PEAK = 4
SPREAD = 0.5
"""Standard deviation of a, of b, and of the logarithm of the size of the noise over prompts."""
MOST_ALARMS, LEAST_COVERAGE, MOST_MISSED = 0.05, 0.93, 0.07


@dataclass(frozen=True, kw_only=True)
class World:
    """How gold follows the proxy, and what that comes to."""

    kind: str
    rise: float
    bend: float
    gold_N: FloatArray
    """The expected curve."""

    @property
    def highest(self) -> set[int]:
        """Sizes at which it is highest."""
        return set((np.flatnonzero(self.gold_N >= self.gold_N.max() - 1e-9) + 1).tolist())

    @property
    def fall(self) -> float:
        """From there to the largest size."""
        return float(self.gold_N.max() - self.gold_N[-1])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one kind of data of one size showed, as shares of the draws."""

    kind: str
    prompts: int
    most: int
    replies: int
    noise: str
    draws: int
    called: float
    """Called a turn-over."""
    highest_held: float
    """The sizes at which gold may be highest hold that at which it is, the largest of equal ones."""
    called_and_held: float
    width: float
    """Sizes in the interval, the median."""
    fall_above: float
    """The lower limit of the fall is above it."""
    fall_below: float
    """The upper limit is below it."""
    beta_held: float
    """The interval of β holds that of the fit to the expected curve."""
    plain_called: float
    """An ordinary interval, at 90 %, of the highest point less the last one lies above 0."""
    plain_held: float
    """The middle 95 % of the highest sizes of bootstrap draws hold that at which gold is highest."""


def world(kind: str, most: int) -> World:
    """The world of a kind, with the b that puts its highest n where it is to be."""
    grid = np.linspace(-9.0, 9.0, 20_001)
    sizes_N = np.arange(1, most + 1)[:, None]
    density = sizes_N * norm.pdf(grid) * norm.cdf(grid) ** (sizes_N - 1)
    rise_N = np.trapezoid(density * grid, grid, axis=1)
    bend_N = np.trapezoid(density * np.square(np.maximum(grid, 0.0)), grid, axis=1)
    # From n − 1 to n gold rises while b is below this.
    limits = np.diff(rise_N) / np.diff(bend_N)
    rise, bend = {
        "flat": (0.0, 0.0),
        "rising": (1.0, 0.0),
        "edge": (1.0, float(limits[-1])),
        "turning": (1.0, float(limits[PEAK - 2] + limits[PEAK - 1]) / 2),
        "falling": (1.0, 1.5 * float(limits[0])),
    }[kind]
    return World(kind=kind, rise=rise, bend=bend, gold_N=rise * rise_N - bend * bend_N)


def drawn(of: World, prompts: int, replies: int, noise: str, generator: np.random.Generator) -> list[Candidates]:
    """Prompts with replies."""
    proxy = generator.normal(size=(prompts, replies))
    rise, bend = 1 + SPREAD * generator.normal(size=(2, prompts, 1))
    size = np.exp(SPREAD * generator.normal(size=(prompts, 1)))
    tail = {"long tail up": 1.0, "long tail down": -1.0}.get(noise, 0.0)
    error = tail * (generator.exponential(size=proxy.shape) - 1) if tail else generator.normal(size=proxy.shape)
    gold = of.rise * rise * proxy - of.bend * bend * np.square(np.maximum(proxy, 0.0)) + size * error
    gold += 3 * generator.normal(size=(prompts, 1))
    return [Candidates(prompt=str(p), proxy_K=proxy[p], gold_K=gold[p]) for p in range(prompts)]


def cell(
    of: World, prompts: int, reach: tuple[int, int], noise: str, draws: int, run: Simulation, *, flips: int
) -> Cell:
    """Judge new data, so many times."""
    most, replies = reach
    places = [KINDS.index(of.kind), PROMPTS.index(prompts), REACHES.index(reach), NOISES.index(noise)]
    generator = run.generator(int(np.dot(places, (1000, 100, 10, 1))))
    sizes = sizes_of(most)
    wanted = max(of.highest)
    beta = fit_gain(np.tile(of.gold_N, (2, 1))).beta.value
    found = []
    for number in range(draws):
        gold_PN = curves_of(drawn(of, prompts, replies, noise, generator), most=most).gold_PN
        assert gold_PN is not None
        turn = turn_over(gold_PN[:, np.array(sizes) - 1], sizes, draws=flips, seed=number)
        fit = fit_gain(gold_PN, draws=1)
        called = turn.p <= ALPHA
        held = wanted in turn.may_be
        found.append(
            [
                called,
                held,
                called and held,
                len(turn.may_be),
                turn.fall.low > of.fall + 1e-9,
                turn.fall.high < of.fall - 1e-9,
                fit.beta.low <= beta <= fit.beta.high,
                *_plain(gold_PN[:, np.array(sizes) - 1], sizes, wanted, generator, flips),
            ]
        )
    values = np.array(found, dtype=np.float64)
    mean = values.mean(0).tolist()
    return Cell(
        kind=of.kind,
        prompts=prompts,
        most=most,
        replies=replies,
        noise=noise,
        draws=draws,
        called=mean[0],
        highest_held=mean[1],
        called_and_held=mean[2],
        width=float(np.median(values[:, 3])),
        fall_above=mean[4],
        fall_below=mean[5],
        beta_held=mean[6],
        plain_called=mean[7],
        plain_held=mean[8],
    )


def _plain(
    gold_PN: FloatArray, sizes: Sequence[int], wanted: int, generator: np.random.Generator, draws: int
) -> tuple[bool, bool]:
    """What tests that do not know of the choice of the highest point would say: (called, held)."""
    best = int(np.argmax(gold_PN.mean(0)))
    called = stats.mean(gold_PN[:, best] - gold_PN[:, -1], level=1 - 2 * ALPHA).low > 0
    count = len(gold_PN)
    times = generator.multinomial(count, np.full(count, 1 / count), size=draws)
    low, high = np.quantile(np.array(sizes)[(times @ gold_PN).argmax(1)], [0.025, 0.975], method="inverted_cdf")
    return called, bool(low <= wanted <= high)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, judge, and write the rates."""
    parser = parser_of(__doc__, KINDS, draws=200)
    parser.add_argument("--flips", type=int, default=499, help="draws and flips of each test")
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), choices=PROMPTS)
    run = Simulation("gold_turnover", parser, arguments)
    options = run.options
    cells = [
        cell(world(kind, reach[0]), prompts, reach, noise, options.draws, run, flips=options.flips)
        for kind in options.kinds
        for reach in REACHES
        for prompts in options.prompts
        for noise in NOISES
    ]
    honest = [one for one in cells if one.kind in HONEST]
    turning = [one for one in cells if one.kind not in HONEST]
    page = [
        f"{len(cells)} kinds of data, {options.draws} draws of each ({run.minutes}).",
        "",
        results.table(
            ["what", "curves", "share (Wilson, 95 %)", "**of a kind, least to most**"],
            [
                _pooled("called a turn-over, of curves that have none", honest, "called"),
                *(_pooled(f"of these {kind}", [c for c in honest if c.kind == kind], "called") for kind in HONEST),
                _pooled("called a turn-over, of curves that have one", turning, "called"),
                *(
                    _pooled(f"of these with {prompts} prompts", [c for c in turning if c.prompts == prompts], "called")
                    for prompts in options.prompts
                ),
                _pooled("interval of the highest n holds it", cells, "highest_held"),
                _pooled("of these of curves that turn over", turning, "highest_held"),
                _pooled("lower limit of the fall is too high", cells, "fall_above"),
                _pooled("upper limit of the fall is too low", cells, "fall_below"),
                _pooled("interval of β holds it", cells, "beta_held"),
                _pooled("plain test called it, of curves that have none", honest, "plain_called"),
                *(
                    _pooled(f"of these {kind}", [c for c in honest if c.kind == kind], "plain_called")
                    for kind in HONEST
                ),
                _pooled("plain bootstrap holds the highest n", cells, "plain_held"),
                _pooled("of these flat", [c for c in honest if c.kind == "flat"], "plain_held"),
            ],
        ),
        "By kind of data, in percent:",
        "",
        results.table(
            [
                *("curve", "largest n", "replies", "prompts", "noise", "called", "highest n held"),
                *("sizes in its interval", "fall too high", "too low", "β held"),
                *("plain test", "plain bootstrap"),
            ],
            [
                [
                    *(one.kind, one.most, one.replies, one.prompts, one.noise, *_percent(one.called, one.highest_held)),
                    f"{one.width:g}",
                    *_percent(one.fall_above, one.fall_below, one.beta_held, one.plain_called, one.plain_held),
                ]
                for one in cells
            ],
        ),
    ]
    status = run.record("all", page=page, cells=[asdict(one) for one in cells])
    wrong = [
        bool(honest) and _share(honest, "called") > MOST_ALARMS,
        _share(cells, "highest_held") < LEAST_COVERAGE,
        bool(turning) and max(_share(turning, name) for name in ("fall_above", "fall_below")) > MOST_MISSED,
    ]
    return 1 if any(wrong) else status


def _share(cells: Iterable[Cell], name: str) -> float:
    return float(np.mean([getattr(one, name) for one in cells]))


def _pooled(what: str, cells: Sequence[Cell], name: str) -> list[str]:
    if not cells:
        return [what, "0", "–", "–"]
    number = sum(one.draws for one in cells)
    values = [getattr(one, name) for one in cells]
    share = format_estimate(stats.wilson(round(_share(cells, name) * number), number), percent=True)
    return [what, f"{number:,}", share, f"**{min(values):.1%} to {max(values):.1%}**"]


def _percent(*shares: float) -> list[str]:
    return [f"{100 * share:.1f}" for share in shares]


if __name__ == "__main__":
    sys.exit(main())
