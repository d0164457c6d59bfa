"""Models that ranks hold in parts: bit for bit what they are whole, on disk as well, and nobody holds one whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from common import GROUPED, SIZES, make_tokenizer, write_base_model
from rewardlab.artifact.load import load
from rewardlab.artifact.weights import write_weights
from rewardlab.core.spec import read_spec
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import read_config
from rewardlab.model.outline import read_outline
from rewardlab.model.sharded_weights import ALONE, Weight

FP32 = {"precision": "fp32"}
BF16 = {"precision": "bf16"}
LORA = {"lora": True, "lora_rank": 3}
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "all weights": (2, "llama", FP32, {}),
    "all weights in bf16, saved in bf16": (2, "qwen2", BF16, {"save_dtype": "bfloat16"}),
    "three ranks, uneven parts": (3, "gpt_neox", FP32, {}),
    "two nodes, padded": (4, "gemma2", FP32, {"sharding": "hybrid", "per_node": 2, "layout": "padded"}),
    "lora": (2, "gemma3", LORA | FP32, {}),
    "lora in bf16": (2, "qwen3", LORA | BF16, {}),
    "dora in bf16, norms whole": (2, "llama", LORA | BF16 | {"dora": True, "lora_modules_to_save": ["norm"]}, {}),
}
MOVED = {"max_rounding_error"}
"""How far the live model is from the saved one: rounding, which depends on where in memory a gathered weight begins."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_model_in_parts_is_bit_for_bit_the_whole_one_and_so_is_its_folder(case, tmp_path, on_ranks):
    size, family, settings, more = CASES[case]
    base = write_base_model(tmp_path / "base", family=family)
    ends, said, _ = on_ranks("beside_whole", size, tmp_path, model=str(base), settings=settings, **more)
    assert set(ends.values()) == {0}, said[-3000:]
    lines = require_same(tmp_path)
    assert not any("reads the whole model" in line for line in lines)
    assert any(line.startswith("layout: ") for line in lines)


@pytest.mark.slow
def test_a_base_in_several_files_in_half_precision_with_tied_embeddings(tmp_path, on_ranks):
    base = write_base_model(tmp_path / "base")
    config = LlamaConfig(**{**SIZES, **GROUPED, "tie_word_embeddings": True, "pad_token_id": 2})
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    ends, said, _ = on_ranks("beside_whole", 2, tmp_path, model=str(base), settings=LORA | BF16)
    assert set(ends.values()) == {0}, said[-3000:]
    assert not any("reads the whole model" in line for line in require_same(tmp_path))


