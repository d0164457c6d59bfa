"""Docstrings and comments are plain English: two habits that make a reader stop are kept out of these rooms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src/rewardlab"
ROOMS = (
    *("analysis", "artifact", "client", "commands", "core", "curation", "data", "diagnosing", "distributed"),
    *("evaluation", "experiments", "gold", "model", "probing", "report", "rl", "serve", "training"),
    *("arguments.py", "batch.py", "cli.py", "console.py", "flags.py", "quickstart.py", "score.py"),
)
IS_NO = re.compile(
    r"(?<!there )\b(is|are|be) no (?!longer|more|less|fewer|better|worse|larger|smaller|faster)\w+", re.IGNORECASE
)
"""`is no number`, which is `is not a number`; `there is no number` says something else."""
FRAGMENTS = ("Whether ", "What ", "Who ", "Whom ", "How ", "Of ")
"""Beginnings of a docstring that names no action; that of a function begins with one: `Return whether …`."""


def files(room: str) -> list[Path]:
    """Return the modules of a room."""
    place = SOURCE / room
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def docstrings(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether it is a function's) of every docstring, those of attributes and constants too."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", [])
        for number, statement in enumerate(body if isinstance(body, list) else []):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    of_function = number == 0 and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                    if of_function and any("property" in ast.unparse(by) for by in node.decorator_list):
                        of_function = False  # it is read like an attribute
                    yield statement.lineno, " ".join(text.split()), of_function


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of every comment; lines of comments that follow each other are one."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield last + 1 - len(block), " ".join(block)
                block = []
            block.append(token.string.lstrip("# ").strip())
            last = token.start[0]
    if block:
        yield last + 1 - len(block), " ".join(block)


def faults(source: str) -> list[tuple[int, str]]:
    """Return (line, words) of every phrase in a module's docstrings and comments that is kept out."""
    found = [(line, text[: len(start) + 30]) for line, text, of_function in docstrings(source) if of_function
             for start in FRAGMENTS if text.startswith(start)]  # fmt: skip
    texts = [*((line, text) for line, text, _ in docstrings(source)), *comments(source)]
    return found + [(line, match[0]) for line, text in texts for match in IS_NO.finditer(text)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_comments_say_is_not_a_and_begin_with_a_verb(room: str) -> None:
    of_files = {str(path.relative_to(SOURCE)): faults(path.read_text(encoding="utf-8")) for path in files(room)}
    assert of_files, room
    assert {name: found for name, found in of_files.items() if found} == {}


def test_the_phrases_are_found_across_line_breaks_and_in_comments() -> None:
    function = 'def f() -> bool:\n    """Whether it is."""\n    # Ties are no\n    # wins.\n'
    source = f'"""A text that is no\nnumber."""\n\n\n{function}'
    assert [words for _, words in faults(source)] == ["Whether it is.", "is no number", "are no wins"]
    fine = '"""There is no number, and it is no longer than that."""\n\n\nx = 1\n"""Whether it is."""\n'
    assert faults(fine) == []
