"""Claims as trees: what they ask of which arms, by how much they hold, and how that moves with each term.

`claims.parse` reads one from a text. Terms and numbers are joined by + - * /, ``min``, ``max`` and ``mean``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.quantities import quantity_named

SPLITS: Final = ("test", "validation")
MOST_CHOICES: Final = 200
"""Most combinations of arguments of `min` and `max` in one comparison."""
OVER_MANY: Final = ("min", "max", "mean")
"""Functions of one or more values."""
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity of one arm."""

    quantity: str
    """Our name of the quantity (see `quantities.QUANTITIES`)."""
    arm: str
    step: int | None = None
    """Optimiser step; None is the checkpoint that the run chose."""
    on: str = "test"
    """Data of the scores: ``test`` or ``validation``. A value from a curve, or at a step, is always of validation."""

    def __str__(self) -> str:
        """Return the term as it is written in a claim."""
        arm = self.arm if self.arm.isidentifier() else f'"{self.arm}"'
        step = "" if self.step is None else f", step={self.step}"
        natural = "validation" if self.step is not None or quantity_named(self.quantity).source == "curve" else "test"
        on = "" if self.on == natural else f', on="{self.on}"'
        return f"{self.quantity}({arm}{step}{on})"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Operation:
    """Nodes joined by ``+ - * /``, ``min``, ``max`` or ``mean``."""

    name: str
    arguments: tuple[Node, ...]


Node = Term | Constant | Operation


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, of which one is claimed to be the larger one."""

    left: Node
    right: Node
    operator: Literal[">", ">=", "<", "<="]
    text: str

    def __str__(self) -> str:
        """Return its text."""
        return self.text

    @property
    def is_strict(self) -> bool:
        """Whether equal sides refute it."""
        return self.operator in (">", "<")

    @property
    def terms(self) -> tuple[Term, ...]:
        """Its terms, each once, in the order of the text."""
        return tuple(dict.fromkeys(_terms(Operation("-", (self.left, self.right)))))

    @property
    def margin(self) -> Node:
        """The larger side minus the smaller one, as it is claimed: above 0 where the claim holds."""
        sides = (self.left, self.right) if self.operator in (">", ">=") else (self.right, self.left)
        return Operation("-", sides)

    @property
    def choices(self) -> tuple[Literal["any", "all"], tuple[Comparison, ...]] | None:
        """Whether any or all of several simpler comparisons must hold for this one to hold, and these comparisons.

        Each has one argument of the first `min` or `max` in its place. None without a `min` or `max` that can be taken
        apart: one that is multiplied by other terms, or that stands below a fraction line, cannot.
        """
        found = _first_choice(self.margin, 1.0)
        if found is None:
            return None
        name, sign, margins = found
        alternatives = tuple(
            Comparison(one, Constant(0.0), ">" if self.is_strict else ">=", self.text) for one in margins
        )
        return "any" if (name == "max") == (sign > 0) else "all", alternatives

    @property
    def takes_extremes(self) -> bool:
        """Whether it holds a `min` or `max` of several values."""
        return any(True for _ in _extremes(self.margin))

    @property
    def takes_sides_alone(self) -> bool:
        """Whether each `min` or `max` of several values is an `abs`: a number or its negative."""
        return all(map(_is_absolute, _extremes(self.margin)))

    @property
    def is_linear(self) -> bool:
        """Whether its value is a weighted sum of its terms and a number."""
        return _linear(self.margin) is not None

    def value(self, values: Mapping[Term, float]) -> float:
        """Return by how much the comparison holds: above 0 it holds, below 0 it does not. NaN after a division by 0."""
        return _value(self.margin, values)

    def gradient(self, values: Mapping[Term, float]) -> dict[Term, float]:
        """Return term -> derivative of `value` at these values. For min and max, it is that of the extreme argument.

        A linear comparison has the same derivatives everywhere and needs no values.
        """
        if (weights := _linear(self.margin)) is not None:
            return weights[1]
        found: dict[Term, float] = {}
        _push(self.margin, 1.0, values, found)
        return found

    def holds(self, value: float) -> bool:
        """Return whether the comparison holds where `value` is exactly this."""
        return value > 0 or (value == 0 and not self.is_strict)

    def bounds(self, ranges: Mapping[Term, Range]) -> Range:
        """Return limits of `value` where each term lies in its range.

        They are reached where the expression is linear; else interval arithmetic may make them too wide, never too
        narrow.
        """
        weights = _linear(self.margin)
        if weights is None:
            return _bounds(self.margin, ranges)
        constant, of_terms = weights
        ends = [_scaled(ranges[term], weight) for term, weight in of_terms.items()]
        return constant + sum(low for low, _ in ends), constant + sum(high for _, high in ends)


@dataclass(frozen=True, slots=True)
class Claim:
    """A hypothesis: it holds if all its parts do."""

    parts: tuple[Comparison, ...]
    text: str

    def __str__(self) -> str:
        """Return its text, with plain signs and spaces."""
        return self.text

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of all parts, each once."""
        return tuple(dict.fromkeys(term for part in self.parts for term in part.terms))

    def judged_on(self, on: str) -> Claim:
        """Return the claim with all its scores on `test` or `validation` data."""
        return replace(
            self, parts=tuple(replace(part, left=_on(part.left, on), right=_on(part.right, on)) for part in self.parts)
        )

    def require_arms(self, arms: Collection[str]) -> None:
        """Raise ConfigError, with the nearest name, if the claim asks an arm that is not among `arms`."""
        require_arms(self.text, self.terms, arms)


