"""GRPO and RLOO of TRL with a reward function of rewardlab, on the CPU with tiny models.

The policy is a table: its logits are one free number for each token, whatever it has read. The reward of a reply is
known in closed form, so it is known what training has to reach.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop
from trl.trainer.utils import is_async_callable

import rewardlab.rl.trl as trl_module
from conftest import make_tokenizer
from faulty_proxy import Faults, spoiling
from reward_models import save_tiny, served
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError
from rewardlab.rl import BlockingScorer, RewardScorer, RolloutError, Scored, advantages, read_rollouts
from rewardlab.rl.members import About
from rewardlab.rl.rewarding import groups_of
from rewardlab.rl.trl import RewardFunction, reward_function

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")  # TRL's own
GROUP = 4
REWARDS: list[Any] = []
"""Those that trainers were made with."""
PROMPTS = [[{"role": "user", "content": f"Question {number}?"}] for number in range(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("trl") / "rm")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


def policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def settings(output: Path, **changed: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": False,
        "seed": 0,
        **changed,
    }


def trainer(reward: Any, output: Path, *, kind: type = GRPOTrainer, **changed: Any) -> Any:
    if hasattr(reward, "close"):
        REWARDS.append(reward)
    tokenizer = make_tokenizer()
    # Without a reference model, which TRL would load by the name of this one, and it has none.
    config = (RLOOConfig if kind is RLOOTrainer else GRPOConfig)(**settings(output, beta=0.0, **changed))
    return kind(
        model=policy(tokenizer),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt, "quality": 0.5} for prompt in PROMPTS]),
        processing_class=tokenizer,
    )


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the connections that reward functions have made in the trainers' loops."""
    yield
    for reward in REWARDS:
        reward.close()
    REWARDS.clear()


class Seen:
    """A reward function that notes what it was asked and what it answered."""

    def __init__(self, reward: RewardFunction) -> None:
        self.reward, self.__name__ = reward, reward.__name__
        self.calls: list[tuple[list[Any], list[float]]] = []

    def close(self) -> None:
        self.reward.close()

    async def __call__(self, prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        rewards = await self.reward(prompts, completions, **kwargs)
        talks = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        self.calls.append((talks, rewards))
        return rewards


@pytest.mark.parametrize(("kind", "where"), [(GRPOTrainer, "folder"), (RLOOTrainer, "folder"), (GRPOTrainer, "url")])
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


class KnownScorer(RewardScorer):
    """A scorer whose scores are a function of the reply: what a saved model would be, known in closed form."""

    def __init__(self, score: Callable[[str], float], *, noise: float = 0.0) -> None:
        super().__init__("http://127.0.0.1:1")
        self.known, self.known_noise = score, noise

    async def _open(self) -> Any:
        return [About(joins_texts=False, tolerance=0.0, arithmetic="float32", scale=None)]

    async def details(self, rollouts: Any) -> list[Scored]:
        return [
            Scored(score=self.known(rollout.conversation[-1].content), noise=self.known_noise) for rollout in rollouts
        ]


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
    assert [row["reward_std"] for row in run.state.log_history if "reward" in row] != []
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_in_the_middle_of_training_ends_it_before_the_step(
    kind: type, value: float, tmp_path: Path
) -> None:
    calls = 0

    def broken(reply: str) -> float:
        nonlocal calls
        calls += 1
        return value if calls == 2 * 2 * GROUP - 1 else len(reply) / 10

    class Broken(KnownScorer):
        async def details(self, rollouts: Any) -> list[Any]:
            return [Scored(score=self.known(one.conversation[-1].content), noise=0.0) for one in rollouts]

    run = trainer(reward_function(Broken(broken)), tmp_path / "out", kind=kind, max_steps=3)
    after_steps: list[dict[str, torch.Tensor]] = []
    step = run.training_step

    def noted(*arguments: Any, **keywords: Any) -> Any:
        after_steps.append({name: weight.clone() for name, weight in run.model.state_dict().items()})
        return step(*arguments, **keywords)

    run.training_step = noted
    with pytest.raises(RolloutError, match="step 1, prompt 1, reply 2"):
        run.train()
    assert run.state.global_step == 1
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, after_steps[-1][name]), name


def test_a_server_that_dies_in_the_middle_ends_training_and_names_the_rollouts(folder: Path, tmp_path: Path) -> None:
    with ExitStack() as serving:
        address = serving.enter_context(served(folder))
        reward = reward_function(address, client={"attempts": 1, "timeout_s": 5.0})

        class Ending(Seen):
            async def __call__(self, *arguments: Any, **keywords: Any) -> list[float]:
                if self.calls:
                    await asyncio.to_thread(serving.close)
                return await super().__call__(*arguments, **keywords)

        run = trainer(Ending(reward), tmp_path / "out", max_steps=3)
        with pytest.raises(RolloutError, match=r"step 1, prompt 0, reply 0 and 7 more: .*127\.0\.0\.1"):
            run.train()
        assert run.state.global_step == 1


