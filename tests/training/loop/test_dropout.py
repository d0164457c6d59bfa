"""Dropout of adapters is drawn by conversation: a step is the same step however it is computed."""

from __future__ import annotations

import pytest
import torch

from common import arithmetic, make_groups, make_model, set_layout
from many_ranks import trainer_for
from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.distributed.ranks import Parallel
from rewardlab.model.applying import apply_compute, read_last_layer_only_where_scored
from rewardlab.model.config import ModelConfig, TrainComputeConfig
from rewardlab.model.dropout import ConversationDropout, Draws, _mixed, draw
from rewardlab.model.lora import add_adapters

RATE = 0.3
DRAWN = ["11101010", "10011011", "01111111", "11111110"]
"""Kept features of the first tokens in the first layer."""


def adapted(family: str = "llama", *, layout="shared", dtype=torch.float64, **settings):
    """A tiny model with adapters that drop, and none of whose gradients are hidden by a B of zeros."""
    model = make_model(family, dtype=dtype)
    config = ModelConfig(lora=True, lora_rank=2, lora_dropout=RATE, **settings)
    model.draws = add_adapters(model.backbone, config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    model.step_draw = (0, 3)
    return set_layout(model, layout).train()


def gradients_of(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    scores = model(batch)
    (scores * torch.linspace(1, 2, len(scores), dtype=scores.dtype)).sum().backward()
    return {"": scores.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_equal(ours, theirs, bound=1e-10) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).norm()) <= bound * float(tensor.norm()), name


# --- the draws -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_draws_are_uniform_and_do_not_know_of_each_other():
    """Over neighbouring keys, as tokens have them: mean, share below the rate, and products of neighbours."""
    keys = pack(make_groups(300)).keys_T
    assert len(set(keys.tolist())) == len(keys)
    layers = [ConversationDropout(f"layers.{n}.q_proj", 0.05, Draws()).key for n in range(3)]
    found = torch.stack([draw(_mixed(_mixed(keys.clone()) ^ layer), 258) for layer in layers]).double() / 65536
    count = found.numel()
    assert abs(float(found.mean())) * (12 * count) ** 0.5 < 4
    for share in (0.01, 0.05, 0.5):
        below = (found < share - 0.5).double() - round(share * 65536) / 65536
        deviation = (share * (1 - share)) ** 0.5
        assert abs(float(below.mean())) / deviation * count**0.5 < 4
        for first, second in (
            (below[..., 1:], below[..., :-1]),
            (below[..., 4:], below[..., :-4]),
            (below[:, 1:], below[:, :-1]),
            (below[1:], below[:-1]),
        ):
            assert abs(float((first * second).mean())) / deviation**2 * first.numel() ** 0.5 < 4


def test_what_is_drawn_is_written_down():
    """The numbers are part of what a run is: a change of them is a change of every run with dropout."""
    model = adapted()
    batch = pack(make_groups(2))
    model.draws.begin(batch, (0, 3))
    layer = model.backbone.layers[0].self_attn.q_proj.lora_dropout["default"]
    ones = torch.ones(1, batch.num_tokens, 8, dtype=torch.float64)
    rows = ["".join("01"[value > 0] for value in row) for row in layer(ones)[0, :4].tolist()]
    assert rows == DRAWN
    assert float(layer(ones).max()) == 65536 / (65536 - round(RATE * 65536))


def test_a_model_that_is_judged_drops_nothing():
    model = adapted().eval()
    batch = pack(make_groups(3))
    bare = adapted()
    for module in bare.modules():
        if isinstance(module, ConversationDropout):
            module.num_dropped = 0
    torch.testing.assert_close(model(batch), bare(batch))
    assert float((model.train()(batch) - bare(batch)).detach().norm()) > 1e-3


# --- the law ---------------------------------------------------------------------------------------------------


def steps_of(folder, budget: int, layout: str, backend: str, order: int = 1):
    with arithmetic(torch.float64):
        how = {"lora": True, "dropout": RATE, "budget": budget, "layout": layout, "groups": 10, "batch_size": 6}
        trainer = trainer_for(folder, how, Parallel())
        trainer.model.attention_backend = backend
        if layout != "padded":
            read_last_layer_only_where_scored(trainer.model)
        losses, batches = [], []
        for _ in range(8):
            planned = trainer._planned(trainer.step)[::order]
            losses.append(trainer.train_step(planned).sums.mean_loss)
            batches.append(len(planned))
            trainer.step += 1
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return losses, weights, batches


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return steps_of(tmp_path_factory.mktemp("plain"), 45, "unshared", "segments")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("layout", "backend"),
    [(layout, backend) for layout in ("shared", "unshared") for backend in ("segments", "mask", "products")]
    + [("padded", "segments")],  # which has the attention of transformers
)
@pytest.mark.parametrize("budget", [60, 1000])
def test_steps_are_the_same_for_any_budget_layout_and_kernel(budget, layout, backend, plain, tmp_path):
    losses, weights, batches = steps_of(tmp_path, budget, layout, backend, order=-1)
    assert batches != plain[2]
    bound = 1e-6 if backend == "products" else 1e-9  # it keeps its softmax in float32
    assert losses == pytest.approx(plain[0], rel=bound)
    require_equal(weights, plain[1], 1e3 * bound)  # Adam divides small gradients by their size


@pytest.mark.parametrize("settings", [{}, {"dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_computed_again_is_dropped_again(mode, layout, settings):
    batch = pack(make_groups(4))
    wanted = gradients_of(adapted(layout=layout, dtype=torch.float32, **settings), batch)
    model = adapted(layout=layout, dtype=torch.float32, **settings)
    apply_compute(model, TrainComputeConfig(activation_checkpointing=mode, attention_backend="segments"))
    require_equal(gradients_of(model, batch), wanted, 1e-5)


def test_layers_steps_seeds_preferences_and_replies_have_masks_of_their_own():
    model = adapted()
    first, second = model.backbone.layers[0].self_attn, model.backbone.layers[1].self_attn
    layers = [first.q_proj, first.k_proj, second.q_proj]

    def masks(indices, seed):
        batch = pack(make_groups(3), indices=indices)
        model.draws.begin(batch, seed)
        ones = torch.ones(1, batch.num_tokens, 64, dtype=torch.float64)
        return [layer.lora_dropout["default"](ones) > 0 for layer in layers]

    base, again = masks((0, 1, 2), (0, 3)), masks((0, 1, 2), (0, 3))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(base, again, strict=True))
    others = [*base[1:], *masks((3, 4, 5), (0, 3)), *masks((0, 1, 2), (0, 4)), *masks((0, 1, 2), (1, 3))]
    rows = [mask[0] for mask in (base[0], *others)]
    seen = {tuple(row.tolist()) for rows_of in rows for row in rows_of}
    assert len(seen) == sum(map(len, rows)), "no token of any layer, step or preference is dropped as another is"


def test_a_layer_that_sees_other_rows_is_named():
    model = adapted()
    model.draws.begin(pack(make_groups(2)), (0, 0))
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj is computed for 7 rows of a batch of \d+ tokens"):
        model.backbone.layers[0].self_attn.q_proj(torch.zeros(7, 32, dtype=torch.float64))
