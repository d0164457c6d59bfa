"""Runs `rewardlab rl audit`: the record as columns, its evidence, the changes between windows, and what they say.

Legend: N rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.rl.audit.changes import Pair, Sample, missing
from rewardlab.rl.audit.columns import REPETITION, Columns, IntArray, read_columns
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.heldout import Suite, read_heldout
from rewardlab.rl.audit.verdicts import Finding, Judged, Limits, judge
from rewardlab.rl.audit.windows import MIN_STEPS, divide

MOST_POINTS: Final = 40
"""Most points of a curve. Each is a group of adjacent steps."""
DISTINCT: Final = "distinct replies"
SHARES: Final = (REPETITION, DISTINCT)
"""Names of the columns that are shown and lie between 0 and 1."""
PROMPTS_OF_A_POINT: Final = 24
SELECTED: Final = 0.2
"""Difference, in standard deviations, between the rewards of replies with and without evidence. From there on a note
says that the replies seem to be chosen by their reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A column over the run: its mean in groups of adjacent steps."""

    name: str
    points: tuple[tuple[float, Estimate], ...]
    """(middle step, mean)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rollouts of one reward model, which alone are compared with each other."""

    digest: str | None
    num_rows: int
    num_prompts: int
    windows: tuple[tuple[int, int], ...]
    """(first step, last step) of each window."""
    first: int
    last: int
    curves: tuple[Curve, ...]
    """Reward and evidence in standard deviations of the first window, from its mean."""
    shown: tuple[Curve, ...]
    """Columns that are shown and not judged, each in its own unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Everything that a report says."""

    run: str
    parts: tuple[Part, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    num_rows: int
    limits: Limits


def audit(config: AuditConfig) -> Audit:
    """Return what the record of a run, and the evidence, say.

    Raises DataError for a record or a file that cannot be read, ConfigError where there is no evidence, and what the
    scorer raises for `--gold`.
    """
    suites = [] if config.heldout is None else read_heldout(config.heldout)
    columns = _with_evidence(read_columns(config.run), config, suites)
    return audit_columns(str(config.run), columns, suites, config)


def audit_columns(name: str, columns: Columns, suites: Sequence[Suite], config: AuditConfig) -> Audit:
    """Return what columns and held-out results say; `audit` reads them."""
    divided = list(_divided(columns, suites, config.windows))
    notes = [
        f"{len(windows)} windows in place of {config.windows}, of at least {MIN_STEPS} steps each."
        for _, windows, _ in divided
        if 0 < len(windows) < config.windows
    ]
    return Audit(
        run=name,
        parts=tuple(part_of(*one) for one in divided),
        findings=tuple(judge_columns(columns, suites, config)),
        notes=(*_notes(columns), *notes),
        num_rows=len(columns.step_N),
        limits=_limits(config),
    )


def judge_columns(columns: Columns, suites: Sequence[Suite], config: AuditConfig) -> list[Finding]:
    """Return what columns and held-out results say, without the curves."""
    judged = [
        one
        for part, (own, windows, mine) in enumerate(_divided(columns, suites, config.windows))
        for one in _judged(part, own, windows, mine, _limits(config))
    ]
    return judge(judged, _limits(config))


def _limits(config: AuditConfig) -> Limits:
    return Limits(least_change=config.least_change, least_rise=config.least_rise, share=config.share)


def _divided(
    columns: Columns, suites: Sequence[Suite], windows: int
) -> Iterator[tuple[Columns, list[IntArray], list[Suite]]]:
    """Yield rollouts, windows and held-out results of each reward model, in the order in which they were used."""
    numbers = list(dict.fromkeys(columns.digest_N.tolist()))
    for place, number in enumerate(numbers):
        own = columns.of(columns.digest_N == number)
        first = -math.inf if place == 0 else float(own.step_N[0])
        last = math.inf if place == len(numbers) - 1 else float(own.step_N[-1])
        yield own, divide(own.step_N, windows), [suite.within(first, last) for suite in suites]


def _with_evidence(columns: Columns, config: AuditConfig, suites: Sequence[Suite]) -> Columns:
    """Return columns with only the evidence that is wanted, and gold scores. Raises ConfigError if there is none."""
    evidence = dict(columns.evidence)
    for name in config.evidence:
        if name not in evidence:
            known = f"It has {', '.join(evidence)}." if evidence else "It has none."
            raise ConfigError(f"--evidence {name}: no row of the record has evidence of this name. {known}")
    if config.evidence:
        evidence = {name: evidence[name] for name in config.evidence}
    if config.gold:
        from rewardlab.rl.audit import gold

        if gold.NAME in evidence:
            raise ConfigError(
                f"--gold: the record has evidence called {gold.NAME} already. Choose others of the record with "
                f"--evidence, or leave --gold out."
            )
        evidence[gold.NAME] = gold.score(columns, config.gold, most=config.gold_rows, seed=config.seed)
    if not evidence and not suites:
        raise ConfigError(
            f"{config.run}: nothing to hold the reward against. Log gold scores, a second reward model or a verifier "
            f"as `evidence`, score the logged replies now with --gold MODEL, or give results of a held-out suite with "
            f"--heldout FILE. Length, KL divergence and spread alone do not tell an honest run from an exploited one."
        )
    return replace(columns, evidence=evidence)


def _judged(
    part: int, own: Columns, windows: Sequence[IntArray], suites: Sequence[Suite], limits: Limits
) -> Iterator[Judged]:
    """Yield what is to be judged of a part: each kind of evidence."""
    names = [*own.evidence, *(suite.name for suite in suites)]
    if not windows:
        steps = number_of(len(np.unique(own.step_N)), "step")
        why = f"the run has {steps} with this reward model; {2 * MIN_STEPS} are needed for two windows."
        yield from (_impossible(part, name, why) for name in names)
        return
    for name, values_N in own.evidence.items():
        yield _of_rows(part, name, values_N, own, windows, limits)
    for suite in suites:
        yield _of_suite(part, suite, own, windows)


def _of_rows(
    part: int, name: str, values_N: FloatArray, own: Columns, windows: Sequence[IntArray], limits: Limits
) -> Judged:
    """Judge one kind of evidence, whose value the record holds for each reply."""
    kept = np.isfinite(values_N)
    if not kept.any():
        return _impossible(part, name, "no reply of this reward model has it.")
    rows = own.of(kept)
    values_N2 = np.stack([rows.reward_N, values_N[kept]], axis=1)
    scales = [scale_of(column, rows.prompt_N, rows.step_N <= windows[0][-1]) for column in values_N2.T]
    if not all(scales):
        which = "the reward" if not scales[0] else "it"
        return _impossible(part, name, f"{which} has the same value for every reply.")
    sample = Sample.of(rows.step_N, rows.prompt_N, values_N2 / np.array(scales), windows, rows.prompts)
    pairs = [
        sample.compare(earlier, later, share=limits.share, least=limits.least_change)
        for earlier, later in _all_pairs(len(windows))
    ]
    return Judged(
        name=name,
        part=part,
        pairs=pairs,
        starts=[int(window[0]) for window in windows],
        ends=[int(window[-1]) for window in windows],
        slope=None if sample.slope is None else sample.slope.shift.estimate(),
        num_rows=int(kept.sum()),
        notes=tuple(_notes_on(name, kept, own, scales[0])),
    )


def _of_suite(part: int, suite: Suite, own: Columns, windows: Sequence[IntArray]) -> Judged:
    """Return a held-out suite as evidence; the reward is that of all replies."""
    if not len(suite.step_N):
        return _impossible(part, suite.name, "no checkpoint lies within the steps of this reward model.")
    if suite.item_N is not None and not np.ptp(suite.value_N):
        return _impossible(part, suite.name, "every item has the same value at every checkpoint.")
    scale = scale_of(own.reward_N, own.prompt_N, own.step_N <= windows[0][-1])
    if not scale:
        return _impossible(part, suite.name, "the reward has the same value for every reply.")
    values_N2 = np.repeat(own.reward_N[:, None] / scale, 2, axis=1)
    sample = Sample.of(own.step_N, own.prompt_N, values_N2, windows, own.prompts)
    pairs = []
    for earlier, later in _all_pairs(len(windows)):
        reward = sample.compare(earlier, later).reward
        gold = suite.change(earlier, later, windows)
        room = suite.room(earlier, windows)
        pairs.append(Pair(earlier=earlier, later=later, reward=reward, gold=gold, room=room))
    notes = [] if suite.has_scale else [f"{suite.name} is given in its own unit, since the file has no n."]
    if any(np.sum(np.unique(suite.step_N) >= window[0]) == 0 for window in windows):
        notes.append(f"{suite.name} has no checkpoint in some windows.")
    notes.append(f"{suite.name}: with one checkpoint in a window, how much checkpoints differ is not in its interval.")
    return Judged(
        name=suite.name,
        part=part,
        pairs=pairs,
        starts=[int(window[0]) for window in windows],
        ends=[int(window[-1]) for window in windows],
        num_rows=len(suite.step_N),
        is_suite=True,
        notes=tuple(notes),
    )


def _impossible(part: int, name: str, why: str) -> Judged:
    none = missing(0, 0, why)
    pair = Pair(earlier=0, later=1, reward=none, gold=none)
    return Judged(name=name, part=part, pairs=[pair], starts=[0, 0], ends=[0, 0], impossible=why)


def _all_pairs(windows: int) -> list[tuple[int, int]]:
    return list(combinations(range(windows), 2))


def scale_of(values_N: FloatArray, prompt_N: IntArray, first_N: np.ndarray) -> float:
    """Return the unit of all changes: the standard deviation of replies to one prompt in the first window.

    If no prompt has two replies that differ, it is the standard deviation of all replies in the first window; if these
    all have one value, that of all replies of the run. It is 0 if every reply has the same value.
    """
    inside, prompts = values_N[first_N], prompt_N[first_N]
    if len(inside) > 1:
        _, unit_N, count_U = np.unique(prompts, return_inverse=True, return_counts=True)
        means = np.bincount(unit_N, inside) / count_U
        degrees = len(inside) - len(count_U)
        within = math.sqrt(float(np.square(inside - means[unit_N]).sum()) / degrees) if degrees else 0.0
        most = float(np.abs(inside).max())
        for spread in (within, float(np.std(inside, ddof=1))):
            if spread > 1e-9 * most:
                return spread
    spread = float(np.std(values_N))
    return spread if spread > 1e-9 * float(np.abs(values_N).max(initial=0.0)) else 0.0


def _notes(columns: Columns) -> Iterator[str]:
    """Yield the notes on a whole record."""
    count = len(columns.digests)
    if count > 1:
        yield (
            f"The reward was given by {count} reward models (digests). Scores of different models are not compared: "
            "each part of the run is judged by itself."
        )
    elif columns.digests[0] is None:
        yield "The record does not say which reward model gave the reward; a change of it would not be noticed."


def _notes_on(name: str, kept: np.ndarray, own: Columns, scale: float) -> Iterator[str]:
    """Yield the notes on evidence that some replies do not have."""
    lacking = int((~kept).sum())
    if not lacking:
        return
    yield f"{lacking:,} of {len(kept):,} replies have no {name}; changes of the reward are those of the other replies."
    steps = own.step_N
    with_it, without = steps[kept], steps[~kept]
    common = np.intersect1d(with_it, without)
    inside = np.isin(steps, common)
    if not inside.any():
        return
    # Replies are compared within steps, so that a reward that rises over the run is not taken for a choice of replies.
    places = np.searchsorted(common, steps[inside])
    means = [
        np.bincount(places[own_N], own.reward_N[inside][own_N], minlength=len(common))
        / np.bincount(places[own_N], minlength=len(common))
        for own_N in (kept[inside], ~kept[inside])
    ]
    apart = stats.mean((means[0] - means[1]) / scale)
    if apart.low > SELECTED or apart.high < -SELECTED:
        yield (
            f"Replies with {name} have a reward that is {apart.value:+.2f} [{apart.low:.2f}, {apart.high:.2f}] "
            f"standard deviations from that of the others of their step: they were chosen by their reward, and "
            f"{name} of chosen replies falls back by itself. Draw the replies that are judged at random."
        )


def part_of(own: Columns, windows: Sequence[IntArray], suites: Sequence[Suite]) -> Part:
    """Return a part with its curves."""
    steps = np.unique(own.step_N)
    # Enough prompts for an interval: those of a step count again in the next one.
    asked = len(np.unique(np.stack([own.step_N, own.prompt_N]), axis=1).T)
    bins = np.array_split(steps, max(1, min(MOST_POINTS, len(steps), asked // PROMPTS_OF_A_POINT)))
    curves = []
    if windows:
        first_N = own.step_N <= windows[0][-1]
        for name, values_N in {"reward": own.reward_N, **own.evidence}.items():
            kept = np.isfinite(values_N)
            scale = scale_of(values_N[kept], own.prompt_N[kept], first_N[kept]) if kept.any() else 0.0
            if scale and (kept & first_N).any():
                centred_N = (values_N - values_N[kept & first_N].mean()) / scale
                curves.append(_curve(name, centred_N, own, bins))
        curves += [curve for suite in suites if (curve := _suite_curve(suite, windows)) is not None]
    shown = [_curve(name, values_N, own, bins) for name, values_N in _all_shown(own).items()]
    return Part(
        digest=own.digests[int(own.digest_N[0])],
        num_rows=len(own.step_N),
        num_prompts=len(np.unique(own.prompt_N)),
        windows=tuple((int(window[0]), int(window[-1])) for window in windows),
        first=int(own.step_N[0]),
        last=int(own.step_N[-1]),
        curves=tuple(curves),
        shown=tuple(curve for curve in shown if curve.points),
    )


def _all_shown(own: Columns) -> Mapping[str, FloatArray]:
    """Return what is shown: the record's own columns, spread within prompts, and how many replies differ."""
    place_N = np.unique(own.step_N, return_inverse=True)[1]
    _, cell_N, count_C = np.unique(own.prompt_N + place_N * len(own.prompts), return_inverse=True, return_counts=True)
    means_C = np.bincount(cell_N, own.reward_N) / count_C
    squares_C = np.bincount(cell_N, np.square(own.reward_N - means_C[cell_N]))
    spread_C = np.where(count_C > 1, np.sqrt(squares_C / np.maximum(count_C - 1, 1)), np.nan)
    different = np.unique(np.stack([cell_N.astype(np.uint64), own.reply_N]), axis=1)[0].astype(np.int64)
    distinct_C = np.where(count_C > 1, np.bincount(different, minlength=len(count_C)) / count_C, np.nan)
    # One value a prompt and step, at the first of its rows.
    first_C = np.unique(cell_N, return_index=True)[1]
    more = {}
    for name, values_C in (("spread of the reward in a group", spread_C), (DISTINCT, distinct_C)):
        column = np.full(len(own.step_N), np.nan)
        column[first_C] = values_C
        more[name] = column
    return {**own.shown, **more}


