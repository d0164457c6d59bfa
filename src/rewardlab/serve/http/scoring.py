"""Scoring of a request's body: prepared in a thread, queued at the engine, and cancelled if the client goes away."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rewardlab.client.protocol import ScoreRequest
from rewardlab.core.errors import DataError, RenderError
from rewardlab.serve.engine.api import (
    DrainingError,
    Engine,
    EngineFailedError,
    Refused,
    Scored,
    TooLongError,
    UnscorableError,
    WrongDigestError,
)
from rewardlab.serve.http.body import Held, Receive, body_of, parse
from rewardlab.serve.http.body_faults import refusal_of
from rewardlab.serve.http.config import MIB, LimitsConfig
from rewardlab.serve.http.refusals import ClientGone, TooBusyError, TooLargeError

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
MOST_TOKEN_ID: Final = 2**31 - 1
SWAPS_MEANWHILE: Final = 3
"""How often a model may be swapped between tokenising and queueing a request before the request fails."""


@dataclass(frozen=True, kw_only=True)
class Asked(Generic[Body]):
    """A request in the form of its route, and the same as a request for the engine."""

    body: Body
    request: ScoreRequest


@dataclass(frozen=True, kw_only=True)
class Answered(Generic[Body]):
    """A request and its scores."""

    asked: Asked[Body]
    scored: Scored


def validated(kind: type[Body], value: Any) -> Body:
    """Return a body from parsed JSON; no value is converted to another type.

    Raises InvalidError, which names one fault.
    """
    try:
        return kind.model_validate(value, strict=True)
    except ValidationError as error:
        raise refusal_of(kind, value, error) from None


class Scoring:
    """Scores requests of all routes by one engine, within the limits."""

    def __init__(self, engine: Engine, limits: LimitsConfig) -> None:
        self.engine = engine
        self.limits = limits
        self.held = Held(limits.max_held_mib * MIB)
        self.in_flight = 0
        self.draining = False
        count = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="prepare")
        self._free = asyncio.Semaphore(count)
        """Requests wait for a free thread here, not in the queue of the threads, which would keep cancelled ones."""
        self._unanswered: set[asyncio.Future[None]] = set()
        """One for each request that is scored; done once it is given up."""

    def give_up(self) -> None:
        """Answer all requests that are in flight with DrainingError, whatever threads still do for them.

        Called in the event loop.
        """
        self.held.give_up()
        for given_up in self._unanswered:
            if not given_up.done():
                given_up.set_result(None)

    def close(self) -> None:
        """End the threads that prepare requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def score(
        self,
        receive: Receive,
        headers: Any,
        kind: type[Body],
        to_request: Callable[[Body], ScoreRequest],
        to_place: Callable[[Body, str], str] = lambda _body, place: place,
    ) -> Answered[Body]:
        """Read a body of this kind, score what `to_request` makes of it, and return the answer.

        `to_place` turns a place in the request into that in the body. Raises Refused, or ClientGone after taking the
        request out of all queues. A request on which a thread still works counts as in flight until it is done.
        """
        if self.draining:
            raise DrainingError("This server is about to end. Send the request to another.", retry_after_s=1.0)
        if self.in_flight >= self.limits.max_in_flight:
            raise TooBusyError(
                f"{self.limits.max_in_flight} requests are being answered already. Try again.",
                retry_after_s=1.0,
            )
        self.in_flight += 1
        try:
            async with body_of(receive, headers, self.limits, self.held) as body:
                begin = functools.partial(self._begin, body, kind, to_request, to_place)
                asked, scored = await self._unless_gone(receive, self._both(begin, to_place))
        finally:
            self.in_flight -= 1
        require_whole(asked.request, scored)
        return Answered(asked=asked, scored=scored)

    async def _unless_gone(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, or cancel it and raise ClientGone once the client has closed its connection, and
        DrainingError once all is given up."""
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_closed(receive))
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered.add(given_up)
        try:
            await asyncio.wait((working, gone, given_up), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.done():
                raise ClientGone
            raise _ended()
        finally:
            self._unanswered.discard(given_up)
            if given_up.done():
                # Not waited for: a thread may work on it for minutes.
                working.add_done_callback(lambda task: task.cancelled() or task.exception())
                working.cancel()
            for task in (gone,) if given_up.done() else (working, gone):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError, Refused):
                        await task

    async def _both(
        self, begin: Callable[[], tuple[Asked[Body], Future[Scored]]], to_place: Callable[[Body, str], str]
    ) -> tuple[Asked[Body], Scored]:
        """Return the request and its scores.

        When cancelled, it takes the request out of the engine's queue, and ends only when no thread works on it.
        """
        async with self._free:
            beginning = asyncio.wrap_future(self._threads.submit(begin))
            try:
                asked, future = await asyncio.shield(beginning)
            except asyncio.CancelledError:
                # The thread cannot be stopped; if it queues the request later, that is cancelled then.
                beginning.add_done_callback(_cancel_result)
                await asyncio.wait([beginning])
                raise
        with _placed(asked.body, to_place):
            return asked, await _result_of(future)

    def _begin(
        self,
        body: bytes,
        kind: type[Body],
        to_request: Callable[[Body], ScoreRequest],
        to_place: Callable[[Body, str], str],
    ) -> tuple[Asked[Body], Future[Scored]]:
        values = parse(body, max_depth=self.limits.max_depth)
        asked_body = validated(kind, values)
        for _ in range(SWAPS_MEANWHILE):
            try:
                with _placed(asked_body, to_place):
                    request = to_request(asked_body)
                    return Asked(body=asked_body, request=request), self._queue(request)
            except WrongDigestError:
                # If the client named the digest, it gets the error. Otherwise the route bound its tokens to a digest
                # that was swapped meanwhile: convert and try again.
                if getattr(asked_body, "digest", None) is not None:
                    raise
        raise EngineFailedError("Models are swapped faster than requests can be read.")

    def _queue(self, request: ScoreRequest) -> Future[Scored]:
        """Check a request against the limits, prepare and queue it."""
        require_few(sum(sizes_of(request)), self.limits)
        for place, ids in enumerate(request.token_ids or ()):
            if not all(0 <= one <= MOST_TOKEN_ID for one in ids):
                raise UnscorableError("A token id is negative or too large.", param=f"token_ids.{place}")
        try:
            prepared = self.engine.prepare(request)
        except (RenderError, DataError) as error:
            raise UnscorableError(str(error)) from error
        if prepared.num_tokens > self.limits.max_request_tokens:
            raise TooLongError(
                f"{prepared.num_tokens:,} tokens in one request, above {self.limits.max_request_tokens:,}. Send "
                "several requests."
            )
        return self.engine.submit(prepared)


def require_few(count: int, limits: LimitsConfig) -> None:
    """Raise TooLargeError for more conversations than a request may have."""
    if count > limits.max_conversations:
        raise TooLargeError(
            f"{count:,} conversations in one request, above {limits.max_conversations:,}. Send several requests."
        )


@contextmanager
def _placed(body: Body, to_place: Callable[[Body, str], str]) -> Iterator[None]:
    """Within the block, let a refusal name the place in the body instead of that in the request."""
    try:
        yield
    except Refused as refused:
        if refused.param is not None:
            refused.param = to_place(body, refused.param)
        raise


def sizes_of(request: ScoreRequest) -> Sequence[int]:
    """Return the number of conversations in each group of the answer."""
    if request.replies is not None:
        return [len(request.replies)]
    if request.groups is not None:
        return [len(group.replies) for group in request.groups]
    return [1] * len(request.conversations or request.token_ids or ())


def require_whole(request: ScoreRequest, scored: Scored) -> None:
    """Raise EngineFailedError unless there is a finite score, or a cause, for everything that was asked."""
    sizes = sizes_of(request)
    good = len(scored.groups) == len(sizes) and all(
        len(group.scores) == len(group.num_tokens) == len(group.truncated_tokens) == size
        and len(group.truncated_reply_tokens) in (0, size)
        and all(
            math.isfinite(score) if score is not None else request.on_error == "null" and number in group.errors
            for number, score in enumerate(group.scores)
        )
        for group, size in zip(scored.groups, sizes, strict=True)
    )
    if not good:
        raise EngineFailedError("The engine's answer does not fit the request; nothing of it is handed on.")


async def _result_of(future: Future[Scored]) -> Scored:
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # Either the engine cancelled the future, which it does only when it ends, or the caller was cancelled and gets
        # the cancellation as it is.
        task = asyncio.current_task()
        if future.cancelled() and task is not None and not task.cancelling():
            raise _ended() from None
        raise


def _ended() -> DrainingError:
    return DrainingError("The server ended before it could answer.", retry_after_s=1.0)


def _cancel_result(begun: asyncio.Future[tuple[Any, Future[Scored]]]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result()[1].cancel()


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
