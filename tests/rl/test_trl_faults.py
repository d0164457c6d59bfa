"""A reward model that fails in the middle of GRPO: training ends before the step, or goes on with the same rewards."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from faulty_proxy import Faults, spoiling
from reward_models import save_tiny, served
from rewardlab.rl import BlockingScorer, RolloutError, Scored
from rewardlab.rl.trl import reward_function
from trl_runs import GROUP, PROMPTS, KnownScorer, Seen, trainer

pytest_plugins = ["reward_fixtures"]
pytestmark = [
    pytest.mark.usefixtures("closed_rewards"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning"),  # TRL's own
]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_reward_that_trl_would_make_infinite_is_an_error_that_names_the_rollout(tmp_path: Path) -> None:
    reward = reward_function(KnownScorer(lambda reply: 1e39 if reply else 1.0), log_dir=str(tmp_path))
    completions = [[{"role": "assistant", "content": text}] for text in ("", "x")]
    with pytest.raises(RolloutError, match="no reward in float32") as caught:
        asyncio.run(reward([PROMPTS[0]] * 2, completions))
    assert caught.value.rollouts == (1,)
    assert not list(tmp_path.iterdir())