def require_arms(text: str, terms: Iterable[Term], arms: Collection[str]) -> None:
    """Raise ConfigError, with the nearest name, if a text asks an arm that is not among `arms`."""
    for term in terms:
        if term.arm not in arms:
            near = difflib.get_close_matches(term.arm, list(arms), n=1)
            hint = f"Did you mean {near[0]}?" if near else f"The arms are {', '.join(sorted(arms)) or 'none'}."
            raise ConfigError(f"{text!r} asks the arm {term.arm!r}, which the plan does not have. {hint}")


def num_choices(part: Comparison) -> int:
    """Return how many comparisons a comparison is taken apart into, counted until it exceeds `MOST_CHOICES`."""
    if (found := part.choices) is None:
        return 1
    total = 0
    for one in found[1]:
        total += num_choices(one)
        if total > MOST_CHOICES:
            break
    return total


def _extremes(node: Node) -> Iterator[Operation]:
    """Yield each `min` or `max` of several values in a node."""
    if isinstance(node, Operation):
        if node.name in ("min", "max") and len(node.arguments) > 1:
            yield node
        for argument in node.arguments:
            yield from _extremes(argument)


def _is_absolute(node: Operation) -> bool:
    first, *others = node.arguments
    return node.name == "max" and others == [Operation("-", (Constant(0.0), first))]


def _first_choice(node: Node, sign: float) -> tuple[str, float, list[Node]] | None:
    """Return the first `min` or `max` in a node that can be taken apart: (its name, sign, nodes); None without one.

    `sign` is that of the node's slope by it, and the nodes have each of its arguments in its place.
    """
    if not isinstance(node, Operation):
        return None
    if node.name in ("min", "max"):
        return node.name, sign, list(node.arguments)
    signs = [sign] * len(node.arguments)
    if node.name == "-":
        signs[1] = -sign
    elif node.name in "*/":
        numbers = [isinstance(_linear(one), tuple) and not any(True for _ in _terms(one)) for one in node.arguments]
        values = [_value(one, {}) if number else 0.0 for one, number in zip(node.arguments, numbers, strict=True)]
        # Only a factor that is a number has a known sign; what stands below a fraction line has no constant slope.
        signs = [sign * values[1], 0.0 if node.name == "/" else sign * values[0]]
    for number, (argument, own) in enumerate(zip(node.arguments, signs, strict=True)):
        if own and (found := _first_choice(argument, own)) is not None:
            before, after = node.arguments[:number], node.arguments[number + 1 :]
            return found[0], found[1], [Operation(node.name, (*before, one, *after)) for one in found[2]]
    return None


def _on(node: Node, on: str) -> Node:
    if isinstance(node, Term):
        of_scores = node.step is None and quantity_named(node.quantity).source == "scores"
        return replace(node, on=on) if of_scores else node
    return (
        replace(node, arguments=tuple(_on(one, on) for one in node.arguments)) if isinstance(node, Operation) else node
    )


