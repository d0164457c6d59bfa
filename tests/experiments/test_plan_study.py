"""Studies: a frozen plan cannot be changed unnoticed, and amendments say why and what had been seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from rewardlab.core.errors import ConfigError, DataError, RankError
from rewardlab.core.files import read_summed_json, sha256_file, write_json, write_summed_json
from rewardlab.core.spec import SPEC_FILE
from rewardlab.experiments import lengths, many_ranks
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.gates import select
from rewardlab.experiments.log import LOG, read_log
from rewardlab.experiments.many_ranks import arguments_of_first
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.records import _left_to_the_run, record_of, settings_hash, settings_path
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.study import amend, begun_and_judged, freeze, open_study
from study_folders import do_all, edit, finished_study, frozen_study, train_by_hand, write_plan

# --- freezing ----------------------------------------------------------------------------------------------------


def test_a_plan_that_was_edited_after_it_was_frozen_is_refused(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    edit(study.folder, "accuracy(plain) - 0.05", "accuracy(plain) - 0.10")
    with pytest.raises(ConfigError, match="is not the plan that was frozen.*rewardlab plan amend"):
        open_study(study.folder)


def test_the_frozen_copy_cannot_be_changed_either(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    for path in (study.folder / "plan.yaml", study.folder / "frozen" / "plan.1.yaml"):
        path.write_text(path.read_text(encoding="utf-8") + "\n# later\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not the plan that was frozen"):
        open_study(study.folder)


def test_a_changed_log_is_noticed(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    study.note("gate passed", phase="main", reason="because", state="closed")
    study.note("redone", run="plain/seed_0")
    path = study.folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace("because", "it was fine"), lines[2]]), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3 does not follow"):
        open_study(study.folder)
    path.write_text("".join([lines[0], lines[2]]), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2 does not follow"):
        read_log(study.folder)


def test_a_folder_is_frozen_once(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    with pytest.raises(ConfigError, match="a plan is frozen there"):
        freeze(tmp_path / "plan.yaml", study.folder)
    with pytest.raises(ConfigError, match="is a plan that is not frozen"):
        open_study(tmp_path / "plan.yaml")


def test_a_plan_is_not_frozen_into_the_folder_of_a_run(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "manifest.json", {"config_hash": "", "provenance": {}})
    with pytest.raises(ConfigError, match="holds a run or an evaluation"):
        freeze(plan, run)
    assert [path.name for path in run.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("gpus", "jobs", "message"),
    [
        (("0,1",), 1, "--gpus 0,1: name each GPU by its number"),
        (("cuda:0",), 1, "--gpus cuda:0: name each GPU by its number"),
        (("0", "1"), 1, "--gpus 0 1: with --jobs 1 only 1 of them would be used. Add --jobs 2"),
    ],
)
def test_gpus_that_runs_would_not_get_are_refused(gpus: tuple[str, ...], jobs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(study=Path("study"), gpus=gpus, jobs=jobs)
    RunConfig(study=Path("study"), gpus=("0", "GPU-8932f937-d72c"), jobs=4)


def test_data_that_change_after_freezing_are_refused(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "other", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"train.jsonl: is not the file that the plan was frozen with"):
        do(study, study.runs[0], train_by_hand("plain", 0.7))
    assert record_of(study, study.runs[0]).state == "waiting"


def test_test_data_that_are_trained_on_are_refused_under_any_name(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    (tmp_path / "test.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    with pytest.raises(DataError, match="is read as dataset too"):
        freeze(path, tmp_path / "study")


# --- amending ----------------------------------------------------------------------------------------------------


def test_an_amendment_keeps_what_changed_why_and_what_had_been_seen(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    edit(study.folder, "accuracy(plain) - 0.05", "accuracy(plain) - 0.10")
    amended = amend(study.folder, reason="a typing mistake", seen="nothing-run", begun=False, judged=False)
    assert amended.version == 2
    (entry,) = amended.amendments
    assert (entry["reason"], entry["seen"]) == ("a typing mistake", "nothing-run")
    assert [line[0] for line in entry["changes"]] == ["-", "+"]
    assert "0.10" in amended.plan.hypotheses["keeps"].claim
    first = study.folder / "frozen" / "plan.1.yaml"
    assert "accuracy(plain) - 0.05" in first.read_text(encoding="utf-8"), "the frozen text stays"


def test_an_amendment_cannot_deny_what_was_seen(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:1])
    edit(study.folder, "accuracy(plain) - 0.05", "accuracy(plain) - 0.10")
    begun, judged = begun_and_judged(study.folder)
    assert (begun, judged) == (True, True)
    for seen in ("nothing-run", "no-results"):
        with pytest.raises(ConfigError, match="runs have been judged"):
            amend(study.folder, reason="why", seen=seen, begun=begun, judged=judged)
    assert amend(study.folder, reason="why", seen="results", begun=begun, judged=judged).version == 2


@pytest.mark.parametrize("ends", ["redone", "cleared", "damaged"])
def test_results_of_a_run_that_is_done_again_were_there_all_the_same(tmp_path: Path, ends: str) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    do_all(study, [run])
    redo(study, run)
    if ends != "redone":
        with pytest.raises(OSError, match="no disk"):
            do(open_study(study.folder), run, _fails)
        assert not (study.run_folder(run) / "evals").exists()
    if ends == "damaged":
        (study.folder / "records" / f"{run.name}.json").write_text("{", encoding="utf-8")
    assert begun_and_judged(study.folder) == (True, True)


def _fails(arguments: Sequence[str]) -> None:
    raise OSError("no disk")


def test_an_amendment_needs_a_reason_and_a_change(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    with pytest.raises(ConfigError, match="is as it was"):
        amend(study.folder, reason="why", seen="results", begun=False, judged=False)
    edit(study.folder, "0.05", "0.10")
    with pytest.raises(ConfigError, match="say why"):
        amend(study.folder, reason=" ", seen="results", begun=False, judged=False)


@pytest.mark.slow
def test_runs_of_other_settings_are_outdated_and_done_again_only_when_asked(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    edit(study.folder, "lr: 0.01", "lr: 0.02")
    amended = amend(study.folder, reason="too harsh", seen="results", begun=True, judged=True)
    run = amended.run_named("harsh/seed_0")
    assert record_of(amended, run).state == "outdated"
    assert record_of(amended, amended.run_named("plain/seed_0")).state == "done"
    with pytest.raises(
        ConfigError, match=r"was begun with other settings than the plan has now: lr .*, now .*\. Do it"
    ):
        do(amended, run, train_by_hand("harsh", 0.6))
    do(amended, run, train_by_hand("harsh", 0.6), again=True)
    assert record_of(amended, run).state == "done"
    assert open_study(amended.folder).entries[-1]["kind"] == "redone"


@pytest.mark.parametrize(
    ("before", "state"),
    [
        ({"gone": 1}, "done"),
        ({"gone": 1, "track_gpu": None}, "done"),
        ({"gone": 1, "max_grad_norm": 2.0}, "outdated"),
        ({"micro_token_budget": 8192}, "done"),
        ({"max_seq_len": 1024}, "done"),
        ({"max_seq_len": 512}, "outdated"),
    ],
    ids=[
        "a setting that is no more",
        "one that came",
        "a default that changed",
        "a default that the run decides now",
        "a length that the run decides now",
        "another length",
    ],
)
def test_settings_that_versions_add_or_drop_make_no_run_outdated(tmp_path: Path, before: dict, state: str) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:1])
    run = study.runs[0]
    settings = {name: value for name, value in {**run.settings, **before}.items() if before.get(name, 0) is not None}
    write_json(settings_path(study, run), {**settings, "output_dir": "x"})
    record = tmp_path / "study" / "records" / f"{run.name}.json"
    of_then = {**read_summed_json(record), "settings": settings_hash(replace(run, settings=settings))}
    write_summed_json(record, of_then)
    found = record_of(study, run)
    assert found.state == state
    if state == "outdated":
        name = list(before)[-1]
        assert found.message.endswith(f"now: {name} {before[name]}, now {run.settings[name]!r}")
    write_json(settings_path(study, run), {**settings, "gone": 2})
    found = record_of(study, run)
    assert found.state == "outdated", "the file is not what the run began with"
    assert found.message.endswith("Which, cannot be read from its file of settings")


@pytest.mark.parametrize(("limit", "left"), [(1024, ["max_seq_len"]), (256, [])])
def test_a_reward_model_may_have_another_length_limit_than_an_earlier_version_wrote_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, left: list[str]
) -> None:
    spec = SimpleNamespace(renderer=SimpleNamespace(max_length=limit))
    monkeypatch.setattr(lengths, "read_spec", lambda folder: spec)
    now, then = {"max_seq_len": "auto", "model": str(tmp_path)}, {"max_seq_len": 1024}
    assert _left_to_the_run({**now, "micro_token_budget": 8192}, then) == ["max_seq_len"]
    (tmp_path / SPEC_FILE).touch()
    assert _left_to_the_run({**now, "micro_token_budget": 8192}, then) == left
    assert _left_to_the_run(now, then) == ["micro_token_budget", *left]
    # A reward model of the hub is looked up in its cache, also at a revision.
    cached = {("org/rm", SPEC_FILE, None): str(tmp_path / SPEC_FILE), ("org/rm", SPEC_FILE, "v1"): str(tmp_path)}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda model, name, revision: cached.get((model, name, revision))
    )
    on_hub = {**now, "micro_token_budget": 8192}
    for model, expected in (("org/rm", left), ("org/rm@v1", left), ("org/base", ["max_seq_len"])):
        assert _left_to_the_run({**on_hub, "model": model}, then) == expected


def test_runs_of_other_data_are_outdated_too_and_the_amendment_says_so(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:2])
    rows = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:10]), encoding="utf-8")
    edit(study.folder, "title: What", "title: Whatever")
    amended = amend(study.folder, reason="half the rows", seen="results", begun=True, judged=True)
    found = record_of(amended, amended.runs[0])
    assert (found.state, "train.jsonl" in found.message) == ("outdated", True)
    assert amended.amendments[0]["data_changed"] == [str(tmp_path / "train.jsonl")]
    assert "Files were changed with it: " in summarise(amended).amendments[0].text
    do(amended, amended.runs[0], train_by_hand("plain", 0.7), again=True)
    assert record_of(amended, amended.runs[0]).is_over


def test_a_winner_that_alone_is_judged_can_be_run(tmp_path: Path) -> None:
    text = """\
