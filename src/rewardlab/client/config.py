"""Settings of a client."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args, get_type_hints

from rewardlab.core.errors import ConfigError
from rewardlab.core.remaking import writable
from rewardlab.core.spec import OutputAs
from rewardlab.core.values import convert, require

Engine = Literal["auto", "rewardlab", "vllm", "sglang"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
OnSwap = Literal["error", "follow"]
RenderFn = Callable[[list[dict[str, str]]], str | Sequence[int]]
"""Messages of a conversation -> its rendered text, or its tokens, as the model is to read them."""
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "engine": ("auto", "rewardlab", "vllm", "sglang"),
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "on_swap": ("error", "follow"),
    "output": get_args(OutputAs),
}


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Settings of a client, besides the address of its server."""

    model: str | None = None
    """Name of the model or adapter on the server; None for the only one, or for our server's default."""
    token: str | None = field(default=None, repr=False)
    """Sent as `Authorization: Bearer …`, without the white space around it."""
    engine: Engine = "auto"
    """What answers at the address; `auto` finds out by its routes."""
    artifact: str | Path | None = None
    """Folder of the reward model that is served. It renders conversations for vLLM and SGLang, and its canaries are the
    proof that the server has this model. Our server renders by itself; with a folder, it must have this very model."""
    render_fn: RenderFn | None = None
    """Renders conversations in place of the folder."""
    truncate: bool | None = False
    """Whether conversations above the model's length limit may be cut, by the rule of training; None cuts unless the
    model was trained without such conversations."""
    precision: Precision = "auto"
    """Arithmetic of a server that does not tell it; `auto` takes the first one whose references fit."""
    output: OutputAs = "raw"
    """What is asked for: raw scores, or what `rewardlab calibrate --store` made of them in the model that our server
    has. Other engines answer raw scores alone, and anything else is refused."""
    on_swap: OnSwap = "error"
    """What a new model on our server does: end in an error, or have its canaries checked and be followed."""
    check: bool = True
    """Whether the canaries are scored before anything else."""
    max_concurrency: int = 16
    """Most requests that are under way at a time."""
    max_batch: int = 32
    """Most conversations in a request. The replies to one prompt stay together on our server, however many."""
    timeout_s: float = 300.0
    """Seconds for one request with all its attempts and the waits between them; waiting for its turn is not counted."""
    attempts: int = 5
    """Most times that a request is sent."""
    httpx_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of `httpx2.AsyncClient`, such as `verify`, `cert`, `proxy`, `trust_env`, `headers`, `timeout`."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r:.60}.")
        for name in ("max_concurrency", "max_batch", "attempts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not value > 0:
                raise ConfigError(f"{name}: expected a whole number above 0, got {value!r:.60}.")
        limit = self.timeout_s
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise ConfigError(f"timeout_s: expected a finite number above 0, got {limit!r:.60}.")
        for name in ("model", "artifact", "truncate", "check"):
            convert(getattr(self, name), get_type_hints(ClientConfig)[name], name)
        require_function(self.render_fn)
        if self.token is not None:
            object.__setattr__(self, "token", bare_token(self.token, name="token"))
        if not isinstance(self.httpx_options, Mapping):
            raise ConfigError(f"httpx_options: expected a mapping, got a {type(self.httpx_options).__name__}.")
        object.__setattr__(self, "httpx_options", writable(self.httpx_options))


class Settings(TypedDict, total=False):
    """The fields of `ClientConfig` as keyword arguments."""

    model: str | None
    token: str | None
    engine: Engine
    artifact: str | Path | None
    render_fn: RenderFn | None
    truncate: bool | None
    precision: Precision
    output: OutputAs
    on_swap: OnSwap
    check: bool
    max_concurrency: int
    max_batch: int
    timeout_s: float
    attempts: int
    httpx_options: Mapping[str, Any]


def require_function(render_fn: object) -> None:
    """Raise ConfigError unless `render_fn` is None or can be called."""
    require(render_fn is None or callable(render_fn), f"render_fn: expected a function, got {render_fn!r:.60}.")


def bare_token(token: Any, *, name: str) -> str:
    """Return a token without the white space around it, such as the end of line of the file that it was read from.

    Raises ConfigError for one that is not a text, is empty, or does not fit into a header, without showing it.
    """
    if not isinstance(token, str):
        raise ConfigError(f"{name}: expected a text, got a {type(token).__name__}.")
    bare = token.strip()
    if not bare:
        raise ConfigError(f"{name}: it is empty.")
    if not (bare.isascii() and bare.isprintable()):
        raise ConfigError(
            f"{name}: it has a character that a header cannot hold, such as an end of line or a letter beyond ASCII."
        )
    return bare


def token_in(name: str | None, *, flag: str) -> str | None:
    """Return the token in an environment variable, None without a name. Raises ConfigError if it is not set."""
    if not name:
        return None
    token = os.environ.get(name, "").strip()
    if not token:
        raise ConfigError(f"{flag} {name}: the environment has no such variable, or it is empty. Export it.")
    return bare_token(token, name=f"{flag} {name}")
