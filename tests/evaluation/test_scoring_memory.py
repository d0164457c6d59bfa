"""Scoring where memory runs out: in halves, with the same numbers, and in fewer tokens from then on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common import make_groups, make_model, stored
from rewardlab import score
from rewardlab.data.pack import halves_of, plan_replies
from rewardlab.model.reward import RewardModel
from rewardlab.score import score_groups

GROUPS = make_groups(30, replies=4, seed=5)


def narrow(model, most: int, computed: list[int]):
    """The model on a device that holds so many tokens."""
    forward = model.forward

    def computes(batch, *more):
        computed.append(batch.num_tokens)
        if batch.num_tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch, *more)

    model.forward = computes
    return model


@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
@pytest.mark.parametrize("most", [70, 150])
def test_what_does_not_fit_is_scored_in_halves_to_the_same_numbers(layout, most, log):
    wanted = score_groups(make_model(layout=layout), GROUPS, budget=100_000)
    computed: list[int] = []
    model = narrow(make_model(layout=layout), most, computed)
    found = score_groups(model, GROUPS, budget=100_000)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    failures = sum(tokens > most for tokens in computed)
    assert 0 < failures < 10
    assert log.text.count("OUT OF MEMORY") == failures
    # It stays so: the next call tries no more than what fitted.
    computed.clear()
    score_groups(model, stored(GROUPS[:20]), budget=100_000)
    assert max(computed) <= most


def test_a_conversation_that_does_not_fit_alone_is_the_error_it_was():
    model = narrow(make_model(), 3, [])
    with pytest.raises(torch.OutOfMemoryError):
        score_groups(model, GROUPS, budget=1000)


def test_nothing_is_tried_again_where_it_is_not_wanted():
    computed: list[int] = []
    with pytest.raises(torch.OutOfMemoryError):
        score_groups(narrow(make_model(), 70, computed), GROUPS, budget=1000, halves=False)
    assert len(computed) == 1


def test_other_errors_pass():
    model = make_model()

    def fails(batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model.forward = fails
    with pytest.raises(RuntimeError, match="shapes"):
        score_groups(model, GROUPS, budget=1000)


@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
def test_halves_have_all_replies_of_a_row_once_and_in_order(layout):
    for row in plan_replies(GROUPS, 150, layout=layout):
        rest, whole = [row], []
        while rest:
            one = rest.pop()
            found = halves_of(GROUPS, one, layout)
            if found is None:
                whole.append(one)
                continue
            assert all(found)
            rest += reversed(found)
        assert all(len(one) == 1 and one[0].stop - one[0].first == 1 for one in whole)
        wanted = [(piece.group, reply) for piece in row for reply in range(piece.first, piece.stop)]
        assert [(piece.group, piece.first) for (piece,) in whole] == wanted


@pytest.mark.parametrize(("device", "most"), [("cpu", 8192), ("cuda:0", 32_768)])
def test_where_nobody_says_how_many_tokens_a_gpu_gets_four_times_as_many(monkeypatch, device, most):
    budgets = []
    monkeypatch.setattr(score, "plan_replies", lambda groups, budget, layout: budgets.append(budget) or [])
    monkeypatch.setattr(RewardModel, "device", torch.device(device))
    score_groups(make_model(layout="unshared"), [], budget=None)
    score_groups(make_model(layout="unshared"), [], budget=100)
    assert budgets == [most, 100]
    assert score.budget_of(torch.device(device)) == most
