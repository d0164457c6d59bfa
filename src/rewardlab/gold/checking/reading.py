"""The files of all stages as they are: nothing is refused here that a check could name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json
from rewardlab.core.terminal import short
from rewardlab.core.types import Conversation, Message, prompt_key
from rewardlab.data.readers import holds_lines, read_each_row
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.files.layouts import read_responses, read_rewards
from rewardlab.gold.files.parts import parts_of
from rewardlab.gold.files.prompts import read_prompts
from rewardlab.gold.files.rows import GoldRow, read_gold_rows, turns_of, with_system

SIDES: Final = ("train", "test")
FORMS: Final = ("{}.jsonl", "{}.trl.jsonl", "{}.columns.json")
"""Files of each side in a built folder: our rows, TRL's, and one object of columns."""
Scores = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two replies to a prompt, the better one first."""

    prompt: Conversation
    chosen: str
    rejected: str
    is_tie: bool = False
    number: int = 0
    """Row of the file, from 1."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The pairs of one file."""

    path: Path
    side: str
    """`train` or `test`."""
    pairs: Sequence[Pair]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The rows without a prompt, where prompts were taken from the pairs with the same replies."""

    unpaired: Sequence[int]
    """Rows whose replies no pair has."""
    ambiguous: Sequence[int]
    """Rows whose replies come in several rows, or under several prompts."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Everything that was read; what is not there is empty or None."""

    prompts: Sequence[Conversation] | None
    samples: Sequence[GoldRow] | None
    """Prompts with replies, as sampled."""
    responses: Sequence[Sequence[str | None]] | None
    """Replies alone, of the layout with one JSON file a fact."""
    rewards: Sequence[Scores] | None
    labels: Sequence[GoldRow] | None
    """Rows with gold scores."""
    built: Sequence[Built]
    names: Mapping[str, Path]
    """Name of an input, such as `labels` -> file."""
    folders: Sequence[Path] = field(default=())
    """Where manifests may lie."""
    taken: Taken | None = None
    """Rows whose prompt is not known, where prompts were taken from pairs with the same replies; else None."""

    @property
    def rows(self) -> Sequence[GoldRow]:
        """The labelled rows, else the sampled ones."""
        return self.labels if self.labels is not None else self.samples or ()

    def name(self, what: str) -> str:
        """Return the name of a file for messages."""
        return str(self.names[what]) if what in self.names else what


def read_stages(config: CheckConfig) -> Stages:
    """Return the files of all stages. Raises ConfigError and DataError for a file that is not there or not readable."""
    config_samples, config_labels, pairs = _places(config)
    names: dict[str, Path] = {}
    prompts = None
    if config.prompts_path is not None:
        names["prompts"] = config.prompts_path
        found = read_prompts(str(config.prompts_path), system=config.system, repeats=True)
        prompts = [one.prompt for one in found]
    samples = _gold_rows(config_samples, "samples", names, config.system)
    labels = _gold_rows(config_labels, "labels", names, config.system)
    if labels is None and config.rewards_path is None and pairs is not None:
        labels = _of_built(pairs, names)
    responses = rewards = None
    if config.responses_path is not None:
        names["responses"] = config.responses_path
        responses = [tuple(row) for row in read_responses(config.responses_path, config.num_responses)]
    if config.rewards_path is not None:
        names["rewards"] = config.rewards_path
        rewards = [tuple(row)[: config.num_responses] for row in read_rewards(config.rewards_path)]
    built = [] if pairs is None else _built(pairs)
    if config.data_path is not None:
        built.append(Built(path=config.data_path, side="train", pairs=list(read_pairs(config.data_path))))
    taken: Taken | None = None
    if responses is not None:
        found_prompts = prompts
        if found_prompts is None:
            found_prompts, taken = _prompts_of(responses, [pair for one in built for pair in one.pairs])
        samples, labels = _joined(found_prompts, responses, rewards)
    folders = {path.parent for path in names.values()} | ({pairs} if pairs is not None else set())
    return Stages(
        prompts=prompts,
        samples=samples,
        responses=responses,
        rewards=rewards,
        labels=labels,
        built=built,
        names=names,
        folders=sorted(folders),
        taken=taken,
    )


