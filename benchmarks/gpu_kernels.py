"""The layout law of every attention kernel of CUDA at real widths, largest and mean error, forward and backward."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import gpu_runs, results, timing
from harness.gpu_runs import MODELS
from harness.workload import random_group
from rewardlab.batch import pack
from rewardlab.core.types import TokenGroup
from rewardlab.model import attention
from rewardlab.model.attention_backends import BACKENDS, unavailable
from rewardlab.model.attention_formula import Formula
from rewardlab.model.prompt_layout import PromptLayout
from rewardlab.model.reward import RewardModel
from rewardlab.model.trials import ROUNDING
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.settings.config import LossConfig

PARTS = ("output", "dq", "dk", "dv")
HALF = torch.bfloat16
Errors = dict[str, dict[str, float]]
"""part -> {"max", "mean"}: how far from the exact one."""


def draw_groups(replies: int, tokens: int, *, vocabulary: int, seed: int) -> list[TokenGroup]:
    """Groups of K replies, about `tokens` in all: prompts of some 114 tokens and replies of some 43, as HH's are, and
    the shapes that go wrong first: no prompt, a reply of one token, lengths that are no multiple of anything.
    """
    draw = np.random.default_rng(seed)
    shapes: list[tuple[int, list[int]]] = [(0, [7] * replies), (1, [1, *[33] * (replies - 1)]), (129, [64] * replies)]
    while sum(shared + sum(own) for shared, own in shapes) < tokens:
        prompt, *own = draw.lognormal([np.log(90), *[np.log(34)] * replies], 0.7)
        shapes.append((int(prompt) + 1, [int(length) + 1 for length in own]))
    return [
        random_group(shared, own, vocabulary=vocabulary, seed=seed + number)
        for number, (shared, own) in enumerate(shapes)
    ]


def attend_alone(inputs: Sequence[Tensor], groups: Sequence[tuple[int, tuple[int, ...]]], dtype: torch.dtype) -> Tensor:
    """Every conversation by itself in `dtype`, with its own copy of the prompt; laid out as the packed row."""
    outputs, start = [], 0
    for shared, suffixes in groups:
        place = start + shared
        for reply, length in enumerate(suffixes):
            index = torch.cat([torch.arange(start, start + shared), torch.arange(place, place + length)])
            q, k, v = (tensor[:, :, index.to(tensor.device)].to(dtype) for tensor in inputs)
            grouped = q.shape[1] != k.shape[1]
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            outputs.append(found if reply == 0 else found[:, :, shared:])
            place += length
        start = place
    return torch.cat(outputs, 2)


class OneLayer:
    """Queries, keys and values of a packed row in the shape of a model's heads, and what attention should make of them.

    Exact is one conversation at a time in float64. What half precision may err is what it errs one conversation at a
    time, gradients of a shared prompt added in float32: that is what the padded path does.
    """

    def __init__(self, model: str, replies: int, tokens: int, device: torch.device) -> None:
        shape: Mapping[str, Any] = MODELS[model]
        heads, grouped = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.groups = pack(draw_groups(replies, tokens, vocabulary=256, seed=1)).groups
        self.num_tokens = PromptLayout(self.groups).num_tokens
        draw = torch.Generator().manual_seed(0)

        def random(count: int) -> Tensor:
            width = shape["hidden_size"] // heads
            return torch.randn(1, count, self.num_tokens, width, generator=draw).to(device, HALF)

        self.inputs = [random(count) for count in (heads, grouped, grouped)]
        self.weights = random(heads)
        self.exact = self.alone(torch.float64)
        self.allowed = self.errors(self.alone(HALF))

    def alone(self, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients, one conversation at a time."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = [tensor.to(wide).requires_grad_() for tensor in self.inputs]
        output = attend_alone(leaves, self.groups, dtype)
        found = [output.detach(), *torch.autograd.grad(output, leaves, self.weights.to(output.dtype))]
        return [tensor.to(dtype) for tensor in found]

    def packed(self, backend: str) -> Callable[[], list[Tensor]]:
        """Output and gradients of a kernel, on one layout for all calls, as the layers of a model share it."""
        layout = PromptLayout(self.groups, backend)
        leaves = [tensor.clone().requires_grad_() for tensor in self.inputs]

        def run() -> list[Tensor]:
            output = BACKENDS[backend](*leaves, layout, Formula())
            return [output.detach(), *torch.autograd.grad(output, leaves, self.weights)]

        return run

    def errors(self, found: Sequence[Tensor]) -> Errors:
        """How far from exact."""
        return {name: distance(one, truth) for name, one, truth in zip(PARTS, found, self.exact, strict=True)}


class WholeModel:
    """Scores and gradients of a few layers at full width; exact is the padded path in float32."""

    def __init__(self, model: str, replies: int, tokens: int, device: torch.device, work: Path, layers: int) -> None:
        folder = gpu_runs.folder_of(work, model, num_hidden_layers=layers)
        fixed = {"attention_backend": "segments", "precision": "fp32", "max_seq_len": 1024}
        _, self.model = gpu_runs.random_model(folder, fixed, device)
        groups = draw_groups(replies, tokens, vocabulary=self.model.config.vocab_size, seed=2)
        self.batch = pack(groups).to(device)
        self.num_tokens = self.batch.num_tokens
        self.exact = self.padded(torch.float32)
        self.allowed = self.errors(self.padded(HALF))

    def padded(self, dtype: torch.dtype) -> list[Tensor]:
        """One padded row a reply."""
        set_layout(self.model, "padded")
        return self._scores_and_gradient(dtype)

    def packed(self, backend: str) -> Callable[[], list[Tensor]]:
        """A kernel in half precision, on the row with shared prompts."""

        def run() -> list[Tensor]:
            set_layout(self.model, "shared")
            self.model.attention_backend = backend
            return self._scores_and_gradient(HALF)

        return run

    def _scores_and_gradient(self, dtype: torch.dtype) -> list[Tensor]:
        self.model.compute_dtype = dtype
        self.model.zero_grad(set_to_none=True)
        rewards = self.model(self.batch)
        (preference_loss(rewards, self.batch, LossConfig()) / total_weight(self.batch)).backward()
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return [rewards.detach(), torch.cat(gradients)]

    def errors(self, found: Sequence[Tensor]) -> Errors:
        """How far from exact."""
        return {
            name: distance(one, truth)
            for name, one, truth in zip(("score", "gradient"), found, self.exact, strict=True)
        }


def set_layout(model: RewardModel, layout: Any) -> None:
    """The same weights under another layout."""
    model.layout = layout
    name = attention.padded_implementation(model.config) if layout == "padded" else attention.NAME
    model.backbone.set_attn_implementation(name)


def distance(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Largest and mean, of numbers that should be equal; not-a-number stays one."""
    difference = (found.to(truth.dtype) - truth).abs()
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def ratios_of(errors: Errors, allowed: Errors) -> dict[str, float]:
    """How many times as far from exact as the padded path in half precision, by part and kind of error."""
    return {
        f"{part} {kind}": value / allowed[part][kind] if allowed[part][kind] else float(value > 0) * float("inf")
        for part, kinds in errors.items()
        for kind, value in kinds.items()
    }


