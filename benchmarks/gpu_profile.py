"""Where the time of a training step goes on one GPU: how long it computes, what, and what the host does meanwhile."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness import flops, gpu_runs, ours, results, timing
from rewardlab.training.cost.peak_flops import makers_peak_flops

CASES = ("0.5b full", "0.5b lora", "3b full", "3b lora")
"""Model, what trains."""
KINDS: Mapping[str, str] = {
    "products": r"nvjet|cutlass|gemm|splitK",
    "attention": r"flash|fmha|attention",
    "rounding": r"^_round|<long, long|<int, int|[Bb]itwise|shift_|arange",
    "optimiser": r"FusedOpti|FusedAdam",
    "norms": r"layer_norm|GammaBeta|rms_norm",
    "kernels of Triton": r"^_(multiply|multiply_backward|add_product|turn)$",
}
"""Kind of work -> what names of a GPU's kernels have; the first kind that fits has it, and `others` what is left."""
OTHERS = "others"
LISTED = 30


def kind_of(kernel: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel)), OTHERS)


def profiled(step: Any, *, on_gpu: bool) -> dict[str, Any]:
    """What the GPU and the host did in a step: seconds and calls by kind, by kernel and by operation of the host."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as watched:
        step()
    kinds = {kind: {"seconds": 0.0, "calls": 0} for kind in (*KINDS, OTHERS)}
    kernels: dict[str, tuple[float, int]] = {}
    host: dict[str, tuple[float, int]] = {}
    for event in watched.key_averages():
        if event.device_type == DeviceType.CPU:
            host[event.key] = (event.self_cpu_time_total / 1e6, event.count)
        elif "#" not in event.key:  # names of ranges, such as Optimizer.step#AdamW.step, are no kernels
            seconds = event.self_device_time_total / 1e6
            kernels[event.key[:150]] = (seconds, event.count)
            kinds[kind_of(event.key)]["seconds"] += seconds
            kinds[kind_of(event.key)]["calls"] += event.count
    return {"kinds": kinds, "kernels": longest(kernels), "host": longest(host)}


def longest(found: Mapping[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
    """The first LISTED by seconds."""
    return dict(sorted(found.items(), key=lambda entry: -entry[1][0])[:LISTED])


def measure(name: str, options: argparse.Namespace, work: Path, until: float) -> dict[str, Any]:
    """Steps of one cell, timed, then one under the profiler."""
    del until  # a cell takes half a minute
    model_name, kind = name.split(" ")
    device = gpu_runs.device_of(options)
    groups = gpu_runs.draw_pairs(model_name, options)
    config, model = gpu_runs.build(
        model_name, kind, options, work, groups, **{"elementwise_backend": "auto"} | ours.parse_settings(options.set)
    )
    step = ours.step_of(ours.trainer_of(config, model, groups))
    wait = gpu_runs.wait_for

    def timed() -> timing.Sample:
        return timing.timed(step, wait=lambda: wait(device))

    for _ in range(options.warmup):
        timed()
    samples = [timed() for _ in range(options.repeats)]
    seconds = statistics.median(sample.wall for sample in samples)
    found = profiled(lambda: (step(), wait(device)), on_gpu=device.type == "cuda")
    busy = sum(kind["seconds"] for kind in found["kinds"].values())
    peak = makers_peak_flops(device, torch.bfloat16)
    shape = flops.shape_of(
        ours.config_of(config.model.model), lora_rank=config.model.lora_rank if config.model.lora else 0
    )
    rate = shape.train_flops(flops.useful_work(groups, sharing=True)) / seconds
    return {
        "cell": name,
        "precision": config.model.precision,
        "seconds": seconds,
        "samples": [sample.wall for sample in samples],
        "micro_batches": samples[0].facts["micro_batches"],
        "tokens": samples[0].facts["tokens"],
        "busy": busy / seconds,
        "mfu": rate / peak.flops if peak else None,
        "kernels_started": sum(kind["calls"] for kind in found["kinds"].values()),
        **found,
    }


def page_of(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    """The page so far."""
    show = results.show
    chosen = f" with {' '.join(options.set)}" if options.set else ""
    precision = " and ".join(dict.fromkeys(cell["precision"] for cell in cells))
    steps = [
        [
            cell["cell"],
            f"**{show(cell['seconds'])}** ({show(min(cell['samples']))} to {show(max(cell['samples']))})",
            show(cell["tokens"]),
            str(cell["micro_batches"]),
            "–" if cell["mfu"] is None else f"{cell['mfu']:.1%}",
            f"{cell['busy']:.0%}",
            show(cell["kernels_started"]),
        ]
        for cell in cells
    ]
    kinds = [
        [cell["cell"], *(f"{1000 * kind['seconds']:.1f} ({kind['calls']})" for kind in cell["kinds"].values())]
        for cell in cells
    ]
    return [
        f"# Where a step's time goes on {gpu_runs.device_name(options)}",
        "",
        f"Steps of pairs of lengths like HH's, random weights, {precision}{chosen}; medians of {options.repeats}, "
        "lowest and highest in brackets. `busy`: what the GPU computed in one more step, by PyTorch's profiler, over "
        "the seconds of a step without it. Kernels: how many the host started in that step.",
        "",
        results.table(["model, kind", "seconds", "tokens", "micro-batches", "MFU", "busy", "kernels"], steps),
        "Milliseconds of the GPU by kind of work, and in brackets how many kernels did it. `rounding` by operations is "
        "told by its arithmetic on integers, so its casts count under `others`.",
        "",
        results.table(["model, kind", *KINDS, OTHERS], kinds),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=None, metavar="MODEL KIND")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    gpu_runs.add_flags(parser)
    options = parser.parse_args(arguments)
    options.cells = options.cells or (["tiny full", "tiny lora"] if options.tiny else list(CASES))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; the result is written again after each. 1 if one could not run."""
    options = parse(arguments)
    _, sound = gpu_runs.run_cells("gpu_profile", options, options.cells, measure=measure, page=page_of)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
