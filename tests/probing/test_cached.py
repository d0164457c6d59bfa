"""States are found by the tokens of a conversation, whatever data it is in and however a batch is laid out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import rewardlab.probing.cached as cached_module
import rewardlab.probing.states as states_module
from common import make_groups, make_model, set_layout, stored
from harming import HARMS
from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.probing.cached import CachedStates, cached_states
from rewardlab.probing.states import conversation_keys, hash_of, lists_of, state_file, states_of
from rewardlab.score import score_groups


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The replies of every batch whose states were computed."""
    batches: list[int] = []
    original = states_module.layer_states
    monkeypatch.setattr(
        states_module, "layer_states", lambda *args: (batches.append(args[1].num_replies), original(*args))[1]
    )
    return batches


@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
@pytest.mark.parametrize("budget", [20, 4096])
def test_looked_up_scores_are_those_that_are_computed(tmp_path, layout, budget):
    model, groups = set_layout(make_model(), layout), make_groups(12, replies=4)
    expected = np.concatenate(score_groups(model, groups, budget=budget))
    model.known_states = cached_states(model, {"training": stored(groups)}, budget=64, cache=tmp_path)
    model.backbone = None  # nothing of it is needed any more
    np.testing.assert_allclose(np.concatenate(score_groups(model, groups, budget=budget)), expected, atol=1e-5)


def test_the_head_gets_the_gradient_that_it_gets_of_computed_states(tmp_path):
    model, groups = make_model(), make_groups(6, replies=3)
    batch = pack(groups)
    gradients = []
    for known in (None, cached_states(model, {"training": groups}, budget=64, cache=tmp_path)):
        model.known_states = known
        model.zero_grad()
        model(batch).square().sum().backward()
        gradients.append(model.head.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


def test_a_key_is_that_of_the_tokens_however_they_are_divided():
    tokens = np.arange(1, 9, dtype=np.int32)
    whole = conversation_keys(tokens[:0], [tokens])
    assert conversation_keys(tokens[:3], [tokens[3:], tokens[3:7]]) == [
        *whole,
        *conversation_keys(tokens[:7], [tokens[7:0]]),
    ]
    assert conversation_keys(tokens[:3], [tokens[:0:-1]]) != whole
    assert len({*conversation_keys(tokens[:1], [tokens[1:] + n for n in range(5)])}) == 5


def test_a_conversation_that_was_never_computed_is_an_error(tmp_path):
    model, groups = make_model(), make_groups(4)
    model.known_states = cached_states(model, {"training": groups[:3]}, budget=64, cache=tmp_path)
    with pytest.raises(ModelError, match="the states of 2 of 8 replies were never computed"):
        model(pack(groups))
    with model.computing():
        assert model(pack(groups)).shape == (8,)
    assert isinstance(model.known_states, CachedStates)


def test_only_conversations_that_nobody_computed_are_computed(tmp_path, computed):
    model, groups = make_model(), make_groups(10)
    cached_states(model, {"training": groups[:4], "test": groups[2:6]}, budget=4096, cache=tmp_path)
    assert computed == [8, 4]
    found = cached_states(model, {"training": groups[::-1]}, budget=4096, cache=tmp_path)
    assert computed == [8, 4, 8]
    assert (found.num_read, found.num_computed) == (12, 8)
    other = replace(groups[0], suffixes=(groups[0].suffixes[1], groups[0].suffixes[1][:-1], groups[0].suffixes[0]))
    cached_states(model, {"training": [other]}, budget=4096, cache=tmp_path)
    assert computed[3:] == [3]


def test_the_states_of_a_probe_are_found(tmp_path, computed):
    model, groups = make_model(), make_groups(5)
    states_of(model, groups, [1, 2], budget=4096, cache=tmp_path, name="training")
    computed.clear()
    cached_states(model, {"training": groups}, budget=4096, cache=tmp_path)
    assert computed == []
    states_of(model, make_groups(5, seed=1), [1], budget=4096, cache=tmp_path, name="training")
    assert len(list(lists_of(tmp_path, hash_of(model)).iterdir())) == 1, "earlier layers are no last states"


def test_what_was_computed_before_an_interruption_is_kept(tmp_path, monkeypatch, computed):
    model, groups = make_model(), make_groups(9)
    monkeypatch.setattr(cached_module, "CHUNK", 4)
    original = states_module.layer_states

    def stops(*args):
        if len(computed) == 2:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(states_module, "layer_states", stops)
        with pytest.raises(KeyboardInterrupt):
            cached_states(model, {"training": groups}, budget=4096, cache=tmp_path)
    assert computed == [8, 8]
    cached_states(model, {"training": groups}, budget=4096, cache=tmp_path)
    assert computed == [8, 8, 2]


@pytest.mark.parametrize("how", [how for how in HARMS if "link" not in how])
@pytest.mark.parametrize("what", ["states", "checksum", "list"])
def test_whatever_is_damaged_is_computed_again_and_said_once(tmp_path, caplog, what, how, computed):
    model, groups = make_model(), make_groups(9)
    before = cached_states(model, {"training": groups}, budget=4096, cache=tmp_path)(pack(groups))
    (listed,) = lists_of(tmp_path, hash_of(model)).iterdir()
    states = state_file(tmp_path / "states" / listed.stem, 2)
    HARMS[how]({"states": states, "checksum": states.with_suffix(".json"), "list": listed}[what])
    computed.clear()
    # Other data with the same conversations, whose folder is another one.
    again = cached_states(model, {"training": groups[::-1]}, budget=4096, cache=tmp_path)(pack(groups))
    assert torch.allclose(before, again, atol=1e-5)
    assert sum(computed) == 18
    caplog.clear()
    cached_states(model, {"training": groups}, budget=4096, cache=tmp_path)
    assert sum(computed) == 18
    assert caplog.text == ""
