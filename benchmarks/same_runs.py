"""The same commands with the code of another commit and with this one: losses, weights and scores agree bit for bit.

    scripts/bench same_runs --before main

For changes that move code and compute nothing else: run it before such a change is committed, and after each of
several. Tiny models and generated preferences; ends with an error that names what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import safe_open

from harness import results, tiny
from rewardlab.analysis.metrics import current_columns
from rewardlab.core.files import sha256_file
from rewardlab.data.synthetic import generate, write_dataset

ROOT: Final = Path(__file__).resolve().parents[1]
CLOCK: Final = (
    "tokens_per_second",
    "pairs_per_second",
    "model_tflops_per_second",
    "mfu",
    "peak_memory_gib",
    "seconds",
    "eval_seconds",
)
"""Columns of metrics.jsonl that depend on the machine's mood."""
ABSENT = object()
STOPPED: Final = 75
"""Exit status of a run that was asked to end."""
TRAIN: Final = (
    *("--lr", "3e-3", "--batch-size", "8", "--max-seq-len", "160", "--eval-fraction", "0.2", "--steps", "8"),
    *("--log-every", "1", "--eval-every", "4", "--checkpoint-every", "2", "--train-eval-limit", "16"),
    *("--micro-token-budget", "512", "--test-split", "test", "--eval-limit", "24", "--report-to", "none"),
    *("--attention-backend", "segments", "--linear-backend", "torch", "--attention", "shared", "--cache-dir", "none"),
)
KINDS: Final[Mapping[str, Sequence[str]]] = {
    "full": (*TRAIN, "--precision", "fp32"),
    "full, bf16": (*TRAIN, "--precision", "bf16", "--save-every", "4"),
    "LoRA": (*TRAIN, "--precision", "fp32", "--lora", "--lora-rank", "4", "--lora-dropout", "0.1"),
    "K-wise": (*TRAIN, "--precision", "fp32", "--kwise-loss", "plackett-luce", "--center-lambda", "0.01"),
}
LONG: Final = ("--steps", "200", "--eval-every", "50", "--log-every", "10", "--checkpoint-limit", "50")
"""For a run that is to be stopped on its way."""
PROBE: Final = ("--max-seq-len", "160", "--test-split", "test", "--layers", "1", "last", "--precision", "fp32")


@dataclass(frozen=True)
class Code:
    """A checkout of rewardlab."""

    name: str
    folder: Path

    def environment(self) -> dict[str, str]:
        """The environment in which this checkout is imported, with one thread."""
        path = os.pathsep.join([str(self.folder / "src"), str(ROOT / "benchmarks")])
        return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    def start(self, *words: str, cwd: Path) -> subprocess.Popen[str]:
        """`rewardlab` of this checkout, begun."""
        return subprocess.Popen(
            [sys.executable, "-m", "rewardlab", *words],
            cwd=cwd,
            env=self.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, cwd: Path) -> None:
        """The same, to its end. RuntimeError unless that is a good one."""
        self.finish(self.start(*words, cwd=cwd), words, status=0)

    def finish(self, process: subprocess.Popen[str], words: Sequence[str], *, status: int) -> None:
        """Wait for a process. RuntimeError unless it ends with this status."""
        _, said = process.communicate()
        if process.returncode != status:
            command = f"rewardlab {' '.join(words)}"
            raise RuntimeError(f"{self.name}: {command} ended with {process.returncode}:\n{said}")


@contextmanager
def checkout(commit: str, work: Path) -> Iterator[Path]:
    """The files of a commit in a folder of their own."""
    folder = work / "before"
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    yield folder


