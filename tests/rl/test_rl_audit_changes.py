"""Changes between windows: equal to slow versions, unmoved by units, wide enough where steps or prompts drift."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind, ttest_rel

from rewardlab.rl.audit.changes import Sample
from rewardlab.rl.audit.windows import MIN_STEPS, divide


def sample(step_N: np.ndarray, prompt_N: np.ndarray, values_N2: np.ndarray, windows: int = 2) -> Sample:
    keys = [f"prompt {number}" for number in range(int(prompt_N.max()) + 1)]
    return Sample.of(step_N, prompt_N, values_N2, divide(step_N, windows), keys)


def drawn(steps: int, prompts: int, seed: int = 0, *, recur: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One reply to every prompt in every step, or to new prompts."""
    generator = np.random.default_rng(seed)
    step_N = np.repeat(np.arange(steps), prompts)
    prompt_N = np.tile(np.arange(prompts), steps) if recur else np.arange(steps * prompts)
    of_prompt = generator.normal(size=(int(prompt_N.max()) + 1, 2))
    return step_N, prompt_N, generator.normal(size=(len(step_N), 2)) + of_prompt[prompt_N]


@given(st.integers(1, 300), st.integers(2, 20))
def test_windows_have_equal_numbers_of_steps_and_never_too_few(steps: int, wanted: int) -> None:
    windows = divide(np.arange(steps) * 3, wanted)
    if steps < 2 * MIN_STEPS:
        assert windows == []
        return
    sizes = [len(window) for window in windows]
    assert len(windows) == min(wanted, steps // MIN_STEPS)
    assert min(sizes) >= MIN_STEPS
    assert max(sizes) - min(sizes) <= 1
    assert np.concatenate(windows).tolist() == (np.arange(steps) * 3).tolist()


def test_with_the_same_prompts_a_change_is_the_mean_of_the_changes_of_prompts() -> None:
    step_N, prompt_N, values_N2 = drawn(12, 15)
    pair = sample(step_N, prompt_N, values_N2).compare(0, 1)
    change_P = [
        values_N2[(prompt_N == p) & (step_N >= 6), 1].mean() - values_N2[(prompt_N == p) & (step_N < 6), 1].mean()
        for p in range(15)
    ]
    assert pair.gold.value == pytest.approx(np.mean(change_P), rel=1e-12)
    assert pair.gold.method.endswith("the same prompts")


def test_the_error_over_prompts_is_that_of_the_paired_test_where_steps_say_nothing() -> None:
    step_N, prompt_N, values_N2 = drawn(8, 30)
    values_N2 = np.where((step_N >= 4)[:, None], 1.0, 0.0) * prompt_N[:, None] / 10 + 0 * values_N2
    change_P = np.arange(30) / 10
    error = change_P.std(ddof=1) / np.sqrt(30)
    found = sample(step_N, prompt_N, values_N2).compare(0, 1).gold
    assert found.error == pytest.approx(error, rel=1e-9)
    test = ttest_rel(change_P, np.zeros(30), alternative="greater")
    assert found.p_at_most(0) == pytest.approx(test.pvalue, rel=1e-6)


def test_the_error_over_steps_is_that_of_two_samples_of_blocks_where_prompts_say_nothing() -> None:
    generator = np.random.default_rng(1)
    step_N, prompt_N, _ = drawn(12, 20)
    of_step = generator.normal(size=12)
    values_N2 = np.stack([of_step[step_N]] * 2, axis=1)
    found = sample(step_N, prompt_N, values_N2).compare(0, 1).gold
    test = ttest_ind(of_step[6:], of_step[:6], equal_var=False, alternative="greater")
    assert found.value / found.error == pytest.approx(test.statistic, rel=1e-9)
    assert found.degrees == pytest.approx(test.df, rel=1e-9)


def test_the_order_of_rows_changes_nothing() -> None:
    step_N, prompt_N, values_N2 = drawn(16, 12, recur=True)
    order = np.random.default_rng(3).permutation(len(step_N))
    first = sample(step_N, prompt_N, values_N2).compare(0, 1, share=0.25)
    again = sample(step_N[order], prompt_N[order], values_N2[order]).compare(0, 1, share=0.25)
    assert again.gold.value == pytest.approx(first.gold.value, rel=1e-12)
    assert again.gold.error == pytest.approx(first.gold.error, rel=1e-9)


def test_prompts_that_are_easier_later_do_not_move_what_is_compared_by_prompt() -> None:
    """Each window has half of its replies from prompts of its own, which differ; only common ones are compared."""
    step_N, prompt_N, values_N2 = drawn(16, 24)
    own = (prompt_N < 12) | ((prompt_N < 18) == (step_N < 8))
    values_N2 = np.where(prompt_N[:, None] >= 18, 50.0, 0.0) + values_N2
    pair = sample(step_N[own], prompt_N[own], values_N2[own]).compare(0, 1)
    assert abs(pair.gold.value) < 1
    assert pair.gold.num_prompts == 12


def test_the_slope_is_least_squares_within_prompts() -> None:
    step_N, prompt_N, values_N2 = drawn(16, 12)
    values_N2[:, 1] = 0.6 * values_N2[:, 0] - 3.0 * prompt_N
    found = sample(step_N, prompt_N, values_N2).slope
    assert found is not None
    assert found.value == pytest.approx(0.6, rel=1e-9)
    assert found.is_positive


def test_the_error_of_the_slope_is_in_that_of_the_shortfall() -> None:
    step_N, prompt_N, values_N2 = drawn(16, 12)
    values_N2[:, 1] += 0.8 * values_N2[:, 0]
    values_N2[:, 0] += 30.0 * (step_N >= 8)
    own = sample(step_N, prompt_N, values_N2)
    assert own.slope is not None
    pair = own.compare(0, 1, share=0.5)
    assert pair.shortfall is not None
    assert pair.shortfall.error > 0.5 * own.slope.shift.error * 30 * 0.9


@pytest.mark.parametrize(("steps", "prompts", "said"), [(16, 9, "too few prompts (9)"), (8, 12, "")])
def test_without_enough_prompts_there_is_no_interval(steps: int, prompts: int, said: str) -> None:
    gold = sample(*drawn(steps, prompts)).compare(0, 1).gold
    assert np.isnan(gold.error) == bool(said)
    assert np.isnan(gold.p_at_most(0)) == bool(said)
    assert gold.method.startswith(said)


@pytest.mark.parametrize("lacking", [0, 2, 5])
def test_a_block_whose_prompts_are_in_one_window_alone_is_no_part_of_the_error_of_the_change(lacking: int) -> None:
    generator = np.random.default_rng(0)
    step_N, prompt_N, values_N2 = drawn(12, 12)
    of_step = generator.normal(size=(12, 2))
    values_N2 = of_step[step_N] + 0.0 * values_N2
    alone = np.where(step_N == lacking, prompt_N + 12, prompt_N)
    found = sample(step_N, alone, values_N2).compare(0, 1).gold
    kept = np.delete(of_step[:6, 1], lacking)
    expected = np.sqrt(kept.var(ddof=1) / 5 + of_step[6:, 1].var(ddof=1) / 6)
    assert found.error == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("lacking", [0, 2, 5])
def test_a_block_whose_prompts_are_in_one_window_alone_is_in_the_error_of_the_slope(lacking: int) -> None:
    step_N, prompt_N, values_N2 = drawn(12, 12)
    values_N2[:, 1] += 2 * values_N2[:, 0]
    values_N2[:, 0] += 100.0 * (step_N >= 6)
    alone = np.where(step_N == lacking, prompt_N % 6 + 12, prompt_N)
    own = sample(step_N, alone, values_N2)
    pair = own.compare(0, 1, share=0.25)
    assert own.slope is not None
    assert pair.shortfall is not None
    assert pair.shortfall.error > 0.25 * own.slope.shift.error * 100 * 0.9


def test_evidence_in_too_few_steps_of_a_window_is_told() -> None:
    step_N, prompt_N, values_N2 = drawn(16, 12)
    kept = np.isin(step_N, [0, 1, 2, 8, 9, 10, 11])
    own = Sample.of(
        step_N[kept], prompt_N[kept], values_N2[kept], divide(step_N, 2), [str(number) for number in range(12)]
    )
    assert own.compare(0, 1).gold.method == "too few steps with evidence in a window (3); 4 are the fewest that will do"
