"""Do the stages of a plan that are not complete.

`run.json` says what each stage was done with: its arguments, and the hashes of what it read and wrote. A stage whose
record still holds is left alone. `sample` and `label` decide for themselves, since they go on row by row.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError, RunInterrupted
from rewardlab.core.files import OF_MODELS, read_summed_json, sha256_file, write_summed_json
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.lock import only_process
from rewardlab.core.spec import SPEC_FILE
from rewardlab.gold.files.parts import parts_of
from rewardlab.gold.foreign import files_of, is_classifier, is_hub_name, pinned_name
from rewardlab.gold.matching.runs import what_of
from rewardlab.gold.pipeline.config import RunConfig
from rewardlab.gold.pipeline.plan import STAGES, Plan
from rewardlab.gold.proxies import model_in
from rewardlab.gold.rmood_flags import translated

RECORD: Final = "run.json"
BY_ROW: Final = ("sample", "label")
"""Stages that find out for themselves what is missing."""
REPORTS: Final = ("match", "curve", "check")
"""Stages that are done again whenever what they read has changed."""
BUILD: Final = "build"
TRAIN: Final = "train"
PROXIES: Final = "--proxies"
WRITTEN: Final = ("--output", "--output-dir", "--folder")
"""Flags that name what is written."""
Tool = Callable[[Sequence[str]], None]


def run(plan: Plan, config: RunConfig, tools: Mapping[str, Tool], *, say: Callable[[str], None]) -> None:
    """Do the stages with `tools`, which take the arguments of their commands.

    Raises ConfigError for a stage that was done with other settings or other inputs, and what the stages raise; exits
    with the status of the gravest stage, after all of them.
    """
    for name in (config.until, config.redo):
        if name is not None and name not in plan.stages:
            raise ConfigError(f"{plan.path}: it has no stage {name!r}. There are: {', '.join(plan.stages)}.")
    if config.until and config.redo and STAGES.index(config.redo) > STAGES.index(config.until):
        raise ConfigError(f"--redo {config.redo} is behind --until {config.until}, so nothing would be done again.")
    with nullcontext() if config.dry_run else _alone(plan.folder):
        status = dict[str, int]()
        for stage in plan.stages:
            status[stage] = _Stage(plan, config, stage, say).do(tools[stage])
            if stage == config.until:
                break
    if failed := [stage for stage in status if status[stage]]:
        pages = ", ".join(str(plan.folder / stage / f"{stage}.md") for stage in failed)
        say(f"exit status {max(status.values())}: a verdict of {' and '.join(failed)} failed; see {pages}")
        raise SystemExit(max(status.values()))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes away from it in the block."""
    require_writable_folder(folder, "folder")
    with only_process(folder, "folder"):
        yield


