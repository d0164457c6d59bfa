"""Data changed on purpose, to see what a model learns without something: without labels, replies, prompts, lengths.

Each change is a function of a preference, the settings of the control and the id of its row, so it depends neither on
the order in which rows are read nor on the process that reads them. A changed row keeps its identity: prompts, roots
and what is held out are those of the row as it was. docs/controls.md says what each control shows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import Comparison, Conversation, Message, Preference, TokenGroup
from rewardlab.data.config import Control
from rewardlab.data.judgements import seeded_generator
from rewardlab.data.splits import Texts, find_roots, reply_key

EMPTY: Final = "[empty]"
"""The text that stands for every reply of `prompt_only`, and for every prompt of `response_only`."""
NO_REPLY: Final[Conversation] = (Message("assistant", EMPTY),)
NO_PROMPT: Final[Conversation] = (Message("user", EMPTY),)
TRIES: Final = 64
"""Random donors that are tried before all that may be used are looked up."""
POOL_TEXTS: Final = "replies.jsonl"
POOL_COLUMNS: Final = ("ends", "keys", "roots", "prompts", "own_prompts", "own_roots")


def changed_by(control: Control, preference: Preference, pool: Pool | None = None) -> tuple[Preference, bool]:
    """Return (the preference as the control changes it, whether it differs).

    `length_matched` changes nothing here, since it counts tokens: see `length_matched`. `random_negatives` needs a
    pool.
    """
    made = preference
    if control.mode == "label_shuffle":
        assert control.shuffle_rate is not None
        assert control.seed is not None
        generator = _generator(control, preference)
        made = shuffled(preference, rate=control.shuffle_rate, generator=generator)
        return made, _judged(made) != _judged(preference)
    if control.mode == "prompt_only":
        made = replace(preference, replies=(NO_REPLY,) * len(preference.replies))
    elif control.mode == "response_only":
        made = replace(preference, prompt=NO_PROMPT)
    elif control.mode == "random_negatives":
        assert pool is not None, "donors are drawn from a pool"
        made = with_random_negatives(preference, pool, _generator(control, preference))
    return made, made != preference


def _generator(control: Control, preference: Preference) -> np.random.Generator:
    """Return the random numbers of one row: others for each mode, seed, dataset and row."""
    assert control.seed is not None, f"{control.mode} draws"
    return seeded_generator(control.seed, f"{control.mode}\x1f{preference.source}\x1f{preference.id}")


def in_place_of(original: Preference, changed: Preference) -> Preference:
    """Return the changed judgements with the texts of the original, by which rows are held out and kept together."""
    return replace(changed, prompt=original.prompt, replies=original.replies)


# --- labels --------------------------------------------------------------------------------------------------


def shuffled(preference: Preference, *, rate: float, generator: np.random.Generator) -> Preference:
    """Return the preference with its judgements moved to other replies at random.

    Two replies are swapped with probability `rate`. K replies are permuted uniformly with probability 2·rate, up to ½,
    which for two replies is the same. Above ½ the order is turned around with probability 2·rate − 1, and permuted
    otherwise. So at ½ the judgements say nothing about the replies, whatever K is, and at 1 they say the opposite.

    Labels, weights and margins move with their comparison; a tie stays one; a ranking moves alike.
    """
    permute = 2 * min(rate, 1 - rate)
    if generator.random() < permute:
        return permuted(preference, generator.permutation(len(preference.replies)).tolist())
    return preference if rate <= 0.5 else turned_around(preference)


def permuted(preference: Preference, order: Sequence[int]) -> Preference:
    """Return the preference with the judgements of reply k moved to reply `order[k]`."""
    ranking = preference.ranking
    return replace(
        preference,
        comparisons=tuple(
            replace(one, first=order[one.first], second=order[one.second]) for one in preference.comparisons
        ),
        ranking=None if ranking is None else tuple(order[reply] for reply in ranking),
    )


def turned_around(preference: Preference) -> Preference:
    """Return the preference with every judgement the other way round."""
    ranking = preference.ranking
    return replace(
        preference,
        comparisons=tuple(replace(one, first=one.second, second=one.first) for one in preference.comparisons),
        ranking=None if ranking is None else ranking[::-1],
    )


def _judged(preference: Preference) -> tuple[object, ...]:
    """Return the judgements in a form in which (i, j, y) equals (j, i, 1 − y)."""
    turned = [
        one if one.first < one.second else replace(one, first=one.second, second=one.first, label=1 - one.label)
        for one in preference.comparisons
    ]
    return (sorted(map(repr, turned)), preference.ranking)


# --- replies to other prompts --------------------------------------------------------------------------------


def with_random_negatives(preference: Preference, pool: Pool, generator: np.random.Generator) -> Preference:
    """Return the preference with every reply but the best ones replaced by a reply to another prompt.

    The best are those that win most (a soft label counts as its direction). Comparisons between a best reply and
    another are kept, with label 1; those between two random replies would say nothing, and are left out. The
    preference stays as it is if all replies are equally good, or if too few donors may be used.
    """
    wins = [0.0] * len(preference.replies)
    for one in preference.comparisons:
        for reply, label in ((one.first, one.label), (one.second, 1 - one.label)):
            wins[reply] += float(np.sign(label - 0.5))
    judged = sorted({reply for one in preference.comparisons for reply in (one.first, one.second)})
    most = max(wins[reply] for reply in judged)
    best = {reply for reply in judged if wins[reply] == most}
    kept = tuple(_certain(one, best) for one in preference.comparisons if (one.first in best) != (one.second in best))
    replaced = [reply for reply in range(len(preference.replies)) if reply not in best]
    donors = pool.draw(preference, len(replaced), generator) if kept else None
    if donors is None:
        return preference
    replies = list(preference.replies)
    for reply, donor in zip(replaced, donors, strict=True):
        replies[reply] = donor
    return replace(preference, replies=tuple(replies), comparisons=kept)


def _certain(one: Comparison, best: set[int]) -> Comparison:
    """Return a comparison in which the best reply is certainly preferred."""
    first, second = (one.first, one.second) if one.first in best else (one.second, one.first)
    return replace(one, first=first, second=second, label=1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """All replies of a dataset, in a temporary file: only hashes of eight bytes are in memory. R replies, N prompts."""

    texts: Path
    ends: npt.NDArray[np.int64]
    """[R] where the text of each reply ends in the file."""
    keys: npt.NDArray[np.uint64]
    """[R] hash of each reply."""
    roots: npt.NDArray[np.int64]
    """[R] root of the row that it belongs to."""
    prompts: npt.NDArray[np.uint64]
    """[R] key of the prompt that it answers."""
    own_prompts: npt.NDArray[np.uint64]
    """[N] sorted keys of the prompts."""
    own_roots: npt.NDArray[np.int64]
    """[N] their roots."""

    def draw(self, preference: Preference, count: int, generator: np.random.Generator) -> list[Conversation] | None:
        """Return `count` replies to prompts of other roots, different texts, none a text of the preference itself.

        Each is drawn uniformly from those that may be used; None if there are too few.
        """
        prompt = np.uint64(int(preference.key, 16))
        root = int(self.own_roots[np.searchsorted(self.own_prompts, prompt)])
        taken = {reply_key(reply)[0] for reply in preference.replies}
        donors: list[Conversation] = []
        for _ in range(count):
            index = self._one(prompt, root, taken, generator)
            if index is None:
                return None
            taken.add(int(self.keys[index]))
            donors.append(self.reply(index))
        return donors

    def _one(self, prompt: np.uint64, root: int, taken: set[int], generator: np.random.Generator) -> int | None:
        """Return the index of a reply that may be used, each with the same probability; None if there is none."""
        for index in generator.integers(len(self.ends), size=TRIES).tolist():
            if self.roots[index] != root and self.prompts[index] != prompt and int(self.keys[index]) not in taken:
                return int(index)
        usable = (self.roots != root) & (self.prompts != prompt)
        usable &= ~np.isin(self.keys, np.fromiter(taken, dtype=np.uint64), kind="sort")  # as in `splits`
        indices = np.flatnonzero(usable)
        return int(generator.choice(indices)) if len(indices) else None

    def reply(self, index: int) -> Conversation:
        """Return a reply by its index."""
        start, end = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        with self.texts.open("rb") as file:
            file.seek(start)
            turns = json.loads(file.read(end - start))
        return tuple(Message(role, content) for role, content in turns)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What a chunk of preferences adds to a pool."""

    texts: Texts
    replies: list[bytes]
    """Every reply as a line of JSON."""


