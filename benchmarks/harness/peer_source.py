"""Parts of another project's source, run as they stand: advantages are made in the middle of long methods.

Files are read and not imported: what they import takes seconds, or is not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def of_trl(file: str) -> Path:
    """A file of the installed TRL."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError('no package trl; pip install -e ".[bench]"')
    return Path(spec.origin).parent / file


def defined(file: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """The one function, method or class of a file that has this name, without decorators and annotations."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name)
    found.decorator_list = []
    for node in ast.walk(found):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return found


def lines_of(body: Sequence[ast.stmt], *, first: str, through: str) -> list[ast.stmt]:
    """The statements from the one that begins with `first` through the one in which the text `through` stands."""
    (begin,) = (number for number, one in enumerate(body) if ast.unparse(one).startswith(first))
    (end,) = (number for number, one in enumerate(body) if through in ast.unparse(one))
    if begin >= end:
        raise ValueError(f"{through!r} stands before {first!r}: the source is not what it was")
    return [*body[begin : end + 1]]


def run(statements: Sequence[ast.stmt], names: Mapping[str, Any]) -> dict[str, Any]:
    """The names after statements ran."""
    known = dict(names)
    exec(compile(ast.Module(body=[*statements], type_ignores=[]), "peer", "exec"), known)
    return known
