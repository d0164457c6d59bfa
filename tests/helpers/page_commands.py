"""The commands on a page: which words a shell would give to which program, and where they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pages import blocks

SHELLS = ("bash", "console", "sh", "shell")
"""Languages of blocks whose every line is a command."""
PRINTED = "text"
"""Language of blocks in which a command begins with `$ `, and what it printed follows."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
ENDS = re.compile(r"[;&|()]+")
REDIRECTS = re.compile(r"\d*[<>]+&?")
INLINE = re.compile(r"(?<!`)`(rewardlab [a-z][^`]*)`(?!`)")


class Command(NamedTuple):
    """One command of a page."""

    line: int
    """Of the page, from 1."""
    words: tuple[str, ...]
    """The program and what is given to it; without assignments before it and redirections."""


def commands(page: str) -> list[Command]:
    """The commands of all fenced blocks of a page, in their order in each language."""
    found: list[Command] = []
    for language in (*SHELLS, PRINTED):
        for block in blocks(page, language):
            # A variable may stand for several words, as it does in a shell.
            known: dict[str, str] = {}
            for line, text in _whole_lines(block.text, prompted=language == PRINTED):
                for words in _split(_filled(text, known)):
                    found += _command(block.line + line, words, known)
    return found


def spans(page: str) -> Iterator[tuple[int, str]]:
    """Line and text of each `rewardlab …` in the prose of a page, which may lie on two lines."""
    without = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page, flags=re.MULTILINE | re.DOTALL)
    for match in INLINE.finditer(without):
        yield without[: match.start()].count("\n") + 1, " ".join(match[1].split())


def _whole_lines(text: str, *, prompted: bool) -> Iterator[tuple[int, str]]:
    """Lines joined with those that continue them, after a backslash or inside quotes."""
    lines = iter(enumerate(text.splitlines()))
    for number, line in lines:
        whole = line.strip()
        if prompted and not whole.startswith("$ "):
            continue
        whole = whole.removeprefix("$ ")
        while whole.endswith("\\") or not _is_closed(whole):
            more = next(lines, None)
            if more is None:
                break
            whole = whole[:-1] + more[1] if whole.endswith("\\") else f"{whole}\n{more[1]}"
        if whole and not whole.startswith("#"):
            yield number, whole


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _filled(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda name: known.get(name[1], name[0]), text)


def _split(text: str) -> Iterator[list[str]]:
    """The words of each command of a line, without redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_file = False
    for word in lexer:
        if ENDS.fullmatch(word):
            yield words
            words = []
        elif REDIRECTS.fullmatch(word):
            is_file = True
        elif is_file:
            is_file = False
        else:
            words.append(word)
    yield words


def _command(line: int, words: list[str], known: dict[str, str]) -> list[Command]:
    while words and ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        known[name] = value
    return [Command(line, tuple(words))] if words else []
