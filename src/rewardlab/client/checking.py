"""The check of a server by the canaries of its model, before any other score is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewardlab.analysis.endpoint_faults import Finding, Heard, compare_forms, find
from rewardlab.analysis.faults import name_token_fault
from rewardlab.client import canaries
from rewardlab.client.asking import Asking
from rewardlab.client.config import ClientConfig
from rewardlab.client.endpoint import EndpointSpec
from rewardlab.client.rendering import Artifact, ByFunction
from rewardlab.client.rows import Answered, Row, requests_of, rows_of_conversations
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.spec import Canary
from rewardlab.data.chat import to_messages


async def check(asking: Asking, endpoint: EndpointSpec, artifact: Artifact | None, config: ClientConfig) -> str:
    """Return the precision whose references the server's scores of the canaries fit.

    The canaries are rendered and sent as every conversation is. If no known fault fits their scores, they are also sent
    as tokens, which distinguishes a wrong rendering from wrong weights.

    Raises CanaryError if the scores are not the model's, or ConfigError if there are no canaries.
    """
    known, precision = _references(endpoint, artifact, config)
    rows = [
        Row(name=f"canary {canary.name!r}", token_ids=tuple(canary.token_ids))
        if as_tokens
        else replace(row, name=f"canary {canary.name!r}")
        for row, canary, as_tokens in zip(
            rows_of_conversations([one.messages for one in known]),
            known,
            _sent_as_tokens(known, endpoint, artifact, config),
            strict=True,
        )
    ]
    scores = await _scores_of_kinds(asking, rows, max_batch=config.max_batch)
    # Opening the folder has proved that it renders the canaries to their own tokens.
    rendered = endpoint.engine != "rewardlab" and config.render_fn is None
    route = f"POST {endpoint.route}"
    heard = Heard(form="token_ids" if rendered else "messages", route=route, scores=tuple(scores))
    expected = None if precision == "auto" else precision
    found = find(known, heard, expected=expected)
    # The client itself sends no texts, so only the caller's rendering can let typed control tokens through.
    if not found.faults:
        return found.precision
    if found.faults == ("unknown",):
        again = [] if rendered else [await _as_tokens(asking, rows, known, expected, route=route, config=config)]
        found = compare_forms([found, *again])[0]
    other = None if config.render_fn is None else _other_tokens(known, ByFunction(config.render_fn), artifact)
    if other is not None:
        found = replace(found, heard=replace(found.heard, said=other))
    raise canaries.error_of(known, found, where=f"{endpoint.url}{endpoint.route}")


async def _as_tokens(
    asking: Asking,
    rows: Sequence[Row],
    known: Sequence[Canary],
    expected: str | None,
    *,
    route: str,
    config: ClientConfig,
) -> Finding:
    """Send the canaries as tokens, and return the finding about their scores."""
    plain = [Row(name=row.name, token_ids=tuple(one.token_ids)) for row, one in zip(rows, known, strict=True)]
    silent = Heard(form="token_ids", route=route)
    try:
        scores = await _scores_in_turn(asking, plain, max_batch=config.max_batch)
    except EndpointError as error:
        return find(known, replace(silent, fault="failed", said=str(error)), expected=expected)
    return find(known, replace(silent, scores=tuple(scores)), expected=expected)


def _sent_as_tokens(
    known: Sequence[Canary], endpoint: EndpointSpec, artifact: Artifact | None, config: ClientConfig
) -> list[bool]:
    """Return for each canary whether its tokens are sent in place of its conversation, which is above the length limit.

    Such a canary was cut when the model was saved. Our own server cuts it again, as it is asked to; nobody does that
    for other engines, or for a function of the caller.
    """
    if artifact is not None:
        return [canary.name in artifact.cut for canary in known]
    limit = None if endpoint.served is None else endpoint.served.max_length
    if config.render_fn is None or limit is None:
        return [False] * len(known)
    rendered = [ByFunction(config.render_fn).render(to_messages(canary.messages)).item for canary in known]
    return [isinstance(item, list) and len(item) > limit for item in rendered]


async def _scores_of_kinds(asking: Asking, rows: Sequence[Row], *, max_batch: int) -> list[float]:
    """Return the scores of rows, in order. Rows of tokens go into their own requests, as the protocol demands."""
    scores: dict[int, float] = {}
    for are_tokens in (False, True):
        numbers = [number for number, row in enumerate(rows) if (row.token_ids is not None) == are_tokens]
        own = await _scores_in_turn(asking, [rows[number] for number in numbers], max_batch=max_batch)
        scores |= zip(numbers, own, strict=True)
    return [scores[number] for number in range(len(rows))]


async def _scores_in_turn(asking: Asking, rows: Sequence[Row], *, max_batch: int) -> list[float]:
    """Return the scores of rows, in order, asked for by one request after the other."""
    scores: dict[int, float] = {}
    for request in requests_of(rows, max_batch=max_batch, whole=asking.whole):
        answers = await asking.ask([rows[number] for number in request], keep=False)
        scores |= zip(request, scores_of(answers), strict=True)
    return [scores[number] for number in range(len(rows))]


def scores_of(answers: Sequence[Answered]) -> list[float]:
    """Return the scores of answers that all have one."""
    scores = [answer.score for answer in answers if answer.score is not None]
    assert len(scores) == len(answers), "rows without a score are kept only on request"
    return scores


def _references(endpoint: EndpointSpec, artifact: Artifact | None, config: ClientConfig) -> tuple[list[Canary], str]:
    """Return (canaries, precision or `auto`). Raises ConfigError if there are none."""
    served = endpoint.served
    own = None if artifact is None else list(artifact.spec.canaries)
    if served is not None and (own or served.canaries):
        return own or [canaries.canary_of(one) for one in served.canaries], served.dtype
    if own:
        return own, config.precision
    raise ConfigError(
        f"check: there are no canaries by which {endpoint.url} could be checked. Give artifact=FOLDER, the "
        f"reward-model folder that is served, or switch the check off and trust the server: check=False."
    )


def _other_tokens(known: Sequence[Canary], render: ByFunction, artifact: Artifact | None) -> str | None:
    """Return how the caller's function renders some canary differently from the model; None if it does not."""
    bos = None if artifact is None else artifact.spec.renderer.bos_token_id
    for canary in known:
        item = render.render(to_messages(canary.messages)).item
        if isinstance(item, list) and (fault := name_token_fault(canary.token_ids, item, bos_token_id=bos)):
            return f"render_fn renders canary {canary.name!r} to {fault}"
    return None
