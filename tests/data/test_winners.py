"""What may name another reply as the better one than the one that is read is told, by whatever reads the rows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rewardlab.cli import main
from rewardlab.core.files import write_jsonl
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.winners import ROWS, first_of, other_winners, tell_other_winners

PAIR = {"prompt": "Why?", "chosen": "a", "rejected": "b"}
NAMELESS = {"chosen_column": "answer_1", "rejected_column": "answer_2"}


def told(rows: list[dict[str, Any]], **reading: Any) -> list[str]:
    return other_winners(rows, ReadingConfig(**reading))


def nameless(**more: list[Any]) -> list[dict[str, Any]]:
    """Rows with two replies whose names say nothing, and these columns."""
    rows = zip(*more.values(), strict=True)
    return [
        {"prompt": "q", "answer_1": f"a {n}", "answer_2": f"b {n}"} | dict(zip(more, row, strict=True))
        for n, row in enumerate(rows)
    ]


def test_a_verdict_that_nothing_reads_is_told() -> None:
    # Replies in the order in which they were shown, and which of them won: without the label every row says that the
    # first did, and a model of these labels is worth nothing.
    rows = [{"q": f"q {n}", "a": f"a {n}", "b": f"b {n}", "winner": "AB"[n % 2], "strength": n} for n in range(6)]
    flags = {"prompt_column": "q", "chosen_column": "a", "rejected_column": "b"}
    (line,) = told(rows, **flags)
    assert line == (
        "the column winner is not read: the reply in a counts as the better one in every row. If winner (A, B) says "
        "which of the two is, name it with --label-column winner, and with --map-label VALUE=1 what means a, with "
        "VALUE=0 what means b, with VALUE=0.5 a tie."
    )
    assert not told(rows, label_column="winner", map_label=("A=1", "B=0"), **flags)
    for name, values in (("preferred_response", (1, 2)), ("Human_Preference", ("left", "right", "tie"))):
        named = [PAIR | {"chosen": f"a {n}", name: values[n % len(values)]} for n in range(6)]
        assert f"the column {name} is not read" in told(named)[0]


def test_columns_that_are_no_verdict_are_not_told() -> None:
    for more in (
        [{"winner": "A"}, {"winner": "A"}],  # the same in every row: the rows are sorted already
        [{"winner": f"model {n}"} for n in range(9)],
        [{"preference": {"a": 1}}, {"preference": {"b": 1}}],
        [{"preference_strength": n % 2} for n in range(4)],
        [{"better_response_id": n % 2} for n in range(4)],
        [{"answer": "AB"[n % 2]} for n in range(4)],
        [{"winner": "AB"[n % 2], "label": n % 2} for n in range(4)],
    ):
        assert not told([PAIR | {"chosen": f"a {n}"} | row for n, row in enumerate(more)])


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("better_response_id", [0, 1], "0, 1"),  # PKU-SafeRLHF
        ("safer_response_id", [0, 1], "0, 1"),
        ("overall_preference", [-3, 0, 2, 1, -1, 3], "-3, -1, 0, 1, …"),  # HelpSteer3
        ("preference_strength", [-2, 2], "-2, 2"),  # HelpSteer2-preference
        ("overall_response", [1, 2], "1, 2"),  # Align-Anything
        ("preference_score", [0.25, 0.125, 0.75, 0.5, 1.0], "0.125, 0.25, 0.5, 0.75, …"),
        ("gpt4Preference", ["first", "second", "tie"], "first, second, tie"),
    ],
)
def test_where_the_names_of_the_replies_say_nothing_more_columns_may_be_verdicts(
    name: str, values: list[Any], shown: str
) -> None:
    (line,) = told(nameless(**{name: values}), **NAMELESS)
    assert f"If {name} ({shown}) says which of the two is, name it with --label-column {name}, " in line
    assert not told(nameless(**{name: values}), label_column=name, map_label=("x=1",), **NAMELESS)


def test_what_is_read_and_other_numbers_and_words_are_no_verdicts() -> None:
    sides = {"chosen_column": "answer_1", "rejected_column": "answer_2"}
    margins = nameless(preference_margin=[0.5, 1.5, 2.5])
    assert told(margins, **sides)
    assert not told(margins, margin_column="preference_margin", **sides)
    assert not told(nameless(num_votes=list(range(9))), **sides)
    assert not told(nameless(overall_length=list(range(100, 190, 10))), **sides)
    assert not told(nameless(preferred_language=["en", "de", "fr"]), **sides)
    assert told(nameless(safer_answer=["answer 1", "answer 2"]), **sides)


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("pw", ["left", "right"], "left, right"),
        ("pw", [[{"selected": "left"}], [{"selected": "right"}]], "left, right"),  # Label Studio, JSON_MIN
        ("pw", ['[{"selected": "left"}]', '[{"selected": "right"}]'], "left, right"),  # the same as CSV
        ("quality.responses", [["answer_1", "answer_2"], ["answer_1"], None], "answer_1, answer_2"),  # Argilla
        ("mark", ["Answer 1", "answer-2", "both"], "Answer 1, answer-2, both"),
        ("mark", ["answer_1", "answer_2", "tie", "both bad", "neither"], "answer_1, answer_2, both bad, neither, …"),
    ],
)
def test_a_column_of_any_name_that_names_both_replies_is_told(name: str, values: list[Any], shown: str) -> None:
    # Each of these exports trained half of its rows the wrong way round, and nothing was said.
    (line,) = told(nameless(**{name: values}), **NAMELESS)
    assert line.startswith(f"the column {name} is not read: the reply in answer_1 counts as the better one in every")
    assert f"If {name} ({shown}) says which" in line
    assert not told(nameless(**{name: values}), label_column=name, map_label=("left=1",), **NAMELESS)


def test_columns_that_name_one_reply_or_none_or_stand_beside_named_sides_are_not_told() -> None:
    assert not told(nameless(shown_first=["answer_1", "answer_1"]), **NAMELESS)
    assert not told(nameless(politics=["left", "centre"], tags=[["left"], ["north"]]), **NAMELESS)
    assert not told(nameless(leaning=["left", "right", "center"], tags=[["left", "right"], ["up"], None]), **NAMELESS)
    assert not told([PAIR | {"chosen": f"a {n}", "wing": ("left", "right")[n % 2]} for n in range(4)])
    assert not told(nameless(note=[f"answer_{n % 2 + 1}{n}" for n in range(9)]), **NAMELESS)


def test_rows_that_cannot_be_looked_at_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(path := tmp_path / "rows.jsonl", [PAIR])
    (source,) = find_sources([str(path)], "train")
    path.unlink()
    assert first_of(source) == []
    odd = [PAIR | {"preference_\ud83d": n} for n in range(2)] + [PAIR | {"score_chosen": 10**5000, "score_rejected": 1}]
    tell_other_winners(source, ReadingConfig(), odd)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "names", [("response_a", "response_b"), ("answerA", "answerB"), ("first", "second"), ("output-1", "output-2")]
)
def test_such_names_differ_in_a_place_alone(names: tuple[str, str]) -> None:
    rows = [{"prompt": "q", names[0]: f"a {n}", names[1]: f"b {n}", "overall_response": n} for n in (1, 2)]
    assert len(told(rows, chosen_column=names[0], rejected_column=names[1])) == 1
    others = [{"prompt": "q", "good": f"a {n}", "bad": f"b {n}", "overall_response": n} for n in (1, 2)]
    assert not told(others, chosen_column="good", rejected_column="bad")


def test_ratings_against_the_order_of_the_replies_are_told() -> None:
    rows = nameless(rating_1=[5, 2, 4, 3], rating_2=[1, 3, 4, None], rating_1_model=["m", "n", "o", "p"])
    (line,) = told(rows, **NAMELESS)
    assert line == (
        "rating_2 is above rating_1 in 1 of the first 3 rows, and the reply in answer_1 counts as the better one in "
        "every row. If the higher number is that of the better reply, write both replies as `responses` and the "
        "numbers as `scores`, or turn such rows round."
    )
    assert not told(nameless(rating_1=[5, 4], rating_2=[1, 3]), **NAMELESS), "sorted by them"
    assert not told(nameless(words_1=[5, 4], words_2=[9, 9]), **NAMELESS), "no rating"


@pytest.mark.parametrize(("against", "lines"), [(0, 0), (2, 0), (6, 1), (20, 1)])
def test_scores_of_chosen_and_rejected_that_are_against_many_choices_are_told(against: int, lines: int) -> None:
    rows = [PAIR | {"chosen_score": n, "rejected_score": n + (1 if n < against else -1)} for n in range(20)]
    assert len(told(rows)) == lines
    assert not told([row | {"label": 0.0} for row in rows]), "a label says which is better"


def test_equal_scores_of_both_sides_which_count_as_wins_are_told() -> None:
    rows = [PAIR | {"score_chosen": 5.0, "score_rejected": 5.0 if n < 3 else 1.0} for n in range(20)]
    (line,) = told(rows)
    assert line.startswith("score_rejected equals score_chosen in 3 of the first 20 rows, and the reply in chosen")
    assert not told([row | {"label": 0.5} for row in rows[:3]] + [row | {"label": 1.0} for row in rows[3:]])
    assert not told(rows[3:])


def test_lists_of_texts_that_were_written_as_text_are_told() -> None:
    rows = [{"prompt": "Why?", "chosen": str(["Because."]), "rejected": str(["It's so.", "No."])} for _ in range(3)]
    (line,) = told(rows)
    assert line.startswith("chosen and rejected hold lists that were written as text in 3 of the first 3 rows, such as")
    assert not told([PAIR | {"chosen": '["a", "b"]', "rejected": "['a', 'b']"}]), "one of them may be a reply"
    assert not told([PAIR | {"chosen": '["a"]', "rejected": '["b"]'}]), "JSON, as a reply may be"
    assert not told([rows[0], PAIR, PAIR]), "in a few rows"


def test_replies_that_repeat_their_prompt_are_told() -> None:
    asked = "How do I keep basil alive?"
    rows = [{"prompt": asked, "chosen": f"{asked} Light.", "rejected": f"\n{asked}\nNo."} for _ in range(3)]
    (line,) = told(rows)
    assert "begin with the text of prompt in 3 of the first 3 rows, so it is read twice" in line
    assert not told([{**row, "rejected": "No."} for row in rows])
    assert not told([{"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi."}]), "as replies begin"
    asked = "\n\nHuman: Why is it so?\n\nAssistant:"
    assert not told([{"prompt": asked, "chosen": f"{asked} So.", "rejected": f"{asked} No."}]), "read without it"


def test_ratings_of_both_sides_by_any_name_are_looked_at() -> None:
    for first, second in (("chosen_reward", "rejected_reward"), ("rm_score_chosen", "rm_score_rejected")):
        rows = [PAIR | {first: 1.0, second: 2.0 + n} for n in range(6)]
        assert f"{second} is above {first} in 6 of the first 6 rows" in told(rows)[0]
        assert not told([PAIR | {first: 3.0, second: 2.0} for _ in range(6)])
    assert not told([PAIR | {"chosen_model_elo": 1, "rejected_model_elo": 2}]), "of models, not of replies"


@pytest.mark.parametrize("name", ["toxicity", "Toxicity", "harm", "PPL", "perplexity", "rank", "token_count", "length"])
def test_numbers_that_are_better_the_lower_they_are_are_no_ratings_of_a_side(name: str) -> None:
    assert not told([PAIR | {f"chosen_{name}_score": 1, f"rejected_{name}_score": 9} for _ in range(6)])
    assert not told(nameless(**{f"{name}_score_1": [1, 2], f"{name}_score_2": [9, 9]}), **NAMELESS)
    assert told([PAIR | {"chosen_harmlessness_score": 1, "rejected_harmlessness_score": 9} for _ in range(6)])


@pytest.mark.parametrize("flag", ["margin", "strength"])
def test_margins_and_strengths_with_their_sign_turned_are_told(flag: str) -> None:
    def lines(values: list[Any]) -> list[str]:
        return told([PAIR | {"m": value} for value in values], **{f"{flag}_column": "m"})

    (line,) = lines([-1.5, "-2", 3, None])
    assert f"m is below 0 in 2 of the first 3 rows, which are dropped: a {flag} says by how much" in line
    assert line.endswith(
        " If a label says which reply that is, give the absolute value; if the other reply is the better one where it "
        "is below 0, turn the replies and the sign round in those rows alone."
    )
    (line,) = lines([-1] * 10 + [1])
    assert " minus that reply's, turn its sign round; if the other" in line, "as good as all"
    assert lines([1, 2, 0]) == lines([-1] + [1] * 10) == lines(["a", None]) == []
    assert not told([PAIR | {"m": -1}])


def test_ranks_that_are_read_as_scores_are_told() -> None:
    rows = [{"prompt": "q", "responses": ["a", "b", "c"], "ranks": [3, 1, 2]}]
    assert "ranks are read as scores: the reply with the largest number counts" in told(rows, scores_column="ranks")[0]
    assert told([rows[0] | {"ranks": "[3, 1, 2]"}], scores_column="ranks"), "as CSV has them"
    assert not told([rows[0] | {"ranks": [-3, -1, -2]}], scores_column="ranks")
    assert not told([rows[0] | {"good": [3, 1, 2]}], scores_column="good")
    alone = [{"prompt": "q", "response": "a", "rank": 1}]
    (line,) = told(alone, attributes=("rank=0.5",))
    assert line.endswith("counts as the best one. If 1 is the best, give --attributes rank=-0.5.")
    assert not told(alone, attributes=("rank=-1",))


def test_a_label_that_is_the_number_of_the_better_reply_is_told() -> None:
    # As a probability 0 is a win of the second reply, as a number one of the first: every row would be turned round.
    rows = nameless(better_response_id=[0, 1, 0])
    (line,) = told(rows, label_column="better_response_id", **NAMELESS)
    assert "1 means answer_1, 0 means answer_2. If it is the number of the better reply, give --map-label 0=1" in line
    for said in ("0=1", "1=0"), ("1=1", "0=0"):
        assert not told(rows, label_column="better_response_id", map_label=said, **NAMELESS)
    assert not told(nameless(share_id=[0.2, 1.0]), label_column="share_id", **NAMELESS)
    assert not told(nameless(first_is_better=[0, 1]), label_column="first_is_better", **NAMELESS)


def test_sides_that_are_names_of_columns_are_told() -> None:
    rows = [{"prompt": "q", "a": "x", "b": "y", "chosen": "ab"[n], "rejected": "ba"[n]} for n in (0, 1)]
    (line,) = told(rows)
    assert line.startswith("chosen and rejected hold a and b, which are columns of the row: these words are read as")
    assert not told([*rows, PAIR]), "in all rows, or they may be texts"


def test_whatever_reads_rows_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], base_model: Path) -> None:
    verdicts = [n % 2 for n in range(80)]
    write_jsonl(path := tmp_path / "rows.jsonl", nameless(better_response_id=verdicts))
    flags = [str(path), "--chosen-column", "answer_1", "--rejected-column", "answer_2"]
    model = ["--model", str(base_model), "--max-seq-len", "128"]
    for command in (
        ["data", "inspect", *flags],
        ["data", "audit", *flags],
        ["data", "convert", *flags, "--output", str(tmp_path / "converted.jsonl")],
        ["data", "mix", *flags, "--output", str(tmp_path / "mixed.jsonl")],
        ["data", "split", *flags, "--near", "none", "--output-dir", str(tmp_path / "split")],
        ["data", "mislabels", *flags, *model, "--output-dir", str(tmp_path / "searched")],
        ["train", "--dataset", *flags, *model, "--steps", "1", "--output-dir", str(tmp_path / "run"), "--dry-run"],
    ):
        with suppress(SystemExit):  # an audit above its limits
            main(command)
        told = "".join(capsys.readouterr())
        assert told.count("the column better_response_id is not read") == 1, (command, told)


def test_no_more_rows_are_looked_at_than_can_be_read(tmp_path: Path) -> None:
    rows = nameless(better_response_id=[0] * ROWS + [1])
    write_jsonl(path := tmp_path / "rows.jsonl", rows)
    (source,) = find_sources([str(path)], "train")
    assert first_of(source) == rows[:ROWS]
    path.write_text('{"prompt": "q"}\n{damaged\n', encoding="utf-8")
    assert first_of(source) == [{"prompt": "q"}], "what is behind the damage is told elsewhere"
