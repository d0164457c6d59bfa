"""Reads the folder of a run, of `rewardlab probe` or of `rewardlab eval`, for the report.

Reports are also made of runs that go on, were killed or were damaged, so every file may be missing, incomplete or
wrong. What cannot be used is named in `problems`, and the rest is read. Only a folder without any file of a run is
refused.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from rewardlab.analysis.health import WarningSign
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import UTF8, is_number, parse_json, require_no_pipe, to_float
from rewardlab.core.run_folder import ENDED, EVALUATED, MANIFEST, saved_steps
from rewardlab.core.spec import SPEC_FILE, RewardSpec, read_spec
from rewardlab.core.terminal import cut_to
from rewardlab.report.evaluations import JUDGED, Judged, read_judged, read_object, scores_of
from rewardlab.report.rereading import Known, read_last_step

Value = TypeVar("Value")
Kind = Literal["train", "probe", "eval"]
CONTROLS: Final = ("diagnose.json", "diagnose/diagnose.json")
"""Where the results of `rewardlab diagnose` may lie in a folder."""
BARE: Final = ("test", "selection")
"""Evaluations that are read from their score rows alone, in the folder of another program."""
RECORDS: Final = ("metrics.csv", "metrics.jsonl")
"""Files that hold the rows of a run; the first that is there is read."""
MOST_SAID: Final = 300
"""Most characters of an error in the report."""
MOST_ENDED: Final = 1000
"""The same for what ended the run."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that was found in a folder."""

    folder: Path
    kind: Kind
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    rows: Sequence[Mapping[str, float]]
    """The rows of metrics.csv by step; cells that are empty or not finite are left out."""
    signs: Sequence[WarningSign]
    evaluations: Mapping[str, Judged]
    distributions: Mapping[int, Mapping[str, Sequence[float]]]
    """Step -> `chosen` and `rejected` -> scores of the decided comparisons, in the same order; NaN if not finite.
    Empty if they were not asked for."""
    cards: Mapping[str, Mapping[str, Any]]
    """The precision cards `precision` and `live`, as they were written."""
    probe: Mapping[str, Any]
    """The content of probe.json."""
    suites: Sequence[Mapping[str, Any]]
    """Results of public suites, as they were written."""
    robustness: Mapping[str, Any]
    """The content of eval.perturbed.json."""
    controls: Mapping[str, Any]
    """The content of diagnose.json: of the folder, of a folder `diagnose` in it, or of the folder of `--controls`."""
    model: RewardSpec | None
    """The spec of the chosen model."""
    model_folder: Path | None
    steps_saved: Sequence[int]
    problems: Sequence[str]
    """What is missing or cannot be read, in words."""
    ended: str = ""
    """What ended a run before its last step, in words; empty if nothing did."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name or str(self.folder)

    @property
    def beta(self) -> float:
        """The β by which it was judged, else that of the model, else 1."""
        judged, model = self.judged, self.model
        for found in (judged.beta if judged else None, self.config.get("beta"), model.beta if model else None):
            if is_number(found) and found > 0:
                return float(found)
        return 1.0

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Scores at which `rewardlab train` or `eval` was asked for the rates of acceptance."""
        asked = self.config.get("thresholds")
        numbers = map(to_float, asked) if isinstance(asked, list) else ()
        return tuple(dict.fromkeys(number for number in numbers if math.isfinite(number)))

    @property
    def control(self) -> object:
        """The control experiment by which the data were changed, or those of the model that was judged, as it was
        written; None if they were not."""
        data = self.manifest.get("data")
        if isinstance(data, dict):
            return data.get("control")
        return None if self.model is None else self.model.provenance.get("control")

    @property
    def shared(self) -> object:
        """Counts of what two parts of the data have in common, as they were written; None if they were not."""
        data = self.manifest.get("data")
        return data.get("shared") if isinstance(data, dict) else None

    @property
    def num_steps(self) -> int | None:
        """The number of steps that the run should have; None if that is unknown."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def step(self) -> int:
        """The last step in the record."""
        return max([int(row["step"]) for row in self.rows[-1:]] + [*self.steps_saved, 0])

    @property
    def finished(self) -> bool:
        """Return whether the run ended, possibly early by its own rule, so that its model is saved and judged."""
        if self.kind == "eval":
            return "eval" in self.evaluations or bool(self.suites)
        if self.kind == "probe":
            return bool(self.probe)
        # The last thing that a run does is to judge its chosen model, on test data if there are any.
        if self.config.get("test_dataset") or self.config.get("test_split"):
            return "test" in self.evaluations
        if self.config.get("eval_dataset") or self.config.get("eval_split") or self.config.get("eval_fraction"):
            return "selection" in self.evaluations
        if not self.config:
            return "test" in self.evaluations or "selection" in self.evaluations
        return self.num_steps is not None and self.num_steps in self.steps_saved

    @property
    def judged(self) -> Judged | None:
        """The evaluation by which the run is judged, on test data if possible, else on the data that chose the model.
        For an unfinished run it is the last evaluation so far; None without any."""
        for name in JUDGED:
            if name in self.evaluations:
                return self.evaluations[name]
        steps = {
            int(match[1]): name for name in self.evaluations if (match := re.fullmatch(r"step_([0-9]{1,18})", name))
        }
        return self.evaluations[steps[max(steps)]] if steps else None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int
    """The last step in the record."""
    num_steps: int | None
    """The number of steps that the run should have; None if that is unknown."""
    signs: Sequence[WarningSign]


def read_progress(folder: Path) -> Progress | None:
    """Return how far the run in a folder is; None if no run began there.

    Of its record only the end is read, and no scores, so that one can ask after hundreds of runs. What cannot be read
    is left out.
    """
    if not any((folder / name).exists() for name in (MANIFEST, "config.json", "evals", *RECORDS)):
        return None

    def tried(name: str, read: Callable[[Path], Value], otherwise: Value) -> Value:
        path = folder / name
        if not path.is_file():
            return otherwise
        try:
            return read(path)
        except (OSError, ValueError, csv.Error):  # as in `read_folder`; the readers used here raise no others
            return otherwise

    config: Mapping[str, Any] = tried("config.json", read_object, {})
    steps = None if "model_type" in config else config.get("steps")
    record = next((name for name in RECORDS if (folder / name).is_file()), RECORDS[0])
    last = tried(record, read_last_step, None)
    return Progress(
        step=max([last or 0, *(step for step, _ in saved_steps(folder))]),
        num_steps=steps if isinstance(steps, int) else None,
        signs=tried("warnings.jsonl", _signs, []),
    )


def read_folder(folder: Path, known: Known | None = None, *, distributions: bool = True) -> Record:
    """Return everything that was found in a folder. Files that have not changed since `known` is about them are not
    read again. `distributions` says whether the scores of every evaluation are read, most of what a run wrote.

    Raises ConfigError if it is not a folder, or holds nothing that a run, a probe or an evaluation writes.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: {'is not a folder' if folder.exists() else 'not found'}. Name the folder of a run."
        )
    known = known or Known()
    problems: list[str] = []

    def tried(
        name: str, read: Callable[[Path], Value], otherwise: Value, *, wanted: bool = False, beside: Sequence[Path] = ()
    ) -> Value:
        path = folder / name
        if not path.exists():
            if wanted:
                problems.append(f"{name} is missing.")
            return otherwise
        try:
            require_no_pipe(path)
            return known.once(read, (path, *beside), problems)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, csv.Error) as error:
            problems.append(f"{name} cannot be read: {_said(error, folder)}")
            return otherwise

    nothing: dict[str, Any] = {}
    manifest = tried(MANIFEST, read_object, nothing)
    probe = tried("probe.json", read_object, nothing)
    settings = manifest.get("config")
    evaluated = isinstance(settings, dict) and manifest.keys() >= EVALUATED
    config = settings if isinstance(settings, dict) and evaluated else tried("config.json", read_object, nothing)
    # Models and data have files of these names too: transformers' config.json, the manifests of `data` and `gold`.
    is_model = "model_type" in config
    config = nothing if is_model else config
    manifest = nothing if "tool" in manifest else manifest
    kind: Kind = "eval" if evaluated else "probe" if probe or "folds" in config else "train"
    rooms = {"eval": folder} if evaluated else {"evals": folder / "evals"}
    evaluations = {
        judged.name: judged
        for room in rooms.values()
        for path in (sorted(room.glob("*.metrics.json")) if room.is_dir() else ())
        if (
            judged := tried(
                str(path.relative_to(folder)),
                lambda path: read_judged(path, problems),
                None,
                beside=(scores_of(path),),
            )
        )
        is not None
    }
    if not manifest:
        evaluations |= _bare_scores(folder / "evals", problems)
    found = [name for name in RECORDS if (folder / name).is_file()]
    if not (config or manifest or evaluations or found):
        said = f" {' '.join(problems)}" if problems else ""
        what = " It is a model: name its run, or what `rewardlab eval` wrote about it." if is_model else ""
        raise ConfigError(
            f"{folder}: holds nothing that `rewardlab train`, `probe` or `eval` wrote (config.json, manifest.json, "
            f"metrics.csv, evals/).{said}{what or ' Name the folder that was --output-dir.'}"
        )
    training = kind == "train"
    no_rows: list[Mapping[str, float]] = []
    rows = tried(
        found[0] if found else "metrics.csv", lambda path: known.rows.read(path, problems), no_rows, wanted=training
    )
    if training and not config:
        problems.append("config.json is missing or empty, so the settings are unknown.")
    chosen = _model_folder(folder, config, evaluated=evaluated)
    ended = tried(ENDED, lambda path: _sentence(read_object(path)["text"]), "") if training else ""
    return Record(
        folder=folder,
        kind=kind,
        config=config,
        manifest=manifest,
        rows=rows,
        signs=tried("warnings.jsonl", _signs, []),
        evaluations=evaluations,
        distributions=tried("reward_distributions.json", _distributions, {}) if distributions else {},
        cards={
            name: card
            for name, path in (("precision", "precision.json"), ("live", "live.json"))
            if (card := tried(path if evaluated else f"evals/{path}", read_object, nothing))
        },
        probe=probe,
        suites=[
            suite
            for path in sorted(folder.glob("suite.*.json"))
            if (suite := tried(path.name, read_object, nothing)) and isinstance(suite.get("rows"), list)
        ],
        robustness=tried("eval.perturbed.json", read_object, nothing),
        controls=next((own for name in CONTROLS if (own := tried(name, read_object, nothing))), nothing),
        model=_spec(chosen, problems),
        model_folder=chosen,
        steps_saved=[step for step, _ in saved_steps(folder)],
        problems=tuple(dict.fromkeys(problems)),
        ended=ended,
    )


