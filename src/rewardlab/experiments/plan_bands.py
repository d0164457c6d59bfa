"""Bands of a quantity as a plan file says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import is_number
from rewardlab.experiments.grids import as_number
from rewardlab.experiments.plan import Band

BAND_KEYS: Final = ("failure", "success", "expected")


def read_band(about: str, values: Mapping[str, Any], where: str) -> Band:
    """Return a band from its `BAND_KEYS` in a plan. Raises ConfigError, with the place, for what they cannot be."""
    expected = values.get("expected")
    edges = {name: values[name] for name in ("failure", "success") if name in values}
    if len(edges) == 1 or (not edges and expected is None):
        raise ConfigError(
            f"{where}: wanted `failure` and `success`, two numbers, or `expected: [least, most]`, or all three."
        )
    if not all(map(is_number, edges.values())):
        hint = as_number(*edges.values())
        raise ConfigError(f"{where}: wanted two numbers, got {edges!r:.80}.{hint}")
    ends = list(expected) if isinstance(expected, Sequence) and not isinstance(expected, str) else []
    if expected is not None and (len(ends) != 2 or not all(map(is_number, ends)) or not ends[0] < ends[1]):
        raise ConfigError(
            f"{where}: expected: wanted two numbers, the smaller first, got {expected!r:.60}.{as_number(*ends)}"
        )
    return Band(
        about=about,
        failure=float(edges["failure"]) if edges else None,
        success=float(edges["success"]) if edges else None,
        expected=None if expected is None else (float(ends[0]), float(ends[1])),
    )
