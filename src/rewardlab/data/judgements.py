"""The judgements in a row (pairs, scores, rankings, single comparisons) as the comparisons of a preference."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Final

import numpy as np

from rewardlab.core.errors import DataError
from rewardlab.core.files import sha256_text, to_float
from rewardlab.core.types import Comparison, Conversation, Preference
from rewardlab.data.config import Control, ReadingConfig
from rewardlab.data.rows import (
    MAX_REPLIES,
    Row,
    UnusableRowError,
    is_absent,
    read_integers,
    read_name,
    read_number,
    show,
    text_key,
)

LARGEST: Final = 1e15
"""Largest strength, margin or weight: in float32, sums of larger ones would soon be infinite."""
SMALLEST: Final = 1e-30
"""Smallest weight: below it, float32 divides by sums that have lost their digits."""
SCORES: Final = (
    *(("score_chosen", "score_rejected"), ("chosen_score", "rejected_score")),
    *(("chosen_rating", "rejected_rating"), ("rating_chosen", "rating_rejected")),
    *(("chosen-rating", "rejected-rating"), ("chosen_avg_rating", "rejected_avg_rating")),
)
"""What public pairs call the scores of their sides; the first two that a row has are read."""
MAX_VOTES_TEXT = 10_000
"""Characters of a text that is looked at for labels of annotators."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Everything that the result of reading a row depends on, besides the row."""

    source: str
    """Name of the dataset, for metrics."""
    reading: ReadingConfig
    seed: int
    kwise_loss: str = "pairs"
    """`pairs` or `plackett-luce`; the latter needs strict rankings."""
    bare: bool = False
    """Whether texts are taken as they are, without splitting transcripts into turns."""
    control: Control | None = None
    """What is changed on purpose in the preferences that are read; None for nothing."""

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
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Cause -> judgements of a kept row (of several rows, where these make one preference) that flags left out."""
    order: tuple[int, ...] | None = None
    """The place in its row of each reply; None where the format names the better reply or joins several rows, so that
    places say nothing."""
    second_preferred: int = 0
    """Comparisons written in the row whose label is below ½."""
    left_out: tuple[tuple[str, str], ...] = ()
    """(cause, detail) of each reply that is left out, where the others of the row are enough to be compared."""


def seeded_generator(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends on both arguments, so that draws for datasets and rows are independent."""
    return np.random.default_rng(int(sha256_text(f"{seed}\x1f{name}")[:32], 16))


# --- judgements ----------------------------------------------------------------------------------------------


def make_pair(
    prompt: Conversation, replies: tuple[Conversation, Conversation], row: Row, place: str, rules: Rules
) -> ParsedRow:
    """Return a preference of two replies, of which the first is preferred with the probability in `label`.

    Raises UnusableRowError for equal replies, for a label, strength or margin that cannot be used, and for a label or
    labels of several annotators in the column `labels`, which is not read here.
    """
    if text_key(replies[0]) == text_key(replies[1]):
        raise UnusableRowError("identical_replies", f"both are {show(replies[0][-1].content)}")
    if _holds_votes(row.get("labels")):
        raise UnusableRowError(
            "bad_label",
            f"labels is {show(row['labels'])}, and the first row has no labels by annotators, so none are read; put a "
            f"row that has them first, as a list or an object",
        )
    if is_absent(row.get("label")) and _is_label(row.get("labels")):
        raise UnusableRowError(
            "bad_label",
            f"labels is {show(row['labels'])}, and there is no label; if it is the label, use --label-column labels "
            f"(words with --map-label), and rename it if it is not",
        )
    label = read_number(row, "label", "bad_label", high=1.0)
    row = _with_difference(row, rules.reading, label=1.0 if label is None else label)
    comparison = make_comparison(0, 1, 1.0 if label is None else label, row, rules.reading)
    if isinstance(who := row.get("annotator"), (str, int)) and not is_absent(who):
        comparison = replace(comparison, annotator=read_name(who))
    ranking = {1.0: (0, 1), 0.0: (1, 0)}.get(comparison.label)
    preference = Preference(
        id=place, source=rules.source, prompt=prompt, replies=replies, comparisons=(comparison,), ranking=ranking
    )
    return ParsedRow(preference=preference, label=label)


