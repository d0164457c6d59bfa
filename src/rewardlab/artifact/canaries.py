"""Canaries: built-in conversations whose tokens and scores travel with every reward model.

Each canary also carries decoys: the score that each known fault would give. Whoever checks a copy of the model, a
file or an endpoint, compares with the canonical scores first; where they differ, the decoys name the fault.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit

from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.spec import SCORE_TOLERANCE, Canary
from rewardlab.core.types import Conversation, IntArray, Message, TokenGroup
from rewardlab.data.chat import Renderer
from rewardlab.model.reward import RewardModel

FloatArray = npt.NDArray[np.float64]
PRECISION_MISMATCH: Final = "precision_mismatch"
SPECIAL_TOKENS: Final = "special_tokens"
FAULTS: Final = {
    "double_bos": "a second BOS token in front of the conversation",
    "shifted_position": "the score read one token before the end",
    "no_template": "plain text in place of the chat template",
    "dropped_rope": "the default position settings (rope) in place of the model's",
    "dropped_rope_scaling": "the scaling of the positions (rope) dropped, their base kept",
    "sigmoid": "a sigmoid applied to the score",
    "softmax": "a softmax over the single label",
    "zero_head": "a head that is zero or was never loaded",
    SPECIAL_TOKENS: "control tokens typed in a reply read as control tokens, so that a reply can forge turns, and "
    "nothing else: what every engine does that is given texts; give it token ids",
    PRECISION_MISMATCH: "weights rounded to the nearest bfloat16: export a bfloat16 folder with `rewardlab export`",
}

UNKNOWN: Final = "unknown: weights, numerics or an engine that rewardlab does not know"
CONSTANT: Final = ("softmax", "zero_head")
"""Faults that leave nothing of the model: their scores are the same whatever it is."""
ROUNDED_ONCE: Final = 2.0**-8
"""Half a step of bfloat16 below 1, and somewhat more."""
ROOM_IN_HALF: Final = 1.5
WITHIN: Final = 0.75
"""How far a score may be from a fault's, in tolerances: a single one in half precision, and the root mean square."""
TYPICAL: Final = 5.0
"""How many times smaller than what is allowed the noise of an arithmetic typically is (docs/one-score.md)."""
CLEAR: Final = 10.0
"""How much larger the sum of squares of the distances has to be, in units of that noise, for the evidence to be clear:
the likelihood is then e^5 times smaller, without the canary that says most."""

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
    """Scores of token sequences, one at a time and unpadded, read `before_end` tokens before the last."""
    scores = []
    with torch.no_grad():
        for token_ids in sequences:
            group = TokenGroup(
                preference_id="",
                source="",
                prompt_key="",
                shared=np.zeros(0, np.int32),
                suffixes=(token_ids[: len(token_ids) - before_end],),
                prompt_tokens=(0,),
                truncated_tokens=(0,),
                comparisons=(),
            )
            scores.append(float(model(pack([group]).to(model.device))[0]))
    return scores


def make_canaries(model: RewardModel, renderer: Renderer) -> list[Canary]:
    """Canaries of a model in float32; conversations that the renderer refuses are left out."""
    kept = render_canaries(renderer)
    sequences = [token_ids for _, _, token_ids in kept]
    scores = score_tokens(model, sequences)
    decoys = _decoys(model, renderer, [messages for _, messages, _ in kept], sequences, scores)
    return [
        Canary(
            name=name,
            messages=[message.as_dict() for message in messages],
            token_ids=[int(token) for token in token_ids],
            score=score,
            decoys={fault: values[number] for fault, values in decoys.items() if not math.isnan(values[number])},
        )
        for number, ((name, messages, token_ids), score) in enumerate(zip(kept, scores, strict=True))
    ]


def reference_scores(canaries: Sequence[Canary], precision: str) -> list[float]:
    """What the canaries score in arithmetic of this dtype; float32's scores where there is no reference of it."""
    return [canary.references.get(precision, canary.score) for canary in canaries]


def name_fault(
    canaries: Sequence[Canary],
    scores: Sequence[float],
    *,
    precision: str = "float32",
    tolerance: float | None = None,
) -> str | None:
    """What is wrong with these scores of the canaries: None, a fault's description, or `unknown`.

    They are compared with the references of the precision (a dtype) that they were computed in; `tolerance` takes the
    place of its own. A fault is named if all scores lie within the tolerance of its decoys (`_fits`), and if, also
    without the canary that speaks most for it, the decoys explain the scores clearly better than what needs no fault:
    the references, the references moved by one number, and one number for all. Where several faults do, all are named
    that the best one is not clearly better than.

    The canary in which control tokens are typed is looked at only where the others are right: engines that are given
    texts, not tokens, read it otherwise, whatever else is wrong with them.
    """
    allowed = SCORE_TOLERANCE[precision] if tolerance is None else tolerance
    typed = [number for number, canary in enumerate(canaries) if SPECIAL_TOKENS in canary.decoys]
    others = [number for number in range(len(canaries)) if number not in typed]
    fault = _name_fault([canaries[n] for n in others], [scores[n] for n in others], precision, allowed)
    if fault is not None or not typed:
        return fault
    own, found = [canaries[number] for number in typed], [scores[number] for number in typed]
    if largest_distance(reference_scores(own, precision), found) <= allowed:
        return None
    if largest_distance([canary.decoys[SPECIAL_TOKENS] for canary in own], found) <= allowed:
        return f"{FAULTS[SPECIAL_TOKENS]} ({SPECIAL_TOKENS})"
    return UNKNOWN


