"""Score the replies in a file with a saved reward model or another backend."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rewardlab.analysis.ensembles import Combination
from rewardlab.core.errors import ConfigError, DataError, naming
from rewardlab.core.files import sha256_file
from rewardlab.core.folders import remove_left_over, removed_at_end
from rewardlab.core.lock import only_process
from rewardlab.core.signals import IS_WHOLE, held_back, results_are_whole
from rewardlab.core.spec import CUT_MIDDLE, REFUSING, RendererSpec, read_spec
from rewardlab.core.terminal import plural
from rewardlab.core.values import Section
from rewardlab.data.readers import require_rows
from rewardlab.model.config import DEFAULT_COMPUTE, ComputeConfig
from rewardlab.serve.file_scoring.backends import Backend, LocalBackend, LocalModel
from rewardlab.serve.file_scoring.journal import Journal, clear_spent, empty, holds_scores, mark_finished, partial_of
from rewardlab.serve.file_scoring.output import Output, format_of
from rewardlab.serve.file_scoring.processes import ProcessBackend
from rewardlab.serve.file_scoring.results import Columns, FileScores, Result, result_of
from rewardlab.serve.file_scoring.rows import Survey, survey
from rewardlab.serve.file_scoring.run import score_missing

if TYPE_CHECKING:
    from rewardlab.artifact.adapters import Members

logger = logging.getLogger("rewardlab")
OUTPUT: Final = "output"
"""Name of the output in the folder of an unfinished one, until it is whole."""


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(Section):
    """How a file is scored and what is written."""

    precision: str = "fp32"
    token_budget: int | None = None
    """Tokens computed at a time; None for the default of the device."""
    compute: ComputeConfig = DEFAULT_COMPUTE
    processes: int = 1
    """Processes that score, each with a model of its own."""
    overwrite: bool = False
    """Whether an output that is there is replaced."""
    restart: bool = False
    """Whether what an interrupted run left is discarded."""
    output_as: Literal["raw", "calibrated", "probability"] = "raw"
    on_error: Literal["refuse", "write"] = "refuse"
    """What becomes of a row that cannot be scored: nothing is scored, or it is written with the cause."""
    overlong: Literal["auto", "cut", "refuse"] = "auto"
    """What becomes of a conversation above the model's length limit: cut by the rule of training, or not scored; `auto`
    is as in training, so a model that was trained without such conversations scores none."""
    pick: Literal["all", "best"] = "all"
    """What is written of several responses: all of them with their scores, or the best one."""


DEFAULT: Final = ScoreSettings()


def settled(settings: ScoreSettings, renderers: Sequence[RendererSpec]) -> ScoreSettings:
    """Return settings that say what becomes of long conversations, for models with these renderers."""
    if settings.overlong != "auto":
        return settings
    refused = any(renderer.truncation in REFUSING for renderer in renderers)
    return replace(settings, overlong="refuse" if refused else "cut")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A file to be scored: what it holds, and where its scores are kept."""

    source: Path
    target: Path
    output: Output
    survey: Survey
    columns: Columns
    folder: Path
    """Where scores are kept until the output is written."""
    input_sha256: str
    settings: ScoreSettings
    ended: ExitStack
    """Closed once the lock in `folder` is released."""

    def journal(self, identity: Mapping[str, object]) -> Journal:
        """Return the journal of a model's scores. Raises ConfigError if the folder holds scores of something else."""
        return self._journal("single", identity)

    def journals(self, identities: Sequence[Mapping[str, object]]) -> list[Journal]:
        """Return the journal of each member of an ensemble, each in its own folder below that of the output.

        Raises ConfigError if the folder holds scores of something else.
        """
        self._journal("ensemble", {"members": list(identities)}).begin({})
        shared = {"input": self.input_sha256, "overlong": self.settings.overlong}
        return [
            Journal(self.folder / f"member_{number}", {**shared, **identity})
            for number, identity in enumerate(identities, start=1)
        ]

    def _journal(self, mode: str, of_mode: Mapping[str, object]) -> Journal:
        """Return the journal of the folder itself, whose identity holds for everything below it."""
        identity = {"mode": mode, "input": self.input_sha256, "overlong": self.settings.overlong, **of_mode}
        clear_spent(self.folder, self.target, identity)
        return Journal(self.folder, identity)

    def score(self, backend: Backend, journal: Journal) -> None:
        """Score the rows that are not in the journal. Raises RewardlabError if that fails; what was scored is kept."""
        score_missing(self.source, self.survey, backend, journal, as_json=self.output.as_json)

    def finish(self, results: Iterator[Result]) -> FileScores:
        """Write the output from the results of all rows, and return the counts.

        Raises ConfigError if somebody else wrote that file meanwhile, DataError if the input has changed since.
        """
        counts = FileScores()
        path = self.folder / OUTPUT
        try:
            with naming(self.target, temporary=path):
                self.output.write(path, self.survey, self.columns, _counted(results, counts))
            if sha256_file(self.source) != self.input_sha256:
                raise DataError(f"{self.source}: it was changed while it was scored. Score it again with --restart.")
            # Check again: scoring may take hours, in which somebody may have written the file.
            if self.target.exists() and not self.settings.overwrite:
                raise ConfigError(
                    f"--output {self.target}: the file was created while scoring ran. Move it, and run the same "
                    f"command again: its scores are kept in {self.folder}."
                )
            mark_finished(self.folder, path)
            with held_back():
                path.replace(self.target)
                if not counts.unscored:  # otherwise their share is still to be judged
                    results_are_whole(self.target)
        finally:
            path.unlink(missing_ok=True)
        removed_at_end(self.folder, self.ended)
        return counts


