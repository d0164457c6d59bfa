"""`rewardlab score` in a process that is killed or told to end: what was scored is kept, and the bytes are the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from common import make_model, make_tokenizer
from killing import run_program
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.file_scoring import journal as journal_module
from rewardlab.serve.file_scoring import rows as rows_module
from rewardlab.serve.file_scoring.file import score_with
from rewardlab.serve.file_scoring.journal import partial_of
from scored_files import write_rows
from scoring_stub import Stub


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 20)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "scored.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=64))
    folder = tmp_path_factory.mktemp("resume") / "model"
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return str(folder)


PROGRAM = """
import sys
from pathlib import Path
from killing import end_while_appending
from rewardlab.serve.file_scoring import file, journal, rows
from scoring_stub import Stub
rows.ROWS_AT_A_TIME = 3
end_while_appending(journal, at=3)
file.score_with(Stub(), Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def scored_at_once(model, tmp_path_factory) -> Path:
    """What an uninterrupted run writes."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows_module, "ROWS_AT_A_TIME", 3)
        main(words_for(model, write_rows(folder / "rows.jsonl", 20), folder / "whole.jsonl"))
    return folder / "whole.jsonl"


def words_for(model: str, source: Path, target: Path) -> list[str]:
    return ["score", "--model", model, "--input", str(source), "--output", str(target)]


@pytest.mark.slow
def test_a_killed_process_goes_on_and_writes_the_same_bytes(source, target, tmp_path, caplog):
    """Killed while a line of scores is half written. What scores is no model: what is shown is what is kept."""
    ended = run_program(PROGRAM, [str(source), str(target)])
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not target.exists()
    assert (partial_of(target) / "scores.jsonl").read_bytes().count(b"\n") == 2
    second = Stub()
    with caplog.at_level("INFO", logger="rewardlab"):
        score_with(second, source, target)
    assert "6 of 20 rows were scored before; going on" in caplog.text
    assert second.asked[0].startswith("So 6")
    score_with(Stub(), source, tmp_path / "whole.jsonl")
    assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not partial_of(target).exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("how", "status"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_ends_it_at_once_with_what_is_scored_kept(
    model, source, target, scored_at_once, how, status, monkeypatch, capsys
):
    append, calls = journal_module.append_text, []

    def ending(path, text):
        calls.append(path)
        if len(calls) == 3:
            signal.raise_signal(getattr(signal, how))
        append(path, text)

    monkeypatch.setattr(journal_module, "append_text", ending)
    before = signal.getsignal(getattr(signal, how))
    with pytest.raises(SystemExit) as ended:
        main(words_for(model, source, target))
    assert ended.value.code == status
    assert signal.getsignal(getattr(signal, how)) == before
    said = capsys.readouterr()
    assert "6 of 20 rows are scored and kept in" in said.out
    assert ("stopped by SIGTERM" in said.err) == (how == "SIGTERM")
    main(words_for(model, source, target))
    assert target.read_bytes() == scored_at_once.read_bytes()
