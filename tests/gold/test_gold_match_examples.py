"""`gold match`: pairs that a proxy orders against gold, to be read by eye."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.gold_rows import Size, draw_rows, draw_scores, gold_of, proxy
from rewardlab.core.errors import ConfigError
from rewardlab.gold.files.layouts import write_rows
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.matching.columns import Part, part_of
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.examples import as_shown, examples_of
from rewardlab.gold.matching.report import json_report, page, text_report
from rewardlab.gold.matching.run import match
from rewardlab.gold.proxies import Proxy
from rewardlab.report.markdown import markdown_page
from told_tables import tables, without_method


def drawn(rows: int = 60, replies: int = 3) -> list[GoldRow]:
    return draw_rows(Size(rows, replies), np.random.default_rng(0))


def scored(rows: list[GoldRow], seed: int = 1) -> np.ndarray:
    return draw_scores(rows, 0.7, np.random.default_rng(seed))


def part(rows: list[GoldRow], *scores: np.ndarray) -> Part:
    return part_of("test", rows, [proxy(own, f"p{number}") for number, own in enumerate(scores)])


def test_they_are_the_wrong_pairs_of_which_gold_is_surest_one_a_prompt() -> None:
    rows, own = drawn(), scored(drawn())
    gold = gold_of(rows)
    wrong: dict[str, float] = {}
    count = 0
    for number, row in enumerate(rows):
        for one in range(3):
            for other in range(one):
                apart = gold[number, one] - gold[number, other]
                if apart * (own[number, one] - own[number, other]) < 0:
                    count += 1
                    wrong[row.key] = max(wrong.get(row.key, 0.0), abs(apart))
    found = examples_of(part(rows, own), "p0", 4)
    assert found.num_wrong == count
    assert [one.gold[0] - one.gold[1] for one in found.pairs] == pytest.approx(sorted(wrong.values())[::-1][:4])
    for one in found.pairs:
        assert one.scores["p0"][0] < one.scores["p0"][1], "gold prefers the first, and the proxy the second"
        row = rows[one.row - 1]
        assert (row.id, row.prompt) == (one.id, one.prompt)
        first, second = one.replies
        assert one.texts == (row.responses[first], row.responses[second])
        assert one.gold == (gold[one.row - 1, first], gold[one.row - 1, second])
        assert one.scores["p0"] == (own[one.row - 1, first], own[one.row - 1, second])


def test_replies_that_are_left_out_do_not_move_the_numbers_of_the_others() -> None:
    rows = drawn()
    partly = Proxy(name="p0", scores=tuple((None, *own[1:]) for own in scored(rows).tolist()))
    found = examples_of(part_of("test", rows, [partly]), "p0", 3)
    assert found.pairs
    for one in found.pairs:
        assert set(one.replies) == {1, 2}
        assert one.texts == tuple(rows[one.row - 1].responses[number] for number in one.replies)


def test_a_proxy_that_is_gold_has_none_and_ties_are_none() -> None:
    rows = drawn()
    for scores in (gold_of(rows), np.zeros((60, 3))):
        found = examples_of(part(rows, scores), "p0", 3)
        assert (found.num_wrong, found.pairs) == (0, ())


def files(folder: Path, rows: list[GoldRow], **proxies: np.ndarray) -> dict[str, object]:
    write_rows(folder / "labels.jsonl", (row.as_json() for row in rows))
    for name, scores in proxies.items():
        (folder / f"{name}.json").write_text(json.dumps(scores.tolist()), encoding="utf-8")
    named = tuple(f"{name}={folder / name}.json" for name in proxies)
    return {"input": (folder / "labels.jsonl",), "proxies": named, "output_dir": folder / "match"}


def test_every_form_of_the_report_shows_both_scores_of_both_replies(tmp_path: Path) -> None:
    rows = drawn()
    config = MatchConfig.of(**files(tmp_path, rows, small=scored(rows), good=gold_of(rows)), num_examples=2)
    found = match(config)
    assert {name: len(one.pairs) for name, one in found.examples.items()} == {"small": 2, "good": 0}
    first = found.examples["small"].pairs[0]
    shown = as_shown(first)
    assert f"gold prefers reply {first.replies[0]} by " in shown.title
    heading = f"reply {first.replies[1]}: gold {first.gold[1]:.4g}, small {first.scores['small'][1]:.4g}, good "
    text, markdown = text_report(found), markdown_page(page(found))
    assert heading in text
    assert shown.title in text
    assert heading in markdown.replace("\\", "")
    assert "Where small and gold differ most" in markdown
    assert "good orders none of " in " ".join(text.split())
    told = json_report(found, config)["examples"]["small"]
    assert told["pairs"][0]["scores"]["small"] == list(first.scores["small"])
    assert told["num_wrong"] == found.examples["small"].num_wrong


def test_none_are_shown_where_none_are_asked_for(tmp_path: Path) -> None:
    rows = drawn()
    config = MatchConfig.of(**files(tmp_path, rows, small=scored(rows)), num_examples=0)
    found = match(config)
    assert found.examples == {}
    assert "against gold. Shown below" not in text_report(found)
    with pytest.raises(ConfigError, match="num-examples"):
        MatchConfig.of(**files(tmp_path, rows, small=scored(rows)), num_examples=-1)


def test_long_texts_are_cut_and_control_characters_are_written_out(tmp_path: Path) -> None:
    rows = drawn()
    rows = [
        GoldRow(
            id=row.id, prompt=row.prompt, responses=tuple(f"{text}\x1b[2J{'x' * 500}" for text in row.responses),
            gold=row.gold,
        )
        for row in rows
    ]  # fmt: skip
    text = text_report(match(MatchConfig.of(**files(tmp_path, rows, small=scored(rows)), num_examples=1)))
    assert "more characters)" in text
    assert "\x1b" not in text


def test_every_table_of_the_page_says_how_its_intervals_were_made(tmp_path: Path) -> None:
    rows = drawn()
    proxies = {"small": scored(rows), "other": scored(rows, seed=2), "good": gold_of(rows)}
    shown = list(tables(page(match(MatchConfig.of(**files(tmp_path, rows, **proxies))))))
    assert {"Match on test, paired", "Which may be the best", "Scores on test"} <= {table.caption for table in shown}
    assert without_method(shown) == []
