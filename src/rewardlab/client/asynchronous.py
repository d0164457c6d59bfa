"""The client for asynchronous programs. The blocking one (`blocking.py`) runs this one on its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, Unpack

from rewardlab.client.asking import AskEngine, Asking, AskOwn
from rewardlab.client.checking import check, scores_of
from rewardlab.client.config import ClientConfig, Settings
from rewardlab.client.endpoint import EndpointSpec, find, require_output
from rewardlab.client.failures import ModelChangedError
from rewardlab.client.http import Http
from rewardlab.client.rendering import Artifact, ByFunction, formatting_of
from rewardlab.client.rows import Answered, Row, requests_of, rows_of_conversations, rows_of_groups, rows_of_tokens
from rewardlab.core.errors import ConfigError
from rewardlab.core.opened_once import OpenedOnce
from rewardlab.core.remaking import added, remade
from rewardlab.core.spec import OutputAs
from rewardlab.core.types import Message

T = TypeVar("T")
Turns = Sequence[Message | Mapping[str, str]]
Group = tuple[str | Turns, Iterable[str]]
"""A prompt and its replies."""
FOLLOWED: Final = 3
"""How often a request is sent at most because the server has changed its model in the meantime."""


class AsyncRewardClient:
    """Scores conversations on a server: rewardlab's, vLLM or SGLang.

    Scores are raw, or as the setting `output` says. It connects when it is first used, finds out what answers there,
    and scores the canaries of the model before anything else. It may be made anywhere and belongs to the event loop in
    which it is first used.
    """

    def __init__(self, url: str, **settings: Unpack[Settings]) -> None:
        """`url` is the address of the server, such as http://127.0.0.1:8000; `settings` are those of `ClientConfig`.

        Raises ConfigError for a setting that cannot be used.
        """
        self.config = ClientConfig(**settings)
        self._http = Http(url, self.config)
        self.url = self._http.url
        self._once: OpenedOnce[EndpointSpec] = OpenedOnce("client", otherwise="RewardClient")
        self._jobs = asyncio.Semaphore(self.config.max_concurrency + 1)
        """Limits the requests that are rendered or under way; one more than may be under way, so that one can be
        rendered while the others wait for their answers."""
        self._artifact: Artifact | None = None
        self._endpoint: EndpointSpec | None = None
        self._proving = asyncio.Lock()
        self._proved = 0
        """The count of the server's absences when its canaries were last scored."""
        self._checked: dict[str | None, EndpointSpec] = {}
        """Digest -> the model of this server that passed the check."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as address and settings, the token among them; there it connects anew.

        What a subclass has added travels too, and its `__init__` is not called again.
        """
        return remade, (AsyncRewardClient, type(self), (self.url,), vars(self.config)), added(self, MADE)

    async def __aenter__(self) -> AsyncRewardClient:
        try:
            await self.connect()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def digest(self) -> str | None:
        """Digest of the model that the client is connected to; None before connecting, or if it is not known."""
        return None if self._endpoint is None else self._endpoint.digest

    def checked(self, digest: str | None) -> EndpointSpec | None:
        """Return what was told of the model with this digest when it passed the check; None if none has."""
        return self._checked.get(digest)

    async def connect(self) -> EndpointSpec:
        """Find out what answers at the address, check the canaries, and return it, even if that was done before.

        Raises EndpointError (CanaryError if the scores are not the model's), ConfigError or ArtifactError.
        """
        self._once.require_usable()
        return await self._once.opened(self._connect)

    async def spec(self) -> EndpointSpec:
        """Return what the client is connected to. Raises as `connect` does."""
        self._once.require_usable()
        return self._endpoint or await self._once.opened(self._connect)

    async def score(self, conversations: Iterable[Turns]) -> list[float]:
        """Return one score for each conversation, in order. A conversation must end with an assistant turn.

        Raises RenderError naming the conversation that cannot be rendered, or EndpointError.
        """
        return scores_of(await self._all(rows_of_conversations(conversations)))

    async def score_replies(self, prompt: str | Turns, replies: Iterable[str]) -> list[float]:
        """Return one score for each reply to one prompt, in order, all by one model. Raises as `score` does."""
        rows, _ = rows_of_groups([(prompt, replies)], single=True)
        return scores_of(await self._all(rows))

    async def score_groups(self, groups: Iterable[Group]) -> list[list[float]]:
        """Return the scores of each group, a prompt with its replies, in order. Raises as `score` does."""
        return [scores_of(group) for group in await self._grouped(groups, keep=False)]

    async def score_token_ids(self, token_ids: Iterable[Iterable[int]]) -> list[float]:
        """Return one score for each conversation that is rendered already, all by one model.

        Raises as `score` does.
        """
        return scores_of(await self._of_one_model(rows_of_tokens(token_ids)))

    async def answers(self, conversations: Iterable[Turns]) -> list[Answered]:
        """Return an answer for each conversation, in order; one that cannot be scored gets its cause, not an error.

        Raises EndpointError if the fault is the server's, and RenderError for a value that is not a conversation.
        """
        return await self._all(rows_of_conversations(conversations), keep=True)

    async def answer_groups(self, groups: Iterable[Group]) -> list[list[Answered]]:
        """Return the answers for each group, in order; as `answers` otherwise."""
        return await self._grouped(groups, keep=True)

    async def answer_token_ids(self, token_ids: Iterable[Iterable[int]]) -> list[Answered]:
        """Return the answers for conversations that are rendered already, all by one model; as `answers` otherwise."""
        return await self._of_one_model(rows_of_tokens(token_ids), keep=True)

    async def aclose(self) -> None:
        """Close the connections. A closed client cannot be used again."""
        await self._once.close()
        await self._http.close()

    async def _grouped(self, groups: Iterable[Group], *, keep: bool) -> list[list[Answered]]:
        rows, counts = rows_of_groups(groups)
        answers = iter(await self._all(rows, keep=keep))
        return [[next(answers) for _ in range(count)] for count in counts]

    async def _of_one_model(self, rows: Sequence[Row], *, keep: bool = False) -> list[Answered]:
        """Return the answers to rows, all by one model: nothing says which rows belong together, so all may.

        Raises ModelChangedError if the server changed its model during each of `FOLLOWED` attempts.
        """
        for _ in range(FOLLOWED):
            answers = await self._all(rows, keep=keep)
            # A row that was never asked for, such as one that is too long, was answered by no model.
            if len({answer.digest for answer in answers if answer.score is not None}) <= 1:
                return answers
        raise ModelChangedError(f"{self.url}: the server took another model during each of {FOLLOWED} attempts.")

    async def _all(self, rows: Sequence[Row], *, keep: bool = False) -> list[Answered]:
        """Return the answers to rows, in order, from as many requests as it takes."""
        self._once.require_usable()
        own = (await self.spec()).engine == "rewardlab"
        requests = list(requests_of(rows, max_batch=self.config.max_batch, whole=own))
        parts = await _gathered([self._some([rows[number] for number in request], keep=keep) for request in requests])
        answers: dict[int, Answered] = {}
        for request, part in zip(requests, parts, strict=True):
            answers |= zip(request, part, strict=True)
        return [answers[number] for number in range(len(rows))]

    async def _some(self, rows: Sequence[Row], *, keep: bool) -> list[Answered]:
        """Return the answers to the rows of one request, all by one model that passed the check."""
        for _ in range(FOLLOWED):
            endpoint = await self.spec()
            async with self._jobs:
                pinned = self.config.on_swap == "error"
                config = self.config
                asking = self._asking(endpoint, pinned=pinned, truncate=config.truncate, output=config.output)
                answers = await asking.ask(rows, keep=keep)
            if endpoint.engine != "rewardlab":
                if await self._still(endpoint):
                    return answers
                continue
            digests = {answer.digest for answer in answers if answer.digest is not None}
            if digests <= {self.digest, *self._checked}:
                return answers
            # Another model answered: `connect` checks its canaries before its scores are used.
            await self.connect()
            if digests <= set(self._checked):
                return answers
        raise ModelChangedError(
            f"{self.url}: the server took another model, or was away, {FOLLOWED} times in a row, faster than it could "
            f"be checked."
        )

    async def _still(self, endpoint: EndpointSpec) -> bool:
        """Return whether an engine without digests certainly has the model that was checked.

        If it has been away since the last check, its canaries are scored again. False if it was away during that, too.

        Raises CanaryError if it has come back with another model.
        """
        if not self.config.check:
            return True
        async with self._proving:
            if self._proved == self._http.absences:
                return True
            seen = self._http.absences
            asking = self._asking(endpoint, pinned=True, truncate=True)
            # Accept only the precision of the first check: a server with another one was restarted differently.
            precision: Any = endpoint.precision or "auto"
            await check(asking, endpoint, self._artifact, replace(self.config, precision=precision))
            self._proved = seen
            return not (isinstance(asking, AskEngine) and asking.interrupted)

    def _asking(
        self, endpoint: EndpointSpec, *, pinned: bool, truncate: bool | None, output: OutputAs = "raw"
    ) -> Asking:
        """Return the object that asks this server; `pinned` says that no other model may answer.

        Canaries have raw scores, and those above the length limit were cut by the rule of the model (`truncate`).
        """
        formatting = formatting_of(self.config.render_fn, self._artifact)
        if endpoint.engine != "rewardlab":
            return AskEngine(self._http, endpoint, formatting, artifact=self._artifact)
        return AskOwn(
            self._http,
            endpoint,
            pinned=pinned,
            truncate=truncate,
            render=formatting if isinstance(formatting, ByFunction) else None,
            output=output,
        )

    async def _connect(self) -> EndpointSpec:
        """Open the folder, find out what answers, check the canaries; repeat if a followed server changes meanwhile."""
        if self.config.artifact is not None and self._artifact is None:
            folder = Path(self.config.artifact)
            self._artifact = await asyncio.to_thread(Artifact, folder, truncate=self.config.truncate)
        for attempt in range(FOLLOWED):
            try:
                self._endpoint = await self._found()
                break
            except ModelChangedError:
                if self.config.on_swap == "error" or attempt == FOLLOWED - 1:
                    raise
        assert self._endpoint is not None
        self._checked[self._endpoint.digest] = self._endpoint
        return self._endpoint

    async def _found(self) -> EndpointSpec:
        """Return what answers at the address, after the check."""
        endpoint = await find(self._http, engine=self.config.engine, model=self.config.model)
        self._require_same_model(endpoint)
        require_output(endpoint, self.config.output)
        seen = self._http.absences
        if self.config.check:
            # Pinned even if swaps are followed, since one model has to score all canaries.
            precision = await check(
                self._asking(endpoint, pinned=True, truncate=True), endpoint, self._artifact, self.config
            )
            endpoint = replace(endpoint, precision=precision)
            self._proved = seen
        if endpoint.engine != "rewardlab" and self._artifact is not None and self.config.check:
            # The engine names no digest, but the canaries have the scores of this folder's model.
            endpoint = replace(endpoint, digest=self._artifact.digest)
        return endpoint

    def _require_same_model(self, endpoint: EndpointSpec) -> None:
        """Raise ModelChangedError if our server has another model than the local folder."""
        if self._artifact is None or endpoint.engine != "rewardlab":
            return
        if self.config.on_swap == "follow":
            raise ConfigError(
                "artifact and on_swap='follow': the folder is one model, and a server that is followed may take "
                "others. Leave one of them out."
            )
        if self._artifact.digest != endpoint.digest:
            raise ModelChangedError(
                f"{self.url}: model {endpoint.model!r} there has the digest {endpoint.digest}, and "
                f"{self.config.artifact} has {self._artifact.digest}: they are different models. Serve that folder, or "
                f"give the one that is served."
            )


MADE: Final = frozenset(
    ("config", "_http", "url", "_once", "_jobs", "_artifact", "_endpoint", "_proving", "_proved", "_checked")
)
"""What `AsyncRewardClient.__init__` makes, which stays in its process."""


async def _gathered(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all jobs, in order. If one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
