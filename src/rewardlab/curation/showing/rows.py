"""Finds rows of a dataset and shows how each is used: read, rendered, cut, or left out with the cause."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.terminal import short
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.curation.models import renderer_of
from rewardlab.curation.rows import ReadRow, walk
from rewardlab.curation.showing.config import ShowConfig
from rewardlab.curation.showing.tokens import ShownReply, shown_reply
from rewardlab.data.bulk import render_all, render_replies
from rewardlab.data.chat import Renderer
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.layout import Rendered
from rewardlab.data.rows import CAUSES
from rewardlab.data.sources import open_units

MOST_NAMESAKES: Final = 10
"""Rows of one id that are shown."""
IDS: Final = ("id", "pair_id", "preference_id")
"""Columns by whose value a row can be named."""
RENDERING_CAUSES: Final[Mapping[str, str]] = {
    "template_refuses": "the chat template refuses a conversation or leaves out a turn, or control tokens cannot be "
    "told apart",
    "overlong": "a conversation is above the length limit, and such rows are left out (--truncation drop or error)",
    "reply_too_long": "without replies that are too long even without a prompt, no judged pair is left",
    "prompt_too_long": "the prompt leaves no room for a reply, and it may not be cut (--truncation reply-middle)",
    "identical_tokens": "all judged replies render to the same tokens",
    "ends_in_padding": "a reply ends in the token that pads the model's batches",
}


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """A row, and how it is used."""

    place: str
    number: int
    num_alike: int = 1
    """Rows of the id by which it was asked for, itself among them; 1 if it was asked for by its number or place."""
    format: str
    """The schema by which the dataset is read, with the columns by which it was recognised."""
    preference: Preference | None
    """None if the row cannot be read."""
    cause: str | None
    """The cause for which the row is left out; None if it is used."""
    detail: str | None
    """The cause in words."""
    row: Mapping[str, object]
    """The row as it stands in the file; in formats with several rows per preference, the first of them."""
    left_out: tuple[str, ...] = ()
    """Why replies of the row are left out, beside which the others are used; these are numbered without them."""
    replies: tuple[ShownReply | str, ...] = ()
    """Each reply as tokens, or why it has none; empty without a model."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON."""
        values = {item.name: _plain(getattr(self, item.name)) for item in fields(self)}
        if self.preference is not None:
            del values["row"]
        return values


def _plain(value: object) -> Any:
    """Return a value as JSON can hold it; others, such as NaN or a date of a Parquet file, as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def show_rows(config: ShowConfig) -> list[ShownRow]:
    """Return the rows that were asked for, in that order; all that have an id, up to `MOST_NAMESAKES` of them.

    If none was asked for, the first row of the dataset is returned, whatever its number: a table's has a header above.

    Raises DataError if the dataset cannot be read or has no such row, ConfigError and ArtifactError for the model.
    """
    renderer = renderer_of(config.shown.model, config.rendering) if config.shown.model else None
    (source,) = find_sources([config.shown.dataset], config.shown.hf_split, streaming=config.reading.streaming)
    bare = config.rendering.joins_texts if renderer is None else renderer.spec.joins_texts
    rules = Rules(source=source.name, reading=config.reading, seed=config.shown.seed, bare=bare)
    schema, _ = open_units(source, rules, may_be_damaged=True)
    said = schema.label
    if not config.shown.row:
        return [_shown(row, said, renderer) for row in islice(walk(source, rules, may_be_damaged=True), 1)]
    found = _find(source, rules, config.shown.row)
    return [
        replace(_shown(row, said, renderer), num_alike=count) for name in config.shown.row for row, count in found[name]
    ]


def _find(source: Source, rules: Rules, names: Sequence[str]) -> dict[str, list[tuple[ReadRow, int]]]:
    """Return name -> (row, how many have the name): the row of this number or place or, if there is none, the first
    `MOST_NAMESAKES` rows of this id. Raises DataError for a name that no row has.
    """
    wanted = frozenset(names)
    by_place: dict[str, ReadRow] = {}
    by_id: dict[str, list[ReadRow]] = defaultdict(list)
    counts: Counter[str] = Counter()
    num_rows = 0
    for row in walk(source, rules, may_be_damaged=True):
        num_rows += 1
        by_place |= {name: row for name in (str(row.number), row.place) if name in wanted}
        for name in wanted.intersection(_ids_of(row)):
            counts[name] += 1
            if counts[name] <= MOST_NAMESAKES:
                by_id[name].append(row)
        if len(by_place) == len(wanted):
            break
    found = {name: [(row, counts[name]) for row in rows] for name, rows in by_id.items()}
    found |= {name: [(row, 1)] for name, row in by_place.items()}
    if missing := [name for name in names if name not in found]:
        raise DataError(
            f"--row {short(missing[0])}: {source.label} has no such row among its {num_rows}: no line of this number, "
            f"and no {', '.join(IDS)} of this value."
        )
    return found


def _ids_of(row: ReadRow) -> set[str]:
    """Return the values by which a row can be asked for, besides its number and place."""
    return {str(value) for held in row.rows for column in IDS if isinstance(value := held.get(column), str | int)}


def _shown(row: ReadRow, said: str, renderer: Renderer | None) -> ShownRow:
    known: dict[str, Any] = {"place": row.place, "number": row.number, "format": said, "row": row.rows[0]}
    if row.preference is None:
        meaning = CAUSES.get(row.cause or "", "")
        return ShownRow(preference=None, cause=row.cause, detail=f"{meaning}: {row.detail}", **known)
    if row.parsed is not None:
        known["left_out"] = tuple(f"{cause}: {detail}" for cause, detail in row.parsed.left_out)
    if renderer is None:
        return ShownRow(preference=row.preference, cause=None, detail=None, **known)
    cause, group, detail = _group(row.preference, renderer)
    (results,) = render_replies([row.preference], renderer)
    shared = 0 if group is None else len(group.shared)
    replies = tuple(
        shown_reply(renderer, row.preference.prompt, reply, result, number=number, num_shared=shared)
        if isinstance(result, Rendered)
        else str(result)
        for number, (reply, result) in enumerate(zip(row.preference.replies, results, strict=True))
    )
    return ShownRow(preference=row.preference, cause=cause, detail=detail, replies=replies, **known)


def _group(preference: Preference, renderer: Renderer) -> tuple[str | None, TokenGroup | None, str | None]:
    """Return (the cause for which the row is left out or None, its group or None, the cause in words or None)."""
    try:
        (outcome,) = render_all([preference], renderer)
    except DataError as error:
        return "overlong", None, str(error)
    if isinstance(outcome, TokenGroup):
        return None, outcome, None
    return outcome.cause, None, f"{RENDERING_CAUSES[outcome.cause]} ({outcome.place})"