def gather(preferences: Sequence[Preference]) -> Gathered:
    """Return what a chunk of preferences adds to a pool."""
    replies = [
        json.dumps([[turn.role, turn.content] for turn in reply]).encode() + b"\n"
        for preference in preferences
        for reply in preference.replies
    ]
    return Gathered(texts=Texts.of(preferences), replies=replies)


@contextmanager
def pool_of(chunks: Iterable[Gathered]) -> Iterator[Path]:
    """Yield a temporary folder that holds the pool of all chunks, for `open_pool` in any process; then delete it."""
    with tempfile.TemporaryDirectory(prefix="rewardlab-pool-") as name:
        folder = Path(name)
        parts, sizes = list[Texts](), [np.empty(0, np.int64)]
        with (folder / POOL_TEXTS).open("wb") as file:
            for chunk in chunks:
                sizes.append(_write(file, chunk.replies))
                parts.append(chunk.texts)
        texts = Texts.join(parts)
        roots_P = find_roots(texts)[0] if len(texts.prompts_P) else np.empty(0, np.int64)
        own_prompts, firsts = np.unique(texts.prompts_P, return_index=True)
        columns: dict[str, npt.NDArray[Any]] = {
            "ends": np.cumsum(np.concatenate(sizes)),
            "keys": texts.replies_R,
            "roots": roots_P[texts.owners_R],
            "prompts": texts.prompts_P[texts.owners_R],
            "own_prompts": own_prompts,
            "own_roots": roots_P[firsts],
        }
        for column in POOL_COLUMNS:
            np.save(folder / f"{column}.npy", columns[column])
        yield folder


