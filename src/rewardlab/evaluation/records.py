"""Files that an evaluation writes beside its scores: columns for slices, and its worst mistakes with their texts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rewardlab.analysis.mistakes import margin_of, sides_of
from rewardlab.analysis.slices import BUILT_IN, TURNS, of_column
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import finite_or_none, write_jsonl
from rewardlab.core.run_folder import MISTAKES, SLICES
from rewardlab.core.terminal import cut_to
from rewardlab.core.types import Conversation, Preference, ScoredComparison, ScoreRow
from rewardlab.core.values import did_you_mean
from rewardlab.data.originals import Key, Original

NUM_MISTAKES: Final = 50
"""How many comparisons, those with the most negative margins, are written with their texts."""
MAX_SHOWN: Final = 80
"""Most characters of a text that names a slice."""


def write_mistakes(
    folder: Path,
    name: str,
    worst: Sequence[ScoredComparison],
    originals: Iterable[Original],
) -> None:
    """Write `<name>.mistakes.jsonl`: comparisons with prompt, replies and scores, in the order of `worst`.

    A comparison whose row is no longer among the `originals` is written without texts.
    """
    texts = {original.key: original.preference for original in originals}
    write_jsonl(folder / f"{name}.{MISTAKES}", (_mistake(one, texts) for one in worst))


def _mistake(joined: ScoredComparison, texts: Mapping[Key, Preference]) -> dict[str, object]:
    preferred, other = sides_of(joined)
    preference = texts.get((joined.source, joined.preference_id))

    def side(row: ScoreRow) -> dict[str, object]:
        messages: Conversation | None = None
        if preference is not None and row.reply < len(preference.replies):
            messages = preference.replies[row.reply]
        return {
            "reply": row.reply,
            "score": finite_or_none(row.score),
            "num_tokens": row.num_tokens,
            "truncated_tokens": row.truncated_tokens,
            **({"truncated_reply_tokens": row.truncated_reply_tokens} if row.truncated_reply_tokens else {}),
            "messages": None if messages is None else [turn.as_dict() for turn in messages],
        }

    return {
        "source": joined.source,
        "preference_id": joined.preference_id,
        "prompt_key": joined.prompt_key,
        "margin": margin_of(joined),
        "label": max(joined.comparison.label, 1 - joined.comparison.label),
        "prompt": None if preference is None else [turn.as_dict() for turn in preference.prompt],
        "preferred": side(preferred),
        "other": side(other),
    }


def write_slices(folder: Path, name: str, slices: Mapping[str, Mapping[Key, object]]) -> None:
    """Write `<name>.slices.jsonl`: one line for each preference, with its value in each column."""
    keys = dict.fromkeys(key for values in slices.values() for key in values)
    write_jsonl(
        folder / f"{name}.{SLICES}",
        (
            {
                "source": source,
                "preference_id": identity,
                "slices": {column: values.get((source, identity)) for column, values in slices.items()},
            }
            for source, identity in keys
        ),
    )


def slices_of(
    originals: Iterable[Original], columns: Sequence[str], *, judged: Collection[Key]
) -> dict[str, dict[Key, object]]:
    """Return column -> (source, id) -> value for the `judged` preferences; None for a row without a value.

    The number of turns of a conversation, reply included, comes first. A column that has the name of a slicing that
    needs none is `column NAME`; where no row has such a column, that slicing alone is meant.

    Raises ConfigError if no row has a column (naming the nearest), or if its values are lists or mappings.
    """
    turns: dict[Key, object] = {}
    found: dict[str, dict[Key, object]] = {column: {} for column in columns}
    known: dict[str, None] = {}
    for original in originals:
        if original.key not in judged:
            continue
        known |= dict.fromkeys(original.columns)
        turns[original.key] = original.num_turns
        for column in found:
            found[column][original.key] = original.columns.get(column)
    slices: dict[str, dict[Key, object]] = {TURNS: turns}
    for column, values in found.items():
        needs_none = column in {*BUILT_IN, TURNS}
        if column not in known:
            if needs_none:
                continue
            near = did_you_mean(column, known)
            raise ConfigError(f"--slice {column}: no row has this column.{near} Columns: {', '.join(known) or 'none'}.")
        if any(isinstance(value, (list, tuple, dict)) for value in values.values()):
            raise ConfigError(f"--slice {column}: it holds lists or mappings. Name a column of texts or numbers.")
        slices[of_column(column) if needs_none else column] = {key: _shown(value) for key, value in values.items()}
    return slices


def _shown(value: object) -> object:
    """Return a value as the name of a slice: texts in one line and shortened."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return finite_or_none(value)
    return cut_to(" ".join(str(value).split()), MAX_SHOWN)
