"""Limits on a chat template, which is a program that comes with a model and may never end.

Its language is sandboxed by transformers: it reaches no file and no other object. What is left is how long it runs and
how much it writes: loops inside each other multiply.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from rewardlab.core.errors import RenderError
from rewardlab.core.libc import resident

MAX_SECONDS: Final = 10.0
SECONDS_EACH: Final = 0.1
"""Processor time for a call of the template engine, and more for every conversation in it; an ordinary one takes less
than a millisecond."""
MAX_GROWTH: Final = 2 << 30
"""Bytes by which the process may have grown meanwhile, once the template has run for `SOON` seconds."""
SOON: Final = 0.2
MAX_CHARACTERS: Final = 4 << 20
"""Of a rendering beyond ten times the conversation's own."""
MAX_TEMPLATE: Final = 1 << 20
"""Characters of a template."""
MAX_NUMBER: Final = 1_000_000
"""The largest number that a template may name: none has a use for more, and multiplied with a text it is memory."""
PAUSE_S: Final = 0.05


class _Endless(BaseException):
    """Raised inside a template that goes on for too long; no `except Exception` of others holds it back."""


@cache
def require_harmless(template: str) -> None:
    """Raise RenderError for a template with an operation that could not be interrupted: a power, or a huge number."""
    import jinja2

    if len(template) > MAX_TEMPLATE:
        raise RenderError(f"the chat template has {len(template)} characters, and at most {MAX_TEMPLATE} are read.")
    try:
        tokens = list(jinja2.Environment().lex(template))
    except jinja2.TemplateSyntaxError:  # the engine that renders it says so better
        return
    for line, kind, text in tokens:
        if kind == "operator" and text == "**":
            raise RenderError(f"line {line} of the chat template takes a power, which may be without end. Remove it.")
        if kind in ("integer", "float") and float(text.replace("_", "")) > MAX_NUMBER:
            raise RenderError(
                f"line {line} of the chat template names {text:.20}, which is above {MAX_NUMBER}. Lower it."
            )


def within_limits(render: Callable[[], Sequence[str]], template: str, contents: Sequence[int]) -> Sequence[str]:
    """What `render` makes by `template` of conversations with so many characters each.

    Raises RenderError if the template may not be run, takes more processor time or memory than any conversation does,
    or writes out of all proportion.
    """
    require_harmless(template)
    watch = _Watch(MAX_SECONDS + SECONDS_EACH * len(contents))
    try:
        try:
            watch.start()
            texts = render()
        finally:
            watch.stop()
    except _Endless:
        raise RenderError(
            f"it was stopped after {watch.spent():.1f} seconds of processor time, {watch.grown() >> 20} MiB larger: it "
            f"repeats itself without an end in sight. Use another template."
        ) from None
    for text, content in zip(texts, contents, strict=True):
        if len(text) > MAX_CHARACTERS + 10 * content:
            raise RenderError(f"it makes {len(text)} characters of a conversation of {content}. Use another template.")
    return texts


class _Watch(threading.Thread):
    """Looks at the thread that began it from time to time, and stops what runs there if it goes on for too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="rewardlab-template", daemon=True)
        self._seconds = seconds
        self._watched = threading.get_ident()
        self._clock = _clock_of(self._watched)
        self._begun, self._size = self._clock(), (resident() or 0)
        self._over = threading.Event()
        self._lock = threading.Lock()

    def spent(self) -> float:
        """Seconds of processor time since it began."""
        spent: float = self._clock() - self._begun
        return spent

    def grown(self) -> int:
        """Bytes by which the process has grown since then."""
        return max(0, (resident() or 0) - self._size)

    def run(self) -> None:
        while not self._over.wait(PAUSE_S):
            spent = self.spent()
            if spent > self._seconds or (spent > SOON and self.grown() > MAX_GROWTH):
                with self._lock:
                    if not self._over.is_set():
                        _raise_in(self._watched, _Endless)
                return

    def stop(self) -> None:
        """The watched thread is done; what was to be raised there and was not yet is taken back."""
        with self._lock:
            self._over.set()
            _raise_in(self._watched, None)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise in another thread, at its next step; None takes back what is not raised yet."""
    what: Any = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _clock_of(thread: int) -> Any:
    """Processor time of a thread where the system tells it, so that a busy machine does not count; else the wall's."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)
