"""Runs `rewardlab compare`: reads scores, compares models on the same comparisons, writes results. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from rewardlab.analysis.aligned import ScoreSet
from rewardlab.analysis.comparison import ComparisonOfModels, Disagreement, compare_models, name_apart
from rewardlab.analysis.json_form import encode
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import provenance, read_json, sha256_file, to_float, write_json, write_jsonl
from rewardlab.core.placing import placing
from rewardlab.core.run_folder import EVALUATED, holds_run, judged_together, manifest_keys, only_writer
from rewardlab.core.values import require
from rewardlab.evaluation.compare_config import CompareConfig
from rewardlab.evaluation.score_files import SUFFIX, read_scores
from rewardlab.evaluation.score_layouts import (
    IDS,
    SOURCES,
    RowKey,
    ScoreFile,
    key_of_text,
)
from rewardlab.evaluation.table_rows import Row, first_of, read_rows, texts_of

Value = TypeVar("Value")
COMPARE_FILE: Final = "compare.json"
DISAGREEMENTS_FILE: Final = "disagreements.jsonl"
OF_ONE_RUN: Final = {
    "before": "{on}_before_training",
    "length only": "{on}_length_only",
    "bag of words": "{on}_bag_of_words",
    "after": "{on}",
}
"""Models of a single run, the reference first: name -> evaluation in its folder."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A comparison of score files, with facts about these files."""

    result: ComparisonOfModels
    files: Mapping[str, Path]
    """Model -> file with its scores."""
    chose: tuple[str, ...]
    """Models that are judged on data which chose their checkpoint."""
    texts: Mapping[tuple[str, str], Mapping[str, str]]
    """Source and id -> texts of `prompt`, `preferred` and `other`, if a file has them."""


def compare_files(models: Sequence[Path], config: CompareConfig) -> Compared:
    """Compare the scores of several models, or of one run before and after training beside its baselines.

    Raises ConfigError, DataError or ArtifactError for scores that cannot be compared.
    """
    read = _read(models, config)
    sets = [_with_beta(file.scores, number, len(read), config.beta) for number, file in enumerate(read)]
    gold = None if config.gold is None else read_scores(config.gold, name="gold", on=config.on, outcome=config.outcome)
    rows = _rows_by_id(config.columns)
    # Where a file has no sources, all rows go by their ids alone.
    bare = any(not any(row.source for row in file.scores.rows) for file in (*read, *([] if gold is None else [gold])))
    values = _column_values(read, rows, bare=bare) if config.slice else {}
    result = compare_models(
        sets,
        metric=config.metric,
        margin=config.margin,
        slices={name: values.get(name, {}) for name in config.slice} if config.slice else None,
        gold=None if gold is None else gold.scores,
        common=config.common,
    )
    texts: dict[tuple[str, str], Mapping[str, str]] = {}
    for file in (*read, *([] if gold is None else [gold])):
        for key, own in file.texts.items():
            texts.setdefault(key, own)
    _add_texts(texts, rows, sets)
    if bare:
        texts = _by_id(texts)
    return Compared(
        result=result,
        files={own.name: file.path for own, file in zip(sets, read, strict=True)},
        chose=tuple(file.scores.name for file in read if file.chose),
        texts=texts,
    )


def _read(models: Sequence[Path], config: CompareConfig) -> list[ScoreFile]:
    names, on, outcome = config.names, config.on, config.outcome
    require(len(models) > 0, "MODELS is missing: name two score files or folders, or one run.")
    if len(models) == 1 and len(several := judged_together(models[0])) > 1:
        models = several
    if len(models) == 1:
        return _of_one_run(models[0], on=on, names=names)
    require(
        not names or len(names) == len(models), f"--names: got {len(names)} names for {len(models)} models; name each."
    )
    named = list(names) or short_names(models)
    name_apart(named)
    read: list[ScoreFile] = []
    known: set[RowKey] = set()
    for path, name in zip(models, named, strict=True):
        file = read_scores(path, name=name, on=on, outcome=outcome, columns=config.slice)
        # The files are of the same rows: the first texts of a row are held, and no others.
        texts = {key: own for key, own in file.texts.items() if key not in known}
        known |= texts.keys()
        read.append(replace(file, texts=texts))
    return read


