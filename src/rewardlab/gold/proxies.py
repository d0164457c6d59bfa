"""Scores of proxies for rows with gold scores: computed now, or read from a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, read_lines
from rewardlab.core.lock import only_process
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.terminal import number_of, plural
from rewardlab.data.readers import holds_lines, read_each_row
from rewardlab.data.shards import extension_of
from rewardlab.gold.files.layouts import read_rewards
from rewardlab.gold.files.rows import GoldRow, scores_of, texts_of
from rewardlab.gold.foreign import find_model, is_classifier, is_hub_name
from rewardlab.gold.kept_results import Kept
from rewardlab.gold.reward_models import reward_models, score_all
from rewardlab.gold.scoring import DEFAULT_SCORING, ScoringConfig

BEST: Final = "best"
"""Where a run keeps the model that it chose."""
MOST_CAUSES: Final = 3
"""Most causes of missing scores that a note names."""
SCORE: Final = "the proxy's score"
"""What a number in the file of a proxy is, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A reward model and its scores of some rows."""

    name: str
    scores: tuple[tuple[float | None, ...], ...]
    """For each row a score for each reply; None for a reply without one."""
    causes: tuple[str, ...] = ()
    """Why replies that are there have no score: the first few causes that differ."""

    @property
    def note(self) -> str:
        """The causes in a sentence; empty without any."""
        if not self.causes:
            return ""
        return f"{self.name} gave no score to some replies. The first causes: {'; '.join(self.causes).rstrip('.')}."


def proxy_scores(
    sources: Sequence[str],
    rows: Sequence[GoldRow],
    folder: Path,
    config: ScoringConfig = DEFAULT_SCORING,
    most: int | None = None,
) -> list[Proxy]:
    """Return the scores of each proxy for rows, in their order; with `most`, for the first `most` rows.

    A source is `[NAME=]WHAT`, where WHAT is a reward-model folder, a run, a sequence-classification model of another
    project (a folder or a hub name, which is imported), or a file with a score for each reply of every row, whatever
    `most` is: `[[r1, r2], …]`, rows with `scores` (as `rewardlab score` writes them) or with `gold` (as `rewardlab gold
    label` does). Scores that are computed are kept in `folder`, so that the same call goes on from them.

    Raises ConfigError for a source that is not there or a name that comes twice, DataError for a file that does not
    belong to the rows.
    """
    named = named_sources(sources)
    return [_proxy(name, what, rows, folder, config, most) for name, what in named.items()]


def named_sources(sources: Sequence[str]) -> dict[str, str]:
    """Return sources by their names. Raises ConfigError as `proxy_scores` does."""
    named: dict[str, str] = {}
    for source in sources:
        name, what = _parted(source)
        if name in named:
            raise ConfigError(
                f"{source}: another proxy is called {name!r} too. Give names: {name}1={named[name]} {name}2={what}."
            )
        if not (Path(what).exists() or is_hub_name(what)):
            raise ConfigError(
                f"{what}: no such file or folder. Name a reward-model folder, a run, a sequence-classification model "
                f"of another project (a folder or a hub name), or a file of scores."
            )
        if Path(what).is_dir():
            folder_of(what)
        named[name] = what
    return named


def pinned(sources: Sequence[str]) -> tuple[str, ...]:
    """Return sources with the commit of each model on the hub, so that every later use is of the same one.

    The models are fetched and imported now. Raises ConfigError as `find_model` does.
    """
    parted = [(source, *_parted(source)) for source in sources]
    return tuple(
        f"{name}={find_model(what, flag='--proxies').name}" if is_hub_name(what) else source
        for source, name, what in parted
    )


def _parted(source: str) -> tuple[str, str]:
    """Return the name and the WHAT of a source."""
    found = re.fullmatch(r"([^=/\\]+)=(.+)", source)
    return (found[1], found[2]) if found and not Path(source).exists() else (_short_name(source), source)


def folder_of(what: str) -> Path:
    """Return the reward-model folder that a folder is or that a run holds, or a sequence classifier of another project.

    Raises ConfigError for any other folder.
    """
    found = model_in(Path(what))
    if found is None and is_classifier(Path(what)):
        return Path(what)
    if found is None:
        raise ConfigError(
            f"{what}: is neither a reward-model folder ({SPEC_FILE} is missing) nor a run with a model in it nor a "
            f"…ForSequenceClassification of another project. `rewardlab import {what} --output-dir NEW` makes a folder "
            f"of other reward models."
        )
    return found


def model_in(folder: Path) -> Path | None:
    """Return a folder that is a reward model, else the model that a run chose, else its last; None if there is none."""
    numbered = [one for one in folder.glob("step_*") if re.fullmatch(r"step_\d+", one.name)]
    steps = sorted(numbered, key=lambda one: int(one.name.removeprefix("step_")), reverse=True)
    return next((one for one in (folder, folder / BEST, *steps) if (one / SPEC_FILE).is_file()), None)


def _short_name(source: str) -> str:
    path = Path(source)
    path = path.resolve() if path.name in ("", ".", "..") else path
    if path.name == BEST:
        return path.parent.name or BEST
    return path.name if path.is_dir() else path.name.removesuffix(extension_of(path) or "") or path.name


def _proxy(
    name: str, what: str, rows: Sequence[GoldRow], folder: Path, config: ScoringConfig, most: int | None
) -> Proxy:
    if Path(what).is_file():
        return Proxy(name=name, scores=tuple(_read(Path(what), rows))[:most])
    rows = rows[:most]
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder, "--output-dir"):
        model = what if is_hub_name(what) else str(folder_of(what))
        sources = reward_models(model, config, flag="--proxies")
        scored = score_all(lambda: rows, sources, Kept(folder), title=f"scoring with {Path(what).name}")
        found = [scored.of(row) for row in rows]
    failed = [
        why
        for row, (_, errors) in zip(rows, found, strict=True)
        for place, why in errors.items()
        if row.responses[int(place)] is not None
    ]
    return Proxy(
        name=name, scores=tuple(scores for scores, _ in found), causes=tuple(dict.fromkeys(failed))[:MOST_CAUSES]
    )


def _read(path: Path, rows: Sequence[GoldRow]) -> Iterator[tuple[float | None, ...]]:
    """Yield the scores in a file. Raises DataError if they do not belong to the rows."""
    found = list(_lists(path) if _is_bare(path) else _columns(path, rows))
    if len(found) != len(rows):
        raise DataError(
            f"{path}: has scores of {number_of(len(found), 'row')}, and {len(rows)} "
            f"{plural(len(rows), 'has', 'have')} gold scores. Is it of other data?"
        )
    for number, (scores, row) in enumerate(zip(found, rows, strict=True), start=1):
        if len(scores) != len(row.responses):
            raise DataError(
                f"{path}:{number}: has {number_of(len(scores), 'score')}, and {row.where or f'row {number}'} has "
                f"{number_of(len(row.responses), 'reply')}. Is it of other data?"
            )
        checked = scores_of(scores, len(row.responses), f"{path}:{number}", what=SCORE)
        assert checked is not None
        yield checked


def _is_bare(path: Path) -> bool:
    """Return whether a file has lists of scores, and no objects."""
    if ".jsonl" in path.suffixes:
        return next((line for _, line in read_lines(path)), "").lstrip().startswith("[")
    value = read_json(path) if path.suffix == ".json" and not holds_lines(path) else None
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _lists(path: Path) -> Iterator[Sequence[float | None]]:
    return read_rewards(path, what=SCORE)


def _columns(path: Path, rows: Sequence[GoldRow]) -> Iterator[Sequence[float | None]]:
    for (number, row), gold in zip(read_each_row(path), _endless(rows), strict=False):
        where = f"{path}:{number}"
        if isinstance(row, DataError):
            raise row
        column = next((name for name in ("scores", "gold") if isinstance(row.get(name), list)), None)
        if column is None:
            raise DataError(f"{where}: it has no list of `scores` (or `gold`). Score the file with `rewardlab score`.")
        if gold is not None:
            _require_same(row, gold, where)
        yield cast(Sequence[float | None], row[column])


def _endless(rows: Sequence[GoldRow]) -> Iterator[GoldRow | None]:
    """Yield the rows, then None for ever, so that a file with more rows is read to its end and counted."""
    yield from rows
    while True:
        yield None


def _require_same(row: Mapping[str, Any], gold: GoldRow, where: str) -> None:
    """Raise DataError if a row has other replies than the one with gold scores."""
    replies = row.get("responses")
    if isinstance(replies, list) and texts_of(replies, where) != gold.responses:
        raise DataError(
            f"{where}: its replies are not those of {gold.where}. Rows belong together by place: score the very file "
            f"with the gold scores."
        )
