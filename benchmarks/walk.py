"""How much of the package runs for one training step, one `score()` and one `eval`, and what `--help` costs.

    scripts/bench walk                   the working tree
    scripts/bench walk --before main     beside another commit

Counts the modules of rewardlab whose functions are called, by profiling; names the longest function and the time that
`rewardlab train --help` takes (median of five starts). Tiny models, on the CPU.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness import results, tiny
from same_runs import ROOT, checkout

STARTS: Final = 5
TRAIN: Final = (
    *("--lr", "3e-3", "--batch-size", "8", "--max-seq-len", "160", "--steps", "2", "--eval-fraction", "0.2"),
    *("--report-to", "none", "--precision", "fp32", "--attention-backend", "segments", "--linear-backend", "torch"),
)
TRACER: Final = '''
import cProfile, json, sys
from pathlib import Path
import rewardlab
from rewardlab import cli

package = str(Path(rewardlab.__file__).parent)
work, found = Path(sys.argv[1]), {}


def counted(name, call):
    """`call`, its modules noted."""

    def traced(*arguments, **settings):
        profile = cProfile.Profile()
        try:
            return profile.runcall(call, *arguments, **settings)
        finally:
            files = {entry.code.co_filename for entry in profile.getstats() if not isinstance(entry.code, str)}
            own = [file for file in files if file.startswith(package)]
            found[name] = sorted(Path(file).relative_to(package).as_posix() for file in own)

    return traced


def train():
    import rewardlab.training.run as run

    homes = [module for name, module in list(sys.modules.items()) if name.startswith("rewardlab.training")]
    trainer = next(module.Trainer for module in homes if hasattr(module, "Trainer"))
    trainer.train_step = counted("one training step", trainer.train_step)
    run.verify_in_clean_process = rewardlab.verify
    cli.main(json.loads(sys.argv[2]))


train()
scorer = rewardlab.load(work / "run" / "step_2")
counted("one score()", scorer.score_replies)([{"role": "user", "content": "How?"}], ["So.", "Like that."])
counted("one eval", cli.main)(json.loads(sys.argv[3]))
print("FOUND" + json.dumps(found))
'''


def walked(source: Path, work: Path) -> dict[str, list[str]]:
    """What runs -> the modules of `source` that it calls."""
    model = tiny.write_tiny(work / "model", "tiny-llama")
    rows = [{"prompt": f"Question {k}?", "chosen": f"Yes, {k}.", "rejected": f"No {k}."} for k in range(60)]
    pairs = work / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = ["train", "--model", model, "--dataset", str(pairs), "--output-dir", str(work / "run"), *TRAIN]
    chosen = str(work / "run" / "step_2")
    judge = ["eval", "--model", chosen, "--dataset", str(pairs), "--output-dir", str(work / "eval")]
    answer = subprocess.run(
        [sys.executable, "-c", TRACER, str(work), json.dumps(train), json.dumps(judge)],
        env=_environment(source),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    line = next(line for line in answer.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, list[str]] = json.loads(line.removeprefix("FOUND"))
    return found


def _environment(source: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "REWARDLAB_CACHE": str(source / ".cache")}


def longest_function(source: Path) -> tuple[int, str]:
    """(lines, module:name) of the longest function."""
    lengths = []
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                name = f"{path.relative_to(source / 'rewardlab')}:{node.name}"
                lengths.append((node.end_lineno - node.lineno + 1, name))
    return max(lengths)


def seconds_of_help(source: Path) -> float:
    """Median time of `rewardlab train --help`, in a new process each time."""
    seconds = []
    for _ in range(STARTS):
        started = time.perf_counter()
        command = [sys.executable, "-m", "rewardlab", "train", "--help"]
        subprocess.run(command, env=_environment(source), capture_output=True, check=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def facts_of(source: Path) -> dict[str, Any]:
    """Everything that is told of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        counts = {name: str(len(modules)) for name, modules in walked(source, Path(folder)).items()}
    lines, name = longest_function(source)
    modules = sum(path.name != "__init__.py" for path in source.rglob("*.py"))
    told = {f"modules that {what} executes": count for what, count in counts.items()}
    return {
        "modules": str(modules),
        **told,
        "longest function": f"{lines} lines ({name})",
        "`rewardlab train --help`": f"{seconds_of_help(source):.2f} s",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="commit to show beside the working tree")
    options = parser.parse_args(arguments)
    columns = {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.before:
            with checkout(options.before, Path(scratch)) as folder:
                columns[options.before] = facts_of(folder / "src")
        columns["working tree"] = facts_of(ROOT / "src")
    rows = [[what, *(column[what] for column in columns.values())] for what in columns["working tree"]]
    print(results.table(["", *columns], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
