"""Numbers of arms with their intervals, and how they are printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rewardlab.analysis.crossed import Crossed, Observed, Part
from rewardlab.analysis.crossed_pooled import pooled_over, with_noise_of_others
from rewardlab.analysis.multiple import holm
from rewardlab.core.errors import RewardlabError
from rewardlab.core.types import Estimate
from rewardlab.experiments.at_limits import Weighed, weighed_sum
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.outcomes import Outcome, Outcomes
from rewardlab.experiments.plan import Run
from rewardlab.experiments.quantities import clamped, cut, quantity_named, range_of
from rewardlab.experiments.study import Study

LEVEL: Final = 0.95
"""Level of all intervals except those of hypotheses, whose level follows from their tests."""
NAMES: Final = {"margin_p50": "median margin", "ece": "ECE", "seconds": "time in training steps"}
"""Quantity -> the heading of its column, where that is not its name."""
MOST_DIGITS: Final = 4
"""Digits of the largest number of a column that are printed."""
_EQUAL: Final = 1e-9
"""Share of a value below which the width of its interval is what rounding leaves."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A quantity as it is asked of every arm."""

    quantity: str
    step: int | None = None
    on: str = "test"

    def term(self, arm: str) -> Term:
        """Return the quantity of an arm."""
        return Term(self.quantity, arm, step=self.step, on=self.on)

    @property
    def title(self) -> str:
        """Its name, as it heads a table."""
        quantity = quantity_named(self.quantity)
        unit = f" ({quantity.unit})" if quantity.unit else ""
        step = "" if self.step is None else f" at step {self.step}"
        on = " on validation" if quantity.source == "scores" and self.step is None and self.on != "test" else ""
        return f"{NAMES.get(self.quantity, self.quantity.replace('_', ' '))}{step}{on}{unit}"

    @property
    def better(self) -> str:
        """`higher`, `lower` or `neither`."""
        return quantity_named(self.quantity).better


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A quantity of an arm: its mean over seeds, and the value of each seed."""

    term: str
    estimate: Estimate | None
    """None where there is no value."""
    by_seed: Mapping[str, float]
    why: str = ""
    """Why there is no value; empty where there is one."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An arm minus another one, paired by seed and prompt."""

    arm: str
    other: str
    estimate: Estimate | None
    p: float
    """Two-sided p-value; NaN where the noise is not known."""
    adjusted: float
    """The same, adjusted over all differences of the table (Holm)."""
    shared_seeds: int
    """Seeds that both arms have."""
    why: str = ""
    """Why there is no value; empty where there is one."""


class Reader:
    """Reads the values of a study's terms, each once."""

    def __init__(self, study: Study) -> None:
        self._outcomes = Outcomes(study, may_read="test")
        self._found: dict[Term, Observed] = {}
        self._missing: dict[Term, str] = {}

    def observe(self, terms: Iterable[Term]) -> tuple[Mapping[Term, Observed], Mapping[Term, str]]:
        """Return (the values of all terms that were ever asked for, why others have no value)."""
        new = [term for term in terms if term not in self._found and term not in self._missing]
        found, missing = self._outcomes.observe(new)
        self._found |= found
        self._missing |= missing
        return self._found, self._missing

    def get(self, term: Term) -> Observed | None:
        """Return the value of a term for each seed; None if it has none."""
        return self.observe([term])[0].get(term)

    def why(self, term: Term) -> str:
        """Return why a term has no value."""
        return self.observe([term])[1].get(term, "")

    def cell(self, term: Term) -> Cell:
        """Return a term as a cell of a table."""
        found = self.get(term)
        if found is None:
            return Cell(term=str(term), estimate=None, by_seed={}, why=self.why(term))
        values = zip(map(str, found.seeds), found.by_seed_S.tolist(), strict=True)
        mean = mean_of(term.quantity, [found], max_steps=self.most_steps([term.arm]))
        return Cell(term=str(term), estimate=mean, by_seed=dict(values))

    def most_steps(self, arms: Iterable[str]) -> int | None:
        """Return the most steps that a finished run of some arms should have; None if that is not known of all."""
        records = [one.record for arm in arms for one in self.done(arm)]
        # A program may call something else by this name, and have more steps.
        steps = [max(one.num_steps, one.step) for one in records if one.num_steps is not None]
        return max(steps) if steps and len(steps) == len(records) else None

    def settings(self, run: Run) -> Mapping[str, Any]:
        """Return the settings of a run, those that it chose itself (such as a rate for its model) included."""
        chosen = next((one.record.config for one in self.done(run.arm) if one.run.seed == run.seed), {})
        return {name: chosen.get(name) if value is None else value for name, value in run.settings.items()}

    def done(self, arm: str) -> list[Outcome]:
        """Return what the finished runs of an arm left; none if something of it cannot be read."""
        try:
            return self._outcomes.done(arm)
        except RewardlabError:
            return []


