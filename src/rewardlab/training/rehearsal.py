"""`rewardlab train --dry-run`: a whole run in small, of which nothing is kept, and what the whole run would take.

A rehearsal reads all of the data, as the run will, and then goes through every stage of it with a few steps and a few
rows: it trains, evaluates, saves, loads the saved model in a process of its own, and judges it. In between it trains
on a few preferences alone, which shows whether the set-up can learn at all.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.config import require_kind, settings_of
from rewardlab.core.errors import ConfigError, DiskFullError, RunInterrupted
from rewardlab.core.folders import remove, require_writable_folder
from rewardlab.core.lock import LOCK, only_process
from rewardlab.core.run_folder import CHECKPOINTS, saved_steps
from rewardlab.core.signals import INTERRUPTED, RESUME_LATER, Terminated, raised_at_once
from rewardlab.core.terminal import visible
from rewardlab.core.types import TokenGroup
from rewardlab.core.values import require
from rewardlab.data.dataset_names import given_rows
from rewardlab.data.groups import Datasets, Groups, prompt_numbers
from rewardlab.data.merging import Limits, MergedGroups
from rewardlab.data.pack import costs
from rewardlab.data.prepare import draw
from rewardlab.data.step_order import batch_of_step
from rewardlab.evaluation.precision import MOST
from rewardlab.model.reward import RewardModel
from rewardlab.score import SPREAD
from rewardlab.training.by_heart import ByHeart, learn_by_heart
from rewardlab.training.closing import wants_card
from rewardlab.training.cost.memory import free_memory, in_use
from rewardlab.training.loop.reward_trainer import RewardTrainer
from rewardlab.training.loop.step_rows import StepRows
from rewardlab.training.monitoring.monitor import require_monitoring
from rewardlab.training.rehearsed import Rehearsal
from rewardlab.training.run import Rows, TrainResult, carry_out
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.start import Ready, require_free

logger = logging.getLogger("rewardlab")

STEPS: Final = 5
"""Steps that are taken; the first, in which kernels are prepared, is not timed."""
JUDGED: Final = 64
"""Preferences of each kind of data that are evaluated."""
QUIET: Final[Mapping[str, Any]] = {
    "dry_run": False,
    "overwrite": False,
    "report_to": ("none",),
    "profile": False,
    "profile_memory": False,
    "track_gpu": False,
    "max_hours": None,
    "early_stopping_patience": None,
    "log_every": 1,
}
"""Settings without what only a whole run is for."""


def rehearse(
    config: RewardTrainerConfig,
    *,
    preferences: Rows | None = None,
    eval_preferences: Rows | None = None,
    test_preferences: Rows | None = None,
) -> Rehearsal | None:
    """Try the run of `config` in small, in a folder that is removed, and return what it would take.

    Rows in memory are as for `train`. The first step is that with the most tokens, the second that with the largest
    preference, and the others are the run's first (all in their order where an epoch has no more than these); at most
    `JUDGED` preferences of each kind of data are evaluated. The run's folder is neither made nor changed. With several
    processes all but the first get None.

    Raises what `train` would, ConfigError for a run to be resumed, and RunInterrupted if a signal ends it.
    """
    require_kind(config, RewardTrainerConfig)
    given = given_rows(preferences=preferences, eval_preferences=eval_preferences, test_preferences=test_preferences)
    if config.run.resume is not None:
        raise ConfigError("--dry-run tries a run that begins. Leave out --resume, or --dry-run.")
    # What the rehearsal itself leaves out.
    require_monitoring(config)
    if config.run.output_dir.is_dir():
        require_writable_folder(config.run.output_dir, "--output-dir")
        if (config.run.output_dir / LOCK).exists():
            with only_process(config.run.output_dir, "--output-dir"):
                pass  # no run is under way there
        require_free(config, overwrite=config.run.overwrite)
    shortened = _Shortened(config)
    with _interruptible(), _told_when_full(config.run.output_dir), _own_folder(_above(config.run.output_dir)) as folder:
        logger.info("dry run: a few steps and rows, in %s, which is removed at the end", folder)
        result = carry_out(config.replace(**QUIET, output_dir=folder), given, None, trial=shortened)
        return shortened.rehearsal(result) if _is_first() else None


def _is_first() -> bool:
    return (os.environ.get("RANK") or "0") == "0"


def _above(output_dir: Path) -> Path:
    """Return the folder of a run, or the nearest one above that is there. Raises RewardlabError if none can be made."""
    output_dir = output_dir.absolute()
    there = next(path for path in (output_dir, *output_dir.parents) if os.path.lexists(path))
    if not there.is_dir():
        require_writable_folder(output_dir, "--output-dir")  # says why that cannot be
    return there


@contextmanager
def _own_folder(above: Path) -> Iterator[Path]:
    """Yield a folder of this process and its ranks alone, on the disk of the run's, and remove it."""
    require_writable_folder(above, "--output-dir")
    # The processes of one run have the port of their meeting in common, and no other run on these machines has it.
    ranks = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get("RANK")]
    folder = above / f".dry-run-{'-'.join(ranks) or os.getpid()}"
    if _is_first():
        require(not os.path.lexists(folder), f"{folder} is there; a dry run that was killed left it. Remove it.")
        for path in sorted(above.glob(".dry-run-*")):
            if (path / LOCK).is_file():
                with suppress(ConfigError), only_process(path, "--output-dir"):  # held: it goes on
                    logger.warning("%s is there; a dry run that was killed left it. Remove it.", path)
    try:
        yield folder
    finally:
        if _is_first():
            remove(folder)


