"""The rewards that TRL's GRPOTrainer computes of given conversations, by a model that it loads or by a function."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.tiny import write_tiny

Messages = Sequence[dict[str, str]]


def trl_rewards(folder: str, groups: Sequence[Sequence[Messages]], work: Path, *, half: bool) -> list[float]:
    """The rewards of all conversations by `reward_funcs=FOLDER`, in order; a group has the same prompt, and is given to
    TRL at once.

    The policy is a tiny one, and generates nothing. Raises ImportError without TRL.
    """
    trainer = trainer_with(folder, groups[0][0][:-1], work, half=half)
    return [reward for group in groups for reward in rewards_of(trainer, group)]


def trainer_with(reward: Any, prompt: Messages, work: Path, *, half: bool) -> Any:
    """A GRPOTrainer of a tiny policy with `reward_funcs=reward`. Raises ImportError without TRL."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    policy = write_tiny(work / "policy", "tiny-llama")
    with _quiet():
        config = GRPOConfig(
            output_dir=str(work / "grpo"),
            use_cpu=True,
            bf16=half,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=2,
            num_generations=2,
        )
        return GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [list(prompt)]}),
        )


def rewards_of(trainer: Any, conversations: Sequence[Messages]) -> list[float]:
    """The rewards of conversations that are given to a trainer at once, in order."""
    prompts, completions = [list(one[:-1]) for one in conversations], [[one[-1]] for one in conversations]
    inputs = [{"prompt": prompt} for prompt in prompts]
    with _quiet(), torch.no_grad():
        # The method that a step of training calls with what was generated; it has no public name.
        rewards = trainer._calculate_rewards(inputs, prompts, completions, [[0]] * len(conversations))
    found: list[float] = rewards[:, 0].float().tolist()
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
