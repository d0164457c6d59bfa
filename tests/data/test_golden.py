"""Every format, from rows as they are published to the prompt, replies and judgements that are meant.

The files in golden/ were written by hand: `rows` is the dataset, everything else what is to come of it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from loading import ALLOW_DROPS, load, write
from rewardlab.core.types import Comparison, Conversation, Preference
from rewardlab.curation.rows import walk
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.formats import SCHEMAS
from rewardlab.data.judgements import Rules
from rewardlab.data.rows import Row
from rewardlab.data.sources import open_units, parse_units

FOLDER = Path(__file__).parent / "golden"
GOLDEN = sorted(path.stem for path in FOLDER.glob("*.json"))


def golden(name: str) -> dict[str, Any]:
    """A file of what is given and what is meant."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def said(turns: Conversation) -> list[str]:
    """Turns as the files write them."""
    return [f"{turn.role}: {turn.content}" for turn in turns]


def plain(preference: Preference) -> dict[str, Any]:
    """A preference as the files write it: of its comparisons only what is not the default."""
    usual = {field.name: field.default for field in dataclasses.fields(Comparison)}
    return {
        "row": int(preference.id.rpartition(":")[2]),
        "prompt": said(preference.prompt),
        "replies": [said(reply) for reply in preference.replies],
        "comparisons": [
            {name: value for name, value in dataclasses.asdict(one).items() if value != usual[name]}
            for one in preference.comparisons
        ],
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_become_the_prompt_replies_and_judgements_that_are_meant(tmp_path: Path, name: str) -> None:
    meant = golden(name)
    path = write(tmp_path / "rows.jsonl", meant["rows"])
    loaded = load(path, **ALLOW_DROPS, **{key: as_setting(value) for key, value in meant["settings"].items()})
    found = [plain(preference) for preference in loaded.preferences]
    wanted = [{key: value for key, value in one.items() if key != "ranking"} for one in meant["preferences"]]
    assert found == wanted
    for one, preference in zip(meant["preferences"], loaded.preferences, strict=True):
        if "ranking" in one:
            assert preference.ranking == (None if one["ranking"] is None else tuple(one["ranking"]))
    (report,) = loaded.reports
    assert dict(report.dropped) == meant["dropped"]
    assert dict(report.skipped) == meant["skipped"]
    assert report.skipped_ties == meant.get("skipped_ties", 0)
    assert report.kept + sum(report.dropped.values()) == report.rows_read == meant.get("read", len(meant["rows"]))
    assert report.format.startswith(f"{meant['format']}, by the columns ")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_row_reads_the_same_wherever_it_is_parsed(tmp_path: Path, name: str) -> None:
    meant = golden(name)
    path = write(tmp_path / "rows.jsonl", meant["rows"])
    reading = ReadingConfig(**{key: as_setting(value) for key, value in meant["settings"].items()})
    (source,) = find_sources([str(path)], "train")
    rules = Rules(source=source.name, reading=reading, seed=0)
    schema, units = open_units(source, rules)
    together, tally = parse_units(units, source=source, schema=schema, rules=rules)
    one_by_one = [
        parse_units([unit], source=source, schema=schema, rules=rules) for unit in open_units(source, rules)[1]
    ]
    assert [preference for (preference,), _ in one_by_one] == together
    assert sum(part.kept for _, part in one_by_one) == tally.kept


def in_order(format: str, row: Row) -> list[str] | None:
    """The texts of the replies of a row in the order of the row; None where the format names the better one."""
    columns = IN_ORDER.get(format)
    if callable(columns):
        return columns(row)
    return None if columns is None else [str(row[column]).strip() for column in columns]


def first_words(reply: Any) -> str:
    """What a reply says first: a text, messages, or the texts of several turns, which may be JSON."""
    if isinstance(reply, str):
        return str(json.loads(reply)[0]) if reply.startswith("[") else reply
    first = next(turn for turn in reply if isinstance(turn, str) or turn["role"] == "assistant")
    return first if isinstance(first, str) else str(first["content"])


IN_ORDER: dict[str, Any] = {
    "SHP": ("human_ref_A", "human_ref_B"),
    "K-wise": lambda row: [first_words(one) for one in row["responses"]],
    "judged replies": lambda row: [first_words(one) for one in row["replies"]],
    "HelpSteer2-preference": ("response_1", "response_2"),
    "HelpSteer3": ("response1", "response2"),
    "MultiPref": ("completion_a", "completion_b"),
    "Unified-Feedback": lambda row: [row[f"conv_{side}"][-1]["content"] for side in "AB"],
    "PKU-SafeRLHF": ("response_0", "response_1"),
    "Nectar, answers with ranks": lambda row: [one["answer"] for one in row["answers"]],
    "NeMo-RL, completions with ranks": lambda row: [one["completion"][0]["content"] for one in row["completions"]],
    "UltraFeedback, completions with ratings": lambda row: [one["response"] for one in row["completions"]],
    "CodeUltraFeedback, rated responses of models": lambda row: [one["response"] for one in row["responses"]][:2],
    "Stack Exchange, answers with votes": lambda row: [one["text"] for one in row["answers"]],
    "WebGPT comparisons": ("answer_0", "answer_1"),
    "summarize-from-feedback": lambda row: [one["text"].strip() for one in row["summaries"]],
    "Chatbot Arena": lambda row: [first_words(row[f"conversation_{side}"]) for side in "ab"],
    "Chatbot Arena, 55k": lambda row: [first_words(row[f"response_{side}"]) for side in "ab"],
}
"""Format whose rows have an order that says nothing of which reply is better -> the columns, or a reader, of it."""
NAMED = {
    "long form, two rows a pair",
    "pairs with scores, as UltraFeedback binarised",
    "pairs with several annotators",
    "reward-bench",
    "RM-Bench",
    "pairs",
    "LLaMA-Factory's ShareGPT",
    "Alpaca preferences",
    "whole conversations or HH transcripts",
    "ms-swift, messages and a rejected reply",
    "OpenAI's preferred and non-preferred outputs",
    "HelpSteer, a rated reply a row",
    "unpaired replies, good or bad",
    "unpaired conversations, good or bad",
    "SHP, the judgements of a post together",
}
"""Formats that name the better reply, or join several rows."""


@pytest.mark.parametrize("name", GOLDEN)
def test_labels_go_in_both_directions_and_replies_have_the_places_of_the_row_unless_it_names_the_better_one(
    tmp_path: Path, name: str
) -> None:
    meant = golden(name)
    assert (meant["format"] in NAMED) != (meant["format"] in IN_ORDER)
    path = write(tmp_path / "rows.jsonl", meant["rows"])
    reading = ReadingConfig(**{key: as_setting(value) for key, value in meant["settings"].items()})
    (source,) = find_sources([str(path)], "train")
    directions = set()
    for row in walk(source, Rules(source=source.name, reading=reading, seed=0)):
        if row.parsed is None:
            continue
        preference, order = row.parsed.preference, row.parsed.order
        texts = in_order(meant["format"], row.rows[0])
        if texts is None:
            assert order is None
        else:
            assert order is not None
            assert [reply[0].content for reply in preference.replies] == [texts[place] for place in order]
        places = order or range(len(preference.replies))
        decided = (one for one in preference.comparisons if one.label != 0.5)
        directions |= {(places[one.first] < places[one.second]) == (one.label > 0.5) for one in decided}
    # The lists of RewardBench 2 and RM-Bench say which replies are better, and nothing can turn them round.
    assert directions == ({True} if name in ("rewardbench2", "rm_bench") else {True, False}), "both directions"


def as_setting(value: object) -> object:
    """Lists as the settings have them."""
    return tuple(value) if isinstance(value, list) else value


def test_every_format_has_a_golden_file() -> None:
    named = {golden(name)["format"] for name in GOLDEN}
    assert {schema.name for schema in SCHEMAS} <= named


def test_the_golden_files_have_empty_system_turns_several_turns_several_replies_and_ties() -> None:
    every = [(name, one) for name in GOLDEN for one in golden(name)["preferences"]]
    assert sum("system: " in one["prompt"] for _, one in every) >= 8
    assert sum(len(one["prompt"]) > 2 for _, one in every) >= 8
    assert sum(len(one["replies"]) > 2 for _, one in every) >= 8
    assert sum(any(c.get("label") == 0.5 for c in one["comparisons"]) for _, one in every) >= 5
