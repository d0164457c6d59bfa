"""The precision card: differences are paired, have intervals, and are a sign only beyond what the data leave open."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rewardlab.analysis.health import ADVICE, Health
from rewardlab.analysis.precision import CANONICAL, MEASURES, PrecisionCard, precision_card
from rewardlab.analysis.signs import RunFacts
from rewardlab.core.types import Comparison, ScoreRow
from rewardlab.report.precision import card_block

Scores = np.ndarray


def rows_of(scores_NK: Scores, *, prompts: int | None = None) -> list[ScoreRow]:
    """Two rows a pair, the first reply preferred; with fewer prompts than pairs they repeat."""
    return [
        ScoreRow(
            preference_id=str(number),
            source="made-up",
            prompt_key=str(number % (prompts or len(scores_NK))),
            reply=reply,
            score=float(score),
            num_tokens=5,
            prompt_tokens=2,
            truncated_tokens=0,
            comparisons=(Comparison(first=0, second=1),) if reply == 0 else (),
        )
        for number, pair in enumerate(scores_NK)
        for reply, score in enumerate(pair)
    ]


def card_of(exact: Scores, prompts: int | None = None, **others: Scores) -> PrecisionCard:
    rows = {CANONICAL: exact, **{name.replace("_", " "): scores for name, scores in others.items()}}
    return precision_card(
        {name: rows_of(scores, prompts=prompts) for name, scores in rows.items()}, beta=1.0, num_available=900, seed=3
    )


@pytest.fixture
def exact() -> Scores:
    draw = np.random.default_rng(0)
    return draw.normal(size=(300, 2)) + np.array([0.5, 0.0])


def test_the_measures_are_what_they_say_by_hand(exact):
    moved = np.random.default_rng(1).normal(0.2, 0.1, size=exact.shape)
    found = card_of(exact, bf16=exact + moved).measures["bf16"]
    margin, other = exact[:, 0] - exact[:, 1], (exact + moved)[:, 0] - (exact + moved)[:, 1]
    nll = [np.log1p(np.exp(-values)) for values in (margin, other)]
    for measure, value in {
        "accuracy": np.mean(other > 0),
        "accuracy − float32's": np.mean(other > 0) - np.mean(margin > 0),
        "NLL": nll[1].mean(),
        "NLL − float32's": (nll[1] - nll[0]).mean(),
        "score shift": moved.mean(),
        "score spread": moved.std() / exact.std(),
        "margin error": math.sqrt(np.mean((other - margin) ** 2)) / margin.std(),
    }.items():
        assert found[measure].value == pytest.approx(value)
        assert found[measure].low < found[measure].value < found[measure].high
    assert set(found) == set(MEASURES)


def test_paired_intervals_are_narrower_than_those_of_two_accuracies_or_losses(exact):
    found = card_of(exact, bf16=exact + np.random.default_rng(1).normal(0, 0.05, exact.shape)).measures["bf16"]
    for measure, times in (("accuracy", 2), ("NLL", 10)):
        alone, change = found[measure], found[f"{measure} − float32's"]
        assert (alone.high - alone.low) > times * (change.high - change.low)


def test_the_same_verdicts_leave_an_interval_about_zero_and_not_none(exact):
    change = card_of(exact, bf16=exact * 1.001).measures["bf16"]["accuracy − float32's"]
    assert change.value == 0
    assert 0.005 < change.high < 0.02
    assert change.low == pytest.approx(-change.high)
    assert change.method == "score interval, paired"


def test_prompts_that_repeat_widen_the_intervals(exact):
    """Each score beside itself, moved in the same way, says nothing more."""
    moved = exact + np.random.default_rng(1).normal(0, 0.5, exact.shape)
    alone = card_of(exact, bf16=moved).measures["bf16"]
    doubled = card_of(np.tile(exact, (2, 1)), prompts=300, bf16=np.tile(moved, (2, 1))).measures["bf16"]
    for measure in ("margin error", "score shift", "NLL − float32's"):
        one, other = alone[measure], doubled[measure]
        assert other.value == pytest.approx(one.value)
        assert (other.high - other.low) == pytest.approx(one.high - one.low, rel=0.2)


SERVED = {
    "may be served": (
        lambda scores: scores * 1.001,
        "Margins are off by 0.0014 (root mean square), less than the ±0.16",
    ),
    "may not be served": (
        lambda scores: scores[:, ::-1],
        "(root mean square), more than the ±0.16 to which 300 prompts",
    ),
    "may not be served: no number": (
        lambda scores: np.where(np.arange(300)[:, None] == 0, np.nan, scores),
        "2 replies have no finite score in it.",
    ),
    "may not be served: wrong order": (
        # Half the pairs are close, and each of them is turned to the wrong side.
        lambda scores: np.where(np.arange(300)[:, None] < 150, scores - [[0.02, 0.0]], scores),
        "It ranks fewer pairs right: accuracy changes by -0.500",
    ),
    "too few pairs to say": (lambda scores: scores[:39] * 1.001, "At least 40 prompts are needed, and 39 have pairs"),
}


@pytest.mark.parametrize(("answer", "given"), SERVED.items(), ids=SERVED)
def test_a_verdict_says_in_which_precision_a_model_may_be_served_and_why(answer, given, exact):
    change, evidence = given
    if "order" in answer:
        exact[:150, 0] = exact[:150, 1] + 0.01
    other = change(exact)
    (verdict,) = card_of(exact[: len(other)], bf16=other).verdicts()
    assert verdict.answer == answer.split(":")[0]
    assert evidence in verdict.evidence
    assert str(verdict).startswith(f"bf16: {verdict.answer}. ")


def test_few_prompts_have_no_interval_and_no_sign(exact):
    card = card_of(exact[:8], prompts=4, bf16=exact[:8] + np.arange(16).reshape(8, 2))
    assert math.isnan(card.measures["bf16"]["margin error"].low)
    assert card.measures["bf16"]["margin error"].method == "too few prompts (4)"
    assert card.notable() == []
    assert Health(RunFacts(num_steps=1)).judge_precisions(card) == []


@pytest.mark.parametrize("prompts", [39, 40])
def test_a_ratio_of_spreads_has_an_interval_from_40_prompts_on(exact, prompts):
    moved = exact + np.random.default_rng(1).normal(0, 0.5, exact.shape)
    found = card_of(exact[:prompts], bf16=moved[:prompts]).measures["bf16"]
    for measure in ("score spread", "margin error"):
        assert math.isnan(found[measure].low) == math.isnan(found[measure].high) == (prompts < 40)
        assert found[measure].method == f"too few prompts ({prompts})" if prompts < 40 else found[measure].low > 0


def test_scores_that_are_not_finite_are_left_out_of_what_is_compared(exact):
    broken = exact.copy()
    broken[0, 1] = math.nan
    card = card_of(exact, fp16=broken)
    found = card.measures["fp16"]
    assert found["score shift"].value == 0
    assert found["margin error"].value == 0
    assert found["NLL − float32's"].n == 299
    assert card.off() == card.notable() == ["fp16"], "however few they are"
    (sign,) = Health(RunFacts(num_steps=5)).judge_precisions(card)
    assert sign.text == "scores are not finite: 1 in fp16."
    assert "fp16: 1 reply has no finite score in it" in card_block(card)


def test_margins_beyond_the_interval_of_the_mean_margin_are_a_sign(exact):
    draw = np.random.default_rng(1)
    card = card_of(exact, bf16=exact + draw.normal(0, 0.6, exact.shape))
    assert card.notable() == ["bf16"]
    (sign,) = Health(RunFacts(num_steps=5)).judge_precisions(card)
    assert sign.name == "other_precision"
    assert sign.text.startswith(
        f"margins are off by {card.margin_error['bf16']:.2f} in bf16 (root mean square), beyond"
    )
    assert sign.advice == ADVICE["other_precision"]
    small = card_of(exact, bf16=exact + draw.normal(0, 0.02, exact.shape))
    assert Health(RunFacts(num_steps=5)).judge_precisions(small) == []


def test_what_others_make_of_the_weights_is_a_note_on_the_card_and_no_sign_of_the_run(exact):
    near, far = (exact + np.random.default_rng(1).normal(0, width, exact.shape) for width in (0.02, 0.6))
    card = card_of(exact, bf16=near, nearest_bf16=far)
    assert (card.off(), card.notable()) == (["nearest bf16"], [])
    assert Health(RunFacts(num_steps=5)).judge_precisions(card) == []
    advice = "make a folder with `rewardlab export FOLDER --dtype bfloat16`"
    assert advice in " ".join(card_block(card).split())
    assert advice not in " ".join(card_block(card_of(exact, bf16=far, nearest_bf16=near)).split())


def test_the_card_as_text_says_what_was_compared_on_which_rows(exact, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = card_block(card_of(exact, bf16=exact + 0.01, nearest_bf16=exact * 0.5))
    lines = text.splitlines()
    assert "(300 of 900 preferences, drawn with seed 3)" in " ".join(lines)
    header = next(line for line in lines if line.split()[:2] == ["float32", "bf16"])
    assert header.split() == ["float32", "bf16", "nearest", "bf16"]
    assert [line.split("  ")[0] for line in lines if line.startswith(tuple(MEASURES))][: len(MEASURES)] == list(
        MEASURES
    )
    assert "margin error: root mean square of the differences of margins" in text
    assert max(map(len, lines)) <= 120
    own = card_block(card_of(exact, bf16=exact))
    assert "the saved model, whose weights are bf16, in float32 and in bf16" in " ".join(own.splitlines())
