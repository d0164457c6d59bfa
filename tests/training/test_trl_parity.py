"""Step for step with TRL's RewardTrainer, where it is installed: the tiny cases of benchmarks/parity_trl.py."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trl-parity.md"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def parity_trl() -> ModuleType:
    return importlib.import_module("parity_trl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_twenty_steps_are_those_of_trl(parity_trl, tmp_path, name, kind):
    folder = parity_trl.write_tiny(tmp_path / "model", name)
    parity = parity_trl.run_case(
        folder, name=name, use_lora=kind == "lora", num_steps=20, lr=1e-3, max_tokens=160, work=tmp_path
    )
    assert parity.failures == []
    assert parity.clipped_steps > 0, "clipping is among what is compared"
    assert parity.total_update > 1e-2, "the weights move enough for a difference to show"
    # Sharper than the promise: two float32 paths with another order of summation.
    assert parity.loss_distance <= 2e-5
    assert parity.grad_norm_distance <= 2e-4


def test_the_page_lists_what_was_switched_off(parity_trl):
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in parity_trl.SWITCHES if f"| {' | '.join(row)} |" not in page] == []


def test_a_difference_would_be_noticed(parity_trl):
    weights = {"w": torch.ones(3)}
    moved = {"w": torch.tensor([2.0, 1.0, 1.0])}
    track = parity_trl.Track(losses=[0.7, 0.6], grad_norms=[2.0, 0.5], before=weights, after=moved, seconds=1.0)

    def against(**changes: object):
        return parity_trl.compare("m", "full", track, replace(track, **changes), max_grad_norm=1.0)

    assert against().failures == []
    assert against().clipped_steps == 1
    (loss,) = against(losses=[0.7, 0.6002]).failures
    assert loss.startswith("m, full: step 2: loss 0.600000 here, 0.600200 in TRL")
    off = against(after={"w": torch.tensor([2.0, 1.0, 1.01])})
    assert off.update_distance == pytest.approx(0.01, rel=1e-5)
    assert off.weight_distance == pytest.approx(0.01 / 6**0.5, rel=1e-5)
    assert len(off.failures) == 2, "a weight and the updates"
    large = {"w": torch.full((3,), 1000.0)}
    here, there = ({"w": large["w"] + torch.tensor(move)} for move in ([0.5, 0.0, 0.0], [0.0, 0.5, 0.0]))
    (far,) = parity_trl.compare(
        *("m", "full"),
        replace(track, before=large, after=here),
        replace(track, before=large, after=there),
        max_grad_norm=1.0,
    ).failures
    assert far == "m, full: updates are 1.4e+00 apart, relatively; allowed is 0.001", "though no weight is 1e-3 off"
    for losses in ([float("nan"), 0.6], [0.7, float("nan")]):
        assert len(against(losses=losses).failures) == 1
    with pytest.raises(AssertionError, match="does not start"):
        against(before={"w": torch.zeros(3)})
