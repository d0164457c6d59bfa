"""How far reward and evidence moved between two windows of a run, with errors over steps and over prompts.

A window is a fixed share of the steps. The change from one window to another is

    of the same prompts    Σ w_p (ȳ_p,later − ȳ_p,earlier) / Σ w_p with w_p = n_p,earlier n_p,later / (n_p,earlier +
                           n_p,later), where at least ten prompts, with half of the replies of each window, are in both
    of all replies         the difference of the two means, elsewhere

Its variance is estimated by leaving out, one after the other,

    blocks of steps        adjacent steps of a window, so that what all replies of a step have in common, and what
                           drifts for a few steps, is in the error
    prompts                with all their replies in all windows, in at most a hundred groups

(the delete-a-group jackknife, as in `analysis.agreement`). The two variances are added. This counts the noise of single
replies twice and errs on the wide side. Where no prompt is in two blocks, leaving out blocks leaves out prompts too,
and the larger of the two is taken. Limits are those of Student's distribution, with Satterthwaite's degrees of freedom
for the blocks and prompts there are (Satterthwaite 1946, Biometrics Bulletin 2, 110-114).

Legend: N rollouts, U units (prompts, or one unit of all replies), B blocks, H groups of prompts, P prompts.

Changes and their errors are one computation over the same sums, so they are in one file; windows.py makes the windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from scipy.special import stdtr, stdtrit

from rewardlab.analysis.agreement import deal_groups
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.stats import MIN_CLUSTERS, too_few
from rewardlab.core.types import Estimate
from rewardlab.rl.audit.columns import IntArray
from rewardlab.rl.audit.sums import jackknife, mean_change, or_whole, padded, ratio, sums_of, within, without_units
from rewardlab.rl.audit.windows import MIN_STEPS, windows_of

MOST_BLOCKS: Final = 6
"""Most blocks of a window. Longer blocks keep more of a drift in the error, and fewer make the quantile larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A change with its error, in standard deviations of the first window."""

    value: float
    error: float
    """Standard error; NaN where there is too little data for one."""
    degrees: float
    num_prompts: int
    num_steps: int
    method: str

    def p_at_most(self, bound: float) -> float:
        """Return the p-value of the true change being at most `bound`; NaN without an error."""
        return self._tail(self.value - bound)

    def p_at_least(self, bound: float) -> float:
        """Return the p-value of the true change being at least `bound`; NaN without an error."""
        return self._tail(bound - self.value)

    def _tail(self, excess: float) -> float:
        if not self.error > 0:
            # A slope has no error where the evidence is an exact copy of the reward.
            return math.nan if math.isnan(self.error) else float(excess <= 0)
        return float(stdtr(self.degrees, -excess / self.error))

    def estimate(self, *, level: float = 0.95) -> Estimate:
        """Return the change with its interval."""
        reach = math.nan if math.isnan(self.error) else self.error * float(stdtrit(self.degrees, (1 + level) / 2))
        return Estimate(
            value=self.value,
            low=self.value - reach,
            high=self.value + reach,
            n=self.num_prompts,
            method=self.method,
            level=level,
        )

    def scaled(self, factor: float) -> Shift:
        """Return the change in another unit."""
        return replace(self, value=self.value * factor, error=self.error * abs(factor))


def room_of(values_N: FloatArray, before_N: np.ndarray) -> float:
    """Return how far values lie below the highest of all, where `before_N` says, on average."""
    return float(values_N.max() - values_N[before_N].mean())


def missing(num_prompts: int, num_steps: int, why: str) -> Shift:
    """Return a change that cannot be measured; its method says `why`."""
    return Shift(
        value=math.nan, error=math.nan, degrees=math.nan, num_prompts=num_prompts, num_steps=num_steps, method=why
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The changes of reward and evidence between two windows."""

    earlier: int
    later: int
    reward: Shift
    gold: Shift
    wanted: float | None = None
    """Rise of the evidence that is wanted for each standard deviation by which the reward rose; None for a held-out
    suite."""
    predicted: bool = False
    """Whether `wanted` is a share of what the first window predicts."""
    shortfall: Shift | None = None
    """Change of the evidence minus what is wanted for the change of the reward."""
    room: float | None = None
    """How far the evidence can rise: from its mean in the earlier window to its highest value of the run; None if that
    is not known."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Replies that have both a reward and one kind of evidence, in standard deviations of the first window."""

    window_N: IntArray
    block_N: IntArray
    """Number of the block in its window."""
    prompt_N: IntArray
    values_N2: FloatArray
    """Reward and evidence."""
    group_P: IntArray
    """Group of each prompt."""
    steps: tuple[int, ...]
    """Steps with evidence in each window."""
    blocks: tuple[int, ...]
    """Blocks of each window."""
    min_steps: int = MIN_STEPS
    """Fewest steps with evidence in a window that is compared. With one there is no error over steps."""

    @classmethod
    def of(
        cls,
        step_N: IntArray,
        prompt_N: IntArray,
        values_N2: FloatArray,
        windows: Sequence[IntArray],
        keys: Sequence[str],
        *,
        min_steps: int = MIN_STEPS,
    ) -> Sample:
        """Return replies in windows and blocks. `keys` are those of all prompts."""
        window_N = windows_of(step_N, windows)
        block_N = np.zeros(len(step_N), dtype=np.int64)
        counts = []
        for window in range(len(windows)):
            inside = window_N == window
            unique, place = np.unique(step_N[inside], return_inverse=True)
            counts.append(len(unique))
            block_N[inside] = place * min(len(unique), MOST_BLOCKS) // max(len(unique), 1)
        return cls(
            window_N=window_N,
            block_N=block_N,
            prompt_N=prompt_N,
            values_N2=values_N2,
            group_P=deal_groups(keys, keys),
            steps=tuple(counts),
            blocks=tuple(min(count, MOST_BLOCKS) for count in counts),
            min_steps=min_steps,
        )

    def num_prompts(self, window: int) -> int:
        """Return how many prompts a window has."""
        return len(np.unique(self.prompt_N[self.window_N == window]))

    @cached_property
    def slope(self) -> Slope | None:
        """Slope of the evidence on the reward within prompts of the first window; None if it cannot be measured."""
        inside = self.window_N == 0
        if not inside.any():
            return None
        return Slope.of(
            self.values_N2[inside],
            self.block_N[inside],
            self.prompt_N[inside],
            self.group_P,
            num_blocks=self.blocks[0],
            num_prompts=self.num_prompts(0),
        )

    def compare(self, earlier: int, later: int, *, share: float = 0.0, least: float = 0.0) -> Pair:
        """Return how reward and evidence changed between two windows, and what the evidence lacks.

        The evidence has to rise by `share` of what the first window predicts, and by `least` for each standard
        deviation of the reward. Only `least` counts where the first window does not show that the evidence rises with
        the reward.
        """
        rows = np.isin(self.window_N, (earlier, later))
        num_prompts = len(np.unique(self.prompt_N[rows]))
        num_steps = self.steps[earlier] + self.steps[later]
        few = min(self.steps[earlier], self.steps[later])
        if few < self.min_steps or num_prompts < MIN_CLUSTERS:
            number, things, least_number = num_prompts, "prompts", MIN_CLUSTERS
            if few < self.min_steps:
                number, things, least_number = few, "steps with evidence in a window", self.min_steps
            why = too_few(number, things) + (f"; {least_number} are the fewest that will do" if number else "")
            none = missing(num_prompts, num_steps, why)
            return Pair(earlier=earlier, later=later, reward=none, gold=none)
        change = _Change.of(self, rows, earlier, later)
        slope = self.slope if self.slope is not None and self.slope.is_positive else None
        predicted = slope is not None and share * slope.value > least
        wanted = share * slope.value if slope is not None and predicted else least
        return Pair(
            earlier=earlier,
            later=later,
            reward=change.shift(0),
            gold=change.shift(1),
            wanted=wanted,
            predicted=predicted,
            shortfall=change.shortfall(slope if predicted else None, share, wanted),
            room=room_of(self.values_N2[:, 1], self.window_N == earlier),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The slope of the evidence on the reward within prompts of the first window.

    Its values without parts of the data are kept, so that `_Change.shortfall` can leave the same parts out.
    """

    value: float
    blocks_B: FloatArray
    groups_H: FloatArray
    """By the number of the group; NaN where the group has no prompt."""
    shift: Shift

    @property
    def is_positive(self) -> bool:
        """Whether the two are shown to go together: the lower limit of the 95 % interval is above 0."""
        return self.shift.p_at_most(0.0) < 0.025

    @classmethod
    def of(
        cls,
        values_N2: FloatArray,
        block_N: IntArray,
        prompt_N: IntArray,
        group_P: IntArray,
        *,
        num_blocks: int,
        num_prompts: int,
    ) -> Slope | None:
        """Return the slope; None without two replies to one prompt whose rewards differ, or below ten prompts."""
        if num_prompts < MIN_CLUSTERS:
            return None
        prompts, unit_N = np.unique(prompt_N, return_inverse=True)
        y, g = (values_N2 - values_N2.mean(0)).T
        columns_N5 = np.stack([np.ones_like(y), y, g, y * y, y * g], axis=1)
        cells_UB5 = sums_of(columns_N5, unit_N, block_N, num_blocks)
        total_U5 = cells_UB5.sum(1)
        parts_U2 = within(total_U5)
        whole_2 = parts_U2.sum(0)
        if not whole_2[0] > 1e-12 * max(1.0, float(total_U5[:, 3].sum())):
            return None
        without_B2 = np.stack([within(total_U5 - cells_UB5[:, block]).sum(0) for block in range(cells_UB5.shape[1])])
        groups = int(group_P.max()) + 1
        group_U = group_P[prompts]
        without_H2 = whole_2 - np.stack([np.bincount(group_U, part, minlength=groups) for part in parts_U2.T], axis=1)
        blocks_B, groups_H = ratio(without_B2), ratio(without_H2)
        value = float(whole_2[1] / whole_2[0])
        present = np.bincount(group_U, minlength=groups) > 0
        shift = _shift(
            np.array([value]),
            {0: blocks_B},
            groups_H[present],
            nested=not _recur(unit_N, block_N),
            num_prompts=num_prompts,
            num_steps=cells_UB5.shape[1],
            method="jackknife over steps and prompts, within prompts",
            floor=0.0,
        )
        return cls(value=value, blocks_B=blocks_B, groups_H=np.where(present, groups_H, np.nan), shift=shift)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """The change of reward and evidence between two windows [2], and its values without each block and group."""

    value_2: FloatArray
    blocks: Mapping[int, FloatArray]
    """Window -> [B, 2] without each block."""
    groups_H2: FloatArray
    """By the number of the group; NaN where it has no reply in these windows."""
    nested: bool
    """Whether no prompt is in two blocks, so that leaving out blocks leaves out prompts too."""
    num_prompts: int
    num_steps: int
    method: str
    floor: float
    """Smallest error: about what one more reply in each window would change."""

    @classmethod
    def of(cls, sample: Sample, rows: np.ndarray, earlier: int, later: int) -> _Change:
        prompt_N, window_N = sample.prompt_N[rows], sample.window_N[rows]
        paired = _in_both(prompt_N, window_N == later)
        if paired is not None:
            kept = np.flatnonzero(rows)[paired]
            prompt_N, window_N = sample.prompt_N[kept], sample.window_N[kept]
        else:
            kept = np.flatnonzero(rows)
        block_N = sample.block_N[kept]
        prompts, number_N = np.unique(prompt_N, return_inverse=True)
        unit_N = number_N if paired is not None else np.zeros_like(number_N)
        columns_N3 = np.concatenate([sample.values_N2[kept], np.ones((len(kept), 1))], axis=1)
        cells = {
            window: sums_of(
                columns_N3[window_N == window],
                unit_N[window_N == window],
                block_N[window_N == window],
                sample.blocks[window],
            )
            for window in (earlier, later)
        }
        units = int(unit_N.max()) + 1
        cells = {window: padded(cell, units) for window, cell in cells.items()}
        before, after = cells[earlier].sum(1), cells[later].sum(1)
        blocks = {
            earlier: np.stack([mean_change(before - one, after) for one in cells[earlier].swapaxes(0, 1)]),
            later: np.stack([mean_change(before, after - one) for one in cells[later].swapaxes(0, 1)]),
        }
        for window, cell in cells.items():
            # A block may have no reply to a prompt that is in both windows.
            blocks[window][cell[:, :, 2].sum(0) == 0] = np.nan
        groups = int(sample.group_P.max()) + 1
        if paired is not None:
            groups_H2 = without_units(before, after, sample.group_P[prompts], groups)
        else:
            group_N = sample.group_P[prompt_N]
            by_group = [
                padded(sums_of(columns_N3[own], group_N[own], np.zeros(int(own.sum()), dtype=np.int64), 1), groups)[
                    :, 0
                ]
                for own in (window_N == earlier, window_N == later)
            ]
            groups_H2 = np.stack(
                [mean_change(before - by_group[0][[h]], after - by_group[1][[h]]) for h in range(groups)]
            )
            groups_H2[by_group[0][:, 2] + by_group[1][:, 2] == 0] = np.nan
        counts = (float((window_N == earlier).sum()), float((window_N == later).sum()))
        return cls(
            value_2=mean_change(before, after),
            blocks=blocks,
            groups_H2=groups_H2,
            nested=not _recur(number_N, window_N * MOST_BLOCKS + block_N),
            num_prompts=len(prompts),
            num_steps=sample.steps[earlier] + sample.steps[later],
            method="jackknife over steps and prompts" + (", the same prompts" if paired is not None else ""),
            floor=1 / counts[0] + 1 / counts[1],
        )

    def shift(self, column: int) -> Shift:
        """Return the change of one column."""
        blocks = {window: own[:, column] for window, own in self.blocks.items()}
        return self._of(self.value_2[[column]], blocks, self.groups_H2[:, column])

    def shortfall(self, slope: Slope | None, share: float, wanted: float) -> Shift:
        """Return the change of the evidence minus the change that is wanted.

        The error includes that of the slope, if the slope says what is wanted.
        """

        def lacking(change: FloatArray, per_reward: FloatArray | float) -> FloatArray:
            found: FloatArray = change[..., 1] - per_reward * change[..., 0]
            return found

        blocks = {window: lacking(own, wanted) for window, own in self.blocks.items()}
        groups_H = lacking(self.groups_H2, wanted)
        if slope is not None:
            # Slope and change may lack different blocks or groups. A part that only one of them has leaves the other
            # as it is.
            blocks[0] = lacking(or_whole(self.blocks.get(0, self.value_2[None]), self.value_2), share * slope.blocks_B)
            groups_H = lacking(
                or_whole(self.groups_H2, self.value_2), share * or_whole(slope.groups_H, np.float64(slope.value))
            )
            groups_H[np.isnan(self.groups_H2[:, 1]) & np.isnan(slope.groups_H)] = np.nan
        return self._of(lacking(self.value_2[None], wanted), blocks, groups_H)

    def _of(self, value: FloatArray, blocks: Mapping[int, FloatArray], groups_H: FloatArray) -> Shift:
        return _shift(
            value,
            blocks,
            groups_H,
            nested=self.nested,
            num_prompts=self.num_prompts,
            num_steps=self.num_steps,
            method=self.method,
            floor=self.floor,
        )


def _shift(
    value: FloatArray,
    blocks: Mapping[int, FloatArray],
    groups_H: FloatArray,
    *,
    nested: bool,
    num_prompts: int,
    num_steps: int,
    method: str,
    floor: float,
) -> Shift:
    """Return a value with its error, from the values without each block and without each group of prompts."""
    parts = [jackknife(own) for own in blocks.values()]
    steps, prompts = sum(variance for variance, _ in parts), jackknife(groups_H)
    if nested:
        parts = parts if steps >= prompts[0] else [prompts]
        variance = max(steps, prompts[0])
    else:
        parts = [*parts, prompts]
        variance = steps + prompts[0]
    weights = sum(own * own / degrees for own, degrees in parts if degrees > 0)
    degrees = variance * variance / weights if weights > 0 else float(max(d for _, d in parts))
    return Shift(
        value=float(value[0]),
        error=max(math.sqrt(variance), floor),
        degrees=max(degrees, 1.0),
        num_prompts=num_prompts,
        num_steps=num_steps,
        method=method,
    )


def _in_both(prompt_N: IntArray, late_N: np.ndarray) -> np.ndarray | None:
    """Return which replies are to prompts that both windows have, if these are enough to compare them alone."""
    shared = np.intersect1d(prompt_N[late_N], prompt_N[~late_N])
    both_N: np.ndarray = np.isin(prompt_N, shared)
    enough = min(both_N[late_N].mean(), both_N[~late_N].mean()) >= 0.5
    return both_N if len(shared) >= MIN_CLUSTERS and enough else None


def _recur(prompt_N: IntArray, block_N: IntArray) -> bool:
    """Return whether a prompt is in two blocks."""
    pairs = np.unique(np.stack([prompt_N, block_N]), axis=1)
    return int(pairs.shape[1]) > len(np.unique(prompt_N))
