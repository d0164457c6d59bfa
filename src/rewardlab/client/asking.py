"""Sending one request to an engine, and reading its answer as one entry per row.

Legend: R rows of a request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any, Final, Protocol, runtime_checkable

from pydantic import ValidationError

from rewardlab.client.dialects import Dialect, Item, require_count, values_of, wrong_in
from rewardlab.client.endpoint import EndpointSpec
from rewardlab.client.failures import BadAnswerError, ModelChangedError, RefusedError
from rewardlab.client.http import Http
from rewardlab.client.offers import strange
from rewardlab.client.protocol import ScoreRequest, ScoreResponse, WireGroup, WireMessage
from rewardlab.client.rendering import Artifact, ByFunction, Formatting, Rendering, require_formatting
from rewardlab.client.rows import Answered, Row
from rewardlab.core.errors import RenderError
from rewardlab.core.spec import REFUSING, OutputAs
from rewardlab.core.types import Conversation, Message, prompt_key
from rewardlab.data.prompts import conversations_of
from rewardlab.data.rows import UnusableRowError

OF_A_ROW: Final = (400, 413, 422)
"""Refusals that may be due to one row of a request."""
WRONG_DIGEST: Final = 409
TOO_LARGE: Final = 413
PROMPT_KEY: Final = "x-prompt-key"
"""Header with a hash of the prompt. The texts themselves would end up in logs of balancers."""
PLACE: Final = re.compile(r"(?:groups\.(?=\d+\.replies)|token_ids\.)(?P<part>\d+)(?:\.replies\.(?P<row>\d+))?")
"""Matches the places of faults that our server reports within a request, and finds the row in them."""


@runtime_checkable
class Asking(Protocol):
    """Asks one server for the scores of the rows of one request."""

    whole: bool
    """Whether all rows of one prompt have to go into one request."""

    async def ask(self, rows: Sequence[Row], *, keep: bool) -> list[Answered]:
        """Return R answers, in order. With `keep`, a row without a score gets its cause; otherwise an error is raised.

        Raises EndpointError, or RenderError for a row that cannot be rendered.
        """


class AskOwn:
    """Asks our own server, which renders by itself and names the digest of the model that gave the scores."""

    whole = True

    def __init__(
        self,
        http: Http,
        endpoint: EndpointSpec,
        *,
        pinned: bool,
        truncate: bool | None,
        render: ByFunction | None,
        output: OutputAs,
    ) -> None:
        """`pinned` says that only the model of `endpoint` may answer. `render` renders here instead of on the server.

        `truncate` says whether conversations above the limit may be cut; None by the rule of the model.
        """
        if truncate is None:
            truncate = endpoint.served is None or endpoint.served.truncation not in REFUSING
        self._http = http
        self._endpoint = endpoint
        self._pinned = pinned
        self._truncate = truncate
        self._render = render
        self._output = output

    async def ask(self, rows: Sequence[Row], *, keep: bool) -> list[Answered]:
        """See `Asking`. Raises ModelChangedError if another model answers than the pinned one.

        If the server finds the whole request too large (413 without the place of a row), it is halved between prompts
        until the server takes it.
        """
        try:
            return await self._ask_rendered(rows, keep=keep)
        except RefusedError as error:
            if error.status != TOO_LARGE or error.param:
                raise
            parts = [list(part) for _, part in groupby(rows, key=lambda row: row.key)]
            if len(parts) > 1:
                halves = parts[: len(parts) // 2], parts[len(parts) // 2 :]
                return [one for half in halves for one in await self.ask(list(chain(*half)), keep=keep)]
            if not keep:
                raise
            # One model has to score all replies to a prompt, so a request with a single prompt is never divided.
            return [Answered(score=None, output=self._output, error=str(error)) for _ in rows]

    async def _ask_rendered(self, rows: Sequence[Row], *, keep: bool) -> list[Answered]:
        """Return the answers to one request, rendered here if the caller's function does that."""
        if self._render is not None and rows[0].token_ids is None:
            rendered = await asyncio.to_thread(rendered_rows, self._render, rows, keep=keep, bare=False)
            sent = [(row, one.item) for row, one in zip(rows, rendered, strict=True) if isinstance(one, Rendering)]
            for row, item in sent:
                require_tokens(item, row, engine="our own server")
            tokens = [Row(name=row.name, token_ids=tuple(int(token) for token in item)) for row, item in sent]
            answers = iter(await self._ask(tokens, keep=keep) if tokens else [])
            return [next(answers) if isinstance(one, Rendering) else one for one in rendered]
        return await self._ask(rows, keep=keep)

    async def _ask(self, rows: Sequence[Row], *, keep: bool) -> list[Answered]:
        parts = [list(part) for _, part in groupby(rows, key=lambda row: row.key)]
        form: dict[str, Any] = (
            {"groups": [_wire_group(part) for part in parts]}
            if rows[0].token_ids is None
            else {"token_ids": [list(row.token_ids or ()) for row in rows]}
        )
        parts = parts if rows[0].token_ids is None else [[row] for row in rows]
        request = ScoreRequest(
            model=self._endpoint.model,
            digest=self._endpoint.digest if self._pinned else None,
            output=self._output,
            truncate=self._truncate,
            on_error="null" if keep else "refuse",
            **form,
        )
        where = f"POST {self._endpoint.url}{self._endpoint.route}"
        try:
            body = request.model_dump(exclude_defaults=True)
            values = (await self._http.post(self._endpoint.route, body, _headers(parts))).values
        except RefusedError as error:
            if error.status == WRONG_DIGEST:
                raise self._changed(str(error)) from error
            if (row := _meant(error.param, parts)) is not None:
                raise RefusedError(
                    f"{row.name}: {error}", status=error.status, kind=error.kind, param=error.param
                ) from error
            raise
        _require_finite(values, parts, where=where)
        answer = _answer_of(values, where=where)
        if self._pinned and answer.digest != self._endpoint.digest:
            raise self._changed(f"{where}: the answer has the digest {answer.digest:.16}…")
        if answer.output != self._output:
            raise BadAnswerError(f"{where}: {self._output} scores were asked for, and {answer.output} ones answered.")
        require_count(answer.groups, [f"group {n}" for n in range(len(parts))], where=where)
        answers = []
        for part, group in zip(parts, answer.groups, strict=True):
            names = [row.name for row in part]
            shortened = group.truncated_reply_tokens or [0] * len(part)
            for values_of_group in (group.scores, group.num_tokens, group.truncated_tokens, shortened):
                require_count(values_of_group, names, where=where)
            for k, (row, score) in enumerate(zip(part, group.scores, strict=True)):
                cause = group.errors.get(k)
                wrong = None if score is not None else cause or wrong_in(score)
                if wrong is not None and not keep:
                    raise BadAnswerError(f"{where}: {row.name}: {wrong}.")
                answers.append(
                    Answered(
                        score=score,
                        output=self._output,
                        error=wrong,
                        num_tokens=group.num_tokens[k],
                        truncated_tokens=group.truncated_tokens[k],
                        truncated_reply_tokens=shortened[k],
                        digest=answer.digest,
                    )
                )
        return answers

    def _changed(self, said: str) -> ModelChangedError:
        return ModelChangedError(
            f"{said.rstrip('.')}. This client is connected to the model with the digest {self._endpoint.digest:.16}…, "
            f"and scores of two models cannot be compared. Connect anew (`connect()`), or follow swaps from call to "
            f"call: on_swap='follow'."
        )


