"""Earlier layers: read from one pass, equal to the model cut off there."""

from __future__ import annotations

import copy

import pytest
import torch

from common import CONFIGS, arithmetic, make_groups, make_model, set_layout
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.model.layers import cut_off, decoder_layers, layer_states, resolve_layers


def deep(family: str, **settings):
    """A model of four layers."""
    config = CONFIGS[family]()
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = 4
    if kinds is not None:
        config.layer_types = ["full_attention"] * 4
    return make_model(family, config=config, **settings)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_a_layer_s_states_are_the_output_of_the_model_cut_off_there(family, layout):
    groups = make_groups(5, replies=3)
    with arithmetic(torch.float64), torch.no_grad():
        model = deep(family, layout=layout, dtype=torch.float64)
        batch = pack(groups)
        states = layer_states(model, batch, [1, 3, 4])
        assert states.shape == (batch.num_replies, 3, 32)
        for column, layer in enumerate([1, 3, 4]):
            cut = copy.deepcopy(model)
            cut_off(cut, layer)
            assert len(decoder_layers(cut.backbone)) == cut.config.num_hidden_layers == layer
            torch.testing.assert_close(states[:, column], cut.final_states(batch).float(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(states[:, 0], states[:, 1], atol=1e-2)


def test_the_last_layer_needs_no_norm_of_ours():
    model = deep("llama")
    batch = pack(make_groups(3))
    with torch.no_grad():
        torch.testing.assert_close(layer_states(model, batch, [4])[:, 0], model.final_states(batch))


def test_reading_layers_leaves_no_hook_behind():
    model = deep("llama")
    with torch.no_grad():
        layer_states(model, pack(make_groups(3)), [2])
    assert all(not layer._forward_hooks for layer in decoder_layers(model.backbone))


def test_lists_with_one_entry_a_layer_are_cut_too():
    model = deep("gemma3")
    cut_off(model, 3)
    assert model.config.layer_types == ["full_attention"] * 3


def test_a_backbone_whose_output_is_something_else_is_refused():
    model = deep("llama")
    model.backbone.norm.register_forward_hook(lambda module, inputs, output: output if output.ndim == 2 else output + 1)
    with torch.no_grad(), pytest.raises(ModelError, match="not its final norm over its last layer"):
        layer_states(set_layout(model, "padded"), pack(make_groups(3)), [2])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["last"], [6]),
        (["all"], [1, 2, 3, 4, 5, 6]),
        (["3", "last", "1", "3"], [1, 3, 6]),
        (["2", "all"], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_layers_by_number_and_by_word(wanted, found):
    assert resolve_layers(wanted, 6) == found


@pytest.mark.parametrize("wanted", ["0", "7", "-1", "first", "1.5", ""])
def test_a_layer_that_is_not_there_is_refused(wanted):
    with pytest.raises(ConfigError, match="--layers .*name `last`, `all` or numbers from 1 to 6"):
        resolve_layers([wanted], 6)
    with pytest.raises(ConfigError, match="name at least one"):
        resolve_layers([], 6)
