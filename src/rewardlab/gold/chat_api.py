"""A language model behind the chat API of OpenAI: `POST /v1/chat/completions`, as vLLM, SGLang and others serve it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.files import is_number, to_json
from rewardlab.core.terminal import listed, short
from rewardlab.core.types import Conversation
from rewardlab.gold.files.rows import HALF, is_encodable
from rewardlab.gold.pool import PassingError

if TYPE_CHECKING:
    from rewardlab.client.http import Http

CHAT: Final = "/v1/chat/completions"
MODELS: Final = "/v1/models"
OF_THE_REQUEST: Final = (400, 413, 422)
"""Statuses of refusals that concern one request; others, such as that of a wrong token, concern all."""
BROKEN_OFF: Final = ("abort", "error", "cancelled")
"""Words of servers for why a reply ended, where it is only a part of what the model would have written."""
NEEDED: Final = ("httpx2", "stamina")
MOST_TOKENS: Final = 1 << 40
"""More tokens than any prompt or reply has."""
LEAST_LOGPROB: Final = -1e15
"""Less than any log-probability of a token. The sum of larger ones is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One reply of a language model."""

    text: str
    stop: str
    """`stop` where the model ended it, `length` at the token limit, or the server's own word."""
    tokens: int | None
    """Tokens of the reply, None where the server does not say."""
    prompt_tokens: int | None
    logprob: float | None
    """Sum of the log-probabilities of its tokens, None where the server does not give them."""


class RequestRefusedError(Exception):
    """A request that the server refuses, and would refuse again; others may be taken."""


class ChatApi:
    """One server. It belongs to the event loop in which it is first used."""

    def __init__(
        self, url: str, *, model: str | None, token: str | None, concurrency: int, timeout_s: float, attempts: int
    ) -> None:
        """Raise ConfigError if the address is unusable, or a package is missing."""
        try:
            from rewardlab.client.config import ClientConfig
            from rewardlab.client.http import Http
        except ModuleNotFoundError as error:
            if error.name in NEEDED:
                raise ConfigError(f'asking a server needs {error.name}: pip install "rewardlab[client]"') from error
            raise
        config = ClientConfig(token=token, max_concurrency=concurrency, timeout_s=timeout_s, attempts=attempts)
        base = url.rstrip("/").removesuffix("/v1")
        self._http: Http = Http(base, config)
        self.url = self._http.url
        self.model = model
        self.identity: dict[str, Any] = {}
        """What the server says of its model, once it is open."""

    async def open(self) -> None:
        """Find the model.

        Raises EndpointError if the server does not list models; ConfigError if it has none of the given name, or, where
        no name is given, not exactly one.
        """
        values = (await self._http.get(MODELS)).values
        models = values.get("data") if isinstance(values, dict) else None
        if not isinstance(models, list) or not all(isinstance(one, dict) and "id" in one for one in models):
            raise EndpointError(f"GET {self.url}{MODELS}: is not a list of models. Is this a server with OpenAI's API?")
        named = {str(one["id"]): one for one in models}
        if self.model is None and len(named) != 1:
            raise ConfigError(f"{self.url} serves {_names(named) or 'no model'}. Name one: --served-model-name.")
        self.model = self.model or next(iter(named))
        if self.model not in named:
            raise ConfigError(f"{self.url} has no model {self.model!r}; it serves {_names(named)}.")
        about = named[self.model]
        told = {name: about[name] for name in ("root", "max_model_len", "meta") if _is_json(about.get(name))}
        self.identity = {"model": self.model, **told}

    async def complete(self, messages: Conversation | Sequence[Mapping[str, str]], **parameters: Any) -> Completion:
        """Return one reply.

        Raises PassingError where the server is away, too busy or answers with something that is not a reply;
        RequestRefusedError where it refuses this request; EndpointError where it would refuse any.
        """
        from rewardlab.client.failures import BadAnswerError, RefusedError, UnavailableError

        turns = [turn if isinstance(turn, Mapping) else turn.as_dict() for turn in messages]
        if not all(is_encodable(turn["content"]) for turn in turns):
            raise RequestRefusedError(f"the prompt {HALF}.")
        body = {"model": self.model, "messages": turns, "n": 1, "stream": False, **parameters}
        try:
            answer = await self._http.post(CHAT, body)
        except RefusedError as error:
            if error.status in OF_THE_REQUEST:
                raise RequestRefusedError(str(error)) from error
            raise
        except (UnavailableError, BadAnswerError) as error:
            raise PassingError(str(error)) from error
        return _completion(answer.values, f"POST {self.url}{CHAT}")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def _completion(values: Any, where: str) -> Completion:
    """Return the reply in an answer. Raises PassingError if it does not hold exactly one whole text."""
    choices = values.get("choices") if isinstance(values, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        got = f"{len(choices)} choices" if isinstance(choices, list) else "no choices"
        raise PassingError(f"{where}: the answer has {got}, wanted 1.")
    if choices[0].get("finish_reason") in BROKEN_OFF:
        raise PassingError(f"{where}: the server broke the reply off ({choices[0]['finish_reason']}).")
    message, usage = choices[0].get("message"), values.get("usage")
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str):
        raise PassingError(f"{where}: the answer has no text (a reply that is reasoning or a tool call alone?).")
    usage = usage if isinstance(usage, dict) else {}
    return Completion(
        text=text,
        stop=str(choices[0].get("finish_reason") or "unknown"),
        tokens=_count(usage.get("completion_tokens")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        logprob=_logprob(choices[0].get("logprobs")),
    )


def _names(models: Iterable[str]) -> str:
    return listed(list(map(short, models)))


def _is_json(value: object) -> bool:
    """Return whether there is a value, and one that JSON can hold: not NaN, which some servers write."""
    try:
        return value is not None and bool(to_json(value))
    except (ValueError, RecursionError):
        return False


def _count(value: object) -> int | None:
    """Return a number of tokens; None for anything else, also for more than any reply has."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else None


def _logprob(given: Any) -> float | None:
    """Return the sum over the tokens of a reply; None unless each is a number that a log-probability can be.

    Rounding may put one slightly above 0.
    """
    tokens = given.get("content") if isinstance(given, dict) else None
    if not isinstance(tokens, list) or not tokens:
        return None
    found = [token.get("logprob") if isinstance(token, dict) else None for token in tokens]
    numbers = [float(one) for one in found if is_number(one) and LEAST_LOGPROB <= one <= 1e-6]
    return math.fsum(numbers) if len(numbers) == len(found) else None
