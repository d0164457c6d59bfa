"""The suite's type checker refuses what annotations do not allow, wherever they stand."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

import typecheck
from rewardlab.training.loop.losses import centering

checked = typecheck.jaxtyped(typechecker=typecheck.beartype)


@checked
def halved(number: int, lies: bool = False) -> float:
    return "half" if lies else number / 2


@checked
def added(first_C: Float[Tensor, " C"], second_C: Float[Tensor, " C"] | None = None) -> Float[Tensor, " C"]:
    return first_C if second_C is None else (first_C + second_C)[: len(first_C)]


@checked
def repeated(values_C: Float[Tensor, " C"], times: int) -> Float[Tensor, " C"]:
    return values_C.repeat(times)


def adder(number: int):
    @checked
    def add(other: int) -> int:
        return number + other

    return add


@checked
@dataclass(frozen=True)
class Row:
    tokens_T: Int[Tensor, " T"]
    mask_T: Int[Tensor, " T"]

    @property
    @checked
    def length(self) -> int:
        return len(self.tokens_T) if self.mask_T.any() else "nothing"

    @checked
    def same_as(self, other: Row, strictly: bool = False) -> bool:
        return other is self if strictly else torch.equal(other.tokens_T, self.tokens_T)

    @classmethod
    @checked
    def of(cls, tokens_T: Int[Tensor, " T"], mask_T: Int[Tensor, " T"]) -> Row:
        return cls(tokens_T, mask_T)


@checked
class Longer(Row):
    """It has the constructor of another class."""


@checked
def tokens_of(row: Row) -> Any:
    return row.tokens_T


class Stand:
    """Put in the place of a row."""

    tokens_T = ()


def test_types_are_checked():
    assert halved(3) == 1.5
    with pytest.raises(BeartypeCallHintParamViolation):
        halved("3")
    with pytest.raises(BeartypeCallHintReturnViolation):
        halved(3, lies=True)


def test_shapes_of_one_call_are_held_against_each_other():
    assert torch.equal(added(torch.ones(3), torch.ones(3)), torch.full([3], 2.0))
    assert len(added(torch.ones(2))) == 2, "another call, another C"
    with pytest.raises(BeartypeCallHintParamViolation):
        added(torch.ones(3), torch.ones(4))
    with pytest.raises(BeartypeCallHintParamViolation):
        added(torch.ones(3, dtype=torch.int64))
    with pytest.raises(BeartypeCallHintReturnViolation):
        repeated(torch.ones(3), 2)


def test_a_function_inside_another_is_checked_every_time_it_is_defined():
    assert [adder(number)(10) for number in (1, 2, 3)] == [11, 12, 13]
    for number in (1, 2):
        with pytest.raises(BeartypeCallHintParamViolation):
            adder(number)("10")
    assert adder(1).__name__ == "add"


def test_fields_are_checked():
    Row(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeCheckError):
        Row(torch.ones(3, dtype=torch.int64), torch.ones(4, dtype=torch.int64))


def test_methods_that_name_their_own_class_are_checked():
    ones, more = torch.ones(3, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    row = Row.of(ones, ones)
    assert row.same_as(Row(ones, ones))
    with pytest.raises(TypeCheckError):
        row.same_as(row, strictly="yes")
    with pytest.raises(TypeCheckError):
        Row.of(ones, more)


def test_properties_are_checked():
    ones = torch.ones(3, dtype=torch.int64)
    assert Row(ones, ones).length == 3
    with pytest.raises(BeartypeCallHintReturnViolation):
        _ = Row(ones, ones - 1).length


def test_a_constructor_is_checked_once():
    assert Longer.__init__ is Row.__init__


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintParamViolation):
        centering(torch.ones(3), torch.ones(4))


def test_nothing_is_checked_where_the_checks_are_turned_off(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert checked(adder) is adder


def test_constructors_whose_code_is_equal_are_told_apart() -> None:
    """Two dataclasses with the same names of fields, whose types differ."""

    def first() -> Any:
        @dataclass
        class Found:
            file: str

        return Found

    def second() -> Any:
        @dataclass
        class Found:
            file: Path

        return Found

    text, path = (typecheck.jaxtyped(make(), typechecker=typecheck.beartype) for make in (first, second))
    assert text(file="a").file == "a"
    assert path(file=Path("a")).file == Path("a")
    with pytest.raises(TypeError):
        path(file="a")


def test_the_first_calls_of_each_test_are_checked_and_no_more() -> None:
    for _ in range(typecheck.MOST):
        with pytest.raises(BeartypeCallHintReturnViolation):
            halved(1, lies=True)
    assert halved(1, lies=True) == "half"
    typecheck.begin_test()
    with pytest.raises(BeartypeCallHintReturnViolation):
        halved(1, lies=True)


@checked
async def later() -> int:
    return 1


def test_what_stands_for_a_class_at_the_first_call_is_not_taken_for_it(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "Row", Stand)
        with pytest.raises(BeartypeCallHintParamViolation):
            tokens_of(Stand())
    ones = torch.ones(3, dtype=torch.int64)
    assert torch.equal(tokens_of(Row(ones, ones)), ones)


def test_a_function_that_is_awaited_is_still_known_as_one() -> None:
    assert inspect.iscoroutinefunction(later)
