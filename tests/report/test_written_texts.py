"""Texts of mistakes are those that the evaluation wrote, where they are whole, and are found again otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rewardlab.analysis.mistakes import margin_of, sides_of, worst_mistakes
from rewardlab.core.files import write_jsonl
from rewardlab.core.types import Comparison, ScoredComparison, ScoreRow
from rewardlab.evaluation.texts import find_texts
from rewardlab.report.build import report_of, tell
from rewardlab.report.folder import read_folder
from rewardlab.report.markdown import markdown_page
from rewardlab.report.mistakes import FoundTexts, KnownTexts, keys_of, written_texts
from run_folders import prompt_of, score_rows, write_evaluation

Row = dict[str, Any]


def line_of(joined: ScoredComparison) -> Row:
    """A line as `evaluation.records.write_mistakes` writes it."""
    number = int(joined.preference_id.rsplit(":", 1)[1]) - 1
    preferred, other = (
        {
            "reply": row.reply,
            "score": row.score,
            "messages": [{"role": "assistant", "content": f"written {row.reply} of {number}"}],
        }
        for row in sides_of(joined)
    )
    return {
        "source": joined.source,
        "preference_id": joined.preference_id,
        "margin": margin_of(joined),
        "prompt": [turn.as_dict() for turn in prompt_of(number)],
        "preferred": preferred,
        "other": other,
    }


@pytest.fixture
def mistakes() -> tuple[ScoredComparison, ...]:
    return tuple(worst_mistakes(score_rows(), most=3).comparisons)


def test_the_report_of_an_evaluation_needs_its_data_no_more(tmp_path, mistakes) -> None:
    write_evaluation(tmp_path, "eval", score_rows())
    write_jsonl(tmp_path / "eval.mistakes.jsonl", map(line_of, mistakes[:2]))
    config = {"model": "m", "dataset": [str(tmp_path / "gone.jsonl")]}
    (tmp_path / "manifest.json").write_text(json.dumps({"config": config, "data": [], "tokens": {}, "provenance": {}}))
    asked: list[list[tuple[str, str]]] = []

    def found(config: Any, name: str, wanted: Any, rows: Any) -> FoundTexts:
        asked.append(list(wanted))
        return find_texts(config, name, wanted, rows)

    told = tell(read_folder(tmp_path), find_texts=found, num_mistakes=3, draws=20)
    text = markdown_page(report_of([told]))
    assert asked == [keys_of(mistakes[2:])], "only what was not written is looked for"
    assert text.count("written 0 of") == text.count("written 1 of") == 2
    assert "gone.jsonl" in text, "why the third is missing"
    hidden = tell(read_folder(tmp_path), find_texts=None, num_mistakes=3, draws=20)
    assert "written 0 of" not in markdown_page(report_of([hidden]))


def change(part: str, name: str, value: object) -> Callable[[Row], None]:
    return lambda line: line[part].__setitem__(name, value) if part else line.__setitem__(name, value)


@pytest.mark.parametrize(
    "damage",
    [
        change("", "prompt", None),
        change("", "prompt", [{"role": "user", "content": "another"}]),
        change("", "prompt", [7]),
        change("", "source", "elsewhere"),
        change("preferred", "score", 1e9),
        change("other", "reply", 5),
        change("other", "messages", None),
        change("other", "messages", [{"role": "assistant"}]),
        change("", "other", []),
    ],
)
def test_a_line_that_is_not_what_was_judged_gives_no_text(tmp_path, mistakes, damage) -> None:
    path = tmp_path / "eval.mistakes.jsonl"
    lines = [line_of(joined) for joined in mistakes]
    damage(lines[1])
    write_jsonl(path, lines)
    assert set(written_texts(path, mistakes)) == set(keys_of([mistakes[0], mistakes[2]]))


def test_a_torn_file_gives_none(tmp_path, mistakes) -> None:
    path = tmp_path / "eval.mistakes.jsonl"
    assert written_texts(path, mistakes) == {}
    write_jsonl(path, map(line_of, mistakes))
    assert len(written_texts(path, mistakes)) == 3
    path.write_text(path.read_text()[:-20])
    assert written_texts(path, mistakes) == {}


def test_of_several_replies_the_texts_of_all_comparisons_are_there_or_none_is_taken(tmp_path) -> None:
    comparisons = (Comparison(first=0, second=3), Comparison(first=1, second=3, label=1.0))
    one = replace(score_rows(1)[0], score=0.0, comparisons=())
    rows: list[ScoreRow] = [
        replace(one, reply=reply, score=float(reply), comparisons=tuple(c for c in comparisons if c.first == reply))
        for reply in range(4)
    ]
    wrong = worst_mistakes(rows, most=9).comparisons
    path = tmp_path / "eval.mistakes.jsonl"
    write_jsonl(path, map(line_of, wrong))
    (found,) = written_texts(path, wrong).values()
    assert [bool(reply) for reply in found.replies] == [True, True, False, True]
    assert found.replies[3][0].content == "written 3 of 0"
    write_jsonl(path, map(line_of, wrong[:1]))
    assert written_texts(path, wrong) == {}


def test_known_texts_are_found_texts() -> None:
    assert isinstance(KnownTexts(preferences={}, ceiling=None, turns={}, problems=()), FoundTexts)
