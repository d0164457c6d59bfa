"""Answers over HTTP: bodies in JSON, errors in the form of `ErrorResponse`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import Response
from pydantic import BaseModel

from rewardlab.client.protocol import ErrorDetail, ErrorResponse
from rewardlab.core.terminal import visible
from rewardlab.serve.engine.api import Refused

GONE: Final = 499
"""Status code in log and metrics for a request whose client went away; nobody receives it."""
MOST_MESSAGE: Final = 2000
"""Most characters of a message."""


def answer(body: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a model as its body."""
    return Response(
        body.model_dump_json().encode(),
        status_code=status,
        media_type="application/json",
        headers=dict(headers or {}),
    )


def error_body(status: int, kind: str, message: str, *, param: str | None = None) -> ErrorResponse:
    """Return the body of an error. Characters that cannot be printed are escaped, so that it can go into a log."""
    said = visible(message[:MOST_MESSAGE], lines=True)
    where = None if param is None else visible(param[:MOST_MESSAGE])
    return ErrorResponse(error=ErrorDetail(message=said, type=kind, code=status, param=where))


def refusal(refused: Refused) -> Response:
    """Return the answer to a refused request, with Retry-After where trying again helps."""
    headers: dict[str, str] = {}
    if refused.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(refused.retry_after_s)))
    if refused.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if refused.status == HTTPStatus.REQUEST_TIMEOUT:
        headers["connection"] = "close"
    return answer(
        error_body(refused.status, refused.kind, str(refused), param=refused.param),
        status=refused.status,
        headers=headers,
    )


def plain_error(status: int, headers: Mapping[str, Any] | None = None) -> Response:
    """Return the answer for a status that the framework decides on, such as 404 and 405."""
    words = {
        404: "No such route. GET /openapi.json lists those there are.",
        405: "This route does not take this method; the header Allow names those it takes.",
        500: "The server failed; its log says where. The request may be sent again.",
    }
    phrase = HTTPStatus(status).phrase
    kind = "internal" if status >= 500 else phrase.lower().replace(" ", "_")
    return answer(error_body(status, kind, words.get(status, f"{phrase}.")), status=status, headers=headers)
