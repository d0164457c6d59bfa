"""Rows that nobody meant to be read: each is counted, and none ends an audit with a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.planted import Planted
from rewardlab.core.errors import RewardlabError
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.registry import CHECKS
from rewardlab.curation.auditing.run import audit_rows
from rewardlab.data.config import ReadingConfig

NASTY = (
    *(
        "",
        " ",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "\ufffd",
        "\ufeff",
        "\u202e",
        "\x1b[2J",
        "\r\n\r\n",
        "\x1e\x1f",
        "\uffff",
    ),
    *("<|im_start|>system\n", "<|im_end|>", "[INST]", "</s>", "\n\nHuman: ", "\n\nAssistant:", "### Response:"),
    *("i'm sorry, but ", "aaaa " * 40, "中" * 60, "```", "[[[[<<<<", "e\u0301\u0302" * 9, "\n" * 30),
)
TEXTS = st.one_of(
    st.sampled_from(NASTY), st.text(max_size=30), st.lists(st.sampled_from(NASTY), max_size=4).map("".join)
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "", "\0"]), "content": TEXTS}),
    max_size=4,
)
VALUES = st.one_of(TEXTS, MESSAGES, st.none(), st.integers(), st.floats(allow_nan=False), st.lists(TEXTS, max_size=3))
ROWS = st.fixed_dictionaries(
    {"prompt": VALUES, "chosen": VALUES, "rejected": VALUES},
    optional={"label": VALUES, "strength": VALUES, "\0": VALUES, "meta": st.recursive(VALUES, st.lists, max_leaves=8)},
)


@pytest.mark.slow
@given(st.lists(ROWS, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_hostile_rows_are_all_kept_or_dropped_and_never_a_traceback(rows: list[dict[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = AuditConfig(dataset=(str(path),), max_seq_len=64, reading=ReadingConfig(num_workers=1))
        audit = audit_rows(config).audit
    (source,) = audit.sources
    assert source.read == len(rows) == source.kept + sum(source.dropped.values())
    json.dumps(audit.as_dict(), allow_nan=False)
    assert all(0 <= finding.flagged <= len(rows) for finding in audit.findings)


@pytest.mark.slow
def test_a_reply_of_a_megabyte_and_values_nested_deep_are_read(tmp_path: Path) -> None:
    deep: object = "bottom"
    for _ in range(500):
        deep = [deep]
    rows = [
        {"prompt": "p", "chosen": "word " * 200_000, "rejected": "b"},
        {"prompt": deep, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "x" * 1_000_000, "rejected": "y", "meta": deep},
        {"prompt": "r", "chosen": "Human" + "\n" * 1_000_000 + "Human:", "rejected": "Human: \n" * 100_000},
        {"prompt": "s", "chosen": " \t" * 500_000 + ":", "rejected": "</s> " * 100_000},
        {"prompt": "<|im_end|>" * 1_000, "chosen": "a", "rejected": "b" * 9_000_000},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    audit = audit_rows(AuditConfig(dataset=(str(path),), reading=ReadingConfig(num_workers=1))).audit
    assert dict(audit.sources[0].dropped) == {"bad_roles": 1, "row_too_long": 1}
    flagged = {finding.check.name: finding.flagged for finding in audit.findings if finding.flagged}
    assert flagged["repetition"] == 3
    assert flagged["unequal-lengths"] == 3


@pytest.mark.parametrize("line", ["not json", "[1]", '{"prompt": ', '{"a": 1, "a": 2}', '{"x": ' + "[" * 100_000])
def test_a_line_that_is_no_json_is_flagged_and_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"})
    path.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
    audit = audit_rows(AuditConfig(dataset=(str(path),), reading=ReadingConfig(num_workers=1))).audit
    assert dict(audit.sources[0].dropped) == {"not_json": 1}
    (found,) = (finding for finding in audit.findings if finding.check.name == "unusable-rows")
    assert [audit.place(row) for row in found.rows_F.tolist()] == ["rows.jsonl:2"]


def test_bytes_that_are_no_text_end_an_audit_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"})
    path.write_bytes(f"{good}\n".encode() + b"\xff\n")
    with pytest.raises(RewardlabError, match="rows.jsonl"):
        audit_rows(AuditConfig(dataset=(str(path),), reading=ReadingConfig(num_workers=1)))


@pytest.mark.soak
def test_memory_grows_by_kilobytes_a_row_however_long_the_texts_are(tmp_path: Path) -> None:
    """Ten times the rows, each with texts of 20 kB, must not cost more than 6 kB a row."""
    peaks = []
    for number in (1_000, 10_000):
        path = tmp_path / f"{number}.jsonl"
        planted = Planted()
        rows = [planted.sound() for _ in range(100)]
        with path.open("w") as file:
            for index in range(number):
                row = rows[index % 100]
                file.write(json.dumps({**row, "chosen": f"{index} " + str(row["chosen"]) * 50}) + "\n")
        program = (
            "import resource, sys; from rewardlab.curation.auditing.run import audit_rows;"
            "from rewardlab.curation.auditing.config import AuditConfig;"
            "from rewardlab.data.config import ReadingConfig;"
            "audit_rows(AuditConfig(dataset=(sys.argv[1],), reading=ReadingConfig(num_workers=1)));"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 9_000 * 6, peaks


def test_every_check_says_what_it_means_on_one_line() -> None:
    for name, check in CHECKS.items():
        assert name == check.name
        assert check.meaning
        assert "\n" not in check.meaning + check.score
        assert check.threshold > 0
