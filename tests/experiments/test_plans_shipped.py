"""The plans of examples/plans: each can be frozen at every scale, and the comparator breaks the pairs that it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pages import module_at
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Comparison, TokenGroup
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats import read_rows
from rewardlab.data.formats.known import recognise
from rewardlab.data.judgements import Rules
from rewardlab.experiments.checking import check
from rewardlab.experiments.claims import parse
from rewardlab.experiments.gates import gate_claim
from rewardlab.experiments.one_run import do, program_words
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.records import record_of
from rewardlab.experiments.resolving import runs_of
from study_folders import PLAN, frozen_study

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"
NAMES = sorted(path.name for path in PLANS.glob("*.yaml"))
WANTED = {
    *("baselines", "ablation", "diagnostics", "lora", "sensitivity", "v4", "v5", "scale", "data_size", "kwise"),
    *("against_trl", "sensitivity_quick"),
}


def test_all_are_there() -> None:
    assert {name.removesuffix(".yaml") for name in NAMES} == WANTED


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `python examples/plans/tiny_data.py FOLDER` writes, and nothing else."""
    folder = tmp_path_factory.mktemp("tiny")
    module_at(PLANS / "tiny_data.py").main(folder)
    return folder


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("scale", [None, "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_frozen_and_each_hypothesis_decided_either_way(
    tiny_data: Path, monkeypatch: pytest.MonkeyPatch, name: str, scale: str | None
) -> None:
    monkeypatch.chdir(tiny_data)
    checked = check(read_plan(PLANS / name, scale=scale))
    assert checked.errors == []
    assert all(one.reach.holds_at is not None and one.reach.fails_at is not None for one in checked.tested.values())
    assert all(len({run.seed for run in checked.runs if run.arm == arm}) >= 3 for arm in checked.costs)
    if scale is None:
        programs = {run.arm for run in checked.runs if run.program}
        assert [arm for arm, cost in checked.costs.items() if cost.hours is None and arm not in programs] == []
    else:
        assert checked.num_comparisons in (100, 400), "counted in the data of this scale"
        for run in checked.runs:
            told = json.dumps(dict(run.settings))
            assert "Qwen" not in told, f"{run.name} would load a model of the hub"
            assert "stanfordnlp" not in told


def test_the_ranked_rows_of_tiny_data_are_four_rated_replies_to_a_prompt(tiny_data: Path) -> None:
    prompts = {}
    for part, count in (("train", 200), ("test", 100)):
        lines = (tiny_data / f"kwise.{part}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        for number, row in enumerate(rows):
            rules = Rules(source=part, reading=ReadingConfig(), seed=0)
            preference = read_rows([row], schema=recognise(row, part), place=f"row {number}", rules=rules).preference
            assert len(preference.replies) == len(set(row["scores"])) == 4
            assert len(preference.comparisons) == 6
        prompts[part] = {row["prompt"] for row in rows}
        assert len(prompts[part]) == count
    assert prompts["train"].isdisjoint(prompts["test"])


def test_heads_on_a_frozen_backbone_answer_what_they_can(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_data)
    plan = read_plan(PLANS / "lora.yaml", scale="tiny", probes=True)
    assert list(plan.arms) == ["full"]
    assert set(plan.left_out) == {"lora_r8", "lora_r16"}


def test_a_claim_that_cannot_fail_keeps_a_plan_from_being_frozen(tmp_path: Path) -> None:
    base = "question: q\nbase: {model: m, dataset: [o/a], test_dataset: [o/b], steps: 500, eval_fraction: 0.1}\n"
    base += "arms: {a: {}}\n"
    for claim, told in (
        ("stopped_at(a) < 900", "H: no possible values refute it"),
        ("accuracy(a) > 1.2", "H: no possible values support it"),
        ("accuracy(b) > 0.5", "H: .*asks the arm 'b'"),
        ("acuracy(a) > 0.5", "Did you mean accuracy"),
    ):
        (tmp_path / "plan.yaml").write_text(f"{base}hypotheses: {{H: {claim}}}\n", encoding="utf-8")
        (error, *_) = check(read_plan(tmp_path / "plan.yaml")).errors
        with pytest.raises(ConfigError, match=told):
            raise ConfigError(error)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("arms: {a: {}, b: {label_smoothing: 0.05}}", "the arms a and b are the same runs"),
        ("arms: {a: {}}\nbudget: {runs: 2}", "budget: 3 runs, and 2 are allowed"),
        ("arms: {a: {}}\nbands: {accuracy(c): {failure: 0.5, success: 0.6}}", "bands: .*asks the arm 'c'"),
        ("arms: {a: {test_dataset: []}}", "a/seed_0: names no test data"),
        (
            "arms: {a: {model: m-3b, dataset: [pairs.jsonl], steps: 1000}}\n"
            "assume: {tflops: 0.001}\nbudget: {hours: 1}",
            "budget: about [1-9].* hours, and 1 are allowed",
        ),
    ],
)
def test_what_else_keeps_a_plan_from_being_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', encoding="utf-8")
    base = "question: q\nbase: {model: m, dataset: [o/a], test_dataset: [o/b], eval_fraction: 0.1}\n"
    (tmp_path / "plan.yaml").write_text(f"{base}{more}\n", encoding="utf-8")
    (error, *_) = check(read_plan(tmp_path / "plan.yaml")).errors
    with pytest.raises(ConfigError, match=told):
        raise ConfigError(error)


