"""Where the time of a training step goes on the CPU: shares of kinds of work, before and after a change of settings.

    scripts/bench profile_step --precision bf16

`casts` computes as autocast does: PyTorch's attention kernel and norms, and every weight cast in every micro-batch;
`ours` as a run does. Times are of PyTorch's profiler, which counts an operation without those that it calls.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness import machine, ours, results, workload

CPU = torch.device("cpu")
CASTS, OURS = "casts", "ours"
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention, kernels": ("scaled_dot_product", "flash_attention"),
    "attention, products": ("bmm", "baddbmm"),
    "attention, softmax and masks": ("softmax", "masked_fill", "where", "triu", "exp", "exp2"),
    "products": ("mm", "addmm", "linear", "mkldnn"),
    "norms, rotary, activations": (
        *("mul", "pow", "add", "neg", "rsqrt", "mean", "silu", "sum", "div", "sub", "sigmoid"),
        *("layer_norm", "rms_norm"),
    ),
    "casts and copies": ("copy", "clone", "contiguous"),
    "cat, split, index": ("cat", "split", "index", "gather", "slice_backward", "select_backward", "embedding"),
    "fills": ("zero", "fill", "zeros", "new_zeros"),
    "rounding of copies": ("bitwise", "remainder", "arange"),
    "optimiser and norms of gradients": ("adamw", "foreach", "vector_norm"),
}
"""Kind of work -> words in the names of operations; the first kind with a match has it, whole words before parts."""


def kind_of(operation: str) -> str:
    """The kind of an operation such as `aten::_foreach_norm`."""
    name = operation.split("::")[-1].lstrip("_").rstrip("_")
    for kind, words in KINDS.items():
        if name in words:
            return kind
    # Parts of names: the longest word first, so that `addmm` is not an `add`.
    found = [(len(word), kind) for kind, words in KINDS.items() for word in words if len(word) > 3 and word in name]
    return max(found)[1] if found else "other"


def profiled(step: Any) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds by kind, seconds by operation) of a step."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        step()
    kinds, operations = dict.fromkeys([*KINDS, "other"], 0.0), {}
    for event in watched.key_averages():
        if event.self_cpu_time_total <= 0:
            continue
        operations[event.key] = event.self_cpu_time_total / 1e6
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return kinds, dict(sorted(operations.items(), key=lambda item: -item[1])[:25])


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile both, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--repeats", type=int, default=3, help="steps timed without the profiler; their median counts")
    ours.add_step_flags(parser, pairs=16)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    fixed = ours.step_settings(options)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        data = workload.read_rows(options.data, options.pairs, folder=options.data_folder)
        groups = workload.to_groups(data, folder, max_seq_len=options.max_seq_len)
        for name, changed in ((CASTS, {"attention_backend": "segments", "norm_backend": "torch"}), (OURS, {})):
            trainer = ours.build_trainer(ours.settings(folder, fixed | changed), groups, sharing=True, device=CPU)
            model = trainer.model
            if name == CASTS and model.half_weights is not None:
                model.half_weights.drop()
                model.half_weights = None
            step = ours.step_of(trainer)
            step()  # makes the optimiser's state
            seconds = []
            for _ in range(options.repeats):
                started = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - started)
            kinds, operations = profiled(step)
            attention = model.attention_backend
            found[name] = {"seconds": seconds, "kinds": kinds, "operations": operations, "attention": attention}
            trainer.release()
            del trainer, model, step
    results.write(
        "profile_step",
        f"{data.name}.{options.precision}",
        page=page_of(found, options, data.name),
        data={"found": found},
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return 0


def page_of(found: Mapping[str, Mapping[str, Any]], options: argparse.Namespace, data: str) -> list[str]:
    """The page."""
    totals = {name: sum(one["kinds"].values()) for name, one in found.items()}
    rows: list[list[object]] = []
    for kind in (*KINDS, "other"):
        cells: list[object] = []
        for name, one in found.items():
            cells += [f"{one['kinds'][kind]:.2f}", f"{one['kinds'][kind] / totals[name]:.0%}"]
        rows.append([kind, *cells])
    rows.append(["all", *(cell for total in totals.values() for cell in (f"{total:.2f}", "100%"))])
    rows.append(
        [
            "a step without the profiler, median",
            *(
                cell
                for one in found.values()
                for cell in (f"**{sorted(one['seconds'])[len(one['seconds']) // 2]:.2f}**", "")
            ),
        ]
    )
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    return [
        f"# Where a step's time goes: {options.precision}, {data}",
        "",
        f"{Path(options.model).name}, {depth}, all weights, {options.pairs} pairs, {' '.join(options.set)}. Seconds of "
        f"one step under PyTorch's profiler, by kind of operation.",
        "",
        results.table(["kind of work", *(cell for name in found for cell in (f"{name}, s", "share"))], rows),
        *(
            f"- `{name}`: attention {one['attention']}"
            + ("; every weight cast in every micro-batch." if name == CASTS else "; as a run computes.")
            for name, one in found.items()
        ),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
