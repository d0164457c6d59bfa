"""A tiny saved model for the tests of the client, made once a session."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common import make_model, make_tokenizer
from fake_engines import Model
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.spec import RewardSpec, read_spec
from rewardlab.data.chat import Renderer, load_tokenizer, to_messages
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer

_PLACE = tempfile.TemporaryDirectory(prefix="rewardlab-client-")


@cache
def folder() -> Path:
    """A saved tiny reward model with references for half precision."""
    path = Path(_PLACE.name) / "rm"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    save_reward_model(path, make_model(), renderer, beta=1.0, save_dtype=torch.bfloat16, provenance={})
    return path


@cache
def spec() -> RewardSpec:
    """Its spec."""
    return read_spec(folder())


def digest() -> str:
    """Its digest."""
    return json.loads((folder() / "config.json").read_text())["rewardlab_spec_sha256"]


@cache
def renderer() -> Renderer:
    """Its renderer."""
    return Renderer(load_tokenizer(str(folder())), spec().renderer)


def table(**how: Any) -> Model:
    """The model of the folder as a table."""
    return Model(spec=spec(), renderer=renderer(), **how)


def talks(count: int) -> list[list[dict[str, str]]]:
    """Distinct conversations; every third has the prompt of the first."""
    return [
        [
            {"role": "user", "content": f"Prompt {0 if number % 3 == 0 else number}?"},
            {"role": "assistant", "content": f"Reply {number}."},
        ]
        for number in range(count)
    ]


def expected(conversations: list[Any]) -> list[float]:
    """The scores of conversations, by the table."""
    return [table().score(renderer().token_ids(to_messages(one)).tolist()) for one in conversations]
