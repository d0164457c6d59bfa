"""An embedding on the CPU whose gradient is not written out anew for every micro-batch.

The gradient of an embedding is as large as the embedding, and zero but for the tokens of the batch. PyTorch fills a new
tensor with zeros for every micro-batch and adds it to the last one. Here the rows of each micro-batch are added to one
tensor, which is kept from step to step, so that its memory is mapped once and cleared once a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rewardlab.model.autograd import first_order


class _Rows(torch.autograd.Function):
    """Rows of a weight by index. The weight's `grad` is written here, and autograd is told that it has none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, owner: RowEmbedding) -> Tensor:
        ctx.save_for_backward(index)
        ctx.owner = owner
        return F.embedding(index, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (gradient,) = gradients
        (index,) = ctx.saved_tensors
        ctx.owner.add_rows(index.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        return None, None, None


class RowEmbedding(nn.Embedding):
    """An nn.Embedding, same parameter and name, whose weight is a leaf on the CPU.

    Its gradient comes with `backward()`; `torch.autograd.grad` is not told of it.
    """

    kept: Tensor | None = None
    """The tensor of the last step's gradient."""

    def forward(self, input: Int[Tensor, " ..."]) -> Float[Tensor, "... W"]:
        """As nn.Embedding. A weight whose gradient somebody else waits for has it from autograd, as ever."""
        watched = self.weight._backward_hooks or self.weight._post_accumulate_grad_hooks
        if watched or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return F.embedding(input, self.weight)
        rows: Any = _Rows
        output: Tensor = rows.apply(self.weight, input, self)
        return output

    def add_rows(self, index: Int[Tensor, " T"], gradient: Float[Tensor, "T W"]) -> None:
        """Add the rows of a micro-batch to the weight's gradient; a weight without one is given the kept tensor."""
        weight = self.weight
        if weight.grad is None:
            if self.kept is None or (self.kept.shape, self.kept.dtype) != (weight.shape, weight.dtype):
                self.kept = torch.empty_like(weight)
            weight.grad = self.kept.zero_()
        weight.grad.index_add_(0, index, gradient.to(weight.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> RowEmbedding:
        """Moved or cast as nn.Embedding is, without what was kept."""
        self.kept = None
        base: Any = super()
        base._apply(fn, recurse)
        return self


def add_gradients_by_row(module: nn.Module) -> int:
    """Let every trained nn.Embedding inside add its gradient row by row; returns how many do.

    Embeddings whose rows or gradients are scaled, or are sparse already, are left as they are.
    """
    found = [
        child
        for child in module.modules()
        if type(child) is nn.Embedding
        and child.weight.requires_grad
        and child.max_norm is None
        and not child.scale_grad_by_freq
        and not child.sparse
    ]
    for child in found:
        child.__class__ = RowEmbedding
    return len(found)
