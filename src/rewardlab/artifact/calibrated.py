"""Storing a calibration in a reward-model folder: the same weights and canaries under a new seal."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from rewardlab.artifact.load import require_files
from rewardlab.artifact.save import verify_in_clean_process
from rewardlab.artifact.seal import seal
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.core.lock import LOCK
from rewardlab.core.spec import SPEC_FILE, UNPROTECTED, CalibrationSpec, RewardSpec, read_spec


def store_calibration(
    folder: Path, *, temperature: float, affine: tuple[float, float], calibration: CalibrationSpec
) -> RewardSpec:
    """Write a calibration into the spec of a folder, in place of an earlier one; return the new spec.

    Weights, tokens and canaries, and so every raw score, stay as they are; only the digest of the spec in config.json
    and in the weights' metadata changes. A copy is written beside the folder and verified in a clean process, and then
    takes the folder's name: an error or a kill leaves the folder as it was. Files, links and folders that were not
    saved with the model are kept as they are.

    Raises ArtifactError if the folder does not pass verification or is of a version without a seal; OSError if the disk
    has no room for the copy.
    """
    folder = folder.resolve()
    spec = read_spec(folder)
    require_files(folder, spec)
    if spec.schema_version == UNPROTECTED:
        raise ArtifactError(
            f"{folder}: saved by an earlier version, whose folders have no place for a calibration. Write it anew with "
            f"`rewardlab export FOLDER --dtype {spec.save_dtype} --output-dir NEW`, and calibrate that."
        )
    with replacing_folder(folder) as place:
        for name in spec.files:
            _copy(folder, place, name)
        new = put_calibration(place, spec, temperature=temperature, affine=affine, calibration=calibration)
        # Copy other files only after sealing, so that they do not become part of the model.
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if name in (SPEC_FILE, LOCK) or (place / name).exists():
                continue
            if path.is_dir() and not path.is_symlink():
                (place / name).mkdir()
            else:
                _copy(folder, place, name, follow_links=False)
        verify_in_clean_process(place)
    return new


def put_calibration(
    folder: Path,
    spec: RewardSpec,
    *,
    temperature: float,
    affine: tuple[float, float] | None,
    calibration: CalibrationSpec,
) -> RewardSpec:
    """Write a calibration into the spec of a folder that is being made, which has no name yet; return the new spec."""
    new = seal(folder, replace(spec, temperature=temperature, affine=affine, calibration=calibration))
    write_json(folder / SPEC_FILE, new.to_dict())
    return new


def _copy(source: Path, target: Path, name: str, *, follow_links: bool = True) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source / name, target / name, follow_symlinks=follow_links)
