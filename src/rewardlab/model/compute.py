"""The choice of kernels: made once, at the start, by name, and written into the resolved configuration.

No choice changes what is computed: every kernel passes the layout law in its own precision. What is measured or tried
here is printed. A resumed run takes the names from its configuration and chooses nothing.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from rewardlab.core.errors import ConfigError
from rewardlab.core.libc import can_keep_freed_memory
from rewardlab.core.types import Log
from rewardlab.model import fused, gated, linear, norm
from rewardlab.model.attention import leave_out_cudnn
from rewardlab.model.attention_backends import BACKENDS, HALF, unavailable
from rewardlab.model.attention_formula import Formula, formulas_of
from rewardlab.model.config import ComputeConfig, TrainComputeConfig
from rewardlab.model.linear import MIN_WIDTH, OneDnnLinear, onednn_available
from rewardlab.model.per_layer import largest, layer_configs
from rewardlab.model.prompt_layout import PromptLayout
from rewardlab.model.trials import beyond_rounding, failed, times_as_fast

PREFERRED: Final = {
    ("cuda", True): ("varlen", "flash", "flex", "segments"),
    ("cpu", True): ("products", "segments"),
}
"""(device, whether in half precision) -> attention backends in the order in which `auto` tries them. It takes the first
that works; `products` must also be measured to be faster than `segments`."""
WORTH_IT: Final = 1.2
"""How many times as fast a kernel must be to be taken. Less could be noise, and the same machine should choose the same
kernel every time."""
TRIAL_GROUPS: Final = ((37, (11, 50, 5)), (0, (29,)), (128, (64, 1)))
"""(shared tokens, tokens of each reply) of the row with which a backend's numbers are checked: lengths that are and are
not multiples of a kernel's blocks, a group without shared tokens, and a reply of one token."""
SPEED_GROUPS: Final = (((50, (12, 14)),) * 4, ((114, (43, 50)),) * 2, ((480, (100, 120)),))
"""Rows with which kernels are timed, as (shared tokens, tokens of each reply): short, of middle length, and long."""


Heads = tuple[int, int, int, int]
"""(query heads, key heads, width of a query's and key's head, width of a value's)"""


def choose_compute(
    config: ComputeConfig,
    text_config: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    log: Log,
    train: bool = True,
    rank: int = 0,
) -> dict[str, Any]:
    """Return the settings of ComputeConfig with every `auto` decided, from the model's shape alone, and log them.

    `rank` is that of the adapters whose sums a kernel may compute (`BackboneConfig.summed_rank`).

    Raises ConfigError if a backend that the configuration names cannot be used here.
    """
    if device.type == "cuda":
        _ignore_warnings_of_cuda()
    attention, why = _choose_attention(config.attention_backend, text_config, device, dtype, train=train)
    linear, measured = _choose_linear(config.linear_backend, text_config, device, dtype)
    chosen: dict[str, Any] = {}
    said = ""
    if isinstance(config, TrainComputeConfig):
        chosen["norm_backend"], said = _choose_norm(config, text_config, device)
        chosen["elementwise_backend"], more = _choose_elementwise(config, text_config, device, dtype, rank)
        said += more
    allocator = config.allocator
    if allocator == "auto":
        allocator = "keep" if device.type == "cpu" and can_keep_freed_memory() else "system"
    log(
        f"compute: attention {attention}{why}; linear layers {linear}{measured}{said}; allocator {allocator}"
        + ("; layers compiled" if config.compile else "")
    )
    return {"attention_backend": attention, "linear_backend": linear, "allocator": allocator, **chosen}


