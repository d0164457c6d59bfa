"""Stochastic rounding to half precision.

After training, most weights differ from the half-precision value that they started at by less than half a step of that
format. Rounding to the nearest gives the old value back, so a copy rounded that way has lost most of the training.
Stochastic rounding goes up or down, to the nearer value with the higher probability, and keeps the training: each
weight is right on average, and a product sums over many of them (Croci et al. 2022, "Stochastic rounding:
implementation, error analysis and applications").
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rewardlab.model import fused
from rewardlab.model.trials import failed

logger = logging.getLogger("rewardlab")
AT_A_TIME: Final = 1 << 18
"""Weights rounded at a time on the CPU: few enough for the processor's caches, and enough for all of its cores."""
TOGETHER: Final = 1 << 24
"""Weights of several tensors rounded at a time on a GPU, in about half a gigabyte of its memory for the moment."""
TOGETHER_ON_CPU: Final = 1 << 13
"""The same on the CPU, where an operation costs less to start, and more memory would gain little."""
PLACES: Final = 4
"""How many draws of 16 bits one 64-bit number of the generator holds."""
GOLDEN: Final = 0x9E3779B97F4A7C15
"""The increment of SplitMix64's counter: 2^64 divided by the golden ratio."""
MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""The mixing rounds of SplitMix64: (shift, factor)."""
LAST_SHIFT: Final = 31
"""The shift that ends SplitMix64, with no multiplication after it."""
BITS_DROPPED: Final = {torch.bfloat16: 16, torch.float16: 13}
"""How many low bits of a float32 mantissa each format has no room for."""
SMALLEST_NORMAL: Final = 2.0**-14
"""Smallest normal float16; smaller values have fewer mantissa bits."""
FLOAT16_STEP: Final = 2.0**-24
"""Distance between neighbouring float16 values below SMALLEST_NORMAL."""
TRIAL_VALUES: Final = (0.0, -0.0, 1e-7, -3e-6, 6e-5, 7e4, -1e30, float("inf"), float("-inf"), float("nan"))
"""Values of which a kernel that rounds must know what to do with them."""
NO_NUMBER: Final = 123.0
"""What stands for NaN where values are compared."""


def name_seed(name: str) -> tuple[int, int]:
    """Return two 64-bit numbers made from a tensor's name, the same in every process (Python's `hash` is not)."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def round_stochastically(
    tensor: Tensor, dtype: torch.dtype, seed: Sequence[int], *, out: Tensor | None = None, start: int = 0
) -> Tensor:
    """Round a float tensor to bfloat16 or float16, each value up or down so that it is right on average.

    The result depends on the values, their order and `seed` alone and is the same on every device. Values that the
    format can hold, infinities and NaN are kept; values beyond its range become infinite. `out`, if given, is a
    contiguous tensor of the same shape in `dtype` or wider that takes the result and is returned. For a part of a
    larger tensor, `start` is the flat index of its first value there; so the parts are rounded as the whole would be.

    Raises ValueError for any other `dtype`.
    """
    if dtype not in BITS_DROPPED:
        raise ValueError(f"dtype {dtype}: stochastic rounding is to bfloat16 or float16.")
    out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device) if out is None else out
    round_together([Part(tensor.detach(), seed, out, start)], dtype)
    return out


def _round_alone(part: Part, dtype: torch.dtype) -> None:
    """Round a tensor by PyTorch's operations."""
    source, target = part.tensor.reshape(-1), part.out.view(-1)
    key = _key(part.seed, dtype)
    at_a_time = AT_A_TIME if source.device.type == "cpu" else max(1, len(source))
    for place in range(0, len(source), at_a_time):
        values = source[place : place + at_a_time].to(torch.float32)
        noise = _draws(part.start + place, len(values), key, source.device)
        _round_into(target[place : place + at_a_time], values, noise, dtype)


class Part(NamedTuple):
    """A tensor to round, or a part of a larger one, with the arguments of `round_stochastically`."""

    tensor: Tensor
    seed: Sequence[int]
    out: Tensor
    start: int = 0


def round_together(parts: Sequence[Part], dtype: torch.dtype) -> None:
    """Round float tensors of one device, each into its `out`, to the bits that `round_stochastically` gives it.

    Alone a tensor takes some thirty operations, however small it is. On a GPU it is their number that costs time, or
    the memory that each of them reads and writes: there one kernel rounds them all, where Triton is to be had.
    """
    left: list[Part] = []
    by_kernel: dict[torch.dtype, list[Part]] = {}
    for part in parts:
        can = _is_known(part, dtype) and _agrees(part.tensor.device, dtype, part.out.dtype)
        (by_kernel.setdefault(part.out.dtype, []) if can else left).append(part)
    for own in by_kernel.values():
        _round_by(fused.load_kernels(), own, dtype)
    for portion in _portions(left):
        if len(portion) == 1:
            _round_alone(portion[0], dtype)
        else:
            _round_portion(portion, dtype)


