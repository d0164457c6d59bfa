"""Processes that kill themselves at random points of a run, at most KILLS, until one comes to its end.

    python soak.py SETTINGS.json KILLS SEED

A point is a step, or one of the calls by which files get to the disk. Prints what it did as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

from rewardlab.core.config import from_mapping
from rewardlab.training import run as run_module
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.trainer import Trainer

MOST = 400
"""Processes after which something is wrong."""


def count_down(points: int, report: int) -> None:
    """Let this process kill itself at a point, and write to `report` whether it was writing."""
    left = [points]

    def wrap(owner: object, name: str, kind: bytes) -> None:
        call = getattr(owner, name)

        def counted(*arguments, **keywords):
            left[0] -= 1
            if left[0] <= 0:
                os.write(report, kind)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        setattr(owner, name, counted)

    wrap(Trainer, "train_step", b"t")
    wrap(os, "fsync", b"s")
    wrap(Path, "rename", b"s")
    wrap(Path, "replace", b"s")
    wrap(torch.autograd, "backward", b"t")


def main() -> None:
    values, kills, seed = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3])
    config = from_mapping(RewardTrainerConfig, values, where="settings")
    run_module.verify_in_clean_process = lambda folder: None
    draw = random.Random(seed)
    ends = {"t": 0, "s": 0}
    torch.set_num_threads(1)
    for _ in range(MOST):
        killing = sum(ends.values()) < kills
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            if killing:
                count_down(draw.randint(1, 25), writing)
            run_module.train(config)
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as report:
            kind = report.read()
        draw.random()  # the child drew from a copy
        if os.WIFSIGNALED(status) and kind:
            ends[kind] += 1
        elif status != 0:
            sys.exit(f"a process ended with {status}")
        else:
            break
    sys.stdout.write(json.dumps({"kills": sum(ends.values()), "while saving": ends["s"]}) + "\n")


if __name__ == "__main__":
    main()
