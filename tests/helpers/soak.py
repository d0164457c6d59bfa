"""Processes that kill themselves at random points of a run, until one comes to its end.

    python soak.py SETTINGS.json SEED

Half of them die at a step, before its forward pass, a backward pass or its update; the others at one of the calls by
which files get to the disk, at most two steps after they began. Prints what it did as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from rewardlab.artifact import canaries
from rewardlab.core.config import from_mapping
from rewardlab.training import run as run_module
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.settings.config import RewardTrainerConfig

MOST = 400
"""Processes after which something is wrong."""


def before_each(owner: object, name: str, do: Callable[[], None]) -> None:
    call = getattr(owner, name)

    def watched(*arguments, **keywords):
        do()
        return call(*arguments, **keywords)

    setattr(owner, name, watched)


def die(kind: bytes, report: int) -> None:
    os.write(report, kind)
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_a_step(points: int, report: int) -> None:
    left = [points]

    def point() -> None:
        left[0] -= 1
        if left[0] == 0:
            die(b"t", report)

    before_each(Trainer, "train_step", point)
    before_each(torch.autograd, "backward", point)
    before_each(torch.optim.AdamW, "step", point)


def die_while_writing(steps: int, points: int, report: int) -> None:
    """At the call number `points` after the step number `steps` began, or after the process did for 0."""
    left = {"steps": steps, "points": points}

    def step() -> None:
        left["steps"] -= 1

    def point() -> None:
        left["points"] -= left["steps"] <= 0
        if left["points"] == 0:
            die(b"w", report)

    before_each(Trainer, "train_step", step)
    before_each(os, "fsync", point)
    before_each(Path, "rename", point)
    before_each(Path, "replace", point)


def main() -> None:
    config = from_mapping(RewardTrainerConfig, json.loads(Path(sys.argv[1]).read_text()), where="settings")
    run_module.verify_in_clean_process = lambda folder: None
    canaries.CONVERSATIONS = canaries.CONVERSATIONS[:2]  # as in the process of the tests
    draw = random.Random(int(sys.argv[2]))
    ends = {"t": 0, "w": 0}
    torch.set_num_threads(1)
    for _ in range(MOST):
        at_a_step, steps, points = draw.random() < 0.5, draw.randint(0, 2), draw.randint(1, 30)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            if at_a_step:
                die_at_a_step(steps + 1, writing)
            else:
                die_while_writing(steps, points, writing)
            run_module.train(config)
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as report:
            kind = report.read()
        if os.WIFSIGNALED(status) and kind:
            ends[kind] += 1
        elif status == 0:
            break
        else:
            sys.exit(f"a process ended with {status}")
    else:
        sys.exit(f"{MOST} processes did not come to the end")
    sys.stdout.write(json.dumps({"at a step": ends["t"], "while writing": ends["w"]}) + "\n")


if __name__ == "__main__":
    main()
