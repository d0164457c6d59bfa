"""Train a Bradley-Terry reward model: `rewardlab train`, under the name by which scripts call it.

    python examples/reward_model/train_rm_bradley_terry.py --model Qwen/Qwen2.5-3B --hf-dataset stanfordnlp/SHP \
        --eval-split test --eval-limit 1000 --steps 1000 --output-dir runs/shp

Every flag is one of `rewardlab train`, whose --help lists them. A split named with --eval-split chooses the checkpoint;
for numbers that chose nothing name another one with --test-split.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rewardlab.cli import main as rewardlab


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with the arguments of the command line."""
    rewardlab(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    main()
