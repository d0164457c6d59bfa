"""Score files of every layout become the same score rows, and what is wrong with one is said with its line."""

from __future__ import annotations

import csv
import json
import math
import shutil
import zipfile
from pathlib import Path

import pytest

from rewardlab.analysis.aligned import align
from rewardlab.analysis.metrics import evaluate
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import write_json
from rewardlab.core.types import Message, prompt_key
from rewardlab.evaluation import compare, score_layouts
from rewardlab.evaluation.compare_config import CompareConfig
from rewardlab.evaluation.score_files import read_scores
from scored import evaluation, rows_of

CHOSEN = [round(0.1 * number, 2) for number in range(12)]
REJECTED = [0.55] * 12


def accuracy(rows) -> float:
    return evaluate(rows, beta=1.0).estimates["eval_accuracy"].value


def of_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **more):
    return read_scores(path, name="m", **more)


def reward_bench(path: Path) -> Path:
    """Columns beside facts about the model, as reward-bench's run_rm.py writes them."""
    columns = {
        "id": list(range(12)),
        "subset": ["chat"] * 6 + ["hard"] * 6,
        "prompt": [f"What is {number}?" for number in range(12)],
        "text_chosen": ["a"] * 12,
        "text_rejected": ["b"] * 12,
        "scores_chosen": [[score] for score in CHOSEN],
        "scores_rejected": REJECTED,
        "results": [int(score > 0.55) for score in CHOSEN],
    }
    path.write_text(json.dumps({**columns, "model": "some/model", "model_type": "Seq. Classifier"}))
    return path


def as_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "chosen_score", "rejected_score", "difficulty"])
        writer.writerows([f"p{number}", score, 0.55, "easy"] for number, score in enumerate(CHOSEN))
    return path


def one_reply_a_row(path: Path) -> Path:
    return of_rows(
        path,
        [
            {"id": number, "reply": reply, "score": score}
            for number, pair in enumerate(zip(CHOSEN, REJECTED, strict=True))
            for reply, score in enumerate(pair)
        ],
    )


PAIRS = {
    "reward-bench": (reward_bench, "scores.json"),
    "CSV": (as_csv, "scores.csv"),
    "reward-bench's --save_all": (
        lambda path: of_rows(path, [{"chosen": c, "rejected": 0.55} for c in CHOSEN]),
        "m_all.jsonl",
    ),
}


@pytest.mark.parametrize(("write", "name"), PAIRS.values(), ids=PAIRS)
def test_pairs_of_scores_are_read(write, name, tmp_path):
    found = read(write(tmp_path / name)).scores
    assert [row.score for row in found.rows] == [x for pair in zip(CHOSEN, REJECTED, strict=True) for x in pair]
    assert accuracy(found.rows) == 0.5
    assert found.beta is None
    assert not found.verdicts_only


def test_sources_prompts_texts_and_columns_come_along(tmp_path):
    found = read(reward_bench(tmp_path / "scores.json"))
    first = found.scores.rows[0]
    assert first.source == "chat"
    assert first.preference_id == "0"
    assert first.prompt_key == prompt_key([Message("user", "What is 0?")])
    assert found.texts["chat", "0"] == {"prompt": "What is 0?", "preferred": "a", "other": "b"}
    assert read(as_csv(tmp_path / "scores.csv"), columns=("difficulty",)).columns["", "p3"]["difficulty"] == "easy"


def test_of_a_row_only_what_is_asked_for_is_held_when_the_next_one_is_read(tmp_path, monkeypatch):
    path, order = reward_bench(tmp_path / "scores.json"), []
    rows_of, texts_of = score_layouts.read_rows, score_layouts.texts_of
    monkeypatch.setattr(score_layouts, "read_rows", lambda file: (order.append("read") or row for row in rows_of(file)))
    monkeypatch.setattr(score_layouts, "texts_of", lambda *a, **b: order.append("kept") or texts_of(*a, **b))
    found = read(path)
    assert order == ["read", "kept"] * 12
    assert not found.columns
    assert len({id(row.comparisons) for row in found.scores.rows}) == 2, "all pairs are judged alike"
    other = shutil.copy(path, tmp_path / "other.json")
    first, second = compare._read([path, Path(other)], CompareConfig())
    assert len(first.texts) == 12
    assert not second.texts, "the texts are those of the first"


def test_reward_bench_two_judges_each_right_reply_against_each_wrong_one(tmp_path):
    rows = [
        {"id": f"{number}", "subset": "Ties", "scores": [3.0, 1.0, 2.0, 0.0], "num_correct": 2} for number in range(12)
    ]
    found = read(of_rows(tmp_path / "v2.jsonl", rows)).scores.rows
    assert [(c.first, c.second) for c in found[0].comparisons + found[1].comparisons] == [
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
    ]
    assert accuracy(found) == 0.75


