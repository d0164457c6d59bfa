"""The run-time type checker of the test suite: an int is fine where a float is wanted, as for mypy.

jaxtyping's own decorator binds the arguments of every call, for sizes that are computed from them (`"{n} 3"`, which no
annotation here has), and looks at all of them twice. Done everywhere it takes as long as the code that it watches.
Here the shapes of a call are held against each other by jaxtyping's context alone, and only where a signature or the
fields of a dataclass have shapes; all else is checked by beartype alone. The checks of a function are made when it is
first called, since tests import many functions that they do not call. An annotation with a name that is not known where
the function is defined, such as that of its own class, is not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, update_wrapper, wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, isgeneratorfunction
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, get_args, get_type_hints
from weakref import WeakSet

import jaxtyping
from beartype import BeartypeConf
from beartype import beartype as decorate

beartype = decorate(conf=BeartypeConf(is_pep484_tower=True))
_by_type_error = decorate(conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))
"""What a constructor refuses is a TypeError, as with jaxtyping: readers of files catch it as they do Python's own."""

MOST = 10
"""Calls of a function that are checked in each test. What a loop calls thousands of times is of the same types, and to
check all of them took a fifth of the time of the tests."""

_with_shapes = jaxtyping.jaxtyped
_test = [0]
"""The number of the test that runs."""
_LATER: WeakSet[Any] = WeakSet()
"""Functions that are checked from their first call on."""
_wrappers: dict[tuple[CodeType, str, str], Any] = {}
"""What checks a function that is defined anew at every call of the one around it."""


def begin_test() -> None:
    """Check the first calls of every function anew."""
    _test[0] += 1


def jaxtyped(what: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """As `jaxtyping.jaxtyped`, for functions and classes; what a call of another type raises is beartype's own, but for
    constructors and what names its own class: there it is a TypeError.

    With JAXTYPING_DISABLE=1 nothing is checked.
    """
    if what is None:
        return partial(jaxtyped, typechecker=typechecker)
    if jaxtyping.config.jaxtyping_disable:
        return what
    if isinstance(what, type):
        if is_dataclass(what) and not _is_checked(what.__init__):  # a decorator of the class may have given it another
            what.__init__ = jaxtyped(what.__init__, typechecker=_by_type_error)
        return what
    if not isinstance(what, FunctionType):
        return _with_shapes(what, typechecker=typechecker)
    if "<locals>" not in what.__qualname__ and not _makes(what):
        return _first_calls(what, typechecker)
    known = _wrappers.get(_key(what))
    return _around(known, what) if known is not None else _checked(what, typechecker, *_hints(what))


def _key(function: FunctionType) -> tuple[CodeType, str, str]:
    """What a function is known by. Code alone is not enough: that of constructors of dataclasses with the same names of
    fields is equal, whatever their types."""
    return function.__code__, function.__module__, function.__qualname__


def _checked(function: FunctionType, typechecker: Callable[[Any], Any], known: bool, hints: dict[str, Any]) -> Any:
    shapes = any(map(_is_shape, hints.values()))
    if shapes and isgeneratorfunction(function):  # what it yields is not checked
        return _with_shapes(typechecker(function), typechecker=None)
    checked = (typechecker if known else _by_type_error)(_with_hints(function, hints))
    if shapes:
        checked = _in_context(checked)
    elif _is_checked(checked):
        _wrappers[_key(function)] = checked
    checked.__annotations__ = function.__annotations__
    return checked


def _makes(function: FunctionType) -> bool:
    """Whether a call returns a coroutine or a generator: what calls it may ask for its kind."""
    return bool(function.__code__.co_flags & (CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR))


def _first_calls(plain: FunctionType, typechecker: Callable[[Any], Any]) -> Any:
    """A function of which the first calls in each test are checked.

    What its annotations mean is looked up now: at its first call a test may have put something else in their place.
    """
    test = calls = 0
    checked: Any = None
    meaning = _hints(plain)

    @wraps(plain)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, calls, checked
        if test != _test[0]:
            test, calls = _test[0], 0
        if calls == MOST:
            return plain(*args, **kwargs)
        calls += 1
        if checked is None:
            checked = _checked(plain, typechecker, *meaning)
        return checked(*args, **kwargs)

    _LATER.add(looked_at)
    return looked_at


def _hints(function: FunctionType) -> tuple[bool, dict[str, Any]]:
    """(whether all names are known, what the annotations mean); with a name that is not, or not yet, it is Any."""
    try:
        return True, get_type_hints(function)
    except NameError:
        return False, {name: _meaning(one, function) for name, one in function.__annotations__.items()}


def _meaning(annotation: Any, function: FunctionType) -> Any:
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), function.__globals__)["it"]
    except NameError:
        return Any


def _with_hints(function: FunctionType, hints: dict[str, Any]) -> FunctionType:
    """The same function, annotated like this."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    del copy.__wrapped__
    copy.__annotations__ = hints
    return copy


def _in_context(checked: Any) -> Any:
    """A function whose calls have each their own sizes."""

    @wraps(checked)
    def with_shapes(*args: Any, **kwargs: Any) -> Any:
        with _with_shapes("context"):
            return checked(*args, **kwargs)

    return with_shapes


def _is_checked(function: Any) -> bool:
    """Whether this is a function that beartype made around another one, or is around such a one."""
    if function in _LATER or (hasattr(function, "__wrapped__") and _is_checked(function.__wrapped__)):
        return True
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
