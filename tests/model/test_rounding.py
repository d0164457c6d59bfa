"""Rounding to half precision: to a neighbour, right on average, the same again for the same seed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rewardlab.model.rounding import (
    AT_A_TIME,
    Part,
    _draws,
    name_seed,
    round_stochastically,
    round_together,
    round_weights,
)

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


def weights(count: int = 4000) -> torch.Tensor:
    """Of many magnitudes, those below the smallest normal float16 among them."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=draw) * 10.0 ** torch.empty(count).uniform_(-7, 2, generator=draw)


def neighbours(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of the format that is not above, and the smallest that is not below."""
    near = values.to(dtype)
    low = torch.where(
        near.double() > values.double(), torch.nextafter(near, torch.tensor(-math.inf, dtype=dtype)), near
    )
    high = torch.where(
        near.double() < values.double(), torch.nextafter(near, torch.tensor(math.inf, dtype=dtype)), near
    )
    return low.double(), high.double()


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_goes_to_a_neighbour_and_is_right_on_average(dtype):
    values, draws = weights(), 400
    low, high = neighbours(values, dtype)
    rounded = torch.stack([round_stochastically(values, dtype, (draw,)).double() for draw in range(draws)])
    assert ((rounded == low) | (rounded == high)).all()
    step = (high - low).clamp(min=1e-300)
    share = ((values.double() - low) / step).clamp(0, 1)
    found = (rounded == high).double().mean(0)[high > low]
    wanted = share[high > low]
    error = (found - wanted) / ((wanted * (1 - wanted) + 1e-4) / draws).sqrt()
    assert error.abs().max() < 6
    assert abs(error.mean()) < 5 / math.sqrt(len(error)), "a bias that all weights share"
    assert 0.85 < error.std() < 1.1, "draws of neighbouring weights, or of neighbouring seeds, are not independent"


@pytest.mark.parametrize("dtype", HALVES)
def test_values_that_the_format_has_are_kept_and_so_is_what_is_no_number(dtype):
    values = weights().to(dtype).float()
    assert torch.equal(round_stochastically(values, dtype, (1,)).float(), values)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    found = torch.cat([round_stochastically(part, dtype, (1,)).float() for part in odd.split([1, 1, 1, 2])])
    assert found.isnan().tolist() == odd.isnan().tolist()
    assert found[[0, 1, 3, 4]].tolist() == odd[[0, 1, 3, 4]].tolist()
    assert found.signbit().tolist()[3:] == [False, True]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_nan_of_any_bits_stays_one_and_costs_its_neighbours_nothing(dtype):
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001] * 500, dtype=torch.int32)  # the first two are CUDA's
    values = torch.cat([bits.view(torch.float32), weights(2000)])
    found = round_stochastically(values, dtype, (1,)).float()
    assert found[:2000].isnan().all()
    assert not torch.equal(found[2000:], weights(2000).to(dtype).float()), "still rounded either way"
    assert (found[2000:] - weights(2000)).abs().max() <= 2**-7 * weights(2000).abs().max()


def test_what_lies_beyond_the_range_of_float16_becomes_infinite():
    assert round_stochastically(torch.tensor([7e4, -1e30]), torch.float16, (0,)).tolist() == [math.inf, -math.inf]


def test_the_bits_depend_on_the_seed_alone():
    values = torch.randn(3 * AT_A_TIME + 17, generator=torch.Generator().manual_seed(1))
    first = round_stochastically(values, torch.bfloat16, (1, 2))
    torch.manual_seed(5)
    out = torch.empty_like(first)
    assert round_stochastically(values, torch.bfloat16, (1, 2), out=out) is out
    assert torch.equal(first, out)
    assert not torch.equal(first, round_stochastically(values, torch.bfloat16, (1, 3)))
    assert name_seed("a.weight") != name_seed("b.weight")
    assert torch.equal(round_weights(values, torch.bfloat16, "a"), round_weights(values, torch.bfloat16, "a"))
    assert not torch.equal(round_weights(values, torch.bfloat16, "a"), round_weights(values, torch.bfloat16, "b"))


def test_the_draws_are_those_of_splitmix64_by_its_definition():
    key, start, everything = 0x0123456789ABCDEF, 4 * 70_001 + 3, (1 << 64) - 1
    drawn = _draws(start, 9, key, CPU).tolist()
    for place, draw in enumerate(drawn, start):
        state = (key + place // 4) * 0x9E3779B97F4A7C15 & everything
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & everything
        state = (state ^ state >> 27) * 0x94D049BB133111EB & everything
        state ^= state >> 31
        assert draw == state >> 16 * (place % 4) & 0xFFFF


@pytest.mark.parametrize("dtype", HALVES)
def test_parts_of_a_tensor_are_rounded_as_the_whole(dtype):
    values = torch.randn(2 * AT_A_TIME + 1001, generator=torch.Generator().manual_seed(1))
    whole = round_stochastically(values, dtype, (3,))
    ends = [0, 5, 6, AT_A_TIME + 3, 2 * AT_A_TIME + 6, len(values)]
    parts = [
        round_stochastically(values[start:stop], dtype, (3,), start=start) for start, stop in itertools.pairwise(ends)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("limit", [1, 40, 1 << 18])
@pytest.mark.parametrize("dtype", HALVES)
def test_several_tensors_together_get_the_bits_of_each_alone(dtype, limit, monkeypatch):
    monkeypatch.setattr("rewardlab.model.rounding.TOGETHER_ON_CPU", limit)
    values = weights()
    shapes, starts = [(8, 4), (3, 5), (0, 7), (1, 1), (2, 64), (5,)], [0, 3, 2, 0, 4097, 6]
    parts, alone = [], []
    for number, (shape, start) in enumerate(zip(shapes, starts, strict=True)):
        tensor = values[number * 200 :][: math.prod(shape)].view(shape)
        alone.append(round_stochastically(tensor, dtype, (number, 7), start=start))
        parts.append(Part(tensor, (number, 7), torch.full(shape, math.nan, dtype=dtype), start))
    round_together(parts, dtype)
    for part, expected in zip(parts, alone, strict=True):
        assert torch.equal(part.out, expected)
    # In place too, as the shards of a model are.
    own = [Part(part.tensor.clone(), part.seed, part.tensor.clone(), part.start) for part in parts]
    round_together([part._replace(tensor=part.out) for part in own], dtype)
    for part, expected in zip(own, alone, strict=True):
        assert torch.equal(part.out, expected.float())


def test_a_number_that_is_none_keeps_to_itself_among_several(monkeypatch):
    monkeypatch.setattr("rewardlab.model.rounding.TOGETHER_ON_CPU", 1 << 18)
    values = [torch.tensor([math.nan, 1.001]), torch.tensor([math.inf, 2.003, -1e-3])]
    parts = [Part(tensor, (3,), torch.zeros_like(tensor, dtype=torch.bfloat16)) for tensor in values]
    round_together(parts, torch.bfloat16)
    assert parts[0].out.isnan().tolist() == [True, False]
    assert parts[1].out.isinf().tolist() == [True, False, False]


def test_draws_are_even_and_independent_of_place_and_key():
    count = 1 << 18
    draws = [_draws(0, count, key, CPU).double() for key in (0, 1, 2**63 + 5)]
    for draw in draws:
        assert 0 <= draw.min() <= draw.max() <= 0xFFFF
        assert abs(draw.mean() - 32767.5) < 5 * 18918 / math.sqrt(count)
        shares = torch.histc(draw, 256, 0, 0xFFFF) * 256 / count
        assert (shares - 1).abs().max() < 6 / math.sqrt(count / 256)
        for lag in (1, 2, 3, 4, 576, 4096):
            assert abs(torch.corrcoef(torch.stack([draw[lag:], draw[:-lag]]))[0, 1]) < 6 / math.sqrt(count)
    assert abs(torch.corrcoef(torch.stack(draws))[[0, 0, 1], [1, 2, 2]]).max() < 6 / math.sqrt(count)
    assert torch.equal(_draws(101, 99, 7, CPU), _draws(0, 200, 7, CPU)[101:])


def test_only_wider_floats_are_rounded():
    whole = torch.arange(5)
    assert torch.equal(round_weights(whole, torch.float16, "a"), whole.to(torch.float16))
    half = torch.randn(5).bfloat16()
    assert torch.equal(round_weights(half, torch.bfloat16, "a"), half)
    values = torch.randn(5)
    assert round_weights(values, torch.float32, "a") is values
    with pytest.raises(ValueError, match="stochastic rounding is to bfloat16 or float16"):
        round_stochastically(values, torch.float64, (0,))


def test_small_updates_survive_on_average_where_the_nearest_value_hides_them():
    """What a reward model's training does to a weight: a few thousandths of a step of the format."""
    start = torch.randn(1 << 16, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    trained = (
        start + 2.0**-12 * start.abs() * torch.randn(start.shape, generator=torch.Generator().manual_seed(3)).sign()
    )
    update = trained - start
    nearest, rounded = trained.bfloat16().float() - start, round_weights(trained, torch.bfloat16, "w").float() - start
    assert float(nearest.abs().max()) == 0
    slope = float((rounded @ update) / (update @ update))
    assert 0.8 < slope < 1.2
