"""The model that a run starts from, before its weights are read: its configuration, class and renderer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.save import choose_pad
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.spec import SPEC_FILE, RendererSpec, RewardSpec, read_spec
from rewardlab.data.chat import Renderer, load_tokenizer
from rewardlab.data.config import USUAL_LENGTH, DataConfig, RenderingConfig
from rewardlab.data.dataset_names import NOTHING, Given, require_sources
from rewardlab.data.template_files import template_of
from rewardlab.data.templates import build_renderer
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import BUILTIN_NAMES, BackboneConfig, ComputeConfig
from rewardlab.model.disk_class import disk_class_of, is_made
from rewardlab.model.files import require_same_sizes, require_whole_files
from rewardlab.model.heads import require_place_for_head
from rewardlab.model.hub import commit_of, file_of
from rewardlab.model.load import PRECISION, read_config
from rewardlab.model.precision import choose_precision
from rewardlab.model.quantization import require_plain_files
from rewardlab.model.reward import AttentionLayout

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model before its weights are read: all that is needed to tokenise for it."""

    path: str
    """Hub name or folder; the folder of the conversion for the built-in model."""
    config: Any
    """The configuration of transformers."""
    disk_class: Any
    """The sequence-classification class in which it is saved."""
    renderer: Renderer
    commit: str | None
    """The commit of a model of the hub, if it is known."""

    @property
    def at_commit(self) -> str:
        """The path; for a name of the hub with its commit, so that it says which model was read."""
        return self.path if self.commit is None or Path(self.path).is_dir() else f"{self.path}@{self.commit}"


def settle_length(model: BackboneConfig, rendering: RenderingConfig) -> int:
    """Return the number of tokens that `--max-seq-len` stands for.

    Raises ConfigError if it is `model` and the model's configuration states no number of positions; ModelError if the
    model cannot be found; ArtifactError for a damaged spec of a reward model.
    """
    if isinstance(rendering.max_seq_len, int):
        return rendering.max_seq_len
    path = resolve_model_name(model.model, logger.info)
    positions = _positions(read_config(path, trust_remote_code=model.trust_remote_code))
    if rendering.max_seq_len == "auto":
        return _usual_length(path, positions)
    if positions is None:
        raise ConfigError(
            "--max-seq-len model: the configuration of this model states no number of positions. Give a number of "
            "tokens."
        )
    logger.info("length: up to %d tokens, the positions of the model", positions)
    return positions


def _usual_length(path: str, positions: int | None) -> int:
    """Return the number of tokens where none is asked for: that of a reward model, or what the positions allow."""
    if (spec := spec_of(path)) is not None:
        logger.info("length: up to %d tokens, as the reward model was trained", spec.renderer.max_length)
        return spec.renderer.max_length
    if positions is None or positions >= USUAL_LENGTH:
        return USUAL_LENGTH
    logger.info("length: up to %d tokens, the positions of the model", positions)
    return positions


def settle_rendering(model: BackboneConfig, rendering: RenderingConfig) -> dict[str, Any]:
    """Return settings of rendering, by their flat names, that depend on the model or on a file, decided: the number of
    tokens, the text of the template, and whether texts stay as they are, as a reward model had them that goes on.

    Raises ConfigError for a template that cannot be used, and as `settle_length` does; ArtifactError for a damaged spec
    of a reward model; ModelError for a model at a revision that the hub does not give.
    """
    settled = {
        "max_seq_len": settle_length(model, rendering),
        "chat_template": template_of(rendering.chat_template),
    }
    if (joined := _joined_before(model, rendering)) is not None:
        own = rendering.system_prompt
        settled |= {"chat_template": "concat", "system_prompt": joined.system_prompt if own is None else own}
    return settled


def goes_on_joining(model: BackboneConfig, rendering: RenderingConfig) -> bool:
    """Return whether the model is a reward model that was trained on texts as they are, and no other template is asked
    for. Its template alone would join the turns of a transcript without their names.

    Raises ModelError and ArtifactError as `settle_rendering` does.
    """
    return _joined_before(model, rendering) is not None


def _joined_before(model: BackboneConfig, rendering: RenderingConfig) -> RendererSpec | None:
    """Return how a reward model renders that goes on joining texts as they are; None for any other model."""
    if rendering.chat_template != "auto" or not model.model:
        return None
    spec = spec_of(resolve_model_name(model.model, logger.info))
    return spec.renderer if spec is not None and spec.renderer.joins_texts else None


def spec_of(path: str) -> RewardSpec | None:
    """Return the spec of a reward model, in its folder or on the hub; None for a model of another kind, or for none.

    Raises ArtifactError for a damaged spec.
    """
    place = file_of(path, SPEC_FILE)
    return None if place is None else read_spec(place.parent)


