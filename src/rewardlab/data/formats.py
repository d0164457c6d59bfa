"""Read one row of a public preference dataset as a Preference, or name the cause why it cannot be used.

The functions depend on their arguments alone; files are found and read in `sources`. The schema of a dataset is
recognised by the columns of its first row (`SCHEMAS`), and every later row is read by that schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rewardlab.core.errors import DataError
from rewardlab.data.config import ReadingConfig
from rewardlab.data.judgements import ParsedRow, Rules, compare_all, draw_replies, make_pair, read_judged, read_scores
from rewardlab.data.rows import (
    Row,
    UnusableRowError,
    is_absent,
    parse_transcript,
    read_conversation,
    read_number,
    read_prompt,
    read_reply,
    require_bounded,
    require_reply,
    require_text,
    show,
    split_texts,
)

LONG_FORM_TEXTS = ("response", "completion", "text", "content")
"""Columns in which long-form data keeps a reply. The first that is present is used."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns by which a dataset is recognised, and the reader of its rows."""

    name: str
    needed: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    """Columns of which at least one is needed as well; empty if none is."""
    read: Callable[[Row, str, Rules], ParsedRow]

    @property
    def columns(self) -> str:
        """The columns as text, for messages."""
        return ", ".join(self.needed) + (f" and one of {'/'.join(self.one_of)}" if self.one_of else "")

    def fits(self, columns: Iterable[str]) -> bool:
        """Whether rows with these columns match this schema."""
        present = set(columns)
        return present.issuperset(self.needed) and (not self.one_of or not present.isdisjoint(self.one_of))


def recognise(columns: Iterable[str], place: str) -> Schema:
    """Return the first schema that the columns match.

    Raises DataError, naming the columns found and the schemas accepted, if there is none.
    """
    names = [name for name in columns if isinstance(name, str)]
    for schema in SCHEMAS:
        if schema.fits(names):
            return schema
    near = [f"{name!r} as {meant!r}" for name in names if (meant := meant_column(name, names))]
    hint = f" Perhaps {', '.join(near)} is meant." if near else ""
    accepted = "; ".join(f"{schema.columns} ({schema.name})" for schema in SCHEMAS)
    raise DataError(
        f"{place}: the columns {', '.join(map(repr, names)) or '(none)'} match no known schema of preferences."
        f"{hint} Rename them to one of: {accepted}."
    )


def meant_column(name: str, present: Collection[str]) -> str | None:
    """Return the column of a schema that a misspelt name resembles; None if the name is known or resembles none.

    Columns that are present are not suggested.
    """
    known = dict.fromkeys(column for schema in SCHEMAS for column in (*schema.needed, *schema.one_of))
    if name in known:
        return None
    by_case = {column.casefold(): column for column in known if column not in present}
    near = difflib.get_close_matches(name.strip().casefold(), by_case, n=1, cutoff=0.75)
    return by_case[near[0]] if near else None


def read_rows(rows: Sequence[Row], *, schema: Schema, place: str, rules: Rules) -> ParsedRow:
    """Return the preference in one row (in long-form data, in all rows of a pair). `place` becomes its id.

    Raises UnusableRowError for rows to drop, DataError if a flag forbids dropping them.
    """
    for row in rows:
        require_bounded(row)
        _require_fields(row, schema)
    if schema is not LONG_FORM:
        (row,) = rows
        return schema.read(row, place, rules)
    try:
        row = _join_pair(rows, rules.reading)
    except UnusableRowError as unusable:
        if unusable.cause == "incomplete_pair" and rules.reading.incomplete_pairs == "error":
            raise DataError(
                f"{place}: {unusable.detail}. Complete the pair, or drop such pairs with --incomplete-pairs drop."
            ) from unusable
        raise
    return schema.read(row, place, rules)


# --- schemas -------------------------------------------------------------------------------------------------