def _meant(param: str, parts: Sequence[Sequence[Row]]) -> Row | None:
    """Return the row at a place in the request (`groups.3.replies.0`, `token_ids.3`); None if it is not a row's."""
    if (place := PLACE.match(param)) is None:
        return None
    part, row = int(place["part"]), int(place["row"] or 0)
    return parts[part][row] if part < len(parts) and row < len(parts[part]) else None


def _require_finite(values: Any, parts: Sequence[Sequence[Row]], *, where: str) -> None:
    """Raise BadAnswerError, naming the row, if some score is there but is not a finite number.

    Other faults are found afterwards; this one comes first, since its message names the row and says what to do.
    """
    groups = values.get("groups") if isinstance(values, dict) else None
    for part, group in zip(parts, groups if isinstance(groups, list) else (), strict=False):
        scores = group.get("scores") if isinstance(group, dict) else None
        for row, score in zip(part, scores if isinstance(scores, list) else (), strict=False):
            if score is not None and (wrong := wrong_in(score)) is not None:
                raise BadAnswerError(f"{where}: {row.name}: {wrong}.")


def _answer_of(values: Any, *, where: str) -> ScoreResponse:
    """Return the answer of our server. Raises BadAnswerError if it does not follow the protocol."""
    try:
        return ScoreResponse.model_validate(values)
    except ValidationError as error:
        raise strange(where, error, values) from error


def _headers(parts: Sequence[Sequence[Row]]) -> dict[str, str]:
    """Return the header by which a load balancer can send all requests about one prompt to the server that caches it.

    A request about several prompts has no header, since their servers may differ; nor has one of token ids, which do
    not say where the prompt ends.
    """
    if len(parts) != 1 or parts[0][0].token_ids is not None:
        return {}
    prompt = parts[0][0].prompt
    return {PROMPT_KEY: prompt_key([Message("user", prompt)] if isinstance(prompt, str) else prompt)}


def _wire_group(rows: Sequence[Row]) -> WireGroup:
    """Return rows with the same prompt as a group of our server's protocol."""
    prompt = rows[0].prompt
    wired = prompt if isinstance(prompt, str) else [WireMessage(role=one.role, content=one.content) for one in prompt]
    return WireGroup(prompt=wired, replies=[row.reply for row in rows])


