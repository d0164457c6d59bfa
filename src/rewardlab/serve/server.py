"""`rewardlab serve`: an engine of this package and the app around it, in one process or in several."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rewardlab.core.terminal import short
from rewardlab.core.values import require
from rewardlab.model.config import ComputeConfig
from rewardlab.serve.http.config import LOOPBACK, HttpConfig, LimitsConfig, ServeConfig

if TYPE_CHECKING:  # it needs pydantic, and `serve` says what is missing
    from rewardlab.serve.engine.api import Engine

NEEDED: Final = ("fastapi", "uvicorn", "prometheus_client", "pydantic")


def load_engine(folders: Mapping[str, Path], *, adapters: frozenset[str], settings: Mapping[str, Any]) -> Engine:
    """Return an engine of this package; `adapters` are the names that stand for adapters on one base.

    Raises ArtifactError if a folder fails its checks.
    """
    from rewardlab.serve.engine.local import LocalEngine

    engine: Engine = LocalEngine.load(
        {name: folder for name, folder in folders.items() if name not in adapters},
        adapters={name: folder for name, folder in folders.items() if name in adapters},
        **settings,
    )
    return engine


def serve(
    folders: Sequence[str],
    settings: ServeConfig,
    *,
    limits: LimitsConfig,
    compute: ComputeConfig,
    say: Callable[[str], None],
) -> int:
    """Serve the models of `folders` (`FOLDER` or `NAME=FOLDER`) until a signal and return the exit status.

    Raises ConfigError for settings, ArtifactError for a folder that fails its checks.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    require(not missing, f'the server needs {", ".join(missing)}: pip install "rewardlab[serve]"')
    from rewardlab.serve.http.run import end_at_once, listen, serve_until_ended, url_of
    from rewardlab.serve.http.telemetry import Spans, spans_from_environment

    models, config = models_of([*folders, *settings.adapters]), http_config(settings, limits)
    adapters = frozenset(models_of(settings.adapters))
    spans = spans_from_environment() if settings.otel else Spans(None)
    # Before the models are loaded, so that a taken port is reported at once.
    with listen(settings.host, settings.port) as bound:
        load = functools.partial(load_engine, adapters=adapters, settings=engine_settings(settings, compute))
        if settings.workers > 1:
            return _serve_in_workers(load, models, bound, settings, config, say)
        from rewardlab.serve.http.app import make_app

        engine = load(models)
        served = make_app(engine, config, spans=spans)
        told = ", ".join(f"{one.name} (digest {one.digest[:12]}, {one.dtype})" for one in engine.served())
        url = url_of(bound)
        serve_until_ended(
            served,
            bound,
            config.limits,
            drain_timeout_s=settings.drain_timeout,
            on_start=lambda _server: say(f"serving {told} at {url}"),
        )
    if served.swaps is not None and served.swaps.busy:
        end_at_once()
    return 0


def _serve_in_workers(
    load: Callable[[Mapping[str, Path]], Engine],
    models: Mapping[str, Path],
    bound: socket.socket,
    settings: ServeConfig,
    config: HttpConfig,
    say: Callable[[str], None],
) -> int:
    from rewardlab.serve.http.run import url_of
    from rewardlab.serve.http.worker import WorkerPlan
    from rewardlab.serve.http.workers import Workers

    plan = WorkerPlan(load=load, config=config, drain_timeout_s=settings.drain_timeout, otel=settings.otel)
    url = url_of(bound)
    workers = Workers(plan, models, bound, count=settings.workers)
    return workers.run(lambda: say(f"{settings.workers} workers serve {', '.join(models)} at {url}"))


def models_of(words: Sequence[str]) -> dict[str, Path]:
    """Return name -> folder of `FOLDER` or `NAME=FOLDER`, in the order given. Raises ConfigError for a name twice."""
    models: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or "/" in name:
            name, folder = Path(word).resolve().name, word
        require(bool(name and folder), f"{short(word)}: name a model as FOLDER or NAME=FOLDER.")
        require(name not in models, f"{short(word)}: two models are called {short(name)}. Write NAME=FOLDER.")
        models[name] = Path(folder)
    return models


def http_config(settings: ServeConfig, limits: LimitsConfig) -> HttpConfig:
    """Return the settings of the app. Raises ConfigError for missing tokens, and for folders that do not exist."""
    from rewardlab.serve.http.tokens import read_token, require_token_for

    token = read_token(settings.token_env, settings.token_file, flag="--token")
    admin = read_token(settings.admin_token_env, settings.admin_token_file, flag="--admin-token")
    require_token_for(settings.host, token)
    require(token is None or token != admin, "--admin-token: is the token of everybody. Choose another.")
    for folder in settings.allow_swap_from:
        require(folder.is_dir(), f"--allow-swap-from {short(str(folder))}: there is no such folder.")
    return HttpConfig(
        limits=limits,
        token=token,
        admin_token=admin,
        allow_swap_from=tuple(folder.resolve() for folder in settings.allow_swap_from),
        accept_rendered=settings.accept_rendered,
        # With a token, a web page whose own name leads to this machine gets 401, so names need no check.
        hosts=LOOPBACK if token is None else (),
        log_requests=settings.log_requests,
    )


def engine_settings(settings: ServeConfig, compute: ComputeConfig) -> dict[str, Any]:
    """Return the arguments of `LocalEngine.load` beside the models."""
    return {
        "precision": settings.precision,
        "device": settings.device,
        "token_budget": settings.micro_token_budget,
        "max_waiting_tokens": settings.max_waiting_tokens,
        "max_batch_wait_ms": settings.max_batch_wait_ms,
        "cache_tokens": settings.cache_tokens,
        "compute": compute,
    }
