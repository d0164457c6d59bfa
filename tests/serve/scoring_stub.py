"""A backend without a model, for tests of what happens to rows, scores and files."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewardlab.serve.file_scoring.backends import Answer
from rewardlab.serve.file_scoring.rows import Asked


def score_of(reply: str) -> float:
    """A score that is the same in every process."""
    return zlib.crc32(reply.encode()) / 2**32


class Stub:
    """Scores a reply by its letters; gives causes to replies with `!`; `before` sees the rows of every call."""

    def __init__(
        self,
        before: Callable[[Sequence[Asked]], None] = lambda rows: None,
        *,
        num_parts: int = 1,
        bare: bool | None = False,
        digest: str = "d",
    ) -> None:
        self.before = before
        self.num_parts = num_parts
        self.bare = bare
        self.identity = {"backend": "stub", "model": digest}
        self.asked: list[str] = []
        self.closed = 0

    async def start(self, decided: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"kernels": "those"}

    async def score_rows(self, rows: Sequence[Asked]) -> Answer:
        self.before(rows)
        self.asked += [reply for row in rows for reply in row.replies]
        return Answer(
            [[f"{reply} is loud" if "!" in reply else score_of(reply) for reply in row.replies] for row in rows]
        )

    def tell(self, num_typed: int, num_replies: int, name: str) -> None:
        pass

    async def close(self) -> None:
        self.closed += 1


class StubJob:
    """In place of `processes.Job`: scores as the stub does, without a model, in whatever process it is."""

    def __init__(self, model: object, decided: Mapping[str, Any]) -> None:
        pass

    def __call__(self, rows: Sequence[Asked] | None) -> Answer | dict[str, Any]:
        """Return the scores of rows; for None, what was decided."""
        return {"kernels": "those"} if rows is None else asyncio.run(Stub().score_rows(rows))
