"""Level plans: as few rows as packed ones, of like size, and even work on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import make_groups
from rewardlab.core.errors import ConfigError
from rewardlab.data.pack import plan_groups, plan_level, plan_micro_batches, plan_packed


def loads_of(plan, sizes) -> list[int]:
    return [sum(sizes[index] for index in row) for row in plan]


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    budget=st.integers(50, 200),
    num_ranks=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_level_rows_hold_every_group_once_in_no_more_rows_and_no_larger_ones_than_packed(sizes, budget, num_ranks):
    ranks = plan_level(sizes, budget, num_ranks=num_ranks)
    packed = plan_packed(sizes, budget, num_ranks=num_ranks)
    assert [len(plan) for plan in ranks] == [len(plan) for plan in packed], "law 2: equal counts on every rank"
    rows = [row for plan in ranks for row in plan]
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    loads = loads_of(rows, sizes)
    assert max(loads) <= max(max(loads_of(plan, sizes)) for plan in packed) <= budget
    if ranks != packed:
        empty = sum(load == 0 for load in loads)
        assert empty == max(0, len(rows) - len(sizes)), "a dummy only where groups are too few"
        filled = [load for load in loads if load]
        assert max(filled) - min(filled) <= max(sizes), "no two rows differ by more than one group"
    assert ranks == plan_level(sizes, budget, num_ranks=num_ranks)


def test_the_last_row_is_not_nearly_empty():
    sizes = [10] * 21
    assert sorted(loads_of(plan_packed(sizes, 100)[0], sizes)) == [10, 100, 100]
    assert sorted(loads_of(plan_level(sizes, 100)[0], sizes)) == [70, 70, 70]


def test_ranks_without_a_row_get_one_of_their_own():
    sizes = [10] * 12
    assert [loads_of(plan, sizes) for plan in plan_packed(sizes, 100, num_ranks=4)] == [[100], [20], [0], [0]]
    assert [loads_of(plan, sizes) for plan in plan_level(sizes, 100, num_ranks=4)] == [[30]] * 4


def test_where_level_rows_would_burst_the_packed_ones_are_taken():
    sizes = [6, 6, 4, 4, 4]  # 6 + 6 and 4 + 4 + 4 fit exactly; evenly filled, one row takes 14
    assert plan_level(sizes, 12) == plan_packed(sizes, 12)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_plan_of_nothing_is_as_empty_as_a_packed_one(num_ranks):
    assert plan_level([], 20, num_ranks=num_ranks) == plan_packed([], 20, num_ranks=num_ranks) == [[]] * num_ranks
    for layout in ("shared", "padded"):
        assert plan_micro_batches([], 20, layout=layout, num_ranks=num_ranks) == [[]] * num_ranks


def test_a_group_above_the_budget_is_an_error():
    with pytest.raises(ConfigError, match="Raise the budget to at least 30"):
        plan_level([3, 30], 20)


def test_the_padded_layout_keeps_groups_of_like_length_together():
    groups = make_groups(12)
    assert plan_micro_batches(groups, 90, layout="padded") == plan_groups(groups, 90, layout="padded")
    for layout in ("shared", "unshared"):
        (plan,) = plan_micro_batches(groups, 90, layout=layout)
        sizes = [group.num_tokens if layout == "shared" else group.num_unshared_tokens for group in groups]
        assert plan == plan_level(sizes, 90)[0]