def _is_known(part: Part, dtype: torch.dtype) -> bool:
    """Return whether a kernel of Triton can read and write a tensor."""
    tensor, out = part.tensor, part.out
    return tensor.dtype is torch.float32 and out.dtype in (dtype, torch.float32) and fused.can_read(tensor, out)


def _round_by(kernels: Any, parts: Sequence[Part], dtype: torch.dtype) -> None:
    """Round float32 tensors of one GPU in one launch, each into its `out`, which are of one dtype."""
    rows = [
        (part.tensor.data_ptr(), part.out.data_ptr(), part.tensor.numel(), signed(_key(part.seed, dtype)), part.start)
        for part in parts
    ]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")  # whatever device is the default
    device = parts[0].tensor.device
    kernels.round_all(
        table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table,
        max(row[2] for row in rows),
        bf16=dtype is torch.bfloat16,
        wide=parts[0].out.dtype is torch.float32,
        # A thread reads four values at once where all begin at such a place, and none has a rest.
        aligned=not any(row[0] % 16 or row[1] % 16 or row[2] % PLACES or row[4] % PLACES for row in rows),
    )
    # As PyTorch's operations do. A backward pass that needs the earlier values then raises an error.
    torch.autograd.graph.increment_version([part.out for part in parts])


@cache
def _agrees(device: torch.device, dtype: torch.dtype, kind: torch.dtype) -> bool:
    """Return whether Triton's kernel rounds every value of a trial as PyTorch's operations do, to the bit; `kind` is
    the dtype of what it writes.
    """
    if fused.unsupported(device):
        return False
    try:
        reason = "" if _same_bits(fused.load_kernels(), device, dtype, kind) else "it gives other bits here"
    except ImportError:
        return False
    except Exception as error:  # of any class: see `failed`
        reason = failed(error)
    if reason:
        logger.warning("weights are rounded by PyTorch's operations, not by Triton's kernel: %s", reason)
    return not reason


