"""Tests whether gold scores belong to the texts beside them, where no other file can tell: do the texts predict them?

A linear model of the words and lengths of replies is fitted to gold's order of one pair a row, on half of the prompts,
and judged on the other half. Where scores lie one row off, the texts say nothing about them in their place, and
something one row further. Swapped replies cannot be seen in this way: a model fitted to a reversed order is as good.

Legend: L rows, R replies, N pairs, A places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final

import numpy as np
from scipy.sparse import csr_matrix, hstack

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.linear import Comparisons, Matrix, cross_validate, fit
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.paired import change_of_shares, significance_of
from rewardlab.analysis.text_features import scale_of, scaled, vocabulary_of, word_features
from rewardlab.core.types import Estimate
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.findings import Finding, Status, further, is_above, is_below, percent, points

SHIFTS: Final = (-1, 1)
MOST_ROWS: Final = 2_000
"""Most rows that are looked at, from the first on; more would cost minutes."""
MOST_WORDS: Final = 2_000
PENALTIES: Final = (1e-3, 1e-2, 1e-1)
FEWEST: Final = 50
"""Rows with two scored replies below which nothing is fitted."""
LEVEL: Final = 0.01
"""Chance that any other place is wrongly named."""
NOTHING: Final = 0.56
"""Share of pairs below which the texts say next to nothing."""
NAME: Final = "texts and gold scores"


def text_finding(rows: Sequence[GoldRow], *, seed: int = 0) -> Finding | None:
    """Return what the texts say about the gold scores beside them and one row off; None without gold scores."""
    if not any(row.gold is not None for row in rows):
        return None
    rows = rows[:MOST_ROWS]
    features, starts = _features(rows)
    prompts = sorted({row.key for row in rows})
    chosen = np.random.default_rng((seed, 11)).permutation(len(prompts))[: len(prompts) // 2]
    half = {prompts[place] for place in chosen.tolist()}
    outcomes = {shift: _outcomes(rows, features, _pairs(rows, starts, shift), half, seed) for shift in (0, *SHIFTS)}
    here = outcomes[0]
    if here is None:
        few = f"Fewer than {FEWEST} rows have two replies with different gold scores: too few to fit anything."
        return Finding(name=NAME, status="undecided", evidence=few)
    match = stats.mean_share(*here)
    moved = _moved(here, {shift: found for shift, found in outcomes.items() if shift and found is not None})
    told = f"A linear model of words and lengths orders {percent(match)} of the pairs of unseen prompts as gold does"
    if moved is not None:
        shift, other, change, p = moved
        return Finding(
            name=NAME,
            status="fail",
            evidence=f"{told} with the scores in their place, and {percent(other)} with those {further(shift)} "
            f"(difference {points(change)}, p {p:.2g} with all places tried accounted for).",
            advice="The scores are shifted by a row against the texts: a row is missing or double. Label again.",
        )
    if is_above(match, 0.5):
        return Finding(name=NAME, status="pass", evidence=f"{told}, no better with those of a neighbouring row.")
    status: Status = "warn" if is_below(match, NOTHING) else "undecided"
    return Finding(
        name=NAME,
        status=status,
        evidence=f"{told}: this is not shown to be better than chance, in this place or one row off.",
        advice="The scores may be of another set, or gold may go by what words do not show. Label twenty rows again "
        "and compare.",
    )


Outcomes = tuple[FloatArray, list[str]]


def _moved(here: Outcomes, others: dict[int, Outcomes]) -> tuple[int, Estimate, Estimate, float] | None:
    """Return the place that is shown to be better than that of the file: its shift, match, gain and p-value."""
    found = []
    for shift, (there_N, keys) in others.items():
        here_P, there_P, names = _by_prompt(here, (there_N, keys))
        found.append((shift, there_N, keys, there_P - here_P, names))
    adjusted = holm([significance_of(change_P, names).p for *_, change_P, names in found])
    better = [
        (float(change_P.mean()), shift, stats.mean_share(there_N, keys), change_of_shares(change_P, names), p)
        for (shift, there_N, keys, change_P, names), p in zip(found, adjusted, strict=True)
        if p <= LEVEL and change_P.mean() > 0
    ]
    return max(better, key=lambda one: one[0])[1:] if better else None


def _by_prompt(one: Outcomes, other: Outcomes) -> tuple[FloatArray, FloatArray, list[str]]:
    """Return the mean outcome of each prompt that both have, [P] twice, and its key."""
    means = []
    for values_N, keys in (one, other):
        names, number_N = np.unique(np.asarray(keys, dtype=np.str_), return_inverse=True)
        means.append(dict(zip(names.tolist(), np.bincount(number_N, values_N) / np.bincount(number_N), strict=True)))
    shared = [key for key in means[0] if key in means[1]]
    first, second = (np.array([own[key] for key in shared]) for own in means)
    return first, second, shared


def _features(rows: Sequence[GoldRow]) -> tuple[Matrix, list[int]]:
    """Return [R, F] features of all replies in order, and where those of each row begin."""
    texts = [text or "" for row in rows for text in row.responses]
    bags = [set(re.findall(r"\w+", text.casefold())) for text in texts]
    words = word_features(bags, vocabulary_of(bags, most=MOST_WORDS))
    sizes = np.array([[len(text), text.count("\n"), len(bag)] for text, bag in zip(texts, bags, strict=True)])
    logs = np.log1p(sizes)
    spread = logs.std(0)
    dense = np.where(spread > 0, (logs - logs.mean(0)) / np.where(spread > 0, spread, 1.0), 0.0)
    starts = np.cumsum([0, *(len(row.responses) for row in rows)])[:-1]
    return csr_matrix(hstack([words, csr_matrix(dense)])), starts.tolist()


def _pairs(rows: Sequence[GoldRow], starts: Sequence[int], shift: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, winner, loser) of one pair a row: its best and its worst reply by the scores `shift` rows further."""
    for number, row in enumerate(rows):
        place = number + shift
        gold = rows[place].gold if 0 <= place < len(rows) else None
        if gold is None or len(gold) != len(row.responses):
            continue
        known = [k for k, text in enumerate(row.responses) if text is not None and gold[k] is not None]
        scores = [gold[k] for k in known]
        if len(known) < 2:
            continue
        values = np.array(scores, dtype=np.float64)
        best, worst = known[int(values.argmax())], known[int(values.argmin())]
        if values.max() > values.min() and row.responses[best] != row.responses[worst]:
            yield number, starts[number] + best, starts[number] + worst


