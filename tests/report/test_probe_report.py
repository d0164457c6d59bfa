"""What a probe prints."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rewardlab.analysis.linear import Comparisons
from rewardlab.analysis.metrics import evaluate
from rewardlab.core.types import Estimate
from rewardlab.probing.heads import _curve_point
from rewardlab.report.probe import _curve, _held_out
from scored import rows_of


def test_the_learning_curve_says_of_which_column_an_interval_is():
    accuracy = Estimate(value=0.9, low=0.8, high=0.95, n=9, method="Wilson")
    loss = Estimate(value=0.3, low=0.2, high=0.4, n=9, method="t interval")
    text = _curve([SimpleNamespace(comparisons=9.0, accuracy=accuracy, loss=loss)])
    assert text.splitlines()[-2:] == ["accuracy: 95% intervals: Wilson", "NLL: 95% intervals: t interval"]


def test_no_loss_of_the_curve_is_said_to_lie_below_zero():
    keys = tuple("abcdefghijkl")
    data = Comparisons(
        differences=np.ones((12, 1)),
        labels=np.ones(12),
        margins=np.zeros(12),
        weights=np.ones(12),
        prompts=np.arange(12),
        prompt_keys=keys,
        roots=np.arange(12),
    )
    point = _curve_point(1.0, data, np.array([[9.0] * 11 + [1.0]]), 12.0, keys)
    assert point.loss.low == 0.0 < point.loss.value


@pytest.mark.parametrize(("right", "is_told"), [(60, False), (63, True), (80, False)])
def test_a_held_out_accuracy_that_may_be_chance_is_said_to_be(right: int, is_told: bool):
    overall = evaluate(rows_of([(1.0, 0.0)] * right + [(0.0, 1.0)] * (104 - right)), beta=1.0)
    chosen = SimpleNamespace(
        layer=3, penalty=1.0, at_edge=False, result=SimpleNamespace(overall=overall, by_source={"made-up": overall})
    )
    assert ("may be chance" in _held_out(chosen)) is is_told
