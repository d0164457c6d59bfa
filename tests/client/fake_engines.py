"""Small servers that speak the dialect of each engine exactly, with the habits that spoil scores.

Their model is a table: the canaries have their recorded scores, everything else a number made of its tokens.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from rewardlab.client.protocol import (
    ScoredGroup,
    ScoreRequest,
    ScoreResponse,
    ServedModel,
    SpecResponse,
    Usage,
    WireCanary,
    WireMessage,
)
from rewardlab.core.spec import RewardSpec
from rewardlab.core.types import Message
from rewardlab.data.chat import Renderer, to_messages
from rewardlab.data.prompts import conversations_of

Reply = tuple[int, Any, dict[str, str]]


@dataclass
class Model:
    """A reward model as a table."""

    spec: RewardSpec
    renderer: Renderer
    precision: str = "float32"
    fault: str | None = None
    """A fault under which it scores its canaries."""

    def score(self, token_ids: Sequence[int]) -> float:
        """The raw score of tokens."""
        for canary in self.spec.canaries:
            if list(token_ids) == canary.token_ids:
                reference = canary.references.get(self.precision, canary.score)
                return reference if self.fault is None else canary.decoys.get(self.fault, canary.score)
            if "special_tokens" in canary.decoys and list(token_ids) == self.forged(canary.messages):
                return canary.decoys["special_tokens"]
            if list(token_ids) == [canary.token_ids[0], *canary.token_ids] and "double_bos" in canary.decoys:
                return canary.decoys["double_bos"]
        return number_of(token_ids)

    def forged(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation whose typed control tokens are read as such, as every engine reads texts."""
        text = self.renderer.text(to_messages(messages))
        return self.renderer.tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokens(self, conversation: Sequence[Message]) -> list[int]:
        """The tokens of a conversation."""
        return self.renderer.token_ids(tuple(conversation)).tolist()


def number_of(token_ids: Sequence[int]) -> float:
    """A score from -8 to 8, another one for other tokens."""
    return zlib.crc32(json.dumps(list(token_ids)).encode()) / 2**28 - 8


def sigmoid(score: float) -> float:
    """What vLLM makes of a score unless it is asked not to."""
    return 1 / (1 + math.exp(-score))


@dataclass
class Fake:
    """What the servers have in common: they count, and do what a test hands them first."""

    model: Model
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """(path, body) of every request."""
    headers: list[httpx2.Headers] = field(default_factory=list)
    """Those of every request."""
    first: list[Callable[[str, Any], Reply | None]] = field(default_factory=list)
    """Done in place of the usual answer, from the front, each once for a request for scores; None goes on."""
    token: str | None = None
    scoring: tuple[str, ...] = ()

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content) if request.content else None
        path = request.url.path.removeprefix("/behind")
        self.asked.append((path, body))
        self.headers.append(request.headers)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return answer(401, {"error": "Unauthorized"})
        if path in self.scoring and self.first and (reply := self.first.pop(0)(path, body)) is not None:
            return answer(*reply)
        return answer(*self.reply(path, body))

    def reply(self, path: str, body: Any) -> Reply:
        """(status, JSON or text, headers)."""
        raise NotImplementedError

    @property
    def paths(self) -> list[str]:
        """Paths that were asked for."""
        return [path for path, _ in self.asked]

    @property
    def transport(self) -> dict[str, Any]:
        """Options for a client that is to talk to this server."""
        return {"transport": httpx2.MockTransport(self)}


def answer(status: int, values: Any, headers: dict[str, str] | None = None) -> httpx2.Response:
    """A response; a text is sent as it is, and NaN as Python writes it."""
    content = values if isinstance(values, str) else json.dumps(values)
    return httpx2.Response(status, content=content.encode(), headers=headers or {})


def openapi(*paths: str) -> Reply:
    """A list of routes as FastAPI writes it."""
    return 200, {"openapi": "3.1.0", "info": {"title": "FastAPI"}, "paths": {path: {} for path in paths}}, {}


NOT_FOUND: Reply = (404, {"detail": "Not Found"}, {})


@dataclass
class FakeVllm(Fake):
    """vLLM: a sigmoid unless `use_activation` is false; texts get the tokenizer's own tokens unless told otherwise."""

    routes: tuple[str, ...] = ("/classify", "/pooling", "/score", "/v1/score", "/rerank", "/tokenize", "/version")
    names: tuple[str, ...] = ("rm",)
    obeys: bool = True
    """Whether it heeds `use_activation`."""
    scoring: tuple[str, ...] = ("/classify", "/pooling")

    def reply(self, path: str, body: Any) -> Reply:
        if path == "/openapi.json":
            return openapi(*self.routes, "/v1/models")
        if path == "/version":
            return 200, {"version": "0.32.0"}, {}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]}, {}
        if path not in self.scoring or path not in self.routes:
            return NOT_FOUND
        if body.get("model", self.names[0]) not in self.names:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}, {}
        scores = [self.model.score(self._tokens(item, body)) for item in self._items(body["input"])]
        if body.get("use_activation", True) or not self.obeys:
            scores = [sigmoid(score) for score in scores]
        if path == "/classify":
            data = [{"index": n, "label": "LABEL_0", "probs": [s], "num_classes": 1} for n, s in enumerate(scores)]
        else:
            assert body["task"] == "classify"
            data = [{"index": n, "object": "pooling", "data": [score]} for n, score in enumerate(scores)]
        return 200, {"id": "x", "object": "list", "model": "rm", "data": data, "usage": {"prompt_tokens": 1}}, {}

    def _items(self, given: Any) -> list[Any]:
        one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if one else list(given)

    def _tokens(self, item: Any, body: Any) -> list[int]:
        if not isinstance(item, str):
            return item
        ids = self.model.renderer.tokenizer(item, add_special_tokens=False)["input_ids"]
        return ids if not body.get("add_special_tokens", True) else [ids[0], *ids]