def _name_fault(canaries: Sequence[Canary], scores: Sequence[float], precision: str, allowed: float) -> str | None:
    """What is wrong with the scores of canaries in which nothing is typed."""
    references = reference_scores(canaries, precision)
    if largest_distance(references, scores) <= allowed:
        return None
    if not all(map(math.isfinite, scores)):
        return UNKNOWN
    found, wanted = np.array(scores), np.array(references)
    fitting: dict[str, tuple[Any, Any]] = {}
    for fault in FAULTS:
        if not all(fault in canary.decoys for canary in canaries):
            continue
        decoys, room = _under(fault, canaries, wanted, allowed, half=precision != "float32")
        rivals = [wanted] if fault in CONSTANT else [wanted, wanted + np.mean(found - wanted), np.mean(found)]
        own = (found - decoys) / room
        most = ROOM_IN_HALF if precision != "float32" else 1.0
        if _fits(own, most=most) and all(_clearly_better(own, (found - rival) / room) for rival in rivals):
            fitting[fault] = own, room
    if not fitting:
        return UNKNOWN
    best = min(fitting, key=lambda fault: float(np.sum(np.abs(fitting[fault][0] * fitting[fault][1]))))
    left = {best: FAULTS[best]} | {
        fault: FAULTS[fault]
        for fault, (own, _) in fitting.items()
        if fault != best and not _clearly_better(fitting[best][0], own)
    }
    return ", or ".join(f"{description} ({fault})" for fault, description in left.items())


def _under(
    fault: str, canaries: Sequence[Canary], references: FloatArray, allowed: float, *, half: bool
) -> tuple[FloatArray, FloatArray]:
    """(what the canaries score under a fault, how far from that a score may be).

    What is exactly 0 or 1 is so in every arithmetic. A sigmoid squeezes the noise of its score, and its result is
    rounded once more.
    """
    decoys = np.array([canary.decoys[fault] for canary in canaries])
    if fault in CONSTANT:
        return decoys, np.full(len(decoys), SCORE_TOLERANCE["float32"])
    if fault == "sigmoid" and half:
        noise = allowed * np.maximum(1.0, np.abs(references))
        squeezed = expit(references)
        low, high = squeezed - expit(references - noise), expit(references + noise) - squeezed
        return squeezed, np.maximum(low, high) + ROUNDED_ONCE
    return decoys, allowed * np.maximum(1.0, np.abs(decoys))


def _fits(own: FloatArray, *, most: float) -> bool:
    """Whether distances, in units of what is allowed, are none: each at most `most`, and their root mean square less.

    In half precision scores are compared with decoys in float32, which have no reference of their own.
    """
    return bool(np.abs(own).max() <= most and np.sqrt(np.mean(own**2)) <= WITHIN)


def _clearly_better(own: FloatArray, other: FloatArray) -> bool:
    """Whether an explanation leaves clearly smaller distances, in units of what is allowed, than another one, also
    without the canary that says so most.
    """
    gains = np.sort((other**2 - own**2) * TYPICAL**2)
    return float(np.sum(gains[:-1])) >= CLEAR


def name_token_fault(wanted: Sequence[int], got: Sequence[int], *, bos_token_id: int | None) -> str | None:
    """What is wrong with the tokens of a canary's rendering: None, a fault's description, or where they part."""
    if list(got) == list(wanted):
        return None
    if list(got) == [bos_token_id, *wanted]:
        return f"{FAULTS['double_bos']} (double_bos)"
    pairs = enumerate(zip(got, wanted, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(got), len(wanted)))
    return f"other tokens from token {place} on"


def largest_distance(wanted: Sequence[float], got: Sequence[float]) -> float:
    """Largest distance in units of max(1, |wanted|)."""
    return max(
        (abs(a - b) / max(1.0, abs(a)) if math.isfinite(b) else math.inf for a, b in zip(wanted, got, strict=True)),
        default=math.inf,
    )


def render_canaries(renderer: Renderer) -> list[tuple[str, Conversation, IntArray]]:
    """(name, messages, tokens) of the canaries that this template and limit allow.

    Raises ConfigError if there are none, since nothing could then be verified.
    """
    rendered = []
    conversations = [(name, tuple(Message(*turn) for turn in turns)) for name, turns in CONVERSATIONS]
    for name, messages in (*conversations, *_forged(renderer)):
        try:
            token_ids = renderer.render(messages[:-1], messages[-1:]).token_ids
        except RenderError:  # a template without a system role, or a limit below this conversation
            continue
        rendered.append((name, messages, token_ids))
    if not rendered:
        raise ConfigError(
            f"--max-seq-len {renderer.spec.max_length} is too small for any of the conversations by which a saved "
            f"model is verified. Raise it to at least 64."
        )
    return rendered


