"""Rows of one prompt in a step: drawn together where that is asked for, computed once, and the step is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import runs
from common import arithmetic, make_groups, make_model
from loading import pair, write
from rewardlab import train
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import read_json
from rewardlab.core.types import TokenGroup
from rewardlab.data.step_order import Bundles, batch_of_step, steps_per_epoch
from rewardlab.distributed.ranks import Ranks
from rewardlab.model.dropout import Draws
from rewardlab.training.loop import losses
from rewardlab.training.loop.reward_trainer import RewardSteps
from rewardlab.training.settings.config import RewardTrainerConfig

# --- the order -------------------------------------------------------------------------------------------------


@given(
    prompts=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    most=st.integers(2, 5),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_an_epoch_has_every_row_once_and_those_of_a_bundle_beside_each_other(prompts, most, batch_size, seed):
    count, bundles = len(prompts), Bundles(np.array(prompts), most)
    steps = steps_per_epoch(count, batch_size)

    def epoch(number: int) -> list[int]:
        return [
            row
            for step in range(number * steps, (number + 1) * steps)
            for row in batch_of_step(step, num_groups=count, batch_size=batch_size, seed=seed, bundles=bundles)
        ]

    order = epoch(0)
    assert sorted(order) == list(range(count))
    assert order == epoch(0)
    # Rows of a prompt lie in as few stretches as bundles of `most` allow, or in fewer where two came to lie together.
    seen = [prompts[row] for row in order]
    stretches = [(seen[n], n) for n in range(count) if n == 0 or seen[n] != seen[n - 1]]
    for prompt in set(prompts):
        assert sum(one == prompt for one, _ in stretches) <= -(-prompts.count(prompt) // most)


def test_every_epoch_draws_the_bundles_and_the_rows_in_them_anew():
    bundles = Bundles(np.repeat(np.arange(20), 6), 3)
    orders = [batch_of_step(step, num_groups=120, batch_size=120, seed=0, bundles=bundles) for step in range(2)]
    together = [{frozenset(order[n : n + 3]) for n in range(0, 120, 3)} for order in orders]
    assert all(len({row // 6 for row in one}) == 1 for own in together for one in own)
    assert len(together[0] & together[1]) < 10
    assert [row // 6 for row in orders[0]] != [row // 6 for row in orders[1]]


# --- the step --------------------------------------------------------------------------------------------------


def rows_of_few_prompts(count: int = 12, *, replies: int = 3) -> list[TokenGroup]:
    """Rows with rankings on a third as many prompts, every third of which has a reply of another one."""
    groups = make_groups(count, replies=replies, seed=2)
    prompts = count // 3
    rows = []
    for number, group in enumerate(groups):
        first = groups[number % prompts]
        suffixes = group.suffixes if number < prompts or number % 3 else (first.suffixes[-1], *group.suffixes[1:])
        rows.append(
            replace(
                group,
                prompt_key=f"{number % prompts:x}",
                shared=first.shared,
                suffixes=suffixes,
                prompt_tokens=(len(first.shared),) * group.num_replies,
            )
        )
    return rows


def steps_over(model, groups, **settings) -> RewardSteps:
    ranks = settings.pop("ranks", Ranks())
    weights = {"regularization_lambda": 0.1, "score_regularization_lambda": 0.05, "center_lambda": 0.02}
    config = RewardTrainerConfig.of(model="m", dataset=("d",), batch_size=len(groups), **weights | settings)
    return RewardSteps(config, model, groups, ranks)


def result_of(steps: RewardSteps, budget: int = 10_000) -> tuple[dict[str, torch.Tensor], int]:
    """(Loss, statistics and gradients of the first step, tokens that it computed)."""
    model = steps.model
    model.zero_grad()
    batches = steps.plan(0, budget)
    with arithmetic(torch.float64):
        found = [steps.forward(batch, 0) for batch in batches]
        sum(loss for loss, _ in found).backward()
    result = {"loss": sum(loss.detach() for loss, _ in found), "statistics": sum(own for _, own in found)}
    result["weight"] = torch.tensor(sum(map(losses.total_weight, batches)), dtype=torch.float64)
    result |= {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    return result, sum(batch.num_tokens for batch in batches)


@pytest.mark.parametrize("kwise_loss", ["pairs", "plackett-luce"])
@pytest.mark.parametrize("budget", [45, 10_000])
def test_a_step_is_the_same_whether_its_rows_of_a_prompt_are_computed_together(kwise_loss, budget, monkeypatch):
    groups = rows_of_few_prompts()
    if kwise_loss == "plackett-luce":
        groups = [one if number % 2 else replace(one, ranking=None) for number, one in enumerate(groups)]
    steps = steps_over(make_model(dtype=torch.float64).train(), groups, kwise_loss=kwise_loss)
    together, tokens = result_of(steps, budget)
    batches = steps.plan(0, budget)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(groups)))
    assert all(batch.num_tokens <= budget for batch in batches)
    named = ", ".join(map(steps.describe, batches))
    assert all(one.preference_id in named for one in groups) or "more" in named
    monkeypatch.setattr(RewardSteps, "_together", lambda own, some, most: (some, [[n] for n in range(len(some))]))
    apart, all_tokens = result_of(steps, budget)
    assert tokens < all_tokens
    assert together.keys() == apart.keys()
    for name, tensor in apart.items():
        assert (together[name] - tensor).norm() <= 1e-10 * tensor.norm(), name


def test_rows_of_which_none_has_the_prompt_of_another_are_laid_out_as_they_are(monkeypatch):
    steps = steps_over(make_model().train(), make_groups(12, replies=3))
    found = steps.plan(0, 60)
    monkeypatch.setattr(RewardSteps, "_together", lambda own, some, most: (some, [[n] for n in range(len(some))]))
    for one, other in zip(found, steps.plan(0, 60), strict=True):
        assert one.indices == other.indices
        assert torch.equal(one.keys_T, other.keys_T)
        assert torch.equal(one.token_ids_T, other.token_ids_T)


@pytest.mark.parametrize("cause", ["dropout", "unshared", "padded"])
def test_where_a_prompt_cannot_be_shared_rows_stay_apart(cause):
    groups = rows_of_few_prompts()
    model = make_model(layout="shared" if cause == "dropout" else cause)
    if cause == "dropout":
        model.draws = Draws()
    batches = steps_over(model, groups).plan(0, 10_000)
    assert sum(batch.num_replies for batch in batches) == sum(one.num_replies for one in groups)


def test_every_rank_has_work_though_all_rows_have_one_prompt():
    groups = [replace(one, shared=make_groups(1)[0].shared) for one in make_groups(16)]
    groups = [replace(one, prompt_tokens=(len(one.shared),) * one.num_replies) for one in groups]
    model = make_model()
    tokens = [
        sum(batch.num_tokens for batch in steps_over(model, groups, ranks=Ranks(rank=rank, size=4)).plan(0, 10_000))
        for rank in range(4)
    ]
    assert min(tokens) > 0.5 * max(tokens)


# --- the run ---------------------------------------------------------------------------------------------------

SAME = "the same long beginning of two replies, which a row of its own computes once for both of them, "
MANY = [
    pytest.param([{**pair(k), "chosen": f"good {n}"} for k in range(20) for n in range(3)], True, id="three a prompt"),
    pytest.param([pair(k) for k in range(20)], False, id="one a prompt"),
    pytest.param(
        [{"prompt": f"P {k // 2}", "chosen": f"{k} {SAME}good", "rejected": f"{k} {SAME}no"} for k in range(40)],
        False,
        id="replies that begin alike",
    ),
]


@pytest.mark.parametrize(("rows", "is_worth_it"), MANY)
def test_a_run_says_where_several_rows_a_prompt_are_worth_it_and_saves_as_much(
    base_model, tmp_path, caplog, rows, is_worth_it
):
    caplog.set_level("INFO", logger="rewardlab")
    settings = {"epochs": 1.0, "batch_size": 12, "eval_fraction": 0.0, "micro_token_budget": 4096}
    data = write(tmp_path / "rows.jsonl", rows)
    tokens = []
    for number in (1, 3):
        folder = tmp_path / str(number)
        train(runs.config_for(base_model, data, folder, rows_per_prompt=number, **settings))
        tokens.append(sum(float(row["tokens"] or 0) for row in runs.rows_of(folder)))
    hints = [line for line in caplog.messages if "--rows-per-prompt 3" in line]
    told = [line for line in caplog.messages if "3 rows of one come together" in line]
    assert len(hints) == is_worth_it
    assert len(told) == 1
    if is_worth_it:
        assert "these have 20 prompts" in hints[0]
        assert hints[0].split()[-4:] == told[0].split()[-4:]
        assert tokens[1] < tokens[0]
        whole = read_json(tmp_path / "1" / "manifest.json")["tokens"]["training"]["tokens"]
        assert 1.05 < float(told[0].partition("some ")[2].split()[0]) <= round(whole / tokens[1], 1)
    else:
        assert tokens[1] == tokens[0]


def test_a_stopped_run_goes_on_with_the_same_rows(base_model, tmp_path):
    rows = [{**pair(k), "chosen": f"good {n}"} for k in range(9) for n in range(4)]
    data = write(tmp_path / "rows.jsonl", rows)
    settings = {"rows_per_prompt": 2, "checkpoint_every": 2, "eval_fraction": 0.0, "steps": 6}
    train(runs.config_for(base_model, data, tmp_path / "whole", **settings))
    train(runs.config_for(base_model, data, tmp_path / "parts", **settings | {"steps": 3}))
    resumed = {"resume": "auto", "reschedule": True}
    train(runs.config_for(base_model, data, tmp_path / "parts", **settings | resumed))
    whole, parts = (runs.rows_of(tmp_path / name) for name in ("whole", "parts"))
    assert sum(int(row["tokens"]) for row in whole) == sum(int(row["tokens"]) for row in parts)
    assert whole[-1]["tokens"] == parts[-1]["tokens"]


def test_dropout_and_several_rows_a_prompt_are_refused_together():
    with pytest.raises(ConfigError, match="--rows-per-prompt 4: with --lora-dropout each row has masks of its own"):
        RewardTrainerConfig.of(model="m", dataset=("d",), lora=True, lora_dropout=0.1, rows_per_prompt=4)
