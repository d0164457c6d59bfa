"""Parts of stored data: which preferences belong to training, evaluation or test, and their groups as a sequence.

A part is an array of numbers into one or several stores; nothing is copied and no row is an object in memory. Groups
are built when they are asked for, and what is wanted of all of them (token counts, prompts) is read from columns.

Legend: P preferences, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import TokenGroup
from rewardlab.data.roots import RULES, Keys, Numbers, Texts, find_roots
from rewardlab.data.store import TokenStore


class Part:
    """Preferences of one or several stores, kept or left out, in an order of their own."""

    def __init__(self, stores: Sequence[TokenStore], numbers_P: Numbers) -> None:
        """`numbers_P` counts through the preferences of all stores, one after the other."""
        self.stores = tuple(stores)
        self.numbers_P = numbers_P

    @classmethod
    def join(cls, parts: Sequence[tuple[TokenStore, Numbers]]) -> Part:
        """Preferences of each store, given by their numbers in it."""
        stores = [store for store, _ in parts]
        starts = _starts([store.num_preferences for store in stores])
        numbers = [start + numbers for start, (_, numbers) in zip(starts, parts, strict=False)]
        return cls(stores, np.concatenate([np.empty(0, np.int64), *numbers]))

    def __len__(self) -> int:
        return len(self.numbers_P)

    def take(self, positions: npt.NDArray[Any]) -> Part:
        """Those at these positions (or where a mask is true)."""
        return Part(self.stores, self.numbers_P[positions])

    def prompt_keys(self) -> Keys:
        """[P] prompt keys as numbers."""
        return self._column("prompt_key")

    def texts(self) -> Texts:
        """What their prompts and replies say, as keys."""
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
        """[P] why each was left out (see `store.LEFT_OUT`), 0 for those kept."""
        return self._column("cause")

    def place(self, position: int) -> str:
        """Where a preference that was left out came from."""
        starts = _starts([store.num_preferences for store in self.stores])
        number = int(self.numbers_P[position])
        store = int(np.searchsorted(starts, number, side="right")) - 1
        return self.stores[store].place(number - int(starts[store]))

    def groups(self) -> Groups:
        """The groups of those kept, in the same order."""
        kept = np.concatenate([np.empty(0, bool), *(store.columns["cause"] == 0 for store in self.stores)])
        of_preference = np.cumsum(kept) - 1
        return Groups(self.stores, of_preference[self.numbers_P[kept[self.numbers_P]]])

    def _column(self, name: str) -> npt.NDArray[Any]:
        return self._all(name)[self.numbers_P]

    def _all(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([store.columns[name] for store in self.stores])


class Groups(Sequence[TokenGroup]):
    """TokenGroups of one or several stores, built at access."""

    def __init__(self, stores: Sequence[TokenStore], numbers_G: Numbers, *, by_prompt: bool = False) -> None:
        """`numbers_G` counts through the groups of all stores; `by_prompt` divides weights as `loader.weigh` does."""
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
        """Those at these positions (or where a mask is true)."""
        return Groups(self.stores, self.numbers_G[positions], by_prompt=self.by_prompt)

    def weighed(self) -> Groups:
        """The same, the weights of a group's comparisons divided by their number."""
        return Groups(self.stores, self.numbers_G, by_prompt=True)

    def prompt_keys(self) -> Keys:
        """[G] prompt keys as numbers."""
        return self._column(lambda store: store.columns["prompt_key"][store.columns["preference"]])

    def texts(self) -> Texts:
        """What the prompts and all replies of their preferences say, as keys."""
        starts = _starts([store.num_preferences for store in self.stores])
        preferences = [start + store.columns["preference"] for start, store in zip(starts, self.stores, strict=True)]
        return Part(self.stores, np.concatenate(preferences)[self.numbers_G]).texts()

    def num_replies(self) -> Numbers:
        """[G] K of each group."""
        return self._column(lambda store: np.diff(store.columns["reply_end"], prepend=0))

    def num_tokens(self) -> Numbers:
        """[G] tokens, the shared ones once."""
        return self._column(lambda store: np.diff(store.columns["token_end"], prepend=0))

    def num_unshared_tokens(self) -> Numbers:
        """[G] tokens, the shared ones once a reply."""
        return self.num_tokens() + self.column("shared").astype(np.int64) * (self.num_replies() - 1)

    def longest(self) -> Numbers:
        """[G] tokens of each group's longest conversation."""
        return self.column("longest").astype(np.int64)

    def column(self, name: str) -> npt.NDArray[Any]:
        """[G] a column of the stores that has one entry a group."""
        return self._column(lambda store: store.columns[name])

    def _column(self, of: Any) -> npt.NDArray[Any]:
        return np.concatenate([of(store) for store in self.stores])[self.numbers_G]


def num_replies(groups: Sequence[TokenGroup]) -> Numbers:
    """[G] K of each group; stored groups are not built for it."""
    if isinstance(groups, Groups):
        return groups.num_replies()
    return np.array([group.num_replies for group in groups], dtype=np.int64)


def roots_of(groups: Sequence[TokenGroup]) -> tuple[Numbers, str]:
    """([G] the same number for groups that folds keep together, one of `roots.RULES`; see `roots.find_roots`).

    Groups in memory do not hold what was said, so only those of one prompt are kept together.
    """
    if isinstance(groups, Groups):
        return find_roots(groups.texts())
    return np.unique([group.prompt_key for group in groups], return_inverse=True)[1], RULES[-1]


def origin(groups: Sequence[TokenGroup]) -> str:
    """The datasets that groups are of, and where their tokens lie; nothing of them is read to say it."""
    if not isinstance(groups, Groups):
        return "data in memory"
    files = [(store.source, getattr(store.columns["tokens"].base, "filename", None)) for store in groups.stores]
    return ", ".join(f"{name} in {Path(file).parent if file else 'memory'}" for name, file in files)


def _starts(counts: Sequence[int]) -> Numbers:
    return np.cumsum([0, *counts[:-1]], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run trains on and what it watches."""

    train: Sequence[TokenGroup]
    eval: Sequence[TokenGroup] = ()
    train_eval: Sequence[TokenGroup] = ()
    """A fixed part of the training data, evaluated like `eval`."""
