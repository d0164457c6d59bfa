"""FLOPs of the matrix products of a model: what a step must compute, and what it did compute.

Model FLOPs are the useful ones: 6 a weight and token for training (2 forward, 4 backward; 4 in all for a frozen
weight, whose own gradient nobody wants), 2 for scoring, and attention by the query-key pairs that a causal mask leaves.
Padding is not useful, nor is the last layer's feed-forward part where no score is read; what gradient checkpointing
computes twice counts once. Norms, embeddings and the head are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING

from rewardlab.core.types import TokenGroup


@dataclass(frozen=True, kw_only=True)
class Work:
    """Tokens through the linear layers, and query-key pairs through attention."""

    tokens: int = 0
    pairs: int = 0
    unread: int = 0
    """Tokens that the last layer's feed-forward part need not see."""

    def __add__(self, other: Work) -> Work:
        return Work(
            tokens=self.tokens + other.tokens, pairs=self.pairs + other.pairs, unread=self.unread + other.unread
        )

    @classmethod
    def of(cls, facts: Mapping[str, float]) -> Work:
        """Inverse of `facts`, among others."""
        return cls(tokens=round(facts["tokens"]), pairs=round(facts["pairs"]), unread=round(facts["unread"]))

    def facts(self) -> dict[str, float]:
        """As facts of a sample."""
        return {"tokens": self.tokens, "pairs": self.pairs, "unread": self.unread}


def segment(shared: int, own: int) -> int:
    """Query-key pairs of `own` tokens that see `shared` tokens and their own past."""
    return own * shared + own * (own + 1) // 2


def layout_work(groups: Iterable[tuple[int, Sequence[int]]]) -> Work:
    """Of packed rows: (shared tokens, tokens of each reply) of every group."""
    tokens = pairs = replies = 0
    for shared, suffixes in groups:
        tokens += shared + sum(suffixes)
        replies += len(suffixes)
        pairs += segment(0, shared) + sum(segment(shared, own) for own in suffixes)
    return Work(tokens=tokens, pairs=pairs, unread=tokens - replies)


def useful_work(groups: Iterable[TokenGroup], *, sharing: bool) -> Work:
    """The least that gives every reply's score, with every prompt once or once a reply."""
    if sharing:
        return layout_work((len(group.shared), [len(suffix) for suffix in group.suffixes]) for group in groups)
    return layout_work((0, [length]) for group in groups for length in group.lengths)


def padded_work(rows: int, length: int) -> Work:
    """Of a padded batch; its attention counted as causal, whatever the kernel computes."""
    return Work(tokens=rows * length, pairs=rows * segment(0, length))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides a model's FLOPs."""

    layers: int
    linear: int
    """Weights of the backbone's linear layers."""
    adapters: int
    """Weights of low-rank adapters; 0 if every weight trains."""
    attention_width: int
    """Query heads times head width."""
    products: tuple[tuple[int, int], ...]
    """(in, out) of the linear layers, each once."""
    last_linear: int = 0
    last_adapters: int = 0
    """The same weights and adapters, of the last layer's feed-forward part alone."""

    def train_flops(self, work: Work) -> float:
        """Forward and backward."""
        frozen = 4 if self.adapters else 6
        weight = frozen * self.linear + 6 * self.adapters
        last = frozen * self.last_linear + 6 * self.last_adapters
        attention = 12 * self.layers * self.attention_width * work.pairs
        return float(weight * work.tokens - last * work.unread + attention)

    def score_flops(self, work: Work) -> float:
        """Forward alone."""
        weight, last = 2 * (self.linear + self.adapters), 2 * (self.last_linear + self.last_adapters)
        attention = 4 * self.layers * self.attention_width * work.pairs
        return float(weight * work.tokens - last * work.unread + attention)


def shape_of(config: Any, *, lora_rank: int = 0) -> Shape:
    """Of a configuration of transformers; `lora_rank` counts adapters on every linear layer."""
    with torch.device("meta"):
        backbone = MODEL_MAPPING[type(config)](config)
    linear = _linear_layers(backbone)
    last = _linear_layers(backbone.layers[-1].mlp)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        layers=config.num_hidden_layers,
        linear=sum(module.weight.numel() for module in linear),
        adapters=_adapters(linear, lora_rank),
        attention_width=head * config.num_attention_heads,
        products=tuple(dict.fromkeys((module.in_features, module.out_features) for module in linear)),
        last_linear=sum(module.weight.numel() for module in last),
        last_adapters=_adapters(last, lora_rank),
    )


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [child for child in module.modules() if isinstance(child, nn.Linear)]


def _adapters(linear: Iterable[nn.Linear], rank: int) -> int:
    return rank * sum(module.in_features + module.out_features for module in linear)
