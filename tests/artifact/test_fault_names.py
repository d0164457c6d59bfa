"""A fault is named on evidence: a small run of the simulation, and each rule of the naming on its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fault_names
from artifacts import save
from rewardlab.analysis.faults import FAULTS, UNKNOWN, name_fault
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import Canary, read_spec
from rewardlab.serve.verifying.folder import verify
from sealing import edit_weights

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("names") / "rm"
    save(folder)
    return folder


@pytest.mark.slow
def test_a_small_simulation_names_what_is_planted_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_names, "FAMILIES", ("Llama 3 scaling",))
    assert fault_names.main(["--seeds", "1", "--draws", "3", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    for precision, faults in found["planted"].items():
        assert len(faults) == 9
        for fault, rules in faults.items():
            now = rules["now"]
            assert now["wrong"] == now["among_others"] == 0, (precision, fault)
            assert precision != "float32" or now["right"] == 1, fault
    for precision, kinds in found["none"].items():
        now = [sum(rules["now"][key] for rules in kinds.values()) for key in ("wrong", "unknown")]
        before = [sum(rules["before"][key] for rules in kinds.values()) for key in ("wrong", "unknown")]
        assert now[0] <= 0.005 * sum(now), precision
        assert before[0] > 0.2 * sum(before), "the rule before did so for every third"


def swap(weights: dict[str, torch.Tensor]) -> None:
    """The two layers change places."""
    for name, tensor in dict(weights).items():
        other = name.replace(".layers.0.", ".layers.x.").replace(".layers.1.", ".layers.0.").replace(".x.", ".1.")
        weights[other] = tensor


def flip(weights: dict[str, torch.Tensor]) -> None:
    """A quarter of the signs."""
    draw = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor.mul_(torch.where(torch.rand(tensor.shape, generator=draw) < 0.25, -1.0, 1.0))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("change", [swap, flip])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_damaged_weights_have_no_name(tmp_path, change, precision):
    folder = tmp_path / "rm"
    save(folder)
    before = load_file(folder / "model.safetensors")
    edit_weights(folder, change)
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ArtifactError, match=f"What fits: {UNKNOWN}"):
        verify(folder, precision=precision)


def canaries_of(scores: list[float], **decoys: list[float]) -> list[Canary]:
    """Canaries with these scores and decoys."""
    return [
        Canary(
            name=str(number),
            messages=[{"role": "user", "content": "a"}],
            token_ids=[1],
            score=score,
            decoys={fault: values[number] for fault, values in decoys.items()},
            references={"bfloat16": score},
        )
        for number, score in enumerate(scores)
    ]


SCORES = [0.4, -0.8, 1.6, 0.1, -1.3]
SHIFTED = [1.4, 0.9, -0.6, 1.7, 0.2]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_decoys_that_fit_are_named_and_those_that_do_not_are_not(precision):
    canaries = canaries_of(SCORES, shifted_position=SHIFTED, zero_head=[0.0] * 5, softmax=[1.0] * 5)

    def named(scores: list[float]) -> str | None:
        return name_fault(canaries, scores, precision=precision)

    assert named(SCORES) is None
    assert named(SHIFTED) == f"{FAULTS['shifted_position']} (shifted_position)"
    assert named([0.0] * 5) == f"{FAULTS['zero_head']} (zero_head)"
    assert named([1.0] * 5) == f"{FAULTS['softmax']} (softmax)"
    for scores in (
        [value + 0.5 for value in SHIFTED],  # near to nothing
        [*SHIFTED[:4], SHIFTED[4] + 0.4],  # one is too far
        [0.002, 0.0, -0.001, 0.0, 0.0],  # a lost head gives zeros
        [1.01, 0.99, 1.0, 1.0, 1.0],
        [float("nan")] * 5,
        SHIFTED[::-1],
    ):
        assert named(scores) == UNKNOWN


def test_typed_control_tokens_that_are_obeyed_are_told_apart_from_every_fault():
    plain = canaries_of(SCORES, shifted_position=SHIFTED)
    typed = replace(
        plain[0], name="control tokens", score=0.3, decoys={"special_tokens": -0.9, "shifted_position": 2.0}
    )
    canaries = [*plain, typed]
    found = name_fault(canaries, [*SCORES, -0.9])
    assert found == f"{FAULTS['special_tokens']} (special_tokens)"
    assert "nothing else: what every engine does that is given texts; give it token ids" in found
    assert name_fault(canaries, [*SCORES, 0.3]) is None
    assert name_fault(canaries, [*SCORES, -0.6]) == UNKNOWN, "neither reading"
    assert name_fault(canaries, [*SHIFTED, -0.9]) == f"{FAULTS['shifted_position']} (shifted_position)"


def test_canaries_that_are_all_typed_are_judged_by_themselves():
    typed = canaries_of(SCORES, special_tokens=[score + 1 for score in SCORES])
    assert name_fault(typed, SCORES) is None
    assert name_fault(typed, [score + 1 for score in SCORES]) == f"{FAULTS['special_tokens']} (special_tokens)"
    assert name_fault(typed, [score + 2 for score in SCORES]) == UNKNOWN
    assert name_fault([], []) is not None, "no canaries prove nothing"


def test_one_canary_is_no_evidence():
    apart = canaries_of(SCORES, shifted_position=[*SCORES[:4], 0.9])
    assert name_fault(apart, [*SCORES[:4], 0.9]) == UNKNOWN
    assert name_fault(apart[4:], [0.9]) == UNKNOWN
    two = canaries_of(SCORES, shifted_position=[*SCORES[:3], 0.9, 0.9])
    assert name_fault(two, [*SCORES[:3], 0.9, 0.9]) == f"{FAULTS['shifted_position']} (shifted_position)"


def test_what_a_constant_or_a_moved_reference_explains_as_well_has_no_name():
    moved = [score + 0.7 for score in SCORES]
    assert name_fault(canaries_of(SCORES, no_template=moved), moved) == UNKNOWN
    near = (np.array([0.5, 0.51, 0.49, 0.5, 0.52])).tolist()
    flat = canaries_of(SCORES, no_template=near)
    assert name_fault(flat, near, precision="bfloat16") == UNKNOWN, "the arithmetic hides how they differ"
    assert name_fault(flat, near) == f"{FAULTS['no_template']} (no_template)", "that of float32 does not"


def test_faults_that_cannot_be_told_apart_are_both_named():
    other = [value + 0.01 for value in SHIFTED]
    canaries = canaries_of(SCORES, double_bos=other, shifted_position=SHIFTED)
    found = name_fault(canaries, SHIFTED, precision="bfloat16")
    assert found == f"{FAULTS['shifted_position']} (shifted_position), or {FAULTS['double_bos']} (double_bos)"
    assert name_fault(canaries, SHIFTED) == f"{FAULTS['shifted_position']} (shifted_position)"


def test_a_sigmoid_in_half_precision_is_one_of_the_scores_there(saved):
    canaries = [replace(canary, references={"bfloat16": canary.score + 0.1}) for canary in read_spec(saved).canaries]
    scores = torch.tensor([canary.score + 0.1 for canary in canaries]).bfloat16().sigmoid().tolist()
    assert "(sigmoid)" in (name_fault(canaries, scores, precision="bfloat16") or "")


NEAR = [0.5, -0.7, 1.5, 0.2, -1.4, 0.9]
NEARLY = [0.62, -0.59, 1.37, 0.31, -1.29, 0.78]
"""Scores under a fault that moves each by about 0.11: less than the tolerance of bfloat16."""


def test_a_fault_within_the_tolerance_of_half_precision_is_named_where_the_evidence_is_clear():
    canaries = canaries_of(NEAR, precision_mismatch=NEARLY)
    noise = np.array([0.02, -0.03, 0.01, -0.02, 0.03, -0.01])
    for scores in (NEARLY, (np.array(NEARLY) + noise).tolist()):
        fault = name_fault(canaries, scores, precision="bfloat16")
        assert fault == f"{FAULTS['precision_mismatch']} (precision_mismatch)"
    assert name_fault(canaries, (np.array(NEAR) + noise).tolist(), precision="bfloat16") is None
    between = (np.array(NEAR) + np.array(NEARLY)) / 2
    assert name_fault(canaries, between.tolist(), precision="bfloat16") is None
    assert name_fault(canaries, (np.array(NEAR) + 0.1).tolist(), precision="bfloat16") is None, "a constant"


def test_the_noise_of_a_sound_engine_is_hardly_ever_named():
    """With decoys of all sizes about the references, the worst of which is as far away as half the tolerance."""
    draw = np.random.default_rng(0)
    named = 0
    for size in (0.03, 0.06, 0.1, 0.2):
        for _ in range(250):
            own = draw.normal(0, 1, 7)
            canaries = canaries_of(own.tolist(), precision_mismatch=(own + draw.normal(0, size, 7)).tolist())
            noise = draw.normal(0, 0.03, 7).clip(-0.14, 0.14)
            named += name_fault(canaries, (own + noise).tolist(), precision="bfloat16") is not None
    assert named <= 2


def test_a_sound_engine_nearer_to_float32_than_the_references_are_has_no_fault():
    """Decoys are computed in float32, so one that hardly moves is nearer to such an engine than the references."""
    exact = np.array([0.5, -0.7, 1.5, 0.2, -1.4, 0.9, 0.1])
    off = np.array([0.07, -0.06, 0.08, 0.07, -0.08, 0.06, -0.07])
    canaries = [
        replace(canary, references={"bfloat16": reference})
        for canary, reference in zip(
            canaries_of(exact.tolist(), double_bos=(exact + 0.002).tolist()), (exact + off).tolist(), strict=True
        )
    ]
    assert name_fault(canaries, exact.tolist(), precision="bfloat16") is None
