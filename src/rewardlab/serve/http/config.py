"""Settings of the HTTP server: its limits, and who may do what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require
from rewardlab.model.config import BUDGETS, ScoringPrecision

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]", "::1")
"""Names of this machine that only this machine can reach."""
KIB: Final = 2**10
MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Section):
    """What a request may cost. Beyond a limit it is refused with a code that says which; nothing is cut to fit."""

    max_body_kib: int = 8192
    """Most KiB of a body (413), counted while it arrives."""
    max_held_mib: int = 256
    """Most MiB of all bodies that are held at a time, in each worker (429)."""
    max_conversations: int = 1024
    """Most conversations of a request, each reply one (413)."""
    max_request_tokens: int = 262_144
    """Most tokens that a request may compute, each prompt once (413)."""
    max_depth: int = 16
    """Deepest nesting of JSON (400); a request needs 6."""
    max_in_flight: int = 1024
    """Most requests that are answered at a time, in each worker (429)."""
    max_connections: int = 2048
    """Most connections that are open at a time, in each worker (503)."""
    header_timeout: float = 10.0
    """Seconds in which the head of a request has to arrive, then the connection is closed (408)."""
    body_timeout: float = 20.0
    """Seconds in which the body has to arrive (408)."""
    write_timeout: float = 30.0
    """Seconds in which a client has to read what waits for it, then the connection is broken off."""
    keep_alive: float = 75.0
    """Seconds after which a connection without requests is closed."""

    def __post_init__(self) -> None:
        require_between(
            self,
            max_body_kib=(1, 4_194_304),
            max_held_mib=(1, 1_048_576),
            max_conversations=(1, 10_000_000),
            max_request_tokens=(1, 1_000_000_000),
            max_depth=(6, 256),
            max_in_flight=(1, 1_000_000),
            max_connections=(1, 1_000_000),
            header_timeout=(0.01, 86_400),
            body_timeout=(0.01, 86_400),
            write_timeout=(0.01, 86_400),
            keep_alive=(0.01, 86_400),
        )
        require(
            self.max_body_kib * KIB <= self.max_held_mib * MIB,
            f"--max-held-mib {self.max_held_mib}: holds not even one body of --max-body-kib {self.max_body_kib}.",
        )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """Where the server is reached, by whom, and how its engine computes."""

    adapters: tuple[str, ...] = ()
    """Folders trained with LoRA from one base, which is held once, as `FOLDER` or `NAME=FOLDER`, beside the models; in
    fp32 only."""
    host: str = "127.0.0.1"
    """Address to listen on. Any that others can reach needs a token."""
    port: int = 8000
    """Port; 0 takes a free one."""
    workers: int = 1
    """Processes, each with its own copy of the models, on one port."""
    precision: ScoringPrecision = "fp32"
    """fp32 gives the canonical scores; bf16 and fp16 are faster on hardware that has them."""
    device: str | None = None
    """Device that computes, such as `cuda:0`; by default a GPU if there is one."""
    micro_token_budget: int = 8192
    """Tokens computed at a time; changes numbers by rounding alone."""
    max_waiting_tokens: int = 1_048_576
    """Most tokens that may wait in a worker; beyond, requests get 429 with Retry-After."""
    max_batch_wait_ms: float = 0.0
    """Milliseconds for which a batch that is not full waits for more requests."""
    cache_tokens: int = 16_384
    """Tokens of prompts that are kept computed across requests; 0 keeps none."""
    token_env: str | None = None
    """Environment variable that holds the token which requests need."""
    token_file: Path | None = None
    """File that holds it."""
    admin_token_env: str | None = None
    """Environment variable that holds the token of `/admin/swap`; without one there is no such route."""
    admin_token_file: Path | None = None
    """File that holds it."""
    allow_swap_from: tuple[Path, ...] = ()
    """Folders below which a model that is swapped in may lie."""
    accept_rendered: bool = False
    """Let `/get_reward` and `/slime` take texts that a policy's template rendered. Only if it is the model's own."""
    drain_timeout: float = 30.0
    """Seconds in which requests that were taken are answered after SIGTERM."""
    log_requests: bool = False
    """Log one line a request, without its texts."""
    otel: bool = False
    """Send OpenTelemetry spans where its environment variables say."""

    def __post_init__(self) -> None:
        require_between(
            self,
            port=(0, 65535),
            workers=(1, 1024),
            micro_token_budget=BUDGETS,
            max_waiting_tokens=BUDGETS,
            max_batch_wait_ms=(0, 60_000),
            cache_tokens=(0, BUDGETS[1]),
            drain_timeout=(0, 86_400),
        )
        require(
            not self.allow_swap_from or bool(self.admin_token_env or self.admin_token_file),
            "--allow-swap-from: without --admin-token-env or --admin-token-file nobody may swap.",
        )


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Everything that the app decides by."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    token: bytes | None = None
    """What scoring routes want as `Authorization: Bearer …`; None lets everybody score."""
    admin_token: bytes | None = None
    """What `/admin/…` wants; without one these routes do not exist."""
    allow_swap_from: tuple[Path, ...] = ()
    """Folders below which a model to swap in may lie."""
    accept_rendered: bool = False
    """Whether `/get_reward` and `/slime` take text that a policy's template rendered."""
    hosts: tuple[str, ...] = ()
    """Names by which requests may call this server (421 for others); any if empty. Guards a server without a token
    against web pages whose own name leads to this machine."""
    log_requests: bool = False
    """Log one line a request, without its texts."""