@pytest.mark.parametrize("fault", ["nan", "null", "short", 3.0])
def test_a_server_that_answers_wrongly_or_too_late_ends_training_before_the_step(
    fault: Any, url: str, tmp_path: Path
) -> None:
    faults = Faults()
    with spoiling(url, faults) as address:
        reward = reward_function(address, client={"attempts": 2, "timeout_s": 1.0 if fault == 3.0 else 30.0})

        class Spoiling(Seen):
            async def __call__(self, *arguments: Any, **keywords: Any) -> list[float]:
                if self.calls:
                    faults.coming = [fault] * 4
                return await super().__call__(*arguments, **keywords)

        run = trainer(Spoiling(reward), tmp_path / "out", max_steps=3)
        with pytest.raises(RolloutError, match=r"step 1, prompt \d, reply \d"):
            run.train()
        assert run.state.global_step == 1
        assert fault in faults.met
        reward.close()


def test_a_server_that_is_busy_slow_or_gone_for_a_moment_is_asked_again_and_changes_no_reward(
    url: str, folder: Path, tmp_path: Path
) -> None:
    faults = Faults()
    with spoiling(url, faults) as address:
        reward = reward_function(address, noise_floor=False)

        class Spoiling(Seen):
            async def __call__(self, *arguments: Any, **keywords: Any) -> list[float]:
                faults.coming = ["busy", "drop", 0.5]
                return await super().__call__(*arguments, **keywords)

        spoiled = Spoiling(reward)
        run = trainer(spoiled, tmp_path / "out", max_steps=2)
        run.train()
        assert run.state.global_step == 2
        assert {"busy", "drop", 0.5} <= set(faults.met)
        spoiled.close()
    with BlockingScorer(folder) as scorer:
        for talks, rewards in spoiled.calls:
            np.testing.assert_allclose(rewards, scorer.score(talks), atol=2e-5)


def test_a_server_that_answers_no_number_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = save_tiny(tmp_path / "rm")
    reward = reward_function(str(poisoned))

    class Poisoning(Seen):
        async def __call__(self, *arguments: Any, **keywords: Any) -> list[float]:
            if self.calls:
                scorer: Any = self.reward._scorers.here()
                (slot,) = scorer._members[0]._engine._slots.values()
                with torch.no_grad():
                    slot.scorer.model.head.weight.fill_(math.nan)
            return await super().__call__(*arguments, **keywords)

    run = trainer(Poisoning(reward), tmp_path / "out", max_steps=3)
    with pytest.raises(RolloutError, match=r"step 1, prompt 0, reply 0 has no score by .*rm: its score is nan"):
        run.train()
    assert run.state.global_step == 1


def test_a_function_reaches_another_process_and_is_asynchronous_for_trl(folder: Path) -> None:
    reward = pickle.loads(pickle.dumps(reward_function(folder, name="mine", noise_floor=False)))
    assert is_async_callable(reward)
    assert reward.__name__ == "mine"
    talk = {"role": "assistant", "content": "So."}

    async def done() -> list[float]:
        try:
            return await reward([PROMPTS[0]], [[talk]], [[1]])
        finally:
            await reward.aclose()

    assert all(map(math.isfinite, asyncio.run(done())))


def test_a_reward_that_trl_would_make_infinite_is_an_error_that_names_the_rollout(tmp_path: Path) -> None:
    reward = reward_function(KnownScorer(lambda reply: 1e39 if reply else 1.0), log_dir=str(tmp_path))
    completions = [[{"role": "assistant", "content": text}] for text in ("", "x")]
    with pytest.raises(RolloutError, match="no reward in float32") as caught:
        asyncio.run(reward([PROMPTS[0]] * 2, completions))
    assert caught.value.rollouts == (1,)
    assert not list(tmp_path.iterdir())


def test_a_function_of_a_scorer_that_is_made_already_reaches_another_process_too(folder: Path) -> None:
    reward = pickle.loads(pickle.dumps(reward_function(RewardScorer(folder), noise_floor=False)))

    async def done() -> list[float]:
        try:
            return await reward([PROMPTS[0]], [[{"role": "assistant", "content": "So."}]])
        finally:
            await reward.aclose()

    assert all(map(math.isfinite, asyncio.run(done())))


def test_loops_that_ended_leave_no_model_behind(folder: Path) -> None:
    def engines() -> int:
        gc.collect()
        return sum(thread.name == "rewardlab-engine" for thread in threading.enumerate())

    reward = reward_function(folder, noise_floor=False)
    before = engines()
    for _ in range(3):
        asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "So."}]]))
        assert engines() == before + 1


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


def test_plain_texts_are_refused_until_it_is_said_how_they_are_read(folder: Path) -> None:
    async def rewards(**how: Any) -> list[float]:
        reward = reward_function(folder, **how)
        try:
            return await reward(["Why?"] * 2, ["So.", "Because."])
        finally:
            await reward.aclose()

    with pytest.raises(ConfigError, match="text_as: the prompts are plain texts"):
        asyncio.run(rewards())
    assert len(asyncio.run(rewards(text_as="turns"))) == 2


