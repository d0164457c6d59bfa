"""Messages name pages of the repository in one way: an installed package does not hold them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = re.compile(r"docs/[\w-]+\.md")


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a module that are not docstrings, those of f-strings whole."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    joined = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (alone | joined):
            yield node.value


def test_a_page_that_a_message_names_is_there_and_said_to_be_in_the_repository() -> None:
    told = [text for path in (ROOT / "src").rglob("*.py") for text in texts_of(path) if PAGE.search(text)]
    assert len(told) > 5
    for text in told:
        assert re.search(rf"{PAGE.pattern} in rewardlab's repository", text), text
        assert all((ROOT / page).is_file() for page in PAGE.findall(text)), text
