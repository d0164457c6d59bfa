"""Arms from every combination of values, and from random draws."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.plan import NAME, Arm, Way

MOST_ARMS: Final = 1000
"""Most arms of one grid; more are likely a mistake."""
EXPONENT: Final = re.compile(r"([+-]?\d+)(\.\d+)?[eE]([+-]?)(\d+)")
"""A number that YAML 1.1 reads as a text if its point or the sign of its exponent is missing."""


def grid_arms(grid: Mapping[str, Any], where: str) -> list[Arm]:
    """Return an arm for every combination of values, named like `lr=1e-06,warmup_steps=50`.

    Raises ConfigError for a setting without values, and for a grid of more than `MOST_ARMS`.
    """
    if not grid:
        return []
    for name, values in grid.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(f"{where}: {name}: wanted a list of values, got {values!r:.60}.")
    if math.prod(len(values) for values in grid.values()) > MOST_ARMS:
        raise ConfigError(f"{where}: it has more than {MOST_ARMS:,} combinations. Draw some with `random`.")
    return [arm_of(dict(zip(grid, values, strict=True)), where) for values in itertools.product(*grid.values())]


def drawn_arms(given: Mapping[str, Any], where: str) -> list[Arm]:
    """Return arms drawn at random: `draws`, a `seed`, and for each of `settings` how it is drawn.

    A setting is drawn from `log: [low, high]`, `uniform: [low, high]`, `integers: [low, high]` (both ends) or
    `choice: [values]`. Raises ConfigError for anything else.
    """
    if not given:
        return []
    if unknown := set(given) - {"draws", "seed", "settings"}:
        raise ConfigError(f"{where}: unknown {sorted(unknown)[0]!r}. It may say: draws, seed, settings.")
    draws = given.get("draws")
    if not isinstance(draws, int) or isinstance(draws, bool) or not 1 <= draws <= MOST_ARMS:
        raise ConfigError(f"{where}: draws: wanted a number from 1 to {MOST_ARMS:,}, got {draws!r:.60}.")
    ways = ways_of(given.get("settings"), where)
    generator = np.random.default_rng(int(given.get("seed", 0)))
    found = []
    for _ in range(draws):
        found.append(arm_of({name: _draw(generator, way) for name, way in ways.items()}, where))
    return found


def way_of(given: object, where: str) -> Way:
    """Return how a setting is drawn. Raises ConfigError for anything that does not say so."""
    ways = ("log", "uniform", "integers", "choice")
    if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in ways:
        raise ConfigError(f"{where}: wanted one of {', '.join(ways)} with its values, got {given!r:.60}.")
    kind, values = next(iter(given.items()))
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(f"{where}: {kind}: wanted a list of values, got {values!r:.60}.")
    if kind == "choice":
        return kind, tuple(values)
    wanted: Any = int if kind == "integers" else int | float
    if len(values) != 2 or not all(_is_number(one, wanted) for one in values) or values[0] >= values[1]:
        what = "whole numbers" if kind == "integers" else "numbers"
        raise ConfigError(
            f"{where}: {kind}: wanted two {what}, the smaller first, got {values!r:.60}.{as_number(*values)}"
        )
    if kind == "log" and values[0] <= 0:
        raise ConfigError(f"{where}: log: wanted numbers above 0, got {values!r:.60}.")
    return kind, tuple(values)


def ways_of(given: object, where: str) -> dict[str, Way]:
    """Return setting -> how it is drawn. Raises ConfigError if there is none, or for one as `way_of` does."""
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"{where}: settings: wanted a way to draw for each setting, such as `lr: {{log: [1.0e-6, 1.0e-4]}}`."
        )
    return {str(name).replace("-", "_"): way_of(way, f"{where}: {name}") for name, way in given.items()}


def as_number(*values: object) -> str:
    """Return a hint for the first value that YAML reads as a text though a number is meant, such as `1e-5`.

    Empty if there is none.
    """
    found = next((one for value in values if isinstance(value, str) and (one := EXPONENT.fullmatch(value))), None)
    if found is None:
        return ""
    return f" YAML reads {found[0]} as a text: write {found[1]}{found[2] or '.0'}e{found[3] or '+'}{found[4]}."


def rounded(value: float, low: float, high: float) -> float:
    """Return a drawn number with four digits, which are enough for a setting and short enough for a name."""
    return min(max(float(f"{value:.4g}"), float(low)), float(high))


def _is_number(value: object, wanted: Any) -> bool:
    return isinstance(value, wanted) and not isinstance(value, bool)


def _draw(generator: np.random.Generator, way: Way) -> Any:
    kind, values = way
    if kind == "choice":
        return values[int(generator.integers(len(values)))]
    low, high = values
    if kind == "integers":
        return int(generator.integers(low, high + 1))
    if kind == "log":
        return rounded(math.exp(generator.uniform(math.log(low), math.log(high))), low, high)
    return rounded(generator.uniform(low, high), low, high)


def arm_of(values: Mapping[str, Any], where: str) -> Arm:
    """Return an arm that is named for its values. Raises ConfigError if that is not a possible name."""
    name = ",".join(f"{key}={_short(value)}" for key, value in values.items())
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r:.100} is not a name for an arm. Name these arms yourself, under `arms`.")
    return Arm(name=name, settings={key.replace("-", "_"): value for key, value in values.items()})


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
