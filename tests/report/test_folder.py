"""Run folders are read whatever they hold: whole, unfinished, torn and damaged."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_file
from rewardlab.report import evaluations
from rewardlab.report.build import report_of, tell
from rewardlab.report.card import card_text
from rewardlab.report.evaluations import estimate_of, read_scores
from rewardlab.report.folder import read_folder
from rewardlab.report.markdown import markdown_page
from run_folders import score_rows, write_evaluation, write_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return write_run(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def told(folder: Path) -> str:
    """The report as Markdown."""
    return markdown_page(report_of([tell(read_folder(folder), find_texts=None, draws=20)]))


def test_every_part_of_a_finished_run_is_read(whole: Path) -> None:
    record = read_folder(whole)
    assert record.kind == "train"
    assert record.finished
    assert record.problems == ()
    assert [row["step"] for row in record.rows] == list(range(0, 41, 5))
    assert record.judged is not None
    assert record.judged.name == "test"
    assert len(read_scores(record.judged)) == 104
    assert record.judged.counts["all"]["comparisons"] == 52
    assert [sign.name.strip() for sign in record.signs] == ["overfitting"]
    assert sorted(record.distributions) == [0, 10, 20, 30, 40]
    assert record.model_folder == whole / "best"


def test_a_beta_that_no_float_holds_is_none(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    for path in (*run.glob("evals/*.metrics.json"), run / "best/reward_spec.json"):
        path.unlink()
    (run / "config.json").write_text(json.dumps(config | {"beta": 10**400}))
    assert read_folder(run).beta == 1.0
    (run / "config.json").write_text(json.dumps(config | {"beta": 2}))
    assert read_folder(run).beta == 2.0


def test_a_run_on_its_way_is_told_by_its_last_evaluation(tmp_path: Path) -> None:
    record = read_folder(write_run(tmp_path / "run", reached=30))
    assert not record.finished
    assert record.judged is not None
    assert record.judged.name == "step_30"
    assert "Not finished: step 30 of 40 so far" in told(tmp_path / "run")


def test_a_run_is_finished_when_its_last_judgement_is_there(run: Path) -> None:
    for name in ("test.metrics.json", "test.scores.jsonl"):
        (run / "evals" / name).unlink()
    assert not read_folder(run).finished, "test data were named, and are judged last"
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"test_dataset": []}))
    record = read_folder(run)
    assert record.finished
    assert record.judged is not None
    assert record.judged.name == "selection"
    (run / "config.json").write_text(json.dumps(settings | {"test_dataset": [], "eval_fraction": 0.0}))
    assert not read_folder(run).finished
    (run / "step_40").mkdir()
    assert read_folder(run).finished, "without evaluation a run ends with its last step"


def test_a_run_that_has_not_evaluated_says_so(run: Path) -> None:
    shutil.rmtree(run / "evals")
    text = told(run)
    assert "This folder holds no evaluation" in text
    assert "No evaluation so far." in text


def test_a_torn_last_row_is_left_out_and_counted(run: Path) -> None:
    path = run / "metrics.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1][:9]]))
    record = read_folder(run)
    assert [row["step"] for row in record.rows] == list(range(0, 41, 5))
    assert record.problems == ("metrics.csv: 1 damaged row is left out.",)


def test_scores_that_do_not_match_their_checksum_are_not_used(run: Path) -> None:
    path = run / "evals/test.scores.jsonl"
    path.write_text(path.read_text().replace('"score": ', '"score": 1', 1))
    record = read_folder(run)
    assert record.judged is not None
    assert record.judged.scores is None
    assert any("does not match its checksum" in problem for problem in record.problems)
    assert "Accuracy 0." in told(run)
    assert "Calibration" not in [line.strip("# ") for line in told(run).splitlines() if line.startswith("#")]


def test_where_a_report_leaves_out_score_rows_it_says_so_with_their_number(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "MOST_ROWS", 104)
    assert "more than" not in told(run), "none is left out"
    monkeypatch.setattr(evaluations, "MOST_ROWS", 75)
    found = tell(read_folder(run), find_texts=None, draws=20)
    said = "test.scores.jsonl has more than 75 rows. What is computed from rows is of the first 74; "
    assert said in markdown_page(report_of([found]))
    assert found.judgement is not None
    assert found.judgement.counts.comparisons == 37, "the 75th row is the first of a pair"
    assert {pair.comparisons for pair in found.against.pairs.values()} <= {37}
    card = card_text(found.record, found.judgement, ceiling=None, against=found.against, problems=found.problems)
    assert said in card
    judged = found.record.judged
    assert judged is not None
    assert len(read_scores(judged)) == 104, "verdicts of plans are of all rows"


FILES = [
    "config.json",
    "manifest.json",
    "metrics.csv",
    "warnings.jsonl",
    "reward_distributions.json",
    "evals/test.metrics.json",
    "evals/test.scores.jsonl",
    "evals/step_0.metrics.json",
    "best/reward_spec.json",
]


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["gone", "empty", "half", "bytes", "list", "deep", "folder", "pipe"])
def test_no_damage_to_a_file_stops_the_report(run: Path, name: str, harm: str) -> None:
    path = run / name
    content = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "pipe":
        os.mkfifo(path)
    elif harm != "gone":
        made = {
            "empty": b"",
            "half": content[: len(content) // 2],
            "bytes": b"\xff\x00\xfe" * 50,
            "list": b"[1, null, {}]\n",
            "deep": b"[" * 100_000,
        }
        path.write_bytes(made[harm])
    assert "## Headline" in told(run)


ODD = (None, 0, -1, 1e308, True, "x", "nan", [], {}, [1], {"a": 1}, [[]], "1e400", 2**63, 0.1, "\ud800", 10**400)


def paths_in(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Where every value of a JSON file stands."""
    yield path
    if isinstance(value, dict):
        for name, part in value.items():
            yield from paths_in(part, (*path, name))
    elif isinstance(value, list):
        for number, part in enumerate(value[:3]):
            yield from paths_in(part, (*path, number))


