"""Canaries: built-in conversations whose tokens and scores are saved with every reward model.

Each canary also has decoys: the scores that it would get under each known fault. `analysis/faults.py` compares the
scores of a copy of the model with the canonical ones and the decoys, and tells which fault explains them.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import nn

from rewardlab.analysis.faults import SPECIAL_TOKENS
from rewardlab.artifact.canary_states import SAVED, CanaryStates, alone
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.spec import Canary
from rewardlab.core.types import Conversation, IntArray, Message
from rewardlab.data.chat import Renderer
from rewardlab.model.reward import RewardModel

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Together they cover what renderings differ in: length, number of turns, a system message, code, and text that takes
# several bytes a character. A saved spec holds the messages, so changing them here does not affect earlier folders.
CONVERSATIONS: Final[tuple[tuple[str, tuple[tuple[str, str], ...]], ...]] = (
    ("short", (("user", "What is the capital of Portugal?"), ("assistant", "Lisbon."))),
    ("refusal", (("user", "Tell me how to bake bread."), ("assistant", "I would rather not talk about that."))),
    (
        "two turns",
        (
            ("user", "I have two eggs and some spinach. What can I cook?"),
            ("assistant", "An omelette would work well. Do you have cheese?"),
            ("user", "Yes, a little feta."),
            ("assistant", "Then fold the spinach and feta into the omelette just before it sets."),
        ),
    ),
    (
        "system",
        (
            ("system", "Answer in one sentence."),
            ("user", "Why does ice float on water?"),
            ("assistant", "Ice is less dense than liquid water because its molecules form an open lattice."),
        ),
    ),
    (
        "code",
        (
            ("user", "Write a Python function that doubles a number."),
            ("assistant", "```python\ndef double(number):\n    return 2 * number\n```"),
        ),
    ),
    ("unicode", (("user", "Übersetze «good morning» ins Japanische."), ("assistant", "おはようございます 🌅"))),
    (
        "long",
        (
            ("user", "Explain how a bicycle stays upright."),
            (
                "assistant",
                "A moving bicycle stays upright mostly because the rider, and partly the bicycle itself, steers into "
                "a fall. When it leans to the left the front wheel turns left, which moves the contact points back "
                "under the centre of mass. The geometry of the fork and the spinning wheels help with this, but "
                "neither alone explains it: bicycles have been built that balance without either of them.",
            ),
        ),
    ),
)


def score_tokens(model: RewardModel, sequences: Sequence[IntArray], *, before_end: int = 0) -> list[float]:
    """Score token sequences one at a time, without padding, reading `before_end` tokens before the last."""
    scores = []
    with torch.no_grad():
        for token_ids in sequences:
            batch = alone(token_ids[: len(token_ids) - before_end])
            scores.append(float(model(batch.to(model.device))[0]))
    return scores


def make_canaries(model: RewardModel, renderer: Renderer, states: CanaryStates | None = None) -> list[Canary]:
    """Return the canaries of a model in float32, with their decoys; those that the renderer refuses are left out.

    States of this backbone are looked up in `states`, and missing ones are computed and kept there. Raises ConfigError
    if the renderer refuses all canaries.
    """
    states = CanaryStates() if states is None else states
    states.confirm(model, SAVED)
    kept = render_canaries(renderer)
    sequences = [token_ids for _, _, token_ids in kept]
    with states.of(model, SAVED):
        scores = score_tokens(model, sequences)
        decoys = _decoys(model, renderer, [messages for _, messages, _ in kept], sequences, scores)
    decoys |= _rope_decoys(model, sequences, states)
    return [
        Canary(
            name=name,
            messages=[message.as_dict() for message in messages],
            token_ids=[int(token) for token in token_ids],
            score=score,
            # NaN stands for a fault that cannot show in this canary.
            decoys={fault: values[number] for fault, values in decoys.items() if not math.isnan(values[number])},
        )
        for number, ((name, messages, token_ids), score) in enumerate(zip(kept, scores, strict=True))
    ]


def render_canaries(renderer: Renderer) -> list[tuple[str, Conversation, IntArray]]:
    """Return (name, messages, tokens) of the canaries that the renderer's template and length limit allow.

    Raises ConfigError if it allows none, because a saved model could then not be verified.
    """
    rendered = []
    conversations = [(name, tuple(Message(*turn) for turn in turns)) for name, turns in CONVERSATIONS]
    for name, messages in (*conversations, *_forged(renderer)):
        try:
            token_ids = renderer.render(messages[:-1], messages[-1:]).token_ids
        except RenderError:
            # The template has no system role, or the conversation is longer than the limit. The others still serve.
            continue
        rendered.append((name, messages, token_ids))
    if not rendered:
        raise ConfigError(
            f"--max-seq-len {renderer.spec.max_length} is too small for all of the conversations with which a saved "
            f"model is verified. Raise it to at least 64."
        )
    return rendered


def _forged(renderer: Renderer) -> list[tuple[str, Conversation]]:
    """Return a canary whose reply contains the control tokens that the template writes between turns.

    The list is empty if control tokens in messages need not stay text, or if typing them changes no token.
    """
    if renderer.spec.special_tokens_in_text != "text":
        return []
    # Four turns with texts that are easy to find again: what stands in the rendering between the second and the fourth
    # is what ends a reply and begins the next turns.
    said = ("Why?", "So.", "And then?", "Nothing.")
    turns = tuple(Message(role, text) for role, text in zip(("user", "assistant") * 2, said, strict=True))
    try:
        text = renderer.text(turns)
    except RenderError:  # a template for one exchange
        return []
    between = text[text.find(said[1]) + len(said[1]) : text.find(said[3])]
    bare = "".join(re.findall("|".join(map(re.escape, renderer.markers.names)), between)) if between else ""
    reading = Renderer(renderer.tokenizer, replace(renderer.spec, special_tokens_in_text="keep"))
    # A template may cut off the part of a reply up to something it writes itself, such as the end of a thought, or
    # refuse it. Then the control tokens alone, without the text between them, are tried.
    for border in (between, bare):
        forged = turns[0], Message("assistant", f"{said[1]}{border}{said[3]}")
        try:
            read_apart = renderer.token_ids(forged).tolist() != reading.token_ids(forged).tolist()
        except RenderError:  # a template that looks for its own marks in replies, as that of GPT-OSS does
            continue
        if read_apart:
            return [("control tokens", forged)]
    return []


def _decoys(
    model: RewardModel,
    renderer: Renderer,
    conversations: Sequence[Conversation],
    sequences: Sequence[IntArray],
    scores: Sequence[float],
) -> dict[str, list[float]]:
    """Return the canaries' scores under each fault that does not change the model; NaN if it has no effect on one."""
    bos = renderer.spec.bos_token_id
    decoys: dict[str, list[float]] = {
        "shifted_position": score_tokens(model, sequences, before_end=1),
        "no_template": score_tokens(model, [_plain(renderer, messages) for messages in conversations]),
        # math.exp overflows above about 709; the sigmoid of such a score is 0 in any case.
        "sigmoid": [1 / (1 + math.exp(-score)) if score > -700 else 0.0 for score in scores],
        "softmax": [1.0] * len(scores),
        "zero_head": [0.0] * len(scores),
    }
    if bos is not None:
        doubled = [np.concatenate([np.array([bos], np.int32), token_ids]) for token_ids in sequences]
        decoys["double_bos"] = score_tokens(model, doubled)
    if renderer.spec.special_tokens_in_text == "text":
        reading = Renderer(renderer.tokenizer, replace(renderer.spec, special_tokens_in_text="keep"))
        decoys[SPECIAL_TOKENS] = [
            score_tokens(model, [reading.token_ids(messages)])[0] if renderer.num_typed(messages) else math.nan
            for messages in conversations
        ]
    return decoys


