"""The kernels of CUDA against the padded path and float32, on a real device. Skipped where there is none."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from common import make_groups, make_model, make_tokenizer, set_layout
from cuda_waits import no_waiting
from rewardlab.artifact.load import load
from rewardlab.batch import pack
from rewardlab.data.groups import Datasets
from rewardlab.model import lora_sums
from rewardlab.model.applying import checkpoint_activations, compile_layers, read_last_layer_only_where_scored
from rewardlab.model.attention_backends import unavailable
from rewardlab.model.attention_formula import Formula
from rewardlab.model.compute import choose_compute, trial
from rewardlab.model.config import ComputeConfig
from rewardlab.model.half import HalfWeights
from rewardlab.model.lora_sums import adapted_product, product_and
from rewardlab.model.selftest import leak
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.progress import compiled_programs
from rewardlab.training.monitoring.records import Records
from rewardlab.training.run import train
from rewardlab.training.settings.config import LossConfig, RewardTrainerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
KERNELS = ["segments", "mask", "varlen", "flash", "flex"]


def wide_config() -> LlamaConfig:
    """Heads of 64, as the kernels like them; grouped."""
    return LlamaConfig(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=None,
    )


def require(backend: str, dtype: torch.dtype) -> None:
    """Skip where this backend cannot run."""
    if reason := unavailable(backend, device=CUDA, dtype=dtype, formula=Formula(), train=True):
        pytest.skip(f"{backend}: {reason}")


def scores_and_gradient(model, groups):
    batch = pack(groups).to(CUDA)
    model.zero_grad()
    rewards = model(batch)
    (preference_loss(rewards, batch, LossConfig()) / total_weight(batch)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return rewards.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", KERNELS)
def test_in_half_precision_no_kernel_errs_more_than_twice_as_much_as_the_padded_path(backend, dtype):
    require(backend, dtype)
    groups = make_groups(24, replies=4, seed=3)
    model = set_layout(make_model(config=wide_config()).to(CUDA), "padded")
    truth, true_gradient = scores_and_gradient(model, groups)
    model.compute_dtype = dtype
    padded, padded_gradient = scores_and_gradient(model, groups)
    set_layout(model, "shared")
    model.attention_backend = backend
    found, gradient = scores_and_gradient(model, groups)
    assert (found - truth).abs().mean() <= 2 * (padded - truth).abs().mean()
    assert (found - truth).abs().max() <= 2 * (padded - truth).abs().max()
    assert (gradient - true_gradient).norm() <= 2 * (padded_gradient - true_gradient).norm()


@pytest.mark.parametrize("backend", ["segments", "mask", "flex"])
def test_in_float32_kernels_agree_with_the_padded_path(backend):
    require(backend, torch.float32)
    groups = make_groups(12, replies=4, seed=4)
    model = set_layout(make_model(config=wide_config()).to(CUDA), "padded")
    truth, true_gradient = scores_and_gradient(model, groups)
    set_layout(model, "shared")
    model.attention_backend = backend
    found, gradient = scores_and_gradient(model, groups)
    assert (found - truth).abs().max() <= 1e-5 * max(1, truth.abs().max())
    assert (gradient - true_gradient).norm() <= 1e-5 * true_gradient.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", KERNELS)
def test_every_kernel_passes_the_trial_at_the_start_of_a_run(backend, dtype):
    require(backend, dtype)
    assert trial(backend, wide_config(), device=CUDA, dtype=dtype, train=True) == ""


def test_the_first_choice_in_bf16_is_a_ragged_kernel():
    lines: list[str] = []
    chosen = choose_compute(ComputeConfig(), wide_config(), device=CUDA, dtype=torch.bfloat16, log=lines.append)
    assert chosen["attention_backend"] in ("varlen", "flash"), lines


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", KERNELS)
def test_siblings_stay_invisible(backend, dtype):
    require(backend, dtype)
    model = make_model(config=wide_config()).to(CUDA)
    model.compute_dtype = dtype
    model.attention_backend = backend
    assert leak(model) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("with_copies", [True, False], ids=["copies", "autocast"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_what_an_adapter_adds_is_seen_however_little_it_is(dtype, biased, with_copies):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=biased, device=CUDA)
    layer.weight.data = torch.randn(64, 64, device=CUDA).to(dtype).float() / 8
    input = torch.randn(400, 64, device=CUDA).to(dtype)
    update = (torch.randn(400, 64, device=CUDA) * torch.finfo(dtype).eps / 100).to(dtype)
    without = F.linear(input.double(), layer.weight.double(), layer.bias.double() if biased else None)
    module = nn.Sequential(layer)
    if with_copies:
        HalfWeights(module, "backbone", dtype, "nearest").refresh()
    with torch.autocast("cuda", dtype=dtype):
        found = product_and(update, input, layer)
    assert found.dtype is dtype
    # The slope of the change on the addition, beside that of rounding alone: 1 if all of it is seen.
    change = found.double() - without.to(dtype).double()
    assert float((change * update).sum() / update.double().square().sum()) == pytest.approx(1, abs=0.35)
    assert (found.double() - (without + update)).abs().max() <= 0.6 * torch.finfo(dtype).eps * without.abs().max()


@pytest.mark.parametrize("rank", [4, 3], ids=["a scale of a power of two", "another scale"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_operations_joined_for_an_adapter_err_no_more_than_apart(input_dtype, rank, monkeypatch):
    draw = torch.Generator(CUDA).manual_seed(0)
    base, first, second = nn.Linear(256, 192), nn.Linear(256, rank, bias=False), nn.Linear(rank, 192, bias=False)
    module = nn.Sequential(base, first, second).to(CUDA)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, device=CUDA, generator=draw) / 8).bfloat16().float()
    base.requires_grad_(False)
    given = torch.randn(500, 256, device=CUDA, generator=draw).bfloat16()
    gradient = torch.randn(500, 192, device=CUDA, generator=draw).bfloat16()
    weights, scale = (first.weight, second.weight), 32 / rank

    def computed(input, layers):
        output = layers(input)
        return [output.detach(), *torch.autograd.grad(output, (input, *weights), gradient.to(output.dtype))]

    with torch.no_grad():
        wide = nn.Sequential(nn.Linear(256, 192), nn.Linear(256, rank, bias=False), nn.Linear(rank, 192, bias=False))
        wide.to(CUDA).double().load_state_dict(module.state_dict())
    input = given.double().requires_grad_()
    output = wide[0](input) + scale * wide[2](wide[1](input))
    wanted = [output.detach(), *torch.autograd.grad(output, (input, wide[1].weight, wide[2].weight), gradient.double())]
    HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
    errors = {}
    for joined in (True, False):
        monkeypatch.setattr(lora_sums, "joins_operations", lambda tensor, joined=joined: joined)
        input = given.to(input_dtype).requires_grad_()
        found = computed(input, lambda x: adapted_product(x, base, first, second, scale))
        errors[joined] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors[True]) < 0.01
    assert all(a <= 1.2 * b + 1e-6 for a, b in zip(errors[True], errors[False], strict=True)), errors


@pytest.mark.parametrize(("lora", "lr"), [(False, 1e-4), (True, 1e-3)], ids=["all weights", "lora"])
def test_a_run_in_float16_learns_and_saves_what_it_learnt(lora, lr, tmp_path, pairs_file, verified_here):
    config = wide_config()
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    losses = {}
    for precision in ("fp32", "fp16"):
        result = train(
            RewardTrainerConfig.of(
                **{"model": str(tmp_path / "base"), "dataset": (str(pairs_file),), "output_dir": tmp_path / precision},
                **{"steps": 8, "batch_size": 8, "lr": lr, "max_seq_len": 128, "precision": precision, "lora": lora},
                **{"eval_fraction": 0.2, "log_every": 1},
            )
        )
        rows = [json.loads(line) for line in (tmp_path / precision / "metrics.jsonl").read_text().splitlines()]
        losses[precision] = [row["train_loss"] for row in rows if row.get("train_loss") is not None]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert result.card is not None
    assert result.card.notable() == []


@pytest.mark.parametrize("backend", ["segments", "varlen", "flash", "flex"])
def test_a_step_makes_the_host_wait_for_nothing_but_its_result(backend, tmp_path):
    require(backend, torch.bfloat16)
    groups = make_groups(24, replies=4, seed=3)
    model = make_model(config=wide_config()).to(CUDA).train()
    model.compute_dtype, model.attention_backend = torch.bfloat16, backend
    trainer = reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=24, micro_token_budget=512),
        model,
        Datasets(train=groups),
        num_steps=3,
        records=Records(tmp_path),
        save=lambda folder, step: None,
    )
    trainer.train_step(trainer._planned(0))  # compiles, and makes the optimiser's state
    batches = trainer.steps.plan(0, trainer.token_budget)
    weight = sum(trainer.steps.weight(batch) for batch in batches)
    with no_waiting():
        found = trainer._accumulate(batches, weight)
    assert len(batches) > 1
    assert found is not None


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_saves_memory_and_changes_no_gradient_beyond_rounding(mode):
    groups = make_groups(64, replies=4, seed=5)
    peaks, gradients = [], []
    for wanted in ("none", mode):
        model = make_model(config=wide_config()).to(CUDA).train()
        read_last_layer_only_where_scored(model)
        checkpoint_activations(model, wanted)
        torch.cuda.reset_peak_memory_stats()
        gradients.append(scores_and_gradient(model, groups)[1])
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm()


def test_compiled_layers_agree_and_do_not_recompile_for_every_length():
    model = make_model(config=wide_config()).to(CUDA)
    model.compute_dtype = torch.bfloat16
    model.attention_backend = "varlen"
    groups = make_groups(24, replies=4, seed=6)
    truth, _ = scores_and_gradient(model, groups)
    compile_layers(model)
    found, _ = scores_and_gradient(model, groups)
    assert (found - truth).abs().max() <= 0.05 * max(1, truth.abs().max())
    made = compiled_programs()
    for count in (5, 9, 17):
        scores_and_gradient(model, groups[:count])
    assert compiled_programs() == made


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_with_quantised_weights_saves_whole_ones(kind, tmp_path, pairs_file, verified_here):
    pytest.importorskip("bitsandbytes")
    config = wide_config()
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    base = load_file(tmp_path / "base/model.safetensors")
    result = train(
        RewardTrainerConfig.of(
            **{"model": str(tmp_path / "base"), "dataset": (str(pairs_file),), "output_dir": tmp_path / "run"},
            **{"steps": 4, "batch_size": 8, "lr": 1e-3, "max_seq_len": 128, "precision": "bf16"},
            **{"lora": True, "dora": True, "lora_rank": 2, "lora_alpha": 4.0, "lora_modules_to_save": ("norm",)},
            **{"quantization": kind, "optimizer": "adamw8bit", "activation_checkpointing": "full"},
        )
    )
    saved = load_file(result.last / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for name, tensor in saved.items():
        if name != "score.weight" and "norm" not in name:
            rest = float((tensor - base[name]).norm() / base[name].norm())
            assert rest < 0.05, f"{name}: {rest}, of which rounding to 4 bits would be 0.1"
    load(result.last)