def _with_difference(row: Row, reading: ReadingConfig, *, label: float) -> Row:
    """Return a row without a strength, but with a score of each side, with their difference as the strength.

    It is taken towards the side that the label prefers; of a tie, which prefers none, its size is taken. Scores that
    contradict the choice give no strength, and are an error of the row only where a strength is asked for.
    """
    names = next((pair for pair in SCORES if not any(is_absent(row.get(name)) for name in pair)), None)
    if names is None or not is_absent(row.get("strength")):
        return row
    chosen, rejected = (row[name] for name in names)
    difference = to_float(chosen) - to_float(rejected)
    if label == 0.5:
        difference = abs(difference)
    elif label < 0.5:
        difference = -difference
    fits = 0 <= difference <= LARGEST
    if not fits and reading.strength_as != "none":
        raise UnusableRowError(
            "bad_strength", f"the scores of chosen and rejected are {show(chosen)} and {show(rejected)}"
        )
    return {**row, "strength": difference if fits else None}


def _holds_votes(labels: object) -> bool:
    """Return whether a value holds labels of annotators, also as text; words alone, such as tags, are none."""
    if isinstance(labels, str) and labels.startswith(("[", "{")) and len(labels) <= MAX_VOTES_TEXT:
        text = labels
        for parse in (json.loads, ast.literal_eval):  # as CSV files have them, or tables of pandas made CSV
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                labels = parse(text)
                break
    if isinstance(labels, Mapping):
        labels = list(labels.values())
    if not isinstance(labels, (list, tuple)):
        return False
    return any(isinstance(said, (int, float)) for said in labels)


def _is_label(value: object) -> bool:
    """Return whether a value is one label: a number from 0 to 1, or true or false, also as text."""
    words = value.strip().lower() if isinstance(value, str) else value
    return words in ("true", "false") or isinstance(value, bool) or 0 <= to_float(value) <= 1


