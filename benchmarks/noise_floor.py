"""What the noise floor costs, and what it keeps from being learnt: groups of simulated scores, each scored twice.

    scripts/bench noise_floor --draws 4000

Scores of a group are normal around a mean of their own. Both scorings are off from them by up to a fifth of the
tolerance, as an arithmetic typically is, or by up to the whole of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from harness import results
from harness.simulation import Simulation, parser_of
from rewardlab.analysis import stats
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.core.types import Estimate
from rewardlab.rl import Noise, advantages

KINDS = {
    "bfloat16": SCORE_TOLERANCE["bfloat16"],
    "float16": SCORE_TOLERANCE["float16"],
    "measured 0.01": 0.01,
    "float32": SCORE_TOLERANCE["float32"],
}
"""Whose tolerance it is -> the tolerance."""
SIZES = (4, 8, 16)
SPREADS = (0.1, 0.3, 1.0, 3.0)
"""Standard deviations of the scores of a group."""
BATCH = 100
"""Groups that are scored together."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What groups of one size and spread came to."""

    size: int
    spread: float
    groups: int
    below: Estimate
    """Share of groups that are zero."""
    silent: Estimate
    """Share of rollouts with advantage 0, those of such groups included."""
    turned: Estimate
    """Share of rollouts whose advantage has another sign in the second scoring, without the floor."""
    turned_at_most: Estimate
    """The same where both scorings are off by up to the whole tolerance."""
    turned_above: int
    """Rollouts whose advantage has another sign in the second scoring, with the floor, in all these scorings."""


def draw(tolerance: float, size: int, spread: float, count: int, generator: np.random.Generator) -> Cell:
    """Groups of one kind, scored twice with each amount of noise."""
    noise = Noise(tolerance=tolerance, source="simulated")
    turned: dict[float, list[float]] = {0.2: [], 1.0: []}
    below, silent, above = 0, list[float](), 0
    for start in range(0, count, BATCH):
        many = min(BATCH, count - start)
        names = np.repeat(np.arange(many), size)
        reference = np.repeat(generator.normal(size=many) * 2, size) + spread * generator.normal(size=many * size)
        for part, shares in turned.items():
            off = part * tolerance * np.maximum(1, np.abs(reference))
            twice = [reference + off * generator.uniform(-1, 1, size=len(off)) for _ in range(2)]
            plain = [advantages(one, names).advantages_R for one in twice]
            shares += (plain[0] * plain[1] < 0).reshape(many, size).mean(axis=1).tolist()
            found = [advantages(one, names, noise_R=noise.between_scorings(one)) for one in twice]
            above += int((found[0].advantages_R * found[1].advantages_R < 0).sum())
            if part == 0.2:
                below += found[0].num_groups_below
                silent += (found[0].advantages_R == 0).reshape(many, size).mean(axis=1).tolist()
    return Cell(
        size=size,
        spread=spread,
        groups=count,
        below=stats.wilson(below, count),
        silent=stats.mean_share(silent),
        turned=stats.mean_share(turned[0.2]),
        turned_at_most=stats.mean_share(turned[1.0]),
        turned_above=above,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw groups of every kind, and write what became of them. Ends with an error if a counted sign was turned."""
    parser = parser_of(__doc__, [*KINDS], draws=4000)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    run = Simulation("noise_floor", parser, arguments)
    cells = {
        kind: [
            draw(KINDS[kind], size, spread, run.options.draws, run.generator(100 * number + size))
            for size in run.options.sizes
            for spread in SPREADS
        ]
        for number, kind in enumerate(KINDS)
        if kind in run.options.kinds
    }
    record = {kind: [asdict(cell) for cell in of] for kind, of in cells.items()}
    status = run.record("all", page=_page(run, cells), cells=record)
    return status or int(any(cell.turned_above for of in cells.values() for cell in of))


def _shown(share: Estimate) -> str:
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _page(run: Simulation, cells: dict[str, list[Cell]]) -> list[str]:
    page = [
        f"Groups of simulated scores, {run.options.draws} in each row, each scored twice; 95 % intervals by group "
        f"({run.minutes}). `zero groups` and `zero rollouts` are what the floor silences. `turned` is the share of "
        "rollouts whose advantage (rule `trl`) has another sign in the second scoring if there is no floor, with noise "
        "up to a fifth of the tolerance and up to all of it. `turned, floor` counts them with it: wanted 0.",
        "",
    ]
    for kind, of in cells.items():
        rows = [
            [
                cell.size,
                cell.spread,
                *map(_shown, (cell.below, cell.silent, cell.turned, cell.turned_at_most)),
                cell.turned_above,
            ]
            for cell in of
        ]
        head = ["replies", "spread", "zero groups", "zero rollouts", "turned", "turned at most", "turned, floor"]
        page += [f"## {kind}: tolerance {KINDS[kind]:g}", "", results.table(head, rows), ""]
    return page


if __name__ == "__main__":
    sys.exit(main())