class _Stage:
    def __init__(self, plan: Plan, config: RunConfig, name: str, say: Callable[[str], None]) -> None:
        self._plan, self._config, self._name, self._say = plan, config, name, say
        self._path = plan.folder / RECORD
        self._arguments = plan.arguments(name)
        self._again = config.redo is not None and STAGES.index(name) >= STAGES.index(config.redo)

    def do(self, tool: Tool) -> int:
        """Do the stage, unless it is complete, and return its exit status. Raises as `run`."""
        before = self._read().get(self._name)
        compared = before is not None and not self._again and self._name not in BY_ROW
        # Weights take a while, so a dry run reads only what it compares.
        base, others = ({}, {}) if self._config.dry_run and not compared else self._read_now()
        inputs = base | others
        if before is not None and compared:
            before = {**before, "inputs": self._comparable(before["inputs"])}
            # Records of earlier versions know nothing of base models.
            known = inputs if base.keys() & before["inputs"].keys() else others
            same = before["arguments"] == self._arguments and before["inputs"] == known
            if same and before["status"] is not None and before["outputs"] == self._hashes(self._outputs()):
                self._say(f"== {self._name}: complete")
                return int(before["status"])
            if not same and self._name not in REPORTS:
                raise ConfigError(f"{self._name}: {self._changes(before, inputs)} `--redo {self._name}` does it again.")
            self._require_unchanged(before)
        words = [*self._arguments, *self._how(has_begun=before is not None)]
        self._say(f"== {self._name}: rewardlab gold {shlex.join([self._name, *words])}")
        if self._config.dry_run:
            return 0
        done = {"arguments": self._arguments, "inputs": inputs}
        if self._name == BUILD and (before is not None or not (self._plan.folder / "pairs").exists()):
            # The folder appears in one step. A run that ends between that and the record is to find its own work.
            self._write({**done, "status": None, "outputs": {}})
        status = self._call(tool, words)
        self._write({**done, "status": status, "outputs": self._hashes(self._outputs())})
        return status

    def _how(self, *, has_begun: bool) -> list[str]:
        """Return the flags that make the stage go on or begin again."""
        if self._name == TRAIN:
            return ["--overwrite"] if self._again else ["--resume", "auto"]
        if self._again or self._name in REPORTS or (self._name == BUILD and has_begun):
            return ["--overwrite"]
        # Replies that failed before may be there now: the plan itself changed the input of `label`, so that is allowed.
        return ["--follow-input"] if self._name == "label" and self._plan.labels_its_own_samples else []

    def _call(self, tool: Tool, words: Sequence[str]) -> int:
        try:
            tool(words)
        except SystemExit as ended:
            # A verdict that fails ends a command with 1, and the stages after it are done all the same.
            if ended.code not in ((0, 1, None) if self._name in REPORTS else (0, None)):
                raise
            return int(ended.code or 0)
        except RunInterrupted as error:
            # The message may name --resume, which a plan does not have; so may those below, or --overwrite.
            if "--resume" not in str(error):
                raise
            raise RunInterrupted(
                f"{error} Here that is the same `rewardlab gold run`.", exit_status=error.exit_status
            ) from error
        except (ConfigError, DataError) as error:
            named = any(flag in str(error) for flag in ("--overwrite", "--resume"))
            if self._name not in (*BY_ROW, TRAIN) or not named:
                raise
            raise type(error)(f"{error} Here that is `rewardlab gold run` with --redo {self._name}.") from error
        return 0

    def _require_unchanged(self, before: Mapping[str, Any]) -> None:
        """Raise ConfigError if the preferences were changed after they were written, so that no change is lost."""
        now = self._hashes(self._outputs()) if self._name == BUILD else {}
        if changed := [name for name, digest in before["outputs"].items() if now.get(name, digest) != digest]:
            raise ConfigError(
                f"{self._name}: what it wrote has changed: {', '.join(changed)}. `--redo {self._name}` does it again."
            )

    def _changes(self, before: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
        if before["arguments"] != self._arguments:
            gone = [word for word in before["arguments"] if word not in self._arguments]
            new = [word for word in self._arguments if word not in before["arguments"]]
            return f"was done with {shlex.join(gone) or 'less'}, now {shlex.join(new) or 'without it'}."
        changed = [name for name in {**before["inputs"], **inputs} if before["inputs"].get(name) != inputs.get(name)]
        return f"what it read has changed: {', '.join(changed)}."

    # --- what it reads and writes ------------------------------------------------------------------------------

    def _inputs(self) -> list[Path]:
        pairs, proxy = self._plan.folder / "pairs", self._proxy()
        labels = [pairs / f"labels.{side}.jsonl" for side in ("test", "train")]
        built = [pairs / "train.jsonl", pairs / "test.jsonl"]
        ours: Mapping[str, list[Path]] = {
            "build": [self._plan.folder / "labels.jsonl"],
            "train": built,
            "match": [*labels, proxy],
            "curve": [labels[0], proxy],
            "check": [
                *sorted(self._plan.folder.glob("samples*.json*")),
                *sorted(self._plan.folder.glob("labels*.json*")),
                *sorted(pairs.glob("*.json*")),
            ],
        }
        return [*ours.get(self._name, []), *(file for path in self._named() for file in _files_of(path))]

    def _named(self) -> list[Path]:
        """Return what the arguments may name, other than what is written."""
        return [Path(one) for word in self._words() for one in (word, word.partition("=")[2]) if one]

    def _read_now(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the hashes of the files of a base model, and those of everything else that is read."""
        return self._hashes(self._base()), self._hashes(self._inputs()) | self._commits()

    def _comparable(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Return the recorded inputs without what cannot be compared: files of a model that do not decide what it is,
        which earlier versions recorded, and for `train` those of a base model whose folder is gone."""
        folders = {self._place(path): path for path in self._named()}
        kept, gone = dict(inputs), dict[str, None]()
        for name in inputs:
            inside = str(Path(name).parent)
            # A file that is named itself, beside a folder that is, decides whatever its ending.
            if inside not in folders or name in folders or str(Path(inside, "config.json")) not in inputs:
                continue
            if self._name == TRAIN and not _exists(folders[inside]):
                gone[inside] = None
                del kept[name]
            elif Path(name).suffix not in OF_MODELS:
                del kept[name]
        for folder in gone:
            self._say(f"{self._name}: {folder} is gone, so the base model is not compared with that of the record")
        return kept

    def _base(self) -> list[Path]:
        """Return the files of a model in a folder that a proxy is trained from."""
        named = self._named() if self._name == TRAIN else []
        return [file for path in named if _exists(path / "config.json") for file in _deciding(path)]

    def _words(self) -> list[str]:
        """Return the arguments that name nothing that is written."""
        return [word for word in self._arguments if word.partition("=")[0] not in WRITTEN]

    def _commits(self) -> dict[str, str]:
        """Return name -> current commit of the proxies on the hub. Raises ConfigError for one that the hub does not
        give."""
        found, is_proxy = dict[str, str](), False
        for word in translated(self._arguments, self._name, say=lambda _: None):
            flag, _, value = word.partition("=") if word.startswith("--") else ("", "", word)
            is_proxy = flag == PROXIES if flag else is_proxy
            what = str(what_of(value)) if is_proxy and value else ""
            if is_hub_name(what):
                found[what] = pinned_name(what, flag=PROXIES)
        return found

    def _proxy(self) -> Path:
        run = self._plan.folder / "proxy"
        return (model_in(run) or run) / SPEC_FILE

    def _outputs(self) -> list[Path]:
        at = self._plan.folder
        return {
            "sample": [at / "samples.jsonl"],
            "label": [at / "labels.jsonl"],
            "build": [at / "pairs" / "train.jsonl", at / "pairs" / "labels.train.jsonl"],
            "train": [self._proxy()],
            "match": [at / "match" / "match.json"],
            "curve": [at / "curve" / "curve.json"],
            "check": [at / "check" / "check.json"],
        }[self._name]

    def _hashes(self, paths: Sequence[Path]) -> dict[str, str]:
        """Return the SHA-256 of the files that are there, by their places in the folder of the plan."""
        found = {}
        for path in paths:
            for part in [path] if path.is_file() else _parts(path):
                found[self._place(part)] = sha256_file(part)
        return found

    def _place(self, path: Path) -> str:
        """Return the name of a file or folder in the record."""
        at, folder = path.absolute(), self._plan.folder.absolute()
        return str(at.relative_to(folder)) if at.is_relative_to(folder) else str(path)

    # --- the record --------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        return dict(read_summed_json(self._path)) if self._path.exists() else {}

    def _write(self, done: Mapping[str, Any]) -> None:
        record = self._read()
        record[self._name] = dict(done)
        write_summed_json(self._path, record)


def _files_of(path: Path) -> Sequence[Path]:
    """Return the files whose hashes stand for a path.

    They are the file itself; for a reward model or a run its spec, which names the weights; for a sequence classifier
    of another project the files that decide what it is; none for anything else.
    """
    if not _exists(path):
        return []
    if path.is_file():
        return [path]
    model = model_in(path) if path.is_dir() else None
    if model is not None:
        return [model / SPEC_FILE]
    return _deciding(path) if is_classifier(path) else []


def _deciding(folder: Path) -> list[Path]:
    return [path for path in files_of(folder) if path.suffix in OF_MODELS]


def _exists(path: Path) -> bool:
    """Return whether there is a file or folder; an argument may be a text, too long for a name."""
    try:
        return path.exists()
    except OSError:
        return False


def _parts(path: Path) -> list[Path]:
    try:
        return parts_of(path)
    except DataError:
        return []
