"""The controls on frozen states: each seed divides the roots anew, and heads are judged on roots that they did not see.

Legend: R replies, W hidden width, F features, K folds, S seeds, N comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.linear import PENALTIES, compare, cross_validate
from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.controls import length_matched, lengths_apart, shuffled
from rewardlab.data.judgements import seeded_generator
from rewardlab.diagnosing.arms import Arm, FloatArray
from rewardlab.evaluation.baselines import baseline_features
from rewardlab.probing.heads import Features

FEWEST: Final = 20
"""The smallest number of comparisons of equal length for which `length_matched` is run."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Variants:
    """The same preferences as they are and as the controls change them, with their states."""

    groups: Sequence[TokenGroup]
    roots_G: npt.NDArray[np.int64]
    """[G] the conversation of each."""
    states: Mapping[str, Any]
    """`full`, `prompt_only`, `response_only`, `random_negatives` -> [R, W] states of every reply."""
    negatives: Sequence[TokenGroup]
    """The preferences with replies to other prompts, and their comparisons."""


@dataclass(frozen=True, kw_only=True)
class TestData:
    """Other preferences on which every head is judged."""

    groups: Sequence[TokenGroup]
    roots_G: npt.NDArray[np.int64]
    """[G] the conversation of each."""
    states: Mapping[str, Any]
    """`full` and `response_only` -> [R, W] states of every reply."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the controls are run."""

    seeds: Sequence[int]
    folds: int = 5
    threshold: int = 50
    """Replies whose lengths differ by fewer tokens than this count as equally long."""
    lengths: bool = True
    """Whether `length_matched` is run; `run_controls` leaves it out if that is impossible."""


def run_controls(
    of: Variants, settings: Settings, test: TestData | None = None
) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """Return (control -> its accuracies on held-out conversations, the same on test data).

    Raises DataError if there are fewer than two conversations, all judgements are ties, or a fit does not converge.
    """
    _require_decided(of.groups, "the data")
    if test is not None:
        _require_decided(test.groups, "the test data")
    settings = replace(settings, lengths=settings.lengths and why_no_lengths(of, settings) is None)
    held: dict[str, list[FloatArray]] = {}
    elsewhere: dict[str, list[FloatArray]] = {}
    features = {name: Features.of(of.groups, states) for name, states in of.states.items() if name != "full"}
    features |= {"full": Features.of(of.groups, of.states["full"])}
    words = baseline_features(of.groups, [] if test is None else test.groups)
    for seed in bar(settings.seeds, title="controls"):
        for name, judged in _of_seed(of, features, settings, seed, test):
            held.setdefault(name, []).append(judged.right_N)
            if judged.test_N is not None:
                elsewhere.setdefault(name, []).append(judged.test_N)
        for name, (own_RF, test_RF, penalties) in words.items():
            judged = _judged(of, own_RF, of.groups, settings, seed, penalties=penalties)
            held.setdefault(name, []).append(judged.right_N)
            if test is not None:
                elsewhere.setdefault(name, []).append(_right_on(test.groups, test_RF @ judged.theta_FK))
    arms = {
        name: _arm(right, of.groups if "changed" not in name else of.negatives, of.roots_G)
        for name, right in held.items()
    }
    if test is None:
        return arms, {}
    return arms, {name: _arm(right, test.groups, test.roots_G) for name, right in elsewhere.items()}


