"""A row with gold scores as preferences: which replies can be used, which are compared, and what is left out, by cause.

The label of a pair is 1, or with `soft_tau` σ((r1 − r2)/τ), the model of Bradley and Terry (1952) at the temperature τ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, Conversation, Message, Preference
from rewardlab.data.judgements import seeded_generator
from rewardlab.data.rows import MAX_REPLIES
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.files.rows import GoldRow, is_encodable

REPLY_CAUSES: Final = {
    "unusable_prompt": "answer a prompt without text, or with half a surrogate pair in it",
    "missing_reply": "could not be sampled",
    "missing_score": "have no gold score",
    "empty": "have no text",
    "bad_unicode": "have half a surrogate pair, which no tokenizer can read",
    "cut": "ended at the token limit",
    "identical": "repeat an earlier reply to the prompt",
}
"""Why a reply is not compared: cause -> meaning. A reply with several causes counts for the first."""
PAIR_CAUSES: Final = {"tie": "have equal scores", "small_margin": "differ by less than the least margin"}
"""Why two replies give no comparison: cause -> meaning."""


@dataclass(kw_only=True)
class Counts:
    """What became of rows, replies and pairs. Each is the sum of what is used and what is left out."""

    rows: int = 0
    rows_of_one_id: int = 0
    """Rows with the id of an earlier row."""
    rows_used: int = 0
    rows_without_two: int = 0
    """Rows with fewer than two replies that can be compared."""
    rows_without_pair: int = 0
    """Rows with two or more such replies, but no pair that is kept."""
    replies: int = 0
    replies_used: int = 0
    """Replies that can be compared."""
    replies_left_out: Counter[str] = field(default_factory=Counter)
    """Cause -> replies, see `REPLY_CAUSES`."""
    pairs: int = 0
    """Pairs that were looked at."""
    pairs_used: int = 0
    pairs_left_out: Counter[str] = field(default_factory=Counter)
    """Cause -> pairs, see `PAIR_CAUSES`."""
    largest_disagreement: float = 0.0
    """Largest difference between the gold scores of identical replies to a prompt; 0 for a model that gives equal texts
    equal scores."""

    def as_dict(self) -> dict[str, object]:
        """Return the counts as a JSON mapping."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One preference, and the name of its row."""

    id: str
    preference: Preference

    def pairs(self) -> Iterator[tuple[list[dict[str, str]], list[dict[str, str]]]]:
        """Yield (chosen, rejected) of each comparison, as whole conversations."""
        for one in self.preference.comparisons:
            yield self._whole(one.first), self._whole(one.second)

    def _whole(self, reply: int) -> list[dict[str, str]]:
        return [turn.as_dict() for turn in (*self.preference.prompt, *self.preference.replies[reply])]


def judge(row: GoldRow, config: BuildConfig, counts: Counts) -> list[Judged]:
    """Return the preferences of a row, and count what it gives and what is left out.

    Replies keep the order in which they were sampled; a comparison names the better one first, with the difference of
    the gold scores as `strength`.

    Raises DataError for scores whose difference is not finite, and for more replies than one row may have.
    """
    assert row.gold is not None
    kept = _usable(row, config, counts)
    counts.rows += 1
    comparisons, ties = _compare(row, kept, config, counts)
    if not comparisons:
        counts.rows_without_two += len(kept) < 2
        counts.rows_without_pair += len(kept) >= 2
        return []
    counts.rows_used += 1
    source = row.extra.get("source")
    name = source if isinstance(source, str) and source else "gold"
    if config.rows_as == "kwise":
        return [_kwise(row, kept, comparisons, name, ranked=not ties and _says_all(config, len(kept), comparisons))]
    return [_pair(row, one, name) for one in comparisons]


def _usable(row: GoldRow, config: BuildConfig, counts: Counts) -> list[int]:
    """Return the replies that can be compared, and count the others by cause."""
    assert row.gold is not None
    is_cut = row.is_cut
    kept: list[int] = []
    first: dict[str, int] = {}
    is_asked = _is_asked(row)
    for number, (text, score) in enumerate(zip(row.responses, row.gold, strict=True)):
        counts.replies += 1
        cause = _cause(text, score, cut=config.drop_cut and is_cut[number]) if is_asked else "unusable_prompt"
        if cause is None:
            assert text is not None
            earlier = first.setdefault(text.strip(), number)
            cause = "identical" if earlier != number else None
            apart = abs(_difference(row, earlier, number))
            counts.largest_disagreement = max(counts.largest_disagreement, apart)
        if cause is None:
            kept.append(number)
        else:
            counts.replies_left_out[cause] += 1
    counts.replies_used += len(kept)
    return kept


def _is_asked(row: GoldRow) -> bool:
    """Return whether the prompt of a row can be trained on: it has text besides system turns, and can be encoded."""
    said = any(turn.content.strip() for turn in row.prompt if turn.role != "system")
    return said and all(is_encodable(turn.content) for turn in row.prompt)