def _ignore_warnings_of_cuda() -> None:
    """Hide two warnings of PyTorch, from now on: of a context that it then makes by itself, as it should, and of TF32,
    which is left off because scores are to be exact in float32.
    """
    for message in ("Attempting to run cuBLAS, but there was no current CUDA context", "TensorFloat32 tensor cores"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def require_kernels(config: TrainComputeConfig, device: torch.device) -> None:
    """Raise ConfigError for kernels that are asked for and need a CUDA device, where there is none.

    `choose_compute` refuses them too, once data have been read.
    """
    asked = {
        "--elementwise-backend triton": (config.elementwise_backend == "triton", "Use torch, or auto in a new run."),
        "--norm-backend fused": (config.norm_backend == "fused", "Use auto or torch."),
        "--liger": (config.liger, "Leave the flag out here."),
    }
    for flag, (is_asked, instead) in asked.items():
        if is_asked and device.type != "cuda":
            raise ConfigError(f"{flag}: it needs a CUDA device, and there is none here. {instead}")


def _choose_attention(
    wanted: str, text_config: Any, device: torch.device, dtype: torch.dtype, *, train: bool
) -> tuple[str, str]:
    """Return (attention backend, remark for the log).

    Raises ConfigError if the backend that is `wanted` cannot be used here.
    """
    formula = formulas_of(text_config)[0]
    if wanted != "auto":
        reason = unavailable(wanted, device=device, dtype=dtype, formula=formula, train=train)
        if not reason and device.type == "cuda" and wanted != "segments":
            reason = _failure(wanted, text_config, device=device, dtype=dtype, train=train)
        if reason:
            raise ConfigError(f"--attention-backend {wanted}: {reason}. Use auto, or segments, which always works.")
        return wanted, ""
    if not heads_of(text_config):  # nothing to choose for
        return "segments", ""
    passed_over: list[tuple[str, str]] = []
    for name in PREFERRED.get((device.type, dtype in HALF), ("segments",)):
        reason = unavailable(name, device=device, dtype=dtype, formula=formula, train=train) or trial(
            name, text_config, device=device, dtype=dtype, train=train
        )
        if not reason and name == "products":
            ratio = attention_speed(name, heads_of(text_config)[0], dtype, train=train)
            if ratio >= WORTH_IT:
                return name, f" ({ratio:.1f} times as fast as segments)"
            reason = f"{ratio:.1f} times as fast as segments"
        if not reason:
            return name, "".join(f" (not {other}: {reason})" for other, reason in passed_over)
        passed_over.append((name, reason))
    raise AssertionError("segments works everywhere")


def trial(name: str, text_config: Any, *, device: torch.device, dtype: torch.dtype, train: bool) -> str:
    """Return why a backend's output or gradients differ from those of `segments` by more than rounding, or "".

    Both are compared with `segments` in float32 (`beyond_rounding`). A kernel that raises an error has failed the
    trial.
    """
    if name == "segments":
        return ""
    for shape, formula in product(heads_of(text_config), formulas_of(text_config, device=device)):
        exact = _attend_once("segments", shape, formula, device, torch.float32, train=train)
        plain = _attend_once("segments", shape, formula, device, dtype, train=train)
        try:
            tried = _attend_once(name, shape, formula, device, dtype, train=train)
        except Exception as error:  # another backend takes over
            return failed(error)
        if reason := beyond_rounding(("output", "dq", "dk", "dv", "dsinks"), exact, plain, tried):
            return reason if formula.window is None else f"{reason} with a sliding window"
    return ""


def _failure(name: str, text_config: Any, *, device: torch.device, dtype: torch.dtype, train: bool) -> str:
    """Return the error of a backend that cannot compute in the model's shape, or "". On a GPU kernels refuse some
    widths of heads, and older devices.
    """
    try:
        for shape, formula in product(heads_of(text_config), formulas_of(text_config, device=device)):
            _attend_once(name, shape, formula, device, dtype, train=train)
    except Exception as error:  # of any class: see `failed`
        return failed(error)
    return ""


def _attend_once(
    name: str, shape: Heads, formula: Formula, device: torch.device, dtype: torch.dtype, *, train: bool
) -> list[Tensor]:
    """Return the output for a small random row in this shape of heads, and if `train` also the gradients of query, key,
    value and, where there are any, sinks.
    """
    leave_out_cudnn(device)
    heads, grouped, width, of_values = shape
    layout = PromptLayout(TRIAL_GROUPS, name)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        # Rounded to bfloat16 first, so that every precision starts from the same numbers.
        torch.randn(1, count, layout.num_tokens, size, generator=draw)
        .bfloat16()
        .to(device, dtype)
        .requires_grad_(train)
        for count, size in ((heads, width), (grouped, width), (grouped, of_values))
    )
    leaves = [query, key, value]
    if formula.sinks is not None:
        leaves.append(formula.sinks.clone().requires_grad_(train))
        formula = replace(formula, sinks=leaves[-1])
    output = BACKENDS[name](query, key, value, layout, formula)
    if not train:
        return [output]
    weights = torch.randn(output.shape, generator=draw).bfloat16().to(device, dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


def heads_of(text_config: Any) -> list[Heads]:
    """Return the shapes of the heads that layers hand to attention, the one of most layers first.

    In latent attention (DeepSeek) the two widths differ, and `head_dim` is that of the rotated part alone. Gemma 4 has
    wider heads in layers without a window. Models without attention, such as Mamba, have none.
    """
    if getattr(text_config, "num_attention_heads", None) is None:
        return []
    return [shape for shape, _ in Counter(map(_heads_of_layer, layer_configs(text_config))).most_common()]


def _heads_of_layer(config: Any) -> Heads:
    heads = config.num_attention_heads
    grouped = getattr(config, "num_key_value_heads", None) or heads
    of_heads = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = getattr(config, "qk_head_dim", None) or of_heads
    return heads, grouped, width, getattr(config, "v_head_dim", None) or width


@cache  # a process that loads many models measures each shape once
def attention_speed(name: str, shape: Heads, dtype: torch.dtype, *, train: bool) -> float:
    """Measure how many times as fast as `segments` a backend is on the CPU, with its backward pass if `train`.

    Returns the `overall_speed` of SPEED_GROUPS.
    """
    heads, grouped, width, of_values = shape
    draw = torch.Generator().manual_seed(0)
    ratios = []
    for groups in SPEED_GROUPS:
        num_tokens = PromptLayout(groups).num_tokens
        query, key, value = (
            torch.randn(1, num_tokens, count, size, generator=draw).to(dtype).transpose(1, 2).requires_grad_(train)
            for count, size in ((heads, width), (grouped, width), (grouped, of_values))
        )

        def attend(backend: str, groups: Any = groups, inputs: Any = (query, key, value)) -> None:
            query, key, value = inputs
            output = BACKENDS[backend](query, key, value, PromptLayout(groups, backend), Formula())
            if train:
                torch.autograd.grad(output, inputs, output.detach())

        ratios.append(times_as_fast(partial(attend, name), partial(attend, "segments"), torch.device("cpu")))
    return overall_speed(ratios)


def overall_speed(ratios: Sequence[float]) -> float:
    """Return the geometric mean of how many times as fast a kernel is on several rows; the lowest if that is below 1.

    So rows on which it is level with the other do not decide, which noise would do for them, and rows on which it loses
    do.
    """
    return min(ratios) if min(ratios) < 1 else math.prod(ratios) ** (1 / len(ratios))


def _choose_linear(wanted: str, text_config: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return (backend of linear layers, remark for the log).

    Raises ConfigError if oneDNN is `wanted` and cannot be used here.
    """
    possible = device.type == "cpu" and dtype is torch.float32 and onednn_available()
    if wanted == "onednn" and not possible:
        raise ConfigError(
            "--linear-backend onednn: it needs float32 on the CPU and a PyTorch built with oneDNN. Use auto or torch."
        )
    if wanted != "auto" or not possible:
        return ("torch" if wanted == "auto" else wanted), ""
    inner = _inner_width(text_config)
    if min(text_config.hidden_size, inner) < MIN_WIDTH:
        return "torch", ""
    ratio = onednn_speed(text_config.hidden_size, inner)
    return ("onednn" if ratio >= WORTH_IT else "torch"), f" (oneDNN is {ratio:.2f} times as fast)"


def _inner_width(text_config: Any) -> int:
    # Architectures without this field (GPT-2 and its like) have feed-forward parts of four times the hidden width.
    inner = largest(text_config, "intermediate_size") or 4 * int(text_config.hidden_size)
    return max(inner) if isinstance(inner, list | tuple) else inner  # Gemma 3n has one for each layer


def _choose_elementwise(
    config: TrainComputeConfig, text_config: Any, device: torch.device, dtype: torch.dtype, rank: int
) -> tuple[str, str]:
    """Return (backend of gated products, sums of adapters and rotations in training, remark for the log).

    Only what the run computes by kernels is tried and timed: sums where there are adapters of this `rank`; products and
    rotations unless the compiler or Liger has them.

    Raises ConfigError if Triton is asked for and cannot be used here.
    """
    wanted = config.elementwise_backend
    possible = device.type == "cuda" and dtype in HALF
    if wanted == "torch" or (wanted == "auto" and not possible):
        return "torch", ""
    rank, joined = (rank if rank <= linear.MOST_RANK else 0), config.compile or config.liger
    if wanted == "auto" and joined and not rank:
        return "torch", ""
    shapes = heads_of(text_config)
    reason = "it is for half precision on CUDA" if shapes else "this model has no attention"
    if possible and shapes:
        heads, _, width, _ = shapes[0]
        reason = fused.trial(device, dtype, rank=rank, heads=(heads, width), joined=joined)
    if wanted == "triton" and reason:
        raise ConfigError(f"--elementwise-backend triton: {reason}. Use torch, or auto in a new run.")
    if wanted == "triton":
        return wanted, "; element-wise parts triton"
    if reason:
        return "torch", f"; element-wise parts torch (not triton: {reason})"
    inner = _inner_width(text_config)
    ratios = {} if joined else {"gated products": gated.kernel_speed(inner, device, dtype)}
    if rank:
        ratios["sums of adapters"] = linear.kernel_speed(inner, rank, device, dtype)
    chosen = "triton" if overall_speed(tuple(ratios.values())) >= WORTH_IT else "torch"
    measured = ", ".join(f"{ratio:.2f} times as fast in {part}" for part, ratio in ratios.items())
    return chosen, f"; element-wise parts {chosen} (triton is {measured})"


def _choose_norm(config: TrainComputeConfig, text_config: Any, device: torch.device) -> tuple[str, str]:
    """Return (backend of norms in training, remark for the log).

    Raises ConfigError if the norms that are asked for cannot be used here.
    """
    wanted, name = config.norm_backend, norm.BESIDE_TORCH.get(device.type)
    if wanted in norm.COMPUTE and (wanted != name or config.compile):
        place = "the CPU" if wanted == "blockwise" else "CUDA"
        where = f"they are for {place}" if wanted != name else "--compile makes norms of its own"
        raise ConfigError(f"--norm-backend {wanted}: {where}. Use auto or torch.")
    if wanted != "auto":
        return wanted, f"; norms {wanted}"
    width = text_config.hidden_size
    if name is None or config.compile or width < norm.MIN_WIDTH or not hasattr(text_config, "rms_norm_eps"):
        return "torch", ""
    if name == "fused" and (reason := norm.trial(name, width, device)):
        return "torch", f"; norms torch (not {name}: {reason})"
    ratio = norm.norm_speed(name, width, device)
    chosen = name if ratio >= WORTH_IT else "torch"
    return chosen, f"; norms {chosen} ({name} is {ratio:.2f} times as fast)"


@cache  # a process that loads many models measures each shape once
def onednn_speed(num_inputs: int, num_outputs: int) -> float:
    """Measure how many times as fast as PyTorch's linear layer oneDNN's is, forward and backward, in under a second."""
    num_rows = max(32, min(1024, int(1e9 / (num_inputs * num_outputs))))
    draw = torch.Generator().manual_seed(0)
    input = torch.randn(num_rows, num_inputs, generator=draw).requires_grad_()
    gradient = torch.randn(num_rows, num_outputs, generator=draw)
    with torch.random.fork_rng(devices=[]):
        plain, tried = (kind(num_inputs, num_outputs, bias=False) for kind in (nn.Linear, OneDnnLinear))

    def passes(layer: nn.Module) -> None:
        layer(input).backward(gradient)
        input.grad = layer.weight.grad = None

    return times_as_fast(partial(passes, tried), partial(passes, plain), torch.device("cpu"))
