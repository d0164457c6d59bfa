"""What Python code hands in that is no list, number, tensor or folder is refused in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOLD = """
from rewardlab import RewardlabError

for wrong in wrongs:
    try:
        print("took", wrong())
    except RewardlabError as error:
        print(error)
"""
RL = """
import numpy as np
from rewardlab.rl import advantages, combine, floored, read_rollouts, RolloutLog
from rewardlab.rl.shaping import clipped, kl_of_tokens, kl_shaped, length_penalised, rewards_of_tokens, standardised

made = combine([1.0, 2.0])
wrongs = (
    lambda: combine(3),
    lambda: combine({1.0, 2.0}),
    lambda: combine(score for score in (1.0, 2.0)),
    lambda: combine([1.0, 2.0], {0: 1.0, 1: 2.0}, how="add"),
    lambda: combine([1.0], noise_R=np.array(0.0)),
    lambda: combine([1.0], coefficient="2"),
    lambda: advantages({1.0, 2.0}, [0, 0]),
    lambda: advantages([1.0, 2.0], {0, 1}),
    lambda: advantages([1.0, 2.0], [0, 0], rule=["trl"]),
    lambda: floored([1.0, 2.0], "ab", None),
    lambda: clipped([1.0], low=0, high=1),
    lambda: clipped(made, low="0", high=1),
    lambda: standardised([1.0], mean=0, std=1),
    lambda: length_penalised([1.0], [3], target_tokens=1, per_token=0.1),
    lambda: kl_shaped([1.0], [0.1], beta=0.1),
    lambda: kl_of_tokens(3, 3, estimator="k1"),
    lambda: rewards_of_tokens(1.0, {0.1, 0.2}, beta=0.1),
    lambda: list(read_rollouts(3)),
    lambda: RolloutLog(None),
)
"""
OF_RL = [
    "scores: got 3, of type int; wanted a list or an array with one for each rollout, in order.",
    "scores: got {1.0, 2.0}, of type set; wanted a list",
    "scores: got <generator",
    "the environment's rewards: got {0: 1.0, 1: 2.0}, of type dict; wanted a list",
    "noise: got array(0.), of type ndarray; wanted a list",
    "coefficient: got '2'; wanted 0 or more",
    "reward: got {1.0, 2.0}, of type set; wanted a list",
    "groups: got {0, 1}, of type set; wanted a list",
    "rule: got ['trl']. Wanted one of trl,",
    "groups: got 'ab', of type str; wanted a list",
    "rewards: got a list; wanted what rewardlab.rl.combine(scores) returns",
    "low: got '0'; wanted a finite number",
    *["rewards: got a list; wanted what rewardlab.rl.combine(scores) returns"] * 3,
    "log-probabilities of the policy: got 3, of type int; wanted a list or an array with one for each token",
    "kl_T: got {0.1, 0.2}, of type set; wanted a list or an array with one for each token, in order.",
    "run: expected Path, got 3",
    "folder: expected Path, got None",
]
METRICS = """
import torch
from rewardlab import Comparison, ScoreRow, bradley_terry, centering, evaluate, margin_regularizer, plackett_luce
from rewardlab import score_regularizer

def row(reply, score, label=None):
    judged = () if label is None else (Comparison(first=0, second=1, label=label),)
    return ScoreRow(
        preference_id="a", source="s", prompt_key="k", reply=reply, score=score, num_tokens=3, prompt_tokens=1,
        truncated_tokens=0, comparisons=judged,
    )

one, two = torch.zeros(3), torch.zeros(3, 1)
wrongs = (
    lambda: evaluate([row(0, 1.0, 1.0)], beta=1.0),
    lambda: evaluate([row(0, "1", 1.0), row(1, 0.0)], beta=1.0),
    lambda: evaluate([row(0, 1.0, 3.0), row(1, 0.0)], beta=1.0),
    lambda: evaluate([row(0, 1.0, 1.0), row(1, 0.0)], beta="x"),
    lambda: evaluate([row(0, 1.0, 1.0), row(1, 0.0)], beta=-1.0),
    lambda: evaluate([row(0, 1.0, 1.0), row(1, 0.0)], beta=1.0, seed="x"),
    lambda: bradley_terry(one, two),
    lambda: bradley_terry(one, one, two),
    lambda: bradley_terry([0.5], [1.0]),
    lambda: centering(one, one[:1]),
    lambda: score_regularizer(one, None),
    lambda: margin_regularizer(two),
    lambda: margin_regularizer(one, "l3"),
    lambda: plackett_luce(two, torch.tensor([[0, 1]])),
    lambda: plackett_luce(one, torch.tensor([0, 1])),
    lambda: plackett_luce(one, torch.tensor([[0.0, 1.0]])),
    lambda: plackett_luce(one, torch.tensor([[0, 1]], dtype=torch.uint8)),
)
"""
OF_METRICS = [
    "a of s: reply 0 is compared with reply 1, which has no score row. Give the rows of all replies.",
    "rows: the score of a is '1'; wanted a number.",
    "a comparison has a label that is not from 0 to 1.",
    "beta: expected float, got 'x'",
    "beta: got -1.0; wanted a number above 0.",
    "seed: expected int, got 'x'",
    "got difference_C of shape [3] and type torch.float32, label_C of shape [3, 1] and type",
    "got difference_C of shape [3] and type torch.float32, label_C of shape [3]",
    "got difference_C [0.5], a list, label_C [1.0], a list; wanted tensors",
    "got first_C of shape [3] and type torch.float32, second_C of shape [1] and type torch.float32; wanted tensors",
    "got first_C of shape [3] and type torch.float32, second_C None, a NoneType; wanted tensors",
    "got difference_C of shape [3, 1] and type torch.float32; wanted a tensor of one dimension",
    "kind: 'l3' is not one of 'l1', 'l2'",
    "got rewards_R of shape [3, 1] and type torch.float32; wanted a tensor of one dimension",
    "ranking_GK: got of shape [2] and type torch.int64; wanted a tensor of whole numbers [G, K].",
    "ranking_GK: got of shape [1, 2] and type torch.float32; wanted",
    "ranking_GK: got of shape [1, 2] and type torch.uint8; wanted",
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "expected"), [(RL, OF_RL), (METRICS, OF_METRICS)])
def test_what_is_no_list_number_or_tensor_is_refused_in_words(program, expected):
    """In a process whose types nobody checks, as users have it."""
    answer = subprocess.run([sys.executable, "-c", program + TOLD], capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(beginning)
