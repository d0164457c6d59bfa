"""The conditions of the warning signs that no row of a run holds: before its first step, and of the chosen model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rewardlab.analysis.signs import SURE
from rewardlab.analysis.stats import wilson
from rewardlab.core.types import Estimate

SHALLOW: Final[Mapping[str, float]] = MappingProxyType({"length only": 0.7, "bag of words": 0.95})
"""Name of a baseline -> accuracy from which on, lower limit and all, it shows that next to nothing has to be learned.

Of human preferences and of models' judgements words alone reach 0.9 at most; above 0.95 something marks the preferred
replies. Length reaches 0.75 where labels like long replies."""

WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {"length only": "length alone", "bag of words": "a bag of words", "before": "the model before training"}
)

CUT_SIDE: Final = 0.8
"""Share of the preferences with one cut reply in which the same side was cut, from which on, lower limit and all, the
cut tells the label. Where labels like long replies it is 0.7 or so."""
CUT_ALONE: Final = 0.1
"""Share of all preferences of which one reply alone is cut, below which a model learns little of it."""
FEWEST_CUT: Final = 30
"""Such preferences that there must be."""


def one_side_cut(cut_alone: Mapping[str, tuple[int, int, int]]) -> str | None:
    """Report data in which the limit of tokens cut one side and not the other in most pairs.

    `cut_alone` maps a name of data to the preferences of which the preferred reply alone lost something, those of which
    the other one alone did, and all preferences.
    """
    found = []
    for data, (preferred, other, preferences) in cut_alone.items():
        either, most = preferred + other, max(preferred, other)
        if either < max(FEWEST_CUT, CUT_ALONE * preferences) or wilson(most, either).low <= CUT_SIDE:
            continue
        side = "preferred" if most == preferred else "other"
        found.append(
            f"in {most} of the {either} preferences of the {data} data of which one reply alone lost something, of its "
            f"prompt or of its own, that is the {side} one"
        )
    return f"the limit of tokens tells which reply is preferred: {'; '.join(found)}." if found else None


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


def behind_at_the_end(differences: Mapping[str, Estimate], *, data: str) -> str | None:
    """Report simpler judges that are clearly right more often than the chosen model on the same pairs.

    `differences` maps the name of each to the model's accuracy minus its own.
    """
    found = []
    for name, one in differences.items():
        if one.value + SURE * (one.high - one.value) < 0:
            less = f"{-one.value:.3f} [{-one.high:.3f}, {-one.low:.3f}]"
            found.append(f"{WORDS.get(name, name)} by {less}")
    return f"right more often than the chosen model on {data}: {' and '.join(found)}." if found else None


def _told(estimate: Estimate) -> str:
    """Return an estimate with its interval."""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