@contextmanager
def _told_when_full(output_dir: Path) -> Iterator[None]:
    """Say for a full disk what that means for the run: there is nothing to go on with."""
    try:
        yield
    except DiskFullError as full:
        why = full.__cause__.strerror if isinstance(full.__cause__, OSError) else "the disk is full"
        raise DiskFullError(
            f"--output-dir {visible(str(output_dir))}: {why} there for a few steps in small, and the run needs more. "
            f"Make room there, or choose a folder on another disk. A dry run keeps nothing."
        ) from full


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let signals end a rehearsal by RunInterrupted wherever it is."""
    try:
        with raised_at_once():
            yield
    except RunInterrupted as stopped:
        raise _interruption(str(stopped).partition(" after ")[0], stopped.exit_status) from None
    except Terminated as ended:
        raise _interruption(f"stopped by {ended}", RESUME_LATER) from None
    except KeyboardInterrupt:
        raise _interruption("stopped by Ctrl-C", INTERRUPTED) from None


def _interruption(how: str, status: int) -> RunInterrupted:
    return RunInterrupted(f"{how}. A dry run keeps nothing; the same command begins anew.", exit_status=status)


class _Shortened:
    """A `Trial`: shortens a run, remembers the whole, and sees whether its model can learn."""

    def __init__(self, config: RewardTrainerConfig) -> None:
        self._asked = config
        self._whole: Ready | None = None
        self._short: Ready | None = None
        self._memory: int | None = None
        self._on_cpu = True
        self._by_heart: ByHeart | None = None

    def shorten(self, ready: Ready) -> Ready:
        """Return the run with a few steps and rows."""
        # As the run itself will have them, so that its hash is the same.
        asked = {name: own.of(self._asked) for name, own in settings_of(RewardTrainerConfig).items() if name in QUIET}
        decided = {"dry_run": False, "overwrite": False, "output_dir": self._asked.run.output_dir}
        whole = ready.config.replace(**asked | decided)
        self._whole = replace(ready, config=whole)
        require_monitoring(whole)  # of the steps, which are decided now
        self._on_cpu = ready.device.type == "cpu"
        free = free_memory(ready.device)
        self._memory = None if free is None else free + in_use(ready.device)
        config = ready.config
        assert config.run.steps is not None
        taken = min(STEPS, config.run.steps)
        seed, data = config.run.seed, ready.data
        short = Datasets(
            train=_rows_of(data.train, ready, taken),
            eval=_some(data.eval, seed),
            train_eval=_some(data.train_eval, seed),
        )
        changed = config.replace(
            steps=taken,
            eval_every=taken,
            save_every=None,
            rows_per_prompt=1,  # the rows of its steps are chosen already
            warmup_steps=min(config.schedule.warmup_steps or 0, taken),
            precision_card="always" if wants_card(whole, config.run.steps) else "never",
        )
        self._short = replace(ready, config=changed, data=short, test=_some(ready.test, seed))
        return self._short

    def settings(self, config: RewardTrainerConfig) -> RewardTrainerConfig:
        """Return the settings of the whole run."""
        assert self._whole is not None
        return self._whole.config

    def trained(self, trainer: RewardTrainer, model: RewardModel, ready: Ready) -> None:
        """Let the model learn a few preferences by heart."""
        logger.info("dry run: a few preferences again and again, to see whether they can be learned")
        self._by_heart = learn_by_heart(trainer, model, ready.config, ready.data.train)

    def rehearsal(self, result: TrainResult) -> Rehearsal:
        """Return what the whole run would take, by the record of the short one."""
        assert self._whole is not None
        assert self._short is not None
        whole, short, folder = self._whole, self._short, result.output_dir
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows: Sequence[Mapping[str, Any]] = [json.loads(line) for line in lines]
        steps = [row for row in rows if row.get("tokens")]
        timed = steps[1:] or steps
        rates = [row["seconds"] / row["tokens"] for row in timed]
        tokens = _tokens_of_training(whole)
        model = _size(result.last)
        checkpoint = _size(folder / CHECKPOINTS)
        judged = [row["eval_seconds"] for row in rows if row.get("eval_seconds")]
        evaluations = _evaluations(whole) if whole.data.eval else 0
        return Rehearsal(
            config=whole.config,
            preferences={
                "training": len(whole.data.train),
                "evaluation": len(whole.data.eval),
                "training rows evaluated": len(whole.data.train_eval),
                "test": len(whole.test),
            },
            num_steps=whole.config.run.steps or 0,
            steps_taken=result.last_step,
            train_seconds=(min(rates) * tokens, max(rates) * tokens) if rates else None,
            steps_timed=len(timed),
            evaluations=evaluations,
            eval_seconds=_seconds_of_evaluations(whole, short, judged, evaluations),
            by_heart=self._by_heart,
            peak_bytes=round(max((row.get("peak_memory_gib") or 0.0) for row in rows) * 2**30),
            on_cpu=self._on_cpu,
            memory_bytes=self._memory,
            model_bytes=model,
            checkpoint_bytes=checkpoint,
            disk_bytes=_most_on_disk(whole, model, checkpoint),
            free_disk_bytes=shutil.disk_usage(folder).free + _size(folder) + self._replaced(),
        )

    def _replaced(self) -> int:
        """Return the bytes of models and checkpoints that the run will replace."""
        run = self._asked.run.output_dir
        if not (self._asked.run.overwrite and run.is_dir()):
            return 0
        return sum(
            _size(folder) for folder in (run / "best", run / CHECKPOINTS, *(path for _, path in saved_steps(run)))
        )


def _some(groups: Sequence[TokenGroup], seed: int) -> Sequence[TokenGroup]:
    return draw(groups, JUDGED, seed) if isinstance(groups, Groups) else groups[:JUDGED]


def _rows_of(train: Sequence[TokenGroup], ready: Ready, num_steps: int) -> Sequence[TokenGroup]:
    """Return training data whose first steps are the heaviest of the run, and then the run's first."""
    assert isinstance(train, Groups)
    size, seed = ready.config.run.batch_size, ready.config.run.seed
    whole_steps = len(train) // size  # those of an epoch that are not cut short at its end
    if whole_steps <= num_steps:
        return train
    all_rows = _step_rows(train, ready)
    steps = [np.array(all_rows.of_step(step)) for step in range(whole_steps)]
    tokens, prompts, numbers = np.array(costs(train, ready.layout)), train.prompt_tokens(), prompt_numbers(train)

    def computed(rows: npt.NDArray[np.int64]) -> int:
        """About how many tokens a step computes: a prompt of several rows counts once."""
        first = np.unique(numbers[rows], return_index=True)[1] if all_rows.merges else np.arange(len(rows))
        return int((tokens - prompts)[rows].sum() + prompts[rows[first]].sum())

    heaviest = [int(np.argmax([of(rows) for rows in steps])) for of in (computed, lambda rows: tokens[rows].max())]
    chosen = list(dict.fromkeys([*heaviest, *range(num_steps)]))[:num_steps]
    rows = np.concatenate([steps[step] for step in chosen])
    order = [batch_of_step(step, num_groups=len(rows), batch_size=size, seed=seed) for step in range(num_steps)]
    placed: npt.NDArray[np.int64] = np.empty(len(rows), np.int64)
    placed[np.concatenate([np.array(batch) for batch in order])] = rows
    return train.take(placed)


