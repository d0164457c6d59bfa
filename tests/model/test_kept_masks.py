"""What attention keeps of its masks for the backward pass does not grow with the layers."""

from __future__ import annotations

import pytest
import torch

from rewardlab.model import attention_backends
from rewardlab.model.attention_formula import Formula
from rewardlab.model.prompt_layout import PromptLayout, additive

GROUPS = [(40, (20, 20, 20)), (0, (9,))]


def kept(name: str, *, layers: int, dtype: torch.dtype, window: int | None, autocast: bool = False) -> int:
    """Bytes of all masks that a pass through so many layers keeps."""
    layout = PromptLayout(GROUPS)
    found: dict[int, int] = {}
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() >= 2 and torch.isneginf(tensor).any():
            tensors.append(tensor)  # so that no other one gets its place in memory
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.randn(1, 4, layout.num_tokens, 8, dtype=dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = hidden
        for _ in range(layers):
            value = output[:, :2].bfloat16() if autocast else output[:, :2]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                attended = attention_backends.BACKENDS[name](
                    output, output[:, :2], value, layout, Formula(window=window)
                )
            output = output + attended
    output.sum().backward()
    return sum(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("name", ["segments", "segments in blocks", "mask"])
def test_all_layers_keep_the_same_masks(name, window, dtype, monkeypatch):
    name, blocks, _ = name.partition(" in blocks")
    if blocks:
        monkeypatch.setattr(attention_backends, "MOST_WRITTEN", 2**9)
    monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 8)
    one, five = (kept(name, layers=layers, dtype=dtype, window=window) for layers in (1, 5))
    assert one == five > 0


def test_they_do_where_autocast_rounds_the_queries():
    one, five = (kept("segments", layers=layers, dtype=torch.float32, window=None, autocast=True) for layers in (1, 5))
    assert one == five > 0


def test_scoring_keeps_boolean_masks_which_are_smaller():
    layout = PromptLayout(GROUPS)
    row = torch.randn(1, 2, layout.num_tokens, 8)
    with torch.no_grad():
        attention_backends.segments(row, row, row, layout, Formula())
    assert {tensor.dtype for tensor in layout._made.values()} == {torch.bool}


def test_weights_that_do_not_train_keep_no_masks_for_a_backward_pass():
    layout = PromptLayout(GROUPS)
    row = torch.randn(1, 2, layout.num_tokens, 8)
    assert torch.is_grad_enabled()
    attention_backends.segments(row, row, row, layout, Formula())
    assert {tensor.dtype for tensor in layout._made.values()} == {torch.bool}


def test_rows_of_an_added_mask_lie_where_a_gpu_wants_them():
    mask = torch.ones(5, 37, dtype=torch.bool).tril(32)
    held = additive(mask, torch.float32)
    assert (held.shape, held.stride()) == (mask.shape, (48, 1))


def test_what_is_added_under_a_mask_is_nothing_or_minus_infinity():
    mask = torch.tensor([[True, False], [True, True]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(additive(mask, dtype), torch.tensor([[0.0, -torch.inf], [0.0, 0.0]], dtype=dtype))