@dataclass
class FakeSglang(Fake):
    """SGLang: raw at its own /classify and /v1/embeddings, a softmax at /v1/classify."""

    routes: tuple[str, ...] = ("/classify", "/v1/classify", "/v1/embeddings", "/get_server_info", "/get_model_info")
    scoring: tuple[str, ...] = ("/classify", "/v1/embeddings")

    def reply(self, path: str, body: Any) -> Reply:
        if path == "/openapi.json":
            return openapi(*self.routes, "/v1/models", "/generate", "/flush_cache")
        if path == "/get_server_info":
            return 200, {"version": "0.5.23", "dtype": "auto"}, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "rm"}]}, {}
        if path not in self.routes:
            return NOT_FOUND
        if path == "/classify":
            ids = body["input_ids"]
            one = isinstance(ids[0], int)
            rows = [
                {"embedding": [self.model.score(item)], "meta_info": {"id": "x", "prompt_tokens": len(item)}}
                for item in ([ids] if one else ids)
            ]
            return 200, rows[0] if one else rows, {}
        if path == "/v1/embeddings":
            assert body["model"] == "rm"
            data = [
                {"object": "embedding", "embedding": [self.model.score(item)], "index": number}
                for number, item in enumerate(body["input"])
            ]
            return 200, {"object": "list", "data": data, "model": "rm", "usage": {}}, {}
        return 200, {"data": [{"index": 0, "label": "LABEL_0", "probs": [1.0], "num_classes": 1}]}, {}


@dataclass
class FakeOwn(Fake):
    """Our server, by the protocol. Its digest can change between two requests."""

    digest: str = "a" * 64
    names: tuple[str, ...] = ("default", "other")
    dtype: str = "float32"
    max_length: int = 256
    shift: float = 0.0
    """Added to every score of a conversation that is rendered here."""
    decoys: bool = False
    """Whether it tells what each canary scores under every fault."""
    most: int = 10**9
    """Most conversations of a request."""
    scoring: tuple[str, ...] = ("/v1/score",)

    def reply(self, path: str, body: Any) -> Reply:
        if path == "/v1/spec":
            return 200, self.spec().model_dump(), {}
        if path != "/v1/score":
            return NOT_FOUND
        request = ScoreRequest.model_validate(body)
        if request.digest not in (None, self.digest):
            return 409, error_body("wrong_digest", 409, "another model is served now"), {}
        if sum(len(group.replies) for group in request.groups or ()) + len(request.token_ids or ()) > self.most:
            return 413, error_body("too_large", 413, f"more than {self.most} conversations"), {}
        return 200, self.scored(request).model_dump(), {}

    def spec(self) -> SpecResponse:
        """What it tells of itself."""
        canaries = [
            WireCanary(
                name=canary.name,
                messages=[WireMessage(**message) for message in canary.messages],
                token_ids=canary.token_ids,
                score=canary.score,
                references=canary.references,
                decoys=canary.decoys if self.decoys else {},
            )
            for canary in self.model.spec.canaries
        ]
        served = [
            ServedModel(
                name=name,
                digest=self.digest,
                template_hash=self.model.spec.renderer.template_hash,
                dtype=self.dtype,
                tolerance=1e-4 if self.dtype == "float32" else 0.15,
                max_length=self.max_length,
                outputs=["raw"],
                canaries=canaries,
            )
            for name in self.names
        ]
        return SpecResponse(version="0", models=served)

    def scored(self, request: ScoreRequest) -> ScoreResponse:
        """The answer to a request, by the protocol."""
        rows: list[list[list[int]]] = [[ids] for ids in request.token_ids or ()]
        for group in request.groups or ():
            prompt = group.prompt if isinstance(group.prompt, str) else [m.model_dump() for m in group.prompt]
            conversations = conversations_of(prompt, group.replies, bare=False)
            rows.append([self.model.tokens(conversation) for conversation in conversations])
        shift = self.shift if request.token_ids is None else 0.0
        groups = []
        for row in rows:
            wrong = {k: f"{len(ids)} tokens" for k, ids in enumerate(row) if len(ids) > self.max_length}
            assert not wrong or request.on_error == "null"
            groups.append(
                ScoredGroup(
                    scores=[None if k in wrong else self.model.score(ids) + shift for k, ids in enumerate(row)],
                    num_tokens=[len(ids) for ids in row],
                    truncated_tokens=[0] * len(row),
                    errors=wrong,
                )
            )
        return ScoreResponse(
            model=request.model or self.names[0],
            digest=self.digest,
            output="raw",
            groups=groups,
            usage=Usage(computed_tokens=1, cached_tokens=0),
        )


def error_body(kind: str, code: int, message: str) -> dict[str, Any]:
    """An error of our server."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
