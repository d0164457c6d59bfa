"""A prompt with some of its replies, to be read by eye: as lines of a terminal, and as a block of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rewardlab.core.terminal import visible
from rewardlab.core.types import Conversation
from rewardlab.report import document
from rewardlab.report.document import Block, Turn

MOST_CHARACTERS: Final = 600
"""Characters of a text that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One row as it is rendered."""

    title: str
    prompt: Conversation
    replies: tuple[tuple[str, str], ...]
    """(what is known about it, text) of each reply."""


def row_text(shown: Shown, *, most: int = MOST_CHARACTERS) -> str:
    """Return a row as lines for a terminal, at most so many characters of each text."""
    lines = [f"--- {shown.title}"]
    lines += [f"[{turn.role}] {_cut(turn.content, most)}" for turn in shown.prompt]
    lines += [f"[{facts}] {_cut(text, most)}" for facts, text in shown.replies]
    return visible("\n".join(lines), lines=True)


def _cut(text: str, most: int) -> str:
    left = len(text) - most
    return text if left <= 0 else f"{text[:most]} … ({left:,} more characters)"


def row_block(shown: Shown) -> Block:
    """Return a row as a block of a page."""
    return document.Shown(
        title=shown.title,
        facts=(),
        prompt=tuple(_turn(turn.role, turn.content) for turn in shown.prompt),
        replies=tuple((facts, (_turn("assistant", text),)) for facts, text in shown.replies),
    )


def _turn(role: str, text: str) -> Turn:
    return Turn(role=role, text=text[:MOST_CHARACTERS], left_out=max(0, len(text) - MOST_CHARACTERS))
