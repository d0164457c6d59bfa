"""Shared-prompt attention for half precision on the CPU, as plain matrix products.

In bf16 the backward pass of PyTorch's flash kernel for the CPU is several times as slow as the products that it stands
for, and its forward pass no faster than they are on rows of ordinary length; it is no more exact. Here logits are
products in float32, weights their softmax, rounded; everything else is products in half precision, whose gradients are
added up in float32. Weights are kept for the backward pass where keys are few, and else computed again.

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

from rewardlab.model.autograd import first_order

if TYPE_CHECKING:
    from rewardlab.model.attention_backends import PromptLayout

MAX_WASTE: Final = 1.3
"""Later replies are joined into one task, under a mask, if that multiplies their (query, key) places by no more."""
FEW_QUERIES: Final = 96
"""Tasks that have no more queries together are joined in any case: there a call costs more than its places."""
MAX_PLACES: Final = 60_000
"""(query, key) places of a task, so that its matrices stay in the processor's caches."""
LEAST_QUERIES: Final = 32
"""Tasks are not cut below this: products of a few rows are slow."""
KEPT_KEYS: Final = 512
"""Tasks with no more keys keep their weights: 2 bytes a query, head and key, so at most 1 KiB a query and head, where
the rest of a layer keeps some 3.5 KiB (heads of width 64; docs/scaling.md)."""
Stretch = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Queries [start, stop) of a row, and the stretches of it in which their keys stand, in order."""

    start: int
    stop: int
    keys: tuple[Stretch, ...]
    hidden: Bool[Tensor, "Q _"]
    """Which of the last keys a query does not see; it sees all keys before them."""

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        """S."""
        return sum(stop - start for start, stop in self.keys)


def plan_tasks(groups: Sequence[tuple[int, tuple[int, ...]]], *, max_places: int = MAX_PLACES) -> list[Task]:
    """The tasks of a row, each of at most `max_places`, or of LEAST_QUERIES; `groups` as in PromptLayout."""
    tasks: list[Task] = []
    start = 0
    for num_shared, lengths in groups:
        for first, last in _joined(num_shared, lengths):
            tasks += _tasks(start, num_shared, lengths, first, last, max_places)
        start += num_shared + sum(lengths)
    return tasks


def _joined(num_shared: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Replies [first, last) of a group that stand together; the first reply brings the shared part with it."""
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


