"""Shards that are rounded in place: when, beside what FSDP does with them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from common import make_groups, make_model
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
