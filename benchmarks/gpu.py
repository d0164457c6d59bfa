"""Training steps on one GPU with random weights: Qwen2.5 shapes, lengths like HH's, SHP's and UltraFeedback's."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import flops, gpu_runs, machine, ours, peers, results, timing
from harness.gpu_runs import DATA, MODELS, PAIRS, scaled
from harness.random_model import build, config_folder, random_weights
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import read_config, resolve_precision
from rewardlab.model.reward import disk_name
from rewardlab.training.cost.peak_flops import makers_peak_flops
from rewardlab.training.cost.throughput import PeakFlops
from rewardlab.training.loop.reward_trainer import RewardTrainer
from rewardlab.training.settings.config import RewardTrainerConfig

VARIANTS: Mapping[str, str] = {
    "ours": "rewardlab: packed rows, each prompt once",
    "packed": "rewardlab without sharing prompts",
    "sorted": "a plain loop over padded micro-batches of pairs sorted by length",
    "trl-no-gc": "stand-in for TRL's compute: its collator's rule, --per-device pairs a micro-batch in random order, "
    "without gradient checkpointing; TRL itself does not run here",
    "trl": "the same stand-in with gradient checkpointing, which is TRL's default",
}
COMPARED = (("sorted", "ours"), ("trl-no-gc", "ours"), ("trl", "ours"), ("packed", "ours"))
Step = Callable[[], Mapping[str, float]]


class Bench:
    """One model in one kind of training, ours and the padded peer's, with the weights shared where they can be."""

    def __init__(self, name: str, data: str, kind: str, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.device = torch.device(options.device)
        folder = config_folder(work / name, MODELS[name])
        longest = 128 if options.tiny else options.max_seq_len
        self.pairs = options.pairs or PAIRS[name]
        vocabulary = read_config(folder).vocab_size
        lengths = scaled(DATA[data], 0.2) if options.tiny else DATA[data]
        self.groups = lengths.draw(self.pairs, longest=longest, vocabulary=vocabulary, seed=0)
        self.fixed = {
            "batch_size": self.pairs,
            "max_seq_len": longest,
            "precision": resolve_precision(options.precision, self.device),
            "lora": kind == "lora",
        } | ours.parse_settings(options.set)
        self.config = ours.settings(folder, self.fixed)
        self.half = self.config.model.precision == "bf16"
        self.shape = flops.shape_of(
            ours.config_of(folder), lora_rank=self.config.model.lora_rank if self.config.model.lora else 0
        )
        self.trainer = self._trainer(self.config)
        self.resident: dict[str, nn.Module] = {}
        self.own: dict[str, torch.optim.Optimizer] = {}
        self.budgets: dict[str, int] = {}
        """Tokens that a micro-batch may have, of the variants that count tokens."""

    def _trainer(self, config: RewardTrainerConfig) -> RewardTrainer:
        with random_weights(seed=0, device=self.device):
            return ours.build_trainer(config, self.groups, sharing=True, device=self.device)

    def steppers(self) -> dict[str, timing.Stepper]:
        """One for each variant asked for."""
        steps: dict[str, timing.Stepper] = {}
        wanted = [name for name in VARIANTS if name in self.options.variants]
        for name in wanted:
            if name in ("ours", "packed"):
                layout = "shared" if name == "ours" else "unshared"
                steps[name] = self._ours(name, self.trainer, layout)
        for label, *more in self.options.also:
            config = ours.settings(self.config.model.model, self.fixed | ours.parse_settings(more))
            trainer = self._trainer(config)
            if adopt(trainer.model, dict(self.trainer.model.named_parameters())):
                trainer.optimizer = self.trainer.optimizer
            steps[label] = self._ours(label, trainer, "shared")
        peer_names = [name for name in wanted if name not in ("ours", "packed")]
        if peer_names:
            peer, optimizer = self._peer()
            for name in peer_names:
                order = peers.random_order(self.options.per_device)
                if name == "sorted":
                    self.budgets[name] = self.options.sorted_budget or self.config.run.token_budget
                    order = peers.sorted_order(self.budgets[name])
                loop = peers.PaddedLoop(
                    peer, self.groups, self.config, order=order, half=self.half, pad=0, optimizer=optimizer
                )
                optimizer = loop.optimizer
                steps[name] = self._padded(name, loop, checkpointing=name == "trl")
        return steps

    def _ours(self, name: str, trainer: RewardTrainer, layout: Any) -> timing.Stepper:
        self.resident[name], self.own[name] = trainer.model, trainer.optimizer
        self.budgets[name] = trainer.token_budget
        step = ours.step_of(trainer)

        def run() -> timing.Sample:
            trainer.model.layout = layout
            trainer._next = None  # planned ahead for the layout before
            return self._timed(name, step)

        return run

    def _peer(self) -> tuple[Any, torch.optim.Optimizer | None]:
        """transformers' classifier on our weights, its optimiser ours too; on its own where they cannot be shared."""
        config = read_config(self.config.model.model)
        config.num_labels, config.pad_token_id = 1, 0
        peer = build(disk_class_of(config), config, self.options.peer_attention, seed=0, device=self.device)
        if self.config.model.lora:
            return peers.with_adapters(peer, self.config, half=self.half), None
        model = self.trainer.model
        mine = {disk_name(name, model.disk_class): parameter for name, parameter in model.named_parameters()}
        return peer, self.trainer.optimizer if adopt(peer, mine) else None

    def _padded(self, name: str, loop: peers.PaddedLoop, *, checkpointing: bool) -> timing.Stepper:
        self.resident[name], self.own[name] = loop.model, loop.optimizer

        def run() -> timing.Sample:
            torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default, which a peer has and ours turns off
            if checkpointing:
                loop.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                loop.model.gradient_checkpointing_disable()
            return self._timed(name, loop.step)

        return run

    def _timed(self, name: str, step: Step) -> timing.Sample:
        """A sample with its peak memory: this variant's weights and optimiser, and what the step takes above."""
        if self.device.type != "cuda":
            return timing.timed(step)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            sample = timing.timed(step, wait=torch.cuda.synchronize)
        except torch.OutOfMemoryError:
            self.own[name].zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            raise
        above = torch.cuda.max_memory_allocated() - before
        held = sum(parameter.nbytes for parameter in self.resident[name].parameters())
        states = sum(
            value.nbytes
            for state in self.own[name].state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        facts = {**sample.facts, "peak_memory_gb": (above + held + states) / 2**30}
        return timing.Sample(wall=sample.wall, cpu=sample.cpu, facts=facts)


def adopt(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Put these parameters in place of the module's own, if they are the same by name and shape."""
    own = {name: parameter.shape for name, parameter in module.named_parameters()}
    if own != {name: parameter.shape for name, parameter in parameters.items()}:
        return False
    for name, parameter in parameters.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, parameter)
    return True


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=None, choices=list(MODELS), help="by default 0.5b and 3b")
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--kinds", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of ours and of packed")
    parser.add_argument("--also", nargs="+", action="append", default=[], metavar=("LABEL", "NAME=VALUE"))
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--pairs", type=int, default=None, help="a step; by default 64 (0.5b) and 32 (3b)")
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--per-device", type=int, default=8, help="pairs of the TRL stand-in's micro-batch")
    parser.add_argument(
        "--sorted-budget",
        type=int,
        default=None,
        help="padded tokens of the sorted loop's micro-batch; by default the micro-token-budget of ours",
    )
    parser.add_argument("--peer-attention", default="sdpa", help="attn_implementation of sorted and trl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=None,
        help="the GPU's dense peak; by default that of rewardlab's table, or the best matrix product of the run",
    )
    parser.add_argument("--peak-seconds", type=float, default=0.4, help="for each matrix product of the peak")
    gpu_runs.add_flags(parser)
    options = parser.parse_args(arguments)
    options.models = options.models or (["tiny"] if options.tiny else ["0.5b", "3b"])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; the result is written again after each. 1 if one could not run."""
    options = parse(arguments)
    warnings.simplefilter("ignore", FutureWarning)
    names = [f"{model} {data} {kind}" for data in options.data for model in options.models for kind in options.kinds]
    _, sound = gpu_runs.run_cells("gpu", options, names, measure=run_cell, page=page_of)
    return 0 if sound else 1


def run_cell(name: str, options: argparse.Namespace, work: Path, end: float) -> dict[str, Any]:
    """Measure one cell."""
    bench = Bench(*name.split(" "), options, work)
    rows = 256 if options.tiny else 8192
    peak = machine.matmul_peak(
        bench.shape.products,
        machine.PRECISION[bench.config.model.precision],
        bench.device,
        rows=rows,
        seconds=options.peak_seconds,
    )
    found = timing.interleave(
        bench.steppers(),
        repeats=options.repeats,
        warmup=options.warmup,
        until=end,
        tolerate=(torch.OutOfMemoryError,),
    )
    over = mfu_peak(options.peak_tflops, bench.device, bench.config.model.precision, peak)
    variants = {}
    for label, samples in found.samples.items():
        summed = timing.Timing.of(samples)
        useful = flops.useful_work(bench.groups, sharing=label not in ("packed", "sorted", "trl", "trl-no-gc"))
        rate = bench.shape.train_flops(useful) / summed.wall / 1e12
        variants[label] = {
            **asdict(summed),
            "pairs_per_second": bench.pairs / summed.wall,
            "tokens_computed": summed.facts["tokens"],
            "tokens_useful": useful.tokens,
            "tflops_useful": rate,
            "mfu": 1e12 * rate / over.flops,
            "of_measured_peak": 1000 * rate / peak.gflops,
            "peak_memory_gb": max(one.facts.get("peak_memory_gb", 0.0) for one in samples) or None,
            "micro_token_budget": bench.budgets.get(label),
        }
    pairs = [*COMPARED, *((label, "ours") for label in variants if label not in VARIANTS)]
    tokens = {label: facts["tokens_computed"] for label, facts in variants.items()}
    ratios, token_ratios = results.compare(pairs, found.samples, tokens)
    return {
        "cell": name,
        "pairs": bench.pairs,
        "precision": bench.config.model.precision,
        "rounds": found.rounds,
        "failed": dict(found.failed),
        "ratios": {label: asdict(value) for label, value in ratios.items()},
        "token_ratios": token_ratios,
        "variants": variants,
        "samples": {label: [asdict(one) for one in samples] for label, samples in found.samples.items()},
        "matmul_peak": asdict(peak),
        "mfu_peak": asdict(over),
        "mean_lengths": mean_lengths(bench.groups),
    }


def mfu_peak(given: float | None, device: torch.device, precision: str, measured: machine.Peak) -> PeakFlops:
    """What MFU is over: the TF/s given, else the maker's number in this arithmetic, else what was measured."""
    if given is not None:
        return PeakFlops(flops=given * 1e12, source="--peak-tflops")
    shape = "×".join(map(str, measured.shape))
    return makers_peak_flops(device, machine.PRECISION[precision]) or PeakFlops(
        flops=measured.gflops * 1e9, source=f"measured, {precision} matmul of {shape}"
    )


