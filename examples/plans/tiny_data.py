"""Preferences for plans at `--scale tiny`, where none of your own are at hand: pairs.{train,test}.jsonl, generated.

    python examples/plans/tiny_data.py FOLDER

Their noise is known, so the best accuracy that any model can expect is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rewardlab.data.synthetic import ceiling, generate, write_dataset

TRAIN, TEST, SEED = 600, 400, 0


def main(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_dataset(folder, num_train=TRAIN, num_test=TEST, seed=SEED)
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").replace(folder / f"pairs.{part}.jsonl")
    best = ceiling(generate(TEST, seed=SEED, topics="test"))
    print(f"{folder}: {TEST} test pairs; the best model expects an accuracy of {best.bayes_accuracy:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
