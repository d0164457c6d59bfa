"""Embeddings that add up their gradient row by row: the same gradient, in one tensor that is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from common import make_groups, make_model
from rewardlab.batch import pack
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ComputeConfig, TrainComputeConfig
from rewardlab.model.embedding import RowEmbedding, add_gradients_by_row
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

PLAIN = {"attention_backend": "segments", "linear_backend": "torch", "allocator": "system"}


def step_of(model, seed):
    for number in range(3):
        batch = pack(make_groups(4, seed=3 * seed + number, replies=3))
        preference_loss(model(batch), batch, LossConfig()).backward()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2 scales its embedding's output
@pytest.mark.parametrize("max_norm", [1e9, 0.0], ids=["updated", "not finite on the way"])
def test_steps_are_those_of_a_plain_embedding(family, max_norm):
    models = [make_model(family).double() for _ in range(2)]
    assert add_gradients_by_row(models[1].backbone) == (1 if family == "llama" else 0)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        gradients = []
        for model, optimizer in zip(models, optimizers, strict=True):
            step_of(model, step)
            embedding = model.backbone.get_input_embeddings()
            gradients.append(embedding.weight.grad.clone())
            if not max_norm and step == 1:  # a step that was given up left no number in it
                embedding.weight.grad.fill_(torch.nan)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-12)


def test_the_tensor_is_kept_from_step_to_step_and_given_back_with_the_model():
    model = make_model("llama").train()
    apply_compute(model, TrainComputeConfig(**PLAIN))
    embedding = model.backbone.get_input_embeddings()
    assert type(embedding) is RowEmbedding
    step_of(model, 0)
    first = embedding.weight.grad
    model.zero_grad(set_to_none=True)
    step_of(model, 1)
    assert embedding.weight.grad.data_ptr() == first.data_ptr()
    model.to("meta")
    assert embedding.kept is None


def test_embeddings_that_do_not_train_or_scale_rows_and_models_that_score_are_left_alone():
    scored = make_model("llama")
    apply_compute(scored, ComputeConfig(**PLAIN))
    assert type(scored.backbone.get_input_embeddings()) is nn.Embedding
    frozen = nn.Embedding(4, 2)
    frozen.requires_grad_(False)
    others = [
        nn.Embedding(4, 2, max_norm=1.0),
        nn.Embedding(4, 2, scale_grad_by_freq=True),
        nn.Embedding(4, 2, sparse=True),
    ]
    assert add_gradients_by_row(nn.ModuleList([frozen, *others])) == 0


def test_a_hook_on_the_weight_sees_its_gradient():
    embedding = nn.Embedding(5, 3)
    add_gradients_by_row(nn.ModuleList([embedding]))
    embedding.weight.register_hook(torch.zeros_like)
    embedding(torch.tensor([1])).sum().backward()
    assert torch.equal(embedding.weight.grad, torch.zeros(5, 3))


def test_a_weight_that_another_module_uses_as_well_gets_both_gradients():
    plain = nn.Embedding(5, 3)
    tied = copy.deepcopy(plain)
    add_gradients_by_row(nn.ModuleList([tied]))
    index = torch.tensor([1, 1, 4])
    for embedding in (plain, tied):
        for _ in range(2):
            (embedding(index).sum() + (embedding.weight**2).sum()).backward()
    assert torch.allclose(plain.weight.grad, tied.weight.grad)