def _prompts_of(responses: Sequence[Sequence[str | None]], pairs: Sequence[Pair]) -> tuple[list[Conversation], Taken]:
    """Return the prompt of each row, taken from the pairs whose two replies the row has, and the rows without one.

    A prompt is not known where several rows have the two replies, or pairs of several prompts do. Such a row gets a
    text of its own as its prompt, so that no two of them are taken for one.
    """
    prompts_of: dict[frozenset[str], dict[str, Conversation]] = {}
    for pair in pairs:
        prompts_of.setdefault(frozenset((pair.chosen, pair.rejected)), {}).setdefault(
            bare_key(pair.prompt), pair.prompt
        )
    keys = [[key for key in _sets_of_two(texts) if key in prompts_of] for texts in responses]
    rows_with = Counter(key for own in keys for key in own)
    prompts, unpaired, ambiguous = list[Conversation](), list[int](), list[int]()
    for number, own in enumerate(keys):
        told = next((key for key in own if rows_with[key] == len(prompts_of[key]) == 1), None)
        if told is not None:
            prompts.extend(prompts_of[told].values())
            continue
        prompts.append((Message("user", f"(not known: no pair tells the prompt of row {number + 1})"),))
        (ambiguous if own else unpaired).append(number)
    return prompts, Taken(unpaired=unpaired, ambiguous=ambiguous)


def _sets_of_two(texts: Sequence[str | None]) -> Iterator[frozenset[str]]:
    """Yield every two replies of a row, and each by itself for pairs of one text."""
    known = [text for text in dict.fromkeys(texts) if text is not None]
    yield from (frozenset((one, other)) for one, other in [*combinations(known, 2), *zip(known, known, strict=True)])


def _places(config: CheckConfig) -> tuple[Path | None, Path | None, Path | None]:
    """Return the files of samples and labels, and the folder of pairs. Raises ConfigError if a folder has none."""
    if config.folder is None:
        return config.samples, config.labels, config.pairs
    # Hidden folders belong to commands that are at work, or were killed.
    rooms = [config.folder, *sorted(path for path in config.folder.glob("[!.]*") if path.is_dir())]
    found = [_first(rooms, f"{name}.jsonl") for name in ("samples", "labels")]
    pairs = next((room for room in rooms if any((room / form.format("train")).is_file() for form in FORMS)), None)
    if not any((*found, pairs)):
        raise ConfigError(
            f"--folder {config.folder}: neither samples.jsonl nor labels.jsonl nor train.jsonl lies in it or in a "
            f"folder of it. Name the files with --samples, --labels and --pairs."
        )
    return found[0], found[1], pairs


def _first(rooms: Sequence[Path], name: str) -> Path | None:
    for room in rooms:
        try:
            parts_of(room / name)
        except DataError:
            continue
        return room / name
    return None


def _gold_rows(path: Path | None, what: str, names: dict[str, Path], system: str | None) -> list[GoldRow] | None:
    if path is None:
        return None
    names[what] = path
    rows = read_gold_rows(path, labelled=what == "labels")
    return [replace(row, prompt=with_system(row.prompt, system)) for row in rows]


def _of_built(pairs: Path, names: dict[str, Path]) -> list[GoldRow] | None:
    """Return the rows that a built folder keeps of each side; None if it keeps none."""
    files = [path for side in SIDES if (path := pairs / f"labels.{side}.jsonl").is_file()]
    names |= {path.name: path for path in files}
    return list(read_gold_rows(files, labelled=True)) if files else None


def _joined(
    prompts: Sequence[Conversation], responses: Sequence[Sequence[str | None]], rewards: Sequence[Scores] | None
) -> tuple[list[GoldRow], list[GoldRow] | None]:
    """Return prompts and responses as rows, and these with their scores, up to the end of the shortest file."""
    rows = [
        GoldRow(id=str(number), prompt=prompt, responses=tuple(texts), where=f"row {number + 1}")
        for number, (prompt, texts) in enumerate(zip(prompts, responses, strict=False))
    ]
    if rewards is None:
        return rows, None
    labelled = [
        GoldRow(
            id=row.id,
            prompt=row.prompt,
            responses=row.responses,
            gold=_fitted(gold, len(row.responses)),
            where=row.where,
        )
        for row, gold in zip(rows, rewards, strict=False)
    ]
    return rows, labelled


def _fitted(scores: Scores, count: int) -> Scores:
    """Return as many scores as there are replies; a row with another number of them is counted by a check."""
    return tuple(scores[:count]) + (None,) * (count - len(scores))


def _built(folder: Path) -> list[Built]:
    """Return what a built folder holds. Raises ConfigError for one without pairs."""
    if folder.is_file():
        return [Built(path=folder, side="train", pairs=list(read_pairs(folder)))]
    found = [
        Built(path=path, side=side, pairs=list(read_pairs(path)))
        for side in SIDES
        for form in FORMS
        if (path := folder / form.format(side)).is_file()
    ]
    if not found:
        raise ConfigError(f"--pairs {folder}: it holds no {FORMS[0].format('train')}. Name what `gold build` wrote.")
    return found


