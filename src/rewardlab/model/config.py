"""Settings of the model room. Imports neither torch nor transformers, so that `--help` is fast."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require
from rewardlab.model.hub import at_revision

MOST_RANK: Final = 65_536
"""Highest rank of adapters that is accepted: larger than any matrix of an existing model."""
BUDGETS: Final = (16, 1_000_000_000)
"""Lowest and highest number of tokens computed at a time that is accepted."""
DEFAULT_BUDGET: Final = 8192
"""Tokens computed at a time where nothing says otherwise."""
HalfRounding = Literal["stochastic", "nearest"]
ScoringPrecision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(Section):
    """The kernels that compute; no choice changes a number beyond rounding. `auto` is decided once, at the start, and
    the decision is saved with the run's settings."""

    attention_backend: Literal["auto", "segments", "products", "mask", "flex", "varlen", "flash"] = "auto"
    """Kernel of shared-prompt attention. `segments` runs everywhere; on the CPU in bf16 `auto` takes `products`
    (backward by matrix products) where it is measured to be faster; on CUDA in bf16 the first that works of `varlen`
    (PyTorch), `flash` (flash-attn) and `flex` (compiled FlexAttention); `mask` is one dense mask."""
    linear_backend: Literal["auto", "torch", "onednn"] = "auto"
    """Linear layers in float32 on the CPU: PyTorch's choice, or oneDNN; `auto` measures both."""
    allocator: Literal["auto", "system", "keep"] = "auto"
    """`keep` makes the C library keep freed memory for the next tensor; `auto` does so on the CPU."""
    compile: bool = False
    """Compile the decoder layers, in training the loss too (a minute at the start; a tenth off a step on the CPU)."""


@dataclass(frozen=True, kw_only=True)
class TrainComputeConfig(ComputeConfig):
    """The kernels of a run that trains, and settings that save memory at the cost of time."""

    norm_backend: Literal["auto", "torch", "blockwise", "fused"] = "auto"
    """RMSNorm in float32: one operation after the other, on the CPU a few rows at a time (`blockwise`), on CUDA one
    kernel (`fused`); `auto` measures both."""
    elementwise_backend: Literal["auto", "torch", "triton"] = "auto"
    """In half precision on CUDA, what multiplies the factors of gated feed-forward parts, adds up adapters and rotates
    queries and keys: PyTorch's operations, or one kernel of Triton for each (GPUs from compute capability 8.0 on);
    `auto` measures the first two."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward pass, to save memory: of every layer, or all but its matmuls."""
    liger: bool = False
    """Use Liger's fused kernels (CUDA; the package `liger-kernel`)."""

    def __post_init__(self) -> None:
        require(
            not (self.compile and self.activation_checkpointing == "selective"),
            "--activation-checkpointing selective: --compile decides by itself what to keep. Use full or none with it.",
        )


def require_model(model: str, *, model_is: str) -> None:
    """Raise ConfigError unless a model is named; `model_is` is the part of the message that says what to name."""
    require(model != "", f"--model is missing: name {model_is}.")


SMOLLM2: Final = "smollm2-135m-instruct"
BUILTIN_NAMES: Final = (SMOLLM2,)
"""Models that need no hub, by their names in lower case."""
SIMILAR: Final = 0.7
"""How similar (difflib's ratio) a name is at least that is taken for a misspelt one; `smollm2-135m` has 0.73."""
DEFAULT_COMPUTE: Final = ComputeConfig()
LIBRARY_COMPUTE: Final = ComputeConfig(allocator="system")
"""Settings for a model loaded by `rewardlab.load`. They leave the allocator alone, because `keep` changes it for the
whole process, which belongs to the caller, and cannot be undone."""


def misspelt_builtin(name: str) -> str:
    """Return what to say of a name that is nearly that of a built-in model and of nothing else; empty for any other.

    It would be sought on the hub, which takes most of a minute without a network. Models of the hub have an owner
    before a slash, except for the oldest, such as `gpt2`.
    """
    near = difflib.get_close_matches(name.lower(), BUILTIN_NAMES, n=1, cutoff=SIMILAR)
    if not near and name.lower().startswith(SMOLLM2[:6]):
        near = [SMOLLM2]
    if not near or "/" in name or name.lower() in BUILTIN_NAMES or Path(name).exists():
        return ""
    return (
        f"no model at {name!r}: there is no such folder. Did you mean {near[0]!r}, the built-in model? Names on the "
        f"hub have an owner, as HuggingFaceTB/SmolLM2-360M-Instruct has."
    )


