"""The reward model: a backbone, a head, and one forward that turns a PackedBatch into one reward a reply.

On disk it is a Hugging Face `…ForSequenceClassification`; `disk_name` is the one mapping between the two.

Legend: T packed tokens, R replies, W hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rewardlab.batch import PackedBatch
from rewardlab.core.errors import ModelError
from rewardlab.model.attention import LAYOUT_ARGUMENT
from rewardlab.model.attention_backends import PromptLayout
from rewardlab.model.dropout import Draws
from rewardlab.model.half import AS_SAVED, HalfWeights, RoundedParts

AttentionLayout = Literal["shared", "unshared", "padded"]
"""`shared` and `unshared` take the packed row; `padded` one row a reply."""

HEAD_ON_DISK = "score"


class RewardModel(nn.Module):
    """Backbone and head; the head is always float32 (or wider), always outside adapters and quantisation."""

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Linear,
        *,
        disk_class: type,
        layout: AttentionLayout,
        compute_dtype: torch.dtype,
    ) -> None:
        """`disk_class` is the sequence-classification class that reads this model from disk."""
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.disk_class = disk_class
        self.layout: AttentionLayout = layout
        self.compute_dtype = compute_dtype
        self.attention_backend = "segments"
        """Name of the kernel of shared-prompt attention (model/attention_backends.py)."""
        self.read_only_where_scored: nn.Module | None = None
        """The last layer's feed-forward part, where it runs only for tokens at which a score is read."""
        self.half_weights: HalfWeights | RoundedParts | None = None
        """Rounds the backbone's weights to the half precision of its arithmetic; None where autocast does."""
        self.step_draw: tuple[int, ...] = AS_SAVED
        """What the rounding of weights, and dropout, are seeded with while training; else a model computes as it will
        be saved."""
        self.draws: Draws | None = None
        """What the dropout of adapters is drawn by; None if there is none."""
        self.read_originals: Callable[[], Mapping[str, Tensor]] | None = None
        """Reads frozen weights that are held rounded, as they were before, in float32; None if nothing is rounded."""

    @property
    def config(self) -> Any:
        """Configuration of the text backbone."""
        config: Any = self.backbone.config  # nn.Module says Tensor
        return config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the head is, and so the scores."""
        return self.head.weight.device

    def forward(self, batch: PackedBatch) -> Float[Tensor, " R"]:
        """One reward a reply, in the order of the batch, in the dtype of the head."""
        hidden_RW = self.final_states(batch)
        with torch.autocast(self.device.type, enabled=False):
            scores_R1 = F.linear(hidden_RW.to(self.head.weight.dtype), self.head.weight, self.head.bias)
        return scores_R1.squeeze(-1).clone()  # no view: FSDP's hooks need a tensor of their own

    def row_length(self, num_tokens: int) -> int:
        """Tokens that a row of `num_tokens` is computed with.

        Kernels that are compiled for one length get a conversation of filler at the end of the row, up to the next of
        eight steps to each power of two, and of 128: at most an eighth more for long rows, and a program for each
        step rather than for each length.
        """
        if self.layout == "padded" or self.attention_backend != "flex":
            return num_tokens
        step = max(128, 1 << max(0, (num_tokens - 1).bit_length() - 4))
        return -(-num_tokens // step) * step

    def final_states(self, batch: PackedBatch) -> Float[Tensor, "R W"]:
        """What the head reads: the backbone's output at the last token of each reply."""
        if self.half_weights is not None:
            self.half_weights.refresh(self.step_draw if self.training else AS_SAVED)
        if self.draws is not None and self.training:
            num_filled = self.row_length(batch.num_tokens) - batch.num_tokens
            self.draws.begin(batch, self.step_draw, num_filled=num_filled, padded=self.layout == "padded")
        with self._arithmetic():
            hidden = self._run_padded(batch) if self.layout == "padded" else self._run_packed(batch)
        return self.read(hidden, batch)

    def read(self, hidden: Tensor, batch: PackedBatch) -> Float[Tensor, "R W"]:
        """The rows of hidden states ([1, T, W] packed, [R, L, W] padded) at the last token of each reply."""
        if self.layout != "padded":
            return hidden[0, batch.read_at_R]
        last_R = batch.last_when_padded().to(hidden.device)
        return hidden[torch.arange(len(last_R), device=hidden.device), last_R]

    def _arithmetic(self) -> AbstractContextManager[Any]:
        half = self.compute_dtype in (torch.bfloat16, torch.float16)
        # Copies are made elsewhere; autocast would hold those of a sharded model all together.
        return torch.autocast(
            self.device.type,
            dtype=self.compute_dtype if half else None,
            enabled=half,
            cache_enabled=self.half_weights is None,
        )

    def _run_packed(self, batch: PackedBatch) -> Float[Tensor, "1 T W"]:
        num_filled = self.row_length(batch.num_tokens) - batch.num_tokens
        groups = (*batch.groups, (0, (num_filled,))) if num_filled else batch.groups
        layout = PromptLayout(groups, self.attention_backend, batch.read_at_R)
        output = self.backbone(
            input_ids=F.pad(batch.token_ids_T, (0, num_filled))[None],
            position_ids=F.pad(batch.positions_T, (0, num_filled))[None],
            use_cache=False,
            **{LAYOUT_ARGUMENT: layout},
        )
        if layout.num_calls != self.config.num_hidden_layers:
            raise ModelError(
                f"{type(self.backbone).__name__} ran shared-prompt attention {layout.num_calls} times for "
                f"{self.config.num_hidden_layers} layers, so its scores would be wrong. Use --attention padded."
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _run_padded(self, batch: PackedBatch) -> Float[Tensor, "R L W"]:
        ids_RL, real_RL, _ = batch.padded(pad_token_id=0)
        hidden: Tensor = self.backbone(
            input_ids=ids_RL, attention_mask=real_RL.long(), use_cache=False
        ).last_hidden_state
        return hidden

    def decay_exempt(self) -> Iterator[str]:
        """Names of parameters that weight decay must leave alone: norms, biases and the head's bias."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                yield name


def disk_name(name: str, disk_class: Any) -> str:
    """Parameter name inside -> name in the folder: `backbone.x` -> `<prefix>.x`, `head.x` -> `score.x`."""
    room, _, rest = name.partition(".")
    return f"{disk_class.base_model_prefix if room == 'backbone' else HEAD_ON_DISK}.{rest}"


def disk_state(state: Mapping[str, Tensor], disk_class: Any) -> dict[str, Tensor]:
    """A state dict under the names of the folder."""
    return {disk_name(name, disk_class): tensor for name, tensor in state.items()}
