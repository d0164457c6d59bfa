"""What tests of the documentation read: pages, their fenced blocks and their tables."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]
"""Every page that a user or a contributor reads."""


def read(name: str) -> str:
    """A page of the documentation."""
    return (DOCS / name).read_text(encoding="utf-8")


def module_at(path: Path) -> ModuleType:
    """A program that lies beside the pages, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the annotations of a class
    spec.loader.exec_module(module)
    return module


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    """Of the page, where its first line stands; from 1."""
    text: str


def blocks(page: str, language: str) -> Iterator[Block]:
    """The blocks of one language."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(page[: match.start(1)].count("\n") + 1, match[1])


class Ran(NamedTuple):
    """What came of a page's python examples, run in one namespace."""

    promised: list[str]
    """What their comments say they print."""
    printed: list[str]
    names: dict[str, object]
    """The namespace afterwards."""


def run_examples(name: str, **given: object) -> Ran:
    """Run the python examples of a page."""
    printed: list[str] = []
    names: dict[str, object] = {
        "__name__": "page",
        **given,
        "print": lambda *values: printed.append(" ".join(map(str, values))),
    }
    promised: list[str] = []
    for block in blocks(read(name), "python"):
        promised += re.findall(r"  # -> (.*)$", block.text, re.MULTILINE)
        exec(compile(block.text, name, "exec", dont_inherit=True), names)
    return Ran(promised, printed, names)


def promised_and_printed(name: str, **given: object) -> tuple[list[str], list[str]]:
    """What the comments of a page's python examples say they print, and what they print."""
    ran = run_examples(name, **given)
    return ran.promised, ran.printed


def first_cells(page: str, heading: str = "") -> list[str]:
    """What stands in backticks in the first column of the tables below a heading, or of all on the page."""
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (body,) = [part for part in section if part.startswith(f"{heading}\n")] if heading else [page]
    return [
        name for cell in re.findall(r"^\| (`[^|]*) \|", body, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)
    ]


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
