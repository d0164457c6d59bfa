"""The checklist answers yes or no only where intervals decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.analysis.judgement import Judgement, judge_rows
from rewardlab.analysis.paired import compare_pair
from rewardlab.core.types import Comparison, Estimate, ScoreRow
from rewardlab.report.checklist import checklist_section
from rewardlab.report.document import Checklist, Paragraph, Table, shown
from rewardlab.report.evaluations import read_scores
from rewardlab.report.folder import Record, read_folder
from rewardlab.report.from_scores import rewards_section
from rewardlab.report.paired import against_baselines, runs_section
from run_folders import score_rows, write_evaluation, write_run
from score_rows import score_row


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A finished run without warning signs."""
    return replace(read_folder(write_run(tmp_path_factory.mktemp("runs") / "run")), signs=())


@pytest.fixture(scope="module")
def judgement() -> Judgement:
    return judge_rows(score_rows(), beta=1.0, draws=20)


def answer(question: str, record: Record, judgement: Judgement | None = None) -> str:
    (block,) = checklist_section(record, judgement).blocks
    assert isinstance(block, Checklist)
    (found,) = [check.answer for check in block.checks if question in check.question]
    return found


def estimate(value: float, low: float, high: float) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=100, method="m")


def with_accuracies(record: Record, **accuracies: Estimate) -> Record:
    evaluations = {
        name: replace(
            judged,
            estimates={
                **judged.estimates,
                "all": {
                    **judged.estimates["all"],
                    **({"eval_accuracy": accuracies[name]} if name in accuracies else {}),
                },
            },
        )
        for name, judged in record.evaluations.items()
    }
    return replace(record, evaluations=evaluations)


@pytest.mark.parametrize(
    ("own", "length", "words", "wanted"),
    [
        (estimate(0.60, 0.5, 0.7), estimate(0.62, 0.52, 0.72), estimate(0.5, 0.4, 0.6), "look"),
        (estimate(0.60, 0.58, 0.62), estimate(0.72, 0.7, 0.74), estimate(0.5, 0.4, 0.6), "no"),
        (estimate(0.80, 0.75, 0.85), estimate(0.62, 0.5, 0.74), estimate(0.6, 0.4, 0.7), "yes"),
        # The better of the two by points is beaten; the wider one may still be as good.
        (estimate(0.80, 0.75, 0.85), estimate(0.62, 0.6, 0.64), estimate(0.6, 0.4, 0.8), "look"),
        (estimate(0.60, float("nan"), float("nan")), estimate(0.7, 0.6, 0.8), estimate(0.6, 0.4, 0.8), "look"),
    ],
)
def test_baselines_are_beaten_or_not_by_intervals(record, own, length, words, wanted):
    changed = with_accuracies(record, test=own, test_length_only=length, test_bag_of_words=words)
    assert answer("length alone", changed) == wanted


@pytest.mark.parametrize(
    ("low", "evaluations", "wanted"),
    [(0.51, 1, "yes"), (0.51, 20, "look"), (0.54, 20, "yes"), (float("nan"), 20, "look")],
)
def test_a_checkpoint_that_the_same_data_chose_must_be_clear_for_all_their_evaluations(
    record: Record, low: float, evaluations: int, wanted: str
) -> None:
    """Of twenty models that know nothing, the best is beyond a 95 % interval in one run of five."""
    chosen = replace(record, evaluations={"selection": replace(record.evaluations["test"], name="selection")})
    own = with_accuracies(chosen, selection=estimate(0.6, low, 1.2 - low))
    rows = [{"step": 10.0 * number, "eval_accuracy": 0.5} for number in range(evaluations)]
    judged = replace(own, rows=rows)
    assert answer("better than a coin", judged) == wanted
    assert answer("mean the same reply", judged) == wanted
    # Test data chose nothing, however often the evaluation data were looked at.
    tested = with_accuracies(replace(record, rows=rows), test=estimate(0.6, low, 1.2 - low))
    assert answer("better than a coin", tested) == ("yes" if low > 0.5 else "look")


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ({}, "yes"),
        ({"training": {"preferences": 100, "kept": 96}, "test": {"preferences": 20, "kept": 20}}, "yes"),
        ({"training": {"preferences": 100, "kept": 100}, "test": {"preferences": 80, "kept": 19}}, "look"),
        ({"preferences": 80, "kept": 19, "replies": 38, "dropped": {"overlong": 61}}, "look"),
    ],
)
def test_rows_that_are_left_out_for_their_length_are_not_used(record, tokens, wanted):
    data = {"test": [{"rows_read": 200, "kept": 200}]}
    changed = replace(record, manifest={**record.manifest, "data": data, "tokens": tokens})
    assert answer("nearly all rows", changed) == wanted