def score_file(model: str, source: Path, target: Path, settings: ScoreSettings = DEFAULT) -> FileScores:
    """Write the rows of `source` to `target` with the column `score`, or `scores` for several responses.

    A reply that is above the model's length limit, ends in the pad token, is refused by the chat template or gets a
    score that is not finite has null in place of a score. Its cause is in `score_error`, or in `score_errors` by the
    number of the response. Scores are kept in `.NAME.partial` until the output is written. After any interruption the
    same call resumes from them, and then writes the same file, byte for byte.

    Raises DataError naming file and line, before anything is scored, for a row that cannot be scored or written (unless
    settings say that it is written with the cause); ConfigError if `target` is `source`, or exists and is not to be
    overwritten, or if the kept scores are of something else; ArtifactError if the model fails its checks.
    """
    require_places(source, target, overwrite=settings.overwrite)
    renderer = read_spec(Path(model)).renderer
    settings = settled(settings, [renderer])
    backend = backend_of(model, settings)
    may_shorten = renderer.truncation == CUT_MIDDLE
    return score_with(backend, source, target, settings, affine=backend.spec.affine, may_shorten=may_shorten)


def backend_of(
    model: str, settings: ScoreSettings, members: Members | None = None, heads: Combination | None = None
) -> LocalBackend | ProcessBackend:
    """Return the backend for a reward-model folder.

    With `members`, the folder is one of an ensemble whose backbone is loaded once; several processes do not share it.
    `heads` asks for the bootstrap heads of a probe in place of its head.

    Raises ArtifactError if its spec cannot be read.
    """
    assert settings.overlong != "auto", "it is settled by the specs of all models"
    local = LocalModel(
        folder=model,
        precision=settings.precision,
        token_budget=settings.token_budget,
        compute=settings.compute,
        overlong=settings.overlong,
        heads=heads,
    )
    return LocalBackend(local, members) if settings.processes == 1 else ProcessBackend(local, settings.processes)


def score_with(
    backend: Backend,
    source: Path,
    target: Path,
    settings: ScoreSettings = DEFAULT,
    *,
    affine: tuple[float, float] | None = None,
    may_shorten: bool = False,
) -> FileScores:
    """Do what `score_file` does, with any backend.

    `affine` is the calibration of its model, and `may_shorten` says whether replies may lose their middle. Raises the
    same errors, and those of the backend.
    """
    convert = conversion(settings.output_as, affine)
    with surveyed(source, target, settings, bare=backend.bare, may_shorten=may_shorten) as work:
        journal = work.journal(backend.identity)
        work.score(backend, journal)
        counts = work.finish(result_of(outcome, convert) for outcome in journal.outcomes())
    backend.tell(journal.num_typed, counts.scored + counts.unscored, str(source))
    return counts


