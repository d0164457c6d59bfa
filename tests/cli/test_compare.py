"""`rewardlab compare` from its arguments to what it prints and writes; no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import done_here, in_process, only_message, refusal
from rewardlab.core.errors import DataError
from rewardlab.core.types import Message, prompt_key
from rewardlab.evaluation.compare import compare_files
from rewardlab.evaluation.compare_config import CompareConfig
from scored import evaluation, rows_of

N = 60
DRAW = np.random.default_rng(0)
TRUTH = DRAW.normal(1.0, 1.0, N)


def scores(noise: float, scale: float = 1.0) -> np.ndarray:
    return scale * np.stack([TRUTH + DRAW.normal(0, noise, N), np.zeros(N)], 1)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three evaluations of one data set, better and better."""
    for name, noise in (("a", 2.0), ("b", 1.0), ("c", 0.1)):
        evaluation(tmp_path / name / "eval", rows_of(scores(noise)))
    return tmp_path


def test_two_models_are_compared_and_the_result_is_written(runs, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    done = in_process(
        "compare", runs / "a/eval", runs / "b/eval", "--margin", 0.03, "--output-dir", runs / "out", "--slice", "longer"
    )
    assert done.returncode == 0, done.stderr
    assert "b − a" in done.stdout
    assert "less than 0.03 worse" in done.stdout
    assert max(map(len, done.stdout.replace(str(runs), "").splitlines())) <= 80
    found = json.loads((runs / "out/compare.json").read_text())
    (other,) = found["others"]
    verdicts = other["paired"]["verdicts"]
    accuracy = other["paired"]["metrics"]["accuracy"]
    assert found["names"] == ["a", "b"]
    assert accuracy["difference"]["value"] == pytest.approx((verdicts["only_second"] - verdicts["only_first"]) / N)
    assert found["settings"]["margin"] == 0.03
    rows = [json.loads(line) for line in (runs / "out/disagreements.jsonl").read_text().splitlines()]
    assert len(rows) == other["num_disagreements"] == verdicts["only_second"] + verdicts["only_first"]
    assert "already holds a comparison" in refusal(
        capsys, "compare", runs / "a/eval", runs / "b/eval", "--output-dir", runs / "out"
    )


def test_several_models_get_the_set_that_may_be_the_best(runs, capsys):
    done = done_here(capsys, "compare", runs / "a/eval", runs / "b/eval", runs / "c/eval", "--names", "x", "y", "z")
    assert "Not distinguishable from the best in accuracy: " in done.stdout
    assert "after Holm's correction for 2 comparisons with x" in done.stdout


def test_gold_scores_give_match_rate_and_correlations(runs, capsys):
    done = done_here(capsys, "compare", runs / "a/eval", runs / "b/eval", "--gold", runs / "c/eval")
    assert "Against the gold scores:" in done.stdout
    assert all(word in done.stdout for word in ("match", "Pearson", "Spearman", "Kendall"))


def test_a_single_run_is_compared_with_itself_before_training_and_its_baselines(tmp_path, capsys):
    for name, noise in (("test_before_training", 3.0), ("test_length_only", 9.0), ("test", 0.5)):
        evaluation(tmp_path / "run/evals", rows_of(scores(noise)), name)
    done = done_here(capsys, "compare", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "length only − before" in done.stdout
    assert "after − before" in done.stdout


def test_the_models_of_one_evaluation_are_compared_in_its_order(runs, capsys):
    for name in ("a", "b", "c"):
        (runs / name / "eval").rename(runs / f"{name}-moved")
        (runs / name).rmdir()
        (runs / f"{name}-moved").rename(runs / name)
    (runs / "models.json").write_text(json.dumps({"b": {}, "a": {}}))
    done = done_here(capsys, "compare", runs)
    assert "a − b" in done.stdout, done.stderr
    assert "The reference is b." in done.stdout


@pytest.mark.slow
def test_scores_alone_are_judged_by_the_gold_model(tmp_path, capsys):
    for name, noise in (("a", 1.0), ("b", 0.5), ("gold", 0.0)):
        rows = [
            json.dumps({"id": number, "reply": reply, "score": float(score)})
            for number, pair in enumerate(scores(noise))
            for reply, score in enumerate(pair)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "b", "gold")]
    assert "--gold" in only_message(done_here(capsys, "compare", *files[:2]).stderr)
    done = done_here(capsys, "compare", *files[:2], "--gold", files[2])
    assert "the order of the gold scores counts as the truth" in done.stdout
    lines = [json.loads(line) for line in files[2].read_text().splitlines()]
    files[2].write_text(
        "\n".join(json.dumps({**row, "score": None if row["id"] < 5 else row["score"]}) for row in lines)
    )
    done = done_here(capsys, "compare", *files[:2], "--gold", files[2])
    assert "Compared on 55 comparisons" in done.stdout
    assert "5" in re.search(r".*gold.*finite.*|.*finite.*gold.*", done.stdout)[0]
    files[2].write_text("\n".join(json.dumps(row) for row in lines if row["reply"] == 0 or row["id"] >= 5))
    lacks = only_message(done_here(capsys, "compare", *files[:2], "--gold", files[2]).stderr)
    files[2].write_text("\n".join(json.dumps(row) for row in lines if row["id"] >= 5))
    assert "gold lacks 10 of" in only_message(done_here(capsys, "compare", *files[:2], "--gold", files[2]).stderr)
    done = done_here(capsys, "compare", *files[:2], "--gold", files[2], "--common")
    assert "Compared on 55 comparisons" in done.stdout
    assert lacks.startswith("gold lacks 5 of the replies that a.jsonl scores, such as reply 1 of '0'")


def test_columns_of_another_file_slice_the_comparison(runs, capsys):
    rows = [json.dumps({"id": f"d.jsonl:{number}", "topic": "even" if number % 2 else "odd"}) for number in range(N)]
    (runs / "topics.jsonl").write_text("\n".join(rows))
    done = done_here(
        capsys, "compare", runs / "a/eval", runs / "b/eval", "--slice", "topic", "--columns", runs / "topics.jsonl"
    )
    assert "topic: even" in done.stdout
    assert "after correction for the 2 slices tested" in done.stdout


def of_pairs(path: Path, scored: np.ndarray, **columns: object) -> Path:
    """Write pairs, each with a row of the columns."""
    rows = [
        {"scores_chosen": chosen, "scores_rejected": other, **{name: own[number] for name, own in columns.items()}}
        for number, (chosen, other) in enumerate(scored.tolist())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sizes_of(found) -> dict[str, int]:
    return {one.value: one.comparisons for one in found.result.others[0].slices}


def test_an_id_of_another_source_gives_no_value_to_a_slice(tmp_path):
    ids = {"id": [str(number % 30) for number in range(N)], "source": ["x"] * 30 + ["y"] * 30}
    topics = [["old", "new", "none"][number % 3] for number in range(30)] + [None] * 30
    files = [
        of_pairs(tmp_path / "a.jsonl", scores(1.0), **ids, topic=topics),
        of_pairs(tmp_path / "b.jsonl", scores(1.0), **ids),
    ]
    found = compare_files(files, CompareConfig(slice=("topic",)))
    assert sizes_of(found) == {"old": 10, "new": 10, "'none'": 10, "none": 30}


def test_a_source_called_none_is_not_the_absence_of_one(tmp_path):
    ids = {"id": list(map(str, range(N))), "source": ["none", "", "x"] * (N // 3)}
    files = [of_pairs(tmp_path / f"{name}.jsonl", scores(1.0), **ids) for name in "ab"]
    wanted = {"'none'": N // 3, "none": N // 3, "x": N // 3}
    assert sizes_of(compare_files(files, CompareConfig())) == wanted
    assert sizes_of(compare_files(files, CompareConfig(slice=("source",)))) == wanted


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (None, r"a\.jsonl:2: this row has no verdict \(correct, outcome, results, result\)\."),
        ("zzz", r"a\.jsonl:1: this row has no 'zzz', which --outcome names\."),
    ],
)
def test_a_row_without_a_verdict_is_told_as_it_is(tmp_path, outcome, told):
    rows = [{"id": "a", "outcome": True}, {"id": "b"}]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=told):
        compare_files(files, CompareConfig(outcome=outcome))


def test_columns_with_sources_fit_scores_without(tmp_path):
    ids = {"id": list(map(str, range(N)))}
    files = [of_pairs(tmp_path / f"{name}.jsonl", scores(1.0), **ids) for name in "ab"]
    more = of_pairs(
        tmp_path / "more.jsonl",
        scores(1.0),
        id=[*ids["id"][:50], *ids["id"][:10]],
        source=["x"] * 50 + ["y"] * 10,
        topic=["old"] * 30 + ["new"] * 20 + ["new"] * 10,
        chosen=["better"] * N,
    )
    found = compare_files(files, CompareConfig(slice=("topic",), columns=more))
    assert sizes_of(found) == {"old": 20, "new": 20, "none": 20}, "an id with two values has none"
    assert found.texts["", "3"]["preferred"] == "better"


def test_prompts_are_counted_with_their_ties(tmp_path):
    more = {"id": list(map(str, range(N))), "label": [1.0] * 40 + [0.5] * 20}
    files = [of_pairs(tmp_path / f"{name}.jsonl", scores(1.0), **more) for name in "ab"]
    done = in_process("compare", *files)
    assert "Compared on 60 comparisons of 60 prompts, which both models score." in done.stdout


def test_the_data_that_were_judged_give_texts_and_columns_by_their_lines(tmp_path, capsys):
    rows = [
        {"prompt": f"Prompt {n}?", "chosen": f"good {n}", "rejected": f"bad {n}", "mood": "ab"[n % 2]}
        for n in range(1, N + 1)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, noise in (("a", 2.0), ("b", 0.5)):
        scored = [
            replace(
                row,
                preference_id=f"d.jsonl:{number // 2 + 1}",
                prompt_key=prompt_key([Message("user", f"Prompt {number // 2 + 1}?")]),
            )
            for number, row in enumerate(rows_of(scores(noise)))
        ]
        evaluation(tmp_path / name, scored)
    flags = ("compare", tmp_path / "a", tmp_path / "b", "--slice", "mood", "--columns")
    done = done_here(capsys, *flags, tmp_path / "d.jsonl")
    assert "mood: a" in done.stdout, done.stderr
    assert re.search(
        r"d\.jsonl:(\d+), reply 0 over 1.*\n(.*\n)?    prompt: Prompt \1\?\n    preferred: good \1", done.stdout
    )
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    assert "prompt: " not in done_here(capsys, *flags, tmp_path / "d.jsonl").stdout, "texts of other rows would mislead"


def test_the_text_that_a_label_of_the_data_prefers_is_shown_as_preferred(tmp_path):
    (tmp_path / "d.jsonl").write_text(
        "".join(
            json.dumps({"id": n, "chosen": "the worse", "rejected": "the better", "label": 0}) + "\n" for n in range(N)
        )
    )
    for name, noise in (("a", 3.0), ("b", 0.5)):
        rows = rows_of(scores(noise), label=0.0)
        evaluation(tmp_path / name, [replace(row, preference_id=row.preference_id.split(":")[1]) for row in rows])
    found = compare_files([tmp_path / "a", tmp_path / "b"], CompareConfig(columns=tmp_path / "d.jsonl")).texts
    assert found["", "0"] == {"preferred": "the better", "other": "the worse"}


def test_pairs_that_are_all_labelled_as_ties_are_refused(tmp_path, capsys):
    for name in "ab":
        rows = [
            {"id": n, "scores_chosen": own, "scores_rejected": other, "label": 0.5}
            for n, (own, other) in enumerate(scores(1.0))
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refusal(capsys, "compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "0 comparisons (60 more are labelled as ties, which no model can get right)" in said


def csv_of(path: Path, own: np.ndarray, *, ids: bool) -> Path:
    head, cells = ["id,"] if ids else [""], [f"i{number}," if ids else "" for number in range(len(own))]
    rows = [f"{cell}{first},{second}" for cell, (first, second) in zip(cells, own, strict=True)]
    path.write_text("\n".join([f"{head[0]}scores_chosen,scores_rejected", *rows]) + "\n")
    return path


def test_prompts_are_those_of_the_files_that_know_them_in_either_order(tmp_path):
    draw = np.random.default_rng(3)
    kinds = {
        "ids": lambda n: {},
        "by_number": lambda n: {"prompt_id": f"p{n // 5}"},
        "by_text": lambda n: {"prompt": f"Question {n // 5}?"},
    }
    for name, prompt in kinds.items():
        rows = [{"id": f"r{n}", "scores_chosen": draw.normal(1), "scores_rejected": 0.0, **prompt(n)} for n in range(N)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def compared(*names):
        (other,) = compare_files([tmp_path / f"{name}.jsonl" for name in names], CompareConfig()).result.others
        return other.paired.metrics["accuracy"].difference

    for first, second in (("ids", "by_number"), ("by_number", "by_text"), ("ids", "by_text")):
        there, back = compared(first, second), compared(second, first)
        assert there.n == back.n == N // 5
        assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))


def test_rows_without_ids_are_said_to_be_paired_by_their_number(tmp_path, capsys):
    named = [csv_of(tmp_path / f"{name}.csv", scores(1.0), ids=True) for name in "ab"]
    bare = [csv_of(tmp_path / f"{name}.csv", scores(1.0), ids=False) for name in "cd"]
    said = "rows are paired by their number in the file"
    assert said not in done_here(capsys, "compare", *named).stdout
    done = done_here(capsys, "compare", *bare, "--beta", "1", "--output-dir", tmp_path / "out")
    assert f"No ids in c.csv, d.csv: {said}" in " ".join(done.stdout.split()), done.stderr
    assert json.loads((tmp_path / "out/compare.json").read_text())["by_place"] == ["c.csv", "d.csv"]
    assert done_here(capsys, "compare", *named, "--common").returncode == 0
    assert "--common: c.csv, d.csv have no ids" in refusal(capsys, "compare", *map(str, bare), "--common")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "MODELS is missing: name two score files or folders, or one run"),
        (["{a}"], "nothing to compare it with"),
        (["nosuch"], "nosuch: no such file or folder"),
        (["{a}", "{a}"], "the same scores are named twice"),
        (["{a}", "nosuch"], "nosuch: no such file or folder"),
        (["{a}", "{b}", "--names", "x"], "--names: got 1 names for 2 models"),
        (["{a}", "{b}", "--names", "x", "x"], "--names 'x': every model needs a name of its own"),
        (["{a}", "{b}", "--margin", "-0.1"], "--margin -0.1: must be above 0"),
        (["{a}", "{b}", "--beta", "1", "2", "3"], "--beta: got 3 values for 2 models"),
        (["{a}", "{b}", "--slice", "mood"], "--slice mood: no file has this column. Known without one: source, longer"),
        (["{a}", "{b}", "--columns", "x.csv"], "--columns x.csv: no such file"),
        (["{a}", "{b}", "--output-dir", "{a}"], "holds a run or an evaluation"),
    ],
)
def test_what_cannot_be_compared_ends_with_one_message(flags, message, runs, capsys):
    given = [flag.format(a=runs / "a/eval", b=runs / "b/eval") for flag in flags]
    if "--output-dir" in flags:
        (runs / "a/eval/manifest.json").write_text('{"config": 1, "data": 1, "tokens": 1, "provenance": 1}')
    assert message in refusal(capsys, "compare", *given)


def test_the_nll_needs_a_beta(tmp_path, capsys):
    for name in ("a", "b"):
        lines = [
            json.dumps({"id": number, "scores_chosen": 1.0 * number, "scores_rejected": 3}) for number in range(20)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "the β of a.jsonl, b.jsonl is not known. Give it with --beta" in refusal(
        capsys, "compare", *files, "--metric", "nll"
    )
    assert done_here(capsys, "compare", *files, "--metric", "nll", "--beta", 1).returncode == 0


@pytest.mark.slow
def test_nothing_heavy_is_imported(runs):
    program = (
        "import sys; from rewardlab.cli import main; main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'datasets', 'peft'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", str(runs / "a/eval"), str(runs / "b/eval")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["disagreements.jsonl", "compare.json"])
def test_a_file_that_compare_did_not_write_is_never_replaced(runs, tmp_path, capsys, name):
    place = tmp_path / "place"
    place.mkdir()
    (place / name).write_text('{"mine": 1}')
    line = ("compare", runs / "a/eval", runs / "b/eval", "--output-dir", place, "--overwrite")
    assert f"holds {name}, which `rewardlab compare` did not write" in refusal(capsys, *line)
    assert (place / name).read_text() == '{"mine": 1}'
    (place / name).unlink()
    for _ in range(2):
        assert done_here(capsys, *line).returncode == 0
    assert "already holds a comparison" in refusal(capsys, *line[:-1])
