"""Trainers of TRL with a tiny policy on the CPU, and reward functions that are watched or known in closed form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from common import make_tokenizer
from rewardlab.rl import RewardScorer, Scored
from rewardlab.rl.members import About
from rewardlab.rl.trl import RewardFunction

GROUP = 4
REWARDS: list[Any] = []
"""Those that trainers were made with."""
PROMPTS = [[{"role": "user", "content": f"Question {number}?"}] for number in range(16)]


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
