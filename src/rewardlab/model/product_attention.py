"""Shared-prompt attention for half precision on the CPU: PyTorch's flash kernel forward, matrix products backward.

In bf16 the backward pass of PyTorch's flash kernel for the CPU is several times as slow as the products that it stands
for, and no more exact. So the forward pass keeps what flash attention keeps, the logarithm of each row's sum. The
backward pass computes the weights again from it, as a product in float32, and from the weights the gradients, as
products in half precision that are added up in float32.

A packed row is cut into tasks: queries that stand together, and one or two stretches of keys that they may see.

Legend: H query heads, G key heads, T packed tokens, D head width, Q queries and S keys of a task, F = H/G · Q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from rewardlab.model.attention_backends import PromptLayout

MAX_WASTE: Final = 1.3
"""Later replies are joined into one task, under a mask, if that multiplies their (query, key) places by no more."""
FEW_QUERIES: Final = 96
"""Tasks that have no more queries together are joined in any case: there a call costs more than its places."""
MAX_PLACES: Final = 100_000
"""(query, key) places of a task of the backward pass, so that its matrices stay in the processor's caches."""
Stretch = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Queries [start, stop) of a row, and the stretches of it in which their keys stand, in order."""

    start: int
    stop: int
    keys: tuple[Stretch, ...]
    hidden: Bool[Tensor, "Q _"]
    """Which of the last keys a query does not see; it sees all keys before them."""
    is_causal: bool
    """Whether these are all tokens of the keys' one stretch, each of which sees itself and those before it."""

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        """S."""
        return sum(stop - start for start, stop in self.keys)


def plan_tasks(groups: Sequence[tuple[int, tuple[int, ...]]], *, max_places: int | None = None) -> list[Task]:
    """The tasks of a row; `groups` as in PromptLayout. `max_places` cuts large tasks further."""
    tasks: list[Task] = []
    start = 0
    for num_shared, lengths in groups:
        for first, last in _joined(num_shared, lengths):
            tasks += _cut(_task(start, num_shared, lengths, first, last), max_places)
        start += num_shared + sum(lengths)
    return tasks