def labelled(path: Path, label: object, **more: object) -> Path:
    """Pairs of which the chosen reply scores higher in four of five, all with one label."""
    return of_rows(
        path,
        [
            {"id": number, "scores_chosen": float(number % 5 > 0), "scores_rejected": 0.5, "label": label, **more}
            for number in range(60)
        ],
    )


@pytest.mark.parametrize(
    ("label", "right", "decided"), [(0, 0.2, 60), ("0.3", 0.2, 60), (0.5, math.nan, 0), (None, 0.8, 60), ("", 0.8, 60)]
)
def test_the_label_of_a_pair_says_which_reply_is_preferred(label, right, decided, tmp_path):
    found = evaluate(read(labelled(tmp_path / "f.jsonl", label)).scores.rows, beta=1.0)
    assert found.estimates["eval_accuracy"].value == pytest.approx(right, nan_ok=True)
    assert (found.sums.decided, found.sums.label_ties) == (decided, 60 - decided)


def test_a_soft_label_is_used_as_it_is(tmp_path):
    found = evaluate(read(labelled(tmp_path / "f.jsonl", 0.3)).scores.rows, beta=1.0)
    whole = {side: [math.log1p(math.exp(-side * d)) for d in (0.5, 0.5, 0.5, 0.5, -0.5)] for side in (1, -1)}
    assert found.sums.mean_nll == pytest.approx((0.3 * sum(whole[1]) + 0.7 * sum(whole[-1])) / 5)


def test_labels_of_lists_of_scores_are_read_too(tmp_path):
    rows = [{"id": number, "scores": [2.0, 1.0, 0.0], "num_correct": 1, "label": 0.5} for number in range(12)]
    found = read(of_rows(tmp_path / "f.jsonl", rows)).scores.rows
    assert [judged.label for judged in found[0].comparisons] == [0.5, 0.5]


def test_the_preferred_text_is_the_one_that_the_label_prefers(tmp_path):
    read_label = read(labelled(tmp_path / "f.jsonl", 0.2, text_chosen="a", text_rejected="b"))
    assert read_label.texts["", "0"] == {"preferred": "b", "other": "a"}


