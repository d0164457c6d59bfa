"""An embedding for the CPU whose gradients are added up in one tensor that is kept.

The gradient of an embedding is as large as the embedding, and zero except in the rows of the batch's tokens. PyTorch
fills a new tensor with zeros for every micro-batch and adds it to the previous one. Here the rows of each micro-batch
are added to one tensor, which is kept from step to step, so its memory is mapped once and cleared once a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rewardlab.model.autograd import first_order


class _Rows(torch.autograd.Function):
    """Selects rows of a weight. Its backward pass writes the weight's `grad` itself and returns None to autograd."""

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
    """An nn.Embedding with the same parameter and name, whose weight is a leaf on the CPU.

    `backward()` adds to the weight's gradient; `torch.autograd.grad` does not see it.
    """

    kept: Tensor | None = None
    """The gradient tensor of an earlier step, to be used again; None before the first."""

    def forward(self, input: Int[Tensor, " ..."]) -> Float[Tensor, "... W"]:
        """Look up the rows [..., W] of token ids [...], as nn.Embedding does.

        A weight with gradient hooks gets its gradient from autograd, because the hooks would not run otherwise.
        """
        watched = self.weight._backward_hooks or self.weight._post_accumulate_grad_hooks
        if watched or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return F.embedding(input, self.weight)
        rows: Any = _Rows
        output: Tensor = rows.apply(self.weight, input, self)
        return output

    def add_rows(self, index: Int[Tensor, " T"], gradient: Float[Tensor, "T W"]) -> None:
        """Add the rows of a micro-batch to the weight's gradient, which is the kept tensor, zeroed, if it has none."""
        weight = self.weight
        if weight.grad is None:
            if self.kept is None or (self.kept.shape, self.kept.dtype) != (weight.shape, weight.dtype):
                self.kept = torch.empty_like(weight)
            weight.grad = self.kept.zero_()
        weight.grad.index_add_(0, index, gradient.to(weight.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> RowEmbedding:
        """Move or cast the parameters as nn.Embedding does, and let go of the kept tensor, which no longer fits."""
        self.kept = None
        base: Any = super()
        base._apply(fn, recurse)
        return self


def add_gradients_by_row(module: nn.Module) -> int:
    """Make every nn.Embedding inside that trains add its gradient row by row, in place; return how many do.

    Embeddings that scale their rows or gradients, or have sparse gradients, are left as they are.
    """
    embeddings = [
        child
        for child in module.modules()
        if type(child) is nn.Embedding
        and child.weight.requires_grad
        and child.max_norm is None
        and not child.scale_grad_by_freq
        and not child.sparse
    ]
    # The class is swapped and the module kept, so that parameter names and references to the module stay valid.
    for child in embeddings:
        child.__class__ = RowEmbedding
    return len(embeddings)