def _cause(text: str | None, score: float | None, *, cut: bool) -> str | None:
    """Return why a reply cannot be compared, looking at it alone; None if it can."""
    if text is None:
        return "missing_reply"
    if score is None:
        return "missing_score"
    if not text.strip():
        return "empty"
    if not is_encodable(text):
        return "bad_unicode"
    return "cut" if cut else None


def _difference(row: GoldRow, first: int, second: int) -> float:
    """Return r_first − r_second. Raises DataError where it overflows."""
    assert row.gold is not None
    one, other = row.gold[first], row.gold[second]
    assert one is not None
    assert other is not None
    apart = one - other
    if not math.isfinite(apart):
        raise DataError(f"{row.where}: the gold scores {one:g} and {other:g} are too far apart to be subtracted.")
    return apart


def _compare(row: GoldRow, kept: Sequence[int], config: BuildConfig, counts: Counts) -> tuple[list[Comparison], int]:
    """Return comparisons of replies by their numbers in the row, the better one first, and how many ties there were."""
    comparisons = []
    ties = 0
    for i, j in _chosen(row, kept, config):
        counts.pairs += 1
        apart = _difference(row, i, j)
        if apart == 0 or abs(apart) < config.min_margin:
            ties += apart == 0
            counts.pairs_left_out["tie" if apart == 0 else "small_margin"] += 1
            continue
        first, second = (i, j) if apart > 0 else (j, i)
        label = 1.0 if config.soft_tau is None else soft_label(abs(apart), config.soft_tau)
        comparisons.append(Comparison(first=first, second=second, label=label, strength=abs(apart)))
    counts.pairs_used += len(comparisons)
    return comparisons, ties


def compared(row: GoldRow, config: BuildConfig) -> frozenset[tuple[int, int]]:
    """Return the pairs of replies that `judge` makes comparisons of, as numbers in the row, the lower one first."""
    counts = Counts()
    found, _ = _compare(row, _usable(row, config, counts), config, counts)
    return frozenset((min(one.first, one.second), max(one.first, one.second)) for one in found)


def soft_label(difference: float, tau: float) -> float:
    """Return σ(difference / τ), for a difference of at least 0."""
    return 1.0 / (1.0 + math.exp(-difference / tau))


def _chosen(row: GoldRow, kept: Sequence[int], config: BuildConfig) -> list[tuple[int, int]]:
    """Return the pairs to look at, each in the order of the row."""
    if len(kept) < 2:
        return []
    if config.pairs == "all":
        return list(combinations(kept, 2))
    if config.pairs == "random":
        draw = seeded_generator(config.seed, f"pair\x1f{row.key}\x1f{row.id}").choice(len(kept), 2, replace=False)
        i, j = sorted(int(place) for place in draw)
        return [(kept[i], kept[j])]
    assert row.gold is not None
    scores = {number: score for number, score in enumerate(row.gold) if score is not None}
    order = sorted(kept, key=lambda number: -scores[number])
    if config.pairs == "best-worst":
        return [(min(order[0], order[-1]), max(order[0], order[-1]))]
    return [(min(pair), max(pair)) for pair in pairwise(order)]


def _says_all(config: BuildConfig, num_replies: int, comparisons: Sequence[Comparison]) -> bool:
    """Return whether a ranking says the same as the comparisons: these are all pairs, and certain."""
    return config.soft_tau is None and len(comparisons) == num_replies * (num_replies - 1) // 2


def _pair(row: GoldRow, one: Comparison, source: str) -> Judged:
    numbers = sorted((one.first, one.second))
    name = row.id if len(row.responses) == 2 else f"{row.id}#{numbers[0]}-{numbers[1]}"
    return _judged(row, name, numbers, [one], source, None)


def _kwise(
    row: GoldRow, kept: Sequence[int], comparisons: Sequence[Comparison], source: str, *, ranked: bool
) -> Judged:
    if len(kept) > MAX_REPLIES:
        raise DataError(
            f"{row.where}: {len(kept)} replies are to be in one row, and training reads at most {MAX_REPLIES}. Take "
            f"fewer with --num-responses, or --rows-as pairs."
        )
    assert row.gold is not None
    scores = {number: score for number, score in enumerate(row.gold) if score is not None}
    order = sorted(kept, key=lambda number: -scores[number]) if ranked else None
    return _judged(row, row.id, kept, comparisons, source, order)


def _judged(
    row: GoldRow,
    name: str,
    numbers: Sequence[int],
    comparisons: Sequence[Comparison],
    source: str,
    order: Sequence[int] | None,
) -> Judged:
    """Return a preference over the replies of these numbers."""
    place = {number: index for index, number in enumerate(numbers)}
    settled = tuple(
        Comparison(first=place[one.first], second=place[one.second], label=one.label, strength=one.strength)
        for one in comparisons
    )
    preference = Preference(
        id=row.where,
        source=source,
        prompt=row.prompt,
        replies=tuple(reply_of(row, number) for number in numbers),
        comparisons=settled,
        ranking=None if order is None else tuple(place[number] for number in order),
    )
    return Judged(id=name, preference=preference)


def reply_of(row: GoldRow, number: int) -> Conversation:
    """Return a reply of a row as turns."""
    text: Any = row.responses[number]
    return (Message("assistant", text),)
