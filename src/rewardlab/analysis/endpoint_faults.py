"""What is wrong with the scores that an endpoint gave to the canaries: the faults by name, and what to do; no torch.

The canaries are sent in several forms (token ids, rendered texts, messages). One form alone tells what was computed;
forms that disagree tell whether it is the model that is wrong or what it was made to read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rewardlab.analysis.faults import (
    CONSTANT,
    FAULTS,
    SPECIAL_TOKENS,
    largest_distance,
    name_fault,
    reference_scores,
)
from rewardlab.core.spec import SCORE_TOLERANCE, Canary

FORM_OF: Final = {"token_ids": "token ids", "texts": "rendered texts", "messages": "messages"}
"""Form in which the canaries are sent -> its name in messages."""
LIVE_FAULTS: Final = {
    "missing_bos": "no BOS token in front of the conversation, where the model was trained with one",
    "other_template": "another chat template, for the model itself is right, as another form shows",
    "other_tokens": "texts read as other tokens, for the model itself is right, as another form shows",
    "generation_prompt": "the beginning of one more reply added at the end, as add_generation_prompt does",
    "truncates": "long conversations are cut without a word",
    "stale_weights": "other weights: an earlier or a later model, or one that was trained from it",
    "precision": "another precision than the one that was expected",
    "not_finite": "scores that are not finite numbers",
    "wrong_count": "another number of scores than conversations",
    "mixed": "another score when several conversations are sent together",
    "refuses": "conversations refused that the model allows",
    "failed": "the endpoint does not answer with scores",
    "unknown": "no fault that rewardlab knows",
}
"""Faults that only an endpoint has -> what they are."""
DESCRIPTIONS: Final[Mapping[str, str]] = {**FAULTS, **LIVE_FAULTS}
REMEDIES: Final[Mapping[str, str]] = {
    "sigmoid": 'Send "use_activation": false with every request (current vLLM ignores "activation" and "softmax"), '
    "and serve a folder whose config.json says problem_type regression.",
    "softmax": "Of one label a softmax is always 1. Use SGLang's own POST /classify in place of /v1/classify, and send "
    '"use_activation": false to vLLM.',
    "zero_head": "Serve a folder that holds score.weight; `rewardlab verify FOLDER` proves it. An engine that makes "
    "the head anew gives scores of nothing.",
    "double_bos": 'Send token ids; or texts with "add_special_tokens": false, or without the BOS that the template '
    "wrote.",
    "missing_bos": "Send token ids; or texts with the BOS that the template writes, which nobody has cut off.",
    "no_template": "Send token ids or messages, or texts that the folder's chat template has rendered.",
    "other_template": "Start the server with the folder's own chat template (no --chat-template), or send token ids.",
    "other_tokens": 'Send token ids, or texts with "add_special_tokens": false that nobody has stripped.',
    "generation_prompt": 'Send "add_generation_prompt": false, or token ids.',
    "shifted_position": "Send the whole rendering, nothing stripped from its end, and serve the folder's own "
    "config.json, whose pad token ends no conversation.",
    "dropped_rope": "Serve the folder's own config.json in an engine that reads rope_parameters; `rewardlab export` "
    "writes their older names too.",
    "dropped_rope_scaling": "Serve the folder's own config.json in an engine that reads rope_parameters, with their "
    "scaling; `rewardlab export` writes their older names too.",
    "precision_mismatch": "Serve that folder, or start the engine in float32.",
    SPECIAL_TOKENS: "Send token ids wherever a reply may contain control tokens.",
    "truncates": "Raise the server's limit (vLLM: --max-model-len) and let it refuse what is longer: no "
    "truncate_prompt_tokens, no --allow-auto-truncate.",
    "stale_weights": "Restart the server with the folder that is meant, or swap to it, and verify again.",
    "precision": "Start the engine in the precision that is meant (vLLM: --dtype), or say with --precision which one "
    "it is to be.",
    "not_finite": "Compute in bfloat16 or float32 if this is float16, whose range is too small for some models.",
    "wrong_count": "Something between drops or repeats scores: use the endpoint itself, and compare the counts of every"
    " answer.",
    "mixed": "Scores of one request are mixed up, or depend on their neighbours: send one conversation a request, and "
    "report it to the engine.",
    "refuses": "Raise the server's limit to the model's (max_length in reward_spec.json; vLLM: --max-model-len).",
    "failed": "See what the endpoint said, and its log.",
    "unknown": "Send token ids to tell whether it is the model that is wrong or what it is made to read.",
}
"""Fault -> what to do about it."""
REMEDIES_OF_IDS: Final[Mapping[str, str]] = {
    "double_bos": "It is added to token ids too, which no engine does that rewardlab knows: look at what stands "
    "between you and the engine.",
    "missing_bos": "It is taken from token ids too, which no engine does that rewardlab knows: look at what stands "
    "between you and the engine.",
}
"""Fault -> what to do where token ids get wrong scores as well; these take the place of `REMEDIES`."""
PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Word of `--precision` -> dtype."""


