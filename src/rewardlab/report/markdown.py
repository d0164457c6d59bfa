"""Renders a report as Markdown: everything but the charts, which are replaced by their descriptions.

Every text is escaped, so that nothing in it can become a heading, a link, an image, HTML or the end of a table; texts
of several lines become blocks of code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from rewardlab.core.terminal import plural, visible
from rewardlab.report.document import (
    CODE,
    Beside,
    Block,
    Charts,
    Checklist,
    Document,
    Facts,
    Lines,
    Mistake,
    Paragraph,
    Shown,
    Table,
    Turn,
    number_columns,
)

SIGNS: Final = re.compile(r"[\\`*_\[\]|~$]|^[-+=](?=[\s=-]|$)|(?<=\bwww)\.", re.IGNORECASE)
"""Characters that have a meaning in a line of Markdown; a backslash before them removes it."""
ITEM: Final = re.compile(r"^(\d+)([.)])(?=\s|$)")
"""A number at the beginning of a line that would begin a list."""
ENTITIES: Final = re.compile(r"[&<>@#]|:(?=//)|(?<=mailto):", re.IGNORECASE)
"""Characters of HTML, and those that begin a heading, a link or a mention: written as numeric entities."""


def markdown_page(document: Document) -> str:
    """Return the report as Markdown."""
    several = len(document.parts) > 1
    blocks = [f"# {escaped(document.title)}", escaped(document.made_by)]
    level = "###" if several else "##"
    for part in document.parts:
        if several:
            blocks.append(f"## {escaped(part.title)}")
        for section in part.sections:
            blocks.append(f"{level} {escaped(section.title)}")
            blocks += [text for block in section.blocks for text in _block(block, level)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def escaped(text: str) -> str:
    """Return a text in one line, escaped so that Markdown, and HTML within it, shows it unchanged."""
    return _escaped(" ".join(visible(text).split()))


def _escaped(line: str) -> str:
    line = ITEM.sub(r"\1\\\2", SIGNS.sub(lambda sign: f"\\{sign[0]}", line))
    return ENTITIES.sub(lambda sign: f"&#{ord(sign[0])};", line)


def sentence(text: str) -> str:
    """Return a sentence of ours in one line, escaped but for backticks: what stands between two is code."""
    parts = CODE.split(" ".join(visible(text).split()))
    return "".join(f"`{part}`" if place % 2 else _escaped(part) for place, part in enumerate(parts))


def fenced(text: str) -> str:
    """Return a text of several lines as a block of code, with a fence that the text cannot close."""
    text = visible(text, lines=True)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _block(block: Block, level: str) -> list[str]:
    if isinstance(block, Paragraph):
        return [f"{'> ' if block.tone in ('warning', 'alarm') else ''}{sentence(block.text)}"]
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Charts):
        return ["\n".join(f"- {escaped(chart.title)}: {sentence(chart.words)}" for chart in block.charts)]
    if isinstance(block, Beside):
        return [f"- {escaped(block.chart.title)}: {sentence(block.chart.words)}", *_table(block.table)]
    if isinstance(block, Facts):
        pairs = "\n".join(f"- {escaped(name)}: {escaped(value)}" for name, value in block.pairs)
        return [f"**{escaped(block.caption)}**", pairs]
    if isinstance(block, Lines):
        return [f"**{escaped(block.caption)}**", fenced(block.text)]
    if isinstance(block, Checklist):
        rows = [(check.question, check.answer, check.numbers) for check in block.checks]
        return [_rows(("question", "answer", "numbers"), rows, frozenset(), shown=sentence)]
    if isinstance(block, Shown):
        facts = "\n".join(f"- {escaped(fact)}" for fact in block.facts)
        replies = [text for heading, turns in block.replies for text in _turns(heading, turns)]
        return [f"{level}# {escaped(block.title)}", facts, *_turns("Prompt", block.prompt), *replies]
    return _mistake(block, level)


def _table(table: Table) -> list[str]:
    notes = " · ".join(map(sentence, table.notes))
    return [f"**{escaped(table.caption)}**", _rows(table.header, table.rows, number_columns(table)), notes]


def _rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[int],
    *,
    shown: Callable[[str], str] = escaped,
) -> str:
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    lines = [map(escaped, header), rule, *(map(shown, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mistake(mistake: Mistake, level: str) -> list[str]:
    facts = "\n".join(f"- {escaped(fact)}" for fact in mistake.facts)
    blocks = [f"{level}# {escaped(mistake.title)}", facts, sentence(mistake.missing)]
    if not mistake.missing:
        blocks += [
            *_turns("Prompt", mistake.prompt),
            *_turns("Preferred by the label", mistake.preferred),
            *_turns("Preferred by the model", mistake.other),
        ]
    return blocks


def _turns(title: str, turns: Sequence[Turn]) -> list[str]:
    blocks = [f"{escaped(title)}:"]
    for turn in turns:
        left = (
            f" ({turn.left_out:,} more {plural(turn.left_out, 'character is', 'characters are')} left out)"
            if turn.left_out
            else ""
        )
        blocks += [f"{escaped(turn.role)}{left}", fenced(turn.text)]
    return blocks