def _tasks(
    start: int, num_shared: int, lengths: Sequence[int], first: int, last: int, max_places: int
) -> Iterator[Task]:
    """Replies [first, last) of a group that begins at token `start`, in pieces of consecutive queries."""
    before = num_shared if first else 0
    begin = start + before + sum(lengths[:first])
    own = list(lengths[first:last])
    if first == 0:
        own[0] += num_shared
    num_queries = sum(own)
    num_keys = before + num_queries
    # Of every query, where its own reply begins among these keys; what all see comes before them.
    begins_Q = torch.repeat_interleave(torch.tensor([sum(own[:n]) for n in range(len(own))]), torch.tensor(own))
    seen_by_all = num_shared if first == 0 else 0
    count = -(-num_queries * num_keys // max(max_places, LEAST_QUERIES * num_keys))
    for top, end in pairwise(num_queries * n // count for n in range(count + 1)):
        keys_S, queries_Q = torch.arange(end), torch.arange(top, end)[:, None]
        hidden = (keys_S > queries_Q) | ((keys_S >= seen_by_all) & (keys_S < begins_Q[top:end, None]))
        open_keys = int((~hidden).all(0).long().cumprod(0).sum())
        stretch = (begin, begin + end)
        yield Task(
            start=begin + top,
            stop=begin + end,
            keys=((start, start + before), stretch) if before else (stretch,),
            hidden=hidden[:, open_keys:].clone(),
        )


class Products(torch.autograd.Function):
    """Attention of a packed row, [1, H, T, D] by [1, G, T, D] and [1, G, T, D], in the dtype of the values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, scale: float) -> Tensor:
        num_heads, num_tokens = query.shape[1:3]
        # In the order in which the layer goes on with it: all heads of a token together.
        output = value.new_empty(1, num_tokens, num_heads, value.shape[-1]).transpose(1, 2)
        row = _Row(query, key, value, scale)
        kept = []
        for task in layout.keep("tasks", lambda: plan_tasks(layout.groups)):
            weights = row.weights(task)
            output[0, :, task.start : task.stop] = row.by_head(torch.bmm(weights, row.of_keys(row.value, task)))
            if task.num_keys <= KEPT_KEYS and any(ctx.needs_input_grad):
                kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        row = _Row(query, key, value, ctx.scale)
        gradient = gradients[0][0].to(value.dtype)
        narrow_query, narrow_key = query[0].to(value.dtype), key[0].to(value.dtype)
        num_heads, num_tokens = query.shape[1:3]
        d_query = value.new_empty(1, num_tokens, num_heads, query.shape[-1]).transpose(1, 2)
        # Keys that several tasks see, such as a prompt's, add their gradients in float32.
        d_key, d_value = (torch.zeros(*tensor.shape[1:], dtype=torch.float32) for tensor in (key, value))
        saved = iter(kept)
        for task in ctx.layout.keep("tasks", lambda: plan_tasks(ctx.layout.groups)):
            weights = next(saved) if task.num_keys <= KEPT_KEYS else row.weights(task)
            q, g = row.of_queries(narrow_query, task), row.of_queries(gradient, task)
            d_weights = torch.bmm(g, row.of_keys(row.value, task).transpose(1, 2))
            d_logits = torch._softmax_backward_data(d_weights, weights, -1, value.dtype)
            d_query[0, :, task.start : task.stop] = row.by_head(torch.bmm(d_logits, row.of_keys(narrow_key, task)))
            d_k = torch.bmm(d_logits.transpose(1, 2), q)
            d_v = torch.bmm(weights.transpose(1, 2), g)
            place = 0
            for start, stop in task.keys:
                d_key[:, start:stop] += d_k[:, place : place + stop - start]
                d_value[:, start:stop] += d_v[:, place : place + stop - start]
                place += stop - start
        return (
            d_query.to(query.dtype).mul_(ctx.scale),
            d_key.mul_(ctx.scale).to(key.dtype)[None],
            d_value.to(value.dtype)[None],
            None,
            None,
        )


class _Row:
    """A row's queries, keys and values, cut task by task."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        dtype = value.dtype
        self.num_heads, self.num_groups = query.shape[1], key.shape[1]
        self.value = value[0]
        # The logits are those of queries and keys in half precision, as everywhere.
        self._query = query[0].to(dtype).float() * scale
        self._key = key[0].to(dtype).float()

    def weights(self, task: Task) -> Float[Tensor, "G F S"]:
        """Softmax of the logits, in half precision."""
        queries, keys = self.of_queries(self._query, task), self.of_keys(self._key, task)
        # Into a tensor of its own: selective checkpointing keeps what products return, and these logits would be a lot.
        logits = queries.new_empty(self.num_groups, queries.shape[1], task.num_keys)
        torch.bmm(queries, keys.transpose(1, 2), out=logits)
        if task.hidden.shape[1]:
            last = logits.view(self.num_heads, task.num_queries, task.num_keys)[..., -task.hidden.shape[1] :]
            last.masked_fill_(task.hidden, float("-inf"))
        return torch.softmax(logits, -1, out=logits).to(self.value.dtype)

    def of_queries(self, tensor: Tensor, task: Task) -> Float[Tensor, "G F _"]:
        """Of [H, T, …]: queries of the heads that share keys, one after the other."""
        part = tensor[:, task.start : task.stop]
        return part.reshape(self.num_groups, -1, part.shape[-1])

    def of_keys(self, tensor: Tensor, task: Task) -> Float[Tensor, "G S _"]:
        """Of [G, T, …]: the tokens of the task's stretches."""
        parts = [tensor[:, start:stop] for start, stop in task.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def by_head(self, rows: Tensor) -> Float[Tensor, "H Q _"]:
        """Of [G, F, …]."""
        return rows.view(self.num_heads, -1, rows.shape[-1])
