"""Train a Bradley-Terry reward model: `rewardlab train`, under the name by which scripts call it.

    python examples/reward_model/train_rm_bradley_terry.py --model Qwen/Qwen2.5-3B --hf-dataset stanfordnlp/SHP \
        --eval-split test --eval-limit 1000 --steps 1000 --output-dir runs/shp

Every flag is one of `rewardlab train`, whose --help lists them. What commands for the earlier script of this name leave
out is off, as it was there: a schedule and label smoothing, which `rewardlab train` has by default. A split named with
--eval-split chooses the checkpoint; for numbers that chose nothing name another one with --test-split.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rewardlab.cli import main as rewardlab


def with_what_was_off(arguments: Sequence[str]) -> list[str]:
    """Return arguments that say of a schedule and of label smoothing that they are off, unless these are given."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    if given & {"--config", "--preset", "--compat", "--help"}:
        return list(arguments)
    level = "constant_with_warmup" if given & {"--warmup-steps", "--warmup-ratio"} else "constant"
    flags = {"--lr-scheduler": level, "--label-smoothing": "0"}
    off = [word for flag, value in flags.items() if flag not in given for word in (flag, value)]
    if off:
        print(f"not given, so as in the earlier script: {' '.join(off)}", flush=True)
    return [*arguments, *off]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with the arguments of the command line."""
    rewardlab(["train", *with_what_was_off(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    main()