def _forged(renderer: Renderer) -> list[tuple[str, Conversation]]:
    """A reply that types what the template writes between turns, where control tokens in messages are to stay text."""
    if renderer.spec.special_tokens_in_text != "text":
        return []
    said = ("Why?", "So.", "And then?", "Nothing.")
    turns = tuple(Message(role, text) for role, text in zip(("user", "assistant") * 2, said, strict=True))
    try:
        text = renderer.text(turns)
    except RenderError:  # a template for one exchange
        return []
    between = text[text.find(said[1]) + len(said[1]) : text.find(said[3])]
    bare = "".join(re.findall("|".join(map(re.escape, renderer.markers.names)), between)) if between else ""
    reading = Renderer(renderer.tokenizer, replace(renderer.spec, special_tokens_in_text="keep"))
    for border in (between, bare):  # a template may cut a reply at what it writes itself, such as thoughts
        forged = turns[0], Message("assistant", f"{said[1]}{border}{said[3]}")
        if renderer.token_ids(forged).tolist() != reading.token_ids(forged).tolist():
            return [("control tokens", forged)]
    return []


def _decoys(
    model: RewardModel,
    renderer: Renderer,
    conversations: Sequence[Conversation],
    sequences: Sequence[IntArray],
    scores: Sequence[float],
) -> dict[str, list[float]]:
    bos = renderer.spec.bos_token_id
    decoys: dict[str, list[float]] = {
        "shifted_position": score_tokens(model, sequences, before_end=1),
        "no_template": score_tokens(model, [_plain(renderer, messages) for messages in conversations]),
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
    for fault, parameters in rope_faults(model.config).items():
        if (other := _with_rope(model, parameters)) is not None:
            decoys[fault] = score_tokens(other, sequences)
    return decoys


def _plain(renderer: Renderer, messages: Conversation) -> IntArray:
    text = "\n".join(message.content for message in messages)
    return np.asarray(renderer.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def rope_faults(config: Any) -> dict[str, dict[str, Any]]:
    """Position settings as an engine has them that drops all, or only the scaling, where that changes anything."""
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict) or not own:
        return {}
    defaults = getattr(type(config)(), "rope_parameters", None) or {}
    if "rope_type" not in own:  # one set of settings for each kind of layer that turns its heads at all
        turning = {kind: values for kind, values in own.items() if isinstance(values, dict)}
        dropped = own | {kind: _like(values, defaults.get(kind) or {}) for kind, values in turning.items()}
        unscaled = own | {kind: _like(values, values) for kind, values in turning.items()}
    else:
        dropped, unscaled = _like(own, defaults), _like(own, own)
    faults = {"dropped_rope": dropped, "dropped_rope_scaling": unscaled}
    if dropped == unscaled:  # the base is the default one, so both faults are the same
        faults.pop("dropped_rope_scaling")
    return {fault: parameters for fault, parameters in faults.items() if parameters != own}


def _like(own: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Unscaled settings with the base of `source`; which part of a head turns is `own`, since shapes hang on it."""
    kept = {"partial_rotary_factor": own["partial_rotary_factor"]} if "partial_rotary_factor" in own else {}
    return {"rope_type": "default", "rope_theta": source.get("rope_theta", own.get("rope_theta")), **kept}


def _with_rope(model: RewardModel, parameters: dict[str, Any]) -> RewardModel | None:
    """The same weights under other position settings; None for a model that keeps none there or cannot have these."""
    rotary: Any = getattr(model.backbone, "rotary_emb", None)
    if rotary is None:
        return None
    config = copy.deepcopy(model.config)
    config.rope_parameters = parameters
    changed = copy.copy(model)
    changed._modules = dict(model._modules)
    changed.backbone = copy.copy(model.backbone)
    changed.backbone._modules = dict(model.backbone._modules)
    turned: Any = type(rotary)(config=config).to(model.device)
    changed.backbone.rotary_emb = turned
    own, other = ({name: buffer.shape for name, buffer in part.named_buffers()} for part in (rotary, turned))
    both = own.keys() & other.keys()  # a forward pass may have added or dropped some
    return changed if both and all(own[name] == other[name] for name in both) else None


def separated(canaries: Sequence[Canary], *, tolerance: float) -> dict[str, bool]:
    """For each fault with decoys, whether it would be noticed: its median decoy lies further off than the tolerance."""
    found: dict[str, list[float]] = {}
    for canary in canaries:
        for fault, decoy in canary.decoys.items():
            found.setdefault(fault, []).append(abs(decoy - canary.score) / max(1.0, abs(canary.score)))
    return {fault: median(distances) > tolerance for fault, distances in found.items()}
