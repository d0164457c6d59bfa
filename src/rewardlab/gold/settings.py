"""Settings that are of no use beside others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rewardlab.core.values import require


def require_unset(config: Any, *names: str, only: str) -> None:
    """Raise ConfigError for a setting that differs from its default where it would have no effect.

    `only` says with which settings it has one.
    """
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        flag = name.replace("_", "-")
        require(getattr(config, name) == defaults[name], f"--{flag}: only with {only}; here it would change nothing.")