question: Which rate?
base: {model: a-model-3b, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
phases:
- {name: search, seeds: [0], search: {grid: {lr: [1.0e-6, 1.0e-5]}}}
- {name: judged, arms: [winner], seeds: [10, 11]}
hypotheses: {good: accuracy(winner) > 0.6}
"""
    study = frozen_study(tmp_path, text)
    do_all(study, study.runs)
    select(study, study.plan.phases[0])
    study = open_study(study.folder)
    do_all(study, [run for run in study.runs if run.arm == "winner"])
    assert all(record_of(study, run).is_over for run in study.runs)
    (tmp_path / "test.jsonl").write_text((tmp_path / "train.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(DataError, match="is read as dataset too"):
        freeze(tmp_path / "plan.yaml", tmp_path / "other")


# --- runs --------------------------------------------------------------------------------------------------------


def test_a_run_that_is_done_is_left_alone_and_a_failure_is_kept(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run, other = study.runs[:2]

    def fails(arguments: object) -> None:
        raise DataError("no such file")

    with pytest.raises(DataError):
        do(study, run, fails)
    assert (record_of(study, run).state, record_of(study, run).message) == ("failed", "DataError: no such file")
    do(study, run, train_by_hand("plain", 0.7))
    do(study, run, fails)
    assert (record_of(study, run).state, record_of(study, run).attempts) == ("done", 2)
    with pytest.raises(DataError, match="left no evals/test.scores.jsonl"):
        do(study, other, lambda arguments: None)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    asked: list[list[str]] = []

    def stops(arguments: list[str]) -> None:
        asked.append(list(arguments))
        raise SystemExit(75)

    with pytest.raises(SystemExit):
        do(study, run, stops)
    assert record_of(study, run).state == "interrupted"
    with pytest.raises(SystemExit):
        do(study, run, stops)
    assert all(words[-2:] == ["--resume", "auto"] for words in asked)


def test_the_test_data_are_read_once_by_each_model_on_record(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    do(study, run, train_by_hand("plain", 0.7))
    (read,) = record_of(study, run).test_reads
    assert read["scores"] == sha256_file(study.run_folder(run) / "evals" / "test.scores.jsonl")
    redo(study, run)
    do(study, run, train_by_hand("other", 0.9))
    assert len(record_of(study, run).test_reads) == 2, "and the second is on record"
    assert open_study(study.folder).entries[-1]["test_reads"] == [read]


def test_another_rank_trains_what_the_first_one_tells_and_writes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    first: list[list[str]] = []
    other: list[list[str]] = []

    def trains(arguments: list[str]) -> None:
        first.append(arguments)
        state = record_of(study, run)
        monkeypatch.setenv("RANK", "1")
        do(study, run, other.append)
        assert record_of(study, run) == state, "the others write no record"
        monkeypatch.setenv("RANK", "0")
        train_by_hand("plain", 0.7)(arguments)

    do(study, run, trains)
    assert first == other
    do(study, run, lambda arguments: pytest.fail("it is done"))
    monkeypatch.setenv("RANK", "1")
    do(study, run, lambda arguments: pytest.fail("the others are told that there is nothing to do"))


def test_another_rank_waits_for_this_start_of_the_first_and_ends_if_that_one_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    for name, value in {"WORLD_SIZE": "2", "MASTER_PORT": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "test.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError):
        do(study, run, train_by_hand("plain", 0.7))
    with pytest.raises(RankError, match="the first process of this run ended: .*test.jsonl: is not the file"):
        arguments_of_first(study, run, wait_s=1.0)
    monkeypatch.setenv("MASTER_PORT", "2")
    with pytest.raises(RankError, match="told nothing within 0.3 s"):
        arguments_of_first(study, run, wait_s=0.3)


@pytest.mark.parametrize("elastic", [False, True])
def test_ranks_started_by_hand_find_each_other_and_those_of_another_torchrun_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    by_hand = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1", "RANK": "0"}
    for name, value in (by_hand | ({"TORCHELASTIC_RUN_ID": "none"} if elastic else {})).items():
        monkeypatch.setenv(name, value)
    do(study, run, train_by_hand("plain", 0.7))
    monkeypatch.setattr(many_ranks.os, "getppid", lambda: 1)
    if elastic:
        with pytest.raises(RankError, match="told nothing within 0.3 s"):
            arguments_of_first(study, run, wait_s=0.3)
    else:
        assert arguments_of_first(study, run, wait_s=0.3)


@pytest.mark.slow
def test_a_rank_that_waits_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    study = frozen_study(tmp_path)
    monkeypatch.setattr(many_ranks, "SAY_AFTER_S", 0.0)
    with caplog.at_level("INFO", logger="rewardlab"), pytest.raises(RankError, match="told nothing"):
        arguments_of_first(study, study.runs[0], wait_s=0.5)
    (said,) = [record.message for record in caplog.records if "waiting for the first process" in record.message]
    assert study.runs[0].name in said
