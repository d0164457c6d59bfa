"""One page of the newest results from a GPU, to stand in docs: what each script found, tables and all."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.results import RESULTS
from rewardlab.core.files import write_text

PARTS = ("gpu", "gpu_kernels", "gpu_profile", "gpu_memory", "gpu_sharded", "gpu_nvml")
"""In the order of the page."""
OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"


def newest(results: Path, benchmark: str) -> tuple[Path, dict[str, Any]] | None:
    """The page and data of the last result that is from a GPU; None if there is none."""
    found = []
    for path in results.glob(f"{benchmark}.*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["machine"].get("gpu"):
            found.append((data["date"], path, data))
    if not found:
        return None
    _, path, data = max(found, key=lambda entry: entry[0])
    return path.with_suffix(".md"), data


def collect(results: Path, output: Path) -> list[str]:
    """Lines of the page. SystemExit if there is no result from a GPU."""
    found = {name: result for name in PARTS if (result := newest(results, name)) is not None}
    if not found:
        raise SystemExit(f"no result in {results.name} is from a GPU. Run scripts/bench gpu on one first.")
    lines = ["# On a GPU", "", "Collected by `scripts/bench gpu_page`; not written by hand.", ""]
    for path, _ in found.values():
        title, *rest = path.read_text(encoding="utf-8").rstrip().splitlines()
        link = Path(*[".."] * len(output.parent.relative_to(results.parents[1]).parts), *path.parts[-3:])
        lines += [
            f"#{title}",
            *itertools.chain.from_iterable(map(wrap, rest)),
            "",
            f"[record]({link.as_posix()})",
            "",
        ]
    if missing := [name for name in PARTS if name not in found]:
        lines += [f"No record of: {', '.join(f'`{name}.py`' for name in missing)}.", ""]
    return lines


def wrap(line: str) -> list[str]:
    """The lines of a paragraph, item or heading, as wide as pages have them; of a table the line as it is."""
    indent = "  " if line.startswith("- ") else ""
    return [line] if line.startswith("|") or not line else textwrap.wrap(line, 116, subsequent_indent=indent)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    results, output = options.results.resolve(), options.output.resolve()
    write_text(output, "\n".join(collect(results, output)))
    print(f"written: {output.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
