"""Scores of proxies for rows with gold scores: computed now, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.errors import ConfigError
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.scoring import DEFAULT_SCORING, ScoringConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A reward model and its scores of some rows."""

    name: str
    scores: tuple[tuple[float | None, ...], ...]
    """For each row one score for each reply; None where it has none."""


def proxy_scores(
    sources: Sequence[str], rows: Sequence[GoldRow], folder: Path, config: ScoringConfig = DEFAULT_SCORING
) -> list[Proxy]:
    """Return the scores of each proxy for rows, in their order.

    A source is `[NAME=]WHAT`, where WHAT is a reward-model folder, or a file with a score for each reply of each row:
    `[[r1, r2], …]`, rows with `scores` (as `rewardlab score` writes them) or with `gold` (as `rewardlab gold label`
    does). Scores that are computed are kept in `folder`, so that the same call goes on from them.

    Raises ConfigError for a source that is not there or a name that comes twice, DataError for a file that does not
    belong to the rows.
    """
    raise ConfigError("not yet")
