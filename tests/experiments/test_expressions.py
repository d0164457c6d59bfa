"""Hypotheses as text: what is read, what is refused, values, gradients and bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.quantities import ALIASES, QUANTITIES, quantity_named, range_of

A, B = Term("accuracy", "a"), Term("accuracy", "b")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("accuracy(lora_r8) ≥ accuracy(full) − 0.03", "accuracy(lora_r8) >= accuracy(full) - 0.03"),
        ("gap(base, step=500) < .10", "gap(base, step=500) < 0.1"),
        ("stopped_at(base)<900", "stopped_at(base) < 900"),
        ("peak_memory(lora) ≤ 0.6 × peak_memory(full)", "peak_memory(lora) <= 0.6 * peak_memory(full)"),
        ("accuracy('lora-r8', on='validation') > 0.6", 'accuracy("lora-r8", on="validation") > 0.6'),
        (
            "ece(smooth) < 0.12\n  and accuracy(smooth) >= accuracy(plain) - 0.02",
            "ece(smooth) < 0.12 and accuracy(smooth) >= accuracy(plain) - 0.02",
        ),
    ],
)
def test_a_claim_is_read_as_it_is_meant_and_written_plainly(text: str, read: str) -> None:
    assert str(parse(text)) == read
    assert str(parse(read)) == read


def test_terms_say_quantity_arm_step_and_split() -> None:
    claim = parse(
        'eval_nll("x-1") < 0.7 and gap(x) < 0.1 and accuracy(x, step=5) > 0.5 and ece(x, on="validation") < 1'
    )
    assert claim.terms == (
        Term("loss", "x-1"),
        Term("gap", "x", on="validation"),
        Term("accuracy", "x", step=5, on="validation"),
        Term("ece", "x", on="validation"),
    )
    assert [str(term) for term in claim.terms] == [
        'loss("x-1")',
        "gap(x)",
        "accuracy(x, step=5)",
        'ece(x, on="validation")',
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acuracy(a) > 1", "Did you mean accuracy"),
        ("accuracy > 0.5", "alone"),
        ("accuracy(a) == 0.5", "equality"),
        ("accuracy(a) = 0.5", "has a single =; write > >= < <=; equality within a margin"),
        ("accuracy(a) > 12 %", "not an expression"),
        ("accuracy(a) > 0.5 or accuracy(b) > 0.5", "`or`"),
        ("not accuracy(a) > 0.5", "`not`"),
        ("accuracy(a)", "compares nothing"),
        ("1 > 0", "asks nothing"),
        ("accuracy() > 0.5", "no arm"),
        ("accuracy(a, b) > 0.5", "no arm"),
        ("accuracy(a, of=1) > 0.5", "step=500"),
        ("accuracy(a, step=-1) > 0.5", "step=500"),
        ('accuracy(a, on="train") > 0.5', "step=500"),
        ('accuracy(a, step=5, on="test") > 0.5', "leave it out"),
        ("stopped_at(a, step=5) > 0.5", "not recorded by steps"),
        ("min() < accuracy(a)", "choose"),
        ("abs(accuracy(a), accuracy(b)) < 0.1", "abs of something other than one value"),
        ("abs() > accuracy(a)", "abs of something other than one value"),
        ("accuracy(a) > 1e999", "too large"),
        ("accuracy(a) > True", "number is wanted"),
        ('__import__("os").getcwd() > accuracy(a)', "something other than"),
        ("accuracy(a)[0] > 1", "something other than"),
        ("accuracy(a) ** 2 > 1", "something other than"),
        ("accuracy(a)\0 > 1", "null bytes|cannot be read"),
        ("(" * 900 + "1" + ")" * 900, "parentheses"),
        ("-" * 1900 + "1 > accuracy(a)", "deeply"),
        ("1 < " * 1000, "characters"),
    ],
)
def test_what_is_no_claim_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_an_error_shows_the_place() -> None:
    with pytest.raises(ConfigError) as error:
        parse("accuracy(ä) > acuracy(b)")
    text, place = str(error.value).splitlines()[-2:]
    assert text[place.index("^") :] == "acuracy(b)"


def test_an_arm_that_the_plan_lacks_is_named_with_the_nearest() -> None:
    claim = parse("accuracy(lora_r8) > accuracy(full)")
    claim.require_arms(["lora_r8", "full"])
    with pytest.raises(ConfigError, match="Did you mean lora_r16"):
        claim.require_arms(["lora_r16", "full"])


@pytest.mark.parametrize(("operator", "sign"), [(">", 1), (">=", 1), ("<", -1), ("<=", -1)])
def test_a_value_above_0_means_that_the_comparison_holds(operator: str, sign: int) -> None:
    [part] = parse(f"accuracy(a) {operator} accuracy(b) - 0.03").parts
    assert part.value({A: 0.7, B: 0.6}) == pytest.approx(sign * 0.13)
    assert part.holds(0.0) is (operator in (">=", "<="))


def test_a_chain_is_two_comparisons() -> None:
    parts = parse("0.4 < accuracy(a) <= 0.6").parts
    assert [str(part) for part in parts] == ["0.4 < accuracy(a)", "accuracy(a) <= 0.6"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (
            "abs(accuracy(a) - accuracy(b)) <= 0.02",
            ["accuracy(a) - accuracy(b) <= 0.02", "accuracy(a) - accuracy(b) >= -0.02"],
        ),
        ("0.1 + ece(b) > abs(margin(a))", ["0.1 + ece(b) > margin(a)", "-(0.1 + ece(b)) < margin(a)"]),
        ("abs(margin(a)) > 0.1", ["abs(margin(a)) > 0.1"]),
        ("abs(margin(a)) <= -0.02", ["margin(a) <= -0.02", "margin(a) >= 0.02"]),
    ],
)
def test_a_value_within_a_margin_is_one_on_both_sides_of_0(text: str, asked: list[str]) -> None:
    assert [str(part) for part in parse(text).parts] == asked
    assert str(parse(text)) == text


@given(a=st.floats(0.01, 0.99), b=st.floats(0.01, 0.99), operator=st.sampled_from(["<", "<=", ">", ">="]))
def test_absolute_values_hold_where_they_should(a: float, b: float, operator: str) -> None:
    off = abs(a - b)
    if abs(off - 0.3) < 1e-9:
        return
    wanted = off < 0.3 if operator in ("<", "<=") else off > 0.3
    for text in (
        f"abs(accuracy(a) - accuracy(b)) {operator} 0.3",
        f"2 * abs(accuracy(a) - accuracy(b)) {operator} 0.6",
    ):
        values = [part.value({A: a, B: b}) for part in parse(text).parts]
        assert all(value > 0 for value in values) is wanted


EXPRESSIONS = (
    "accuracy(a) - 2 * accuracy(b) + 1",
    "accuracy(a) / (1 + accuracy(b))",
    "-accuracy(a) * accuracy(b)",
    "min(accuracy(a), accuracy(b)) - max(0.3, accuracy(b))",
    "mean(accuracy(a), accuracy(b), 0.5) / 2",
    "(accuracy(a) - 0.5) / (accuracy(a) + accuracy(b) + 0.1)",
    "2 * abs(accuracy(a) - accuracy(b))",
)
SHARE = st.floats(0.01, 0.99)


@pytest.mark.parametrize("text", EXPRESSIONS)
@given(a=SHARE, b=SHARE)
def test_gradients_are_those_of_small_steps(text: str, a: float, b: float) -> None:
    [part] = parse(f"{text} > 0.1").parts
    if abs(a - b) < 1e-3 or abs(b - 0.3) < 1e-3:
        return
    values, step = {A: a, B: b}, 1e-6
    gradient = part.gradient(values)
    for term in (A, B):
        moved = [part.value({**values, term: values[term] + sign * step}) for sign in (1, -1)]
        assert gradient.get(term, 0.0) == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-4)


@pytest.mark.parametrize("text", EXPRESSIONS)
@given(a=SHARE, b=SHARE)
def test_bounds_hold_every_value(text: str, a: float, b: float) -> None:
    [part] = parse(f"{text} <= 0.1").parts
    low, high = part.bounds({A: (0.01, 0.99), B: (0.01, 0.99)})
    assert low - 1e-12 <= part.value({A: a, B: b}) <= high + 1e-12


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("max(accuracy(a), accuracy(b)) > 0.5", "any", 2),
        ("min(accuracy(a), accuracy(b)) > 0.5", "all", 2),
        ("max(accuracy(a), accuracy(b)) < 0.5", "all", 2),
        ("0.5 < 1 - 2 * min(accuracy(a), accuracy(b), 0.3)", "any", 3),
        ("-1 * max(accuracy(a), 0.2) / 2 >= -0.3", "all", 2),
        ("mean(0.1, min(accuracy(a), max(accuracy(b), 0.4))) <= accuracy(b)", "any", 2),
    ],
)
@given(a=SHARE, b=SHARE)
def test_a_choice_holds_where_any_or_all_of_its_parts_do(text: str, kind: str, count: int, a: float, b: float) -> None:
    [part] = parse(text).parts
    values = {A: a, B: b}
    assert part.choices is not None
    assert (part.choices[0], len(part.choices[1])) == (kind, count)
    held = [one.holds(one.value(values)) for one in part.choices[1]]
    whole = part.value(values)
    if abs(whole) > 1e-9:
        assert part.holds(whole) == (any(held) if kind == "any" else all(held))


@pytest.mark.parametrize(
    "text", ["accuracy(a) > 0.5", "accuracy(a) * max(accuracy(a), 0.5) > 0.2", "1 / max(accuracy(a), 0.5) > 1"]
)
def test_what_cannot_be_taken_apart_is_left_whole(text: str) -> None:
    assert parse(text).parts[0].choices is None


def test_half_a_claim_is_never_read() -> None:
    for text, why in (
        ("accuracy(a) > 0.5  # as before\nand ece(a) < 0.1", "holds a comment"),
        ("accuracy(a, step=500, step=600) > 0.5", "the same name twice|not an expression"),
        (f"accuracy(a) > {'9' * 400}", "too large|nested too deeply"),
        (
            "max(" + ", ".join(f"accuracy(a{n})" for n in range(201)) + ") > 0.5",
            "more than 200 combinations|characters",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            parse(text)
    assert parse('accuracy("a#b") > 0.5').terms[0].arm == "a#b"


def test_bounds_of_a_linear_claim_are_reached() -> None:
    [part] = parse("accuracy(a) - accuracy(a) / 2 >= 0.3 * accuracy(b)").parts
    assert part.bounds({A: (0.0, 1.0), B: (0.0, 1.0)}) == pytest.approx((-0.3, 0.5))
    [ratio] = parse("accuracy(a) / accuracy(b) > 0.9").parts
    assert ratio.bounds({A: (0.0, 1.0), B: (0.0, 1.0)}) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("train_acc", "train_accuracy"),
        ("train_eval_accuracy", "train_accuracy"),
        ("train_eval_loss", "train_loss"),
        ("train_eval_gap", "gap"),
        ("gap_acc", "gap"),
        ("pairwise_accuracy", "accuracy"),
        ("mean_margin", "margin"),
    ],
)
def test_columns_and_names_of_other_loops_are_quantities(name: str, own: str) -> None:
    assert quantity_named(name).name == own


@pytest.mark.parametrize("name", ["fpr", "eval_fnr", "tpr"])
def test_a_rate_at_a_threshold_is_not_a_quantity_and_the_error_says_what_is(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is not a quantity of an arm: .* Ask for roc_auc"):
        parse(f"{name}(a) < 0.1")


def test_every_name_and_alias_leads_to_a_quantity() -> None:
    assert quantity_named("nll").name == "loss"
    assert quantity_named("median_margin").name == "margin_p50"
    assert quantity_named("eval_pairwise_accuracy").name == "accuracy"
    for name in (*QUANTITIES, *ALIASES):
        own = quantity_named(name)
        assert own.low < own.high
        assert own.meaning
    assert range_of("stopped_at", max_steps=1000) == (0.0, 1000.0)
