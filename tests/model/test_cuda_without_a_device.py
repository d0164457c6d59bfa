"""The path of CUDA where there is no GPU, on a fake device: shapes, dtypes, devices and waits of a whole step.

No number is computed, so nothing here says that a kernel is right, fast or small; tests/gpu and benchmarks/gpu.py do.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.attention.flex_attention import flex_attention

from common import CONFIGS, make_groups, make_model
from fake_cuda import DEVICE, fake_cuda, run_backward
from rewardlab.batch import PackedBatch, pack
from rewardlab.data.groups import Datasets
from rewardlab.data.pack import plan_replies
from rewardlab.model import attention_backends, compute
from rewardlab.model.applying import apply_compute
from rewardlab.model.attention_formula import Formula
from rewardlab.model.compute import unavailable
from rewardlab.model.config import ModelConfig, TrainComputeConfig
from rewardlab.model.prompt_layout import PromptLayout, Ragged
from rewardlab.model.trainable import choose_trainable, half_frozen
from rewardlab.score import score_groups
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import LossConfig, RewardTrainerConfig

# PyTorch 2.11 has no error of its own for this.
FakeTensorDeviceMismatchError = getattr(fake_tensor, "FakeTensorDeviceMismatchError", RuntimeError)
IN_HALF = ["segments", "mask", "varlen", "flash"]
IN_FLOAT32 = ["segments", "mask"]
CASES = [
    *((backend, torch.bfloat16) for backend in IN_HALF),
    *((backend, torch.float32) for backend in IN_FLOAT32),
]
KINDS = {
    "full": {},
    "lora": {"lora": True},
    "dora": {"lora": True, "dora": True},
    "head": {"train_head_only": True},
}
STEPS = [
    *(
        (*case, kind, mode)
        for case in CASES[:3:2]
        for kind in ("full", "lora")
        for mode in ("none", "selective", "full")
    ),
    *((*case, kind, mode) for case in (CASES[1], *CASES[3:]) for kind, mode in (("full", "none"), ("lora", "full"))),
]
"""segments and varlen with everything, the others with two settings each."""
STEPS += [("varlen", torch.float16, kind, "none") for kind in ("full", "lora")]
IN_EVERY_RUN = {
    ("segments", torch.bfloat16, "full", "none"),
    ("segments", torch.bfloat16, "lora", "selective"),
    ("segments", torch.bfloat16, "full", "full"),
    ("varlen", torch.bfloat16, "lora", "none"),
    ("varlen", torch.bfloat16, "full", "selective"),
    ("varlen", torch.bfloat16, "lora", "full"),
    ("mask", torch.bfloat16, "full", "none"),
    ("flash", torch.bfloat16, "lora", "full"),
    ("segments", torch.float32, "lora", "full"),
    ("mask", torch.float32, "full", "none"),
    ("varlen", torch.float16, "lora", "none"),
    ("varlen", torch.float16, "full", "none"),
    ("flash", torch.bfloat16, "full", "none"),
} & set(STEPS)
"""segments and varlen meet each kind and each mode, each kind each mode; float16 and flash meet both kinds."""
assert set(STEPS) >= IN_EVERY_RUN
STEPS = [step if step in IN_EVERY_RUN else pytest.param(*step, marks=pytest.mark.slow) for step in STEPS]
GROUPS = make_groups(3, replies=3, seed=3)
MANY = make_groups(8, replies=4, seed=3)


def varlen_in_the_words_of_flash_attn(q, k, v, q_starts, k_starts, longest_q, longest_k, *, softmax_scale, **known):
    """The package is not here; its call has the shapes of PyTorch's."""
    assert known == {"causal": True, "softcap": 0.0, "window_size": (-1, 0)}
    ragged = Ragged(
        query_starts=q_starts, key_starts=k_starts, longest_query=longest_q, longest_key=longest_k, gather_U=None
    )
    return attention_backends.varlen_kernel(q, k, v, ragged, Formula(scale=softmax_scale))


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    package = SimpleNamespace(flash_attn_varlen_func=varlen_in_the_words_of_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", package)


@pytest.fixture
def device():
    with fake_cuda() as device:
        yield device


def model_on(
    device, backend="varlen", dtype=torch.bfloat16, *, family="qwen2", kind="full", checkpointing="none", config=None
):
    """As `load_reward_model` prepares it, without what compares numbers."""
    model = make_model(family, config=config).train()
    model.compute_dtype = dtype
    choose_trainable(model, ModelConfig(model="x", **KINDS[kind]), seed=0)
    half_frozen(model.backbone, dtype)
    device.put(model)
    compute = TrainComputeConfig(
        attention_backend=backend, linear_backend="torch", allocator="system", activation_checkpointing=checkpointing
    )
    apply_compute(model, compute)
    return model


def trainer_on(device, folder, backend="varlen", dtype=torch.bfloat16, *, budget=128, **more) -> RewardTrainer:
    return reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=8, micro_token_budget=budget, **more),
        model_on(device, backend, dtype),
        Datasets(train=MANY),
        num_steps=3,
        records=Records(folder),
        save=lambda folder, step: None,
    )


