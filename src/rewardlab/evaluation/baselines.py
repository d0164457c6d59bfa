"""Baselines: models that see only how long a reply is, or only which words it has.

They are linear Bradley–Terry models fitted on the same preferences, with the penalty chosen by cross-validation over
conversations (see `rewardlab.data.splits`). A reward model that is not clearly better than they are may have learned no
more than they did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from rewardlab.analysis.linear import PENALTIES, Matrix, compare, cross_validate, fit
from rewardlab.analysis.text_features import (
    WORD_PENALTIES,
    length_features,
    scale_of,
    scaled,
    vocabulary_of,
    word_features,
)
from rewardlab.core.errors import DataError
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Groups, num_replies, roots_of
from rewardlab.data.splits import Numbers
from rewardlab.evaluation.evaluate import EvalResult, judge
from rewardlab.score import score_rows

logger = logging.getLogger("rewardlab")
MAX_GROUPS = 10_000
"""Baselines are fitted on at most this many preferences; more would cost minutes and change little."""
Featurize = Callable[[Sequence[TokenGroup]], Matrix]


def fit_baselines(
    train: Sequence[TokenGroup], judged: Mapping[str, Sequence[TokenGroup]], *, seed: int
) -> dict[str, dict[str, EvalResult]]:
    """Return baseline -> name of a judged set -> its evaluation.

    Empty if the training data have fewer than two prompts; `judged` sets without a preference are left out.
    """
    if len(train) > MAX_GROUPS:
        logger.info("baselines: fitted on %d of the %d training preferences", MAX_GROUPS, len(train))
        # The 4 makes this draw independent of others with the same seed.
        chosen = np.sort(np.random.default_rng((seed, 4)).permutation(len(train))[:MAX_GROUPS])
        train = train.take(chosen) if isinstance(train, Groups) else [train[index] for index in chosen]
    if len({group.prompt_key for group in train if group.comparisons}) < 2:
        logger.warning("no baselines: they need training preferences on at least two prompts")
        return {}
    roots_G = roots_of(train)[0]
    # Groups are built from storage at every access and are needed several times below, so keep them.
    train = list(train)
    evaluations = {}
    for name, (featurize, penalties) in _kinds(train).items():
        try:
            evaluations[name] = _evaluate(train, roots_G, judged, featurize, penalties, seed)
        # Baselines are only shown beside the run's own results, so their failure must not end it.
        except DataError as error:
            logger.warning("no baseline %r: %s", name, error)
    return evaluations


def baseline_features(
    groups: Sequence[TokenGroup], others: Sequence[TokenGroup]
) -> dict[str, tuple[Matrix, Matrix, Sequence[float]]]:
    """Return baseline (`length_only`, `bag_of_words`) -> (features of all replies of `groups`, those of `others`,
    candidate penalties), scaled as the baselines are fitted. Words are those of `groups`, whatever their labels.
    """
    groups, others = list(groups), list(others)
    kinds = _kinds(groups)
    found: dict[str, tuple[Matrix, Matrix, Sequence[float]]] = {}
    for name, (featurize, penalties) in kinds.items():
        features = featurize(groups)
        scale = scale_of(compare(groups, features).differences)
        apart = scaled(featurize(others), scale) if others else features[:0]
        found[name.replace(" ", "_")] = (scaled(features, scale), apart, penalties)
    return found


def _kinds(groups: Sequence[TokenGroup]) -> dict[str, tuple[Featurize, Sequence[float]]]:
    """Return baseline -> (function that computes its features, candidate penalties). Words are those of `groups`."""
    vocabulary = vocabulary_of(map(_words, _all_replies(groups)))

    def words(of: Sequence[TokenGroup]) -> Matrix:
        return word_features(map(_words, _all_replies(of)), vocabulary)

    return {"length only": (_lengths, PENALTIES), "bag of words": (words, WORD_PENALTIES)}


def _evaluate(
    train: Sequence[TokenGroup],
    roots_G: Numbers,
    judged: Mapping[str, Sequence[TokenGroup]],
    featurize: Featurize,
    penalties: Sequence[float],
    seed: int,
) -> dict[str, EvalResult]:
    features = featurize(train)
    scale = scale_of(compare(train, features).differences)
    data = compare(train, scaled(features, scale), roots_G)
    chosen = cross_validate(data, penalties=penalties, seed=seed)
    theta = fit(data, data.weights[:, None], np.array([chosen.penalty]))[:, 0]
    results = {}
    for name, groups in judged.items():
        if groups:
            scores = np.asarray(scaled(featurize(groups), scale) @ theta, dtype=np.float64)
            sizes = np.cumsum(num_replies(groups))[:-1]
            results[name] = judge(score_rows(groups, np.split(scores, sizes)), beta=1.0)
    return results


def _lengths(groups: Sequence[TokenGroup]) -> Matrix:
    """Return the features of each reply's number of tokens."""
    return length_features(np.array([len(reply) for reply in _all_replies(groups)], dtype=np.float64))


def _all_replies(groups: Sequence[TokenGroup]) -> Iterator[list[int]]:
    """Yield the tokens of each reply, with those that close its turn."""
    for group in groups:
        for reply in range(group.num_replies):
            yield group.conversation(reply)[group.prompt_tokens[reply] :].tolist()


def _words(reply: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the tokens of a reply and its pairs of neighbouring tokens, each once."""
    return {(token,) for token in reply} | set(pairwise(reply))
