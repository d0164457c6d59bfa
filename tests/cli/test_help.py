"""Help, version, the choice of a command, and how the program ends."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest

from command_line import in_process, refusal
from rewardlab import cli
from rewardlab.cli import commands, main
from rewardlab.commands.parsing import EXAMPLES, PURPOSES
from rewardlab.flags import sections_of
from rewardlab.training.settings.config import RewardTrainerConfig

COMMANDS = tuple(commands())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(arguments, capsys):
    main(arguments)
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_that_of_the_package(flag, capsys):
    from importlib.metadata import version

    main([flag])
    assert capsys.readouterr().out == f"rewardlab {version('rewardlab')}\n"


@pytest.mark.parametrize(
    ("command", "near"), [("trian", " Did you mean 'train'?"), ("evl", " Did you mean 'eval'?"), ("7", "")]
)
def test_an_unknown_command_is_refused_with_the_nearest(command, near, capsys):
    assert refusal(capsys, command) == f"unknown command {command!r}.{near} Commands: {', '.join(COMMANDS)}.\n"


def help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `--help` prints."""
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_train_lists_every_flag_in_its_room_and_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text(capsys, "train")
    assert max(map(len, text.splitlines())) <= 100
    rooms = sections_of(RewardTrainerConfig, "train")
    titles = [f" {room} options" for room in rooms]
    _, *sections = re.split("|".join(titles), text)
    assert re.findall("|".join(titles), text) == titles
    for section, part in zip(sections, rooms.values(), strict=True):
        listed = re.findall(r"^  --([a-z][a-z-]*)", section, re.MULTILINE)
        assert listed == [setting.name.replace("_", "-") for setting in part]


def test_the_help_says_type_meaning_and_default_of_a_flag(capsys, tmp_path):
    text = " ".join(help_text(capsys, "train").split())
    assert "--max-seq-len INT|auto|model Tokens a conversation may have; `--truncation` says what happens to" in text
    assert "or its positions if it has fewer. (default: auto)" in text
    assert (
        "--lr FLOAT Highest learning rate; by default 5e-6 for full fine-tuning, 5e-5 for LoRA and 1e-3 for the head "
        "alone. --differential-lr" in text
    )
    assert re.search(r"--kwise-loss \{pairs,plackett-luce\} For K > 2: [^()]* \(default: pairs\)", text)
    assert "--center-lambda FLOAT c of the centring regulariser" in text
    assert re.search(r"--label-smoothing FLOAT [^()]* \(default: 0\.05\)", text)
    assert re.search(r"--train-eval-limit INT [^()]* \(default: 0\)", text)
    assert "--dataset STR ... Training data" in text
    assert "--lora, --no-lora Train low-rank adapters and the head instead of every weight. --lora-rank" in text


def test_the_help_shows_what_the_file_says_as_defaults(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("max-seq-len: 77\nlora: true\ndataset: [a.jsonl, b.jsonl]\n")
    text = " ".join(help_text(capsys, "train", "--config", str(tmp_path / "run.yaml")).split())
    assert "or its positions if it has fewer. (default: 77)" in text
    assert "--lora, --no-lora Train low-rank adapters and the head instead of every weight. (default: True)" in text
    assert "(also `--hf-dataset`). (default: a.jsonl b.jsonl)" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text(capsys, command)
    assert text.startswith(f"usage: rewardlab {command} [-h]")
    assert PURPOSES[command] in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_a_section_of_settings_is_about_flows_over_the_lines_of_the_source(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text(capsys, "eval")
    assert "the start, and the decision is saved with the run's settings." in text
    assert f"\nExample: rewardlab eval {EXAMPLES['eval']}\n" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in ([], ["--version"], ["train"], *([command, "--help"] for command in COMMANDS))
            if words != ["train", "--help"]
        ),
    ],
)
def test_help_and_bad_flags_need_neither_torch_nor_transformers(arguments):
    program = (
        "import sys\nfrom rewardlab.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines()[-1] == "[]"
    assert answer.returncode == (2 if arguments == ["train"] else 0)


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "rewardlab", "train", "--help"], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (answer.returncode, answer.stderr) == (141, b"")


@pytest.mark.slow
def test_a_terminal_that_lacks_a_letter_loses_the_letter_and_not_the_text():
    answer = in_process("train", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (answer.returncode, answer.stderr) == (0, "")
    assert re.search(r"--beta FLOAT\W+\(beta \? score difference\)", answer.stdout)


def test_the_log_goes_to_the_output_of_each_call_and_leaves_the_logger_as_it_was(monkeypatch, capsys):
    logger = logging.getLogger("rewardlab")
    before = (list(logger.handlers), logger.level)
    monkeypatch.setattr(cli, "commands", lambda: {"say": lambda arguments: logger.info("hello %s", *arguments)})
    for name in ("you", "again"):
        main(["say", name])
        assert capsys.readouterr().out == f"hello {name}\n"
    assert (list(logger.handlers), logger.level) == before


def test_an_interrupt_is_told_and_ends_with_the_status_of_one(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "commands", lambda: {"wait": interrupted})
    with pytest.raises(SystemExit) as stopped:
        main(["wait"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("command", "columns"),
    [*(("verify", columns) for columns in ("", "0", "1", "2", "39", "-4", "100000", "1e9", "9" * 400)), ("train", "3")],
)
def test_a_terminal_of_any_width_shows_the_help(command, columns, monkeypatch, capsys):
    with monkeypatch.context() as narrow:  # pytest writes its own lines by it as well, so not a moment longer
        narrow.setenv("COLUMNS", columns)
        text = help_text(capsys, command)
        assert os.environ["COLUMNS"] == columns
    assert PURPOSES[command] in " ".join(text.split())
    assert 20 < max(map(len, text.splitlines())) <= 200