UNHEARD: Final = ("wrong_count", "refuses", "failed", "not_taken")
"""Faults of an answer that leave no scores to look at."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What an endpoint answered to the canaries in one form."""

    form: str
    """One of FORM_OF."""
    route: str
    """What they were sent to, such as `POST /classify`."""
    scores: tuple[float, ...] = ()
    """One score a canary; those of a failed or miscounted answer are left out."""
    num_tokens: tuple[int | None, ...] = ()
    """Tokens that the endpoint says it has read, for each canary; None where it does not say."""
    together: tuple[float, ...] = ()
    """Scores of the same canaries in one request for all, where `scores` are those of one request each."""
    fault: str = ""
    """One of UNHEARD if there are no scores to look at, `not_taken` being a form that the endpoint does not take."""
    said: str = ""
    """What the endpoint said, or what was odd, as the end of a sentence."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong with the scores of one form."""

    heard: Heard
    faults: tuple[str, ...]
    """Names of the faults that fit; empty if the scores are right. Several if they cannot be told apart."""
    precision: str = ""
    """The dtype in which the endpoint computes, as far as the references tell; empty if nothing fits."""
    distance: float = math.inf
    """Largest distance of a score from its reference, in units of max(1, |score|)."""

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong, or only what is wrong in every engine that is given texts."""
        return (
            not self.faults
            or self.faults == ("not_taken",)
            or (self.faults == (SPECIAL_TOKENS,) and self.heard.form != "token_ids")
        )

    def line(self) -> str:
        """Return one line about this form."""
        what = f"{FORM_OF.get(self.heard.form, self.heard.form)}, {self.heard.route}"
        if self.faults == ("not_taken",):
            return f"{what}: not taken ({self.heard.said})"
        if not self.faults:
            return f"{what}: right in {self.precision} (largest distance {self.distance:.1e})"
        if self.is_right:
            return f"{what}: right in {self.precision}, but control tokens typed in a reply are obeyed (special_tokens)"
        said = self.heard.said or (f"largest distance {self.distance:.1e}" if math.isfinite(self.distance) else "")
        return f"{what}: WRONG, {' or '.join(self.faults)}{f' ({said})' if said else ''}"


def find(canaries: Sequence[Canary], heard: Heard, *, expected: str | None = None) -> Finding:
    """Return what is wrong with the scores of one form, looked at by itself.

    `expected` is the dtype that the endpoint is to compute in; None finds it out from the references.
    """
    if heard.fault in UNHEARD:
        return Finding(heard=heard, faults=(heard.fault,))
    if not all(map(math.isfinite, heard.scores)):
        several = sum(not math.isfinite(score) for score in heard.scores)
        said = f"{several} of {len(heard.scores)} scores"
        return Finding(heard=replace(heard, said=said), faults=("not_finite",))
    found = _in_any_precision(canaries, heard, expected)
    if heard.together and found.is_right and _mixed(heard, found.precision):
        said = "one by one the same conversations get other scores"
        return replace(found, faults=("mixed",), heard=replace(heard, said=said))
    return found


def _mixed(heard: Heard, precision: str) -> bool:
    """Return whether scores of one joint request differ from those of single requests by more than the tolerance.

    Half precision moves a score when other conversations come along, but by less than its tolerance.
    """
    return largest_distance(heard.scores, heard.together) > SCORE_TOLERANCE[precision]


def _in_any_precision(canaries: Sequence[Canary], heard: Heard, expected: str | None) -> Finding:
    """Return the finding that fits best among those by the references of every precision."""
    looks = {
        dtype: Finding(
            heard=heard,
            faults=_names(name_fault(canaries, heard.scores, precision=dtype)),
            precision=dtype,
            distance=largest_distance(reference_scores(canaries, dtype), heard.scores),
        )
        for dtype in SCORE_TOLERANCE
    }
    fitting = _nearest_first([look for look in looks.values() if look.faults in ((), (SPECIAL_TOKENS,))], canaries)
    exact = looks["float32"]
    # Decoys are kept in float32. Where one explains all scores to the tolerance of float32, that is stronger evidence
    # than scores within the far wider tolerance of half precision.
    if exact not in fitting and exact.faults != ("unknown",):
        return exact
    if exact not in fitting and (counted := _by_counts(canaries, heard)):
        # A cut that moves few scores by little would pass for half precision.
        return replace(exact, faults=counted, heard=replace(heard, said=cut_at(canaries, heard) or heard.said))
    if fitting:
        return _as_expected(canaries, exact if exact in fitting else fitting[0], fitting, expected)
    if said := cut_at(canaries, heard):
        return replace(exact, faults=("truncates",), heard=replace(heard, said=said))
    half = [look for dtype, look in looks.items() if dtype != "float32" and look.faults != ("unknown",)]
    # The expected precision comes first; a fault that shows in another precision is a fault all the same.
    half.sort(key=lambda look: look.precision != expected)
    return half[0] if half else replace(exact, precision="")


def _as_expected(
    canaries: Sequence[Canary], found: Finding, fitting: Sequence[Finding], expected: str | None
) -> Finding:
    """Return a finding of right scores, wrong only if they are clearly those of another precision."""
    dtype = found.precision
    if expected is None or expected == dtype:
        return found
    for other in fitting:
        # Scores of half precision may be within the tolerances of both kinds; those of float32 are exact.
        if other.precision == expected and (dtype != "float32" or _same_in(canaries, dtype, expected)):
            return other
    said = f"the scores are those of {dtype}, where {expected} was expected"
    return replace(found, faults=("precision",), heard=replace(found.heard, said=said))


def _same_in(canaries: Sequence[Canary], first: str, second: str) -> bool:
    """Return whether the references of two precisions are too close to tell in which the scores were computed."""
    both = reference_scores(canaries, first), reference_scores(canaries, second)
    return largest_distance(*both) <= SCORE_TOLERANCE["float32"]


def _nearest_first(findings: Sequence[Finding], canaries: Sequence[Canary]) -> list[Finding]:
    """Return the findings in the order of the scores' distance from the references of their precision.

    A precision without references of its own is compared with the canonical scores, and comes after the others.
    """

    def distance(one: Finding) -> tuple[bool, float]:
        off = np.array(reference_scores(canaries, one.precision)) - np.array(one.heard.scores)
        return not all(one.precision in canary.references for canary in canaries), float(np.sum(off**2))

    return sorted(findings, key=distance)


def _names(said: str | None) -> tuple[str, ...]:
    """Return the faults that a description names, or `unknown` if it names none; empty for no description."""
    if said is None:
        return ()
    return tuple(name for name in DESCRIPTIONS if f"({name})" in said) or ("unknown",)


def cut_at(canaries: Sequence[Canary], heard: Heard) -> str:
    """Return, in words, up to how many tokens all scores are right, if those of all longer conversations are wrong.

    Where the endpoint counts tokens, it must have read fewer than were sent. Empty unless at least two lengths are
    right and one is wrong. Conversations with typed control tokens are left out.
    """
    plain = [
        (len(canary.token_ids), canary, score, count)
        for canary, score, count in zip(canaries, heard.scores, heard.num_tokens or [None] * len(canaries), strict=True)
        if SPECIAL_TOKENS not in canary.decoys
    ]
    for dtype, tolerance in SCORE_TOLERANCE.items():
        right = {
            length: largest_distance(reference_scores([canary], dtype), [score]) <= tolerance
            for length, canary, score, _ in sorted(plain, key=lambda one: one[0])
        }
        good = [length for length, is_right in right.items() if is_right]
        bad = [length for length, is_right in right.items() if not is_right]
        fewer = all(count is None or count < length for length, _, _, count in plain if length in bad)
        if len(good) > 1 and bad and max(good) < min(bad) and fewer:
            return f"conversations of up to {max(good)} tokens are right, longer ones are not"
    return ""


def _by_counts(canaries: Sequence[Canary], heard: Heard) -> tuple[str, ...]:
    """Return the fault that the endpoint's own counts of tokens show, if they show one."""
    known = [
        (len(canary.token_ids), count)
        for canary, count in zip(canaries, heard.num_tokens or [None] * len(canaries), strict=True)
        if count is not None and SPECIAL_TOKENS not in canary.decoys
    ]
    if len(known) < 2:
        return ()
    if heard.form == "token_ids" and all(count == length + 1 for length, count in known):
        return ("double_bos",)
    if heard.form == "token_ids" and any(count < length for length, count in known):
        return ("truncates",)
    return ()


