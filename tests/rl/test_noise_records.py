"""The scripts behind the numbers on the page about credit run, and fail where they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import credit_rules
import noise_floor
from rewardlab.rl import RULES, noise

WORDS = ["--draws", "60", "--kinds", "bfloat16", "--sizes", "4"]


def test_the_simulation_of_the_noise_floor_counts_what_it_says(tmp_path: Path) -> None:
    assert noise_floor.main([*WORDS, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]["bfloat16"]
    assert [cell["spread"] for cell in cells] == [*noise_floor.SPREADS]
    assert all(cell["turned_above"] == 0 for cell in cells)
    assert cells[0]["below"]["value"] == 1.0
    assert cells[0]["turned_at_most"]["value"] > 0.2


def test_the_simulation_ends_with_an_error_if_a_counted_sign_turns_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise.Noise, "between_scorings", lambda self, scores_R: [1e-9] * len(scores_R))
    assert noise_floor.main([*WORDS, "--no-result"]) == 1


VERL = """
def compute_grpo_outcome_advantage(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=True):
    groups = token_level_rewards[:, 0].reshape(-1, int((index == index[0]).sum()))
    found = groups - groups.mean(1, keepdim=True)
    if norm_adv_by_std_in_grpo:
        found = found / (groups.std(1, keepdim=True) + EPSILON)
    return found.reshape(-1, 1), None
def compute_rloo_outcome_advantage(): ...
def compute_gpg_outcome_advantage(): ...
"""


@pytest.mark.parametrize(("epsilon", "status"), [("1e-6", 0), ("1e-4", 1)])
def test_a_library_that_computes_something_else_is_noticed(tmp_path: Path, epsilon: str, status: int) -> None:
    source = tmp_path / "core_algos.py"
    source.write_text(VERL.replace("EPSILON", epsilon), encoding="utf-8")
    asked = ["--verl", str(source), "--draws", "20", "--no-result"]
    assert credit_rules.main([*asked, "--kinds", "verl-grpo", "verl-grpo-no-std"]) == status
    assert credit_rules.main(["--draws", "20", "--no-result"]) == 1  # nothing to compare with


def test_the_record_holds_every_rule_that_the_tests_cannot_hold_against_a_library() -> None:
    (path,) = sorted((Path(credit_rules.__file__).parent / "results").glob("credit_rules.all.*.json"))[-1:]
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert set(found) == {rule for rule in RULES if not rule.startswith("trl")}
    assert max(found.values()) <= credit_rules.NEAR
