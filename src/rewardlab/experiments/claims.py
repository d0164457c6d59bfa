"""Hypotheses as text: ``accuracy(lora_r8) >= accuracy(full) - 0.03``, read into a tree and never executed.

A claim is one comparison, or several joined by ``and``. A term asks one quantity of one arm: ``gap(base, step=500)``,
``accuracy("lora-r8", on="validation")``. Terms and numbers are joined by + - * /, parentheses, ``min``, ``max``,
``mean`` and ``abs``. The signs ≥ ≤ − × are read as >= <= - *.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.expressions import (
    MOST_CHOICES,
    OVER_MANY,
    SPLITS,
    Claim,
    Comparison,
    Constant,
    Node,
    Operation,
    Term,
    num_choices,
)
from rewardlab.experiments.quantities import quantity_named

LONGEST: Final = 2_000
"""Characters of a claim; longer texts are refused before they are read."""
_COMMENT: Final = re.compile(r"""^(?:[^#"']|"[^"]*"|'[^']*')*#""")
_SIGNS: Final = str.maketrans({"≥": ">=", "≤": "<=", "−": "-", "×": "*", "–": "-", "“": '"', "”": '"'})
_OPERATORS: Final[Mapping[type[ast.AST], str]] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
Sign = Literal[">", ">=", "<", "<="]
_COMPARED: Final[Mapping[type[ast.AST], Sign]] = {
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Lt: "<",
    ast.LtE: "<=",
}
COMPARE: Final = "write > >= < <=; equality within a margin is abs(accuracy(a) - accuracy(b)) <= 0.02"
"""What to write in place of other comparisons."""


def parse(text: str) -> Claim:
    """Return the claim that a text makes.

    Raises ConfigError, showing the place, for anything but comparisons of terms and numbers.
    """
    plain = _plain(text)
    with _placed(plain):
        tree = ast.parse(plain, mode="eval").body
        parts = tuple(_parts(tree, plain))
        written = ast.unparse(tree).replace("'", '"')
    claim = Claim(parts=parts, text=written)
    for part in parts:
        if num_choices(part) > MOST_CHOICES:
            raise _refused(plain, 0, f"chooses among more than {MOST_CHOICES} combinations by min and max")
        if not part.terms:
            raise _refused(plain, 0, f"{part.text!r} asks nothing of any arm; name one, such as accuracy(base)")
    return claim


def parse_term(text: str) -> Term:
    """Return the one quantity of an arm that a text names. Raises ConfigError, showing the place, for anything else."""
    plain = _plain(text)
    with _placed(plain):
        node = _node(ast.parse(plain, mode="eval").body, plain)
    if not isinstance(node, Term):
        raise _refused(plain, 0, "holds something other than one quantity of an arm, such as accuracy(full)")
    return node


def _plain(text: str) -> str:
    """Return a text on one line with plain signs. Raises ConfigError for one that is too long, or holds a comment."""
    if len(text) > LONGEST:
        raise ConfigError(f"it has {len(text):,} characters; at most {LONGEST:,} are read. Make it several.")
    plain = " ".join(text.translate(_SIGNS).split())
    if _COMMENT.search(plain):
        raise _refused(plain, plain.index("#"), "holds a comment (#); write it beside the hypothesis, as `expects`")
    return plain


@contextmanager
def _placed(plain: str) -> Iterator[None]:
    """Raise ConfigError, showing the place, where Python cannot read the text within the block."""
    try:
        yield
    except SyntaxError as error:
        place = (error.offset or 1) - 1
        why = f"has a single =; {COMPARE}" if plain[place : place + 1] == "=" else f"is not an expression ({error.msg})"
        raise _refused(plain, place, why) from None
    except (RecursionError, MemoryError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{plain[:60]!r}… is nested too deeply, or holds a character that cannot be read.") from None


def _refused(text: str, column: int, why: str) -> ConfigError:
    """Return an error that shows the place."""
    return ConfigError(f"it {why}:\n    {text}\n    {' ' * min(max(column, 0), len(text))}^")


def _at(text: str, node: ast.AST, why: str) -> ConfigError:
    # Offsets of the parser count bytes, and names of arms may hold any letter.
    column = len(text.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore"))
    return _refused(text, column, why)


def _parts(tree: ast.expr, text: str) -> Iterator[Comparison]:
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        for value in tree.values:
            yield from _parts(value, text)
        return
    if isinstance(tree, ast.BoolOp) or (isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not)):
        raise _at(
            text, tree, "uses `or` or `not`; state what is claimed, and make alternatives hypotheses of their own"
        )
    if not isinstance(tree, ast.Compare):
        raise _at(text, tree, "compares nothing; wanted such as accuracy(a) >= accuracy(b) - 0.03")
    sides = [tree.left, *tree.comparators]
    for (left, right), operator in zip(itertools.pairwise(sides), tree.ops, strict=True):
        if type(operator) not in _COMPARED:
            why = f"compares by something else; {COMPARE}"
            raise _at(text, right, why)
        sign = _COMPARED[type(operator)]
        for one, other, own in _within(left, right, sign):
            written = f"{ast.unparse(one)} {own} {ast.unparse(other)}".replace("'", '"')
            yield Comparison(left=_node(one, text), right=_node(other, text), operator=own, text=written)


def _within(left: ast.expr, right: ast.expr, sign: Sign) -> Iterator[tuple[ast.expr, ast.expr, Sign]]:
    """Yield what a comparison asks: one, or for ``abs(x) <= m`` that x lies above −m and below m."""
    turned: Mapping[Sign, Sign] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
    if sign in ("<", "<=") and (inner := _absolute(left)) is not None:
        yield inner, right, sign
        yield inner, _negative(right), turned[sign]
    elif sign in (">", ">=") and (inner := _absolute(right)) is not None:
        yield left, inner, sign
        yield _negative(left), inner, turned[sign]
    else:
        yield left, right, sign


def _absolute(tree: ast.expr) -> ast.expr | None:
    """Return what stands in ``abs(…)``; None for anything else, and for a call of it that `_call` refuses."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "abs":
        return tree.args[0] if len(tree.args) == 1 and not tree.keywords else None
    return None


def _negative(tree: ast.expr) -> ast.expr:
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return tree.operand
    return ast.copy_location(ast.UnaryOp(ast.USub(), tree), tree)


def _node(tree: ast.expr, text: str) -> Node:
    if isinstance(tree, ast.Constant):
        if isinstance(tree.value, bool) or not isinstance(tree.value, int | float):
            raise _at(text, tree, "holds a text or a truth value where a number is wanted")
        if not math.isfinite(tree.value):
            raise _at(text, tree, "holds a number that is too large")
        return Constant(float(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):
        inner = _node(tree.operand, text)
        return Operation("-", (Constant(0.0), inner)) if isinstance(tree.op, ast.USub) else inner
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return Operation(_OPERATORS[type(tree.op)], (_node(tree.left, text), _node(tree.right, text)))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return _call(tree, tree.func.id, text)
    if isinstance(tree, ast.Name):
        raise _at(text, tree, f"holds {tree.id!r} alone; wanted a quantity of an arm, such as accuracy({tree.id})")
    raise _at(text, tree, "holds something other than quantities of arms, numbers, + - * / and min, max, mean, abs")


def _call(tree: ast.Call, name: str, text: str) -> Node:
    if name in OVER_MANY:
        if not tree.args or tree.keywords or any(isinstance(one, ast.Starred) for one in tree.args):
            raise _at(text, tree, f"calls {name} without anything to choose from, or with names")
        return Operation(name, tuple(_node(one, text) for one in tree.args))
    if name == "abs":
        if (inner := _absolute(tree)) is None:
            raise _at(text, tree, "calls abs of something other than one value")
        return Operation("max", (_node(inner, text), _node(_negative(inner), text)))
    try:
        quantity = quantity_named(name)
    except ConfigError as error:
        raise _at(text, tree, f"cannot be read: {error}".rstrip(".")) from None
    if len(tree.args) != 1 or (arm := _arm(tree.args[0])) is None:
        raise _at(text, tree, f'asks {name} of no arm; wanted {name}(arm), or {name}("an-arm") for names with signs')
    step, on = _keywords(tree, name, text)
    if step is not None and not quantity.column:
        raise _at(text, tree, f"asks {name} at a step, but it is not recorded by steps")
    if on is not None and (quantity.source != "scores" or step is not None):
        raise _at(text, tree, f"says `on` for {name}, which is not read from score rows here; leave it out")
    from_curve = quantity.source == "curve" or step is not None
    return Term(quantity=quantity.name, arm=arm, step=step, on=on or ("validation" if from_curve else "test"))


def _arm(tree: ast.expr) -> str | None:
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str) and tree.value.strip():
        return tree.value
    return None


def _keywords(tree: ast.Call, name: str, text: str) -> tuple[int | None, str | None]:
    step: int | None = None
    on: str | None = None
    if len({keyword.arg for keyword in tree.keywords}) < len(tree.keywords):
        raise _at(text, tree, f"gives {name} the same name twice")
    for keyword in tree.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg == "step" and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            step = value
        elif keyword.arg == "on" and isinstance(value, str) and value in SPLITS:
            on = value
        else:
            raise _at(text, keyword, f'gives {name} something other than step=500 or on="validation" (or "test")')
    return step, on
