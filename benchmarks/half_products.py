"""Half precision where the processor has no fast products of it: products in float32 beside those of PyTorch.

    scripts/bench half_products
    scripts/bench half_products --set lora=true

A training step, and an evaluation of its pairs, in float32, in half precision as rewardlab computes it, and in half
precision with PyTorch's own products, in turn. Where PyTorch has fast ones the last two are the same, and the page says
so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from harness import machine, ours, results, timing, workload
from rewardlab.core.types import TokenGroup
from rewardlab.evaluation.evaluate import evaluate_groups
from rewardlab.model import linear
from rewardlab.model.load import PRECISION
from rewardlab.training.loop.reward_trainer import RewardTrainer

CPU = torch.device("cpu")
EXACT, OURS, TORCH = "float32", "half precision", "half precision, PyTorch's products"
Work = Callable[[], Mapping[str, float]]


def without_widening(work: Work) -> Mapping[str, float]:
    """The same with PyTorch's own products."""
    with mock.patch.object(linear, "WIDENED", frozenset()):
        return work()


def evaluation_of(trainer: RewardTrainer, groups: Sequence[TokenGroup], budget: int) -> Work:
    """Judges the groups by the model as it is."""

    def evaluate() -> Mapping[str, float]:
        found = evaluate_groups(trainer.model, groups, beta=1.0, budget=budget, progress="judging")
        return {"rows": float(len(found.rows))}

    return evaluate


def times_of(works: Mapping[str, Work], rounds: int) -> Mapping[str, Sequence[timing.Sample]]:
    """Samples of each way, in turn."""
    return timing.interleave(
        {
            name: partial(timing.timed, partial(without_widening, work) if name == TORCH else work)
            for name, work in works.items()
        },
        repeats=rounds,
        warmup=1,
    ).samples


def lines_about(what: str, samples: Mapping[str, Sequence[timing.Sample]]) -> list[str]:
    """A table and its ratios."""
    times = {name: timing.Timing.of(own) for name, own in samples.items()}
    gain, cost = timing.ratio(samples[TORCH], samples[OURS]), timing.ratio(samples[OURS], samples[EXACT])
    return [
        results.table([f"{what} in", "seconds"], [[name, results.spread(asdict(own))] for name, own in times.items()]),
        f"PyTorch's products take **{gain.value:.2f}** times as long ({gain.low:.2f} to {gain.high:.2f}; of CPU "
        f"seconds {gain.cpu:.2f}). Beside float32, half precision takes {cost.value:.2f} times as long "
        f"({cost.low:.2f} to {cost.high:.2f}).",
        "",
    ]


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
    steps: dict[str, Work] = {}
    evaluations: dict[str, Work] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        data = workload.read_rows(options.data, options.pairs, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        for name, precision in ((EXACT, "fp32"), (OURS, options.precision), (TORCH, options.precision)):
            config = ours.settings(folder, {**ours.step_settings(options), "precision": precision})
            trainer = ours.build_trainer(config, groups, sharing=True, device=CPU)
            steps[name] = ours.step_of(trainer)
            evaluations[name] = evaluation_of(trainer, groups, config.run.token_budget)
    samples = {
        "a training step": times_of(steps, options.rounds),
        "an evaluation": times_of(evaluations, options.rounds),
    }
    widened = PRECISION[options.precision] in linear.WIDENED
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    kind = "lora" if config.model.lora else "full"
    results.write(
        "half_products",
        f"{data.name}.{kind}.{options.layers or 'all'}-layers.{options.precision}",
        page=[
            "# Half precision without fast products of it",
            "",
            f"{Path(options.model).name}, {depth}, {options.pairs} pairs of {data.name}, {data.fixed_by}, "
            f"{'LoRA' if config.model.lora else 'all weights'}. {options.rounds} interleaved rounds; medians of "
            f"seconds, with the lowest and the highest round in brackets.",
            "",
            "PyTorch has no fast products of it on this processor, so rewardlab computes them in float32."
            if widened
            else "**PyTorch has fast products of it on this processor**: rewardlab takes them, and the last two lines "
            "are of the same code.",
            "",
            *(line for what, own in samples.items() for line in lines_about(what, own)),
        ],
        data={
            "widened": widened,
            "samples": {
                what: {name: [asdict(one) for one in each] for name, each in own.items()}
                for what, own in samples.items()
            },
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
