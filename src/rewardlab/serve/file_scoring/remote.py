"""A backend that asks a server for scores: rewardlab's own, vLLM or SGLang, through the client of this package."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Conversation
from rewardlab.serve.file_scoring.backends import Answer, Entry, entry
from rewardlab.serve.file_scoring.rows import Asked

logger = logging.getLogger("rewardlab")
PARTS: Final = 4
"""Parts of the rows that are asked for at the same time: enough for the server's batches, and little is lost."""
ENGINES: Final = {"http": ("rewardlab",), "vllm": ("vllm", "sglang")}
"""`--backend` -> the engines that it accepts at the address."""


@runtime_checkable
class Client(Protocol):
    """The part of `rewardlab.client.AsyncRewardClient` that is used here."""

    url: str

    async def connect(self) -> Any:
        """Find out what answers, check its canaries and return it: `engine`, `digest`, `precision`, `route`.

        Raises EndpointError, ConfigError or ArtifactError.
        """

    async def answer_groups(self, groups: Iterable[tuple[str | Conversation, Iterable[str]]]) -> list[Any]:
        """Return for each group of replies to a prompt a list with `score`, `error`, `truncated_tokens` and
        `truncated_reply_tokens` of every reply, in order.

        Raises EndpointError where the fault is the server's.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class RemoteBackend:
    """A server that gives scores. All scores of a file come from one model, in one precision."""

    num_parts = PARTS

    def __init__(self, client: Client, kind: str, *, model: str | None = None, bare: bool | None = None) -> None:
        """`kind` is a backend of `ENGINES`; `model` is the name on the server, None for its default."""
        self.client = client
        self.kind = kind
        self.identity = {"backend": kind, "served model": model}
        self.bare = bare

    async def start(self, decided: Mapping[str, Any]) -> Mapping[str, Any]:
        """Connect, and check that the model is the one of an earlier start.

        Raises ConfigError if it is another one, or another engine than was asked for; EndpointError as `connect` does.
        """
        endpoint = await self.client.connect()
        if endpoint.engine not in ENGINES[self.kind]:
            other = next(kind for kind, engines in ENGINES.items() if endpoint.engine in engines)
            raise ConfigError(f"--backend {self.kind}: {self.client.url} is {endpoint.engine}. Say --backend {other}.")
        found = {"digest": endpoint.digest, "precision": endpoint.precision}
        changed = [name for name in found if decided and decided.get(name) != found[name]]
        if changed:
            told = "; ".join(f"{name} was {decided.get(name)}, now {found[name]}" for name in changed)
            raise ConfigError(
                f"{self.client.url}: the rows so far were scored by another model ({told}). Serve that one again, or "
                f"begin again with --restart."
            )
        logger.info("%s: %s, digest %s, %s", self.client.url, endpoint.engine, endpoint.digest, endpoint.precision)
        return found

    async def score_rows(self, rows: Sequence[Asked]) -> Answer:
        """Return the scores of rows, each row's by one model. Raises EndpointError."""
        groups = await self.client.answer_groups([(row.prompt, row.replies) for row in rows])
        return Answer(
            [[_entry(answered) for answered in group] for group in groups],
            num_tokens=[sum(answered.num_tokens or 0 for answered in group) for group in groups],
        )

    def tell(self, num_typed: int, num_replies: int, name: str) -> None:
        """Log nothing: only the server knows whether control tokens are typed."""

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()


def _entry(answered: Any) -> Entry:
    """Return the score of a reply with what was cut for it, or the cause for which it has none."""
    if answered.score is None:
        return str(answered.error or "the server gave no score")
    return entry(answered.score, answered.truncated_tokens or 0, answered.truncated_reply_tokens or 0)