@pytest.mark.parametrize(
    ("name", "phase", "judged", "all_weights"),
    [("diagnostics", 0, "full", "all_weights"), ("v5", 0, "C1", "all_weights"), ("scale", 1, "3b", "3b_all_weights")],
)
def test_a_gate_before_what_is_larger_asks_for_all_criteria_of_readiness(
    name: str, phase: int, judged: str, all_weights: str
) -> None:
    plan = read_plan(PLANS / f"{name}.yaml")
    claims = [gate_claim(text) for text in plan.phases[phase].gate.values()]
    asked = {term.quantity for claim in claims for term in claim.terms if term.arm == judged}
    assert asked == {"accuracy", "margin_p50", "negative_margin_rate", "ece", "gap", "speed_spread"}
    scored = [term for claim in claims for term in claim.terms if quantity_named(term.quantity).source == "scores"]
    assert all(term.on == "validation" for term in scored)
    assert any({term.arm for term in claim.terms} == {judged, all_weights} for claim in claims)
    settings = {run.arm: run.settings for run in runs_of(plan)}
    assert settings[judged]["lora"]
    assert not settings[all_weights]["lora"]


def test_the_arms_beside_a_loop_that_breaks_pairs_all_train_all_weights_for_as_long() -> None:
    arms = {run.arm: run.settings for run in runs_of(read_plan(PLANS / "baselines.yaml"))}
    assert set(arms) == {"together", "split_pairs", "plain"}
    same = ("lora", "lr", "steps", "batch_size", "max_seq_len", "micro_token_budget", "weight_decay")
    assert {tuple(settings[name] for name in same) for settings in arms.values()} == {
        (False, 5e-6, 1000, 16, 1024, 8192, 0.01)
    }
    off = ("label_smoothing", "lr_scheduler", "early_stopping_patience")
    assert [arms["plain"][name] for name in off] == [0.0, "constant", None]


@pytest.mark.parametrize(
    ("name", "hypothesis", "quantity", "arms"),
    [
        ("ablation", "H2_gap", "gap", {"A1", "A2"}),
        ("ablation", "H3", "ece", {"A2", "A3"}),
        ("baselines", "H2", "gap", {"together", "plain"}),
    ],
)
def test_a_technique_is_held_against_the_arm_without_it(
    name: str, hypothesis: str, quantity: str, arms: set[str]
) -> None:
    claim = parse(read_plan(PLANS / f"{name}.yaml").hypotheses[hypothesis].claim)
    quantities = [[term.quantity for term in part.terms] for part in claim.parts if {t.arm for t in part.terms} == arms]
    assert quantity in {each[0] for each in quantities if len(set(each)) == 1}


@pytest.mark.parametrize("name", ["sensitivity", "sensitivity_quick"])
def test_the_rates_of_all_weights_are_tried_on_all_weights(name: str) -> None:
    runs = runs_of(read_plan(PLANS / f"{name}.yaml"))
    assert {run.settings["lr"] for run in runs} == {1e-6, 5e-6, 1e-5}
    assert not any(run.settings["lora"] for run in runs)


