"""Law 3 for what a model itself lets depend on the rows of a batch: positions, padding, widths of its own."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, GemmaConfig, LlamaConfig, OPTConfig, Phi3Config

from common import make_groups, make_model, set_layout
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.model.config import ModelConfig
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import choose_layout, require_sound_layout
from rewardlab.model.selftest import EXACT, distance_from_alone
from test_layout import FAMILIES, one_by_one

LIMIT = 32
"""Above the lengths of the conversations by which layouts are tried."""
NAMED = SIZES | GROUPED | {"max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = PLAIN | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = PLAIN | {"rope_type": "dynamic", "factor": 2.0}
GEMMA3 = NAMED | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
UNSTEADY = {
    "longrope": lambda: Phi3Config(**NAMED, rope_parameters=dict(LONG), original_max_position_embeddings=LIMIT),
    "dynamic": lambda: LlamaConfig(**NAMED | {"max_position_embeddings": LIMIT}, rope_parameters=dict(DYNAMIC)),
    "longrope of one kind of layer": lambda: Gemma3TextConfig(
        **GEMMA3, rope_parameters={"full_attention": dict(LONG), "sliding_attention": dict(PLAIN)}
    ),
    "dynamic of one kind of layer": lambda: Gemma3TextConfig(
        **GEMMA3 | {"max_position_embeddings": LIMIT},
        rope_parameters={"full_attention": dict(DYNAMIC), "sliding_attention": dict(PLAIN)},
    ),
}


def layout_of(config, max_length: int) -> str:
    return choose_layout(config, disk_class_of(config), ModelConfig(), max_length=max_length, share=True, log=print)


@pytest.mark.parametrize("kind", UNSTEADY)
def test_positions_that_the_longest_row_decides_are_refused_above_their_limit(kind):
    with pytest.raises(ModelError, match=f"above {LIMIT} tokens .* Use --max-seq-len {LIMIT} or less"):
        layout_of(UNSTEADY[kind](), LIMIT + 1)
    assert layout_of(UNSTEADY[kind](), LIMIT) == "shared"


@pytest.mark.parametrize("kind", UNSTEADY)
def test_up_to_that_limit_a_score_is_that_of_a_conversation_alone_and_above_it_is_not(kind):
    model = set_layout(make_model(config=UNSTEADY[kind]()), "padded")
    (group,) = make_groups(1)
    tokens = np.arange(1, 41, dtype=np.int32)
    for lengths, same in (((5, LIMIT), True), ((5, 40), False)):
        both = replace(group, shared=tokens[:0], suffixes=tuple(tokens[:length] for length in lengths))
        # Copies, since transformers before 5.21 ends in an error where one model has two passes above the limit.
        alone = one_by_one(copy.deepcopy(model), [both])
        with torch.no_grad():
            together = copy.deepcopy(model)(pack([both]))
        assert (float((together - alone).abs().max()) <= EXACT) == same


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_score_as_each_does_alone(family):
    model, said = make_model(family, layout="padded"), []
    assert distance_from_alone(model) <= EXACT
    require_sound_layout(model, said.append)
    assert "layout: padded; other rows of a batch move a score by" in said[0]


def test_a_model_whose_padded_rows_depend_on_each_other_is_refused():
    # Alone, Gemma's attention is then bidirectional; beside a longer row transformers gives it a causal mask.
    config = GemmaConfig(**NAMED, head_dim=8)
    config.use_bidirectional_attention = True
    assert layout_of(config, 64) == "padded"
    with pytest.raises(ModelError, match=r"in a padded batch of GemmaModel .* away from its score alone"):
        require_sound_layout(make_model(config=config, layout="padded"), print)


@pytest.mark.parametrize("width", [16, 48])
def test_a_projection_behind_the_last_layer_has_a_width_of_its_own(width):
    config = OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=width, do_layer_norm_before=False)
    assert layout_of(config, 64) == "shared"
    groups = make_groups(4)
    model = make_model(config=config)
    with torch.no_grad():
        shared = model(pack(groups))
    reference = one_by_one(model, groups)
    assert reference.std() > 0.05
    assert (shared - reference).abs().max() <= EXACT
