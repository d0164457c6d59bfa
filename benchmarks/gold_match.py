"""How often `rewardlab gold match` and `gold check` raise a false alarm, and how often they find what was planted.

    scripts/bench gold_match

Gold scores and proxies are drawn (`harness/gold_rows.py`), so the true match and the true size of margins are known.

    order      honest scores, and scores that are swapped, shifted or of another set: is the right fault named?
    edge       proxies exactly at a threshold: is one side of it claimed too often?
    texts      rows with words that tell of gold more or less, in order and shifted by a row: what the texts alone tell

Ends with an error if more than 1 % of the honest draws of `order` or of `texts` are called out of order, or at an edge
more than 5 % are called above it or more than 5 % below (the interval is two-sided at 95 %, so 2.5 % each are wanted).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from harness import gold_rows, results
from harness.gold_rows import SCORE_FAULTS, Size
from harness.simulation import Simulation, parser_of
from rewardlab.analysis import stats
from rewardlab.analysis.agreement import Agreement
from rewardlab.analysis.matching import Match, Regret, Replies, slope_of, spread_of
from rewardlab.analysis.stats import wilson
from rewardlab.core.types import Estimate
from rewardlab.gold.checking.texts import text_finding
from rewardlab.gold.matching.judged import Judged, Limits
from rewardlab.gold.matching.order import Order, order_of
from rewardlab.gold.matching.verdicts import judge
from rewardlab.report.tables import format_estimate

KINDS = ("order", "edge", "texts")
SIZES = (Size(50, 2), Size(200, 2), Size(1000, 2), Size(200, 4), Size(200, 2, tied=0.2), Size(400, 2, repeats=4))
MATCHES = (0.5, 0.6, 0.7, 0.8, 0.9)
ORDER_FAULTS = (
    "swapped",
    "shifted by a row",
    "shifted from the middle on",
    "shifted in the last tenth",
    "sign turned round",
)
SHOWN = (0.0, 0.2, 0.5)
TEXT_ROWS = (100, 400, 1500)
FALSE = 0.01
AT_EDGE = 0.05
NONE = Estimate(value=math.nan, low=math.nan, high=math.nan, n=0, method="not computed")


def prompts_of(size: Size) -> list[str]:
    """Keys of prompts."""
    return [f"p{number // size.repeats}" for number in range(size.rows)]


def named(order: Order) -> str:
    """What was named: swapped, turned round, shifted, or nothing."""
    found = order.named
    if found is None:
        return "nothing"
    return found.name if found.name in ("swapped", "turned round") else "shifted"


def right(fault: str, replies: int) -> str:
    """What should be named. Of two replies a turned sign is a swap."""
    if fault == "sign turned round":
        return "swapped" if replies == 2 else "turned round"
    return "swapped" if fault == "swapped" else "shifted"


def orders(size: Size, match: float, fault: str, draws: int, generator: np.random.Generator) -> Counter[str]:
    """What was named in new draws."""
    found: Counter[str] = Counter()
    for _ in range(draws):
        gold = gold_rows.draw_gold(size, generator)
        scores = gold_rows.scores_for(gold, match, generator)
        if fault:
            scores = SCORE_FAULTS[fault](scores, generator)
        found[named(order_of(scores, gold, prompts_of(size)))] += 1
    return found


def quick_match(gold: np.ndarray, scores: np.ndarray, prompts: Sequence[str]) -> Match:
    """The match with what verdicts at the edge need, without correlations."""
    rows, replies = gold.shape
    own = Replies.of(np.repeat(np.arange(rows), replies), prompts, gold.ravel())
    margin_N, prompt_N = own.margins(scores.ravel()), own.prompt_L[own.row_N]
    return Match(
        num_pairs=len(margin_N),
        proxy_ties=0,
        agreement=Agreement(
            match=stats.mean_share(own.outcomes(scores.ravel()), own.decided_keys), correlations={}, gold_ties=0
        ),
        within={},
        rows_without_order=0,
        margins={},
        slope=slope_of(margin_N, own.gold_N, prompt_N),
        spread=spread_of(margin_N, own.gold_N, prompt_N),
        score_spread=NONE,
        regret=Regret(num_rows=0, lost=NONE, gained=NONE, share=NONE),
    )


def edges(size: Size, draws: int, generator: np.random.Generator) -> dict[str, Counter[str]]:
    """Verdicts on proxies exactly at a threshold: `above`, `below` or `undecided`."""
    found: dict[str, Counter[str]] = {name: Counter() for name in ("match 80%", "match 50%", "margins 0.25")}
    for _ in range(draws):
        for name, match, scale in (("match 80%", 0.8, 1.0), ("match 50%", 0.5, 1.0), ("margins 0.25", 0.66, 0.25)):
            gold = gold_rows.draw_gold(size, generator)
            scores = gold_rows.scores_for(gold, match, generator, scale=scale)
            test = quick_match(gold, scores, prompts_of(size))
            judged = Judged(name="p", test=test, train=None, order=Order(alternatives=()), train_order=None, run=None)
            status = {one.name: one.status for one in judge(judged, Limits())}
            found[name][_side(name, status, test)] += 1
    return found


def _side(name: str, status: Mapping[str, str], test: Match) -> str:
    if name == "margins 0.25":
        return {"pass": "above", "undecided": "undecided"}.get(status["compressed scores"], "below")
    if name == "match 50%":
        own = test.agreement.match
        return "above" if own.low > 0.5 else "below" if own.high < 0.5 else "undecided"
    return {"pass": "above", "undecided": "undecided"}.get(status["match on test"], "below")


def texts(rows: int, shown: float, shifted: bool, draws: int, generator: np.random.Generator) -> Counter[str]:
    """Statuses of what the texts say."""
    found: Counter[str] = Counter()
    for _ in range(draws):
        drawn = gold_rows.draw_rows(Size(rows, 2, shown=shown), generator)
        if shifted:
            drawn = gold_rows.with_gold(drawn, np.roll(gold_rows.gold_of(drawn), 1, axis=0))
        finding = text_finding(drawn)
        assert finding is not None
        found[finding.status] += 1
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, judge, and write the rates."""
    parser = parser_of(__doc__, KINDS, draws=400)
    parser.add_argument("--text-draws", type=int, default=40, help="draws of each cell of `texts`, which fit models")
    run = Simulation("gold_match", parser, arguments)
    options = run.options
    page: list[str] = []
    cells: dict[str, object] = {}
    wrong = False
    for kind, part in (("order", _order), ("edge", _edge), ("texts", _texts)):
        if kind in options.kinds:
            told, own, bad = part(run)
            page += told
            cells[kind] = own
            wrong |= bad
    page = [f"{options.draws} draws of each cell, {options.text_draws} of texts ({run.minutes}).", "", *page]
    status = run.record("all" if set(options.kinds) == set(KINDS) else "_".join(options.kinds), page=page, cells=cells)
    return 1 if wrong else status