def write_rankings(folder: Path, *, num_train: int, num_test: int) -> None:
    """K-wise rows with four replies each, the best first by true utility."""
    folder.mkdir()
    for split, count in (("train", num_train), ("test", num_test)):
        pairs = generate(2 * count, seed=5, topics=split)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for one, other in zip(pairs[::2], pairs[1::2], strict=True):
                replies = [reply[-1].content for pair in (one, other) for reply in pair.preference.replies]
                scores = [score + 1e-6 * n for n, score in enumerate((*one.utilities, *other.utilities))]
                prompt = one.preference.prompt[-1].content
                file.write(json.dumps({"prompt": prompt, "responses": replies, "scores": scores}) + "\n")


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same in two folders of runs, evaluations or scores."""
    found = []
    names = [{path.relative_to(folder).as_posix() for path in folder.rglob("*")} for folder in (one, other)]
    for name in sorted(names[0] & names[1]):
        mine, theirs = one / name, other / name
        if name.endswith(".safetensors") and "/state/" not in f"/{name}" and "checkpoints/" not in name:
            found += [f"{name}: {tensor}" for tensor in other_tensors(mine, theirs)]
        elif name.endswith("metrics.jsonl"):
            found += [f"{name}: {column}" for column in other_columns(rows_of(mine), rows_of(theirs))]
        elif name.endswith((".scores.jsonl", "scored.jsonl")) and sha256_file(mine) != sha256_file(theirs):
            found.append(name)
    wanted = (".scores.jsonl", "metrics.jsonl", "model.safetensors", "scored.jsonl")
    found += [f"{name}: in one of them alone" for name in sorted(names[0] ^ names[1]) if name.endswith(wanted)]
    if not any(name.endswith(wanted) for name in names[0]):
        found.append("nothing to compare")
    return found


def rows_of(path: Path) -> list[dict[str, object]]:
    """metrics.jsonl without the clock, columns of earlier versions by the names of today."""
    rows = [current_columns(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def other_columns(mine: Sequence[Mapping[str, object]], theirs: Sequence[Mapping[str, object]]) -> list[str]:
    """Columns of two tables of rows that are not the same."""
    if len(mine) != len(theirs):
        return [f"{len(mine)} rows, {len(theirs)} rows"]
    pairs = list(zip(mine, theirs, strict=True))
    columns = dict.fromkeys(name for rows in pairs for row in rows for name in row)
    return [
        name if any(name in one and name in other for one, other in pairs) else f"{name} in one of them alone"
        for name in columns
        if any(one.get(name, ABSENT) != other.get(name, ABSENT) for one, other in pairs)
    ]


def other_tensors(one: Path, other: Path) -> list[str]:
    """Tensors of two files that are not the same bits."""
    with safe_open(one, framework="np") as mine, safe_open(other, framework="np") as theirs:
        names = set(mine.keys())
        if names != set(theirs.keys()):
            return ["other names"]
        return [
            name
            for name in sorted(names)
            if not np.array_equal(mine.get_tensor(name).view(np.uint8), theirs.get_tensor(name).view(np.uint8))
        ]


def compare(before: Code, after: Code, work: Path) -> dict[str, list[str]]:
    """Scenario -> what differs."""
    model = tiny.write_tiny(work / "model", "tiny-llama")
    write_dataset(work / "pairs", num_train=80, num_test=24, seed=3)
    write_rankings(work / "ranked", num_train=60, num_test=12)
    found: dict[str, list[str]] = {}

    def both(scenario: str, *words: str) -> None:
        for code in (before, after):
            code.run(*words, "--output-dir", str(work / code.name / scenario), cwd=work)
        found[scenario] = differences(work / before.name / scenario, work / after.name / scenario)
        print(f"{scenario}: {'the same' if not found[scenario] else '; '.join(found[scenario][:5])}", flush=True)

    for kind, flags in KINDS.items():
        data = "ranked" if kind == "K-wise" else "pairs"
        both(kind, "train", "--model", model, "--dataset", str(work / data), *flags)
    both("probe", "probe", "--model", model, "--dataset", str(work / "pairs"), *PROBE)
    chosen = str(work / before.name / "full" / "step_8")
    both("eval", "eval", "--model", chosen, "--dataset", str(work / "pairs"), "--hf-split", "test")
    rows = [json.loads(line) for line in (work / "pairs/test.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = work / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": r["prompt"], "response": r["chosen"]}) + "\n" for r in rows))
    for code in (before, after):
        (work / code.name / "score").mkdir()
        target = work / code.name / "score" / "scored.jsonl"
        code.run("score", "--model", chosen, "--input", str(asked), "--output", str(target), cwd=work)
    found["score"] = differences(work / before.name / "score", work / after.name / "score")
    found["resume"] = resumed(before, after, model, work)
    for scenario in ("score", "resume"):
        print(f"{scenario}: {'the same' if not found[scenario] else '; '.join(found[scenario][:5])}", flush=True)
    return found


def resumed(before: Code, after: Code, model: str, work: Path) -> list[str]:
    """A run that the code before began, and that was stopped on its way, taken up by both."""
    run = work / "stopped"
    words = ("train", "--model", model, "--dataset", str(work / "pairs"), *KINDS["LoRA"], *LONG)
    begun = (*words, "--output-dir", str(run))
    process = before.start(*begun, cwd=work)
    while process.poll() is None and not (run / "checkpoints" / "step_2").is_dir():
        time.sleep(0.05)
    process.terminate()
    before.finish(process, begun, status=STOPPED)
    for code in (before, after):
        target = work / code.name / "resumed"
        shutil.copytree(run, target)
        code.run(*words, "--resume", "auto", "--output-dir", str(target), cwd=work)
    return differences(work / before.name / "resumed", work / after.name / "resumed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every scenario with both; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="HEAD", help="commit to compare the working tree with")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        with checkout(options.before, work) as folder:
            found = compare(Code("old", folder), Code("new", ROOT), work)
    rows = [[name, "; ".join(what) or "nothing"] for name, what in found.items()]
    print(results.table(["scenario", "what differs"], rows))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
