"""Which fault explains the scores that a copy of a reward model gave to its canaries; no torch.

A copy of the model, as a folder or behind an endpoint, is checked by comparing its scores of the canaries with the
reference scores. If they differ, the decoys (the scores that a canary gets under each known fault) tell which fault
explains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from rewardlab.core.spec import SCORE_TOLERANCE, Canary

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
"""Faults under which every model gives the same scores."""
ROUNDED_ONCE: Final = 2.0**-8
"""Bound on one rounding of a number below 1 to bfloat16: half a step there is 2^-9, so this is twice as much."""
ROOM_IN_HALF: Final = 1.5
"""How far any score may be from its decoy, in tolerances, for a fault to fit in half precision; 1 in float32."""
WITHIN: Final = 0.75
"""Largest root mean square of the scores' distances from their decoys, in tolerances, for a fault to fit."""
TYPICAL: Final = 5.0
"""How many times smaller than the tolerance the noise of an arithmetic typically is (docs/one-score.md)."""
CLEAR: Final = 10.0
"""How much larger the sum of squared distances of the worse explanation has to be, in units of that typical noise, for
the evidence to count as clear. With normal noise its likelihood is then e^5 times smaller. The canary that speaks most
for the better explanation is left out of the sum."""


def reference_scores(canaries: Sequence[Canary], precision: str) -> list[float]:
    """Return the canaries' reference scores in arithmetic of this dtype, or those of float32 if there are none."""
    return [canary.references.get(precision, canary.score) for canary in canaries]


def name_fault(
    canaries: Sequence[Canary],
    scores: Sequence[float],
    *,
    precision: str = "float32",
    tolerance: float | None = None,
    known: Mapping[str, str] = FAULTS,
) -> str | None:
    """Return what is wrong with these scores of the canaries: None, a description of the fault, or UNKNOWN.

    The scores are compared with the references of `precision`, the dtype of the arithmetic that computed them, and
    within `tolerance`, by default that of the dtype. A fault is named if all scores lie near its decoys (`_fits`), and
    if the decoys explain the scores clearly better than three explanations that need no fault: the references
    themselves, the references plus a constant, and one constant for all. If several faults pass, all are named that
    the best one does not beat clearly.

    In half precision the tolerance is wide enough to hide a fault that moves scores little, such as rounding the
    weights of a model that LoRA trained. So scores within it are looked at too. Then twice the evidence is asked for,
    and the scores in float32 are one more explanation that needs no fault: decoys are in float32, so an engine nearer
    to it than the references are is nearer to every decoy that hardly moves.

    `known` are the faults that are looked for, and what they are; one without decoys is not named.

    The canary in which control tokens are typed is looked at only if the others are right: engines that are given
    texts and not tokens read it differently, whatever else is wrong with them.
    """
    allowed = SCORE_TOLERANCE[precision] if tolerance is None else tolerance
    typed = [number for number, canary in enumerate(canaries) if SPECIAL_TOKENS in canary.decoys]
    others = [number for number in range(len(canaries)) if number not in typed]
    if not canaries:
        return UNKNOWN
    fault = None
    if others:
        fault = _name_fault([canaries[n] for n in others], [scores[n] for n in others], precision, allowed, known)
    if fault is not None or not typed:
        return fault
    own, own_scores = [canaries[number] for number in typed], [scores[number] for number in typed]
    if largest_distance(reference_scores(own, precision), own_scores) <= allowed:
        return None
    if largest_distance([canary.decoys[SPECIAL_TOKENS] for canary in own], own_scores) <= allowed:
        return f"{FAULTS[SPECIAL_TOKENS]} ({SPECIAL_TOKENS})"
    return UNKNOWN


