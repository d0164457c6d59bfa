"""Requests to other engines, and where in their answers the raw scores are.

Only routes that can give raw scores are used. Those of vLLM are `/classify` and `/pooling`, always with
`use_activation: false` (the default is a sigmoid; newer versions ignore `activation` and `softmax`). Those of SGLang
are its own `/classify`, and `/v1/embeddings`, by which verl asks it. vLLM's `/score` and `/rerank` are never used,
since they join two texts without the chat template, nor is SGLang's `/v1/classify`, whose softmax over one label is
always 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.client.failures import BadAnswerError
from rewardlab.core.terminal import number_of

Item = str | list[int]
"""A rendered conversation: its text, or its tokens."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one route of an engine is asked for scores."""

    engine: str
    path: str
    """Route of the requests, without the address of the server."""
    takes_text: bool
    """Whether the engine adds no token to a rendered text; if it does, a BOS of the template would be doubled."""
    names_model: bool
    """Whether a request names the model."""
    body: Callable[[Sequence[Item], str | None], dict[str, Any]]
    """(rendered conversations, name of the model) -> request."""
    values: Callable[[Any], list[Any]]
    """Answer -> what stands where the raw scores belong, in the order of the request.

    Raises LookupError, TypeError or ValueError if the answer has another shape.
    """


def _of_vllm(items: Sequence[Item], model: str | None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    # Rendered texts have all their tokens already. By default the tokenizer would add its own, such as a second BOS.
    return {**named, "input": list(items), "use_activation": False, "add_special_tokens": False, **more}


def _to_pooling(items: Sequence[Item], model: str | None) -> dict[str, Any]:
    return _of_vllm(items, model, task="classify", encoding_format="float")


def _to_sglang(items: Sequence[Item], model: str | None) -> dict[str, Any]:
    return {"input_ids": list(items)}


def _to_embeddings(items: Sequence[Item], model: str | None) -> dict[str, Any]:
    return {"model": model, "input": list(items), "encoding_format": "float"}


def _in_order(answer: Any) -> list[Mapping[str, Any]]:
    """Return the entries of an answer in the style of OpenAI, by their `index`."""
    entries = list(answer["data"])
    places = [entry["index"] for entry in entries]
    if sorted(places) != list(range(len(entries))):
        raise ValueError(f"its entries have the numbers {places[:8]}")
    return sorted(entries, key=lambda entry: entry["index"])


def _only(values: Any) -> Any:
    """Return the only number of a list. Raises ValueError for another count: then it is not a scalar reward."""
    if not isinstance(values, list) or len(values) != 1:
        found = number_of(len(values), "number") if isinstance(values, list) else type(values).__name__
        raise ValueError(f"a row has {found} where a reward model gives one; is this an embedding model?")
    return values[0]


def _from_classify(answer: Any) -> list[Any]:
    return [_only(entry["probs"]) for entry in _in_order(answer)]  # raw, whatever the field is called


def _from_pooling(answer: Any) -> list[Any]:
    return [_only(entry["data"]) for entry in _in_order(answer)]


def _from_sglang(answer: Any) -> list[Any]:
    # SGLang answers one row by a mapping, several rows by a list.
    return [_only(entry["embedding"]) for entry in (answer if isinstance(answer, list) else [answer])]


def _from_embeddings(answer: Any) -> list[Any]:
    return [_only(entry["embedding"]) for entry in _in_order(answer)]


VLLM_CLASSIFY: Final = Dialect(
    engine="vllm", path="/classify", takes_text=True, names_model=True, body=_of_vllm, values=_from_classify
)
VLLM_POOLING: Final = Dialect(
    engine="vllm", path="/pooling", takes_text=True, names_model=True, body=_to_pooling, values=_from_pooling
)
SGLANG_CLASSIFY: Final = Dialect(
    engine="sglang", path="/classify", takes_text=False, names_model=False, body=_to_sglang, values=_from_sglang
)
SGLANG_EMBEDDINGS: Final = Dialect(
    engine="sglang",
    path="/v1/embeddings",
    takes_text=False,
    names_model=True,
    body=_to_embeddings,
    values=_from_embeddings,
)
DIALECTS: Final = {
    "vllm": (VLLM_CLASSIFY, VLLM_POOLING),
    "sglang": (SGLANG_CLASSIFY, SGLANG_EMBEDDINGS),
}
"""Engine -> its routes that give raw scores, the better one first."""
MARKS: Final = {
    "sglang": ("/get_model_info", "/model_info", "/get_server_info", "/flush_cache"),
    "vllm": ("/pooling", "/tokenize", "/load", "/version", "/is_sleeping"),
}
"""Engine -> routes by which it is recognised, checked in this order: SGLang has taken over some routes of vLLM."""


def engine_of(routes: Collection[str]) -> str | None:
    """Return the engine that has these routes; None if neither has."""
    return next((engine for engine, marks in MARKS.items() if any(mark in routes for mark in marks)), None)


def choose(engine: str, routes: Collection[str]) -> Dialect | None:
    """Return the dialect of this engine for these routes; None if none of them gives raw scores."""
    return next((dialect for dialect in DIALECTS[engine] if dialect.path in routes), None)


def values_of(dialect: Dialect, answer: Any, names: Sequence[str], *, where: str) -> list[Any]:
    """Return the values in an answer at the places of the scores, one for each of the rows with these names.

    Raises BadAnswerError if the answer has another shape or count.
    """
    try:
        values = dialect.values(answer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f": {error}" if type(error) is ValueError else ""
        raise BadAnswerError(
            f"{where}: the answer is not what {dialect.engine} answers at {dialect.path}{reason}. "
            f"Is engine={dialect.engine!r} right, and is a reward model served?"
        ) from error
    require_count(values, names, where=where)
    return values


def require_count(values: Sequence[Any], names: Sequence[str], *, where: str) -> None:
    """Raise BadAnswerError unless there is one value for each row."""
    if len(values) != len(names):
        raise BadAnswerError(
            f"{where}: {number_of(len(values), 'score')} for {number_of(len(names), 'row')} "
            f"({between(names)}), so it is not known which score "
            f"belongs to which row."
        )


def wrong_in(value: Any) -> str | None:
    """Return why a value cannot be a score; None if it is a finite number."""
    # `isfinite` fails for a whole number beyond the range of floats.
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return None
    found = "null" if value is None else str(value) if isinstance(value, float) else type(value).__name__
    why = ". In float16 numbers can leave its range: serve the model in bfloat16 or float32"
    return f"the score is {found}, wanted a finite number{why if value is None or isinstance(value, float) else ''}"


def between(names: Sequence[str]) -> str:
    """Return the first and last row of a request for a message."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "none"