def measure(name: str, options: argparse.Namespace, work: Path, until: float) -> dict[str, Any]:
    """One cell: every kernel on the same row."""
    what, model, shape = name.split(" ")
    replies, device = int(shape.removeprefix("K=")), gpu_runs.device_of(options)
    case: OneLayer | WholeModel
    if what == "layer":
        case = OneLayer(model, replies, options.tokens, device)
    else:
        case = WholeModel(model, replies, options.tokens, device, work, options.layers)
    kernels: dict[str, dict[str, Any]] = {}
    steppers: dict[str, timing.Stepper] = {}
    for backend in BACKENDS:
        if reason := unavailable(backend, device=device, dtype=HALF, formula=Formula(), train=True):
            kernels[backend] = {"left_out": reason}
            continue
        run = case.packed(backend)
        try:
            errors = case.errors(run())
        except Exception as error:  # one kernel that fails is a result, and the others are wanted too
            kernels[backend] = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
            continue
        ratios = ratios_of(errors, case.allowed)
        kernels[backend] = {"errors": errors, "ratios": ratios, "holds": all(r <= ROUNDING for r in ratios.values())}
        steppers[backend] = stepper(run, options.calls, device)
    found = timing.interleave(steppers, repeats=options.repeats, warmup=1, until=until, say=lambda line: None)
    for backend, samples in found.samples.items():
        kernels[backend] |= asdict(timing.Timing.of(samples))
    return {"cell": name, "tokens": case.num_tokens, "allowed": case.allowed, "kernels": kernels}


