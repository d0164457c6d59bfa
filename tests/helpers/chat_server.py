"""A server with the chat API of OpenAI on the loopback address: replies by prompt and seed, and its faults."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loopback import Answering, listening

WORDS = ("basil", "needs", "light", "water", "and", "a", "warm", "place", "but", "no", "frost", "at", "all", "or", "it")


def reply_of(messages: list[dict[str, str]], seed: int) -> str:
    """What the model says."""
    digest = hashlib.sha256(json.dumps([messages, seed]).encode()).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest[: 3 + digest[0] % 5])


@dataclass
class ChatServer:
    """What was asked, and what becomes of the next requests: one entry each, None for an honest answer."""

    faults: list[Any] = field(default_factory=list)
    """`429`, `500`, `503`, `400` as numbers; `drop`, `none`, `two`, `nan`, `null`, `garbage`, `abort`; a float
    waits before."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    poisoned: str = ""
    """A prompt with this text always gets 500."""
    refused: str = ""
    """A prompt with this text always gets 400."""
    models: tuple[str, ...] = ("tiny-chat",)
    root: str | None = None
    """Where the weights are from, if not the name of the model."""
    says: Callable[[str], str] | None = None
    """What the model answers to a text, in place of a reply by prompt and seed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, body: dict[str, Any]) -> Any:
        """Note a request, and take its fault."""
        text = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            if self.poisoned and self.poisoned in text:
                return 500
            if self.refused and self.refused in text:
                return 400
            return self.faults.pop(0) if self.faults else None


@contextmanager
def chatting(server: ChatServer) -> Iterator[str]:
    """The address of a server."""

    class Handler(Answering):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(
                200,
                json.dumps({"data": [{"id": name, "root": server.root or name} for name in server.models]}).encode(),
            )

        def do_POST(self) -> None:
            body = json.loads(self.body())
            fault = server.next(body)
            if isinstance(fault, float):
                time.sleep(fault)
            if fault == "drop":
                self.close_connection = True
            elif isinstance(fault, int):
                self.answer(fault, json.dumps({"error": {"message": "no"}}).encode())
            elif fault == "garbage":
                self.answer(200, b"<html>")
            else:
                self.answer(200, json.dumps(_answer(body, fault, server.says)).encode())

    with listening(Handler) as url:
        yield url


def _answer(body: dict[str, Any], fault: Any, says: Callable[[str], str] | None) -> dict[str, Any]:
    text = says(body["messages"][-1]["content"]) if says else reply_of(body["messages"], body["seed"])
    num = len(text.split())
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None if fault == "null" else text},
        "finish_reason": "length" if num > 6 else "stop",
        "logprobs": {"content": [{"token": word, "logprob": -0.5} for word in text.split()]},
    }
    if fault == "abort":
        choice["finish_reason"] = "abort"
    if fault == "nan":
        choice["logprobs"]["content"][0]["logprob"] = float("nan")
    choices = {"none": [], "two": [choice, choice]}.get(fault, [choice]) if not isinstance(fault, float) else [choice]
    return {"choices": choices, "usage": {"completion_tokens": num, "prompt_tokens": 5}}