def _positions(config: Any) -> int | None:
    """Return the number of positions of a model, or None if its configuration states none."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


def require_positions(config: Any, length: int, length_from: str = "") -> None:
    """Raise ConfigError if a length limit is above the number of positions that a model's configuration states.

    `length_from` is a sentence on what sets such a limit besides the flag.
    """
    positions = _positions(config)
    if positions is not None and length > positions:
        raise ConfigError(
            f"--max-seq-len {length} is above the {positions} positions of this model. Use at most {positions}."
            f"{length_from and f' {length_from}'}"
        )


def require_embeddings(renderer: Renderer, num_embeddings: int) -> None:
    """Raise ModelError if the chat template writes tokens that the model has no embeddings for.

    Words of which texts may consist are told, since only such texts cannot be scored. ConfigError is raised as
    `render_canaries` does.
    """
    tokenizer, canaries = renderer.tokenizer, render_canaries(renderer)
    rendered = {int(token) for _, _, token_ids in canaries for token in token_ids}
    remedy = (
        f"The model has embeddings for {num_embeddings} tokens and its tokenizer has {len(tokenizer)}: enlarge them by "
        f"model.resize_token_embeddings(len(tokenizer)) and save the model again."
    )
    if written := [token for token in sorted(rendered) if token >= num_embeddings]:
        names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in written)
        raise ModelError(f"the rendered conversations hold {names}, which the model cannot read. {remedy}")
    beyond = {name for name, token in tokenizer.get_vocab().items() if token >= num_embeddings}
    # A control token that is typed is read as letters, so one that no template writes, such as one for padding, does no
    # harm.
    if renderer.spec.special_tokens_in_text == "text":
        beyond -= set(renderer.markers.names)
    if beyond:
        shown = ", ".join(map(repr, sorted(beyond)[:3])) + (" and others" if len(beyond) > 3 else "")
        logger.warning("model: texts with %s cannot be read. %s", shown, remedy)


def open_base(
    model: BackboneConfig,
    rendering: RenderingConfig,
    *,
    truncation: str | None = None,
    computes: bool = True,
    length_from: str = "",
) -> Base:
    """Find the model and build its renderer.

    `truncation` is the rule by which the renderer cuts long conversations; by default that of the newest models.
    `computes` says whether a reward is read from the model, for which it needs a place; else it renders texts alone.
    `length_from` is as in `require_positions`.

    Raises ModelError, RenderError or ArtifactError for a model that could not be saved as a reward model, or has too
    few embeddings for its tokenizer, and ConfigError for a length limit above its number of positions or too small for
    every canary.
    """
    path = resolve_model_name(model.model, logger.info)
    folder = Path(path) if Path(path).is_dir() else None
    if folder is not None:
        require_whole_files(folder)
    config = read_config(path, trust_remote_code=model.trust_remote_code)
    if computes:
        require_plain_files(path, config)
    disk_class = disk_class_of(config)
    if is_made(disk_class):
        logger.info(
            "model: transformers has no sequence-classification class for %s; what is saved is read by rewardlab and "
            "vLLM, and not by AutoModelForSequenceClassification",
            config.model_type,
        )
    if folder is not None:
        require_same_sizes(folder, config, disk_class)
    if computes:
        require_place_for_head(path, config, disk_class)
    require_positions(config, rendering.length_limit, length_from)
    # A reward model that is trained further keeps the treatment of control tokens in messages that it was trained with.
    if rendering.special_tokens_in_text == "auto" and (spec := spec_of(path)) is not None:
        rendering = replace(rendering, special_tokens_in_text=spec.renderer.special_tokens_in_text)
    renderer = build_renderer(load_tokenizer(path, trust_remote_code=model.trust_remote_code), rendering)
    if truncation is not None:
        renderer = Renderer(renderer.tokenizer, replace(renderer.spec, truncation=truncation))
    # Saving needs at least one canary and a pad token: refuse a model without them now, not after training.
    num_embeddings = config.get_text_config().vocab_size
    require_embeddings(renderer, num_embeddings)
    renderer.pad_token_id = choose_pad(renderer, num_embeddings)
    renderer.num_embeddings = num_embeddings
    return Base(path=path, config=config, disk_class=disk_class, renderer=renderer, commit=commit_of(path))


def require_inputs(model: BackboneConfig, data: DataConfig, given: Given = NOTHING) -> None:
    """Raise ModelError, DataError or ConfigError if the model, the data or a chat template cannot be found.

    Called before the output folder is created, so that a mistyped name leaves no folder behind.
    """
    require_sources(data, given)
    template_of(data.rendering.chat_template)
    if model.model.lower() not in BUILTIN_NAMES:
        read_config(resolve_model_name(model.model, logger.info), trust_remote_code=model.trust_remote_code)


def decide_computing(
    base: Base,
    model: BackboneConfig,
    compute: ComputeConfig,
    *,
    layout: AttentionLayout,
    device: torch.device,
    train: bool,
    divided: bool = False,
) -> dict[str, Any]:
    """Return decided settings by their flat names: arithmetic, attention, kernels, how control tokens are read.

    `train` says whether gradients are computed, `divided` whether ranks hold parts of the model, whose adapters no
    kernel sums. Raises ConfigError for settings that cannot be used on this machine.
    """
    precision = choose_precision(
        model.precision,
        base.config,
        base.disk_class,
        compute,
        layout=layout,
        device=device,
        train=train,
        log=logger.info,
    )
    kernels = choose_compute(
        compute,
        base.config.get_text_config(),
        device=device,
        dtype=PRECISION[precision],
        train=train,
        log=logger.info,
        rank=0 if divided else model.summed_rank,
    )
    return kernels | {
        "precision": precision,
        "attention": "padded" if layout == "padded" else "shared",
        "special_tokens_in_text": base.renderer.spec.special_tokens_in_text,
    }
