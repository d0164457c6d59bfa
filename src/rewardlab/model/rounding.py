"""Rounding to half precision: to the nearest value, or stochastically, to either neighbour.

Once trained, most weights differ from the half-precision value that they started at by less than half a step of that
format. Rounding to the nearest gives the old value back, so a copy made that way has forgotten most of the training.
Rounding stochastically, up or down with the odds of the nearness, keeps it: each weight is right on average, and a
product sums over many of them (Croci et al. 2022, "Stochastic rounding: implementation, error analysis and
applications").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

AT_A_TIME: Final = 1 << 17
"""Weights rounded at a time on the CPU, so that what lies between stays in the processor's caches."""
PLACES: Final = 4
"""Draws of 16 bits in one number of the generator."""
GOLDEN: Final = 0x9E3779B97F4A7C15
"""What SplitMix64 counts by."""
MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Its rounds: a shift and a factor."""
BITS_DROPPED: Final = {torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that the format has no room for."""
SMALLEST_NORMAL: Final = 2.0**-14
FLOAT16_STEP: Final = 2.0**-24
"""Distance of float16 values below SMALLEST_NORMAL."""


def name_seed(name: str) -> tuple[int, int]:
    """Numbers that stand for a tensor's name, the same in every process."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def round_stochastically(
    tensor: Tensor, dtype: torch.dtype, seed: Sequence[int], *, out: Tensor | None = None, start: int = 0
) -> Tensor:
    """A float tensor in bfloat16 or float16, each value rounded up or down with odds that make it right on average.

    A function of the values, their order and `seed` alone, the same on every device. Values that the format has are
    kept, so are infinities and NaN; what lies beyond its range becomes infinite. `out` is a contiguous tensor of the
    same shape in `dtype` or wider, and is returned. `start` is where the tensor begins in the one that it is a part of,
    value after value: the parts of a tensor are then rounded as the whole of it.

    Raises ValueError for another dtype.
    """
    if dtype not in BITS_DROPPED:
        raise ValueError(f"dtype {dtype}: stochastic rounding is to bfloat16 or float16.")
    out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device) if out is None else out
    source, target = tensor.detach().reshape(-1), out.view(-1)
    # Each format has draws of its own: by those of the other, a weight rounded to one and then the other would be moved
    # the same way twice, and small updates would be multiplied.
    key = int(np.random.SeedSequence((*seed, BITS_DROPPED[dtype])).generate_state(1, np.uint64)[0])
    at_a_time = AT_A_TIME if tensor.device.type == "cpu" else max(1, len(source))
    for place in range(0, len(source), at_a_time):
        part = source[place : place + at_a_time].to(torch.float32)
        noise = _draws(start + place, len(part), key, tensor.device)
        target[place : place + at_a_time] = _round(part, noise, dtype)
    return out


def _draws(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """16 random bits, as int32, for each of `count` places from `start`: a quarter of a number of SplitMix64 (Steele et
    al. 2014) begun at `key`.

    Arithmetic alone, so that it needs no generator and no order. Products in int64 wrap around, as they should.
    """
    first, skipped = divmod(start, PLACES)
    bits = torch.arange(first, first - (-(skipped + count) // PLACES), device=device)
    bits.add_(signed(key)).mul_(signed(GOLDEN))
    for shift, factor in (*MIX, (31, 1)):
        bits.bitwise_xor_(bits.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(signed(factor))
    return bits.view(torch.int16)[skipped : skipped + count].to(torch.int32).bitwise_and_(0xFFFF)


def signed(number: int) -> int:
    """64 bits as int64 reads them."""
    return (number & (1 << 64) - 1) - (1 << 64 if number & 1 << 63 else 0)


def _round(values: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values with 16 random bits each, away from zero if the bits to be dropped and the noise carry; `noise` is
    lost.
    """
    if dtype is torch.bfloat16:
        rounded = noise.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(dtype)
        # Infinities have no bits to carry, but a NaN may: CUDA's (0x7FFFFFFF) carries into the sign. A sum tells in
        # one pass whether a processor has to look closer.
        if values.device.type == "cpu" and values.sum().isfinite():
            return rounded
        return torch.where(values.isfinite(), rounded, values.to(dtype))
    dropped = BITS_DROPPED[dtype]
    bits = (values.view(torch.int32) + (noise >> (16 - dropped))) & -(1 << dropped)
    rounded = torch.where(values.isfinite(), bits.view(torch.float32), values)
    small = ((values.abs() / FLOAT16_STEP + noise / 65536).floor() * FLOAT16_STEP).copysign(values)
    return torch.where(values.abs() < SMALLEST_NORMAL, small, rounded).to(dtype)


def round_weights(tensor: Tensor, dtype: torch.dtype, name: str, *, start: int = 0) -> Tensor:
    """A weight for a file or an engine in half precision: the same bits whenever a tensor of this name is rounded.

    Anything but a wider floating-point tensor is only cast. `start` as in `round_stochastically`, for a part of it.
    """
    if dtype not in BITS_DROPPED or tensor.dtype in BITS_DROPPED or not tensor.is_floating_point():
        return tensor.to(dtype)
    return round_stochastically(tensor, dtype, name_seed(name), start=start)