class AskEngine:
    """Asks vLLM or SGLang, which get rendered conversations."""

    whole = False

    def __init__(
        self, http: Http, endpoint: EndpointSpec, formatting: Formatting | None, *, artifact: Artifact | None
    ) -> None:
        self._http = http
        self._endpoint = endpoint
        self._formatting = formatting
        self._artifact = artifact
        self.interrupted = False
        """Whether some request was answered only after the server had been away."""

    async def ask(self, rows: Sequence[Row], *, keep: bool) -> list[Answered]:
        """See `Asking`."""
        # Rendering takes processor time, so it runs in a thread, and the event loop attends to other requests.
        made = await asyncio.to_thread(self._made, rows, keep=keep)
        sent = [(row, one) for row, one in zip(rows, made, strict=True) if isinstance(one, Rendering)]
        answers = iter(await self._send(sent, keep=keep) if sent else [])
        return [next(answers) if isinstance(one, Rendering) else one for one in made]

    def _made(self, rows: Sequence[Row], *, keep: bool) -> list[Rendering | Answered]:
        """Return each row as it is sent or, with `keep`, why it cannot be rendered; raises RenderError without."""
        if rows[0].token_ids is not None:
            return [self._tokens(row, keep=keep) for row in rows]
        formatting = require_formatting(self._formatting, engine=self._endpoint.engine)
        bare = self._artifact is not None and self._artifact.spec.renderer.joins_texts
        return rendered_rows(formatting, rows, keep=keep, bare=bare)

    def _tokens(self, row: Row, *, keep: bool) -> Rendering | Answered:
        try:
            if self._artifact is not None:
                self._artifact.require_length(row.token_ids or ())
        except RenderError as error:
            return _refused(row, error, keep=keep)
        return Rendering(item=list(row.token_ids or ()), truncated_tokens=0, truncated_reply_tokens=0)

    async def _send(self, sent: Sequence[tuple[Row, Rendering]], *, keep: bool) -> list[Answered]:
        """Return the answers to rendered rows. Raises EndpointError."""
        dialect = self._endpoint.dialect
        assert dialect is not None, "another engine is asked by a dialect"
        where = f"POST {self._endpoint.url}{dialect.path}"
        if not dialect.takes_text:
            for row, one in sent:
                require_tokens(one.item, row, engine=self._endpoint.engine)
        try:
            values = await self._values(dialect, sent, where=where)
        except RefusedError as error:
            if keep and error.status in OF_A_ROW and len(sent) > 1:
                # The refusal does not say which row it means, so ask for each row by itself.
                return [answer for one in sent for answer in await self._send([one], keep=True)]
            if keep and error.status in OF_A_ROW:
                return [Answered(score=None, error=str(error), digest=self._endpoint.digest)]
            raise
        answers = []
        for (row, one), value in zip(sent, values, strict=True):
            wrong = wrong_in(value)
            if wrong is not None and not keep:
                raise BadAnswerError(f"{where}: {row.name}: {wrong}.")
            answers.append(
                Answered(
                    score=None if wrong is not None else float(value),
                    error=wrong,
                    num_tokens=len(one.item) if isinstance(one.item, list) else None,
                    truncated_tokens=one.truncated_tokens,
                    truncated_reply_tokens=one.truncated_reply_tokens,
                    digest=self._endpoint.digest,
                )
            )
        return answers

    async def _values(self, dialect: Dialect, sent: Sequence[tuple[Row, Rendering]], *, where: str) -> list[Any]:
        try:
            body = dialect.body([one.item for _, one in sent], self._endpoint.model)
            answer = await self._http.post(dialect.path, body)
            self.interrupted |= answer.interrupted
        except RefusedError as error:
            if error.status != 404:
                raise
            raise RefusedError(f"{error} {self._endpoint.said_routes()}", status=404, kind=error.kind) from error
        return values_of(dialect, answer.values, [row.name for row, _ in sent], where=where)


def rendered_rows(formatting: Formatting, rows: Sequence[Row], *, keep: bool, bare: bool) -> list[Rendering | Answered]:
    """Return each row rendered or, with `keep`, why it cannot be.

    `bare` says that the model takes a text prompt as it is, as in `data/prompts.py`. Raises RenderError without `keep`.
    """
    asked: list[Conversation | Exception] = []
    for row in rows:
        try:
            asked += conversations_of(row.prompt, [row.reply], bare=bare)
        except (RenderError, UnusableRowError) as error:
            asked.append(error)
    made = iter(formatting.render_all([one for one in asked if not isinstance(one, Exception)]))
    outcomes = [one if isinstance(one, Exception) else next(made) for one in asked]
    return [
        one if isinstance(one, Rendering) else _refused(row, one, keep=keep)
        for row, one in zip(rows, outcomes, strict=True)
    ]


def _refused(row: Row, error: Exception, *, keep: bool) -> Answered:
    """Return the answer to a row that cannot be rendered: no score, and the cause.

    Raises RenderError, naming the row, without `keep`.
    """
    if not keep:
        raise RenderError(f"{row.name}: {error}") from error
    return Answered(score=None, error=str(error))


def require_tokens(item: Item, row: Row, *, engine: str) -> None:
    """Raise RenderError unless a row was rendered to token ids."""
    if isinstance(item, str):
        raise RenderError(
            f"{row.name}: render_fn gave a text, to which {engine} would add the tokenizer's own tokens, such as a "
            f"second BOS. Let render_fn return token ids."
        )
