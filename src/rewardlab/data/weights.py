"""Datasets with weights: how many rows of each are used, so that their shares are the ones that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import at_home
from rewardlab.data.finding import is_number

Shares = tuple[Fraction, ...]
LARGEST: Final = 1e9
"""Largest weight."""


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """Names of datasets, and their shares of the rows that are used."""

    names: tuple[str, ...]
    weights: tuple[str, ...]
    """As they were written."""
    shares: Shares
    """They sum to 1 exactly."""


def split_weights(names: Sequence[str], flag: str) -> Weighted | None:
    """Return names such as `a.jsonl:0.7 b.parquet:0.3` without their weights, and these; None if they have none.

    A weight is a number after the last colon. The name of an existing file or folder is never divided, and neither is a
    single name, since there is nothing to weigh one dataset against.

    Raises ConfigError if only some of the names have a weight, or a weight is not above 0.
    """
    parts = [_parts(name) for name in names]
    bare = [name for name, weight in parts if not weight]
    if len(names) < 2 or len(bare) == len(names):
        return None
    if bare:
        weighted = next(name for name, (_, weight) in zip(names, parts, strict=True) if weight)
        number = weighted.rpartition(":")[2]
        raise ConfigError(
            f"{flag} {weighted} has the weight {number}, and {bare[0]} has none. Give all datasets a weight or none. "
            f"If {number} is the configuration of a hub dataset, name its revision too: {weighted}@main."
        )
    for name, (_, weight) in zip(names, parts, strict=True):
        if not 0 < float(weight) <= LARGEST:
            raise ConfigError(f"{flag} {name}: the weight {weight} must be above 0 and at most {LARGEST:.0e}.")
    weights = [Fraction(weight) for _, weight in parts]
    return Weighted(
        names=tuple(name for name, _ in parts),
        weights=tuple(weight for _, weight in parts),
        shares=tuple(weight / sum(weights) for weight in weights),
    )


def without_weights(names: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return names without their weights, if they have any. Raises ConfigError as `split_weights` does."""
    weighted = split_weights(names, flag)
    return tuple(names) if weighted is None else weighted.names


def refuse_weights(names: Sequence[str], flag: str) -> None:
    """Raise ConfigError if all of several names have weights, for data of which every row counts the same."""
    if len(names) > 1 and all(weight for _, weight in map(_parts, names)):
        raise ConfigError(
            f"{flag} {' '.join(names)}: these data take no weights, since every row of them counts the same. Leave the "
            f"numbers out. Weights are for --dataset of train and probe, and for data mix."
        )


def local_path(name: str) -> Path | None:
    """Return the file or folder of this machine that a dataset's name means, with or without a weight (`a.jsonl:0.7`);
    None if there is none.
    """
    path = at_home(_parts(name)[0])
    return path if path.exists() else None


def _parts(name: str) -> tuple[str, str]:
    """Return (name, weight), the weight empty if there is none."""
    before, colon, number = name.rpartition(":")
    if not colon or not before or not is_number(number) or at_home(name).exists():
        return name, ""
    return before, number


def counts_by_share(
    available: Sequence[int], shares: Shares, names: Sequence[str], most: int | None = None
) -> tuple[int, ...]:
    """Return how many rows of each dataset are used: as many as the scarcest allows, and at most `most` in total.

    The counts add up to the total, each is within one row of its share of it, and none exceeds the available rows.

    Raises DataError if a dataset would get no row.
    """
    total = min(int(count / share) for count, share in zip(available, shares, strict=True))
    total = total if most is None else min(total, most)
    exact = [total * share for share in shares]
    counts = [int(rows) for rows in exact]
    # The rows left over go to the datasets with the largest remainders, one row each. A dataset with a remainder always
    # has a further row.
    by_remainder = sorted(range(len(counts)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    for name, count, share in zip(names, counts, shares, strict=True):
        if not count:
            scarcest = min(range(len(counts)), key=lambda k: available[k] / shares[k])
            raise DataError(
                f"{name}: its share of {float(share):.4g} would be not one row of {total}. {names[scarcest]} has "
                f"{available[scarcest]} rows for its share of {float(shares[scarcest]):.4g}. Give other weights."
            )
    return tuple(counts)


def report_shares(
    weighted: Weighted, names: Sequence[str], available: Sequence[int], counts: Sequence[int]
) -> dict[str, object]:
    """Return the shares wanted and got, and the counts, for a manifest. `names` are those of the reports."""
    total = sum(counts)
    return {
        "rows": total,
        "datasets": [
            {
                "name": name,
                "weight": float(weight),
                "share_wanted": round(float(share), 6),
                "share": round(count / total, 6),
                "rows": count,
                "of": of,
            }
            for name, weight, share, count, of in zip(
                names, weighted.weights, weighted.shares, counts, available, strict=True
            )
        ],
    }


def shares_in_words(report: dict[str, object]) -> str:
    """Return the report in a line, for the log."""
    datasets = report["datasets"]
    assert isinstance(datasets, list)
    told = [f"{one['name']} {one['share']:.4f} ({one['rows']} of {one['of']} rows; wanted "
            f"{one['share_wanted']:.4f})" for one in datasets]  # fmt: skip
    return f"weights: {report['rows']} rows: " + ", ".join(told)