@pytest.mark.parametrize(
    ("shared", "wanted"),
    [
        (None, "not known"),
        ({}, "not known"),
        ({"test_with_training": {"prompts": "many"}}, "not known"),
        ({"test_with_training": {"prompts": 0}}, "yes"),
        ({"test_with_training": {"prompts": 2}}, "no"),
        ({"test_with_training": {"prompts": 0, "rows": 0}}, "yes"),
        ({"test_with_training": {"prompts": 0, "replies": 3, "rows": 3}}, "look"),
        ({"test_with_training": {"prompts": 0}, "test_with_evaluation": {"prompts": 0, "rows": 0}}, "yes"),
        ({"test_with_training": {"prompts": 0}, "test_with_evaluation": {"prompts": 0, "rows": 1}}, "look"),
        ({"test_with_training": {"prompts": 0}, "test_with_evaluation": {"prompts": 2, "rows": 2}}, "no"),
        ({"test_with_evaluation": {"prompts": 2, "rows": 2}}, "no"),
    ],
)
def test_an_overlap_that_is_unknown_is_not_none(record, shared, wanted):
    changed = replace(record, manifest={**record.manifest, "data": {"shared": shared}})
    assert answer("chose nothing", changed) == wanted


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"test_dataset": None, "test_split": None}, "There are no test data; "),
        ({"test_dataset": ["a.jsonl"]}, "The test data, which are judged last, have no numbers yet; "),
        ({"test_split": "test"}, "The test data, which are judged last, have no numbers yet; "),
    ],
)
def test_a_run_that_ended_early_has_test_data_though_they_were_not_judged(
    record: Record, settings: dict[str, object], why: str
) -> None:
    selection = {"selection": replace(record.evaluations["test"], name="selection")}
    changed = replace(record, evaluations=selection, config={**record.config, **settings})
    (block,) = checklist_section(changed, None).blocks
    assert isinstance(block, Checklist)
    (found,) = [check for check in block.checks if "chose nothing" in check.question]
    assert found.answer == "no"
    assert found.numbers.startswith(why)


@pytest.mark.parametrize(
    ("last", "low", "wanted"),
    [(0.70, 0.60, "look"), (0.70, None, "look"), (0.70, 0.68, "yes"), (0.69, 0.66, "look"), (0.5, 0.4, "look")],
)
def test_a_last_accuracy_near_the_peak_is_enough_only_if_it_is_known_so_well(record, last, low, wanted):
    rows = [{"step": 10.0, "eval_accuracy": 0.7, "eval_accuracy_low": 0.69}, {"step": 20.0, "eval_accuracy": last}]
    rows[1] |= {} if low is None else {"eval_accuracy_low": low}
    assert answer("stay at its best", replace(record, rows=rows)) == wanted


@pytest.mark.parametrize(
    ("slope", "wanted"),
    [
        (estimate(1.0, 0.9, 1.1), "yes"),
        (estimate(1.06, 1.02, 1.1), "yes"),
        (estimate(1.0, 0.3, 1.7), "look"),
        (estimate(0.85, 0.7, 0.95), "look"),
        (estimate(0.5, 0.3, 0.7), "no"),
        (estimate(2.0, 1.5, 2.5), "no"),
        (estimate(1.0, float("nan"), float("nan")), "not known"),
    ],
)
def test_probabilities_are_believed_only_where_the_slope_is_known_to_be_near_one(record, judgement, slope, wanted):
    changed = replace(judgement, estimates={**judgement.estimates, "eval_calibration_slope": slope})
    assert answer("believed", record, changed) == wanted


