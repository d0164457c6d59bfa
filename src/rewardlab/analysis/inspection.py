"""What an inspection of a dataset found, as numbers: exact counts of its rows, and estimates with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.analysis.ceiling import Ceiling
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.types import Estimate

SHARES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Quantiles of lengths and strengths."""
NUM_BARS: Final = 30
"""Bars of a histogram."""
MOST_SHOWN: Final = 0.99
"""Share of the values that a histogram shows where its tail is long; the last bar holds all above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of values in bars."""

    edges: tuple[float, ...]
    """One more than bars; empty without values."""
    counts: tuple[int, ...]
    beyond: int
    """Values outside the bars: at long tails they would flatten all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values of all rows, exactly: no estimate."""

    count: int
    mean: float
    lowest: float
    quantiles: Mapping[str, float]
    """``1%`` and so on -> value; empty without values."""
    highest: float
    histogram: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in one unit."""

    unit: str
    """`tokens` or `words`."""
    counted_by: str
    """What counts: the name of a model or tokenizer, or how words are told apart."""
    prompts: Spread
    replies: Spread
    conversations: Spread
    """Prompt and one reply together."""
    limit: int | None
    """Longest conversation that fits; None for words, of which no limit is known."""
    overlong: int
    """Conversations above the limit."""
    overlong_rows: int
    """Rows with such a conversation."""
    unrendered: Mapping[str, int]
    """Cause -> rows that cannot be rendered: no two replies that are compared are left."""
    unrendered_replies: Mapping[str, int]
    """Cause -> replies of other rows that cannot be rendered; training leaves them out alone."""
    computed: int
    """Units of all conversations where what replies share is computed once."""
    unshared: int
    """The same where every reply has its own copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelBalance:
    """What labels look like."""

    comparisons: int
    decided: int
    label_ties: int
    skipped_ties: int
    """Comparisons of K-wise rows that were not made, since the scores are equal."""
    soft: int
    """Labels strictly between 0 and 1, and not ½."""
    below_half: int
    """Labels below ½, by which the reply that is named second is preferred."""
    first_is_better: Estimate | None
    """Share of decided comparisons whose better reply stands before the other in the row; None where the format names
    the better reply, so that its place says nothing; labels below ½ show that `chosen` is only the first of two."""
    longer_is_better: Estimate
    """Share of decided comparisons whose better reply is the longer one; equal lengths count one half."""
    by_difference: Sequence[tuple[str, Estimate]]
    """Size of the length difference, in words -> the same among these."""
    difference: Spread
    """Length of the better reply minus that of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What length and words alone reach, each comparison judged by a model that saw nothing of its conversation."""

    accuracy: Mapping[str, Estimate]
    rows: int
    """Rows that they were fitted and judged on."""
    missing: str
    """Why there are none; empty if there are."""
    by_strength: tuple[tuple[str, Estimate], ...] = ()
    """The accuracy of words where the strength is low, and where it is high, by how they are called; empty where
    strengths do not differ."""

    @property
    def strengths_are_reversed(self) -> bool:
        """Whether words find the better reply less often where it is said to be preferred more strongly."""
        if len(self.by_strength) < 2:
            return False
        (_, low), (_, high) = self.by_strength
        return high.high < low.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """How far judgements of the same pair agree."""

    annotators: int
    """Different names."""
    repeated: int
    """Pairs judged several times in one row."""
    repeated_elsewhere: int
    """Pairs of texts judged in several rows."""
    alpha: Mapping[str, Estimate]
    """What is compared -> Krippendorff's α."""
    ceilings: tuple[Ceiling, ...]
    """The most trustworthy first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tongues:
    """Scripts of all letters, and languages of a sample of replies."""

    letters: int
    scripts: Mapping[str, float]
    """Script -> its share of the letters of prompts and replies, the most frequent first."""
    languages: Mapping[str, Estimate]
    """Code of a language -> its share of the replies."""
    sampled: int
    """Replies whose language was guessed."""
    missing: str
    """Why no languages were guessed; empty if they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row as text."""

    place: str
    prompt: tuple[tuple[str, str], ...]
    """(role, text) of each turn."""
    replies: tuple[tuple[tuple[str, str], ...], ...]
    judged: str
    """Its comparisons, in words."""
    rendered: tuple[str, ...]
    """Each conversation as the model sees it; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Everything that was found in one dataset."""

    name: str
    split: str
    format: str
    why: str
    """What the format was recognised by."""
    rows_read: int
    kept: int
    dropped: Mapping[str, int]
    """Cause -> rows."""
    examples: Mapping[str, tuple[str, ...]]
    left_out: str
    """In words, how many replies of kept rows are left out, and why; empty if none is."""
    used: int
    """Kept rows within the limit; everything below describes these."""
    prompts: int
    """Different prompts."""
    roots: int
    """Conversations: rows that belong to one side of a split."""
    root_rule: str
    largest_root: int
    """Prompts of the largest."""
    num_replies: Mapping[int, int]
    """K -> rows."""
    turns: Mapping[int, int]
    """Turns of the prompt without its system turns -> rows."""
    system: Mapping[str, int]
    """`none`, `with text` or `empty` -> rows."""
    lengths: Lengths
    labels: LabelBalance
    baselines: Baselines
    strengths: Spread | None
    """None where no comparison has one."""
    judges: Judges
    tongues: Tongues
    samples: tuple[Sample, ...]


def spread(values_N: FloatArray, *, whole: bool = True) -> Spread:
    """Return mean, quantiles and histogram of finite values [N], whole numbers or others."""
    if not values_N.size:
        empty = Histogram(edges=(), counts=(), beyond=0)
        return Spread(count=0, mean=np.nan, lowest=np.nan, quantiles={}, highest=np.nan, histogram=empty)
    found = np.quantile(values_N, SHARES, method="inverted_cdf")
    return Spread(
        count=values_N.size,
        mean=float(values_N.mean()),
        lowest=float(values_N.min()),
        quantiles={f"{share:.0%}": float(value) for share, value in zip(SHARES, found, strict=True)},
        highest=float(values_N.max()),
        histogram=histogram(values_N, whole=whole),
    )


def histogram(values_N: FloatArray, *, whole: bool) -> Histogram:
    """Return bars of equal width over the values or, where these have long tails, over the middle 98 % of them."""
    low, high = float(values_N.min()), float(values_N.max())
    tail = 1 - MOST_SHOWN
    near, far = (float(end) for end in np.quantile(values_N, [tail, MOST_SHOWN], method="inverted_cdf"))
    if high - low > 2 * (far - near) > 0:
        low, high = min(low, near) if low >= 0 else near, far
    if whole:
        # Every bar spans the same count of whole numbers, else some bars would be half empty.
        width = max(1, int(np.ceil((high - low + 1) / NUM_BARS)))
        edges = low - 0.5 + width * np.arange(int((high - low) // width) + 2)
    else:
        edges = np.linspace(low, high, NUM_BARS + 1) if high > low else np.array([low - 0.5, high + 0.5])
    counts = np.histogram(values_N, edges)[0]
    return Histogram(
        edges=tuple(edges.tolist()), counts=tuple(counts.tolist()), beyond=int(values_N.size - counts.sum())
    )
