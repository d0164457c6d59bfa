"""Slices: bins that keep equal values together, labels that differ, columns of any kind."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rewardlab.analysis.score_table import ScoreTable, score_table
from rewardlab.analysis.slices import _binned, slice_pairs
from rewardlab.core.errors import DataError
from score_rows import pair_rows

values = arrays(
    np.float64, st.integers(1, 40), elements=st.one_of(st.sampled_from([0.0, 1.0, math.nan]), st.floats(-1e4, 1e4))
)


@given(values=values)
def test_every_value_is_in_one_bin_and_the_bins_are_in_order(values: np.ndarray) -> None:
    labels, index = _binned(values, 5)
    assert len(labels) <= 5
    assert len(set(labels)) == len(labels)
    assert np.array_equal(index < 0, np.isnan(values))
    assert set(index[index >= 0].tolist()) == set(range(len(labels)))
    edges = [(values[index == n].min(), values[index == n].max()) for n in range(len(labels))]
    assert all(one[1] < other[0] for one, other in pairwise(edges))


def table() -> ScoreTable:
    return score_table(pair_rows([(float(number % 3), 1.0, 1.0) for number in range(60)]))


def column(value) -> dict[tuple[str, str], object]:
    return {("made-up", f"row-{number}"): value(number) for number in range(60)}


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (lambda n: n % 2 == 0, ["no", "yes"]),
        (lambda n: [10, 9, 100][n % 3], ["9", "10", "100"]),
        (lambda n: "chat" if n < 40 else None, ["chat", "missing"]),
        (lambda n: n / 2 if n else None, ["0.5 to 6", "6.5 to 12", "12.5 to 17.5", "18 to 23.5", "24 to 29.5",
                                          "missing"]),
        (lambda n: ["nan", "a", 2.5][n % 3], ["2.5", "a", "nan"]),
    ],
    ids=["truth values", "few numbers", "texts", "many numbers", "both"],
)  # fmt: skip
def test_a_column_of_any_kind_becomes_slices_in_a_natural_order(value, labels) -> None:
    parts = slice_pairs(table(), beta=1.0, columns={"mine": column(value)})["mine"]
    assert [part.label for part in parts] == labels
    assert sum(part.num_comparisons for part in parts) == 60


def test_a_column_does_not_take_the_place_of_a_built_in_slicing() -> None:
    with pytest.raises(DataError, match="'source' has the name of a built-in slicing. Rename the column"):
        slice_pairs(table(), beta=1.0, columns={"source": column(str)})


def test_a_column_of_other_data_is_refused() -> None:
    other = {("made-up", f"another-{number}"): number for number in range(60)}
    with pytest.raises(DataError, match="'mine' has a value for none of the 60 preferences"):
        slice_pairs(table(), beta=1.0, columns={"mine": other})


def test_rare_values_are_put_together() -> None:
    rows = pair_rows([(1.0, 0.0, 1.0)] * 130)
    own = {("made-up", f"row-{number}"): f"v{number if number < 70 else 0}" for number in range(130)}
    parts = slice_pairs(score_table(rows), beta=1.0, columns={"mine": own})["mine"]
    assert len(parts) == 51
    assert (parts[-1].label, parts[-1].num_comparisons) == ("other values", 20)
    assert parts[0].num_comparisons == 61


def labels_and_sizes(value) -> list[tuple[str, int]]:
    parts = slice_pairs(table(), beta=1.0, columns={"mine": column(value)})["mine"]
    return [(part.label, part.num_comparisons) for part in parts]


def test_values_named_like_reserved_slices_stay_apart_from_them() -> None:
    kinds = ["missing", "other values", None, "'missing'"]
    assert labels_and_sizes(lambda n: kinds[n % 4]) == [
        ("''missing''", 15), ("'missing'", 15), ("'other values'", 15), ("missing", 15),
    ]  # fmt: skip


def test_unknown_values_are_a_slice_of_their_own_however_many_others_there_are() -> None:
    found = labels_and_sizes(lambda n: None if n == 7 else f"v{n}")
    assert found[-2:] == [("other values", 9), ("missing", 1)]


def test_infinite_numbers_are_slices_of_their_own_and_nan_is_missing() -> None:
    extremes = {0: math.inf, 1: -math.inf, 2: math.nan, 3: None, 4: math.inf, 5: 10**400}
    found = labels_and_sizes(lambda n: extremes.get(n, n))
    assert [label for label, _ in found[1:-2]] == ["6 to 16", "17 to 27", "28 to 37", "38 to 48", "49 to 59"]
    assert (found[0], found[-2:]) == (("-inf", 1), [("inf", 3), ("missing", 2)])
    assert labels_and_sizes(lambda n: [math.inf, 1.0, math.nan][n % 3]) == [("1", 20), ("inf", 20), ("missing", 20)]


@pytest.mark.parametrize("kind", [np.int64, np.float32, Fraction], ids=lambda kind: kind.__name__)
def test_numbers_of_other_libraries_are_numbers(kind) -> None:
    assert labels_and_sizes(kind) == labels_and_sizes(int)
    assert len(labels_and_sizes(kind)) == 5


def test_numbers_that_differ_have_labels_that_differ() -> None:
    assert labels_and_sizes(lambda n: 1234567.0 + n % 2) == [("1234567", 30), ("1234568", 30)]
    assert labels_and_sizes(lambda n: np.bool_(n % 2)) == [("no", 30), ("yes", 30)]
