"""Reading of bodies: limits are checked while a body arrives, and the JSON in it must have exactly one meaning."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

from rewardlab.serve.engine.api import DrainingError
from rewardlab.serve.http.config import KIB, MIB, LimitsConfig
from rewardlab.serve.http.refusals import (
    ClientGone,
    MalformedError,
    NotJsonError,
    SlowBodyError,
    TooBusyError,
    TooLargeError,
)

Receive = Callable[[], Awaitable[Any]]
DISCARDED: Final = 8
"""A body of up to this many times the limit is read to its end and thrown away. A client that sends everything before
it reads then sees why it was refused, not a broken connection."""
MEDIA_TYPE: Final = "application/json"
ESCAPED_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
MOST_KEYS: Final = 256
"""Most keys of an object. A request needs 21, and each unknown key is an error that takes memory to describe."""
MOST_DIGITS: Final = 100
"""Most digits of a number. No field needs more, and Python reads long ones in time that grows with their square."""


class Held:
    """Counts the bytes of all bodies that are in memory at a time, and knows which still arrive."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self.arriving: set[asyncio.Timeout] = set()
        """The time limit of each body that still arrives."""
        self.given_up = False

    def give_up(self) -> None:
        """Wait for no body any more: whoever reads one gets DrainingError. Called in the event loop."""
        self.given_up = True
        for limit in self.arriving:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def take(self, count: int) -> None:
        """Count bytes in. Raises TooBusyError if that is more than may be held."""
        if self.bytes + count > self.most:
            raise TooBusyError(
                f"The bodies of all requests together are above {self.most // MIB} MiB. Try again.", retry_after_s=1.0
            )
        self.bytes += count


def require_json(headers: Any) -> None:
    """Raise NotJsonError unless the headers say that the body is plain JSON in UTF-8."""
    kind, _, rest = headers.get("content-type", "").partition(";")
    # The names of parameters, like that of the type, are the same in capitals (RFC 9110, section 8.3.1).
    charset = rest.lower().partition("charset=")[2].partition(";")[0].strip(' "')
    if kind.strip().lower() != MEDIA_TYPE or charset not in ("", "utf-8", "utf8"):
        raise NotJsonError(f"Send the body as JSON in UTF-8, with the header content-type: {MEDIA_TYPE}.")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise NotJsonError("Send the body as it is, without a content-encoding.")


@asynccontextmanager
async def body_of(receive: Receive, headers: Any, limits: LimitsConfig, held: Held) -> AsyncIterator[bytes]:
    """Yield the body of a request, which counts as held until the block ends.

    Raises NotJsonError, TooLargeError, TooBusyError, SlowBodyError, DrainingError, or ClientGone.
    """
    require_json(headers)
    taken = [0]
    try:
        try:
            async with asyncio.timeout(limits.body_timeout) as limit:
                held.arriving.add(limit)
                body = await _read(receive, headers.get("content-length"), limits.max_body_kib * KIB, held, taken)
        except TimeoutError:
            if not held.given_up:
                raise SlowBodyError(f"The body did not arrive within {limits.body_timeout:g} s.") from None
        finally:
            held.arriving.discard(limit)
        if held.given_up:
            raise DrainingError("The server ended before the body of the request had arrived.", retry_after_s=1.0)
        yield body
    finally:
        held.bytes -= taken[0]


async def _read(receive: Receive, announced: str | None, most: int, held: Held, taken: list[int]) -> bytes:
    """Return a body of at most `most` bytes, whose header announced a length.

    `taken[0]` is what it has added to `held`, also when it ends by an error: the caller subtracts it.
    """
    # Cut to 20 digits, since Python refuses to convert a text of thousands of digits; 20 are above every limit.
    if announced is not None and announced.isdecimal() and int(announced[:20]) > DISCARDED * most:
        raise _too_large(most)
    body, seen = bytearray(), 0
    async for chunk in _chunks(receive):
        seen += len(chunk)
        if seen > most:
            body.clear()
            if seen > DISCARDED * most:
                break
            continue
        held.take(len(chunk))
        taken[0] += len(chunk)
        body += chunk
    if seen > most:
        raise _too_large(most)
    return bytes(body)


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _too_large(most: int) -> TooLargeError:
    return TooLargeError(
        f"The body is above {most // KIB} KiB. Send fewer conversations a request, or start the server with a larger "
        "--max-body-kib."
    )


def parse(body: bytes, *, max_depth: int) -> Any:
    """Return the value of a JSON text.

    Raises MalformedError for a text that is not JSON by RFC 8259 and I-JSON: bytes that are not UTF-8, NaN and
    Infinity, numbers beyond float64, a key twice in an object, lone surrogates; also for nesting deeper than
    `max_depth`, and for an object with more keys than any field needs. Parsers read such texts in different ways, so a
    proxy or a log could see another request than the one that is scored.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"The body is not UTF-8 (byte {error.start}).") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except json.JSONDecodeError as error:
        raise MalformedError(f"The body is not JSON: {error.msg} (character {error.pos}).") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    _require_shallow(value, max_depth)
    # Decoding has refused surrogates in the bytes themselves; only escapes such as \ud800 can still hold one.
    if ESCAPED_SURROGATE.search(body):
        _require_text(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise MalformedError(f"The body has an object with more than {MOST_KEYS} keys.")
    value = dict(pairs)
    if len(value) != len(pairs):
        raise MalformedError("The body has an object in which a key is given twice.")
    return value


def _no_constant(name: str) -> NoReturn:
    raise MalformedError(f"The body has {name}, which is not JSON.")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise MalformedError("The body has a number that is too large.")
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise MalformedError("The body has a number that is too large.")
    return int(digits)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _require_shallow(value: Any, most: int) -> None:
    """Raise MalformedError for deeper nesting, level by level: recursion would end at Python's own limit."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        level = [one for outer in level for one in _inside(outer) if isinstance(one, (dict, list))]
        if not level:
            return
    raise _too_deep(most)


def _too_deep(most: int) -> MalformedError:
    return MalformedError(f"The body is nested deeper than {most} levels.")


def _require_text(value: Any) -> None:
    """Raise MalformedError if some text or key, at any depth, holds half a surrogate pair."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        waiting.extend(_inside(one))
        texts = [one] if isinstance(one, str) else list(one) if isinstance(one, dict) else []
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise MalformedError("The body has half a surrogate pair, which is not a character.") from None
