"""Saves the model that trains as a reward-model folder: by one process, or by all ranks that hold a sharded model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rewardlab.artifact.base import Base
from rewardlab.artifact.canary_states import CanaryStates
from rewardlab.artifact.copies import copy_reward_model
from rewardlab.artifact.save import NOTABLE_ROUNDING, Trained, save_reward_model, saved_dtype
from rewardlab.core.config import config_hash, to_mapping
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import provenance
from rewardlab.core.run_folder import saved_step
from rewardlab.core.spec import SCORE_TOLERANCE, RewardSpec, read_spec
from rewardlab.distributed.ranks import Ranks
from rewardlab.distributed.sharding import Parts
from rewardlab.model.load import PRECISION
from rewardlab.model.reward import RewardModel
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")


class Saver:
    """Writes the model as reward-model folders. The first rank writes; of a sharded model, every rank takes part in
    gathering one weight after another.

    A second folder of one step is a copy of the first. Canaries are computed anew for each step, but for a backbone
    that does not train: then most of their states are those of the first folder.
    """

    def __init__(
        self, config: RewardTrainerConfig, base: Base, model: RewardModel, ranks: Ranks, parts: Parts | None
    ) -> None:
        self._config, self._base, self._model, self._ranks, self._parts = config, base, model, ranks, parts
        frozen = not any(parameter.requires_grad for parameter in model.backbone.parameters())
        self._states = CanaryStates() if frozen and parts is None else None
        self._last: _Saved | None = None

    def save(self, folder: Path, step: int) -> None:
        """Write the model after `step` to `folder`. Every rank calls it.

        Raises as `save_reward_model` does, on all ranks.
        """
        if self._ranks.by_first(lambda: self._copies(folder, step)):
            return
        if self._parts is None:
            self._ranks.by_first(lambda: self._write(folder, step))
        else:
            self._write(folder, step)

    def _write(self, folder: Path, step: int) -> None:
        config = self._config
        commit = self._base.commit
        spec = save_reward_model(
            folder,
            self._model,
            self._base.renderer,
            beta=config.loss.beta,
            save_dtype=saved_dtype(config.run.save_dtype),
            provenance={
                "config": to_mapping(config),
                "config_hash": config_hash(config),
                **({} if commit is None else {"base_commit": commit}),
                **config.data.diagnostic.provenance,
                **provenance(),
                "step": step,
            },
            source=Trained(
                adapter=(config.model, self._base.at_commit) if config.model.lora else None, states=self._states
            ),
            division=self._parts,
        )
        self._last = _Saved(folder=folder, step=step, spec=spec)
        self._tell(folder, spec)

    def _copies(self, folder: Path, step: int) -> bool:
        """Copy the folder that was saved last if it holds the model of this step; return whether it was copied."""
        last = self._last
        if last is None or last.step != step or last.folder == folder:
            return False
        try:
            copy_reward_model(last.folder, last.spec, folder)
        except (ArtifactError, OSError) as error:
            # Writing the model needs nothing of that folder; if the disk is full, it says so itself.
            logger.warning("%s cannot be copied, so %s is written from the model: %s", last.folder, folder, error)
            return False
        self._tell(folder, last.spec)
        return True

    def _tell(self, folder: Path, spec: RewardSpec) -> None:
        """Log that a folder was saved, and a warning if its scores are far from those of the model in training."""
        config = self._config
        logger.info("saved %s (%s)", folder, spec.save_dtype)
        # The usual rounding of the run's precision is expected; a warning about it in each run would hide the others.
        if spec.max_rounding_error > _usual(config):
            logger.warning(
                "saved scores differ from the live ones by up to %.2f on the canaries (weights saved as %s, live "
                "arithmetic %s); evaluations of the folder are about the saved ones%s",
                spec.max_rounding_error,
                spec.save_dtype,
                config.model.precision,
                _what_to_do(spec.save_dtype, config),
            )


def copies_model_of(step: int, source: Path, folder: Path) -> bool:
    """Copy a reward-model folder of this step; return False, having changed nothing, if `source` is not one."""
    try:
        if saved_step(source) != step:
            return False
        copy_reward_model(source, read_spec(source), folder)
    except ArtifactError as error:
        logger.warning("%s cannot be copied: %s", source, error)
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The folder that was written last."""

    folder: Path
    step: int
    spec: RewardSpec


def _usual(config: RewardTrainerConfig) -> float:
    """Return the largest difference between live and saved scores that needs no warning."""
    dtype = str(PRECISION[config.model.precision]).removeprefix("torch.")
    return max(NOTABLE_ROUNDING, SCORE_TOLERANCE[dtype])


def _what_to_do(save_dtype: str, config: RewardTrainerConfig) -> str:
    """Return how to bring live and saved scores closer together, as the end of a sentence; empty if nothing does."""
    if save_dtype != "float32":
        return ". --save-dtype float32 saves the weights as they are"
    if config.model.precision == "fp32":
        return ""
    if config.model.half_rounding == "nearest":
        return ". --half-rounding stochastic computes by weights that are right on average"
    return ". --precision fp32 computes by the saved weights"
