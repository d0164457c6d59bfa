"""Keys and values of prompts that were computed before, in front of what a packed row computes now.

The states of a prompt's first tokens depend on these tokens alone, since attention is causal and positions begin at 0.
So they may be kept and attended to by replies that come later, as if the tokens stood in the row.

Legend: H key heads, P tokens, D and E head widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptStates:
    """Keys and values of consecutive tokens of a prompt, at every layer, as attention reads them: with positions.

    One tensor a layer, since layers may have heads of several widths.
    """

    keys: tuple[Float[Tensor, "H P D"], ...]
    values: tuple[Float[Tensor, "H P E"], ...]

    @property
    def num_tokens(self) -> int:
        """The number of tokens (P)."""
        return self.keys[0].shape[1]

    def part(self, start: int, stop: int) -> PromptStates:
        """Return a copy of the states of tokens `start` to `stop` (exclusive)."""
        keys, values = (tuple(one[:, start:stop].clone() for one in kind) for kind in (self.keys, self.values))
        return PromptStates(keys=keys, values=values)


def joined(parts: Sequence[PromptStates]) -> PromptStates:
    """Return the states of tokens that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    return PromptStates(
        keys=tuple(torch.cat(layer, 1) for layer in zip(*(part.keys for part in parts), strict=True)),
        values=tuple(torch.cat(layer, 1) for layer in zip(*(part.values for part in parts), strict=True)),
    )


class Past:
    """What the groups of one packed row attend to in front of it, and which of their own states are to be kept."""

    def __init__(self, known: Sequence[PromptStates | None], num_kept: Sequence[int]) -> None:
        """For each group of the row, in order: the states of the tokens in front of its shared tokens, and of how many
        of its first shared tokens states are kept."""
        self._known = known
        self._num_kept = num_kept
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in num_kept]

    @property
    def is_empty(self) -> bool:
        """Return whether no group has anything in front of it."""
        return all(states is None for states in self._known)

    @property
    def longest(self) -> int:
        """The most tokens that any group has in front of it."""
        return max((states.num_tokens for states in self._known if states is not None), default=0)

    def before(self, group: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return (keys [1, H, P, D], values [1, H, P, E]) in front of a group at a layer, None if there are none."""
        states = self._known[group] if group < len(self._known) else None
        return None if states is None else (states.keys[layer][None], states.values[layer][None])

    def keep(self, key: Tensor, value: Tensor, groups: Sequence[Any]) -> None:
        """Keep what is wanted of a layer's keys [1, H, T, D] and values [1, H, T, E] of the row of these groups."""
        start = 0
        for kept, number, (num_shared, suffixes) in zip(self._kept, self._num_kept, groups, strict=False):
            if number:
                row = slice(start, start + number)
                kept.append((key[0, :, row].clone(), value[0, :, row].clone()))
            start += num_shared + sum(suffixes)

    def kept(self, group: int) -> PromptStates | None:
        """Return the states kept of a group after the forward pass, None if none were wanted."""
        layers = self._kept[group]
        if not layers:
            return None
        return PromptStates(keys=tuple(key for key, _ in layers), values=tuple(value for _, value in layers))
