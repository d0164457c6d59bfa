"""The chart of a match: what a proxy says of pairs beside what gold says of them."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.matching import Match, Replies
from rewardlab.gold.findings import number, percent
from rewardlab.report.charts import Chart, Dot, Point, Rule, axis

MOST: Final = 400
"""Most pairs that are drawn of a proxy; more would hide each other."""


def drawn_of(replies: Replies, scores_R: FloatArray) -> tuple[Point, ...]:
    """Return (gold's difference, the proxy's) of pairs, each of the reply that gold prefers less the other.

    They rise by gold's difference; ties of gold are left out. Of more than `MOST` pairs as many are taken, evenly from
    the smallest difference to the largest.
    """
    gold_N = replies.gold_N[replies.decided_N]
    own_N = replies.margins(scores_R)[replies.decided_N] * np.sign(gold_N)
    order_N = np.lexsort((own_N, np.abs(gold_N)))
    if len(order_N) > MOST:
        order_N = order_N[np.linspace(0, len(order_N) - 1, MOST).round().astype(np.intp)]
    return tuple(zip(np.abs(gold_N)[order_N].tolist(), own_N[order_N].tolist(), strict=True))


def margins_chart(name: str, drawn: tuple[Point, ...], match: Match, *, num_pairs: int) -> Chart:
    """Return the chart of one proxy: how far apart gold has two replies, and how far apart the proxy has them."""
    few = "" if len(drawn) == num_pairs else f", {len(drawn):,} of which are drawn, evenly by gold's difference"
    words = (
        f"{num_pairs:,} pairs{few}: score of the reply that gold prefers less that of the other. Above the dotted line "
        f"{name} orders a pair as gold does: {percent(match.agreement.match)}. Its differences are "
        f"{number(match.spread)} times as large as gold's (root mean square)."
    )
    return Chart(
        title=f"Differences of {name} beside gold's",
        words=words,
        x=axis("difference of gold's scores", [x for x, _ in drawn], include=(0.0,)),
        y=axis("difference of the proxy's", [y for _, y in drawn], include=(0.0,)),
        dots=tuple(Dot(series=0, at=at, low=math.nan, high=math.nan) for at in drawn),
        rules=(Rule(axis="y", at=0.0),),
    )
