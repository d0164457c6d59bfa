"""Dropout on the inputs of adapters, drawn by conversation: whether a feature is dropped depends on the seed, the step,
the preference, the reply, the position in it, the layer and the feature, and on nothing else.

So a step has the same mask for every token budget, order, layout, kernel and number of ranks, and again when
activations are recomputed in the backward pass. The tokens that the replies to a prompt share have one mask for all
replies, so they can be computed once, and both sides of a comparison see the same network up to where they differ.

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
"""A constant in the seed that makes these draws differ from other draws of the same seed and step."""
PLACES: Final = 4
"""How many draws of 16 bits one 64-bit number holds."""
STEPS: Final = 1 << 16
"""The number of values that a draw can have; a dropout rate is rounded to a multiple of 1 / STEPS."""


class Draws:
    """The numbers by which all layers draw their dropout in one forward pass: one for every token."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        """int64 [T], or [R · L] in the padded layout: one number for each token that a layer is computed for."""
        self.read: Tensor | None = None
        """int64 [R]: those of the tokens at which a score is read, since the last layer may be computed for them alone.
        None in the padded layout."""

    def begin(self, batch: PackedBatch, seed: Sequence[int], *, num_filled: int = 0, padded: bool = False) -> None:
        """Set the numbers for the tokens of `batch` in the step that `seed` stands for.

        `num_filled` is the number of filler tokens after those of a packed row; `padded` says which layout is computed.
        """
        key = int(np.random.SeedSequence((*seed, KIND)).generate_state(1, np.uint64)[0])
        keys = batch.padded_rows(batch.keys_T, 0).reshape(-1) if padded else batch.keys_T
        keys = _mixed(nn.functional.pad(keys, (0, num_filled)) ^ signed(key))
        self.tokens, self.read = keys, None if padded else keys[batch.read_at_R]


class ConversationDropout(nn.Module):
    """Dropout before an adapter, in place of `nn.Dropout`."""

    def __init__(self, name: str, rate: float, draws: Draws) -> None:
        """`name` is that of the layer, which is part of the seed: each layer has masks of its own."""
        super().__init__()
        self.name, self.draws = name, draws
        self.num_dropped = min(round(rate * STEPS), STEPS - 1)
        """How many of the STEPS values of a draw drop a feature."""
        # A buffer and not a Python number: torch.compile takes numbers as constants, so it would compile every layer
        # anew for its own number instead of sharing one program.
        self.register_buffer("key", torch.tensor(signed(name_seed(name)[0])), persistent=False)
        self.key: Tensor

    @property
    def rate(self) -> float:
        """The share of features that are dropped, in [0, 1)."""
        return self.num_dropped / STEPS

    def forward(self, features: Tensor) -> Tensor:
        """Set some of the features [..., W] to 0 and scale up the others, so that each keeps its value on average.

        Raises ModelError if the layer is computed neither for all tokens nor for those at which a score is read (as
        an expert is), because what it drops would then depend on the rest of the batch.
        """
        if not self.training or self.num_dropped == 0:
            return features
        tokens, read = self.draws.tokens, self.draws.read
        assert tokens is not None, "RewardModel.final_states calls Draws.begin first"
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
        # Draws are int16, so they begin at −STEPS / 2; the lowest `num_dropped` of their values drop a feature.
        kept = draw(keys, features.shape[-1]) >= self.num_dropped - STEPS // 2
        return torch.where(kept, features, 0.0).mul_(STEPS / (STEPS - self.num_dropped))

    def extra_repr(self) -> str:
        """Return the rate, for `print`."""
        return f"rate={self.rate:.4g}"


def draw(keys: Tensor, width: int) -> Tensor:
    """Draw int16 [..., width], uniform over all int16 values, from int64 keys [...].

    Each 64-bit number is made of a key and a count by two rounds of shift and multiplication, and gives PLACES draws.
    Integer arithmetic alone, so every device gives the same bits, which torch's generators do not.
    """
    counts = torch.arange(-(-width // PLACES), device=keys.device) * signed(GOLDEN)
    return _mixed(keys[..., None] + counts).view(torch.int16)[..., :width]


def _mixed(numbers: Tensor) -> Tensor:
    """Replace the numbers of a tensor, in place, by numbers that look drawn at random, and return the tensor.

    This is the mixing of SplitMix64 (Steele et al. 2014) with shifts that keep the sign, which is one operation instead
    of two. The multiplication after each shift spreads its effect on the upper bits. Products in int64 wrap around,
    which the algorithm wants.
    """
    for shift, factor in MIX:
        numbers.bitwise_xor_(numbers >> shift).mul_(signed(factor))
    return numbers
