"""Reward functions for TRL: GRPOTrainer, RLOOTrainer and AsyncGRPO.

    from rewardlab.rl.trl import reward_function
    trainer = GRPOTrainer(model=…, reward_funcs=reward_function("runs/rm/best"), …)

or, without code, `trl grpo --reward_funcs rewardlab.rl.trl.reward`, configured by the environment (`rl/configured.py`).

Facts of TRL 1.16: a reward function is called in every process with its share of the rollouts; None and NaN are taken
as "not applicable" and trained on silently; asynchronous functions run in one event loop for the trainer's life, so
connections are made there. This module imports nothing from TRL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from rewardlab.core.config import settings_of
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.spec import read_spec
from rewardlab.core.types import UNLISTED
from rewardlab.rl.checking import FloatArray, as_many, finite
from rewardlab.rl.config import ScorerConfig, is_address, require_known
from rewardlab.rl.configured import from_environment
from rewardlab.rl.loops import LoopScorer
from rewardlab.rl.reading import Reading
from rewardlab.rl.rewarding import RewardConfig, Rewarded, groups_of, keys_of, rewarded, rows_of
from rewardlab.rl.rollout_log import RolloutLog
from rewardlab.rl.rollouts import Rollout, RolloutError, naming
from rewardlab.rl.scorer import RewardScorer, Scored

logger = logging.getLogger("rewardlab")
PREFIX: Final = "rewardlab"
"""Prefix of metrics and columns in TRL's log."""
TAKES: Final = tuple(settings_of(RewardConfig))


def reward_function(source: Any, *, name: str = PREFIX, **settings: Any) -> RewardFunction:
    """Return a reward function for `reward_funcs` of a trainer of TRL.

    `source` is a reward-model folder, the address of a server, several of them as an ensemble, or a `RewardScorer`.
    `settings` are the fields of `RewardConfig` and, for a source that is not a scorer yet, of `ScorerConfig`. `name` is
    the function's name in TRL's log.

    Raises ConfigError for settings that cannot be used, and ArtifactError for a folder that holds no reward model. The
    model is loaded when it is first asked.
    """
    own = {key: settings.pop(key) for key in list(settings) if key in TAKES}
    config = RewardConfig(**own)
    if isinstance(source, RewardScorer):
        if settings:
            raise ConfigError(f"{', '.join(settings)}: the scorer is made already. Give these to the RewardScorer.")
        return RewardFunction(partial(_made_already, source), config, name=name)
    require_known(settings, [*TAKES, *settings_of(ScorerConfig)])
    # What cannot be used is an error before the trainer begins, which may be after minutes of loading.
    RewardScorer(source, **settings)
    for one in [source] if isinstance(source, str | Path) else source:
        if not is_address(one):
            read_spec(Path(one))
    return RewardFunction(partial(RewardScorer, source, **settings), config, name=name)


def _made_already(scorer: RewardScorer) -> RewardScorer:
    return scorer


