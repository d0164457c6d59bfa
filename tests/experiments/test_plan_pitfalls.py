"""What `check` says about plans whose runs could be done, but would show less than they seem to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.checking import assumed_of, check
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.words import check_report
from study_folders import PLAN, finished_study, told, with_arm, write_plan


def with_claim(claim: str, base: str = "") -> str:
    """The plan with a claim more, and settings of its base."""
    return PLAN.replace("steps: 400}", f"steps: 400{base}}}") + f'  more: "{claim}"\n'


def test_a_plan_of_like_arms_has_nothing_to_mend(tmp_path: Path) -> None:
    assert told(tmp_path, PLAN, "error") == told(tmp_path, PLAN, "warning") == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("eval_limit: 10", "eval_limit"),
        ("ties: skip", "ties"),
        ("max_replies: 2", "max_replies"),
        ("truncation: drop, max_seq_len: 64", "truncation, max_seq_len"),
    ],
)
def test_arms_on_different_test_rows_are_told(tmp_path: Path, settings: str, named: str) -> None:
    warnings = told(tmp_path, with_arm(settings), "warning")
    assert any(f"different test rows: {named} differ among them" in one for one in warnings), warnings


def test_arms_that_cut_their_rows_differently_are_judged_on_the_same(tmp_path: Path) -> None:
    assert not told(tmp_path, with_arm("max_seq_len: 64"), "warning")


def test_defaults_of_trl_that_a_plan_does_not_take_are_told(tmp_path: Path) -> None:
    (line,) = [one for one in told(tmp_path, with_arm("compat: trl"), "warning") if "compat" in one]
    assert line.startswith("arm smooth: compat: trl fills in none of TRL's defaults in a plan. Write those that are ")
    assert "max_seq_len: 1024, truncation: drop, " in line
    without = [name for name in ("seed:", "epochs:", "lora_rank:", "label_smoothing:") if name in line]
    assert not without, "they do nothing here, differ, or were chosen"
    whole = with_arm(f"compat: trl, {line.partition('meant: ')[2]}")
    assert not [one for one in told(tmp_path, whole, "warning") if "compat" in one]
    ratio = [
        one for one in told(tmp_path, with_arm("compat: trl, warmup_steps: 9"), "warning") if "warmup_ratio" in one
    ]
    assert not ratio, "the steps of the warmup were chosen"
    adapters = [one for one in told(tmp_path, with_arm("compat: trl, lora: true"), "warning") if "compat" in one]
    assert "lora_target_modules: peft-default" in adapters[0]


SEARCHED = """\
question: Which rate?
base: {model: m, dataset: [train.jsonl], test_dataset: [test.jsonl], steps: 400, compat: trl%s}
seeds: [10, 11]
phases:
  - {name: search, seeds: [0, 1], search: %s}
  - {name: confirm, arms: [winner]}