def mean_of(quantity: str, found: Sequence[Observed], *, max_steps: int | None = None) -> Estimate:
    """Return the mean of a quantity over arms and seeds, with its interval; `max_steps` is that of `clamped`."""
    mean = _weighted([(quantity, one, 1 / len(found)) for one in found])
    return clamped(mean.interval(LEVEL), quantity, max_steps=max_steps)


def differences(reader: Reader, column: Column, pairs: Sequence[tuple[str, str]]) -> tuple[Difference, ...]:
    """Return arm minus other for each pair, with two-sided p-values adjusted over all of them (Holm)."""
    arms = (reader.get(column.term(arm)) for arm in dict.fromkeys(arm for pair in pairs for arm in pair))
    of_others = pooled_over([one for one in arms if one is not None])
    found = [_difference(reader, column, arm, other, of_others) for arm, other in pairs]
    adjusted = holm([one.p for one in found])
    return tuple(replace(one, adjusted=p) for one, p in zip(found, adjusted, strict=True))


def contrast(
    quantity: str, first: Sequence[Observed], second: Sequence[Observed], *, of_others: Part | None = None
) -> Crossed:
    """Return the mean of a quantity over some arms minus that over others.

    Arms of one seed vary from seed to seed as those among them that have several, or else by `of_others`.
    """
    plus, minus = ([(quantity, one, sign / len(arms)) for one in arms] for sign, arms in ((1, first), (-1, second)))
    found = _weighted([*plus, *minus])
    part = pooled_over([*first, *second]) or of_others
    return with_noise_of_others(found, [(one, weight, part) for _, one, weight in (*plus, *minus)])


def change_of(quantity: str, first: Sequence[Observed], second: Sequence[Observed]) -> Estimate:
    """Return the mean of a quantity over some arms minus that over others, with its interval."""
    low, high = range_of(quantity)
    return cut(contrast(quantity, first, second).interval(LEVEL), (low - high, high - low))


def _weighted(parts: Weighed) -> Crossed:
    return weighed_sum(parts, math.fsum(weight * one.mean for _, one, weight in parts))


def _difference(reader: Reader, column: Column, arm: str, other: str, of_others: Part | None) -> Difference:
    terms = (column.term(arm), column.term(other))
    first, second = (reader.get(term) for term in terms)
    if first is None or second is None:
        why = next(text for term in terms if (text := reader.why(term)))
        return Difference(arm=arm, other=other, estimate=None, p=math.nan, adjusted=math.nan, shared_seeds=0, why=why)
    low, high = range_of(column.quantity)
    found = contrast(column.quantity, [first], [second], of_others=of_others)
    sides = (found.p_above(), found.p_below())
    return Difference(
        arm=arm,
        other=other,
        estimate=cut(found.interval(LEVEL), (low - high, high - low)),
        p=math.nan if any(map(math.isnan, sides)) else min(1.0, 2 * min(sides)),
        adjusted=math.nan,
        shared_seeds=len({*first.seeds} & {*second.seeds}),
    )


# --- printing ------------------------------------------------------------------------------------------------------


def search_named(phase: str) -> str:
    """Return what the search of a phase is called: ``search rates``, and ``search`` where the phase has that name."""
    return phase if phase == "search" else f"search {phase}"


def interval(estimate: Estimate | None) -> str:
    """Return ``0.734 [0.695, 0.771]``, with as many digits as the interval warrants.

    Without an interval it is ``0.734 [—]``, without a value a dash. A number that settings decide has no noise:
    ``1,024 [exact]``.
    """
    return intervals([estimate])[0]


def intervals(estimates: Sequence[Estimate | None]) -> list[str]:
    """Return the cells of a column, all with as many digits as the narrowest interval warrants."""
    known = [one for one in estimates if one is not None and not math.isnan(one.value)]
    largest = max((abs(one.value) for one in known), default=0.0)
    most = max(MOST_DIGITS - 1 - math.floor(math.log10(largest)), 0) if 0 < largest < math.inf else 8
    decimals = min(max(map(_wanted, known), default=0), most)
    return [_cell(one, decimals) for one in estimates]


def _cell(estimate: Estimate | None, decimals: int) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "—"
    value, low, high = (_number(one, decimals) for one in (estimate.value, estimate.low, estimate.high))
    if math.isnan(estimate.low):
        return f"{value} [—]"
    return f"{value} [exact]" if estimate.method == "exact" else f"{value} [{low}, {high}]"


def _wanted(estimate: Estimate) -> int:
    """Return the decimals that an estimate warrants: two digits of its interval, or three of its value without one."""
    width = estimate.high - estimate.low
    known = math.isfinite(width) and width > _EQUAL * abs(estimate.value)
    if not known and estimate.value == round(estimate.value):
        return 0
    return _decimals(width / 2 if known else abs(estimate.value) / 10)


def _decimals(size: float) -> int:
    """Return the decimals that show two digits of a number."""
    return min(max(1 - math.floor(math.log10(size)), 0), 8) if size > 0 and math.isfinite(size) else 2


def _number(value: float, decimals: int) -> str:
    if math.isnan(value):
        return "—"
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if not text.strip("-0.,") else text
