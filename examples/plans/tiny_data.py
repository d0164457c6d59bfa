"""Generated preferences for plans at `--scale tiny`, where none of your own are at hand.

    python examples/plans/tiny_data.py FOLDER

It writes pairs.{train,test}.jsonl and kwise.{train,test}.jsonl (four rated replies to a prompt). Their noise is known,
so the best accuracy that any model can expect on the pairs is printed.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from rewardlab.core.files import write_jsonl
from rewardlab.data.synthetic import TopicSplit, ceiling, generate, num_prompts, reply_texts, write_dataset

TRAIN, TEST, SEED = 600, 400, 0
KWISE_TRAIN, KWISE_TEST = 200, 100


def main(folder: Path) -> None:
    """Write the files."""
    write_dataset(folder, num_train=TRAIN, num_test=TEST, seed=SEED)
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").replace(folder / f"pairs.{part}.jsonl")
    write_jsonl(folder / "kwise.train.jsonl", kwise_rows(KWISE_TRAIN, "train"))
    write_jsonl(folder / "kwise.test.jsonl", kwise_rows(KWISE_TEST, "test"))
    best = ceiling(generate(TEST, seed=SEED, topics="test"))
    print(f"{folder}: {TEST} test pairs; the best model expects an accuracy of {best.bayes_accuracy:.3f}")


def kwise_rows(num_rows: int, topics: TopicSplit) -> list[dict[str, object]]:
    """Return rows of four replies: those of the two pairs that `generate` draws of a prompt in two rounds.

    The score of a reply is its true utility and noise of the standard Gumbel distribution, by which the order of
    scores is drawn from Plackett-Luce, and each pair from Bradley-Terry, as labels of the pairs are.
    """
    uniform = np.random.Generator(np.random.PCG64([SEED, num_rows]))
    prompts = num_prompts(topics)
    drawn = generate(2 * prompts, seed=SEED, topics=topics)
    rows: list[dict[str, object]] = []
    for pairs in zip(drawn[:prompts], drawn[prompts:], strict=True):
        utilities = {
            text: utility for pair in pairs for text, utility in zip(reply_texts(pair), pair.utilities, strict=True)
        }
        if len(utilities) == 4:
            scores = [utility - math.log(-math.log(uniform.random())) for utility in utilities.values()]
            prompt = pairs[0].preference.prompt[0].content
            rows.append(
                {"prompt": prompt, "responses": list(utilities), "scores": [round(score, 6) for score in scores]}
            )
    return rows[:num_rows]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
