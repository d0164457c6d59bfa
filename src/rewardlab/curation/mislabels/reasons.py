"""The reasons for suspecting a label: one entry for each pair, in the order of suspicion, with reasons in words.

Legend: N pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rewardlab.core.terminal import number_of
from rewardlab.curation.mislabels.lengths import characters
from rewardlab.curation.mislabels.pairs import Pairs
from rewardlab.curation.mislabels.ranking import Ranking


def entries_of(pairs: Pairs, ranking: Ranking, opposite: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Return one entry for each pair, the most suspicious first: each witness's testimony and other evidence.

    `opposite` [N] are the ids of near duplicates with the opposite label.
    """
    entries = []
    joint = ranking.together.probability_N(pairs)
    # Made for all pairs at once: for each pair anew they would cost as much as all pairs, times their number.
    margins = {one.name: one.margin_N * pairs.sign_N for one in ranking.testimonies}
    for place, number in enumerate(ranking.order_N.tolist(), start=1):
        owner = int(pairs.owners_N[number])
        preference = pairs.preferences[owner]
        judged = pairs.comparison(number)
        preferred, other = _sides(pairs, number)
        lengths = [characters(preference.replies[side]) for side in (preferred, other)]
        said = {
            one.name: {
                "probability": _number(float(ranking.probability_WN[which, number])),
                "margin": _number(float(margins[one.name][number])),
            }
            for which, one in enumerate(ranking.testimonies)
        }
        entry: dict[str, Any] = {
            "rank": place,
            "id": preference.id,
            "source": preference.source,
            "preferred": preferred,
            "other": other,
            "label": judged.label,
            "flagged": bool(ranking.flagged_N[number]),
            "witnesses_against": int(ranking.against_N[number]),
            "probability": _number(float(joint[number])),
            "witnesses": said,
            "characters": {"preferred": lengths[0], "other": lengths[1]},
            "strength": judged.strength,
            "annotator": judged.annotator,
            "annotators": _split(pairs, owner, preferred, other),
            "opposite_near_duplicates": list(opposite[number]),
        }
        entry["reasons"] = _reasons(entry)
        entries.append(entry)
    return entries


def _sides(pairs: Pairs, number: int) -> tuple[int, int]:
    """Return the replies of a pair, the one that the label prefers first."""
    replies = int(pairs.first_N[number]), int(pairs.second_N[number])
    return replies if pairs.label_N[number] > 0.5 else (replies[1], replies[0])


def _split(pairs: Pairs, owner: int, preferred: int, other: int) -> dict[str, int] | None:
    """Return how many judgements of the same two replies agree and disagree; None if there is only one judgement."""
    same = opposite = 0
    for one in pairs.preferences[owner].comparisons:
        if {one.first, one.second} != {preferred, other} or one.label == 0.5:
            continue
        agrees = (one.first == preferred) == (one.label > 0.5)
        same, opposite = same + agrees, opposite + (not agrees)
    return {"same": same, "opposite": opposite} if same + opposite > 1 else None


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _reasons(entry: Mapping[str, Any]) -> list[str]:
    """Return in words the evidence for a mistake, and what may explain it otherwise."""
    said = [
        f"{name} puts the label at {one['probability']:.0%} (margin {one['margin']:+.2f})"
        if one["probability"] is not None
        else f"{name} says nothing"
        for name, one in entry["witnesses"].items()
    ]
    reasons = [*said]
    longer = entry["characters"]["preferred"] - entry["characters"]["other"]
    reasons.append(
        "both replies are of one length"
        if not longer
        else f"the preferred reply is {number_of(abs(longer), 'character')} {'longer' if longer > 0 else 'shorter'}"
    )
    if entry["opposite_near_duplicates"]:
        reasons.append(
            f"nearly the same pair has the opposite label: {', '.join(entry['opposite_near_duplicates'][:5])}"
        )
    if entry["annotators"] is not None and entry["annotators"]["opposite"]:
        reasons.append(
            f"annotators disagree: {entry['annotators']['same']} judge as this label does, "
            f"{entry['annotators']['opposite']} the other way"
        )
    if entry["strength"] is not None:
        reasons.append(f"strength {entry['strength']:g}")
    if 0 < entry["label"] < 1:
        reasons.append(f"a soft label of {entry['label']:g}")
    return reasons