def told(question: str, record: Record, judgement: Judgement | None = None) -> str:
    (block,) = checklist_section(record, judgement).blocks
    (found,) = [check.numbers for check in block.checks if question in check.question]
    return found


def test_a_slope_without_a_value_is_told_with_its_reason(record):
    """A hundred pairs that are all ranked rightly are not too few."""
    rows = [row for number in range(100) for row in pair(number, margin=1 + number / 100)]
    assert told("believed", record, judge_rows(rows, beta=1.0, draws=5)).endswith("no finite value fits best.")
    few = judge_rows(rows[:6], beta=1.0, draws=5)
    assert "few" in told("believed", record, few) or "no finite" in told("believed", record, few)


def pair(number: int, *, margin: float) -> list[ScoreRow]:
    judged = Comparison(first=0, second=1)
    return [score_row(number, 0, margin, (judged,)), score_row(number, 1, 0.0)]


def test_comparisons_without_a_finite_score_are_none_to_judge_by(record):
    judged = record.judged
    counts = {"all": {**judged.counts["all"], "comparisons": 1500.0, "non_finite": 600.0}}
    evaluations = {**record.evaluations, judged.name: replace(judged, counts=counts)}
    changed = replace(record, evaluations=evaluations)
    assert answer("thousand", changed) == "look"
    assert told("thousand", changed).startswith("900 comparisons")


def better(record: Record) -> str:
    """The answer by the rows of the run's files."""
    (block,) = checklist_section(record, None, against_baselines(record, read_scores(record.judged))).blocks
    (found,) = [check for check in block.checks if "length alone" in check.question]
    assert "On the same pairs, its accuracy minus that of" in found.numbers
    assert ("; p after Holm's correction for these 2." in found.numbers) == ("; minus that of" in found.numbers)
    return found.answer


