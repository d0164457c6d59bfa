"""Token groups on disk: flat columns in one folder, memory-mapped. A TokenGroup is built only when it is accessed.

Columns instead of pickled groups keep memory constant (the system loads and drops pages as needed), let whole-dataset
figures be computed without building a group, and execute no code when they are opened, as unpickling would.

Legend: P preferences, D of them left out, G of them kept (groups), R replies, C comparisons, T tokens.

A folder holds one raw file for each column, and `store.json`: the format, what the store was made from, the length and
SHA-256 of every column, and the SHA-256 of all that. `open_store` checks everything, so a damaged store is never used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.files import HASH_CHUNK_BYTES, read_summed_json, write_summed_json
from rewardlab.core.types import Comparison, Preference, TokenGroup
from rewardlab.data.splits import Texts

FORMAT: Final = 6
"""Version of the format, raised when the columns or the content of `store.json` change."""
MANIFEST: Final = "store.json"
LEFT_OUT: Final = (
    "template_refuses",
    "overlong",
    "reply_too_long",
    "identical_tokens",
    "ends_in_padding",
    "prompt_too_long",
    "not_length_matched",
)
"""Causes for which a preference has no group. Column `cause` holds 1 + the index in this list, or 0 for those kept."""
Columns = dict[str, npt.NDArray[Any]]

COLUMNS: Final[Mapping[str, str]] = {
    # [P], [D]
    "prompt_key": "<u8",
    "first_turn": "<u8",
    "said_end": "<i8",
    "cause": "<u2",
    "changed": "|b1",
    "place_end": "<i8",
    "place_text": "|u1",
    # all replies of all preferences
    "said": "<u8",
    "said_long": "|b1",
    # [G]
    "preference": "<i8",
    "id_end": "<i8",
    "id_text": "|u1",
    "token_end": "<i8",
    "reply_end": "<i8",
    "comparison_end": "<i8",
    "shared": "<i4",
    "longest": "<i4",
    "num_truncated": "<i4",
    "num_shortened": "<i4",
    "num_typed": "<i4",
    "prompts_differ": "|b1",
    "lost_replies": "<i4",
    "lost_comparisons": "<i4",
    "ranked": "|b1",
    # [R]
    "suffix": "<i4",
    "prompt_tokens": "<i4",
    "truncated_tokens": "<i4",
    "truncated_reply_tokens": "<i4",
    "rank": "<i4",
    "number": "<i4",
    # [C]
    "first": "<i4",
    "second": "<i4",
    "label": "<f8",
    "weight": "<f8",
    "margin": "<f8",
    "strength": "<f8",
    # [T]
    "tokens": "<i4",
}
"""Column name -> type on disk. `X_end` says where the entries of a row end in another column. `first_turn`, `said` and
`said_long` are what `roots.Texts` needs, and `changed` is whether a control changed the preference. `rank` holds the
replies of a ranked group from best to worst. A `strength` of NaN means none."""
ENDS: Final = {
    "said_end": "said",
    "preference": "cause",
    "place_end": "place_text",
    "id_end": "id_text",
    "token_end": "tokens",
    "reply_end": "suffix",
    "comparison_end": "first",
}
"""Column -> the column whose entries it counts. In a chunk these counts start at 0, so `StoreWriter` shifts them."""


class DamagedError(Exception):
    """A store is damaged or incomplete. It is caught by the cache and never reaches the user."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A preference without a group."""

    cause: str
    """One of `LEFT_OUT`."""
    place: str
    """Its id, or, where the chat template refuses it, its id followed by the words of the template."""


