"""The model that trains, as reward-model folders: by one process, or by the first of many."""

from __future__ import annotations

import logging
from pathlib import Path

from rewardlab.artifact.save import NOTABLE_ROUNDING, Live, live_scores, save_reward_model, saved_dtype
from rewardlab.core.config import config_hash, to_mapping
from rewardlab.core.files import provenance
from rewardlab.model.reward import RewardModel
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.parallel import device_of_rank, is_divided, twin_of, update_twin
from rewardlab.training.prepare import Base
from rewardlab.training.ranks import Ranks

logger = logging.getLogger("rewardlab")


class Saver:
    """Writes the model as reward-model folders. The first rank does, with a whole copy of a model that is sharded."""

    def __init__(self, config: RewardTrainerConfig, base: Base, model: RewardModel, ranks: Ranks) -> None:
        """Before the model is divided."""
        self._config, self._base, self._model, self._ranks = config, base, model, ranks
        self._is_divided = is_divided(config.sharding)
        self._twin = twin_of(model, ranks) if self._is_divided else model

    def release(self) -> None:
        """Give back the copy; nothing is saved after it."""
        self._twin = None

    def save(self, folder: Path, step: int) -> None:
        """Every rank calls it. Raises as `save_reward_model` does, on all of them."""
        live: Live | None = None
        if self._is_divided:
            update_twin(self._twin, self._model)
            live = Live(scores=live_scores(self._model, self._base.renderer), device=device_of_rank())
        self._ranks.by_first(lambda: self._write(folder, step, live))

    def _write(self, folder: Path, step: int, live: Live | None) -> None:
        config = self._config
        assert self._twin is not None
        spec = save_reward_model(
            folder,
            self._twin,
            self._base.renderer,
            beta=config.beta,
            save_dtype=saved_dtype(config.save_dtype),
            provenance={"config": to_mapping(config), "config_hash": config_hash(config), **provenance(), "step": step},
            adapter=(config, self._base.path) if config.lora else None,
            live=live,
        )
        logger.info("saved %s (%s)", folder, spec.save_dtype)
        if spec.max_rounding_error > NOTABLE_ROUNDING:
            logger.warning(
                "saved scores differ from the live ones by up to %.2f on the canaries (weights saved as %s, live "
                "arithmetic %s); evaluations of the folder are about the saved ones%s",
                spec.max_rounding_error,
                spec.save_dtype,
                config.precision,
                _what_to_do(spec.save_dtype, config),
            )


def _what_to_do(save_dtype: str, config: RewardTrainerConfig) -> str:
    """So that live and saved scores are nearer to each other."""
    if save_dtype != "float32":
        return ". --save-dtype float32 saves the weights as they are"
    if config.precision == "fp32":
        return ""
    if config.half_rounding == "nearest":
        return ". --half-rounding stochastic computes by weights that are right on average"
    return ". --precision fp32 computes by the saved weights"
