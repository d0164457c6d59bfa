"""Dropout on the inputs of adapters, drawn by conversation: a function of the seed, the step, the preference, the
reply, the position in it, the layer and the feature, and of nothing else.

So one step has one mask however it is computed: by any token budget, order, layout, kernel or number of ranks, and
again in the backward pass. What the replies to a prompt share has one mask for all of them, so it can be computed once;
the two sides of a comparison then see the same network up to the point where they part.

Legend: T packed tokens, R replies, L tokens of a padded row, W features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from rewardlab.batch import PackedBatch
from rewardlab.core.errors import ModelError
from rewardlab.model.rounding import GOLDEN, MIX, name_seed, signed

KIND: Final = 0xD209
"""Sets these draws apart from others by the same seed and step."""
PLACES: Final = 4
"""Draws of 16 bits in one number."""
STEPS: Final = 1 << 16
"""A rate is rounded to a multiple of one over this."""


class Draws:
    """What the dropout of all layers draws by in one forward pass: a number for every token."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        """int64, one for each row that a layer is computed for: [T], or [R · L] in the padded layout."""
        self.read: Tensor | None = None
        """The same for the tokens at which a score is read, [R]: the last layer may be computed for them alone."""

    def begin(self, batch: PackedBatch, seed: Sequence[int], *, num_filled: int = 0, padded: bool = False) -> None:
        """Take up a batch, and a step by its `seed`; `num_filled` tokens of filler follow those of a packed row."""
        key = int(np.random.SeedSequence((*seed, KIND)).generate_state(1, np.uint64)[0])
        keys = batch.padded_rows(batch.keys_T, 0).reshape(-1) if padded else batch.keys_T
        keys = _mixed(nn.functional.pad(keys, (0, num_filled)) ^ signed(key))
        self.tokens, self.read = keys, None if padded else keys[batch.read_at_R]


class ConversationDropout(nn.Module):
    """Takes the place of `nn.Dropout` before an adapter."""

    def __init__(self, name: str, rate: float, draws: Draws) -> None:
        """`name` is that of the layer: each has masks of its own."""
        super().__init__()
        self.name, self.draws = name, draws
        self.num_dropped = min(round(rate * STEPS), STEPS - 1)
        """Of STEPS values that a draw may have, those that drop a feature."""
        # A tensor, not a number: a compiled layer would be compiled again for each.
        self.register_buffer("key", torch.tensor(signed(name_seed(name)[0])), persistent=False)
        self.key: Tensor

    @property
    def rate(self) -> float:
        """The share of features that are dropped."""
        return self.num_dropped / STEPS

    def forward(self, features: Tensor) -> Tensor:
        """The features [..., W], some of them 0 and the others larger, right on average.

        Raises ModelError for a layer that is not computed for every token, or for those that are read: what it drops
        would depend on the batch.
        """
        if not self.training or self.num_dropped == 0:
            return features
        tokens, read = self.draws.tokens, self.draws.read
        assert tokens is not None, "a RewardModel begins the draws"
        num_rows = features.numel() // features.shape[-1]
        if num_rows != tokens.shape[0]:
            if read is None or num_rows != read.shape[0]:
                raise ModelError(
                    f"{self.name} is computed for {num_rows} rows of a batch of {tokens.shape[0]} tokens, so dropout "
                    f"cannot be drawn by conversation. Leave the layer out of --lora-target-modules, or use "
                    f"--lora-dropout 0."
                )
            tokens = read
        keys = _mixed(tokens ^ self.key).view(features.shape[:-1])
        kept = draw(keys, features.shape[-1]) >= self.num_dropped - STEPS // 2
        return torch.where(kept, features, 0.0).mul_(STEPS / (STEPS - self.num_dropped))

    def extra_repr(self) -> str:
        """For print."""
        return f"rate={self.rate:.4g}"


def draw(keys: Tensor, width: int) -> Tensor:
    """[..., width] int16, uniform over all of its values: quarters of numbers made of a key and a count, by two rounds
    of a multiplication and a shift. Arithmetic alone, so the same on every device.
    """
    counts = torch.arange(-(-width // PLACES), device=keys.device) * signed(GOLDEN)
    return _mixed(keys[..., None] + counts).view(torch.int16)[..., :width]


def _mixed(numbers: Tensor) -> Tensor:
    """The same tensor with numbers that look drawn at random, by those that were there.

    As in SplitMix64 (Steele et al. 2014), but for the shifts, which keep the sign: what that does to the upper bits the
    multiplication after it spreads. Products in int64 wrap around, as they should.
    """
    for shift, factor in MIX:
        numbers.bitwise_xor_(numbers >> shift).mul_(signed(factor))
    return numbers
