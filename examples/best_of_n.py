"""Rank replies with a saved model; or say what the best of n is worth, from a file of prompts with many replies each.

    python examples/best_of_n.py runs/mine/best "How do I keep basil alive?" "Give it light and water." "No idea."
    python examples/best_of_n.py runs/mine/best --file samples.jsonl --output curve.csv

A prompt is computed once, however many replies there are. A row of the file has `prompt` (a text, or messages) and
`replies`; with `gold`, a score of each reply by a judge that you trust more, the curve also tells what that judge
thinks of the replies that the model picks. Where the model's curve rises and that of gold falls, more replies make
things worse.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import rewardlab
from rewardlab.analysis.best_of_n import Candidates, Point, best_of_n
from rewardlab.core.errors import RewardlabError
from rewardlab.data.prompts import prompt_turns
from rewardlab.report.tables import format_estimate, interval_note
from rewardlab.rl.samples import read_samples


def rank(model: rewardlab.Scorer, prompt: str, replies: Sequence[str]) -> list[tuple[float, str]]:
    """The replies with their scores, best first, printed."""
    ranked = sorted(zip(model.score_replies(prompt, replies), replies, strict=True), reverse=True)
    for score, reply in ranked:
        print(f"{score:+8.3f}  {reply}")
    if len(ranked) > 1:
        # A score has no unit; a difference is a probability, by the model's own beta.
        probability = 1 / (1 + math.exp(-model.beta * (ranked[0][0] - ranked[1][0])))
        print(f"The first is preferred to the second with probability {probability:.2f}, says the model.")
    return ranked


def curve(model: rewardlab.Scorer, path: str) -> tuple[Point, ...]:
    """The best-of-n curve of a file, printed for n = 1, 2, 4, … and the most."""
    candidates = []
    for row in read_samples(path):
        turns, _ = prompt_turns(row.prompt, bare=False)
        name = "\n".join(f"{turn.role}: {turn.content}" for turn in turns)
        scores = model.score_replies(row.prompt, row.replies)
        candidates.append(Candidates(prompt=name, proxy_K=scores, gold_K=row.gold))
    points = best_of_n(candidates)
    first, last = points[0], points[-1]
    judges = {"the model": "proxy"} | ({"gold": "gold"} if first.gold else {})
    print(f"{'n':>5}  " + "".join(f"{f'score by {who}':27}" for who in judges) + "KL from the policy")
    for point in points:
        if point.n.bit_count() == 1 or point is last:
            cells = "".join(f"{format_estimate(getattr(point, name)):27}" for name in judges.values())
            print(f"{point.n:5}  {cells}at most {point.kl_bound:.2f} nats")
    print(f"{first.proxy.n} prompts. {interval_note([first.proxy])}.")
    for who, name in judges.items():
        gain = getattr(last, f"{name}_gain")
        print(f"Picking one of {last.n} gains {format_estimate(gain)} over one reply, by {who}.")
    return points


def write(points: Sequence[Point], path: Path) -> None:
    """The curve as CSV, a row for each n; a cell without a number is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = ("proxy", "proxy_gain", "gold", "gold_gain")
        writer.writerow(["n", *(f"{name}{end}" for name in names for end in ("", "_low", "_high")), "kl_upper_bound"])
        for point in points:
            found = [getattr(point, name) for name in names]
            cells = [number for one in found for number in ((one.value, one.low, one.high) if one else [math.nan] * 3)]
            writer.writerow([point.n, *("" if math.isnan(cell) else cell for cell in cells), point.kl_bound])


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, str]] | tuple[Point, ...]:
    """The replies with their scores, best first; of a file, its curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a reward-model folder, such as runs/mine/best")
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("replies", nargs="*")
    parser.add_argument("--file", help="prompts with replies, in place of one prompt")
    parser.add_argument("--output", type=Path, help="where the curve of the file is written, as CSV")
    asked = parser.parse_args(arguments)
    if bool(asked.file) == bool(asked.replies) or (asked.output and not asked.file):
        parser.error("give a prompt with replies, or --file (and then perhaps --output)")

    model = rewardlab.load(asked.model)  # checks files, tokens and known scores before it scores anything
    if not asked.file:
        return rank(model, asked.prompt, asked.replies)
    points = curve(model, asked.file)
    if asked.output:
        write(points, asked.output)
        print(f"\nwrote {asked.output}")
    return points


if __name__ == "__main__":
    try:
        main()
    except RewardlabError as error:
        sys.exit(f"error: {error}")