def _name_fault(
    canaries: Sequence[Canary], scores: Sequence[float], precision: str, allowed: float, known: Mapping[str, str]
) -> str | None:
    """Return what is wrong with the scores of the canaries without typed control tokens, as `name_fault` does."""
    references = reference_scores(canaries, precision)
    within = largest_distance(references, scores) <= allowed
    if within and precision == "float32":
        return None
    if not all(map(math.isfinite, scores)):
        return UNKNOWN
    got, wanted = np.array(scores), np.array(references)
    fitting: dict[str, tuple[Any, Any]] = {}
    for fault in known:
        if not all(fault in canary.decoys for canary in canaries):
            continue
        decoys, room = _under(fault, canaries, wanted, allowed, half=precision != "float32")
        # A model whose scores are shifted, or nearly equal, can come close to some decoys by chance. Such scores are
        # explained as well by the rivals, so no fault is named. A constant score is itself the sign of the faults in
        # CONSTANT, so there the rivals that fit a constant are left out.
        rivals = [wanted] if fault in CONSTANT else [wanted, wanted + np.mean(got - wanted), np.mean(got)]
        own = (got - decoys) / room
        most = ROOM_IN_HALF if precision != "float32" else 1.0
        if within:
            rivals.append(np.array([canary.score for canary in canaries]))
        wanted_evidence = 2 * CLEAR if within else CLEAR
        if _fits(own, most=most) and all(_evidence(own, (got - rival) / room) >= wanted_evidence for rival in rivals):
            fitting[fault] = own, room
    if not fitting:
        return None if within else UNKNOWN
    # The best fault has the smallest distances in scores; `room` differs from fault to fault.
    best = min(fitting, key=lambda fault: float(np.sum(np.abs(fitting[fault][0] * fitting[fault][1]))))
    left = {best: known[best]} | {
        fault: known[fault]
        for fault, (own, _) in fitting.items()
        if fault != best and _evidence(fitting[best][0], own) < CLEAR
    }
    return ", or ".join(f"{description} ({fault})" for fault, description in left.items())


def _under(
    fault: str, canaries: Sequence[Canary], references: FloatArray, allowed: float, *, half: bool
) -> tuple[FloatArray, FloatArray]:
    """Return (what the canaries score under a fault, how far from that a score may be).

    Scores of exactly 0 or 1 are so in every arithmetic, so little is allowed there. In half precision the score under
    the sigmoid is noisy before the sigmoid, which squeezes the noise, and its result is rounded once more.
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
    """Return whether scores lie near a fault's decoys: distances at most `most`, with a root mean square up to WITHIN.

    Distances are in units of what is allowed. `most` is larger in half precision, because the decoys are known in
    float32 only.
    """
    return bool(np.abs(own).max() <= most and np.sqrt(np.mean(own**2)) <= WITHIN)


def _evidence(own: FloatArray, other: FloatArray) -> float:
    """Return how much an explanation with the distances `own` is better than one with the distances `other`.

    Distances are in units of what is allowed; the result is a sum of squares in units of the typical noise. The canary
    with the largest gain is left out, so that one odd score cannot decide.
    """
    gains = np.sort((other**2 - own**2) * TYPICAL**2)
    return float(np.sum(gains[:-1]))


def name_token_fault(wanted: Sequence[int], got: Sequence[int], *, bos_token_id: int | None) -> str | None:
    """Return what is wrong with the tokens of a canary's rendering: None, a description of the fault, or the index of
    the first token that differs.
    """
    if list(got) == list(wanted):
        return None
    if list(got) == [bos_token_id, *wanted]:
        return f"{FAULTS['double_bos']} (double_bos)"
    pairs = enumerate(zip(got, wanted, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(got), len(wanted)))
    return f"other tokens from token {place} on"


def largest_distance(wanted: Sequence[float], got: Sequence[float]) -> float:
    """Return the largest distance in units of max(1, |wanted|); infinity if a score is not finite or there are none."""
    return max(
        (abs(a - b) / max(1.0, abs(a)) if math.isfinite(b) else math.inf for a, b in zip(wanted, got, strict=True)),
        default=math.inf,
    )


def separated(canaries: Sequence[Canary], *, tolerance: float) -> dict[str, bool]:
    """Return for each fault with decoys whether it would be noticed: whether the median distance of its decoys from the
    scores, in units of max(1, |score|), exceeds the tolerance.
    """
    distances_of: dict[str, list[float]] = {}
    for canary in canaries:
        for fault, decoy in canary.decoys.items():
            distances_of.setdefault(fault, []).append(abs(decoy - canary.score) / max(1.0, abs(canary.score)))
    return {fault: median(distances) > tolerance for fault, distances in distances_of.items()}
