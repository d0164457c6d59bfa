"""PackedBatch: TokenGroups laid out for one forward pass, the one tensor type that passes between rooms.

Legend: T packed tokens, R replies, C comparisons, G rankings, K replies of a ranking, L tokens of a padded row.

A row is ``[shared][reply 0][reply 1]…[next group]…``. The positions of every reply of a group start at the group's
shared length, as they would without the other replies. Which tokens attend to which follows from `groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rewardlab.core.types import TokenGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """The tensors of one forward pass and its loss."""

    token_ids_T: Int[Tensor, " T"]
    positions_T: Int[Tensor, " T"]
    keys_T: Int[Tensor, " T"]
    """A number for each token, made of the preference (`indices`), the reply and the position. Dropout is drawn by it,
    so it does not depend on what else is in the batch. A shared token has one number for all replies, in every
    layout."""
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """(shared tokens, tokens of each reply) of every group, in the order of the row."""
    read_at_R: Int[Tensor, " R"]
    """Row index of each reply's last token, where its score is read."""
    first_C: Int[Tensor, " C"]
    second_C: Int[Tensor, " C"]
    """Replies compared, as indices into the R scores. Replies of a group with the same tokens have the index of the
    first of them."""
    label_C: Float[Tensor, " C"]
    weight_C: Float[Tensor, " C"]
    margin_C: Float[Tensor, " C"]
    """Label, weight and margin of each comparison, in float64 (see core.types.Comparison)."""
    ranked_C: Bool[Tensor, " C"]
    """Whether the comparison's preference has a ranking, which may replace its comparisons in the loss."""
    ranking_GK: Int[Tensor, "G K"]
    """Replies from best to worst, as indices into the R scores; −1 fills rows of fewer replies."""
    indices: tuple[int, ...] = ()
    """The positions of these groups in the caller's list, of a merged group those of all that are in it: for messages
    and score rows."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are computed (T)."""
        return len(self.token_ids_T)

    @property
    def num_replies(self) -> int:
        """The number of replies (R)."""
        return len(self.read_at_R)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the same batch with its tensors on `device` (see `send`)."""
        moved: dict[str, Any] = {
            field.name: send(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    def padded(self, pad_token_id: int) -> tuple[Int[Tensor, "R L"], Bool[Tensor, "R L"], Int[Tensor, " R"]]:
        """Return one right-padded row for each reply: (token ids, which of them are not padding, index of the last one
        that is not).

        This is the reference layout, and the one for models that cannot compute packed rows.
        """
        ids_RL = self.padded_rows(self.token_ids_T, pad_token_id)
        last_R = send(self.last_when_padded(), ids_RL.device)
        real_RL = torch.arange(ids_RL.shape[1], device=ids_RL.device) <= last_R[:, None]
        return ids_RL, real_RL, last_R

    def padded_rows(self, values_T: Int[Tensor, " T"], filler: int) -> Int[Tensor, "R L"]:
        """Return values of the tokens of the packed row, laid out as `padded` lays out the tokens themselves."""
        return nn.utils.rnn.pad_sequence(list(self._conversations(values_T)), batch_first=True, padding_value=filler)

    def last_when_padded(self) -> Int[Tensor, " R"]:
        """Return the index of the last token that is not padding in each row of `padded`."""
        return torch.tensor([shared + own - 1 for shared, suffixes in self.groups for own in suffixes])

    def _conversations(self, values_T: Tensor) -> Iterator[Tensor]:
        """Yield for each reply the values of the shared tokens followed by those of its own."""
        offset = 0
        for num_shared, suffixes in self.groups:
            shared = values_T[offset : offset + num_shared]
            offset += num_shared
            for length in suffixes:
                yield torch.cat([shared, values_T[offset : offset + length]])
                offset += length


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. To a GPU it is copied from pinned memory, so that the host need not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack(groups: Sequence[TokenGroup], *, share: bool = True, indices: Sequence[int] = ()) -> PackedBatch:
    """Lay out groups in one row. `indices` are their positions in the caller's list, by default 0, 1, ….

    With ``share=False`` every reply gets its own copy of the shared tokens; scores and gradients are the same.
    No groups give a dummy of one token and no comparison, for ranks that have nothing to compute: models refuse empty
    input.
    """
    layout: list[tuple[int, tuple[int, ...]]] = []
    pieces: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    for number, group in zip(indices or range(len(groups)), groups, strict=True):
        of_prompt, *of_replies = _keys(number, group)
        if share:
            keys += [of_prompt, *of_replies]
            layout.append((len(group.shared), tuple(len(suffix) for suffix in group.suffixes)))
            pieces += [group.shared, *group.suffixes]
            positions += [np.arange(len(group.shared))]
            positions += [np.arange(len(group.shared), length) for length in group.lengths]
        else:
            for own in of_replies:
                keys += [of_prompt, own]
            layout += [(0, (length,)) for length in group.lengths]
            pieces += [group.conversation(reply) for reply in range(group.num_replies)]
            positions += [np.arange(length) for length in group.lengths]
    if not groups:
        layout, pieces, positions, keys = [(0, (1,))], *([np.zeros(1, np.int64)] for _ in range(3))
    return PackedBatch(
        token_ids_T=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        positions_T=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        keys_T=torch.from_numpy(np.concatenate(keys)),
        groups=tuple(layout),
        read_at_R=torch.tensor(_read_positions(layout)),
        indices=tuple(indices),
        **_judgements(groups),
    )


def _keys(number: int, group: TokenGroup) -> list[np.ndarray]:
    """Return int64 `PackedBatch.keys_T` of a group: first of its shared tokens, then of each reply's own tokens."""
    lengths = (len(group.shared), *(len(suffix) for suffix in group.suffixes))
    starts = (0, *(len(group.shared),) * group.num_replies)
    # 24 bits for the position (16 million tokens), 12 for the reply (part 0 is the shared part), the others for the
    # preference. The numbers are not random; dropout mixes them before it uses them.
    return [
        (number << 36) + (part << 24) + np.arange(start, start + length)
        for part, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def _read_positions(layout: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
    """Return the row index of each reply's last token."""
    read_at, offset = [], 0
    for num_shared, suffixes in layout:
        offset += num_shared
        for length in suffixes:
            offset += length
            read_at.append(offset - 1)
    return read_at


def first_alike(group: TokenGroup) -> list[int]:
    """Return for each reply the number of the first one that has the same tokens."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(suffix.tobytes(), reply) for reply, suffix in enumerate(group.suffixes)]


def _judgements(groups: Sequence[TokenGroup]) -> dict[str, Tensor]:
    """Return the fields of PackedBatch that hold comparisons and rankings, with replies counted over all groups."""
    first, second, judged, ranked, rankings = [], [], [], [], []
    offset = 0
    for group in groups:
        # Replies of the same tokens are one reply: its score cancels, and so does its gradient, without rounding.
        alike = [offset + reply for reply in first_alike(group)]
        for comparison in group.comparisons:
            first.append(alike[comparison.first])
            second.append(alike[comparison.second])
            judged.append((comparison.label, comparison.weight, comparison.margin))
            ranked.append(group.ranking is not None)
        if group.ranking is not None:
            rankings.append([alike[reply] for reply in group.ranking])
        offset += group.num_replies
    label_C, weight_C, margin_C = torch.tensor(judged, dtype=torch.float64).reshape(-1, 3).unbind(1)
    longest = max((len(ranking) for ranking in rankings), default=0)
    ranking_GK = torch.full((len(rankings), longest), -1, dtype=torch.long)
    for row, ranking in enumerate(rankings):
        ranking_GK[row, : len(ranking)] = torch.tensor(ranking)
    return {
        "first_C": torch.tensor(first, dtype=torch.long),
        "second_C": torch.tensor(second, dtype=torch.long),
        "label_C": label_C,
        "weight_C": weight_C,
        "margin_C": margin_C,
        "ranked_C": torch.tensor(ranked, dtype=torch.bool),
        "ranking_GK": ranking_GK,
    }
