"""Inspecting and auditing 100,000 rows: seconds, processor time and peak memory of the commands.

    scripts/bench data_tools

Generates pairs of the lengths of HH's (prompts of 10 to 170 words, replies of 5 to 80) from 20,000 made-up words as
frequent as those of a language, one in a hundred of them twice, and runs the commands as a user would, each in a
process of its own on a terminal, in turn: with lengths in words, and in the tokens of a model (`--model`). Peak memory
is the most that the process and its workers held together, looked at ten times a second. Ends with an error if a
command draws no progress bar, or if inspecting and auditing with lengths in words together take over two minutes or
2 GB. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import machine, results

MOST_SECONDS = 120.0
MOST_MB = 2000.0
WORDS = 20_000
TWICE = 100
"""One row in so many stands in the file a second time."""
IN_TOKENS = ("--max-seq-len", "1024")
COMMANDS = {
    "inspect": ("inspect", "--languages", "2000"),
    "audit": ("audit",),
    "inspect-tokens": ("inspect", "--languages", "2000", *IN_TOKENS),
    "audit-tokens": ("audit", *IN_TOKENS),
}
"""Name -> the tool and its flags; those that end in `tokens` get `--model` too."""
BARS = {"inspect": "inspecting", "audit": "auditing"}
"""Tool -> how its progress bar begins."""


def write_rows(path: Path, count: int) -> None:
    """Write pairs as JSON Lines, the same for the same count."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 10, WORDS).tolist()]
    shares = 1 / np.arange(1, WORDS + 1)
    many = rng.choice(WORDS, size=4_000_000, p=shares / shares.sum())
    before = ""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            if number % TWICE == TWICE - 1:
                file.write(before)
                continue
            sizes = rng.integers((10, 5, 5), (171, 81, 81)).tolist()
            starts = rng.integers(0, len(many) - 200, 3).tolist()
            prompt, chosen, rejected = (
                " ".join(words[word] for word in many[start : start + size].tolist())
                for start, size in zip(starts, sizes, strict=True)
            )
            before = json.dumps({"prompt": f"{number} {prompt}?", "chosen": f"{chosen}.", "rejected": f"{rejected}!"})
            before += "\n"
            file.write(before)


def measure(name: str, path: Path, model: str, output: Path) -> dict[str, Any]:
    """Run a command on a file in a process of its own, on a terminal, and keep what it says."""
    tool, *flags = COMMANDS[name]
    if name.endswith("tokens"):
        flags += ["--model", model]
    command = [sys.executable, "-m", "rewardlab", "data", tool, str(path), *flags]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    ours, terminal = pty.openpty()
    # A new terminal has no columns, on which nothing is drawn.
    termios.tcsetwinsize(terminal, (24, 120))
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal)
    os.close(terminal)
    reader = threading.Thread(target=_copy, args=(ours, output))
    reader.start()
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, memory_mb(process.pid))
        time.sleep(0.1)
    seconds = time.monotonic() - began
    reader.join()
    os.close(ours)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    drawn = len(re.findall(rf"{BARS[tool]} {re.escape(path.name)}: [^\r\n]*rows", output.read_text(encoding="utf-8")))
    return {
        "name": name,
        "command": f"rewardlab data {shlex.join((tool, *flags))}".replace(model, Path(model).name),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mb": peak,
        "bars": drawn,
        "status": process.returncode,
    }


def _copy(terminal: int, output: Path) -> None:
    """Write what a process says on its terminal to a file, until it ends."""
    with output.open("wb") as sink:
        while True:
            try:
                said = os.read(terminal, 65_536)
            except OSError:
                # Linux says so that nobody has the other end open.
                return
            if not said:
                return
            sink.write(said)
            sink.flush()


def memory_mb(process: int) -> float:
    """Memory of a process and of those that it started; pages that they share are counted once."""
    total = 0.0
    waiting = [process]
    while waiting:
        own = waiting.pop()
        try:
            lines = Path(f"/proc/{own}/smaps_rollup").read_text(encoding="utf-8").splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
            for task in Path(f"/proc/{own}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="utf-8").split())
        except (OSError, StopIteration):
            continue
    return total


def page(rows: int, size_mb: float, found: Sequence[dict[str, Any]]) -> list[str]:
    """What was found, as Markdown."""
    table = results.table(
        ["command", "seconds", "processor seconds", "peak memory, MB", "times its bar was drawn", "exit status"],
        [
            [
                one["command"],
                f"**{one['seconds']:.0f}**",
                f"{one['cpu_seconds']:.0f}",
                f"{one['peak_mb']:,.0f}",
                one["bars"],
                one["status"],
            ]
            for one in found
        ],
    )
    return [f"{rows:,} generated pairs, {size_mb:.0f} MB; {os.cpu_count()} cores.", table]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the commands that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tools", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokens count lengths")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.jsonl")
        write_rows(path, options.rows)
        size_mb = path.stat().st_size / 1e6
        found = []
        for name in options.tools:
            output = Path(folder, f"{name}.txt")
            found.append(measure(name, path, options.model, output))
            # An audit that finds something may end with 1.
            if found[-1]["status"] not in (0, 1) or not found[-1]["bars"]:
                why = "drew no progress bar" if found[-1]["status"] in (0, 1) else "failed"
                print(f"{name} {why}:\n{output.read_text(encoding='utf-8')[-3000:]}", file=sys.stderr)
                return 1
    results.write(
        "data_tools",
        "all" if len(found) == len(COMMANDS) else "-".join(options.tools),
        page=page(options.rows, size_mb, found),
        data={"rows": options.rows, "file_mb": size_mb, "tools": found},
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    in_words = [one for one in found if not one["name"].endswith("tokens")]
    slow = sum(one["seconds"] for one in in_words) > MOST_SECONDS
    large = any(one["peak_mb"] > MOST_MB for one in in_words)
    return int(options.rows <= 100_000 and (slow or large))


if __name__ == "__main__":
    sys.exit(main())
