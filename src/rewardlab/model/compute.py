"""How a model computes: kernels chosen once, at the start, by name, and written into the resolved configuration.

None of it changes what is computed: every choice passes the layout law in its own precision. What is measured or tried
here is printed, and a run that is taken up again is given the names and chooses nothing.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.libc import can_keep_freed_memory, keep_freed_memory, spare_memory, use_huge_pages
from rewardlab.model.attention import LAYOUT_ARGUMENT
from rewardlab.model.attention_backends import BACKENDS, HALF, PromptLayout, unavailable
from rewardlab.model.config import ComputeConfig, HalfRounding, TrainComputeConfig
from rewardlab.model.embedding import add_gradients_by_row
from rewardlab.model.half import HalfWeights
from rewardlab.model.layers import decoder_layers
from rewardlab.model.linear import MIN_WIDTH, OneDnnLinear, onednn_available, use_onednn
from rewardlab.model.reward import RewardModel

Log = Callable[[str], None]
PREFERRED: Final = {
    ("cuda", True): ("varlen", "flash", "flex", "segments"),
    ("cpu", True): ("products", "segments"),
}
"""(device, in half precision) -> attention: the first that works, on the CPU also the first faster than `segments`."""
WORTH_IT: Final = 1.2
"""How much faster a kernel must be to be taken: less could be noise, and a choice should be the same tomorrow."""
TRIAL_GROUPS: Final = ((37, (11, 50, 5)), (0, (29,)), (128, (64, 1)))
SPEED_GROUPS: Final = (((50, (12, 14)),) * 4, ((114, (43, 50)),) * 2, ((480, (100, 120)),))
"""Groups in whose shape kernels are timed: short, as in a trial, middling, and long."""
ROUNDING: Final = 2.0
"""A backend in half precision may err this many times as much as the plain one in the same precision."""


def choose_compute(
    config: ComputeConfig,
    text_config: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    log: Log,
    train: bool = True,
) -> dict[str, Any]:
    """Settings of ComputeConfig with every `auto` decided, from the model's shape alone.

    Raises ConfigError for a backend that was named and cannot be used here.
    """
    attention, why = _choose_attention(config.attention_backend, text_config, device, dtype, train=train)
    linear, measured = _choose_linear(config.linear_backend, text_config, device, dtype)
    allocator = config.allocator
    if allocator == "auto":
        allocator = "keep" if device.type == "cpu" and can_keep_freed_memory() else "system"
    log(
        f"compute: attention {attention}{why}; linear layers {linear}{measured}; allocator {allocator}"
        + ("; layers compiled" if config.compile else "")
    )
    return {"attention_backend": attention, "linear_backend": linear, "allocator": allocator}


def apply_compute(model: RewardModel, config: ComputeConfig, *, half_rounding: HalfRounding = "stochastic") -> None:
    """Make a loaded model compute as a configuration without `auto` says.

    Raises ConfigError or ModelError for what its architecture does not have.
    """
    model.attention_backend = config.attention_backend
    if config.allocator == "keep" and keep_freed_memory() and isinstance(config, TrainComputeConfig):
        use_huge_pages(spare_memory() // 4)
    if model.device.type == "cpu" and config.linear_backend == "onednn":
        use_onednn(model.backbone)
    if model.compute_dtype in HALF:
        model.half_weights = HalfWeights(model.backbone, "backbone", model.compute_dtype, half_rounding)
    if isinstance(config, TrainComputeConfig):
        if model.device.type == "cpu" and not dist.is_initialized():  # FSDP adds up gradients by its own hooks
            add_gradients_by_row(model.backbone)
        if config.liger:
            _use_liger(model)
        checkpoint_activations(model, config.activation_checkpointing)
    if model.layout != "padded":
        read_last_layer_only_where_scored(model)
    if config.compile:
        compile_layers(model)


def checkpoint_activations(model: RewardModel, mode: str) -> None:
    """Compute activations again in the backward pass: of every layer (`full`), or all but matmuls (`selective`).

    Raises ModelError if the architecture does not support it.
    """
    if mode == "none":
        return
    if not getattr(model.backbone, "supports_gradient_checkpointing", False):
        raise ModelError(f"{type(model.backbone).__name__} has no activation checkpointing. Leave it out.")
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = _keep_matmuls
    backbone: Any = model.backbone
    if hasattr(backbone, "activation_checkpointing_enable"):  # its name since transformers 5.2x
        backbone.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if getattr(backbone, "_require_grads_hook", None) is not None:
        # transformers makes the embeddings' output need a gradient, for checkpoints of the reentrant kind; here that
        # would only send gradients down through frozen layers.
        backbone.disable_input_require_grads()


def compile_layers(model: RewardModel) -> None:
    """Compile the decoder layers one by one: they share one program, whatever the number of tokens.

    Layers whose activations are checkpointed are compiled in parts, inside the checkpoint: around one, PyTorch would
    leave the whole layer uncompiled. What computes only where a score is read is left out (see
    `read_last_layer_only_where_scored`).
    """
    for layer in decoder_layers(model.backbone):
        whole = not getattr(layer, "gradient_checkpointing", False)
        for part in [layer] if whole else layer.children():
            if not any(module._forward_pre_hooks for module in (part, *part.children())):
                part.compile(dynamic=True)


def read_last_layer_only_where_scored(model: RewardModel) -> None:
    """In the last layer, run the feed-forward part only for the tokens at which a score is read.

    Nothing else looks at its output, so nothing changes; it saves three quarters of one layer. Models whose layers have
    no plain feed-forward module named `mlp` are left as they are.
    """
    try:
        last = decoder_layers(model.backbone)[-1]
    except ModelError:
        return
    mlp = getattr(last, "mlp", None)
    attention = getattr(last, "self_attn", getattr(last, "attention", None))
    if not isinstance(mlp, nn.Module) or not isinstance(attention, nn.Module) or not _is_plain(mlp):
        return
    reading: list[Tensor | None] = [None]
    num_tokens = [0]

    def enter(_attention: nn.Module, _inputs: Any, keywords: dict[str, Any]) -> None:
        layout: PromptLayout | None = keywords.get(LAYOUT_ARGUMENT)
        reading[0] = layout.read_at_R if layout is not None else None

    def select(_mlp: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (hidden,) = inputs
        num_tokens[0] = hidden.shape[1]
        return inputs if reading[0] is None else (hidden[:, reading[0]],)

    def spread(_mlp: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if reading[0] is None:
            return output
        return output.new_zeros(1, num_tokens[0], output.shape[-1]).index_copy(1, reading[0], output)

    # On the attention, not on the layer: hooks of a checkpointed layer do not run when it is computed again.
    attention.register_forward_pre_hook(enter, with_kwargs=True)
    mlp.register_forward_pre_hook(select)
    mlp.register_forward_hook(spread)
    # Not as a child: its parameters have their names already.
    object.__setattr__(model, "read_only_where_scored", mlp)


def _choose_attention(
    wanted: str, text_config: Any, device: torch.device, dtype: torch.dtype, *, train: bool
) -> tuple[str, str]:
    """(backend, what to say about it)."""
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if wanted != "auto":
        reason = unavailable(wanted, device=device, dtype=dtype, softcap=softcap, train=train)
        if reason:
            raise ConfigError(f"--attention-backend {wanted}: {reason}. Use auto, or segments, which always works.")
        return wanted, ""
    passed_over: list[tuple[str, str]] = []
    for name in PREFERRED.get((device.type, dtype in HALF), ("segments",)):
        reason = unavailable(name, device=device, dtype=dtype, softcap=softcap, train=train) or trial(
            name, text_config, device=device, dtype=dtype, train=train
        )
        if not reason and name == "products":
            ratio = attention_speed(name, *_heads_of(text_config), dtype, train=train)
            if ratio >= WORTH_IT:
                return name, f" ({ratio:.1f} times as fast as segments)"
            reason = f"{ratio:.1f} times as fast as segments"
        if not reason:
            return name, "".join(f" (not {other}: {reason})" for other, reason in passed_over)
        passed_over.append((name, reason))
    raise AssertionError("segments works everywhere")


def trial(name: str, text_config: Any, *, device: torch.device, dtype: torch.dtype, train: bool) -> str:
    """Why a backend does not give, forward and backward, what the plain one gives in float32; empty if it does."""
    if name == "segments":
        return ""
    exact = _attend_once("segments", text_config, device, torch.float32, train=train)
    plain = _attend_once("segments", text_config, device, dtype, train=train)
    try:
        found = _attend_once(name, text_config, device, dtype, train=train)
    except Exception as error:  # kernels, compilers and drivers raise what they like; another backend takes over
        return f"it failed here, {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    for part, truth, reference, tensor in zip(("output", "dq", "dk", "dv"), exact, plain, found, strict=False):
        distance, allowed = _distance(tensor, truth), ROUNDING * _distance(reference, truth) + 1e-6
        if not distance <= allowed:
            return f"its {part} is off by {distance:.1e}, where {allowed:.1e} would be rounding"
    return ""


def _attend_once(name: str, text_config: Any, device: torch.device, dtype: torch.dtype, *, train: bool) -> list[Tensor]:
    """Output, and gradients of query, key and value, of a small random row in the shape of the model's heads."""
    heads, grouped, width = _heads_of(text_config)
    layout = PromptLayout(TRIAL_GROUPS, name)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        # Rounded once, so that every precision starts from the same numbers.
        torch.randn(1, count, layout.num_tokens, width, generator=draw)
        .bfloat16()
        .to(device, dtype)
        .requires_grad_(train)
        for count in (heads, grouped, grouped)
    )
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    output = BACKENDS[name](query, key, value, layout, None, softcap)
    if not train:
        return [output]
    weights = torch.randn(output.shape, generator=draw).bfloat16().to(device, dtype)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), weights)]


