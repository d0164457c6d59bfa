"""The prompts of other data (suites, or any dataset), none of which should be among the audited rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np

from rewardlab.core.suite_names import SuiteName
from rewardlab.core.types import Conversation, prompt_key
from rewardlab.curation.rows import walk
from rewardlab.curation.shingles import Hashes, Numbers, WordHashes, shingles_of, words_of
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.formats import SCHEMAS
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import read_source
from rewardlab.data.rows import UnusableRowError, read_prompt
from rewardlab.data.sources import first_rows_in
from rewardlab.data.suites.reading import folder_of, read_suite, require_suites

LENGTHS: Final = (13, 8)
"""Lengths in words of the runs that are compared: GPT-3 removed texts that shared a run of 13 (Brown et al. 2020), PaLM
counted shared runs of 8."""
MOST_PROMPTS: Final = 10
"""A run of the first length that stands in more different prompts of the other data is boilerplate, such as the wording
of a task, and does not count: GPT-3 ignored runs that occurred in more than 10 documents."""
SUITES: Final = get_args(SuiteName)


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Sorted hashes, and the item from which each comes."""

    hashes_G: Hashes
    of_G: Numbers
    """[G] index of the first item with each hash."""

    @classmethod
    def of(cls, hashes: Sequence[Hashes], items: Sequence[Numbers], *, most: int | None = None) -> Places:
        """Return all distinct hashes, each with the first item that has it; with `most`, those given no more often."""
        joined = np.concatenate([np.zeros(0, np.uint64), *hashes])
        found, first, counts = np.unique(joined, return_index=True, return_counts=True)
        wanted = counts <= (len(joined) if most is None else most)
        return cls(hashes_G=found[wanted], of_G=np.concatenate([np.zeros(0, np.int64), *items])[first[wanted]])

    def find(self, hashes: Hashes) -> Numbers:
        """Return for each hash the item that has it, −1 where there is none."""
        if not len(self.hashes_G):
            return np.full(len(hashes), -1)
        at = np.minimum(np.searchsorted(self.hashes_G, hashes), len(self.hashes_G) - 1)
        return np.where(self.hashes_G[at] == hashes, self.of_G[at], -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Others:
    """The prompts of other data, as hashes."""

    names: tuple[str, ...]
    """Item -> `suite/id` or `file:line`."""
    prompts: Places
    runs: tuple[Places, ...]
    """The runs of words of each of `LENGTHS`."""
    unread: int
    """Number of rows of datasets whose prompt could not be read."""
    boilerplate: int
    """Runs of the first length that are left out, since they stand in more than `MOST_PROMPTS` of the prompts."""

    def score(
        self,
        rows: Sequence[int],
        prompts_P: Hashes,
        words: Sequence[list[int]],
        note: Callable[[str, int, float, str], None],
    ) -> None:
        """Score rows by what their prompts have in common with these.

        `prompts_P` are hashes of whole prompts, `words` the hashes of the words of each prompt.
        """
        for row, item in zip(rows, self.prompts.find(prompts_P).tolist(), strict=True):
            if item >= 0:
                note("overlap-prompts", row, 1, self.names[item])
        for length, runs in zip(LENGTHS, self.runs, strict=True):
            hashes, offsets = shingles_of(_long_enough(words, length), length)
            items = runs.find(hashes)
            for place in np.unique(np.searchsorted(offsets, np.flatnonzero(items >= 0), side="right") - 1).tolist():
                own = items[offsets[place] : offsets[place + 1]]
                shared = own[own >= 0]
                score = len(shared) if length == LENGTHS[0] else len(shared) / len(own)
                note(f"overlap-{length}", rows[place], score, self.names[shared[0]])


def read_others(names: Sequence[str], *, split: str, suite_data: Path | None, rules: Rules) -> Others:
    """Return the prompts of the suites and datasets with these names.

    Raises DataError and ConfigError as the readers of both do.
    """
    suites = [name for name in names if name in SUITES]
    require_suites(suites, suite_data)
    items: list[str] = []
    prompts: list[Hashes] = []
    runs: list[list[Hashes]] = [[] for _ in LENGTHS]
    owners: list[list[Numbers]] = [[] for _ in LENGTHS]
    known = WordHashes()
    seen: set[int] = set()
    unread = 0
    for name, prompt in _prompts(names, suites, split, suite_data, rules):
        if prompt is None:
            unread += 1
            continue
        key = int(prompt_key(prompt), 16)
        words = [[known[word] for word in words_of(text_of_prompt(prompt))]] if key not in seen else []
        for place, length in enumerate(LENGTHS):
            hashes = np.unique(shingles_of(_long_enough(words, length), length)[0])
            runs[place].append(hashes)
            owners[place].append(np.full(len(hashes), len(items)))
        prompts.append(np.array([key], dtype=np.uint64))
        items.append(name)
        seen.add(key)
    longer, shorter = zip(runs, owners, strict=True)
    counted = Places.of(*longer, most=MOST_PROMPTS)
    return Others(
        names=tuple(items),
        prompts=Places.of(prompts, [np.arange(len(items))]),
        runs=(counted, Places.of(*shorter)),
        unread=unread,
        boilerplate=len(np.unique(np.concatenate([np.zeros(0, np.uint64), *longer[0]]))) - len(counted.hashes_G),
    )


def text_of_prompt(prompt: Conversation) -> str:
    """Return the text by which a prompt is compared: without its system turn, which many prompts share."""
    return "\n".join(turn.content for turn in prompt if turn.role != "system")


def _prompts(
    names: Sequence[str], suites: Sequence[str], split: str, suite_data: Path | None, rules: Rules
) -> Iterator[tuple[str, Conversation | None]]:
    """Yield (item, its prompt), with None for a prompt that cannot be read."""
    for suite in suites:
        for item in read_suite(suite, folder_of(suite, suites, suite_data)).items:
            yield f"{suite}/{item.id}", item.prompt
    for source in datasets_of(names, split, rules.reading):
        yield from _bare_prompts(source) if _has_prompts_alone(source) else _preferred_prompts(source, rules)


def datasets_of(names: Sequence[str], split: str, reading: ReadingConfig) -> tuple[Source, ...]:
    """Return the datasets among these names, without the suites. Raises DataError for one that is not found."""
    datasets = [name for name in names if name not in SUITES]
    return find_sources(datasets, split, streaming=reading.streaming) if datasets else ()


def _has_prompts_alone(source: Source) -> bool:
    """Return whether the rows of a dataset have prompts but are not preferences."""
    return any(
        "prompt" in row and not any(schema.fits(row) for schema in SCHEMAS) for _, row in first_rows_in([source])
    )


def _preferred_prompts(source: Source, rules: Rules) -> Iterator[tuple[str, Conversation | None]]:
    for row in walk(source, rules):
        yield row.place, None if row.preference is None else row.preference.prompt


def _bare_prompts(source: Source) -> Iterator[tuple[str, Conversation | None]]:
    for number, row in read_source(source):
        try:
            prompt = read_prompt(row.get("prompt"))
        except UnusableRowError:
            prompt = None
        yield f"{source.label}:{number}", prompt


def _long_enough(texts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Return the texts, those with fewer words than a run replaced by empty ones, since they have no run."""
    return [words if len(words) >= length else [] for words in texts]
