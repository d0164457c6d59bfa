"""Train a reward model from preferences that no file holds, and judge it on others.

    python examples/train_from_memory.py
    python examples/train_from_memory.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 200 --output-dir runs/mine

Rows are what `rewardlab train` reads from files: dicts with `prompt`, `chosen` and `rejected` here. `Preference`s, a
`datasets.Dataset` or any other iterable of rows would do as well.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence

import rewardlab

PLANTS = ["basil", "mint", "thyme", "a fern", "a cactus", "an orchid", "ivy", "aloe"]
PLACES = ["on a balcony", "in the kitchen", "in a dark hall", "outside in winter", "in sand", "near the sea"]


def preferences(first: int, last: int) -> Iterator[dict[str, str]]:
    """Made-up judgements: an answer is preferred to a refusal. Numbers make every prompt another one."""
    for number in range(first, last):
        plant, place = PLANTS[number % len(PLANTS)], PLACES[number // len(PLANTS) % len(PLACES)]
        yield {
            "prompt": f"Question {number}: how do I keep {plant} alive {place}?",
            "chosen": f"Certainly: {plant} wants light, and water once the soil is dry.",
            "rejected": f"No idea{'.' * (number % 3 + 1)}",
        }


def main(arguments: Sequence[str] | None = None) -> rewardlab.TrainResult:
    """Train and say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="hub name, folder or built-in name")
    parser.add_argument("--output-dir", default="runs/from-memory", help="the run folder, replaced if it is there")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=None, help="by default the one for LoRA")
    asked = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    config = rewardlab.RewardTrainerConfig.of(
        model=asked.model,
        output_dir=asked.output_dir,
        overwrite=True,
        lora=True,
        lr=asked.lr,
        steps=asked.steps,
        batch_size=8,
        max_seq_len=256,
    )
    result = rewardlab.train(
        config,
        preferences=preferences(0, 200),
        eval_preferences=preferences(200, 240),  # they choose the checkpoint
        test_preferences=preferences(240, 300),  # they judge it
    )

    assert result.test is not None
    accuracy = result.test.overall.estimates["eval_accuracy"]
    print(f"model: {result.model}")
    print(f"test accuracy {accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}] on {accuracy.n} prompts")
    return result


if __name__ == "__main__":
    main()