"""


@pytest.mark.parametrize(
    ("search", "arms"),
    [
        ("{grid: {lr: [1.0e-6, 1.0e-5]}}", "arms lr=1e-06, lr=1e-05:"),
        ("{optuna: {trials: 2, settings: {lr: {log: [1.0e-6, 1.0e-4]}}}}", "arms search_trial_0, search_trial_1:"),
    ],
)
def test_what_a_search_draws_is_chosen_and_arms_of_one_warning_share_a_line(
    tmp_path: Path, search: str, arms: str
) -> None:
    (line,) = [one for one in told(tmp_path, SEARCHED % ("", search), "warning") if "compat" in one]
    assert line.startswith(arms)
    assert " lr: " not in line
    meant = line.partition("meant: ")[2]
    assert not [one for one in told(tmp_path, SEARCHED % (f", {meant}", search), "warning") if "compat" in one]


def test_rows_drawn_by_every_seed_are_told(tmp_path: Path) -> None:
    text = PLAN.replace("steps: 400}", "steps: 400, eval_limit: 15}")
    assert [one for one in told(tmp_path, text, "warning") if one.startswith("eval_limit: each seed draws its own 15")]


@pytest.mark.parametrize(
    ("claim", "base", "why"),
    [
        ("gap(smooth) < 0.1", "", "is not measured: set train_eval_limit for smooth"),
        ("train_loss(smooth, step=80) < 0.5", "", "is not measured"),
        ("accuracy(smooth, step=500) > 0.6", "", "smooth has 400 steps"),
        ("accuracy(smooth, step=90) > 0.6", "", "smooth is evaluated every 40 steps"),
        ("accuracy(smooth, step=80) > 0.6", ", eval_every: 100", "smooth is evaluated every 100 steps"),
    ],
)
def test_values_that_will_not_be_there_are_errors(tmp_path: Path, claim: str, base: str, why: str) -> None:
    errors = told(tmp_path, with_claim(claim, base), "error")
    assert [why in one for one in errors] == [True], errors


@pytest.mark.parametrize("claim", ["accuracy(smooth, step=80) > 0.6", "accuracy(smooth, step=400) > 0.6"])
def test_values_at_evaluated_steps_are_there(tmp_path: Path, claim: str) -> None:
    assert not told(tmp_path, with_claim(claim), "error")
    assert not told(tmp_path, with_claim(claim), "warning")


def test_a_step_that_a_run_may_not_reach_is_told(tmp_path: Path) -> None:
    text = with_claim("accuracy(smooth, step=80) > 0.6", ", early_stopping_patience: 2")
    assert any("a run that stops before that step has no value there" in one for one in told(tmp_path, text, "warning"))


def test_values_of_gates_are_looked_at_too(tmp_path: Path) -> None:
    phases = """\
phases:
  - {name: first, arms: [plain], gate: {healthy: "gap(plain) < 0.15"}}
  - {name: second, arms: [smooth, harsh]}
"""
    errors = told(tmp_path, PLAN + phases, "error")
    assert errors == [
        "gate of first: healthy: gap(plain) is not measured: set train_eval_limit for plain, the training rows it takes"
    ]


def test_a_gate_that_asks_about_a_later_arm_is_told_so(tmp_path: Path) -> None:
    phases = """\
phases:
  - {name: first, arms: [plain], gate: {early: "accuracy(smooth) > 0.5"}}
  - {name: second, arms: [smooth, harsh]}
