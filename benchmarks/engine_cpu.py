"""The server's engine beside a loop over requests: prompts that come again, asked in turn and all at once.

    scripts/bench engine_cpu --layers 30 --prompt-tokens 1500

Every variant scores the same requests, each of one prompt with `--replies` replies; a prompt comes `--requests` times,
other prompts between. `loop` is rewardlab's Scorer, one request after the other, as a script would do it. The cache of
prompts is empty at the start of every round. Ends with an error if scores differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from harness import machine, ours, random_model, results, timing
from harness.tiny import byte_tokenizer
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.client.protocol import ScoreRequest
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.model import attention
from rewardlab.model.config import DEFAULT_COMPUTE
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import wrap
from rewardlab.serve.engine.local import LocalEngine

CPU = torch.device("cpu")
SHAPE: Mapping[str, int] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 384,
}
"""Widths of SmolLM2-135M; the vocabulary is that of the tiny tokenizer."""
VARIANTS: Mapping[str, str] = {
    "loop": "the Scorer, one request after the other",
    "in turn": "the engine without a cache, one request after the other",
    "in turn, cached": "the engine with its cache, one request after the other",
    "at once": "the engine without a cache, all requests at once",
    "at once, cached": "the engine with its cache, all requests at once",
}
COMPARED = (("loop", "in turn, cached"), ("loop", "at once"), ("loop", "at once, cached"), ("loop", "in turn"))
NEAR = 1e-4


def save_random(folder: Path, *, layers: int, max_length: int) -> Path:
    """A reward-model folder with random weights in the shape of SmolLM2."""
    tokenizer = byte_tokenizer(["How do I keep basil alive indoors?"], vocab_size=350)
    config: Any = LlamaConfig(**SHAPE, num_hidden_layers=layers, max_position_embeddings=max_length, num_labels=1)
    classifier = random_model.build(disk_class_of(config), config, attention.NAME, seed=0, device=CPU)
    model = wrap(classifier, layout="shared", compute_dtype=torch.float32).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    renderer = build_renderer(tokenizer, RenderingConfig(max_seq_len=max_length))
    save_reward_model(folder, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


def requests_of(options: argparse.Namespace) -> list[ScoreRequest]:
    """The requests of a round: every prompt as often as asked, in an order drawn once."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(length))

    prompts = [text(options.prompt_tokens) for _ in range(options.prompts)]
    asked = [
        {"prompt": prompt, "replies": [text(options.reply_tokens) for _ in range(options.replies)]}
        for prompt in prompts
        for _ in range(options.requests)
    ]
    draw.shuffle(asked)
    return [ScoreRequest.model_validate(one) for one in asked]


class Variants:
    """What is timed, and the scores that each variant found last."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.requests = requests_of(options)
        self.scorer = load(folder, compute=DEFAULT_COMPUTE)
        limits = {"token_budget": options.token_budget, "device": CPU}
        self.plain = LocalEngine.load({"model": folder}, cache_tokens=0, **limits)
        self.cached = LocalEngine.load({"model": folder}, cache_tokens=options.cache_tokens, **limits)
        self.found: dict[str, list[list[float]]] = {}

    def work(self, name: str) -> Callable[[], Mapping[str, float]]:
        """The work of a variant."""
        if name == "loop":
            return self._loop
        engine = self.cached if name.endswith("cached") else self.plain
        return lambda: self._ask(name, engine, at_once=name.startswith("at once"))

    def _loop(self) -> Mapping[str, float]:
        scores, tokens = [], 0
        for request in self.requests:
            assert isinstance(request.prompt, str)
            assert request.replies is not None
            scores.append(self.scorer.score_replies(request.prompt, request.replies))
            tokens += self.plain.prepare(request).num_tokens
        self.found["loop"] = scores
        return {"tokens": float(tokens)}

    def _ask(self, name: str, engine: LocalEngine, *, at_once: bool) -> Mapping[str, float]:
        # The engine's own thread forgets the prompts that it keeps, so that every repeat computes all of them.
        engine._batcher.call(engine._cache.clear).result()
        before = engine.stats().computed_tokens
        if at_once:
            waiting = [engine.submit(engine.prepare(request)) for request in self.requests]
            answers = [future.result() for future in waiting]
        else:
            answers = [engine.submit(engine.prepare(request)).result() for request in self.requests]
        self.found[name] = [[score for score in one.groups[0].scores if score is not None] for one in answers]
        return {"tokens": float(engine.stats().computed_tokens - before)}

    def close(self) -> None:
        """End the engines."""
        self.plain.close()
        self.cached.close()

    def distance(self) -> float:
        """The largest distance of a variant's score from that of the loop, in units of max(1, |score|)."""
        return max(
            abs(a - b) / max(1.0, abs(a))
            for scores in self.found.values()
            for own, other in zip(self.found["loop"], scores, strict=True)
            for a, b in zip(own, other, strict=True)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """All variants in turn, and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="how often each prompt comes")
    parser.add_argument("--replies", type=int, default=1, help="replies of a request")
    parser.add_argument("--prompt-tokens", type=int, default=300, help="letters of a prompt, nearly a token each")
    parser.add_argument("--reply-tokens", type=int, default=30, help="letters of a reply")
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--cache-tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    ours.quiet()
    before = machine.load_average()
    with tempfile.TemporaryDirectory() as place:
        length = options.prompt_tokens + options.reply_tokens + 64
        variants = Variants(save_random(Path(place, "model"), layers=options.layers, max_length=length), options)
        try:
            steppers = {name: _timed(variants.work(name)) for name in VARIANTS}
            measured = timing.interleave(steppers, repeats=options.repeats)
        finally:
            variants.close()
    distance = variants.distance()
    tokens = {name: found[-1].facts["tokens"] for name, found in measured.samples.items()}
    ratios, token_ratios = results.compare(COMPARED, measured.samples, tokens)
    head = (
        f"{options.prompts} prompts of {options.prompt_tokens} letters, each in {options.requests} requests of "
        f"{options.replies} replies of {options.reply_tokens} letters; SmolLM2's widths, {options.layers} layers, "
        f"random weights, float32, {options.repeats} rounds."
    )
    page = [
        "# The engine beside a loop",
        "",
        head,
        "",
        results.ratio_rows(ratios, token_ratios),
        *(f"- `{name}`: {what}" for name, what in VARIANTS.items()),
        "",
        f"Largest distance of a score from the loop's: {distance:.1e}.",
        "",
    ]
    results.write(
        "engine_cpu",
        f"p{options.prompt_tokens}.k{options.replies}",
        page=page,
        data={
            "samples": {name: [asdict(one) for one in found] for name, found in measured.samples.items()},
            "distance": distance,
        },
        options=options,
        device=CPU,
        load=(before, machine.load_average()),
    )
    return 0 if distance <= NEAR else 1


def _timed(work: Callable[[], Mapping[str, float]]) -> timing.Stepper:
    return lambda: timing.timed(work)


if __name__ == "__main__":
    raise SystemExit(main())
