"""Plans as they are read: arms, grids, scales, heads on a frozen backbone, and errors that say where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.resolving import in_keys, runs_of

PLAN: dict[str, Any] = {
    "question": "Does it help?",
    "base": {"model": "m-3b", "dataset": ["a.jsonl"], "test_dataset": ["b.jsonl"], "eval_fraction": 0.1, "lr": 1e-5},
    "arms": {"plain": {"preset": "plain"}, "lora": {"says": "adapters", "lora": True, "lora_rank": 8}},
    "hypotheses": {"H1": "accuracy(lora) > accuracy(plain)"},
}


def read(folder: Path, changes: dict[str, Any] | None = None, **how: Any):
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({**PLAN, **(changes or {})}, sort_keys=False), encoding="utf-8")
    return read_plan(path, **how)


def test_every_arm_is_run_with_three_seeds_and_all_settings(tmp_path: Path) -> None:
    runs = runs_of(read(tmp_path))
    assert [run.name for run in runs] == [f"{arm}/seed_{seed}" for arm in ("plain", "lora") for seed in range(3)]
    assert runs[0].settings["label_smoothing"] == 0.0, "from the preset"
    assert (runs[3].settings["lora_rank"], runs[3].settings["seed"]) == (8, 0)
    assert runs[3].settings["lr"] == 1e-5
    assert "output_dir" not in runs[0].settings


def test_an_arm_wins_over_what_the_base_says_in_other_units(tmp_path: Path) -> None:
    arms = {"plain": {"says": "as it is"}, "longer": {"says": "by epochs", "epochs": 3, "warmup_ratio": 0.1}}
    base = {**PLAN["base"], "steps": 400, "warmup_steps": 10}
    found = {run.arm: run.settings for run in runs_of(read(tmp_path, {"base": base, "arms": arms, "hypotheses": {}}))}
    names = ("steps", "epochs", "warmup_steps", "warmup_ratio")
    assert [found["plain"][name] for name in names] == [400, 1.0, 10, None]
    assert [found["longer"][name] for name in names] == [None, 3.0, None, 0.1]


def test_a_grid_makes_an_arm_of_every_combination(tmp_path: Path) -> None:
    plan = read(tmp_path, {"arms": {}, "grid": {"lr": [1e-6, 5e-6], "warmup_steps": [0, 50]}, "hypotheses": {}})
    assert list(plan.arms) == [f"lr={lr},warmup_steps={steps}" for lr in ("1e-06", "5e-06") for steps in (0, 50)]
    assert runs_of(plan)[-1].settings["warmup_steps"] == 50


def test_draws_are_the_same_each_time_and_lie_within_their_limits(tmp_path: Path) -> None:
    random = {"draws": 20, "seed": 3, "settings": {"lr": {"log": [1e-6, 1e-4]}, "lora_rank": {"choice": [2, 4]}}}
    phases = [{"name": "search", "seeds": [7], "search": {"random": random}}, {"name": "main", "arms": ["winner"]}]
    changes = {"phases": phases, "arms": {}, "hypotheses": {}}
    first, again = (read(tmp_path, changes).phases[0].search for _ in range(2))
    assert first == again
    rates = [arm.settings["lr"] for arm in first.arms]
    assert all(1e-6 <= rate <= 1e-4 for rate in rates)
    assert len(set(rates)) == 20
    assert {arm.settings["lora_rank"] for arm in first.arms} == {2, 4}


def test_a_scale_replaces_what_it_names_and_leaves_arms_out(tmp_path: Path) -> None:
    tiny = {
        "base": {"model": "tiny"},
        "arms": {"plain": {"steps": 5}},
        "seeds": 2,
        "hypotheses": {"H1": "accuracy(plain) > 0.5"},
        "leave_out": {"lora": "too large"},
    }
    plan = read(tmp_path, {"scales": {"tiny": tiny}}, scale="tiny")
    assert [run.name for run in runs_of(plan)] == ["plain/seed_0", "plain/seed_1"]
    assert (runs_of(plan)[0].settings["model"], runs_of(plan)[0].settings["steps"]) == ("tiny", 5)
    assert plan.left_out == {"lora": "too large"}
    assert plan.hypotheses["H1"].claim == "accuracy(plain) > 0.5"


def test_probes_train_heads_and_leave_out_what_needs_the_backbone(tmp_path: Path) -> None:
    plan = read(tmp_path, probes=True)
    (name,) = plan.arms
    settings = runs_of(plan)[0].settings
    assert (name, settings["train_head_only"], settings["cache_states"]) == ("plain", True, True)
    assert settings["lr"] is None, "the rate of a plan is one for weights"
    assert plan.left_out == {"lora": "lora, lora_rank: the backbone would have to train"}


def test_settings_given_with_set_win_over_the_base(tmp_path: Path) -> None:
    plan = read(tmp_path, sets={"model": "mine", "dataset": ["c.jsonl"]})
    assert (plan.base["model"], plan.base["dataset"]) == ("mine", ["c.jsonl"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"question": ""}, "`question` is missing"),
        ({"arms": {"a": {"lora_rnk": 3}}}, "arms.a: 'lora_rnk' is not a setting of rewardlab train.*lora_rank"),
        (
            {"arms": {"a": {"zebra": 3}}},
            "'zebra' is not a setting of rewardlab train. Correct it or take it out. docs/",
        ),
        ({"arms": {"a": {"seed": 3}}}, "seed is decided by the plan for every run"),
        ({"arms": {"a b": {}}}, "is not a name"),
        ({"arms": {}}, "it has no arm"),
        ({"seeds": [1, 1]}, "names one twice"),
        ({"seeds": "three"}, "wanted a number of seeds"),
        ({"phases": [{"name": "one", "arms": ["plain"]}]}, "the arm 'lora' is in no phase"),
        ({"phases": [{"name": "one", "arms": ["plane", "lora"]}]}, "no arm 'plane'.*plain"),
        (
            {"phases": [{"name": "one", "arms": ["plain", "lora"], "gate": ["accuracy(plain) > 0.6"]}]},
            r"one.gate: wanted `name: claim` lines \(`learns: accuracy\(full\) > 0.6`\), got",
        ),
        ({"grid": {"lr": 3}}, "lr: wanted a list of values"),
        ({"bands": {"accuracy(plain)": {"failure": 0.5}}}, "wanted `failure` and `success`"),
        (
            {"bands": {"accuracy(plain)": {"expects": [0.5, 0.6]}}},
            "accuracy.plain.: unknown 'expects'. Did you mean 'expected'",
        ),
        ({"baseline": "plan"}, "baseline: there is no arm 'plan'"),
        ({"hypothesis": {}}, "unknown 'hypothesis'.*hypotheses"),
        ({"waterfall": ["plain", "nothing"]}, "waterfall: there is no arm 'nothing'"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, changes)


def test_a_scale_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--scale small: .* has no such scale. It has: tiny"):
        read(tmp_path, {"scales": {"tiny": {}}}, scale="small")


def test_settings_that_training_refuses_are_refused_by_arm(tmp_path: Path) -> None:
    plan = read(tmp_path, {"arms": {"plain": {"label_smoothing": 0.7}}})
    with pytest.raises(ConfigError, match="label_smoothing 0.7"):
        runs_of(plan)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e12}, "arm lora: lr 1000000000000.0: must be at most"),
        ({"lora": True, "train_head_only": True}, "arm lora: train_head_only: with lora"),
        ({"lr": "fast"}, "arm lora: lr: expected float"),
    ],
)
def test_settings_that_training_would_refuse_are_told_with_their_arm(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        runs_of(read(tmp_path, {"arms": {"plain": {}, "lora": settings}}))
    assert str(refused.value).startswith(said)


def test_names_of_other_libraries_bring_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base: 'learning_rate' is not a setting .* Did you mean 'lr'"):
        read(tmp_path, {"base": {**PLAN["base"], "learning_rate": 1e-5}})


def test_a_plan_that_is_not_there_is_asked_for_as_a_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PLAN .*none.yaml: no such file. Give a plan"):
        read_plan(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"phases": [{"search": {"random": {"draws": 2, "settings": {"lr": {"log": ["1e-5", "1e-3"]}}}}}]}, "1.0e-5"),
        ({"assume": {"seed_sd": "15e-3"}}, "15e-3 as a text: write 15.0e-3"),
        ({"bands": {"accuracy(lora)": {"failure": 0.5, "success": "1e0"}}}, r"1e0 as a text: write 1.0e\+0"),
    ],
)
def test_numbers_that_yaml_reads_as_texts_are_told_as_such(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"YAML reads .*{said}"):
        read(tmp_path, change)


@pytest.mark.parametrize("search_at", [0, 1])
def test_a_winner_needs_a_search_in_a_phase_before(tmp_path: Path, search_at: int) -> None:
    phases: list[dict[str, Any]] = [{"name": "early", "seeds": [5], "arms": ["plain", "lora", "winner"]}, {"name": "s"}]
    phases[search_at] |= {"seeds": [7], "search": {"grid": {"lr": [1e-5, 1e-4]}}}
    plan = read(tmp_path, {"phases": phases[: search_at + 1]})
    with pytest.raises(ConfigError, match="phase early: the arm winner needs an earlier phase with a search"):
        runs_of(plan)


def test_a_winner_is_judged_on_fresh_seeds_only(tmp_path: Path) -> None:
    phases = [
        {"name": "search", "seeds": [0, 1], "search": {"grid": {"lr": [1e-6, 1e-5]}}},
        {"name": "confirm", "seeds": [1, 2], "arms": ["winner"]},
    ]
    plan = read(tmp_path, {"phases": phases, "arms": {}, "hypotheses": {}})
    with pytest.raises(ConfigError, match=r"the seeds \[1\] chose the winner in search"):
        runs_of(plan)


def test_runs_of_a_search_name_no_test_data(tmp_path: Path) -> None:
    phases = [
        {"name": "search", "seeds": [10], "search": {"grid": {"lr": [1e-6, 1e-5]}}},
        {"name": "confirm", "arms": ["winner"]},
    ]
    plan = read(tmp_path, {"phases": phases, "arms": {}, "hypotheses": {}})
    assert all(not run.settings["test_dataset"] and not run.reads_test for run in runs_of(plan))
    chosen = runs_of(plan, winner={"arm": "lr=1e-05", "settings": {"lr": 1e-5}})
    assert [run.name for run in chosen if run.reads_test] == ["winner/seed_0", "winner/seed_1", "winner/seed_2"]
    assert chosen[-1].settings["test_dataset"] == ["b.jsonl"]


def test_a_message_about_settings_names_the_keys_of_the_plan() -> None:
    said = "--max-seq-len 9: lower it, with --no-checkpoints; `rewardlab data inspect --max-seq-len 9` and --jobs stay"
    assert in_keys(said) == (
        "max_seq_len 9: lower it, with checkpoints: false; `rewardlab data inspect --max-seq-len 9` and --jobs stay"
    )


@pytest.mark.parametrize(
    ("said", "in_a_plan"),
    [
        ("give --no-lora or --map-label FIRST=1 SECOND=0.", "give lora: false or map_label: [FIRST=1, SECOND=0]."),
        (
            "give --attributes 'rank=-1' --response-column completion.",
            "give attributes: [rank=-1], response_column: completion.",
        ),
        ("--map-label 'A is better'=1 B=0, or", "map_label: ['A is better=1', B=0], or"),
        ("--attributes rank=1: the smallest", "attributes [rank=1]: the smallest"),
        ('give --map-label "it\'s"=1', 'give --map-label "it\'s"=1'),
        ("--chosen-column and --rejected-column", "chosen_column and rejected_column"),
        ("--margin-column margin takes", "margin_column margin takes"),
        ("a`b/--lr.jsonl: --lr, `rewardlab train --lr 1`", "a`b/--lr.jsonl: lr, `rewardlab train --lr 1`"),
    ],
)
def test_values_in_a_message_stand_as_a_plan_writes_them(said: str, in_a_plan: str) -> None:
    assert in_keys(said) == in_a_plan
