"""What tests of the command line share: calls, refusals and rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.training.settings.config import RewardTrainerConfig

BASE = ["--model", "base", "--dataset", "pairs.jsonl"]
DEFAULTS = RewardTrainerConfig.of(model="base", dataset=("pairs.jsonl",))
ROW = {"prompt": "How do I keep basil?", "chosen": "Water it.", "rejected": "No."}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the user reads when a command is refused: one message after `error: `, exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    return only_message(capsys.readouterr().err)


def only_message(stderr: str) -> str:
    """The one error message in what was written to stderr."""
    assert "Traceback" not in stderr
    _, *messages = re.split(r"^error: ", stderr, flags=re.MULTILINE)
    assert len(messages) == 1, stderr
    return messages[0]


def in_process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """`python -m rewardlab` as a shell would run it."""
    command = [sys.executable, "-m", "rewardlab", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def done_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported everything, so it takes no start of Python."""
    capsys.readouterr()
    status: Any = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        status = stopped.code
    told = capsys.readouterr()
    return subprocess.CompletedProcess(list(map(str, arguments)), status, told.out, told.err)


def write_rows(path: Path, *rows: object) -> Path:
    """JSONL; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def short_run(base_model: Path, folder: Path) -> list[object]:
    """`train` for two steps on the tiny model; the dataset is still to be named."""
    settings = "--steps 2 --batch-size 4 --max-seq-len 128 --eval-every 2 --lr 1e-3"
    return ["train", "--model", base_model, "--output-dir", folder, *settings.split()]


def tiny_reward_model(folder: Path, *, provenance: Mapping[str, object] | None = None) -> Path:
    """Save a tiny reward model with random weights."""
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance=provenance or {})
    return folder