def _same_bits(kernels: Any, device: torch.device, dtype: torch.dtype, kind: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    # All at places that are multiples of four, which the kernel reads at once, and not.
    for sizes, starts in (((4096, 64), (0, 8)), ((4099, 61), (0, 5))):
        sources = [torch.randn(size, generator=draw) * torch.randn(size, generator=draw).exp() for size in sizes]
        sources[0][: len(TRIAL_VALUES)] = torch.tensor(TRIAL_VALUES)
        parts = [
            Part(source.to(device), (number, 7), torch.empty_like(source, dtype=kind, device=device), start)
            for number, (source, start) in enumerate(zip(sources, starts, strict=True))
        ]
        _round_by(kernels, parts, dtype)
        for part in parts:
            by_operations = part._replace(out=torch.empty_like(part.out))
            _round_alone(by_operations, dtype)
            # A NaN has many bits, and none of them matters.
            if not torch.equal(*(one.out.nan_to_num(NO_NUMBER) for one in (part, by_operations))):
                return False
    return True


def _portions(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Divide into runs of tensors of no more weights than are rounded at a time; a larger tensor is one by itself."""
    portion: list[Part] = []
    size = 0
    for part in parts:
        limit = TOGETHER_ON_CPU if part.tensor.device.type == "cpu" else TOGETHER
        count = part.tensor.numel()
        if portion and size + count > limit:
            yield portion
            portion, size = [], 0
        portion.append(part)
        size += count
    if portion:
        yield portion


def _round_portion(parts: Sequence[Part], dtype: torch.dtype) -> None:
    """Round the tensors one after another in memory, each with zeros around it up to whole numbers of the generator."""
    device = parts[0].tensor.device
    zeros = torch.zeros(PLACES, device=device)
    pieces: list[Tensor] = []
    starts, places = [], []  # of each tensor's values among all, and of its numbers of the generator
    end = 0
    for part in parts:
        count, skipped = part.tensor.numel(), part.start % PLACES
        after = -(skipped + count) % PLACES
        pieces += [zeros[:skipped], part.tensor.detach().reshape(-1).to(torch.float32), zeros[:after]]
        places.append(end // PLACES)
        starts.append(end + skipped)
        end += skipped + count + after
    bits = torch.arange(end // PLACES, device=device)
    torch._foreach_add_(
        [bits[place:stop] for place, stop in zip(places, [*places[1:], len(bits)], strict=True)],
        [signed(_key(part.seed, dtype) + part.start // PLACES - at) for part, at in zip(parts, places, strict=True)],
    )
    target = torch.empty(end, dtype=dtype, device=device)
    _round_into(target, torch.cat(pieces), _mix(bits).to(torch.int32).bitwise_and_(0xFFFF), dtype)
    torch._foreach_copy_(
        [part.out for part in parts],
        [
            target[start : start + part.tensor.numel()].view(part.tensor.shape)
            for part, start in zip(parts, starts, strict=True)
        ],
    )


def _key(seed: Sequence[int], dtype: torch.dtype) -> int:
    """Return the state of SplitMix64 that a seed begins with.

    Each format has draws of its own. With the same draws a weight that is rounded to one format and then to the other
    would be moved in the same direction twice, and small updates would be multiplied.
    """
    return int(np.random.SeedSequence((*seed, BITS_DROPPED[dtype])).generate_state(1, np.uint64)[0])


def _draws(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return 16 random bits, as int32, for each of `count` places from `start` on.

    Each is a quarter of a number of SplitMix64 (Steele et al. 2014) with the state `key`. It is computed by arithmetic
    on the place alone, so any part can be drawn without the rest. Products in int64 wrap around, as SplitMix64 wants.
    """
    first, skipped = divmod(start, PLACES)
    bits = torch.arange(first, first - (-(skipped + count) // PLACES), device=device).add_(signed(key))
    return _mix(bits)[skipped : skipped + count].to(torch.int32).bitwise_and_(0xFFFF)


def _mix(bits: Tensor) -> Tensor:
    """Turn counters of SplitMix64 with its state added, as int64, into its numbers, in place; PLACES int16 of each."""
    bits.mul_(signed(GOLDEN))
    shifted = torch.empty_like(bits)
    for shift, factor in (*MIX, (LAST_SHIFT, None)):
        # PyTorch shifts int64 with the sign. The mask clears its copies, which makes this the unsigned shift of
        # SplitMix64.
        torch.bitwise_right_shift(bits, shift, out=shifted)
        bits.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            bits.mul_(signed(factor))
    return bits.view(torch.int16)


def signed(number: int) -> int:
    """Return the number whose two's complement in 64 bits is `number`, as torch.int64 wants it."""
    return (number & (1 << 64) - 1) - (1 << 64 if number & 1 << 63 else 0)


def _round_into(target: Tensor, values: Tensor, noise: Tensor, dtype: torch.dtype) -> None:
    """Round float32 values to `dtype` by 16 random bits each, into `target`; the memory of `noise` is overwritten.

    The noise is added to the bits that will be dropped. If the sum carries, the magnitude goes up by one step, which
    happens with a probability equal to the dropped fraction.
    """
    if dtype is torch.bfloat16:
        # bfloat16 is the upper half of a float32, so adding integers and dropping 16 bits does it all.
        bits = noise.add_(values.view(torch.int32)).bitwise_right_shift_(16)
        # An infinity has no bits that could carry, but a NaN may: CUDA's (0x7FFFFFFF) carries into the sign. One sum
        # shows whether any value is not finite, which saves the CPU the slower `where` in most cases.
        if values.device.type == "cpu" and values.sum().isfinite():
            if target.dtype is dtype:
                target.view(torch.int16).copy_(bits)
            else:
                target.copy_(bits.to(torch.int16).view(dtype))
            return
        target.copy_(torch.where(values.isfinite(), bits.to(torch.int16).view(dtype), values.to(dtype)))
        return
    dropped = BITS_DROPPED[dtype]
    bits = (values.view(torch.int32) + (noise >> (16 - dropped))) & -(1 << dropped)
    rounded = torch.where(values.isfinite(), bits.view(torch.float32), values)
    # Below SMALLEST_NORMAL float16 has a fixed step, so more than 13 bits are dropped; the same rule, by arithmetic.
    small = ((values.abs() / FLOAT16_STEP + noise / 65536).floor() * FLOAT16_STEP).copysign(values)
    target.copy_(torch.where(values.abs() < SMALLEST_NORMAL, small, rounded).to(dtype))


def round_weights(tensor: Tensor, dtype: torch.dtype, name: str, *, start: int = 0) -> Tensor:
    """Round a weight for a file or an engine in half precision; the same name always gives the same bits.

    Tensors that are not of a wider floating-point dtype are only cast. `start` is as in `round_stochastically`.
    """
    if dtype not in BITS_DROPPED or tensor.dtype in BITS_DROPPED or not tensor.is_floating_point():
        return tensor.to(dtype)
    return round_stochastically(tensor, dtype, name_seed(name), start=start)