def require_gradients(model):
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            assert gradient is not None, name
            assert (gradient.shape, gradient.dtype, gradient.device) == (
                parameter.shape,
                parameter.dtype,
                DEVICE,
            ), name
            assert parameter.dtype is torch.float32, name
        else:
            assert parameter.grad is None, name


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("backend", "dtype", "kind", "checkpointing"), STEPS)
def test_forward_and_backward_stay_on_the_device_in_their_dtypes(device, backend, dtype, kind, checkpointing):
    model = model_on(device, backend, dtype, kind=kind, checkpointing=checkpointing)
    batch = pack(GROUPS).to(DEVICE)
    rewards = model(batch)
    assert (rewards.shape, rewards.dtype, rewards.device) == ((batch.num_replies,), torch.float32, DEVICE)
    run_backward(preference_loss(rewards, batch, LossConfig()))
    require_gradients(model)
    assert device.waits == []


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2", "dora"), ("qwen2", "head"), ("llama", "full"), ("qwen3", "lora")]
)
def test_other_families_and_parts_that_train_stay_on_the_device(device, family, kind):
    model = model_on(device, family=family, kind=kind)
    batch = pack(GROUPS).to(DEVICE)
    run_backward(preference_loss(model(batch), batch, LossConfig()))
    require_gradients(model)
    assert device.waits == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_multiply_in_the_precision_of_the_run_and_the_head_in_float32(device, dtype):
    model = model_on(device, "segments", dtype)
    batch = pack(GROUPS).to(DEVICE)
    run_backward(preference_loss(model(batch), batch, LossConfig()))
    linear = 2 * 7 * 3  # two layers of seven matrices: forward, and the gradients of both factors
    assert device.products == {(dtype, False): linear, (torch.float32, True): 3}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["varlen", "flash"])
def test_ragged_kernels_are_called_once_a_layer_and_direction(device, backend):
    model = model_on(device, backend)
    batch = pack(GROUPS).to(DEVICE)
    run_backward(preference_loss(model(batch), batch, LossConfig()))
    kernels = {name: count for name, count in device.calls.items() if "varlen" in name}
    assert kernels == {"torch_attn::_varlen_attn": 2, "torch_attn::_varlen_attn_backward": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_copies_of_all_layers_are_rounded_by_as_many_kernels_as_those_of_one(device, kind):
    model = model_on(device, kind=kind)
    model.half_weights.refresh((1,))
    rounded = sum(count for name, count in device.calls.items() if name.startswith(("bitwise", "mul", "where")))
    layers = sum(one.layer.half_weight is not one.layer.weight for one in model.half_weights._layers)
    assert layers >= 14
    assert 5 <= rounded < 25
    assert device.waits == []


def operations(device, layers, kind):
    """Those that start work in the forward and in the backward pass of a model of so many layers."""
    config = CONFIGS["qwen2"]()
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    model = model_on(device, kind=kind, config=config)
    batch = pack(GROUPS).to(DEVICE)
    model(batch)  # rounds the copies
    before = device.started()
    loss = preference_loss(model(batch), batch, LossConfig())
    forward = device.started()
    run_backward(loss)
    return forward - before, device.started() - forward


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("full", (36, 81)), ("lora", (50, 94))])
def test_a_layer_starts_few_operations(device, kind, most):
    """On a GPU a small model's step takes the time that starting them takes. By the difference of three layers and two;
    with transformers' norms, which take 12 and 24 of them, since the kernel for CUDA is not in every build.
    """
    three, two = (operations(device, layers, kind) for layers in (3, 2))
    forward, backward = (more - fewer for more, fewer in zip(three, two, strict=True))
    assert 0.8 * most[0] <= forward <= most[0]
    assert 0.8 * most[1] <= backward <= most[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "as where it is sharded"])
