"""Whether the test data of a run are apart from the data that it was trained on and chosen by, as its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rewardlab.core.terminal import plural

CHOSE_NOTHING: Final = "test data, which chose nothing"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What test data have in common with another part of a run's data."""

    prompts: int | None
    """Prompts that are in both; None if the folder does not say."""
    rows: int
    """Test rows with a prompt, a first turn or a reply of the other part."""

    @property
    def words(self) -> str:
        """A description of test data that have this in common with the data that chose the checkpoint."""
        if not self.prompts:
            return CHOSE_NOTHING
        are = plural(self.prompts, "prompt is", "prompts are")
        return f"test data, of which {self.prompts:,} {are} in the data that chose the checkpoint too"


def overlap_of(shared: object, other: str) -> Overlap:
    """Return what test data share with `training` or `evaluation`, by the counts `shared` of a manifest."""
    counts = shared.get(f"test_with_{other}") if isinstance(shared, Mapping) else None
    found = counts if isinstance(counts, Mapping) else {}
    rows = _count(found.get("rows"))
    return Overlap(prompts=_count(found.get("prompts")), rows=rows or 0)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
