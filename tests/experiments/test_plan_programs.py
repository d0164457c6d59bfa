"""Files of arms that are other programs: frozen with the plan and kept in the study."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import tarfile
from pathlib import Path

import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.experiments import programs
from rewardlab.experiments.archiving import archive
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.one_run import do
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.records import record_of
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.study import Study, amend, require_same_data
from study_folders import PLAN, edit, frozen_study

PROGRAMS = {"{plan_folder}/loop.py": "loop.py", "--rates={plan_folder}/rates.json": "rates.json"}


@pytest.mark.parametrize("word", PROGRAMS)
def test_the_files_of_a_program_are_frozen_with_the_plan_and_kept(tmp_path: Path, word: str) -> None:
    named = tmp_path / PROGRAMS[word]
    named.write_text("as it was frozen", encoding="utf-8")
    words = json.dumps(
        ["{python}", "-c", "import sys; sys.exit(5)" + "#" * 5000, word, "/no/such/file", "{output_dir}"]
    )
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    assert {Path(name).name for name in study.data} == {"train.jsonl", "test.jsonl", named.name}
    assert named.name in {Path(name).name for name in study.data_of(study.run_named("plain/seed_0"))}
    assert named.name not in {Path(name).name for name in study.data_of(study.run_named("smooth/seed_0"))}

    named.write_text("edited", encoding="utf-8")
    with pytest.raises(DataError, match=f"{named.name}: is not the file .*from its copy") as refused:
        do(study, study.run_named("plain/seed_0"), lambda arguments: None)
    assert Path(re.search(r"copy (\S+);", str(refused.value))[1]).read_text("utf-8") == "as it was frozen"

    amended = amend(study.folder, reason="a fault in it", seen="no-results", begun=True, judged=False)
    assert amended.amendments[0]["data_changed"] == [str(named)]
    with pytest.raises(SystemExit):
        do(amended, amended.run_named("plain/seed_0"), lambda arguments: None)
    with tarfile.open(archive(amended, tmp_path / "all.tar.gz", weights=False).path) as tar:
        kept = [tar.extractfile(name).read() for name in tar.getnames() if name.endswith(named.name)]
    assert sorted(kept) == [b"as it was frozen", b"edited"]
    with pytest.raises(ConfigError, match="is as it was"):
        amend(study.folder, reason="nothing", seen="no-results", begun=True, judged=False)


def test_a_file_that_a_program_writes_keeps_no_run_back_and_is_not_frozen_by_an_amendment(tmp_path: Path) -> None:
    output = tmp_path / "out.log"
    words = json.dumps(["{python}", "loop.py", f"--log={output}"])
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    output.write_text("of the first run", encoding="utf-8")
    require_same_data(study)
    with pytest.raises(ConfigError, match="is as it was"):
        amend(study.folder, reason="nothing", seen="no-results", begun=True, judged=False)
    edit(study.folder, "title: What", "title: Whatever")
    amended = amend(study.folder, reason="clearer", seen="no-results", begun=True, judged=False)
    assert str(output) not in amended.data
    output.write_text("of the second run", encoding="utf-8")
    require_same_data(amended)


def test_files_that_were_missing_at_freezing_are_a_change_before_any_run(tmp_path: Path) -> None:
    words = json.dumps(["{python}", "{plan_folder}/loop.py"])
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    (tmp_path / "loop.py").write_text("pass", encoding="utf-8")
    amended = amend(study.folder, reason="forgotten", seen="nothing-run", begun=False, judged=False)
    assert amended.amendments[0]["data_changed"] == [str(tmp_path / "loop.py")]
    assert str(tmp_path / "loop.py") in amended.data


def test_copies_of_programs_are_whole_and_not_of_large_files(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(programs, "MAX_COPIED_BYTES", 10)
    (tmp_path / "loop.py").write_text("pass", encoding="utf-8")
    (tmp_path / "large.bin").write_bytes(b"0" * 11)
    words = json.dumps(["{python}", "{plan_folder}/loop.py", "--data={plan_folder}/large.bin"])
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    loop, large = (str(tmp_path / name) for name in ("loop.py", "large.bin"))
    assert large in study.data
    assert "large.bin: is larger than" in caplog.text
    assert [path.name for path in (study.folder / "frozen" / "programs").rglob("*") if path.is_file()] == ["loop.py"]

    kept = programs.copy_of(study.folder, loop, study.data[loop])
    kept.write_text("pa", encoding="utf-8")  # As a freeze leaves it that is killed while it copies.
    programs.keep_programs(study.runs, tmp_path, study.data, study.folder)
    assert kept.read_text(encoding="utf-8") == "pass"
    with pytest.raises(DataError, match=r"loop.py: changed while it was being frozen"):
        programs.keep_programs(study.runs, tmp_path, {**study.data, loop: "0" * 64}, study.folder)


def test_an_interpreter_that_is_named_by_its_path_is_not_frozen(tmp_path: Path) -> None:
    words = json.dumps([sys.executable, "-c", "pass"])
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    assert {Path(name).name for name in study.data} == {"train.jsonl", "test.jsonl"}


def test_a_program_that_failed_is_not_judged_by_what_it_left_when_it_is_done_again(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import pathlib, sys\n"
        "mark, scores = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]) / 'evals/test.scores.jsonl'\n"
        "if mark.exists(): sys.exit(0)\n"
        "mark.touch(); scores.parent.mkdir(exist_ok=True); scores.write_text('of the first try'); sys.exit(3)\n",
        encoding="utf-8",
    )
    words = json.dumps(["{python}", "{plan_folder}/loop.py", str(tmp_path / "mark"), "{output_dir}"])
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    run = study.run_named("plain/seed_0")
    with pytest.raises(SystemExit):
        do(study, run, lambda arguments: None)
    left = study.run_folder(run) / "evals/test.scores.jsonl"
    assert left.exists()
    with contextlib.suppress(ConfigError, DataError):
        do(study, run, lambda arguments: None)
    assert not left.exists()


def by_programs(folder: Path, code: str, *more: str) -> Study:
    """A study all of whose arms are a program, of which nothing is done; the program gets the folder of its run."""
    (folder / "loop.py").write_text(code, encoding="utf-8")
    words = json.dumps(["{python}", "{plan_folder}/loop.py", "{output_dir}", "{seed}", *more])
    return frozen_study(folder, re.sub(r"(?m)^(  \w+: {)(?=says)", rf"\1program: {words}, ", PLAN))


LEAVES_SCORES = """\
import json, pathlib, sys
scores = pathlib.Path(sys.argv[1]) / "evals/test.scores.jsonl"
scores.parent.mkdir()
with scores.open("w") as file:
    for n in range(60):
        for reply in (0, 1):
            row = {"preference_id": str(n), "source": "", "prompt_key": str(n), "reply": reply, "num_tokens": 20}
            row |= {"score": float(reply == (n % 10 + int(sys.argv[2]) < 3)), "prompt_tokens": 9, "truncated_tokens": 0}
            row["comparisons"] = [{"first": 0, "second": 1}] if reply == 0 else []
            file.write(json.dumps(row) + "\\n")
