"""Loading a RewardModel by name: any causal model of transformers, or an existing reward model with its head.

Anything missing, superfluous or unsuitable is an error or a line of the log; nothing is filled in silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from rewardlab.core.errors import ModelError
from rewardlab.core.files import at_home
from rewardlab.core.schema import read_object
from rewardlab.core.spec import why_no_model
from rewardlab.core.terminal import quoted
from rewardlab.core.types import Log
from rewardlab.model import attention
from rewardlab.model.applying import apply_compute
from rewardlab.model.attention_backends import HALF
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import (
    DEFAULT_COMPUTE,
    BackboneConfig,
    ComputeConfig,
    ModelConfig,
    looks_local,
    misspelt_builtin,
)
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.files import ADAPTER_CONFIG, CONFIG, DAMAGED_BASE, require_counts, told
from rewardlab.model.half import line_about_others
from rewardlab.model.heads import is_classifier, needs_own_code, not_causal, require_one_output
from rewardlab.model.lora import HEAD_NAMES, bare_name, measure_lengths
from rewardlab.model.outline import Originals, Outline, Place
from rewardlab.model.quantization import loading_options, prepare_quantized, quantized_files
from rewardlab.model.reward import HEAD_ON_DISK, AttentionLayout, RewardModel
from rewardlab.model.selftest import EXACT, distance_from_alone, distance_from_padded, inexact, leak, measured_again
from rewardlab.model.sharded_weights import (
    Division,
    drop_gathered,
    fill,
    fill_head,
    outline_of,
    places_in,
    standing_in,
    worst,
)
from rewardlab.model.text_part import for_text, text_class
from rewardlab.model.trainable import choose_trainable, half_frozen, parameters_line

PRECISION: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_DISTANCE: Final = 1e-4
MAX_DISTANCE_HALF: Final = 0.5
"""Largest allowed difference between the scores of the real model's packed and padded layouts, relative to
max(1, |score|), in float32 and in half precision. It leaves room for the rounding of many layers and for no more."""
_WANTED: Final = "Give a hub name, a folder with config.json and weights, or smollm2-135m-instruct."


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration (of transformers) of the model at `name`.

    Raises ModelError if there is no model, if there are adapters alone, or if the configuration cannot be read or has
    absurd numbers.
    """
    path = Path(name)
    if path.is_file() or (looks_local(name) and not path.exists()):
        home = at_home(path)
        remark = f" (write {home}: the shell did not expand ~)" if name.startswith("~") and home.is_dir() else ""
        why = why_no_model(name) if path.is_file() else f"there is no such folder{remark}."
        raise ModelError(f"no model at {name!r}: {why} {_WANTED}")
    if said := misspelt_builtin(name):
        raise ModelError(said)
    if (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        raise ModelError(_adapters_alone(path))
    if (own := path / CONFIG).is_file():
        require_counts(read_object(own, DAMAGED_BASE), where=str(own))
    with told(name, f"its {CONFIG} cannot be read"):
        try:
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):  # transformers names its argument
                raise needs_own_code(name) from error
            why = why_no_model(name) or str(error).splitlines()[0]
            raise ModelError(f"no model at {name!r}: {why} {_WANTED}") from error


def _adapters_alone(folder: Path) -> str:
    """Return the message for a folder of adapters without their base model."""
    merged = folder.resolve().parent
    where = str(merged) if (merged / CONFIG).is_file() else "the reward-model folder that they were exported from"
    return (
        f"{folder}: it holds adapters alone (a folder of PEFT, without config.json), and how conversations are "
        f"rendered for them is in the merged folder. Go on from that: {where}. Adapters of another project are "
        f"imported first: `rewardlab import {quoted(str(folder))} --output-dir NEW`."
    )


