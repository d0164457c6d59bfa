"""Slices of comparisons: the same few numbers for each source, length, margin, or value of a column.

Legend: N comparisons.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.losses import nll_estimate
from rewardlab.analysis.score_table import IntArray, Pairs, PreferenceKey, ScoreTable
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate

SliceColumn = Mapping[PreferenceKey, object]
"""Source and id of a preference -> its value: a text, a number, a truth value, or None where it is unknown."""
NUM_BINS: Final = 5
NUM_DECILES: Final = 10
MOST_NUMBERS: Final = 10
"""A column of numbers with more distinct values than this is divided into `NUM_BINS` bins of equal counts."""
MOST_VALUES: Final = 50
"""Most values of a column that become slices of their own; the rest, the rarest, are put together."""
MISSING: Final = "missing"
_FEWEST_DIGITS, _MOST_DIGITS = 3, 18
OTHER: Final = "other values"
_RESERVED: Final = (MISSING, OTHER)
TURNS: Final = "turns"
"""Name of the slice by the number of turns of a conversation, reply included."""
BUILT_IN: Final[Mapping[str, str]] = {
    "source": "dataset that the preference is from",
    "reply_tokens": "mean tokens of the two replies, five bins of equal counts",
    "length_difference": "tokens of the preferred reply minus those of the other, five bins of equal counts; label "
    "ties, where no reply is preferred, are in none",
    "truncated": "whether something was cut from either conversation, prompt or reply",
    "margin_decile": "size of the score difference, ten bins of equal counts",
}
"""Name of each slicing that needs no column -> what it divides by."""


def of_column(name: str) -> str:
    """Return the name of the slicing by a column that is called like one that is always there."""
    return f"column {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some of the comparisons, by one value or range of a column."""

    label: str
    num_comparisons: int
    """All comparisons, those that are not finite included."""
    estimates: Mapping[str, Estimate]
    """`eval_accuracy`, `eval_loss` and `eval_margin`."""


def slice_pairs(
    table: ScoreTable, *, beta: float, columns: Mapping[str, SliceColumn] | None = None
) -> dict[str, tuple[Slice, ...]]:
    """Return the slices of each built-in slicing and of each column given, by name.

    Raises DataError if a column has the name of a built-in one.
    """
    pairs = table.pairs
    size = np.abs(pairs.difference)
    finite = np.isfinite(size)
    found = {
        "source": _labelled(table.sources, pairs.source),
        "reply_tokens": _binned((pairs.length_preferred + pairs.length_other) / 2, NUM_BINS),
        "length_difference": _binned(np.where(pairs.label == 0.5, np.nan, pairs.length_difference), NUM_BINS),
        "truncated": _labelled(("no", "yes"), pairs.truncated.astype(np.int64)),
        "margin_decile": _binned(np.where(finite, size, np.nan), NUM_DECILES),
    }
    for name, column in (columns or {}).items():
        if name in found:
            raise DataError(f"the slice column {name!r} has the name of a built-in slicing. Rename the column.")
        if not any(key in column for key in table.preferences):
            raise DataError(
                f"the slice column {name!r} has a value for none of the {len(table.preferences):,} preferences. Its "
                "values go by source and id of the preference; were they read from the data that was scored?"
            )
        found[name] = _of_column(table, column)
    return {name: _slices(table, pairs, *labelled, beta=beta) for name, labelled in found.items()}


_Labelled = tuple[Sequence[str], IntArray]
"""Labels, and for each comparison [N] the index of its own, −1 for none."""


def _slices(
    table: ScoreTable, pairs: Pairs, labels: Sequence[str], index: IntArray, *, beta: float
) -> tuple[Slice, ...]:
    found = []
    for number, label in enumerate(labels):
        kept = index == number
        if kept.any():
            own = pairs.where(kept)
            found.append(
                Slice(label=label, num_comparisons=int(kept.sum()), estimates=core_estimates(table, own, beta=beta))
            )
    return tuple(found)