"""


def test_the_scores_that_a_program_leaves_are_all_that_is_needed_to_judge_it(tmp_path: Path) -> None:
    study = by_programs(tmp_path, LEAVES_SCORES)
    for run in study.runs[:3]:
        do(study, run, lambda arguments: None)
    term = Term(quantity="accuracy", arm="plain")
    found, missing = Outcomes(study, may_read="test").observe([term])
    assert missing == {}
    assert found[term].by_seed_S == pytest.approx([0.7, 0.8, 0.9])
    methods = summarise(study).methods
    assert methods.startswith("Reward models were trained in 1 arm of 3 seeds (0, 1, 2). 1 of the arms was run by")


def test_of_several_ranks_the_first_runs_a_program_alone_and_the_others_wait_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may take days, and may be told by a signal to every rank that it has to end."""
    refuses = "import os\nassert not {'RANK', 'WORLD_SIZE', 'LOCAL_RANK'} & {*os.environ}\n"
    study = by_programs(tmp_path, refuses + LEAVES_SCORES)
    run = study.runs[0]
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []

    def waits(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) < 5:
            os.kill(os.getpid(), signal.SIGUSR2)
            return
        monkeypatch.setenv("RANK", "0")
        do(study, run, lambda arguments: None)

    monkeypatch.setattr("rewardlab.experiments.many_ranks.time.sleep", waits)
    hours = itertools.count(step=3600)
    monkeypatch.setattr("rewardlab.experiments.many_ranks.time.monotonic", lambda: float(next(hours)))
    do(study, run, lambda arguments: None)
    assert len(waited) == 5
    assert record_of(study, run).state == "done"


@pytest.mark.parametrize("reads", [False, True])
def test_an_advice_has_been_tried_by_a_program_only_if_it_reads_the_settings(reads: bool, tmp_path: Path) -> None:
    study = by_programs(tmp_path, LEAVES_SCORES.replace("float(reply", "9.0 * (reply"), "{settings}" if reads else "")
    for run in study.runs:
        do(study, run, lambda arguments: None)
    (said,) = [one.do for one in summarise(study).advice if one.do.startswith("Train with --label-smoothing")]
    assert ("Tried in this study" in said) is reads


def test_a_program_whose_scores_cannot_be_read_failed(tmp_path: Path) -> None:
    study = by_programs(tmp_path, LEAVES_SCORES.replace('"reply": reply', '"answer": reply'))
    with pytest.raises(DataError, match=r"test\.scores\.jsonl: not the rows of an evaluation"):
        do(study, study.runs[0], lambda arguments: None)
    assert record_of(study, study.runs[0]).state == "failed"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("range(60)", "range(0)"), "holds no rows, so there is nothing to judge. The program has to write a row for"),
        (("if reply == 0 else []", "if reply > 1 else []"), "no row has a comparison, so there is nothing to judge"),
        (("for reply in (0, 1):", "for reply in (0,):"), "compares reply 0 with reply 1, which has no score row"),
    ],
)
def test_a_program_whose_scores_hold_nothing_to_judge_failed(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    study = by_programs(tmp_path, LEAVES_SCORES.replace(*change))
    with pytest.raises(DataError, match=rf"test\.scores\.jsonl: .*{why}"):
        do(study, study.runs[0], lambda arguments: None)
    assert record_of(study, study.runs[0]).state == "failed"
    assert why in record_of(study, study.runs[0]).message
