"""Observers of a run: called on the training thread with what happens, and never able to end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class Observer:
    """The callbacks of something that watches a run; those it does not need stay None. Steps count from 1."""

    name: str
    """Name for the warning if it fails."""
    step_begins: Callable[[int], None] | None = None
    """Called before the first forward pass of a step, and again if the step is computed again."""
    forward_done: Callable[[], None] | None = None
    """Called after the forward pass of a micro-batch; the device may still be computing it."""
    backward_done: Callable[[], None] | None = None
    step_done: Callable[[int], None] | None = None
    """Called after the update."""
    row: Callable[[int, Mapping[str, Any]], None] | None = None
    """Called with values that were just added to the row of a step in metrics.csv."""
    close: Callable[[bool], None] | None = None
    """Called once, at the end; the argument is whether an error ended the run."""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When a line in the log is due, and how it begins."""

    num_steps: int
    every: int
    """Steps between evaluations, which is when summaries are logged."""

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        return step % self.every == 0 or step == self.num_steps

    def label(self, step: int) -> str:
        """Return the beginning of a line, such as `step 4/12`."""
        return f"step {step}/{self.num_steps}"


EVENTS = ("step_begins", "forward_done", "backward_done", "step_done", "row", "close")


class Observers:
    """All observers of a run. One that raises is dropped with one warning, and the run goes on. Closed by `with`.

    With several ranks only the first one has observers, so that each file is written once.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._told: dict[str, list[tuple[Observer, Callable[..., None]]]] = {event: [] for event in EVENTS}
        for observer in observers:
            for event in EVENTS:
                if (callback := getattr(observer, event)) is not None:
                    self._told[event].append((observer, callback))

    def __enter__(self) -> Observers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell("close", error is not None)
        self._told = {event: [] for event in EVENTS}

    def step_begins(self, step: int) -> None:
        """See Observer."""
        self._tell("step_begins", step)

    def forward_done(self) -> None:
        """See Observer."""
        self._tell("forward_done")

    def backward_done(self) -> None:
        """See Observer."""
        self._tell("backward_done")

    def step_done(self, step: int) -> None:
        """See Observer."""
        self._tell("step_done", step)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """See Observer."""
        self._tell("row", step, values)

    def _tell(self, event: str, *what: object) -> None:
        # A copy of the list, since `_drop` removes entries while this loop runs.
        for observer, callback in list(self._told[event]):
            try:
                callback(*what)
            # Any error of a viewer's package, or a full disk: watching must never end the run.
            except Exception as error:
                self._drop(observer, error)

    def _drop(self, observer: Observer, error: Exception) -> None:
        first = (str(error).splitlines() or [""])[0]
        logger.warning(
            "%s failed (%s: %s) and is left out from here on; the run goes on, and its record is in its folder",
            observer.name,
            type(error).__name__,
            first,
        )
        for event in EVENTS:
            self._told[event] = [entry for entry in self._told[event] if entry[0] is not observer]
