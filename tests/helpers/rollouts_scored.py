"""Rollouts, their scores by a scorer of their own, and members whose scores are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rewardlab.analysis.ensembles import Scale
from rewardlab.rl import RewardScorer, Rollout
from rewardlab.rl.members import About, Found

NEAR = 2e-5
"""How near the scores of two ways to compute them are in float32."""


def talk(prompt: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


TALKS = [talk(f"Question {n % 4}?", f"Answer {n}, " + "and water " * (n % 3)) for n in range(14)] + [
    talk("Question 1?", "Answer 5, and water and water ")
]


def scores(source: Any, rollouts: Sequence[Any], **settings: Any) -> list[float]:
    async def done() -> list[float]:
        async with RewardScorer(source, **settings) as scorer:
            return await scorer.score(rollouts)

    return asyncio.run(done())


def details(source: Any, rollouts: Sequence[Any], **settings: Any) -> list[Any]:
    async def done() -> list[Any]:
        async with RewardScorer(source, **settings) as scorer:
            return await scorer.details(rollouts)

    return asyncio.run(done())


class Told:
    """A member whose scores are given, and that notes what it was asked."""

    def __init__(self, name: str, values: Sequence[float | None], scale: Scale | None = None) -> None:
        self.name, self.values, self.scale = name, values, scale
        self.closed = 0

    async def open(self) -> About:
        return About(joins_texts=False, tolerance=0.01, arithmetic="float32", scale=self.scale)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Found]:
        return [Found(score=value) for value in self.values]

    async def aclose(self) -> None:
        self.closed += 1
