"""One score in every precision: rounding keeps what was learned, and what does not keep it is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from common import make_groups, make_model
from lessons import slightly_trained, wide_renderer
from rewardlab.analysis.faults import FAULTS, PRECISION_MISMATCH, name_fault
from rewardlab.artifact.canaries import score_tokens
from rewardlab.artifact.halves import stored
from rewardlab.artifact.load import load
from rewardlab.artifact.save import live_scores, save_reward_model
from rewardlab.batch import pack
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import SCORE_TOLERANCE, RewardSpec, read_spec
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ComputeConfig
from rewardlab.model.half import HalfLinear
from rewardlab.model.reward import RewardModel
from rewardlab.serve.verifying.folder import verify
from sealing import edit_weights

PLAIN = ComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
MISMATCH = f"{FAULTS[PRECISION_MISMATCH]} ({PRECISION_MISMATCH})"


def save(folder: Path, model: RewardModel, dtype: torch.dtype = torch.float32) -> RewardSpec:
    return save_reward_model(folder, model, wide_renderer(), beta=1.0, save_dtype=dtype, provenance={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slightly trained model in float32."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("half") / "rm"
    save(path, slightly_trained())
    return path


def as_live(model: RewardModel, dtype: torch.dtype) -> RewardModel:
    """The model as it computes in a run of this precision."""
    model.compute_dtype = dtype
    apply_compute(model, PLAIN)
    return model


# --- the same bits everywhere ----------------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_files_live_models_and_loaded_ones_have_the_same_bits_in_half_precision(tmp_path, folder, dtype, precision):
    live = as_live(slightly_trained(), dtype)
    live(pack(make_groups(1)))
    copies = {
        f"{name.removeprefix('backbone.')}.weight": layer.half_weight
        for name, layer in live.named_modules()
        if isinstance(layer, HalfLinear)
    }
    assert len(copies) == 14, "seven linear layers in each of the two"
    save(tmp_path / "half", slightly_trained(), dtype)
    written = load_file(tmp_path / "half/model.safetensors")
    loaded = load(folder, precision=precision).model.backbone.state_dict()
    for name, copy in copies.items():
        assert copy.dtype is dtype
        assert torch.equal(copy, written[f"model.{name}"])
        assert torch.equal(copy, loaded[name])
        assert not torch.equal(copy, slightly_trained().backbone.get_parameter(name).to(dtype)), "not the nearest"


@pytest.mark.slow
def test_every_float_tensor_of_a_half_precision_folder_is_rounded_under_its_name(tmp_path):
    model = slightly_trained()
    save(tmp_path / "rm", model, torch.bfloat16)
    written = load_file(tmp_path / "rm/model.safetensors")
    assert len(written) == len(model.state_dict())
    for name, tensor in model.state_dict().items():
        on_disk = name.replace("backbone.", "model.").replace("head.", "score.")
        assert torch.equal(written[on_disk], stored(tensor, torch.bfloat16, name))


def test_weights_in_both_half_precisions_one_after_the_other_are_right_on_average():
    """With the same draws an update of 1 % of a step would be kept nine times as often as it should."""
    weight = torch.full((400, 400), 1.0 + 2**-7 / 100)
    twice = stored(stored(weight, torch.float16, "w").float(), torch.bfloat16, "w")
    share = float((twice > 1).float().mean())
    assert share == pytest.approx(0.01, abs=5 * (0.01 / weight.numel()) ** 0.5)


# --- references ------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("attention", ["padded", "shared"])
def test_a_float32_folder_loads_in_half_precision_and_scores_as_it_promised(folder, attention):
    spec = read_spec(folder)
    scorer = load(folder, precision="bf16", attention=attention)
    scores = score_tokens(scorer.model, [np.asarray(c.token_ids, np.int32) for c in spec.canaries])
    assert scores == pytest.approx([c.references["bfloat16"] for c in spec.canaries], abs=0.02)
    assert max(abs(c.references["bfloat16"] - c.score) for c in spec.canaries) < 0.1
    assert min(abs(c.decoys[PRECISION_MISMATCH] - c.score) for c in spec.canaries) > 0.3, "a lot was learned"
    assert verify(folder, precision="bf16").precision == "bfloat16"
    assert load(folder, precision="fp16").model.compute_dtype is torch.float16


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox"])
def test_every_family_loads_in_half_precision(tmp_path, family):
    save(tmp_path / family, slightly_trained(make_model(family)))
    for precision, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        model = load(tmp_path / family, precision=precision).model
        assert model.compute_dtype is getattr(torch, name)
        assert {layer.half_weight.dtype for layer in model.modules() if isinstance(layer, HalfLinear)} == {
            model.compute_dtype
        }


def test_the_live_scores_of_a_run_in_bf16_are_those_of_its_saved_model(folder):
    live = live_scores(as_live(slightly_trained().train(), torch.bfloat16), wide_renderer())
    wanted = [canary.references["bfloat16"] for canary in read_spec(folder).canaries]
    assert live == pytest.approx(wanted, abs=0.02)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_half_precision_folder_keeps_what_was_learned_and_has_canaries_of_its_own(tmp_path, folder, dtype, precision):
    spec = save(tmp_path / "rm", slightly_trained(), dtype)
    name = str(dtype).removeprefix("torch.")
    exact = read_spec(folder).canaries
    assert (spec.save_dtype, spec.rounding) == (name, "stochastic")
    assert max(abs(a.score - b.score) for a, b in zip(spec.canaries, exact, strict=True)) < 0.1
    assert all(name in canary.references for canary in spec.canaries)
    assert (PRECISION_MISMATCH in spec.canaries[0].decoys) == (name == "float16"), "bfloat16 weights are on their grid"
    for each in ("fp32", precision):
        assert verify(tmp_path / "rm", precision=each).num_canaries == 7
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=dtype).eval()
    with torch.no_grad():
        scores = [float(plain(torch.tensor([canary.token_ids])).logits) for canary in spec.canaries]
    assert name_fault(spec.canaries, scores, precision=name) is None


def test_a_float32_folder_in_an_engine_of_bfloat16_is_named_a_precision_mismatch(folder):
    canaries = read_spec(folder).canaries
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        scores = [float(plain(torch.tensor([canary.token_ids])).logits) for canary in canaries]
    assert name_fault(canaries, scores, precision="bfloat16") == MISMATCH
    assert "rewardlab export" in MISMATCH


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_rounded_to_the_nearest_behind_the_folders_back_are_named_in_any_precision(tmp_path, folder, precision):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))

    def round_all(weights: dict[str, torch.Tensor]) -> None:
        weights.update({name: tensor.bfloat16().float() for name, tensor in weights.items()})

    edit_weights(copy, round_all)
    with pytest.raises(ArtifactError) as refused:
        verify(copy, precision=precision)
    assert f"What fits: {MISMATCH}" in str(refused.value)


# --- range -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_beyond_the_range_of_float16_are_refused_with_a_way_out(tmp_path):
    model = make_model()
    with torch.no_grad():
        model.head.weight[0, 3] = -70000.0
    with pytest.raises(
        ArtifactError, match=r"^head.weight holds 7e\+04, and the largest float16 value is 65504. Take bfloat16"
    ):
        save(tmp_path / "rm", model, torch.float16)
    assert not (tmp_path / "rm").exists()
    save(tmp_path / "rm", model, torch.bfloat16)


@pytest.mark.slow
def test_weights_too_small_for_float16_are_refused_with_a_way_out(tmp_path):
    model = make_model()
    with torch.no_grad():
        model.backbone.layers[1].mlp.up_proj.weight.mul_(1e-5)
    with pytest.raises(ArtifactError, match=r"up_proj.weight holds weights of .*e-0[67] .*too small.*Take bfloat16"):
        save(tmp_path / "rm", model, torch.float16)
    with torch.no_grad():
        model.backbone.layers[1].mlp.up_proj.weight.zero_()
    save(tmp_path / "rm", model, torch.float16)


@pytest.mark.slow
def test_a_model_whose_arithmetic_leaves_the_range_of_float16_is_named(tmp_path):
    model = make_model()
    with torch.no_grad():
        for name in ("up_proj", "down_proj"):
            getattr(model.backbone.layers[1].mlp, name).weight.mul_(3e3)
    with pytest.raises(ArtifactError, match=r"scores are not finite in float16 arithmetic. Take bfloat16"):
        save(tmp_path / "half", model, torch.float16)
    save(tmp_path / "whole", model)
    with pytest.raises(ArtifactError, match=r"not finite in float16, whose range is too small.*bf16, or fp32"):
        load(tmp_path / "whole", precision="fp16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_has_diverged_is_called_that_and_not_kept(tmp_path, dtype):
    model = make_model()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(ArtifactError, match=r"not finite in float32: the model has diverged"):
        save(tmp_path / "rm", model, dtype)
    assert list(tmp_path.iterdir()) == []


def test_the_tolerance_of_a_precision_is_that_of_its_own_reference(folder):
    canaries = read_spec(folder).canaries
    near = [canary.references["bfloat16"] + 0.9 * SCORE_TOLERANCE["bfloat16"] for canary in canaries]
    assert name_fault(canaries, near, precision="bfloat16") is None
    assert name_fault(canaries, near) is not None
    far = [canary.references["bfloat16"] * 1.2 + 1 for canary in canaries]
    assert name_fault(canaries, far, precision="bfloat16").startswith("unknown")