def _arm(right: Sequence[FloatArray], groups: Sequence[TokenGroup], roots_G: npt.NDArray[np.int64]) -> Arm:
    roots = [str(root) for group, root in zip(groups, roots_G, strict=True) for _ in group.comparisons]
    return Arm(right_SN=np.stack(right), clusters=tuple(roots))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The outcomes of the heads of one control and seed."""

    right_N: FloatArray
    """[N] outcomes on held-out conversations."""
    theta_FK: FloatArray
    test_N: FloatArray | None = None
    """Outcomes on test data, averaged over the heads of the folds."""


def _of_seed(
    of: Variants, features: Mapping[str, Features], settings: Settings, seed: int, test: TestData | None
) -> Iterator[tuple[str, Judged]]:
    """Yield (control, the outcomes of its heads) for one seed."""

    def told(fitted: Features, judged: Judged, states: str = "full") -> Judged:
        if test is None or states not in test.states:
            return judged
        scores_RK = np.asarray(test.states[states], dtype=np.float64) @ fitted.heads(judged.theta_FK)
        return replace(judged, test_N=_right_on(test.groups, scores_RK))

    def fit(name: str, groups: Sequence[TokenGroup]) -> Judged:
        return _judged(of, features[name].features_RF, groups, settings, seed)

    full = features["full"]
    yield "full", told(full, fit("full", of.groups))
    yield "label_shuffle", told(full, fit("full", shuffle_groups(of.groups, seed)))
    if "prompt_only" in features:
        yield "prompt_only", fit("prompt_only", of.groups)
    if "response_only" in features:
        yield "response_only", told(features["response_only"], fit("response_only", of.groups), "response_only")
    if "random_negatives" in features:
        fitted = features["random_negatives"]
        # The same heads are judged twice: on the changed pairs to which they were fitted, and on the original replies.
        original_RF = (np.asarray(of.states["full"], dtype=np.float64) / fitted.scale_W) @ fitted.axes_WF
        scored = _judged(of, fitted.features_RF, of.negatives, settings, seed, judged_on=original_RF)
        yield "random_negatives", told(fitted, scored)
        changed = _judged(of, fitted.features_RF, of.negatives, settings, seed, judged_groups=of.negatives)
        yield "random_negatives_changed", changed
    if settings.lengths:
        yield from _of_lengths(of, settings, seed, told)


def why_no_lengths(of: Variants, settings: Settings) -> str | None:
    """Return why `length_matched` cannot be run on these preferences, in words; None if it can."""
    matched_N = _matched(of, settings.threshold)
    judged_N = np.array([one.label != 0.5 for group in of.groups for one in group.comparisons], dtype=bool)
    count = int((matched_N & judged_N).sum())
    within = f"replies differ by fewer than {settings.threshold} tokens"
    if matched_N.all():
        return f"in all comparisons the {within}, so there is nothing to match{_other_threshold(of, judged_N)}"
    if count < FEWEST:
        other = _other_threshold(of, judged_N)
        return f"in only {count} comparisons that are not ties the {within}; it needs {FEWEST}{other}"
    root_N = np.repeat(of.roots_G, [len(group.comparisons) for group in of.groups])
    for kept_N in (matched_N, *(_drawn(matched_N, seed) for seed in settings.seeds)):
        if len(np.unique(root_N[kept_N & judged_N])) < 2:
            return f"all comparisons whose {within}, or as many drawn at random, are of one conversation"
    return None


def _other_threshold(of: Variants, judged_N: Mask) -> str:
    """Return the threshold that keeps about half of the judged comparisons, in words; empty if it keeps too few."""
    apart_N = np.array([apart for group in of.groups for apart in lengths_apart(group)])[judged_N]
    half = int(np.median(apart_N)) if len(apart_N) else 0
    kept = int((apart_N < half).sum())
    return f" (--diagnostic-length-threshold {half} keeps {kept:,} of {len(apart_N):,})" if kept >= FEWEST else ""


def _matched(of: Variants, threshold: int) -> Mask:
    """Return [N] whether the replies of a comparison are equally long."""
    return np.concatenate([_kept(group, length_matched(group, threshold=threshold)) for group in of.groups])


def _drawn(matched_N: Mask, seed: int) -> Mask:
    """Return [N] a random mask with as many comparisons as there are of equal length."""
    drawn_N = np.zeros(len(matched_N), dtype=bool)
    drawn_N[np.random.default_rng((seed, 6)).permutation(len(matched_N))[: matched_N.sum()]] = True
    return drawn_N


def _of_lengths(of: Variants, settings: Settings, seed: int, told: Any) -> Iterator[tuple[str, Judged]]:
    """Yield the outcomes of heads that are fitted to and judged on pairs of equal length, and on as many random
    pairs."""
    matched_N = _matched(of, settings.threshold)
    drawn_N = _drawn(matched_N, seed)
    for name, kept_N in (("length_matched", matched_N), ("random_subset", drawn_N)):
        chosen = _with_comparisons(of.groups, kept_N)
        rows = np.repeat([bool(group.comparisons) for group in chosen], [group.num_replies for group in chosen])
        fitted = Features.of(
            [group for group in chosen if group.comparisons], np.asarray(of.states["full"], dtype=np.float64)[rows]
        )
        scaled_RF = (np.asarray(of.states["full"], dtype=np.float64) / fitted.scale_W) @ fitted.axes_WF
        judged = _judged(of, scaled_RF, chosen, settings, seed)
        yield name, told(fitted, replace(judged, right_N=np.where(kept_N, judged.right_N, np.nan)))


def _kept(group: TokenGroup, matched: TokenGroup | None) -> Mask:
    kept = () if matched is None else matched.comparisons
    return np.array([one in kept for one in group.comparisons], dtype=bool)


def _with_comparisons(groups: Sequence[TokenGroup], kept_N: Mask) -> list[TokenGroup]:
    """Return the groups with only the comparisons of the mask."""
    chosen, start = [], 0
    for group in groups:
        own = kept_N[start : start + len(group.comparisons)]
        start += len(group.comparisons)
        few = tuple(one for one, is_kept in zip(group.comparisons, own, strict=True) if is_kept)
        chosen.append(replace(group, comparisons=few))
    return chosen


def shuffle_groups(groups: Iterable[TokenGroup], seed: int) -> list[TokenGroup]:
    """Return the groups with their judgements shuffled, each group with its own random numbers, as `label_shuffle`
    does."""
    made = []
    for group in groups:
        bare = Preference(
            id=group.preference_id,
            source=group.source,
            prompt=(),
            replies=((),) * group.num_replies,
            comparisons=group.comparisons,
            ranking=group.ranking,
        )
        generator = seeded_generator(seed, f"label_shuffle\x1f{group.source}\x1f{group.preference_id}")
        moved = shuffled(bare, rate=0.5, generator=generator)
        made.append(replace(group, comparisons=moved.comparisons, ranking=moved.ranking))
    return made


def _judged(
    of: Variants,
    features_RF: Any,
    groups: Sequence[TokenGroup],
    settings: Settings,
    seed: int,
    *,
    judged_on: Any = None,
    judged_groups: Sequence[TokenGroup] | None = None,
    penalties: Sequence[float] = PENALTIES,
) -> Judged:
    """Fit heads to the comparisons of `groups`, each without one fold, and judge each on the fold that it did not see.

    They are judged on the original comparisons with the same features, or, if given, on those of `judged_groups` with
    the features `judged_on`.
    """
    data = compare(groups, features_RF, of.roots_G)
    validated = cross_validate(data, penalties=penalties, num_folds=settings.folds, seed=seed)
    fold_of = {key: int(fold) for key, fold in zip(data.prompt_keys, validated.fold_P, strict=True)}
    on = features_RF if judged_on is None else judged_on
    scores_RK = np.asarray(on @ validated.theta_FK)
    wanted = of.groups if judged_groups is None else judged_groups
    right: list[float] = []
    row = 0
    for group in wanted:
        # A prompt without comparisons to fit has no fold. No head has seen it, so any head may judge it.
        own = scores_RK[row : row + group.num_replies, fold_of.get(group.prompt_key, 0)]
        right += [_right(float(own[one.first] - own[one.second]), one.label) for one in group.comparisons]
        row += group.num_replies
    return Judged(right_N=np.array(right), theta_FK=validated.theta_FK)


def _right_on(groups: Sequence[TokenGroup], scores_RK: Any) -> FloatArray:
    """Return [N] the share of the K heads that rank each comparison as labelled."""
    found, row = [], 0
    scores_RK = np.asarray(scores_RK)
    for group in groups:
        own_K = scores_RK[row : row + group.num_replies]
        found += [
            float(np.mean([_right(float(d), one.label) for d in own_K[one.first] - own_K[one.second]]))
            for one in group.comparisons
        ]
        row += group.num_replies
    return np.array(found)


def _right(difference: float, label: float) -> float:
    """Return 1 if the difference has the sign of the label, ½ for equal scores, 0 otherwise; NaN for a label tie."""
    if label == 0.5:
        return float("nan")
    return float(np.heaviside(difference if label > 0.5 else -difference, 0.5))


def _require_decided(groups: Sequence[TokenGroup], what: str) -> None:
    if all(one.label == 0.5 for group in groups for one in group.comparisons):
        raise DataError(f"all judgements of {what} are ties, so there is no accuracy. Name data with preferences.")


def require_roots(roots_G: npt.NDArray[np.int64]) -> None:
    """Raise DataError if there are too few conversations to divide."""
    if len(np.unique(roots_G)) < 2:
        raise DataError("the data are one conversation; controls need at least two to hold one out. Name more data.")
