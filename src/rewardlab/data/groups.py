"""Parts of stored data: which preferences belong to training, evaluation or test, and their groups as a sequence.

A part is an array of indices into one or several stores: nothing is copied, and no row is an object in memory. Groups
are built when they are accessed. What is needed of all of them (token counts, prompts) is read from columns.

Legend: P preferences, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import TokenGroup
from rewardlab.data.splits import RULES, Keys, Numbers, Texts, find_roots
from rewardlab.data.store import TokenStore


class Part:
    """A selection of the preferences in one or several stores, with or without groups, in any order."""

    def __init__(self, stores: Sequence[TokenStore], numbers_P: Numbers) -> None:
        """`numbers_P` are indices into the preferences of all stores, one store after the other."""
        self.stores = tuple(stores)
        self.numbers_P = numbers_P

    @classmethod
    def join(cls, parts: Sequence[tuple[TokenStore, Numbers]]) -> Part:
        """Return the part with these preferences of each store, given by their indices in it."""
        stores = [store for store, _ in parts]
        starts = _starts([store.num_preferences for store in stores])
        numbers = [start + numbers for start, (_, numbers) in zip(starts, parts, strict=False)]
        return cls(stores, np.concatenate([np.empty(0, np.int64), *numbers]))

    def __len__(self) -> int:
        return len(self.numbers_P)

    def take(self, positions: npt.NDArray[Any]) -> Part:
        """Return the preferences at these positions, or where a mask is true."""
        return Part(self.stores, self.numbers_P[positions])

    def prompt_keys(self) -> Keys:
        """Return [P] prompt keys as integers."""
        return self._column("prompt_key")

    def texts(self) -> Texts:
        """Return the texts of their prompts and replies, as hashes."""
        # Replies are selected without a loop over rows: each row of the part is a range of the column of all replies.
        ends = [store.columns["said_end"] for store in self.stores]
        counts = np.concatenate([np.empty(0, np.int64), *(np.diff(end, prepend=0) for end in ends)])
        starts = (np.cumsum(counts) - counts)[self.numbers_P]
        counts = counts[self.numbers_P]
        owners_R = np.repeat(np.arange(len(self)), counts)
        firsts = np.cumsum(counts) - counts
        positions_R = np.arange(len(owners_R)) + (starts - firsts)[owners_R]
        return Texts(
            prompts_P=self.prompt_keys(),
            first_turns_P=self._column("first_turn"),
            replies_R=self._all("said")[positions_R],
            long_R=self._all("said_long")[positions_R],
            owners_R=owners_R,
        )

    def causes(self) -> npt.NDArray[np.uint16]:
        """Return [P] 1 + the index in `store.LEFT_OUT` of the cause for which each was left out, 0 for those kept."""
        return self._column("cause")

    def changed(self) -> npt.NDArray[np.bool_]:
        """Return [P] whether a control changed each."""
        return self._column("changed")

    def by_store(self) -> Iterator[tuple[TokenStore, Part]]:
        """Yield each store with the preferences of this part that are in it."""
        starts = _starts([store.num_preferences for store in self.stores])
        number_P = np.searchsorted(starts, self.numbers_P, side="right") - 1
        for number, store in enumerate(self.stores):
            yield store, self.take(number_P == number)

    def place(self, position: int) -> str:
        """Return where the preference at a position, which was left out, came from."""
        starts = _starts([store.num_preferences for store in self.stores])
        number = int(self.numbers_P[position])
        store = int(np.searchsorted(starts, number, side="right")) - 1
        return self.stores[store].place(number - int(starts[store]))

    def groups(self) -> Groups:
        """Return the groups of the preferences that have one, in the same order."""
        kept = np.concatenate([np.empty(0, bool), *(store.columns["cause"] == 0 for store in self.stores)])
        of_preference = np.cumsum(kept) - 1
        return Groups(self.stores, of_preference[self.numbers_P[kept[self.numbers_P]]])

    def _column(self, name: str) -> npt.NDArray[Any]:
        return self._all(name)[self.numbers_P]

    def _all(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([store.columns[name] for store in self.stores])


class Groups(Sequence[TokenGroup]):
    """A sequence of TokenGroups in one or several stores. Each is built at every access."""

    def __init__(self, stores: Sequence[TokenStore], numbers_G: Numbers, *, by_prompt: bool = False) -> None:
        """`numbers_G` are indices into the groups of all stores. `by_prompt` divides weights as `weigh` does."""
        self.stores = tuple(stores)
        self.numbers_G = numbers_G
        self.by_prompt = by_prompt
        self._starts = _starts([store.num_groups for store in stores])

    def __len__(self) -> int:
        return len(self.numbers_G)

    @overload
    def __getitem__(self, index: SupportsIndex) -> TokenGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Groups: ...
    def __getitem__(self, index: SupportsIndex | slice) -> TokenGroup | Groups:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        number = int(self.numbers_G[index.__index__()])
        store = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.stores[store].group(number - int(self._starts[store]), by_prompt=self.by_prompt)

    def __iter__(self) -> Iterator[TokenGroup]:
        return (self[index] for index in range(len(self)))

    def take(self, positions: npt.NDArray[Any]) -> Groups:
        """Return the groups at these positions, or where a mask is true."""
        return Groups(self.stores, self.numbers_G[positions], by_prompt=self.by_prompt)

    def weighed(self) -> Groups:
        """Return the same groups, with the weights of each group's comparisons divided by their number."""
        return Groups(self.stores, self.numbers_G, by_prompt=True)

    def prompt_keys(self) -> Keys:
        """Return [G] prompt keys as integers."""
        return self._column(lambda store: store.columns["prompt_key"][store.columns["preference"]])

    def texts(self) -> Texts:
        """Return the texts of their preferences (prompts and all replies), as hashes."""
        starts = _starts([store.num_preferences for store in self.stores])
        preferences = [start + store.columns["preference"] for start, store in zip(starts, self.stores, strict=True)]
        return Part(self.stores, np.concatenate(preferences)[self.numbers_G]).texts()

    def num_replies(self) -> Numbers:
        """Return [G] the number of replies of each group."""
        return self._column(lambda store: np.diff(store.columns["reply_end"], prepend=0))

    def num_comparisons(self) -> Numbers:
        """Return [G] the number of comparisons of each group."""
        return self._column(lambda store: np.diff(store.columns["comparison_end"], prepend=0))

    def num_tokens(self) -> Numbers:
        """Return [G] tokens of each group, with shared tokens counted once."""
        return self._column(lambda store: np.diff(store.columns["token_end"], prepend=0))

    def num_unshared_tokens(self) -> Numbers:
        """Return [G] tokens of each group, with shared tokens counted once for each reply."""
        return self.num_tokens() + self.column("shared").astype(np.int64) * (self.num_replies() - 1)

    def longest(self) -> Numbers:
        """Return [G] tokens of each group's longest conversation."""
        return self.column("longest").astype(np.int64)

    def prompt_tokens(self) -> Numbers:
        """Return [G] tokens before the reply, the fewest of each group's conversations."""

        def fewest(store: TokenStore) -> Numbers:
            ends = store.columns["reply_end"].astype(np.int64)
            tokens = store.columns["prompt_tokens"].astype(np.int64)
            return np.minimum.reduceat(tokens, np.append(0, ends[:-1])) if len(ends) else ends

        return self._column(fewest)

    def cut_alone(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return ([G] whether of more comparisons the preferred reply alone lost tokens to the limit, of its prompt or
        of its own, than the other one alone; [G] whether of fewer). Ties are left out."""

        def counts(store: TokenStore, *, of_preferred: bool) -> Numbers:
            columns = store.columns
            is_cut_R = (columns["truncated_tokens"] > 0) | (columns["truncated_reply_tokens"] > 0)
            group_C = np.repeat(np.arange(store.num_groups), np.diff(columns["comparison_end"], prepend=0))
            start_G = np.append(0, columns["reply_end"])[:-1]
            one_C, other_C = (is_cut_R[start_G[group_C] + columns[name]] for name in ("first", "second"))
            preferred_C = np.where(columns["label"] > 0.5, one_C, other_C)
            alone_C = (one_C != other_C) & (columns["label"] != 0.5) & (preferred_C == of_preferred)
            return np.bincount(group_C, weights=alone_C, minlength=store.num_groups).astype(np.int64)

        preferred_G, other_G = (self._column(partial(counts, of_preferred=side)) for side in (True, False))
        return preferred_G > other_G, preferred_G < other_G

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return [G] a column of the stores that has one entry for each group."""
        return self._column(lambda store: store.columns[name])

    def _column(self, of: Any) -> npt.NDArray[Any]:
        return np.concatenate([of(store) for store in self.stores])[self.numbers_G]


def num_replies(groups: Sequence[TokenGroup]) -> Numbers:
    """Return [G] the number of replies of each group, without building stored groups."""
    if isinstance(groups, Groups):
        return groups.num_replies()
    return np.array([group.num_replies for group in groups], dtype=np.int64)


def roots_of(groups: Sequence[TokenGroup]) -> tuple[Numbers, str]:
    """Return ([G] the root of each group, the rule used) as `roots.find_roots` does. Groups of one root share a fold.

    Groups in memory do not hold their texts, so only groups of one prompt are kept together.
    """
    if isinstance(groups, Groups):
        return find_roots(groups.texts())
    return prompt_numbers(groups), RULES[-1]


def prompt_numbers(groups: Sequence[TokenGroup]) -> Numbers:
    """Return [G] a number for each group that only those of the same prompt share, without building stored groups."""
    keys = groups.prompt_keys() if isinstance(groups, Groups) else [group.prompt_key for group in groups]
    return np.unique(keys, return_inverse=True)[1]


def origin(groups: Sequence[TokenGroup]) -> str:
    """Return a text that names the datasets of groups and where their tokens are stored, without reading any tokens."""
    if not isinstance(groups, Groups):
        return "data in memory"
    files = [(store.source, getattr(store.columns["tokens"].base, "filename", None)) for store in groups.stores]
    return ", ".join(f"{name} in {Path(file).parent if file else 'memory'}" for name, file in files)


def _starts(counts: Sequence[int]) -> Numbers:
    return np.cumsum([0, *counts[:-1]], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The groups that a run trains on, and those that it evaluates."""

    train: Sequence[TokenGroup]
    eval: Sequence[TokenGroup] = ()
    train_eval: Sequence[TokenGroup] = ()
    """A fixed part of the training data, evaluated like `eval`."""


def weigh(groups: Sequence[TokenGroup], *, by: str) -> Sequence[TokenGroup]:
    """Return groups whose weights count each prompt once (`by` = `prompt`) or each comparison once (`comparison`).

    For `prompt`, the weights of a group's comparisons are divided by their number.
    """
    if by == "comparison":
        return groups
    if isinstance(groups, Groups):
        return groups.weighed()
    return [
        replace(
            group,
            comparisons=tuple(
                replace(comparison, weight=comparison.weight / len(group.comparisons))
                for comparison in group.comparisons
            ),
        )
        for group in groups
    ]
