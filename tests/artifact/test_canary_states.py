"""Kept states of canaries: fewer forward passes, and the same folder to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rewardlab.artifact.save as save_module
from common import CONFIGS, make_model
from lessons import slightly_trained, wide_renderer
from rewardlab.artifact.canary_states import CanaryStates
from rewardlab.artifact.copies import copy_reward_model
from rewardlab.artifact.load import load
from rewardlab.artifact.save import Trained, save_reward_model
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import SPEC_FILE, RewardSpec
from rewardlab.model.reward import RewardModel

pytestmark = pytest.mark.usefixtures("few_canaries")
AGAIN = 2
"""Passes of a save whose states are known: one conversation in the live model, one in the folder."""


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Tokens of every conversation that a backbone computed alone, as canaries are; trials of the layout are not."""
    found: list[int] = []
    read = RewardModel.read

    def counts(model, hidden, batch):
        if batch.num_replies == 1:
            found.append(batch.num_tokens)
        return read(model, hidden, batch)

    monkeypatch.setattr(RewardModel, "read", counts)
    return found


def save(folder: Path, model: RewardModel, states: CanaryStates | None, dtype=torch.float32) -> RewardSpec:
    return save_reward_model(
        folder, model, wide_renderer(), beta=1.0, save_dtype=dtype, provenance={}, source=Trained(states=states)
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its name in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def nudge(weight: torch.Tensor) -> None:
    """Move a weight as a step would."""
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)) * 0.05)


def scaled_rope() -> RewardModel:
    """Positions with another base and a scale, so that both faults of them have decoys."""
    config = CONFIGS["llama"]()
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}
    return slightly_trained(make_model(config=config))


MODELS = {
    "shared": slightly_trained,
    "padded": lambda: slightly_trained(make_model(layout="padded")),
    "scaled positions": scaled_rope,
    "half": slightly_trained,
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in MODELS), ("shared", torch.bfloat16), ("half", torch.float16)],
)
def test_a_folder_with_known_states_is_the_folder_without(tmp_path, passes, kind, dtype):
    model, states = MODELS[kind](), CanaryStates()
    if kind == "half":
        model.compute_dtype = torch.bfloat16
    passes.clear()
    save(tmp_path / "first", model, states, dtype)
    first = len(passes)
    nudge(model.head.weight)
    passes.clear()
    save(tmp_path / "kept", model, states, dtype)
    assert len(passes) == AGAIN
    assert max(passes) == passes[-1], "the longest one is computed again"
    passes.clear()
    save(tmp_path / "anew", model, None, dtype)
    assert len(passes) == first
    assert contents(tmp_path / "kept") == contents(tmp_path / "anew") != contents(tmp_path / "first")
    assert load(tmp_path / "kept")


@pytest.mark.slow
def test_another_backbone_gets_states_of_its_own(tmp_path, passes):
    model, states = slightly_trained(), CanaryStates()
    passes.clear()
    save(tmp_path / "first", model, states)
    first = len(passes)
    nudge(model.backbone.layers[1].mlp.down_proj.weight)
    passes.clear()
    save(tmp_path / "kept", model, states)
    assert len(passes) == first
    save(tmp_path / "anew", model, None)
    assert contents(tmp_path / "kept") == contents(tmp_path / "anew")


@pytest.mark.slow
def test_a_state_in_other_bits_lets_all_be_computed(tmp_path, passes, log):
    model, states = slightly_trained(), CanaryStates()
    passes.clear()
    save(tmp_path / "first", model, states)
    first = len(passes)
    num_live = len(states._known["live", torch.device("cpu")])
    # The live scores of a save come before its folder is read, and were confirmed by then.
    for arithmetic, num_computed in (("live", first + 1), ("float32", first + AGAIN - num_live)):
        known = states._known[arithmetic, torch.device("cpu")]
        _, state = known[max(known, key=len)]
        state[0, 3] += 1e-6
        passes.clear()
        save(tmp_path / arithmetic, model, states)
        assert f"a state came out in other bits than before ({arithmetic})" in log.text
        assert len(passes) == num_computed
        assert contents(tmp_path / arithmetic) == contents(tmp_path / "first")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", [1, 2])
def test_a_reload_that_disagrees_is_refused_though_states_are_known(tmp_path, monkeypatch, number):
    model, states = slightly_trained(), CanaryStates()
    real, count = save_module.assemble, 0

    def disagrees(*given, **named):
        nonlocal count
        scorer, count = real(*given, **named), count + 1
        if count == number:
            scorer.model.backbone.rotary_emb.inv_freq.mul_(1.5)
        return scorer

    monkeypatch.setattr(save_module, "assemble", disagrees)
    earlier = [str(count) for count in range(1, number)]
    for name in earlier:
        save(tmp_path / name, model, states)
    with pytest.raises(ArtifactError, match="away from the live model on the canaries"):
        save(tmp_path / "refused", model, states)
    assert [path.name for path in tmp_path.iterdir()] == earlier
    # What was computed wrongly is not in the next folder.
    save(tmp_path / "next", model, states)
    save(tmp_path / "anew", model, None)
    assert contents(tmp_path / "next") == contents(tmp_path / "anew")


def test_looking_up_leaves_the_model_as_it_was(tmp_path):
    model = slightly_trained().train()
    model.known_states = lambda batch: pytest.fail("states of data are none of canaries")
    known, states = model.known_states, CanaryStates()
    save(tmp_path / "first", model, states)
    save(tmp_path / "second", model, states)
    assert model.known_states is known
    assert model.training


def test_a_copy_is_the_folder_without_what_was_added_since(tmp_path, passes):
    spec = save(tmp_path / "first", slightly_trained(), None)
    before = contents(tmp_path / "first")
    (tmp_path / "first/README.md").write_text("a model card")
    passes.clear()
    copy_reward_model(tmp_path / "first", spec, tmp_path / "copy")
    assert not passes
    assert contents(tmp_path / "copy") == before
    assert load(tmp_path / "copy")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", SPEC_FILE])
def test_a_copy_of_a_changed_folder_is_not_kept(tmp_path, name):
    spec = save(tmp_path / "first", slightly_trained(), None)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/earlier").touch()
    path = tmp_path / "first" / name
    changed = bytearray(path.read_bytes())
    changed[-20] ^= 1
    path.write_bytes(bytes(changed))
    if name == SPEC_FILE:
        # It is not copied but written again as it was saved.
        copy_reward_model(tmp_path / "first", spec, tmp_path / "copy")
        assert load(tmp_path / "copy")
        return
    with pytest.raises(ArtifactError, match="changed after the model was saved|digest"):
        copy_reward_model(tmp_path / "first", spec, tmp_path / "copy")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        copy_reward_model(tmp_path / "first", spec, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["earlier"]
    assert {path.name for path in tmp_path.iterdir()} == {"first", "copy"}
