"""The arithmetic that `--precision auto` takes: on the CPU, the one that is faster in a trial of a training step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import torch

from rewardlab.batch import PackedBatch, pack
from rewardlab.core.types import Log
from rewardlab.model.applying import apply_compute
from rewardlab.model.attention import NAME, padded_implementation
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import ComputeConfig
from rewardlab.model.load import PRECISION, resolve_precision
from rewardlab.model.reward import AttentionLayout, HalfPrecisionError, RewardModel, width_of
from rewardlab.model.selftest import VOCABULARY, probe_groups, tiny_config
from rewardlab.model.text_part import backbone_of

WORTH_HALF: Final = 1.3
"""How many times as fast bf16 must be to be taken on a CPU. Less is not worth its rounding and could be noise; the same
machine should choose the same arithmetic every time."""
TRIAL_GROUPS: Final = ((114, (43, 50)),) * 2
"""(shared tokens, tokens of each reply) of the micro-batch that is timed: about the lengths of Anthropic's HH."""
CLEAR: Final = 1.2
"""By what factor a ratio must differ from WORTH_HALF for a few rounds to decide. Nearer to it, noise would."""
LONGEST: Final = 10.0
"""Seconds after which no round is added, so that wide models, whose rounds are long, do not wait."""
MOST_ROUNDS: Final = 16


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
    """Return the precision that `wanted` stands for; anything but `auto` is returned as it is.

    On a CPU with native bf16, `auto` is bf16 if a step of two layers in the model's shape is at least WORTH_HALF times
    as fast in it, all weights trained and each precision with the kernels that it would take. It is fp32 for a family
    whose code cannot compute in bf16. The log says what was measured.
    """
    chosen = resolve_precision(wanted, device)
    if wanted != "auto" or chosen == "fp32" or device.type != "cpu":
        return chosen
    # With wide models the trial takes a while.
    log("precision: timing bf16 and fp32 in the model's shape")
    try:
        ratio = half_speed(model_config, disk_class, compute, layout=layout, train=train)
    except HalfPrecisionError as error:
        log(f"precision: fp32. {error}")
        return "fp32"
    except Exception as error:
        # Some classes cannot be built from their configuration alone. Then the trial is skipped; the run can go on.
        log(f"precision: bf16, which this processor has; not tried beforehand ({type(error).__name__}: {error})")
        return chosen
    chosen = "bf16" if ratio >= WORTH_HALF else "fp32"
    worth = "" if chosen == "bf16" else f"; it is worth its rounding from {WORTH_HALF:g} times on"
    log(f"precision: {chosen}, since bf16 is {ratio:.2f} times as fast as fp32 in the model's shape{worth}")
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
    """Measure how many times as fast as fp32 bf16 is on this processor, with random weights in the model's shape.

    With `train` the backward pass is measured too. At least `repeats` rounds follow a first one that warms up, and up
    to MOST_ROUNDS or LONGEST in all where the ratio is near WORTH_HALF.
    """
    models = {}
    for name in ("fp32", "bf16"):
        model = _two_layers(model_config, disk_class, layout, PRECISION[name])
        settings = replace(compute, compile=False, allocator="system")
        # A kernel that the user named may exist for one precision only. The other one is timed with its own choice.
        if name == "bf16":
            settings = replace(settings, linear_backend="auto")
        elif settings.attention_backend == "products":
            settings = replace(settings, attention_backend="auto")
        chosen = choose_compute(
            settings, model.config, device=model.device, dtype=PRECISION[name], train=train, log=lambda line: None
        )
        apply_compute(model, replace(settings, **chosen | {"allocator": "system"}))
        models[name] = model.train(train)
    batch = pack(probe_groups(VOCABULARY, TRIAL_GROUPS), share=layout != "unshared")
    best = dict.fromkeys(models, float("inf"))
    # The two take turns, so that other load on the machine slows both alike, and the shortest times are kept. The first
    # round makes the half-precision copies of the weights, which in training serve all micro-batches of a step.
    total = 0.0
    for finished in range(1, MOST_ROUNDS + 1):
        for name, model in models.items():
            seconds = _seconds_of_step(model, batch, train=train)
            best[name], total = min(best[name], seconds), total + seconds
        ratio = best["fp32"] / best["bf16"]
        clear = not WORTH_HALF / CLEAR < ratio < WORTH_HALF * CLEAR
        if finished > repeats and (clear or total > LONGEST):
            break
    return ratio


def _seconds_of_step(model: RewardModel, batch: PackedBatch, *, train: bool) -> float:
    started = time.perf_counter()
    with torch.set_grad_enabled(train):
        scores = model(batch)
    if train:
        scores.sum().backward()
    seconds = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return seconds


def _two_layers(model_config: Any, disk_class: Any, layout: AttentionLayout, dtype: torch.dtype) -> RewardModel:
    """Build the architecture in its true width, with two layers, a small vocabulary and random weights."""
    shape = model_config.get_text_config()
    small = tiny_config(shape)
    if inner := getattr(shape, "intermediate_size", 0):
        small.intermediate_size = inner[:2] if isinstance(inner, list) else inner
    implementation = padded_implementation(small) if layout == "padded" else NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = backbone_of(small, disk_class, implementation)
        head = torch.nn.Linear(width_of(small), 1, bias=False)
    return RewardModel(backbone, head, disk_class=disk_class, layout=layout, compute_dtype=dtype)
