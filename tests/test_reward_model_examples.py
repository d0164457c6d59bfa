"""Scripts for those who come from the seeds: the same flags train, and the same table is made of the runs."""

from __future__ import annotations

import csv
import math
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from pages import module_at
from rewardlab.commands.training import parse_train
from rewardlab.experiments.study import amend
from study_folders import finished_study, frozen_study

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "reward_model"
SEEDS = ROOT.parent / "shared" / "seeds"
SCRIPT = "train_rm_bradley_terry.py"
SHP = "--hf-dataset stanfordnlp/SHP --limit 5000 --steps 1000 --batch-size 16 --weight-decay 0.01 --output-dir o"
JUDGED = "--eval-split test --eval-limit 1000 --eval-every 100"
SCHEDULED = "--lr 5e-6 --lr-scheduler cosine --warmup-steps 50"
MODULES = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
COMMANDS = (
    f"--model Qwen/Qwen2.5-7B {SHP} {JUDGED} --lr 5e-6",
    f"--model Qwen/Qwen2.5-7B {SHP} {JUDGED} {SCHEDULED} --label-smoothing 0.05 --early-stopping-patience 5",
    f"--model Qwen/Qwen2.5-7B {SHP} {JUDGED} {SCHEDULED} --label-smoothing 0.05 --hf-split train --log-every 10 "
    "--save-every 100 --profile-memory --micro-token-budget 8192 --max-seq-len 1024 --early-stopping-patience 5",
    f"--model Qwen/Qwen2.5-7B {SHP} {JUDGED} {SCHEDULED} --lora --lora-rank 16 --lora-alpha 32 --profile-memory",
    f"--model Qwen/Qwen2.5-3B {SHP} {JUDGED} --lora --lora-rank 4 --lora-alpha 32 --lora-target-modules {MODULES} "
    "--lr 5e-5 --score-regularization-lambda 0.1 --track-gpu",
    f"--model Qwen/Qwen2.5-3B {SHP} {JUDGED} --lora --rslora --beta 1.0 --regularization-lambda 0.0",
    f"--model Qwen/Qwen2.5-3B {SHP} {JUDGED} --diagnostic-mode label_shuffle --diagnostic-shuffle-rate 0.5",
    f"--model Qwen/Qwen2.5-3B {SHP} {JUDGED} --diagnostic-mode length_matched --diagnostic-length-threshold 50",
)
"""Those of the seeds 000 and 002, with what their texts name besides."""
NOT_OURS = {"--env-file", "--me"}
"""Flags on the pages of the seeds that are those of `uv run` and `squeue`."""


def load(name: str) -> ModuleType:
    """An example as a module."""
    return module_at(EXAMPLES / f"{name}.py")


def seed_texts() -> str:
    pages = [path for number in ("000", "002") for path in SEEDS.glob(f"{number}-*.md")]
    if not pages:
        pytest.skip("the seeds do not lie beside the repository (../shared/seeds)")
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_seeds_are_understood(command: str) -> None:
    config = parse_train(shlex.split(command))
    assert config.run.steps == 1000
    assert config.data.dataset == ("stanfordnlp/SHP",)
    if MODULES in command:
        assert config.model.lora_target_modules == tuple(MODULES.split(","))


@pytest.mark.slow
def test_every_command_in_the_seeds_is_understood() -> None:
    lines = seed_texts().replace("\\\n", " ").splitlines()
    commands = [line.split(SCRIPT, 1)[1] for line in lines if "python" in line and SCRIPT in line]
    assert len(commands) >= 10
    for command in commands:
        parse_train(shlex.split(re.sub(r"\$\{?LR\}?", "1e-6", command)))


def test_the_list_here_names_every_flag_in_the_seeds() -> None:
    flags = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    assert set(flags.findall(seed_texts())) - NOT_OURS <= set(flags.findall(" ".join(COMMANDS)))


def test_the_script_hands_its_arguments_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("train_rm_bradley_terry")
    given: list[list[str]] = []
    monkeypatch.setattr(script, "rewardlab", lambda arguments: given.append(list(arguments)))
    script.main(["--model", "m", "--lr-scheduler", "cosine", "--label_smoothing=0.1"])
    script.main(["--preset", "plain"])
    assert given == [
        ["train", "--model", "m", "--lr-scheduler", "cosine", "--label_smoothing=0.1"],
        ["train", "--preset", "plain"],
    ]


@pytest.mark.parametrize(
    ("given", "schedule", "smoothing"),
    [
        (COMMANDS[0], "constant", 0.0),
        (f"{COMMANDS[0]} --warmup-steps 50", "constant_with_warmup", 0.0),
        (COMMANDS[1], "cosine", 0.05),
    ],
)
def test_what_commands_of_the_seeds_leave_out_is_off(given: str, schedule: str, smoothing: float) -> None:
    script = load("train_rm_bradley_terry")
    config = parse_train(script.with_what_was_off(shlex.split(given)))
    assert (config.schedule.lr_scheduler, config.loss.label_smoothing) == (schedule, smoothing)