def core_estimates(table: ScoreTable, pairs: Pairs, *, beta: float) -> dict[str, Estimate]:
    """Return accuracy, loss and mean margin of some of the comparisons."""
    finite, decided = pairs.finite, pairs.decided
    keys = table.keys(decided)
    return {
        "eval_accuracy": stats.proportion(decided.outcome, keys),
        "eval_loss": nll_estimate(finite.logit(beta=beta), finite.label, table.keys(finite)),
        "eval_margin": stats.level_mean(decided.difference, keys),
    }


def _labelled(labels: Sequence[str], index: IntArray) -> _Labelled:
    return labels, index


def _binned(values: FloatArray, num_bins: int) -> _Labelled:
    """Return bins of about equal counts of values [N], labelled by what they hold; NaN is in none.

    Equal values stay together, so there may be fewer bins.
    """
    known = values[~np.isnan(values)]
    if not known.size:
        return (), np.full(values.size, -1)
    edges = np.unique(np.quantile(known, np.linspace(0, 1, num_bins + 1)[1:-1]))
    index = np.where(np.isnan(values), -1, np.searchsorted(edges, values, "left"))
    ranges = [(own.min(), own.max()) for n in range(edges.size + 1) if (own := values[index == n]).size]
    # Bins without values would have no label; the others keep their order.
    _, index = np.unique(index, return_inverse=True)
    index = index - 1 if np.isnan(values).any() else index
    for digits in range(_FEWEST_DIGITS, _MOST_DIGITS):
        labels = [_range(low, high, digits) for low, high in ranges]
        if len(set(labels)) == len(labels):
            break
    return labels, index.astype(np.int64)


def _range(low: float, high: float, digits: int) -> str:
    """Return ``low to high`` with `digits` significant digits, but all of those before the point."""
    first, last = (
        f"{value:.0f}" if value == round(value) else np.format_float_positional(value, digits, False, False, trim="-")
        for value in (low, high)
    )
    return first if first == last else f"{first} to {last}"


def _of_column(table: ScoreTable, column: SliceColumn) -> _Labelled:
    values = [_known(column.get(key)) for key in table.preferences]
    floats = {value: _as_float(value) for value in values if _is_number(value)}
    if len(floats) > MOST_NUMBERS and all(value is None or _is_number(value) for value in values):
        as_float = np.array([floats[value] if _is_number(value) else math.nan for value in values])
        return _of_numbers(as_float[table.pairs.preference])
    texts = [None if value is None else _text(value) for value in values]
    counts = Counter(text for text in texts if text is not None)
    kept = sorted(counts, key=lambda text: (-counts[text], text))[:MOST_VALUES]
    labels = sorted(kept, key=_natural)
    place: dict[str | None, int] = {text: number for number, text in enumerate(labels)} | {None: len(labels) + 1}
    code = np.array([place.get(text, len(labels)) for text in texts], dtype=np.int64)
    return [*labels, OTHER, MISSING], code[table.pairs.preference]


def _of_numbers(values: FloatArray) -> _Labelled:
    """Return bins of finite values [N], with −∞, ∞ and NaN in slices of their own."""
    labels, index = _binned(np.where(np.isfinite(values), values, np.nan), NUM_BINS)
    index = np.where(np.isnan(values), len(labels) + 2, index + 1)
    index = np.where(values == -np.inf, 0, np.where(values == np.inf, len(labels) + 1, index))
    return ["-inf", *labels, "inf", MISSING], index.astype(np.int64)


def _known(value: object) -> object:
    """Return a value, with None for NaN."""
    return None if isinstance(value, (float, np.floating)) and math.isnan(value) else value


def _is_number(value: object) -> TypeGuard[numbers.Real]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value == abs(value) else -math.inf


def _text(value: object) -> str:
    """Return the label of a value. A text that equals a reserved label is put in quotes."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real):
        return str(value).removesuffix(".0")
    text = str(value)
    return f"'{text}'" if text.strip("'") in _RESERVED else text


def _natural(text: str) -> tuple[int, float, str]:
    """Return the key that sorts numbers by size, before texts by letters."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return (0, number, text) if math.isfinite(number) else (1, 0.0, text)