def changed(value: object, path: tuple, new: object) -> object:
    """The same with another value at one place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["config.json", "manifest.json", "reward_distributions.json", "evals/test.metrics.json", "evals/test.scores.jsonl"],
)
def test_no_value_of_another_kind_stops_the_report(run: Path, name: str) -> None:
    path, generator = run / name, random.Random(0)
    lines = path.read_text().splitlines() if name.endswith(".jsonl") else [path.read_text()]
    for _ in range(15):
        number = generator.randrange(len(lines))
        value = json.loads(lines[number])
        place = generator.choice(list(paths_in(value)))
        odd = json.dumps(changed(value, place, generator.choice(ODD)))
        path.write_text("\n".join([*lines[:number], odd, *lines[number + 1 :]]) + "\n")
        if name.endswith(".jsonl"):
            metrics = run / "evals/test.metrics.json"
            metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"scores_sha256": sha256_file(path)}))
        assert "## Headline" in told(run)


@pytest.mark.parametrize(
    "values",
    [
        {"all": {"estimates": {"eval_accuracy": {"value": "x", "n": "y"}}, "sums": None}},
        {"all": {"estimates": {"eval_accuracy": None}}},
        {"all": {"estimates": {"eval_accuracy": {"value": None, "low": None, "high": None, "n": 3, "method": "none"}}}},
    ],
)
def test_estimates_of_another_form_are_left_out(run: Path, values: object) -> None:
    (run / "evals/test.metrics.json").write_text(json.dumps(values))
    assert "## Headline" in told(run)


def test_scores_that_are_all_not_finite_are_named_and_not_judged(run: Path) -> None:
    rows = [
        type(row)(**{**{name: getattr(row, name) for name in row.__slots__}, "score": float("nan")})
        for row in score_rows(12)
    ]
    write_evaluation(run / "evals", "test", rows)
    text = told(run)
    assert "cannot be judged" in text
    assert "12 comparisons without a finite score" in text


def test_a_folder_of_an_evaluation_is_read_with_its_settings(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "eval", score_rows())
    manifest = {"config": {"model": "m", "dataset": ["x"]}, "data": [], "tokens": {}, "provenance": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    record = read_folder(tmp_path)
    assert record.kind == "eval"
    assert record.finished
    assert record.judged is not None
    assert record.judged.name == "eval"
    assert "An evaluation that is finished" in told(tmp_path)


def test_a_long_text_among_the_settings_is_shown_by_its_beginning_and_its_hash(run: Path) -> None:
    settings = json.loads((run / "config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}" + "x" * 5000 + "\ud800"
    prompt = "Be brief and kind. " * 10
    (run / "config.json").write_text(json.dumps(settings | {"chat_template": template, "system_prompt": prompt}))
    text = told(run)
    assert "{% for message in messages %}" in text
    assert "x" * 80 not in text
    assert "… (5,063 characters, SHA-256 " in text
    assert "; whole in config.json)" in text
    assert prompt.strip() in text, "what is short is shown whole"


def test_what_holds_no_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    for name, words in (("none", "not found"), ("file", "is not a folder"), ("other", "holds nothing that `rewardlab")):
        with pytest.raises(ConfigError, match=words):
            read_folder(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "It is a model: name its run"),
        ("manifest.json", {"tool": "rewardlab data split", "seed": 0, "provenance": {}}, "Name the folder that was"),
    ],
)
def test_a_model_and_data_are_no_run_though_they_have_files_of_its_names(
    name: str, content: dict[str, object], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"holds nothing that.*{words}"):
        read_folder(tmp_path)


def test_a_copy_of_an_evaluation_beside_the_steps_is_no_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", reached=30)
    for name in ("step_30 (copy)", "step_40x", "step_²"):
        shutil.copy(folder / "evals/step_20.metrics.json", folder / f"evals/{name}.metrics.json")
    judged = read_folder(folder).judged
    assert judged is not None
    assert judged.name == "step_30"


@pytest.mark.parametrize("entry", ["n", "level"])
def test_an_estimate_beyond_every_number_is_none(entry: str) -> None:
    values = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 10, "method": "m", "level": 0.95}
    assert estimate_of(values) is not None
    assert estimate_of({**values, entry: math.inf if entry == "n" else 10**400}) is None
