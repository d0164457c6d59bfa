"""Linear Bradley–Terry models on fixed features: convex, so each has one solution, and fitted in seconds.

Many models are fitted at once, one in each column: the folds and penalties of a cross-validation, bootstrap replicates,
the sizes of a learning curve. They differ only in the weights of the comparisons and in the penalty, so a step of
L-BFGS for all of them is two matrix products.

Legend: C comparisons, F features, B models (columns), P prompts, Q roots: the prompts of one belong together, as those
of a conversation do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_expit

from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, Estimate

FloatArray = npt.NDArray[np.float64]
Matrix = Any
"""A dense array or a scipy.sparse matrix."""

TOLERANCE = 1e-9
"""Fitting stops once the objective is provably within this of its minimum, in nats per comparison."""
ROUGH = 1e-4
"""Tolerance that suffices to compare penalties."""
MAX_ITERATIONS = 5000
"""Iterations of L-BFGS after which a fit fails."""
MEMORY = 8
"""Pairs of steps and gradient changes that L-BFGS keeps."""
SUFFICIENT = 1e-4
"""Share of the predicted decrease that a step must reach (Armijo's rule)."""
PENALTIES = tuple(float(penalty) for penalty in np.geomspace(1e-3, 1e2, 11))
"""Candidates of the cross-validation, suited to features whose differences have a mean square of 1."""
CROSS_VALIDATED = math.sqrt(2)
"""How many times wider the interval of a cross-validated accuracy has to be near ½."""
MAX_ENTRIES = 20_000_000
"""Most comparisons × columns that are computed at a time, to limit memory."""
MAX_COEFFICIENTS = 4_000_000
"""Most features × columns that are fitted at a time: L-BFGS keeps 16 arrays of this size, half a GB. Ten thousand
replies of some hundred words have hundreds of thousands of words and pairs of words."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """What was judged of C comparisons, whatever stands for their replies."""

    labels: FloatArray
    """[C] probability that the first is preferred."""
    margins: FloatArray
    """[C] additive margin in logits in favour of the preferred reply, at least 0."""
    weights: FloatArray
    """[C] at least 0."""
    prompts: npt.NDArray[np.intp]
    """[C] index of the prompt, the unit that is counted."""
    prompt_keys: tuple[str, ...]
    """[P]."""
    roots: npt.NDArray[np.intp]
    """[P] index of the root, the unit that is drawn and held out. Roots are numbered in the order of their first
    prompts."""

    @property
    def num_roots(self) -> int:
        """Q."""
        return int(self.roots.max()) + 1

    @property
    def roots_C(self) -> npt.NDArray[np.intp]:
        """[C] index of the root of each comparison."""
        return self.roots[self.prompts]


@dataclass(frozen=True, kw_only=True)
class Comparisons(Labelled):
    """The data of linear models: differences of features with their labels, weights and prompts."""

    differences: Matrix
    """[C, F] features of the first reply minus those of the second."""


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """The result of a cross-validation over roots."""

    penalty: float
    """The candidate with the smallest held-out loss."""
    losses: dict[float, float]
    """Candidate -> mean held-out negative log-likelihood."""
    theta_FK: FloatArray
    """[F, K] coefficients with the chosen penalty. Column k is fitted without fold k."""
    fold_P: npt.NDArray[np.intp]
    """[P] the fold of each prompt, an index of a column."""

    @property
    def num_folds(self) -> int:
        """K."""
        return int(self.theta_FK.shape[1])

    @property
    def at_edge(self) -> bool:
        """Whether the smallest or largest candidate won, so that a better one may lie outside."""
        return self.penalty in (min(self.losses), max(self.losses))


@runtime_checkable
class Judged(Protocol):
    """Replies with judgements about them, such as core.types.TokenGroup."""

    @property
    def prompt_key(self) -> str:
        """Key of the prompt."""

    @property
    def num_replies(self) -> int:
        """K."""

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """The judgements."""


@dataclass(frozen=True, kw_only=True)
class Judgements(Labelled):
    """What was judged of groups of replies, with the numbers of the replies: features make `Comparisons` of it.

    Groups that are built from storage at every access cost more than the fits of a layer, so that models of several
    features share one of these.
    """

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    """[C] the two replies of each comparison, among the replies of all groups in order."""

    @classmethod
    def of(cls, groups: Sequence[Judged], roots_G: npt.NDArray[np.int64] | None = None) -> Judgements:
        """Return what was judged of the groups; `roots_G` is that of `compare`."""
        first, second, judged, keys = [], [], [], []
        root_of: dict[str, int] = {}
        offset = 0
        for index, group in enumerate(groups):
            for comparison in group.comparisons:
                first.append(offset + comparison.first)
                second.append(offset + comparison.second)
                judged.append((comparison.label, comparison.margin, comparison.weight))
                keys.append(group.prompt_key)
                root_of.setdefault(group.prompt_key, index if roots_G is None else int(roots_G[index]))
            offset += group.num_replies
        number = {key: index for index, key in enumerate(root_of)}
        root_number = {root: index for index, root in enumerate(dict.fromkeys(root_of.values()))}
        labels, margins, weights = np.array(judged, dtype=np.float64).reshape(-1, 3).T
        return cls(
            first=np.array(first, dtype=np.int64),
            second=np.array(second, dtype=np.int64),
            labels=labels,
            margins=margins,
            weights=weights,
            prompts=np.array([number[key] for key in keys], dtype=np.intp),
            prompt_keys=tuple(number),
            roots=np.array([root_number[root] for root in root_of.values()], dtype=np.intp),
        )

    def by(self, features_RF: Matrix) -> Comparisons:
        """Return the comparisons by features [R, F] of all replies in order."""
        differences = features_RF[self.first]
        differences -= features_RF[self.second]  # in place where that can be: no arrays are larger
        return Comparisons(
            differences=differences, **{field.name: getattr(self, field.name) for field in fields(Labelled)}
        )


def compare(groups: Sequence[Judged], features_RF: Matrix, roots_G: npt.NDArray[np.int64] | None = None) -> Comparisons:
    """Return the comparisons of the groups, from features [R, F] of all their replies in order.

    `roots_G` has the same number for groups that belong together, among them all groups of one prompt. Without it,
    each prompt is a root of its own.
    """
    return Judgements.of(groups, roots_G).by(features_RF)


def fit(
    data: Comparisons,
    weights_CB: FloatArray,
    penalties_B: FloatArray,
    *,
    start_FB: FloatArray | None = None,
    tolerance: float = TOLERANCE,
) -> FloatArray:
    """Return [F, B] coefficients that minimise Σ w·ℓ / Σ w + penalty/2 · ‖θ‖², each column with its weights and
    penalty.

    ℓ is the Bradley–Terry loss with margin (docs/design/formulas.md) at β = 1. The problem is strictly convex for
    penalties above 0. Columns are independent of each other, so fitting them together changes only rounding.

    Raises DataError if all weights of a column are 0, or if it does not converge.
    """
    if not (weights_CB.sum(0) > 0).all():
        raise DataError("no comparison has any weight, so there is nothing to fit. Look at the weights of the data.")
    num_columns = weights_CB.shape[1]
    theta_FB = np.zeros((data.differences.shape[1], num_columns))
    block = max(1, min(MAX_ENTRIES // max(len(data.labels), 1), MAX_COEFFICIENTS // max(len(theta_FB), 1)))
    for first in range(0, num_columns, block):
        part = slice(first, first + block)
        start = theta_FB[:, part] if start_FB is None else start_FB[:, part]
        theta_FB[:, part] = _lbfgs(_Objective(data, weights_CB[:, part], penalties_B[part]), start.copy(), tolerance)
    return theta_FB


class _Objective:
    """Value and gradient for a block of columns, and the diagonal of the Hessian at θ = 0, an upper bound
    everywhere."""

    def __init__(self, data: Comparisons, weights_CB: FloatArray, penalties_B: FloatArray) -> None:
        # Comparisons are turned so that every label is at least ½: the margin favours the preferred reply. Not the
        # features are turned, which would take as much memory again, but what is computed from them: to the last bit
        # it is the same.
        self.differences = data.differences
        self.sign_C1 = np.where(data.labels >= 0.5, 1.0, -1.0)[:, None]
        self.label_C1 = np.maximum(data.labels, 1 - data.labels)[:, None]
        self.margin_C1 = np.where(data.labels == 0.5, 0.0, data.margins)[:, None]
        self.share_CB = weights_CB / weights_CB.sum(0)
        self.penalty_B = penalties_B
        squares = self.differences.multiply(self.differences) if _is_sparse(self.differences) else None
        mean_square_FB = (squares if squares is not None else self.differences**2).T @ self.share_CB
        self.curvature_FB = 0.25 * np.asarray(mean_square_FB) + penalties_B

    def __call__(self, theta_FB: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return ([B] values, [F, B] gradients)."""
        logits_CB = self.sign_C1 * (self.differences @ theta_FB) - self.margin_C1
        nll_CB = -(self.label_C1 * log_expit(logits_CB) + (1 - self.label_C1) * log_expit(-logits_CB))
        value_B = (self.share_CB * nll_CB).sum(0) + 0.5 * self.penalty_B * (theta_FB**2).sum(0)
        slope_CB = self.share_CB * (expit(logits_CB) - self.label_C1)
        return value_B, np.asarray(self.differences.T @ (self.sign_C1 * slope_CB)) + self.penalty_B * theta_FB

    def keep(self, columns: npt.NDArray[np.bool_]) -> None:
        """Drop all other columns."""
        self.share_CB = self.share_CB[:, columns]
        self.penalty_B = self.penalty_B[columns]
        self.curvature_FB = self.curvature_FB[:, columns]


def _lbfgs(objective: _Objective, theta_FB: FloatArray, tolerance: float) -> FloatArray:
    """Minimise every column by L-BFGS (Nocedal & Wright, Algorithms 7.4 and 7.5) with backtracking.

    Columns that have converged are dropped from the block, so that the last ones do not cost as much as all of them.
    """
    result_FB = theta_FB.copy()
    remaining = np.arange(theta_FB.shape[1])
    value_B, gradient_FB = objective(theta_FB)
    steps: list[tuple[FloatArray, FloatArray]] = []
    for _ in range(MAX_ITERATIONS):
        # The penalty makes the objective strongly convex: its value exceeds the minimum by at most ‖gradient‖² / (2 ·
        # penalty).
        done_B = (gradient_FB**2).sum(0) / (2 * objective.penalty_B) <= tolerance
        if done_B.any():
            result_FB[:, remaining[done_B]] = theta_FB[:, done_B]
            going = ~done_B
            if not going.any():
                return result_FB
            objective.keep(going)
            remaining, theta_FB, value_B, gradient_FB = (
                remaining[going], theta_FB[:, going], value_B[going], gradient_FB[:, going]
            )  # fmt: skip
            steps = [(step[:, going], change[:, going]) for step, change in steps]
        direction_FB = _direction(gradient_FB, steps, objective.curvature_FB)
        moved_FB, new_value_B, new_gradient_FB = _search(objective, theta_FB, value_B, gradient_FB, direction_FB)
        steps = [*steps[-(MEMORY - 1) :], (moved_FB - theta_FB, new_gradient_FB - gradient_FB)]
        theta_FB, value_B, gradient_FB = moved_FB, new_value_B, new_gradient_FB
    raise DataError(
        f"a linear model did not converge in {MAX_ITERATIONS} iterations; its features may lie too many orders of "
        f"magnitude apart."
    )


def _direction(
    gradient_FB: FloatArray, steps: Sequence[tuple[FloatArray, FloatArray]], curvature_FB: FloatArray
) -> FloatArray:
    """Return the direction by the two-loop recursion, each column with its own history.

    Steps without positive curvature, which only rounding can produce here, are skipped.
    """
    rest_FB = gradient_FB.copy()
    used = []
    for step_FB, change_FB in reversed(steps):
        product_B = (step_FB * change_FB).sum(0)
        inverse_B = np.divide(1.0, product_B, out=np.zeros_like(product_B), where=product_B > 0)
        share_B = inverse_B * (step_FB * rest_FB).sum(0)
        rest_FB -= share_B * change_FB
        used.append((step_FB, change_FB, inverse_B, share_B))
    rest_FB /= curvature_FB
    for step_FB, change_FB, inverse_B, share_B in reversed(used):
        rest_FB += (share_B - inverse_B * (change_FB * rest_FB).sum(0)) * step_FB
    return -rest_FB


def _search(
    objective: _Objective,
    theta_FB: FloatArray,
    value_B: FloatArray,
    gradient_FB: FloatArray,
    direction_FB: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the (point, value, gradient) reached, halving the steps that do not decrease their column enough."""
    slope_B = (gradient_FB * direction_FB).sum(0)
    length_B = np.ones_like(value_B)
    # Near the minimum the decrease is smaller than rounding errors, and no step would ever be accepted.
    rounding_B = 1e-14 * np.maximum(1.0, np.abs(value_B))
    for _ in range(60):
        moved_FB = theta_FB + length_B * direction_FB
        new_value_B, new_gradient_FB = objective(moved_FB)
        short_B = new_value_B > value_B + SUFFICIENT * length_B * slope_B + rounding_B
        if not short_B.any():
            break
        length_B[short_B] *= 0.5
    return moved_FB, new_value_B, new_gradient_FB


def cross_validate(
    data: Comparisons, *, penalties: Sequence[float] = PENALTIES, num_folds: int = 5, seed: int = 0
) -> CrossValidation:
    """Choose the penalty by the loss on held-out prompts. Every prompt is held out once, with all of its root.

    With fewer roots than folds, each root is a fold.

    Raises DataError for fewer than two roots.
    """
    fold_P = fold_of_prompts(data.roots, num_folds, seed)
    fold_C, folds = fold_P[data.prompts], range(fold_P.max() + 1)
    train_CK = data.weights[:, None] * (fold_C[:, None] != np.arange(len(folds)))
    theta_FKG = fit(
        data,
        np.repeat(train_CK, len(penalties), axis=1),
        np.tile(np.asarray(penalties), len(folds)),
        tolerance=ROUGH,
    ).reshape(-1, len(folds), len(penalties))
    logits_CG = np.empty((len(data.labels), len(penalties)))
    for fold in folds:
        logits_CG[fold_C == fold] = data.differences[fold_C == fold] @ theta_FKG[:, fold]

    def held_out_loss(logits_C: FloatArray) -> float:
        return float((data.weights * nll_of(data.labels, logits_C)).sum() / data.weights.sum())

    losses = {penalty: held_out_loss(logits_CG[:, column]) for column, penalty in enumerate(penalties)}
    # Of penalties with equal losses the largest is taken.
    best = min(losses, key=lambda penalty: (losses[penalty], -penalty))
    # The candidates were compared by rough fits; the chosen one is fitted exactly, and its loss computed again.
    start_FK = theta_FKG[:, :, list(penalties).index(best)]
    theta_FK = fit(data, train_CK, np.full(len(folds), best), start_FB=start_FK)
    found = CrossValidation(penalty=best, losses=losses, theta_FK=theta_FK, fold_P=fold_P)
    losses[best] = held_out_loss(held_out_logits(data, found))
    return found


def held_out_logits(data: Comparisons, found: CrossValidation) -> FloatArray:
    """Return [C] the logit of each comparison by the model that was fitted without its root."""
    fold_C = found.fold_P[data.prompts]
    logits_C = np.empty(len(data.labels))
    for fold in range(found.num_folds):
        logits_C[fold_C == fold] = data.differences[fold_C == fold] @ found.theta_FK[:, fold]
    return logits_C


def may_be_chance(accuracy: Estimate) -> bool:
    """Return whether a cross-validated accuracy may be ½ though its interval leaves ½ out.

    The interval takes comparisons as independent. But each helps to fit the models that rank others, and is ranked by
    models that these helped to fit: where labels say nothing, two of them are right or wrong together, and the variance
    is up to twice as large (docs/design/intervals-open.md).
    """
    reach = accuracy.value - accuracy.low if accuracy.value > 0.5 else accuracy.high - accuracy.value
    return reach < abs(accuracy.value - 0.5) <= CROSS_VALIDATED * reach


def nll_of(labels: FloatArray, logits: FloatArray) -> FloatArray:
    """Return the negative log-likelihood of the labels, without margins, elementwise."""
    losses: FloatArray = -(labels * log_expit(logits) + (1 - labels) * log_expit(-logits))
    return losses


def fold_of_prompts(roots_P: npt.NDArray[np.intp], num_folds: int, seed: int) -> npt.NDArray[np.intp]:
    """Return [P] the fold of each prompt, from 0. Prompts of one root have the same fold.

    Each root, the largest first and those of equal size in random order, goes to the fold with the fewest prompts so
    far. Folds then have nearly equal numbers of prompts, unless a single root is larger than that.

    Raises DataError for fewer than two roots.
    """
    sizes_Q = np.bincount(roots_P)
    if len(sizes_Q) < 2:
        raise DataError(
            "cross-validation needs at least two prompts that do not belong to one conversation. Name more data."
        )
    order = np.random.default_rng((seed, 1)).permutation(len(sizes_Q))
    order = order[np.argsort(-sizes_Q[order], kind="stable")]
    folds_Q = np.empty(len(sizes_Q), dtype=np.intp)
    filled = [(0, fold) for fold in range(min(num_folds, len(sizes_Q)))]
    for root in order.tolist():
        count, folds_Q[root] = filled[0]
        heapq.heapreplace(filled, (count + int(sizes_Q[root]), int(folds_Q[root])))
    return folds_Q[roots_P]


def bootstrap_weights(data: Comparisons, *, num_draws: int, seed: int) -> FloatArray:
    """Return [C, B] weights that make each column one bootstrap sample of the roots, with all of their prompts.

    A sample without any weight, possible with very few roots, is replaced by the whole data.
    """
    generator = np.random.default_rng((seed, 2))
    counts_QB = generator.multinomial(data.num_roots, np.full(data.num_roots, 1 / data.num_roots), size=num_draws).T
    weights_CB = data.weights[:, None] * counts_QB[data.roots_C]
    return np.where(weights_CB.sum(0) > 0, weights_CB, data.weights[:, None])


def nested_subsets(num_roots: int, shares: Sequence[float], *, seed: int) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield for each share [Q] which roots belong to it. Smaller subsets lie within larger ones."""
    order = np.random.default_rng((seed, 3)).permutation(num_roots)
    rank = np.empty(num_roots, dtype=np.intp)
    rank[order] = np.arange(num_roots)
    for share in shares:
        yield rank < max(1, round(share * num_roots))


def _is_sparse(matrix: Matrix) -> bool:
    return not isinstance(matrix, np.ndarray)
