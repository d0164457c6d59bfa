"""Shared-prompt attention: each prompt is computed once, and replies cannot see each other.

The function is registered with transformers under a name for which no mask function exists. So transformers builds
no mask and does not infer document borders from position ids, which with a shared prompt would be silently wrong.
The layout is passed through the model's forward as a keyword argument, and every attention layer increments a counter
in it. A model that ignores the registry or drops the argument is therefore detected in its first forward pass.

Legend: H query heads, T packed tokens, D head width.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from rewardlab.model.attention_backends import BACKENDS
from rewardlab.model.attention_formula import Formula
from rewardlab.model.prompt_layout import PromptLayout
from rewardlab.model.text_part import listed_class

NAME: Final = "rewardlab_shared_prompt"
LAYOUT_ARGUMENT: Final = "prompt_layout"

# Keyword arguments that may be ignored, because they do not change which tokens attend to which.
HARMLESS_ARGUMENTS: Final = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
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
    """Compute attention for one packed row: a reply's tokens see the shared part of their group and their own past.

    Raises TypeError if there is no layout, or if there is a mask, dropout or an unknown argument, all of which it would
    have to ignore.
    """
    layout: PromptLayout | None = arguments.pop(LAYOUT_ARGUMENT, None)
    window: int | None = arguments.pop("sliding_window", None)
    formula = Formula(
        scale=scaling,
        softcap=arguments.pop("softcap", None),
        # A window that hides nothing in this row is left away, since kernels without one are simpler.
        window=window if window is not None and layout is not None and window < layout.longest else None,
        sinks=arguments.pop("s_aux", None),
    )
    unknown = sorted(name for name, given in arguments.items() if given is not None and name not in HARMLESS_ARGUMENTS)
    if layout is None or attention_mask is not None or dropout or unknown:
        named = {
            "does not pass on where replies begin": layout is None,
            "masks tokens by itself": attention_mask is not None,
            "drops attention weights": bool(dropout),
            f"computes with {', '.join(unknown)}, which shared-prompt attention does not": bool(unknown),
        }
        found = "; it ".join(said for said, holds in named.items() if holds)
        raise TypeError(f"{type(module).__name__} cannot compute a shared-prompt row: it {found}")
    # RewardModel compares this count with the number of layers, to detect layers that computed attention of their own.
    layout.num_calls += 1
    backend = layout.backend
    if layout.past is not None:
        layout.past.keep(key, value, layout.groups)
        # The other kernels take as many keys as queries.
        backend = backend if layout.past.is_empty else "segments"
    attend = BACKENDS[backend]
    return attend(query, key, value, layout, formula).transpose(1, 2).contiguous(), None


# torch.compile does not trace this function: what it does depends on the lengths of the prompts and replies in a row,
# which differ from row to row. The rest of a layer is compiled around it.
opaque: Any = torch.compiler.disable
AttentionInterface.register(NAME, opaque(shared_prompt_attention))


def refusal(config: PretrainedConfig, model_class: Any, max_length: int) -> str | None:
    """Return the reason why a shared-prompt row would not be exact for this architecture, or None if it is exact.

    Only the configuration and the class are looked at. The self-test (model/selftest.py) finds what they do not say.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # Recurrent and convolutional layers pass a state along the row, from the end of one reply into the next. There is
    # no mask that could stop it. Sparse ones choose the tokens that they attend to among all before, other replies too.
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"its layers of kind {', '.join(other)} carry state along the row, or choose what they see in all of it"
    # The kernels here have no chunks. A chunk as long as the longest conversation hides nothing and can be ignored; a
    # shorter one cannot.
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_length:
        return f"its attention chunk of {chunk} tokens is shorter than --max-seq-len {max_length}"
    if getattr(config, "cross_attention_layers", None):
        return "its layers that look at images are left out for a text"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    # A packed batch has one position a token; multimodal rope (time, height, width) needs three.
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and "mrope_section" in rope:
        return "its positions have several dimensions"
    # The load-balancing loss averages over the tokens of the row, so a shared prompt would weigh less than its copies.
    if getattr(config, "output_router_logits", False):
        return "its router loss would count a shared prompt once instead of once per reply"
    if getattr(model_class, "_is_stateful", False):
        return "it carries state along the row"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "it does not use the attention registry of transformers"
    # Every reply of a group starts at the same position, right after the prompt. A model that counts positions along
    # the row by itself would put the second reply behind the first.
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return "its forward pass takes no position_ids, so replies would get wrong positions"
    return None


def steady_up_to(config: PretrainedConfig) -> int | None:
    """Return up to how many tokens the frequencies of rotary positions are the same whatever a batch holds; None for
    any number.

    Two kinds of rope choose them by the longest position in the batch, once it is above a limit. Then the score of a
    short conversation changes with what it is computed beside, packed or padded.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have one set of settings for each kind of layer.
    sets = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    limits = [
        one.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        for one in sets
        if one.get("rope_type") in ("longrope", "dynamic")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def padded_implementation(config: PretrainedConfig, model_class: Any = None) -> str:
    """Return the name of the transformers attention for the padded path: "sdpa", or "eager" where SDPA would be wrong.

    `config` is that of a text model, and `model_class` its class if it is known; by default the one of transformers
    for the configuration. SDPA has no soft cap, and transformers would drop the cap without an error. Some model
    classes have no SDPA at all.
    """
    model_class = model_class or listed_class(type(config))
    capped = getattr(config, "attn_logit_softcapping", None)
    return "eager" if capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"


def leave_out_cudnn(device: torch.device) -> None:
    """Keep PyTorch from computing attention by cuDNN on a CUDA device, from now on and in the whole process.

    On an H100, PyTorch 2.11 took cuDNN for causal rows of 16 heads of 128, and its backward pass ended in an illegal
    memory access, after which a process cannot use the device. PyTorch's issue 196678 tells of NaN for masked rows.
    The switch cannot be for a forward pass alone: a backward pass that computes activations again chooses again. Other
    kernels take its place; `varlen` does not use it.
    """
    switches: Any = torch.backends.cuda  # without types
    if device.type == "cuda" and switches.cudnn_sdp_enabled():
        switches.enable_cudnn_sdp(False)
