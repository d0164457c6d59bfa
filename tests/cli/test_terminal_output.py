"""No name, text or error from elsewhere gives orders to a terminal, or to the shell in which a suggestion is tried."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from command_line import refusal, short_run, write_rows
from common import write_pairs
from rewardlab import cli
from rewardlab.analysis.metrics import evaluate
from rewardlab.cli import main
from rewardlab.core.bars import bar
from rewardlab.core.errors import RewardlabError, RunInterrupted
from rewardlab.core.types import Comparison, ScoreRow
from rewardlab.report.run import comparison_table

NASTY = "p\x1b[2J\r\x07\x9b1m\u202etxt\u2028\x7fq\nerror: all is lost"
SHOWN = r"p\x1b[2J\r\x07\x9b1m\u202etxt\u2028\x7fq\nerror: all is lost"


def harmless(text: str) -> bool:
    """Whether a terminal only shows it, in lines that are ours."""
    hidden = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return hidden <= {"\n"} and not re.search(r"^error: all is lost", text, re.MULTILINE)


def test_ctrl_c_while_the_commands_are_imported_is_told_in_a_word(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "commands", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["train"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_script_imports_no_command_before_it_can_be_interrupted():
    code = "import sys; from rewardlab.cli import main; sys.exit('rewardlab.commands' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_run_on_nasty_names_and_texts_only_shows_them(base_model, tmp_path, monkeypatch, capsys, verified_here):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"How {n}? {NASTY}", "chosen": f"Yes {n} \x1b]0;owned\x07.", "rejected": f"no \x1b[8m{n}"}
        for n in range(12)
    ]
    data = write_rows(tmp_path / f"{NASTY}.jsonl", *rows)
    run = Path(f"$(touch owned) it's \"{NASTY}")
    main([*map(str, short_run(base_model, run)), "--dataset", data.name, "--test-dataset", data.name])
    said = capsys.readouterr()
    kept = [(run / name).read_text() for name in ("samples.txt", "report.txt")]
    assert all(map(harmless, (said.out, said.err, *kept)))
    assert f"data: {SHOWN}[all rows]: 12 rows read" in said.out
    assert r"\x1b[8m" in kept[0].replace("|", "")
    assert json.loads((run / "config.json").read_text())["output_dir"] == str(run)

    (suggested,) = re.findall(r"^Next: rewardlab (.*)$", said.out, re.MULTILINE)
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {suggested}"], capture_output=True, check=True)
    eval_, flag, model, *_ = words.stdout.decode().split("\0")
    assert (eval_, flag) == ("eval", "--model")
    assert Path(model).is_dir()
    assert not Path("owned").exists()

    main([eval_, flag, model, "--dataset", data.name])
    said = capsys.readouterr()
    assert harmless(said.out + said.err)
    assert f"{SHOWN}[all rows]: 12 rows read" in said.out


def test_a_table_shows_names_and_its_foot_too():
    rows = [
        ScoreRow(
            preference_id=f"{n}",
            source=NASTY,
            prompt_key=f"{n}",
            reply=reply,
            score=1.0,
            num_tokens=1,
            prompt_tokens=0,
            truncated_tokens=0,
            comparisons=(Comparison(first=0, second=1),) if reply == 0 else (),
        )
        for n in range(2)
        for reply in range(2)
    ]
    table = comparison_table({NASTY: evaluate(rows, beta=1.0)}, first="source")
    assert harmless(table)
    assert f"{SHOWN}: 2 scores tied (counted one half)" in " ".join(table.split())


@pytest.mark.parametrize(
    "words",
    [
        ["train", f"--{NASTY}"],
        [NASTY],
        ["train", "--config", f"{NASTY}.yaml"],
        ["train", "--model", NASTY, "--dataset", "pairs.jsonl"],
        ["train", "--precision", NASTY],
        ["train", NASTY],
        ["verify", NASTY],
        ["eval", "--model", NASTY, "--dataset", NASTY],
        ["score", "--model", "m", "--input", NASTY, "--output", "o"],
        ["train", "--resume", NASTY],
    ],
    ids=lambda words: "-".join(words).replace(NASTY, "nasty"),
)
def test_an_error_shows_what_was_typed(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl", 4)
    said = refusal(capsys, *words)
    assert harmless(f"error: {said}")
    assert r"\x1b[2J" in said


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RewardlabError(NASTY), 2),
        (OSError(28, "No space left on device", NASTY), 2),
        (RunInterrupted(NASTY, exit_status=75), 75),
    ],
    ids=["ours", "the system's", "interrupted"],
)
def test_every_end_of_a_command_is_shown_alike(error, status, monkeypatch, capsys):
    def end(_):
        raise error

    monkeypatch.setattr(cli, "commands", lambda: {"end": end})
    with pytest.raises(SystemExit) as stopped:
        main(["end"])
    assert stopped.value.code == status
    said = capsys.readouterr().err
    assert harmless(said)
    assert r"\x1b[2J" in said


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("the rows differ", "error: rank 1: the rows differ\n"),
        ("no room, on rank 1.", "error: no room, on rank 1.\n"),
        ("no room, on rank 12.", "error: rank 1: no room, on rank 12.\n"),
    ],
)
def test_the_error_of_a_rank_names_it_once(said, told, monkeypatch, capsys):
    def end(_):
        raise RewardlabError(said)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(cli, "commands", lambda: {"end": end})
    with pytest.raises(SystemExit):
        main(["end"])
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_streams_ends_as_ever_and_prints_into_no_file(closed, tmp_path):
    code = (
        "import os; from rewardlab import cli, console\n"
        "def end(_):\n"
        "    with open('kept', 'w') as kept:\n"
        "        os.write(1, b'out'), os.write(2, b'err'), print('a report'), console.complain('an error')\n"
        "        kept.write(str(kept.fileno() > 2))\n"
        "cli.commands = lambda: {'end': end}\n"
        "cli.main(['end'])\n"
    )
    line = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kept").read_text() == "True"


def test_a_name_that_the_locale_cannot_write_is_told_with_what_to_set(monkeypatch, capsys):
    monkeypatch.setattr(cli, "commands", lambda: {"end": lambda _: "zł.jsonl".encode("latin-1")})
    with pytest.raises(UnicodeEncodeError):
        main(["end"])
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    said = refusal(capsys, "end")
    assert said.startswith("'zł.jsonl': cannot be the name of a file here, where the locale's names are in iso8859-1")
    monkeypatch.setattr(cli, "commands", lambda: {"end": lambda _: "ł.jsonl".encode("cp1252")})
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "cp1252")
    assert "names are in cp1252" in refusal(capsys, "end")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("could not create a primitive")])
def test_a_command_that_runs_out_of_memory_says_so(error, monkeypatch, capsys):
    def end(_):
        raise error

    monkeypatch.setattr(cli, "commands", lambda: {"end": end})
    assert refusal(capsys, "end").startswith("out of memory. Lower --micro-token-budget")


def test_a_link_that_leads_back_to_itself_is_told_as_such(tmp_path, capsys):
    (loop := tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    said = refusal(capsys, "score", "--model", "m", "--input", str(tmp_path / "rows.jsonl"), "--output", str(loop))
    assert str(loop) in said
    assert "loop" in said.replace(str(loop), "") or "levels of symbolic links" in said


def test_the_help_shows_the_defaults_of_a_file(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"dataset": [NASTY], "system_prompt": NASTY}))
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "run.json"), "--help"])
    said = capsys.readouterr().out
    assert harmless(said)
    assert r"\x1b[2J" in said


def test_a_row_that_cannot_be_used_is_shown(base_model, tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", *([{"prompt": "a", "chosen": [NASTY], "rejected": 3}] * 3))
    said = refusal(capsys, *short_run(base_model, tmp_path / "run"), "--dataset", data)
    assert harmless(f"error: {said}")
    data = write_rows(tmp_path / "data.jsonl", {NASTY: "a"})
    assert harmless(refusal(capsys, *short_run(base_model, tmp_path / "run"), "--dataset", data))


def test_a_bar_shows_its_title(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for items in (range(2), None):
        with bar(items, title=NASTY) as shown:
            shown.refresh()
    drawn = terminal.getvalue()
    assert SHOWN in drawn
    assert harmless(drawn.replace("\r", ""))


def test_a_name_in_another_encoding_is_refused_and_written_out(base_model, pairs_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = Path(shutil.copy(pairs_file, tmp_path / "caf\udce9.jsonl"))
    said = refusal(capsys, *short_run(base_model, Path("run")), "--dataset", data.name)
    assert said == "dataset caf\\xe9.jsonl: its name is not UTF-8. Rename the file, or link to it.\n"
    data = Path(shutil.move(data, tmp_path / "pairs.jsonl"))
    moved = shutil.move(base_model, tmp_path / "mod\udce8le")  # which the tokenizers' own code cannot open
    said = refusal(capsys, *short_run(moved, Path("other")), "--dataset", data.name)
    assert "mod\\udce8le" in said
    assert harmless(said)
    said = refusal(capsys, *short_run(moved, Path("r\udce9sultat")), "--dataset", data.name)
    assert said == "cannot write to r\\udce9sultat: this name is not UTF-8. Choose another place with --output-dir.\n"