def _read_explicit(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + chosen + rejected, each text or messages."""
    prompt = read_prompt(row["prompt"], bare=rules.bare)
    after = rules.before_reply(row["prompt"])
    chosen, rejected = (read_reply(row[side], prompt, after=after) for side in ("chosen", "rejected"))
    return make_pair(prompt, (chosen, rejected), row, place, rules)


def _read_implicit(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read chosen + rejected as whole conversations (messages, or HH transcripts). The prompt is what they share."""
    sides = [row["chosen"], row["rejected"]]
    texts = [side for side in sides if isinstance(side, str)]
    if len(texts) == 2 and rules.bare:
        text, *rest = split_texts(*texts)
        prompt = read_prompt(text, bare=True)
        return make_pair(prompt, (read_reply(rest[0], prompt), read_reply(rest[1], prompt)), row, place, rules)
    if len(texts) == 2:
        try:
            chosen, rejected = (parse_transcript(text) for text in texts)
        except UnusableRowError as unusable:
            near = [name for name in row if meant_column(name, row) == "prompt"]
            if unusable.cause != "no_prompt" or not near:
                raise
            raise UnusableRowError("no_prompt", f"{unusable.detail}; is the column {near[0]!r} the 'prompt'?") from None
    else:
        chosen, rejected = (read_conversation(side) for side in sides)
    shared = 0
    # Each side keeps at least one turn, so that identical conversations are dropped as `identical_replies`.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    for side in (chosen, rejected):
        if side[shared].role != "assistant":
            raise UnusableRowError(
                "prompt_differs",
                f"the sides part at turn {shared + 1}, a {side[shared].role} turn: {show(side[shared])}",
            )
    prompt = require_text(chosen[:shared])
    return make_pair(prompt, (require_reply(chosen[shared:]), require_reply(rejected[shared:])), row, place, rules)


def _read_shp(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read Stanford Human Preferences: `labels` 1 prefers reply A, `score_ratio` is votes of the preferred to the
    other."""
    prompt = read_prompt(row["history"], bare=rules.bare)
    preferred_a = read_number(row, "labels", "bad_label")
    if preferred_a not in (0.0, 1.0):
        raise UnusableRowError("bad_label", f"labels is {preferred_a}, wanted 1 (A is preferred) or 0 (B is)")
    names = ("human_ref_A", "human_ref_B") if preferred_a else ("human_ref_B", "human_ref_A")
    after = rules.before_reply(row["history"])
    preferred, other = (read_reply(row[name], prompt, after=after) for name in names)
    ratio = read_number(row, "score_ratio", "bad_strength", low=1.0)
    share = None if ratio is None else ratio / (1 + ratio)
    judged = {**row, "label": None, "strength": share}
    return make_pair(prompt, (preferred, other), judged, place, rules)


def _read_kwise(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + responses + scores or ranking. Every pair of replies with different scores becomes a comparison."""
    prompt = read_prompt(row["prompt"], bare=rules.bare)
    responses = row["responses"]
    if not isinstance(responses, (list, tuple)):
        raise UnusableRowError("reply_not_text", f"responses is {show(responses)}, wanted a list of replies")
    kept = draw_replies(len(responses), place, rules)
    scores = read_scores(row, len(responses))
    after = rules.before_reply(row["prompt"])
    replies = [read_reply(response, prompt, after=after) for response in responses]
    return compare_all([replies[k] for k in kept], [scores[k] for k in kept], prompt, row, place, rules)


def _read_long_form(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read the rows of one pair, joined by `_join_pair`."""
    return (_read_implicit if is_absent(row.get("prompt")) else _read_explicit)(row, place, rules)


LONG_FORM = Schema(
    name="long form, two rows a pair",
    needed=("pair_id", "role"),
    one_of=("messages", *LONG_FORM_TEXTS),
    read=_read_long_form,
)
SCHEMAS = (
    LONG_FORM,
    Schema(name="K-wise", needed=("prompt", "responses"), one_of=("scores", "ranking"), read=_read_kwise),
    Schema(name="SHP", needed=("history", "human_ref_A", "human_ref_B", "labels"), read=_read_shp),
    Schema(name="pairs", needed=("prompt", "chosen", "rejected"), read=_read_explicit),
    Schema(name="whole conversations or HH transcripts", needed=("chosen", "rejected"), read=_read_implicit),
    Schema(name="judged replies", needed=("prompt", "replies", "comparisons"), read=read_judged),
)
"""All schemas, in the order in which they are tried. Schemas whose columns are a subset of another's come later."""


# --- rows and fields -----------------------------------------------------------------------------------------


def _join_pair(rows: Sequence[Row], reading: ReadingConfig) -> Row:
    """Join the rows of one pair into one row with chosen and rejected, and the prompt if they have one."""
    roles = [str(row["role"]) for row in rows]
    unknown = sorted(set(roles) - {"chosen", "rejected"})
    if unknown:
        raise UnusableRowError("bad_roles", f"role {show(unknown[0])}, wanted chosen or rejected")
    if sorted(roles) != ["chosen", "rejected"]:
        raise UnusableRowError(
            "incomplete_pair",
            f"pair {show(rows[0]['pair_id'])} has {' and '.join(roles) if len(roles) < 4 else f'{len(roles)} rows'}, "
            f"wanted one of each side",
        )
    chosen, rejected = sorted(rows, key=lambda row: str(row["role"]))
    if chosen.get("prompt") != rejected.get("prompt"):
        raise UnusableRowError("prompt_differs", f"pair {show(chosen['pair_id'])} has two prompts")
    joined = {"prompt": chosen.get("prompt"), "chosen": _side(chosen), "rejected": _side(rejected)}
    judged = {"label": "bad_label", "strength": "bad_strength"}
    if reading.margin_column:
        judged[reading.margin_column] = "bad_margin"
    for column, cause in judged.items():
        values = [row[column] for row in (chosen, rejected) if not is_absent(row.get(column))]
        if len(values) == 2 and values[0] != values[1]:
            raise UnusableRowError(
                cause, f"the sides have {column} {show(values[0])} and {show(values[1])}, wanted one for the pair"
            )
        joined[column] = values[0] if values else None
    return joined


def _side(row: Row) -> object:
    """Return what a long-form row holds: messages or, without them, a text."""
    return next(row[column] for column in ("messages", *LONG_FORM_TEXTS) if row.get(column) is not None)


def _require_fields(row: Row, schema: Schema) -> None:
    """Raise UnusableRowError if a column that the schema needs is absent or null."""
    for column in schema.needed:
        if row.get(column) is None:
            raise UnusableRowError("missing_field", f"no {column!r}")
    if schema.one_of and all(row.get(column) is None for column in schema.one_of):
        raise UnusableRowError("missing_field", f"none of {', '.join(map(repr, schema.one_of))}")
