"""Tests, before training, that the layout in use does not change scores (law 3 in docs/design/laws.md).

On a two-layer float32 model of the same class, a shared-prompt row has to give the scores of single replies. On the
real model, no reply may see its sibling, and the packed row has to agree with the padded path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.core.types import Comparison, Log, TokenGroup
from rewardlab.model.attention import NAME, padded_implementation
from rewardlab.model.per_layer import layer_overrides
from rewardlab.model.reward import RewardModel, width_of
from rewardlab.model.text_part import backbone_of

EXACT: Final = 1e-5
"""Largest allowed score difference in float32, relative to max(1, |score|): enough for another order of summation."""
VOCABULARY: Final = 64
PROBED: Final = ((13, (5, 9, 3)), (7, (11, 2)))
"""(tokens of the prompt, tokens of each reply) of the groups that are tested."""


PROBED_WINDOW: Final = 8
"""The sliding window of the tiny model, shorter than the probed conversations, where the model's own will matter."""


def tiny_config(config: Any, *, window: int | None = None) -> Any:
    """Return the configuration with two layers, a small vocabulary and all settings of attention unchanged, but for the
    `window`: if one is given, it takes the place of the configuration's sliding window.
    """
    small = copy.deepcopy(config)
    if window is not None:
        small.sliding_window = window
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    # What is set for each layer alone, such as the widths of Gemma 3n, is that of the first two.
    of_layers = [name for name, value in vars(small).items() if _is_of_layers(value, config.num_hidden_layers)]
    for name in of_layers:
        values = getattr(small, name)
        setattr(small, name, [*values[:2], *values[: 2 - len(values)]])
    # One layer of each kind, if there are two kinds, so that both are tested.
    if kinds:
        small.layer_types = (kinds * 2)[:2]
    if getattr(config, "is_heterogeneous", False):
        small.per_layer_config = _overrides(config, getattr(small, "layer_types", None))
    small.num_hidden_layers = 2
    small.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        try:
            setattr(small, name, None)
        except StrictDataclassFieldValidationError:  # some configurations must have a number
            setattr(small, name, 0)
    if inner := getattr(small, "intermediate_size", 0):
        widths = [min(width, 256) for width in (inner if isinstance(inner, list) else [inner])]
        small.intermediate_size = widths if isinstance(inner, list) else widths[0]
    # In Gemma 3n the last layers take keys and values of earlier ones; of two layers none can.
    if getattr(small, "num_kv_shared_layers", 0):
        small.num_kv_shared_layers = 0
    return small


def _overrides(config: Any, kinds: Sequence[str] | None) -> dict[int, dict[str, Any]]:
    """Return the settings that the two layers of the tiny model have for themselves: those of the first layers of their
    kinds, or of the first two."""
    numbers = [config.layer_types.index(kind) for kind in kinds] if kinds else [0, 1]
    overrides = layer_overrides(config)
    return {place: overrides.get(number, {}) for place, number in enumerate(numbers)}


