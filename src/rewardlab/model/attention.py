"""Shared-prompt attention: each prompt computed once, replies that cannot see each other.

The function is registered with transformers under a name for which no mask function exists, so transformers builds
no mask and never guesses document borders from position ids (with a shared prompt that guess is silently wrong).
The layout travels as a keyword argument through the model's forward; every layer counts itself in it, so a model
that ignores the registry or the argument is found out at its first forward pass.

Legend: H query heads, T packed tokens, D head width.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, PretrainedConfig

from rewardlab.model.attention_backends import BACKENDS, PromptLayout

NAME: Final = "rewardlab_shared_prompt"
LAYOUT_ARGUMENT: Final = "prompt_layout"

HARMLESS_ARGUMENTS: Final = frozenset(
    # Say nothing about who attends to whom, or are checked against the maximum length before training.
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "sliding_window",
        "is_causal",
        "position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)


def shared_prompt_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 _ T D"],
    value: Float[Tensor, "1 _ T _"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Float[Tensor, "1 T H _"], None]:
    """Attention of one packed row: a reply sees the shared part of its group and its own past.

    Opaque to torch.compile, which compiles around it: what it does depends on the layout of each row. Raises
    TypeError for anything it would have to ignore.
    """
    layout: PromptLayout | None = arguments.pop(LAYOUT_ARGUMENT, None)
    softcap: float | None = arguments.pop("softcap", None)
    unknown = sorted(name for name, given in arguments.items() if given is not None and name not in HARMLESS_ARGUMENTS)
    if layout is None or attention_mask is not None or dropout or unknown:
        raise TypeError(
            f"{type(module).__name__} cannot take a shared-prompt row: layout {layout}, "
            f"mask {attention_mask is not None}, dropout {dropout}, unknown arguments {unknown}"
        )
    layout.num_calls += 1
    attend = BACKENDS[layout.backend]
    return attend(query, key, value, layout, scaling, softcap).transpose(1, 2).contiguous(), None


opaque: Any = torch.compiler.disable
AttentionInterface.register(NAME, opaque(shared_prompt_attention))


def refusal(config: PretrainedConfig, model_class: Any, max_length: int) -> str | None:
    """Why a shared-prompt row would not be exact for this architecture, or None.

    What the configuration cannot tell is found by the self-test (model/selftest.py).
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"its layers of kind {', '.join(other)} carry state along the row, from one reply to the next"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_length and _uses_window(config, kinds):
        return f"its sliding window of {window} tokens is shorter than --max-seq-len {max_length}"
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_length:
        return f"its attention chunk of {chunk} tokens is shorter than --max-seq-len {max_length}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and "mrope_section" in rope:
        return "its positions have several dimensions"
    if getattr(config, "output_router_logits", False):
        return "its router loss would count shared prompts once"
    if getattr(model_class, "_is_stateful", False):
        return "it carries state along the row"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "it does not use the attention registry of transformers"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return "its positions follow the row and cannot be given"
    return None


def _uses_window(config: PretrainedConfig, kinds: set[str]) -> bool:
    if getattr(config, "layer_types", None):
        return "sliding_attention" in kinds
    return bool(getattr(config, "use_sliding_window", True))


def padded_implementation(config: PretrainedConfig) -> str:
    """The attention of transformers for the padded path: SDPA, or eager where SDPA would not be the model.

    SDPA has no soft cap and transformers would leave it out; some classes have no SDPA at all.
    """
    model_class = MODEL_MAPPING.get(type(config), None)
    capped = getattr(config, "attn_logit_softcapping", None)
    return "eager" if capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"
