"""The report of `rewardlab probe`: layers, learning curve, test data beside the baselines, and uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from rewardlab.analysis.linear import may_be_chance
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.report.compare import paired_lines
from rewardlab.report.precision import card_block
from rewardlab.report.run import Judged, comparison_table, evaluation_report, judged_table, next_steps
from rewardlab.report.tables import column_notes, format_count, format_estimate, text_table, wrapped

MAY_BE_CHANCE: Final = (
    "The accuracy may be chance though its interval leaves 0.5 out: each comparison also fitted the heads that rank "
    "others, so near 0.5 the interval is up to 1.4 times too narrow. Test data have no such fault."
)


@runtime_checkable
class Layer(Protocol):
    """A head on one layer, such as training.heads.LayerFit."""

    @property
    def layer(self) -> int:
        """Number of the layer, from 1."""

    @property
    def penalty(self) -> float:
        """The penalty chosen by cross-validation."""

    @property
    def at_edge(self) -> bool:
        """Return whether the penalty is the smallest or the largest that was tried."""

    @property
    def result(self) -> Judged:
        """The evaluation of the held-out scores."""


@runtime_checkable
class Point(Protocol):
    """A point of a learning curve, such as training.heads.CurvePoint."""

    @property
    def comparisons(self) -> float:
        """Number of comparisons that a head was fitted on."""

    @property
    def accuracy(self) -> Estimate:
        """Accuracy on held-out prompts."""

    @property
    def loss(self) -> Estimate:
        """Loss on held-out prompts."""


@runtime_checkable
class Spread(Protocol):
    """Uncertainty by bootstrap heads, such as training.heads.Uncertainty."""

    @property
    def over_heads(self) -> Estimate:
        """Accuracy over bootstrap heads."""

    @property
    def bias(self) -> float:
        """Mean accuracy of the bootstrap heads minus that of the head."""

    @property
    def sure(self) -> Estimate:
        """Accuracy on comparisons where the heads agree."""

    @property
    def num_sure(self) -> int:
        """Number of comparisons where the heads agree."""

    @property
    def unsure(self) -> Estimate:
        """Accuracy on the other comparisons."""

    @property
    def num_unsure(self) -> int:
        """Number of the other comparisons."""


def probe_report(
    *,
    layers: Sequence[Layer],
    chosen: Layer,
    curve: Sequence[Point],
    test: Judged | None,
    baselines: Mapping[str, Judged],
    spread: Spread | None,
    model: str,
    card: PrecisionCard | None = None,
) -> str:
    """Return the closing tables of a probe. All but those of the test data are cross-validated by conversation."""
    blocks = [_layers(layers, chosen)] if len(layers) > 1 else []
    blocks += [_held_out(chosen), _curve(curve)]
    if test is not None:
        judged = {**baselines, f"probe, layer {chosen.layer}": test}
        blocks.append("\n".join(["Test data (they chose nothing):", judged_table(judged), *paired_lines(judged)]))
    if spread is not None:
        blocks.append(_spread(spread))
    if card is not None:
        blocks.append(card_block(card))
    blocks.append(next_steps(model))
    return "\n" + "\n\n".join(blocks)


def _layers(layers: Sequence[Layer], chosen: Layer) -> str:
    """Return the table of the layers that were tried."""
    named = {
        f"{tried.layer}{' (chosen)' if tried.layer == chosen.layer else ''}": tried.result.overall for tried in layers
    }
    table = comparison_table(named, first="layer", columns=("accuracy", "NLL", "margin"))
    return f"Layers, on held-out training prompts. The smallest loss was chosen, which flatters it a little:\n{table}"


def _held_out(chosen: Layer) -> str:
    """Return the table of the chosen layer by source."""
    table = evaluation_report(chosen.result.overall, chosen.result.by_source)
    edge = "\nThat is the last penalty tried, so a better one may lie beyond." if chosen.at_edge else ""
    title = f"Layer {chosen.layer}, on held-out training prompts (penalty {chosen.penalty:.2g} by cross-validation):"
    lines = [f"{title}{edge}", table]
    if may_be_chance(chosen.result.overall.estimates["eval_accuracy"]):
        lines.append(wrapped(MAY_BE_CHANCE))
    return "\n".join(lines)


def _curve(curve: Sequence[Point]) -> str:
    """Return the table of the learning curve."""
    rows = [
        [
            format_count(round(point.comparisons)),
            format_estimate(point.accuracy),
            format_estimate(point.loss),
        ]
        for point in curve
    ]
    notes = column_notes({"accuracy": [point.accuracy for point in curve], "NLL": [point.loss for point in curve]})
    table = text_table(["fitted on", "accuracy", "NLL"], rows)
    return "\n".join(["Learning curve, on held-out training prompts:", table, *notes])


def _spread(spread: Spread) -> str:
    """Return sentences on how much another training sample would change the accuracy."""
    low, high = spread.over_heads.low, spread.over_heads.high
    than = f"{abs(spread.bias):.3f} {'worse' if spread.bias < 0 else 'better'}"
    moved = (
        f"Another sample of training prompts would move the accuracy within {low:.3f} to {high:.3f} (bootstrap heads, "
        f"moved to the head: each sees fewer prompts, and they are {than} on average)."
    )
    if math.isnan(low):
        moved = f"How far another sample of training prompts would move the accuracy: {spread.over_heads.method}."
    lines = (
        moved,
        f"Where 95% of them agree: accuracy {format_estimate(spread.sure)} on "
        f"{number_of(spread.num_sure, 'pair')}; "
        f"elsewhere {format_estimate(spread.unsure)} on {format_count(spread.num_unsure)}.",
    )
    return "\n".join(map(wrapped, lines))
