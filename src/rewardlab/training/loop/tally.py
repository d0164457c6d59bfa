"""What the steps of a reward model count, for the rows of the record and the lines of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewardlab.core.types import Sums, TokenGroup
from rewardlab.data.groups import Groups, num_replies


def unit_of(groups: Sequence[TokenGroup]) -> str:
    """Return what the comparisons of these preferences are called: pairs where no preference has more than two replies.

    K ranked replies are up to K·(K−1)/2 comparisons, and nobody would call one row of them several pairs. Sequences of
    other kinds are not read through for it: what they hold are comparisons in any case.
    """
    if not isinstance(groups, Groups | list | tuple):
        return "comparisons"
    return "comparisons" if np.any(num_replies(groups) > 2) else "pairs"


@dataclass(frozen=True, kw_only=True)
class PreferenceTally:
    """Sums over comparisons: loss, NLL, accuracy and margin. `Tally` of a Logbook."""

    unit: str = "pairs"
    """See `unit_of`."""

    def none(self) -> Sums:
        """See `Tally`."""
        return Sums()

    def read(self, values: Mapping[str, Any]) -> Sums:
        """See `Tally`."""
        return Sums(**values)

    def columns(self, sums: Sums) -> dict[str, Any]:
        """Return the loss, the NLL of the raw labels, accuracy, margin and the number of comparisons."""
        return {
            "train_loss": sums.mean_loss,
            "train_nll": sums.mean_nll,
            "train_accuracy": sums.accuracy,
            "train_margin": sums.mean_margin,
            "train_pairs": sums.comparisons,
        }

    def words(self, values: Mapping[str, Any]) -> str:
        """Return accuracy and margin."""
        return f"accuracy {values['train_accuracy']:.3f}  margin {values['train_margin']:+.3f}"
