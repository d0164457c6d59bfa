"""What a killed command left beside its output goes when the same command is given again, a day later where nothing
else tells that no process of another machine is writing there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from common import write_pairs
from killing import KILLED_AT_WRITE, abandon, ended_process, run_program
from reward_models import save_tiny
from rewardlab.cli import main
from rewardlab.serve.verifying.folder import verify

LINES = ("--dataset", "pairs.jsonl", "--output-dir", "judged", "--no-precision-card")
COMMANDS = {
    "score": (("score", "--model", "m1", "--input", "replies.jsonl", "--output", "out"), "out.jsonl"),
    "kept scores": (("score", "--model", "m1", "--input", "replies.jsonl", "--output", "out"), ".out.jsonl.partial"),
    "average": (("average", "m1", "m2", "--output-dir", "out"), "out"),
    "export": (("export", "m1", "--output-dir", "out"), "out"),
    "convert": (("data", "convert", "pairs.jsonl", "--output", "out"), "out.jsonl"),
    "mix": (("data", "mix", "pairs.jsonl", "--output", "out"), "out.jsonl"),
    "inspect": (("data", "inspect", "pairs.jsonl", "--json", "out.json"), "out.json"),
    "audit": (("data", "audit", "pairs.jsonl", "--fix", "--num-workers", "1", "--output", "out"), "out.jsonl"),
    "report": (("report", "judged"), "judged/report.html"),
}
"""A command, and a file or folder that it writes. `out` is `out.jsonl` where a file is wanted."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number in (1, 2):
        save_tiny(tmp_path / f"m{number}", seed=number)
    write_pairs(tmp_path / "pairs.jsonl", 40)
    (tmp_path / "replies.jsonl").write_text('{"prompt": "How?", "response": "So."}\n' * 3)
    monkeypatch.chdir(tmp_path)
    for module in ("average", "export"):
        monkeypatch.setattr(f"rewardlab.serve.folders.{module}.verify_in_clean_process", verify)
    return tmp_path


def run(words: tuple[str, ...]) -> None:
    status = 0
    try:
        main(
            [f"{word}.jsonl" if word == "out" and words[k - 1] == "--output" else word for k, word in enumerate(words)]
        )
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_killed_command_left_goes_and_files_of_other_names_stay(here, command):
    words, written = COMMANDS[command]
    if command == "report":
        run(("eval", "m1", *LINES))
    path, gone = here / written, ended_process()
    half, other = (path.with_name(f".{name}.tmp-{gone}") for name in (path.name, "other"))
    half.write_text("half of it")
    other.touch()
    if words[0] != "score":  # which holds a lock
        abandon(half, other)
    run(words)
    assert list(here.rglob("*.tmp-*")) == [other]


@pytest.mark.slow
def test_an_average_that_was_killed_leaves_no_model_behind(here):
    words = COMMANDS["average"][0]
    told = run_program(KILLED_AT_WRITE, [str(here), "2", *words])
    assert told.returncode == -signal.SIGKILL, told.stderr
    left = list(here.glob(".*tmp-*"))
    assert len(left) == 2, "it was killed in the middle"
    abandon(*left)
    run(words)
    assert not list(here.rglob(".*"))
