"""What the rows themselves show: missing replies and scores, cuts, identical replies, ties, narrow gold scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.findings import Finding, Status, is_above, percent

MOST_CUT: Final = 0.1
"""Share of replies that ended at the token limit above which most of what gold sees may be unfinished."""
MOST_TIES: Final = 0.2
"""Share of pairs of different replies with one gold score above which gold is too coarse; scores in bfloat16 have
4.3 %."""
MOST_AT_AN_END: Final = 0.05
"""Share of scores that equal the smallest or the largest one above which they count as clipped."""
NOISE: Final = 0.1
"""Difference between the gold scores of identical replies, in standard deviations of gold, that padding and half
precision do not explain."""
FEWEST: Final = 20


def row_findings(rows: Sequence[GoldRow]) -> Iterator[Finding]:
    """Yield the findings on rows by themselves, and on the gold scores of labelled ones."""
    if not rows:
        return
    yield _missing(rows)
    if any(row.samples for row in rows):
        yield _cut(rows)
    yield _repeated(rows)
    yield _identical(rows)
    if any(row.gold is not None for row in rows):
        yield from _gold(rows)


def _missing(rows: Sequence[GoldRow]) -> Finding:
    replies = sum(len(row.responses) for row in rows)
    no_text = sum(text is None for row in rows for text in row.responses)
    empty = sum(text is not None and not text.strip() for row in rows for text in row.responses)
    labelled = [row for row in rows if row.gold is not None]
    no_score = sum(
        score is None and text is not None
        for row in labelled
        for text, score in zip(row.responses, row.gold or (), strict=True)
    )
    counts = {"not sampled": no_text, "empty": empty, "without a gold score": no_score}
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return Finding(
        name="missing",
        status="warn" if told else "pass",
        evidence=f"Of {number_of(replies, 'reply')} {told or 'none is missing, and all are there with their scores'}.",
        advice="Run `gold sample` and `gold label` again: they do only what is missing." if no_text or no_score else "",
    )


def _cut(rows: Sequence[GoldRow]) -> Finding:
    cut, keys = [], []
    for row in rows:
        for text, is_cut in zip(row.responses, row.is_cut, strict=True):
            if text is not None:
                cut.append(float(is_cut))
                keys.append(row.key)
    share = stats.mean_share(cut, keys)
    status: Status = "warn" if is_above(share, MOST_CUT) else "pass"
    return Finding(
        name="cut at the token limit",
        status=status,
        evidence=f"{percent(share)} of the replies ({int(sum(cut)):,}).",
        advice="Sample with more --max-tokens, or leave them out with `gold build --drop-cut`."
        if status == "warn"
        else "",
    )


def _repeated(rows: Sequence[GoldRow]) -> Finding:
    prompts = Counter(row.key for row in rows)
    whole = Counter((row.key, row.responses) for row in rows)
    again, twice = sum(prompts.values()) - len(prompts), sum(whole.values()) - len(whole)
    status: Status = "warn" if twice else "pass"
    return Finding(
        name="rows that come again",
        status=status,
        evidence=f"{again:,} {plural(again, 'row has', 'rows have')} a prompt of an earlier row, {twice:,} "
        f"of them with the same replies.",
        advice="Equal rows count twice in everything. Sample each prompt once." if twice else "",
    )


def _identical(rows: Sequence[GoldRow]) -> Finding:
    """Judge identical replies of a row: how many, and whether their gold scores agree, as those of one text must."""
    same, keys, apart = [], [], []
    spread = _spread(rows)
    for row in rows:
        for one, other in combinations(range(len(row.responses)), 2):
            if row.responses[one] is None or row.responses[other] is None:
                continue
            is_same = row.responses[one] == row.responses[other]
            same.append(float(is_same))
            keys.append(row.key)
            if is_same and row.gold is not None:
                first, second = row.gold[one], row.gold[other]
                if first is not None and second is not None:
                    apart.append(abs(first - second) > NOISE * spread)
    if not same:
        return Finding(name="identical replies", status="undecided", evidence="No row has two replies.")
    told = f"{percent(stats.mean_share(same, keys))} of the pairs ({int(sum(same)):,}) are one text twice."
    if sum(apart):
        told += f" {sum(apart):,} of the {len(apart):,} with gold scores have two that differ, by over {NOISE:g} "
        told += "standard deviations."
        return Finding(
            name="identical replies",
            status="fail" if sum(apart) > 1 else "warn",
            evidence=told,
            advice="One text has one score: the scores belong to other replies or rows (or gold is not deterministic). "
            "Label again.",
        )
    return Finding(name="identical replies", status="pass", evidence=told)


def _spread(rows: Sequence[GoldRow]) -> float:
    scores = [score for row in rows for score in row.gold or () if score is not None]
    return float(np.std(scores)) if scores else 0.0


def _gold(rows: Sequence[GoldRow]) -> Iterator[Finding]:
    scores = np.array([score for row in rows for score in row.gold or () if score is not None])
    prompts = [row.key for row in rows for score in row.gold or () if score is not None]
    if not scores.size:
        yield Finding(
            name="gold scores", status="fail", evidence="Not one reply has a gold score.", advice="Run `gold label`."
        )
        return
    tied, keys = [], []
    for row in rows:
        pairs = zip(row.responses, row.gold or (), strict=False)
        known = [(text, score) for text, score in pairs if text is not None and score is not None]
        for (text, score), (other, also) in combinations(known, 2):
            if text != other:
                tied.append(float(score == also))
                keys.append(row.key)
    is_judge = any("judgements" in row.extra for row in rows)
    if tied:
        yield _ties(stats.mean_share(tied, keys), int(sum(tied)), is_judge, scores)
    yield _narrow(scores, prompts, is_judge)


def _ties(share: Estimate, count: int, is_judge: bool, scores: FloatArray) -> Finding:
    told = f"{percent(share)} of the pairs of different replies ({count:,}) have one gold score twice."
    if is_bfloat16(scores):
        told += " All scores have the precision of bfloat16, which makes ties of what lies close together."
    if is_above(share, MOST_TIES) and not is_judge:
        return Finding(
            name="gold ties",
            status="fail",
            evidence=told,
            advice="Gold's scores were rounded or squashed, and pairs are lost. Label again with --precision fp32, and "
            "keep all digits.",
        )
    return Finding(name="gold ties", status="pass", evidence=told)


def is_bfloat16(scores: FloatArray) -> bool:
    """Return whether every score is one that bfloat16 can hold: a float32 whose lower 16 bits are 0."""
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is not a bfloat16
        as_float = scores.astype(np.float32)
    bits = as_float.view(np.uint32)
    return bool((as_float.astype(np.float64) == scores).all() and not (bits & 0xFFFF).any())


def _narrow(scores: FloatArray, prompts: Sequence[str], is_judge: bool) -> Finding:
    """Judge whether gold's scores look like those of a reward model: not clipped, not squashed, not a few numbers."""
    low, high = float(scores.min()), float(scores.max())
    at_end = max((scores == low, scores == high), key=np.mean).astype(np.float64)
    different = len(np.unique(scores))
    told = (
        f"{scores.size:,} scores from {low:.4g} to {high:.4g}, standard deviation {float(np.std(scores)):.3g}, "
        f"{different:,} different ones."
    )
    name = "range of gold scores"
    if low == high:
        return Finding(name=name, status="fail", evidence=told, advice="Gold gives all replies one score. Label again.")
    enough = scores.size >= FEWEST * 5
    if is_judge:
        return Finding(name=name, status="pass", evidence=f"{told} They are shares of a judge.")
    # All replies to an easy prompt may have the highest score, so they are not independent.
    share = stats.mean_share(at_end, prompts)
    if enough and is_above(share, MOST_AT_AN_END):
        return Finding(
            name=name,
            status="fail",
            evidence=f"{told} {percent(share)} of them are the same extreme one.",
            advice="They were clipped. Label again without the clip.",
        )
    if enough and different < math.sqrt(scores.size):
        return Finding(
            name=name,
            status="fail",
            evidence=f"{told} So few point to rounding.",
            advice="Label again, and keep all digits.",
        )
    if enough and low >= 0 and high <= 1:
        return Finding(
            name=name,
            status="warn",
            evidence=f"{told} All lie between 0 and 1, as after a sigmoid.",
            advice="A sigmoid pulls good replies together. Label with raw scores, unless gold gives no others.",
        )
    return Finding(name=name, status="pass", evidence=told)
