"""Half precision on processors without instructions for it: products in float32 beside those of PyTorch, in training.

    scripts/bench half_products

A step in float32, in half precision as rewardlab computes it, and in half precision with PyTorch's own products, in
turn. On a processor that has such instructions the last two are the same, and the page says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from harness import machine, ours, results, timing, workload
from rewardlab.model import linear
from rewardlab.model.load import PRECISION

CPU = torch.device("cpu")
EXACT, OURS, TORCH = "float32", "half precision", "half precision, PyTorch's products"


def without_widening(step: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """A step with PyTorch's own products."""
    own, linear.WIDENED = linear.WIDENED, frozenset()  # type: ignore[misc]
    try:
        return step()
    finally:
        linear.WIDENED = own  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> int:
    """Measure the three, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours.add_step_flags(parser, pairs=16)
    parser.set_defaults(data=workload.GENERATED)
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--rounds", type=int, default=5)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    works: dict[str, Callable[[], Mapping[str, float]]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        data = workload.read_rows(options.data, options.pairs, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        for name, precision in ((EXACT, "fp32"), (OURS, options.precision), (TORCH, options.precision)):
            config = ours.settings(folder, {**ours.step_settings(options), "precision": precision})
            step = ours.step_of(ours.build_trainer(config, groups, sharing=True, device=CPU))
            works[name] = partial(without_widening, step) if name == TORCH else step
    samples = timing.interleave(
        {name: partial(timing.timed, one) for name, one in works.items()}, repeats=options.rounds, warmup=1
    ).samples
    times = {name: timing.Timing.of(own) for name, own in samples.items()}
    gain, cost = timing.ratio(samples[TORCH], samples[OURS]), timing.ratio(samples[OURS], samples[EXACT])
    widened = PRECISION[options.precision] in linear.WIDENED
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    results.write(
        "half_products",
        f"{data.name}.{options.layers or 'all'}-layers.{options.precision}",
        page=[
            "# Half precision without instructions for it",
            "",
            f"{Path(options.model).name}, {depth}, {options.pairs} pairs of {data.name}, {data.fixed_by}, "
            f"{' '.join(options.set) or 'all weights'}. {options.rounds} interleaved rounds of a training step; "
            f"medians of seconds, with the lowest and the highest round in brackets.",
            "",
            "This processor has no instructions for it, so rewardlab computes its products in float32."
            if widened
            else "**This processor has instructions for it**: rewardlab takes PyTorch's products, and the last two "
            "lines are of the same code.",
            "",
            results.table(
                ["a step in", "seconds"], [[name, results.spread(asdict(own))] for name, own in times.items()]
            ),
            f"PyTorch's products take **{gain.value:.2f}** times as long ({gain.low:.2f} to {gain.high:.2f}; of CPU "
            f"seconds {gain.cpu:.2f}). Beside float32 a step in half precision takes {cost.value:.2f} times as long "
            f"({cost.low:.2f} to {cost.high:.2f}).",
            "",
        ],
        data={
            "widened": widened,
            "gain": asdict(gain),
            "beside_float32": asdict(cost),
            "samples": {name: [asdict(one) for one in own] for name, own in samples.items()},
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
