"""Preferences -> TokenGroups, and the order in which a run sees them.

Macro-batch k is a function of (seed, k) and the number of groups alone: nothing is drawn along the way, so a run
can be taken up at any step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.chat import Renderer

OVERLONG = "overlong"
"""Cause of what `--overlong drop` leaves out."""


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """What tokenising did to a dataset; kept + dropped = preferences given."""

    preferences: int
    kept: int
    dropped: Mapping[str, int]
    dropped_ids: Mapping[str, tuple[str, ...]]
    """Up to three examples a cause."""
    truncated_replies: int
    replies: int
    lost_replies: int
    """Replies left out of preferences that were kept, because they do not fit the limit."""
    lost_comparisons: int
    """Comparisons left out of preferences that were kept, with those replies or between identical tokens."""
    prompts_differ_after_cut: int
    """Preferences whose replies kept different amounts of the prompt."""
    tokens: int
    """Tokens computed with each prompt once."""
    unshared_tokens: int
    """Tokens computed with one prompt a reply."""
    longest: int

    def as_dict(self) -> dict[str, object]:
        """For the manifest."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "dropped": dict(self.dropped),
            "dropped_ids": {cause: list(ids) for cause, ids in self.dropped_ids.items()},
        }


def tokenize(
    preferences: Sequence[Preference],
    renderer: Renderer,
    *,
    max_drop_fraction: float,
    name: str,
    own_limit: bool = False,
    overlong: str = "truncate",
) -> tuple[list[TokenGroup], TokenReport]:
    """Render every preference; what cannot be used is counted by cause.

    Causes: `template_refuses` (the chat template raises, for example at a role), `overlong` (a reply does not fit
    the limit with its whole prompt, if `overlong` is `drop`), and those of `Renderer.group`.

    `own_limit` says that the length limit came with a model and no flag can raise it.

    Raises DataError if nothing is left, or if more than `max_drop_fraction` was dropped; rows that `--overlong drop`
    asks to leave out are counted, but do not count towards that.
    """
    groups: list[TokenGroup] = []
    dropped: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    lost = [0, 0]
    for preference in tqdm(preferences, desc=f"tokenising {name}", disable=None, leave=False):
        place = preference.id
        try:
            group = renderer.group(preference)
        except RenderError as error:
            group, place = "template_refuses", str(error)
        if overlong == "drop" and _is_overlong(group, preference):
            group = OVERLONG
        if isinstance(group, str):
            dropped[group] += 1
            examples.setdefault(group, []).append(place)
        else:
            groups.append(group)
            lost[0] += len(preference.replies) - group.num_replies
            lost[1] += len(preference.comparisons) - len(group.comparisons)
    report = TokenReport(
        preferences=len(preferences),
        kept=len(groups),
        dropped=dict(dropped),
        dropped_ids={cause: tuple(ids[:3]) for cause, ids in examples.items()},
        truncated_replies=sum(cut > 0 for group in groups for cut in group.truncated_tokens),
        replies=sum(group.num_replies for group in groups),
        lost_replies=lost[0],
        lost_comparisons=lost[1],
        prompts_differ_after_cut=sum(len(set(group.truncated_tokens)) > 1 for group in groups),
        tokens=sum(group.num_tokens for group in groups),
        unshared_tokens=sum(group.num_unshared_tokens for group in groups),
        longest=max((max(group.lengths) for group in groups), default=0),
    )
    _require_enough(report, max_drop_fraction, name, renderer.spec.max_length, own_limit)
    return groups, report


def _is_overlong(group: TokenGroup | str, preference: Preference) -> bool:
    """Whether a reply lost tokens of its prompt, or was itself left out."""
    if isinstance(group, str):
        return group == "reply_too_long"
    return any(group.truncated_tokens) or group.num_replies < len(preference.replies)


def _require_enough(report: TokenReport, max_drop_fraction: float, name: str, max_length: int, own_limit: bool) -> None:
    num_dropped = report.preferences - report.kept
    if report.kept and num_dropped - report.dropped.get(OVERLONG, 0) <= max_drop_fraction * report.preferences:
        return
    causes = "; ".join(
        f"{cause}: {count} (such as {report.dropped_ids[cause][0]})" for cause, count in report.dropped.items()
    )
    share = math.ceil(1000 * num_dropped / report.preferences) / 1000  # rounded up, so that following it works
    allow = "" if not report.kept else f", or allow it with --max-drop-fraction {share:.3f}"
    limit, remedy = f"--max-seq-len {max_length}", "Raise --max-seq-len"
    if own_limit:
        limit, remedy = f"the model's limit of {max_length} tokens", "Leave them out, or train with more --max-seq-len"
    raise DataError(
        f"{name}: {num_dropped} of {report.preferences} preferences cannot be used with {limit} ({causes}). "
        f"{remedy}{allow}."
    )


def weigh(groups: Sequence[TokenGroup], *, by: str) -> list[TokenGroup]:
    """Divide the weights of a prompt's comparisons by their number (`by` = prompt), or leave them (`comparison`)."""
    if by == "comparison":
        return list(groups)
    return [
        replace(
            group,
            comparisons=tuple(
                replace(comparison, weight=comparison.weight / len(group.comparisons))
                for comparison in group.comparisons
            ),
        )
        for group in groups
    ]


def steps_per_epoch(num_groups: int, batch_size: int) -> int:
    """Macro-batches in one pass; the last may be smaller."""
    return -(-num_groups // batch_size)


def macro_batch(step: int, *, num_groups: int, batch_size: int, seed: int) -> list[int]:
    """Indices of the groups of macro-batch `step` (from 0)."""
    epoch, position = divmod(step, steps_per_epoch(num_groups, batch_size))
    order = np.random.default_rng((seed, epoch)).permutation(num_groups)
    return [int(index) for index in order[position * batch_size : (position + 1) * batch_size]]