def _heads_of(text_config: Any) -> tuple[int, int, int]:
    """(query heads, key heads, width of a head)."""
    heads = text_config.num_attention_heads
    grouped = getattr(text_config, "num_key_value_heads", None) or heads
    return heads, grouped, getattr(text_config, "head_dim", None) or text_config.hidden_size // heads


@cache  # a process that loads many models measures each shape once
def attention_speed(
    name: str, heads: int, grouped: int, width: int, dtype: torch.dtype, *, train: bool, repeats: int = 5
) -> float:
    """How many times as fast as `segments` a backend is on the CPU, with its backward pass if `train`; the lowest
    over SPEED_GROUPS.
    """
    draw = torch.Generator().manual_seed(0)
    ratios = []
    for groups in SPEED_GROUPS:
        num_tokens = PromptLayout(groups).num_tokens
        query, key, value = (
            torch.randn(1, num_tokens, count, width, generator=draw).to(dtype).transpose(1, 2).requires_grad_(train)
            for count in (heads, grouped, grouped)
        )
        best = dict.fromkeys(("segments", name), float("inf"))
        for _ in range(repeats + 1):  # interleaved, so that both meet the same neighbours; the first warms up
            for backend in best:
                layout = PromptLayout(groups, backend)
                started = time.perf_counter()
                output = BACKENDS[backend](query, key, value, layout, None, None)
                if train:
                    torch.autograd.grad(output, (query, key, value), output.detach())
                best[backend] = min(best[backend], time.perf_counter() - started)
        ratios.append(best["segments"] / best[name])
    return min(ratios)


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def _choose_linear(wanted: str, text_config: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """(backend, what to say about it)."""
    possible = device.type == "cpu" and dtype is torch.float32 and onednn_available()
    if wanted == "onednn" and not possible:
        raise ConfigError(
            "--linear-backend onednn: it is for float32 on the CPU, with a PyTorch that has oneDNN. Use auto or torch."
        )
    if wanted != "auto" or not possible:
        return ("torch" if wanted == "auto" else wanted), ""
    inner = getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size
    if min(text_config.hidden_size, inner) < MIN_WIDTH:
        return "torch", ""
    ratio = onednn_speed(text_config.hidden_size, inner)
    return ("onednn" if ratio >= WORTH_IT else "torch"), f" (oneDNN is {ratio:.2f} times as fast)"


@cache  # a process that loads many models measures each shape once
def onednn_speed(num_inputs: int, num_outputs: int, *, repeats: int = 5) -> float:
    """How many times as fast as PyTorch's own linear layer oneDNN is, forward and backward; a fraction of a second."""
    num_rows = max(32, min(1024, int(1e9 / (num_inputs * num_outputs))))
    draw = torch.Generator().manual_seed(0)
    input = torch.randn(num_rows, num_inputs, generator=draw).requires_grad_()
    gradient = torch.randn(num_rows, num_outputs, generator=draw)
    with torch.random.fork_rng(devices=[]):
        layers = [kind(num_inputs, num_outputs, bias=False) for kind in (nn.Linear, OneDnnLinear)]
    best = [float("inf"), float("inf")]
    for _ in range(repeats + 1):  # interleaved, so that both meet the same neighbours; the first warms up
        for number, layer in enumerate(layers):
            started = time.perf_counter()
            layer(input).backward(gradient)
            best[number] = min(best[number], time.perf_counter() - started)
            input.grad = layer.weight.grad = None
    return best[0] / best[1]


def _keep_matmuls() -> Any:
    """Contexts for torch.utils.checkpoint: products and attention are kept, everything between is computed again."""
    kept = [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.rewardlab.onednn_linear.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ]
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):
        kept.append(torch.ops.torch_attn._varlen_attn.default)
    make: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return make(kept)


def _use_liger(model: RewardModel) -> None:
    """Let Liger's fused kernels take the place of norms, feed-forward parts and rotary embeddings."""
    if model.device.type != "cuda":
        raise ConfigError("--liger: its kernels are for CUDA. Leave it out here.")
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ConfigError("--liger needs the package liger-kernel: pip install 'rewardlab[liger]'.") from error
    known = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if (kind := model.config.model_type) not in known:
        raise ConfigError(f"--liger: it has no kernels for model type {kind!r}. Leave it out.")
    # Its losses are those of a language model, and would take the place of a forward that a backbone does not have.
    options = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    liger._apply_liger_kernel_to_instance(model=model.backbone, **options)


def _is_plain(mlp: nn.Module) -> bool:
    """Whether a feed-forward part is made of linear layers alone, one token at a time: no experts, no routing."""
    owners = [module for module in mlp.modules() if next(module.parameters(recurse=False), None) is not None]
    return all(isinstance(module, nn.Linear) for module in owners) and "Moe" not in type(mlp).__name__
