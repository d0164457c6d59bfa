"""The page about credit: its examples, its table of rules, and its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import credit_rules
from pages import promised_and_printed, read
from rewardlab.rl import RULES, advantages
from rewardlab.rl.credit import NOT_OF_REWARDS_ALONE

PAGE = read("credit.md")
REWARDS = [5.0, 5.1, 5.2, 5.3, 0.001, 0.001, 0.002, 0.004, 0.0, 1.0, 0.0, 0.0]
RECORD = Path(credit_rules.__file__).parent / "results" / "noise_floor.all.2026-11-23.json"
DIVISORS = {
    "group": "std of the group",
    "batch": "std of the batch",
    "batch_deviations": "std of all deviations",
    "nonzero": "share not 0",
    "none": "–",
}


def rows_below(head: str) -> list[list[str]]:
    """The cells of the rows of the table whose first head this is."""
    lines = PAGE.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return found
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def test_the_examples_run_and_print_what_they_say() -> None:
    promised, printed = promised_and_printed("credit.md")
    assert printed == promised
    assert len(promised) == 5


def test_the_table_says_what_every_rule_is_and_what_comes_out() -> None:
    expected = []
    for name, rule in RULES.items():
        found = advantages(REWARDS, [*"aaaabbbbcccc"], rule=name).advantages_R
        scaled = rule.scale in ("group", "batch", "batch_deviations")
        expected.append(
            [
                f"`{name}`",
                "mean" if rule.baseline == "group" else "mean of the others",
                DIVISORS[rule.scale],
                str(rule.ddof) if scaled else "–",
                f"{rule.epsilon:g}" if scaled else "–",
                *(f"{found[best]:+.3f}" for best in (3, 7, 9)),
            ]
        )
    assert rows_below("rule") == expected
    named = {f"verl-{name}" for name in ("opo", "grpo-passk", "reinforce-plus-plus-baseline", "gdpo")}
    named |= {"openrlhf-reinforce-baseline", "openrlhf-flash-reinforce"}
    assert named == set(NOT_OF_REWARDS_ALONE)
    assert all(f"`{name.split('-', 1)[1].replace('-', '_')}`" in PAGE for name in NOT_OF_REWARDS_ALONE)


def test_what_the_floor_costs_is_what_the_record_says() -> None:
    cells = json.loads(RECORD.read_text(encoding="utf-8"))["cells"]
    shares = ("below", "silent", "turned", "turned_at_most")
    expected = [
        [
            f"{cell['spread']:g}",
            *(f"{cell[name]['value']:.1%} [{cell[name]['low']:.1%}, {cell[name]['high']:.1%}]" for name in shares),
        ]
        for kind in ("bfloat16", "float16", "measured 0.01", "float32")
        for cell in cells[kind]
        if cell["size"] == 8
    ]
    assert [row[1:] for row in rows_below("tolerance")] == expected
    assert all(cell["turned_above"] == 0 and cell["groups"] == 1000 for of in cells.values() for cell in of)


@pytest.mark.parametrize(("size", "larger"), [(4, 1.15), (8, 1.07)])
def test_how_much_larger_the_advantages_of_async_grpo_are(size: int, larger: float) -> None:
    rewards = [0.5 * number for number in range(size)]
    one, other = (advantages(rewards, [0] * size, rule=rule).advantages_R for rule in ("trl-async", "trl"))
    assert one[0] / other[0] == pytest.approx(larger, abs=0.005)
