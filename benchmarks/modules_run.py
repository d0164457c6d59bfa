"""How many modules a reader passes who follows one optimiser step, one score() or one eval, in two commits.

    scripts/bench modules_run --before 2add5d7

A module counts if one of its functions is called in the same thread between the call of the root function and its
return; what is only imported does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from harness import results, tiny
from rewardlab.data.synthetic import write_dataset
from same_runs import ROOT, TRAIN, Code, checkout

ROOTS: Final[Mapping[str, tuple[str, str]]] = {
    "one step of training": (".trainer", "train_step"),
    "one score()": ("rewardlab.score", "score"),
    "one eval": ("rewardlab.cli", "main"),
}
"""What is followed -> how its module's name ends, and the function where it begins."""
TRACE: Final = """
import json, sys
from pathlib import Path
from rewardlab.cli import main
from rewardlab.data import limits
# Python 3.11 never returns from a traced call in a thread in which a pending error was taken back.
limits._raise_in = lambda thread, error: None
target, ending, function, *words = sys.argv[1:]
state, seen = {"root": None, "done": False}, set()
def watch(frame, event, _):
    name = frame.f_globals.get("__name__", "")
    if state["done"] or not name.startswith("rewardlab"):
        return None
    if state["root"] is None and name.endswith(ending) and frame.f_code.co_name == function:
        state["root"] = frame
        return until_the_end
    if state["root"] is not None and frame.f_code.co_name != "<module>":
        seen.add(name)
    return None
def until_the_end(frame, event, _):
    state["done"] = state["done"] or event == "return"
    return until_the_end
sys.settrace(watch)
try:
    main(words)
finally:
    sys.settrace(None)
    Path(target).write_text(json.dumps(sorted(seen)), encoding="utf-8")
"""


def modules(code: Code, root: tuple[str, str], *words: str, work: Path) -> list[str]:
    """Modules whose functions run below the root. RuntimeError if the command fails or never comes to the root."""
    target = work / "modules.json"
    target.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(target), *root, *words],
        cwd=work,
        env=code.environment(),
        capture_output=True,
        text=True,
    )
    found: list[str] = json.loads(target.read_text(encoding="utf-8"))
    if done.returncode or not found:
        raise RuntimeError(f"{code.name}: {' '.join(words[:1])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return found


def followed(code: Code, work: Path) -> dict[str, list[str]]:
    """What is followed -> the modules it passes, with the code of one commit."""
    model, pairs, run = str(work / "model"), str(work / "pairs"), str(work / code.name / "run")
    train = ("train", "--model", model, "--dataset", pairs, *TRAIN, "--output-dir", run)
    score = ("score", "--model", f"{run}/step_8", "--input", str(work / "asked.jsonl"))
    judge = ("eval", "--model", f"{run}/step_8", "--dataset", pairs, "--hf-split", "test")
    commands = {
        "one step of training": train,
        "one score()": (*score, "--output", str(work / code.name / "scored.jsonl")),
        "one eval": (*judge, "--output-dir", str(work / code.name / "eval")),
    }
    return {name: modules(code, ROOTS[name], *words, work=work) for name, words in commands.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both counts of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="HEAD", help="commit to compare the working tree with")
    parser.add_argument("--names", action="store_true", help="name the modules of the working tree")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        tiny.write_tiny(work / "model", "tiny-llama")
        write_dataset(work / "pairs", num_train=80, num_test=24, seed=3)
        (work / "asked.jsonl").write_text('{"prompt": "Why?", "response": "So."}\n', encoding="utf-8")
        with checkout(options.before, work) as folder:
            before, after = (followed(code, work) for code in (Code("old", folder), Code("new", ROOT)))
    rows = [[name, str(len(before[name])), str(len(after[name]))] for name in ROOTS]
    print(results.table(["followed", f"modules in {options.before}", "modules now"], rows))
    if options.names:
        for name in ROOTS:
            print(f"{name}: {', '.join(module.removeprefix('rewardlab.') for module in after[name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