def choose_layout(
    model_config: Any, disk_class: Any, config: BackboneConfig, *, max_length: int, share: bool, log: Log
) -> AttentionLayout:
    """Return `shared` if shared prompts are exact for this model (or `unshared`, without `share`), else `padded`.

    The log says why a model gets the padded path. Raises ModelError if `--attention shared` was asked for and is not
    exact, or if a conversation's score would depend on the other rows in every layout.
    """
    text_config = model_config.get_text_config()
    if (limit := attention.steady_up_to(text_config)) is not None and max_length > limit:
        raise ModelError(
            f"above {limit} tokens this model's positions depend on the longest row of a batch, so a score would "
            f"depend on the other rows. Use --max-seq-len {limit} or less."
        )
    if config.attention == "padded":
        return "padded"
    reason = attention.refusal(text_config, text_class(text_config, type(model_config)), max_length)
    if reason is None:
        reason = inexact(text_config, disk_class, max_length, log)
    if reason is not None:
        if config.attention == "shared":
            raise ModelError(
                f"--attention shared is not exact for {disk_class.__name__}: {reason}. Use auto or padded."
            )
        log(f"attention: padded, because {reason}; every prompt is computed once per reply")
        return "padded"
    if not share:
        log("attention: packed without sharing prompts, as asked")
        return "unshared"
    return "shared"


def load_reward_model(
    name: str,
    config: ModelConfig,
    compute: ComputeConfig = DEFAULT_COMPUTE,
    *,
    seed: int,
    layout: AttentionLayout,
    device: torch.device,
    log: Log,
    division: Division | None = None,
) -> RewardModel:
    """Load, check and prepare a model for training as `config` says, with the kernels that `compute` names.

    With a `division` all its processes call this; each reads only its own part of the weights if the files allow it.

    Raises ModelError for missing or mismatched weights, for names of layers that the model does not have, or if one
    reply can see another; ConfigError for settings that cannot be used on this device.
    """
    precision = PRECISION[resolve_precision(config.precision, device)]
    kept = [module for module in config.lora_modules_to_save if module not in HEAD_NAMES]
    options = loading_options(config.quantization, compute_dtype=precision, keep=kept, device=device)
    outline = None if division is None else partial(outline_of, division=division, log=log)
    read = _read_weights(name, config, layout, options, outline)
    model = wrap(read.classifier, layout=layout, compute_dtype=precision)
    prepare_quantized(model.backbone, config.quantization, precision)
    places = None if read.outline is None else places_in(read.outline, model)
    if places is not None:
        fill_head(model, places, device)
    elif division is not None:
        model.head.to(device)
    if read.new_head:
        init_head(model.head, seed)
        log(f"head: new, seed {seed}")
    else:
        log(_line_about_kept(model.head, name))
    disable_dropout(model)
    with standing_in(model):
        choose_trainable(model, config, seed=seed)
    if places is not None:
        measure_lengths(model, Originals(places))
    rounded = half_frozen(model.backbone, precision)
    # Quantised weights were read straight to the device. A divided model is moved part by part later, since all of it
    # may not fit.
    if config.quantization == "none" and division is None:
        model.to(device)
    model.train()
    if "auto" in vars(compute).values():
        chosen = choose_compute(compute, model.config, device=device, dtype=precision, log=log, rank=config.summed_rank)
        # The choice is measured, so ranks might choose differently; all take that of the first.
        compute = replace(compute, **(chosen if division is None else division.gather(chosen)[0]))
    apply_compute(model, compute, half_rounding=config.half_rounding)
    if precision in HALF and (line := line_about_others(model.backbone)):
        log(line)
    if division is not None:
        rounded = divide_and_fill(model, places, division) or rounded
    if rounded or config.quantization != "none":
        model.read_originals = partial(_read_state, name, config) if places is None else partial(Originals, places)
    require_sound_layout(model, log, division)
    drop_gathered(model)
    log(parameters_line(model))
    return model


def _line_about_kept(head: nn.Linear, name: str) -> str:
    """Return the line of the log about the head that came with the model at `name`."""
    zero = "" if head.weight.any() else "; every score is 0 at first: --new-head draws another head"
    return f"head: kept from {Path(name).name}, norm {head.weight.norm():.4g}{zero}"


