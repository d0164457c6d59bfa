"""Sending canaries to a live endpoint in the protocol of its engine, and reading its answers. Imports no torch.

Nothing is retried or repaired here: a check has to see what every consumer would see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

import httpx2

from rewardlab.client import dialects, offers
from rewardlab.client.http import base_of
from rewardlab.client.protocol import SCORE_PATH, SPEC_PATH, SpecResponse
from rewardlab.client.reaching import LOOK, by_proxy, lasting, opened, proxy_of
from rewardlab.core.errors import EndpointError

NAMED_BY: Final = "--served-name"
"""The flag that names a model."""
TIMEOUT_S: Final = 120.0
OTHERWISE: Final = "See that the address is right."
REMEDIES: Final = {
    401: "Give its token: --token-env NAME, an environment variable that holds it.",
    403: "See whether the token may do this.",
    429: "Ask again when it has less to do.",
    500: "See the server's log.",
    502: "See that the server behind that address is up.",
    503: "Ask again when it is ready.",
    504: "See that the server behind that address is up.",
}
"""Status of an endpoint that does not say what it is -> what to do; `OTHERWISE` for others."""
LONGEST_QUOTE: Final = 200
"""Most characters of an answer that a message repeats."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request for scores."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Scores, and how many tokens the endpoint says it has read for each; None where it does not say."""

    scores: list[float]
    num_tokens: list[int | None]


class Refusal(Exception):
    """The endpoint gave no scores: what it gave, its code as `status`, 0 without one, and what to do as `remedy`."""

    def __init__(self, said: str, *, status: int = 0, remedy: str = OTHERWISE) -> None:
        super().__init__(said)
        self.status = status
        self.remedy = remedy


@runtime_checkable
class Dialect(Protocol):
    """The protocol of an engine: its requests and answers."""

    @property
    def name(self) -> str:
        """The engine's name."""

    @property
    def forms(self) -> Sequence[str]:
        """The forms that it takes: `token_ids`, `texts`, `messages`."""

    def ask(self, form: str, conversations: Sequence[Any]) -> Question:
        """Return the request that asks for the scores of conversations in a form, raw."""

    def hear(self, answer: Any) -> Answer:
        """Return the scores in an answer.

        Raises LookupError, TypeError, ValueError or OverflowError for one of another shape.
        """


