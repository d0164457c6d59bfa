"""The files that a plan freezes are those that its runs read, however they are named; other ones make runs outdated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rewardlab.core.errors import DataError
from rewardlab.core.files import write_json, write_summed_json
from rewardlab.experiments.checking import check
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.records import record_of
from rewardlab.experiments.study import Study, amend, open_study, require_same_data
from study_folders import PLAN, do_all, finished_study, frozen_study, train_by_hand, with_arm, write_plan

NAMED = "dataset: [train.jsonl], test_dataset: [test.jsonl]"
ROW = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'
OTHER = ROW.replace("p", "q", 1)


def amended(study: Study) -> Study:
    return amend(study.folder, reason="other files", seen="results", begun=True, judged=True)


@pytest.mark.parametrize(
    ("said", "files"),
    [
        ("dataset: [pairs], test_split: test", ("pairs.test.jsonl", "pairs.train.jsonl")),
        ("dataset: [a/pairs], test_dataset: [./a/pairs]", ("a/pairs.test.jsonl", "a/pairs.train.jsonl")),
        (
            "dataset: [pairs], test_dataset: [pairs]",
            ("pairs/test.jsonl", "pairs/train-00000-of-00002.jsonl", "pairs/train-00001-of-00002.jsonl"),
        ),
    ],
)
def test_files_that_a_name_and_a_split_mean_are_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, files: Sequence[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(ROW * (number + 1), encoding="utf-8")
    path = write_plan(tmp_path, PLAN.replace(NAMED, said))
    found = check(read_plan(path))
    assert (found.num_comparisons, found.errors) == (1, [])
    study = frozen_study(tmp_path, PLAN.replace(NAMED, said))
    assert tuple(study.data) == files
    require_same_data(study)
    for name in files:
        (tmp_path / name).write_text(OTHER, encoding="utf-8")
        with pytest.raises(DataError, match=f"^{name}: is not the file that the plan was frozen with"):
            require_same_data(study)
        (tmp_path / name).write_text(ROW * (files.index(name) + 1), encoding="utf-8")


@pytest.mark.parametrize("file", ["own.jinja", "tokenizer/chat_template.jinja", "tokenizer/tokenizer_config.json"])
def test_the_chat_template_that_runs_name_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{{ messages }}", encoding="utf-8")
    study = frozen_study(tmp_path, with_arm(f"chat_template: {file.partition('/')[0]}"))
    assert file in study.data
    assert [file in study.data_of(run) for run in study.runs if run.seed == 0] == [False, True, False]
    (tmp_path / file).write_text("{{ messages[0] }}", encoding="utf-8")
    with pytest.raises(DataError, match=f"^{file}: is not the file that the plan was frozen with"):
        require_same_data(study)


def test_test_rows_under_another_split_that_are_trained_on_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        (tmp_path / f"pairs.{split}.jsonl").write_text(ROW, encoding="utf-8")
    with pytest.raises(DataError, match=r"^pairs.test.jsonl: is read as dataset too"):
        frozen_study(tmp_path, PLAN.replace(NAMED, "dataset: [pairs], test_split: test"))


def test_a_run_is_outdated_once_a_file_came_to_its_folder_of_data_or_went(tmp_path: Path) -> None:
    rows, more = tmp_path / "rows", tmp_path / "rows" / "more.jsonl"
    rows.mkdir()
    (rows / "train.jsonl").write_text(ROW, encoding="utf-8")
    study = frozen_study(tmp_path, PLAN.replace("[train.jsonl]", f"[{rows}]"))
    first, second = study.runs[:2]
    do_all(study, [first])
    more.write_text(ROW, encoding="utf-8")
    study = amended(study)
    assert record_of(study, first).state == "outdated"
    assert str(more) in record_of(study, first).message
    do_all(study, [second])
    more.unlink()
    study = amended(study)
    assert (record_of(study, first).state, record_of(study, second).state) == ("done", "outdated")
    (rows / "train.jsonl").unlink()
    assert record_of(study, first).state == "done", "a study can be looked at where its data are not"


def test_files_of_another_arm_in_the_same_folder_make_no_run_outdated(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:1])
    beside = tmp_path / "train.jsonl.more.jsonl"
    beside.write_text(ROW, encoding="utf-8")
    path = study.folder / "plan.yaml"
    text = path.read_text(encoding="utf-8").replace("lr: 0.01}", f"lr: 0.01, dataset: [{beside}]}}")
    path.write_text(text, encoding="utf-8")
    study = amended(study)
    assert str(beside) in study.data
    assert record_of(study, study.runs[0]).is_over


def test_a_model_in_a_folder_that_changes_after_freezing_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "base"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (model / name).write_text("as it was", encoding="utf-8")
    study = frozen_study(tmp_path, PLAN.replace("a-model-3b", str(model)))
    first, second = study.runs[:2]
    do_all(study, [first])
    (model / "README.md").write_text("a card came later", encoding="utf-8")
    require_same_data(study)
    (model / "model.safetensors").write_text("trained on", encoding="utf-8")
    with pytest.raises(DataError, match=r"model.safetensors: is not the file that the plan was frozen with"):
        do(study, second, train_by_hand("plain", 0.7))
    study = amended(study)
    assert study.amendments[0]["data_changed"] == [str(model / "model.safetensors")]
    assert (record_of(study, first).state, record_of(study, second).state) == ("outdated", "waiting")


# --- what a run leaves, and the one after it -----------------------------------------------------------------------


def test_a_run_that_is_done_again_and_fails_at_once_does_not_go_on_with_the_run_before(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    run = study.runs[0]
    folder = study.run_folder(run)
    # As training leaves them, by which a run is known as one.
    write_summed_json(folder / "manifest.json", {"config_hash": "0", "provenance": {}})
    (folder / "checkpoints" / "step_400").mkdir(parents=True)
    write_json(folder / "checkpoints" / "step_400" / "checkpoint.json", {})
    redo(study, run)

    def fails(arguments: Sequence[str]) -> None:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError):
        do(open_study(study.folder), run, fails)
    assert not [name for name in ("best", "checkpoints", "evals", "metrics.csv") if (folder / name).exists()]
    assert record_of(study, run).state == "failed"
    assert len(record_of(study, run).test_reads) == 1, "that the test data were read stays known"
    with pytest.raises(DataError, match="left no evals/test.scores.jsonl"):
        do(open_study(study.folder), run, lambda arguments: None)
    do(open_study(study.folder), run, train_by_hand("plain", 0.7))
    assert record_of(study, run).is_over


def test_a_run_that_gives_again_what_an_earlier_one_gave_can_be_judged(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    for accuracy in (0.7, 0.8, 0.7):
        do(open_study(study.folder), run, train_by_hand("plain", accuracy), again=True)
    study = open_study(study.folder)
    reads = [one["scores"] for one in record_of(study, run).test_reads]
    assert (len(reads), reads[0]) == (3, reads[2])
    term = Term("accuracy", "plain", on="test")
    assert Outcomes(study, may_read="test").observe([term])[1] == {}


def rows(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt, "chosen": "a", "rejected": "b"}) + "\n" for prompt in prompts)


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (NAMED, ["2 of 3 test rows have the prompt of a row that is trained on"]),
        (
            f"{NAMED}, eval_dataset: [other.jsonl]",
            ["2 of 3 test rows", "1 of 3 test rows have the prompt of a row that"],
        ),
        ("dataset: [other.jsonl], test_dataset: [test.jsonl]", ["1 of 3 test rows"]),
        ("dataset: [none.jsonl], test_dataset: [test.jsonl]", []),
        (f"{NAMED}, limit: 2", []),
        ("dataset: [implicit.jsonl], test_dataset: [implicit_test.jsonl]", []),
        ("dataset: [messages.jsonl], test_dataset: [test.jsonl]", ["1 of 3 test rows"]),
    ],
)
def test_test_rows_that_stand_in_other_files_are_told_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, told: Sequence[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = write_plan(tmp_path, PLAN)
    files = {"train": ("x", "b", "y", "a", "z"), "test": ("a", "b", "c"), "other": ("d", "c"), "none": ("d",)}
    for name, prompts in files.items():
        Path(f"{name}.jsonl").write_text(rows(*prompts), encoding="utf-8")
    said = [{"role": "user", "content": "a"}]
    for name, values in {
        "implicit": {"prompt": None, "chosen": "Human: q Assistant: a", "rejected": "Human: q Assistant: b"},
        "implicit_test": {"prompt": None, "chosen": "Human: r Assistant: a", "rejected": "Human: r Assistant: b"},
        "messages": {"prompt": said, "chosen": "a", "rejected": "b"},
    }.items():
        Path(f"{name}.jsonl").write_text(json.dumps(values) + "\n", encoding="utf-8")
    plan.write_text(PLAN.replace(NAMED, base), encoding="utf-8")
    found = check(read_plan(plan))
    warnings = [one.text for one in found.problems if "have the prompt of a row" in one.text]
    assert len(warnings) == len(told)
    assert all(text.startswith(begin) for text, begin in zip(warnings, told, strict=True))
    assert not found.errors


def test_prompts_that_begin_alike_are_different_prompts(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, PLAN)
    (tmp_path / "test.jsonl").write_text(rows(*("x" * 3000 + str(n) for n in range(5))), encoding="utf-8")
    assert check(read_plan(plan)).num_prompts == 5
