"""Shards that are rounded in place: when, beside what FSDP does with them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Gemma4TextConfig

from common import make_groups, make_model
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.distributed import sharding
from rewardlab.model.rounded_parts import RoundedParts


def test_shards_are_rounded_before_the_streams_of_fsdp_wait_for_what_was_started_before():
    """FSDP gathers on streams of its own. They wait for the others in its hook on the whole model, and not again."""
    model = make_model().train()
    model.compute_dtype = torch.bfloat16
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharding._shard(model, init_device_mesh("cpu", (1,)))
        model.half_weights = RoundedParts(model.backbone, "backbone", torch.bfloat16)
        held = model.backbone.layers[0].mlp.up_proj.weight.detach().to_local()
        before, seen = held.clone(), []
        hooks = dict(model._forward_pre_hooks)
        number = next(number for number, hook in hooks.items() if getattr(hook, "__name__", "") == "_pre_forward")
        own = hooks[number]

        def look(*given):
            seen.append(held.clone())
            return own(*given)

        model._forward_pre_hooks[number] = look
        for draw in (1, 2):
            model.step_draw = (draw,)
            model(pack(make_groups(2)))
            assert not torch.equal(held, before)
            assert torch.equal(seen.pop(), held), "rounded later than FSDP looked"
            assert torch.equal(held, held.bfloat16().float())
    finally:
        dist.destroy_process_group()


def test_layers_outside_the_decoder_do_not_keep_the_rounding_of_an_evaluation():
    """FSDP keeps what it gathered for them from pass to pass."""
    named = {**SIZES, **GROUPED, "head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2}
    named |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384, "num_kv_shared_layers": 0}
    model = make_model(config=Gemma4TextConfig(**named))
    model.compute_dtype = torch.bfloat16
    model.backbone.per_layer_model_projection.weight.data.mul_(30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharding._shard(model, init_device_mesh("cpu", (1,)))
        model.half_weights = RoundedParts(model.backbone, "backbone", torch.bfloat16)
        batch, found = pack(make_groups(2)), []
        with torch.no_grad():
            for draw in ((), (1,), (2,), (1,)):  # the first as in an evaluation
                model.train(bool(draw))
                model.step_draw = draw
                model(batch)
                found.append(model.backbone.per_layer_model_projection.weight.detach().clone())
                assert torch.equal(found[-1], found[-1].bfloat16().float())
        assert torch.equal(found[1], found[3])
        assert not any(torch.equal(first, second) for first, second in pairwise(found))
    finally:
        dist.destroy_process_group()