@pytest.mark.slow
def test_a_model_in_parts_whose_positions_are_not_the_defaults_of_its_class_is_saved(tmp_path, on_ranks):
    """As those of Llama 3, Qwen2.5 and SmolLM2: what engines that drop them would score is saved with the model."""
    base = write_base_model(tmp_path / "base")
    values = json.loads((base / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}
    (base / "config.json").write_text(json.dumps(values | {"rope_parameters": rope}))
    ends, said, _ = on_ranks("beside_whole", 2, tmp_path, model=str(base), settings=FP32)
    assert set(ends.values()) == {0}, said[-3000:]
    require_same(tmp_path)
    decoys = read_spec(tmp_path / "parts").canaries[0].decoys
    assert decoys.keys() >= {"dropped_rope", "dropped_rope_scaling"}


@pytest.mark.slow
def test_other_files_are_read_whole_and_a_line_says_so(tmp_path, on_ranks):
    base = write_base_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    torch.save(model.state_dict(), base / "pytorch_model.bin")
    ends, said, _ = on_ranks("beside_whole", 2, tmp_path, model=str(base), settings=FP32)
    assert set(ends.values()) == {0}, said[-3000:]
    wanted = (
        "load: every rank reads the whole model into its own memory first, because its weights are in no safetensors "
        "files"
    )
    assert wanted in require_same(tmp_path)


def require_same(folder: Path) -> list[str]:
    """Of models in parts and whole everything is equal; returns what was said while the first was loaded."""
    told = json.loads((folder / "told.json").read_text())
    for what in ("loaded", "still", "reloaded"):
        assert not any(told[what]), (what, told[what])
    assert len({number for numbers in told["fingerprints"] for number in numbers}) == 1
    for parts, whole in told["scores"]:
        assert parts == pytest.approx(whole, rel=1e-6, abs=1e-6)  # as the law says it, by max(1, |score|)
    names = [path.relative_to(folder / "whole") for path in sorted((folder / "whole").rglob("*")) if path.is_file()]
    found = [path.relative_to(folder / "parts") for path in sorted((folder / "parts").rglob("*")) if path.is_file()]
    assert found == names
    for name in names:
        ours, theirs = (folder / kind / name for kind in ("parts", "whole"))
        if name.name == "reward_spec.json":
            first, second = (json.loads(path.read_text()) for path in (ours, theirs))
            for spec in (first, second):
                del spec["digests"]["max_rounding_error"]
            assert first["max_rounding_error"] == pytest.approx(second["max_rounding_error"], rel=1e-3, abs=1e-6)
            assert {key: value for key, value in first.items() if key not in MOVED} == {
                key: value for key, value in second.items() if key not in MOVED
            }
        else:
            assert ours.read_bytes() == theirs.read_bytes(), name
    assert load(folder / "parts")
    lines: list[str] = told["said"][0]
    return lines


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_model(tmp_path, on_ranks):
    """24 layers on four ranks: each holds its quarter, beside it what a forward pass gathers, and one weight."""
    base = tmp_path / "base"
    config = LlamaConfig(**{**SIZES, **GROUPED, "num_hidden_layers": 24, "pad_token_id": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    found = {}
    for in_parts in (True, False):
        size = 4 if in_parts else 1
        ends, said, _ = on_ranks("measured", size, tmp_path, model=str(base), settings=FP32, in_parts=in_parts)
        assert set(ends.values()) == {0}, said[-3000:]
        found[in_parts] = json.loads((tmp_path / "told.json").read_text())
    parts, whole = found[True], found[False]
    for what in ("load", "save", "judge"):
        assert min(whole[what]) >= whole["whole"], "or the measure sees nothing"
    assert max(parts["load"]) < 0.6 * whole["whole"], parts
    assert max(parts["judge"]) < 0.6 * whole["whole"], parts
    # Its parts of the live model and of the one read back, and of that once more while half precision is scored.
    assert max(parts["save"]) < whole["whole"], parts


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_save_is_told_on_all_ranks_and_nothing_is_lost(tmp_path, on_ranks):
    base = write_base_model(tmp_path / "base")
    ends, said, seconds = on_ranks("full_disk", 2, tmp_path, model=str(base), settings=FP32)
    assert set(ends.values()) == {0}, said[-3000:]
    assert seconds < 60
    for rank in range(2):
        assert (tmp_path / f"told-{rank}").read_text().startswith("[Errno 28] No space left on device: ")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"base", "model", "again"}
    assert load(tmp_path / "model")
    assert load(tmp_path / "again")


def test_weights_written_one_at_a_time_make_the_file_of_all_at_once(tmp_path):
    draw = torch.Generator().manual_seed(0)
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    tensors = {
        f"{place}.ä{number}": (torch.randn(shape, generator=draw) * 3).to(kind)
        for number, kind in enumerate(kinds)
        for place, shape in {"b": (3, 5), "a": (7,), "c": ()}.items()
    }
    weights = {
        name: Weight(shape=tuple(tensor.shape), dtype=tensor.dtype, whole=lambda wanted, tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "at once", metadata={"format": "pt"})
    write_weights(tmp_path / "one at a time", weights, ALONE)
    assert (tmp_path / "one at a time").read_bytes() == (tmp_path / "at once").read_bytes()


def refusal_for(base: Path) -> object:
    return read_outline(disk_class_of(read_config(str(base))), str(base), "eager", new_head=False)


def test_what_is_more_than_renamed_has_no_outline(tmp_path):
    base = tmp_path / "base"
    config = MixtralConfig(**SIZES, **GROUPED, num_local_experts=2, num_experts_per_tok=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    assert refusal_for(base) == "transformers converts its weights while it reads them"
    base = write_base_model(tmp_path / "quantised")
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert refusal_for(base) == "its weights are quantised"
    base = write_base_model(tmp_path / "incomplete")
    save_file({"model.norm.weight": torch.zeros(32)}, base / "model.safetensors", metadata={"format": "pt"})
    assert refusal_for(base) == "weights are missing from its files"