def encode(
    preferences: Sequence[Preference],
    outcomes: Sequence[TokenGroup | LeftOut],
    changed: Sequence[bool] | None = None,
) -> Columns:
    """Return the columns of a chunk of preferences and their outcomes, in order.

    `changed` says which of them a control has changed; None if there is no control.
    """
    lists: dict[str, Any] = {name: [] for name in COLUMNS}
    texts: dict[str, list[bytes]] = {"id": [], "place": []}
    pieces: list[npt.NDArray[np.int32]] = []
    for number, (preference, outcome) in enumerate(zip(preferences, outcomes, strict=True)):
        if isinstance(outcome, LeftOut):
            lists["prompt_key"].append(int(preference.key, 16))
            lists["cause"].append(1 + LEFT_OUT.index(outcome.cause))
            texts["place"].append(outcome.place.encode())
            continue
        lists["prompt_key"].append(int(outcome.prompt_key, 16))
        lists["cause"].append(0)
        lists["preference"].append(number)
        texts["id"].append(outcome.preference_id.encode())
        pieces += [outcome.shared, *outcome.suffixes]
        _add_group(lists, outcome)
        lists["lost_replies"].append(len(preference.replies) - outcome.num_replies)
        lists["lost_comparisons"].append(len(preference.comparisons) - len(outcome.comparisons))
    for name, encoded in texts.items():
        lists[f"{name}_end"] = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        lists[f"{name}_text"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    said = Texts.of(preferences)
    lists |= {"first_turn": said.first_turns_P, "said": said.replies_R, "said_long": said.long_R}
    lists["changed"] = [False] * len(preferences) if changed is None else list(changed)
    lists["said_end"] = [len(preference.replies) for preference in preferences]
    for name in ("said_end", "token_end", "reply_end", "comparison_end"):
        lists[name] = np.cumsum(lists[name], dtype=np.int64)
    # The empty array gives the result its type where no preference of the chunk was kept.
    lists["tokens"] = np.concatenate([np.empty(0, np.int32), *pieces])
    return {name: np.asarray(lists[name], dtype=kind) for name, kind in COLUMNS.items()}


def _add_group(lists: dict[str, Any], group: TokenGroup) -> None:
    """Append a group to the columns. Columns of ends get counts here, which `encode` sums up."""
    lists["token_end"].append(group.num_tokens)
    lists["reply_end"].append(group.num_replies)
    lists["comparison_end"].append(len(group.comparisons))
    lists["shared"].append(len(group.shared))
    lists["longest"].append(max(group.lengths))
    lists["num_truncated"].append(sum(cut > 0 for cut in group.truncated_tokens))
    lists["num_shortened"].append(sum(cut > 0 for cut in group.truncated_reply_tokens))
    lists["num_typed"].append(group.num_typed)
    lists["prompts_differ"].append(len(set(group.truncated_tokens)) > 1)
    lists["ranked"].append(group.ranking is not None)
    lists["suffix"] += [len(suffix) for suffix in group.suffixes]
    lists["prompt_tokens"] += group.prompt_tokens
    lists["truncated_tokens"] += group.truncated_tokens
    lists["truncated_reply_tokens"] += group.truncated_reply_tokens
    lists["number"] += group.numbers
    # Every group has K entries in `rank`, ranked or not, so that `reply_end` serves for this column too.
    ranking = group.ranking if group.ranking is not None else (-1,) * group.num_replies
    assert len(ranking) == group.num_replies, "a ranking is of all replies"
    lists["rank"] += ranking
    for comparison in group.comparisons:
        for name in ("first", "second", "label", "weight", "margin"):
            lists[name].append(getattr(comparison, name))
        lists["strength"].append(np.nan if comparison.strength is None else comparison.strength)


class StoreWriter:
    """Appends chunks to the columns in an empty folder. The folder is a store only after `finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = dict.fromkeys(COLUMNS, 0)
        self._files: dict[str, IO[bytes]] = {}
        self._digests = {name: hashlib.sha256() for name in COLUMNS}

    def __enter__(self) -> StoreWriter:
        self._files = {name: _file(self.folder, name).open("wb") for name in COLUMNS}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, chunk: Columns) -> None:
        """Append a chunk that `encode` made."""
        moved = {name: chunk[name] + self.counts[ENDS[name]] if name in ENDS else chunk[name] for name in COLUMNS}
        for name, values in moved.items():
            content = np.ascontiguousarray(values, dtype=COLUMNS[name]).tobytes()
            self._files[name].write(content)
            self._digests[name].update(content)
            self.counts[name] += len(values)

    def finish(self, *, source: str, facts: Mapping[str, object]) -> None:
        """Flush the columns to the disk, then write the manifest. `facts` are stored with it.

        The manifest comes last because a folder without one is not a store: a process killed before this line leaves
        nothing that could be taken for one.
        """
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        columns = {
            name: {"type": COLUMNS[name], "length": self.counts[name], "sha256": self._digests[name].hexdigest()}
            for name in COLUMNS
        }
        write_summed_json(
            self.folder / MANIFEST, {"format": FORMAT, "source": source, "facts": dict(facts), "columns": columns}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Read-only columns, mapped from a folder by `open_store` or held in memory."""

    columns: Columns
    source: str
    """Name of the dataset."""
    facts: Mapping[str, Any]
    """The facts that were given to `StoreWriter.finish`."""

    @property
    def num_preferences(self) -> int:
        """P."""
        return len(self.columns["cause"])

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.columns["preference"])

    def group(self, index: int, *, by_prompt: bool = False) -> TokenGroup:
        """Build group `index`. With `by_prompt`, the weights of its comparisons are divided by their number."""
        columns = self.columns
        start, end = _span(columns["token_end"], index)
        replies = slice(*_span(columns["reply_end"], index))
        shared = int(columns["shared"][index])
        tokens = columns["tokens"][start:end]
        borders = np.cumsum(columns["suffix"][replies])
        key = int(columns["prompt_key"][columns["preference"][index]])
        return TokenGroup(
            preference_id=_text(columns, "id", index),
            source=self.source,
            prompt_key=f"{key:016x}",
            shared=tokens[:shared],
            suffixes=tuple(np.split(tokens[shared:], borders[:-1])),
            prompt_tokens=tuple(columns["prompt_tokens"][replies].tolist()),
            truncated_tokens=tuple(columns["truncated_tokens"][replies].tolist()),
            truncated_reply_tokens=tuple(columns["truncated_reply_tokens"][replies].tolist()),
            num_typed=int(columns["num_typed"][index]),
            comparisons=self._comparisons(index, by_prompt=by_prompt),
            ranking=tuple(columns["rank"][replies].tolist()) if columns["ranked"][index] else None,
            numbers=tuple(columns["number"][replies].tolist()),
        )

    def place(self, index: int) -> str:
        """Return where preference `index`, which was left out, came from."""
        # Only preferences that were left out have a place, so their number before this one is its index.
        return _text(self.columns, "place", int(np.count_nonzero(self.columns["cause"][:index])))

    def _comparisons(self, index: int, *, by_prompt: bool) -> tuple[Comparison, ...]:
        """Build the comparisons of group `index`."""
        span = slice(*_span(self.columns["comparison_end"], index))
        names = ("first", "second", "label", "weight", "margin", "strength")
        rows = zip(*(self.columns[name][span].tolist() for name in names), strict=True)
        shares = span.stop - span.start if by_prompt else 1
        return tuple(
            Comparison(
                first=first,
                second=second,
                label=label,
                weight=weight / shares,
                margin=margin,
                strength=None if np.isnan(strength) else strength,
            )
            for first, second, label, weight, margin, strength in rows
        )


