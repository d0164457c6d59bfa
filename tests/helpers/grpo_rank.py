"""One process of a run of GRPOTrainer, as torchrun starts them: SOURCE FOLDER STEPS BATCH, and `resume` to go on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rewardlab.rl.trl import reward_function
from trl_runs import GROUP, trainer


def run(source: str, folder: Path, *, steps: int, batch: int, resume: bool) -> None:
    """Train, with a checkpoint every second step and a record of the rollouts."""
    reward = reward_function(source, group_size=GROUP, log_dir=str(folder / "record"))
    several = {"ddp_backend": "gloo"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    changed = {"max_steps": steps, "per_device_train_batch_size": batch, "save_strategy": "steps", "save_steps": 2}
    trainer(reward, folder / "run", **changed, **several).train(resume_from_checkpoint=resume)
    reward.close()


if __name__ == "__main__":
    where, place, count, size, *more = sys.argv[1:]
    run(where, Path(place), steps=int(count), batch=int(size), resume=more == ["resume"])
