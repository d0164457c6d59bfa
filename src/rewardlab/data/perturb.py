"""Changes of a text that should not change how good it is: white space, markdown, list order, politeness, typos.

Pure functions of a text and a random generator. Each returns the changed text, or None where there is nothing to
change: a text without a list has no order of items. Code between fences is left alone; `plain_text` removes its fences.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from rewardlab.core.types import Conversation, Message, Preference

Change = Callable[[str, np.random.Generator], str | None]
POLITE: Final = "\n\nI hope this helps! Please let me know if you have any other questions."
TYPOS: Final = 0.05
"""Share of the words of four letters or more in which two neighbouring letters are swapped; at least one word."""
FENCE: Final = re.compile(r"(```.*?(?:```|\Z)|^[ \t]*~~~.*?(?:^[ \t]*~~~[^\n]*|\Z))", re.DOTALL | re.MULTILINE)
ITEM: Final = re.compile(r"^([ \t]*)([-*+•]|\d{1,3}[.)])([ \t]+)(\S.*)$")
# Between two marks stand 300 characters at most, of an address 2,000: the time to find them grows with the length of a
# text and not with its square, whatever it is made of.
LINK: Final = re.compile(r"!?\[([^\[\]\n]{1,300})\]\((?:[^()\s]|\([^()\s]{0,300}\)){1,2000}\)")
STRONG: Final = re.compile(r"(\*\*\*|\*\*|__)(?=\S)(.{1,300}?)(?<=\S)\1")
EMPHASIS: Final = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]{1,300}?)(?<=[^\s*])\*(?![\w*])")
BLOCK: Final = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[^`\n]*(?:\n|\Z)(.*?)(?:^[ \t]*\1[^\n]*(?:\n|\Z)|\Z)", re.DOTALL | re.MULTILINE
)
CODE: Final = re.compile(r"`([^`\n]{1,300})`")
WORD: Final = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A change of texts, and of which ones."""

    of: Literal["reply", "prompt"]
    """Whether replies are changed, each for itself, or the last user turn of the prompt."""
    meaning: str
    change: Change


def spaced(text: str, draw: np.random.Generator) -> str | None:
    """Double the space after sentences and single line breaks."""

    def change(part: str) -> str:
        part = re.sub(r"(?<=[.!?;:]) (?=\S)", "  ", part)
        return re.sub(r"(?<!\n)\n(?!\n)", "\n\n", part)

    return _outside_code(text, change)


def plain_text(text: str, draw: np.random.Generator) -> str | None:
    """Remove markdown: headings, bold and italic marks, code marks and fences, links; items keep their marks.

    Code loses its marks and keeps its text. A mark without its partner within 300 characters stays, and of marks inside
    others the inner ones may.
    """
    code: list[str] = []
    # A character for private use that the text does not have stands around the number of a piece of code.
    sign = next(chr(number) for number in range(0xE000, 0x110000) if chr(number) not in text)

    def aside(found: str) -> str:
        code.append(found)
        return f"{sign}{len(code) - 1}{sign}"

    def block(match: re.Match[str]) -> str:
        # The line break after a block stays, so that what follows it begins a line.
        body, end = (match[2][:-1], "\n") if match[2].endswith("\n") else (match[2], "")
        return aside(body) + end if match[2] else ""

    changed = BLOCK.sub(block, text)
    changed = CODE.sub(lambda match: aside(match[1]), changed)
    changed = re.sub(r"^#{1,6}[ \t]+", "", changed, flags=re.MULTILINE)
    changed = LINK.sub(r"\1", changed)
    changed = STRONG.sub(r"\2", changed)
    changed = EMPHASIS.sub(r"\1", changed)
    changed = re.sub(f"{sign}(\\d+){sign}", lambda match: code[int(match[1])], changed)
    return changed if changed != text and changed.strip() else None


def reordered(text: str, draw: np.random.Generator) -> str | None:
    """Put the items of every list (one line each, equally indented, at least two) into another order.

    Numbers stay where they are, so that a numbered list is numbered as before. An item with more below it, such as a
    list of its own, stays too.
    """

    def change(part: str) -> str:
        lines = part.split("\n")
        start = 0
        while start < len(lines):
            end = start
            while end < len(lines) and _indent(lines[end]) is not None and _indent(lines[end]) == _indent(lines[start]):
                end += 1
            # Of equally indented items in a row only the last can have lines of its own.
            last = end - 1 if end > start and _goes_on(lines, end) else end
            if last - start >= 2:
                items = [ITEM.fullmatch(line) for line in lines[start:last]]
                texts = [item[4] for item in items if item is not None]
                order = _another_order(texts, draw)
                for number, item in enumerate(items):
                    assert item is not None, "a line with an indent is an item"
                    lines[start + number] = f"{item[1]}{item[2]}{item[3]}{order[number]}"
            start = max(end, start + 1)
        return "\n".join(lines)

    return _outside_code(text, change)


