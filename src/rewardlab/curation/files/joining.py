"""Make one row of those that judge the same replies, or replies to the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Literal

import numpy as np

from rewardlab.core.files import to_json
from rewardlab.core.types import Comparison, Conversation, Preference
from rewardlab.curation.files.forms import as_own_row
from rewardlab.data.rows import MAX_CHARACTERS, MAX_REPLIES

Join = Literal["pairs", "prompts"]
Named = tuple[Preference, str, str]
"""A preference with its id and its source."""
Key = tuple[str, Conversation, frozenset[Conversation], object]
MORE_CHARACTERS: Final = 32
"""Characters that a judgement may have more in a joined row than in its own: longer numbers of replies, and a number in
place of an annotator; in Parquet, the names of fields that it does not have."""


@dataclass(kw_only=True)
class JoinCounts:
    """Counts of a join."""

    rows: int = 0
    """Before."""
    joined_rows: int = 0
    """After."""
    largest: int = 0
    """The most replies of a row after it."""
    judged_again: int = 0
    """Pairs of replies with several judgements after it."""
    agreeing: int = 0
    """Those of which all judgements prefer the same reply, as copies of a row do."""
    merged: int = 0
    """Judgements that were left out, since they said the same of equal replies of one row."""
    rankings: int = 0
    """Rows with a ranking of three replies or more, which stay as they are."""
    full: int = 0
    """Times that a joined row had no room for another one within the limits of a row, so that a new one was begun."""

    def add(self, later: JoinCounts) -> None:
        """Add the counts of another dataset."""
        self.rows += later.rows
        self.joined_rows += later.joined_rows
        self.largest = max(self.largest, later.largest)
        self.judged_again += later.judged_again
        self.agreeing += later.agreeing
        self.merged += later.merged
        self.rankings += later.rankings
        self.full += later.full

    def as_dict(self) -> dict[str, int]:
        """Return the counts as a JSON mapping."""
        return dict(vars(self))


class Joiner:
    """Takes preferences, and gives them back joined, each at the place of the first.

    Texts must be equal to the letter, and sources too. A joined row stays within `MAX_REPLIES` and `MAX_CHARACTERS`,
    beyond which reading would drop it: what has no room in it begins another. All preferences are kept in memory.
    """

    def __init__(self, by: Join) -> None:
        self.counts = JoinCounts()
        self._by = by
        self._rows: list[_Growing] = []
        self._open: dict[Key, _Growing] = {}
        """For each key, the last of its rows, which takes up others."""

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
        if growing is not None and growing.has_room_for(preference):
            growing.take(preference)
            return
        self.counts.full += growing is not None
        self._open[key] = _Growing(named)
        self._rows.append(self._open[key])

    def joined(self) -> Iterator[Named]:
        """Yield the joined preferences."""
        for growing in self._rows:
            whole = growing.whole()
            self.counts.joined_rows += 1
            self.counts.merged += growing.merged if growing.is_joined else 0
            self.counts.largest = max(self.counts.largest, len(whole.replies))
            again = [leans for leans in _leans(whole.comparisons) if len(leans) > 1]
            self.counts.judged_again += len(again)
            self.counts.agreeing += sum(len(set(leans)) == 1 for leans in again)
            yield whole, growing.row_id, growing.source


def _leans(comparisons: Iterable[Comparison]) -> Iterable[list[float]]:
    """Return, for each pair of replies, which of the two its judgements prefer: 1 or −1, or 0 for neither."""
    of_pairs: dict[tuple[int, int], list[float]] = {}
    for one in comparisons:
        turned = 1 if one.first < one.second else -1
        pair = (min(one.first, one.second), max(one.first, one.second))
        of_pairs.setdefault(pair, []).append(turned * float(np.sign(one.label - 0.5)))
    return of_pairs.values()


class _Growing:
    """A preference that takes up others."""

    def __init__(self, first: Named) -> None:
        self._first, self.row_id, self.source = first
        self._places: dict[Conversation, int] = {}
        self._comparisons: list[Comparison] = []
        self._taken = 0
        self.merged = 0
        """Judgements of equal replies of a row that became one."""
        alone = replace(self._first, replies=(), comparisons=(), ranking=None)
        self._characters = len(to_json(as_own_row(alone, self.row_id, self.source), indent=None))
        """Of the row as it is written, or a few more."""
        self.take(self._first)

    def has_room_for(self, other: Preference) -> bool:
        """Return whether the row could still be read with another preference in it."""
        num_replies = len(self._places.keys() | set(other.replies))
        return num_replies <= MAX_REPLIES and self._characters + self._more_characters(other) <= MAX_CHARACTERS

    def _more_characters(self, other: Preference) -> int:
        """Return by how many characters another preference makes the row longer, at most."""
        new = tuple(reply for reply in dict.fromkeys(other.replies) if reply not in self._places)
        row = as_own_row(replace(other, replies=new), self.row_id, self.source)
        texts = (to_json(row[name], indent=None) for name in ("replies", "comparisons"))
        return sum(map(len, texts)) + MORE_CHARACTERS * len(other.comparisons)

    def take(self, other: Preference) -> None:
        """Add the replies of another preference that are new, and all of its judgements."""
        self._taken += 1
        self._characters += self._more_characters(other)
        places = [self._places.setdefault(reply, len(self._places)) for reply in other.replies]
        taken: dict[Comparison, tuple[int, int]] = {}
        for one in other.comparisons:
            own, moved = (one.first, one.second), replace(one, first=places[one.first], second=places[one.second])
            # Equal replies of one row are one reply now, and what was said of each of them is said once. The same
            # judgement twice of the same replies is that of two people.
            if taken.setdefault(moved, own) == own:
                self._comparisons.append(moved)
            else:
                self.merged += 1

    @property
    def is_joined(self) -> bool:
        """Whether it took up any."""
        return self._taken > 1

    def whole(self) -> Preference:
        """Return the preference with all that it took up."""
        if not self.is_joined:
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