def test_what_an_adapter_adds_is_not_left_to_cublas_which_rounds_before_it_adds(device, copies):
    model = model_on(device, kind="lora")
    if not copies:
        model.half_weights.drop()
        model.half_weights = None
    batch = pack(GROUPS).to(DEVICE)
    rewards = model(batch)
    name = "product_with_adapter" if copies else "summed_product"
    assert device.calls[f"rewardlab::{name}"] == 7 * model.config.num_hidden_layers
    run_backward(preference_loss(rewards, batch, LossConfig()))
    require_gradients(model)


@pytest.mark.slow
def test_selective_checkpointing_keeps_products_and_attention_and_full_computes_them_again(device):
    calls = {}
    for mode in ("none", "selective", "full"):
        model = model_on(device, checkpointing=mode)
        batch = pack(GROUPS).to(DEVICE)
        run_backward(preference_loss(model(batch), batch, LossConfig()))
        products = sum(count for (_, vector), count in device.products.items() if not vector)
        calls[mode] = (products, device.calls["torch_attn::_varlen_attn"])
    assert calls["selective"] == calls["none"] == (42, 2)
    assert calls["full"][1] == 4
    assert calls["none"][0] < calls["full"][0] <= 42 + 14


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_of_flex_attention_is_made_on_the_device(device, monkeypatch):
    monkeypatch.setattr(attention_backends, "_compiled_flex", lambda device_type: flex_attention)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its compiler wants a device
    model = model_on(device, "flex").eval()
    with torch.no_grad():
        rewards = model(pack(GROUPS).to(DEVICE))
    assert (rewards.dtype, rewards.device) == (torch.float32, DEVICE)
    assert device.calls["flex_attention"] >= 2
    assert device.waits == []


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_a_step_waits_for_the_device_once(device, backend, dtype, tmp_path):
    trainer = trainer_on(device, tmp_path, backend, dtype)
    batches = trainer._planned(0)
    assert len(batches) > 1
    trainer.train_step(batches)
    assert device.waits == ["a number read in fetch of totals"]
    for state in trainer.optimizer.state.values():
        assert {tensor.device for tensor in state.values()} == {DEVICE}
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("settings", [{"kwise_loss": "plackett-luce"}, {"center_lambda": 0.1, "max_grad_norm": 0.5}])
def test_no_loss_waits_for_the_device(device, settings, tmp_path):
    trainer = trainer_on(device, tmp_path, **settings)
    trainer.train_step(trainer._planned(0))
    assert device.waits == ["a number read in fetch of totals"]


@pytest.mark.slow
def test_everything_sent_to_the_device_comes_from_pinned_memory(device, tmp_path):
    trainer = trainer_on(device, tmp_path)
    batches = trainer._planned(0)
    assert trainer._accumulate(batches, 1.0) is not None
    of_batch = sum(isinstance(getattr(batches[0], field.name), torch.Tensor) for field in fields(PackedBatch))
    of_layout = 3  # where queries and keys of a reply start, and the rows of the keys
    assert device.copies == len(batches) * (of_batch + of_layout)
    assert device.waits == []


@pytest.mark.slow
def test_the_next_batch_is_sent_before_the_present_one_is_computed(device, tmp_path):
    trainer = trainer_on(device, tmp_path, budget=64)
    order: list[str] = []
    steps = trainer.steps
    move, forward = steps.move, steps.forward
    steps.move = lambda batch: order.append("sent") or move(batch)
    steps.forward = lambda batch, step: order.append("computed") or forward(batch, step)
    trainer._accumulate(trainer._planned(0), 1.0)
    assert order[:4] == ["sent", "sent", "computed", "sent"]