def divide_and_fill(model: RewardModel, places: Mapping[str, Place] | None, division: Division) -> bool:
    """Divide the model among the ranks, and read each rank's part from `places` if weights are still empty.

    Returns whether reading rounded any weight on any rank.
    """
    division.divide(model)
    return any(division.gather(places is not None and fill(model, places, bare_name)))


def _read_state(name: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read every weight of the model at `name` in float32, under the names of a RewardModel."""
    read = _read_weights(name, config, "padded")
    return wrap(read.classifier, layout="padded", compute_dtype=torch.float32).state_dict()


def wrap(classifier: Any, *, layout: AttentionLayout, compute_dtype: torch.dtype) -> RewardModel:
    """Make a RewardModel of the backbone and the head of a loaded sequence classifier.

    Raises ModelError if the classifier has no linear head with one output.
    """
    head = getattr(classifier, HEAD_ON_DISK, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise not_causal(f"{type(classifier).__name__} has no linear head `{HEAD_ON_DISK}` with one output.")
    backbone = getattr(classifier, classifier.base_model_prefix)
    for module in backbone.modules():
        if isinstance(module, nn.Embedding):
            # PyTorch gives the padding token's embedding no gradient. The pad token of many models is also a real token
            # (often EOS), whose embedding would never train.
            module.padding_idx = None
    return RewardModel(
        backbone,
        head.float() if head.weight.dtype.itemsize < 4 else head,
        disk_class=type(classifier),
        layout=layout,
        compute_dtype=compute_dtype,
    )


def init_head(head: nn.Linear, seed: int) -> None:
    """Draw the head's weights from N(0, 1 / (W + 1)) with W the hidden width (Stiennon et al. 2020); set its bias to 0.

    It has a generator of its own, so that the same seed gives the same head whatever was drawn before.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def disable_dropout(model: nn.Module) -> None:
    """Switch off the model's own dropout, because both sides of a comparison must see the same network."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            # Many models apply dropout by a rate in an attribute: dropout, attn_pdrop, layerdrop.
            if isinstance(value, float) and ("drop" in name):
                setattr(module, name, 0.0)


def require_sound_layout(model: RewardModel, log: Log, division: Division | None = None) -> None:
    """Raise ModelError if a reply's score depends on its sibling, if packed scores differ from those of padded rows, or
    if those depend on the rows beside them.

    The processes of a `division` measure together, and all of them decide by the largest result.
    """
    # With 8-bit weights bitsandbytes also rounds activations to 8 bits, which is coarser than bf16.
    in_8_bits = getattr(model.backbone, "is_loaded_in_8bit", False)
    exact = model.compute_dtype.itemsize >= 4 and not in_8_bits
    most_moved = EXACT if exact else torch.finfo(torch.bfloat16 if in_8_bits else model.compute_dtype).eps
    most_distant = MAX_DISTANCE if exact else MAX_DISTANCE_HALF

    def measured(measure: Callable[[RewardModel], float], most: float, name: str) -> float:
        find = worst(partial(measure, model), division)
        # Not measured again on a GPU: a kernel with a race condition is wrong only now and then, and a second
        # measurement would excuse it.
        return measured_again(find, most, name, log) if model.device.type == "cpu" else find()

    name = type(model.backbone).__name__
    model.eval()
    if model.layout == "padded":
        moved, distance = 0.0, measured(distance_from_alone, most_distant, "a padded row beside others")
    else:
        moved = measured(leak, most_moved, "a score beside another sibling")
        distance = measured(distance_from_padded, most_distant, "the padded path")
    model.train()
    if model.compute_dtype is torch.float16 and not math.isfinite(moved + distance):
        raise ModelError(
            f"{name} has no finite scores in float16, whose range ends at 65,504. Use --precision bf16 or fp32."
        )
    if not moved <= most_moved:
        raise ModelError(
            f"changing one reply moves the score of another by {moved:.1e} with {name} and layout {model.layout}. Use "
            f"--attention padded."
        )
    if not distance <= most_distant and model.layout == "padded":
        raise ModelError(
            f"in a padded batch of {name} the score of a conversation is {distance:.1e} away from its score alone, so "
            f"it would depend on the other rows. Use another model."
        )
    if not distance <= most_distant:
        raise ModelError(
            f"the {model.layout} layout scores {distance:.1e} away from the padded path with {name}. Use --attention "
            f"padded."
        )
    if model.layout == "padded":
        log(f"layout: padded; other rows of a batch move a score by {distance:.0e}")
    else:
        log(f"layout: {model.layout}; siblings move a score by {moved:.0e}, the padded path is {distance:.0e} away")


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision that `auto` stands for: bf16 if the processor computes it natively, else fp32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return "bf16" if native else "fp32"


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A sequence classifier read from its files."""

    classifier: Any
    """The classifier in float32: with its weights, or without them if there is an outline."""
    new_head: bool
    """Whether its head has to be drawn."""
    outline: Outline | None
    """Where the weights lie, if they are to be read part by part later."""


def _read_weights(
    name: str,
    config: ModelConfig,
    layout: AttentionLayout,
    options: Mapping[str, Any] | None = None,
    find_outline: Callable[..., Outline | None] | None = None,
) -> _Read:
    """Read the classifier at `name`, or only its outline if `find_outline` is given and returns one.

    `options` are passed to `from_pretrained`. Raises ModelError if weights other than those of the head are missing, or
    if a reward model has lost its head or has one with several outputs, and no new one is asked for.
    """
    model_config = read_config(name, trust_remote_code=config.trust_remote_code)
    disk_class = disk_class_of(model_config)
    require_one_output(name, model_config, new_head=config.new_head)
    implementation = (
        attention.padded_implementation(model_config.get_text_config()) if layout == "padded" else attention.NAME
    )
    outline = None if find_outline is None else find_outline(disk_class, name, implementation, new_head=config.new_head)
    if outline is not None:
        classifier, missing = outline.classifier, set(outline.missing)
    else:
        classifier, missing, _ = read_classifier(
            disk_class,
            name,
            implementation,
            new_head=config.new_head,
            trust_remote_code=config.trust_remote_code,
            options=options,
        )
    if not options and getattr(classifier, "is_quantized", False):  # by its files alone
        raise quantized_files(name, classifier.config.quantization_config)
    head_keys = {key for key in missing if key.startswith(f"{HEAD_ON_DISK}.")}
    if other := sorted(missing - head_keys):
        if not hasattr(classifier, HEAD_ON_DISK):
            raise not_causal(f"{name}: {disk_class.__name__} has no head called `{HEAD_ON_DISK}`.")
        raise ModelError(
            f"{name}: weights are missing from the files: {', '.join(other[:5])}"
            f"{' …' if len(other) > 5 else ''}. The folder is incomplete, or of another architecture."
        )
    if head_keys and is_classifier(model_config) and not config.new_head:
        raise ModelError(
            f"{name}: it calls itself {model_config.architectures[0]} but its files hold no {HEAD_ON_DISK}.weight, so "
            f"its rewards are lost. Restore the file, or draw a new head with --new-head."
        )
    return _Read(classifier=classifier, new_head=bool(head_keys) or config.new_head, outline=outline)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from listing weights that are missing: whoever loads a model here says it himself."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def read_classifier(
    disk_class: Any,
    name: str,
    implementation: str,
    *,
    new_head: bool = False,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, set[str], set[str]]:
    """Return (sequence classifier, names of weights missing from its files, names in the files that it does not have).

    The classifier is in float32 unless `options` quantise it. Raises ModelError for files that are damaged or do not
    fit.
    """
    with quiet_transformers(), told(name, f"cannot be loaded as {disk_class.__name__}"):
        classifier, info = disk_class.from_pretrained(
            name,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=for_text(disk_class.config_class, implementation),
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=new_head,
            **(options or {}),
        )
    missing = set(info["missing_keys"]) | {str(entry[0]) for entry in info.get("mismatched_keys", ())}
    return classifier, missing, set(info.get("unexpected_keys", ()))
