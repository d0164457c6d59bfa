"""A second folder of a model that was just saved: its files, copied and read back."""

from __future__ import annotations

import shutil
from pathlib import Path

from rewardlab.artifact.load import require_files
from rewardlab.core.files import write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.core.spec import SPEC_FILE, RewardSpec, read_spec


def copy_reward_model(source: Path, spec: RewardSpec, folder: Path) -> None:
    """Write `folder` with the files of `source`, which was saved with this `spec`; it is replaced only at the very end.

    Every file of the copy is read back and compared by its SHA-256, so the scores in the spec hold for it as for the
    original. Files that were added to `source` since are left out.

    Raises ArtifactError if a file differs from the one that was saved; OSError if one is missing or the disk is full.
    In both cases an earlier folder stays as it was.
    """
    with replacing_folder(folder) as temporary:
        for name in spec.files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, temporary / name)
        write_json(temporary / SPEC_FILE, spec.to_dict())
        require_files(temporary, read_spec(temporary))
