"""What tests of sound folders share: a tiny reward model, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common import CHATML, make_model, make_tokenizer
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.errors import ArtifactError
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.verifying.folder import verify


def save(folder: Path, family: str = "llama", *, template: str | None = CHATML, dtype=torch.float32, **settings):
    """A saved tiny reward model and its spec."""
    renderer = build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=256))
    model = make_model(family, **settings)
    if family == "llama" and "config" not in settings:
        # A base other than the default, so that losing it shows.
        model = make_model(family, config=_with_rope(model.config, 777.0))
    spec = save_reward_model(folder, model, renderer, beta=1.5, save_dtype=dtype, provenance={"test": True})
    return model, renderer, spec


def _with_rope(config, base):
    config.rope_parameters = {"rope_type": "default", "rope_theta": base}
    return config


def refusal(folder: Path) -> str:
    """What `load` and `verify` say, which is the same."""
    said = []
    for check in (load, verify):
        with pytest.raises(ArtifactError) as refused:
            check(folder)
        said.append(str(refused.value))
    assert said[0] == said[1]
    return said[0]
