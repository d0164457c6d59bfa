"""The app's description in /openapi.json: bodies and errors of every route, from the classes that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rewardlab.client.protocol import DIGEST_HEADER, ErrorResponse
from rewardlab.serve.http.middleware import OPEN, REQUEST_ID

SCHEMAS: Final = "#/components/schemas/"
CAUSES: Final = {
    400: "The body is not JSON, or its JSON has more than one meaning.",
    401: "The token is missing, or another one.",
    403: "Nothing may be swapped in from this folder.",
    404: "No such model or route.",
    405: "The route does not take this method.",
    408: "The body did not arrive in time.",
    409: "The model has another digest than the one asked for, or another swap goes on.",
    413: "Too long, too large, or too many at a time.",
    415: "The headers do not say that the body is JSON.",
    421: "The name in the header Host is not one of this server's.",
    422: "JSON that is not a request, a conversation that cannot be scored, or a folder that failed its checks.",
    429: "Too much is waiting; Retry-After says when to try again.",
    500: "The model could not compute, or the server failed.",
    503: "The server is about to end, or not ready.",
}
"""Code -> what it means, for all routes."""
EVERYWHERE: Final = (401, 405, 421, 500)
SCORING: Final = (400, 401, 404, 405, 408, 409, 413, 415, 421, 422, 429, 500, 503)
ADMINISTRATION: Final = (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 429, 500, 503)
_HEADERS: Final = {
    REQUEST_ID: {"description": "The request's id: the one that was sent, or a new one.", "schema": {"type": "string"}}
}
_DIGEST: Final = {
    DIGEST_HEADER: {"description": "Digest of the model that scored.", "schema": {"type": "string"}},
}


def errors(codes: Sequence[int]) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a route as FastAPI documents them."""
    return {code: {"model": ErrorResponse, "description": CAUSES[code]} for code in codes}


def takes(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the part of a route's description that names the classes of its body."""
    refs = [{"$ref": SCHEMAS + kind.__name__} for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]], *, version: str, guarded: bool) -> None:
    """Make the app describe itself, with the schemas of `bodies`, which FastAPI does not read by itself."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(_description(app, bodies, version, guarded))
        return made

    # FastAPI documents this assignment as the way to replace the description; type checkers forbid it for methods.
    app.openapi = openapi  # type: ignore[method-assign]


def _description(app: FastAPI, bodies: Sequence[type[BaseModel]], version: str, guarded: bool) -> dict[str, Any]:
    told = get_openapi(
        title="rewardlab",
        version=version,
        description="Scores of reward models, raw unless others are asked for.",
        routes=app.routes,
    )
    _, schemas = models_json_schema([(kind, "validation") for kind in bodies], ref_template=SCHEMAS + "{model}")
    parts = told.setdefault("components", {})
    parts.setdefault("schemas", {}).update(schemas.get("$defs", {}))
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in told["paths"].items():
        for route in methods.values():
            scores = path.startswith(("/v1/score", "/classify", "/pooling", "/get_reward", "/slime"))
            for code, response in route["responses"].items():
                response["headers"] = _HEADERS | (_DIGEST if scores and code == "200" else {})
            if path.startswith("/admin/") or (guarded and path not in OPEN):
                route["security"] = [{"token": []}]
    return told
