"""The model that a run starts from, before its weights are read: enough to tokenise for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.save import choose_pad
from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import CUT_FEWEST, SPEC_FILE, read_spec
from rewardlab.data.chat import Renderer, build_renderer, load_tokenizer
from rewardlab.data.config import DataConfig, RenderingConfig
from rewardlab.data.named import require_sources
from rewardlab.model.builtin import BUILTIN_NAMES, resolve_model_name
from rewardlab.model.config import BackboneConfig
from rewardlab.model.files import require_same_sizes, require_whole_files
from rewardlab.model.load import disk_class_of, read_config

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model before its weights are read: enough to tokenise for it."""

    path: str
    config: Any
    """Of transformers."""
    disk_class: Any
    """The sequence-classification class that it is saved as."""
    renderer: Renderer


def settle_length(model: BackboneConfig, rendering: RenderingConfig) -> int:
    """The number of tokens that `--max-seq-len` means; ConfigError for `model` where it has no number of positions."""
    if rendering.max_seq_len != "model":
        return rendering.max_seq_len
    path = resolve_model_name(model.model, logger.info)
    positions = _positions(read_config(path, trust_remote_code=model.trust_remote_code))
    if positions is None:
        raise ConfigError("--max-seq-len model: this model has no number of positions. Give a number of tokens.")
    logger.info("length: up to %d tokens, the positions of the model", positions)
    return positions


def _positions(config: Any) -> int | None:
    """Of a model, by its configuration; None if it counts none."""
    found: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found


def open_base(model: BackboneConfig, rendering: RenderingConfig, *, truncation: str = CUT_FEWEST) -> Base:
    """Find the model and build its renderer, which cuts by the rule `truncation`.

    Raises ModelError, RenderError or ArtifactError for a model that could not be saved as a reward model, ConfigError
    for a limit beyond its positions.
    """
    path = resolve_model_name(model.model, logger.info)
    folder = Path(path) if Path(path).is_dir() else None
    if folder is not None:
        require_whole_files(folder)
    config = read_config(path, trust_remote_code=model.trust_remote_code)
    disk_class = disk_class_of(config)
    if folder is not None:
        require_same_sizes(folder, config, disk_class)
    positions = _positions(config)
    if positions is not None and rendering.length_limit > positions:
        raise ConfigError(
            f"--max-seq-len {rendering.max_seq_len} is above the {positions} positions of this model. Use at most "
            f"{positions}."
        )
    if (
        rendering.special_tokens_in_text == "auto" and (Path(path) / SPEC_FILE).is_file()
    ):  # what goes on keeps its reading
        rendering = replace(rendering, special_tokens_in_text=read_spec(Path(path)).renderer.special_tokens_in_text)
    renderer = build_renderer(load_tokenizer(path, trust_remote_code=model.trust_remote_code), rendering)
    renderer = Renderer(renderer.tokenizer, replace(renderer.spec, truncation=truncation))
    render_canaries(renderer)
    renderer.pad_token_id = choose_pad(renderer, config.get_text_config().vocab_size)
    return Base(path=path, config=config, disk_class=disk_class, renderer=renderer)


def require_inputs(model: BackboneConfig, data: DataConfig) -> None:
    """Raise ModelError, DataError or ConfigError for a model or data that are not there: said before a folder is
    claimed for what is made of them.
    """
    require_sources(data)
    if model.model.lower() not in BUILTIN_NAMES:
        read_config(model.model, trust_remote_code=model.trust_remote_code)