def open_store(folder: Path) -> TokenStore:
    """Return the store in a folder, with its columns memory-mapped.

    Raises DamagedError unless every column is as it was written.
    """
    manifest = _read_manifest(folder)
    columns = {name: _open_column(_file(folder, name), entry) for name, entry in manifest["columns"].items()}
    return TokenStore(columns=columns, source=manifest["source"], facts=manifest["facts"])


def _span(ends: npt.NDArray[Any], index: int) -> tuple[int, int]:
    """Return (start, end) of the entries of row `index`, from a column of ends."""
    return int(ends[index - 1]) if index else 0, int(ends[index])


def _text(columns: Columns, name: str, index: int) -> str:
    """Return text `index` of a pair of columns `NAME_end` and `NAME_text`."""
    start, end = _span(columns[f"{name}_end"], index)
    return columns[f"{name}_text"][start:end].tobytes().decode()


def _file(folder: Path, column: str) -> Path:
    return folder / f"{column}.bin"


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a store. Raises DamagedError if it cannot be read or is of another format."""
    try:
        manifest: Any = read_summed_json(folder / MANIFEST)
        types = {name: entry["type"] for name, entry in manifest["columns"].items()}
        if manifest["format"] != FORMAT or types != COLUMNS:
            raise DamagedError(f"{MANIFEST} is of another format")
        # Raises KeyError here, and not later in the caller, if one is missing.
        manifest["source"], manifest["facts"]
    except (OSError, DataError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error})") from error
    return dict(manifest)


def _open_column(path: Path, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return a column, memory-mapped. Raises DamagedError unless its bytes are those that were written.

    The bytes are hashed through an ordinary file: hashing the map would touch all its pages, which would then count as
    memory of this process.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(HASH_CHUNK_BYTES):
                digest.update(piece)
        if digest.hexdigest() != entry["sha256"]:
            raise DamagedError(f"{path.name} has changed")
        # An empty file cannot be mapped.
        if path.stat().st_size == 0:
            return np.empty(0, entry["type"])
        return np.asarray(np.memmap(path, dtype=entry["type"], mode="r"))
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror or error})") from error
