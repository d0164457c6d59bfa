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
from rewardlab import rehearse, train
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_file
from rewardlab.core.types import TokenGroup
from rewardlab.data.step_order import Bundles, _order, batch_of_step, steps_per_epoch
from rewardlab.distributed.ranks import Ranks
from rewardlab.training import rehearsal
from rewardlab.training.loop import losses
from rewardlab.training.loop.reward_trainer import RewardSteps
from rewardlab.training.loop.step_rows import StepRows
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
    _order.cache_clear()
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
    monkeypatch.setattr(StepRows, "merges", False)
    apart, all_tokens = result_of(steps, budget)
    assert tokens < all_tokens
    assert together.keys() == apart.keys()
    for name, tensor in apart.items():
        assert (together[name] - tensor).norm() <= 1e-10 * tensor.norm(), name


def test_rows_of_which_none_has_the_prompt_of_another_are_laid_out_as_they_are(monkeypatch):
    steps = steps_over(make_model().train(), make_groups(12, replies=3))
    found = steps.plan(0, 60)
    monkeypatch.setattr(StepRows, "merges", False)
    for one, other in zip(found, steps.plan(0, 60), strict=True):
        assert one.indices == other.indices
        assert torch.equal(one.keys_T, other.keys_T)
        assert torch.equal(one.token_ids_T, other.token_ids_T)


@pytest.mark.parametrize("cause", ["dropout", "unshared", "padded"])
def test_where_a_prompt_cannot_be_shared_rows_stay_apart(cause):
    groups = rows_of_few_prompts()
    model = make_model(layout="shared" if cause == "dropout" else cause)
    dropout = {"lora": True, "lora_dropout": 0.1} if cause == "dropout" else {}
    batches = steps_over(model, groups, **dropout).plan(0, 10_000)
    assert sum(batch.num_replies for batch in batches) == sum(one.num_replies for one in groups)


@pytest.mark.parametrize(("count", "prompts", "length"), [(64, 1, 60), (64, 4, 60), (32, 1, 90), (16, 8, 40)])
def test_every_rank_has_as_much_work_as_the_others(count, prompts, length):
    draw = np.random.default_rng(0)
    shared = [draw.integers(1, 300, length).astype(np.int32) for _ in range(prompts)]
    groups = [
        replace(one, shared=shared[n % prompts], prompt_tokens=(length,) * one.num_replies)
        for n, one in enumerate(make_groups(count))
    ]
    tokens = [
        sum(
            batch.num_tokens
            for batch in steps_over(make_model(), groups, ranks=Ranks(rank=rank, size=8)).plan(0, 10_000)
        )
        for rank in range(8)
    ]
    assert min(tokens) > 0.5 * max(tokens)
    assert sum(tokens) < 0.8 * sum(one.num_tokens for one in groups)


def test_micro_batches_of_merged_rows_hold_no_more_keys_than_those_of_pairs_may():
    shared = np.arange(1, 201, dtype=np.int32)
    groups = [replace(one, shared=shared, prompt_tokens=(200,) * one.num_replies) for one in make_groups(40)]
    batches = steps_over(make_model(), groups).plan(0, 1000)
    keys = [sum(prefix + own for prefix, replies in batch.groups for own in replies) for batch in batches]
    assert max(keys) <= 2 * 1000
    assert sum(batch.num_tokens for batch in batches) < 0.5 * sum(one.num_tokens for one in groups)


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
def test_a_run_says_what_several_rows_a_prompt_save_and_saves_as_much(base_model, tmp_path, caplog, rows, is_worth_it):
    caplog.set_level("INFO", logger="rewardlab")
    settings = {"epochs": 1.0, "batch_size": 12, "eval_fraction": 0.0, "micro_token_budget": 4096}
    data = write(tmp_path / "rows.jsonl", rows)
    tokens = []
    for number in (1, 3):
        folder = tmp_path / str(number)
        train(runs.config_for(base_model, data, folder, rows_per_prompt=number, **settings))
        tokens.append(sum(float(row["tokens"] or 0) for row in runs.rows_of(folder)))
    hints = [line for line in caplog.messages if "with --rows-per-prompt 3" in line]
    told = [line for line in caplog.messages if "3 rows of one come together" in line]
    warned = [line for line in caplog.messages if "--rows-per-prompt 3 saves hardly any tokens" in line]
    assert (len(hints), len(told), len(warned)) == ((1, 1, 0) if is_worth_it else (0, 0, 1))
    if is_worth_it:
        assert "these have 20 prompts" in hints[0]
        assert f"some {tokens[0] / tokens[1]:.1f} times fewer tokens" in hints[0]
        assert f"some {tokens[0] / tokens[1]:.1f} times fewer tokens" in told[0]
    else:
        assert tokens[1] == tokens[0]