def _is_of_layers(value: object, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers


def probe_groups(vocabulary: int, shapes: Sequence[tuple[int, Sequence[int]]] = PROBED) -> list[TokenGroup]:
    """Return groups of random tokens. `shapes` has, for each, the prompt's length and those of two or more replies."""
    draw = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return draw.integers(1, vocabulary, length).astype(np.int32)

    return [
        TokenGroup(
            preference_id="probe",
            source="probe",
            prompt_key=str(number),
            shared=tokens(shared),
            suffixes=tuple(tokens(length) for length in suffixes),
            prompt_tokens=(shared,) * len(suffixes),
            truncated_tokens=(0,) * len(suffixes),
            comparisons=(Comparison(first=0, second=1),),
        )
        for number, (shared, suffixes) in enumerate(shapes)
    ]


def layout_error(config: Any, disk_class: Any, *, window: int | None = None) -> float:
    """Return the largest difference, relative to max(1, |score|), between a shared-prompt row and single replies, on a
    tiny model of the class with random weights, whose sliding window is `window` if one is given.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = backbone_of(tiny_config(config, window=window), disk_class, NAME).eval()
        head = torch.nn.Linear(width_of(backbone.config), 1, bias=False)
    shared = RewardModel(backbone, head, disk_class=disk_class, layout="shared", compute_dtype=torch.float32)
    groups = probe_groups(VOCABULARY)
    with torch.no_grad():
        together = shared(pack(groups))
        backbone.set_attn_implementation(padded_implementation(config, type(backbone)))
        shared.layout = "padded"
        alone = torch.cat(
            [shared(pack([_only(group, reply)])) for group in groups for reply in range(group.num_replies)]
        )
    return float(((together - alone).abs() / alone.abs().clamp(min=1)).max())


def inexact(config: Any, disk_class: Any, max_length: int, log: Log) -> str | None:
    """Return why a shared-prompt row is not exact for a class and its text configuration, None if it is.

    If the configuration has a sliding window shorter than conversations may be (`max_length` tokens), the tiny model of
    the test has one shorter than the replies. So a class that does not hand its window to attention, or hands over one
    that it does not use, is found out.
    """
    own = getattr(config, "sliding_window", None)
    window = PROBED_WINDOW if own and own < max_length else None
    try:
        error = measured_again(
            lambda: layout_error(config, disk_class, window=window), EXACT, "the layout self-test", log
        )
        if error <= EXACT:
            return None
        # With a window that hides nothing the same test tells whether the window is at fault.
        if window and layout_error(config, disk_class, window=max_length) <= EXACT:
            return (
                f"its sliding window of {own} tokens is shorter than --max-seq-len {max_length}, and its layers do not "
                f"hand it to attention"
            )
    except (TypeError, ModelError) as refused:  # what the attention function and the model say of a row they cannot do
        return str(refused)
    return f"the layout self-test is off by {error:.1e}"


def leak(model: RewardModel) -> float:
    """Return how far a score moves, relative to max(1, |score|), when only a sibling changes; 0 except for rounding."""
    groups = probe_groups(min(VOCABULARY, model.config.vocab_size))
    first = groups[0]
    changed = replace(first, suffixes=(first.suffixes[0], np.flip(first.suffixes[1]).copy(), *first.suffixes[2:]))
    with torch.no_grad():
        before = model(pack(groups).to(model.device))
        after = model(pack([changed, *groups[1:]]).to(model.device))
    moved = ((before - after).abs() / before.abs().clamp(min=1)).cpu()
    moved[1] = 0.0  # the reply that was changed
    return float(moved.max())


def distance_from_padded(model: RewardModel) -> float:
    """Return the largest difference, relative to max(1, |score|), between the model's packed row and padded rows."""
    groups = probe_groups(min(VOCABULARY, model.config.vocab_size))
    layout = model.layout
    text: Any = model.text_part
    with torch.no_grad():
        packed = model(pack(groups, share=layout == "shared").to(model.device))
        try:
            model.layout = "padded"
            text.set_attn_implementation(padded_implementation(model.config, type(text)))
            padded = model(pack(groups).to(model.device))
        finally:
            model.layout = layout
            text.set_attn_implementation(NAME)
    return float(((packed - padded).abs() / padded.abs().clamp(min=1)).max())


def distance_from_alone(model: RewardModel) -> float:
    """Return the largest difference, relative to max(1, |score|), between padded rows of a batch and the same rows each
    by itself.

    Raises ModelError if the model wants more than text.
    """
    groups = probe_groups(min(VOCABULARY, model.config.vocab_size))
    with torch.no_grad():
        try:
            together = model(pack(groups).to(model.device))
        except TypeError as error:  # what operations say of inputs that are not there
            name = type(model.text_part).__name__
            raise ModelError(f"{name} cannot compute a text by itself ({error}). Use another model.") from error
        singles = [pack([_only(group, reply)]) for group in groups for reply in range(group.num_replies)]
        alone = torch.cat([model(single.to(model.device)) for single in singles])
    return float(((together - alone).abs() / alone.abs().clamp(min=1)).max())


def measured_again(measure: Callable[[], float], limit: float, name: str, log: Log) -> float:
    """Return the result of `measure`; a result above the limit is checked by measuring twice more.

    The tests are deterministic, so a layout that is not exact fails every time. If both repeats are within the limit,
    the failure was a fault of the machine and not of the layout: the log says so, and the larger repeat is returned.
    """
    error = measure()
    if error <= limit:
        return error
    repeats = [measure(), measure()]
    if not all(repeat <= limit for repeat in repeats):
        return error
    again = max(repeats)
    log(
        f"this machine gave two results for the same computation: {name} was off by {error:.1e}, then by {again:.1e}. "
        f"Its processor or memory may be faulty, so its other results may be wrong as well."
    )
    return again


def _only(group: TokenGroup, reply: int) -> TokenGroup:
    """Return a group of this reply alone, with nothing shared."""
    return replace(
        group,
        shared=np.zeros(0, np.int32),
        suffixes=(group.conversation(reply),),
        prompt_tokens=(group.prompt_tokens[reply],),
        truncated_tokens=(0,),
        truncated_reply_tokens=(0,),
        numbers=(),
        comparisons=(),
    )