# --- the table ---------------------------------------------------------------------------------------------------


def write_run(folder: Path, header: str, *rows: str) -> Path:
    folder.mkdir()
    (folder / "metrics.csv").write_text("\n".join([header, *rows, ""]), encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_the_table_has_the_best_evaluation_with_its_interval_the_gap_and_the_final_step(tmp_path, capsys) -> None:
    edges = "eval_accuracy_low,eval_accuracy_high"
    plain = write_run(
        tmp_path / "A1_none",
        f"step,train_accuracy,eval_accuracy,{edges}",
        *("10,0.52,,,", "100,0.68,0.62,0.59,0.65", "200,0.75,0.61,0.58,0.64", "210,0.80,,,"),
    )
    measured = write_run(
        tmp_path / "A2_scheduler",
        f"step,eval_accuracy,{edges},gap_accuracy,gap_accuracy_low,gap_accuracy_high",
        "50,0.64,0.61,0.67,0.05,0.01,0.09",
    )
    begun = write_run(tmp_path / "A3_smoothing", "step,train_accuracy", "10,0.5")
    output = tmp_path / "table.csv"
    analyze = load("analyze_rm_experiments")
    (tmp_path / "none").mkdir()
    one, two = analyze.main([*map(str, (plain, measured, begun, tmp_path / "none")), "--csv", str(output)])
    assert (one.best_eval_accuracy, one.low, one.high, one.best_step, one.final_step) == (0.62, 0.59, 0.65, 100, 210)
    assert one.train_eval_gap == pytest.approx(0.18)
    assert math.isnan(one.gap_low)
    assert (two.train_eval_gap, two.gap_low, two.gap_high, two.gap_from) == (0.05, 0.01, 0.09, "train_eval")
    shown = capsys.readouterr()
    assert re.search(r"A1_none +0\.620 \[0\.590, 0\.650\] +100 +0\.180 \[—\] +batches +210", shown.out)
    assert "left out: A3_smoothing: it has no evaluation after 10 steps" in shown.err
    assert "left out: none: " in shown.err
    assert "2 runs, 2 left out; written to" in shown.out
    with output.open(encoding="utf-8") as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["A1_none", "A2_scheduler"]
    assert "nan" not in output.read_text(encoding="utf-8")


def test_of_equal_accuracies_the_lower_loss_is_the_best_as_in_the_run_itself(tmp_path) -> None:
    rows = ("0,0.5,0.70", "5,0.6,0.69", "10,0.6,0.66", "15,0.6,0.68")
    folder = write_run(tmp_path / "tied", "step,eval_accuracy,eval_loss", *rows)
    (row,) = load("analyze_rm_experiments").main([str(folder)])
    assert row.best_step == 10


@pytest.mark.slow
def test_the_runs_of_a_study_are_listed(tmp_path) -> None:
    study = finished_study(tmp_path)
    rows = load("analyze_rm_experiments").main([str(study.folder), "--csv", str(tmp_path / "table.csv")])
    assert [row.run for row in rows] == [run.name for run in study.runs]
    assert {row.final_step for row in rows} == {400}


def test_nothing_to_compare_is_an_error_and_writes_nothing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = frozen_study(tmp_path)
    for folder, why in ((tmp_path / "gone", "no such folder: "), (study.folder, "no run has been evaluated")):
        with pytest.raises(SystemExit) as ended:
            load("analyze_rm_experiments").main([str(folder)])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
    assert not list(tmp_path.glob("**/*.csv"))


@pytest.mark.slow
def test_runs_are_named_by_arm_and_seed_and_outdated_ones_are_left_out(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = finished_study(tmp_path)
    folders = [str(study.run_folder(run)) for run in study.runs[:4]]
    rows = load("analyze_rm_experiments").main(folders)
    assert [row.run for row in rows] == ["plain/seed_0", "plain/seed_1", "plain/seed_2", "smooth/seed_0"]
    plan = study.folder / "plan.yaml"
    plan.write_text(plan.read_text(encoding="utf-8").replace("lr: 0.01", "lr: 0.02"), encoding="utf-8")
    amend(study.folder, reason="r", seen="results", begun=True, judged=True)
    capsys.readouterr()
    rows = load("analyze_rm_experiments").main([str(study.folder)])
    assert {row.run.partition("/")[0] for row in rows} == {"plain", "smooth"}
    assert "left out: harsh/seed_0: outdated: it was begun with other settings" in capsys.readouterr().err
    assert not (tmp_path / "rm_experiments.csv").exists()