def polite(text: str, draw: np.random.Generator) -> str | None:
    """Append a polite ending that says nothing."""
    return None if text.endswith(POLITE) else text.rstrip() + POLITE


def misspelt(text: str, draw: np.random.Generator) -> str | None:
    """Swap two neighbouring inner letters in a share of the longer words, at least in one."""
    parts = FENCE.split(text)
    words = [
        (number, word)
        for number, part in enumerate(parts)
        if number % 2 == 0
        for word in WORD.finditer(part)
        if _swappable(word[0])
    ]
    if not words:
        return None
    count = max(1, round(TYPOS * len(words)))
    # From behind, so that the places before stay where they are; a swap changes no length anyway.
    for index in sorted(draw.permutation(len(words))[:count].tolist(), reverse=True):
        number, word = words[index]
        places = _swappable(word[0])
        place = word.start() + places[int(draw.integers(len(places)))]
        part = parts[number]
        parts[number] = part[:place] + part[place + 1] + part[place] + part[place + 2 :]
    return "".join(parts)


PERTURBATIONS: Final[Mapping[str, Perturbation]] = MappingProxyType(
    {
        "white space": Perturbation(
            of="reply", meaning="spaces after sentences and line breaks doubled", change=spaced
        ),
        "markdown stripped": Perturbation(
            of="reply", meaning="headings, emphasis, code marks and links as plain text", change=plain_text
        ),
        "list order": Perturbation(of="reply", meaning="the items of lists in another order", change=reordered),
        "politeness": Perturbation(of="reply", meaning="a polite ending that says nothing appended", change=polite),
        "typos": Perturbation(
            of="reply", meaning="two letters swapped in a twentieth of the longer words", change=misspelt
        ),
        "prompt typos": Perturbation(
            of="prompt", meaning="the same in the last user turn of the prompt, replies unchanged", change=misspelt
        ),
    }
)
"""Name -> perturbation, in the order of the tables."""


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """A preference after a perturbation."""

    preference: Preference
    changed: frozenset[int]
    """Indices of the replies whose conversation is another: all of them after a change of the prompt."""


def perturb(preference: Preference, perturbation: Perturbation, *, seed: int) -> Perturbed | None:
    """Return the preference with the perturbation applied wherever it applies; None if it applies nowhere.

    Of a reply of several turns, the last one is changed. The same seed gives the same texts, whatever else there is.
    """
    if perturbation.of == "prompt":
        places = [number for number, turn in enumerate(preference.prompt) if turn.role == "user"]
        if not places:
            return None
        turn = preference.prompt[places[-1]]
        text = perturbation.change(turn.content, _draw(seed, preference, turn.content))
        if text is None or text == turn.content:
            return None
        prompt = list(preference.prompt)
        prompt[places[-1]] = Message(turn.role, text)
        everything = frozenset(range(len(preference.replies)))
        return Perturbed(preference=replace(preference, prompt=tuple(prompt)), changed=everything)
    replies: list[Conversation] = []
    changed = set()
    for number, reply in enumerate(preference.replies):
        last = reply[-1]
        text = perturbation.change(last.content, _draw(seed, preference, last.content))
        if text is None or text == last.content:
            replies.append(reply)
        else:
            replies.append((*reply[:-1], Message(last.role, text)))
            changed.add(number)
    if not changed:
        return None
    return Perturbed(preference=replace(preference, replies=tuple(replies)), changed=frozenset(changed))


def _draw(seed: int, preference: Preference, text: str) -> np.random.Generator:
    """Return a generator that depends on the seed, the row and the text alone, not on the order of rows."""
    words = "\x1f".join((str(seed), preference.source, preference.id, text))
    return np.random.default_rng(int(hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:32], 16))


def _outside_code(text: str, change: Callable[[str], str]) -> str | None:
    """Return the text with its parts outside of code fences changed; None if that changes nothing."""
    parts = FENCE.split(text)
    changed = "".join(part if number % 2 else change(part) for number, part in enumerate(parts))
    return changed if changed != text else None


def _indent(line: str) -> str | None:
    item = ITEM.fullmatch(line)
    return None if item is None else item[1]


def _goes_on(lines: list[str], end: int) -> bool:
    """Return whether the item before this line has more lines: the next one with text, or the beginning of the fence
    that follows these lines, is indented further."""
    rest = lines[end:]
    following = next((line for line in rest if line.strip()), rest[-1] if rest else "")
    spaces = [len(line) - len(line.lstrip(" \t")) for line in (lines[end - 1].expandtabs(4), following.expandtabs(4))]
    return spaces[1] > spaces[0]


def _another_order(texts: list[str], draw: np.random.Generator) -> list[str]:
    """Return the texts in a random order that is not theirs, if they are not all equal."""
    if len(set(texts)) < 2:
        return texts
    while True:
        order = [texts[index] for index in draw.permutation(len(texts))]
        if order != texts:
            return order


def _swappable(word: str) -> list[int]:
    """Return the places of a word at which two different inner letters can be swapped."""
    return [place for place in range(1, len(word) - 2) if word[place] != word[place + 1]]