"""
    (error,) = told(tmp_path, PLAN + phases, "error")
    assert "smooth is run only behind this gate, in second" in error


@pytest.mark.parametrize(
    ("added", "why"),
    [
        ("primary: nonsense", "primary: 'nonsense' is not a quantity of an arm"),
        ("bands: {accuracy(plain): {failure: 0.6, success: 0.6}}", "two different numbers"),
    ],
)
def test_what_only_the_report_would_refuse_is_refused_before(tmp_path: Path, added: str, why: str) -> None:
    text = PLAN.replace("bands:\n  accuracy(smooth): {failure: 0.58, success: 0.63}\n", "") + added + "\n"
    errors = told(tmp_path, text, "error")
    assert [why in one for one in errors] == [True], errors


def test_a_metric_that_nothing_measures_is_refused_before_the_search(tmp_path: Path) -> None:
    search = (
        "phases:\n- {name: s, arms: [plain, smooth, harsh], search: {metric: acuracy, grid: {lr: [1.0e-6, 1.0e-5]}}}\n"
    )
    assert any("phase s: search: 'acuracy'" in one for one in told(tmp_path, PLAN + search, "error"))


def test_test_data_with_too_few_prompts_for_a_verdict_are_told_before_the_runs(tmp_path: Path) -> None:
    few = "the test data have 9 prompts, and a verdict needs at least 10: it will stay undecided"
    claims = (
        '  costs: "peak_memory(smooth) < 2 * peak_memory(plain)"\n'
        '  chosen: "accuracy(smooth, on=\\"validation\\") > 0.5"\n'
    )
    text = PLAN + claims + "assume: {test_comparisons: 900, test_prompts: %d}\n"
    warned = [one for one in told(tmp_path, text % 9, "warning") if few in one]
    assert {one.partition(":")[0] for one in warned} == {*read_plan(tmp_path / "plan.yaml").hypotheses} - {
        "costs",
        "chosen",
    }
    assert not [one for one in told(tmp_path, text % 10, "warning") if "a verdict needs" in one]


def test_hours_that_cannot_be_estimated_are_told(tmp_path: Path) -> None:
    (warning,) = told(tmp_path, PLAN + "budget: {hours: 1.0e-10}\n", "warning")
    assert "cannot be estimated (state assume.tflops)" in warning
    assert any(
        "about" in one for one in told(tmp_path, PLAN + "budget: {hours: 1.0e-10}\nassume: {tflops: 1}\n", "error")
    )


@pytest.mark.parametrize(
    "said", ["accuracy: 1.0", "accuracy: 1.5", "seed_sd: -1", "test_comparisons: -5", "disagreeing: 1.9", "tflops: 0"]
)
def test_assumptions_beyond_what_is_possible_are_refused(tmp_path: Path, said: str) -> None:
    with pytest.raises(ConfigError, match=f"assume.{said.split(':')[0]}: wanted at least"):
        read_plan(write_plan(tmp_path, PLAN + f"assume: {{{said}}}\n"))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("accuracy: 0.97, disagreeing: 0.17", "accuracy 0.97 disagree on at most 0.06 of"),
        ("disagreeing_seeds: 0.7", "accuracy 0.7 disagree on at most 0.6 of"),
        ("disagreeing: 0.1, disagreeing_seeds: 0.2", "0.2 is more than disagreeing, 0.1"),
    ],
)
def test_arms_that_cannot_disagree_so_are_refused(tmp_path: Path, said: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(read_plan(write_plan(tmp_path, PLAN + f"assume: {{{said}}}\n")))


def test_seeds_that_disagree_more_than_arms_by_default_make_arms_disagree_as_much(tmp_path: Path) -> None:
    assumed, _ = assumed_of(read_plan(write_plan(tmp_path, PLAN + "assume: {disagreeing_seeds: 0.3}\n")))
    assert assumed.disagreeing == assumed.disagreeing_seeds == 0.3


@pytest.mark.parametrize(("accuracy", "is_told"), [(0.9, False), (0.99, True)])
def test_forecasts_from_single_lost_comparisons_are_called_rough(
    tmp_path: Path, accuracy: float, is_told: bool
) -> None:
    text = PLAN + f"assume: {{accuracy: {accuracy}, test_comparisons: 60, test_prompts: 60}}\n"
    found = [one for one in told(tmp_path, text, "warning") if "is rough" in one]
    assert bool(found) is is_told


@pytest.mark.slow
def test_noise_that_is_pooled_makes_power_and_verdicts_alike(tmp_path: Path) -> None:
    alone, pooled = (check(read_plan(write_plan(tmp_path, PLAN + more))) for more in ("", "pooled: true\n"))
    powers = [one.tested["harms"].power for one in (alone, pooled)]
    assert powers[0] is not None
    assert powers[1] is not None
    assert powers[1].parts[0].visible < 0.8 * powers[0].parts[0].visible
    study = finished_study(tmp_path / "done", PLAN + "pooled: true\n")
    assert "noise of all arms" in summarise(study).hypotheses[0].verdict.parts[0].estimate.method
    with pytest.raises(ConfigError, match="pooled: wanted true or false"):
        read_plan(write_plan(tmp_path, PLAN + "pooled: 3\n"))


# --- data that are read twice, or not there ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test.jsonl": "train.jsonl"}, "train.jsonl: is read as dataset too"),
        ({"eval_fraction: 0.1": "eval_dataset: [test.jsonl]"}, "test.jsonl: is read as eval_dataset too"),
        ({"test.jsonl": "./missing.jsonl"}, "arm plain: dataset './missing.jsonl', split 'test': no such file"),
        ({"train.jsonl": "not_there.jsonl"}, "arm plain: dataset 'not_there.jsonl', split 'train': no such file"),
    ],
)
def test_data_that_freezing_or_training_would_refuse_are_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PLAN
    for before, after in change.items():
        text = text.replace(before, after)
    path = write_plan(tmp_path)
    path.write_text(text, encoding="utf-8")
    (error,) = check_only(path)
    assert said in error


def test_data_that_several_arms_miss_are_told_once(tmp_path: Path) -> None:
    path = write_plan(tmp_path, with_arm("diagnostic_mode: label_shuffle, diagnostic_shuffle_rate: 0.5"))
    (tmp_path / "train.jsonl").unlink()
    (error,) = check_only(path)
    assert error.startswith("arm plain: dataset ")


def test_what_the_hub_may_change_is_named(tmp_path: Path) -> None:
    local = write_plan(tmp_path)
    plan = read_plan(local)
    assert check(plan).unpinned == ["a-model-3b"]
    assert "not here, so sought on the hub, and without a revision: a-model-3b." in " ".join(
        check_report(check(plan)).split()
    )
    text = local.read_text(encoding="utf-8").replace("a-model-3b", "their/model@v1")
    for name, unpinned in (("their/pairs", ["their/pairs"]), ("their/pairs@v1", [])):
        local.write_text(text.replace(str(tmp_path / "train.jsonl"), name), encoding="utf-8")
        assert check(read_plan(local)).unpinned == unpinned


def check_only(path: Path) -> list[str]:
    """Errors of a plan as it is in its file."""
    return check(read_plan(path)).errors


def test_copies_of_a_test_file_are_found_by_their_content(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    (tmp_path / "test.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    (error,) = check_only(path)
    assert "test.jsonl: is read as dataset too" in error


ON_HUB = PLAN.replace("dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1", "dataset: [some/pairs]")


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ("eval_split: test, test_split: test", "some/pairs[test]: judges the arms, and is read as validation data"),
        (
            "eval_split: validation, hf_split: test, test_split: test",
            "some/pairs[test]: judges the arms, and is read as t",
        ),
        ("eval_split: 'test[:50%]', test_split: test", "some/pairs[test] and some/pairs[test[:50%]]: judges"),
        ("eval_fraction: 0.1, hf_split: train+test, test_split: test", "some/pairs[test]: judges the arms"),
        (
            "eval_fraction: 0.1, test_dataset: [some/pairs@main], test_split: train",
            "some/pairs[train]: judges the arms",
        ),
        ("eval_split: validation, test_split: test", ""),
        ("eval_split: 'test[:50%]', test_split: 'test[50%:]'", ""),
        ("eval_fraction: 0.1, test_dataset: ['some/pairs:hard'], test_split: train", ""),
    ],
)
def test_a_split_that_judges_trains_nothing_and_chooses_nothing(tmp_path: Path, splits: str, said: str) -> None:
    errors = told(tmp_path, ON_HUB.replace("dataset: [some/pairs]", f"dataset: [some/pairs], {splits}"), "error")
    assert [said in one for one in errors] == ([True] if said else []), errors


# --- what can never be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "base", "why"),
    [
        (
            "stopped_at(smooth) < 400",
            "",
            "no possible values support it (stopped_at(smooth) is 400 in every run without",
        ),
        ("stopped_at(smooth) <= 400", "", "no possible values refute it (stopped_at(smooth) is 400"),
        ("stopped_at(smooth) < 300", ", early_stopping_patience: 2", ""),
        ("best_step(smooth) < 300", "", ""),
    ],
)
def test_a_run_without_early_stopping_stops_at_its_last_step(tmp_path: Path, claim: str, base: str, why: str) -> None:
    errors = told(tmp_path, with_claim(claim, base), "error")
    assert [why in one for one in errors] == ([True] if why else []), errors
    gate = f'phases:\n- {{name: first, arms: [plain, smooth, harsh], gate: {{soon: "{claim}"}}}}\n'
    errors = told(tmp_path, PLAN.replace("steps: 400}", f"steps: 400{base}}}") + gate, "error")
    assert [f"gate of first: soon: {why}" in one for one in errors] == ([True] if why else []), errors


def test_a_run_of_unknown_steps_may_stop_anywhere(tmp_path: Path) -> None:
    text = with_claim("stopped_at(smooth) < 100").replace("steps: 400", "epochs: 2")
    assert not told(tmp_path, text, "error")


def test_a_plan_that_tests_nothing_any_more_is_told(tmp_path: Path) -> None:
    text = PLAN + "scales: {small: {leave_out: [smooth, harsh], arms: {plain: {lr: 0.01}}}}\n"
    text = text.replace("bands:\n  accuracy(smooth): {failure: 0.58, success: 0.63}\n", "")
    warnings = [one.text for one in check(read_plan(write_plan(tmp_path, text), scale="small")).problems]
    assert "no hypothesis is left to be tested: nothing can turn out to be wrong" in warnings
    assert not any("no hypothesis is left" in one for one in told(tmp_path, text, "warning"))


def test_parts_of_a_claim_that_are_seen_as_badly_share_a_warning(tmp_path: Path) -> None:
    claim = "accuracy(smooth) >= accuracy(plain) - 0.05 and accuracy(harsh) >= accuracy(plain) - 0.05"
    problems = check(read_plan(write_plan(tmp_path, with_claim(claim)))).problems
    (warning,) = [one.text for one in problems if one.text.startswith("more: ")]
    assert warning.startswith("more: accuracy(smooth) >= accuracy(plain) - 0.05, accuracy(harsh) >= accuracy(plain) - ")


# --- jobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slurm", "level", "said"),
    [
        ("{gpus: 1}", "error", "slurm: unknown key 'gpus'"),
        ("{time: 12:00:00}", "error", ""),
        ("{mem: 8}", "error", "slurm: mem: 8 was read as a number"),
        ("{venv: a, container: b}", "error", "slurm: venv: is not seen inside the container"),
        ("{venv: ~/venv}", "error", "slurm: venv: '~/venv': jobs do not replace ~"),
        ("{venv: $HOME/venv}", "warning", "slurm: venv: '$HOME/venv': jobs take it as it is"),
        ("{environment: {HF_HOME: ~/hf}}", "warning", "slurm: environment: HF_HOME: '~/hf': jobs take it"),
        ("{environment: {A: 'a~b $5'}}", "warning", ""),
        ("{environment: {WANDB_API_KEY: 0123456789abcdef}}", "warning", "slurm: environment: WANDB_API_KEY: its value"),
        ("{setup: ['a=1; export HF_TOKEN=\"hf_abcdefgh\"']}", "warning", "slurm: setup: HF_TOKEN: its value seems to"),
        ("{setup: ['export HF_TOKEN=$(cat ~/t) B_TOKEN=$T_0123456789 C_TOKEN=~/abcdefgh']}", "warning", ""),
        ("{environment: {TOKENIZERS_PARALLELISM: 'false', HF_TOKEN_PATH: /my/own/place}}", "warning", ""),
        ("{nodes: 2, time: '12:00:00'}", "error", ""),
    ],
)
def test_the_section_of_jobs_is_read_before_anything_is_frozen(
    tmp_path: Path, slurm: str, level: str, said: str
) -> None:
    found = told(tmp_path, f"{PLAN}slurm: {slurm}\n", level)
    assert [said in one for one in found] == ([True] if said else []), found


@pytest.mark.parametrize(
    ("settings", "slurm", "said"),
    [
        (
            "cache_states: true, train_head_only: true",
            "{gpus_per_node: 2}",
            "arm smooth: cache_states is for one process",
        ),
        ("micro_token_budget: auto", "{nodes: 2}", "arm smooth: micro_token_budget: auto needs a whole model on each"),
        ("micro_token_budget: auto, sharding: none", "{nodes: 2}", ""),
        (
            "lr: 0.001, optimizer: adafactor",
            "{nodes: 2, gpus_per_node: 4}",
            "slurm: 8 processes a run",
        ),
        ("lr: 0.01, optimizer: adafactor, sharding: none", "{nodes: 2}", ""),
        ("cache_states: true, train_head_only: true", "{gpus_per_node: 1}", ""),
    ],
)
def test_runs_that_cannot_be_divided_are_not_given_several_processes(
    tmp_path: Path, settings: str, slurm: str, said: str
) -> None:
    errors = told(tmp_path, with_arm(settings) + f"slurm: {slurm}\n", "error")
    assert [said in one for one in errors] == ([True] if said else []), errors
