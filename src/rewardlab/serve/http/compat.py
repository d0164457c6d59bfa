"""Conversion of other projects' requests into ours, where that needs no guess, and of our scores into their shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rewardlab.client.protocol import ScoreRequest, WireMessage
from rewardlab.serve.engine.api import Engine, Scored
from rewardlab.serve.http.compat_forms import (
    Classified,
    ClassifyResponse,
    GetRewardRequest,
    GetRewardResponse,
    Pooled,
    PoolingRequest,
    PoolingResponse,
    PoolingUsage,
    SlimeRequest,
    asked_of,
)
from rewardlab.serve.http.config import LimitsConfig
from rewardlab.serve.http.refusals import InvalidError, NotMappableError, RawOnlyError
from rewardlab.serve.http.scoring import require_few

RAW_ONLY: Final = "This server answers raw scores only: send use_activation: false, or leave the field out."
ACTIVATIONS: Final = ("use_activation", "activation", "softmax", "normalize")
UNFOLLOWED: Final[Mapping[str, str]] = {
    "truncate_prompt_tokens": "nothing is truncated here; /v1/score truncates by the rule of training if asked to.",
    "chat_template": "conversations are rendered by the model's own template.",
    "chat_template_kwargs": "conversations are rendered by the model's own template.",
    "dimensions": "a score has one dimension.",
}
"""Field of vLLM's requests -> why giving it is an error."""
FALSE_ONLY: Final[Mapping[str, str]] = {
    "add_special_tokens": "the server adds no token to what is rendered already, and rendered messages have theirs.",
    "add_generation_prompt": "a reward is read at the end of the reply, before any further turn.",
    "continue_final_message": "a reward is read at the end of the reply.",
}
RENDERED: Final = (
    "{field} is a text that a policy's template rendered, which cannot be turned back into messages without guessing. "
    "Send messages or token ids, or, if policy and reward model have the same template, start the server with "
    "--accept-rendered."
)


def rendered_request(engine: Engine, texts: Sequence[str], model: str | None, limits: LimitsConfig) -> ScoreRequest:
    """Return a request for conversations that are rendered already.

    It is bound to the digest of the model whose tokenizer made its tokens. So a swap in between cannot hand the tokens
    of one model to another.

    Raises InvalidError for an empty text, TooLargeError for too many, and UnknownModelError and TooLongError as
    `Engine.tokenise` does; places are those of the request that is returned.
    """
    # Splitting takes longer than anything else that is done before the limits are checked.
    require_few(len(texts), limits)
    for number, text in enumerate(texts):
        if not text:
            raise InvalidError("The text is empty.", param=f"token_ids.{number}")
    digest, ids = engine.tokenise(texts, model)
    return ScoreRequest(model=model, digest=digest, token_ids=[list(one) for one in ids])


def pooling_reader(engine: Engine, limits: LimitsConfig) -> Callable[[PoolingRequest], ScoreRequest]:
    """Return the function that turns a request of `/classify` or `/pooling` into ours."""

    def to_request(form: PoolingRequest) -> ScoreRequest:
        given = asked_of(form)
        _refuse_others(given)
        if (form.input is None) == (form.messages is None):
            raise InvalidError("Give exactly one of input and messages.", param="input")
        if form.messages is not None:
            return ScoreRequest(model=form.model, conversations=[form.messages])
        given_input: Any = form.input
        first = given_input if isinstance(given_input, str) else given_input[0]
        if isinstance(first, str):
            texts = [first] if isinstance(given_input, str) else given_input
            return rendered_request(engine, texts, form.model, limits)
        return ScoreRequest(model=form.model, token_ids=[given_input] if isinstance(first, int) else given_input)

    return to_request


