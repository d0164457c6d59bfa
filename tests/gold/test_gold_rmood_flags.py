"""The command lines of RMOOD's documentation, taken literally: each does what its script did, or says what to give."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import labelled
from reward_models import save_tiny
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError
from rewardlab.gold.rmood_flags import translated

LABEL = """labeling_reward.py
    --prompts_path $RMOOD_HOME/datasets/alpacafarm/rm/rm_prompts.json
    --responses_path $RMOOD_HOME/datasets/alpacafarm/rm/rm_sft.json
    --target_path $RMOOD_HOME/datasets/alpacafarm/rm/rm_rewards.json
    --model_name Skywork/Skywork-Reward-V2-Llama-3.1-8B --batch_size 256 --num_responses 2"""
QUALITY = """check_training_quality.py
    --model_path $RMOOD_HOME/models/RMOOD-qwen3-4b-alpacafarm-rm --num_samples 500"""
DIAGNOSE = "diagnose_rm.py --dataset_name alpacafarm --models rm mrm"
VALIDATE = """validate_training.py
    --data_path $RMOOD_HOME/datasets/alpacafarm/rm/rm_implicit.jsonl
    --rewards_path $RMOOD_HOME/datasets/alpacafarm/rm/rm_rewards.json
    --responses_path $RMOOD_HOME/datasets/alpacafarm/rm/rm_sft.json"""
STAGES = {
    "labeling_reward.py": "label",
    "check_training_quality.py": "match",
    "diagnose_rm.py": "match",
    "check_match.py": "match",
    "validate_training.py": "check",
}
GOLD = "models/gold"
ROWS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rmood") / "models"
    for seed, name in enumerate(("gold", "RMOOD-qwen3-4b-alpacafarm-rm", "RMOOD-qwen3-4b-alpacafarm-mrm")):
        save_tiny(folder / name, seed=seed)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Their folder, with files in their layout; the labels are those of a tie in each tenth row."""
    (tmp_path / "models").symlink_to(models)
    data = tmp_path / "datasets" / "alpacafarm"
    (data / "rm").mkdir(parents=True)
    (data / "test").mkdir()
    rows = labelled.rows(ROWS)
    for number in range(0, ROWS, 10):
        rows[number]["gold"] = [1.0, 1.0]
    replies = [{f"response_{k + 1}": text for k, text in enumerate(row["responses"])} for row in rows]
    columns: dict[str, list[object]] = {"chosen": [], "rejected": []}
    for row in rows:
        if row["gold"][0] != row["gold"][1]:
            best = row["gold"].index(max(row["gold"]))
            for side, place in (("chosen", best), ("rejected", 1 - best)):
                reply = {"role": "assistant", "content": row["responses"][place]}
                columns[side].append([*row["prompt"], reply])
    files = {
        "rm/rm_prompts.json": [row["prompt"] for row in rows],
        "rm/rm_sft.json": replies,
        "rm/rm_rewards.json": [row["gold"] for row in rows],
        "rm/rm_implicit.jsonl": columns,
        "rm/test_sft.json": replies,
        "rm/test_reward_gold.json": [row["gold"] for row in rows],
        "test/test_prompts.json": [row["prompt"] for row in rows],
    }
    for name, value in files.items():
        (data / name).write_text(json.dumps(value))
    monkeypatch.setenv("RMOOD_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str, home: Path, *more: str) -> int:
    """Give the flags of a script to the stage that stands in its place; return the exit status."""
    script, *words = shlex.split(line.replace("$RMOOD_HOME", str(home)))
    try:
        main(["gold", STAGES[script], *words, *more])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.slow
def test_labels_are_written_where_and_as_the_script_did(home, capsys) -> None:
    (home / "datasets/alpacafarm/rm/rm_rewards.json").unlink()
    assert run(LABEL.replace("Skywork/Skywork-Reward-V2-Llama-3.1-8B", GOLD), home) == 0
    found = json.loads((home / "datasets/alpacafarm/rm/rm_rewards.json").read_text())
    assert [len(row) for row in found] == [2] * ROWS
    assert "--batch_size: has no effect here; batches are filled by tokens" in capsys.readouterr().out


def test_a_flag_that_another_command_has_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gold", "sample", "--prompts", "p.json", "--output", "s.jsonl"]
    with pytest.raises(SystemExit):
        main([*words, "--use-chat-templates"])
    assert "--use-chat-template'" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--chat-template-kwargs", "x"])
    assert "Did you mean '--template-arguments'?" in capsys.readouterr().err


def test_the_gold_model_of_the_script_is_looked_for_on_the_hub(home, capsys) -> None:
    (home / "datasets/alpacafarm/rm/rm_rewards.json").unlink()
    assert run(LABEL, home) == 2
    told = capsys.readouterr().err
    assert "--model Skywork/Skywork-Reward-V2-Llama-3.1-8B: no such folder, and the hub did not give" in told


@pytest.mark.slow
def test_training_quality_asks_for_the_rows_and_takes_so_many(home, capsys) -> None:
    assert run(QUALITY, home) == 2
    told = capsys.readouterr().err
    assert "--input is missing" in told
    assert "--prompts-path, --responses-path and --rewards-path" in told
    data = "datasets/alpacafarm/rm"
    rows = f"--train_prompts_path {data}/rm_prompts.json --train_responses_path {data}/rm_sft.json".split()
    rows += ["--train_rewards_path", f"{data}/rm_rewards.json", "--output-dir", "found"]
    assert run(QUALITY.replace("500", "30"), home, *rows) in (0, 1)
    assert "Only the first 30 of the 40 training rows are judged (--num-samples)." in capsys.readouterr().out
    found = json.loads(Path("found/match.json").read_text())
    assert found["test"] is None
    assert found["train"]["num_rows"] == 30


@pytest.mark.slow
def test_a_dataset_is_found_by_its_name_and_so_are_its_models(home, capsys) -> None:
    assert run(DIAGNOSE, home) in (0, 1)
    assert "mrm beside rm:" in capsys.readouterr().out
    found = json.loads((home / "datasets/alpacafarm/rm/match/match.json").read_text())
    assert found["proxies"] == ["rm", "mrm"]
    assert found["test"]["num_rows"] == ROWS


def test_a_model_is_found_by_its_short_name_behind_a_sign_too(home) -> None:
    for words in (["--models=rm"], ["--models", "rm"]):
        *_, last = translated(["--dataset_name", "alpacafarm", *words], "match", say=print)
        assert last.removeprefix("--proxies=") == f"rm={home / 'models' / 'RMOOD-qwen3-4b-alpacafarm-rm'}"


def test_a_dataset_that_is_not_there_says_what_to_give(home) -> None:
    with pytest.raises(ConfigError, match="--dataset_name other: no folder other, .* --prompts_path, --responses_path"):
        translated(["--dataset_name", "other"], "match", say=print)


def test_a_match_without_anything_says_what_to_give(home, capsys) -> None:
    assert run("check_match.py", home) == 2
    assert "--input is missing: name a file with gold scores" in capsys.readouterr().err


def test_training_data_are_validated_without_a_file_of_prompts(home, capsys) -> None:
    assert run(VALIDATE, home, "--batch_size", "16") == 0
    flat = " ".join(capsys.readouterr().out.split())
    assert "UNDECIDED: 3 undecided, 9 passed." in flat
    assert "36 of 40 rows have the prompt of the pair with their replies" in flat
    assert "4 rows are in no pair, 0 of them with different gold scores" in flat
    assert "--batch_size: has no effect here; no model computes anything here" in flat


def test_validation_without_prompts_still_names_swapped_scores_and_lost_rows(home, capsys) -> None:
    path = home / "datasets/alpacafarm/rm/rm_rewards.json"
    path.write_text(json.dumps([row[::-1] for row in json.loads(path.read_text())]))
    assert run(VALIDATE, home) == 1
    assert "Chosen and rejected are swapped or the two scores of each row" in " ".join(capsys.readouterr().out.split())
    pairs = home / "datasets/alpacafarm/rm/rm_implicit.jsonl"
    columns = json.loads(pairs.read_text())
    pairs.write_text(json.dumps({side: rows[1:] for side, rows in columns.items()}))
    run(VALIDATE, home)
    assert "5 rows are in no pair, 1 of them with different gold scores" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("stage", ["sample", "label", "match", "check"])
def test_the_help_names_the_flags_of_the_scripts(stage, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["gold", stage, "--help"])
    assert "of earlier scripts also --" in " ".join(capsys.readouterr().out.split())