def _of_one_run(folder: Path, *, on: str | None, names: Sequence[str]) -> list[ScoreFile]:
    """Return the evaluations of one run on the same data: before training, baselines, after training.

    Raises ConfigError if there is only one of these.
    """
    require(folder.exists(), f"{folder}: no such file or folder.")
    require(not names, "--names: a single run names its models itself.")
    evals = folder / "evals"
    asked = [on] if on is not None else ["test", "selection"]
    data = next((name for name in asked if (evals / f"{name}{SUFFIX}").is_file()), None)
    there = {
        name: file
        for name, pattern in OF_ONE_RUN.items()
        if data is not None and (file := evals / f"{pattern.format(on=data)}{SUFFIX}").is_file()
    }
    # On the data that chose the checkpoint, the untrained model was evaluated as step 0.
    if data == "selection" and (start := evals / f"step_0{SUFFIX}").is_file():
        there = {"before": start, **there}
    if len(there) < 2:
        raise ConfigError(
            f"{folder}: nothing to compare it with. Name two score files or folders, or one run with test data."
        )
    return [read_scores(path, name=name) for name, path in there.items()]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest parts of the paths that tell them apart: `a` and `b` for `runs/a/eval` and `runs/b/eval`.

    Raises ConfigError if a path is given twice.
    """
    parts = [[*path.absolute().parts[:-1], path.name.removesuffix(SUFFIX)] for path in paths]
    if len(set(map(tuple, parts))) < len(parts):
        raise ConfigError("the same scores are named twice. Name different ones, or give each a name with --names.")
    while len({own[-1] for own in parts}) == 1 and all(len(own) > 1 for own in parts):
        parts = [own[:-1] for own in parts]
    length = 1
    while len({tuple(own[-length:]) for own in parts}) < len(parts):
        length += 1
    return ["/".join(own[-length:]) for own in parts]


def _with_beta(own: ScoreSet, number: int, count: int, beta: Sequence[float]) -> ScoreSet:
    """Return the scores with the β of `--beta`: one for all, or one a model."""
    if not beta:
        return own
    require(len(beta) in (1, count), f"--beta: got {len(beta)} values for {count} models; give one, or one each.")
    value = beta[0] if len(beta) == 1 else beta[number]
    require(value > 0, f"--beta {value:g}: must be above 0.")
    return replace(own, beta=value)


def _column_values(
    read: Sequence[ScoreFile], rows: Sequence[tuple[RowKey, Row]], *, bare: bool
) -> dict[str, dict[RowKey, str]]:
    """Return the columns of the score files, and those of the rows of `--columns`, by source and id; if `bare`, by id
    alone too."""
    found: dict[str, dict[RowKey, str]] = {}
    for file in read:
        for key, cells in file.columns.items():
            for name, value in cells.items():
                found.setdefault(name, {}).setdefault(key, value)
    for key, row in rows:
        for name, value in row.items():
            if isinstance(value, (str, int, float, bool)):
                found.setdefault(name, {})[key] = str(value)
    return {name: _by_id(values) for name, values in found.items()} if bare else found


def _by_id(values: Mapping[RowKey, Value]) -> dict[RowKey, Value]:
    """Return the values with those of every id without its source too, unless sources have other values of that id."""
    alone: dict[RowKey, Value] = {}
    several: set[str] = set()
    for (_, name), value in values.items():
        if alone.setdefault(("", name), value) != value:
            several.add(name)
    return {key: value for key, value in alone.items() if key[1] not in several} | dict(values)


def _rows_by_id(columns: Path | None) -> list[tuple[RowKey, Row]]:
    """Return the rows of `--columns` by source and id.

    A row is also returned under the id that our score rows give it by its place (`test.jsonl:7`), so that `--columns`
    can name the data themselves.
    """
    if columns is None:
        return []
    if not columns.is_file():
        raise ConfigError(f"--columns {columns}: no such file.")
    found: list[tuple[RowKey, Row]] = []
    for number, row in read_rows(columns):
        found.append((("", f"{columns.name}:{number}"), row))
        if (given := first_of(row, IDS)) is not None:
            found.append(((str(first_of(row, SOURCES) or ""), str(given)), row))
    return found


def _add_texts(
    texts: dict[RowKey, Mapping[str, str]], rows: Sequence[tuple[RowKey, Row]], sets: Sequence[ScoreSet]
) -> None:
    """Add the texts of rows that have the same prompt as the score rows; texts of other data would mislead."""
    prompts = {row.preference_id: row.prompt_key for row in sets[0].rows}
    for key, row in rows:
        if (own := texts_of(row, label=_label_of_data(row))) and key_of_text(row) in (None, prompts.get(key[1])):
            texts.setdefault(key, own)


def _label_of_data(row: Row) -> float:
    """Return the label of a row of the data; 1 if it has no label that is a number."""
    label = to_float(row.get("label"))
    return label if math.isfinite(label) else 1.0


# --- what is written --------------------------------------------------------------------------------------------


def claim_comparison(folder: Path, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Raise ConfigError unless `rewardlab compare` may write to `folder`; `inputs` are the files that it reads.

    The folder must not hold a run or an evaluation, nor files with the names of its output; with `overwrite` it may
    hold an earlier comparison. Files of these names that it did not write are never replaced.
    """
    if holds_run(folder) or manifest_keys(folder) >= EVALUATED:
        raise ConfigError(f"--output-dir {folder}: holds a run or an evaluation. Choose another folder.")
    there = [name for name in (COMPARE_FILE, DISAGREEMENTS_FILE) if (folder / name).exists()]
    own = {(folder / name).resolve() for name in there}
    for path in inputs:
        if path.exists() and path.resolve() in own:
            raise ConfigError(f"{path} is a file that --output-dir {folder} would replace. Choose another folder.")
    if there and not _is_comparison(folder / COMPARE_FILE):
        raise ConfigError(
            f"{folder} holds {', '.join(there)}, which `rewardlab compare` did not write. Choose another "
            f"--output-dir, or move them away."
        )
    if there and not overwrite:
        raise ConfigError(
            f"{folder} already holds a comparison. Choose another --output-dir, or replace it with --overwrite."
        )


