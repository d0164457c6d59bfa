"""The reward model: a backbone, a head, and one forward pass that turns a PackedBatch into one reward for each reply.

On disk it is a Hugging Face `…ForSequenceClassification`; `disk_name` is the one mapping between the two.

Legend: T packed tokens, R replies, W hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rewardlab.batch import PackedBatch, send
from rewardlab.core.errors import ModelError
from rewardlab.model.attention import LAYOUT_ARGUMENT, leave_out_cudnn
from rewardlab.model.dropout import Draws
from rewardlab.model.half import AS_SAVED, HalfWeights
from rewardlab.model.past import Past
from rewardlab.model.prompt_layout import PromptLayout
from rewardlab.model.rounded_parts import RoundedParts
from rewardlab.model.text_part import text_path

AttentionLayout = Literal["shared", "unshared", "padded"]
"""How a batch is laid out: one packed row with each prompt once (`shared`), one packed row with a copy of the prompt
for each reply (`unshared`), or one padded row a reply (`padded`)."""

HEAD_ON_DISK = "score"
"""Name of the head in the sequence-classification classes of transformers."""


_NAMES_HALF: Final = re.compile(r"\b(BFloat16|Half)\b")
"""What torch calls half precision where an operation lacks it, or gets it beside another precision."""


class HalfPrecisionError(ModelError):
    """Raised by a model whose own code cannot compute in half precision."""


class RewardModel(nn.Module):
    """A backbone and a head. The head is always float32 or wider, and never adapted or quantised."""

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Linear,
        *,
        disk_class: type,
        layout: AttentionLayout,
        compute_dtype: torch.dtype,
    ) -> None:
        """`disk_class` is the sequence-classification class that reads this model from disk.

        Raises ModelError as `text_path` does.
        """
        super().__init__()
        self.backbone = backbone
        self.head = head
        self._text_path = text_path(backbone)
        self.disk_class = disk_class
        self.layout: AttentionLayout = layout
        self.compute_dtype = compute_dtype
        self.attention_backend = "segments"
        """Name of the kernel of shared-prompt attention (model/attention_backends.py)."""
        self.read_only_where_scored: nn.Module | None = None
        """The last layer's feed-forward part, if it runs only for tokens at which a score is read."""
        self.half_weights: HalfWeights | RoundedParts | None = None
        """Rounds the backbone's weights to half precision; None in float32, and where autocast does it."""
        self.step_draw: tuple[int, ...] = AS_SAVED
        """The seed of the step for rounding and dropout, used in training mode only. In evaluation mode weights are
        rounded as they will be when they are saved."""
        self.draws: Draws | None = None
        """The numbers by which the dropout of adapters is drawn; None without dropout."""
        self.read_originals: Callable[[], Mapping[str, Tensor]] | None = None
        """Reads the float32 originals of frozen weights that are held rounded or quantised; None if there are none."""
        self.known_states: Callable[[PackedBatch], Tensor] | None = None
        """Returns the [R, W] final states of a batch from where they are kept, in place of computing them; for a frozen
        backbone (probing/cached.py). None to compute them."""
        self.most_tokens: int | None = None
        """Most tokens that are scored at a time, since memory ran out with more; None before that."""

    @property
    def text_part(self) -> nn.Module:
        """The module of the backbone that computes; the backbone itself in a model of text alone."""
        return self.backbone.get_submodule(self._text_path)

    @property
    def config(self) -> Any:
        """The configuration (of transformers) of the text backbone."""
        config: Any = self.backbone.config  # nn.Module says Tensor
        return config.get_text_config()

    @property
    def device(self) -> torch.device:
        """The device of the head, and so of the scores."""
        return self.head.weight.device

    def forward(self, batch: PackedBatch, past: Past | None = None) -> Float[Tensor, " R"]:
        """Return one reward for each reply, in the order of the batch and in the dtype of the head.

        With a `past`, which a padded layout cannot have, groups begin behind tokens that were computed before.

        Raises ModelError if the backbone did not use the attention function of packed rows.
        """
        hidden_RW = self.final_states(batch, past)
        # The head computes in float32 even inside autocast: one rounding of a score to bf16 could hide a margin.
        with torch.autocast(self.device.type, enabled=False):
            scores_R1 = F.linear(hidden_RW.to(self.head.weight.dtype), self.head.weight, self.head.bias)
        # A copy and not a view, because FSDP's hooks on the output need a tensor of its own.
        return scores_R1.squeeze(-1).clone()

    def row_length(self, num_tokens: int) -> int:
        """Return the number of tokens with which a row of `num_tokens` is computed, filler included.

        The kernel of `flex` is compiled for one row length. So a conversation of filler is added at the end of the row,
        up to the next multiple of 128 or of an eighth of a power of two. That is at most an eighth more tokens for long
        rows, and one program for each such length instead of one for every length.
        """
        if self.layout == "padded" or self.attention_backend != "flex":
            return num_tokens
        step = max(128, 1 << max(0, (num_tokens - 1).bit_length() - 4))
        return -(-num_tokens // step) * step

    def final_states(self, batch: PackedBatch, past: Past | None = None) -> Float[Tensor, "R W"]:
        """Return what the head reads: the backbone's output at the last token of each reply. `past` is as in `forward`.

        Raises ModelError if the backbone did not use the attention function of packed rows, and as `known_states` does;
        HalfPrecisionError if its code cannot compute in half precision.
        """
        assert past is None or self.layout != "padded"
        if self.known_states is not None and past is None:
            return self.known_states(batch)
        leave_out_cudnn(self.device)
        self.refresh_half_weights()
        if self.draws is not None and self.training:
            num_filled = self.row_length(batch.num_tokens) - batch.num_tokens
            self.draws.begin(batch, self.step_draw, num_filled=num_filled, padded=self.layout == "padded")
        with self._arithmetic(), self._half_in_words():
            hidden = self._run_padded(batch) if self.layout == "padded" else self._run_packed(batch, past)
        return self.read(hidden, batch)

    def refresh_half_weights(self) -> bool:
        """Round the backbone's weights for the pass that begins, unless they are rounded so already.

        Returns whether the weights themselves were changed, which are those of `RoundedParts`, and not copies.
        """
        draw = self.step_draw if self.training else AS_SAVED
        return self.half_weights is not None and self.half_weights.refresh(draw)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute all states inside this context, those that are kept somewhere too."""
        known, self.known_states = self.known_states, None
        try:
            yield
        finally:
            self.known_states = known

    def read(self, hidden: Tensor, batch: PackedBatch) -> Float[Tensor, "R W"]:
        """Select from hidden states ([1, T, W] packed, [R, L, W] padded) those at the last token of each reply."""
        if self.layout != "padded":
            return hidden[0, batch.read_at_R]
        last_R = send(batch.last_when_padded(), hidden.device)
        return hidden[torch.arange(len(last_R), device=hidden.device), last_R]

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the backbone, which does nothing in float32."""
        half = self.compute_dtype in (torch.bfloat16, torch.float16)
        # Where `half_weights` rounds, autocast's own cache of casts is switched off: of a sharded model it would keep
        # the gathered weights of all layers at once.
        return torch.autocast(
            self.device.type,
            dtype=self.compute_dtype if half else None,
            enabled=half,
            cache_enabled=self.half_weights is None,
        )

    @contextmanager
    def _half_in_words(self) -> Iterator[None]:
        """Raise HalfPrecisionError for what torch says of half precision inside this context."""
        try:
            yield
        except RuntimeError as error:
            if self.compute_dtype not in (torch.bfloat16, torch.float16) or not _NAMES_HALF.search(str(error)):
                raise
            dtype = str(self.compute_dtype).removeprefix("torch.")
            raise HalfPrecisionError(
                f"{type(self.text_part).__name__} cannot compute in {dtype}: its code mixes it with float32, or has an "
                f"operation that torch lacks in it ({str(error).splitlines()[0]}). Take --precision fp32."
            ) from error

    def _run_packed(self, batch: PackedBatch, past: Past | None) -> Float[Tensor, "1 T W"]:
        # Filler is a group of its own without shared tokens, so nothing attends to it, and no score is read in it.
        num_filled = self.row_length(batch.num_tokens) - batch.num_tokens
        groups = (*batch.groups, (0, (num_filled,))) if num_filled else batch.groups
        layout = PromptLayout(groups, self.attention_backend, batch.read_at_R, past)
        output = self.text_part(
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
        hidden: Tensor = self.text_part(
            input_ids=ids_RL, attention_mask=real_RL.long(), use_cache=False
        ).last_hidden_state
        return hidden

    def decay_exempt(self) -> Iterator[str]:
        """Yield the names of parameters that get no weight decay: norms and biases, all below 2 dimensions."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                yield name


def disk_name(name: str, disk_class: Any) -> str:
    """Return the name that a parameter has on disk: `backbone.x` -> `<prefix>.x`, `head.x` -> `score.x`."""
    room, _, rest = name.partition(".")
    return f"{disk_class.base_model_prefix if room == 'backbone' else HEAD_ON_DISK}.{rest}"


def width_of(config: Any) -> int:
    """Return the width of the final hidden states, which the head reads, by the configuration."""
    text_config = config.get_text_config()
    # OPT has a projection behind its last layer, in some sizes to another width.
    width: int = getattr(text_config, "word_embed_proj_dim", None) or text_config.hidden_size
    return width
