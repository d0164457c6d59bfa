"""A run of `rewardlab score` that ends at any moment goes on, and writes the file that it would have written."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewardlab.core import files
from rewardlab.core.errors import ConfigError, DataError, RunInterrupted
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals
from rewardlab.serve.file_scoring import file as file_module
from rewardlab.serve.file_scoring import journal as journal_module
from rewardlab.serve.file_scoring import rows as rows_module
from rewardlab.serve.file_scoring.file import DEFAULT, ScoreSettings, score_with, surveyed
from rewardlab.serve.file_scoring.journal import Journal, partial_of
from rewardlab.serve.file_scoring.results import result_of
from scored_files import write_rows
from scoring_stub import Stub


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 3)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 20)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "scored.jsonl"


def stopping_after(calls: int) -> Stub:
    """A backend that fails at a call."""

    def before(rows: object) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise RuntimeError("the power is out")

    return Stub(before)


@given(
    cut=st.integers(0, 400),
    stop=st.integers(0, 7),
    num_parts=st.integers(1, 4),
    garbage=st.sampled_from([b"", b"\0" * 9, b'{"part": 1', b"{}\n", b"\xff\n"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interruption_gives_the_same_file_and_scores_nothing_twice(
    monkeypatch, cut: int, stop: int, num_parts: int, garbage: bytes
):
    """The run stops at a call; then the end of what it kept is cut off, and other bytes are in its place."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_rows(Path(folder) / "rows.jsonl", 20)
        whole, target = Path(folder) / "whole.jsonl", Path(folder) / "scored.jsonl"
        uninterrupted = Stub()
        score_with(uninterrupted, source, whole)
        first = stopping_after(stop)
        first.num_parts = num_parts
        if stop < 7:
            with pytest.raises(RuntimeError):
                score_with(first, source, target)
        else:
            # All is scored, and the output is not yet written.
            monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                score_with(first, source, target)
            monkeypatch.undo()
            monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 3)
        kept = partial_of(target) / "scores.jsonl"
        if kept.exists():
            content = kept.read_bytes()
            kept.write_bytes(content[: len(content) - min(cut, len(content))] + garbage)
            known = [json.loads(line)["rows"] for line in content[: max(len(content) - cut, 0)].split(b"\n")[:-1]]
        else:
            known = []
        second = Stub(num_parts=num_parts)
        score_with(second, source, target)
        assert target.read_bytes() == whole.read_bytes()
        num_known = sum(len(row) for rows in known for row in rows)
        assert len(second.asked) == len(uninterrupted.asked) - num_known
        assert names_in(Path(folder)) == ["rows.jsonl", "scored.jsonl", "whole.jsonl"]


