"""The script that times rendering, on the tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rendering
from benchmark_results import result
from rewardlab.data.layout import Rendered


def run(folder):
    flags = ["--model", "tiny-llama", "--rows", "generated", "--count", "6", "--rounds", "1", "--results", str(folder)]
    code = rendering.main(flags)
    return code, result(folder)


@pytest.mark.slow
def test_both_ways_are_timed_and_give_the_same_tokens(tmp_path):
    code, found = run(tmp_path)
    assert code == 0
    assert (found["conversations"], found["other_tokens"]) == (12, 0)
    assert set(found["times"]) == set(rendering.WAYS)


@pytest.mark.slow
def test_other_tokens_are_an_error(tmp_path, monkeypatch):
    together = rendering.render_conversations

    def shorter(conversations, renderer):
        found = together(conversations, renderer)
        first = next(iter(found))
        assert isinstance(found[first], Rendered)
        return {**found, first: replace(found[first], token_ids=found[first].token_ids[:-1])}

    monkeypatch.setattr(rendering, "render_conversations", shorter)
    code, found = run(tmp_path)
    assert (code, found["other_tokens"]) == (1, 1)
