"""What is saved after LoRA is the base model's own weights plus the update, whatever dtype they were held in."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rewardlab.model.load as load_module
from merged_adapters import merged_state
from rewardlab.core.errors import ModelError
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

pytestmark = pytest.mark.usefixtures("verified_here")


def config_for(base_model, data, folder) -> RewardTrainerConfig:
    return RewardTrainerConfig.of(
        model=str(base_model),
        dataset=(str(data),),
        output_dir=folder,
        steps=2,
        batch_size=8,
        lr=1e-2,
        max_seq_len=128,
        precision="bf16",
        eval_fraction=0.0,
        lora=True,
        lora_rank=2,
        lora_target_modules=("q_proj", "down_proj"),
    )


def count_reads(monkeypatch) -> list[str]:
    reads, real = [], load_module.read_classifier

    def counted(disk_class, name, *arguments, **more):
        reads.append(name)
        return real(disk_class, name, *arguments, **more)

    monkeypatch.setattr(load_module, "read_classifier", counted)
    return reads


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("on_the_grid", [False, True], ids=["float32 base", "bf16 base"])
def test_a_bf16_run_saves_the_original_weights_plus_the_update(
    base_model, pairs_file, tmp_path, monkeypatch, on_the_grid
):
    if on_the_grid:
        AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16).save_pretrained(base_model)
    reads = count_reads(monkeypatch)
    folder = train(config_for(base_model, pairs_file, tmp_path / "run")).last
    assert len(reads) == (1 if on_the_grid else 2), "the base is read again only where rounding lost something"
    base = {name: tensor.float() for name, tensor in load_file(base_model / "model.safetensors").items()}
    saved = load_file(folder / "model.safetensors")
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    num_adapted = 0
    for name, tensor in saved.items():
        if name == "score.weight":
            continue
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            num_adapted += 1
            update = 32 / 2 * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            assert update.abs().max() > 1e-3
            assert torch.allclose(tensor, base[name] + update, rtol=0, atol=1e-7), name
        else:
            assert torch.equal(tensor, base[name]), name
    assert num_adapted == 4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("settings", "still"),
    [
        ({"train_head_only": True}, ("model.",)),
        ({"freeze_layers": 1}, ("model.embed_tokens", "model.layers.0.")),
        (
            {"lora": True, "dora": True, "lora_modules_to_save": ("norm",)},
            ("model.embed_tokens", "model.layers.0.input"),
        ),
    ],
)
def test_what_is_frozen_is_saved_as_it_was_and_the_rest_is_not(base_model, pairs_file, tmp_path, settings, still):
    """In bf16, whose grid the base does not lie on."""
    folder = train(config_for(base_model, pairs_file, tmp_path / "run").replace(**{"lora": False, **settings})).last
    base, saved = (load_file(path / "model.safetensors") for path in (base_model, folder))
    for name, tensor in base.items():
        if name.startswith("model."):
            assert torch.equal(saved[name], tensor) or not name.startswith(still), name
    moved = {name for name in saved if name in base and not torch.equal(saved[name], base[name])}
    if "lora" in settings:
        adapted = {f"model.layers.{n}.{part}_proj.weight" for n in range(2) for part in ("self_attn.q", "mlp.down")}
        assert moved == adapted | {"model.norm.weight"}
    else:
        assert moved == {name for name in base if name.startswith("model.") and not name.startswith(still)}


@pytest.mark.slow
def test_a_base_that_changed_meanwhile_is_not_merged_into(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run")
    model = load_module.load_reward_model(
        str(base_model), config.model, seed=0, layout="shared", device=torch.device("cpu"), log=print
    )
    assert set(merged_state(model)) > {"head.weight"}
    other = AutoModelForCausalLM.from_pretrained(base_model)
    with torch.no_grad():
        other.model.norm.weight.add_(1.0)
    other.save_pretrained(base_model)
    with pytest.raises(ModelError, match=r"backbone.norm.weight of the base model is not what the run started from"):
        merged_state(model)
