"""Ways to compute shared-prompt attention: one meaning, several kernels.

All take a packed row and its PromptLayout and give the same numbers up to rounding; they differ in which processor
and dtype they run on, and in what they cost. `segments` is the plain one that the others are checked against.

Legend: R replies, H query heads, T packed tokens, U tokens with a copy of the shared part for each reply, D head width.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rewardlab.batch import send
from rewardlab.model.product_attention import Products

Made = TypeVar("Made")


class PromptLayout:
    """Which stretch of the packed row attends to what, and how many layers have asked.

    ``groups`` as in PackedBatch: (shared tokens, tokens of each reply). What a backend needs beside them is made once
    and kept for all layers.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, tuple[int, ...]]],
        backend: str = "segments",
        read_at_R: Int[Tensor, " R"] | None = None,
    ) -> None:
        self.backend = backend
        self.read_at_R = read_at_R
        """Where scores are read; what only they need is not computed elsewhere in the last layer."""
        self.groups = groups
        self.segments = [
            (num_shared, length, reply == 0) for num_shared, suffixes in groups for reply, length in enumerate(suffixes)
        ]
        self.sizes = [shared + length if first else length for shared, length, first in self.segments]
        self.num_calls = 0
        self._made: dict[object, Any] = {}

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.sizes)

    def keep(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` gives, made at the first call with this key."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def mask(self, num_shared: int, length: int, device: torch.device) -> Bool[Tensor, "r s"]:
        """Who a later reply sees: the whole shared part and its own past. [length, num_shared + length]"""

        def make() -> Tensor:
            return torch.ones(length, num_shared + length, dtype=torch.bool, device=device).tril(num_shared)

        return self.keep((num_shared, length), make)

    def owners(self, device: torch.device) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
        """For every token its group, and its reply counted over the row; −1 for shared tokens."""
        groups, replies, reply = [], [], 0
        for number, (num_shared, suffixes) in enumerate(self.groups):
            groups += [number] * (num_shared + sum(suffixes))
            replies += [-1] * num_shared
            for length in suffixes:
                replies += [reply] * length
                reply += 1
        return send(torch.tensor(groups), device), send(torch.tensor(replies), device)

    def dense_mask(self, device: torch.device) -> Bool[Tensor, "T T"]:
        """Who sees whom, written out."""

        def make() -> Tensor:
            group_T, reply_T = self.owners(device)
            mask = torch.ones(self.num_tokens, self.num_tokens, dtype=torch.bool, device=device).tril()
            mask &= group_T[:, None] == group_T[None]
            return mask & ((reply_T[None] == -1) | (reply_T[:, None] == reply_T[None]))

        return self.keep("dense", make)

    def ragged(self, device: torch.device) -> Ragged:
        """The layout for kernels that take queries and keys of different lengths, one stretch after the other."""

        def make() -> Ragged:
            lengths = [shared + length for shared, length, _ in self.segments]
            index: list[Tensor] = []
            start = first = 0
            for (num_shared, _, opens), size in zip(self.segments, self.sizes, strict=True):
                if opens:
                    first = start
                else:
                    index.append(torch.arange(first, first + num_shared))
                index.append(torch.arange(start, start + size))
                start += size

            def to_cumulative(sizes: list[int]) -> Tensor:
                return send(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)

            return Ragged(
                query_starts=to_cumulative(self.sizes),
                key_starts=to_cumulative(lengths),
                longest_query=max(self.sizes),
                longest_key=max(lengths),
                gather_U=send(torch.cat(index), device) if lengths != self.sizes else None,
            )

        return self.keep("ragged", make)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """Cumulative lengths of queries and of the keys they see, and where these keys lie in the row."""

    query_starts: Int[Tensor, " _"]
    key_starts: Int[Tensor, " _"]
    longest_query: int
    longest_key: int
    gather_U: Int[Tensor, " U"] | None
    """Row index of every key; None where nothing is shared, and so nothing to be copied."""


def segments(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float | None, softcap: float | None
) -> Float[Tensor, "1 H T _"]:
    """One causal stretch for the shared part with the first reply, one masked stretch for every further reply."""
    outputs = []
    # `split`, not slices: the backward of a slice adds a full-size tensor of zeros for every segment.
    queries, keys, values = (torch.split(tensor, layout.sizes, 2) for tensor in (query, key, value))
    shared_k = shared_v = key[:, :, :0]
    for (num_shared, length, first), q, k, v in zip(layout.segments, queries, keys, values, strict=True):
        mask = None
        if first:
            if length < k.shape[2]:
                # Widened, so that the gradients of all replies are added in float32.
                shared_k, shared_v = (_at_least_float32(tensor[:, :, :num_shared]) for tensor in (k, v))
        elif num_shared:
            k, v = torch.cat((shared_k.to(k.dtype), k), 2), torch.cat((shared_v.to(v.dtype), v), 2)
            mask = layout.mask(num_shared, length, q.device)
        outputs.append(_attend(q, k, v, mask, scale, softcap))
    return torch.cat(outputs, 2)


def mask(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float | None, softcap: float | None
) -> Float[Tensor, "1 H T _"]:
    """The whole row at once under a mask of T²: work and memory grow with the square of the row."""
    return _attend(query, key, value, layout.dense_mask(query.device), scale, softcap)


def flex(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float | None, softcap: float | None
) -> Float[Tensor, "1 H T _"]:
    """FlexAttention with a block mask, compiled: no copies, and blocks that see nothing are skipped."""
    from torch.nn.attention.flex_attention import create_block_mask

    def make() -> Any:
        group_T, reply_T = layout.owners(query.device)

        length = layout.num_tokens
        # Not compiled, the mask of T² would be written out on the way.
        make_mask: Any = torch.compile(create_block_mask) if query.device.type == "cuda" else create_block_mask
        return make_mask(
            lambda _batch, _head, q, k: (
                (group_T[q] == group_T[k]) & ((reply_T[k] == -1) | (reply_T[q] == reply_T[k])) & (k <= q)
            ),
            B=None,
            H=None,
            Q_LEN=length,
            KV_LEN=length,
            device=query.device,
        )

    output: Tensor = _compiled_flex(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: torch.tanh(score / softcap) * softcap,
        block_mask=layout.keep("block", make),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float | None, softcap: float | None
) -> Float[Tensor, "1 H T _"]:
    """PyTorch's ragged flash attention; keys and values of a shared part are copied for every further reply."""
    assert softcap is None
    ragged = layout.ragged(query.device)
    q, k, v = _ragged_inputs(query, key, value, ragged)
    output = varlen_kernel(q, k, v, ragged, scale)
    return output.transpose(0, 1)[None].to(query.dtype)


def flash(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float | None, softcap: float | None
) -> Float[Tensor, "1 H T _"]:
    """As `varlen`, with the flash-attn package, which also knows soft caps."""
    ragged = layout.ragged(query.device)
    q, k, v = _ragged_inputs(query, key, value, ragged)
    output = flash_kernel(q, k, v, ragged, scale, softcap)
    return output.transpose(0, 1)[None].to(query.dtype)


def products(
    query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float | None, softcap: float | None
) -> Float[Tensor, "1 H T _"]:
    """For half precision on the CPU: plain matrix products, forward and backward."""
    assert softcap is None
    attend: Any = Products
    output: Tensor = attend.apply(query, key, value, layout, scale if scale is not None else query.shape[-1] ** -0.5)
    return output


Backend = Callable[[Tensor, Tensor, Tensor, PromptLayout, float | None, float | None], Tensor]
BACKENDS: Final[dict[str, Backend]] = {
    "segments": segments,
    "products": products,
    "mask": mask,
    "flex": flex,
    "varlen": varlen,
    "flash": flash,
}
HALF: Final = (torch.float16, torch.bfloat16)


SOFT_CAPPED: Final = ("segments", "mask", "flex", "flash")
"""Backends that know soft-capped logits."""


def unavailable(name: str, *, device: torch.device, dtype: torch.dtype, softcap: float | None, train: bool) -> str:
    """Why this backend cannot be used here, or an empty text."""
    if name in ("varlen", "flash") and device.type != "cuda":
        return "it runs on CUDA alone"
    if name == "products" and device.type != "cpu":
        return "it is for the CPU"
    if name in ("varlen", "flash", "products") and dtype not in HALF:
        return f"it runs in half precision alone, not in {str(dtype).removeprefix('torch.')}"
    if softcap is not None and name not in SOFT_CAPPED:
        return "it has no soft cap, which this model needs"
    if name == "flex" and device.type == "cpu" and train:
        return "FlexAttention has no backward pass on the CPU"
    return _not_installed(name)


def _not_installed(name: str) -> str:
    if name == "varlen" and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no torch.nn.attention.varlen"
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return ""


def varlen_kernel(
    query_T: Float[Tensor, "T H D"],
    key_U: Float[Tensor, "U _ D"],
    value_U: Float[Tensor, "U _ E"],
    ragged: Ragged,
    scale: float | None,
) -> Float[Tensor, "T H E"]:
    """The call into PyTorch. Queries are aligned with the end of their keys, as flash attention does since 2.1."""
    attend: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 takes grouped heads as they are; later versions want to be told.
    known = inspect.signature(attend).parameters
    grouped = {"enable_gqa": True} if "enable_gqa" in known and query_T.shape[1] != key_U.shape[1] else {}
    output: Tensor = attend(
        query_T,
        key_U,
        value_U,
        ragged.query_starts,
        ragged.key_starts,
        ragged.longest_query,
        ragged.longest_key,
        scale=scale,
        window_size=(-1, 0),
        **grouped,
    )
    return output


def flash_kernel(
    query_T: Float[Tensor, "T H D"],
    key_U: Float[Tensor, "U _ D"],
    value_U: Float[Tensor, "U _ E"],
    ragged: Ragged,
    scale: float | None,
    softcap: float | None,
) -> Float[Tensor, "T H E"]:
    """The call into flash-attn."""
    attend: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    output: Tensor = attend(
        query_T,
        key_U,
        value_U,
        ragged.query_starts,
        ragged.key_starts,
        ragged.longest_query,
        ragged.longest_key,
        softmax_scale=scale,
        causal=True,
        softcap=softcap or 0.0,
    )
    return output


class _Gather(torch.autograd.Function):
    """Rows by index; the gradients of a row that was copied are added in float32."""

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


def _ragged_inputs(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H, D] queries and [U, _, D] keys and values, all in the dtype of the values.

    Norms and rotary embeddings may have widened queries and keys; the kernels want one half-precision dtype.
    """
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    if ragged.gather_U is not None:
        gather: Any = _Gather
        k, v = gather.apply(k, ragged.gather_U), gather.apply(v, ragged.gather_U)
    return q, k, v


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@cache
def _compiled_flex(device_type: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Two programs a row length, with gradients and without; lengths come in few buckets (RewardModel.row_length).
    # Beyond the limit PyTorch would go on without compiling, with the whole matrix of scores in memory.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(flex_attention, dynamic=False)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, softcap: float | None
) -> Tensor:
    """Causal attention without a mask, or attention under a boolean mask."""
    grouped = query.shape[1] != key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    logits = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1, dtype=at_least_float32)
    return weights.to(value.dtype) @ value
