"""Finding out what answers at an address: the engine, the route for scores, and the model.

Our own server says everything at `/v1/spec`. For other engines the routes in `/openapi.json` are read, because they
have changed between versions. If the needed route is missing, the error lists those that the server has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from rewardlab.client.dialects import Dialect
from rewardlab.client.failures import BadAnswerError, RefusedError, UnavailableError
from rewardlab.client.http import Http
from rewardlab.client.offers import (
    chosen,
    dialect_of,
    engine_with,
    listed,
    model_in,
    require_nameless,
    routes_in,
    said_routes,
    spec_in,
)
from rewardlab.client.protocol import SCORE_PATH, SPEC_PATH, ServedModel, SpecResponse
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.spec import OutputAs

SAY: Final = "; if it is vLLM or SGLang, say so: engine='vllm' or engine='sglang'"
ABSENT: Final = (404, 405)
"""Status codes by which a server says that it has no such route."""
VERSION_PATHS: Final = ("/version", "/get_server_info", "/server_info")


@dataclass(frozen=True, kw_only=True)
class EndpointSpec:
    """A model behind an address."""

    url: str
    engine: str
    """`rewardlab`, `vllm` or `sglang`."""
    version: str | None = None
    """Version of the engine; None if it does not say."""
    route: str
    """The route for scores."""
    model: str | None = None
    """Name of the model on the server; None if the server has only one and does not name it."""
    digest: str | None = None
    """Digest of the reward-model folder: the one that our server names, or that of the local folder if the server gave
    its canaries their recorded scores; None otherwise."""
    precision: str | None = None
    """dtype of the arithmetic: the one that our server names, or the first whose references fit; None before the
    check."""
    max_length: int | None = None
    """Most tokens of a conversation, if known."""
    served: ServedModel | None = None
    """What our server says about the model."""
    dialect: Dialect | None = field(default=None, repr=False)
    """The dialect in which another engine is asked."""
    routes: tuple[str, ...] = field(default=(), repr=False)
    """Routes of another engine, empty if it does not list them."""

    def said_routes(self) -> str:
        """Return a sentence with the engine, its version and its routes, for a message."""
        return said_routes(self.engine, self.version, self.routes)


async def find(http: Http, *, engine: str, model: str | None) -> EndpointSpec:
    """Return what answers at an address.

    Raises EndpointError if nothing answers, or the engine is unknown or has no route for raw scores; ConfigError if a
    name is needed and not given, or no model has it.
    """
    own = await _own_spec(http, required=engine == "rewardlab") if engine in ("auto", "rewardlab") else None
    if own is not None:
        return _own(http.url, own, model)
    routes = await _routes(http)
    found = engine_with(routes, url=http.url, remedy=SAY) if engine == "auto" else engine
    version = await _version(http, routes)
    dialect = dialect_of(found, routes, version=version, url=http.url)
    return EndpointSpec(
        url=http.url,
        engine=found,
        version=version,
        route=dialect.path,
        model=await _model(http, dialect, model),
        dialect=dialect,
        routes=tuple(sorted(routes)),
    )


def require_output(endpoint: EndpointSpec, output: OutputAs) -> None:
    """Raise ConfigError unless this model can be asked for such scores: raw ones always, others where our server has a
    model that holds a calibration."""
    if output == "raw":
        return
    if endpoint.served is None:
        named = {"vllm": "vLLM", "sglang": "SGLang"}.get(endpoint.engine, endpoint.engine)
        raise ConfigError(
            f"output={output!r}: {endpoint.url} is {named}, which answers raw scores and knows no calibration. Serve "
            f"the folder with `rewardlab serve`, or ask for raw scores and convert them: `rewardlab.load(FOLDER)` has "
            f"`calibrated` and `probabilities`."
        )
    if output not in endpoint.served.outputs:
        raise ConfigError(
            f"output={output!r}: the model {endpoint.model!r} at {endpoint.url} holds no calibration. Fit one on "
            f"held-out data and store it, `rewardlab calibrate FOLDER --dataset PAIRS --store`, and serve that folder."
        )


async def _own_spec(http: Http, *, required: bool) -> SpecResponse | None:
    """Return what our server says about itself; None if the server is another engine."""
    try:
        values = (await http.get(SPEC_PATH)).values
    except RefusedError as error:
        if error.status not in ABSENT:
            raise
        if not required:
            return None
        routes = await _routes(http)
        raise EndpointError(
            f"{http.url}: no {SPEC_PATH}, so this is not a server of rewardlab; it has {listed(routes)}. "
            f"See that the address is right, or leave engine out."
        ) from error
    return spec_in(values, where=f"{http.url}{SPEC_PATH}", required=required)


def _own(url: str, spec: SpecResponse, model: str | None) -> EndpointSpec:
    """Return one model of our server: the named one, or the default."""
    served = chosen(spec, model, url=url)
    return EndpointSpec(
        url=url,
        engine="rewardlab",
        version=spec.version,
        route=SCORE_PATH,
        model=served.name,
        digest=served.digest,
        precision=served.dtype,
        max_length=served.max_length,
        served=served,
    )


async def _routes(http: Http) -> set[str]:
    """Return the routes of a server; an empty set if it does not list them."""
    try:
        return routes_in((await http.get("/openapi.json")).values)
    except (RefusedError, BadAnswerError):
        return set()


async def _version(http: Http, routes: Collection[str]) -> str | None:
    """Return the version of an engine, for messages; None if it does not say."""
    for path in VERSION_PATHS:
        if path in routes:
            try:
                values = (await http.get(path)).values
            except (RefusedError, BadAnswerError, UnavailableError):
                continue
            if isinstance(values, dict) and isinstance(version := values.get("version"), str):
                return version[:40]
    return None


async def _model(http: Http, dialect: Dialect, model: str | None) -> str | None:
    """Return the name for the requests: the given one, or that of the only model. Raises ConfigError."""
    if not dialect.names_model:
        require_nameless(dialect, model)
        return None
    try:
        values = (await http.get("/v1/models")).values
    except (RefusedError, BadAnswerError):
        return model
    return model_in(values, model, url=http.url)
