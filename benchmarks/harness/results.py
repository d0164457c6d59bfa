"""Dated results: one JSON file with everything, one Markdown page to read, ratios first."""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import machine
from harness.timing import Ratio, Sample, ratio
from rewardlab.core.files import write_json, write_text

RESULTS = Path(__file__).resolve().parents[1] / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def show(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent; a dash for nothing."""
    if value is None or value != value:
        return "–"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def ratio_rows(ratios: Mapping[str, Ratio], tokens: Mapping[str, float]) -> str:
    """Ratios of time beside ratios of tokens computed."""
    return table(
        ["faster by", "wall (median)", "rounds, low to high", "CPU seconds", "tokens computed"],
        [
            [
                name,
                f"**{show(found.value)}**",
                f"{show(found.low)} to {show(found.high)}",
                show(found.cpu),
                show(tokens.get(name)),
            ]
            for name, found in ratios.items()
        ],
    )


def spread(facts: Mapping[str, Any]) -> str:
    """Median of a variant's seconds, and their range."""
    return f"{show(facts['wall'])} ({show(facts['wall_low'])} to {show(facts['wall_high'])})"


def micro_batches(variants: Mapping[str, Mapping[str, Any]]) -> str:
    """How large a micro-batch of each variant may be, in a sentence; variants without such a limit are left out."""
    budgets = {name: facts["micro_token_budget"] for name, facts in variants.items() if facts["micro_token_budget"]}
    if not budgets:
        return ""
    named = ", ".join(f"`{name}` {budget:,}" for name, budget in budgets.items())
    return f"Tokens of a micro-batch at most, padding counted: {named}."


def compare(
    names: Sequence[tuple[str, str]], samples: Mapping[str, Sequence[Sample]], tokens: Mapping[str, float]
) -> tuple[dict[str, Ratio], dict[str, float]]:
    """Ratios of time and of tokens, by `slower → faster`; pairs of which one was not measured are left out."""
    there = [(slow, fast) for slow, fast in names if slow in samples and fast in samples]
    return (
        {f"{slow} → {fast}": ratio(samples[slow], samples[fast]) for slow, fast in there},
        {f"{slow} → {fast}": tokens[slow] / tokens[fast] for slow, fast in there},
    )


def plain_options(options: argparse.Namespace) -> dict[str, object]:
    """Flags without the folders of this machine."""
    hidden = {"results", "result_paths", "no_result", "data_folder", "function"}

    def plain(value: object) -> object:
        text = str(value)
        return Path(text).name if isinstance(value, Path) or text.startswith(("/", "~", "..")) else value

    return {
        name: [plain(item) for item in value] if isinstance(value, list) else plain(value)
        for name, value in vars(options).items()
        if name not in hidden
    }


def new_path(folder: Path, benchmark: str, tag: str) -> Path:
    """Where the page of a new result goes: `benchmark.tag.date.md`, the second one of a day `….date-2.md`, and so on.

    A result that is there already is never replaced, be it a page, a record or both.
    """
    day = f"{benchmark}.{tag}.{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    for count in itertools.count(1):
        path = folder / f"{day}{'' if count == 1 else f'-{count}'}.md"
        if not path.exists() and not path.with_suffix(".json").exists():
            return path
    raise AssertionError("counting ends nowhere")


def path_of(options: argparse.Namespace, benchmark: str, tag: str) -> Path:
    """The page of this run of a script, which it may write again: the same for the same `options`."""
    mine: dict[str, Path] = vars(options).setdefault("result_paths", {})
    name = f"{benchmark}.{tag}"
    if name not in mine:
        mine[name] = new_path(options.results, benchmark, tag)
    return mine[name]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the dated files")
    parser.add_argument("--no-result", action="store_true", help="write nothing")


def write(
    benchmark: str,
    tag: str,
    *,
    page: Sequence[str],
    data: Mapping[str, Any],
    options: argparse.Namespace,
    device: torch.device,
    load: tuple[float, float],
    say: bool = True,
) -> Path | None:
    """Write `benchmark.tag.date` as .md and .json; `load` is the load average before and after.

    Called again with the same `options`, it replaces what it wrote, and never what was there before. Prints the page
    (unless told not to `say` it); returns the path of the Markdown file.
    """
    now = datetime.datetime.now(datetime.UTC)
    facts = machine.describe(device)
    packages = facts.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    where = facts.get("gpu") or f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads used"
    commit = f"{str(facts['git_commit'])[:12]}{' with changes' if facts['git_dirty'] else ''}"
    text = "\n".join(
        [
            *page,
            f"Machine: {where}; load average {load[0]:.1f} before, {load[1]:.1f} after; {versions}, Python "
            f"{facts['python']}; commit {commit}.",
            "",
        ]
    )
    if say:
        print(f"\n{text}", flush=True)
    if options.no_result:
        return None
    options.results.mkdir(parents=True, exist_ok=True)
    path = path_of(options, benchmark, tag)
    write_text(path, text)
    write_json(
        path.with_suffix(".json"),
        {
            "benchmark": benchmark,
            "case": tag,
            "date": now.isoformat(timespec="seconds"),
            "options": plain_options(options),
            "machine": facts,
            "load_average": list(load),
            **data,
        },
    )
    if say:
        print(f"written: {path.name}, {path.with_suffix('.json').name}")
    return path
