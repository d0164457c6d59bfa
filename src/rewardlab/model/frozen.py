"""How frozen weights are held where a model computes in half precision: matrices in it, everything else in float32.

What the layers of a decoder add up, token by token, begins with a row of the embeddings and passes through the norms.
If either gives half precision, every sum along the layers is rounded to it, and the positions of rotary embeddings are
rounded with them. That is a larger error than all products together make (docs/half-precision-results.md). Norms are
small, so they stay in float32; embeddings are large, so they are held in half precision and read as float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rewardlab.model.rounding import BITS_DROPPED


class WideEmbedding(nn.Embedding):
    """An nn.Embedding that holds half precision and gives float32; its weight does not train."""

    def forward(self, input: Int[Tensor, " ..."]) -> Float[Tensor, "... W"]:
        """Look up the rows [..., W] of token ids [...], in float32."""
        return F.embedding(input, self.weight).float()


def is_held_half(module: nn.Module, parameter: Tensor) -> bool:
    """Return whether a frozen parameter of this module is held in half precision where the model computes in it.

    Vectors are not: norms and biases. Nor are embeddings of a class of their own, such as Gemma's, whose forward method
    multiplies rows in the dtype in which they are held.
    """
    other_embedding = isinstance(module, nn.Embedding) and type(module) not in (nn.Embedding, WideEmbedding)
    return parameter.is_floating_point() and parameter.ndim >= 2 and not other_embedding


def read_wide(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a frozen embedding that is held in half precision (`dtype`) give float32, in place; other modules stay."""
    if type(module) is nn.Embedding and dtype in BITS_DROPPED and not module.weight.requires_grad:
        wide: Any = module
        # The class is swapped and the module kept, so that parameter names and references to the module stay valid.
        wide.__class__ = WideEmbedding