@pytest.mark.slow
def test_scoring_reads_the_device_once_a_row(device):
    model = model_on(device).eval()
    score_groups(model, MANY, budget=128)
    rows = [name for name in device.waits if name == "a copy to the host in compute of score"]
    assert len(rows) == len(device.waits) == len(plan_replies(MANY, 128, layout="shared")) > 1


# What the fake device finds, and that its way through the graph is PyTorch's.


def pageable(x):
    return x + torch.ones(3).to(DEVICE, non_blocking=True)


def blocking(x):
    return x + torch.ones(3).pin_memory().to(DEVICE)


@pytest.mark.parametrize(
    ("mistake", "noted"),
    [
        (lambda x: x.sum().item(), "a number read"),
        (lambda x: bool(x.sum() > 0), "a number read"),
        (lambda x: x.tolist(), "a number read"),
        (lambda x: x.cpu(), "a copy to the host"),
        (lambda x: torch.zeros(3).copy_(x), "a copy to the host"),
        (lambda x: x[torch.tensor([0, 1])], "an index on the host"),
        (pageable, "a copy from pageable memory"),
        (blocking, "a copy from pageable memory"),
    ],
)
def test_a_wait_is_noted(device, mistake, noted):
    mistake(torch.zeros(3, device=DEVICE))
    assert [wait.partition(" in ")[0] for wait in device.waits] == [noted]


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda x: x + torch.ones(3), FakeTensorDeviceMismatchError),
        (lambda x: F.linear(x, torch.ones(2, 3)), FakeTensorDeviceMismatchError),
        (lambda x: x[x > 0], DynamicOutputShapeException),
        (lambda x: x.nonzero(), DynamicOutputShapeException),
    ],
)
def test_a_mixture_of_devices_and_a_shape_by_numbers_raise(device, mistake, error):
    with pytest.raises(error):
        mistake(torch.zeros(3, device=DEVICE))


class Elsewhere(torch.autograd.Function):
    """A backward pass that loses the device."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(gradient.shape)


def test_a_gradient_on_another_device_raises(device):
    x = torch.zeros(3, device=DEVICE, requires_grad=True)
    with pytest.raises(AssertionError, match="a gradient on cpu of something on cuda:0"):
        run_backward(Elsewhere.apply(x).sum())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_graph_is_walked_as_by_pytorch(kind, checkpointing):
    found = []
    for walk in (torch.autograd.backward, run_backward):
        model = make_model("qwen2").train()
        choose_trainable(model, ModelConfig(model="x", **KINDS[kind]), seed=0)
        apply_compute(model, TrainComputeConfig(linear_backend="torch", activation_checkpointing=checkpointing))
        model.attention_backend = "segments"
        batch = pack(GROUPS)
        walk(preference_loss(model(batch), batch, LossConfig()) / total_weight(batch))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_backends_are_offered_by_the_kind_of_device_alone():
    for backend in ("segments", "mask", "varlen", "flex"):
        assert unavailable(backend, device=DEVICE, dtype=torch.bfloat16, formula=Formula(), train=True) == ""


def test_the_layouts_of_all_layers_are_sent_once(device):
    layout = PromptLayout(((5, (3, 4)), (0, (6,))), "varlen")
    for _ in range(3):
        ragged = layout.ragged(DEVICE)
    assert device.copies == 3
    assert ragged.gather_U.device == DEVICE


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_attention_is_not_computed_by_cudnn(device, layout):
    model = model_on(device, "segments")
    model.layout = layout
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        if layout == "padded":
            model.backbone.set_attn_implementation("sdpa")
        model(pack(GROUPS).to(DEVICE))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_nor_in_the_trial_of_a_kernel(device, monkeypatch):
    left_out = []
    monkeypatch.setattr(compute, "leave_out_cudnn", left_out.append)
    with contextlib.suppress(Exception):  # there are no numbers to compare
        compute.trial("varlen", make_model("qwen2").config, device=DEVICE, dtype=torch.bfloat16, train=True)
    assert left_out[0] == DEVICE


def test_on_a_cpu_the_choice_of_kernels_is_the_user_s():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        make_model()(pack(GROUPS))
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