def make_comparison(
    first: int, second: int, label: float, row: Row, reading: ReadingConfig, *, weightless: bool = False
) -> Comparison:
    """Return a judgement with the row's strength and margin used as the flags say. A tie has no margin.

    Raises UnusableRowError for a strength or margin that is missing, not a number, or out of its range, and for a
    strength of 0 as weight unless `weightless` comparisons may be.
    """
    strength_as = reading.strength_as
    low, high = (0.5, 1.0) if strength_as == "soft" else (0.0, LARGEST)
    strength = read_number(row, "strength", "bad_strength", low=low, high=high)
    if strength is None and strength_as != "none":
        raise UnusableRowError("missing_strength", f"no strength for --strength-as {strength_as}")
    weight = strength if strength_as == "weight" and strength is not None else 1.0
    if weight < SMALLEST:
        if not weightless:
            said = f"a strength of {strength:g} with --strength-as weight has no effect on training"
            raise UnusableRowError("zero_weight", said)
        weight = 0.0
    margin = None
    if reading.margin_column:
        margin = read_number(row, reading.margin_column, "bad_margin", high=LARGEST)
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
        weight=weight,
        margin=margin if margin is not None and label != 0.5 else 0.0,
        strength=strength,
    )


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The judgement of one annotator about two replies."""

    label: float
    """Probability that the first is preferred: 1, 0, or 0.5 for a tie."""
    strength: float | None = None
    annotator: str | None = None


def judge_pair(
    prompt: Conversation,
    replies: tuple[Conversation, Conversation],
    votes: Sequence[Vote],
    row: Row,
    place: str,
    rules: Rules,
    *,
    is_named: bool = False,
) -> ParsedRow:
    """Return a preference of two replies with a comparison a vote. None weighs less for there being others: training
    counts each prompt once (`data.groups.weigh`), or each vote.

    A single vote puts the preferred reply first, unless the row names it. `is_named` says that it does, whatever the
    votes are: the named one stays first, as scores from elsewhere number it, and the places of the two carry no
    information. With `--strength-as weight`, ties that have a
    strength would have weight 0 and are left out.

    Raises UnusableRowError for equal replies, and for strengths and margins that cannot be used.
    """
    if text_key(replies[0]) == text_key(replies[1]):
        raise UnusableRowError("identical_replies", f"both are {show(replies[0][-1].content)}")
    order = (0, 1)
    if len(votes) == 1 and votes[0].label < 0.5 and not is_named:
        replies, order = (replies[1], replies[0]), (1, 0)
        votes = [replace(votes[0], label=1 - votes[0].label)]
    weightless = rules.reading.strength_as == "weight"
    counted = [vote for vote in votes if not (weightless and vote.label == 0.5 and vote.strength == 0)]
    if not counted:
        raise UnusableRowError("zero_weight", "every vote is a tie, which --strength-as weight gives no weight")
    comparisons = []
    for vote in counted:
        first, label = (0, vote.label) if vote.label >= 0.5 else (1, 1 - vote.label)
        made = make_comparison(first, 1 - first, label, {**row, "strength": vote.strength}, rules.reading)
        comparisons.append(replace(made, annotator=vote.annotator))
    sure = {(one.first, one.second) for one in comparisons if one.label == 1.0}
    unanimous = len(sure) == 1 and all(one.label == 1.0 for one in comparisons)
    preference = Preference(
        id=place,
        source=rules.source,
        prompt=prompt,
        replies=replies,
        comparisons=tuple(comparisons),
        ranking=next(iter(sure)) if unanimous else None,
    )
    return ParsedRow(preference=preference, order=None if is_named else order)


def read_scores(row: Row, num_replies: int) -> list[float | None]:
    """Return a score for each reply, from `scores` or counted down from the best of `ranking`; None for one that has
    none, as null or NaN.

    Raises UnusableRowError if both are missing, if one is not as long as the replies, or if they contradict each other.
    """
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
    numbers = [None if is_unrated(score) else to_float(score) for score in scores]
    if not all(number is None or math.isfinite(number) for number in numbers):
        raise UnusableRowError("bad_scores", f"scores is {show(scores)}, wanted finite numbers")
    ordered = [] if order is None else [number for reply in order if (number := numbers[reply]) is not None]
    if any(better < worse for better, worse in pairwise(ordered)):
        raise UnusableRowError("bad_scores", f"ranking {show(ranking)} contradicts scores {show(scores)}")
    return numbers


def is_unrated(score: object) -> bool:
    """Return whether a score or a rating says nothing: null, an empty cell, or NaN, as tables write that."""
    return is_absent(score) or (isinstance(score, float) and math.isnan(score))


def require_two(replies: Collection[object], left_out: Mapping[int, UnusableRowError]) -> None:
    """Raise the first of the errors for which replies of a row are left out, if fewer than two others are left."""
    if left_out and len(replies) < 2:
        raise left_out[min(left_out)]


def reasons(left_out: Mapping[int, UnusableRowError]) -> tuple[tuple[str, str], ...]:
    """Return why replies of a row are left out as `ParsedRow.left_out` has it, with their places among all replies.

    Those that are kept are numbered anew, so a place alone could be taken for one of theirs.
    """
    return tuple(
        (left_out[number].cause, f"reply {number} of all, counted from 0: {left_out[number].detail}")
        for number in sorted(left_out)
    )


def draw_replies(num_replies: int, place: str, rules: Rules) -> list[int]:
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


def compare_all(
    replies: Sequence[Conversation],
    scores: Sequence[float],
    prompt: Conversation,
    row: Row,
    place: str,
    rules: Rules,
    *,
    by_difference: bool = False,
) -> ParsedRow:
    """Return a preference with all comparisons that the scores of K replies decide, the better reply first.

    With `by_difference` the strength of a comparison is the difference of the scores. Ties then weigh nothing under
    `--strength-as weight`, and are left out.

    Raises UnusableRowError if all scores tie, if replies are the same text, and for a strength that cannot be used.
    """
    texts = [text_key(reply) for reply in replies]
    pairs = list(combinations(range(len(replies)), 2))
    identical = {pair for pair in pairs if texts[pair[0]] == texts[pair[1]]}
    tied = {pair for pair in pairs if scores[pair[0]] == scores[pair[1]]} - identical
    half = bool(tied) and _half_labels(scores[min(tied)[0]], place, rules)
    half = half and not (by_difference and rules.reading.strength_as == "weight")
    if identical and (len(identical) == len(pairs) or rules.kwise_loss == "plackett-luce"):
        # A ranking cannot leave out one of its replies, so Plackett-Luce loses the row.
        raise UnusableRowError("identical_replies", f"two replies are {show(replies[min(identical)[0]][-1].content)}")
    comparisons = []
    for i, j in pairs:
        if (i, j) in identical or ((i, j) in tied and not half):
            continue
        first, second = (i, j) if scores[i] >= scores[j] else (j, i)
        judged = {**row, "strength": scores[first] - scores[second]} if by_difference else row
        comparisons.append(make_comparison(first, second, 0.5 if (i, j) in tied else 1.0, judged, rules.reading))
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
    return ParsedRow(
        preference=preference,
        skipped_ties=0 if half else len(tied),
        skipped_identical=len(identical),
        order=tuple(range(len(replies))),
    )


def _half_labels(score: float, place: str, rules: Rules) -> bool:
    """Return whether replies of equal score are compared, with label 0.5, instead of not at all.

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