def _outcomes(
    rows: Sequence[GoldRow], features: Matrix, paired: Iterable[tuple[int, int, int]], half: Set[str], seed: int
) -> Outcomes | None:
    """Return whether each pair outside `half` of the prompts is ordered right by the model of that half.

    None for fewer than `FEWEST` prompts. The prompts are divided once, and the halves do not change roles: then the
    outcomes would depend on each other through the models, and a test would find differences where there are none.
    """
    pairs = list(paired)
    keys = [rows[number].key for number, *_ in pairs]
    names, prompts = np.unique(np.asarray(keys, dtype=np.str_), return_inverse=True)
    if len(names) < FEWEST:
        return None
    best, worst = (np.array([pair[side] for pair in pairs]) for side in (1, 2))
    differences = features[best] - features[worst]
    differences = scaled(differences, scale_of(differences))
    fitted_N = np.array([key in half for key in keys])
    data = _comparisons(differences[fitted_N], prompts[fitted_N])
    penalty = cross_validate(data, penalties=PENALTIES, seed=seed).penalty
    theta = fit(data, data.weights[:, None], np.array([penalty]))[:, 0]
    held = [key for key, was_fitted in zip(keys, fitted_N.tolist(), strict=True) if not was_fitted]
    return np.heaviside(np.asarray(differences[~fitted_N] @ theta), 0.5), held


def _comparisons(differences: Matrix, prompts: np.ndarray) -> Comparisons:
    """Return differences, winner minus loser, as the data of a fit."""
    names, numbers = np.unique(prompts, return_inverse=True)
    count = len(numbers)
    return Comparisons(
        differences=differences,
        labels=np.ones(count),
        margins=np.zeros(count),
        weights=np.ones(count),
        prompts=numbers.astype(np.intp),
        prompt_keys=tuple(map(str, names.tolist())),
        roots=np.arange(len(names), dtype=np.intp),
    )