@contextmanager
def surveyed(
    source: Path,
    target: Path,
    settings: ScoreSettings,
    *,
    bare: bool | None,
    spread: bool = False,
    may_shorten: bool = False,
) -> Iterator[Work]:
    """Read a whole file before anything is scored, and lock its output against other processes within the block.

    Raises as `score_file` does.
    """
    require_places(source, target, overwrite=settings.overwrite)
    output = Output(source, format_of(target))
    # A link stays a link: its target is written.
    target = target.resolve() if target.is_symlink() else target
    digest = sha256_file(source)
    refuse = settings.on_error == "refuse"
    found = survey(source, bare=bare, refuse=refuse, looks=[output.look], as_json=output.as_json)
    if settings.pick == "best" and not found.has_several:
        raise ConfigError("--pick best: no row has `responses`, so there is nothing to choose from. Leave it out.")
    if found.num_refused == found.num_rows:
        none = plural(found.num_rows, "its only row cannot", f"none of its {found.num_rows} rows can")
        raise DataError(f"{source}: {none} be scored. --on-error refuse says why.")
    if found.num_refused:
        logger.warning(
            "%s: %d of %d rows cannot be scored; %s written with the cause",
            source,
            found.num_refused,
            found.num_rows,
            plural(found.num_refused, "it is", "they are"),
        )
    columns = Columns.of(
        found,
        pick=settings.pick == "best",
        spread=spread,
        may_cut=settings.overlong != "refuse",
        may_shorten=may_shorten,
    )
    output.require(columns)
    folder = partial_of(target)
    folder.mkdir(exist_ok=True)
    with ExitStack() as ended, only_process(folder, "--output"):
        for path in (target, folder):
            remove_left_over(path, alone=True)
        # Cleared under the lock: of several processes that begin at once, each may have found no folder, and what
        # stands there is that of the one that has the lock.
        try:
            if settings.restart:
                empty(folder)
            yield Work(
                source=source,
                target=target,
                output=output,
                survey=found,
                columns=columns,
                folder=folder,
                input_sha256=digest,
                settings=settings,
                ended=ended,
            )
        except BaseException:
            if folder.exists() and not holds_scores(folder):
                removed_at_end(folder, ended)
            raise


def require_places(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise DataError unless there is something to read, ConfigError unless the output may be written."""
    require_rows(source)
    format_of(target)
    real = Path(os.path.realpath(target))
    if real.is_symlink():
        raise ConfigError(f"--output {target}: a link in a loop, which leads back to itself. Name another file.")
    if target.is_symlink() and not real.parent.is_dir():
        raise ConfigError(f"--output {target}: is a link to {real}, whose folder does not exist.")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"--output {target}: it is the file to be scored. Name another one.")
    if target.exists() and not target.is_file():
        raise ConfigError(f"--output {target}: is not an ordinary file. Name the file to write.")
    if target.exists() and not overwrite:
        raise ConfigError(
            f"--output {target}: it already exists. Name another file, or replace it with --overwrite. {IS_WHOLE}"
        )


def conversion(output_as: str, affine: tuple[float, float] | None) -> Callable[[list[float]], list[float]]:
    """Return the function from the raw scores of a row to those that are written.

    Raises ConfigError if the output needs a calibration and the model has none.
    """
    if output_as == "raw":
        return lambda scores: scores
    from rewardlab.score import calibrated, probabilities

    made_by = {"calibrated": calibrated, "probability": probabilities}[output_as]
    made_by([0.0], affine)
    return lambda scores: made_by(scores, affine)


def _counted(results: Iterator[Result], counts: FileScores) -> Iterator[Result]:
    for result in results:
        counts.count(result)
        yield result
