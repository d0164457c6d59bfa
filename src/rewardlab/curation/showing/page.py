"""Rows as lines of text: with colours on a terminal, elsewhere plain, and with the same marks in both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from rewardlab.core.screen import Screen
from rewardlab.core.terminal import visible
from rewardlab.core.types import Conversation, Preference
from rewardlab.curation.showing.rows import MOST_NAMESAKES, ShownRow
from rewardlab.curation.showing.tokens import ShownReply, ShownToken

STYLES: Final = {"prompt": "", "header": "dim", "reply": "bold", "ending": "dim"}
CONTROL, TYPED, MARK, MISSING, LEFT_OUT = "cyan", "bold red", "reverse", "red", "bold red"
BORDER: Final = "│"
"""The border between two tokens."""
REST: Final = "⋯"
"""Drawn for a token that belongs to the character before it."""
BLANKS: Final = {" ": "·", "\t": "⇥", "\r": "␍"}
"""White space as it is drawn. A line break is drawn as ↵ and breaks the line as well."""
UNSEEN: Final = re.compile(r"^ +| +$| {2,}")
MOST_CUT: Final = 200
"""Most characters shown of what was cut."""
LEGEND: Final = (
    "│ between tokens, · space, ↵ line break, ⋯ rest of a character of several tokens, «…» control token, ‹…› typed "
    "control token, ⟦…⟧ marks: header and ending are what the template writes before and after the reply."
)


def print_rows(rows: Sequence[ShownRow], console: Console | None = None) -> None:
    """Print rows, one after the other, by default on standard output; with colours on a terminal."""
    console = console or Screen(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if any(isinstance(reply, ShownReply) for row in rows for reply in row.replies):
        console.print(Text(LEGEND, "dim"))
    for row in rows:
        console.print()
        for line in _lines(row):
            console.print(line)


def _lines(row: ShownRow) -> list[Text]:
    lines = [Text(f"=== {visible(row.place)} ===", "bold"), Text(f"format: {visible(row.format)}")]
    if row.num_alike > 1:
        lines.append(Text(f"one of {row.num_alike:,} rows with this id, of which at most {MOST_NAMESAKES} are shown"))
    if row.cause is not None:
        lines.append(Text(f"left out: {row.cause}: {visible(row.detail or '')}", LEFT_OUT))
    if row.preference is None:
        return [*lines, *(Text(f"  {visible(name)}: {visible(str(value))}") for name, value in row.row.items())]
    lines += [Text(f"left out beside the other replies: {visible(why)}", LEFT_OUT) for why in row.left_out]
    lines += _judged(row.preference)
    if not row.replies:
        lines += _turns("prompt", row.preference.prompt)
        for number, reply in enumerate(row.preference.replies):
            lines += _turns(f"reply {number}", reply)
    for number, shown in enumerate(row.replies):
        lines.append(Text(""))
        if isinstance(shown, ShownReply):
            lines += [Text(_head(shown), "bold"), _tokens(shown)]
        else:
            lines.append(Text(f"reply {number}: has no tokens: {visible(shown)}", LEFT_OUT))
    return lines


def _judged(preference: Preference) -> list[Text]:
    """Return the comparisons, one a line."""
    said = []
    for one in preference.comparisons:
        parts = [f"reply {one.first} against reply {one.second}: label {one.label:g}"]
        parts += [f"weight {one.weight:g}"] if one.weight != 1 else []
        parts += [f"margin {one.margin:g}"] if one.margin else []
        parts += [f"strength {one.strength:g}"] if one.strength is not None else []
        parts += [f"by {visible(one.annotator)}"] if one.annotator is not None else []
        said.append(Text(f"judged: {', '.join(parts)}"))
    return said


def _turns(title: str, turns: Conversation) -> list[Text]:
    lines = []
    for message in turns:
        lines.append(Text(f"{title}, {message.role}:", "dim"))
        lines += [Text(f"  {_with_blanks(line)}") for line in message.content.split("\n")]
    return lines


def _with_blanks(line: str) -> str:
    """Return a line in which invisible white space is drawn: at its ends, doubled spaces, and tabs."""
    return _drawn(UNSEEN.sub(lambda blanks: "·" * len(blanks.group()), line), lines=False, but=" ")


def _head(shown: ShownReply) -> str:
    cut = [f"{shown.truncated_tokens} cut from the prompt"] if shown.truncated_tokens else []
    cut += [f"{shown.truncated_reply_tokens} cut from the reply"] if shown.truncated_reply_tokens else []
    counts = [
        f"{len(shown.tokens)} tokens",
        f"{shown.prompt_tokens} before the reply",
        f"{shown.num_shared} shared",
        *cut,
    ]
    return f"reply {shown.reply}: {', '.join(counts)}"


def _tokens(shown: ShownReply) -> Text:
    """Return the tokens with their borders and marks."""
    marks: dict[int, list[Text]] = {}
    if shown.num_shared:
        marks.setdefault(shown.num_shared, []).append(Text("⟦shared up to here⟧", MARK))
    for part in ("header", "reply", "ending"):
        start = next((place for place, token in enumerate(shown.tokens) if token.part == part), None)
        if start is not None:
            marks.setdefault(start, []).append(Text(f"⟦{part}⟧", MARK))
    if shown.cut is not None:
        said = shown.cut.text
        short = said if len(said) <= MOST_CUT else f"{said[: MOST_CUT // 2]} … {said[-MOST_CUT // 2 :]}"
        marks.setdefault(shown.cut.at, []).append(
            Text(f"⟦{shown.cut.num_tokens} tokens cut: {_drawn(short, lines=False)}⟧", MISSING)
        )
    line = Text()
    for place, token in enumerate(shown.tokens):
        for mark in marks.get(place, ()):
            line.append_text(mark)
        if place and place not in marks:
            line.append(BORDER, "dim")
        line.append(_drawn_token(token), _style(token))
        if token.is_bos:
            line.append("⟦BOS⟧", MARK)
    for mark in marks.get(len(shown.tokens), ()):
        line.append_text(mark)
    line.append("⟦score read here⟧", MARK)
    return line


def _style(token: ShownToken) -> str:
    return TYPED if token.is_typed else CONTROL if token.is_control else STYLES[token.part]


def _drawn_token(token: ShownToken) -> str:
    drawn = _drawn(token.text, lines=True) or REST
    if token.is_typed:
        return f"‹{drawn}›"
    return f"«{drawn}»" if token.is_control else drawn


def _drawn(text: str, *, lines: bool, but: str = "") -> str:
    """Return a text with its white space drawn, except `but`, and invisible characters escaped."""
    for blank, mark in BLANKS.items():
        text = text if blank == but else text.replace(blank, mark)
    return visible(text.replace("\n", "↵\n" if lines else "↵"), lines=lines)
