"""The conditions of the warning signs that no row of a run holds: before its first step, and of the chosen model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rewardlab.analysis.signs import SURE
from rewardlab.core.types import Estimate

SHALLOW: Final[Mapping[str, float]] = MappingProxyType({"length only": 0.7, "bag of words": 0.95})
"""Name of a baseline -> accuracy from which on, lower limit and all, it shows that next to nothing has to be learned.

Of human preferences and of models' judgements words alone reach 0.9 at most; above 0.95 something marks the preferred
replies. Length reaches 0.75 where labels like long replies."""

WORDS: Final[Mapping[str, str]] = MappingProxyType({"length only": "length alone", "bag of words": "a bag of words"})


def shallow_labels(baselines: Mapping[str, Mapping[str, Estimate]]) -> str | None:
    """Report baselines that are so good that a model of these data needs to learn no more.

    `baselines` maps the name of one to the data on which it was judged, and its accuracy there.
    """
    found = [
        f"{WORDS.get(name, name)} reaches an accuracy of {_told(accuracy)} on {data} data"
        for name, judged in baselines.items()
        for data, accuracy in judged.items()
        if accuracy.low > SHALLOW.get(name, 1.0)
    ]
    return f"{'; '.join(found)}." if found else None


def reversed_at_the_end(accuracies: Mapping[str, Estimate], *, model: str = "the chosen model") -> str | None:
    """Report data on which a model is clearly worse than a coin. `accuracies` maps them to its accuracy."""
    found = [
        f"{_told(one)} on {data}" for data, one in accuracies.items() if one.value + SURE * (one.high - one.value) < 0.5
    ]
    if not found:
        return None
    return f"the accuracy of {model} is {' and '.join(found)}, below 0.5 by more than its interval."


def _told(estimate: Estimate) -> str:
    """Return an estimate with its interval."""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
