"""How a packed row is divided, from which follows which of its tokens attend to which.

Legend: R replies, T packed tokens, U tokens with a copy of the shared part for each reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rewardlab.batch import send
from rewardlab.model.past import Past

Made = TypeVar("Made")
ALIGNED: Final = 16
"""Values: the largest multiple that a GPU's attention wants the rows of a mask to lie apart."""


def mask_after(
    num_seen: int, length: int, device: torch.device, window: int | None = None
) -> Bool[Tensor, "length seen"]:
    """Return the mask [length, num_seen + length] of consecutive tokens: each sees the keys in front of them all,
    itself and those between; of these the last `window` alone if there is one.
    """
    seen = torch.ones(length, num_seen + length, dtype=torch.bool, device=device).tril(num_seen)
    return seen if window is None else seen.triu(num_seen - window + 1)


def additive(mask: Bool[Tensor, "*s"], dtype: torch.dtype) -> Float[Tensor, "*s"]:
    """Return what is added to logits under a boolean mask: 0 where a key is seen, −∞ where not.

    PyTorch's attention makes this of a boolean mask in every call, and keeps each for the backward pass. Rows lie
    ALIGNED values apart, since its kernel on a GPU copies any other mask.
    """
    *rows, length = mask.shape
    held = torch.zeros(*rows, -(-length // ALIGNED) * ALIGNED, dtype=dtype, device=mask.device)
    return held[..., :length].masked_fill_(~mask, float("-inf"))


class PromptLayout:
    """The parts of a packed row, from which follows which tokens attend to which; made anew for each forward pass.

    ``groups`` is as in PackedBatch: (number of shared tokens, number of tokens of each reply). Masks and indices that a
    backend derives from them are made in the first layer and kept for the others (`keep`).
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, tuple[int, ...]]],
        backend: str = "segments",
        read_at_R: Int[Tensor, " R"] | None = None,
        past: Past | None = None,
    ) -> None:
        self.backend = backend
        self.past = past
        """What the groups attend to in front of the row; only `segments` computes with it. None for nothing."""
        self.read_at_R = read_at_R
        """Row indices at which scores are read; the last layer's feed-forward part may be computed for them alone."""
        self.groups = groups
        self.segments = [
            (num_shared, length, reply == 0) for num_shared, suffixes in groups for reply, length in enumerate(suffixes)
        ]
        """For each reply: (shared tokens of its group, its own tokens, whether it is the first reply of the group)."""
        self.sizes = [shared + length if first else length for shared, length, first in self.segments]
        """Tokens of each segment of the row: the shared part belongs to the segment of the first reply."""
        self.longest = max((shared + length for shared, length, _ in self.segments), default=0)
        """An upper limit of the tokens of a conversation, those in front of the row among them."""
        if past is not None:
            self.longest += past.longest
        self.num_calls = 0
        """How many attention layers were computed with this layout."""
        self._made: dict[object, Any] = {}

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the row (T)."""
        return sum(self.sizes)

    def keep(self, key: object, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which is called once for each key and its result kept for all layers."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def mask(
        self,
        num_seen: int,
        length: int,
        device: torch.device,
        window: int | None = None,
        *,
        added_as: torch.dtype | None = None,
    ) -> Shaped[Tensor, "r s"]:
        """Return `mask_after`, or what is added to logits of dtype `added_as`; made once, kept for all layers."""

        def make() -> Tensor:
            mask = mask_after(num_seen, length, device, window)
            return mask if added_as is None else additive(mask, added_as)

        return self.keep((num_seen, length, window, added_as), make)

    def owners(self, device: torch.device) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
        """Return for every token the number of its group, and of its reply in the row (−1 for shared tokens)."""
        groups, replies, reply = [], [], 0
        for number, (num_shared, suffixes) in enumerate(self.groups):
            groups += [number] * (num_shared + sum(suffixes))
            replies += [-1] * num_shared
            for length in suffixes:
                replies += [reply] * length
                reply += 1
        return send(torch.tensor(groups), device), send(torch.tensor(replies), device)

    def positions(self, device: torch.device) -> Int[Tensor, " T"]:
        """Return for every token its position in its conversation, counted from the first token of its group."""
        positions = []
        for num_shared, suffixes in self.groups:
            positions.append(torch.arange(num_shared))
            positions += [torch.arange(num_shared, num_shared + length) for length in suffixes]
        return send(torch.cat(positions), device)

    def dense_mask(self, device: torch.device, window: int | None = None) -> Bool[Tensor, "T T"]:
        """Return the mask of the whole row: entry [q, k] says whether token q sees token k, under a sliding window if
        one is given.
        """

        def make() -> Tensor:
            group_T, reply_T = self.owners(device)
            mask = torch.ones(self.num_tokens, self.num_tokens, dtype=torch.bool, device=device).tril()
            mask &= group_T[:, None] == group_T[None]
            mask &= (reply_T[None] == -1) | (reply_T[:, None] == reply_T[None])
            if window is not None:
                position_T = self.positions(device)
                mask &= position_T[:, None] - position_T[None] < window
            return mask

        return self.keep(("dense", window), make)

    def ragged(self, device: torch.device) -> Ragged:
        """Return the layout for ragged kernels, which take sequences of different lengths one after the other."""

        def make() -> Ragged:
            lengths = [shared + length for shared, length, _ in self.segments]
            index: list[Tensor] = []
            start = group_start = 0
            for (num_shared, _, is_first), size in zip(self.segments, self.sizes, strict=True):
                if is_first:
                    group_start = start
                else:
                    # Ragged kernels want the keys of one sequence next to each other, so the shared part is copied in
                    # front of every later reply. That is the price of these kernels.
                    index.append(torch.arange(group_start, group_start + num_shared))
                index.append(torch.arange(start, start + size))
                start += size

            def to_cumulative(sizes: list[int]) -> Tensor:
                return send(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)

            return Ragged(
                query_starts=to_cumulative(self.sizes),
                key_starts=to_cumulative(lengths),
                longest_query=max(self.sizes),
                longest_key=max(lengths),
                gather_U=send(torch.cat(index), device) if lengths != self.sizes else None,
            )

        return self.keep("ragged", make)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """The sequences of a ragged kernel: where their queries and keys begin, and which row tokens the keys are."""

    query_starts: Int[Tensor, " _"]
    key_starts: Int[Tensor, " _"]
    longest_query: int
    longest_key: int
    gather_U: Int[Tensor, " U"] | None
    """Row index of every key; None if no reply shares a prompt, so that the row's keys serve as they are."""
