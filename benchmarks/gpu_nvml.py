"""The GPU sampled through NVML while steps run: what it says of them, and what asking costs."""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from harness import gpu_runs, ours, results, timing
from rewardlab.training.monitoring.gpu import COLUMNS, GIB, Gpu, GpuWatch, watch_gpu
from rewardlab.training.monitoring.observers import Cadence, Observer, Observers

VARIANTS: Mapping[str, str] = {
    "alone": "nobody asks",
    "watched": "`--track-gpu`: a thread asks NVML",
}
VALUES = tuple(name for name in COLUMNS if name not in ("seconds", "step"))


class NotTold(Exception):
    """NVML's error for what a device does not tell."""


def no_utilization(device: object) -> None:
    """As of a slice of a GPU."""
    raise NotTold


STAND_IN = SimpleNamespace(
    NVMLError=NotTold,
    NVML_TEMPERATURE_GPU=0,
    nvmlInit=lambda: None,
    nvmlShutdown=lambda: None,
    nvmlDeviceGetHandleByUUID=lambda name: name,
    nvmlDeviceIsMigDeviceHandle=lambda device: False,
    nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=GIB, total=2 * GIB),
    nvmlDeviceGetUtilizationRates=no_utilization,
    nvmlDeviceGetPowerUsage=lambda device: 3000,
    nvmlDeviceGetTemperature=lambda device, sensor: 4,
)
"""In place of NVML, to try the script without a GPU: it always says the same."""


def start_watch(path: Path, options: argparse.Namespace) -> Observer:
    """Begins to sample into a file."""
    cadence = Cadence(num_steps=options.steps, every=options.steps)
    device = gpu_runs.device_of(options)
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return watch_gpu(device, visible, path, cadence, interval_ms=options.interval_ms)
    gpu = Gpu(STAND_IN, "none", None)
    return GpuWatch(gpu, path, cadence, interval_s=options.interval_ms / 1000).observer()


def measure(name: str, options: argparse.Namespace, work: Path, until: float) -> dict[str, Any]:
    """Some steps with and without someone who asks, in turn."""
    device = gpu_runs.device_of(options)
    model_name, kind = name.split(" ")
    groups = gpu_runs.draw_pairs(model_name, options)
    trainer = ours.trainer_of(*gpu_runs.build(model_name, kind, options, work, groups), groups)
    step = ours.step_of(trainer)
    files: list[Path] = []

    def steps() -> Mapping[str, float]:
        for _ in range(options.steps):
            facts = step()
            trainer.observers.step_done(trainer.step)
        return facts

    def alone() -> timing.Sample:
        trainer.observers = Observers()
        return timing.timed(steps, wait=lambda: gpu_runs.wait_for(device))

    def watched() -> timing.Sample:
        files.append(work / f"{name.replace(' ', '-')}-{len(files)}.csv")
        with Observers([start_watch(files[-1], options)]) as trainer.observers:
            return timing.timed(steps, wait=lambda: gpu_runs.wait_for(device))

    found = timing.interleave(
        {"alone": alone, "watched": watched}, repeats=options.repeats, warmup=options.warmup, until=until
    )
    ratios, _ = results.compare([("watched", "alone")], found.samples, dict.fromkeys(VARIANTS, 1.0))
    rounds = [read_samples(path) for path in files[options.warmup :]]
    return {
        "cell": name,
        "rounds": found.rounds,
        "ratios": {label: asdict(value) for label, value in ratios.items()},
        "variants": {label: asdict(timing.Timing.of(samples)) for label, samples in found.samples.items()},
        "samples": sum(map(len, rounds)),
        "milliseconds_between": milliseconds_between(rounds),
        "values": {value: summed([row[value] for rows in rounds for row in rows]) for value in VALUES},
        "torch": torch_says(device),
    }


def read_samples(path: Path) -> list[dict[str, str]]:
    """Rows of gpu.csv."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def milliseconds_between(rounds: Sequence[Sequence[Mapping[str, str]]]) -> float | None:
    """Median time from one sample to the next."""
    gaps = [
        1000 * (float(after["seconds"]) - float(before["seconds"]))
        for rows in rounds
        for before, after in itertools.pairwise(rows)
    ]
    return statistics.median(gaps) if gaps else None


def summed(texts: Sequence[str]) -> dict[str, float] | None:
    """Mean, least and most; None for what the device does not tell."""
    known = [float(text) for text in texts if text]
    return {"mean": statistics.fmean(known), "low": min(known), "high": max(known)} if known else None


def torch_says(device: torch.device) -> dict[str, float]:
    """What PyTorch knows of the same device: another one would have another size, or less in use."""
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    return {"memory_total_gib": total / 2**30, "memory_reserved_gib": torch.cuda.memory_reserved(device) / 2**30}


def page_of(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    """The page so far."""
    show = results.show

    def shown(found: Mapping[str, float] | None) -> str:
        return "–" if found is None else f"{show(found['mean'])} ({show(found['low'])} to {show(found['high'])})"

    ratios = [
        [
            cell["cell"],
            f"**{ratio['value']:.3f}** ({ratio['low']:.3f} to {ratio['high']:.3f})",
            cell["samples"],
            show(cell["milliseconds_between"]),
        ]
        for cell in cells
        for ratio in cell["ratios"].values()
    ]
    body = [[cell["cell"], *(shown(cell["values"][value]) for value in VALUES)] for cell in cells]
    return [
        f"# {gpu_runs.device_name(options)}, sampled",
        "",
        f"Seconds of {options.steps} steps with `--track-gpu` over seconds without, interleaved rounds "
        f"({', '.join(str(cell['rounds']) for cell in cells)} of {options.repeats}), medians; a sample is asked for "
        f"every {options.interval_ms} ms.",
        "",
        results.table(["model, kind", "watched over alone", "samples", "ms between samples"], ratios),
        "What NVML says meanwhile, mean (least to most):",
        "",
        results.table(["model, kind", *VALUES], body),
        *(
            f"{cell['cell']}: PyTorch says {cell['torch']['memory_total_gib']:.1f} GiB in all, "
            f"{cell['torch']['memory_reserved_gib']:.1f} GiB reserved by this process.\n"
            for cell in cells
            if cell["torch"]
        ),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=None, metavar="MODEL KIND")
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--interval-ms", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    gpu_runs.add_flags(parser)
    options = parser.parse_args(arguments)
    options.cells = options.cells or (["tiny full"] if options.tiny else ["0.5b full", "3b lora"])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; the result is written again after each. 1 if one could not run."""
    options = parse(arguments)
    _, sound = gpu_runs.run_cells("gpu_nvml", options, options.cells, measure=measure, page=page_of)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
