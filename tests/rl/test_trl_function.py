"""The reward function for TRL by itself: what it takes and refuses, its groups, its record, and other processes."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trl.trainer.utils import is_async_callable

from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.rl import RewardScorer, RolloutError, Scored, read_rollouts
from rewardlab.rl.rewarding import groups_of
from rewardlab.rl.trl import reward_function
from trl_runs import PROMPTS, KnownScorer

pytest_plugins = ["reward_fixtures"]


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


def test_a_function_of_a_scorer_that_is_made_already_reaches_another_process_too(folder: Path) -> None:
    reward = pickle.loads(pickle.dumps(reward_function(RewardScorer(folder), noise_floor=False)))

    async def done() -> list[float]:
        try:
            return await reward([PROMPTS[0]], [[{"role": "assistant", "content": "So."}]])
        finally:
            await reward.aclose()

    assert all(map(math.isfinite, asyncio.run(done())))


@pytest.mark.slow
def test_loops_that_ended_leave_no_model_behind(folder: Path) -> None:
    def engines() -> int:
        gc.collect()
        return sum(thread.name == "rewardlab-engine" for thread in threading.enumerate())

    reward = reward_function(folder, noise_floor=False)
    before = engines()
    for _ in range(3):
        asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "So."}]]))
        while engines() != before + 1:  # the one of an ended loop ends by itself
            time.sleep(0.001)


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
    with pytest.raises(RolloutError, match=r"^step 2, prompt 0, reply 1: .* reward of the environment .*missing"):
        asyncio.run(reward([PROMPTS[0]] * 3, completions, quality=[0.0, None, 1.0], gold=[1.0, 2.0, 3.0]))


def kept_keys(folder: Path, prompts: list[Any], completions: list[Any], **how: Any) -> list[str]:
    """The prompt keys in the record of a call."""

    class Scorer(KnownScorer):
        async def details(self, rollouts: Any) -> list[Scored]:
            return [Scored(score=float(number), noise=0.0) for number, _ in enumerate(rollouts)]

    scorer = Scorer(len)
    scorer.config = replace(scorer.config, **how)
    asyncio.run(reward_function(scorer, log_dir=str(folder))(prompts, completions))
    return [row.prompt_key for row in read_rollouts(folder)]


def with_tools(number: int) -> list[dict[str, str]]:
    turns = (("assistant", f"look {number}"), ("tool", f"found {number}"), ("assistant", "So."))
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("prompts", "completions", "how"),
    [
        (PROMPTS, [[{"role": "assistant", "content": "So."}]] * 4, {}),
        (PROMPTS, [with_tools(number) for number in range(4)], {}),
        (["Why?", "How?"], ["a", "b", "c", "d"], {"text_as": "turns"}),
        (["<user>Why?", "<user>How?"], ["a", "b", "c", "d"], {"text_as": "rendered"}),
        (PROMPTS, [with_tools(n) for n in range(4)], {"render_fn": lambda pair: [*pair[0], *pair[1][:1]]}),
        (PROMPTS, [with_tools(n) for n in range(4)], {"render_fn": lambda pair: f"{pair}"}),
        (
            [[{"role": "user", "content": None, "name": name}] for name in "ab"],
            ["a", "b", "c", "d"],
            {"render_fn": lambda pair: (5, 6)},
        ),
    ],
    ids=["one turn", "several turns", "texts", "rendered", "remade", "remade as text", "of no known form"],
)
def test_all_replies_to_a_prompt_have_one_key_in_the_record(
    tmp_path: Path, prompts: list[Any], completions: list[Any], how: dict[str, Any]
) -> None:
    one, same, other, again = kept_keys(tmp_path, [prompts[0]] * 2 + [prompts[1]] * 2, completions, **how)
    assert one == same != other == again


@pytest.mark.parametrize("gold", [[1.0], [1.0, 2.0, 3.0, 4.0], 1.0, "high"])
def test_evidence_that_is_not_one_value_a_rollout_is_refused_before_anything_is_scored(
    tmp_path: Path, gold: object
) -> None:
    scorer = KnownScorer(lambda reply: pytest.fail("scored"))
    reward = reward_function(scorer, evidence=("gold",), log_dir=str(tmp_path))
    completions = [[{"role": "assistant", "content": "x" * n}] for n in (1, 3, 5)]
    with pytest.raises(ConfigError, match="gold: got .*wanted one for each"):
        asyncio.run(reward([PROMPTS[0]] * 3, completions, gold=gold))
    assert list(tmp_path.iterdir()) == []


def test_a_call_without_rollouts_has_no_rewards_and_one_with_too_few_replies_is_refused() -> None:
    reward = reward_function(KnownScorer(len))
    assert asyncio.run(reward([], [], log_metric=lambda name, value: pytest.fail("nothing to tell"))) == []
    with pytest.raises(ConfigError, match="completions: got 1 for 2 rollouts"):
        asyncio.run(reward(PROMPTS[:2], [[{"role": "assistant", "content": "x"}]]))


@pytest.mark.parametrize("beside", ["tool_calls", "reasoning_content"])
def test_a_refused_completion_names_the_function_that_makes_messages_of_it(beside: str) -> None:
    completion, scorer = {"role": "assistant", "content": "So.", beside: ["hm"]}, KnownScorer(len)
    with pytest.raises(RolloutError, match=rf"reply 0: a message has {beside}, .* A render_fn of reward_function can"):
        asyncio.run(reward_function(scorer)([PROMPTS[0]], [[completion]]))
    scorer.config = replace(scorer.config, render_fn=lambda pair: [*pair[0], completion])
    with pytest.raises(RolloutError, match=rf"take {beside} out\.$"):
        asyncio.run(reward_function(scorer)([PROMPTS[0]], [[completion]]))


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


def test_a_second_trainer_with_the_same_function_does_not_mix_its_rollouts_into_the_first_ones(tmp_path: Path) -> None:
    reward = reward_function(KnownScorer(len), log_dir=str(tmp_path))

    def call(*steps: int) -> None:
        for step in steps:
            state = SimpleNamespace(global_step=step)
            asyncio.run(reward([PROMPTS[0]], [[{"role": "assistant", "content": "x" * step}]], trainer_state=state))

    call(0, 0, 1, 2, 3)
    call(2)
    assert [row.step for row in read_rollouts(tmp_path)] == [0, 0, 1, 2], "as a trainer that went on from step 2 has it"
    with pytest.raises(ConfigError, match="holds the rollouts of another run"):
        call(0)


def test_two_functions_of_a_trainer_do_not_share_a_record_and_a_resumed_run_loses_no_rollout(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self, *folders: Path) -> None:
            self.reward_funcs = [reward_function(KnownScorer(len), log_dir=str(folder)) for folder in folders]
            self.reward_func_names = [f"reward {number}" for number in range(len(folders))]

        def log_metric(self, name: str, value: float) -> None: ...

        def train(self, step: int) -> None:
            for reward in self.reward_funcs:
                replies, state = [[{"role": "assistant", "content": "x"}]], SimpleNamespace(global_step=step)
                asyncio.run(reward([PROMPTS[0]], replies, trainer_state=state, log_metric=self.log_metric))

    with pytest.raises(ConfigError, match=r"several reward functions of the trainer .* Give each a folder of its own"):
        Trainer(tmp_path / "one", tmp_path / "other" / ".." / "one").train(10)
    assert not list(tmp_path.iterdir())
    Trainer(tmp_path / "one", tmp_path / "other").train(10)
    assert [[row.step for row in read_rollouts(tmp_path / name)] for name in ("one", "other")] == [[10], [10]]


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
    with pytest.raises(ConfigError, match="3 rollouts of one prompt, which are not whole groups of 2"):
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


def test_a_folder_without_a_reward_model_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nosuch: no such folder"):
        reward_function(str(tmp_path / "nosuch"))
    with pytest.raises(ArtifactError, match=r"no reward_spec\.json"):
        reward_function([str(folder), tmp_path])
    assert reward_function([str(folder), "http://127.0.0.1:1"]), "nothing is loaded, and no server is asked"


def test_a_scorer_that_is_made_already_takes_no_settings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="text_as: the scorer is made already"):
        reward_function(RewardScorer(folder), text_as="turns")
