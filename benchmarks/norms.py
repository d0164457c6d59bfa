"""RMSNorm in training on the CPU: PyTorch's operations beside `--norm-backend blockwise`, alone and in a whole step.

    scripts/bench norms

First a training step with each backend, in turn, then single norms, forward and backward, with as many rows as the
norms of that step had. Ends with an error if a loss of the two, or an output of a norm, differs in any bit. For that
the learning rate is zero: gradients of the two differ by rounding, and so would weights that move by them. The step
computes what any other does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import machine, ours, results, timing, workload
from rewardlab.model import norm
from rewardlab.training.loop.reward_trainer import RewardTrainer

CPU = torch.device("cpu")
TORCH, BLOCKWISE = "torch", "blockwise"
ROWS_A_SAMPLE = 60_000
"""A sample of a single norm is as many calls as make up these rows: a tenth of a second and more."""


@dataclass(frozen=True, kw_only=True)
class Single:
    """One norm, forward and backward, of so many rows: both ways, in turn."""

    rows: int
    width: int
    in_step: int
    """Norms of the step with as many rows."""
    calls: int
    """Of a sample."""
    samples: Mapping[str, Sequence[timing.Sample]]
    equal: bool
    """Whether the outputs are the same to the bit."""
    gradients_apart: float
    """L2 distance of the gradients of rows and weight, as a part of their norm; the larger of the two."""

    def milliseconds(self, name: str) -> tuple[float, float, float]:
        """(median, lowest, highest) of a call."""
        found = timing.Timing.of(self.samples[name])
        scale = 1e3 / self.calls
        return scale * found.wall, scale * found.wall_low, scale * found.wall_high

    @property
    def saved(self) -> float:
        """Milliseconds that the norms of the step with as many rows should save together."""
        return self.in_step * (self.milliseconds(TORCH)[0] - self.milliseconds(BLOCKWISE)[0])


def norms_of(trainer: RewardTrainer) -> dict[str, nn.Module]:
    """The norms of a trainer's model that compute blockwise, by name. SystemExit if there are none."""
    named = trainer.model.backbone.named_modules()
    found = {name: child for name, child in named if isinstance(child, norm.ReplacedNorm)}
    if not found:
        raise SystemExit(
            "this model has no RMSNorm that can be computed blockwise. Take one of LLaMA's or Qwen's kind."
        )
    return found


def layers_by_width(trainers: Mapping[str, RewardTrainer]) -> dict[int, dict[str, nn.Module]]:
    """Width -> the first norm of that width, as both trainers compute it."""
    plain = dict(trainers[TORCH].model.backbone.named_modules())
    found: dict[int, dict[str, nn.Module]] = {}
    for name, layer in norms_of(trainers[BLOCKWISE]).items():
        found.setdefault(len(layer.weight), {TORCH: plain[name], BLOCKWISE: layer})
    return found


