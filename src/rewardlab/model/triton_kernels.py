"""Triton's kernels of what takes PyTorch many passes over a GPU's memory. Imported by `model/fused.py` alone, where
Triton is.

The arguments of kernels are pointers (in names without a suffix), numbers, and, in capitals, constants that a kernel is
compiled for.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

NUMBERS: Final = 512
"""Numbers of the generator that a program of `_round` computes at a time; each rounds four weights."""
PROGRAMS: Final = 128
"""Programs a tensor at most in `_round`: each goes over the tensor in steps."""
VALUES: Final = 1024
"""Values of a program of the gated product."""
ROWS: Final = 64
COLUMNS: Final = 128
"""Rows and columns of a program of `_add_product`."""


@triton.jit
def _round(table, BF16: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, NUMBERS: tl.constexpr):
    # A row of the table: where the values are, where they go, how many there are, the key, and the place of the first.
    row = table + 5 * tl.program_id(0)
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    if WIDE:
        target = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    elif BF16:
        target = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16))
    else:
        target = tl.load(row + 1).to(tl.pointer_type(tl.float16))
    count = tl.load(row + 2)
    key = tl.load(row + 3)
    start = tl.load(row + 4)
    skipped = start % 4
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        count = tl.multiple_of(count, 4)
        skipped = 0
    numbers = (skipped + count + 3) // 4
    places = tl.arange(0, 4)
    for at in range(tl.program_id(1) * NUMBERS, numbers, tl.num_programs(1) * NUMBERS):
        number = at + tl.arange(0, NUMBERS).to(tl.int64)
        bits = (number + (start // 4 + key)).to(tl.uint64) * 0x9E3779B97F4A7C15
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
        bits = bits ^ (bits >> 31)
        noise = ((bits[:, None] >> (16 * places[None, :]).to(tl.uint64)) & 0xFFFF).to(tl.int32)
        place = 4 * number[:, None] + places[None, :] - skipped
        inside = (place >= 0) & (place < count)
        if ALIGNED:
            inside = place < count
        values = tl.load(source + place, mask=inside, other=0.0)
        held = values.to(tl.int32, bitcast=True)
        finite = (held & 0x7FFFFFFF) < 0x7F800000
        if BF16:
            up = ((held + noise) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            rounded = tl.where(finite, up, values.to(tl.bfloat16))
        else:
            cut = ((held + (noise >> 3)) & -8192).to(tl.float32, bitcast=True)
            # Below the smallest normal number, 2^-14, float16 has a fixed step, 2^-24.
            # Multiplied by powers of two, which is exact; divisions are approximate here.
            small = tl.floor(tl.abs(values) * 16777216.0 + noise.to(tl.float32) * 1.52587890625e-05)
            small = small * 5.9604644775390625e-08
            small = tl.where(held < 0, -small, small)
            kept = tl.where(finite, cut, values)
            rounded = tl.where(tl.abs(values) < 6.103515625e-05, small, kept).to(tl.float16)
        if WIDE:
            tl.store(target + place, rounded.to(tl.float32), mask=inside)
        else:
            tl.store(target + place, rounded, mask=inside)


def round_all(table: Tensor, most: int, *, bf16: bool, wide: bool, aligned: bool) -> None:
    """Round the tensors of a table int64 [tensors, 5] in one launch; the largest has `most` values."""
    grid = (len(table), min(PROGRAMS, triton.cdiv(triton.cdiv(most, 4) + 1, NUMBERS)))
    _round[grid](table, BF16=bf16, WIDE=wide, ALIGNED=aligned, NUMBERS=NUMBERS)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _inside(x):
    # Of GELU by its tanh: the argument is twice as large, since 1 + tanh(t) = 2 · sigmoid(2 t).
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _activated(x, SILU: tl.constexpr):
    if SILU:
        return x * _sigmoid(x)
    else:
        return x * _sigmoid(_inside(x))


@triton.jit
def _slope(x, SILU: tl.constexpr):
    if SILU:
        s = _sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    else:
        s = _sigmoid(_inside(x))
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def _multiply(gate, up, output, count, SILU: tl.constexpr, VALUES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = place < count
    dtype = output.dtype.element_ty
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as by PyTorch's operations one by one.
    activated = _activated(x, SILU).to(dtype).to(tl.float32)
    tl.store(output + place, (activated * factor).to(dtype), mask=inside)


@triton.jit
def _multiply_backward(gate, up, gradient, d_gate, d_up, count, SILU: tl.constexpr, VALUES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = place < count
    dtype = d_up.dtype.element_ty
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    activated = _activated(x, SILU).to(dtype).to(tl.float32)
    tl.store(d_up + place, (activated * incoming).to(dtype), mask=inside)
    through = (incoming * factor).to(dtype).to(tl.float32)
    tl.store(d_gate + place, (through * _slope(x, SILU)).to(dtype), mask=inside)


def multiply(gate: Tensor, up: Tensor, output: Tensor, *, silu: bool) -> None:
    """Write act(gate) · up, of contiguous tensors of one half-precision dtype."""
    count = up.numel()
    _multiply[(triton.cdiv(count, VALUES),)](gate, up, output, count, SILU=silu, VALUES=VALUES)


def multiply_backward(gate: Tensor, up: Tensor, gradient: Tensor, d_gate: Tensor, d_up: Tensor, *, silu: bool) -> None:
    """Write the gradients of both factors of `multiply`."""
    count = up.numel()
    _multiply_backward[(triton.cdiv(count, VALUES),)](gate, up, gradient, d_gate, d_up, count, SILU=silu, VALUES=VALUES)


@triton.jit
def _add_product(
    wide,
    inner,
    second,
    bias,
    output,
    rows,
    columns,
    rank,
    stride,
    BIASED: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, RANK)
    dtype = output.dtype.element_ty
    has_row, has_column, has_number = row < rows, column < columns, number < rank
    # [ROWS, RANK] and [RANK, COLUMNS]; the second matrix lies in memory as [columns, rank].
    left = tl.load(
        inner + row[:, None] * rank + number[None, :], mask=has_row[:, None] & has_number[None, :], other=0.0
    )
    right = tl.load(
        second + column[None, :] * stride + number[:, None], mask=has_number[:, None] & has_column[None, :], other=0.0
    )
    place = row[:, None] * columns + column[None, :]
    inside = has_row[:, None] & has_column[None, :]
    total = tl.dot(left, right) + tl.load(wide + place, mask=inside, other=0.0)
    if BIASED:
        # Rounded first, as layers without an adapter have it.
        total += tl.load(bias + column, mask=has_column, other=0.0).to(dtype).to(tl.float32)[None, :]
    tl.store(output + place, total.to(dtype), mask=inside)


def add_product(wide: Tensor, inner: Tensor, second: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """Write `wide` float32 [N, out] + `inner` [N, r] times `second` [out, r] transposed + `bias` [out], rounded once
    as a sum.
    """
    rows, columns = wide.shape
    rank = inner.shape[1]
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    given: Any = wide if bias is None else bias
    _add_product[grid](
        wide,
        inner,
        second,
        given,
        output,
        rows,
        columns,
        rank,
        second.stride(0),
        BIASED=bias is not None,
        RANK=max(16, triton.next_power_of_2(rank)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )


@triton.jit
def _turn(
    x,
    cos,
    sin,
    output,
    rows_of_cos,
    heads,
    FORWARD: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS), tl.arange(0, HALF)
    known = place < WIDTH // 2
    angle = (row % rows_of_cos) * WIDTH + place
    cos_first = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + angle + WIDTH // 2, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + angle + WIDTH // 2, mask=known, other=0.0).to(tl.float32)[None, :]
    at = row * heads * WIDTH + head[:, None] * WIDTH + place[None, :]
    inside = (head < heads)[:, None] & known[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    if FORWARD:
        to_first = first * cos_first - second * sin_first
        to_second = second * cos_second + first * sin_second
    else:
        to_first = first * cos_first + second * sin_second
        to_second = second * cos_second - first * sin_first
    dtype = output.dtype.element_ty
    tl.store(output + at, to_first.to(dtype), mask=inside)
    tl.store(output + at + WIDTH // 2, to_second.to(dtype), mask=inside)


def turn(x: Tensor, cos: Tensor, sin: Tensor, output: Tensor, *, forward: bool) -> None:
    """Write the rotation of x [B, T, H, D] by cos and sin [B or 1, T, D] into `output`, or turn a gradient back."""
    batch, tokens, heads, width = x.shape
    _turn[(batch * tokens,)](
        x,
        cos,
        sin,
        output,
        cos.shape[0] * tokens,
        heads,
        FORWARD=forward,
        WIDTH=width,
        HALF=triton.next_power_of_2(width // 2),
        HEADS=triton.next_power_of_2(heads),
    )
