"""Which arithmetic `--precision auto` takes: on the CPU, the one that a trial of a step finds to be faster."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import torch

from rewardlab.batch import pack
from rewardlab.model.attention import NAME, padded_implementation
from rewardlab.model.compute import Log, apply_compute, choose_compute
from rewardlab.model.config import ComputeConfig
from rewardlab.model.load import PRECISION, resolve_precision, wrap
from rewardlab.model.reward import AttentionLayout, RewardModel
from rewardlab.model.selftest import VOCABULARY, probe_groups, tiny_config

WORTH_HALF: Final = 1.3
"""How much faster bf16 must be to be taken on a CPU: it rounds, and a choice should be the same tomorrow."""
TRIAL_GROUPS: Final = ((114, (43, 50)),) * 2
"""Shared tokens and replies of the micro-batch that is timed: about as HH's."""


def choose_precision(
    wanted: str,
    model_config: Any,
    disk_class: Any,
    compute: ComputeConfig,
    *,
    layout: AttentionLayout,
    device: torch.device,
    log: Log,
    train: bool = True,
) -> str:
    """`fp32` or `bf16`. On a CPU with native bf16, `auto` is bf16 if a step of two layers in the model's shape, all
    trained, each precision with the kernels that it would take, is at least WORTH_HALF times as fast; `log` is told.
    """
    chosen = resolve_precision(wanted, device)
    if wanted != "auto" or chosen == "fp32" or device.type != "cpu":
        return chosen
    try:
        ratio = half_speed(model_config, disk_class, compute, layout=layout, train=train)
    except Exception as error:  # of a class that its configuration alone does not build; only the trial is lost
        log(f"precision: bf16, which this processor has; not tried beforehand ({type(error).__name__}: {error})")
        return chosen
    chosen = "bf16" if ratio >= WORTH_HALF else "fp32"
    log(f"precision: {chosen}, since bf16 is {ratio:.1f} times as fast as fp32 in the model's shape")
    return chosen


def half_speed(
    model_config: Any,
    disk_class: Any,
    compute: ComputeConfig,
    *,
    layout: AttentionLayout,
    train: bool,
    repeats: int = 2,
) -> float:
    """How many times as fast as float32 bf16 is on this processor, with random weights in the model's shape."""
    models = {}
    for name in ("fp32", "bf16"):
        model = _two_layers(model_config, disk_class, layout, PRECISION[name])
        settings = replace(compute, compile=False, allocator="system")
        if name == "bf16":
            settings = replace(settings, linear_backend="auto")  # what was named is for float32
        elif settings.attention_backend == "products":
            settings = replace(settings, attention_backend="auto")  # what was named is for half precision
        chosen = choose_compute(
            settings, model.config, device=model.device, dtype=PRECISION[name], train=train, log=lambda line: None
        )
        apply_compute(model, replace(settings, **chosen | {"allocator": "system"}))
        models[name] = model.train(train)
    batch = pack(probe_groups(VOCABULARY, TRIAL_GROUPS), share=layout != "unshared")
    best = dict.fromkeys(models, float("inf"))
    # Interleaved, so that both meet the same neighbours. The first warms up, and makes the copies of the weights, which
    # in a step serve all its micro-batches.
    for _ in range(repeats + 1):
        for name, model in models.items():
            started = time.perf_counter()
            with torch.set_grad_enabled(train):
                scores = model(batch)
            if train:
                scores.sum().backward()
            best[name] = min(best[name], time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
    return best["fp32"] / best["bf16"]


def _two_layers(model_config: Any, disk_class: Any, layout: AttentionLayout, dtype: torch.dtype) -> RewardModel:
    """The architecture in its true width, two layers deep, with a small vocabulary."""
    small = tiny_config(model_config)
    text, shape = small.get_text_config(), model_config.get_text_config()
    if getattr(shape, "intermediate_size", 0):
        text.intermediate_size = shape.intermediate_size
    small.num_labels = 1
    implementation = padded_implementation(text) if layout == "padded" else NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = disk_class._from_config(small, dtype=torch.float32, attn_implementation=implementation)
    return wrap(classifier, layout=layout, compute_dtype=dtype)
