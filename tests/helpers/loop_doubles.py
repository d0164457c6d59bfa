"""Stand-ins for a scorer of rollouts: one that knows its scores by the reply, and one that asks a served app."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rewardlab.rl.rollouts import Rollout
from rewardlab.rl.scorer import Scored

NOISE = 2e-4


class TableScorer:
    """Gives each reply the score in a table, and keeps what it was asked."""

    def __init__(self, scores: Mapping[str, Any], *, error: Exception | None = None) -> None:
        self.scores, self.error = scores, error
        self.asked: list[Rollout] = []
        self.closed = False

    async def details(self, rollouts: Iterable[Any]) -> list[Scored]:
        given = list(rollouts)
        self.asked += given
        if self.error is not None:
            raise self.error
        return [self._scored(self.scores[one.conversation[-1].content]) for one in given]

    def _scored(self, score: Any) -> Scored:
        made = Scored(score=0.0, noise=NOISE, truncated_tokens=0)
        object.__setattr__(made, "score", score)  # also what no sound scorer gives
        return made

    async def aclose(self) -> None:
        self.closed = True


class ServedScorer:
    """Asks /v1/score of an app for the messages."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def details(self, rollouts: Iterable[Any]) -> list[Scored]:
        talks = [[turn.as_dict() for turn in one.conversation] for one in rollouts]
        return [Scored(score=score, noise=NOISE) for score in scores_of(self.client, talks)]

    async def aclose(self) -> None:
        pass


def scores_of(client: Any, conversations: list[list[dict[str, str]]]) -> list[float]:
    """The scores that /v1/score gives to conversations."""
    answer = client.post("/v1/score", json={"conversations": conversations})
    assert answer.status_code == 200, answer.text
    return [group["scores"][0] for group in answer.json()["groups"]]