def place_in(form: PoolingRequest | GetRewardRequest | SlimeRequest, place: str) -> str:
    """Return the place in a form that corresponds to `place` in the request made from it."""
    field, _, rest = place.partition(".")
    if field not in ("conversations", "token_ids"):
        return place
    number, _, inner = rest.partition(".")
    if isinstance(form, SlimeRequest):
        turn = inner.partition(".")[0]
        whole = isinstance(form.prompt, str) or not turn.isdecimal()
        parts = ["prompt", "" if whole else inner] if whole or int(turn) < len(form.prompt) else ["response"]
    elif isinstance(form, GetRewardRequest):
        parts = ["query", number, "" if isinstance(form.query[0], str) else inner]
    elif form.messages is not None:
        parts = ["messages", inner]
    else:
        several = isinstance(form.input, list) and not isinstance(form.input[0], int)
        text = isinstance(form.input, str) or (several and isinstance((form.input or [""])[0], str))
        parts = ["input", number if several else "", "" if text else inner]
    return ".".join(part for part in parts if part)


def _refuse_others(given: Mapping[str, Any]) -> None:
    for name in ACTIVATIONS:
        if given.get(name):
            raise RawOnlyError(RAW_ONLY, param=name)
    for name, why in UNFOLLOWED.items():
        if name in given:
            raise InvalidError(f"{name}: {why}", param=name)
    for name, why in FALSE_ONLY.items():
        if given.get(name):
            raise InvalidError(f"{name}: {why}", param=name)
    if given.get("encoding_format", "float") != "float":
        raise InvalidError("encoding_format: scores are sent as numbers (float) only.", param="encoding_format")
    if given.get("task", "classify") != "classify":
        raise InvalidError("task: this server scores (classify) only.", param="task")


def flat_scores(scored: Scored) -> list[float]:
    """Return the scores of all groups in one list; requests of these routes fail if any is missing."""
    return [score for group in scored.groups for score in group.scores if score is not None]


def _usage(scored: Scored) -> PoolingUsage:
    count = sum(sum(group.num_tokens) for group in scored.groups)
    return PoolingUsage(prompt_tokens=count, total_tokens=count)


def classified(scored: Scored, *, name: str) -> ClassifyResponse:
    """Return scores as vLLM's `/classify` does; `name` is the answer's id."""
    data = [Classified(index=index, probs=[score]) for index, score in enumerate(flat_scores(scored))]
    return ClassifyResponse(
        id=f"classify-{name}", created=int(time.time()), model=scored.model, data=data, usage=_usage(scored)
    )


def pooled(scored: Scored, *, name: str) -> PoolingResponse:
    """Return scores as vLLM's `/pooling` does; `name` is the answer's id."""
    data = [Pooled(index=index, data=[score]) for index, score in enumerate(flat_scores(scored))]
    return PoolingResponse(
        id=f"pool-{name}", created=int(time.time()), model=scored.model, data=data, usage=_usage(scored)
    )


def get_reward_reader(
    engine: Engine, limits: LimitsConfig, *, accept_rendered: bool
) -> Callable[[GetRewardRequest], ScoreRequest]:
    """Return the function that turns a request of OpenRLHF into ours.

    The function raises NotMappableError for texts, unless they are accepted.
    """

    def to_request(form: GetRewardRequest) -> ScoreRequest:
        query: Any = form.query
        first = query[0]
        if isinstance(first, str):
            if not accept_rendered:
                raise NotMappableError(RENDERED.format(field="query"), param="query")
            return rendered_request(engine, query, None, limits)
        if isinstance(first[0], int):
            return ScoreRequest(token_ids=query)
        return ScoreRequest(conversations=query)

    return to_request


def rewarded(scored: Scored) -> GetRewardResponse:
    """Return scores as OpenRLHF reads them."""
    scores = flat_scores(scored)
    return GetRewardResponse(rewards=scores, scores=scores)


def slime_reader(
    engine: Engine, limits: LimitsConfig, *, accept_rendered: bool
) -> Callable[[SlimeRequest], ScoreRequest]:
    """Return the function that turns slime's request for one sample into ours.

    The function raises NotMappableError for a text, unless texts are accepted.
    """

    def to_request(form: SlimeRequest) -> ScoreRequest:
        if isinstance(form.prompt, str):
            if not accept_rendered:
                raise NotMappableError(RENDERED.format(field="prompt"), param="prompt")
            return rendered_request(engine, [form.prompt + form.response], None, limits)
        reply = WireMessage(role="assistant", content=form.response)
        return ScoreRequest(conversations=[[*form.prompt, reply]])

    return to_request