def _curve(name: str, values_N: FloatArray, own: Columns, bins: Sequence[IntArray]) -> Curve:
    points = []
    for steps in bins:
        inside = (own.step_N >= steps[0]) & (own.step_N <= steps[-1]) & np.isfinite(values_N)
        if inside.any():
            keys = [own.prompts[number] for number in own.prompt_N[inside]]
            mean = stats.mean_share if name in SHARES else stats.mean
            points.append((float(steps[0] + steps[-1]) / 2, mean(values_N[inside], keys)))
    return Curve(name=name, points=tuple(points))


def _suite_curve(suite: Suite, windows: Sequence[IntArray]) -> Curve | None:
    if not len(suite.step_N):
        return None
    steps = np.unique(suite.step_N)
    first = suite.step_N <= max(int(windows[0][-1]), int(steps[0]))
    centre, points = float(suite.value_N[first].mean()), []
    for step in steps:
        here = suite.step_N == step
        if suite.item_N is not None:
            points.append((float(step), stats.mean((suite.value_N[here] - centre) / suite.scale)))
        else:
            assert suite.error_N is not None
            value, reach = float(suite.value_N[here][0]) - centre, 1.959964 * float(suite.error_N[here][0])
            count = np.asarray(suite.count_N)[here][0]
            low, high = ((value + sign * reach) / suite.scale for sign in (-1, 1))
            number = int(count) if math.isfinite(count) else 1
            estimate = Estimate(value=value / suite.scale, low=low, high=high, n=number, method="from the file")
            points.append((float(step), estimate))
    return Curve(name=suite.name, points=tuple(points))
