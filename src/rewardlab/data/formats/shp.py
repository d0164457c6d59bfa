"""Stanford Human Preferences: comments on a post, and which of two got more votes.

`labels` is 1 where A is preferred; `score_A` and `score_B` are votes for less votes against plus 1, and `score_ratio`
is the larger of them divided by the other, at least 1 (https://huggingface.co/datasets/stanfordnlp/SHP). Not every two
comments of a post are compared: the preferred one must not be the older of them, since older comments get more votes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rewardlab.core.files import to_float
from rewardlab.data.formats.judged import read_judged
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules, make_pair, seeded_generator
from rewardlab.data.rows import Row, UnusableRowError, read_number, read_prompt, read_reply, show

COLUMNS = ("history", "human_ref_A", "human_ref_B", "labels")


def _read_shp(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read one judgement as a pair. `score_ratio` becomes the strength, the share of votes of the preferred reply."""
    prompt = read_prompt(row["history"], bare=rules.bare)
    names = _preferred_first(row)
    after = rules.before_reply(row["history"])
    preferred, other = (read_reply(row[name], prompt, after=after) for name in names)
    ratio = _ratio(row)
    _require_ratio(ratio, rules)
    judged = {**row, "label": None, "labels": None, "strength": None if ratio is None else ratio / (1 + ratio)}
    parsed = make_pair(prompt, (preferred, other), judged, place, rules)
    return replace(parsed, order=(0, 1) if names == (COLUMNS[1], COLUMNS[2]) else (1, 0))


def draw_of_post(rows: Sequence[Row], place: str, rules: Rules) -> set[int]:
    """Return which judgements of a post `--max-per-post` keeps, drawn with the seed among those that the filter leaves.

    `place` is that of the first row. Rows that cannot be used are not counted: reading drops them.
    """
    usable = [number for number, row in enumerate(rows) if passes_filter(row, rules)]
    most = rules.reading.max_per_post
    if most is None or len(usable) <= most:
        return set(usable)
    drawn = seeded_generator(rules.seed, f"judgements of {place}").choice(len(usable), size=most, replace=False)
    return {usable[int(index)] for index in drawn}


def passes_filter(row: Row, rules: Rules) -> bool:
    """Return whether a judgement can be used and `--min-score-ratio` keeps it."""
    try:
        _require_ratio(_ratio(row), rules)
    except UnusableRowError:
        return False
    return True


def _require_ratio(ratio: float | None, rules: Rules) -> None:
    """Raise UnusableRowError for a row that `--min-score-ratio` leaves out, or that does not say its ratio."""
    least = rules.reading.min_score_ratio
    if least is None:
        return
    if ratio is None:
        raise UnusableRowError("missing_field", "no 'score_ratio', and no votes, which --min-score-ratio needs")
    if ratio < least:
        raise UnusableRowError("low_score_ratio", f"{ratio:g} times the votes of the other, wanted {least:g}")


def _join_post(rows: Sequence[Row], place: str, rules: Rules) -> Row:
    """Return the judgements of one post as a row of judged replies, with every comment once.

    Raises UnusableRowError if a row cannot be used, and if the flags leave no judgement.
    """
    first = rows[0]
    if any(row["history"] != first["history"] for row in rows):
        raise UnusableRowError("prompt_differs", f"post {show(first.get('post_id'))} has two texts")
    kept = draw_of_post(rows, place, rules)
    skipped: Counter[str] = Counter()
    replies: dict[tuple[str, bool], int] = {}
    texts: list[str] = []
    comparisons = []
    for number, row in enumerate(rows):
        preferred, other = (_comment(row[name]) for name in _preferred_first(row))
        ratio = _ratio(row)
        try:
            _require_ratio(ratio, rules)
        except UnusableRowError as unusable:
            if unusable.cause != "low_score_ratio":
                raise
            skipped[unusable.cause] += 1
            continue
        if number not in kept:
            skipped["over_post_cap"] += 1
            continue
        ends = []
        # A comment compared with itself has two places, so that the judgement is counted as one of identical replies.
        for text, is_again in ((preferred, False), (other, preferred.strip() == other.strip())):
            ends.append(replies.setdefault((text.strip(), is_again), len(replies)))
            texts += [text] if len(replies) > len(texts) else []
        margin = {name: row.get(name) for name in (rules.reading.margin_column,) if name is not None}
        strength = None if ratio is None else ratio / (1 + ratio)
        comparisons.append({"first": ends[0], "second": ends[1], "strength": strength, **margin})
    if not comparisons:
        cause = skipped.most_common(1)[0][0]
        raise UnusableRowError(cause, f"none of {len(rows)} judgements of the post is left")
    return {"prompt": first["history"], "replies": texts, "comparisons": comparisons, "skipped": skipped}


def _read_post(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read what `_join_post` made of a post."""
    parsed = read_judged(row, place, rules)
    skipped = row["skipped"]
    assert isinstance(skipped, Counter)
    return replace(parsed, skipped=dict(skipped), order=None)


def _preferred_first(row: Row) -> tuple[str, str]:
    preferred_a = read_number(row, "labels", "bad_label")
    if preferred_a not in (0.0, 1.0):
        raise UnusableRowError("bad_label", f"labels is {preferred_a}, wanted 1 (A is preferred) or 0 (B is)")
    return ("human_ref_A", "human_ref_B") if preferred_a else ("human_ref_B", "human_ref_A")


def _ratio(row: Row) -> float | None:
    """Return how many times the votes of the other the preferred reply has; without `score_ratio`, from the votes.

    Votes that contradict the label, or are not positive, give no ratio.
    """
    names = _preferred_first(row)
    ratio = read_number(row, "score_ratio", "bad_strength", low=1.0)
    if ratio is not None:
        return ratio
    preferred, other = (to_float(row.get(f"score_{name[-1]}")) for name in names)
    computed = preferred / other if other > 0 else math.nan
    return computed if math.isfinite(computed) and computed >= 1 else None


def _comment(value: object) -> str:
    if not isinstance(value, str):
        raise UnusableRowError("reply_not_text", f"got {show(value)}, wanted text")
    return value


SHP = Schema(name="SHP", needed=COLUMNS, read=_read_shp, own_strength=True)
SHP_BY_POST = Schema(
    name="SHP, the judgements of a post together",
    needed=COLUMNS,
    read=_read_post,
    group_by=("post_id", "history"),
    join=_join_post,
    unit="post",
    own_strength=True,
)