def read_pairs(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a file in any form: our rows, `chosen` and `rejected` a line, or one object of columns.

    Raises ConfigError for a file that is not there, DataError for rows of another form.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file.")
    for number, row in enumerate(_objects(path), start=1):
        where = f"{path}:{number}"
        if "comparisons" in row:
            yield from _of_own_row(row, number, where)
        elif "chosen" in row and "rejected" in row:
            yield _of_sides(row, number, where)
        else:
            raise DataError(f"{where}: wanted `chosen` and `rejected`, or `replies` and `comparisons`.")


def _objects(path: Path) -> Iterator[Mapping[str, Any]]:
    columns = _columns(path)
    if columns is not None:
        chosen, rejected = columns["chosen"], columns["rejected"]
        if len(chosen) != len(rejected):
            raise DataError(f"{path}: {len(chosen)} chosen and {len(rejected)} rejected; wanted as many of both.")
        for good, bad in zip(chosen, rejected, strict=True):
            yield {"chosen": good, "rejected": bad}
        return
    for _, row in read_each_row(path):
        if isinstance(row, DataError):
            raise row
        yield row


def _columns(path: Path) -> Mapping[str, list[Any]] | None:
    """Return the columns of a file that is one object of lists of conversations, whatever it is called; else None."""
    with path.open("rb") as file:
        lines = [line for line, _ in zip((one for one in file if one.strip()), range(2), strict=False)]
    one_object = (path.suffix == ".json" and not holds_lines(path)) or len(lines) == 1 or not _is_json(lines[0])
    if not one_object or not lines or not lines[0].lstrip().startswith(b"{"):
        return None
    try:
        value = read_json(path)
    except DataError:
        if len(lines) == 1 or path.suffix == ".json":
            raise
        # Neither an object over several lines nor an object a line: reading line by line says where it is damaged.
        return None
    if not isinstance(value, dict) or not all(isinstance(value.get(side), list) for side in ("chosen", "rejected")):
        return None
    first = value["chosen"][:1]
    # A single row has a list of turns here, columns a list of conversations.
    return value if not first or isinstance(first[0], list | str) else None


def _is_json(line: bytes) -> bool:
    """Return whether a line is a value of its own, and not the beginning of one that takes several lines."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _of_sides(row: Mapping[str, Any], number: int, where: str) -> Pair:
    good, bad = (_conversation(row[side], where) for side in ("chosen", "rejected"))
    before = turns_of(row["prompt"], where) if row.get("prompt") else good[:-1]
    return Pair(prompt=before, chosen=good[-1].content, rejected=bad[-1].content, number=number)


def shown_system(system: str | None) -> str:
    """Return a system turn as a message shows it."""
    return "none" if system is None else "an empty one" if not system else f"“{short(system)}”"


def _conversation(value: Any, where: str) -> Conversation:
    turns = [Message("assistant", value)] if isinstance(value, str) else value
    try:
        found = tuple(
            one if isinstance(one, Message) else Message(str(one["role"]), str(one["content"])) for one in turns
        )
    except (TypeError, KeyError) as error:
        raise DataError(f"{where}: a side is not a list of messages with `role` and `content`.") from error
    if not found or found[-1].role != "assistant":
        raise DataError(f"{where}: a side does not end with a turn of the assistant.")
    return found


def _of_own_row(row: Mapping[str, Any], number: int, where: str) -> Iterator[Pair]:
    prompt = turns_of(row.get("prompt"), where)
    replies = row.get("replies")
    if not isinstance(replies, list):
        raise DataError(f"{where}: `replies` is not a list.")
    texts = [_conversation(reply, where)[-1].content for reply in replies]
    for judged in row["comparisons"]:
        label = float(judged.get("label", 1.0))
        first, second = texts[judged["first"]], texts[judged["second"]]
        better, worse = (first, second) if label >= 0.5 else (second, first)
        yield Pair(prompt=prompt, chosen=better, rejected=worse, is_tie=label == 0.5, number=number)


def bare(prompt: Conversation) -> Conversation:
    """Return a prompt without its system turn."""
    return prompt[1:] if prompt and prompt[0].role == "system" else prompt


def bare_key(prompt: Conversation) -> str:
    """Return the key of a prompt without its system turn."""
    return prompt_key(bare(prompt))
