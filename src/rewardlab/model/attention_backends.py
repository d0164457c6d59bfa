"""The kernels of shared-prompt attention: several ways to compute the same thing.

Every backend takes a packed row and its PromptLayout and gives the same numbers up to rounding. They differ in the
device and dtype they run on and in their cost. `segments` is the plain one that the others are checked against.

Legend: R replies, H query heads, T packed tokens, U tokens with a copy of the shared part for each reply, D head width.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rewardlab.model.attention_formula import Formula
from rewardlab.model.past import Past
from rewardlab.model.product_attention import Products
from rewardlab.model.prompt_layout import PromptLayout, Ragged, additive, mask_after


def segments(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H T _"]:
    """Compute the shared part and the first reply as one causal segment, and every later reply as a masked segment.

    Output [1, H, T, head width of the values], as for every backend.
    """
    if layout.past is not None and not layout.past.is_empty:
        return _segments_after(layout.past, query, key, value, layout, formula)
    outputs = []
    # `split` and not slices: the backward pass of a slice makes a full-size tensor of zeros for every segment.
    queries, keys, values = (torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value))
    shared_k = shared_v = key[:, :, :0]
    for (num_shared, length, first), q, k, v in zip(layout.segments, queries, keys, values, strict=True):
        near = 0
        if first:
            if length < k.shape[2]:
                # Autograd adds up the gradients of a tensor in that tensor's dtype. In bf16 the sum over many replies
                # would lose low bits, so the shared keys and values are cast to float32 here and back for each use.
                reached = slice(_reached(num_shared, formula), num_shared)
                shared_k, shared_v = (_at_least_float32(tensor[:, :, reached]) for tensor in (k, v))
        elif num_shared:
            near = shared_k.shape[2]
            k, v = torch.cat((shared_k.to(k.dtype), k), 2), torch.cat((shared_v.to(v.dtype), v), 2)
        outputs.append(_attend_after(near, q, k, v, layout, formula))
    return torch.cat(outputs, 2)


def _segments_after(
    past: Past, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H T _"]:
    """Compute `segments` for groups whose prompts begin in front of the row, without gradients."""
    outputs, group = [], -1
    queries, keys, values = (torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value))
    front_k = front_v = key[:, :, :0]
    for (num_shared, _, first), q, k, v in zip(layout.segments, queries, keys, values, strict=True):
        if first:
            group += 1
            before = past.before(group, layout.num_calls - 1)
            num_seen = 0 if before is None else before[0].shape[2]
            if before is not None:
                k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
            front_k, front_v = (tensor[:, :, : num_seen + num_shared] for tensor in (k, v))
        else:
            num_seen = front_k.shape[2]
            k, v = torch.cat((front_k, k), 2), torch.cat((front_v, v), 2)
        outputs.append(_attend_after(num_seen, q, k, v, layout, formula))
    return torch.cat(outputs, 2)


def _reached(position: int, formula: Formula) -> int:
    """Return the first of the tokens in front that the token at this position still sees."""
    return 0 if formula.window is None else max(0, position - formula.window + 1)


def _attend_after(
    num_seen: int, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H _ _"]:
    """Compute attention of consecutive tokens, with as many keys in front of them as `num_seen` and then their own.

    Under a window they are computed a block at a time, so that what no token of a block sees is left out; without one
    where a mask or logits of all of them would be larger than `MOST_WRITTEN`.
    """
    length = query.shape[2]
    window = formula.window
    if window is None or num_seen + length <= window:
        if (num_seen or not formula.is_plain) and length > (step := _rows_written(num_seen + length, query, formula)):
            return _attend_in_blocks(step, num_seen, query, key, value, layout, formula)
        added_as = _added_as(query, key, value, formula)
        mask = layout.mask(num_seen, length, query.device, added_as=added_as) if num_seen else None
        return _attend(query, key, value, mask, formula)
    outputs = []
    # A block also sees the window in front of its first token, so blocks as long as the window would compute nearly
    # twice the logits that count. The first tokens of a row, which see all in front, are one plain causal call.
    step = max(window // 4, LEAST_BLOCK)
    start = 0
    while start < length:
        stop = min(start + (step if num_seen + start else max(window, step)), length)
        keys = slice(_reached(num_seen + start, formula), num_seen + stop)
        in_front = num_seen + start - keys.start
        causal = in_front == 0 and stop - start <= window
        mask = None
        if not causal:
            added_as = _added_as(query, key, value, formula)
            mask = layout.mask(in_front, stop - start, query.device, window, added_as=added_as)
        outputs.append(_attend(query[:, :, start:stop], key[:, :, keys], value[:, :, keys], mask, formula))
        start = stop
    return torch.cat(outputs, 2)


def _added_as(query: Tensor, key: Tensor, value: Tensor, formula: Formula) -> torch.dtype | None:
    """Return the dtype of a mask that is added to logits where PyTorch's attention keeps it for the backward pass: that
    of one mask is then shared by all layers. Under autocast the values have the dtype in which it computes. None for a
    boolean mask."""
    keeps = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return value.dtype if formula.is_plain and keeps else None


def _rows_written(num_keys: int, query: Tensor, formula: Formula) -> int:
    """Return for how many tokens their mask of so many keys, or logits of all heads where these are written out, may be
    held at once."""
    return max(MOST_WRITTEN // (num_keys * (1 if formula.is_plain else query.shape[1])), LEAST_BLOCK)


def _attend_in_blocks(
    step: int, num_seen: int, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H _ _"]:
    """Compute `_attend_after` without a window for so many tokens at a time; masks are kept only if a backward pass
    needs them."""
    outputs, added_as = [], _added_as(query, key, value, formula)
    for start in range(0, query.shape[2], step):
        block = query[:, :, start : start + step]
        seen = num_seen + start + block.shape[2]
        place = (num_seen + start, block.shape[2], query.device)
        mask = mask_after(*place) if added_as is None else layout.mask(*place, added_as=added_as)
        outputs.append(_attend(block, key[:, :, :seen], value[:, :, :seen], mask, formula))
    return torch.cat(outputs, 2)


def mask(query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula) -> Float[Tensor, "1 H T _"]:
    """Compute the whole row at once under a dense T × T mask; work and memory grow with the square of T."""
    seen = layout.dense_mask(query.device, formula.window)
    if (added_as := _added_as(query, key, value, formula)) is not None:
        seen = layout.keep(("added", formula.window, added_as), lambda: additive(seen, added_as))
    return _attend(query, key, value, seen, formula)


def flex(query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula) -> Float[Tensor, "1 H T _"]:
    """Compute by compiled FlexAttention with a block mask: nothing is copied, and fully masked blocks are skipped."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    window = formula.window

    def make() -> Any:
        group_T, reply_T = layout.owners(query.device)
        position_T = layout.positions(query.device)
        length = layout.num_tokens
        # Without compilation create_block_mask first writes out the dense T × T mask.
        make_mask: Any = torch.compile(create_block_mask) if query.device.type == "cuda" else create_block_mask
        reach = length if window is None else window
        return make_mask(
            lambda _batch, _head, q, k: (
                (group_T[q] == group_T[k])
                & ((reply_T[k] == -1) | (reply_T[q] == reply_T[k]))
                & (k <= q)
                & (position_T[q] - position_T[k] < reach)
            ),
            B=None,
            H=None,
            Q_LEN=length,
            KV_LEN=length,
            device=query.device,
        )

    softcap, sinks = formula.softcap, formula.sinks
    found = _compiled_flex(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: torch.tanh(score / softcap) * softcap,
        block_mask=layout.keep(("block", window), make),
        scale=formula.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    output: Tensor
    if sinks is None:
        output = found
        return output
    # The share of the softmax that a sink leaves to the keys, whose logits have this logarithm of their sum.
    attended, sums = found
    share = torch.sigmoid(sums.lse - sinks[:, None])
    output = attended * share[..., None].to(attended.dtype)
    return output


def varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H T _"]:
    """Compute by PyTorch's ragged flash attention; shared keys and values are copied for every later reply."""
    assert formula.is_plain  # `unavailable` rules this backend out for models with a soft cap or sinks
    return _by_ragged(varlen_kernel, query, key, value, layout, formula)


def flash(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H T _"]:
    """Compute as `varlen` does, by the flash-attn package, which also supports soft-capped logits."""
    return _by_ragged(flash_kernel, query, key, value, layout, formula)


def products(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H T _"]:
    """Compute by plain matrix products, forward and backward, for half precision on the CPU."""
    assert formula.is_plain  # `unavailable` rules this backend out for models with a soft cap or sinks
    attend: Any = Products
    output: Tensor = attend.apply(query, key, value, layout, formula.scale_for(query.shape[-1]), formula.window)
    return output


Backend = Callable[[Tensor, Tensor, Tensor, PromptLayout, Formula], Tensor]
BACKENDS: Final[dict[str, Backend]] = {
    "segments": segments,
    "products": products,
    "mask": mask,
    "flex": flex,
    "varlen": varlen,
    "flash": flash,
}
RaggedKernel = Callable[[Tensor, Tensor, Tensor, Ragged, Formula], Tensor]
"""(queries, keys, values, the ragged sequences, formula) -> output, as `varlen_kernel` takes and gives them"""
HALF: Final = (torch.float16, torch.bfloat16)


SOFT_CAPPED: Final = ("segments", "mask", "flex", "flash")
"""Backends that support soft-capped logits, which Gemma 2 has."""
SINKING: Final = ("segments", "mask", "flex")
"""Backends that support sinks, which GPT-OSS has."""
LEAST_BLOCK: Final = 256
"""Fewest tokens of the blocks that `segments` computes; smaller ones cost more than they save."""
MOST_WRITTEN: Final = 2**27
"""Entries of a mask, or logits, that `segments` holds at once, of 5 bytes each in float32. A later reply of fewer than
11,000 tokens to a short prompt is computed at once."""


def unavailable(name: str, *, device: torch.device, dtype: torch.dtype, formula: Formula, train: bool) -> str:
    """Return the reason why a backend cannot be used here, or an empty string if it can."""
    if name in ("varlen", "flash") and device.type != "cuda":
        return "it runs only on CUDA"
    if name == "products" and device.type != "cpu":
        return "it runs only on the CPU"
    if name in ("varlen", "flash", "products") and dtype not in HALF:
        return f"it runs only in half precision, not in {str(dtype).removeprefix('torch.')}"
    if formula.softcap is not None and name not in SOFT_CAPPED:
        return "it does not support soft-capped logits, which this model has"
    if formula.sinks is not None and name not in SINKING:
        return "it does not support attention sinks, which this model has"
    if formula.sinks is not None and name == "flex" and device.type == "cpu":
        return "FlexAttention has no sums of logits on the CPU, which attention sinks need"
    if name == "flex" and device.type == "cpu" and train:
        return "FlexAttention has no backward pass on the CPU"
    return _not_installed(name)


def _not_installed(name: str) -> str:
    """Return which package a backend lacks, or an empty string."""
    if name == "varlen" and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no torch.nn.attention.varlen"
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return ""


def varlen_kernel(
    query_T: Float[Tensor, "T H D"],
    key_U: Float[Tensor, "U _ D"],
    value_U: Float[Tensor, "U _ D"],
    ragged: Ragged,
    formula: Formula,
) -> Float[Tensor, "T H D"]:
    """Call PyTorch's ragged attention.

    The kernel aligns the last query of a sequence with its last key, as flash attention does since version 2.1. So the
    queries of a later reply see the copied shared part in full and are causal among themselves.
    """
    attend, has_flag = _varlen_attention()
    grouped = {"enable_gqa": True} if has_flag and query_T.shape[1] != key_U.shape[1] else {}
    output: Tensor = attend(
        query_T,
        key_U,
        value_U,
        ragged.query_starts,
        ragged.key_starts,
        ragged.longest_query,
        ragged.longest_key,
        scale=formula.scale,
        window_size=_flash_window(formula),
        **grouped,
    )
    return output


@cache
def _varlen_attention() -> tuple[Any, bool]:
    """Return PyTorch's function, and whether it must be told that there are fewer key heads than query heads: torch
    2.11 takes them as they are.
    """
    attend: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return attend, "enable_gqa" in inspect.signature(attend).parameters


def flash_kernel(
    query_T: Float[Tensor, "T H D"],
    key_U: Float[Tensor, "U _ D"],
    value_U: Float[Tensor, "U _ D"],
    ragged: Ragged,
    formula: Formula,
) -> Float[Tensor, "T H D"]:
    """Call flash-attn; queries are aligned with the end of their keys, as in `varlen_kernel`."""
    attend: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    output: Tensor = attend(
        query_T,
        key_U,
        value_U,
        ragged.query_starts,
        ragged.key_starts,
        ragged.longest_query,
        ragged.longest_key,
        softmax_scale=formula.scale,
        causal=True,
        window_size=_flash_window(formula),
        softcap=formula.softcap or 0.0,
    )
    return output


def _flash_window(formula: Formula) -> tuple[int, int]:
    """Return (tokens seen in front of a token, tokens seen after it) as flash attention counts them; −1 for all."""
    return (-1 if formula.window is None else formula.window - 1, 0)


class _Gather(torch.autograd.Function):
    """Selects rows by index, like `index_select`; the gradients of a row that was copied are added in float32.

    The backward pass of `index_select` itself would add them in half precision and lose low bits.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(source)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        (index,) = ctx.saved_tensors
        wide = _at_least_float32(gradient)
        total = wide.new_zeros((ctx.num_rows, *gradient.shape[1:]))
        return total.index_add_(0, index, wide).to(gradient.dtype), None


def _by_ragged(
    kernel: RaggedKernel, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, formula: Formula
) -> Float[Tensor, "1 H T _"]:
    """Compute by a ragged kernel. It takes heads of one width, so narrower values, as those of latent attention
    (DeepSeek) are, get columns of zeros, which come out as zeros and are cut off.
    """
    ragged = layout.ragged(query.device)
    q, k, v = _ragged_inputs(query, key, value, ragged)
    width = v.shape[-1]
    if width != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    output = kernel(q, k, v, ragged, formula)[..., :width]
    return output.transpose(0, 1).unsqueeze(0)


def _ragged_inputs(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H, D] and keys and values [U, _, D], all in the dtype of autocast, or that of the values.

    Norms, rotary embeddings and adapters may have made float32 of them; the kernels take one half-precision dtype.
    """
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    # Not `tensor[0]`, whose backward pass would fill a tensor of zeros and copy the gradient into it.
    q, k, v = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in (query, key, value))
    if ragged.gather_U is not None:
        gather: Any = _Gather
        k, v = gather.apply(k, ragged.gather_U), gather.apply(v, ragged.gather_U)
    return q, k, v


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@cache
def _compiled_flex(device_type: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Each row length needs two compiled programs, with gradients and without; lengths come in few buckets
    # (RewardModel.row_length). Beyond the limit PyTorch would go on uncompiled, with the whole T × T matrix in memory.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(flex_attention, dynamic=False)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, formula: Formula) -> Tensor:
    """Compute attention under a mask, or causal attention if it is None; windows are in the mask.

    A mask is boolean, or, where the formula is plain, may be what is added to the logits.
    """
    grouped = query.shape[1] != key.shape[1]
    # On CUDA only flash attention takes fewer key heads than query heads, and it takes neither a mask nor float32. With
    # these PyTorch would write out all logits; where each key head is repeated, it has a kernel that does not.
    by_flash = mask is None and value.dtype in HALF  # rotated queries may be float32, which autocast rounds
    if grouped and not (formula.is_plain and (by_flash or not query.is_cuda)):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        grouped = False
    if formula.is_plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=formula.scale, enable_gqa=grouped
        )
    # SDPA has neither a soft cap nor sinks, so these logits are written out.
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    logits = query @ key.transpose(2, 3) * formula.scale_for(query.shape[-1])
    if (softcap := formula.softcap) is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    if formula.sinks is not None:
        # Not rounded to the dtype of the logits, which would hide small updates: joined, both take the wider dtype.
        sinks = formula.sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sinks), -1)
    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.softmax(-1, dtype=at_least_float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