def mean_lengths(groups: Sequence[Any]) -> dict[str, float]:
    """Tokens of prompt, chosen and rejected."""
    return {
        "prompt": sum(len(group.shared) for group in groups) / len(groups),
        "chosen": sum(len(group.suffixes[0]) for group in groups) / len(groups),
        "rejected": sum(len(group.suffixes[1]) for group in groups) / len(groups),
    }


def page_of(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    """The page so far."""
    show = results.show
    heads = list(dict.fromkeys(label for cell in cells for label in cell["ratios"]))
    ratios = [
        [
            cell["cell"],
            *(
                f"**{cell['ratios'][label]['value']:.2f}** ({cell['token_ratios'][label]:.2f})"
                if label in cell["ratios"]
                else "–"
                for label in heads
            ),
        ]
        for cell in cells
    ]
    body = [
        [
            cell["cell"],
            label,
            show(facts["pairs_per_second"]),
            results.spread(facts),
            show(facts["tokens_computed"]),
            show(facts["tokens_useful"]),
            f"{facts['mfu']:.1%}",
            f"{facts['of_measured_peak']:.1%}",
            show(facts["peak_memory_gb"]),
        ]
        for cell in cells
        for label, facts in cell["variants"].items()
    ]
    failed = [f"{cell['cell']}, {label}: {why}" for cell in cells for label, why in cell["failed"].items()]
    chosen = f" `ours` and `packed` with {' '.join(options.set)}." if options.set else ""
    precisions = " and ".join(dict.fromkeys(cell["precision"] for cell in cells))
    return [
        f"# Training steps on {gpu_runs.device_name(options)}",
        "",
        "Times faster than, by wall seconds of a step (in brackets: by tokens computed). Random weights and tokens; "
        f"lengths drawn to be like the data's; {precisions}; interleaved rounds in one process "
        f"({', '.join(str(cell['rounds']) for cell in cells)} of {options.repeats}), medians, the first "
        f"{options.warmup} left out.{chosen}",
        "",
        results.table(["model, data, kind", *heads], ratios),
        results.table(
            [
                "model, data, kind",
                "variant",
                "pairs/s",
                "seconds (range)",
                "tokens computed",
                "useful",
                "MFU",
                "of measured matmul",
                "peak memory, GB",
            ],
            body,
        ),
        *(f"- `{label}`: {text}." for label, text in VARIANTS.items() if label in options.variants),
        *(f"- `{label}`: ours with {' '.join(more)}." for label, *more in options.also),
        "",
        results.micro_batches({label: facts for cell in cells for label, facts in cell["variants"].items()}),
        "",
        "MFU is useful model FLOPs (no padding, nothing computed twice) over "
        + "; ".join(dict.fromkeys(PeakFlops(**cell["mfu_peak"]).line() for cell in cells))
        + ". Measured matmul, best of the model's shapes: "
        + ", ".join(f"{cell['cell']} {cell['matmul_peak']['gflops'] / 1000:.0f} TF/s" for cell in cells)
        + ". Memory: the variant's weights, gradients, optimiser and activations, as allocated.",
        "",
        *([f"Could not run: {'; '.join(failed)}.", ""] if failed else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
