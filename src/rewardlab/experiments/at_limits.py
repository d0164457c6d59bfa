"""Expressions of quantities with what their prompts would vary more if a limit were the true value.

Verdicts, bands, tables and the ranking of a search take their noise from here, so that an interval in a table says what
the verdict beside it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewardlab.analysis.crossed import Crossed, Observed, combined
from rewardlab.analysis.crossed_shares import shares_over
from rewardlab.analysis.crossed_slopes import slopes_over
from rewardlab.experiments.quantities import quantity_named, range_of

Weighed = Sequence[tuple[str, Observed, float]]
"""Name of a quantity, its values, and the derivative of an expression by them."""


def weighed_sum(parts: Weighed, value: float) -> Crossed:
    """Return `value`, an expression with these derivatives, and how uncertain it is.

    Near the end of its range, or of few lost comparisons, a number shows too little variance (`bounded.py`,
    `crossed_slopes.py`). Numbers of which no end is known keep the variance seen.
    """
    numbers = [(one, slope) for _, one, slope in parts]
    reach = sum(abs(slope) * _width(quantity) for quantity, _, slope in parts if slope)
    found = combined(numbers, value, reach=reach)
    if not found.is_testable:
        return found
    of_rows = [(quantity, one) for quantity, one, slope in parts if slope and one.influence_SC is not None]
    has_ends = all(quantity_named(quantity).is_share or one.turned_S is not None for quantity, one in of_rows)
    return replace(found, bounded=(shares_over if has_ends else slopes_over)(numbers, found.value))


def _width(quantity: str) -> float:
    low, high = range_of(quantity)
    return high - low
