"""The tasks of a packed row: together they are its mask, each place once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewardlab.model import product_attention
from rewardlab.model.attention_backends import HALF, products, segments
from rewardlab.model.attention_formula import Formula
from rewardlab.model.product_attention import LEAST_QUERIES, plan_tasks
from rewardlab.model.prompt_layout import PromptLayout

GROUPS = st.lists(
    st.tuples(st.integers(0, 110), st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(GROUPS, st.sampled_from([300, 5000, 10**9]), st.sampled_from([None, 1, 7, 40, 150]))
@example([(0, (141,))], 5000, None)  # four pieces of 35 or 36 queries would be enough, but 36 are too many
def test_tasks_cover_what_each_token_sees_once(groups, max_places, window):
    layout = PromptLayout(groups)
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int32)
    for task in plan_tasks(groups, max_places=max_places, window=window):
        columns = torch.cat([torch.arange(start, stop) for start, stop in task.keys])
        places = torch.ones(task.num_queries, task.num_keys, dtype=torch.int32)
        places[:, task.num_keys - task.hidden.shape[1] :].masked_fill_(task.hidden, 0)
        seen[task.start : task.stop].index_add_(1, columns, places)
        assert task.num_queries * task.num_keys <= max(max_places, LEAST_QUERIES * task.num_keys)
        assert not task.hidden.numel() or task.hidden[:, 0].any(), "no mask where all see all"
        assert window is None or places[:, 0].any(), "no key in front that nobody sees"
    assert torch.equal(seen, layout.dense_mask(torch.device("cpu"), window).int())


def gradients(backend, groups, dtype, *, heads=6, scale=None, window=None):
    draw = torch.Generator().manual_seed(0)
    layout = PromptLayout(groups)
    inputs = [
        torch.randn(1, layout.num_tokens, count, 16, generator=draw)
        .bfloat16()
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, 2, 2)
    ]
    output = backend(*inputs, layout, Formula(scale=scale, window=window))
    weights = torch.randn(output.shape, generator=draw).bfloat16().to(dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("scale", "window"), [(None, None), (0.3, None), (None, 33)])
@pytest.mark.parametrize(
    "groups",
    [
        [(37, (11, 50, 5)), (0, (29,))],
        [(400, (60, 3)), (5, (2,) * 20)],  # cut into pieces; many short replies joined
        [(0, (1,))],
        [(90, (40,) * 8)],
    ],
)
def test_gradients_err_about_as_much_as_the_flash_kernels(groups, scale, window, dtype):
    """The flash kernel leaves the largest weight of a query exact, since it divides by their sum in the end; here it is
    rounded like the others, which can double the error of a query with few keys.
    """
    exact = gradients(segments, groups, torch.float32, scale=scale, window=window)
    plain = gradients(segments, groups, dtype, scale=scale, window=window)
    found = gradients(products, groups, dtype, scale=scale, window=window)
    for truth, reference, tensor in zip(exact, plain, found, strict=True):
        assert tensor.dtype is dtype
        error, allowed = ((other.double() - truth.double()).abs() for other in (tensor, reference))
        assert error.max() <= 2.5 * allowed.max() + 1e-6
        assert error.mean() <= 1.5 * allowed.mean() + 1e-6


def test_wider_queries_and_keys_get_gradients_of_their_own_dtype():
    """Rotary embeddings leave them in float32 under autocast."""
    layout = PromptLayout([(7, (3, 4))])
    query, key = (torch.randn(1, 2, layout.num_tokens, 8, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 2, layout.num_tokens, 8).bfloat16().requires_grad_()
    output = products(query, key, value, layout, Formula())
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert (query.grad.dtype, key.grad.dtype, value.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)


def test_values_may_be_of_another_width_than_keys():
    layout = PromptLayout([(20, (7, 9))])
    inputs = [torch.randn(1, 2, layout.num_tokens, width).bfloat16().requires_grad_() for width in (24, 24, 16)]
    plain = [tensor.detach().float().requires_grad_() for tensor in inputs]
    found, exact = products(*inputs, layout, Formula()), segments(*plain, layout, Formula())
    for tensor, truth in zip(
        [found, *torch.autograd.grad(found.float().sum(), inputs)],
        [exact, *torch.autograd.grad(exact.sum(), plain)],
        strict=True,
    ):
        assert (tensor.float() - truth).norm() <= 0.02 * truth.norm()


def test_weights_are_kept_where_keys_are_few_and_else_computed_again(monkeypatch):
    groups = [(60, (20, 15)), (30, (9, 8))]
    kept = gradients(products, groups, torch.bfloat16)
    monkeypatch.setattr(product_attention, "KEPT_KEYS", 50)
    assert all(map(torch.equal, kept, gradients(products, groups, torch.bfloat16)))


def test_a_second_derivative_is_refused():
    layout = PromptLayout([(3, (2,))])
    inputs = [torch.randn(1, 2, 5, 8).bfloat16().requires_grad_() for _ in range(3)]
    output = products(*inputs, layout, Formula())
    (gradient, *_) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
