"""Limits on a chat template, which is a program that comes with a model and may never end.

Transformers runs it in a sandbox, so it cannot reach files or other objects. The sandbox does not limit running time
or output, and a few nested loops are enough to exhaust either.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from time import monotonic, sleep
from typing import Any, Final

from rewardlab.core.errors import RenderError
from rewardlab.core.libc import resident

MAX_SECONDS: Final = 10.0
SECONDS_EACH: Final = 0.1
"""Processor time allowed for a call of the template engine: a fixed part, and a part for every conversation in it. An
ordinary conversation takes less than a millisecond."""
MAX_GROWTH: Final = 2 << 30
"""Bytes by which the process may grow during the call. Checked after `SOON` seconds, since other threads allocate
too."""
SOON: Final = 0.2
"""Seconds of processor time after which growth is checked."""
MAX_CHARACTERS: Final = 4 << 20
"""Characters that a rendering may have beyond ten times those of its conversation."""
MAX_TEMPLATE: Final = 1 << 20
"""Most characters of a template."""
MAX_NUMBER: Final = 1_000_000
"""The largest number in a template. No template needs more, and a text multiplied by a huge number fills the memory in
one operation, which cannot be interrupted."""
PAUSE_S: Final = 0.05
"""Seconds between two checks of a running template."""
IDLE_S: Final = 1.0
"""Seconds without a running template after which nothing is checked any more."""


class _Endless(BaseException):
    """Raised inside a template that runs for too long. A BaseException, so that no `except Exception` catches it."""


@cache
def require_harmless(template: str) -> None:
    """Raise RenderError for a template that is too long or has an operation that could not be interrupted.

    Such operations are powers, and numbers above `MAX_NUMBER`: Python checks for interrupts only between operations.
    """
    import jinja2

    if len(template) > MAX_TEMPLATE:
        raise RenderError(f"the chat template has {len(template)} characters, and at most {MAX_TEMPLATE} are read.")
    try:
        tokens = list(jinja2.Environment().lex(template))
    except jinja2.TemplateSyntaxError:
        # Rendering will raise a better message.
        return
    for line, kind, text in tokens:
        if kind == "operator" and text == "**":
            raise RenderError(f"line {line} of the chat template takes a power, which may never finish. Remove it.")
        if kind in ("integer", "float") and float(text.replace("_", "")) > MAX_NUMBER:
            raise RenderError(
                f"line {line} of the chat template names {text:.20}, which is above {MAX_NUMBER}. Lower it."
            )


def within_limits(render: Callable[[], Sequence[str]], template: str, contents: Sequence[int]) -> Sequence[str]:
    """Return what `render` makes, with `template`, of conversations of `contents` characters each.

    Raises RenderError if the template is refused by `require_harmless`, takes too much processor time or memory, or
    writes far more than it was given.
    """
    require_harmless(template)
    watch = _Watch(MAX_SECONDS + SECONDS_EACH * len(contents))
    try:
        try:
            _WATCHER.add(watch)
            texts = render()
        finally:
            _WATCHER.remove(watch)
    except _Endless:
        raise RenderError(
            f"it was stopped after {watch.spent():.1f} seconds of processor time, {watch.grown() >> 20} MiB larger: it "
            f"probably never ends. Use another template."
        ) from None
    for text, content in zip(texts, contents, strict=True):
        if len(text) > MAX_CHARACTERS + 10 * content:
            raise RenderError(f"it makes {len(text)} characters of a conversation of {content}. Use another template.")
    return texts


class _Watch:
    """What a call of the template engine has used so far, in the thread that created the watch."""

    def __init__(self, seconds: float) -> None:
        self.thread = threading.get_ident()
        self.interrupted = False
        """Whether an error was scheduled in that thread."""
        self._seconds = seconds
        self._clock = _clock_of(self.thread)
        self._begun = self._clock()
        self.size_before: int | None = None
        """Bytes of the process when the watch was added to the watcher, or as it was smaller since; None if the system
        did not say."""

    def spent(self) -> float:
        """Return seconds of processor time of the watched thread since the watch was created."""
        spent: float = self._clock() - self._begun
        return spent

    def grown(self) -> int:
        """Return bytes by which the process has grown since the watch was added to the watcher."""
        size = resident()
        if size is None:
            return 0
        # Smaller once what an earlier call held is freed.
        self.size_before = size if self.size_before is None else min(self.size_before, size)
        return size - self.size_before

    def is_over(self) -> bool:
        """Return whether the call has used more than it is given.

        The watched thread must not go on meanwhile: a text that doubles could fill the memory in a few more steps.
        """
        spent = self.spent()
        return spent > self._seconds or (spent > SOON and self.grown() > MAX_GROWTH)


class _Watcher:
    """Checks all calls of the template engine every `PAUSE_S` seconds, and interrupts those that exceed the limits.

    A thread does it, because signals reach the main thread only and a template may be rendered in any. It ends when
    there was nothing to check for `IDLE_S` seconds, so that many short calls share one thread.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as after a fork, which leaves the thread in the parent."""
        self._lock = threading.Lock()
        self._watches: set[_Watch] = set()
        self._thread: threading.Thread | None = None
        self._size: int | None = None

    def add(self, watch: _Watch) -> None:
        """Check `watch` from now on."""
        with self._lock:
            if self._thread is None:
                self._size = resident()
                self._thread = threading.Thread(target=self._run, name="rewardlab-template", daemon=True)
                self._thread.start()
            # As it was at most a pause ago: to ask for every call would take an eighth of rendering a conversation.
            watch.size_before = self._size
            self._watches.add(watch)

    def remove(self, watch: _Watch) -> None:
        """End a watch. An error that was to be raised in the watched thread, and is not yet, is taken back."""
        # Under the lock, so that no error is scheduled after this call: it would hit whatever runs next.
        with self._lock:
            self._watches.discard(watch)
            if watch.interrupted:
                _raise_in(watch.thread, None)

    def _run(self) -> None:
        last_seen = monotonic()
        while True:
            sleep(PAUSE_S)
            with self._lock:
                self._look()
                now = monotonic()
                if self._watches:
                    last_seen = now
                elif now - last_seen > IDLE_S:
                    self._thread = None
                    return

    def _look(self) -> None:
        """Interrupt the calls that are over, and note how large the process is for those to come."""
        for watch in self._watches:
            if not watch.interrupted and watch.is_over():
                watch.interrupted = True
                _raise_in(watch.thread, _Endless)
        # Not while a call is being stopped, which holds what it took: the next ones may not take more for that.
        if not any(watch.interrupted for watch in self._watches):
            self._size = resident() or self._size


_WATCHER: Final = _Watcher()
"""Of the process: one thread checks the calls of all renderers, and a fork, which leaves it behind, is noticed once."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCHER.forget)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Schedule an error to be raised in another thread at its next bytecode; None cancels one that is pending."""
    what: Any = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _clock_of(thread: int) -> Any:
    """Return a clock of a thread's processor time, which a busy machine does not distort; elsewhere the wall clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def require_embedded(token_ids: Sequence[int], num_embeddings: int | None, tokenizer: Any) -> None:
    """Raise RenderError if the model has no embedding for one of the tokens; nothing is known if `num_embeddings` is
    None.

    Computing would end in an index out of range, and on a GPU the process could not use it any more.
    """
    if num_embeddings is None or (largest := max(token_ids, default=0)) < num_embeddings:
        return
    raise RenderError(
        f"a text has the token {tokenizer.convert_ids_to_tokens(int(largest))!r} ({largest}), and the model has "
        f"embeddings for {num_embeddings} tokens alone. Leave it out, or enlarge the embeddings of the base model and "
        f"train that."
    )
