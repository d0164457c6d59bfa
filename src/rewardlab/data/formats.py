"""Read one row of a public preference dataset as a Preference, or name the cause why it cannot be used.

The functions depend on their arguments alone; files are found and read in `sources`. The schema of a dataset is
recognised by the columns of its first row (`SCHEMAS`), and every later row is read by that schema.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from rewardlab.core.errors import DataError
from rewardlab.core.files import sha256_text
from rewardlab.core.types import Comparison, Conversation, Preference
from rewardlab.data.config import ReadingConfig
from rewardlab.data.rows import (
    MAX_REPLIES,
    Row,
    UnusableRowError,
    is_absent,
    parse_transcript,
    read_conversation,
    read_integers,
    read_number,
    read_prompt,
    read_reply,
    require_bounded,
    require_reply,
    require_text,
    show,
    split_texts,
    text_key,
    to_float,
)

LONG_FORM_TEXTS = ("response", "completion", "text", "content")
"""Columns in which long-form data keeps a reply. The first that is present is used."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the result of reading a row depends on, besides the row."""

    source: str
    """Name of the dataset, for metrics."""
    reading: ReadingConfig
    seed: int
    kwise_loss: str = "pairs"
    """`pairs` or `plackett-luce`; the latter needs strict rankings."""
    bare: bool = False
    """Whether texts are taken as they are, without splitting transcripts into turns."""

    def before_reply(self, prompt: object) -> object:
        """Return the prompt of a row as `read_reply` expects it in `after`."""
        return None if self.bare else prompt


@dataclass(frozen=True, kw_only=True)
class ParsedRow:
    """A preference, the label of its row if it has one, and how many of its comparisons were left out."""

    preference: Preference
    label: float | None = None
    skipped_ties: int = 0
    skipped_identical: int = 0


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
    names = list(columns)
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


