"""A live endpoint in tests: a tiny reward model behind a server with one thing wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from common import make_model, make_tokenizer
from harness.fake_engine import FakeEngine, app_of, running
from harness.tiny import GROUPED, LLAMA3, SIZES, learn_slightly
from pages import blocks, read
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with scaled positions, whose weights are on no bfloat16 grid."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=512))
    model = make_model(config=LlamaConfig(**SIZES, **GROUPED, rope_parameters=LLAMA3))
    target = tmp_path_factory.mktemp("live") / "rm"
    learned = learn_slightly(model, renderer, directions=(1.0, -1.0))
    save_reward_model(target, learned, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return target


@pytest.fixture(scope="module")
def engine(folder: Path) -> FakeEngine:
    """What the server does, and does wrong."""
    return FakeEngine(folder)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    """The server."""
    with running(app_of(engine)) as address:
        yield address


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit status, what was printed, the message)."""
    status = 0
    try:
        main(["verify", *map(str, arguments)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def messages_on_page() -> list[str]:
    """The messages on docs/wrong-scores.md, each in one line."""
    found = "\n\n".join(block.text for block in blocks(read("wrong-scores.md"), "text"))
    return [" ".join(message.split()) for message in found.split("\n\n")]
