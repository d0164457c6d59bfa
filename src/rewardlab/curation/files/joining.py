"""Make one row of those that judge the same replies, or replies to the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from rewardlab.core.types import Comparison, Conversation, Preference

Join = Literal["pairs", "prompts"]
Named = tuple[Preference, str, str]
"""A preference with its id and its source."""
Key = tuple[str, Conversation, frozenset[Conversation], object]


@dataclass(kw_only=True)
class JoinCounts:
    """Counts of a join."""

    rows: int = 0
    """Before."""
    joined_rows: int = 0
    """After."""
    largest: int = 0
    """The most replies of a row after it."""
    rankings: int = 0
    """Rows with a ranking of three replies or more, which stay as they are."""

    def add(self, later: JoinCounts) -> None:
        """Add the counts of another dataset."""
        self.rows += later.rows
        self.joined_rows += later.joined_rows
        self.largest = max(self.largest, later.largest)
        self.rankings += later.rankings

    def as_dict(self) -> dict[str, int]:
        """Return the counts as a JSON mapping."""
        return dict(vars(self))


class Joiner:
    """Takes preferences, and gives them back joined, each at the place of the first.

    Texts must be equal to the letter, and sources too. All preferences are kept in memory.
    """

    def __init__(self, by: Join) -> None:
        self.counts = JoinCounts()
        self._by = by
        self._open: dict[Key, _Growing] = {}

    def add(self, named: Named) -> None:
        """Take a preference."""
        preference, _, source = named
        self.counts.rows += 1
        replies = frozenset(preference.replies) if self._by == "pairs" else frozenset()
        # A ranking is one judgement of all replies of its row. That of two is no more than their comparison.
        is_ranked = preference.ranking is not None and len(preference.replies) > 2
        self.counts.rankings += is_ranked
        alone = self.counts.rows if is_ranked else None
        key = (source, preference.prompt, replies, alone)
        growing = self._open.get(key)
        if growing is None:
            self._open[key] = _Growing(named)
        else:
            growing.take(preference)

    def joined(self) -> Iterator[Named]:
        """Yield the joined preferences."""
        for growing in self._open.values():
            whole = growing.whole()
            self.counts.joined_rows += 1
            self.counts.largest = max(self.counts.largest, len(whole.replies))
            yield whole, growing.row_id, growing.source


class _Growing:
    """A preference that takes up others."""

    def __init__(self, first: Named) -> None:
        self._first, self.row_id, self.source = first
        self._places: dict[Conversation, int] = {}
        self._comparisons: list[Comparison] = []
        self._taken = 0
        self.take(self._first)

    def take(self, other: Preference) -> None:
        """Add the replies of another preference that are new, and all of its judgements."""
        self._taken += 1
        places = [self._places.setdefault(reply, len(self._places)) for reply in other.replies]
        moved = (replace(one, first=places[one.first], second=places[one.second]) for one in other.comparisons)
        # Equal replies of one row are one reply now, and what was judged of each of them the same judgement.
        self._comparisons += dict.fromkeys(moved)

    def whole(self) -> Preference:
        """Return the preference with all that it took up."""
        if self._taken == 1:
            return self._first
        return replace(self._first, replies=tuple(self._places), comparisons=tuple(self._numbered()), ranking=None)

    def _numbered(self) -> Iterator[Comparison]:
        """Yield the judgements; where several are of the same two replies, those without an annotator are numbered."""
        pairs = [frozenset((one.first, one.second)) for one in self._comparisons]
        often = Counter(pairs)
        names = {one.annotator for one in self._comparisons}
        free = {pair: (name for name in map(str, count(1)) if name not in names) for pair in often}
        for pair, one in zip(pairs, self._comparisons, strict=True):
            yield replace(one, annotator=next(free[pair])) if often[pair] > 1 and one.annotator is None else one
