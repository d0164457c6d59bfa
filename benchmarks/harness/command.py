"""Commands of rewardlab in processes of their own, and a reward model that they make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import workload
from rewardlab.data.synthetic import write_dataset

PAIRS, BATCH = 32, 8


def rewardlab(*words: str) -> str:
    """Run a command of rewardlab and return what it printed. SystemExit with its words if it fails."""
    answer = subprocess.run(
        [sys.executable, "-m", "rewardlab", *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if answer.returncode:
        raise SystemExit(f"rewardlab {words[0]} failed:\n{answer.stdout[-2000:]}\n{answer.stderr[-2000:]}")
    return answer.stdout


def trained(model: str, work: Path, *, steps: int, max_seq_len: int) -> tuple[str, Path]:
    """Return the folder of a base model and that of a reward model, of which all weights were trained for `steps`
    steps on generated preferences, in float32."""
    base = workload.model_folder(model, work, layers=None)
    run, data = work / "run", work / "data"
    write_dataset(data, num_train=PAIRS, num_test=2, seed=0)
    rewardlab(
        *("train", "--model", base, "--dataset", str(data / "train.jsonl"), "--output-dir", str(run)),
        *("--steps", str(steps), "--batch-size", str(BATCH), "--precision", "fp32", "--lr", "2e-5"),
        *("--max-seq-len", str(max_seq_len), "--no-baselines", "--no-checkpoints", "--report-to", "none"),
    )
    return base, run / f"step_{steps}"
