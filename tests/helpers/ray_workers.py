"""Sources without a model, for the workers of a Ray cluster: replies that a formula gives, and planted ends of
processes. Everything is importable by the workers, which do not share this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewardlab.core.errors import ModelError
from rewardlab.gold.sampling.asks import Ask
from rewardlab.gold.sampling.config import SampleConfig


class Formula:
    """Replies by their seeds. `model` is FOLDER:WHAT, where the workers leave notes and what happens on the way."""

    places = 1

    def __init__(self, model: str) -> None:
        folder, _, self.name = model.partition(":")
        self.identity: dict[str, Any] = {}
        self._folder = Path(folder)

    async def open(self) -> None:
        """Note the process, and see what happens."""
        (self._folder / f"pid-{os.getpid()}").touch()
        if "no model" in self.name:
            raise ModelError("there is no such model")
        others = len(list(self._folder.glob("pid-*"))) if "differs" in self.name else 0
        self.identity = {"model": "formula", **({"other": others} if others else {})}

    async def ask(self, items: Sequence[Ask]) -> Sequence[dict[str, Any]]:
        """Return the replies."""
        for item in items:
            self._happen(item)
        with (self._folder / "asked").open("a") as file:
            file.write(f"{os.getpid()} {len(items)}\n")
        return [self._reply(item) for item in items]

    def _happen(self, item: Ask) -> None:
        text = item.prompt[-1].content
        if "kills once" in self.name and text == "question 5":
            try:
                (self._folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)
        if "kills always" in self.name and text == "question 5" and item.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fails" in self.name and text == "question 5" and item.index == 1:
            raise ZeroDivisionError("planted")

    def _reply(self, item: Ask) -> dict[str, Any]:
        if "refuses" in self.name and item.index == 0:
            return {"error": "it is too long"}
        return {"text": f"{item.prompt[-1].content}: {item.seed % 1000}", "stop": "stop", "tokens": 3}

    async def close(self) -> None:
        """Do nothing."""


def formula(config: SampleConfig) -> list[Formula]:
    """Return what stands in for the samplers that settings name."""
    return [Formula(config.model)]
