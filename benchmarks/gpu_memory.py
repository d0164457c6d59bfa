"""Memory of a training step on one GPU against the formulas of docs/scaling.md, by what it is for."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import gpu_runs, memory_formula, ours, results
from rewardlab.core.types import TokenGroup
from rewardlab.model.layers import decoder_layers
from rewardlab.model.norm import ReplacedNorm
from rewardlab.training.cost.memory import HighWater, in_use
from rewardlab.training.monitoring.observers import Observer, Observers

CASES = (
    "3b lora none",
    "0.5b full none",
    "3b lora full",
    "0.5b full full",
    "3b full none",
    "3b full full",
    "3b lora selective",
)
"""Model, what trains, activation checkpointing."""
TINY_CASES = ("tiny lora none", "tiny full full")
CPU = "On a CPU these are of the whole process, in float32, and the formulas do not hold."
COLUMNS = ("weights", "moments", "forward", "peak")


def fill(groups: Sequence[TokenGroup], budget: int) -> list[TokenGroup]:
    """The first that hold at most this many tokens."""
    tokens = itertools.accumulate(len(group.shared) + sum(map(len, group.suffixes)) for group in groups)
    return [group for group, total in zip(groups, tokens, strict=True) if total <= budget]


def measure(name: str, options: argparse.Namespace, work: Path, until: float) -> dict[str, Any]:
    """Two steps: the first makes the optimiser's state, the second has everything.

    Two micro-batches a step: when the second one is computed, the gradients of the first are there.
    """
    model_name, kind, checkpointing = name.split(" ")
    device = gpu_runs.device_of(options)
    groups = fill(gpu_runs.draw_pairs(model_name, options, count=options.tokens // 10), 2 * options.tokens)
    gpu_runs.wait_for(device)
    before = in_use(device)
    chosen = {"micro_token_budget": options.tokens, "activation_checkpointing": checkpointing}
    config, model = gpu_runs.build(model_name, kind, options, work, groups, **chosen)
    trainer = ours.trainer_of(config, model, groups)
    gpu_runs.wait_for(device)
    found = {"weights": in_use(device) - before}
    step = ours.step_of(trainer)
    step()
    gpu_runs.wait_for(device)
    found["moments"] = in_use(device) - before - found["weights"]
    held: list[int] = []
    forward: list[int] = []
    watching = Observer(
        name="memory",
        step_begins=lambda step: held.append(in_use(device)),
        forward_done=lambda: forward.append(in_use(device)),
    )
    trainer.observers = Observers([watching])
    with HighWater(device) as high:
        facts = step()
        gpu_runs.wait_for(device)
    assert len(forward) > 1, "gradients of one micro-batch meet activations of another"
    found |= {"forward": forward[0] - held[0], "peak": high.bytes - before}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    in_layers = [p for layer in decoder_layers(model.backbone) for p in layer.parameters()]
    keys = sum(sum(group.lengths) for group in groups) / facts["tokens"]
    tokens = round(facts["tokens"] / facts["micro_batches"])
    predicted = None
    if checkpointing != "selective":
        predicted = memory_formula.predict(
            model.config,
            trained=trained,
            frozen=total - trained,
            multiplied=sum(p.numel() for p in in_layers if p.requires_grad and p.ndim > 1),
            tokens=tokens,
            keys=keys,
            lora_rank=config.model.lora_rank if config.model.lora else 0,
            checkpointing=checkpointing,
            fused_norms=any(isinstance(part, ReplacedNorm) for part in model.modules()),
        )
    return {
        "cell": name,
        "tokens": tokens,
        "backend": model.attention_backend,
        "measured": found,
        "terms": predicted,
        "predicted": None if predicted is None else comparable(predicted, checkpointing),
    }


def comparable(terms: Mapping[str, float], checkpointing: str) -> dict[str, float]:
    """The terms as what can be seen of them; of what is computed again, the forward pass keeps only the borders."""
    return {
        "weights": terms["weights"] + terms["copies"],
        "moments": terms["moments"],
        **({"forward": terms["activations"]} if checkpointing == "none" else {}),
        "peak": sum(terms.values()),
    }


def page_of(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    """The page so far."""

    def entry(cell: Mapping[str, Any], name: str) -> str:
        measured, predicted = cell["measured"][name] / 1e9, (cell["predicted"] or {}).get(name)
        if predicted is None:
            return f"{measured:.2f}"
        return f"{measured:.2f}, predicted {predicted / 1e9:.2f} (**{measured * 1e9 / predicted:.2f}**)"

    rows = [
        [cell["cell"], f"{cell['tokens']:,.0f}", cell["backend"], *(entry(cell, name) for name in COLUMNS)]
        for cell in cells
    ]
    return [
        f"# Memory of a step on {gpu_runs.device_name(options)}",
        "",
        f"GB (10^9 bytes) that tensors take, measured, then by the formulas of docs/scaling.md, then measured over "
        f"predicted. A step of AdamW with micro-batches of at most {options.tokens:,} tokens, lengths like HH's. "
        "Cell: model, what trains, activation checkpointing. `forward`: what a micro-batch's forward pass adds and "
        "leaves for the backward pass. `peak`: the most of a step, weights, gradients and moments included.",
        "",
        results.table(["cell", "tokens", "kernel", *COLUMNS], rows),
        *([CPU, ""] if options.device == "cpu" else []),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=None, metavar="MODEL KIND CHECKPOINTING")
    parser.add_argument("--tokens", type=int, default=None, help="of the micro-batch, at most; by default 8192")
    gpu_runs.add_flags(parser)
    options = parser.parse_args(arguments)
    options.cells = options.cells or list(TINY_CASES if options.tiny else CASES)
    options.tokens = options.tokens or (512 if options.tiny else 8192)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; the result is written again after each. 1 if one could not run."""
    options = parse(arguments)
    _, sound = gpu_runs.run_cells("gpu_memory", options, options.cells, measure=measure, page=page_of)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