def _write(file: IO[bytes], replies: Sequence[bytes]) -> npt.NDArray[np.int64]:
    file.writelines(replies)
    return np.array([len(reply) for reply in replies], dtype=np.int64)


@lru_cache(maxsize=1)
def open_pool(folder: Path) -> Pool:
    """Return the pool in a folder, with its columns mapped from their files."""
    columns = {column: np.load(folder / f"{column}.npy", mmap_mode="r") for column in POOL_COLUMNS}
    return Pool(texts=folder / POOL_TEXTS, **columns)


# --- lengths -------------------------------------------------------------------------------------------------


def lengths_apart(group: TokenGroup) -> list[int]:
    """Return by how many tokens the replies of each comparison differ.

    A reply counts with the tokens that close its turn, as its content begins after `prompt_tokens`.
    """
    lengths = [length - before for length, before in zip(group.lengths, group.prompt_tokens, strict=True)]
    return [abs(lengths[one.first] - lengths[one.second]) for one in group.comparisons]


def length_matched(group: TokenGroup, *, threshold: int, whole: bool = False) -> TokenGroup | None:
    """Return the group with the comparisons whose replies differ by fewer than `threshold` tokens; None without any.

    With `whole`, a group is kept only with all of its comparisons, since a ranking cannot lose one.
    """
    kept = tuple(one for one, apart in zip(group.comparisons, lengths_apart(group), strict=True) if apart < threshold)
    if not kept or (whole and len(kept) < len(group.comparisons)):
        return None
    return group if len(kept) == len(group.comparisons) else replace(group, comparisons=kept)
