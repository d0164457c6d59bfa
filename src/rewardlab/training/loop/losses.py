"""Rewards -> sums: every loss is a sum over comparisons (or prompts), divided once by the caller.

Legend: R replies, C comparisons, G rankings, K replies of a ranking. d = r_first − r_second, y = label, m = margin.
Formulas and their conventions: docs/design/formulas.md. Everything is computed in the dtype of the rewards, which
is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rewardlab.batch import PackedBatch
from rewardlab.core.types import Sums
from rewardlab.training.settings.config import LossConfig

STATISTICS = ("nll", "correct", "margin", "comparisons", "decided", "score_ties", "label_ties", "non_finite")
"""Order of the vector that `statistics` returns; the fields of core.types.Sums."""


def smooth(label: Tensor, epsilon: float) -> Tensor:
    """y(1 − ε) + (1 − y)ε: 1 becomes 1 − ε. (For the convention y(1 − ε) + ε/2, use ε/2 here.)"""
    return label * (1 - epsilon) + (1 - label) * epsilon


def bradley_terry(
    difference_C: Float[Tensor, " C"],
    label_C: Float[Tensor, " C"],
    margin_C: Float[Tensor, " C"] | float = 0.0,
    *,
    beta: float = 1.0,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " C"]:
    """−[y log σ(βd − m) + (1 − y) log σ(−(βd − m))] for every comparison, oriented so that y ≥ ½.

    Orientation makes the loss of (i, j, y) that of (j, i, 1 − y), margin included; a tie has no margin. Finite for
    any finite difference (Bradley and Terry 1952; soft labels as in cross-entropy).
    """
    label_C = label_C.to(difference_C.dtype)
    flipped_C = label_C < 0.5
    logit_C = beta * torch.where(flipped_C, -difference_C, difference_C)
    target_C = smooth(torch.where(flipped_C, 1 - label_C, label_C), label_smoothing)
    logit_C = logit_C - torch.where(label_C == 0.5, torch.zeros_like(logit_C), torch.ones_like(logit_C) * margin_C)
    return -(target_C * F.logsigmoid(logit_C) + (1 - target_C) * F.logsigmoid(-logit_C))


def margin_regularizer(difference_C: Float[Tensor, " C"], kind: str = "l2") -> Float[Tensor, " C"]:
    """d², or |d| for `l1`: keeps the gap between two replies small."""
    return difference_C.abs() if kind == "l1" else difference_C.square()


def score_regularizer(first_C: Float[Tensor, " C"], second_C: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """r_i² + r_j²: keeps the scores themselves small."""
    return first_C.square() + second_C.square()


def centering(first_C: Float[Tensor, " C"], second_C: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """(r_i + r_j)²: keeps the mean of a pair at zero (Eisenstein et al. 2023)."""
    return (first_C + second_C).square()


def plackett_luce(
    rewards_R: Float[Tensor, " R"], ranking_GK: Int[Tensor, "G K"], *, beta: float = 1.0, label_smoothing: float = 0.0
) -> Float[Tensor, " G"]:
    """−log probability of each ranking: Π over ranks of softmax(βr) among those not yet placed (Plackett 1975).

    `ranking_GK` names replies from best to worst; −1 fills. Smoothing gives ε to the reversed ranking. At K = 2
    both equal Bradley-Terry.
    """
    real_GK = ranking_GK >= 0
    logits_GK = (beta * rewards_R)[ranking_GK.clamp(min=0)]

    def negative_log_likelihood(logits_GK: Tensor, real_GK: Tensor) -> Tensor:
        masked_GK = logits_GK.masked_fill(~real_GK, float("-inf"))
        rest_GK = masked_GK.flip(1).logcumsumexp(1).flip(1)
        return torch.where(real_GK, rest_GK - logits_GK, torch.zeros_like(logits_GK)).sum(1)

    loss_G = negative_log_likelihood(logits_GK, real_GK)
    if label_smoothing == 0:
        return loss_G
    reversed_GK, real_reversed_GK = logits_GK.flip(1), real_GK.flip(1)
    order_GK = torch.argsort(~real_reversed_GK, dim=1, stable=True)
    reversed_G = negative_log_likelihood(reversed_GK.gather(1, order_GK), real_reversed_GK.gather(1, order_GK))
    return (1 - label_smoothing) * loss_G + label_smoothing * reversed_G


def total_weight(batch: PackedBatch) -> float:
    """What the batch adds to Σ w: the comparisons' weights, a ranking counting as its comparisons do together."""
    return float(batch.weight_C.sum())


