"""What the models that a run saves cost: the same commands with the code of another commit and with this one, in turn.

    scripts/bench saved_models --before main --model smollm2-135m-instruct

Two kinds of runs, each evaluated three times: a head on states that are looked up, and LoRA. Forward passes and seconds
of every save, and seconds of the whole command. Ends with an error unless both leave the same models, file by file.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from cached_states import first_rows
from harness import machine, ours, results, workload
from harness.timing import Sample, interleave
from rewardlab.core.files import read_json, sha256_file
from same_runs import ROOT, checkout

SHORT: Final = ("--max-seq-len", "512", "--report-to", "none")
RUNS: Final[Mapping[str, Sequence[str]]] = {
    "head": (*SHORT, "--train-head-only", "--cache-states", "--steps", "60", "--eval-every", "20", "--lr", "1e-3"),
    "LoRA": (
        *(*SHORT, "--lora", "--lora-rank", "8", "--steps", "9", "--eval-every", "3", "--lr", "5e-4"),
        *("--batch-size", "8", "--eval-fraction", "0.2"),
    ),
}
SIDES: Final = ("before", "after")
NOTED: Final = ("passes", "seconds")
"""What is noted of each save."""


def run(code: Path, words: Sequence[str], place: Path) -> Sample:
    """One command with the code in a folder, written to `place`/run; its seconds and what it noted of its saves.

    SystemExit with its words if it fails.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    path = os.pathsep.join([str(code), str(ROOT / "benchmarks")])
    started, busy = time.perf_counter(), _processor_seconds()
    answer = subprocess.run(
        # The folder has one name for all, since it is among the settings that a model is saved with.
        [sys.executable, "-m", "harness.saves", "saves.json", "train", *words, "--output-dir", "run"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(f"rewardlab train failed:\n{answer.stdout[-2000:]}\n{answer.stderr[-2000:]}")
    saves: Any = read_json(place / "saves.json")
    facts = {f"{save['folder']} after {save['step']}: {name}": save[name] for save in saves["saves"] for name in NOTED}
    seconds, busy = time.perf_counter() - started, _processor_seconds() - busy
    return Sample(wall=seconds, cpu=busy, facts=facts)


def _processor_seconds() -> float:
    """Of all processes that this one has started and that have ended, and of those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def models(run_folder: Path) -> dict[str, str]:
    """SHA-256 of every file of every model that a run has saved."""
    folders = (run_folder / "best", *run_folder.glob("step_*"))
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(run_folder).as_posix(): sha256_file(path) for path in files}


def measure(name: str, words: Sequence[str], codes: Mapping[str, Path], work: Path, repeats: int) -> dict[str, Any]:
    """Samples of both sides of a kind of run, and the files in which the models that they leave differ."""
    print(name, flush=True)
    found: set[str] = set()
    left: dict[str, dict[str, str]] = {}

    def stepper(side: str) -> Sample:
        sample = run(codes[side], words, work / side)
        digests = models(work / side / "run")
        for other in left.values():
            found.update(file for file in {*digests, *other} if digests.get(file) != other.get(file))
        left[side] = digests
        return sample

    samples = interleave({side: lambda side=side: stepper(side) for side in SIDES}, repeats=repeats, warmup=1).samples
    return {
        "samples": {side: [vars_of(sample) for sample in samples[side]] for side in SIDES},
        "timed": samples,
        "files": len(left["after"]),
        "different": sorted(found),
    }


def vars_of(sample: Sample) -> dict[str, Any]:
    """A sample as JSON."""
    return {"seconds": sample.wall, "processor_seconds": sample.cpu, "saves": dict(sample.facts)}


def rows_of(name: str, timed: Mapping[str, Sequence[Sample]]) -> list[list[object]]:
    """A row for each side: the command, the saves together, and the passes of each save."""
    rows = []
    for side in SIDES:
        facts = [sample.facts for sample in timed[side]]
        saving = [sum(seconds for key, seconds in one.items() if key.endswith("seconds")) for one in facts]
        passes = {key.removesuffix(": passes"): value for key, value in facts[-1].items() if key.endswith("passes")}
        walls = [sample.wall for sample in timed[side]]
        rows.append(
            [
                name,
                side,
                f"{results.show(_median(walls))} ({results.show(min(walls))} to {results.show(max(walls))})",
                results.show(_median([sample.cpu for sample in timed[side]])),
                f"{results.show(_median(saving))} ({results.show(min(saving))} to {results.show(max(saving))})",
                f"{sum(passes.values()):.0f}",
                ", ".join(f"{place} {count:.0f}" for place, count in passes.items()),
            ]
        )
    return rows


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both kinds with both codes, compare, write. Returns 1 if a model differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="commit to compare the working tree with; without it, with itself")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", default="generated", help="a file of pairs, or `generated`")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["REWARDLAB_CACHE"] = str(work / "cache")
        codes = {"after": work / "after-code" / "src"}
        shutil.copytree(ROOT / "src", codes["after"], ignore=shutil.ignore_patterns("__pycache__"))
        codes["before"] = codes["after"]
        if options.before:
            with checkout(options.before, work) as before:
                codes["before"] = before / "src"
        words = ["--model", workload.model_folder(options.model, work, layers=None)]
        words += ["--dataset", str(first_rows(options.data, options.pairs, work))]
        found = {kind: measure(kind, [*words, *RUNS[kind]], codes, work, options.repeats) for kind in options.kinds}
    timed = {kind: measured.pop("timed") for kind, measured in found.items()}
    page = _page(options, found, timed)
    tag = f"{Path(options.model).name}.{options.pairs}"
    after = machine.load_average()
    device = torch.device("cpu")
    results.write(
        "saved_models", tag, page=page, data={"kinds": found}, options=options, device=device, load=(load, after)
    )
    for kind, measured in found.items():
        if measured["different"]:
            print(f"{kind}: models differ in {', '.join(measured['different'])}", file=sys.stderr)
    return int(any(measured["different"] for measured in found.values()))


def _page(options: argparse.Namespace, found: Mapping[str, Mapping[str, Any]], timed: Mapping[str, Any]) -> list[str]:
    """The lines of the page, ratios first."""
    ratios = []
    for kind in found:
        walls = [[sample.wall for sample in timed[kind][side]] for side in SIDES]
        rounds = [slow / fast for slow, fast in zip(*walls, strict=True)]
        ratios.append(
            f"**{results.show(_median(rounds))}x** for a whole run ({kind}; rounds {results.show(min(rounds))} to "
            f"{results.show(max(rounds))})"
        )
    head = ["run", "code", "seconds of the command", "of processors", "seconds of its saves", "passes", "passes a save"]
    differing = sum(len(measured["different"]) for measured in found.values())
    return [
        "# The models that a run saves: seconds and forward passes, before and after",
        "",
        f"{', '.join(ratios)}.",
        "",
        f"{Path(options.model).name}, {options.pairs} pairs of {Path(options.data).name}; whole commands, one warm-up "
        f"and {options.repeats} rounds in turn, medians and ranges. Reading, loading, training, evaluations, saves and "
        f"the verification of the chosen model are in the seconds of a command.",
        "",
        results.table(head, [row for kind in found for row in rows_of(kind, timed[kind])]),
        f"Files of saved models that differ in any bit between the two codes, or between rounds: {differing} of "
        f"{sum(measured['files'] for measured in found.values())}.",
        "",
        *(f"- {kind}: `{' '.join(RUNS[kind])}`" for kind in found),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
