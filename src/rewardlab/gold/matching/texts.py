"""Tests whether a proxy agrees better with gold on other texts of the same rows: with another system turn.

A template or a system turn that is not that of training moves every score and leaves no trace in files of scores. So
where the model is at hand, some of the rows are scored once more with their system turn changed, and the pairs of
these rows are compared with themselves.

Legend: L rows, K replies of most rows, N pairs of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.multiple import holm
from rewardlab.core.types import Conversation, Message
from rewardlab.gold.files.rows import GoldRow, system_of, with_system
from rewardlab.gold.matching.order import Alternative, compared, outcomes_by_place

WITHOUT: Final = "without their system turn"
EMPTY: Final = "with an empty system turn"
JOINED: Final = "with the text of the system turn before that of the user"


def other_texts(rows: Sequence[GoldRow], most: int) -> tuple[list[int], dict[str, list[GoldRow]]]:
    """Return the places of at most `most` rows, evenly spread, and by name these rows with other system turns.

    A row with an empty system turn loses it, one with a text has it put before the user's turn, and one without gets an
    empty one. Rows that a form does not change stay as they are in it, and a form that changes none is left out.
    """
    labelled = [place for place, row in enumerate(rows) if row.gold is not None]
    count = min(most, len(labelled))
    places = [labelled[k * len(labelled) // count] for k in range(count)]
    forms: dict[str, Callable[[Conversation], Conversation]] = {WITHOUT: _without, EMPTY: _empty, JOINED: _joined}
    found = {
        name: [replace(rows[place], prompt=change(rows[place].prompt)) for place in places]
        for name, change in forms.items()
    }
    return places, {
        name: changed
        for name, changed in found.items()
        if any(one.prompt != rows[place].prompt for one, place in zip(changed, places, strict=True))
    }


def _without(prompt: Conversation) -> Conversation:
    # Only an empty system turn is taken away: one with text may say what is asked for, so the question would change.
    return prompt[1:] if system_of(prompt) == "" else prompt


def _empty(prompt: Conversation) -> Conversation:
    return with_system(prompt, "")


def _joined(prompt: Conversation) -> Conversation:
    system = system_of(prompt)
    if not system or len(prompt) < 2 or prompt[1].role != "user":
        return prompt
    return (Message("user", f"{system}\n\n{prompt[1].content}"), *prompt[2:])


def texts_of(
    rows: Sequence[GoldRow],
    here: Sequence[Sequence[float | None]],
    there: Mapping[str, Sequence[Sequence[float | None]]],
) -> tuple[Alternative, ...]:
    """Return for each form the match of the same pairs as the rows are and with other texts, p after Holm's correction.

    `here` and `there` are the scores of the rows, in their order. A form with too few prompts is left out.
    """
    most = int(np.bincount([len(row.responses) for row in rows]).argmax()) if rows else 0
    if most < 2:
        return ()
    keys = [row.key for row in rows]
    gold_LK = _table([row.gold or () for row in rows], most)
    here_LN = outcomes_by_place(_table(here, most), gold_LK)
    found = [
        one
        for name, scores in there.items()
        if (
            one := compared(
                name,
                f"{len(rows):,} rows that were scored again",
                here_LN,
                outcomes_by_place(_table(scores, most), gold_LK),
                keys,
            )
        )
        is not None
    ]
    adjusted = holm([one.p for one in found])
    return tuple(replace(one, p=p) for one, p in zip(found, adjusted, strict=True))


def _table(values: Sequence[Sequence[float | None]], most: int) -> FloatArray:
    """Return values as [L, K], NaN where there is none and in rows of another length."""
    return np.array(
        [[np.nan if one is None else one for one in own] if len(own) == most else [np.nan] * most for own in values],
        dtype=np.float64,
    ).reshape(len(values), most)
