"""The score that a foreign model gives by itself: plain transformers, its own head, and its own arithmetic.

Nothing here uses the scoring path of rewardlab, so that the two are independent and can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rewardlab.artifact.foreign.layouts import ForeignModel
from rewardlab.core.types import IntArray
from rewardlab.model.attention import padded_implementation
from rewardlab.model.files import told


@torch.no_grad()
def own_scores(source: ForeignModel, sequences: Sequence[IntArray]) -> list[float]:
    """Return the source's own float32 score of each token sequence, one at a time and without padding.

    - `seq-cls`: the logit (or the weighted sum of logits) of the classifier of transformers, which it reads at the
      last token that is not its pad.
    - `v_head`, `value-head`: the causal model's last hidden states, through the head with its bias, at the last token.
    - `linear-head`: the base model's output with positions counted from the mask, through the head at the last token;
      minus the mean, divided by the std.

    Raises ModelError if transformers cannot load the source.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with told(str(source.folder), "its own score cannot be computed"):
            model = _loaded(source)
            return [float(_score(source, model, torch.from_numpy(one).long()[None])) for one in sequences]
    finally:
        transformers_logging.set_verbosity(verbosity)


def _loaded(source: ForeignModel) -> Any:
    """Load the source in the class in which its own project computes it."""
    # Earlier versions of transformers take SDPA for Gemma 2, which drops the soft cap of its attention.
    attention = padded_implementation(source.config.get_text_config())
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
    if source.key_mapping is not None:
        options["key_mapping"] = source.key_mapping
    if source.kind == "seq-cls":
        outputs = len(source.counts)
        return source.disk_class.from_pretrained(str(source.folder), num_labels=outputs, **options).eval()
    own = AutoModel if source.kind == "linear-head" else AutoModelForCausalLM
    return own.from_pretrained(str(source.folder), **options).eval()


def _score(source: ForeignModel, model: Any, ids_1L: Tensor) -> Tensor:
    """Return the score of one sequence as the source's project computes it."""
    mask_1L = torch.ones_like(ids_1L)
    if source.kind == "seq-cls":
        logit: Tensor = model(input_ids=ids_1L, attention_mask=mask_1L).logits[0] @ torch.tensor(source.counts)
        return logit
    if source.kind == "linear-head":
        positions_1L = mask_1L.cumsum(-1) - 1
        hidden_1LW = model(input_ids=ids_1L, attention_mask=mask_1L, position_ids=positions_1L).last_hidden_state
    else:
        hidden_1LW = model(
            input_ids=ids_1L, attention_mask=mask_1L, output_hidden_states=True, use_cache=False
        ).hidden_states[-1]
    outputs_O = hidden_1LW[0, mask_1L.sum() - 1] @ source.rows.T + source.biases
    value = outputs_O @ torch.tensor(source.counts)
    score: Tensor = (value - source.mean) / source.std
    return score
