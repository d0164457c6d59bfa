"""`rewardlab`, with a note of each model that a run saves: forward passes and seconds. A process of its own.

    python -m harness.saves NOTE.json train ...

It names only what earlier versions have too, so that their code can be run by it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rewardlab.cli import main
from rewardlab.core.files import write_json
from rewardlab.model.reward import RewardModel
from rewardlab.training.checkpoints.model_folders import Saver


def note(target: Path) -> None:
    """Let every save write all notes so far to a file: folder, step, passes that a backbone computed, seconds."""
    saves: list[dict[str, Any]] = []
    computed = [0]
    read, save = RewardModel.read, Saver.save

    def counted(model: RewardModel, hidden: Any, batch: Any) -> Any:
        # Trials of a layout are of several conversations; canaries are computed alone.
        computed[0] += batch.num_replies == 1
        return read(model, hidden, batch)

    def noted(saver: Saver, folder: Path, step: int) -> None:
        before, started = computed[0], time.perf_counter()
        save(saver, folder, step)
        seconds = time.perf_counter() - started
        saves.append({"folder": folder.name, "step": step, "passes": computed[0] - before, "seconds": seconds})
        write_json(target, {"saves": saves})

    RewardModel.read = counted
    Saver.save = noted


if __name__ == "__main__":
    note(Path(sys.argv[1]))
    main(sys.argv[2:])
