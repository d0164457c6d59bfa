"""Shared-prompt attention for half precision on the CPU, as plain matrix products.

In bf16 the backward pass of PyTorch's flash kernel for the CPU is several times as slow as the matrix products that it
replaces. Its forward pass is no faster than they are on rows of ordinary length, nor more exact. Here the
logits are products in float32; the attention weights are their softmax, rounded to half precision. All other products
are in half precision, and their gradients are added up in float32. The attention weights are kept for the backward
pass where there are few keys, and computed again otherwise.

A packed row is cut into tasks: consecutive queries, and one or two ranges of keys that they may see.

Legend: H query heads, G key heads, T packed tokens, D head width, Q queries and S keys of a task, F = H/G · Q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewardlab.model.autograd import first_order
from rewardlab.model.prompt_layout import PromptLayout

MAX_WASTE: Final = 1.3
"""Later replies are joined into one masked task if that makes at most this many times as many (query, key) places."""
FEW_QUERIES: Final = 96
"""Tasks with no more queries together are always joined: at that size a call costs more than the extra places."""
MAX_PLACES: Final = 60_000
"""Most (query, key) places in a task, so that its matrices stay in the processor's caches."""
LEAST_QUERIES: Final = 32
"""Tasks are not cut into fewer queries than this, because products of a few rows are slow."""
KEPT_KEYS: Final = 512
"""Tasks with no more keys keep their attention weights for the backward pass. That costs 2 bytes a query, head and key,
so at most 1 KiB a query and head; the rest of a layer keeps about 3 KiB (heads of width 64; docs/scaling.md)."""
Stretch = tuple[int, int]
"""A range [start, stop) of row indices."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Queries [start, stop) of a row, and the ranges of the row in which their keys lie, in order."""

    start: int
    stop: int
    keys: tuple[Stretch, ...]
    hidden: Bool[Tensor, "Q _"]
    """Which of the last keys each query does not see; all keys before these are seen by every query."""

    @property
    def num_queries(self) -> int:
        """The number of queries (Q)."""
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        """The number of keys (S)."""
        return sum(stop - start for start, stop in self.keys)


def plan_tasks(
    groups: Sequence[tuple[int, tuple[int, ...]]], *, max_places: int = MAX_PLACES, window: int | None = None
) -> list[Task]:
    """Cut a row into tasks of at most `max_places` (query, key) places, or of LEAST_QUERIES queries if that is more.

    `groups` is as in PromptLayout; `window` is how many tokens a token sees, None for all in front of it.
    """
    tasks: list[Task] = []
    start = 0
    for num_shared, lengths in groups:
        for first, last in _joined(num_shared, lengths):
            tasks += _tasks(start, num_shared, lengths, (first, last), max_places, window)
        start += num_shared + sum(lengths)
    return tasks


