"""What comes from elsewhere is shown, and does nothing to a terminal."""

from __future__ import annotations

import logging
import subprocess
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.core.terminal import brief, folded, plural, quoted, visible, visible_message

HOSTILE = {
    "\x1b[2J": r"\x1b[2J",
    "\x9b31m": r"\x9b31m",
    "a\rb": r"a\rb",
    "a\x00\x07\x08\x7f": r"a\x00\x07\x08\x7f",
    "\u202egnp.exe\u202c": r"\u202egnp.exe\u202c",
    "\u2066\u2067\u2068\u2069\u200e\u200f\u061c": r"\u2066\u2067\u2068\u2069\u200e\u200f\u061c",
    "\ud800x\udcff": r"\ud800x\udcff",
    "a\u2028b\u2029c\x85d": r"a\u2028b\u2029c\x85d",
    "\ufeff\u200b\U000e0041": r"\ufeff\u200b\U000e0041",
    "a\tb": r"a\tb",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_would_obey_is_written_out(text):
    assert visible(text) == HOSTILE[text]
    assert visible(text, lines=True) == HOSTILE[text]


@pytest.mark.parametrize(
    "text", ["", "plain σ — 日本語 é", "می\u200cخواهم", "👩\u200d💻", "10\u202f000\xa0€", r"C:\new"]
)
def test_what_is_only_to_be_read_stays_as_it_is(text):
    assert visible(text) == text


def test_lines_end_only_where_lines_are_meant():
    assert visible("a\nb") == r"a\nb"
    assert visible("a\nb\r\nc", lines=True) == "a\nb\\r\nc"


@given(st.text())
def test_no_text_moves_the_cursor(text):
    shown = visible(text)
    assert visible(shown) == shown
    assert not {unicodedata.category(letter) for letter in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(letter) for letter in shown} & {
        *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    }


def test_a_line_of_the_log_is_one_line(log):
    logging.getLogger("rewardlab").info("read %s, %d rows", "a\x1b[2J\nerror: all is lost\u202e", 3)
    logging.getLogger("rewardlab").warning("data\x07")
    assert [record.getMessage() for record in log.records] == [
        r"read a\x1b[2J\nerror: all is lost\u202e, 3 rows",
        r"data\x07",
    ]


def test_a_message_of_several_lines_has_one_beginning():
    assert visible_message("none can be used:\n  empty: 3\nFix\x1b the data.") == (
        "none can be used:\n  empty: 3\n  Fix\\x1b the data."
    )


@pytest.mark.parametrize(
    "name",
    [
        "runs/mine",
        "my runs/it's",
        "$(touch x)`y`",
        'a"b',
        "a\nb\x1b[2J\x07",
        "caf\udce9",
        "é日本",
        "*?[a]",
        "",
        "~",
        "-x",
    ],
)
def test_a_quoted_name_is_one_word_to_the_shell(name):
    shown = quoted(name)
    assert visible(shown) == shown
    read = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True).stdout
    assert read == name.encode("utf-8", "surrogateescape")


def test_half_a_surrogate_pair_is_quoted_though_no_command_line_can_hold_it():
    assert quoted("a\ud800") == r"$'a\xed\xa0\x80'"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("short", "'short'"),
        ("a\x1b", r"'a\x1b'"),
        ([1, "a"], "[1, 'a']"),
        ("x" * 200, "'" + "x" * 78 + "…"),
        (10**400, "1" + "0" * 78 + "…"),
        (1 << 40_000, "an int too long to show"),
    ],
    ids=["text", "control", "list", "long", "number", "hexadecimal"],
)
def test_a_value_in_a_message_is_short(value, text):
    assert brief(value) == text


def test_a_value_in_a_message_is_short_however_deep_or_wide_it_is():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(brief(deep)) <= 80
    wide: object = "lol"
    for _ in range(40):  # a billion billion, were it written out
        wide = [wide] * 10
    assert len(brief(wide)) <= 80


@pytest.mark.parametrize("width", [1, 3, 20, 40, 80])
def test_lines_are_broken_between_words_and_commands_stay_whole(width: int) -> None:
    text = (
        "error: runs/judged already holds an evaluation. Run `rewardlab eval  --overwrite`.\n  step 1/4  EVAL  "
        + "x" * 90
    )
    lines = folded(text, width).split("\n")
    assert " ".join("\n".join(lines).split()) == " ".join(text.split())
    assert "`rewardlab eval  --overwrite`" in "\n".join(lines)
    assert all(len(line) <= width or len(line.split()) == 1 or "`" in line for line in lines)
    assert folded("as short as it is  \n", width=30) == "as short as it is  \n"


@pytest.mark.parametrize(
    ("count", "words", "wanted"),
    [
        (1, ("row",), "row"),
        (1.0, ("reply has", "replies have"), "reply has"),
        (0, ("row",), "rows"),
        (2, ("distinctive reply",), "distinctive replies"),
        (2, ("day",), "days"),
        (2, ("query",), "queries"),
        (3, ("reply has", "replies have"), "replies have"),
    ],
)
def test_one_has_the_singular_and_every_other_count_the_plural(count: float, words: tuple[str, ...], wanted: str):
    assert plural(count, *words) == wanted
