"""The renderer of a model, without its weights: as training opens it, or only to count tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from rewardlab.core.schema import read_object
from rewardlab.core.spec import DAMAGED, SPEC_FILE, read_spec
from rewardlab.core.values import require
from rewardlab.data.chat import Renderer, load_tokenizer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer

logger = logging.getLogger("rewardlab")
UNCUT: Final = 1 << 30
"""A length limit that nothing reaches, so that whole lengths are counted."""


def renderer_of(model: str, rendering: RenderingConfig) -> Renderer:
    """Return the renderer of a model: that of a reward-model folder's spec, else the one that training would use.

    Raises ConfigError for settings that a reward-model folder has itself, and as `artifact.base.open_base` does.
    """
    if _is_reward_model(Path(model)):
        return _of_reward_model(Path(model), rendering)
    # Imported here, since a folder that has been saved needs no torch to render.
    from rewardlab.artifact.base import open_base, settle_rendering
    from rewardlab.model.config import BackboneConfig

    backbone = BackboneConfig(model=model)
    return open_base(backbone, replace(rendering, **settle_rendering(backbone, rendering)), computes=False).renderer


def counting_renderer(model: str, rendering: RenderingConfig) -> Renderer:
    """Return a renderer to count a model's tokens with; only its tokenizer has to be there.

    Raises ConfigError for settings that a reward-model folder has itself, and for a limit that only a model knows;
    RenderError if there is no tokenizer; ModelError if the built-in model cannot be fetched.
    """
    # Imported here, since only the built-in model needs this module and its file lock.
    from rewardlab.model.builtin import resolve_model_name

    folder = Path(path := resolve_model_name(model, logger.info))
    if _is_reward_model(folder):
        return _of_reward_model(folder, rendering)
    require(
        rendering.max_seq_len != "model",
        "--max-seq-len model: no more of a model is read than its tokenizer, so give the number of tokens.",
    )
    return build_renderer(load_tokenizer(path), rendering)


def _is_reward_model(folder: Path) -> bool:
    return (folder / SPEC_FILE).is_file()


def _of_reward_model(folder: Path, rendering: RenderingConfig) -> Renderer:
    require(
        rendering == RenderingConfig(),
        f"--model {folder}: is a reward model, which has its own template, limit and truncation. Leave out "
        f"--max-seq-len, --truncation, --chat-template, --template-arguments, --system-prompt and "
        f"--special-tokens-in-text.",
    )
    renderer = Renderer(load_tokenizer(str(folder)), read_spec(folder).renderer)
    config = read_object(folder / "config.json", DAMAGED)
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    renderer.pad_token_id = pad if isinstance(pad, int) else None
    renderer.num_embeddings = size if isinstance(size, int) else None
    return renderer
