"""A head trained with `--cache-states` beside one whose states are computed each time they are read: whole commands.

    scripts/bench cached_states --data pairs.jsonl.gz
    scripts/bench cached_states --model tiny-llama --data generated --pairs 40

Three commands, one after the other, each in a process of its own: the first that looks states up, which computes them;
a second with another seed and rate, which finds them; and the first without the flag. Ends with an error if the records
of the first and the last differ by more than float32 explains.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from harness import machine, ours, results, workload
from harness.command import rewardlab
from rewardlab.core.files import read_json
from rewardlab.data.synthetic import write_dataset

TOLERANCE: Final = 1e-4
"""Of losses and margins, in float32: states are computed beside other conversations."""
COMPARED: Final = ("train_loss", "train_margin", "eval_loss", "eval_margin", "grad_norm")
WAYS: Final[Mapping[str, Sequence[str]]] = {
    "looked up, first run": ("--cache-states",),
    "looked up, another seed and rate": ("--cache-states", "--seed", "1", "--lr", "3e-3"),
    "computed": (),
}


def first_rows(source: str, pairs: int, work: Path) -> Path:
    """The first rows of a file, as one of their own."""
    if source == "generated":
        write_dataset(work / "data", num_train=pairs, num_test=2, seed=0)
        return work / "data" / "train.jsonl"
    read = gzip.open if source.endswith(".gz") else open
    with read(source, "rt", encoding="utf-8") as file:
        lines = [line for _, line in zip(range(pairs), file, strict=False)]
    (work / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return work / "rows.jsonl"


def run(words: Sequence[str], output: Path) -> dict[str, Any]:
    """Seconds of a command and of its processors, its record, and what it says of its states."""
    started, busy = time.perf_counter(), _processor_seconds()
    rewardlab("train", *words, "--output-dir", str(output))
    seconds, busy = time.perf_counter() - started, _processor_seconds() - busy
    with (output / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    states = output / "evals" / "states.json"
    return {
        "seconds": seconds,
        "processor_seconds": busy,
        "in_steps": sum(float(row["seconds"]) for row in rows if row["seconds"]),
        "states": read_json(states) if states.is_file() else None,
        "record": [{name: row[name] for name in ("step", *COMPARED)} for row in rows],
    }


def _processor_seconds() -> float:
    """Of all processes that this one has started and that have ended, and of those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def furthest(one: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]]) -> float:
    """The largest difference of two records of the same steps, in units of max(1, |value|)."""
    largest = 0.0
    for row, again in zip(one, other, strict=True):
        if row["step"] != again["step"]:
            return math.inf
        for name in COMPARED:
            if bool(row[name]) != bool(again[name]):
                return math.inf
            if row[name]:
                value = float(again[name])
                largest = max(largest, abs(float(row[name]) - value) / max(1.0, abs(value)))
    return largest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the three commands, compare, write. Returns 1 if the records differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", default="generated", help="a file of pairs, or `generated`")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    load = machine.load_average()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base = workload.model_folder(options.model, work, layers=None)
        data = first_rows(options.data, options.pairs, work)
        os.environ["REWARDLAB_CACHE"] = str(work / "cache")
        words = ["--model", base, "--dataset", str(data), "--train-head-only", "--precision", "fp32"]
        words += ["--max-seq-len", str(options.max_seq_len), "--epochs", str(options.epochs), "--report-to", "none"]
        for name, flags in WAYS.items():
            print(name, flush=True)
            found[name] = run([*words, *flags], work / f"run-{len(found)}")
    first, second, computed = found.values()
    difference = furthest(first["record"], computed["record"])
    head = ["states", "processor seconds of the command", "seconds", "of them in training steps", "against computed"]
    page = [
        "# A head on a frozen model: states looked up, and computed in every epoch and evaluation",
        "",
        f"**{computed['processor_seconds'] / second['processor_seconds']:.1f}x** for a run that finds its states, "
        f"**{computed['processor_seconds'] / first['processor_seconds']:.1f}x** for the one that computes them first.",
        "",
        f"{Path(options.model).name}, float32, the first {options.pairs} pairs of {Path(options.data).name}, "
        f"{options.epochs:g} epochs, at most {options.max_seq_len} tokens. Whole commands, one after the other, each "
        f"once: reading, loading, evaluations every tenth of the run, saving and verifying included. Ratios are of "
        f"processor seconds, which a busy machine changes less.",
        "",
        results.table(
            head,
            [
                [
                    name,
                    f"{one['processor_seconds']:.0f}",
                    f"{one['seconds']:.0f}",
                    f"{one['in_steps']:.1f}",
                    f"{computed['processor_seconds'] / one['processor_seconds']:.1f}x",
                ]
                for name, one in found.items()
            ],
        ),
        f"The records of the first and the last run differ by at most {difference:.1e} (losses, margins and norms of "
        f"gradients, in units of max(1, |value|)).",
        "",
    ]
    tag = f"{Path(options.model).name}.{options.pairs}"
    results.write(
        "cached_states",
        tag,
        page=page,
        data={"ways": found, "difference": difference},
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    if not difference <= TOLERANCE:
        print(f"the records differ by {difference:.1e}", file=sys.stderr)
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