@pytest.mark.parametrize("settings", [{"attention": "padded"}, {"lora": True, "lora_dropout": 0.1}], ids=str)
def test_a_run_that_cannot_share_prompts_is_told_nothing_of_it(base_model, tmp_path, caplog, settings):
    caplog.set_level("INFO", logger="rewardlab")
    data = write(tmp_path / "rows.jsonl", [{**pair(k), "chosen": f"good {n}"} for k in range(9) for n in range(4)])
    train(runs.config_for(base_model, data, tmp_path / "run", steps=1, eval_fraction=0.0, **settings))
    assert not [line for line in caplog.messages if "--rows-per-prompt" in line]


@pytest.mark.parametrize(
    "settings",
    [{}, {"kwise_loss": "plackett-luce"}, {"micro_token_budget": 96}, {"rows_per_prompt": 3}],
    ids=str,
)
def test_a_dry_run_counts_the_tokens_that_the_run_computes(base_model, tmp_path, monkeypatch, settings):
    seen, reckon = [], rehearsal._tokens_of_training
    monkeypatch.setattr(rehearsal, "_tokens_of_training", lambda whole: seen.append(reckon(whole)) or seen[-1])
    rows = [{**pair(k), "chosen": f"good {n}"} for k in range(12) for n in range(3)]
    rows += [{"prompt": pair(k)["prompt"], "responses": [*"abc"], "ranking": [0, 1, 2]} for k in range(12)]
    data = write(tmp_path / "rows.jsonl", rows[:36] if "kwise_loss" not in settings else rows[36:] * 2)
    config = runs.config_for(base_model, data, tmp_path / "run", **{"batch_size": 12, "eval_fraction": 0.0, **settings})
    rehearse(config)
    train(config)
    assert seen == [pytest.approx(sum(float(row["tokens"] or 0) for row in runs.rows_of(tmp_path / "run")))]


def test_a_stopped_run_goes_on_with_the_same_rows(base_model, tmp_path):
    rows = [{**pair(k), "chosen": f"good {n}"} for k in range(9) for n in range(4)]
    data = write(tmp_path / "rows.jsonl", rows)
    settings = {"rows_per_prompt": 2, "checkpoint_every": 2, "eval_fraction": 0.0, "steps": 6}
    settings |= {"lr_scheduler": "constant", "warmup_steps": 0}
    train(runs.config_for(base_model, data, tmp_path / "whole", **settings))
    train(runs.config_for(base_model, data, tmp_path / "parts", **settings | {"steps": 3}))
    resumed = {"resume": "auto", "reschedule": True}
    train(runs.config_for(base_model, data, tmp_path / "parts", **settings | resumed))
    whole, parts = (runs.rows_of(tmp_path / name) for name in ("whole", "parts"))
    assert sum(int(row["tokens"]) for row in whole) == sum(int(row["tokens"]) for row in parts)
    assert len({sha256_file(tmp_path / name / "step_6" / "model.safetensors") for name in ("whole", "parts")}) == 1


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"lora": True, "lora_dropout": 0.1}, "with --lora-dropout each row has masks of its own"),
        ({"attention": "padded"}, "with --attention padded each reply has its own copy"),
        ({"train_head_only": True, "cache_states": True}, "with --cache-states no prompt is computed in a step"),
        ({"batch_size": 3}, "a step has --batch-size 3 rows, so at most as many"),
    ],
    ids=str,
)
def test_several_rows_a_prompt_are_refused_where_they_save_nothing(settings, cause):
    with pytest.raises(ConfigError, match=f"--rows-per-prompt 4: {cause}"):
        RewardTrainerConfig.of(model="m", dataset=("d",), rows_per_prompt=4, **settings)
