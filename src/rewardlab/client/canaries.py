"""The canaries of a server, and the error for a server that does not give their scores.

`analysis/endpoint_faults.py` finds out what is wrong with scores, here and in `rewardlab verify`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewardlab.analysis.endpoint_faults import DESCRIPTIONS, FORM_OF, Finding, explain, with_decoys
from rewardlab.analysis.faults import largest_distance, reference_scores
from rewardlab.client.failures import CanaryError
from rewardlab.client.protocol import WireCanary
from rewardlab.core.spec import Canary


def canary_of(told: WireCanary) -> Canary:
    """Return a canary of our server. If the server names no decoys, it gets those that follow from its score alone."""
    return with_decoys(
        Canary(
            name=told.name,
            messages=[{"role": message.role, "content": message.content} for message in told.messages],
            token_ids=list(told.token_ids),
            score=told.score,
            decoys=dict(told.decoys),
            references=dict(told.references),
        )
    )


def error_of(canaries: Sequence[Canary], found: Finding, *, where: str) -> CanaryError:
    """Return the error for scores that are not the model's: the fault that fits, what to do, and the worst canary."""
    scores = found.heard.scores
    precision = found.precision or "float32"
    wanted = reference_scores(canaries, precision)
    worst = max(range(len(scores)), key=lambda number: _distance(wanted[number], scores[number]))
    verdict = explain(found.faults, forms=[FORM_OF[found.heard.form]], said=found.heard.said)
    return CanaryError(
        f"{where}: {verdict} Canary {canaries[worst].name!r} scores {scores[worst]:.4f} there, and "
        f"{wanted[worst]:.4f} by the model in {precision}.",
        fault=", or ".join(f"{DESCRIPTIONS[name]} ({name})" for name in found.faults),
    )


def _distance(wanted: float, got: float) -> float:
    return largest_distance([wanted], [got]) if math.isfinite(got) else math.inf
