"""Where tests keep what they prepare; what all of them share is in helpers/common.py."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _use_own_cache() -> None:
    """Keep what tests prepare out of the user's cache, subprocesses included; a model converted there is used."""
    chosen = os.environ.get("REWARDLAB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rewardlab")
    models = Path(chosen).expanduser().absolute() / "models"
    folder = Path(tempfile.mkdtemp(prefix="rewardlab-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if models.is_dir():
        (folder / "models").symlink_to(models)
    os.environ["REWARDLAB_CACHE"] = str(folder)


_use_own_cache()


def pytest_configure(config: pytest.Config) -> None:
    """Load what all tests share, except where this process only hands tests out to others: it takes ten seconds, for
    which those would wait."""
    told = config.option
    hands_out = getattr(told, "dist", "no") != "no" and getattr(told, "tx", None) and not told.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("common")
