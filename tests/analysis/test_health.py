"""Every planted fault is named, by its own name alone; healthy runs, however noisy, are silent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rewardlab.analysis import stats
from rewardlab.analysis.health import ADVICE, Health, WarningSign, judge
from rewardlab.analysis.signs import AT_EVALUATION, LOG_2, WHILE_TRAINING, History, RunFacts

Rows = list[dict[str, Any]]


def interval(name: str, value: float, half: float) -> dict[str, float]:
    """A value and its symmetric interval."""
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def evaluation(step: int, *, acc: float, loss: float, half: float = 0.04, **more: float) -> dict[str, float]:
    """A row with an evaluation whose intervals have a given half width."""
    margin = more.pop("eval_margin", 2 * (acc - 0.5))
    found = (
        interval("eval_accuracy", acc, half) | interval("eval_loss", loss, half) | interval("eval_margin", margin, half)
    )
    return {"step": step, **found, **more}


def training(step: int, *, loss: float, acc: float = 0.7, **more: float) -> dict[str, float]:
    """A row with training values over 160 pairs."""
    values = {"train_loss": loss, "train_nll": loss, "train_accuracy": acc, "train_pairs": 160}
    return {"step": step, **values, "grad_norm": 4.0, "head_grad_norm": 0.6, **more}


def both(step: int, *, trained: float, acc: float, loss: float, train_accuracy: float = 0.7, **more: float) -> dict:
    """A whole row."""
    return training(step, loss=trained, acc=train_accuracy) | evaluation(step, acc=acc, loss=loss, **more)


def names(found: Sequence[WarningSign]) -> list[str]:
    """What was told, in order."""
    return [sign.name for sign in found]


FACTS = RunFacts(num_steps=100, warmup_steps=5)
START = evaluation(0, acc=0.5, loss=0.72)


def memorising(half: float) -> Rows:
    """The training loss goes to nothing, the evaluation loss has a minimum and rises."""
    eval_loss = [0.65, 0.60, 0.57, 0.60, 0.70, 0.85, 0.95, 1.05, 1.15, 1.2]
    rows = [
        both(10 * n + 10, trained=0.6 * 0.6**n, acc=0.68, loss=loss, half=half, train_accuracy=min(1, 0.65 + 0.05 * n))
        for n, loss in enumerate(eval_loss)
    ]
    return [START, *rows]


def test_a_loss_that_rises_beyond_its_intervals_while_training_goes_on_is_overfitting():
    (sign,) = judge(memorising(0.05), FACTS)
    assert (sign.name, sign.step) == ("overfitting", 60), "two evaluations in a row are clear of the best"
    assert "loss rose from 0.570 [0.520, 0.620] at step 30 to 0.850 [0.800, 0.900]" in sign.text
    assert "training loss went from 0.392 to 0.047" in sign.text
    assert "--early-stopping-patience" in sign.advice


@pytest.mark.parametrize("half", [0.4, math.nan])
def test_the_same_within_the_intervals_or_without_any_is_none(half):
    assert judge(memorising(half), FACTS) == []


@pytest.mark.parametrize(
    ("before", "last", "found"), [(0.009, 0.009, []), (0.009, 0.02, []), (0.02, 0.02, ["overfitting"])]
)
def test_a_rise_of_next_to_nothing_is_none(before, last, found):
    losses = [0.3, 1e-6, before, last]
    rows = [
        both(10 * n + 10, trained=0.3 * 0.1**n, acc=0.999, loss=loss, half=loss / 1000) for n, loss in enumerate(losses)
    ]
    assert names(judge([START, *rows], FACTS)) == found


def test_an_accuracy_that_falls_is_overfitting_too():
    accs = [0.6, 0.7, 0.72, 0.71, 0.6, 0.6, 0.59]
    rows = [both(10 * n + 10, trained=0.6 - 0.08 * n, acc=acc, loss=0.6) for n, acc in enumerate(accs)]
    (sign,) = judge([START, *rows], FACTS)
    assert sign.name == "overfitting"
    assert "accuracy fell from 0.720 [0.680, 0.760] at step 30 to 0.600 [0.560, 0.640]" in sign.text


def test_an_evaluation_that_falls_with_its_training_is_not_overfitting():
    rows = memorising(0.05)
    for number, row in enumerate(rows[1:]):
        row["train_nll"] = row["train_loss"] = 0.5 + 0.05 * number
    assert judge(rows, FACTS) == []


def test_learning_the_opposite_is_not_called_overfitting():
    rows = [both(10 * n, trained=0.7 - 0.06 * n, acc=0.5 - 0.04 * n, loss=0.6 + 0.2 * n) for n in range(1, 11)]
    assert names(judge([START, *rows], FACTS)) == ["reversed_labels"]


def test_the_watched_training_rows_decide_where_there_are_any():
    rows = memorising(0.05)
    for number, row in enumerate(rows):
        row |= {"train_eval_loss": 0.7 - 0.05 * number, "gap_loss_low": 0.1 * number}
    (sign,) = judge(rows, FACTS)
    assert "that of the watched training rows went from 0.550 to 0.400" in sign.text
    for row in rows:
        row["gap_loss_low"] = -0.1
    assert judge(rows, FACTS) == []


def test_an_accuracy_below_one_half_after_some_training_asks_for_the_labels():
    accs = [0.44, 0.4, 0.3, 0.2, 0.15]
    rows = [evaluation(step, acc=acc, loss=0.9) for step, acc in zip((0, 10, 20, 30, 40), accs, strict=True)]
    (sign,) = judge(rows, FACTS)
    assert (sign.name, sign.step) == ("reversed_labels", 30)
    assert "accuracy is 0.200 [0.160, 0.240], below 0.5" in sign.text
    flat = [evaluation(step, acc=0.5, loss=0.7, eval_margin=-step / 50) for step in (0, 20, 40)]
    (sign,) = judge(flat, FACTS)
    assert "margin is -0.800 [-0.840, -0.760], below 0 " in sign.text


@pytest.mark.parametrize(
    "accs",
    [
        pytest.param([0.3, 0.3, 0.5, 0.55], id="an untrained head that happens to disagree"),
        pytest.param([0.2, 0.25, 0.35, 0.40], id="on its way up"),
        pytest.param([0.5, 0.47, 0.46, 0.46], id="within the interval"),
        pytest.param([0.5, 0.5, 0.3, 0.5], id="once"),
    ],
)
def test_an_accuracy_below_one_half_is_not_always_a_reversal(accs):
    rows = [evaluation(20 * n, acc=acc, loss=0.7, eval_margin=0.0) for n, acc in enumerate(accs)]
    assert judge(rows, FACTS) == []


def test_a_loss_that_stays_at_that_of_a_coin_shows_no_skill():
    rows = [START, *(both(10 * n, trained=0.692, acc=0.51, loss=0.694, train_accuracy=0.5) for n in range(1, 11))]
    (sign,) = judge(rows, FACTS)
    assert (sign.name, sign.step) == ("no_skill", 40)
    assert "loss over the last 320 pairs is 0.692, a coin toss has 0.693" in sign.text
    alone = [training(10 * n, loss=LOG_2, acc=0.5) for n in range(1, 11)]
    assert names(judge(alone, FACTS)) == ["no_skill"], "without evaluation data too"
    long = RunFacts(num_steps=100_000, warmup_steps=5)
    assert [
        sign.step for sign in judge([*alone, *(training(n, loss=0.69, acc=0.5) for n in range(110, 400, 10))], long)
    ]


@pytest.mark.parametrize(
    ("trained", "train_accuracy", "acc", "loss"),
    [(0.66, 0.5, 0.5, 0.69), (0.69, 0.6, 0.52, 0.69), (0.69, 0.5, 0.6, 0.69), (0.69, 0.5, 0.52, 0.6)],
    ids=["loss", "accuracy", "evaluation", "evaluation loss"],
)
def test_any_sign_of_skill_is_enough(trained, train_accuracy, acc, loss):
    rows = [
        START,
        *(both(10 * n, trained=trained, acc=acc, loss=loss, train_accuracy=train_accuracy) for n in range(1, 11)),
    ]
    assert judge(rows, FACTS) == []


def test_a_few_pairs_show_neither_skill_nor_the_lack_of_it():
    rows = [training(10 * n, loss=0.69, acc=0.5, train_pairs=30) for n in range(1, 11)]
    assert judge(rows, FACTS) == [], "150 pairs in the latter half"


@pytest.mark.parametrize(("pairs", "accuracy", "told"), [(20, 0.54, False), (20, 0.47, True), (80, 0.52, True)])
def test_an_accuracy_that_may_be_that_of_a_run_that_learns_is_no_lack_of_skill(pairs, accuracy, told):
    """Of 200 to 260 pairs 0.54 is within the noise of both 0.5 and 0.6; of 800 pairs 0.52 is clearly below 0.6."""
    rows = [training(n, loss=0.685, acc=accuracy, train_pairs=pairs) for n in range(100 - 26, 101)]
    facts = RunFacts(num_steps=100, warmup_steps=5)
    # Rows of the latter half alone: 13 to 26 of them.
    assert names(judge(rows, facts)) == (["no_skill"] if told else [])


def test_skill_is_not_asked_for_before_the_warm_up_is_over():
    rows = [training(10 * n, loss=0.69, acc=0.5) for n in range(1, 7)]
    assert judge(rows, RunFacts(num_steps=100, warmup_steps=45)) == []


@pytest.mark.parametrize("name", ["train_loss", "grad_norm"])
def test_what_stays_a_multiple_of_its_median_explodes(name):
    rows = [training(10 * n, loss=0.6) for n in range(1, 9)]
    rows += [training(90, loss=0.6) | {name: 60.0}, training(100, loss=0.6) | {name: 70.0}]
    (sign,) = judge(rows, FACTS)
    assert (sign.name, sign.step) == ("exploding", 100)
    assert f"median before was {rows[0][name]:.3g}" in sign.text
    assert "over the last 320 pairs" in sign.text


def test_a_loss_that_is_far_above_that_of_a_coin_from_the_start_explodes_and_is_not_overfitting():
    rows = [both(10 * n, trained=90.0 - 5 * n, acc=0.5, loss=10.0 + 30 * n, half=0.1) for n in range(1, 11)]
    (sign,) = judge([START, *rows], FACTS)
    assert (sign.name, sign.step) == ("exploding", 40)
    assert "the training loss is 70 over the last 320 pairs, where a coin toss has 0.693." in sign.text


def test_one_spike_a_hard_batch_of_a_good_model_and_a_row_of_few_pairs_are_none():
    usual = [training(10 * n, loss=0.6) for n in range(1, 9)]
    assert judge([*usual, training(90, loss=30.0, grad_norm=900.0), training(100, loss=0.6)], FACTS) == []
    fitted = [training(10 * n, loss=0.7 * 0.4**n, grad_norm=5 * 0.4**n, head_grad_norm=0.4**n) for n in range(1, 9)]
    assert judge([*fitted, *(training(n, loss=0.5, grad_norm=3.0) for n in (90, 95, 100))], FACTS) == []
    few = [training(n, loss=0.5, train_pairs=1) for n in range(1, 9)]
    assert judge([*few, *(training(n, loss=4.0, grad_norm=90.0, train_pairs=1) for n in (9, 10, 11))], FACTS) == []


def test_evaluations_that_swing_late_further_than_their_intervals_oscillate():
    accs = [0.6, 0.65, 0.7, 0.7, 0.7, 0.72, 0.72, 0.6, 0.73, 0.62]
    rows = [evaluation(10 * n + 10, acc=acc, loss=0.6, eval_margin=0.5) for n, acc in enumerate(accs)]
    (sign,) = judge(rows, FACTS)
    assert (sign.name, sign.step) == ("oscillating", 90)
    assert "went 0.720 [0.680, 0.760], 0.600 [0.560, 0.640], 0.730 [0.690, 0.770] at steps 70, 80 and 90" in sign.text
    wide = [evaluation(10 * n + 10, acc=acc, loss=0.6, half=0.1, eval_margin=0.5) for n, acc in enumerate(accs)]
    assert judge(wide, FACTS) == []
    early = RunFacts(num_steps=300)
    assert judge(rows, early) == [], "in the first third a model may jump"


def test_a_late_peak_is_a_swing_as_well():
    accs = [0.6, 0.6, 0.75, 0.6]
    rows = [
        evaluation(step, acc=acc, loss=0.6, eval_margin=0.5) for step, acc in zip((70, 80, 90, 100), accs, strict=True)
    ]
    assert names(judge(rows, FACTS)) == ["oscillating"]


def test_scores_in_a_narrow_band_are_told_beside_what_the_accuracy_needs():
    def rows(std: float, acc: float) -> Rows:
        return [
            START,
            *(
                both(10 * n, trained=0.67, acc=acc, loss=0.66, eval_score_mean=5.1, eval_score_std=std)
                for n in range(1, 11)
            ),
        ]

    (sign,) = judge(rows(0.1, 0.7), FACTS)
    assert (sign.name, sign.step) == ("narrow_scores", 40)
    assert "5.1 with a standard deviation of 0.1; an accuracy of 0.700 [0.660, 0.740] needs 0.58 or more" in sign.text
    assert judge(rows(0.1, 0.53), FACTS) == [], "an accuracy that needs little"
    assert judge(rows(0.3, 0.7), FACTS) == []
    assert names(judge(rows(0.005, 0.53), FACTS)) == ["narrow_scores"], "all the same"
    assert judge(rows(0.1, 0.7), RunFacts(num_steps=100, warmup_steps=5, beta=4.0)) == [], "β spreads them"
    assert names(judge(rows(0.1, 1.0), FACTS)) == ["narrow_scores"]
    soft = RunFacts(num_steps=100, warmup_steps=5, label_certainty=0.6)
    assert judge(rows(0.15, 0.97), soft) == [], "labels of 0.6 ask for no more"
    (sign,) = judge(rows(0.1, 0.97), soft)
    assert "needs 0.36 or more" in sign.text


def test_margins_or_scores_that_grow_for_nothing_are_told():
    def rows(accs: Sequence[float], losses: Sequence[float], **sizes: Sequence[float]) -> Rows:
        return [
            both(10 * n + 10, trained=0.3, acc=acc, loss=loss, **{name: size[n] for name, size in sizes.items()})
            for n, (acc, loss) in enumerate(zip(accs, losses, strict=True))
        ]

    growing = [1.0, 1.6, 2.3, 3.1, 4.0]
    (sign,) = judge(rows([0.7] * 5, [0.6] * 5, eval_margin=growing), FACTS)
    assert (sign.name, sign.step) == ("growing_scores", 50)
    assert "margin (times β) grew from 1.00 at step 10 to 4.00 over 5 evaluations" in sign.text
    assert judge(rows([0.7, 0.72, 0.75, 0.8, 0.84], [0.6] * 5, eval_margin=growing), FACTS) == [], "it pays"
    assert judge(rows([0.7] * 5, [0.6, 0.58, 0.56, 0.54, 0.5], eval_margin=growing), FACTS) == [], "the loss falls"
    assert judge(rows([0.7] * 5, [0.6] * 5, eval_margin=[1.0, 1.6, 1.5, 3.1, 4.0]), FACTS) == [], "not steadily"
    assert judge(rows([0.7] * 5, [0.6] * 5, eval_margin=[3.8, 3.9, 4.0, 4.1, 4.2]), FACTS) == [], "hardly"
    assert judge(rows([0.7] * 5, [0.6] * 5, eval_margin=[g / 2 for g in growing]), FACTS) == [], "small"
    drift = judge(rows([0.7] * 5, [0.6] * 5, eval_score_mean=[-1, -3, -5, -8, -12], eval_score_std=[1] * 5), FACTS)
    assert names(drift) == ["growing_scores"]
    assert "size of the scores (times β) grew from 1.41" in drift[0].text


def test_a_gradient_of_zero_is_told_for_head_and_backbone():
    head = [training(10 * n, loss=0.6, head_grad_norm=0.0) for n in range(1, 5)]
    (sign,) = judge(head, FACTS)
    assert (sign.name, sign.step) == ("frozen_head", 30)
    backbone = [training(10 * n, loss=0.6, grad_norm=0.7, head_grad_norm=0.7 * (1 - 1e-8)) for n in range(1, 5)]
    (sign,) = judge(backbone, FACTS)
    assert (sign.name, sign.step) == ("frozen_backbone", 30)
    assert judge(backbone, replace(FACTS, head_alone=True)) == [], "nothing else was meant to train"
    assert judge(head, replace(FACTS, intended=frozenset({"frozen_head"}))) == [], "of a control"
    assert judge([training(10 * n, loss=0.6, grad_norm=0.70001, head_grad_norm=0.7) for n in range(1, 5)], FACTS) == []
    assert judge(head[:2], FACTS) == []


def test_most_prompts_cut_is_told_before_the_first_step():
    (sign,) = judge([], FACTS, truncation={"training": (90, 100), "test": (2, 100)})
    assert (sign.name, sign.step) == ("truncated", 0)
    assert "90 of 100 replies of the training data." in sign.text
    assert judge([], FACTS, truncation={"training": (49, 100), "test": (0, 0)}) == []


def test_every_sign_has_advice_that_names_a_flag_and_every_advice_a_sign():
    of_no_row = {"behind_baseline", "live_differs", "one_side_cut", "other_precision", "shallow_labels", "truncated"}
    assert {*WHILE_TRAINING, *AT_EVALUATION, *of_no_row} == set(ADVICE)
    assert [name for name, text in ADVICE.items() if "--" not in text and name != "frozen_head"] == []


# --- once each -------------------------------------------------------------------------------------------------


def test_a_sign_is_told_once_and_again_only_after_it_was_gone():
    health, told = Health(RunFacts(num_steps=1)), []
    seen = [True] * 4 + [False] * 2 + [True] * 4 + [False] * 3 + [True] * 4
    for step, constant in enumerate(seen, start=20):
        row = evaluation(step, acc=0.5, loss=0.69, eval_score_mean=0.0, eval_score_std=0.001 if constant else 1.0)
        told += [sign.step for sign in health.offer(row)]
    assert told == [20, 33], "while it flickers (two looks) it is not told again"


def test_values_may_come_in_parts_as_text_and_with_empty_cells():
    rows = memorising(0.05)
    whole = judge(rows, FACTS)
    parts = [
        {"step": row["step"]} | {name: value for name, value in row.items() if name.startswith("eval") == late}
        for row in rows
        for late in (False, True)
    ]
    assert judge(parts, FACTS) == whole
    cells = [{**{name: str(value) for name, value in row.items()}, "mfu": "", "epoch": None} for row in rows]
    assert judge(cells, FACTS) == whole
    health = Health(FACTS)
    assert [sign for row in rows for sign in health.offer(row)] == whole


def test_without_facts_the_history_tells_them():
    rows = [
        training(10 * n, loss=0.69, acc=0.5, lr=1e-4 * min(n, 5) if n <= 5 else 1e-4 * (11 - n)) for n in range(1, 11)
    ]
    assert [sign.step for sign in judge(rows)] == [70], "20 steps, and 200 pairs, past a warm-up that ends at step 50"
    assert judge([]) == []


# --- healthy runs ----------------------------------------------------------------------------------------------


def run_of(seed: int, *, pairs: int, evaluations: int, batch: int, gain: float, log_every: int = 10) -> Rows:
    """A model that learns as models do: its differences are those of the truth and an error of its own, and they grow
    until it is calibrated. Labels are noisy, so it is wrong at times; every number is computed as a run computes it.
    """
    draw = np.random.default_rng(seed)
    num_steps = evaluations * 20

    def sample(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        truth, own = draw.normal(0, 1, count), draw.normal(0, 0.7, count)
        return truth, own, np.where(draw.random(count) < 1 / (1 + np.exp(-gain * truth)), 1, -1)

    def differences(sampled: tuple[np.ndarray, np.ndarray, np.ndarray], step: int) -> np.ndarray:
        truth, own, sign = sampled
        skill = 1 - math.exp(-4 * step / num_steps)
        jitter = draw.normal(0, 0.15, len(truth))
        return sign * (0.7 * gain * skill * (truth + 0.4 * own + jitter) + 0.4 * (1 - skill) * own)

    def values_of(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (found > 0).astype(float), np.logaddexp(0, -found)

    watched, means, rows = sample(pairs), draw.normal(0, 1, pairs), Rows()
    for step in range(0, num_steps + 1, log_every):
        row: dict[str, Any] = {"step": step}
        if step:
            correct, nll = values_of(differences(sample(batch * log_every), step))
            loss = float(nll.mean())
            row |= training(step, loss=loss, acc=float(correct.mean())) | {"train_pairs": batch * log_every}
            row |= {"grad_norm": 4 * draw.lognormal(0, 0.5), "head_grad_norm": 0.3 * draw.lognormal(0, 0.5)}
        if step % 20 == 0:
            found = differences(watched, step)
            scores = np.concatenate([means + found / 2, means - found / 2])
            correct, nll = values_of(found)
            for name, estimate in (
                ("eval_accuracy", stats.proportion(correct)),
                ("eval_loss", stats.mean_loss(nll)),
                ("eval_margin", stats.mean(found)),
            ):
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            row |= {"eval_score_mean": scores.mean(), "eval_score_std": scores.std()}
        rows.append(row)
    return rows


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("pairs", [20, 60, 300, 2000])
@pytest.mark.parametrize("batch", [2, 16])
def test_healthy_runs_are_silent_however_noisy(pairs, batch):
    for seed in range(40):
        for gain in (1.5, 3.0):
            rows = run_of(seed, pairs=pairs, evaluations=10, batch=batch, gain=gain)
            facts = RunFacts(num_steps=200, warmup_steps=10)
            assert judge(rows, facts) == [], f"seed {seed}, gain {gain}"


@pytest.mark.slow
def test_long_healthy_runs_with_many_looks_and_a_row_a_step_are_silent():
    for seed in range(3):
        rows = run_of(seed, pairs=60, evaluations=50, batch=2, gain=2.0, log_every=1)
        assert judge(rows, RunFacts(num_steps=1000, warmup_steps=50)) == [], f"seed {seed}"


def test_the_healthy_runs_are_runs_in_which_something_could_be_seen():
    rows = run_of(0, pairs=300, evaluations=10, batch=16, gain=3.0)
    accs = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert accs[0] < 0.6 < 0.7 < accs[-1]
    assert rows[-1]["train_nll"] < rows[1]["train_nll"] - 0.02
    assert any(later < earlier for earlier, later in pairwise(accs)), "it is noisy"


class Counted(dict[str, float]):
    """A row that counts how often a value of any row is looked at."""

    looks = 0

    def __getitem__(self, name: str) -> float:
        Counted.looks += 1
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        Counted.looks += 1
        return super().__contains__(name)

    def get(self, name: str, *default: Any) -> Any:
        Counted.looks += 1
        return super().get(name, *default)


@pytest.mark.parametrize("pairs", [160, 0])
def test_a_row_late_in_a_long_run_is_judged_by_no_more_values_than_one_before(pairs: int) -> None:
    history, counts = History(RunFacts(num_steps=4000)), []
    # At the first of the two every check is past its beginning, also those of the last third of the run.
    for step in range(1, 6001):
        history.step = step
        row = Counted(both(step, trained=0.69, acc=0.6, loss=0.66) | {"train_pairs": pairs})
        history.add_trained(row)
        history.add_evaluated(row)
        if step in (3000, 6000):
            Counted.looks = 0
            for look in (*WHILE_TRAINING.values(), *AT_EVALUATION.values()):
                look(history)
            counts.append(Counted.looks)
    early, late = counts
    assert late <= 1.2 * early
