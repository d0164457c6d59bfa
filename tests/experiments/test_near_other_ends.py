"""Claims on AUC, loss and Brier score near the end of their range, and on shares by several comparisons a prompt."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from rewardlab.analysis.crossed import Observed
from rewardlab.analysis.crossed_shares import shares_over
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.score_table import score_table
from rewardlab.core.types import ScoreRow
from rewardlab.experiments.claims import parse
from rewardlab.experiments.verdicts import contrast_of
from scored import rows_of


def of_prompts(scores: np.ndarray, each: int) -> list[ScoreRow]:
    """Score rows of pairs [N, 2], so many in a row of one prompt."""
    return [replace(row, prompt_key=f"{number // (2 * each):02}") for number, row in enumerate(rows_of(scores))]


def by_scores(name: str, accuracy: float, sure: float, each: int, generator: np.random.Generator) -> Observed:
    """A quantity of one seed on 60 prompts, whose scores differ by normal numbers; too sure by a factor `sure`."""
    ahead = math.sqrt(2) * NormalDist().inv_cdf(accuracy)
    alike = math.sqrt(0.7 if each > 1 else 0.0)
    parts = [
        alike * np.repeat(generator.normal(size=60), each) + math.sqrt(1 - alike**2) * generator.normal(size=60 * each)
        for _ in range(2)
    ]
    scores = np.stack([parts[0] + ahead, parts[1]], axis=1)
    rows = of_prompts(scores, each)
    return observed_in(name, {0: score_table(rows)}, beta=sure * ahead)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "accuracy", "sure", "each"),
    [
        ("brier(a) < 0.03719", 0.95, 1.0, 1),
        ("loss(a) < 0.1273", 0.95, 1.0, 1),
        ("loss(a) < 0.22372", 0.95, 3.0, 1),
        ("loss(a) < 0.09711", 0.98, 3.0, 4),
        ("roc_auc(a) > 0.98", 0.98, 1.0, 1),
        ("accuracy(a) > 0.98", 0.98, 1.0, 4),
        ("brier(a) < 0.01698", 0.98, 3.0, 4),
    ],
)
def test_what_is_near_another_end_keeps_its_level_too(claim: str, accuracy: float, sure: float, each: int) -> None:
    generator, parsed = np.random.default_rng(12), parse(claim)
    [term] = parsed.terms
    p, limits = [], []
    for _ in range(200):
        one = by_scores(term.quantity, accuracy, sure, each, generator)
        found = contrast_of(parsed.parts[0], {term: one})
        if not found.is_constant:
            p.append([found.p_above(), replace(found, bounded=None).p_above()])
            limits.append(found.interval(0.9).low)
    rates = (np.array(p) < 0.05).sum(axis=0) / 200
    assert rates[0] <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)
    assert rates[1] > 0.11, "by the variance seen it would not"
    assert [low > 0 for low in limits] == [own < 0.05 for own, _ in p], "the interval says what the p-value says"


def test_the_end_of_an_area_is_that_of_comparisons_that_come_out_the_other_way() -> None:
    scores = np.random.default_rng(13).normal(size=(40, 2)) + np.array([0.5, 0.0])
    one = observed_in("roc_auc", {0: score_table(rows_of(scores))}, beta=2.0)
    weights = [1 / (1 + math.exp(2 * abs(a - b))) for a, b in scores]
    area = []
    for a, b in scores:
        above = np.mean([other < min(a, b) for _, other in scores]) + 0.5 * np.mean(scores[:, 1] == min(a, b))
        below = np.mean([own > max(a, b) for own, _ in scores]) + 0.5 * np.mean(scores[:, 0] == max(a, b))
        area.append(above + below)
    assert one.turned_S == pytest.approx([np.average(area, weights=weights) - 2 * one.mean])


def test_a_lost_comparison_costs_what_all_lost_ones_would_at_the_temperature_that_fits() -> None:
    generator = np.random.default_rng(13)
    scores = generator.normal(size=(60, 2)) + np.array([1.0, 0.0])
    table = score_table(rows_of(scores))
    found = {name: observed_in(name, {0: table}, beta=6.0) for name in ("loss", "brier")}
    logits = 6 * (scores[:, 0] - scores[:, 1])
    tossed = np.abs(logits).mean()

    def nll(temperature: float) -> float:
        sides = np.log1p(np.exp(-tossed / temperature)) + np.log1p(np.exp(tossed / temperature))
        return float(np.log1p(np.exp(-logits / temperature)).sum() + 0.25 * sides / 2)

    temperature = min(np.geomspace(1, 20, 20_001).tolist(), key=nll)
    assert temperature > 2, "too sure"
    chance, size = 1 / (1 + np.exp(np.abs(logits) / temperature)), np.abs(logits)
    for name, lost in (("loss", np.log1p(np.exp(size))), ("brier", 1 / (1 + np.exp(-size)) ** 2)):
        one = found[name]
        assert one.turned_S is not None
        assert one.turned_S[0] + one.mean == pytest.approx((chance @ lost**2) / (chance @ lost), rel=1e-4)


def test_scores_too_far_apart_for_a_loss_still_have_an_area_with_an_end() -> None:
    scores = 1e300 * np.random.default_rng(14).normal(size=(40, 2))
    one = observed_in("roc_auc", {0: score_table(rows_of(scores))})
    assert one.turned_S is not None
    assert np.isfinite(one.turned_S).all()


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_of_several_comparisons_of_a_prompt_the_root_comes_out_the_other_way_at_once(name: str) -> None:
    scores = np.random.default_rng(15).normal(size=(160, 2)) + np.array([1.5, 0.0])
    rows = of_prompts(scores, 4)
    one = observed_in(name, {0: score_table(rows)})
    end = 1 - one.mean if one.turned_S is None else float(one.turned_S[0])
    bounded = shares_over([(one, 1.0)], one.mean)
    assert bounded is not None
    assert bounded.most == pytest.approx(max(one.mean + end / 2, bounded.values[-1]))
