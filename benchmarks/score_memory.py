"""Scoring a file: peak memory and seconds besides the model, as the file grows, for every format and with a restart.

    scripts/bench score_memory
    scripts/bench score_memory --rows 50000 1000000

Rows are short, and a made-up scorer answers at once, so that what is measured is reading, keeping and writing. Each
cell is a process of its own. Ends with an error if the peak of 200,000 rows is more than 60 MB above that of 20,000.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import machine, results

ROWS = (20_000, 200_000)
FORMATS = ("jsonl", "csv", "parquet")
MOST_MB = 60.0
CELL = """
import json, sys, time
from collections.abc import Mapping
from pathlib import Path
from rewardlab.serve.file_scoring.file import score_with
from rewardlab.serve.file_scoring.backends import Answer

class Lengths:
    num_parts, bare, identity, calls = 1, False, {"backend": "lengths"}, 0
    async def start(self, decided): return {}
    async def score_rows(self, rows):
        self.calls += 1
        if self.calls == stop_at: raise KeyboardInterrupt
        return Answer([[float(len(reply)) for reply in row.replies] for row in rows])
    def tell(self, *told): pass
    async def close(self): pass

source, target, stop_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
began = time.monotonic()
if stop_at:
    try:
        score_with(Lengths(), source, target)
    except KeyboardInterrupt:
        stop_at = 0
score_with(Lengths(), source, target)
# Not ru_maxrss, which begins with that of the process that started this one.
(peak,) = (int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": time.monotonic() - began, "peak_mb": peak}))
"""


def write_rows(path: Path, count: int) -> None:
    """Write short rows, every fourth with several responses, as JSON Lines; other formats are made of these."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row: dict[str, Any] = {"id": number, "prompt": f"How do I keep basil number {number} alive?"}
            row |= {"responses": ["Give it light.", "No."]} if number % 4 == 0 else {"response": "Give it water."}
            file.write(json.dumps(row) + "\n")


def cell(source: Path, target: Path, stop_at: int = 0) -> dict[str, float]:
    """Return seconds and peak memory of a process that scores a file, interrupted once at a call if `stop_at`."""
    line = [sys.executable, "-c", CELL, str(source), str(target), str(stop_at)]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Score files of each size and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    load, lines, cells = machine.load_average(), [], {}
    for count in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "rows.jsonl"
            write_rows(source, count)
            for kind in FORMATS:
                target = Path(folder) / f"scored.{kind}"
                cells[f"jsonl to {kind}, {count:,} rows"] = cell(source, target)
                cells[f"{kind} to {kind}, {count:,} rows"] = cell(target, Path(folder) / f"again.{kind}")
            interrupted = cell(source, Path(folder) / "later.jsonl", stop_at=count // 512)
            cells[f"jsonl to jsonl, interrupted half-way, {count:,} rows"] = interrupted
    for name, found in cells.items():
        print(f"{name}: {found['peak_mb']:.0f} MB, {found['seconds']:.1f} s")
        lines.append([name, f"{found['peak_mb']:.0f}", f"{found['seconds']:.1f}"])
    low, high = f"{min(options.rows):,} rows", f"{max(options.rows):,} rows"
    growth = {
        name: found["peak_mb"] - cells[name.replace(high, low)]["peak_mb"]
        for name, found in cells.items()
        if name.endswith(high)
    }
    print(f"largest growth from {low} to {high}: {max(growth.values()):.0f} MB")
    page = [
        "# What scoring a file takes besides the model",
        "",
        "Short rows and a made-up scorer, each cell a process of its own. "
        f"Largest growth of the peak from {low} to {high}: {max(growth.values()):.0f} MB.",
        "",
        results.table(["what", "peak MB of the process", "seconds"], lines),
    ]
    results.write(
        "score_memory",
        f"{max(options.rows)}",
        page=page,
        data={"cells": cells, "growth_mb": growth},
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    if tuple(options.rows) == ROWS and max(growth.values()) > MOST_MB:
        print(f"memory grows by more than {MOST_MB:.0f} MB")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
