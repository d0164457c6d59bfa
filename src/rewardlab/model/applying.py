"""Making a loaded model compute as a configuration says, in which every `auto` is decided (model/compute.py)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.libc import keep_freed_memory, spare_memory, use_huge_pages
from rewardlab.model.attention import LAYOUT_ARGUMENT
from rewardlab.model.attention_backends import HALF
from rewardlab.model.config import ComputeConfig, HalfRounding, TrainComputeConfig
from rewardlab.model.embedding import add_gradients_by_row
from rewardlab.model.gated import use_gated_products
from rewardlab.model.half import HalfWeights
from rewardlab.model.layers import decoder_layers
from rewardlab.model.linear import use_onednn
from rewardlab.model.lora_sums import sum_before_rounding
from rewardlab.model.norm import BESIDE_TORCH, use_norms
from rewardlab.model.prompt_layout import PromptLayout
from rewardlab.model.reward import RewardModel
from rewardlab.model.rotary import use_rotations


def apply_compute(model: RewardModel, config: ComputeConfig, *, half_rounding: HalfRounding = "stochastic") -> None:
    """Make a loaded model compute as `config` says, in which every `auto` is decided.

    Raises ConfigError if --liger cannot be used here or has no kernels for the model, and ModelError if the
    architecture has no activation checkpointing or no list of decoder layers to compile.
    """
    model.attention_backend = config.attention_backend
    by_kernels = isinstance(config, TrainComputeConfig) and config.elementwise_backend == "triton"
    # This reserves address space, not memory: a page is taken when it is first written to.
    if config.allocator == "keep" and keep_freed_memory() and isinstance(config, TrainComputeConfig):
        use_huge_pages(spare_memory() // 4)
    if model.device.type == "cpu" and config.linear_backend == "onednn":
        use_onednn(model.backbone)
    if model.compute_dtype in HALF:
        _compute_in_half(model, half_rounding, by_kernels=by_kernels)
    if isinstance(config, TrainComputeConfig):
        _replace_parts(model, config)
        checkpoint_activations(model, config.activation_checkpointing)
    if model.layout != "padded":
        read_last_layer_only_where_scored(model)
    if config.compile:
        compile_layers(model)
    elif not (isinstance(config, TrainComputeConfig) and config.liger):
        use_rotations(model.backbone, by_kernels=by_kernels)


def _replace_parts(model: RewardModel, config: TrainComputeConfig) -> None:
    """Make embeddings, norms and feed-forward parts train by what is faster, or keeps less, to the same numbers."""
    # FSDP reduces gradients in hooks of its own, which would not see a gradient that is written to `grad` directly.
    if model.device.type == "cpu" and not dist.is_initialized():
        add_gradients_by_row(model.backbone)
    if config.norm_backend == BESIDE_TORCH.get(model.device.type):
        use_norms(model.backbone, config.norm_backend)
    if config.liger:
        _use_liger(model)
    elif not config.compile:
        use_gated_products(
            model.backbone,
            keep_product=config.activation_checkpointing != "none",
            by_kernels=config.elementwise_backend == "triton",
        )


def _compute_in_half(model: RewardModel, rounding: HalfRounding, *, by_kernels: bool) -> None:
    """Give linear layers half-precision copies of their weights, and make the sums of adapters see small updates."""
    model.half_weights = HalfWeights(model.backbone, "backbone", model.compute_dtype, rounding)
    # To the nearest is what others compute by, so there everything is as PEFT does it.
    if rounding == "stochastic":
        sum_before_rounding(model.backbone, by_kernels=by_kernels)


def checkpoint_activations(model: RewardModel, mode: str) -> None:
    """Recompute activations in the backward pass: of every layer (`full`), or all but the matmuls (`selective`).

    Raises ModelError if the architecture does not support activation checkpointing.
    """
    if mode == "none":
        return
    if not getattr(model.backbone, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"{type(model.backbone).__name__} does not support --activation-checkpointing. Leave the flag out."
        )
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = _keep_matmuls
    backbone: Any = model.backbone
    # transformers 5.2x renamed the method; earlier versions have only the older name.
    if hasattr(backbone, "activation_checkpointing_enable"):
        backbone.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if getattr(backbone, "_require_grads_hook", None) is not None:
        # transformers makes the embeddings' output require a gradient, which only reentrant checkpoints need. Here it
        # would cost a backward pass through frozen layers.
        backbone.disable_input_require_grads()


def _keep_matmuls() -> Any:
    """Return contexts for torch.utils.checkpoint that keep the results of matrix products and attention.

    Everything between them is cheap and is computed again.
    """
    kept = [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.rewardlab.onednn_linear.default,
        torch.ops.rewardlab.widened_product.default,
        torch.ops.rewardlab.summed_product.default,
        torch.ops.rewardlab.product_with_adapter.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ]
    # Those of modules that may not be imported, or packages that may not be installed.
    for room, name in (("torch_attn", "_varlen_attn"), ("flash_attn", "_flash_attn_varlen_forward")):
        if hasattr(namespace := getattr(torch.ops, room), name):
            kept.append(getattr(namespace, name).default)
    make: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return make(kept)


def compile_layers(model: RewardModel) -> None:
    """Compile the decoder layers one by one; all of them share one program, for any number of tokens.

    Layers whose activations are checkpointed are compiled child by child, inside the checkpoint; compiled around it,
    PyTorch would leave the whole layer uncompiled. Modules with forward pre-hooks are left out, which are those of
    `read_last_layer_only_where_scored`.

    Raises ModelError if the decoder layers are not in one list.
    """
    floats_as_constants()
    for layer in decoder_layers(model.backbone):
        whole = not getattr(layer, "gradient_checkpointing", False)
        for part in [layer] if whole else layer.children():
            if not any(module._forward_pre_hooks for module in (part, *part.children())):
                part.compile(dynamic=True)


def floats_as_constants() -> None:
    """Make what this process compiles take Python's floats, such as the scale of an adapter, for constants.

    With dynamic shapes PyTorch hands each over as a tensor of the CPU, and inductor writes and compiles C++ for it
    beside the kernels of a GPU.
    """
    torch._dynamo.config.specialize_float = True


def read_last_layer_only_where_scored(model: RewardModel) -> None:
    """Make the last layer run its feed-forward part only for the tokens at which a score is read.

    Nothing else reads its output, so no score changes, and three quarters of one layer's work are saved. Models whose
    layers have no plain feed-forward module named `mlp` are left as they are.
    """
    try:
        last = decoder_layers(model.backbone)[-1]
    except ModelError:
        return
    mlp = getattr(last, "mlp", None)
    attention = getattr(last, "self_attn", getattr(last, "attention", None))
    if not isinstance(mlp, nn.Module) or not isinstance(attention, nn.Module) or not _is_plain(mlp):
        return
    part = _WhereScored()
    # The layout arrives as an argument of the attention. The hook is not on the layer, although it gets the layout too,
    # because the hooks of a checkpointed layer do not run when the layer is recomputed.
    attention.register_forward_pre_hook(part.enter, with_kwargs=True)
    mlp.register_forward_pre_hook(part.select)
    mlp.register_forward_hook(part.spread)
    # Set without nn.Module's __setattr__, which would register the module as a child and list its parameters twice.
    object.__setattr__(model, "read_only_where_scored", mlp)


class _WhereScored:
    """What the hooks of a last layer tell each other while it runs.

    They are methods, so that a copy of the model has hooks with an object of its own: functions would be shared, and
    two threads with a copy each would read at each other's places.
    """

    def __init__(self) -> None:
        self._reading: list[Tensor | None] = [None]
        self._num_tokens = [0]

    def enter(self, _attention: nn.Module, _inputs: Any, keywords: dict[str, Any]) -> None:
        """Note where scores are read; nowhere without a layout."""
        layout: PromptLayout | None = keywords.get(LAYOUT_ARGUMENT)
        self._reading[0] = layout.read_at_R if layout is not None else None

    def select(self, _mlp: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Return the states at these tokens alone."""
        (hidden,) = inputs
        self._num_tokens[0] = hidden.shape[1]
        return inputs if self._reading[0] is None else (hidden[:, self._reading[0]],)

    def spread(self, _mlp: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Return the output at its tokens, and zeros at all others."""
        if self._reading[0] is None:
            return output
        return output.new_zeros(1, self._num_tokens[0], output.shape[-1]).index_copy(1, self._reading[0], output)


def _is_plain(mlp: nn.Module) -> bool:
    """Return whether a feed-forward part treats every token by itself: linear layers alone, without experts or
    routing."""
    owners = [module for module in mlp.modules() if next(module.parameters(recurse=False), None) is not None]
    return all(isinstance(module, nn.Linear) for module in owners) and "Moe" not in type(mlp).__name__


def _use_liger(model: RewardModel) -> None:
    """Replace norms, feed-forward parts and rotary embeddings by Liger's fused kernels.

    Raises ConfigError without a CUDA device or the package liger-kernel, and for model types that it does not know.
    """
    if model.device.type != "cuda":
        raise ConfigError("--liger: its kernels need a CUDA device. Leave the flag out here.")
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ConfigError("--liger needs the package liger-kernel: pip install 'rewardlab[liger]'.") from error
    known = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if (kind := model.config.model_type) not in known:
        raise ConfigError(f"--liger: Liger has no kernels for model type {kind!r}. Leave the flag out.")
    # Liger's losses are those of a language model. They would replace a forward method that a backbone does not have.
    options = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    liger._apply_liger_kernel_to_instance(model=model.backbone, **options)
