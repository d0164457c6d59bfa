"""Drawn rows with gold scores, scores of proxies whose match is known, and faults to plant in either.

A reply is words; gold goes by how many of the good ones it has, and by noise that no text shows. A proxy is gold's
score plus noise: with gold margins N(0, 2s²) and noise margins N(0, 2t²) its match is ½ + atan(s/t)/π.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rewardlab.core.types import Message
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.proxies import Proxy

GOOD: Final = ("clear", "because", "example", "first", "therefore", "precise")
PLAIN: Final = tuple(f"word{number}" for number in range(60))
MEAN, SPREAD = 10.0, 5.0
"""Of gold scores."""
Table = np.ndarray
"""[L, K] scores."""


@dataclass(frozen=True)
class Size:
    """How much is drawn."""

    rows: int
    replies: int
    tied: float = 0.0
    """Share of rows whose first two replies have one gold score."""
    repeats: int = 1
    """Rows with one prompt."""
    shown: float = 0.5
    """Share of the variance of gold that the words show."""

    @property
    def name(self) -> str:
        """For a table."""
        more = (f", {self.tied:.0%} ties" if self.tied else "") + (
            f", prompts {self.repeats} times" if self.repeats > 1 else ""
        )
        return f"{self.rows} rows of {self.replies}{more}"


def draw_rows(size: Size, generator: np.random.Generator, *, tag: str = "") -> list[GoldRow]:
    """Rows with texts and gold scores."""
    rows = []
    for number in range(size.rows):
        texts, scores = [], []
        for _ in range(size.replies):
            count = int(generator.binomial(len(GOOD), 0.5))
            words = [*generator.choice(GOOD, count, replace=False), *generator.choice(PLAIN, generator.integers(5, 15))]
            generator.shuffle(words)
            shown = (count - len(GOOD) / 2) / math.sqrt(len(GOOD) / 4)
            hidden = generator.normal()
            scores.append(MEAN + SPREAD * (math.sqrt(size.shown) * shown + math.sqrt(1 - size.shown) * hidden))
            texts.append(" ".join(map(str, words)))
        if generator.random() < size.tied and size.replies > 1:
            scores[1] = scores[0]
        rows.append(
            GoldRow(
                id=f"{tag}{number}",
                prompt=(Message("user", f"Question {tag}{number // size.repeats}?"),),
                responses=tuple(texts),
                gold=tuple(scores),
                extra={"source": ("a", "b")[number % 2]},
            )
        )
    return rows


def noise_for(match: float) -> float:
    """Standard deviation of the noise of a proxy, in that of gold, whose match is this: above ½ and below 1."""
    return 1 / math.tan((match - 0.5) * math.pi)


def gold_of(rows: list[GoldRow]) -> Table:
    """[L, K] gold scores."""
    return np.array([row.gold for row in rows], dtype=np.float64)


def draw_scores(rows: list[GoldRow], match: float, generator: np.random.Generator, *, scale: float = 1.0) -> Table:
    """Scores of a proxy of these rows with this match."""
    return scores_for(gold_of(rows), match, generator, scale=scale)


def scores_for(gold: Table, match: float, generator: np.random.Generator, *, scale: float = 1.0) -> Table:
    """Scores of a proxy with this match with gold; at ½ they know nothing. `scale` is their size beside gold's."""
    noise = generator.normal(size=gold.shape) * SPREAD
    if match == 0.5:
        return scale * noise + MEAN
    mixed = gold - MEAN + noise_for(match) * noise
    found: Table = scale * mixed / math.hypot(1.0, noise_for(match)) + MEAN
    return found


def draw_gold(size: Size, generator: np.random.Generator) -> Table:
    """Gold scores alone, without texts."""
    gold: Table = MEAN + SPREAD * generator.normal(size=(size.rows, size.replies))
    tied = generator.random(size.rows) < size.tied
    gold[tied, 1] = gold[tied, 0]
    return gold


def proxy(scores: Table, name: str = "proxy") -> Proxy:
    """Scores as they come from a file."""
    return Proxy(name=name, scores=tuple(tuple(map(float, row)) for row in scores))


def _shift(scores: Table, start: int) -> Table:
    moved = scores.copy()
    moved[start:] = np.roll(scores[start:], -1, axis=0)
    return moved


SCORE_FAULTS: Final[Mapping[str, Callable[[Table, np.random.Generator], Table]]] = {
    "swapped": lambda scores, _: scores[:, ::-1],
    "shifted by a row": lambda scores, _: np.roll(scores, 1, axis=0),
    "shifted from the middle on": lambda scores, _: _shift(scores, len(scores) // 2),
    "shifted in the last tenth": lambda scores, _: _shift(scores, len(scores) - len(scores) // 10),
    "sign turned round": lambda scores, _: -scores,
    "compressed to a tenth": lambda scores, _: scores / 10 + 4.5,
    "of another set": lambda scores, generator: generator.permutation(scores, axis=0),
}
"""Fault of the scores of a proxy -> what it does to them."""


def with_gold(rows: list[GoldRow], gold: Table) -> list[GoldRow]:
    """Rows with other gold scores."""
    return [replace(row, gold=tuple(map(float, own))) for row, own in zip(rows, gold, strict=True)]