def test_scores_without_judgements_are_read_as_such(tmp_path):
    rows = read(one_reply_a_row(tmp_path / "scores.jsonl")).scores.rows
    assert not any(row.comparisons for row in rows)
    several = read(of_rows(tmp_path / "scored.jsonl", [{"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}]))
    assert [(row.preference_id, row.reply, row.score) for row in several.scores.rows] == [
        ("row 1", 0, 1.0),
        ("row 1", 1, 2.0),
    ]


def inspect_samples() -> list[dict[str, object]]:
    return [
        {"id": f"s{number // 2}", "epoch": 1 + number % 2, "scores": {"choice": {"value": "CIPN"[number % 4]}}}
        for number in range(24)
    ]


def as_inspect_json(path: Path) -> Path:
    path.write_text(json.dumps({"version": 2, "status": "success", "eval": {}, "samples": inspect_samples()}))
    return path


def as_inspect_archive(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", "{}")
        for sample in inspect_samples():
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    return path


@pytest.mark.parametrize(("write", "name"), [(as_inspect_json, "log.json"), (as_inspect_archive, "log.eval")])
def test_logs_of_inspect_are_verdicts_whose_epochs_are_clustered(write, name, tmp_path):
    found = read(write(tmp_path / name)).scores
    assert found.verdicts_only
    assert accuracy(found.rows) == (1 + 0 + 0.5 + 0) / 4
    assert len({row.prompt_key for row in found.rows}) == 12
    with pytest.raises(DataError, match=r"no scorer 'model_graded'.*--outcome: choice"):
        read(tmp_path / name, outcome="model_graded")


def lm_eval(path: Path, *, data: str = "", **more: object) -> Path:
    return of_rows(
        path,
        [
            {
                "doc_id": number,
                "doc": {},
                "target": "0",
                "resps": [[]],
                "filtered_resps": [],
                "filter": "none",
                "metrics": ["acc", "acc_norm"],
                "doc_hash": f"hash{data}{number}",
                "acc": float(number % 3 == 0),
                "acc_norm": 1.0,
                **more,
            }
            for number in range(12)
        ],
    )


def test_samples_of_lm_eval_are_verdicts_by_their_first_metric_or_the_one_asked_for(tmp_path):
    path = lm_eval(tmp_path / "samples_arc.jsonl")
    assert accuracy(read(path).scores.rows) == pytest.approx(1 / 3)
    assert accuracy(read(path, outcome="acc_norm").scores.rows) == 1.0


def test_samples_of_lm_eval_of_other_data_are_known_by_their_hashes(tmp_path):
    sets = [
        read_scores(lm_eval(tmp_path / f"{name}.jsonl", data=name), name=name).scores for name in ("arc", "hellaswag")
    ]
    with pytest.raises(DataError, match="other prompts under the id"):
        align(sets)


@pytest.mark.parametrize(("word", "number"), [(True, 1.0), ("false", 0.0), ("I", 0.0), ("0.5", 0.5), (None, math.nan)])
def test_verdicts_may_be_words(word, number, tmp_path):
    found = read(of_rows(tmp_path / "verdicts.jsonl", [{"id": 1, "correct": word}])).scores
    assert found.verdicts_only
    assert accuracy(found.rows) == pytest.approx(number, nan_ok=True)


OWN = rows_of([(1.0, 0.0)])[0].as_dict()
BROKEN = {
    "preference_id: expected a text, found a list": {"preference_id": [1]},
    "score: expected a number, found a text, 'much'": {"score": "much"},
    r"comparisons\[0\]\.second: is missing; expected a whole number": {"comparisons": [{"first": 0}]},
}
WRONG = {
    "unknown columns": (
        [{"a": 1, "b": 2}],
        DataError,
        r"f\.jsonl: its columns \(a, b\) are not a known layout of scores",
    ),
    "no number": (
        [{"id": 1, "scores_chosen": 1, "scores_rejected": 2}, {"id": 2, "scores_chosen": "x", "scores_rejected": 2}],
        DataError,
        r"f\.jsonl:2, scores_chosen: got 'x', wanted a score",
    ),
    "no text for a score": (
        [{"id": 1, "chosen": 1, "rejected": 2}, {"id": 2, "chosen": "a", "rejected": "b"}],
        DataError,
        r"f\.jsonl:2: wanted the scores of both replies as numbers",
    ),
    **{
        f"no number from the first row on, {cells}": (
            [{"id": 1, **cells}],
            DataError,
            rf"f\.jsonl:1, {next(iter(cells))}.*: got .*, wanted a (list of )?score",
        )
        for cells in (
            {"scores_chosen": 10**400, "scores_rejected": 2},
            {"score_chosen": "1,5", "score_rejected": 2},
            {"chosen": "1,5", "rejected": 2},
        )
    },
    "scores that are no list": ([{"scores": "1,5"}], DataError, r"f\.jsonl:1: got '1,5', wanted a list of scores"),
    "a broken verdict": ([{"id": 1, "correct": 0.7}], DataError, r"f\.jsonl:1, correct: got 0\.7, wanted a verdict"),
    "too many right": ([{"scores": [1, 2], "num_correct": 3}], DataError, r"num_correct 3 of 2 replies"),
    "a list that is none": (
        [{"scores": [1, 2]}, {"scores": "1"}],
        DataError,
        r"f\.jsonl:2: got '1', wanted a list of scores",
    ),
    "a broken reply": ([{"id": 1, "reply": -1, "score": 2}], DataError, r"f\.jsonl:1: reply -1, wanted its number"),
    "a row without its column": (
        [{"id": 1, "reply": 0, "score": 2}, {"id": 1, "score": 2}],
        DataError,
        r"f\.jsonl:2: no 'reply' in this row, which the first one has",
    ),
    "a row without its verdict": (
        [{"id": 1, "correct": 1}, {"id": 2}],
        DataError,
        r"f\.jsonl:2: this row has no verdict \(correct, outcome, results, result\)",
    ),
    "a label above 1": (
        [row.as_dict() for row in rows_of([(1.0, 0.0)], label=2.0)],
        DataError,
        r"f\.jsonl:1: not a score row of rewardlab \(a label lies between 0 and 1\)",
    ),
    **{
        f"pairs labelled {label!r}": (
            [{"scores_chosen": 1, "scores_rejected": 2, "label": label}],
            DataError,
            r"f\.jsonl:1, label: got .*, wanted the probability, from 0 to 1",
        )
        for label in (1.5, -0.1, "tie", True, [1, 0], "nan")
    },
    "pairs with labels of several annotators": (
        [{"scores_chosen": 1, "scores_rejected": 2, "labels": [1, 0]}],
        DataError,
        r"f\.jsonl:1: 'labels' holds \[1, 0\], the labels of several annotators",
    ),
    **{
        said: ([OWN | changed], DataError, rf"f\.jsonl:1: not a score row of rewardlab: {said}\. Evaluate the model")
        for said, changed in BROKEN.items()
    },
    "metrics of lm-eval that are no list": (
        [{"doc_id": 1, "resps": [], "metrics": 5}],
        DataError,
        r"f\.jsonl:1, metrics: got 5, wanted a list of names",
    ),
    "no rows": ([], DataError, r"f\.jsonl: no rows"),
}


@pytest.mark.parametrize(("rows", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_score_file_is_refused_with_its_line(rows, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        read(of_rows(tmp_path / "f.jsonl", rows))


def test_a_damaged_log_of_inspect_is_refused(tmp_path):
    (tmp_path / "log.eval").write_bytes(b"PK not a zip")
    with pytest.raises(DataError, match=r"cannot be read as a log of inspect.*inspect log convert"):
        read(tmp_path / "log.eval")


def test_a_log_of_inspect_that_was_cut_is_refused_in_the_same_words(tmp_path):
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "samples/1.json", json.dumps({"id": 1, "scores": {"a": {"value": "C"}}, "pad": [*range(5000)]})
        )
    whole = path.read_bytes()
    for first in range(0, len(whole) - 120, 97):
        path.write_bytes(whole[:first] + whole[-120:])
        with pytest.raises(DataError, match=r"cannot be read as a log of inspect|no rows"):
            read(path)


@pytest.mark.parametrize(
    ("local", "central", "value", "said"),
    [(6, 8, 1, "encrypted"), (8, 10, 99, "compression")],
    ids=["encrypted", "a compression that Python lacks"],
)
def test_a_log_of_inspect_that_python_cannot_unpack_is_refused(tmp_path, local, central, value, said):
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("samples/1.json", json.dumps({"id": 1, "scores": {"a": {"value": "C"}}}))
    data = bytearray(path.read_bytes())
    data[local] = data[data.index(b"PK\x01\x02") + central] = value  # in the entry's header, and in the directory
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"cannot be read as a log of inspect.*{said}.*inspect log convert"):
        read(path)


# --- our own folders ------------------------------------------------------------------------------------------


SCORES = list(zip(CHOSEN, REJECTED, strict=True))


def test_what_an_evaluation_writes_is_what_is_read(tmp_path):
    from rewardlab.evaluation.evaluate import judge, write_evaluation

    rows = rows_of(SCORES)
    write_evaluation(tmp_path / "eval", "eval", judge(rows, beta=1.0))
    found = read(tmp_path / "eval")
    assert found.scores.rows == rows
    assert found.scores.beta == 1.0


def test_beta_is_that_of_the_run_if_the_recorded_nll_says_so(tmp_path):
    run = tmp_path / "run"
    evaluation(run / "evals", rows_of(SCORES), "test", beta=0.25)
    evaluation(run / "evals", rows_of(SCORES), "test_length_only")
    write_json(run / "config.json", {"beta": 0.25})
    assert read(run).scores.beta == 0.25
    # The baselines of a run have a β of their own.
    assert read(run, on="test_length_only").scores.beta == 1.0


def test_a_beta_that_the_recorded_nll_contradicts_is_not_used(tmp_path):
    evaluation(tmp_path / "run" / "evals", rows_of(SCORES), "test", beta=0.25)
    write_json(tmp_path / "run" / "config.json", {"beta": 0.5})
    assert read(tmp_path / "run").scores.beta is None


def test_the_test_data_of_a_run_are_taken_before_those_that_chose_its_checkpoint(tmp_path):
    for name in ("selection", "step_10", "test", "test_before_training"):
        evaluation(tmp_path / "run" / "evals", rows_of(SCORES), name)
    assert read(tmp_path / "run").path.name == "test.scores.jsonl"
    chose = read(tmp_path / "run", on="selection")
    assert chose.path.name == "selection.scores.jsonl"
    assert chose.chose
    with pytest.raises(ConfigError, match=r"named 'nosuch'. There are: selection, step_10, test, test_before"):
        read(tmp_path / "run", on="nosuch")


def test_scores_that_were_changed_are_refused(tmp_path):
    folder = evaluation(tmp_path / "eval", rows_of(SCORES))
    path = folder / "eval.scores.jsonl"
    path.write_text(path.read_text().replace('"score": 0.1', '"score": 9.1'))
    with pytest.raises(ArtifactError, match=r"does not match its checksum in eval\.metrics\.json"):
        read(folder)


def test_a_row_that_lost_its_partner_is_refused(tmp_path):
    folder = evaluation(tmp_path / "eval", rows_of(SCORES))
    path, metrics = folder / "eval.scores.jsonl", folder / "eval.metrics.json"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    metrics.unlink()
    with pytest.raises(DataError, match=r"is judged against reply 1, which has no row"):
        read(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), r"holds no scores .*rewardlab eval"),
        (lambda path: (path.mkdir(), (path / "reward_spec.json").write_text("{}")), "is a model and holds no scores"),
    ],
)
def test_a_folder_without_scores_says_what_to_do(make, message, tmp_path):
    make(tmp_path / "there")
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "there")
