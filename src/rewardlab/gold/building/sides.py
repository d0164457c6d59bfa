"""Which rows are trained on and which are held out: no prompt is on both sides, as with `rewardlab data split`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Final

import numpy as np

from rewardlab.core.bars import bar
from rewardlab.core.types import Preference
from rewardlab.curation.files.grouping import assign, find_groups, look, take
from rewardlab.curation.files.reading import Numbers
from rewardlab.data.splits import count_shared
from rewardlab.gold.building.pairing import reply_of
from rewardlab.gold.files.rows import GoldRow, is_encodable

TRAIN: Final = "train"
TEST: Final = "test"
CHUNK: Final = 1024
"""Rows that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The side of each of R rows."""

    names: tuple[str, ...]
    side_R: Numbers
    """[R] index of the side."""
    prompts: Mapping[str, int]
    """Side -> different prompts."""
    groups: Mapping[str, int]
    """Side -> groups of rows that belong together."""
    rule: str
    """The rule by which rows belong together, see `data.splits.RULES`."""
    shared: Mapping[str, int]
    """What both sides have in common, by kind; empty for one side."""


def divide(rows: Iterable[GoldRow], *, test_fraction: float, near: float | str, seed: int) -> Sides:
    """Return the side of each row; rows with one prompt, near-duplicate prompts or shared distinctive replies share it.

    Raises DataError if nothing can be held out, or a side would be empty.
    """
    read = iter(bar(rows, title="reading prompts"))
    seen = [look(near != "none", [_preference(row) for row in chunk]) for chunk in _chunks(read)]
    found = find_groups(seen, near)
    shares = {TRAIN: 1 - test_fraction} | ({TEST: test_fraction} if test_fraction else {})
    names = tuple(shares)
    side_R = assign(found, shares, seed)
    masks = {name: side_R == number for number, name in enumerate(names)}
    shared: dict[str, int] = {}
    for one, other in combinations(names, 2):
        shared = count_shared(take(found.texts, masks[other]), take(found.texts, masks[one]))
        near_R = found.near_P
        shared["near_duplicate_prompts"] = len(np.intersect1d(near_R[masks[one]], near_R[masks[other]]))
        assert not shared["prompts"], shared
        assert not shared["near_duplicate_prompts"], shared
    return Sides(
        names=names,
        side_R=side_R,
        prompts={name: len(np.unique(found.texts.prompts_P[mask])) for name, mask in masks.items()},
        groups={name: len(np.unique(found.groups_P[mask])) for name, mask in masks.items()},
        rule=found.rule,
        shared=shared,
    )


def _chunks(rows: Iterator[GoldRow]) -> Iterator[tuple[GoldRow, ...]]:
    while chunk := tuple(islice(rows, CHUNK)):
        yield chunk


def _preference(row: GoldRow) -> Preference:
    """Return what decides the group of a row: its prompt and its replies."""
    replies = [number for number, text in enumerate(row.responses) if text is not None and is_encodable(text)]
    return Preference(
        id=row.id,
        source="",
        prompt=row.prompt,
        replies=tuple(reply_of(row, number) for number in replies),
        comparisons=(),
    )