def read_controls(folder: Path) -> Mapping[str, Any]:
    """Return the results that `rewardlab diagnose` wrote into a folder.

    Raises ConfigError if there are none, DataError if the file cannot be read.
    """
    path = next((folder / name for name in CONTROLS if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"--controls {folder}: no diagnose.json. Name the --output-dir of `rewardlab diagnose`.")
    found = read_object(path)
    if not isinstance(found.get("controls"), list):
        raise DataError(f"--controls: {path} is not what `rewardlab diagnose` writes. Run it again.")
    return found


@dataclass(frozen=True, kw_only=True)
class EnsembleRecord:
    """The results of `rewardlab eval --ensemble`."""

    facts: Mapping[str, Any]
    """The content of ensemble.json."""
    evaluations: Mapping[str, Judged]
    """Combination, such as `ensemble mean` -> its evaluation."""
    problems: Sequence[str]


def read_ensemble(folder: Path) -> EnsembleRecord | None:
    """Return the ensemble that was judged in a folder; None if there is none. A damaged one is named in `problems`."""
    path = folder / "ensemble.json"
    if not path.is_file():
        return None
    problems: list[str] = []
    facts: Mapping[str, Any] = {}
    evaluations: dict[str, Judged] = {}
    try:
        facts = read_object(path)
        for own in sorted(folder.glob("ensemble.*.metrics.json")):
            judged = read_judged(own, problems)
            evaluations[judged.name.replace(".", " ")] = judged
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        problems.append(f"The ensemble cannot be read: {_said(error, folder)}")
    return EnsembleRecord(facts=facts, evaluations=evaluations, problems=tuple(problems))


def _bare_scores(room: Path, problems: list[str]) -> dict[str, Judged]:
    """Return the evaluations of which there are score rows alone, as another program than `rewardlab train` may leave
    them; a run of `rewardlab train` has a manifest, and lost the file with the checksum."""
    found = {}
    for name in BARE:
        scores = room / f"{name}.scores.jsonl"
        if scores.is_file() and not (room / f"{name}.metrics.json").exists():
            problems.append(f"{name}.metrics.json is missing, so all is computed from the rows of {scores.name}.")
            found[name] = Judged(name=name, estimates={"all": {}}, counts={"all": {}}, scores=scores)
    return found


def _said(error: Exception, folder: Path) -> str:
    """Return the message of an error, without the path of the folder, and with at most MOST_SAID characters."""
    return cut_to(str(error).replace(f"{folder}/", "") or type(error).__name__, MOST_SAID)


def _sentence(text: object) -> str:
    """Return a text as a sentence of at most MOST_ENDED characters, with its full stop."""
    said = cut_to(" ".join(str(text).split()), MOST_ENDED)
    return said if said.endswith((".", "!", "?", "…")) else f"{said}."


def _signs(path: Path) -> list[WarningSign]:
    signs = []
    for line in path.read_text(encoding=UTF8, errors="replace").splitlines():
        try:
            row = parse_json(line)
            assert isinstance(row, dict)
            signs.append(
                WarningSign(
                    step=int(row["step"]), name=str(row["name"]), text=str(row["text"]), advice=str(row["advice"])
                )
            )
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            continue
    return signs


def _distributions(path: Path) -> dict[int, dict[str, list[float]]]:
    return {
        int(step): {side: [to_float(score) for score in scores[side]] for side in ("chosen", "rejected")}
        for step, scores in read_object(path).items()
    }


def _model_folder(folder: Path, config: Mapping[str, Any], *, evaluated: bool) -> Path | None:
    """Return the folder of the judged model: best/, else the last step; for an evaluation, the one that it names."""
    if evaluated:
        named = Path(str(config.get("model") or ""))
        return named if (named / SPEC_FILE).is_file() else None
    candidates = [folder / "best", *(path for _, path in reversed(saved_steps(folder)))]
    return next((path for path in candidates if (path / SPEC_FILE).is_file()), None)


def _spec(folder: Path | None, problems: list[str]) -> RewardSpec | None:
    if folder is None:
        return None
    try:
        return read_spec(folder)
    except (ArtifactError, DataError, OSError) as error:
        problems.append(f"{folder.name}/{SPEC_FILE} cannot be read: {_said(error, folder)}")
        return None
