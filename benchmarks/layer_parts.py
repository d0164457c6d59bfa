"""Norms, rotary embeddings and gated feed-forward parts in training on the CPU: transformers' operations beside ours.

    scripts/bench layer_parts

A training step in turn with all three of transformers, with each alone computed here, and with all three; and the bytes
that a micro-batch's forward pass keeps for its backward pass. Ends with an error if a loss differs in any bit from that
of transformers' operations. For that the learning rate is zero: gradients may differ by rounding, and so would weights
that move by them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from harness import machine, ours, results, timing, workload
from harness.storages import Storages
from rewardlab.model import applying
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.loop.reward_trainer import RewardTrainer
from rewardlab.training.settings.config import LossConfig

CPU = torch.device("cpu")
PARTS: Mapping[str, str] = {"norms": "use_norms", "rotary": "use_rotations", "gated": "use_gated_products"}
"""Part -> the function that makes a model compute it here."""
PLAIN, ALL = "transformers", "all three"
VARIANTS: Mapping[str, frozenset[str]] = {
    PLAIN: frozenset(),
    **{name: frozenset([name]) for name in PARTS},
    ALL: frozenset(PARTS),
}


def trainer_with(
    parts: frozenset[str], folder: Path, groups: Sequence[object], options: argparse.Namespace
) -> RewardTrainer:
    """A trainer whose model computes these parts here and leaves the others to transformers."""
    fixed = {**ours.step_settings(options), "norm_backend": "blockwise" if "norms" in parts else "torch"}
    with ExitStack() as stack:
        for name, function in PARTS.items():
            if name not in parts:
                stack.enter_context(mock.patch.object(applying, function, return_value=0))
        trainer = ours.build_trainer(ours.settings(folder, fixed), groups, sharing=True, device=CPU)
    ours.hold_weights(trainer)
    return trainer


def kept_by(trainer: RewardTrainer) -> int:
    """Bytes that the forward pass of a step's first micro-batch keeps for its backward pass."""
    batch = trainer._planned(trainer.step)[0]
    trainer.model(batch)  # makes the copies in half precision, which stay
    made = Storages()
    with made:
        loss = preference_loss(trainer.model(batch), batch, LossConfig())
    own = {parameter.untyped_storage()._cdata for parameter in trainer.model.parameters()}
    assert loss.requires_grad
    return sum(size for number, size in made.alive().items() if number not in own)


def page_of(
    samples: Mapping[str, Sequence[timing.Sample]], kept: Mapping[str, int], differ: Sequence[str], what: str
) -> list[str]:
    """The page."""
    rows: list[list[object]] = []
    for name, own in samples.items():
        gain = timing.ratio(samples[PLAIN], own)
        spread = f"{gain.low:.3f} to {gain.high:.3f}"
        times = results.spread(asdict(timing.Timing.of(own)))
        memory = [f"{kept[name] / 1e6:,.0f}", f"{kept[name] / kept[PLAIN]:.2f}"]
        rows.append([f"`{name}`", times, f"**{gain.value:.3f}**", spread, f"{gain.cpu:.3f}", *memory])
    count = len(samples[PLAIN])
    return [
        "# Parts of a layer: transformers' operations, and ours",
        "",
        f"{what}. {count} interleaved rounds; medians, with the lowest and the highest round in brackets. Ratios are "
        f"`{PLAIN}` over the variant.",
        "",
        results.table(
            ["computed here", "a step, seconds", "faster by", "rounds", "of CPU seconds", "kept, MB", "share"], rows
        ),
        "`kept`: what the forward pass of the first micro-batch keeps for its backward pass.",
        "",
        "Losses of all steps are the same to the bit. The learning rate is zero."
        if not differ
        else f"**Not the same to the bit**: {'; '.join(differ)}.",
        "",
    ]


def differences(samples: Mapping[str, Sequence[timing.Sample]]) -> list[str]:
    """What is not the same to the bit, in words."""
    wanted = [sample.facts["loss"] for sample in samples[PLAIN]]
    return [
        f"{name}, loss of round {number}: {one.facts['loss']!r} and not {loss!r}"
        for name, own in samples.items()
        for number, (one, loss) in enumerate(zip(own, wanted, strict=True), start=1)
        if one.facts["loss"] != loss
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours.add_step_flags(parser, pairs=16)
    parser.set_defaults(data=workload.GENERATED)
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of the step")
    parser.add_argument("--rounds", type=int, default=9)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        data = workload.read_rows(options.data, options.pairs, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        trainers = {name: trainer_with(parts, folder, groups, options) for name, parts in VARIANTS.items()}
    kept = {name: kept_by(trainer) for name, trainer in trainers.items()}
    works = {name: partial(timing.timed, ours.step_of(trainer)) for name, trainer in trainers.items()}
    samples = timing.interleave(works, repeats=options.rounds, warmup=1).samples
    differ = differences(samples)
    what = ours.step_words(options, data, trainers[PLAIN].model)
    results.write(
        "layer_parts",
        f"{data.name}.{options.layers or 'all'}-layers.{options.precision}",
        page=page_of(samples, kept, differ, what),
        data={
            "steps": {name: [asdict(one) for one in own] for name, own in samples.items()},
            "ratios": {name: asdict(timing.ratio(samples[PLAIN], own)) for name, own in samples.items()},
            "kept": kept,
            "differ": differ,
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
