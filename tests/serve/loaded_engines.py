"""What tests of the engine share: tiny saved models, requests in every form, and what the Scorer says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common import make_model, make_tokenizer
from rewardlab.artifact.save import Trained, save_reward_model
from rewardlab.client.protocol import ScoreRequest
from rewardlab.core.types import Message
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.model.config import ModelConfig
from rewardlab.model.load import load_reward_model
from rewardlab.score import Scorer
from rewardlab.serve.engine.local import LocalEngine

LONG = "Tell me about the basil in the kitchen and the light in Paris, and why it needs water. " * 2
NEAR = 2e-5
"""How near the scores of two ways to compute them are in float32."""


def request_of(values: Any) -> ScoreRequest:
    """A request from parsed JSON."""
    return ScoreRequest.model_validate(values)


def save_model(folder: Path, *, seed: int = 0, max_length: int = 256, **settings: Any) -> Path:
    """A tiny saved model; each seed has a head of its own."""
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=max_length))
    model = make_model(**settings)
    with torch.no_grad():
        model.head.weight.add_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    save_reward_model(folder, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


def score(engine: LocalEngine, **request: Any) -> list[list[float | None]]:
    """The scores of a request, by group."""
    return [list(group.scores) for group in answer(engine, **request).groups]


def answer(engine: LocalEngine, **request: Any) -> Any:
    """The whole answer to a request."""
    return engine.submit(engine.prepare(request_of(request))).result(timeout=60)


def expected(scorer: Scorer, request: ScoreRequest) -> list[list[float]]:
    """What the Scorer says of a request in any form, one conversation after the other."""
    if request.replies is not None:
        return [_alone(scorer, request.prompt, request.replies)]
    if request.groups is not None:
        return [_alone(scorer, group.prompt, group.replies) for group in request.groups]
    if request.conversations is not None:
        return [scorer.score([_turns(one)]) for one in request.conversations]
    raise AssertionError("token ids have no conversation")


def _alone(scorer: Scorer, prompt: Any, replies: list[str]) -> list[float]:
    given = prompt if isinstance(prompt, str) else _turns(prompt)
    return [scorer.score_replies(given, [reply])[0] for reply in replies]


def _turns(messages: Any) -> list[dict[str, str]]:
    return [message.model_dump() for message in messages]


def token_ids(scorer: Scorer, prompt: str, reply: str) -> list[int]:
    """The tokens of a prompt with a reply."""
    return scorer.renderer.render((Message("user", prompt),), (Message("assistant", reply),)).token_ids.tolist()


def save_adapter(folder: Path, base: Path, *, seed: int, **changes: Any) -> Path:
    """A folder as a LoRA run writes it, its adapter and head moved at random."""
    settings = {"model": str(base), "lora": True, "lora_rank": 3, "lora_alpha": 6.0, "precision": "fp32"}
    config = ModelConfig(**(settings | changes))
    model = load_reward_model(
        str(base), config, seed=seed, layout="shared", device=torch.device("cpu"), log=lambda line: None
    )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    save_reward_model(
        folder,
        model,
        renderer,
        beta=1.0,
        save_dtype=torch.float32,
        provenance={},
        source=Trained(adapter=(config, str(base))),
    )
    return folder
