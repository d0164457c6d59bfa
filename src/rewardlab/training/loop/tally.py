"""What the steps of a reward model count, for the rows of the record and the lines of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rewardlab.core.types import Sums


class PreferenceTally:
    """Sums over comparisons: loss, NLL, accuracy and margin. `Tally` of a Logbook."""

    unit: Final = "pairs"

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
