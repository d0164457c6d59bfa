"""Counts what tokenising did to a dataset, and tokenises preferences that are in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.core.spec import RendererSpec
from rewardlab.core.terminal import plural
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import OVERLONG, PROMPT_TOO_LONG, Renderer
from rewardlab.data.groups import Part
from rewardlab.data.store import LEFT_OUT, LeftOut, TokenStore, encode

logger = logging.getLogger("rewardlab")
CHUNK = 256
"""Preferences that are rendered together."""


_CHANGE: Final = "Change these conversations or leave them out"
HOLD_OUT: Final = (
    " They were held out of the training data: hold out more with --eval-fraction, others with another --seed, or none "
    "with --eval-fraction 0."
)
_LEAVE_OUT: Final = "Leave them out: to the model their replies are the same"
REMEDIES: Final[Mapping[str, tuple[str, str]]] = {
    "template_refuses": (_CHANGE, f"{_CHANGE}, or choose another --chat-template"),
    "ends_in_padding": (_CHANGE, f"{_CHANGE}, or choose a --chat-template that ends each turn"),
    "identical_tokens": (_LEAVE_OUT, _LEAVE_OUT),
}
"""Cause that no length limit is to blame for -> what to do with the template of a model, and where it can be chosen."""


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """Counts of what tokenising did to a dataset; kept + dropped = preferences."""

    preferences: int
    kept: int
    dropped: Mapping[str, int]
    dropped_ids: Mapping[str, tuple[str, ...]]
    """Cause -> up to three examples."""
    truncated_replies: int
    """Replies of whose prompt something was cut."""
    shortened_replies: int
    """Replies of which the middle was cut."""
    replies: int
    lost_replies: int
    """Replies left out of preferences that were kept: they do not fit the limit, or have no rendering."""
    lost_comparisons: int
    """Comparisons left out of preferences that were kept, with those replies or between identical tokens."""
    prompts_differ_after_cut: int
    """Preferences whose replies kept different amounts of the prompt."""
    cut_preferred: int
    """Preferences of which the preferred reply alone lost something, of its prompt or in its middle; of several replies
    in more comparisons than the other way round."""
    cut_other: int
    """Preferences of which the other reply alone did."""
    special_tokens_in_text: int
    """Replies in whose conversation a control token is typed. The renderer's spec says how it is read."""
    tokens: int
    """Tokens to compute if each prompt is computed once."""
    unshared_tokens: int
    """Tokens to compute if the prompt is computed once for each reply."""
    longest: int
    """Tokens of the longest conversation."""

    def as_dict(self) -> dict[str, object]:
        """Return the counts as a JSON mapping, for the manifest."""
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
    keep_identical: bool = False,
) -> tuple[list[TokenGroup], TokenReport]:
    """Render preferences in memory. Return the groups, and a report that counts by cause what could not be used.

    The causes are those of `bulk.render_all`. `own_limit` says that the length limit comes with a model, so that no
    flag can raise it. With `keep_identical`, replies of equal tokens are compared too.

    Raises DataError as `require_enough` and `bulk.render_all` do.
    """
    outcomes: list[TokenGroup | LeftOut] = []
    for start in bar(range(0, len(preferences), CHUNK), title=f"tokenising {name}"):
        outcomes += render_all(preferences[start : start + CHUNK], renderer, keep_identical=keep_identical)
    store = TokenStore(columns=encode(preferences, outcomes), source=name, facts={})
    report = report_of(Part([store], np.arange(len(preferences))))
    require_enough(report, max_drop_fraction, name, renderer.spec.max_length, own_limit=own_limit)
    tell_typed(report.special_tokens_in_text, report.replies, renderer.spec, name)
    return [outcome for outcome in outcomes if isinstance(outcome, TokenGroup)], report