def test_an_environments_reward_is_combined_before_the_floor_and_kept_columns_are_evidence(tmp_path: Path) -> None:
    reward = reward_function(
        KnownScorer(len, noise=0.01),
        how="add",
        coefficient=0.5,
        environment="quality",
        evidence=("gold",),
        log_dir=str(tmp_path),
    )
    completions = [[{"role": "assistant", "content": "x" * n}] for n in (1, 3, 5)]
    columns = {"quality": [0.0, 1.0, 0.0], "gold": [1.0, 2.0, 3.0]}
    found = asyncio.run(reward([PROMPTS[0]] * 3, completions, **columns))
    np.testing.assert_allclose(found, [0.5, 2.5, 2.5])
    rows = list(read_rollouts(tmp_path))
    assert [(row.reward, row.trained_on, row.evidence) for row in rows] == [
        (1.0, 0.5, {"gold": 1.0}),
        (3.0, 2.5, {"gold": 2.0}),
        (5.0, 2.5, {"gold": 3.0}),
    ]
    with pytest.raises(ConfigError, match="the dataset has no column 'quality'; it has gold"):
        asyncio.run(reward([PROMPTS[0]] * 3, completions, gold=[1.0, 2.0, 3.0]))
    with pytest.raises(RolloutError, match="environment"):
        asyncio.run(reward([PROMPTS[0]] * 3, completions, quality=[0.0, None, 1.0], gold=[1.0, 2.0, 3.0]))


def test_a_resumed_run_goes_on_in_its_record_and_a_new_one_does_not_write_into_another(tmp_path: Path) -> None:
    def call(step: int) -> None:
        reward = reward_function(KnownScorer(len), log_dir=str(tmp_path))
        for now in range(step, step + 2):
            state = SimpleNamespace(global_step=now)
            asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "x" * now}]], trainer_state=state))

    call(0)
    call(1)
    assert [row.step for row in read_rollouts(tmp_path)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="holds the rollouts of another run"):
        call(0)


@pytest.mark.parametrize(("before", "now"), [((0, 1), (0, 2)), ((0, 2), (0, 1)), ((1, 2), (0, 1)), ((3, 4), (0, 2))])
def test_a_new_run_with_another_number_of_processes_leaves_the_record_of_another_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], now: tuple[int, int]
) -> None:
    def begin(process: tuple[int, int]) -> None:
        monkeypatch.setenv("RANK", str(process[0]))
        monkeypatch.setenv("WORLD_SIZE", str(process[1]))
        reward = reward_function(KnownScorer(len), log_dir=str(tmp_path), group_size=1)
        state = SimpleNamespace(global_step=0)
        asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "x"}]], trainer_state=state))

    begin(before)
    with pytest.raises(ConfigError, match="holds the rollouts of another run"):
        begin(now)
    assert [row.step for row in read_rollouts(tmp_path)] == [0]


def test_processes_of_one_run_begin_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        reward = reward_function(KnownScorer(len), log_dir=str(tmp_path), group_size=1)
        state = SimpleNamespace(global_step=0)
        asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "x"}]], trainer_state=state))
    assert len(list(read_rollouts(tmp_path))) == 2


@pytest.mark.parametrize(
    ("prompts", "size", "processes", "groups"),
    [
        ("aabb", None, 1, [0, 0, 1, 1]),
        ("aabbaa", None, 1, [0, 0, 1, 1, 2, 2]),
        ("aaaabb", 2, 1, [0, 0, 1, 1, 2, 2]),
        ("aab", 4, 1, [0, 0, 1]),
        ("aabb", 2, 8, [0, 0, 1, 1]),
        ("", None, 1, []),
    ],
)
def test_groups_are_consecutive_rollouts_of_one_prompt(
    prompts: str, size: int | None, processes: int, groups: list[int]
) -> None:
    assert groups_of(prompts, group_size=size, num_processes=processes) == groups


def test_a_group_that_may_be_elsewhere_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"8 processes.*group_size"):
        groups_of("aabb", group_size=None, num_processes=8)
    with pytest.raises(ConfigError, match="3 rollouts of one prompt, which are no whole groups of 2"):
        groups_of("aaab", group_size=2, num_processes=8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"how": "add"}, "how='add' and environment=None"),
        ({"how": "add", "environment": "quality", "coefficient": -1.0}, "coefficient: got -1.0; wanted 0 or more"),
        ({"how": "weighted", "environment": "quality"}, "coefficient: got None; wanted a weight from 0 to 1"),
        ({"environment": "quality"}, "how='replace' and environment='quality'"),
        ({"group_size": 0}, "group_size: expected"),
        ({"evidence": ("gold",)}, "give log_dir"),
        ({"noise_flor": True}, "unknown setting 'noise_flor'.*noise_floor"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_training(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reward_function("runs/rm", **settings)


def test_a_scorer_that_is_made_already_takes_no_settings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="text_as: the scorer is made already"):
        reward_function(RewardScorer(folder), text_as="turns")


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
