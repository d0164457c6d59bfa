"""Fixtures: a tiny reward model, its server, and an end for reward functions (a plugin, since a conftest.py beside the
tests would hide the one of all tests)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_models import save_tiny, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model."""
    return save_tiny(tmp_path_factory.mktemp("rewards") / "rm")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of its server."""
    with served(folder) as address:
        yield address


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Source -> the member that stands for it, in place of what a scorer would make of the source."""
    import rewardlab.rl.scorer as scorer_module

    members: dict[str, Any] = {}
    monkeypatch.setattr(scorer_module, "member_of", lambda source, config: members[str(source)])
    return members


@pytest.fixture
def closed_rewards() -> Iterator[None]:
    """Close the connections that reward functions have made in the trainers' loops."""
    yield
    from trl_runs import REWARDS

    for reward in REWARDS:
        reward.close()
    REWARDS.clear()
