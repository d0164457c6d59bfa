"""Models that read images too, on two ranks: linear layers outside the decoder are held and saved as on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4TextConfig

import families
import runs
from common import GROUPED, SIZES, make_tokenizer, write_pairs
from harness import family_sizes
from rewardlab.artifact.load import load
from rewardlab.training.run import train
from runs import settings_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified_here")]
config_for = partial(
    runs.config_for,
    steps=4,
    batch_size=6,
    lr=1e-3,
    eval_every=1,
    save_every=2,
    **runs.RANKS,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all weights": ("mistral3", {"precision": "fp32"}),
    "all weights in bf16": ("mistral3", {"precision": "bf16"}),
    "adapters in bf16": ("gemma3", {"precision": "bf16", "lora": True}),
    "linear layers of the text model outside its layers": ("gemma4_text", {"precision": "bf16"}),
}


def saved_base(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    if family == "gemma4_text":
        more = {"head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
        per_token = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384}
        config = Gemma4TextConfig(**{**SIZES, **GROUPED, **more, **per_token, "vocab_size": 384, "pad_token_id": 3})
    else:
        config = family_sizes.config_of(family)
    families.generating_class(config).from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_two_ranks_goes_as_on_one_and_is_resumed(case, tmp_path, on_ranks):
    family, settings = CASES[case]
    base = saved_base(family, tmp_path / "base")
    data = write_pairs(tmp_path / "pairs.jsonl", 24)
    config = config_for(base, data, tmp_path / "alone", **settings)
    train(config)
    many = config.replace(output_dir=tmp_path / "many", resume="auto")
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=settings_of(many), stop_after=2)
    assert 0 not in ends.values(), said[-3000:]
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=settings_of(many))
    assert set(ends.values()) == {0}, said[-3000:]
    ours, theirs, start = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "many/step_4", tmp_path / "alone/step_4", base)
    )
    assert ours.keys() == theirs.keys()
    for name, end in theirs.items():
        if name in start:
            way, other = ours[name] - start[name], end - start[name]
            assert bool(way.any()) == bool(other.any()), f"{name} trained in one of the two runs alone"
            assert float((way - other).norm()) <= 1e-3 * float(other.norm()), name
    assert load(tmp_path / "many/step_4")