@dataclass(frozen=True, kw_only=True)
class Rewardlab:
    """Our own server."""

    model: str
    digest: str | None = None
    name: str = "rewardlab"
    forms: Sequence[str] = ("token_ids", "messages")

    def ask(self, form: str, conversations: Sequence[Any]) -> Question:
        """See `Dialect`. Canaries above the length limit were cut by the rule of the model, and so are messages."""
        given: dict[str, Any] = (
            {"token_ids": list(conversations)}
            if form == "token_ids"
            else {"conversations": list(conversations), "truncate": True}
        )
        return Question(path=SCORE_PATH, body={"model": self.model, **given})

    def hear(self, answer: Any) -> Answer:
        """See `Dialect`."""
        scores = [score for group in answer["groups"] for score in group["scores"]]
        counts = [count for group in answer["groups"] for count in group["num_tokens"]]
        return Answer(scores=[_number(score) for score in scores], num_tokens=list(map(_count, counts)))


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Another engine, asked as the client asks it, and in the forms that the client avoids."""

    spoken: dialects.Dialect
    model: str = ""

    @property
    def name(self) -> str:
        """See `Dialect`."""
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.spoken.engine]

    @property
    def forms(self) -> Sequence[str]:
        """See `Dialect`. vLLM renders messages itself."""
        return ("token_ids", "texts", "messages") if self.spoken.engine == "vllm" else ("token_ids", "texts")

    def ask(self, form: str, conversations: Sequence[Any]) -> Question:
        """See `Dialect`. Messages go one conversation a request, as vLLM takes them."""
        body = dict(self.spoken.body([] if form == "messages" else conversations, self.model or None))
        if form == "messages":
            del body["input"], body["add_special_tokens"]
            (body["messages"],) = conversations
        if form == "texts" and "input_ids" in body:
            # The client never sends texts to SGLang, which adds a BOS to them; this check shows what that does.
            body["text"] = body.pop("input_ids")
        return Question(path=self.spoken.path, body=body)

    def hear(self, answer: Any) -> Answer:
        """See `Dialect`. vLLM counts the tokens of a request as a whole, so they are known where it has one text."""
        scores = [_number(value) for value in self.spoken.values(answer)]
        if isinstance(answer, list):
            counts = [row.get("meta_info", {}).get("prompt_tokens") for row in answer]
        else:
            counts = [answer.get("usage", {}).get("prompt_tokens")] if len(scores) == 1 else [None] * len(scores)
        return Answer(scores=scores, num_tokens=list(map(_count, counts)))


def _number(value: Any) -> float:
    """Return a score as a number; null, which JSON has in place of NaN, as NaN."""
    return float("nan") if value is None else float(value)


def _count(value: Any) -> int | None:
    """Return a number of tokens; None for what is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Wire:
    """One connection to an endpoint, whose routes follow on `base`. Closed by `with`."""

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S, whole: bool = False
    ) -> None:
        """`whole` says that the path of the address is that of one route (`path`), not a prefix of all routes.

        Raises ConfigError for an invalid address.
        """
        self.base, self.path = base_of(url, instead="--token-env NAME"), ""
        if whole:
            parts = urlsplit(self.base)
            self.base, self.path = f"{parts.scheme}://{parts.netloc}", parts.path
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._errors: Any = httpx2.HTTPError, httpx2.InvalidURL
        self._slow: Any = httpx2.TimeoutException
        self._timeout_s = timeout_s
        self._client = opened(httpx2.Client, self.base, headers=headers, timeout=timeout_s)

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises Refusal."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that is answered to a body. Raises Refusal."""
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = self._client.request(method, self.base + path, json=body)
        except self._slow as error:
            said = f"no answer within {self._timeout_s:g} s"
            raise Refusal(said, remedy="Raise --timeout-s, or see what the server does.") from error
        except self._errors as error:
            said = f"{type(error).__name__}: {error}"
            raise Refusal(said, remedy=f"{lasting(error) or LOOK}{by_proxy(proxy_of(self.base, {}))}") from error
        if (status := response.status_code) != 200:
            said = f"HTTP {status}: {_quoted(response.text)}"
            raise Refusal(said, status=status, remedy=REMEDIES.get(status, OTHERWISE))
        try:
            return response.json()
        except (ValueError, RecursionError) as error:  # the latter where lists are nested very deep
            raise Refusal(f"no JSON: {_quoted(response.text)}") from error


def _quoted(text: str) -> str:
    """Return the beginning of an answer in one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]} …"


def _then(refusal: Refusal) -> str:
    """Return what to do, as a sentence behind the text of a refusal."""
    return f"{'' if str(refusal).endswith('.') else '.'} {refusal.remedy}"


def spec_of(wire: Wire) -> SpecResponse | None:
    """Return what our own server says about its models; None if it is another engine. Raises EndpointError."""
    try:
        answer = wire.get(SPEC_PATH)
    except Refusal as refusal:
        if refusal.status in (404, 405, 501):
            return None
        raise EndpointError(f"{wire.base}: GET {SPEC_PATH} failed: {refusal}{_then(refusal)}") from refusal
    return offers.spec_in(answer, where=f"{wire.base}{SPEC_PATH}")


def engine_of(wire: Wire, *, name: str | None = None) -> Dialect:
    """Return the dialect of an engine that is not ours, by the routes that it names in /openapi.json.

    `name` is that of the model, None for the only one. Raises EndpointError if no route gives raw scores; ConfigError
    if a name is needed and not given, or no model has it.
    """
    try:
        routes = offers.routes_in(wire.get("/openapi.json"))
    except Refusal as refusal:
        raise EndpointError(
            f"{wire.base}: neither {SPEC_PATH} (rewardlab) nor /openapi.json (vLLM, SGLang) is there: "
            f"{refusal}{_then(refusal)}"
        ) from refusal
    spoken = offers.dialect_of(offers.engine_with(routes, url=wire.base), routes, version=None, url=wire.base)
    if not spoken.names_model:
        offers.require_nameless(spoken, name, setting=NAMED_BY)
        return Foreign(spoken=spoken)
    try:
        listed = wire.get("/v1/models")
    except Refusal as refusal:
        raise EndpointError(f"{wire.base}: /v1/models names no model: {refusal}{_then(refusal)}") from refusal
    return Foreign(spoken=spoken, model=offers.model_in(listed, name, url=wire.base, setting=NAMED_BY) or "")