def seeded_generator(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends on both arguments, so that draws for datasets and rows are independent."""
    return np.random.default_rng(int(sha256_text(f"{seed}\x1f{name}")[:32], 16))


# --- schemas -------------------------------------------------------------------------------------------------


def _read_explicit(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + chosen + rejected, each text or messages."""
    prompt = read_prompt(row["prompt"], bare=rules.bare)
    after = rules.before_reply(row["prompt"])
    chosen, rejected = (read_reply(row[side], prompt, after=after) for side in ("chosen", "rejected"))
    return _pair(prompt, (chosen, rejected), row, place, rules)


def _read_implicit(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read chosen + rejected as whole conversations (messages, or HH transcripts). The prompt is what they share."""
    sides = [row["chosen"], row["rejected"]]
    texts = [side for side in sides if isinstance(side, str)]
    if len(texts) == 2 and rules.bare:
        text, *rest = split_texts(*texts)
        prompt = read_prompt(text, bare=True)
        return _pair(prompt, (read_reply(rest[0], prompt), read_reply(rest[1], prompt)), row, place, rules)
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
    return _pair(prompt, (require_reply(chosen[shared:]), require_reply(rejected[shared:])), row, place, rules)


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
    return _pair(prompt, (preferred, other), judged, place, rules)


def _read_kwise(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + responses + scores or ranking. Every pair of replies with different scores becomes a comparison."""
    prompt = read_prompt(row["prompt"], bare=rules.bare)
    responses = row["responses"]
    if not isinstance(responses, (list, tuple)):
        raise UnusableRowError("reply_not_text", f"responses is {show(responses)}, wanted a list of replies")
    kept = _drawn_replies(len(responses), place, rules)
    scores = _scores(row, len(responses))
    after = rules.before_reply(row["prompt"])
    replies = [read_reply(response, prompt, after=after) for response in responses]
    return _compare_all([replies[k] for k in kept], [scores[k] for k in kept], prompt, row, place, rules)


def _read_long_form(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read the rows of one pair, joined by `_join_pair`."""
    return (_read_implicit if is_absent(row.get("prompt")) else _read_explicit)(row, place, rules)


def _read_judged(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + replies + comparisons, each of which names two replies: a `Preference` as JSON."""
    prompt = read_prompt(row["prompt"], bare=rules.bare)
    replies, entries = row["replies"], row["comparisons"]
    if not isinstance(replies, (list, tuple)) or not isinstance(entries, (list, tuple)):
        raise UnusableRowError("bad_comparison", "replies and comparisons are lists")
    kept = _drawn_replies(len(replies), place, rules)
    after = rules.before_reply(row["prompt"])
    read = [read_reply(replies[k], prompt, after=after) for k in kept]
    texts = [text_key(reply) for reply in read]
    judged = [_read_comparison(entry, len(replies), rules.reading) for entry in entries]
    among = [
        replace(one, first=kept.index(one.first), second=kept.index(one.second))
        for one in judged
        if one.first in kept and one.second in kept
    ]
    comparisons = tuple(one for one in among if texts[one.first] != texts[one.second])
    if not comparisons:
        cause = "identical_replies" if among else "no_comparison"
        raise UnusableRowError(cause, f"{len(judged)} comparisons among {len(replies)} replies")
    preference = Preference(
        id=place,
        source=rules.source,
        prompt=prompt,
        replies=tuple(read),
        comparisons=comparisons,
        ranking=_read_ranking(row, kept, len(replies)),
    )
    return ParsedRow(preference=preference, skipped_identical=len(among) - len(comparisons))


def _read_comparison(entry: object, num_replies: int, reading: ReadingConfig) -> Comparison:
    """Read one judgement of a row: `first` against `second`, with optional label, weight, margin and strength."""
    if not isinstance(entry, Mapping):
        raise UnusableRowError("bad_comparison", f"a comparison is {show(entry)}, wanted first and second")
    pair = read_integers([entry.get("first"), entry.get("second")])
    if pair is None or pair[0] == pair[1] or not all(0 <= k < num_replies for k in pair):
        raise UnusableRowError(
            "bad_comparison", f"{show(entry.get('first'))} against {show(entry.get('second'))} of {num_replies} replies"
        )
    label = read_number(entry, "label", "bad_label", high=1.0)
    made = _comparison(pair[0], pair[1], 1.0 if label is None else label, entry, reading)
    weight = read_number(entry, "weight", "bad_strength")
    margin = None if reading.margin_column else read_number(entry, "margin", "bad_margin")
    return replace(
        made,
        weight=made.weight * (1.0 if weight is None else weight),
        margin=margin if margin is not None and made.label != 0.5 and not made.margin else made.margin,
    )


def _read_ranking(row: Row, kept: Sequence[int], num_replies: int) -> tuple[int, ...] | None:
    """Return the kept replies from best to worst; None if the row has no ranking."""
    if is_absent(row.get("ranking")):
        return None
    order = read_integers(row["ranking"])
    if order is None or sorted(order) != list(range(num_replies)):
        raise UnusableRowError(
            "bad_scores", f"ranking is {show(row['ranking'])}, wanted every index from 0 to {num_replies - 1} once"
        )
    return tuple(kept.index(k) for k in order if k in kept)


LONG_FORM = Schema(
    name="long form, two rows a pair",
    needed=("pair_id", "role"),
    one_of=("messages", *LONG_FORM_TEXTS),
    read=_read_long_form,
)
SCHEMAS = (
    LONG_FORM,
    Schema(name="K-wise", needed=("prompt", "responses"), one_of=("scores", "ranking"), read=_read_kwise),
    Schema(name="judged replies", needed=("prompt", "replies", "comparisons"), read=_read_judged),
    Schema(name="SHP", needed=("history", "human_ref_A", "human_ref_B", "labels"), read=_read_shp),
    Schema(name="pairs", needed=("prompt", "chosen", "rejected"), read=_read_explicit),
    Schema(name="whole conversations or HH transcripts", needed=("chosen", "rejected"), read=_read_implicit),
)
"""All schemas, in the order in which they are tried. Schemas whose columns are a subset of another's come later."""


# --- judgements ----------------------------------------------------------------------------------------------


def _pair(
    prompt: Conversation, replies: tuple[Conversation, Conversation], row: Row, place: str, rules: Rules
) -> ParsedRow:
    """Return a preference of two replies, of which the first is preferred with the probability in `label`."""
    if text_key(replies[0]) == text_key(replies[1]):
        raise UnusableRowError("identical_replies", f"both are {show(replies[0][-1].content)}")
    label = read_number(row, "label", "bad_label", high=1.0)
    comparison = _comparison(0, 1, 1.0 if label is None else label, row, rules.reading)
    ranking = {1.0: (0, 1), 0.0: (1, 0)}.get(comparison.label)
    preference = Preference(
        id=place, source=rules.source, prompt=prompt, replies=replies, comparisons=(comparison,), ranking=ranking
    )
    return ParsedRow(preference=preference, label=label)


def _comparison(first: int, second: int, label: float, row: Row, reading: ReadingConfig) -> Comparison:
    """Return a judgement with the row's strength and margin used as the flags say. A tie has no margin."""
    strength_as = reading.strength_as
    low, high = (0.5, 1.0) if strength_as == "soft" else (0.0, math.inf)
    strength = read_number(row, "strength", "bad_strength", low=low, high=high)
    if strength is None and strength_as != "none":
        raise UnusableRowError("missing_strength", f"no strength for --strength-as {strength_as}")
    if strength == 0 and strength_as == "weight":
        raise UnusableRowError("zero_weight", "a strength of 0 with --strength-as weight has no effect on training")
    margin = None
    if reading.margin_column:
        margin = read_number(row, reading.margin_column, "bad_margin")
        if margin is None:
            raise UnusableRowError("missing_field", f"no {reading.margin_column!r}, which --margin-column names")
    elif strength_as == "margin":
        margin = strength
    if strength_as == "soft" and strength is not None and label != 0.5:
        label = strength if label > 0.5 else 1 - strength
    return Comparison(
        first=first,
        second=second,
        label=label,
        weight=strength if strength_as == "weight" and strength is not None else 1.0,
        margin=margin if margin is not None and label != 0.5 else 0.0,
        strength=strength,
    )


def _scores(row: Row, num_replies: int) -> list[float]:
    """Return a score for each reply, from `scores` or counted down from the best of `ranking`. Both must agree."""
    ranking, scores = row.get("ranking"), row.get("scores")
    order: list[int] | None = None
    if not is_absent(ranking):
        order = read_integers(ranking)
        if order is None or sorted(order) != list(range(num_replies)):
            raise UnusableRowError(
                "bad_scores", f"ranking is {show(ranking)}, wanted every index from 0 to {num_replies - 1} once"
            )
    if is_absent(scores):
        if order is None:
            raise UnusableRowError("missing_field", "neither 'scores' nor 'ranking'")
        places = {reply: rank for rank, reply in enumerate(order)}
        return [-float(places[reply]) for reply in range(num_replies)]
    if not isinstance(scores, (list, tuple)) or len(scores) != num_replies:
        raise UnusableRowError("bad_scores", f"scores is {show(scores)}, wanted {num_replies} numbers, one a reply")
    numbers = [to_float(score) for score in scores]
    if not all(math.isfinite(number) for number in numbers):
        raise UnusableRowError("bad_scores", f"scores is {show(scores)}, wanted finite numbers")
    if order is not None and any(numbers[a] < numbers[b] for a, b in pairwise(order)):
        raise UnusableRowError("bad_scores", f"ranking {show(ranking)} contradicts scores {show(scores)}")
    return numbers


def _drawn_replies(num_replies: int, place: str, rules: Rules) -> list[int]:
    """Return the indices of the replies to keep, in their order.

    Raises UnusableRowError if more than `MAX_REPLIES` would be kept: comparisons grow with the square of the replies.
    """
    limit = rules.reading.max_replies
    num_kept = num_replies if limit is None else min(limit, num_replies)
    if num_kept > MAX_REPLIES:
        raise UnusableRowError(
            "too_many_replies", f"{num_kept:,} replies, at most {MAX_REPLIES} are compared; --max-replies draws fewer"
        )
    if limit is None or num_replies <= limit:
        return list(range(num_replies))
    drawn = seeded_generator(rules.seed, place).choice(num_replies, size=limit, replace=False)
    return sorted(int(index) for index in drawn)


def _compare_all(
    replies: Sequence[Conversation], scores: Sequence[float], prompt: Conversation, row: Row, place: str, rules: Rules
) -> ParsedRow:
    """Return a preference with all comparisons that the scores of K replies decide, the better reply first."""
    texts = [text_key(reply) for reply in replies]
    pairs = list(combinations(range(len(replies)), 2))
    identical = {pair for pair in pairs if texts[pair[0]] == texts[pair[1]]}
    tied = {pair for pair in pairs if scores[pair[0]] == scores[pair[1]]} - identical
    half = bool(tied) and _half_labels(scores[min(tied)[0]], place, rules)
    if identical and (len(identical) == len(pairs) or rules.kwise_loss == "plackett-luce"):
        # A ranking cannot leave out one of its replies, so Plackett-Luce loses the row.
        raise UnusableRowError("identical_replies", f"two replies are {show(replies[min(identical)[0]][-1].content)}")
    comparisons = []
    for i, j in pairs:
        if (i, j) in identical or ((i, j) in tied and not half):
            continue
        first, second = (i, j) if scores[i] >= scores[j] else (j, i)
        comparisons.append(_comparison(first, second, 0.5 if (i, j) in tied else 1.0, row, rules.reading))
    if not comparisons:
        raise UnusableRowError("no_comparison", f"{len(replies)} replies with scores {show(list(scores))}")
    strict = not tied and not identical
    preference = Preference(
        id=place,
        source=rules.source,
        prompt=prompt,
        replies=tuple(replies),
        comparisons=tuple(comparisons),
        ranking=tuple(sorted(range(len(replies)), key=lambda k: -scores[k])) if strict else None,
    )
    return ParsedRow(preference=preference, skipped_ties=0 if half else len(tied), skipped_identical=len(identical))


def _half_labels(score: float, place: str, rules: Rules) -> bool:
    """Whether replies of equal score are compared, with label 0.5, instead of not at all.

    Raises DataError or UnusableRowError if `--ties` or the loss does not allow ties.
    """
    ties, ranked = rules.reading.ties, rules.kwise_loss == "plackett-luce"
    what = f"two replies have the same score {score:g}"
    if ties == "error":
        raise DataError(f"{place}: {what}, which --ties error forbids. Use --ties skip or half, or fix the row.")
    if ranked and ties != "skip":
        raise DataError(
            f"{place}: {what}, and Plackett-Luce needs a strict ranking. "
            f"Drop such rows with --ties skip, or compare pairs with --kwise-loss pairs."
        )
    if ranked:
        raise UnusableRowError("tied_ranking", what)
    return ties == "half"


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
