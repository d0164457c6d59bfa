"""Frozen weights held in half precision: what is exact all the same, and under which name they are rounded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common import make_groups
from in_half import half_model
from rewardlab.batch import pack
from rewardlab.model.layers import decoder_layers
from rewardlab.model.rounding import round_weights
from rewardlab.model.trainable import half_frozen


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3"])
def test_what_the_layers_add_to_is_float32_beside_frozen_weights(family):
    """A sum rounded to half precision after every layer is further off than all products together."""
    model = half_model(family)
    model.backbone.requires_grad_(False)
    half_frozen(model.backbone, torch.bfloat16)
    rows = []
    for layer in decoder_layers(model.backbone):
        layer.register_forward_hook(lambda _layer, inputs, _output: rows.append(inputs[0].dtype))
    model(pack(make_groups(2)))
    assert rows
    assert set(rows) == {torch.float32}


def test_an_embedding_held_in_half_precision_gives_its_rows_exactly():
    model = half_model(lora=True)
    embedding = model.backbone.get_input_embeddings()
    assert embedding.weight.dtype is torch.bfloat16
    ids = torch.tensor([[3, 1, 3]])
    assert torch.equal(embedding(ids), embedding.weight[ids].float())


def test_a_frozen_matrix_of_the_backbone_itself_is_rounded_by_the_name_under_which_it_is_saved():
    model = half_model()
    model.backbone.own = nn.Parameter(torch.linspace(0.1, 1.0, 12).reshape(3, 4), requires_grad=False)
    original = model.backbone.own.detach().clone()
    assert half_frozen(model.backbone.requires_grad_(False), torch.bfloat16)
    assert torch.equal(model.backbone.own, round_weights(original, torch.bfloat16, "backbone.own"))
