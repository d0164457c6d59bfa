"""The run-time type checker of the test suite: an int is fine where a float is wanted, as for mypy.

jaxtyping's own decorator binds the arguments of every call, for sizes that are computed from them (`"{n} 3"`, which no
annotation here has), and looks at all of them twice. Done everywhere it takes as long as the code that it watches.
Here the shapes of a call are held against each other by jaxtyping's context alone, and only where a signature has
shapes; all else is checked by beartype alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper, wraps
from inspect import isgeneratorfunction
from types import CodeType, FunctionType
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf
from beartype import beartype as decorate

beartype = decorate(conf=BeartypeConf(is_pep484_tower=True))

_with_shapes = jaxtyping.jaxtyped
_wrappers: dict[CodeType, Any] = {}
"""What checks a function that is defined anew at every call of the one around it."""


def jaxtyped(what: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """As `jaxtyping.jaxtyped`, for functions and classes; what a call of another type raises is beartype's own.

    With JAXTYPING_DISABLE=1 nothing is checked.
    """
    if what is None:
        return partial(jaxtyped, typechecker=typechecker)
    if jaxtyping.config.jaxtyping_disable:
        return what
    if isinstance(what, type) and _is_checked(what.__init__):  # a decorator of the class gave it another one
        return what
    if not isinstance(what, FunctionType):
        return _with_shapes(what, typechecker=typechecker)
    known = _wrappers.get(what.__code__)
    if known is not None:
        return _around(known, what)
    try:
        shapes = any(map(_is_shape, get_type_hints(what).values()))
    except NameError:  # what cannot be looked up is not checked
        return _with_shapes(what, typechecker=typechecker)
    if shapes and isgeneratorfunction(what):  # what it yields is not checked
        return _with_shapes(typechecker(what), typechecker=None)
    if shapes:
        return _in_context(typechecker(what))
    checked = typechecker(what)
    if _is_checked(checked):
        _wrappers[what.__code__] = checked
    return checked


def _in_context(checked: Any) -> Any:
    """A function whose calls have each their own sizes."""

    @wraps(checked)
    def with_shapes(*args: Any, **kwargs: Any) -> Any:
        with _with_shapes("context"):
            return checked(*args, **kwargs)

    return with_shapes


def _is_checked(function: Any) -> bool:
    """Whether this is a function that beartype made around another one."""
    return "__beartype_func" in (getattr(function, "__kwdefaults__", None) or {})


def _around(known: Any, function: FunctionType) -> FunctionType:
    """The checks of another function of the same code, around this one."""
    wrapper = FunctionType(known.__code__, known.__globals__, known.__name__)
    wrapper.__kwdefaults__ = {**known.__kwdefaults__, "__beartype_func": function}
    return update_wrapper(wrapper, function)


def _is_shape(hint: Any) -> bool:
    """Whether an annotation, or a part of it, is an array of jaxtyping."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_is_shape, hint if isinstance(hint, list) else get_args(hint)))
