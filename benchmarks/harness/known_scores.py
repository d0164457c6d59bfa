"""Requests to a server under load, and the scores that each of its models gives them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

NUM_REQUESTS: Final = 40


def requests() -> list[dict[str, Any]]:
    """Requests of different sizes and shapes."""
    draw = random.Random(0)
    words = [
        "the",
        "basil",
        "in",
        "the",
        "kitchen",
        "needs",
        "water",
        "and",
        "light",
        "more",
        "than",
        "any",
        "of",
        "us",
        "knew",
    ]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    return [
        {"groups": [{"prompt": text(4), "replies": [text(4) for _ in range(draw.choice((1, 2, 8)))]} for _ in range(2)]}
        for _ in range(NUM_REQUESTS)
    ]


def adapters_of(folders: Sequence[Path]) -> dict[str, Path]:
    """Name -> folder of the adapters that are served beside the model."""
    return {f"adapter{number}": folder.resolve() for number, folder in enumerate(folders)}


def digests_of(adapters: Mapping[str, Path]) -> dict[str, str]:
    """Name -> digest of each adapter's folder."""
    from rewardlab.artifact.seal import recorded_digest

    return {name: str(recorded_digest(folder)) for name, folder in adapters.items()}


def expectations(folders: Sequence[Path], asked: Sequence[Any], *, fake: bool) -> dict[str, list[list[list[float]]]]:
    """Digest -> the scores of every request."""
    if fake:
        from fake_engine import digest_of, expected
        from rewardlab.client.protocol import ScoreRequest

        return {
            digest_of(one): [expected(digest_of(one), ScoreRequest.model_validate(body)) for body in asked]
            for one in folders
        }
    from rewardlab import load
    from rewardlab.artifact.seal import recorded_digest

    known = {}
    for folder in folders:
        scorer = load(folder, device="cpu")
        scores = [[scorer.score_replies(g["prompt"], g["replies"]) for g in body["groups"]] for body in asked]
        known[str(recorded_digest(folder))] = scores
    return known
