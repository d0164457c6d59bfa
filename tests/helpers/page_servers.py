"""What stands in for servers and clusters that commands of pages talk to."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chat_server import ChatServer, chatting
from fake_slurm import FakeSlurm
from loopback import Answering, listening
from reward_models import served
from rewardlab.serve.http.config import HttpConfig

ADDRESS = re.compile(r"https?://[\w.-]+:\d+")
TOKEN = "a-token-of-more-than-16"
"""Stands in ADMIN_TOKEN."""


@contextmanager
def rewardlab_server(folder: Path) -> Iterator[str]:
    """Our own server in this process, which takes swaps and rendered texts."""
    http = HttpConfig(admin_token=TOKEN.encode(), allow_swap_from=(Path.cwd(),), accept_rendered=True)
    with served(folder, name="mine", http=http) as url:
        yield url


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """A server with vLLM's routes, whose scores of tokens are those of ours."""
    with rewardlab_server(folder) as ours:

        class Vllm(Answering):
            def do_GET(self) -> None:
                answers: dict[str, object] = {
                    "/openapi.json": {"paths": {path: {} for path in ("/classify", "/pooling", "/score", "/version")}},
                    "/version": {"version": "0.32.0"},
                    "/v1/models": {"object": "list", "data": [{"id": "rm", "object": "model"}]},
                }
                answer = answers.get(self.path)
                self.answer(200 if answer else 404, json.dumps(answer or {"detail": "Not Found"}).encode())

            def do_POST(self) -> None:
                asked = json.loads(self.body())
                assert self.path == "/classify"
                assert asked["use_activation"] is False
                ids = asked["input"] if isinstance(asked["input"][0], list) else [asked["input"]]
                request = urllib.request.Request(
                    f"{ours}/v1/score",
                    data=json.dumps({"token_ids": ids}).encode(),
                    headers={"content-type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=60) as reply:
                    groups = json.load(reply)["groups"]
                scores = [score for group in groups for score in group["scores"]]
                data = [{"index": n, "label": "L", "probs": [s], "num_classes": 1} for n, s in enumerate(scores)]
                self.answer(200, json.dumps({"object": "list", "model": "rm", "data": data}).encode())

        with listening(Vllm) as url:
            yield url


@contextmanager
def language_model(*, judges: bool) -> Iterator[str]:
    """A server with OpenAI's chat API, which replies, or prefers the first of two replies."""
    with chatting(ChatServer(says=(lambda text: "Both are short.\n[[A]]") if judges else None)) as url:
        yield url


@contextmanager
def cluster(folder: Path) -> Iterator[FakeSlurm]:
    """The programs of Slurm before all others of PATH; jobs wait."""
    slurm = FakeSlurm(folder)
    slurm.hold()
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{slurm.bin}{os.pathsep}{before}"
    try:
        yield slurm
    finally:
        os.environ["PATH"] = before


def backend_of(words: Sequence[str]) -> str:
    """What a command says to be at its addresses."""
    return words[words.index("--backend") + 1] if "--backend" in words else "rewardlab"
