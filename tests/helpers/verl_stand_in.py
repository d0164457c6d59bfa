"""What of verl a reward manager meets, written by hand with the signatures of verl 0.10.0.dev (1dda039): the base class
of managers, its way of loading one, and the data of a trajectory. No test needs verl."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

MODULE = "rewardlab.rl.verl"
BASE = "verl.experimental.reward_loop.reward_manager.base"


class RewardManagerBase(ABC):
    """As verl's: it is given the configuration, the policy's tokenizer and a reward function."""

    _class_initialized = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: Callable[..., Any] | None) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]: ...


@contextmanager
def verl_importable(base: type = RewardManagerBase) -> Iterator[ModuleType]:
    """Our module for verl, imported where the stand-in is verl."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == MODULE or name.startswith("verl")}
    parts = BASE.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:end])] = ModuleType(".".join(parts[:end]))
    vars(sys.modules[BASE])["RewardManagerBase"] = base
    try:
        yield importlib.import_module(MODULE)
    finally:
        for name in [name for name in sys.modules if name == MODULE or name.startswith("verl")]:
            del sys.modules[name]
        sys.modules.update(before)


class Section(dict[str, Any]):
    """A mapping of OmegaConf: its items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def config_of(rewardlab: Mapping[str, Any] | None = None, **reward: Any) -> Section:
    """verl's configuration with our section."""
    section = {"num_workers": 8, "reward_model": Section(enable=False), **reward}
    if rewardlab is not None:
        section["rewardlab"] = Section(rewardlab)
    return Section(reward=Section(section))


@dataclass
class Data:
    """Rows of a DataProto."""

    rows: Sequence[SimpleNamespace]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> Any:
        return Data(self.rows[index]) if isinstance(index, slice) else self.rows[index]


def trajectory(prompt: Any, reply: Sequence[int], *, pad: int = 0, left: int = 3, **fields: Any) -> Data:
    """A trajectory as the agent loop makes it (`pad` 0), or as a row of a padded batch."""
    responses = torch.tensor([*reply, *[0] * pad], dtype=torch.int64)
    mask = torch.tensor([1] * left + [1] * len(reply) + [0] * pad, dtype=torch.int64)
    # As numpy makes it of a list of one list of messages: an array of mappings.
    raw = np.array([prompt])[0] if isinstance(prompt, list) and prompt else prompt
    batch = {"prompts": torch.ones(left, dtype=torch.int64), "responses": responses, "attention_mask": mask}
    return Data([SimpleNamespace(batch=batch, non_tensor_batch={"raw_prompt": raw, **fields})])