def _joined(num_shared: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Replies [first, last) of a group that one task takes; the first reply brings the shared part with it."""
    first, queries, places = 0, 0, 0
    for reply, length in enumerate(lengths):
        added = length + (num_shared if reply == 0 else 0)
        own = added * (num_shared + length)
        joined = (queries + added) * (queries + added + (num_shared if first else 0))
        fits = queries + added <= FEW_QUERIES or (first > 0 and joined <= MAX_WASTE * (places + own))
        if queries and not fits:
            yield first, reply
            first, queries, places = reply, 0, 0
        queries, places = queries + added, places + own
    if queries:
        yield first, len(lengths)


def _task(start: int, num_shared: int, lengths: Sequence[int], first: int, last: int) -> Task:
    """Replies [first, last) of a group that begins at token `start`."""
    begin = start + (num_shared if first else 0) + sum(lengths[:first])
    stop = start + num_shared + sum(lengths[:last])
    keys: tuple[Stretch, ...]
    if first == 0:
        lengths_here, keys = [num_shared + lengths[0], *lengths[1:last]], ((start, stop),)
    else:
        lengths_here = list(lengths[first:last])
        keys = ((start, start + num_shared), (begin, stop)) if num_shared else ((begin, stop),)
    hidden = torch.ones(stop - begin, stop - begin, dtype=torch.bool).triu(1)
    place = 0
    for number, length in enumerate(lengths_here):
        seen_by_all = num_shared if first == 0 else 0
        hidden[place : place + length, (seen_by_all if number else place) : place] = True
        place += length
    return Task(start=begin, stop=stop, keys=keys, hidden=hidden, is_causal=first == 0 and last == 1)


def _cut(task: Task, max_places: int | None) -> list[Task]:
    """The task in pieces of consecutive queries, if it is too large."""
    if max_places is None or task.num_queries * task.num_keys <= max_places:
        return [task]
    count = -(-task.num_queries * task.num_keys // max_places)
    ends = [task.num_queries * n // count for n in range(count + 1)]
    pieces = []
    for start, stop in pairwise(ends):
        *others, (first, _) = task.keys
        pieces.append(
            Task(
                start=task.start + start,
                stop=task.start + stop,
                keys=(*others, (first, task.start + stop)),
                hidden=task.hidden[start:stop, :stop],
                is_causal=False,
            )
        )
    return pieces


class Products(torch.autograd.Function):
    """Attention of a packed row, [1, H, T, D] by [1, G, T, D] and [1, G, T, D], in the dtype of the values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float) -> Tensor:
        dtype = value.dtype
        q, k = query.to(dtype), key.to(dtype)
        num_heads, num_tokens = q.shape[1:3]
        # In the order in which the layer goes on with it: all heads of a token together.
        output = q.new_empty(1, num_tokens, num_heads, value.shape[-1]).transpose(1, 2)
        log_sums = torch.empty(num_heads, num_tokens, dtype=torch.float32)
        masks: dict[Task, Tensor] = layout.keep(("masks", dtype), dict)
        for task in layout.keep("tasks", lambda: plan_tasks(layout.groups)):
            mask = None
            if not task.is_causal:
                if task not in masks:
                    masks[task] = _additive(task, dtype)
                mask = masks[task]
            part, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, task.start : task.stop],
                _stretches(k, task.keys),
                _stretches(value, task.keys),
                is_causal=task.is_causal,
                attn_mask=mask,
                scale=scale,
            )
            output[:, :, task.start : task.stop] = part
            log_sums[:, task.start : task.stop] = log_sum[0]
        ctx.save_for_backward(q, k, value, log_sums)
        ctx.layout, ctx.scale, ctx.dtypes = layout, scale, (query.dtype, key.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        query, key, value, log_sums_HT = ctx.saved_tensors
        dtype, (num_heads, num_tokens), num_groups = value.dtype, query.shape[1:3], key.shape[1]
        gradient = gradient.to(dtype)
        d_query = query.new_empty(1, num_tokens, num_heads, query.shape[-1]).transpose(1, 2)
        # Keys that several tasks see, such as a prompt's, add their gradients in float32.
        d_key, d_value = (
            torch.zeros(num_groups, num_tokens, tensor.shape[-1], dtype=torch.float32) for tensor in (key, value)
        )

        def rows(tensor: Tensor, task: Task) -> Tensor:
            """Queries of the heads that share keys, one after the other. [G, F, …]"""
            part = tensor[:, task.start : task.stop]
            return part.reshape(num_groups, -1, *part.shape[2:])

        for task in ctx.layout.keep("tasks backward", lambda: plan_tasks(ctx.layout.groups, max_places=MAX_PLACES)):
            k, v = _stretches(key, task.keys)[0], _stretches(value, task.keys)[0]
            q, g = rows(query[0], task), rows(gradient[0], task)
            logits = torch.bmm(q.float() * ctx.scale, k.float().transpose(1, 2))
            weights = logits.sub_(rows(log_sums_HT, task)[..., None]).exp_()
            seen = weights.view(num_heads, task.num_queries, task.num_keys)
            seen[..., task.num_keys - task.hidden.shape[1] :].masked_fill_(task.hidden, 0.0)
            weighted = torch.bmm(g, v.transpose(1, 2)) * weights
            # Of the same rounded products, so that a query that sees one key gets no gradient, as it should.
            d_logits = weighted.addcmul_(weights, weighted.sum(-1, keepdim=True), value=-1).to(dtype)
            d_query[:, :, task.start : task.stop] = torch.bmm(d_logits, k).view(num_heads, task.num_queries, -1)
            d_k = torch.bmm(d_logits.transpose(1, 2), q)
            d_v = torch.bmm(weights.to(dtype).transpose(1, 2), g)
            place = 0
            for start, stop in task.keys:
                d_key[:, start:stop] += d_k[:, place : place + stop - start]
                d_value[:, start:stop] += d_v[:, place : place + stop - start]
                place += stop - start
        query_dtype, key_dtype = ctx.dtypes
        return (
            d_query.to(query_dtype).mul_(ctx.scale),
            d_key.mul_(ctx.scale).to(key_dtype)[None],
            d_value.to(dtype)[None],
            None,
            None,
        )


def _stretches(tensor: Tensor, stretches: Sequence[Stretch]) -> Tensor:
    """[1, G, S, D]: the tokens of the stretches of [1, G, T, D]."""
    parts = [tensor[:, :, start:stop] for start, stop in stretches]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _additive(task: Task, dtype: torch.dtype) -> Float[Tensor, "Q S"]:
    """The task's mask as the kernel wants it."""
    mask = torch.zeros(task.num_queries, task.num_keys, dtype=dtype)
    mask[:, task.num_keys - task.hidden.shape[1] :].masked_fill_(task.hidden, float("-inf"))
    return mask
