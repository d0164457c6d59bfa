"""Which format was found is said where rows are read, also of data that come from the cache, and kept in the report."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from common import make_tokenizer
from loading import write
from rewardlab.data.prepare import load_data
from rewardlab.data.templates import build_renderer
from rewardlab.training.settings.config import RewardTrainerConfig

JUDGED = [
    {"post_id": "p", "history": "Why?", "human_ref_A": "a", "human_ref_B": f"b{k}", "labels": 1, "score_ratio": 1.0 + k}
    for k in range(4)
]


def prepared(path: Path, folder: Path, *, shows_row: bool = False, **settings: Any) -> dict[str, Any]:
    """What the manifest says of the data."""
    given = {"model": "m", "dataset": (str(path),), "eval_fraction": 0.0, "cache_dir": str(folder), "num_workers": 1}
    config = RewardTrainerConfig.of(**{**given, **settings})
    renderer = build_renderer(make_tokenizer(), config.data.rendering)
    return load_data(config.data, renderer, seed=0, shows_row=shows_row).reports


@pytest.mark.parametrize(
    ("settings", "format", "skipped", "comparisons"),
    [
        ({}, "SHP, by the columns history, human_ref_A, human_ref_B, labels", {}, 4),
        (
            {"shp": "kwise", "min_score_ratio": 2.0, "max_per_post": 2},
            "SHP, the judgements of a post together, by the columns history, human_ref_A, human_ref_B, labels",
            {"low_score_ratio": 1, "over_post_cap": 1},
            2,
        ),
    ],
    ids=["pairs", "by post"],
)
def test_format_and_what_flags_left_out_are_logged_and_reported(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    format: str,
    skipped: Any,
    comparisons: int,
) -> None:
    path = write(tmp_path / "shp.jsonl", JUDGED)
    for again in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="rewardlab"):
            reports = prepared(path, tmp_path / "cache", **settings)
        said = [record.getMessage() for record in caplog.records]
        assert f"data: shp[all rows]: format: {format}" in said
        assert reports["preparation"][0]["from_cache"] == again
        (report,) = reports["train"]
        assert (report["format"], report["skipped"]) == (format, skipped)
        assert comparisons + sum(report["skipped"].values()) + sum(report["dropped"].values()) == len(JUDGED)
        line = "data: shp[all rows]: judgements of kept posts left out: low_score_ratio 1, over_post_cap 1"
        assert (line in said) == bool(skipped)


def test_the_first_row_that_can_be_used_is_shown_as_it_was_understood(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "p", "good": "", "bad": "r"}, {"question": "Why?\x1b[2J", "good": "A" * 999, "bad": "b\nc"}]
    path = write(tmp_path / "mine.jsonl", rows * 3)
    given = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad", "max_drop_fraction": 0.9}
    for shows_row in (True, True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="rewardlab"):
            prepared(path, tmp_path / "cache", shows_row=shows_row, **given)
        said = [record.getMessage().removeprefix("data: mine[all rows]: ") for record in caplog.records]
        if not shows_row:
            assert not any("first row" in line or "Why?" in line for line in said), "texts are not to be in the log"
            continue
        first = said.index("first row: mine.jsonl:2 (mine)")
        assert said[first + 1 : first + 9] == [
            "  prompt:",
            r"    [user] Why?\x1b[2J",
            "  reply 0:",
            f"    [assistant] {'A' * 107} […839 characters…] {'A' * 53}",
            "  reply 1:",
            "    [assistant] b",
            "      c",
            "  reply 0 over reply 1",
        ]


def test_rows_that_make_one_preference_together_are_shown_together_and_long_ones_in_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "rows.jsonl", JUDGED)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        prepared(path, tmp_path / "cache", shows_row=True, shp="kwise")
    said = [record.getMessage().removeprefix("data: rows[all rows]: ") for record in caplog.records]
    first = said.index("first row: rows.jsonl:1 (rows)")
    shown = said[first : first + 17]
    assert shown[3] == "  reply 0:"
    assert "  reply 4:" in shown, "all judgements of the post"
    assert shown[-1] == "  … (lines left out: 1)"
    many = write(tmp_path / "few.jsonl", [{"prompt": "p", "responses": ["a", "b"], "scores": [1, 2]}])
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        prepared(many, tmp_path / "cache", shows_row=True)
    assert not any("left out" in record.getMessage() for record in caplog.records)


def test_a_flag_for_another_format_than_any_that_was_found_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "Why?", "chosen": f"a{n}", "rejected": "b"} for n in range(4)])
    shp = write(tmp_path / "shp.jsonl", JUDGED)

    def told(*paths: Path, **flags: Any) -> list[str]:
        caplog.clear()
        prepared(paths[0], tmp_path / "cache", **{"dataset": tuple(map(str, paths)), **flags})
        return [record.getMessage() for record in caplog.records if "does nothing" in record.getMessage()]

    flags = {"max_per_post": 2, "min_score_ratio": 1.5, "attributes": ("helpfulness=1",)}
    said = told(pairs, **flags)
    assert [line.split()[1] for line in said] == ["--max-per-post", "--min-score-ratio", "--attributes"]
    assert "it is for rows of SHP, and none of the data are" in said[0]
    assert not told(pairs, shp, max_per_post=2, min_score_ratio=1.5)
    assert not told(pairs)
    rated = write(tmp_path / "rated.jsonl", [{"prompt": "Why?", "response": f"a{n}", "clarity": n} for n in range(3)])
    assert not told(rated, attributes=("clarity=1",))
    votes = [{"text": "a", "pm_score": 1, "words": 2}, {"text": "b", "pm_score": 2, "words": 1}]
    answered = write(tmp_path / "answered.jsonl", [{"question": "Why?", "answers": votes}])
    assert not told(answered, attributes=("words=1",)), "it does something there"
    sure = [{"prompt": "Why?", "chosen": f"a{n}", "rejected": "b", "sure": n + 1} for n in range(4)]
    assert not told(write(tmp_path / "sure.jsonl", sure), strength_column="sure")


def test_in_a_mix_the_datasets_that_a_flag_is_not_for_are_named(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "Why?", "chosen": f"a{n}", "rejected": "b"} for n in range(4)])
    shp = write(tmp_path / "shp.jsonl", JUDGED)

    def told(*paths: Path, **flags: Any) -> list[str]:
        log.clear()
        prepared(paths[0], tmp_path / "cache", **{"dataset": tuple(map(str, paths)), **flags})
        return [record.getMessage() for record in log.records if "does nothing" in record.getMessage()]

    assert told(pairs, shp, min_score_ratio=1.5) == [
        "data: --min-score-ratio does nothing for pairs[all rows]: it is for rows of SHP."
    ]
    assert told(pairs, shp) == told(shp, min_score_ratio=1.5) == []
    (alone,) = told(pairs, min_score_ratio=1.5)
    assert alone.endswith("none of the data are. Leave it out, or see which format was recognised above.")


GOOD_AND_BAD = [{"prompt": "Why?", "response": name, "sure": 9} for name in ("a", "b")]


@pytest.mark.parametrize(
    "rows",
    [
        [row | {"sure": 9} for row in JUDGED],
        [row | {"helpfulness": n} for n, row in enumerate(GOOD_AND_BAD)],
        [row | {"label": bool(n)} for n, row in enumerate(GOOD_AND_BAD)],
        [{"prompt": "Why?", "response_1": "a", "response_2": "b", "preference_strength": -2, "sure": 9}],
        [{"question": "Why?", "answers": [{"text": t, "pm_score": n} for n, t in enumerate("ab")], "sure": 9}],
        [{"question": {"full_text": "Why?"}, "answer_0": "a", "answer_1": "b", "score_0": 1, "score_1": 0, "sure": 9}],
        [
            {
                "instruction": "Why?",
                "completions": [{"response": t, "overall_score": n} for n, t in enumerate("ab")],
                "sure": 9,
            }
        ],
    ],
)
def test_a_column_of_strengths_beside_votes_or_ratings_is_told(
    rows: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "own.jsonl", rows)
    prepared(path, tmp_path / "cache", strength_column="sure")
    assert (
        "data: --strength-column does nothing: it is for rows that take their strength from a column, not from votes "
        "or ratings, and none of the data are." in caplog.text
    )


def test_a_margin_or_weight_that_nothing_reads_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sides = {"prompt": "Why?", "rejected": "b"}

    def told(name: str, *rows: dict[str, Any], **flags: Any) -> list[str]:
        caplog.clear()
        path = write(tmp_path / name, [sides | {"chosen": f"a{n}"} | row for n, row in enumerate(rows)])
        prepared(path, tmp_path, **flags)
        return [record.getMessage() for record in caplog.records if "is not read" in record.getMessage()]

    both = {"weight": 0.5, "margin": 2}
    margin, weight = told("both.jsonl", both, both)
    assert margin == (
        "data: both.jsonl: the column margin is not read; --margin-column margin takes it as a margin in the loss."
    )
    assert "the column weight is not read; --strength-column weight --strength-as weight weights" in weight
    assert told("both.jsonl", both, both) == [margin, weight], "also from the cache"
    assert told("both.jsonl", both, both, margin_column="margin") == [weight]
    strong = {"margin": 2, "strength": 1}
    assert not told("strong.jsonl", strong, strong, strength_as="margin"), "the two flags do not go together"
    assert told("texts.jsonl", {"margin": "2"}) == [margin.replace("both", "texts")], "as a CSV file has it"
    assert not told("plain.jsonl", {"weight": "heavy"}, {"margin": None})
    comparisons = {"prompt": "Why?", "replies": ["a", "b"], "comparisons": [{"first": 0, "second": 1}], "weight": 2}
    judged = write(tmp_path / "judged.jsonl", [comparisons, comparisons])
    caplog.clear()
    prepared(judged, tmp_path)
    assert "is not read" not in caplog.text


def test_counts_name_what_makes_one_preference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rewardlab")
    rated = [{"prompt": "Why?", "response": f"a{n}", "clarity": n} for n in range(3)]
    long = [{"pair_id": 1, "role": role, "prompt": "Why?", "text": role} for role in ("chosen", "rejected")]
    for name, rows, flags, counted in (
        ("rated", rated, {"attributes": ("clarity=1",)}, "1 prompt"),
        ("long", long, {}, "1 pair"),
        ("posts", JUDGED, {"shp": "kwise"}, "1 post"),
        ("each", JUDGED, {}, "4 rows"),
    ):
        prepared(write(tmp_path / f"{name}.jsonl", rows), tmp_path, **flags)
        assert f"prepared: {name}[all rows]: {counted} in" in caplog.text


def test_a_column_that_changes_what_is_before_the_reply_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "Why?", "chosen": "a", "rejected": "b"}

    def told(**more: Any) -> list[str]:
        caplog.clear()
        prepared(write(tmp_path / "rows.jsonl", [row | more]), tmp_path)
        return [record.getMessage() for record in caplog.records if "is not read" in record.getMessage()]

    (line,) = told(system_prompt="Be brief.")
    assert "the column system_prompt is not read; where it is called system, it becomes the first turn." in line
    assert not told(system_prompt=" ", system_message=None, system="Be brief.")


def test_the_first_row_is_the_one_that_reading_kept_whatever_comes_before_its_other_half(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"pair_id": number, "role": role, "prompt": f"p{number}" if number else "", "response": role}
        for role in ("chosen", "rejected")
        for number in range(120)
    ]
    path = write(tmp_path / "long.jsonl", rows)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="rewardlab"):
            prepared(path, tmp_path / "cache", shows_row=True, incomplete_pairs="error", max_drop_fraction=0.1)
        said = [record.getMessage().removeprefix("data: long[all rows]: ") for record in caplog.records]
        first = said.index("first row: long.jsonl:2 (long)")
        assert said[first + 2] == "    [user] p1"
        assert said[first + 7] == "  reply 0 over reply 1"