def test_a_run_of_something_else_is_not_mixed_in_and_says_what_differs(source, target, caplog):
    with pytest.raises(RuntimeError):
        score_with(stopping_after(2), source, target)
    before = (partial_of(target) / "scores.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="model was d, now e. Score what it scored.*discard it with --restart"):
        score_with(Stub(digest="e"), source, target)
    source.write_text(source.read_text().replace("How 7", "How seven"))
    with pytest.raises(ConfigError, match="cannot go on: input was "):
        score_with(Stub(), source, target)
    assert (partial_of(target) / "scores.jsonl").read_bytes() == before, "refusing takes nothing away"
    again = Stub()
    score_with(again, source, target, ScoreSettings(restart=True))
    assert len(again.asked) == sum(len(row.get("responses", ["one"])) for row in read(source))


def ended_after_the_output(source: Path, target: Path, monkeypatch, **how) -> None:
    """A run that is killed when the output has its name and the scores are still there."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(file_module, "removed_at_end", killed)
        with pytest.raises(KeyboardInterrupt):
            score_with(Stub(**how), source, target, ScoreSettings(overwrite=True))
    assert target.exists()
    assert partial_of(target).exists()


def test_scores_that_are_all_in_the_output_stand_in_nobodys_way(source, target, monkeypatch, tmp_path):
    ended_after_the_output(source, target, monkeypatch)
    other = Stub(digest="e")
    score_with(other, source, target, ScoreSettings(overwrite=True))
    assert len(other.asked) > 20, "nothing of the other model's is taken"
    assert names_in(tmp_path) == ["rows.jsonl", "scored.jsonl"]


def test_scores_whose_output_is_gone_are_not_taken_for_spent(source, target, monkeypatch):
    ended_after_the_output(source, target, monkeypatch)
    target.write_text("of another")
    with pytest.raises(ConfigError, match="model was d, now e"):
        score_with(Stub(digest="e"), source, target, ScoreSettings(overwrite=True))
    target.unlink()
    second = Stub()
    score_with(second, source, target)
    assert second.asked == []


def test_a_run_that_was_killed_before_its_first_scores_stands_in_nobodys_way(source, target, tmp_path):
    partial_of(target).mkdir()
    Journal(partial_of(target), {"input": "of another"}).begin({})
    score_with(Stub(), source, target)
    assert names_in(tmp_path) == ["rows.jsonl", "scored.jsonl"]


def test_an_output_that_is_a_link_stays_one_and_what_it_leads_to_is_written(source, target, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / "elsewhere/real"
    place.write_text("old")
    target.symlink_to(place)
    with pytest.raises(RuntimeError):
        score_with(stopping_after(2), source, target, ScoreSettings(overwrite=True))
    assert partial_of(place).is_dir()
    assert place.read_text() == "old"
    score_with(Stub(), source, target, ScoreSettings(overwrite=True))
    assert target.is_symlink()
    assert len(read(place)) == 20
    assert names_in(tmp_path) == ["elsewhere", "rows.jsonl", "scored.jsonl"]
    target.unlink()
    target.symlink_to(tmp_path / "nowhere/real")
    with pytest.raises(ConfigError, match="is a link to .*nowhere/real, whose folder does not exist"):
        score_with(Stub(), source, target, ScoreSettings(overwrite=True))


def as_ensemble(source: Path, target: Path, *members: Stub, settings: ScoreSettings = DEFAULT) -> None:
    """Score with several stubs, as `score_ensemble` does with models, and write the scores of the last one."""
    with surveyed(source, target, settings, bare=False) as work:
        journals = work.journals([member.identity for member in members])
        for member, journal in zip(members, journals, strict=True):
            work.score(member, journal)
        work.finish(result_of(outcome, list) for outcome in journals[-1].outcomes())


def kept_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json*")}


def test_an_ensemble_and_a_model_do_not_take_each_others_scores_away(source, target):
    with pytest.raises(RuntimeError):
        score_with(stopping_after(2), source, target)
    before = kept_in(partial_of(target))
    with pytest.raises(ConfigError, match="mode was single, now ensemble"):
        as_ensemble(source, target, Stub(), Stub(digest="e"))
    assert kept_in(partial_of(target)) == before
    two = [Stub(digest="e"), stopping_after(2)]
    with pytest.raises(RuntimeError):
        as_ensemble(source, target, *two, settings=ScoreSettings(restart=True))
    before = kept_in(partial_of(target))
    assert {"state.json", "member_1/scores.jsonl", "member_2/scores.jsonl"} <= set(before)
    for refused in (
        lambda: score_with(Stub(), source, target),
        lambda: as_ensemble(source, target, Stub(), Stub(digest="e")),
        lambda: as_ensemble(source, target, Stub(digest="e"), Stub(), Stub(digest="f")),
    ):
        with pytest.raises(ConfigError, match=r"(mode was ensemble, now single|members was .*, now )"):
            refused()
        assert kept_in(partial_of(target)) == before
    first, second = Stub(digest="e"), Stub()
    as_ensemble(source, target, first, second)
    assert (first.asked, second.asked[0][:4]) == ([], "So 6")
    assert not partial_of(target).exists()


def test_an_ensemble_whose_first_member_fails_leaves_no_folder(source, target, tmp_path):
    with pytest.raises(RuntimeError):
        as_ensemble(source, target, stopping_after(0), Stub(digest="e"))
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_how_long_conversations_are_read_does_not_change_within_a_file(source, target):
    with pytest.raises(RuntimeError):
        score_with(stopping_after(2), source, target, ScoreSettings(overlong="cut"))
    with pytest.raises(ConfigError, match="overlong was cut, now refuse"):
        score_with(Stub(), source, target, ScoreSettings(overlong="refuse"))


def test_causes_do_not_depend_on_the_name_of_the_input(source, target, tmp_path):
    with source.open("a") as file:
        file.write("{\n[1]\n")
    write = ScoreSettings(on_error="write")
    with pytest.raises(RuntimeError):
        score_with(stopping_after(6), source, target, write)
    score_with(Stub(), source.rename(tmp_path / "moved.jsonl"), target, write)
    causes = [row["score_error"] for row in read(target)[-2:]]
    assert causes[0].startswith("line 21: not valid JSON")
    assert causes[1].startswith("line 22: expected a JSON object")


def test_the_same_rows_under_another_name_or_date_go_on(source, target, tmp_path):
    with pytest.raises(RuntimeError):
        score_with(stopping_after(2), source, target)
    moved = source.rename(tmp_path / "moved.jsonl")
    os.utime(moved, (0, 0))
    second = Stub()
    score_with(second, moved, target)
    assert second.asked[0].startswith("So 6"), "six rows were scored"


def test_what_the_backend_decided_is_told_to_it_again(source, target):
    told = []

    class Deciding(Stub):
        async def start(self, decided):
            told.append(dict(decided))
            return await super().start(decided)

    first = Deciding(stopping_after(2).before)
    with pytest.raises(RuntimeError):
        score_with(first, source, target)
    score_with(Deciding(), source, target)
    assert told == [{}, {"kernels": "those"}]
    assert first.closed == 1


def test_an_input_that_changes_while_it_is_scored_is_told(source, target):
    def grows(rows: object) -> None:
        with source.open("a") as file:
            file.write('{"prompt": "More?", "response": "Yes"}\n')

    with pytest.raises(DataError, match="it was changed while it was scored"):
        score_with(Stub(grows), source, target)
    assert not target.exists()


def test_a_full_disk_loses_nothing_that_was_kept(source, target, monkeypatch, caplog):
    append, calls = journal_module.append_text, []

    def full(path, text):
        calls.append(path)
        if len(calls) == 3:
            append(path, text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, text)

    monkeypatch.setattr(journal_module, "append_text", full)
    with pytest.raises(OSError, match="No space left"):
        score_with(Stub(), source, target)
    assert f"6 of 20 rows are scored and kept in {partial_of(target)}" in caplog.text
    second = Stub()
    score_with(second, source, target)
    assert second.asked[0].startswith("So 6")
    assert [row["id"] for row in read(target)] == list(range(20))


def test_a_disk_that_is_full_when_the_output_is_written_keeps_the_scores(source, target, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    monkeypatch.setattr(journal_module, "append_text", _append)
    monkeypatch.setattr(journal_module, "write_summed_json", lambda path, values: path.write_text(_summed(values)))
    with pytest.raises(OSError, match="No space left") as full:
        score_with(Stub(), source, target)
    assert full.value.filename == str(target)
    assert not target.exists()
    assert names_in(partial_of(target)) == [".lock", "scores.jsonl", "state.json"]
    monkeypatch.undo()
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 3)
    second = Stub()
    score_with(second, source, target)
    assert second.asked == []
    assert len(target.read_text().splitlines()) == 20


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def _summed(values: dict) -> str:
    plain = json.loads(json.dumps(dict(values)))
    return json.dumps({**plain, files.SUM: files.sha256_json(plain)})


def test_a_damaged_state_is_told_and_can_be_discarded(source, target):
    with pytest.raises(RuntimeError):
        score_with(stopping_after(2), source, target)
    (partial_of(target) / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON.*begin again with --restart"):
        score_with(Stub(), source, target)
    score_with(Stub(), source, target, ScoreSettings(restart=True))
    assert target.exists()


def test_two_processes_do_not_write_one_output(source, target, holder):
    holder(partial_of(target))
    with pytest.raises(ConfigError, match=f"{partial_of(target)} is being written by "):
        score_with(Stub(), source, target)


def test_of_processes_that_begin_at_once_one_goes_on_with_its_folder(source, target, holder, monkeypatch):
    real = file_module.only_process

    def late(folder, flag):
        holder(folder)
        return real(folder, flag)

    monkeypatch.setattr(file_module, "only_process", late)
    with pytest.raises(ConfigError, match="is being written by "):
        score_with(Stub(), source, target)
    assert partial_of(target).is_dir()


def test_a_mistake_leaves_no_folder(source, target, tmp_path):
    source.write_text('{"prompt": "How?"}\n')
    with pytest.raises(DataError):
        score_with(Stub(), source, target)
    source.write_text('{"prompt": "How?", "response": "So"}\n')
    with pytest.raises(RuntimeError):
        score_with(stopping_after(0), source, target)
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_lines_of_scores_that_come_twice_count_once(tmp_path):
    journal = Journal(tmp_path / "kept", {"input": "a"})
    journal.begin({})
    journal.append(0, [[0.5]])
    journal.append(1, ["no"])
    path = tmp_path / "kept/scores.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    again = Journal(tmp_path / "kept", {"input": "a"})
    assert list(again.outcomes()) == [[0.5], "no"]
    assert again.num_rows == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda line: b"\0" + line[1:],
        lambda line: line.replace(b"0.5", b"9.5"),
        lambda line: line.replace(b'"part": 0', b'"part": 7'),
        lambda line: b"5\n",
        lambda line: b'{"part":0,"typed":0,"rows":[[0.5]]}\n',
    ],
)
def test_a_damaged_line_costs_its_own_part_alone(tmp_path, caplog, change):
    journal = Journal(tmp_path / "kept", {"input": "a"})
    journal.begin({})
    for part, score in enumerate((0.5, 0.25, 0.125)):
        journal.append(part, [[score]])
    path = tmp_path / "kept/scores.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([change(first), *others]))
    again = Journal(tmp_path / "kept", {"input": "a"})
    assert [part in again for part in range(3)] == [False, True, True]
    assert "damaged in line 1; the rows of such lines are scored again" in caplog.text
    again.append(0, [[0.75]])
    for known in (again, Journal(tmp_path / "kept", {"input": "a"})):
        assert list(known.outcomes()) == [[0.75], [0.25], [0.125]]
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.35"))
    with pytest.raises(DataError, match="part 1 was damaged after it was written"):
        list(again.outcomes())


@pytest.mark.parametrize(("has_errors", "status"), [(False, 0), (True, 75)])
def test_a_signal_after_the_output_is_no_success_while_its_errors_are_to_be_judged(
    source, target, monkeypatch, has_errors, status
):
    if not has_errors:
        source.write_text('{"prompt": "How?", "response": "So."}\n')
    monkeypatch.setattr(file_module, "removed_at_end", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(RunInterrupted) as ended, ended_by_signals(BEGINS_ANEW):
        score_with(Stub(), source, target)
    assert target.exists()
    assert ended.value.exit_status == status
