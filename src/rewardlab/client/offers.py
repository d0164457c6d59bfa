"""Reading of what a server offers from its answers: its models, its routes, and the route to use.

Clients and `rewardlab verify` share this, though they send their requests in different ways.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from pydantic import ValidationError

from rewardlab.client.dialects import DIALECTS, Dialect, choose, engine_of
from rewardlab.client.failures import BadAnswerError
from rewardlab.client.protocol import SPEC_PATH, ServedModel, SpecResponse
from rewardlab.core import terminal
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.terminal import brief

SHOWN: Final = 24
"""Most routes in a message."""


def spec_in(values: Any, *, where: str, required: bool = False) -> SpecResponse | None:
    """Return what our server says about itself; None if the answer comes from another engine.

    Raises BadAnswerError if the answer is our server's, or is `required` to be, and cannot be read.
    """
    try:
        return SpecResponse.model_validate(values)
    except ValidationError as error:
        ours = isinstance(values, dict) and values.get("object") == "rewardlab.spec"
        if not (ours or required):
            return None
        raise strange(where, error, values) from error


def strange(where: str, error: ValidationError, values: Any) -> BadAnswerError:
    """Return the error for an answer of our server that breaks the protocol, naming its first wrong field."""
    first = error.errors(include_input=False, include_url=False)[0]
    version = values.get("version") if isinstance(values, dict) else None
    return BadAnswerError(
        f"{where}: the answer is not what this version of rewardlab expects: "
        f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}. "
        f"The server has version {brief(version)}; use the same one on both sides."
    )


def chosen(spec: SpecResponse, model: str | None, *, url: str, setting: str = "model") -> ServedModel:
    """Return one model of our server: the named one, or the default. `setting` is the setting that names it.

    Raises EndpointError if the server has no model yet, ConfigError if it has none of this name.
    """
    if not spec.models:
        raise EndpointError(f"{url}: the server has no model yet. Ask again when it is ready.")
    served = next((one for one in spec.models if model in (None, one.name)), None)
    if served is None:
        names = ", ".join(one.name for one in spec.models)
        raise ConfigError(f"{setting}: {url} has no {model!r:.80}; it has {names}.")
    return served


def routes_in(values: Any) -> set[str]:
    """Return the routes that /openapi.json lists; an empty set if it lists none."""
    paths = values.get("paths") if isinstance(values, dict) else None
    return {path for path in paths if isinstance(path, str)} if isinstance(paths, dict) else set()


def listed(routes: Collection[str]) -> str:
    """Return routes for a message."""
    if not routes:
        return "no list of its routes"
    return f"the routes {terminal.listed(sorted(routes), SHOWN)}"


def said_routes(engine: str, version: str | None, routes: Collection[str]) -> str:
    """Return a sentence with the engine, its version and its routes, for a message."""
    named = {"vllm": "vLLM", "sglang": "SGLang"}.get(engine, engine)
    return f"{named} {version or '(version unknown)'} there has {listed(routes)}."


def engine_with(routes: Collection[str], *, url: str, remedy: str = "") -> str:
    """Return the engine that has these routes. Raises EndpointError, with `remedy`, if no known engine has them."""
    found = engine_of(routes)
    if found is None:
        raise EndpointError(
            f"{url}: no server that this client knows: it has no {SPEC_PATH} (rewardlab), and {listed(routes)}. "
            f"See that the address is right{remedy}."
        )
    return found


def dialect_of(engine: str, routes: Collection[str], *, version: str | None, url: str) -> Dialect:
    """Return the dialect of an engine. Raises EndpointError if it has no route that gives raw scores.

    A server may hide its list of routes. Then the preferred route is used, and a 404 shows if it is missing.
    """
    dialect = choose(engine, routes) if routes else DIALECTS[engine][0]
    if dialect is None:
        start = {"vllm": "--runner pooling --convert classify", "sglang": "--is-embedding"}[engine]
        raise EndpointError(
            f"{url}: none of the routes that give raw scores "
            f"({', '.join(dialect.path for dialect in DIALECTS[engine])}). {said_routes(engine, version, routes)} "
            f"Start it for a reward model: {start}."
        )
    return dialect


def model_in(values: Any, model: str | None, *, url: str, setting: str = "model") -> str | None:
    """Return the name for the requests: the given one, or that of the only model that /v1/models lists.

    Raises ConfigError if a name is needed and not given, or no model has it.
    """
    entries = values.get("data") if isinstance(values, dict) else None
    found = entries if isinstance(entries, list) else []
    names = [entry["id"] for entry in found if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if model is None:
        if len(names) > 1:
            raise ConfigError(f"{setting}: {url} has several models; give one of {', '.join(names)}.")
        return names[0] if names else None
    if names and model not in names:
        raise ConfigError(f"{setting}: {url} has no {model!r:.80}; it has {', '.join(names)}.")
    return model


def require_nameless(dialect: Dialect, model: str | None, *, setting: str = "model") -> None:
    """Raise ConfigError if a model is named to an engine that takes no name."""
    if model is not None:
        raise ConfigError(
            f"{setting}: {dialect.engine} takes no name at {dialect.path}, it answers for the one model that it "
            f"serves. Leave it out."
        )
