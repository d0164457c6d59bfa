"""Drawn gold rows, proxies of a given match, and the findings of `gold match` on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from harness.gold_rows import Size, draw_rows, draw_scores, proxy
from rewardlab.core.types import Estimate
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.findings import Finding
from rewardlab.gold.matching.columns import Part, part_of
from rewardlab.gold.matching.run import Matched, match_parts
from rewardlab.gold.matching.runs import RunFacts


def drawn(rows: int = 200, replies: int = 2, seed: int = 0, tag: str = "") -> list[GoldRow]:
    """Gold rows of replies, drawn."""
    return draw_rows(Size(rows, replies), np.random.default_rng(seed), tag=tag)


def scored(rows: list[GoldRow], match_rate: float = 0.88, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    """Scores of a proxy with about this match."""
    return draw_scores(rows, match_rate, np.random.default_rng(seed), scale=scale)


def part(rows: list[GoldRow], *scores: np.ndarray, name: str = "test") -> Part:
    """The rows with the scores of each proxy, `p0`, `p1` and so on."""
    return part_of(name, rows, [proxy(own, f"p{number}") for number, own in enumerate(scores)])


def findings(matched: Matched) -> dict[str, Finding]:
    """Findings by name."""
    return {one.name: one for one in matched.findings}


def judged(rows: list[GoldRow], scores: np.ndarray, **more: object) -> dict[str, Finding]:
    """The findings on one proxy by name."""
    return findings(match_parts(part(rows, scores), **more))


def facts(**changed: object) -> RunFacts:
    """What a good run tells."""
    base = RunFacts(
        folder=Path("run"),
        epochs=1.0,
        loss_is="train_nll",
        end_loss=sure(0.2),
        epoch_loss=sure(0.2),
        train_accuracy=sure(0.95),
        own_accuracy=sure(0.88),
        own_accuracy_on="test",
        learning_rate=5e-6,
        problems=(),
    )
    return dataclasses.replace(base, **changed)


def sure(value: float, reach: float = 0.02) -> Estimate:
    """An estimate with this interval around it."""
    return Estimate(value=value, low=value - reach, high=value + reach, n=500, method="given")