@pytest.mark.parametrize(("wrong", "wanted"), [((0.35, 0.45), "yes"), ((0.45, 0.45), "look"), ((0.45, 0.35), "no")])
def test_paired_differences_decide_where_intervals_side_by_side_do_not(tmp_path, wrong, wanted):
    """Of 200 pairs two models, wrong on nested sets of them, differ by 10 points, each known to about 7."""
    folder = write_run(tmp_path / "run")
    number = 200

    def rows(share: float) -> list[ScoreRow]:
        made = score_rows(number)
        return [
            replace(row, score=float(row.reply == (1 if n // 2 < share * number else 0))) for n, row in enumerate(made)
        ]

    evals = folder / "evals"
    for name, share in (("test", wrong[0]), ("test_length_only", wrong[1]), ("test_bag_of_words", wrong[1])):
        write_evaluation(evals, name, rows(share))
    record = replace(read_folder(folder), signs=())
    assert better(record) == wanted
    accuracies = [record.evaluations[name].estimates["all"]["eval_accuracy"] for name in ("test", "test_length_only")]
    first, second = sorted(accuracies, key=lambda estimate: estimate.value)
    assert wanted == "look" or first.high > second.low, "the intervals themselves overlap"
    assert answer("length alone", record) == "look", "which is all that they say"


def test_baselines_whose_rows_are_missing_are_told_and_the_intervals_decide(record, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "evals/test_length_only.scores.jsonl").unlink()
    found = read_folder(folder)
    against = against_baselines(found, read_scores(found.judged))
    assert against.pairs == {}
    assert "length only are missing or damaged" in against.problem
    (block,) = checklist_section(found, None, against).blocks
    (check,) = [check for check in block.checks if "length alone" in check.question]
    assert "The rows could not be paired: those of length only" in check.numbers


def test_rows_of_baselines_that_were_changed_are_not_used(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "evals/test_length_only.scores.jsonl"
    path.write_text(path.read_text().replace('"score": ', '"score": 1', 1))
    found = read_folder(folder)
    assert any("test_length_only.scores.jsonl does not match" in problem for problem in found.problems)
    assert against_baselines(found, read_scores(found.judged)).pairs == {}


def test_runs_on_the_same_rows_are_set_beside_each_other_by_their_differences():
    first, same, other = score_rows(60, shift=0.2), score_rows(60, shift=1.5), score_rows(60, source="elsewhere")
    found = runs_section({"a": (first, 1.0), "b": (same, 1.0), "c": (other, 1.0)})
    table, note = found.blocks
    assert isinstance(table, Table)
    (row,) = table.rows
    paired = compare_pair(align([ScoreSet(name="a", rows=first, beta=1.0), ScoreSet(name="b", rows=same, beta=1.0)]), 1)
    assert row[:2] == ("b", shown(paired.metrics["accuracy"].difference))
    assert row[3] == shown(paired.metrics["nll"].difference)
    assert isinstance(note, Paragraph)
    assert "c and a are not compared pair by pair" in note.text
    assert runs_section({"a": (first, 1.0)}).blocks == ()


def test_that_all_preferred_replies_are_longer_is_not_called_too_few_of_unequal_length(record: Record) -> None:
    rows = [replace(row, num_tokens=row.prompt_tokens + 20 - row.reply) for row in score_rows()]
    (block,) = checklist_section(record, judge_rows(rows, beta=1.0, draws=20)).blocks
    assert isinstance(block, Checklist)
    (found,) = [check for check in block.checks if "where length does not tell" in check.question]
    assert found.answer == "not known"
    assert "unequal" not in found.numbers
    assert "5 prompts prefer the longer reply and 5 the shorter" in found.numbers


@pytest.mark.parametrize(
    ("liking", "count", "wanted"),
    [(0.0, 400, "yes"), (0.08, 400, "look"), pytest.param(0.002, 20_000, "yes", marks=pytest.mark.slow)],
)
def test_scores_that_overrate_length_ask_for_a_look_though_the_labels_do_not_follow_it(
    record: Record, liking: float, count: int, wanted: str
) -> None:
    draw = np.random.default_rng(0)
    quality, tokens = draw.normal(size=(count, 2)), draw.integers(5, 60, (count, 2))
    better = draw.random(count) < 1 / (1 + np.exp(-2 * (quality[:, 0] - quality[:, 1])))
    rows = [
        score_row(
            n,
            reply,
            float(2 * quality[n, k] + liking * tokens[n, k]),
            (Comparison(first=0, second=1),) if reply == 0 else (),
            num_tokens=10 + int(tokens[n, k]),
        )
        for n in range(count)
        for reply, k in enumerate((0, 1) if better[n] else (1, 0))
    ]
    judged = judge_rows(rows, beta=1.0, draws=20)
    (block,) = checklist_section(record, judged).blocks
    assert isinstance(block, Checklist)
    (found,) = [check for check in block.checks if "where length does not tell" in check.question]
    assert found.answer == wanted, found.numbers
    assert ("overrate longer replies" in found.numbers) == (wanted == "look")
    if count > 400:
        # It is shown, but is next to nothing.
        assert -0.1 < judged["eval_length_coefficient"].value < judged["eval_length_coefficient"].high < 0


def test_rewards_that_differ_by_little_are_told_apart(record):
    """In three decimals all rewards of such a model, and their intervals, would be 0.000."""
    rows = [replace(row, score=1e-5 * row.score) for row in score_rows()]
    tables = {}
    for name, own in (("plain", score_rows()), ("small", rows)):
        blocks = rewards_section(judge_rows(own, beta=1.0, draws=5), record).blocks
        tables[name] = {row[0]: row[1] for table in blocks if isinstance(table, Table) for row in table.rows}
    for number in ("margin, mean", "margin, standard deviation", "reward of all replies, standard deviation"):
        plain, small = (float(tables[name][number].split(" ")[0]) for name in ("plain", "small"))
        assert small == pytest.approx(1e-5 * plain, rel=0.02)
    assert tables["small"]["share of margins below 0"] == tables["plain"]["share of margins below 0"]