def _terms(node: Node) -> Iterator[Term]:
    if isinstance(node, Term):
        yield node
    elif isinstance(node, Operation):
        for argument in node.arguments:
            yield from _terms(argument)


def _value(node: Node, values: Mapping[Term, float]) -> float:
    if isinstance(node, Term):
        return values[node]
    if isinstance(node, Constant):
        return node.value
    return _joined(node.name, [_value(argument, values) for argument in node.arguments])


def _joined(name: str, values: list[float]) -> float:
    if name in OVER_MANY:
        return min(values) if name == "min" else max(values) if name == "max" else sum(values) / len(values)
    first, second = values
    if name == "/":
        return first / second if second else math.nan
    return first + second if name == "+" else first - second if name == "-" else first * second


def _push(node: Node, weight: float, values: Mapping[Term, float], found: dict[Term, float]) -> None:
    """Add `weight` times the derivatives of a node to `found`."""
    if isinstance(node, Term):
        found[node] = found.get(node, 0.0) + weight
    elif isinstance(node, Operation):
        at = [_value(argument, values) for argument in node.arguments]
        for argument, slope in zip(node.arguments, _slopes(node.name, at), strict=True):
            _push(argument, weight * slope, values, found)


def _slopes(name: str, at: list[float]) -> list[float]:
    """Return the derivative of an operation by each argument."""
    if name == "mean":
        return [1 / len(at)] * len(at)
    if name in OVER_MANY:
        chosen = at.index(_joined(name, at))
        return [float(number == chosen) for number in range(len(at))]
    first, second = at
    if name == "*":
        return [second, first]
    if name == "/":
        return [1 / second, -first / second**2] if second else [math.nan, math.nan]
    return [1.0, 1.0 if name == "+" else -1.0]


def _linear(node: Node) -> tuple[float, dict[Term, float]] | None:
    """Return a node as a constant and a weight for each term; None where it is not linear."""
    if isinstance(node, Constant):
        return node.value, {}
    if isinstance(node, Term):
        return 0.0, {node: 1.0}
    sides = [_linear(argument) for argument in node.arguments]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides) or node.name in ("min", "max"):
        return None
    if node.name == "mean":
        return _weighted(known, [1 / len(known)] * len(known))
    if node.name in "+-":
        return _weighted(known, [1.0, 1.0 if node.name == "+" else -1.0])
    (first, of_first), (second, of_second) = known
    if node.name == "/":
        return _weighted(known[:1], [1 / second]) if second and not of_second else None
    if of_first and of_second:
        return None
    return _weighted(known[1:], [first]) if not of_first else _weighted(known[:1], [second])


def _weighted(sides: list[tuple[float, dict[Term, float]]], weights: list[float]) -> tuple[float, dict[Term, float]]:
    total, found = 0.0, dict[Term, float]()
    for (constant, of_terms), weight in zip(sides, weights, strict=True):
        total += weight * constant
        for term, own in of_terms.items():
            found[term] = found.get(term, 0.0) + weight * own
    return total, found


def _scaled(limits: Range, weight: float) -> Range:
    """Return a range times a number; 0 times ∞ is 0."""
    ends = [weight * end if weight else 0.0 for end in limits]
    return min(ends), max(ends)


def _bounds(node: Node, ranges: Mapping[Term, Range]) -> Range:
    if isinstance(node, Term):
        return ranges[node]
    if isinstance(node, Constant):
        return node.value, node.value
    sides = [_bounds(argument, ranges) for argument in node.arguments]
    if node.name in ("min", "max", "mean", "+"):
        of_many = "mean" if node.name == "mean" else node.name
        return _joined(of_many, [low for low, _ in sides]), _joined(of_many, [high for _, high in sides])
    (low, high), (other_low, other_high) = sides
    if node.name == "-":
        return low - other_high, high - other_low
    if node.name == "/":
        if other_low <= 0 <= other_high:
            return -math.inf, math.inf
        other_low, other_high = 1 / other_high, 1 / other_low
    ends = [_product(one, other) for one in (low, high) for other in (other_low, other_high)]
    return min(ends), max(ends)


def _product(one: float, other: float) -> float:
    return one * other if one and other else 0.0
