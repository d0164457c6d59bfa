"""What tests of damaged folders share: damage that is sealed in, so that only a deeper check can notice it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rewardlab.artifact.seal import METADATA, seal
from rewardlab.core.spec import read_spec


def seal_again(folder: Path) -> None:
    """Record the folder as it is now, as if it had been saved so."""
    write_spec(folder, seal(folder, read_spec(folder)).to_dict())


def write_spec(folder: Path, values: dict[str, Any]) -> None:
    """Nothing but the spec is changed."""
    (folder / "reward_spec.json").write_text(json.dumps(values))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file of a folder, and record that."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    seal_again(path.parent)


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a folder, and record that."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata=METADATA)
    seal_again(folder)
