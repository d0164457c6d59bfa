"""GRPO and RLOO of TRL with our reward function, on the CPU with tiny models: what TRL sees, and what it learns."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop
from trl.trainer.utils import is_async_callable

import rewardlab.rl.trl as trl_module
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError
from rewardlab.rl import advantages, read_rollouts
from rewardlab.rl.trl import reward_function
from trl_runs import GROUP, PROMPTS, REWARDS, KnownScorer, Seen, trainer

pytest_plugins = ["reward_fixtures"]
pytestmark = [
    pytest.mark.usefixtures("closed_rewards"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning"),  # TRL's own
]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (GRPOTrainer, "folder"),
        pytest.param(RLOOTrainer, "folder", marks=pytest.mark.slow),
        pytest.param(GRPOTrainer, "url", marks=pytest.mark.slow),
    ],
)
def test_the_rewards_that_trl_sees_are_the_scores_of_the_command_score(
    kind: type, where: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seen = Seen(reward_function(request.getfixturevalue(where), noise_floor=False))
    run = trainer(seen, tmp_path / "out", kind=kind)
    run.train()
    asked = [talk for talks, _ in seen.calls for talk in talks]
    rewards = [reward for _, own in seen.calls for reward in own]
    assert len(asked) == 2 * 2 * GROUP
    source, target = tmp_path / "asked.jsonl", tmp_path / "scored.jsonl"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in asked), encoding="utf-8")
    main(["score", "--model", str(folder), "--input", str(source), "--output", str(target)])
    scored = [json.loads(line)["score"] for line in target.read_text(encoding="utf-8").splitlines()]
    np.testing.assert_allclose(rewards, scored, atol=2e-5)
    logged = [row["rewards/rewardlab/mean"] for row in run.state.log_history if "rewards/rewardlab/mean" in row]
    np.testing.assert_allclose(logged, [np.mean(own) for _, own in seen.calls], atol=1e-5)
    figures = [row for row in run.state.log_history if "rewardlab/score/mean" in row]
    np.testing.assert_allclose([row["rewardlab/score/mean"] for row in figures], logged, atol=1e-5)


@pytest.mark.slow
def test_two_functions_of_one_name_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = [reward_function(KnownScorer(len), noise_floor=False) for _ in range(2)]
    named = [reward_function(KnownScorer(len), noise_floor=False, name=name) for name in ("one", "other")]
    REWARDS.extend(both + named)
    for rewards, count in ((named, 0), (both, 2)):
        run = trainer(rewards, tmp_path / "out")
        run.train()
        told = [record.getMessage() for record in caplog.records if "mixes their figures" in record.getMessage()]
        assert len(told) == count, "once of each function, in two steps"
    assert "reward functions of the trainer are called 'rewardlab'" in told[0]


@pytest.mark.slow
def test_grpo_raises_a_reward_that_is_known_in_closed_form(tmp_path: Path) -> None:
    """The reward is the share of vowels in a reply. Its optimum is 1, and a policy that learns nothing stays where it
    began."""

    def vowels(reply: str) -> float:
        return sum(letter in "aeiou" for letter in reply) / max(len(reply), 1)

    rewards: list[float] = []
    known = reward_function(KnownScorer(vowels), log_dir=str(tmp_path / "log"))
    run = trainer(
        known,
        tmp_path / "out",
        max_steps=60,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8 * GROUP,
    )
    run.train()
    rewards = [row["reward"] for row in run.state.log_history if "reward" in row]
    assert len(rewards) == 60
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.9
    rows = list(read_rollouts(tmp_path / "log"))
    assert len(rows) == 60 * 8 * GROUP
    assert [row.step for row in rows] == sorted(row.step for row in rows)
    assert {row.step for row in rows} == set(range(60))
    for row in rows[:50]:
        assert row.reward == vowels(row.conversation[-1].content)


def test_differences_within_the_noise_train_nothing(tmp_path: Path) -> None:
    wild = reward_function(KnownScorer(lambda reply: len(reply) % 7 / 100, noise=0.2))
    run = trainer(wild, tmp_path / "out")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    shares = [row["rewardlab/noise_floor/share_of_groups"] for row in run.state.log_history if "reward" in row]
    assert shares == [1.0, 1.0]
    silenced = [row["rewardlab/noise_floor/share_of_rollouts"] for row in run.state.log_history if "reward" in row]
    assert silenced == [1.0, 1.0]
    assert [row["reward_std"] for row in run.state.log_history if "reward" in row] != []
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_the_dotted_path_is_configured_by_the_environment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `trl grpo --reward_funcs rewardlab.rl.trl.reward` finds it."""
    file = tmp_path / "reward.yaml"
    file.write_text(f"text_as: turns\nnoise-floor: false\nlog-dir: {tmp_path / 'log'}\n", encoding="utf-8")
    monkeypatch.setenv("REWARDLAB_RL_SOURCE", str(folder))
    monkeypatch.setenv("REWARDLAB_RL_CONFIG", str(file))
    trl_module._configured.cache_clear()
    (reward,) = [
        getattr(importlib.import_module(module), name)
        for module, _, name in ["rewardlab.rl.trl.reward".rpartition(".")]
    ]
    assert is_async_callable(reward)
    run = trainer(reward, tmp_path / "out", max_steps=1)
    run.train()
    assert "rewards/reward/mean" in run.state.log_history[0]
    assert len(list(read_rollouts(tmp_path / "log"))) == 2 * GROUP
    trl_module._configured.cache_clear()
    monkeypatch.delenv("REWARDLAB_RL_SOURCE")
    with pytest.raises(ConfigError, match="no source of rewards"):
        asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "So."}]]))
    trl_module._configured.cache_clear()


def test_asyncgrpo_asks_for_a_group_and_makes_its_advantages_of_our_rewards(folder: Path) -> None:
    """The part of its rollout worker that scores, with replies made up in place of its vLLM server."""
    PartialState()  # which its logger asks for
    loop = _AsyncRolloutLoop.__new__(_AsyncRolloutLoop)
    reward = reward_function(folder, noise_floor=False)
    loop.reward_funcs, loop.reward_func_names = [reward], ["rewardlab"]
    loop._env_reward_types, loop._provides_rollout_reward = [], False
    texts = ("Yes.", "No, never.", "It is water.")
    sequence = TrainingSequence(rollout_id=0, input_ids=[1, 2], completion_mask=[0, 1], old_log_probs=[0.0, -1.0])
    group = RolloutGroup(
        prompts=[PROMPTS[0]] * 3,
        reward_kwargs={},
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completions_ids=[[1], [2], [3]],
        completions_sequences=[[sequence]] * 3,
        tool_call_counts=[0] * 3,
        tool_failure_counts=[0] * 3,
        model_version=0,
        group_id=0,
        env_rewards=[None] * 3,
        rollout_rewards=[None] * 3,
    )

    async def done() -> tuple[list[Any], list[float]]:
        try:
            return await loop._score_group(group), await reward(group.prompts, group.completions)
        finally:
            await reward.aclose()

    samples, rewards = asyncio.run(done())
    expected = advantages(rewards, [0, 0, 0], rule="trl-async").advantages_R
    assert np.ptp(expected) > 1
    np.testing.assert_allclose([sample.advantage for sample in samples], expected, atol=1e-12)
    np.testing.assert_allclose([sample.metrics["rewards/rewardlab"] for sample in samples], rewards, atol=1e-12)
