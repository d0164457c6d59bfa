"""The client for programs without an event loop of their own, or with one that has other things to do."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Unpack

from rewardlab.client.asynchronous import AsyncRewardClient, Group, Turns
from rewardlab.client.config import ClientConfig, Settings
from rewardlab.client.endpoint import EndpointSpec
from rewardlab.client.rows import Answered
from rewardlab.core.loop_thread import LoopThread
from rewardlab.core.remaking import added, remade


class RewardClient:
    """Scores conversations on a server, as `AsyncRewardClient` does, and waits for the scores.

    Its requests run in a thread of its own, so it may be used from any number of threads, which share its limits, and
    inside a running event loop, which stands still meanwhile.
    """

    def __init__(self, url: str, **settings: Unpack[Settings]) -> None:
        """`url` is the address of the server, such as http://127.0.0.1:8000; `settings` are those of `ClientConfig`.

        Raises ConfigError for a setting that cannot be used.
        """
        self._client = AsyncRewardClient(url, **settings)
        self._thread = LoopThread("client", self._client.aclose)

    def __reduce__(self) -> tuple[Any, ...]:
        """See `AsyncRewardClient.__reduce__`."""
        return remade, (RewardClient, type(self), (self.url,), vars(self.config)), added(self, {"_client", "_thread"})

    def __enter__(self) -> RewardClient:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._client.url

    @property
    def config(self) -> ClientConfig:
        """The settings."""
        return self._client.config

    @property
    def digest(self) -> str | None:
        """See `AsyncRewardClient.digest`."""
        return self._client.digest

    def connect(self) -> EndpointSpec:
        """See `AsyncRewardClient.connect`."""
        return self._thread.wait(self._client.connect())

    def spec(self) -> EndpointSpec:
        """See `AsyncRewardClient.spec`."""
        return self._thread.wait(self._client.spec())

    def score(self, conversations: Iterable[Turns]) -> list[float]:
        """See `AsyncRewardClient.score`."""
        return self._thread.wait(self._client.score(conversations))

    def score_replies(self, prompt: str | Turns, replies: Iterable[str]) -> list[float]:
        """See `AsyncRewardClient.score_replies`."""
        return self._thread.wait(self._client.score_replies(prompt, replies))

    def score_groups(self, groups: Iterable[Group]) -> list[list[float]]:
        """See `AsyncRewardClient.score_groups`."""
        return self._thread.wait(self._client.score_groups(groups))

    def score_token_ids(self, token_ids: Iterable[Iterable[int]]) -> list[float]:
        """See `AsyncRewardClient.score_token_ids`."""
        return self._thread.wait(self._client.score_token_ids(token_ids))

    def answers(self, conversations: Iterable[Turns]) -> list[Answered]:
        """See `AsyncRewardClient.answers`."""
        return self._thread.wait(self._client.answers(conversations))

    def answer_groups(self, groups: Iterable[Group]) -> list[list[Answered]]:
        """See `AsyncRewardClient.answer_groups`."""
        return self._thread.wait(self._client.answer_groups(groups))

    def answer_token_ids(self, token_ids: Iterable[Iterable[int]]) -> list[Answered]:
        """See `AsyncRewardClient.answer_token_ids`."""
        return self._thread.wait(self._client.answer_token_ids(token_ids))

    def close(self) -> None:
        """End the thread and close the connections. Calls that still wait in other threads end with ConfigError."""
        self._thread.close()
