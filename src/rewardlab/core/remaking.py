"""Objects that are made anew in another process, by what made them, with all that a subclass has added."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any


def remade(base: Any, kind: type, arguments: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
    """Return an object of `kind`, a subclass of the class `base` or that itself, made by the `__init__` of `base`."""
    made: Any = object.__new__(kind)
    base.__init__(made, *arguments, **settings)
    return made


def added(one: object, made: Collection[str]) -> dict[str, Any] | None:
    """Return the attributes of an object that are not among those that the `__init__` of its base has `made`.

    A subclass with attributes that pickle cannot write leaves them out by a `__getstate__` of its own.
    """
    state = one.__getstate__()
    held = state if isinstance(state, dict) else {}
    return {name: value for name, value in held.items() if name not in made} or None


def writable(value: Any) -> Any:
    """Return a value whose mappings, inside each other too, are dictionaries where pickle cannot write them."""
    if isinstance(value, MappingProxyType | dict):
        return {name: writable(one) for name, one in value.items()}
    return value