def _is_comparison(path: Path) -> bool:
    """Return whether a file is the output of `as_json`."""
    try:
        value = read_json(path) if path.is_file() else None
    except (OSError, DataError):
        return False
    return isinstance(value, dict) and value.keys() >= {"others", "scores", "settings", "provenance"}


def write_comparison(folder: Path, compared: Compared, *, settings: Mapping[str, object], overwrite: bool) -> None:
    """Write `compare.json` and `disagreements.jsonl` to a folder.

    Raises ConfigError as `claim_comparison` does.
    """
    with only_writer(folder):
        claim_comparison(folder, compared.files.values(), overwrite=overwrite)
        with placing(folder, lambda: (COMPARE_FILE, DISAGREEMENTS_FILE)) as new:
            write_jsonl(new / DISAGREEMENTS_FILE, _disagreements(compared))
            write_json(new / COMPARE_FILE, as_json(compared, settings=settings))


def as_json(compared: Compared, *, settings: Mapping[str, object]) -> dict[str, object]:
    """Return all results as JSON, with NaN as null. Disagreements are written to their own file."""
    result = encode(compared.result)
    for other in result["others"]:
        other["num_disagreements"] = len(other.pop("disagreements"))
    return {
        **result,
        "scores": {name: {"file": str(path), "sha256": sha256_file(path)} for name, path in compared.files.items()},
        "judged_on_data_that_chose_the_checkpoint": list(compared.chose),
        "settings": dict(settings),
        "provenance": provenance(),
    }


def _disagreements(compared: Compared) -> Iterator[dict[str, Any]]:
    """Yield the rows on which some model and the first one disagree, with texts if there are any."""
    for other in compared.result.others:
        names = other.paired.first, other.paired.second
        for one in other.disagreements:
            yield {
                "models": list(names),
                "source": one.pair.source,
                "preference_id": one.pair.preference_id,
                "preferred": one.pair.preferred,
                "other": one.pair.other,
                "label": one.pair.label,
                "outcomes": list(one.outcomes),
                "margins_in_sd": list(one.margins),
                **({"texts": dict(found)} if (found := text_of(compared, one)) else {}),
            }


def text_of(compared: Compared, one: Disagreement) -> Mapping[str, str]:
    """Return the texts of a comparison, empty if no file has them."""
    for source in (one.pair.source, ""):
        if found := compared.texts.get((source, one.pair.preference_id)):
            return found
    return {}