def _rope_decoys(model: RewardModel, sequences: Sequence[IntArray], states: CanaryStates) -> dict[str, list[float]]:
    """Return for each fault of the position settings the scores that the canaries get under it."""
    decoys = {}
    for fault, parameters in rope_faults(model.config).items():
        if (other := _with_rope(model, parameters)) is not None:
            with states.of(other, fault):
                decoys[fault] = score_tokens(other, sequences)
    return decoys


def _plain(renderer: Renderer, messages: Conversation) -> IntArray:
    """Return the tokens of a conversation's texts, joined by newlines, without a template."""
    text = "\n".join(message.content for message in messages)
    return np.asarray(renderer.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def rope_faults(config: Any) -> dict[str, dict[str, Any]]:
    """Return the position settings that an engine has if it drops all of them, or only their scaling, by fault.

    Faults that would change nothing for this configuration are left out.
    """
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict) or not own:
        return {}
    defaults = getattr(type(config)(), "rope_parameters", None) or {}
    # Models with layers of several kinds, such as Gemma 3, have one set of settings for each kind.
    if "rope_type" not in own:
        turning = {kind: values for kind, values in own.items() if isinstance(values, dict)}
        dropped = own | {kind: _like(values, defaults.get(kind) or {}) for kind, values in turning.items()}
        unscaled = own | {kind: _like(values, values) for kind, values in turning.items()}
    else:
        dropped, unscaled = _like(own, defaults), _like(own, own)
    faults = {"dropped_rope": dropped, "dropped_rope_scaling": unscaled}
    if dropped == unscaled:
        # The model has the default base, so both faults give the same scores and one name is enough.
        faults.pop("dropped_rope_scaling")
    return {fault: parameters for fault, parameters in faults.items() if parameters != own}


def _like(own: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without scaling and with the base of `source`.

    Which share of a head is rotated stays as in `own`, because the shapes of tensors depend on it.
    """
    kept = {"partial_rotary_factor": own["partial_rotary_factor"]} if "partial_rotary_factor" in own else {}
    return {"rope_type": "default", "rope_theta": source.get("rope_theta", own.get("rope_theta")), **kept}


def _shallow(module: ModuleT) -> ModuleT:
    """Return a copy with the same weights and submodules, of which others can take the place.

    `copy.copy` would call the class without arguments where FSDP has divided the module.
    """
    copied: ModuleT = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied._modules = dict(module._modules)
    return copied


def _with_rope(model: RewardModel, parameters: dict[str, Any]) -> RewardModel | None:
    """Return the model with the same weights and other position settings.

    None if its rotary embedding is not where transformers usually has it, or cannot have these settings.
    """
    rotary: Any = getattr(model.backbone, "rotary_emb", None)
    if rotary is None:
        return None
    # The rotary embedding can be replaced in the copies without copying weights, and the model itself is not changed.
    config = copy.deepcopy(model.config)
    config.rope_parameters = parameters
    changed = _shallow(model)
    changed.backbone = _shallow(model.backbone)
    turned: Any = type(rotary)(config=config).to(model.device)
    changed.backbone.rotary_emb = turned
    own, other = ({name: buffer.shape for name, buffer in part.named_buffers()} for part in (rotary, turned))
    # Only buffers that both have are compared, since a forward pass may have added or dropped some.
    both = own.keys() & other.keys()
    return changed if both and all(own[name] == other[name] for name in both) else None
