"""Parts of a macro-step: batches moved ahead, what is drawn in it, norms of gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MicroBatch = TypeVar("MicroBatch")


def ahead(batches: Iterable[MicroBatch], move: Callable[[MicroBatch], MicroBatch]) -> Iterator[MicroBatch]:
    """Every batch after `move`, which is called for the next one before the present one is handed out."""
    moved: deque[MicroBatch] = deque()
    for batch in batches:
        moved.append(move(batch))
        if len(moved) > 1:
            yield moved.popleft()
    yield from moved


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """What torch's generators are seeded with before a step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of all gradients together, whole ones also where each rank has a shard."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
