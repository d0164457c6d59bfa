"""A request bound to the model that scores it, and its answer once all replies are scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rewardlab.client.protocol import ScoredGroup, Usage
from rewardlab.core.spec import CUT_MIDDLE, OutputAs
from rewardlab.serve.engine.api import Scored, UnscorableError
from rewardlab.serve.engine.queued import Work, num_tokens
from rewardlab.serve.engine.request_tokens import RequestTokens
from rewardlab.serve.engine.slots import Slot


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRequest:
    """A request as tokens, bound to the model that will score it."""

    slot: Slot
    tokens: RequestTokens
    output: OutputAs
    on_error: str

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed, each prompt once."""
        return num_tokens(self.tokens.units)

    @property
    def digest(self) -> str:
        """The digest of the model that it was prepared for."""
        return self.slot.served.digest


def answer_of(prepared: PreparedRequest, work: Work) -> Scored:
    """Return the answer of a request whose replies are all scored.

    Raises UnscorableError if a score is not finite and the request does not say `on_error="null"`.
    """
    convert = _conversion(prepared)
    groups, first = [], 0
    shortens = prepared.slot.scorer.renderer.spec.truncation == CUT_MIDDLE
    for size in prepared.tokens.sizes:
        replies = prepared.tokens.replies[first : first + size]
        scores: list[float | None] = []
        errors: dict[int, str] = {}
        for number, (reply, score) in enumerate(zip(replies, work.scores[first : first + size], strict=True)):
            value = None
            if reply.error is not None:
                errors[number] = str(reply.error)
            elif score is None or not math.isfinite(score):
                errors[number] = f"its score is {score}, which is not a finite number"
                if prepared.on_error == "refuse":
                    raise UnscorableError(f"{errors[number]}.", param=reply.param)
            else:
                value = convert(score)
            scores.append(value)
        groups.append(
            ScoredGroup(
                scores=scores,
                num_tokens=[reply.num_tokens for reply in replies],
                truncated_tokens=[reply.truncated_tokens for reply in replies],
                truncated_reply_tokens=[reply.truncated_reply_tokens for reply in replies] if shortens else [],
                errors=errors,
            )
        )
        first += size
    return Scored(
        model=prepared.slot.served.name,
        digest=prepared.digest,
        groups=groups,
        usage=Usage(computed_tokens=work.computed_tokens, cached_tokens=work.cached_tokens),
    )


def _conversion(prepared: PreparedRequest) -> Callable[[float], float]:
    """Return the function from a raw score to what the request asks for."""
    scorer = prepared.slot.scorer
    if prepared.output == "raw":
        return float
    several = scorer.calibrated if prepared.output == "calibrated" else scorer.probabilities
    return lambda score: several([score])[0]