def report_of(part: Part) -> TokenReport:
    """Return what tokenising did to a part of the data, from the columns of its stores."""
    causes_P, groups = part.causes(), part.groups()
    preferred_G, other_G = groups.cut_alone()
    codes, firsts, counts = np.unique(causes_P[causes_P > 0], return_index=True, return_counts=True)
    in_order = [(LEFT_OUT[codes[n] - 1], codes[n], int(counts[n])) for n in np.argsort(firsts)]
    return TokenReport(
        preferences=len(part),
        kept=len(groups),
        dropped={cause: count for cause, _, count in in_order},
        dropped_ids={
            cause: tuple(part.place(int(position)) for position in np.flatnonzero(causes_P == code)[:3])
            for cause, code, _ in in_order
        },
        truncated_replies=_total(groups.column("num_truncated")),
        shortened_replies=_total(groups.column("num_shortened")),
        replies=_total(groups.num_replies()),
        lost_replies=_total(groups.column("lost_replies")),
        lost_comparisons=_total(groups.column("lost_comparisons")),
        prompts_differ_after_cut=_total(groups.column("prompts_differ")),
        cut_preferred=_total(preferred_G),
        cut_other=_total(other_G),
        special_tokens_in_text=_total(groups.column("num_typed")),
        tokens=_total(groups.num_tokens()),
        unshared_tokens=_total(groups.num_unshared_tokens()),
        longest=int(groups.longest().max(initial=0)),
    )


def tell_typed(num_typed: int, num_replies: int, spec: RendererSpec, name: str) -> None:
    """Log a warning if control tokens are typed in texts, which is a mistake in the data or an attack."""
    read_as = {
        "text": "as text, so they end no turn (--special-tokens-in-text)",
        "keep": "as control tokens, as if the chat template had written them (--special-tokens-in-text keep)",
    }
    if num_typed:
        logger.warning(
            "tokens: %s: control tokens are typed in %d of %d %s; they are read %s",
            name,
            num_typed,
            num_replies,
            plural(num_replies, "reply or its prompt", "replies or their prompts"),
            read_as[spec.special_tokens_in_text],
        )


def _total(counts_G: npt.NDArray[Any]) -> int:
    return int(counts_G.sum(dtype=np.int64))


def require_enough(
    report: TokenReport,
    max_drop_fraction: float,
    name: str,
    max_length: int,
    *,
    own_limit: bool = False,
    held_out: bool = False,
) -> None:
    """Raise DataError if nothing is left, or if more than `max_drop_fraction` was dropped.

    `held_out` says that the rows were drawn from the training data, so that others can be drawn. Rows that
    `--truncation drop` leaves out do not count towards that share, since the user asked for it.
    """
    num_dropped = report.preferences - report.kept
    if report.kept and num_dropped - report.dropped.get(OVERLONG, 0) <= max_drop_fraction * report.preferences:
        return
    causes = "; ".join(
        f"{cause}: {count} (such as {report.dropped_ids[cause][0]})" for cause, count in report.dropped.items()
    )
    # Rounded up, so that a user who follows the advice is not refused again.
    share = math.ceil(1000 * num_dropped / report.preferences) / 1000
    allow = "" if not report.kept else f", or allow it with --max-drop-fraction {share:.3f}"
    limit, remedy = _advice(report, max_length, own_limit=own_limit)
    raise DataError(
        f"{name}: {num_dropped} of {report.preferences} {plural(report.preferences, 'preference')} cannot "
        f"be used{limit} ({causes}). {remedy}{allow}.{HOLD_OUT if held_out else ''}"
    )


def _advice(report: TokenReport, max_length: int, *, own_limit: bool) -> tuple[str, str]:
    """Return (the limit, if it is why most rows were dropped, as the end of a clause; what to do about them)."""
    # Rows that the user asked to leave out are the reason only where nothing else is.
    counts = {cause: count for cause, count in report.dropped.items() if not report.kept or cause != OVERLONG}
    main = max(counts, key=counts.__getitem__)
    if main in REMEDIES:
        own, other = REMEDIES[main]
        return "", own if own_limit else other
    if own_limit:
        return f" with the model's limit of {max_length} tokens", "Leave them out, or train with more --max-seq-len"
    cut = ", cut prompts instead of replies with --truncation prompt-left" if PROMPT_TOO_LONG in counts else ""
    return f" with --max-seq-len {max_length}", f"Raise --max-seq-len{cut}"