def of_one_arithmetic(canaries: Sequence[Canary], findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; where one form is exactly float32, those that only half precision explains become unknown.

    An endpoint computes every form in one arithmetic. So the latter are scores of other tokens, which pass for the same
    ones only within the wide tolerance of half precision.
    """
    if not any(one.precision == "float32" and (one.is_right or one.faults == ("precision",)) for one in findings):
        return list(findings)
    exact = reference_scores(canaries, "float32")
    return [
        replace(
            one,
            faults=("unknown",),
            precision="",
            distance=largest_distance(exact, one.heard.scores),
            heard=replace(one.heard, said=""),
        )
        if one.precision not in ("", "float32")
        else one
        for one in findings
    ]


def compare_forms(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with unknown faults named as far as a comparison of the forms shows them.

    If one form gets the right scores, the model is right, and a form that gets wrong ones reads other tokens: another
    template for messages, another tokenisation for texts. If token ids get scores that fit no fault, the weights
    differ. Where token ids are not taken, other weights cannot be told from other tokens.
    """
    ids = next((one for one in findings if one.heard.form == "token_ids" and one.heard.scores), None)
    model_is_right = any(one.is_right and one.heard.scores for one in findings)
    compared = []
    for one in findings:
        if one.faults == ("unknown",):
            other = "other_template" if one.heard.form == "messages" else "other_tokens"
            if model_is_right:
                one = replace(one, faults=(other,))
            elif ids is None:
                one = replace(one, faults=("stale_weights", other))
            elif ids.faults == ("unknown",):
                one = replace(one, faults=("stale_weights",))
        compared.append(one)
    return compared


def explain(faults: Sequence[str], *, forms: Sequence[str], said: str = "") -> str:
    """Return the verdict on wrong scores: what fits, in which forms, and what to do."""
    fits = ", or ".join(f"{DESCRIPTIONS[name]} ({name})" for name in faults)
    sent = " and ".join([", ".join(forms[:-1]), forms[-1]] if len(forms) > 1 else forms)
    more = f": {said}" if said else ""
    known = {**REMEDIES, **REMEDIES_OF_IDS} if FORM_OF["token_ids"] in forms else REMEDIES
    remedies = " ".join(dict.fromkeys(known[name] for name in faults))
    return f"wrong scores for {sent}: {fits}{more}. {remedies}"


def with_decoys(canary: Canary) -> Canary:
    """Return a canary with the decoys that follow from its score alone, for canaries that came without any."""
    if canary.decoys:
        return canary
    # Below −700 math.exp would soon overflow, and the sigmoid is 0 in any case.
    squeezed = 1 / (1 + math.exp(-canary.score)) if canary.score > -700 else 0.0
    return replace(canary, decoys={"sigmoid": squeezed, **dict(zip(CONSTANT, (1.0, 0.0), strict=True))})
