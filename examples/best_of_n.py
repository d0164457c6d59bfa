"""Score the replies to a prompt with a saved model, rank them, and say how sure it is of the best.

    python examples/best_of_n.py runs/mine/best "How do I keep basil alive?" "Give it light and water." "No idea."

The prompt is computed once, however many replies there are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import rewardlab


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, str]]:
    """The replies with their scores, best first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a reward-model folder, such as runs/mine/best")
    parser.add_argument("prompt")
    parser.add_argument("replies", nargs="+")
    asked = parser.parse_args(arguments)

    model = rewardlab.load(asked.model)  # checks files, tokens and known scores before it scores anything
    scores = model.score_replies(asked.prompt, asked.replies)
    ranked = sorted(zip(scores, asked.replies, strict=True), reverse=True)
    for score, reply in ranked:
        print(f"{score:+8.3f}  {reply}")
    if len(ranked) > 1:
        # A score has no unit; a difference is a probability, by the model's own beta.
        probability = 1 / (1 + math.exp(-model.beta * (ranked[0][0] - ranked[1][0])))
        print(f"The first is preferred to the second with probability {probability:.2f}, says the model.")
    return ranked


if __name__ == "__main__":
    main()
