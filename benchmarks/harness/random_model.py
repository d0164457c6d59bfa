"""Models of any shape with random weights, through the loader of a run: only the reading of files is replaced."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rewardlab.model import load

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def config_folder(folder: Path, config: Mapping[str, object]) -> str:
    """A folder with a config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = str(config["model_type"])
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": [ARCHITECTURES[kind]]}), encoding="utf-8"
    )
    return str(folder)


@contextlib.contextmanager
def random_weights(*, seed: int, device: torch.device) -> Iterator[None]:
    """Meanwhile `load_reward_model` draws the weights of a folder on the device, and reads none."""

    def draw(disk_class: Any, name: str, implementation: str, **_: Any) -> tuple[Any, set[str], set[str]]:
        config = load.read_config(name)
        config.num_labels = 1
        model = build(disk_class, config, implementation, seed=seed, device=device)
        return model, {"score.weight"}, set()

    with mock.patch.object(load, "read_classifier", draw):
        yield


def build(model_class: Any, config: Any, implementation: str, *, seed: int, device: torch.device) -> Any:
    """A model in float32, its weights drawn on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return model_class._from_config(config, attn_implementation=implementation, dtype=torch.float32)
