"""Settings that are of no use beside others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rewardlab.core.config import require


def require_unset(config: Any, *names: str, only: str) -> None:
    """Raise ConfigError for a setting with another value than its default, where nothing would come of it.

    `only` says what it is for.
    """
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        flag = name.replace("_", "-")
        require(getattr(config, name) == defaults[name], f"--{flag}: only with {only}; here it would change nothing.")