Part = tuple[list[str], object, bool]


def _order(run: Simulation) -> Part:
    draws = run.options.draws
    honest = {
        (size.name, match): orders(size, match, "", draws, run.generator(100 + 10 * number + place))
        for number, size in enumerate(SIZES)
        for place, match in enumerate(MATCHES)
    }
    faults = {
        (fault, size.name, match): (size, orders(size, match, fault, max(draws // 4, 1), run.generator(1000 + n)))
        for n, (fault, size, match) in enumerate(
            (fault, size, match) for fault in ORDER_FAULTS for size in SIZES[1:4] for match in (0.66, 0.8, 0.9)
        )
    }
    alarms = sum(sum(found.values()) - found["nothing"] for found in honest.values())
    total = sum(sum(found.values()) for found in honest.values())
    told = [
        "Honest scores that are called out of order (1 % is wanted at most; Wilson, 95 %):",
        "",
        results.table(
            ["rows", *(f"match {match:.0%}" for match in MATCHES)],
            [[size.name, *(f"{_alarms(honest[size.name, match]):.2%}" for match in MATCHES)] for size in SIZES]
            + [["**all together**", format_estimate(wilson(alarms, total), percent=True), "", "", "", ""]],
        ),
        "Planted faults of order that are named rightly:",
        "",
        results.table(
            ["fault", "rows", "match 66%", "match 80%", "match 90%"],
            [
                [
                    fault,
                    size.name,
                    *(
                        f"{faults[fault, size.name, match][1][right(fault, size.replies)] / max(draws // 4, 1):.0%}"
                        for match in (0.66, 0.8, 0.9)
                    ),
                ]
                for fault in ORDER_FAULTS
                for size in SIZES[1:4]
            ],
        ),
    ]
    data = {
        "honest": [{"rows": name, "match": match, **found} for (name, match), found in honest.items()],
        "faults": [{"fault": f, "rows": name, "match": m, **found} for (f, name, m), (_, found) in faults.items()],
    }
    return told, data, alarms > FALSE * total


def _alarms(found: Counter[str]) -> float:
    return 1 - found["nothing"] / sum(found.values())


def _edge(run: Simulation) -> Part:
    sizes = [size for size in SIZES if size.rows >= 200]
    found = {size.name: edges(size, run.options.draws, run.generator(3000 + n)) for n, size in enumerate(sizes)}
    rows = [
        [name, edge, *(f"{own[side] / sum(own.values()):.1%}" for side in ("above", "below", "undecided"))]
        for name, all_edges in found.items()
        for edge, own in all_edges.items()
    ]
    told = [
        "Proxies exactly at a threshold (2.5 % on each side are wanted; the rest is undecided):",
        "",
        results.table(["rows", "threshold", "called above", "called below", "undecided"], rows),
    ]
    together: dict[str, Counter[str]] = {}
    for all_edges in found.values():
        for edge, own in all_edges.items():
            together.setdefault(edge, Counter()).update(own)
    bad = any(own[side] > AT_EDGE * sum(own.values()) for own in together.values() for side in ("above", "below"))
    return told, {name: {edge: dict(own) for edge, own in one.items()} for name, one in found.items()}, bad


def _texts(run: Simulation) -> Part:
    draws = run.options.text_draws
    found = {
        (rows, shown, shifted): texts(rows, shown, shifted, draws, run.generator(5000 + n))
        for n, (rows, shown, shifted) in enumerate(
            (rows, shown, shifted) for rows in TEXT_ROWS for shown in SHOWN for shifted in (False, True)
        )
    }
    honest = sum(own["fail"] for (_, _, shifted), own in found.items() if not shifted)
    total = draws * len(TEXT_ROWS) * len(SHOWN)
    told = [
        f"Texts against scores alone: {honest} of {total} honest sets are called shifted "
        f"({format_estimate(wilson(honest, total), percent=True)}); sets shifted by a row:",
        "",
        results.table(
            ["rows", "share of gold's variance in the words", "honest: pass", "honest: fail", "shifted: named"],
            [
                [
                    rows,
                    f"{shown:.0%}",
                    f"{found[rows, shown, False]['pass'] / draws:.0%}",
                    f"{found[rows, shown, False]['fail'] / draws:.0%}",
                    f"{found[rows, shown, True]['fail'] / draws:.0%}",
                ]
                for rows in TEXT_ROWS
                for shown in SHOWN
            ],
        ),
    ]
    data = [{"rows": r, "shown": s, "shifted": moved, **own} for (r, s, moved), own in found.items()]
    return told, data, honest > max(FALSE * total, 1)


if __name__ == "__main__":
    sys.exit(main())
