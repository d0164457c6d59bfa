"""Linear layers that get no gradient are no part of `all-linear`: no adapter there would ever move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, JambaConfig, JambaForCausalLM

from adapted import config_for, load_model
from common import make_groups, make_tokenizer
from harness.family_sizes import config_of
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.model.lora import adapted_layers, require_adapter_gradients

MAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}


@pytest.fixture
def jamba(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    JambaForCausalLM(JambaConfig(**SIZES | GROUPED | MAMBA | EXPERTS | {"pad_token_id": 0})).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def after_a_step(base: Path, **settings):
    model = load_model(config_for(base, precision="fp32", lora=True, **settings), layout="padded")
    model(pack(make_groups(2, vocabulary=340))).sum().backward()
    return model


def test_all_linear_leaves_out_what_mamba_multiplies_by_without_calling_it(jamba):
    model = after_a_step(jamba)
    require_adapter_gradients(model)
    names = {path.rpartition(".")[2] for path in adapted_layers(model)}
    assert {"in_proj", "x_proj", "out_proj", "q_proj"} <= names
    assert "dt_proj" not in names


def test_naming_such_a_layer_is_an_error(jamba):
    model = after_a_step(jamba, lora_target_modules=("q_proj", "dt_proj"))
    with pytest.raises(ModelError, match=r"without a gradient: .*dt_proj.* Leave these layers out"):
        require_adapter_gradients(model)


@pytest.mark.parametrize(("family", "word"), [("longcat_flash", "router"), ("zamba2", "adapter_list")])
def test_layers_of_one_family_that_get_no_gradient_are_left_out(tmp_path, family, word):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = after_a_step(tmp_path)
    require_adapter_gradients(model)
    assert not any(word in path for path in adapted_layers(model))
