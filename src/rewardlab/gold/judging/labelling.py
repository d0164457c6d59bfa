"""Rows with replies become rows with gold scores, by the verdicts of a judge on every pair of replies.

The score of a reply is the mean of what it wins, over the pairs that were judged: 1 against a reply that it beats in
both orders, ½ against an equal one. It says nothing across prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.judging.judge import CAUSES, Verdict

JUDGEMENTS: Final = "judgements"
"""Column with what was said about each pair."""
Pair = tuple[int, int]


def pairs_of(row: GoldRow) -> list[Pair]:
    """Return the pairs of replies that a judge compares: all those of replies that are there."""
    there = [number for number, text in enumerate(row.responses) if text is not None]
    return list(combinations(there, 2))


def settled(row: GoldRow, verdicts: Mapping[Pair, Verdict]) -> GoldRow:
    """Return a row with the scores that verdicts on its `pairs_of` give, and with the verdicts in `JUDGEMENTS`.

    A reply without a judged pair has no score, and the reason in `gold_errors`.
    """
    won: list[list[float]] = [[] for _ in row.responses]
    for (first, second), verdict in verdicts.items():
        if verdict.label is not None:
            won[first].append(verdict.label)
            won[second].append(1 - verdict.label)
    gold = tuple(sum(shares) / len(shares) if shares else None for shares in won)
    errors = {str(number): _why(row, number, verdicts) for number, score in enumerate(gold) if score is None}
    told = [_as_dict(pair, verdict) for pair, verdict in verdicts.items()]
    return replace(row, gold=gold, gold_errors=errors, extra={**row.extra, JUDGEMENTS: told})


def _why(row: GoldRow, number: int, verdicts: Mapping[Pair, Verdict]) -> str:
    """Return why a reply has no score."""
    if row.responses[number] is None:
        return "there is no reply"
    causes = dict.fromkeys(cause for pair, one in verdicts.items() if number in pair for cause in one.causes)
    return "; ".join(CAUSES[cause] for cause in causes) or "there is no other reply to compare it with"


def _as_dict(pair: Pair, verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as it is written: what the first reply wins, together and in each order."""
    told: dict[str, Any] = {"first": pair[0], "second": pair[1], "label": verdict.label}
    told["orders"] = list(verdict.shares)
    if verdict.causes:
        told["causes"] = [one.cause for one in verdict.orders]
    if any(one.detail for one in verdict.orders):
        told["answers"] = [one.detail for one in verdict.orders]
    return told
