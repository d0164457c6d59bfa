"""Law 1: sums, not means. Splitting a batch changes neither loss nor gradient. Law 2: equal counts on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import arithmetic, make_groups, make_model
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Sums
from rewardlab.data.groups import weigh
from rewardlab.data.pack import deal, plan_groups, plan_packed, plan_padded
from rewardlab.data.step_order import batch_of_step, steps_per_epoch
from rewardlab.training.loop.losses import STATISTICS, preference_loss, statistics, to_sums, total_weight
from rewardlab.training.settings.config import LossConfig

EVERYTHING = LossConfig(
    beta=1.3, regularization_lambda=0.3, score_regularization_lambda=0.05, center_lambda=0.02, label_smoothing=0.1
)
CONFIGS = {
    "bradley-terry": LossConfig(label_smoothing=0.0),
    "everything": EVERYTHING,
    "l1": LossConfig(regularization_lambda=0.5, regularization_type="l1"),
    "plackett-luce": LossConfig(kwise_loss="plackett-luce", score_regularization_lambda=0.1),
}


def loss_and_gradient(groups, plan, config, dtype):
    """The mean loss over all groups, accumulated over the batches of a plan."""
    model = make_model("llama", dtype=dtype)
    batches = [pack([groups[index] for index in row]) for row in plan]
    weight = sum(map(total_weight, batches))
    total = 0.0
    counted = torch.zeros(len(STATISTICS), dtype=torch.float64)
    with arithmetic(dtype):
        for batch in batches:
            rewards = model(batch)
            loss = preference_loss(rewards, batch, config) / weight
            loss.backward()
            total += float(loss.detach())
            counted += statistics(rewards, batch, beta=config.beta)
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), counted


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_splitting_a_batch_changes_neither_loss_nor_gradient(name, dtype, tolerance):
    groups = make_groups(11, replies=4)
    whole, gradient, counted = loss_and_gradient(groups, [list(range(11))], CONFIGS[name], dtype)
    splits = [
        [[0], [1, 2, 3], list(range(4, 11))],
        [[number] for number in range(11)],
        plan_groups(groups, 60, layout="shared")[0],
        plan_groups(groups, 90, layout="padded")[0],
        # A rank with nothing to do: dummies of weight zero.
        [row for plan in plan_groups(groups, 300, layout="shared", num_ranks=3) for row in plan] + [[]],
    ]
    for split in splits:
        loss, other, parts = loss_and_gradient(groups, split, CONFIGS[name], dtype)
        assert abs(loss - whole) <= tolerance * max(1, abs(whole))
        assert (other - gradient).norm() <= tolerance * gradient.norm()
        assert torch.allclose(parts, counted, atol=1e-5)


def test_the_mean_of_means_would_be_another_number():
    groups = make_groups(11, replies=4)
    whole, _, _ = loss_and_gradient(groups, [list(range(11))], EVERYTHING, torch.float64)
    parts = [
        loss_and_gradient([groups[n] for n in row], [list(range(len(row)))], EVERYTHING, torch.float64)[0]
        for row in ([0], list(range(1, 11)))
    ]
    assert abs(sum(parts) / 2 - whole) > 1e-3


def test_the_sums_of_parts_are_the_sums_of_the_whole():
    part = to_sums(1.5, 2.0, [0.5, 1.5, -0.25, 3.0, 2.0, 1.0, 1.0, 0.0])
    other = Sums(loss=0.5, weight=1.0, nll=0.25, correct=1.0, margin=0.5, comparisons=1, decided=1)
    assert part + other == Sums(
        loss=2.0, weight=3.0, nll=0.75, correct=2.5, margin=0.25, comparisons=4, decided=3, score_ties=1, label_ties=1
    )
    assert (part + other).accuracy == pytest.approx(2.5 / 3)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.integers(50, 200),
    num_ranks=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_holds_every_group_once_within_the_budget_and_equally_many_rows_on_every_rank(sizes, budget, num_ranks):
    ranks = plan_packed(sizes, budget, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(plan) for plan in ranks}) == 1
    rows = [row for plan in ranks for row in plan]
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in row) <= budget for row in rows)
    assert ranks == plan_packed(sizes, budget, num_ranks=num_ranks)


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 50), max_size=60), budget=st.integers(50, 120), num_ranks=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_plan_is_that_of_plain_first_fit_decreasing(sizes, budget, num_ranks):
    rows, loads = [], []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        row = next((row for row, load in enumerate(loads) if load + sizes[index] <= budget), len(rows))
        if row == len(rows):
            rows.append([])
            loads.append(0)
        rows[row].append(index)
        loads[row] += sizes[index]
    assert plan_packed(sizes, budget, num_ranks=num_ranks) == deal(rows, loads, num_ranks)


@pytest.mark.slow
@given(lengths=st.lists(st.lists(st.integers(1, 20), min_size=2, max_size=4), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_padded_batches_count_their_padding(lengths):
    (plan,) = plan_padded(lengths, 120)
    for batch in plan:
        rows = sum(len(lengths[index]) for index in batch)
        assert rows * max(max(lengths[index]) for index in batch) <= 120
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))


def test_a_group_above_the_budget_is_an_error_that_names_the_flag():
    for plan in (lambda: plan_packed([10, 300], 200), lambda: plan_padded([[90, 150]], 200)):
        with pytest.raises(ConfigError, match="--micro-token-budget 200. Raise the budget to at least 300"):
            plan()


def test_a_dummy_batch_has_no_weight_and_a_zero_gradient():
    model = make_model("llama")
    batch = pack([])
    loss = preference_loss(model(batch), batch, EVERYTHING)
    loss.backward()
    assert float(loss.detach()) == 0
    assert total_weight(batch) == 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_each_prompt_counts_once_unless_told_otherwise():
    groups = make_groups(3, replies=5, seed=2)
    for group, weighed in zip(groups, weigh(groups, by="prompt"), strict=True):
        own = sum(c.weight for c in group.comparisons)
        assert sum(c.weight for c in weighed.comparisons) == pytest.approx(own / len(group.comparisons))
    assert weigh(groups, by="comparison") == groups


@given(num_groups=st.integers(1, 50), batch_size=st.integers(1, 20), seed=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_epoch_sees_every_group_once_in_an_order_of_its_own(num_groups, batch_size, seed):
    steps = steps_per_epoch(num_groups, batch_size)
    epochs = [
        [
            index
            for step in range(epoch * steps, (epoch + 1) * steps)
            for index in batch_of_step(step, num_groups=num_groups, batch_size=batch_size, seed=seed)
        ]
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(num_groups))
    for epoch, order in enumerate(epochs):
        assert order == np.random.default_rng((seed, epoch)).permutation(num_groups).tolist()
    if num_groups > 8:
        assert epochs[0] != epochs[1]
