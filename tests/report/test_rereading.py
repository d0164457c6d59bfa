"""A view of a run reads what is new, and shows what a reader of the whole folder would see."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rewardlab.core.files import append_text, write_text
from rewardlab.report import evaluations, rereading, watch
from rewardlab.report.folder import Record, read_folder, read_progress
from rewardlab.report.live import LivePage
from rewardlab.report.rereading import Known
from run_folders import score_rows, write_evaluation, write_run


def append_rows(path: Path, steps: range) -> None:
    """Rows as a run appends them."""
    header = path.read_text().splitlines()[0].split(",")
    for step in steps:
        append_text(path, ",".join({"step": str(step), "train_loss": "0.5"}.get(name, "") for name in header) + "\n")


def change_last_row(path: Path) -> None:
    """The record as an evaluation at the step of its last row leaves it: another file, with that row changed."""
    lines = path.read_text().splitlines()
    header, last = lines[0].split(","), lines[-1].split(",")
    last[header.index("train_loss")] = "0.25"
    write_text(path, "\n".join([*lines[:-1], ",".join(last)]) + "\n")


def tear_last_row(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


CHANGES: dict[str, Callable[[Path], object]] = {
    "rows come": lambda path: append_rows(path, range(50, 53)),
    "its last row changes": change_last_row,
    "rows come and the last one of before changes": lambda path: (
        append_rows(path, range(60, 62)),
        change_last_row(path),
    ),
    "its last row is torn": tear_last_row,
    "the rest of the torn row comes": lambda path: append_text(path, ",,,,,,,,\n"),
    "a damaged row comes": lambda path: append_text(path, "x,y\n"),
    "it is begun anew": lambda path: write_text(path, path.read_text().splitlines()[0] + "\n"),
    "it is empty": lambda path: write_text(path, ""),
    "it has a header without an end": lambda path: write_text(path, "step,train_loss"),
    "it has its first rows": lambda path: write_text(path, "step,train_acc\n1,0.5\n2,0.75\n"),
    "it is gone": Path.unlink,
}


def comparable(record: Record) -> tuple[Record, str]:
    """A record as one that equals another: NaN in its evaluations does not equal itself, its text does."""
    return replace(record, evaluations={}), repr(record.evaluations)


def test_what_is_read_again_is_what_a_new_reader_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "CHUNK_BYTES", 100)
    run, known = write_run(tmp_path / "run", reached=40), Known()
    assert comparable(read_folder(run, known)) == comparable(read_folder(run))
    for said, change in CHANGES.items():
        change(run / "metrics.csv")
        found, wanted = read_folder(run, known), read_folder(run)
        assert (said, found.rows, found.problems) == (said, wanted.rows, wanted.problems)
        assert comparable(read_folder(run, known)) == comparable(wanted), said


def test_an_evaluation_that_changes_is_read_again(tmp_path: Path) -> None:
    run, known = write_run(tmp_path / "run", reached=40), Known()
    read_folder(run, known)
    write_evaluation(run / "evals", "test", score_rows(12, shift=2.0))
    assert comparable(read_folder(run, known)) == comparable(read_folder(run))
    (run / "evals" / "test.scores.jsonl").write_text("{}\n")
    assert "does not match its checksum" in " ".join(read_folder(run, known).problems)
    assert comparable(read_folder(run, known)) == comparable(read_folder(run)), "also what is wrong is said again"


def test_a_frame_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read, frames = write_run(tmp_path / "run", reached=20), [], []

    def next_frame(seconds: float) -> None:
        frames.append(len(read))
        if len(frames) == 3:
            raise KeyboardInterrupt
        append_rows(run / "metrics.csv", range(20 + len(frames), 21 + len(frames)))

    of_row = rereading.MetricRows._row
    monkeypatch.setattr(rereading.MetricRows, "_row", lambda rows, values: read.append("row") or of_row(rows, values))
    of_file = evaluations.sha256_file
    monkeypatch.setattr(evaluations, "sha256_file", lambda path: read.append("scores") or of_file(path))
    monkeypatch.setattr(watch, "sleep", next_frame)
    with pytest.raises(KeyboardInterrupt):
        watch.watch(run, every_s=1.0, console=Console(file=io.StringIO()))
    assert frames == [frames[0], frames[0] + 1, frames[0] + 2]


def test_a_page_reads_only_the_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = write_run(tmp_path / "run", reached=20), []
    of_row = rereading.MetricRows._row
    monkeypatch.setattr(rereading.MetricRows, "_row", lambda rows, values: read.append(values) or of_row(rows, values))
    page = LivePage(folder=run, every_s=5, find_texts=None)
    page.bytes()
    before = len(read)
    append_rows(run / "metrics.csv", range(21, 22))
    page.bytes()
    assert len(read) == before + 1


def test_rows_are_what_a_dict_of_each_would_be_and_share_their_names(tmp_path: Path) -> None:
    """Rows of training, of evaluations, of both in two lines of one step, and with cells that hold no number."""
    names = ("step", "train_loss", "eval_accuracy", "lr")
    lines: list[dict[str, str]] = []
    for step in range(1, 61):
        lines.append({"step": str(step), "train_loss": f"{1 / step}", "lr": "" if step % 7 else "nan"})
        if step % 10 == 0:
            lines.append({"step": str(step), "eval_accuracy": f"{step / 100}", "train_loss": f"{2 / step}"})
    path = tmp_path / "metrics.csv"
    text = "".join(",".join(line.get(name, "") for name in names) + "\n" for line in lines)
    write_text(path, ",".join(names) + "\n" + text)
    wanted: dict[int, dict[str, float]] = {}
    for line in lines:
        values = {name: float(cell) for name, cell in line.items() if cell not in ("", "nan")}
        wanted.setdefault(int(line["step"]), {}).update(values)
    rows = rereading.MetricRows().read(path, [])
    assert [dict(row) for row in rows] == [wanted[step] for step in sorted(wanted)]
    assert rows[0] == wanted[1]
    assert ("lr" in rows[6], rows[6].get("lr"), len(rows[9]), list(rows[9])) == (False, None, 3, list(wanted[10]))
    with pytest.raises(KeyError, match="lr"):
        rows[6]["lr"]
    held = [row for row in rows if isinstance(row, rereading.MetricRow)]
    assert len(held) == 60
    assert len({id(row._place) for row in held}) == 2, "names are held once for all rows that have them"


def test_earlier_names_of_columns_are_looked_up_once_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "metrics.csv", []
    write_text(path, "step,train_acc\n" + "".join(f"{step},0.5\n" for step in range(9)))
    of_name = rereading.current_column
    monkeypatch.setattr(rereading, "current_column", lambda name: asked.append(name) or of_name(name))
    rows = rereading.MetricRows().read(path, [])
    assert ([*rows[8].items()], len(rows), asked) == ([("step", 8), ("train_accuracy", 0.5)], 9, ["step", "train_acc"])


def test_rows_beyond_those_that_are_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "MOST_ROWS", 2)
    record = read_folder(write_run(tmp_path / "run", reached=40))
    assert len(record.rows) == 2
    assert "metrics.csv: only its first 2 rows are read." in record.problems


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_how_far_a_run_is_stands_at_the_end_of_its_record(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "END_BYTES", 1000)
    run = write_run(tmp_path / "run", steps=900, reached=40)
    path = run / f"metrics.{suffix}"
    if suffix == "csv":
        append_rows(path, range(41, 501))
    else:
        (run / "metrics.csv").unlink()
        write_text(path, "".join(f'{{"step": {step}, "train_loss": 0.5}}\n' for step in range(1, 501)))
    assert path.stat().st_size > 4 * rereading.END_BYTES

    def whole(*anything: object) -> None:
        raise AssertionError("the whole record is read")

    with monkeypatch.context() as patched:
        patched.setattr(rereading.MetricRows, "read", whole)
        found = read_progress(run)
        assert found is not None
        assert (found.step, found.num_steps, [sign.step for sign in found.signs]) == (500, 900, [10])
        tear_last_row(path)
        found = read_progress(run)
        assert found is not None
        assert found.step == 499
    assert read_folder(run).step == 499
    path.write_bytes(b"\xff\xfe,,\n" * 3)
    found = read_progress(run)
    assert found is not None
    assert found.step == read_folder(run).step == 0
    assert read_progress(tmp_path / "nothing") is None