def shapes_of(step: Callable[[], object], layers: Iterable[nn.Module]) -> Counter[tuple[int, int]]:
    """(rows, width) of the norms of a step -> how often it computes one. SystemExit if they are not in float32."""
    found: Counter[tuple[int, int]] = Counter()

    def count(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        (rows,) = given
        if rows.dtype is not torch.float32:
            raise SystemExit(f"norms of this step have rows of {rows.dtype}, and only float32 is computed blockwise.")
        found[rows.numel() // rows.shape[-1], rows.shape[-1]] += 1

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(count).remove)
        step()
    return found


def gradients(layer: nn.Module, rows: Tensor, outward: Tensor) -> tuple[Tensor, ...]:
    """Of rows and weight, after a forward pass."""
    return torch.autograd.grad(layer(rows), (rows, layer.weight), outward)


def repeat(layer: nn.Module, rows: Tensor, outward: Tensor, *, calls: int) -> Mapping[str, float]:
    """A sample of a norm, which has no facts."""
    for _ in range(calls):
        gradients(layer, rows, outward)
    return {}


def measure_single(layers: Mapping[str, nn.Module], shape: tuple[int, int], *, in_step: int, rounds: int) -> Single:
    """A norm of the model in both ways, on random rows."""
    draw = torch.Generator().manual_seed(0)
    rows, outward = (torch.randn(1, *shape, generator=draw) for _ in range(2))
    rows.requires_grad_()
    outputs = [layer(rows) for layer in layers.values()]
    plain, blockwise = (gradients(layer, rows, outward) for layer in (layers[TORCH], layers[BLOCKWISE]))
    calls = max(1, ROWS_A_SAMPLE // shape[0])
    works = {name: partial(repeat, layer, rows, outward, calls=calls) for name, layer in layers.items()}
    found = timing.interleave(
        {name: partial(timing.timed, work) for name, work in works.items()}, repeats=rounds, say=lambda line: None
    )
    return Single(
        rows=shape[0],
        width=shape[1],
        in_step=in_step,
        calls=calls,
        samples=found.samples,
        equal=torch.equal(*outputs),
        gradients_apart=max(float((a - b).norm() / a.norm()) for a, b in zip(plain, blockwise, strict=True)),
    )


def page_of(
    steps: Mapping[str, Sequence[timing.Sample]], singles: Sequence[Single], differ: Sequence[str], what: str
) -> list[str]:
    """The page."""
    times = {name: timing.Timing.of(samples) for name, samples in steps.items()}
    gain = timing.ratio(steps[TORCH], steps[BLOCKWISE])
    by_round = [a.wall / b.wall for a, b in zip(steps[TORCH], steps[BLOCKWISE], strict=True)]
    saved = sum(one.saved for one in singles)
    rows: list[list[object]] = []
    for one in singles:
        ratio = timing.ratio(one.samples[TORCH], one.samples[BLOCKWISE])
        times_of_one = [
            f"{results.show(middle)} ({results.show(low)} to {results.show(high)})"
            for middle, low, high in (one.milliseconds(TORCH), one.milliseconds(BLOCKWISE))
        ]
        ratios = [f"**{ratio.value:.2f}**", f"{ratio.low:.2f} to {ratio.high:.2f}", f"{ratio.cpu:.2f}"]
        rows.append([f"{one.rows:,} of {one.width:,}", one.in_step, *times_of_one, *ratios])
    columns = ["`torch`", "`blockwise`", "ratio", "rounds, low to high", "of CPU seconds"]
    count = len(by_round)
    return [
        "# RMSNorm: PyTorch's operations, and a few rows at a time",
        "",
        f"{what}. {count} interleaved rounds; medians, with the lowest and the highest round in brackets. Ratios are "
        f"`torch` over `blockwise`.",
        "",
        "A training step, in seconds:",
        "",
        results.table(
            columns,
            [
                [
                    *(results.spread(asdict(times[name])) for name in (TORCH, BLOCKWISE)),
                    f"**{gain.value:.3f}**",
                    f"{gain.low:.3f} to {gain.high:.3f}",
                    f"{gain.cpu:.3f}",
                ]
            ],
        ),
        f"Round by round: {', '.join(f'{one:.3f}' for one in by_round)}.",
        "",
        "One RMSNorm in float32, forward and backward, in milliseconds:",
        "",
        results.table(["rows", "in a step", *columns], rows),
        f"By the second table the norms of a step should save {saved:.1f} ms, which is "
        f"{saved / 1e3 / times[TORCH].wall:.1%} of it. Rows with a 0 are not the step's: `--rows`, by default as many "
        f"as `auto` measures with.",
        "",
        "Losses of all steps and outputs of all norms are the same to the bit. The learning rate is zero."
        if not differ
        else f"**Not the same to the bit**: {'; '.join(differ)}.",
        f"Gradients of single norms are at most {max(one.gradients_apart for one in singles):.1e} apart, as a part of "
        f"their size.",
        "",
    ]


def differences(steps: Mapping[str, Sequence[timing.Sample]], singles: Sequence[Single]) -> list[str]:
    """What is not the same to the bit, in words."""
    losses = zip(*([sample.facts["loss"] for sample in steps[name]] for name in (TORCH, BLOCKWISE)), strict=True)
    found = [f"loss of round {n}, {a!r} and {b!r}" for n, (a, b) in enumerate(losses, start=1) if a != b]
    return found + [f"output of {one.rows} rows of {one.width}" for one in singles if not one.equal]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure steps and norms, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours.add_step_flags(parser, pairs=16)
    parser.set_defaults(data=workload.GENERATED)
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument(
        "--precision",
        default="bf16" if machine.has_bf16(CPU) else "fp32",
        choices=["fp32", "bf16"],
        help="of the step; by default bf16 where the processor has it",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--rows", nargs="*", type=int, default=[norm.SPEED_ROWS], help="of single norms, besides those of the step"
    )
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    trainers: dict[str, RewardTrainer] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        data = workload.read_rows(options.data, options.pairs, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        for name in (TORCH, BLOCKWISE):
            config = ours.settings(folder, {**ours.step_settings(options), "norm_backend": name})
            trainers[name] = ours.build_trainer(config, groups, sharing=True, device=CPU)
            ours.hold_weights(trainers[name])
    works = {name: ours.step_of(trainer) for name, trainer in trainers.items()}
    # The first step makes the optimiser's state. Both take it, since in bf16 each step draws the rounding of weights.
    shapes = shapes_of(works[BLOCKWISE], norms_of(trainers[BLOCKWISE]).values())
    works[TORCH]()
    steps = timing.interleave(
        {name: partial(timing.timed, work) for name, work in works.items()}, repeats=options.rounds, warmup=0
    ).samples
    layers = layers_by_width(trainers)
    asked = dict.fromkeys([*sorted(shapes, reverse=True), *((count, max(layers)) for count in options.rows)])
    singles = [measure_single(layers[shape[1]], shape, in_step=shapes[shape], rounds=options.rounds) for shape in asked]
    differ = differences(steps, singles)
    what = ours.step_words(options, data, trainers[TORCH].model)
    results.write(
        "norms",
        f"{data.name}.{options.layers or 'all'}-layers.{options.precision}",
        page=page_of(steps, singles, differ, what),
        data={
            "ratio": asdict(timing.ratio(steps[TORCH], steps[BLOCKWISE])),
            "steps": {name: [asdict(one) for one in samples] for name, samples in steps.items()},
            "norms": [asdict(one) for one in singles],
            "differ": differ,
            "lr": max(rate for trainer in trainers.values() for rate in trainer.schedule.get_last_lr()),
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    for line in differ:
        print(f"not the same to the bit: {line}", file=sys.stderr)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