def test_the_arms_of_the_study_before_are_there_with_their_settings() -> None:
    arms = {run.arm: run.settings for run in runs_of(read_plan(PLANS / "v4.yaml"))}
    told = {name: (arms[name]["lora"], arms[name]["lora_rank"], arms[name]["lr"]) for name in ("B2", "C0", "C1")}
    assert told == {"B2": (True, 4, 5e-5), "C0": (True, 8, 1e-4), "C1": (True, 8, 2e-5)}
    assert not arms["A0"]["lora"]
    assert arms["V4-8"]["lora_rank"] == 8
    assert arms["V4-8"]["early_stopping_patience"] == 5
    assert arms["V4-8"]["lora_modules_to_save"]
    controls = {run.settings["diagnostic_mode"] for run in runs_of(read_plan(PLANS / "v5.yaml"))}
    assert controls == {"none", "label_shuffle", "prompt_only", "random_negatives", "length_matched"}


# --- programs ----------------------------------------------------------------------------------------------------


def test_a_program_is_run_in_place_of_training_and_its_failure_is_the_runs(tmp_path: Path) -> None:
    text = PLAN.replace("plain: {says: nothing added", 'plain: {program: ["{python}", "-c", CODE], says: nothing added')
    code = (
        "import json, pathlib, sys; p = pathlib.Path(r'''{output_dir}'''); (p / 'evals').mkdir(parents=True); "
        "row = dict(preference_id='{seed}', source='', prompt_key='', score=1.0); "
        "row |= dict(num_tokens=2, prompt_tokens=1, truncated_tokens=0); "
        "rows = [row | dict(reply=n, comparisons=[dict(first=0, second=1)][n:]) for n in (0, 1)]; "
        "(p / 'evals/test.scores.jsonl').write_text('\\n'.join(map(json.dumps, rows)))"
    )
    study = frozen_study(tmp_path, text.replace("CODE", json.dumps(code)))
    run = study.runs[0]
    assert program_words(study, run)[0] == sys.executable
    do(study, run, lambda arguments: pytest.fail("nothing is trained"))
    assert record_of(study, run).is_over
    with pytest.raises(SystemExit):
        do(study, run, lambda arguments: None, again=True)
    assert record_of(study, run).state == "failed", "the folder was there already"


def group(prompt: int, *replies: int) -> TokenGroup:
    """A pair with so many tokens."""
    return TokenGroup(
        preference_id="p",
        source="s",
        prompt_key="k",
        shared=np.zeros(prompt, np.int32),
        suffixes=tuple(np.zeros(length, np.int32) for length in replies),
        prompt_tokens=(prompt,) * len(replies),
        truncated_tokens=(0,) * len(replies),
        comparisons=(Comparison(first=0, second=1),),
    )


def test_the_comparator_loses_the_pairs_that_a_budget_breaks() -> None:
    split = module_at(PLANS / "split_pairs.py")
    groups = [group(2, 3, 3), group(2, 3, 3), group(2, 3, 3)]  # replies of 5 tokens
    assert split.whole_pairs(groups, 100) == [[0, 1, 2]]
    assert split.whole_pairs(groups, 15) == [[0], [2]], "three replies fit: the second pair is broken"
    assert split.whole_pairs(groups, 10) == [[0], [1], [2]]
    assert split.whole_pairs(groups, 5) == []


def test_its_micro_batches_count_the_same_however_many_pairs_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    split = module_at(PLANS / "split_pairs.py")
    packed: list[Any] = []
    monkeypatch.setattr(split, "batch_of_step", lambda step, **how: [0, 1, 2])
    monkeypatch.setattr(split, "pack", lambda groups, **how: packed.append((groups, how["indices"])) or len(packed))
    steps = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(batch_size=3, seed=0)),
        model=SimpleNamespace(layout="shared"),
        train=[group(2, 3, 3), group(2, 3, 3), group(20, 3, 3)],
    )
    split.broken_plan(steps, 0, 50)
    weights = [[one.weight for made in groups for one in made.comparisons] for groups, _ in packed]
    assert [indices for _, indices in packed] == [[0, 1]]
    assert weights == [[0.5, 0.5]], "the third pair is broken, and lost"
    assert sum(map(sum, weights)) == pytest.approx(1.0)
