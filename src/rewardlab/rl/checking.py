"""Checks of numbers as they are handed in: each is finite, or an error names the rollout that lacks it.

Legend: R rollouts, G rollouts of one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import ConfigError
from rewardlab.core.types import UNLISTED
from rewardlab.rl.rollouts import RolloutError

FloatArray = npt.NDArray[np.float64]
Numbers = Sequence[SupportsFloat | None] | npt.NDArray[Any]
"""One number for each rollout, of any type that Python can make a float of. None stands for one that is missing."""
Groups = Sequence[object] | npt.NDArray[Any]
"""The name of each rollout's group: numbers, texts, tuples, or whatever else Python can look up."""
MOST_NAMED = 8
"""Most rollouts that a message names. It says how many more there are."""


def in_order(values: Sequence[object] | npt.NDArray[Any], *, what: str, of: str = "rollout") -> list[Any]:
    """Return values in their order, such as those of a list, an array, a tensor or a column of a table.

    `what` says what they are. Raises ConfigError for what has no values or no order, such as a number, a
    text, a set or a generator, which would be empty the second time.
    """
    if isinstance(values, UNLISTED) or not isinstance(values, Sized) or getattr(values, "shape", None) == ():
        raise ConfigError(
            f"{what}: got {_shown(values)}, of type {type(values).__name__}; wanted a list or an array with one for "
            f"each {of}, in order."
        )
    return list(values)


def floats(values: Sequence[object] | npt.NDArray[Any]) -> FloatArray:
    """Return values as a new array of floats; NaN for what is None or not a number."""
    return np.array([_number(value) for value in values], dtype=np.float64)


def finite(values_R: Sequence[object] | npt.NDArray[Any], *, what: str) -> FloatArray:
    """Return values as a new array [R].

    `what` says what they are, such as `reward`. Raises RolloutError, naming the rollouts, for a value that is None, not
    a number, NaN or infinite, and ConfigError for what is not a list.
    """
    given_R = in_order(values_R, what=what)
    numbers_R = floats(given_R)
    wrong = tuple(np.flatnonzero(~np.isfinite(numbers_R)).tolist())
    if wrong:
        found = ", ".join(f"rollout {number}: {_shown(given_R[number])}" for number in wrong[:MOST_NAMED])
        more = f", and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise RolloutError(
            f"{len(wrong)} of {len(numbers_R)} rollouts have no {what} that could be trained on ({found}{more}); "
            f"wanted a finite number for each. Find out why it is missing, or leave the rollout out of its group.",
            rollouts=wrong,
        )
    return numbers_R


def not_negative(noise_R: Numbers | None, *, like_R: FloatArray) -> FloatArray:
    """Return the noise of rewards as a new array [R]; all 0 if `noise_R` is None.

    Raises RolloutError for a noise that is not finite or is below 0, ConfigError unless there are as many as `like_R`.
    """
    if noise_R is None:
        return np.zeros_like(like_R)
    found_R = finite(noise_R, what="noise")
    as_many(like_R, found_R, what="noise")
    if below := tuple(np.flatnonzero(found_R < 0).tolist()):
        raise RolloutError(
            f"the noise of rollout {below[0]} is {found_R[below[0]]:g}; wanted 0 or more, since it is a distance.",
            rollouts=below,
        )
    return found_R


def as_many(
    rewards_R: Sequence[object] | npt.NDArray[Any], others_R: Sequence[object] | npt.NDArray[Any], *, what: str
) -> None:
    """Raise ConfigError unless there are as many others, which `what` names, as rewards."""
    wanted, got = len(in_order(rewards_R, what="rewards")), len(in_order(others_R, what=what))
    if wanted != got:
        raise ConfigError(f"{what}: got {got} for {wanted} rollouts; wanted one for each, in the same order.")


def stated(value: float | None, name: str, *, wanted: str, allowed: Callable[[float], bool]) -> float:
    """Return a figure that the user stated. Raises ConfigError unless it is a finite number that is allowed."""
    number = _number(value)
    if not math.isfinite(number) or not allowed(number):
        got = "None" if value is None else _shown(value)
        raise ConfigError(f"{name}: got {got}; wanted {wanted}. State it.")
    return number


def total(values: Iterable[float]) -> float:
    """Return a sum, rounded once; NaN if it, or a part of it, is too large for a float."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def members_of(groups_R: Groups) -> list[npt.NDArray[np.intp]]:
    """Return for each group the numbers of its rollouts [G], in the order in which groups begin.

    Raises ConfigError for a name that is not equal to itself, such as NaN, or cannot be looked up, such as a list.
    """
    members: dict[object, list[int]] = {}
    for number, group in enumerate(groups_R):
        # Arrays and tensors of one number compare as numbers, but a dictionary cannot look them up by their value.
        name = group.tolist() if hasattr(group, "tolist") else group
        try:
            same = members.setdefault(name, [])
        except TypeError as error:
            raise _nameless(number, group) from error
        if name != name:
            raise _nameless(number, group)
        same.append(number)
    return [np.array(numbers, dtype=np.intp) for numbers in members.values()]


def _nameless(number: int, group: object) -> ConfigError:
    """Return the error for a group that other rollouts could not be in."""
    return ConfigError(
        f"groups: rollout {number} is in group {_shown(group)}, of type {type(group).__name__}, which cannot name a "
        f"group; wanted names that Python can look up, such as numbers, texts or tuples."
    )


def centred(rewards_G: FloatArray) -> tuple[float, FloatArray]:
    """Return the mean of a group and the deviations from it [G], which are exactly 0 if all rewards are equal.

    Sums are rounded once (`math.fsum`), so deviations are off by less than 3 units of rounding of the group's range.

    Raises RolloutError if rewards are so far apart that their difference is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        beyond_first_G = rewards_G - rewards_G[0]
        # The numbers are divided before they are added, since a sum of finite numbers need not be finite.
        middle = math.fsum(beyond_first_G / len(rewards_G)) if np.isfinite(beyond_first_G).all() else math.inf
        deviations_G = beyond_first_G - middle
    if not np.isfinite(deviations_G).all():
        raise RolloutError(
            f"rewards of one group lie between {rewards_G.min():g} and {rewards_G.max():g}: their difference is not a "
            f"finite number. Clip them to bounds that mean something."
        )
    return float(rewards_G[0] + middle), deviations_G


def standard_deviation(deviations: FloatArray, *, ddof: int) -> float:
    """Return the standard deviation of numbers by their deviations from the mean; 0 if there are `ddof` or fewer."""
    largest = float(np.abs(deviations).max(initial=0.0))
    if largest == 0 or len(deviations) <= ddof:
        return 0.0
    # Deviations are divided by the largest before they are squared, since the square of a finite number need not be
    # finite.
    return largest * math.sqrt(math.fsum((deviations / largest) ** 2) / (len(deviations) - ddof))


def _number(value: object) -> float:
    """Return a number as a float, and NaN for anything else."""
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # too large, or several numbers, or one with an imaginary part
        return math.nan


def _shown(value: object) -> str:
    """Return a value for a message: on one line, not long."""
    plain = value.item() if isinstance(value, np.generic) else value
    text = "missing" if plain is None else f"{plain!r}"
    return text if len(text) <= 40 else f"{text[:37]}..."