def looks_local(name: str) -> bool:
    """Return whether a name can only be that of a folder; names on a hub have the form `owner/name` or `name`, perhaps
    with `@revision` behind it."""
    if at_revision(name) is not None:
        return False
    return name.startswith((".", "~")) or Path(name).is_absolute() or len(Path(name).parts) > 2 or name.endswith("/")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(Section):
    """Which model and how it computes."""

    model: str = ""
    """Hub name, perhaps with a branch, a tag or a commit (`organisation/name@revision`), folder, or the built-in
    `smollm2-135m-instruct`; an existing reward model keeps its head."""
    attention: Literal["auto", "shared", "padded"] = "auto"
    """`shared` computes each prompt once and refuses models for which that is not exact; `padded` is the plain
    reference path; `auto` takes `shared` where it is exact and says why where it is not."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the backbone; head, loss and trained weights stay float32. `auto` is bf16 on a
    GPU that has it, and on a processor that has it where a trial finds it to be at least 1.3 times as fast. fp16 is
    for GPUs without bf16 (T4, V100)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    @property
    def summed_rank(self) -> int:
        """The rank of adapters whose sums are one with the products of their layers (`model/lora_sums.py`), 0 where
        there are none."""
        return 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BackboneConfig):
    """Which model, how it computes, and what of it trains."""

    half_rounding: HalfRounding = "stochastic"
    """How trained float32 weights become the half-precision ones that bf16 and fp16 compute with, once a step:
    stochastically, right on average, which learns as float32 does; or to the nearest, as autocast does, which hides
    small updates."""
    new_head: bool = False
    """Draw a new head even if the model has one."""
    lora: bool = False
    """Train low-rank adapters and the head instead of every weight."""
    lora_rank: int = 4
    """Rank r of the adapters."""
    lora_alpha: float = 32.0
    """Scale: updates are multiplied by alpha / r."""
    lora_dropout: float = 0.0
    """Dropout on adapter inputs, drawn by conversation: a step drops the same however it is computed."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Names of layers to adapt, `all-linear`, or `peft-default` for PEFT's own choice for the architecture."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead."""
    dora: bool = False
    """Train the length of every weight row apart from its direction (DoRA); slower, and a little more memory."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules trained whole beside the adapters, by name, such as `input_layernorm`; the head always is."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Hold the frozen weights in 4 or 8 bits (QLoRA; CUDA and the package `bitsandbytes`)."""
    train_head_only: bool = False
    """Train the head alone, on a frozen backbone: a linear probe by gradient descent."""
    cache_states: bool = False
    """With `--train-head-only`, compute each conversation once and keep its state ($REWARDLAB_CACHE/states): later
    epochs, evaluations and other runs of the same model look it up."""
    freeze_layers: int = 0
    """Leave the embeddings and so many of the first layers as they are."""

    @property
    def summed_rank(self) -> int:
        """As above: not with DoRA, dropout, or frozen weights that are quantised, nor with rounding to the nearest."""
        apart = self.dora or self.lora_dropout > 0 or self.quantization != "none" or self.half_rounding == "nearest"
        return self.lora_rank if self.lora and not apart else 0

    def __post_init__(self) -> None:
        require(self.lora_alpha > 0, f"--lora-alpha {self.lora_alpha}: must be above 0.")
        require_between(self, lora_rank=(1, MOST_RANK), lora_alpha=(0, 1e6))
        require(0 <= self.lora_dropout < 1, f"--lora-dropout {self.lora_dropout}: must be at least 0 and below 1.")
        require(len(self.lora_target_modules) > 0, "--lora-target-modules: name at least one layer, or `all-linear`.")
        for flag, given in (
            ("--dora", self.dora),
            ("--lora-modules-to-save", self.lora_modules_to_save),
            (f"--quantization {self.quantization}", self.quantization != "none"),
        ):
            require(self.lora or not given, f"{flag}: it needs adapters. Add --lora, or leave it out.")
        require(self.freeze_layers >= 0, f"--freeze-layers {self.freeze_layers}: must not be negative.")
        require(
            not (self.lora and self.freeze_layers),
            f"--freeze-layers {self.freeze_layers}: with --lora every layer is frozen. Leave one of the two out.",
        )
        require(
            not (self.train_head_only and self.lora),
            "--train-head-only: with --lora adapters train too. Leave one of the two out.",
        )
        require(
            self.train_head_only or not self.cache_states,
            "--cache-states: the states stay the same only if the backbone does. Add --train-head-only, or leave it "
            "out.",
        )
        require(
            not (self.train_head_only and self.freeze_layers),
            f"--freeze-layers {self.freeze_layers}: with --train-head-only every layer is frozen. Leave one of the two "
            f"out.",
        )