def _step_rows(train: Sequence[TokenGroup], ready: Ready) -> StepRows:
    return StepRows(ready.config, train, layout=ready.layout, num_ranks=int(ready.facts["ranks"]))


def _tokens(groups: Sequence[TokenGroup], ready: Ready) -> int:
    """Return the tokens that scoring all groups computes."""
    if len(groups) and ready.layout == "shared":
        limits = Limits(tokens=ready.config.run.token_budget, spread=SPREAD)
        return int(MergedGroups(groups, limits).num_tokens().sum())
    return sum(costs(groups, ready.layout)) if len(groups) else 0


def _tokens_of_training(whole: Ready) -> float:
    """Return the tokens that all steps compute, padding left out, as those of the first epoch do in the mean."""
    assert whole.config.run.steps is not None
    return _step_rows(whole.data.train, whole).tokens() * whole.config.run.steps


def _evaluations(whole: Ready) -> int:
    """Return how often a run evaluates: before its first step, at its interval, and at its end."""
    steps, every = whole.config.run.steps, whole.config.run.eval_every
    assert steps is not None
    assert every is not None
    return 1 + -(-steps // every)


def _seconds_of_evaluations(whole: Ready, short: Ready, judged: Sequence[float], evaluations: int) -> float | None:
    """Return the seconds of all evaluations, of the chosen model's, and of the tests before and after training."""
    seen = _tokens(short.data.eval, short) + _tokens(short.data.train_eval, short)
    if not judged or not seen:
        return None
    held_out, test = _tokens(whole.data.eval, whole), _tokens(whole.test, whole)
    each = held_out + _tokens(whole.data.train_eval, whole)
    card = 0.0
    if wants_card(whole.config, whole.config.run.steps or 0):
        groups = whole.test or whole.data.eval
        card = 2 * _tokens(groups, whole) * min(1, MOST / len(groups))
    return judged[-1] / seen * (evaluations * each + held_out + 2 * test + card)


def _most_on_disk(whole: Ready, model: int, checkpoint: int) -> int:
    """Return the bytes of models and checkpoints when a run has most of them, and is writing one more."""
    run, best = whole.config.run, 1 if whole.data.eval else 0
    assert run.steps is not None
    saved = -(-run.steps // run.save_every) if run.save_every else 1
    saved = min(saved, run.save_total_limit or saved)
    return (saved + best) * model + (run.checkpoint_limit * checkpoint) + max(model, checkpoint)


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
