"""A reward-model folder in another dtype: for engines that compute in half precision, or to have float32 again."""

from __future__ import annotations

import logging
from pathlib import Path

from rewardlab.artifact.load import load
from rewardlab.artifact.save import Exported, save_reward_model, saved_dtype, verify_in_clean_process
from rewardlab.core.config import require
from rewardlab.core.files import provenance, replacing_folder
from rewardlab.core.spec import RewardSpec, read_spec

logger = logging.getLogger("rewardlab")


def export(source: Path, target: Path, *, dtype: str, overwrite: bool = False) -> RewardSpec:
    """Write the model in `source` to `target` with its weights in `dtype`, and canaries of their own.

    Weights are rounded stochastically, by their names: the folder is the one that saving in this dtype would have
    given. Adapters are copied as trained. The new spec says what it was made from.

    Raises ArtifactError if `source` does not check, or if `dtype` has not the range for its weights; ConfigError if
    `target` is there already, unless it is to be overwritten. Nothing is there, or what was, until all of it is.
    """
    own, other = source.resolve(), target.resolve()
    require(
        own != other and own not in other.parents and other not in own.parents,
        f"--output-dir {target}: it is {source}, or lies inside, or around it. Name another folder.",
    )
    require(
        overwrite or not target.exists() or (target.is_dir() and not any(target.iterdir())),
        f"--output-dir {target}: there is something already. Name another folder, or replace it with --overwrite.",
    )
    scorer = load(source, device="cpu", attention="padded")
    before = read_spec(source)
    if before.rounding != "none":
        how = {"nearest": "to the nearest", "stochastic": "stochastically"}[before.rounding]
        logger.warning(
            "%s holds weights that were rounded %s, so %s begins with what that left of them; begin with the folder "
            "that has them as trained, if there is one",
            source,
            how,
            target,
        )
    with replacing_folder(target) as place:
        spec = save_reward_model(
            place,
            scorer.model,
            scorer.renderer,
            beta=before.beta,
            save_dtype=saved_dtype(dtype),
            provenance=before.provenance | {"export": provenance()},
            adapter=Exported(folder=source, save_dtype=before.save_dtype, rounding=before.rounding),
        )
        del scorer  # the other process holds a model too
        verify_in_clean_process(place)
    return spec
