"""`rewardlab report` and `rewardlab watch` from their command lines, with torch never loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import refusal, short_run
from common import write_pairs
from rewardlab.cli import main
from rewardlab.report import build
from run_folders import score_rows, write_evaluation, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


def test_report_writes_a_page_markdown_and_a_card_and_names_them(run, capsys):
    main(["report", str(run), "--card"])
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {run / 'report.html'}",
        f"wrote {run / 'report.md'}",
        f"wrote {run / 'best/README.md'}",
    ]
    assert "Bad answer" in (run / "report.html").read_text()


def test_texts_can_be_left_out(run, tmp_path, capsys):
    main(["report", str(run), "--no-texts", "--output-dir", str(tmp_path)])
    assert "Bad answer" not in (tmp_path / "report.html").read_text()
    assert "Its text was not found" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.splitlines() == [f"wrote {tmp_path / name}" for name in ("report.html", "report.md")]


@pytest.mark.slow
def test_several_runs_are_set_side_by_side(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", reached=20)
    main(["report", str(run), str(other), "--output-dir", str(tmp_path), "--mistakes", "0"])
    text = (tmp_path / "report.md").read_text()
    assert "# 2 reward models" in text
    assert text.index("## All runs") < text.index("## mine") < text.index("## other")


def test_watch_prints_one_frame(run, capsys):
    main(["watch", str(run), "--once"])
    assert "Finished at step 40 of 40." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "RUNS is missing"),
        (["report", "gone"], "gone: not found. Name the folder of a run."),
        (["report", "."], "holds nothing that `rewardlab train`, `probe` or `eval` wrote"),
        (["report", ".", "--mistakes", "-1"], "--mistakes"),
        (["watch"], "RUN is missing"),
        (["watch", "gone"], "gone: not found"),
        (["watch", ".", "--once"], "holds nothing that"),
        (["watch", ".", "--once", "--port", "0"], "--once and --port: choose one"),
        (["watch", ".", "--port", "70000"], "--port 70000"),
        (["watch", ".", "--every", "0"], "--every 0"),
    ],
)
def test_mistakes_are_refused_in_words(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(capsys, *arguments)


def test_the_same_run_twice_is_told_apart(run, tmp_path):
    main(["report", str(run), str(run), "--output-dir", str(tmp_path)])
    assert "# 2 reward models" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_neither_command_loads_torch(run, tmp_path):
    calls = [["report", str(run), "--output-dir", str(tmp_path)], ["watch", str(run), "--once"]]
    script = (
        f"import sys; from rewardlab.cli import main; [main(call) for call in {calls!r}]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_a_report_that_is_not_ours_is_replaced_only_when_asked(run, tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")
    line = ["report", str(run), "--output-dir", str(tmp_path)]
    assert f"holds {name}, which `rewardlab report` did not write" in refusal(capsys, *line)
    assert (tmp_path / name).read_text() == "mine"
    main([*line, "--overwrite"])
    assert (tmp_path / name).read_text() != "mine"
    main(line)


def test_the_report_of_several_needs_a_place_of_its_own(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", reached=20)
    assert "--output-dir is missing" in refusal(capsys, "report", str(other), str(run))
    assert not (other / "report.html").exists()


def test_the_report_of_another_run_is_replaced_only_when_asked(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", reached=20)
    main(["report", str(other)])
    own = (other / "report.md").read_text()
    told = refusal(capsys, "report", str(run), "--output-dir", str(other))
    assert told.startswith(f"{other} holds another run, and report.html and report.md about it.")
    assert (other / "report.md").read_text() == own
    main(["report", str(run), str(other), "--output-dir", str(other), "--mistakes", "0"])
    main(["report", str(run), "--output-dir", str(other), "--overwrite", "--mistakes", "0"])
    assert (other / "report.md").read_text() != own


@pytest.mark.slow
def test_the_folder_of_several_models_is_reported_as_they_are(tmp_path, capsys, log):
    manifest = json.dumps({"config": {"model": "m"}, "data": [], "tokens": {}, "provenance": {}})
    for name in ("a", "b"):
        write_evaluation(tmp_path / name, "eval", score_rows())
        (tmp_path / name / "manifest.json").write_text(manifest)
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "models.json").write_text(json.dumps({"b": {}, "gone": {}, "../a": {}, "a": {}}))
    main(["report", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "# 2 reward models" in text
    assert text.index("## All runs") < text.index("## b") < text.index("## a")
    assert "models.json names gone, of which nothing is there" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_ends_with_its_report(base_model, tmp_path, verified_here, capsys):
    data, folder = write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run"
    main([*map(str, short_run(base_model, folder)), "--dataset", str(data)])
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert "Finished at step 2 of 2." in (folder / "report.md").read_text()


@pytest.mark.slow
def test_a_run_whose_report_cannot_be_written_has_ended_well_all_the_same(
    base_model, tmp_path, verified_here, capsys, monkeypatch
):
    def fails(*_, **__):
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr(build, "write_report", fails)
    data, folder = write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run"
    main([*map(str, short_run(base_model, folder)), "--dataset", str(data)])
    said = capsys.readouterr().err.strip()
    assert said.startswith("report.html was not written: report.html: No space left on device. Make room there,")
    assert said.endswith(f"To try again: rewardlab report {folder}")
    assert (folder / "report.txt").exists()
