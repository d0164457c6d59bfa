"""Bodies of other projects' routes: vLLM's /classify and /pooling, OpenRLHF's /get_reward, slime's reward request.

Fields that would change a score and that this server does not implement are refused. Unknown fields are an error,
since ignoring one could give another score than was asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from rewardlab.client.protocol import Messages, Prompt, TokenIds

Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
Conversations = Annotated[list[Messages], Field(min_length=1, fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


def _form_of(value: Any) -> str | None:
    """Return in which form conversations are given, by the first of them; None for none of the forms.

    Only the faults of this form are told: those of the others would name types that nobody meant.
    """
    if isinstance(value, str):
        return "text"
    first = value[0] if isinstance(value, list) and value else None
    inner = first[0] if isinstance(first, list) and first else None
    if isinstance(first, str):
        return "texts"
    if isinstance(first, int):
        return "token ids"
    return "conversations" if isinstance(inner, dict) else "lists of token ids" if isinstance(inner, int) else None


INPUT: Final = Discriminator(
    _form_of,
    custom_error_type="no_form",
    custom_error_message="wanted a text, a list of texts, a list of token ids (whole numbers), or a list of lists of "
    "token ids; none may be empty",
)
QUERY: Final = Discriminator(
    _form_of,
    custom_error_type="no_form",
    custom_error_message="wanted a list with one element for each conversation: a list of messages "
    '({"role": "user", "content": "…"}), a list of token ids (whole numbers), or a text; none may be empty',
)


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PoolingRequest(_Form):
    """What vLLM's `/classify` and `/pooling` take: `input` (rendered conversations as text or token ids), or `messages`
    (one conversation)."""

    model: str | None = None
    input: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[TokenIds, Tag("token ids")]
            | Annotated[Texts, Tag("texts")]
            | Annotated[ManyTokenIds, Tag("lists of token ids")],
            INPUT,
        ]
        | None
    ) = None
    """Conversations that are rendered already, as texts or token ids; the server adds no token."""
    messages: Messages | None = None
    """One conversation, which the server renders."""
    user: str | None = None
    """Ignored."""
    request_id: str | None = None
    """Part of the answer's id."""
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    dimensions: int | None = None
    encoding_format: str | None = None
    task: str | None = None


class PoolingUsage(_Form):
    """Tokens, as vLLM counts them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Classified(_Form):
    """One conversation's score, in the field that vLLM has for it."""

    index: int
    label: str = "LABEL_0"
    probs: list[float]
    """The raw score; the field's name is vLLM's."""
    num_classes: int = 1


class ClassifyResponse(_Form):
    """The answer of `/classify`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage


class Pooled(_Form):
    """One conversation's score."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float]


class PoolingResponse(_Form):
    """The answer of `/pooling`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class ListedModel(_Form):
    """A model as OpenAI's API lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "rewardlab"
    root: str
    """The model's digest."""
    max_model_len: int


class ModelsResponse(_Form):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ListedModel]


class GetRewardRequest(_Form):
    """What OpenRLHF sends: `query` holds one conversation for each element."""

    query: Annotated[
        Annotated[Texts, Tag("texts")]
        | Annotated[Conversations, Tag("conversations")]
        | Annotated[ManyTokenIds, Tag("lists of token ids")],
        QUERY,
    ]
    """Messages or token ids; texts that a policy rendered only with `--accept-rendered`."""
    prompts: JsonValue = None
    """Ignored: the query holds the prompt."""
    labels: JsonValue = None
    """Ignored: a reward model has no use for labels."""


class GetRewardResponse(_Form):
    """What OpenRLHF reads."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, float] = {}


class SlimeRequest(_Form):
    """What slime sends for a sample."""

    prompt: Prompt
    """Messages; a text only with `--accept-rendered`."""
    response: str
    label: JsonValue = None
    """Ignored."""


def asked_of(form: PoolingRequest) -> dict[str, Any]:
    """Return the fields of a form that were given and are not None."""
    return {name: value for name in form.model_fields_set if (value := getattr(form, name)) is not None}
