"""Rows with replies and gold scores, made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewardlab.core.types import Preference
from rewardlab.curation.rows import walk
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.judgements import Rules

WORDS = ("basil", "light", "water", "soil", "Paris", "bread", "rivers", "glass", "winter", "copper", "chess", "tides")


def prompt(number: int, *, system: str | None = "") -> list[dict[str, str]]:
    """A question of its own."""
    word, other = WORDS[number % len(WORDS)], WORDS[number // len(WORDS) % len(WORDS)]
    turns = [{"role": "user", "content": f"Tell me about {word} and {other}, in {number} words or in {number * 7}."}]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def row(number: int, scores: Sequence[float | None], **more: Any) -> dict[str, Any]:
    """A row whose reply k is of its own text."""
    replies = [f"Answer {k} to question {number}" + "!" * (k % 3) for k in range(len(scores))]
    return {"id": f"q{number}", "prompt": prompt(number), "responses": replies, "gold": list(scores), **more}


def rows(count: int, *, replies: int = 2) -> list[dict[str, Any]]:
    """Rows without ties, whose better reply changes place."""
    return [row(n, [((n * 5 + k * 7) % 11) / 4 + k / 64 for k in range(replies)]) for n in range(count)]


def write(path: Path, values: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def preferences(path: Path) -> list[Preference]:
    """The preferences of a file, as training reads them. None may be dropped."""
    (source,) = find_sources([str(path)], "train")
    rows = list(walk(source, Rules(source=source.name, reading=ReadingConfig(), seed=0)))
    assert [row.cause for row in rows if row.preference is None] == []
    return [row.preference for row in rows if row.preference is not None]
