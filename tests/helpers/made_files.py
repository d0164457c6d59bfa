"""One small folder with a file of every kind that a command reads: a study, gold data, rollouts, scores."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from rewardlab.core.files import write_jsonl
from rewardlab.core.types import Message
from rewardlab.rl.rollout_log import RolloutLog, RolloutRow, key_of
from study_folders import finished_study

REPLIES = ("Give it light and water.", "No idea.", "Ask me later, please.")


def make_files(folder: Path) -> Path:
    """Write the files into a folder and return it."""
    finished_study(folder, prompts=12)
    rows = [
        {"id": str(n), "prompt": f"What does plant {n} need?", "responses": list(REPLIES), "gold": [2.0, -1.0, 0.1 * n]}
        for n in range(12)
    ]
    (folder / "gold").mkdir()
    write_jsonl(folder / "gold/labels.jsonl", rows)
    write_jsonl(folder / "gold/samples.jsonl", [{**row, "gold": None} for row in rows])
    stages = {"folder": "gold", "build": {"test_fraction": 0.3}, "check": {}}
    (folder / "gold.yaml").write_text(yaml.safe_dump(stages))
    log = RolloutLog(folder / "rl")
    for step in range(8):
        turns = [(Message("user", f"Plant {n}?"), Message("assistant", f"{REPLIES[n % 3]} {step}")) for n in range(6)]
        log.write(
            [
                RolloutRow(
                    step=step, prompt_key=key_of(talk), conversation=talk, reward=0.1 * step, evidence={"gold": 0.2 * n}
                )
                for n, talk in enumerate(turns)
            ]
        )
    log.close()
    for name in ("a", "b"):
        scores = [{"id": number, "scores_chosen": number % 3, "scores_rejected": 1} for number in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in scores))
    return folder
