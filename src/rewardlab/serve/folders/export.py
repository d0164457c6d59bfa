"""Export of a reward-model folder: in another dtype, in several files, with the bias of zero that some engines want."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rewardlab.artifact.calibrated import put_calibration
from rewardlab.artifact.load import load
from rewardlab.artifact.save import Exported, save_reward_model, saved_dtype, verify_in_clean_process
from rewardlab.artifact.shards import ONE, FileForm
from rewardlab.core.files import provenance
from rewardlab.core.folders import replacing_folder
from rewardlab.core.run_folder import holds_run
from rewardlab.core.signals import IS_WHOLE
from rewardlab.core.spec import SPEC_FILE, RewardSpec, read_spec
from rewardlab.core.values import require
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.files import ADAPTER_CONFIG
from rewardlab.model.reward import RewardModel

logger = logging.getLogger("rewardlab")


def export(
    source: Path,
    target: Path,
    *,
    dtype: str,
    overwrite: bool = False,
    form: FileForm = ONE,
    text_only: bool = False,
) -> RewardSpec:
    """Write the model in `source` to `target` with its weights in `dtype`, and canaries of their own.

    Weights are rounded stochastically, seeded by their names, so the result equals what saving in this dtype would have
    given. `form` divides them into files. Adapters are copied as trained. A calibration goes along where no weight is
    rounded. The new spec says which folder it was made from. With `text_only`, what reads images or sound beside the
    text model is left out, and so are adapters, whose names are those of the whole.

    Raises ArtifactError if `source` fails verification, or if its weights do not fit the range of `dtype`; ConfigError
    if `target` exists and may not be replaced, if one folder contains the other, or if there is nothing to leave out;
    ModelError if the text model alone has no class. `target` appears, or replaces what was there, only when it is
    complete and verified.
    """
    require_apart(source, target, overwrite=overwrite)
    scorer = load(source, device="cpu", attention="padded")
    model = _text_alone(scorer.model, source) if text_only else scorer.model
    before = read_spec(source)
    if before.rounding != "none":
        how = {"nearest": "to the nearest", "stochastic": "stochastically"}[before.rounding]
        logger.warning(
            "%s holds weights that were rounded %s, so %s will have lost what that rounding lost; export from the "
            "folder with the weights as they were trained, if there is one",
            source,
            how,
            target,
        )
    # No weight changes where every value has a place in the new dtype, and so no score.
    keeps_scores = saved_dtype(dtype) in (torch.float32, saved_dtype(before.save_dtype))
    if before.calibration is not None and not keeps_scores:
        logger.warning(
            "the calibration of %s is not carried over, since rounding moves scores; fit one for %s with `rewardlab "
            "calibrate`",
            source,
            target,
        )
    with replacing_folder(target, is_result=True) as place:
        spec = save_reward_model(
            place,
            model,
            scorer.renderer,
            beta=before.beta,
            save_dtype=saved_dtype(dtype),
            provenance=before.provenance | {"export": provenance()},
            source=Exported(
                folder=source,
                save_dtype=before.save_dtype,
                rounding=before.rounding,
                form=form,
                keeps_adapter=not text_only,
            ),
        )
        if before.calibration is not None and keeps_scores:
            spec = put_calibration(
                place, spec, temperature=before.temperature, affine=before.affine, calibration=before.calibration
            )
        # Free this model first: the verifying process loads one as well, and memory may not be enough for both.
        del scorer, model
        verify_in_clean_process(place)
        require_apart(source, target, overwrite=overwrite)  # another process may have made it meanwhile
    return spec


def _text_alone(model: RewardModel, source: Path) -> RewardModel:
    """Return the reward model that the text model of another one is. Raises as `export` does."""
    text: Any = model.text_part
    require(
        text is not model.backbone,
        f"--text-only: {source} is a model of text alone already. Leave the flag out.",
    )
    if (source / "adapter").is_dir():
        logger.warning("adapter/ of %s is left out: its names are those of the whole model", source)
    return RewardModel(
        text, model.head, disk_class=disk_class_of(text.config), layout="padded", compute_dtype=model.compute_dtype
    )


def require_apart(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if one folder contains the other, or if `target` may not be written.

    Without `overwrite` it may be written if it is not there or empty; with it, also if it holds a reward model or
    exported adapters, and no run.
    """
    own, other = source.resolve(), target.resolve()
    place = "is" if own == other else "lies in" if own in other.parents else "contains"
    require(
        own != other and own not in other.parents and other not in own.parents,
        f"--output-dir {target}: it {place} {source}, the folder that is read. Name another folder.",
    )
    require(
        target.is_dir() or not (target.exists() or target.is_symlink()),
        f"--output-dir {target}: it is there and is not a folder. Name another place.",
    )
    if not target.is_dir() or not any(target.iterdir()):
        return
    require(
        overwrite,
        f"--output-dir {target}: it exists and is not empty. Name another folder, or replace it with --overwrite. "
        f"{IS_WHOLE}",
    )
    require(
        not holds_run(target), f"--output-dir {target}: it holds a run, with files of its own. Name another folder."
    )
    require(
        any((target / name).is_file() for name in (SPEC_FILE, ADAPTER_CONFIG)),
        f"--output-dir {target}: it holds files that are not a reward model's, and --overwrite replaces nothing else. "
        f"Name another folder, or empty this one.",
    )