def _joined(num_shared: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of the group's replies that form one task; reply 0 brings the shared part with it."""
    first, queries, places = 0, 0, 0
    for reply, length in enumerate(lengths):
        added = length + (num_shared if reply == 0 else 0)
        own = added * (num_shared + length)
        # The keys of a joined task are its own tokens, after the shared ones if these are not among its queries.
        joined = (queries + added) * (queries + added + (num_shared if first else 0))
        # A long task with the shared part in it is not joined: the shared queries see none of a later reply's keys, so
        # joining would mostly add masked places.
        fits = queries + added <= FEW_QUERIES or (first > 0 and joined <= MAX_WASTE * (places + own))
        if queries and not fits:
            yield first, reply
            first, queries, places = reply, 0, 0
        queries, places = queries + added, places + own
    if queries:
        yield first, len(lengths)


def _tasks(
    start: int, num_shared: int, lengths: Sequence[int], part: tuple[int, int], max_places: int, window: int | None
) -> Iterator[Task]:
    """Cut replies [first, last) of a group that begins at token `start` into tasks of consecutive queries."""
    first, last = part
    before = num_shared if first else 0
    begin = start + before + sum(lengths[:first])
    own = list(lengths[first:last])
    if first == 0:
        own[0] += num_shared
    num_queries = sum(own)
    num_keys = before + num_queries
    # For every query, the index among these replies' own tokens at which its reply begins. Shared tokens before them
    # (`before`) are seen by all and need no mask.
    begins_Q = torch.repeat_interleave(torch.tensor([sum(own[:n]) for n in range(len(own))]), torch.tensor(own))
    seen_by_all = num_shared if first == 0 else 0
    count = -(-num_queries // max(max_places // num_keys, LEAST_QUERIES))
    for top, end in pairwise(num_queries * n // count for n in range(count + 1)):
        # Keys after the last query of the piece are hidden from all of it by causality, so they are left out.
        keys_S, queries_Q = torch.arange(end), torch.arange(top, end)[:, None]
        hidden = (keys_S > queries_Q) | ((keys_S >= seen_by_all) & (keys_S < begins_Q[top:end, None]))
        unseen, near = 0, before
        if window is not None:
            # Replies after the one that brings the shared part with it begin behind that part, wherever they stand.
            own_S = keys_S - begins_Q[:end] + num_shared * ((begins_Q[:end] > 0) | (first > 0))
            position_S = torch.cat((torch.arange(before), own_S))
            far = own_S[top:end, None] - position_S >= window
            hidden = torch.cat((hidden.new_zeros(end - top, before), hidden), 1) | far
            # Leading keys that no query of the piece sees are left out too.
            unseen = int(hidden.all(0).long().cumprod(0).sum())
            hidden, near = hidden[:, unseen:], max(0, before - unseen)
        # Leading keys that no query is hidden from need no mask; only the columns after them are stored and filled.
        open_keys = int((~hidden).all(0).long().cumprod(0).sum())
        stretch = (begin + max(0, unseen - before), begin + end)
        yield Task(
            start=begin + top,
            stop=begin + end,
            keys=((start + before - near, start + before), stretch) if near else (stretch,),
            hidden=hidden[:, open_keys:].clone(),
        )


class Products(torch.autograd.Function):
    """Attention over a packed row: queries [1, H, T, D], keys and values [1, G, T, D], output in the values' dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PromptLayout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        num_heads, num_tokens = query.shape[1:3]
        # In memory all heads of a token lie together, as the output projection reads them, which saves it a copy.
        output = value.new_empty(1, num_tokens, num_heads, value.shape[-1]).transpose(1, 2)
        row = _Row(query, key, value, scale)
        kept = []
        for task in layout.keep(("tasks", window), lambda: plan_tasks(layout.groups, window=window)):
            weights = row.weights(task)
            output[0, :, task.start : task.stop] = row.by_head(torch.bmm(weights, row.of_keys(row.value, task)))
            if task.num_keys <= KEPT_KEYS and any(ctx.needs_input_grad):
                kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
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
        # Several tasks see the same keys, such as a prompt's. Their gradients are added in float32, because a sum over
        # many replies in bf16 would lose low bits.
        d_key, d_value = (torch.zeros(*tensor.shape[1:], dtype=torch.float32) for tensor in (key, value))
        saved = iter(kept)
        tasks = ctx.layout.keep(("tasks", ctx.window), lambda: plan_tasks(ctx.layout.groups, window=ctx.window))
        for task in tasks:
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
        # The products above used unscaled queries and keys; logits are scale · q · k, so both gradients get the factor.
        return (
            d_query.to(query.dtype).mul_(ctx.scale),
            d_key.mul_(ctx.scale).to(key.dtype)[None],
            d_value.to(value.dtype)[None],
            None,
            None,
            None,
        )


class _Row:
    """The queries, keys and values of a row, from which the tasks take theirs."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        dtype = value.dtype
        self.num_heads, self.num_groups = query.shape[1], key.shape[1]
        self.value = value[0]
        # Rounded to half precision first, as every other backend has its queries and keys; then float32 for the logits.
        self._query = query[0].to(dtype).float() * scale
        self._key = key[0].to(dtype).float()

    def weights(self, task: Task) -> Float[Tensor, "G F S"]:
        """Return the attention weights of a task: the softmax of its logits, rounded to half precision."""
        queries, keys = self.of_queries(self._query, task), self.of_keys(self._key, task)
        # `out=` and not the return value: selective checkpointing stores what bmm returns, and the float32 logits would
        # be the largest tensors of the layer.
        logits = queries.new_empty(self.num_groups, queries.shape[1], task.num_keys)
        torch.bmm(queries, keys.transpose(1, 2), out=logits)
        if task.hidden.shape[1]:
            last = logits.view(self.num_heads, task.num_queries, task.num_keys)[..., -task.hidden.shape[1] :]
            last.masked_fill_(task.hidden, float("-inf"))
        return torch.softmax(logits, -1, out=logits).to(self.value.dtype)

    def of_queries(self, tensor: Tensor, task: Task) -> Float[Tensor, "G F _"]:
        """Return a task's queries out of [H, T, …], those of the heads that share a key head one after the other."""
        part = tensor[:, task.start : task.stop]
        return part.reshape(self.num_groups, -1, part.shape[-1])

    def of_keys(self, tensor: Tensor, task: Task) -> Float[Tensor, "G S _"]:
        """Return a task's keys or values out of [G, T, …]."""
        parts = [tensor[:, start:stop] for start, stop in task.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def by_head(self, rows: Tensor) -> Float[Tensor, "H Q _"]:
        """Return [G, F, …] with one entry for each query head again."""
        return rows.view(self.num_heads, -1, rows.shape[-1])