def preference_loss(rewards_R: Float[Tensor, " R"], batch: PackedBatch, config: LossConfig) -> Float[Tensor, ""]:
    """Σ w·ℓ of a batch, regularisers included; divide by Σ `total_weight` over all batches of the step.

    With Plackett-Luce, a preference that has a ranking contributes its ranking's loss, with the weight of its
    comparisons together, in place of its comparisons' losses.
    """
    first_C, second_C = rewards_R[batch.first_C], rewards_R[batch.second_C]
    difference_C = first_C - second_C
    weight_C = batch.weight_C.to(rewards_R.dtype)
    loss_C = bradley_terry(
        difference_C,
        batch.label_C,
        batch.margin_C.to(rewards_R.dtype),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
    )
    total = rewards_R.new_zeros(())
    if config.kwise_loss == "plackett-luce" and len(batch.ranking_GK):
        loss_C = loss_C.masked_fill(batch.ranked_C, 0.0)
        ranking_loss_G = plackett_luce(
            rewards_R, batch.ranking_GK, beta=config.beta, label_smoothing=config.label_smoothing
        )
        total = total + (ranking_loss_G * _ranking_weights(batch).to(rewards_R.dtype)).sum()
    if config.regularization_lambda:
        loss_C = loss_C + config.regularization_lambda * margin_regularizer(difference_C, config.regularization_type)
    if config.score_regularization_lambda:
        loss_C = loss_C + config.score_regularization_lambda * score_regularizer(first_C, second_C)
    if config.center_lambda:
        loss_C = loss_C + config.center_lambda * centering(first_C, second_C)
    # Replies outside every comparison still belong to the graph, so that no rank is left without a backward pass.
    return total + (weight_C * loss_C).sum() + 0.0 * rewards_R.sum()


def _ranking_weights(batch: PackedBatch) -> Float[Tensor, " G"]:
    """For each ranking, the weights of the comparisons among its replies together; without a sync."""
    num_rankings, num_replies = len(batch.ranking_GK), batch.num_replies
    # One place more on both sides, for the −1 that fill and for the replies of no ranking.
    index_GK = torch.where(batch.ranking_GK >= 0, batch.ranking_GK, num_replies)
    number_GK = torch.arange(num_rankings, device=index_GK.device)[:, None].expand_as(index_GK)
    owner_R = index_GK.new_full((num_replies + 1,), num_rankings).index_put((index_GK,), number_GK)
    weights_G = batch.weight_C.new_zeros(num_rankings + 1)
    return weights_G.index_add(0, owner_R[batch.first_C], batch.weight_C)[:num_rankings]


@torch.no_grad()
def statistics(rewards_R: Float[Tensor, " R"], batch: PackedBatch, *, beta: float) -> Float[Tensor, " 8"]:
    """What the log shows of a training batch, as float64 sums in the order of STATISTICS, without a sync."""
    difference_C = (rewards_R[batch.first_C] - rewards_R[batch.second_C]).double()
    label_C = batch.label_C
    finite_C = difference_C.isfinite()
    clean_C = difference_C.where(finite_C, 0.0)
    decided_C = finite_C & (label_C != 0.5)
    oriented_C = torch.where(label_C < 0.5, -clean_C, clean_C)
    nll_C = -(label_C * F.logsigmoid(beta * clean_C) + (1 - label_C) * F.logsigmoid(-beta * clean_C))
    correct_C = (oriented_C > 0).double() + 0.5 * (oriented_C == 0).double()
    ones_C = torch.ones_like(clean_C)
    return torch.stack(
        [
            (nll_C * finite_C).sum(),
            (correct_C * decided_C).sum(),
            (oriented_C * decided_C).sum(),
            ones_C.sum(),
            decided_C.double().sum(),
            (decided_C & (clean_C == 0)).double().sum(),
            (finite_C & (label_C == 0.5)).double().sum(),
            (~finite_C).double().sum(),
        ]
    )


def to_sums(loss: float, weight: float, statistics: Sequence[float]) -> Sums:
    """Sums of core.types from the totals of a step, its statistics in the order of STATISTICS."""
    nll, correct, margin, *counts = statistics
    comparisons, decided, score_ties, label_ties, non_finite = map(round, counts)
    return Sums(
        loss=loss,
        weight=weight,
        nll=nll,
        correct=correct,
        margin=margin,
        comparisons=comparisons,
        decided=decided,
        score_ties=score_ties,
        label_ties=label_ties,
        non_finite=non_finite,
    )