def stepper(run: Callable[[], object], calls: int, device: torch.device) -> timing.Stepper:
    """Seconds of a call, by several: a launch is not what is measured."""

    def step() -> timing.Sample:
        def work() -> Mapping[str, float]:
            for _ in range(calls):
                run()
            return {}

        sample = timing.timed(work, wait=lambda: gpu_runs.wait_for(device))
        return timing.Sample(wall=sample.wall / calls, cpu=sample.cpu / calls)

    return step


def page_of(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    """The page so far."""
    rows = []
    for cell in cells:
        for backend, facts in cell["kernels"].items():
            said = facts.get("left_out") or facts.get("failed")
            if said:
                rows.append([cell["cell"], backend, f"– ({said})", "–", "–", "–"])
                continue
            worst = {kind: worst_of(facts["ratios"], kind) for kind in ("max", "mean")}
            verdict = f"**{'holds' if facts['holds'] else 'BROKEN'}**"
            seconds = results.show(1000 * facts["wall"]) if "wall" in facts else "–"
            rows.append([cell["cell"], backend, verdict, worst["max"], worst["mean"], seconds])
    return [
        f"# Attention kernels on {gpu_runs.device_name(options)}",
        "",
        f"bf16, forward and backward, rows of about {options.tokens:,} tokens with shared prompts. Errors are over "
        f"those that the padded path makes in bf16; the law allows {ROUNDING:g} times as much, of the largest and of "
        f"the mean. `layer`: output and gradients of query, key and value of one call in the shape of the model's "
        f"heads, against float64. `model`: scores and gradients of {options.layers} layers at full width, against "
        f"float32.",
        "",
        results.table(
            ["cell", "kernel", "law", "largest error, worst part", "mean error, worst part", "milliseconds"], rows
        ),
        f"Milliseconds of forward and backward: median of {options.repeats} interleaved rounds, each a mean of "
        f"{options.calls} calls.",
        "",
    ]


def worst_of(ratios: Mapping[str, float], kind: str) -> str:
    """The part that errs most, as a cell of the table."""
    name, value = max(
        ((name, value) for name, value in ratios.items() if name.endswith(kind)),
        key=lambda entry: float("inf") if entry[1] != entry[1] else entry[1],
    )
    return f"{value:.2f} ({name.removesuffix(f' {kind}')})"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=None, choices=list(MODELS), help="by default 0.5b and 3b")
    parser.add_argument("--replies", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--tokens", type=int, default=None, help="of a row, about; by default 4096")
    parser.add_argument("--layers", type=int, default=None, help="of the whole model; by default 4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="that a sample is the mean of")
    gpu_runs.add_flags(parser)
    options = parser.parse_args(arguments)
    options.models = options.models or (["tiny"] if options.tiny else ["0.5b", "3b"])
    options.tokens = options.tokens or (400 if options.tiny else 4096)
    options.layers = options.layers or (2 if options.tiny else 4)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; the result is written again after each. 1 if a kernel breaks the law or a cell could not run."""
    options = parse(arguments)
    attention.leave_out_cudnn(torch.device(options.device))  # what each kernel is compared with is PyTorch's attention
    names = [
        f"{what} {model} K={replies}"
        for what in ("layer", "model")
        for model in options.models
        for replies in options.replies
    ]
    cells, sound = gpu_runs.run_cells("gpu_kernels", options, names, measure=measure, page=page_of)
    broken = [
        f"{cell['cell']} {backend}"
        for cell in cells
        for backend, facts in cell["kernels"].items()
        if "failed" in facts or facts.get("holds") is False
    ]
    if broken:
        print(f"not within the law: {'; '.join(broken)}", flush=True)
    return 0 if sound and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