class RewardFunction:
    """An asynchronous reward function, as TRL's trainers take them: one finite reward a rollout, or an error.

    It can be sent to another process before it is first used, as AsyncGRPO does, so `make` can be pickled.
    """

    def __init__(self, make: Callable[[], RewardScorer], config: RewardConfig, *, name: str) -> None:
        """Make a reward function that calls `make` once for each event loop, to get the loop's scorer."""
        self.__name__ = name
        self.config = config
        self._make = make
        self._scorers = LoopScorer(make)
        self._log: RolloutLog | None = None
        self._last_step = 0
        self._num_calls = 0
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self._make, self.config, self.__name__)

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **kwargs: Any
    ) -> list[float]:
        """Return one finite reward for each completion, in order.

        `kwargs` are the columns of the dataset and, where TRL gives them, `trainer_state`, `log_metric`, `log_extra`.

        Raises RolloutError naming step, prompt and reply for a rollout that has no finite reward, and as
        `RewardScorer.details` does; nothing is returned then, so nothing is trained on.
        """
        as_many(prompts, completions, what="completions")
        if not prompts:
            return []
        self._require_own_record(kwargs.get("log_metric"))
        step = self._step(kwargs.get("trainer_state"))
        environment_R = self._column(self.config.environment, kwargs)
        groups_R = None
        if self.config.noise_floor:
            groups_R = groups_of(prompts, group_size=self.config.group_size, num_processes=_processes()[1])
        evidence = {name: self._evidence(name, kwargs, prompts) for name in self.config.evidence}
        rollouts = await self._rollouts(prompts, completions, step)
        scored = await self._scorers.details(rollouts)
        with naming(rollouts), np.errstate(over="ignore"):
            rewards = rewarded(scored, groups_R, self.config, environment_R)
            finite(rewards.rewards_R.astype(np.float32), what="reward in float32, in which TRL keeps it,")
        self._tell(rewards, scored, kwargs)
        if self.config.log_dir is not None:
            remade = (await self._reading()).render_fn is not None
            keys = keys_of(rollouts, prompts, completions, is_remade=remade)
            judged = {k: v.tolist() for k, v in evidence.items()}
            self._record(Path(self.config.log_dir), step).write(
                rows_of(rollouts, scored, rewards, step=step, keys=keys, evidence=judged)
            )
        return cast(list[float], rewards.rewards_R.tolist())

    async def aclose(self) -> None:
        """Close the scorer of the running event loop, and the record."""
        await self._scorers.aclose()
        self._close_record()

    def close(self) -> None:
        """Close the scorers of all event loops, and the record: when training is done, outside the trainer's loop.

        A program that ends after training need not call it. Raises ConfigError in a thread that runs one of the loops.
        """
        self._scorers.close()
        self._close_record()

    def _close_record(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _step(self, state: Any) -> int:
        """Return the number of optimiser steps done or, if the trainer does not tell it, of calls before this one."""
        self._num_calls += 1
        return self._num_calls - 1 if state is None else int(state.global_step)

    async def _reading(self) -> Reading:
        """Return how the rollouts of the running loop are read."""
        return await cast(RewardScorer, self._scorers.here()).reading()

    async def _rollouts(self, prompts: Sequence[Any], completions: Sequence[Any], step: int) -> list[Rollout]:
        """Return the rollouts of a call, named by step, prompt and reply."""
        reading = await self._reading()
        rollouts, prompt_number, reply_number = [], -1, 0
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if number == 0 or prompt != prompts[number - 1]:
                prompt_number, reply_number = prompt_number + 1, 0
            name = f"step {step}, prompt {prompt_number}, reply {reply_number}"
            with _naming_render_fn(reading):
                rollouts.append(reading.rollout((prompt, completion), name=name, number=number))
            reply_number += 1
        return rollouts

    def _column(self, name: str | None, columns: Mapping[str, Any]) -> list[Any] | None:
        """Return a column of the dataset; None for no name. Raises ConfigError if no column has this name."""
        if name is None:
            return None
        if name not in columns:
            known = ", ".join(sorted(key for key, value in columns.items() if isinstance(value, list))) or "none"
            raise ConfigError(f"the dataset has no column {name!r:.60}; it has {known}.")
        if not isinstance(columns[name], Iterable) or isinstance(columns[name], UNLISTED):
            raise ConfigError(f"{name}: got {columns[name]!r:.40}; wanted one for each rollout, in the same order.")
        return list(columns[name])

    def _evidence(self, name: str, columns: Mapping[str, Any], prompts: Sequence[Any]) -> FloatArray:
        """Return a column of evidence. Raises ConfigError unless it has a value for each rollout, RolloutError for one
        that is not finite."""
        found_R = finite(self._column(name, columns) or (), what=name)
        as_many(prompts, found_R, what=name)
        return found_R

    def _tell(self, rewards: Rewarded, scored: Sequence[Scored], kwargs: Mapping[str, Any]) -> None:
        """Hand figures and columns to TRL's log, where it takes them."""
        if (log_metric := kwargs.get("log_metric")) is not None:
            self._require_own_name(log_metric)
            for name, value in rewards.metrics(scored).items():
                log_metric(f"{self.__name__}/{name}", value)
        if (log_extra := kwargs.get("log_extra")) is not None:
            log_extra(f"{self.__name__}/score", rewards.scores_R.tolist())

    def _require_own_name(self, log_metric: Any) -> None:
        """Warn once if the trainer has another reward function of this name, whose figures its log adds to these."""
        names = getattr(_trainer_of(log_metric), "reward_func_names", ())
        if not self._has_warned and list(names).count(self.__name__) > 1:
            self._has_warned = True
            logger.warning(
                "several reward functions of the trainer are called %r, and its log mixes their figures; rewards are "
                "right. Give each a name of its own: reward_function(…, name=…).",
                self.__name__,
            )

    def _require_own_record(self, log_metric: Any) -> None:
        """Raise ConfigError if the trainer has another reward function with this record, which would hold the rollouts
        of both, or where a resumed run begins, take off those of the first."""
        own = self.config.log_dir
        if own is None:
            return
        functions = getattr(_trainer_of(log_metric), "reward_funcs", ())
        folders = [
            Path(one.config.log_dir) for one in functions if isinstance(one, RewardFunction) and one.config.log_dir
        ]
        if [folder.resolve() for folder in folders].count(Path(own).resolve()) > 1:
            raise ConfigError(
                f"log_dir: several reward functions of the trainer would keep their rollouts in {own}, one record for "
                f"the rewards of all. Give each a folder of its own."
            )

    def _record(self, folder: Path, step: int) -> RolloutLog:
        """Return the record, which is opened when the first rollouts are rewarded.

        A resumed run takes off the rows that it will write again; a step before the last one is that of another trainer
        with this function. Raises ConfigError if a run that starts at step 0 finds the record of another run.
        """
        if self._log is None or step < self._last_step:
            rank, world_size = _processes()
            log = self._log or RolloutLog(folder, rank=rank, world_size=world_size)
            if step == 0 and (another := log.begun()) is not None:
                raise ConfigError(
                    f"log_dir: {another} holds the rollouts of another run. Name another folder, or remove it."
                )
            log.resume_at(step)
            self._log = log
        self._last_step = step
        return self._log


@contextmanager
def _naming_render_fn(reading: Reading) -> Iterator[None]:
    """Add to an error about messages how to make others of them: those of a trainer cannot be changed otherwise."""
    try:
        yield
    except RolloutError as error:
        if reading.render_fn is not None or not isinstance(error.__cause__, RenderError):
            raise
        remedy = "A render_fn of reward_function can do that: it gets (prompt, completion) and returns the messages."
        raise RolloutError(f"{error} {remedy}", rollouts=error.rollouts) from error.__cause__


def _trainer_of(log_metric: Any) -> Any:
    """Return the trainer whose method TRL hands over to log figures; None where it hands over none."""
    return getattr(log_metric, "__self__", None)


def _remade(make: Callable[[], RewardScorer], config: RewardConfig, name: str) -> RewardFunction:
    return RewardFunction(make, config, name=name)


def _processes() -> tuple[int, int]:
    """Return (rank, number of processes) as launchers tell them."""
    return int(os.environ.get("RANK") or "0"), int(os.environ.get("WORLD_SIZE", "1"))


@cache
def _configured() -> RewardFunction:
    """Return the reward function that the environment describes. Raises ConfigError if it describes none."""
    configured = from_environment(takes=TAKES)
    own = {name: getattr(configured.loop, name) for name in TAKES}
    return RewardFunction(configured.make_scorer, RewardConfig(**own), name=PREFIX)


async def reward(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **kwargs: Any
) -> list[float]:
    """Return the rewards of rollouts, by the settings in the environment: for `--reward_funcs rewardlab.rl.trl.reward`.

    `REWARDLAB_RL_SOURCE` names a folder or an address, `REWARDLAB_RL_CONFIG` a YAML or TOML file with `source` and the
    settings of `reward_function`. Raises ConfigError if neither is set, and as `RewardFunction` does.
    """
    return await _configured()(prompts, completions, completion_ids, **kwargs)


__all__ = ["RewardConfig", "RewardFunction", "RolloutError", "reward", "reward_function"]
