"""The additional work of a run with `--cache-states`: states before the first step, and two checks of their scores.

Before training, some conversations are computed as a step computes them, and compared with what is looked up: noise
that a model draws while it trains, or states that are not its own, would show there. After training, the saved folder
is read back, and a sample of rows goes through it for real.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rewardlab.batch import pack
from rewardlab.core.errors import ArtifactError, ModelError
from rewardlab.core.files import cache_folder, write_json
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets
from rewardlab.data.pack import costs
from rewardlab.model.reward import RewardModel
from rewardlab.probing.cached import CachedStates, cached_states
from rewardlab.score import score_groups
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")
Groups = Sequence[TokenGroup]
FIRST: Final = 4
"""Training preferences computed before the first step, the shortest ones: noise shows in any of them."""
LAST: Final = 8
"""Preferences that the saved folder computes in the end, drawn by the run's seed."""
FILE: Final = "states.json"
"""The file beside the evaluations that says what was looked up and how it was checked."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Scores by looked-up states against scores that were computed."""

    replies: int
    largest: float
    """Largest difference, in units of max(1, |score|)."""
    allowed: float


class LookedUp:
    """The states of a run with `--cache-states`, from before its first step until its model is judged."""

    def __init__(self, config: RewardTrainerConfig, model: RewardModel, data: Datasets, test: Groups) -> None:
        """Compute the states that are missing, and let the model look up all of them from now on.

        Raises DataError for a state that is not finite, and ModelError as `require_same_in_training` does.
        """
        self._config, self._data, self._test = config, data, test
        judged = {name: groups for name, groups in (("evaluation", data.eval), ("test", test)) if groups}
        self._states = self._attach(model, {"training": data.train, **judged})
        self._before = require_same_in_training(model, data.train)
        self._of_folder: CachedStates | None = None
        self._judged = judged or {"training": data.train}

    def _attach(self, model: RewardModel, parts: Mapping[str, Groups]) -> CachedStates:
        budget, cache = self._config.run.token_budget, cache_folder(os.environ)
        model.known_states = states = cached_states(model, parts, budget=budget, cache=cache)
        return states

    def attach_saved(self, saved: RewardModel) -> None:
        """Let a folder that was read back look up the states of what it is judged on: by its own weights, so they are
        computed first where its arithmetic or its rounding gave it others.
        """
        self._of_folder = self._attach(saved, self._judged)

    def check_saved(self, saved: RewardModel, folder: Path) -> None:
        """Let a sample of what the folder was judged on go through it, write the record, and end looking up.

        Raises ArtifactError as `require_same_when_saved` does.
        """
        assert self._of_folder is not None, "attach_saved comes first"
        run = self._config.run
        *_, groups = self._judged.values()
        after = require_same_when_saved(saved, groups, budget=run.token_budget, seed=run.seed, folder=folder)
        saved.known_states = None
        counts = {
            name: {"looked_up": states.num_read, "computed": states.num_computed}
            for name, states in (("of_the_run", self._states), ("of_the_folder", self._of_folder))
        }
        checks = {"before_training": asdict(self._before), "folder": asdict(after)}
        evals = run.output_dir / "evals"
        evals.mkdir(parents=True, exist_ok=True)
        write_json(evals / FILE, {"replies": counts, "checks": checks})


def require_same_in_training(model: RewardModel, train: Groups) -> Check:
    """Compare scores by looked-up states with those that a training step computes.

    Raises ModelError if they differ by more than the tolerance of a score in the model's arithmetic.
    """
    shortest = np.argsort(costs(train, model.layout), kind="stable")[:FIRST]
    groups = [train[int(number)] for number in shortest]
    batch = pack(groups, share=model.layout != "unshared", indices=range(len(groups))).to(model.device)
    was_training = model.training
    model.train()
    with torch.no_grad():
        known = model(batch)
        with model.computing():
            computed = model(batch)
    model.train(was_training)
    check = _compare(known.cpu().numpy(), computed.cpu().numpy(), model)
    if not check.largest <= check.allowed:
        raise ModelError(
            f"--cache-states: {type(model.backbone).__name__} scores {check.largest:.1e} away from the states that "
            f"were computed once, in training mode, on {check.replies} replies (allowed: {check.allowed:g}). It draws "
            f"noise while it trains, such as a router's jitter, or the states in $REWARDLAB_CACHE/states are not its "
            f"own. Train without --cache-states; if that folder came from elsewhere, delete it."
        )
    return check


def require_same_when_saved(saved: RewardModel, groups: Groups, *, budget: int, seed: int, folder: Path) -> Check:
    """Compare scores by looked-up states with those that a folder, read back, computes of a sample of the groups.

    Raises ArtifactError if they differ by more than the tolerance of a score.
    """
    drawn = sorted(np.random.default_rng(seed).permutation(len(groups))[:LAST].tolist())
    sample = [groups[number] for number in drawn]
    known = np.concatenate(score_groups(saved, sample, budget=budget))
    with saved.computing():
        computed = np.concatenate(score_groups(saved, sample, budget=budget, progress="checking the saved folder"))
    check = _compare(known, computed, saved)
    logger.info(
        "one score: %s scores %.0e away from the looked-up states on %d of %d preferences",
        *(folder, check.largest, len(sample), len(groups)),
    )
    if not check.largest <= check.allowed:
        raise ArtifactError(
            f"{folder} scores {check.largest:.1e} away from the states that its head was trained on, on "
            f"{check.replies} replies (allowed: {check.allowed:g}). Delete $REWARDLAB_CACHE/states and train again, or "
            f"train without --cache-states; please report this with the model's name."
        )
    return check


def _compare(known_R: np.ndarray, computed_R: np.ndarray, model: RewardModel) -> Check:
    differences = np.abs(known_R - computed_R) / np.maximum(1.0, np.abs(computed_R))
    allowed = SCORE_TOLERANCE[str(model.compute_dtype).removeprefix("torch.")]
    return Check(replies=len(known_R), largest=float(differences.max()), allowed=allowed)
