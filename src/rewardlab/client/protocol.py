"""The protocol of rewardlab's own server: its requests and answers, shared by the server and every client.

`POST /v1/score` takes a `ScoreRequest` and answers a `ScoreResponse`, `GET /v1/spec` answers a `SpecResponse`; every
error is an `ErrorResponse`. Scores are raw unless others are asked for. Every answer has the digest of the model that
gave it, since scores of two models must never be mixed in one group.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from rewardlab.core.spec import CUT_FEWEST, OutputAs

SCORE_PATH: Final = "/v1/score"
SPEC_PATH: Final = "/v1/spec"
DIGEST_HEADER: Final = "x-rewardlab-digest"
"""Header of every answer that holds scores: the digest of the model that gave them."""

Refused = Literal["refuse", "null"]
FORMS: Final = ("replies", "groups", "conversations", "token_ids")
"""Fields of a `ScoreRequest` that say what is scored. Exactly one is given (`replies` together with `prompt`)."""


class _Wire(BaseModel):
    """The base of requests, where an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Told(BaseModel):
    """The base of answers, where an unknown field is ignored: a newer server may have added it."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class WireMessage(_Wire):
    """One turn of a conversation. Of other fields only those are taken that are null or an empty list."""

    model_config = ConfigDict(
        json_schema_extra={"additionalProperties": {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}}
    )

    role: str
    content: str

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, message: Any) -> Any:
        # Messages of other programs have fields such as `"tool_calls": null`, which say nothing.
        if not isinstance(message, dict) or message.keys() <= cls.model_fields.keys():
            return message
        return {name: value for name, value in message.items() if name in cls.model_fields or value not in (None, [])}


def _known_fields(message: Any) -> Any:
    """Return a message of an answer without its unknown fields."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name in WireMessage.model_fields}


# Validation of lists stops at the first fault: a list of the faults of a million elements would take a gigabyte.
Messages = Annotated[list[WireMessage], Field(min_length=1, fail_fast=True)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompt = str | Annotated[list[WireMessage], Field(fail_fast=True)]
"""A text is read as in training data: one user turn, or an open transcript ("Human: … Assistant:")."""


class WireGroup(_Wire):
    """A prompt with its replies, scored together by one model, the prompt computed once."""

    prompt: Prompt
    replies: Annotated[list[str], Field(min_length=1, fail_fast=True)]


class ScoreRequest(_Wire):
    """What is to be scored, in one of four forms, which give the same scores.

    `prompt` and `replies` (one group), `groups` (several), `conversations` (each ends with the reply), or `token_ids`
    (conversations that are rendered already; the server adds no token).
    """

    model: str | None = None
    """Name of the model or adapter; None for the server's default."""
    digest: str | None = None
    """The only digest that may score this request; a server whose model has another one answers 409."""
    prompt: Prompt | None = None
    replies: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    groups: Annotated[list[WireGroup], Field(min_length=1, fail_fast=True)] | None = None
    conversations: Annotated[list[Messages], Field(min_length=1, fail_fast=True)] | None = None
    token_ids: Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)] | None = None
    output: OutputAs = "raw"
    truncate: bool = False
    """Whether conversations above the model's length limit may be cut, by the rule of training; by that of old turns
    where the model was trained without such conversations."""
    on_error: Refused = "refuse"
    """What a reply that cannot be scored does: fail the whole request, or get null and a cause (`errors`)."""

    @model_validator(mode="after")
    def _has_one_form(self) -> ScoreRequest:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(FORMS)}; got {', '.join(given) or 'none'}")
        if (self.prompt is not None) != (self.replies is not None):
            raise ValueError("prompt and replies belong together: give both, or groups, conversations or token_ids")
        return self


class ScoredGroup(_Told):
    """The answer for one group, one conversation or one list of token ids; lists are in the order of its replies."""

    scores: list[float | None]
    """None only with `on_error="null"`, and then `errors` has the cause."""
    num_tokens: list[int]
    truncated_tokens: list[int]
    """Tokens of the prompt that were cut; 0 unless the request said `truncate`."""
    truncated_reply_tokens: list[int] = []
    """Tokens that were cut from the middle of the reply, where the model's rule is to do that; empty where none is."""
    errors: dict[int, str] = {}
    """Number of a reply in the group -> why it has no score."""


class Usage(_Told):
    """What a request cost."""

    computed_tokens: int
    """Tokens that went through the model, each prompt once."""
    cached_tokens: int
    """Tokens of prompts that were taken from the cache instead."""


class ScoreResponse(_Told):
    """The scores of a request, all by one model."""

    object: Literal["rewardlab.scores"] = "rewardlab.scores"
    model: str
    digest: str
    output: OutputAs
    groups: list[ScoredGroup]
    """One for each group, conversation or list of token ids, in the order of the request."""
    usage: Usage


class WireCanary(_Told):
    """A conversation whose score is known, by which a client can check that it gets this model's scores."""

    name: str
    messages: list[Annotated[WireMessage, BeforeValidator(_known_fields)]]
    token_ids: list[int]
    score: float
    """The canonical score: of the saved weights, computed in float32."""
    references: dict[str, float]
    """dtype -> score in that half precision, as rewardlab computes it."""
    decoys: dict[str, float] = {}
    """Fault -> score under that fault, by which whoever gets other scores can name what is wrong."""


class ServedModel(_Told):
    """A model or adapter that a server answers for."""

    name: str
    digest: str
    """Digest of the reward-model folder (`rewardlab_spec_sha256` in its config.json)."""
    template_hash: str
    dtype: str
    """The dtype of the arithmetic, such as `float32`."""
    tolerance: float
    """How far a score may be from its reference in this dtype, in units of max(1, |score|)."""
    max_length: int
    """Most tokens of a conversation."""
    truncation: str = CUT_FEWEST
    """What became of longer ones in training, as in `reward_spec.json`; here they are refused unless a request says
    `truncate`. Servers of earlier versions do not tell it."""
    joins_texts: bool | None = None
    """Whether it takes texts without a chat template. Servers of earlier versions do not tell it."""
    reward_mean: float | None = None
    """Mean of its raw scores on the data that it was calibrated on; None if it holds no calibration, or the server is
    of an earlier version."""
    reward_std: float | None = None
    """Their standard deviation."""
    affine: tuple[float, float] | None = None
    """(scale, shift) by which a raw score becomes log odds, and those a probability; None if the model holds no
    calibration, or the server is of an earlier version."""
    outputs: list[str]
    """What it can answer: `raw` always, the others if the model holds a calibration."""
    canaries: list[WireCanary]


class SpecResponse(_Told):
    """The models of a server, the default one first."""

    object: Literal["rewardlab.spec"] = "rewardlab.spec"
    version: str
    """Version of rewardlab."""
    models: list[ServedModel]


class ErrorDetail(_Told):
    """What is wrong with a request, in the shape of OpenAI's API."""

    message: str
    type: str
    """A word for programs, such as `too_long`, `queue_full`, `unknown_model`, `wrong_digest`, `invalid_request`."""
    code: int
    """The HTTP status."""
    param: str | None = None
    """The place in the request, such as `groups.3.replies.0`."""


class ErrorResponse(_Told):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail
    details: dict[str, JsonValue] | None = None
