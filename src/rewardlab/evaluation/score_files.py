"""Reading of existing scores: in folders of `rewardlab eval`, runs and probes, and in files. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis import metrics
from rewardlab.analysis.aligned import ScoreSet
from rewardlab.core.errors import ArtifactError, ConfigError, DataError, RewardlabError
from rewardlab.core.files import absent, read_json, sha256_file
from rewardlab.core.placing import settle_to_read
from rewardlab.core.run_folder import SCORES_SUM
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.core.types import ScoreRow
from rewardlab.evaluation.score_layouts import ScoreFile, read_file, score_rows, shown
from rewardlab.evaluation.table_rows import read_rows

SUFFIX: Final = ".scores.jsonl"
_CLOSE: Final = 1e-6


def read_scores(
    path: Path, *, name: str, on: str | None = None, outcome: str | None = None, columns: Collection[str] = ()
) -> ScoreFile:
    """Return the scores in a folder of `rewardlab eval`, in a run or probe, or in a file of any known layout.

    `on` names the evaluation in a run (`test`, `selection`, `step_100` …), by default its test data, else those that
    chose its checkpoint. `outcome` names the column, or the scorer, that holds verdicts, `columns` those to be kept of
    files of other programs.

    Raises ConfigError if nothing is there, DataError if a file cannot be read as scores, ArtifactError if our scores
    do not match their checksum.
    """
    if path.is_fifo() or str(path) == "-":
        raise ConfigError(f"{path}: {absent(path)}.")
    settle_to_read(path)
    file = path if path.is_file() else _in_folder(path, on)
    if file.name.endswith(SUFFIX) and file.with_name(file.name.removesuffix(SUFFIX) + ".metrics.json").is_file():
        return _own(file, name)
    return read_file(file, name=name, outcome=outcome, columns=columns)


def _in_folder(path: Path, on: str | None) -> Path:
    """Return the file with scores in a folder. Raises ConfigError if there is none, or not the one asked for."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder.")
    rooms = [room for room in (path, path / "evals") if room.is_dir() and any(room.glob(f"*{SUFFIX}"))]
    if not rooms:
        hint = "Evaluate a model with `rewardlab eval --model … --dataset …` and name the folder that it writes."
        if (path / SPEC_FILE).is_file():
            raise ConfigError(f"{path}: is a model and holds no scores. {hint}")
        raise ConfigError(f"{path}: holds no scores (*{SUFFIX}). {hint}")
    there = {file.name.removesuffix(SUFFIX): file for file in sorted(rooms[0].glob(f"*{SUFFIX}"))}
    wanted = (
        [on] if on is not None else ["eval", "test", "selection", *([next(iter(there))] if len(there) == 1 else [])]
    )
    for one in wanted:
        if one in there:
            return there[one]
    raise ConfigError(
        f"{path}: has no scores named {' or '.join(map(repr, wanted))}. There are: {', '.join(there)}. "
        f"Choose one with --on."
    )


# --- our own files --------------------------------------------------------------------------------------------


def _own(file: Path, name: str) -> ScoreFile:
    stem = file.name.removesuffix(SUFFIX)
    recorded = file.with_name(f"{stem}.metrics.json")
    values = read_json(recorded)
    if not isinstance(values, dict) or values.get(SCORES_SUM, sha256_file(file)) != sha256_file(file):
        raise ArtifactError(f"{file} does not match its checksum in {recorded.name}: evaluate the model again.")
    rows = score_rows(file, (row for _, row in shown(read_rows(file), file)))
    beta = _beta_of(file, rows, values)
    return ScoreFile(path=file, scores=ScoreSet(name=name, rows=rows, beta=beta), chose=stem.startswith("selection"))


def _beta_of(file: Path, rows: Sequence[ScoreRow], recorded: Mapping[str, Any]) -> float | None:
    """Return the β with which the rows have the NLL that was recorded beside them; None if none is found.

    Candidates are the β recorded with the scores, those of the evaluated model and of the run, and 1, which probes and
    baselines have.
    """
    candidates = [recorded.get("beta"), *_nearby_betas(file), 1.0]
    nll = _number_in(recorded, "all", "sums", "nll")
    for beta in candidates:
        if not isinstance(beta, (int, float)) or isinstance(beta, bool) or not beta > 0:
            continue
        if nll is None:
            return float(beta) if beta is not candidates[-1] else None
        try:
            found = metrics.sums(rows, beta=float(beta)).nll
        except DataError:
            return None  # a reply has two rows, which `align` reports
        if math.isclose(found, nll, rel_tol=_CLOSE, abs_tol=_CLOSE):
            return float(beta)
    return None


def _nearby_betas(file: Path) -> Iterator[object]:
    for folder in (file.parent, file.parent.parent):
        config = folder / "config.json"
        if config.is_file():
            yield _number_in(_json_or_none(config), "beta")
        manifest = folder / "manifest.json"
        model = _value_in(_json_or_none(manifest), "config", "model") if manifest.is_file() else None
        if isinstance(model, str) and (Path(model) / SPEC_FILE).is_file():
            try:
                yield read_spec(Path(model)).beta
            except RewardlabError:
                continue


def _json_or_none(path: Path) -> object:
    try:
        return read_json(path)
    except (OSError, DataError):
        return None


def _value_in(value: object, *keys: str) -> object:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number_in(value: object, *keys: str) -> float | None:
    found = _value_in(value, *keys)
    try:
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None
    except OverflowError:  # a whole number that is beyond all floats
        return None
