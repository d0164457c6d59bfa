"""Scores of a gold model for the replies that are judged, found in a file of scores or in the data themselves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.analysis.kwise import ReplyKey
from rewardlab.core.errors import DataError
from rewardlab.core.files import finite_or_none, write_jsonl
from rewardlab.core.run_folder import GOLD
from rewardlab.core.terminal import short
from rewardlab.core.types import ScoreRow, TokenGroup
from rewardlab.evaluation.score_files import read_scores
from rewardlab.evaluation.score_layouts import RowKey, ScoreFile

OWN_LAYOUT: Final = "rewardlab"


@dataclass(frozen=True, kw_only=True)
class _Preference:
    """What the file of the gold scores says of one preference."""

    scores: Mapping[int, float]
    """Number of the reply -> score."""
    prompt_key: str | None
    """None where nothing is known of its prompt."""


def read_gold(path: Path, groups: Sequence[TokenGroup], *, max_replies: int | None = None) -> dict[ReplyKey, float]:
    """Return the gold score of each reply of the `groups` that has a finite one.

    Rows belong to preferences as in `rewardlab compare`: by source and id, by id alone where the file has no sources;
    and, where a row holds a whole preference, by its line: that of the file of the same name, or of the only file that
    is judged. Preferences with another prompt or another number of replies have no gold scores. Of longer rows
    `max_replies` were drawn and numbered anew, so scores of all replies of such a row are not theirs.

    Raises ConfigError if nothing is there, DataError if it cannot be read as scores, holds verdicts or a reply twice,
    or has a score for none of the replies.
    """
    file = read_scores(path, name="gold")
    if file.scores.verdicts_only:
        raise DataError(f"--gold {path}: it holds verdicts (right, wrong). Name a file with a score for each reply.")
    known = _by_key(file)
    lines = dict(_by_line(file, known))
    only = _only_file(group.preference_id for group in groups)
    found: dict[ReplyKey, float] = {}
    for group in groups:
        name, _, line = group.preference_id.rpartition(":")
        held = known.get((group.source, group.preference_id)) or known.get(("", group.preference_id))
        if held is None and line.isdecimal():
            held = lines.get(int(line))
            # Ids of people may end in a number too, so a number is a line only where more than the number says so.
            same_file = name == file.path.name or (only and file.scores.by_place)
            same_prompt = held is not None and held.prompt_key == group.prompt_key
            held = held if same_file or same_prompt else None
        if held is None or not _has_all(held.scores, group, max_replies):
            continue
        if held.prompt_key not in (None, group.prompt_key):
            continue
        for reply in group.numbers:
            if math.isfinite(score := held.scores[reply]):
                found[group.source, group.preference_id, reply] = score
    if not found:
        raise DataError(_why_none(path, file, groups))
    return found


def _has_all(scores: Mapping[int, float], group: TokenGroup, max_replies: int | None) -> bool:
    """Return whether there is a score for each reply of the group, and, as far as the group tells, for no others.

    A group without some of its replies, by their numbers, may have scores for these too.
    """
    if max_replies is not None and max(scores) >= max_replies:
        return False
    lost_some = group.numbers != tuple(range(group.num_replies))
    return scores.keys() >= set(group.numbers) and (lost_some or len(scores) == group.num_replies)


def _by_key(file: ScoreFile) -> dict[RowKey, _Preference]:
    """Return what the file says of each preference, by source and id. Raises DataError for a reply that is there
    twice."""
    scores: dict[RowKey, dict[int, float]] = defaultdict(dict)
    prompts: dict[RowKey, str | None] = {}
    for row in file.scores.rows:
        key = row.source, row.preference_id
        if row.reply in scores[key]:
            raise DataError(
                f"--gold {file.path}: reply {row.reply} of {short(row.preference_id)!r} has two scores. Every id must "
                f"occur once; rows of several files need ids that differ, or a column `source`."
            )
        scores[key][row.reply] = row.score
        prompts[key] = _prompt_of(file, row)
    return {key: _Preference(scores=own, prompt_key=prompts[key]) for key, own in scores.items()}


def _prompt_of(file: ScoreFile, row: ScoreRow) -> str | None:
    """Return the key of a row's prompt, where it is one that can be compared with ours: our own, or that of a text."""
    if file.scores.layout == OWN_LAYOUT:
        return row.prompt_key
    return file.prompts.get((row.source, row.preference_id))


def _by_line(file: ScoreFile, known: Mapping[RowKey, _Preference]) -> Iterator[tuple[int, _Preference]]:
    """Yield the preferences that a single row holds, by the number of that row."""
    for key, line in file.lines.items():
        yield line, known[key]


def _only_file(ids: Iterable[str]) -> bool:
    """Return whether all ids are lines of one file."""
    return len({name.rpartition(":")[0] for name in ids}) == 1


def _why_none(path: Path, file: ScoreFile, groups: Sequence[TokenGroup]) -> str:
    theirs = file.scores.rows[0] if file.scores.rows else None
    ids = "" if theirs is None else f" (it has {short(theirs.preference_id)!r}, the data {groups[0].preference_id!r})"
    return (
        f"--gold {path}: no preference that is judged has gold scores there, one for each of its replies and under the "
        f"same prompt{ids}. Score the same data with the gold model, `rewardlab eval --model GOLD --dataset …`, and "
        f"name the folder; or name the data themselves if their rows hold `scores`."
    )


def write_gold(folder: Path, name: str, gold: Mapping[ReplyKey, float], rows: Iterable[ScoreRow]) -> None:
    """Write `<name>.gold.jsonl`: a line for each reply of the score rows, with its gold score or null."""
    write_jsonl(
        folder / f"{name}.{GOLD}",
        (
            {
                "source": row.source,
                "preference_id": row.preference_id,
                "reply": row.reply,
                "gold": finite_or_none(gold.get((row.source, row.preference_id, row.reply), math.nan)),
            }
            for row in rows
        ),
    )
