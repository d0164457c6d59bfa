"""Laws of cells and tables."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.core.terminal import visible
from rewardlab.core.types import Estimate
from rewardlab.report.tables import (
    digits_of,
    format_count,
    format_estimate,
    interval_note,
    missing_intervals,
    text_table,
)

not_numbers = st.text(st.characters(exclude_categories=("Cs", "Nd"), exclude_characters="-—"), max_size=30)


def estimate(value: float, low: float = math.nan, high: float = math.nan, **other: str) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=100, method=other.get("method", "Wilson"))


def width(line: str) -> int:
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in line
    )


@pytest.mark.parametrize(
    ("given_estimate", "settings", "text"),
    [
        (estimate(0.7341, 0.6949, 0.7706), {}, "0.734 [0.695, 0.771]"),
        (estimate(0.7341, 0.6949, 0.7706), {"percent": True}, "73.4% [69.5, 77.1]"),
        (estimate(0.7341, 0.6949, 0.7706), {"percent": True, "digits": 2}, "73% [69, 77]"),
        (estimate(0.7341, 0.6949, 0.7706), {"digits": 2}, "0.73 [0.69, 0.77]"),
        (estimate(0.7341), {}, "0.734 [—]"),
        (estimate(0.7341), {"percent": True}, "73.4% [—]"),
        (estimate(math.nan), {}, "—"),
        (estimate(-1.5, -2, -0.0001), {}, "-1.500 [-2.000, 0.000]"),
        (estimate(-1316.452, -1437.501, -195.163), {}, "-1,316.5 [-1,437.5, -195.2]"),
        (estimate(123456.7, 100.0, math.inf), {}, "123,457 [100, inf]"),
        (estimate(-1.5e15, -2.5e16, 3.0), {}, "-1.5e+15 [-2.5e+16, 3]"),
        (estimate(1.0, 0.9, 1.0), {"percent": True, "digits": 2}, "100% [90, 100]"),
    ],
)
def test_a_number_is_shown_with_its_interval(given_estimate: Estimate, settings: dict, text: str) -> None:
    assert format_estimate(given_estimate, **settings) == text


@pytest.mark.parametrize(
    ("found", "digits"),
    [
        (estimate(0.69, 0.66, 0.72), 2),
        (estimate(0.0031, 0.0012, 0.0049), 3),
        (estimate(-0.0003, -0.0011, 0.0005), 4),
        (estimate(0.2, 0.004, 0.4), 2),
        (estimate(0.02, 0.004, 0.036), 3),
        (estimate(0.002, 0.0, 0.043), 2),
        (estimate(0.004, 0.0, 0.043), 3),
        (estimate(0.0, 0.0, 0.0), 2),
        (estimate(1e-30, 0.0, 1e-30), 2),
        (estimate(math.nan), 2),
        (estimate(0.041, 0.0409, 0.071), 2),
        (None, 2),
    ],
)
def test_an_estimate_has_the_decimals_that_tell_its_numbers_apart(found: Estimate | None, digits: int) -> None:
    assert digits_of(found, least=2) == digits


def test_a_missing_interval_has_its_reason_and_equal_ones_stand_together() -> None:
    sure, few = estimate(0.5, 0.4, 0.6), estimate(0.5, method="too few")
    named = {"p5": [few, few], "p25": [sure, few], "p50": [sure], "p75": [estimate(math.nan, method="none")]}
    assert missing_intervals(named) == ["[—] p5; p25: too few"]
    assert missing_intervals({"p50": [sure]}) == []


def test_a_count_is_exact() -> None:
    assert [format_count(count) for count in (0, 999, 1_234_567)] == ["0", "999", "1,234,567"]


def test_numbers_are_aligned_to_the_right_and_text_to_the_left() -> None:
    rows = [
        ["eval_accuracy", format_estimate(estimate(0.7341, 0.6949, 0.7706)), format_count(1000)],
        ["eval_margin", format_estimate(estimate(-0.5)), ""],
        ["ece", "—", format_count(7)],
    ]
    assert text_table(["metric", "value", "n"], rows).splitlines() == [
        "metric                        value      n",
        "-------------  --------------------  -----",
        "eval_accuracy  0.734 [0.695, 0.771]  1,000",
        "eval_margin              -0.500 [—]",
        "ece                               —      7",
    ]


def test_a_table_without_rows_is_its_header() -> None:
    assert text_table(["a", "bb"], []) == "a  bb\n-  --"


@given(rows=st.lists(st.tuples(not_numbers, not_numbers), max_size=6), max_width=st.integers(20, 60))
def test_text_is_wrapped_to_the_width_and_none_of_it_is_lost(rows: list[tuple[str, str]], max_width: int) -> None:
    lines = text_table(["name", "what it is"], rows, max_width=max_width).splitlines()
    assert all(width(line) <= max_width for line in lines)
    assert all(visible(line) == line for line in lines)

    def letters(text: str) -> list[str]:
        return sorted(letter for letter in visible(text) if not letter.isspace())

    rule = lines.index(next(line for line in lines if line.startswith("-")))
    assert letters("".join(lines[rule + 1 :])) == letters("".join(cell for cells in rows for cell in cells))


def test_long_words_and_lines_are_broken_within_their_column() -> None:
    table = text_table(["what", "n"], [["one two three", "1"], ["extraordinarily", "12"]], max_width=12)
    assert table.splitlines() == [
        "what       n",
        "--------  --",
        "one two    1",
        "three",
        "extraord  12",
        "inarily",
    ]


def test_numbers_are_never_broken() -> None:
    cell = format_estimate(estimate(0.7341, 0.6949, 0.7706))
    assert cell in text_table(["value"], [[cell]], max_width=5)


def test_text_is_narrowed_to_eight_columns_and_no_further() -> None:
    lines = text_table(["name"], [["two words"], ["abcdefgh"]], max_width=5).splitlines()
    assert lines == ["name", "--------", "two", "words", "abcdefgh"]


def test_wide_letters_take_two_columns() -> None:
    lines = text_table(["name", "n"], [["日本語", "1"], ["abc", "10"]]).splitlines()
    assert {width(line) for line in lines} == {10}
    assert lines[2] == "日本語   1"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="one cell a column"):
        text_table(["a", "b"], [["only one"]])


def test_the_foot_names_each_method_once() -> None:
    estimates = [estimate(0.5), estimate(0.6), estimate(0.1, method="bootstrap by prompt")]
    narrower = Estimate(value=0.5, low=0.4, high=0.6, n=3, method="Wilson", level=0.995)
    assert interval_note([*estimates, narrower]).splitlines() == [
        "95% intervals: Wilson; bootstrap by prompt",
        "99.5% intervals: Wilson",
    ]


def test_columns_that_do_not_fit_stand_below_with_the_names_again() -> None:
    rows = [["other", "0.73 [0.69, 0.77]", "0.50 [0.40, 0.60]", "12"], ["all", "0.74 [0.69, 0.77]", "—", "1,200"]]
    assert text_table(["source", "accuracy", "NLL", "pairs"], rows, max_width=30).splitlines() == [
        "source           accuracy",
        "------  -----------------",
        "other   0.73 [0.69, 0.77]",
        "all     0.74 [0.69, 0.77]",
        "",
        "source                NLL",
        "------  -----------------",
        "other   0.50 [0.40, 0.60]",
        "all                     —",
        "",
        "source  pairs",
        "------  -----",
        "other      12",
        "all     1,200",
    ]


@pytest.mark.parametrize(("columns", "widest"), [("80", 80), ("50", 50), ("3", 40), ("500", 100)])
def test_a_table_fits_the_terminal(monkeypatch, columns: str, widest: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cells = [format_estimate(estimate(0.7341, 0.6949, 0.7706))] * 4
    lines = text_table(["model", "accuracy", "NLL", "margin", "ECE"], [["bag of words", *cells]]).splitlines()
    assert max(map(width, lines)) <= widest
    assert sum(line.count("0.734") for line in lines) == 4


def test_no_word_is_broken_while_a_column_can_stand_below() -> None:
    cells = [[name, *["-0.012 [-0.088, 0.061]"] * 3, "nothing"] for name in ("politeness", "white space")]
    table = text_table(["texts", "shift", "size", "accuracy", "moves"], cells, max_width=88)
    assert {line.split("  ")[0] for line in table.splitlines() if line.startswith("pol")} == {"politeness"}
    assert "nothing" in table


def test_a_name_that_has_to_be_broken_is_broken_at_its_parts() -> None:
    cell = "0.73 [0.69, 0.77]"
    lines = text_table(["arm", "accuracy"], [["slow_and_steady_wins", cell]], max_width=32).splitlines()
    assert lines[2:] == [f"slow_and_      {cell}", "steady_wins"]


def test_a_table_below_repeats_the_columns_that_tell_its_rows_apart() -> None:
    cell = "0.73 [0.69, 0.77]"
    rows = [["gold", "0–14", cell, "<0.001"], ["gold", "15–29", cell, "0.010"]]
    assert text_table(["evidence", "steps", "moved", "p"], rows, max_width=38).splitlines()[5:] == [
        "evidence  steps       p",
        "--------  -----  ------",
        "gold      0–14   <0.001",
        "gold      15–29   0.010",
    ]
