"""What length and words alone reach: they find what is planted, and nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common import stored
from rewardlab.core.types import Comparison, TokenGroup
from rewardlab.evaluation import baselines
from rewardlab.evaluation.baselines import fit_baselines


def group(number: int, first: list[int], second: list[int], *, prompt: int | None = None) -> TokenGroup:
    shared = np.array([5, 6, 7], dtype=np.int32)
    return TokenGroup(
        preference_id=f"row {number}",
        source="made",
        prompt_key=str(number if prompt is None else prompt),
        shared=shared,
        suffixes=(np.array(first, dtype=np.int32), np.array(second, dtype=np.int32)),
        prompt_tokens=(3, 3),
        truncated_tokens=(0, 0),
        comparisons=(Comparison(first=0, second=1),),
    )


def made(count: int, *, seed: int, longer: bool = False, word: int | None = None) -> list[TokenGroup]:
    draw = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        sizes = draw.integers(3, 9, 2)
        if longer:
            sizes = sorted(sizes, reverse=True) if sizes[0] != sizes[1] else (sizes[0] + 1, sizes[0])
        first, second = (draw.integers(10, 60, size).tolist() for size in sizes)
        if word is not None:
            first[0] = word
        groups.append(group(number, first, second))
    return groups


def accuracy(found, name):
    return found[name]["test"].overall.sums.accuracy


def test_length_finds_length_and_words_do_not():
    found = fit_baselines(made(200, seed=0, longer=True), {"test": made(100, seed=1, longer=True)}, seed=0)
    assert accuracy(found, "length only") == 1.0
    assert accuracy(found, "bag of words") < 0.95


def test_words_find_a_word_and_length_does_not():
    found = fit_baselines(made(200, seed=0, word=99), {"test": made(100, seed=1, word=99)}, seed=0)
    assert accuracy(found, "bag of words") > 0.97
    assert 0.3 < accuracy(found, "length only") < 0.7


def test_a_pair_of_words_counts_where_the_words_alone_say_nothing():
    def ordered(seed):
        draw = np.random.default_rng(seed)
        return [
            group(number, [*filler, 98, 99], [*filler, 99, 98])
            for number in range(80)
            for filler in [draw.integers(10, 60, 3).tolist()]
        ]

    assert accuracy(fit_baselines(ordered(0), {"test": ordered(1)}, seed=0), "bag of words") == 1.0


def test_the_prompt_is_not_looked_at():
    train = made(60, seed=0, word=99)
    moved = [replace(one, shared=np.array([99, 99, 99], dtype=np.int32)) for one in train]
    test = made(30, seed=1)
    one, other = (fit_baselines(data, {"test": test}, seed=0) for data in (train, moved))
    for name in one:
        assert [row.score for row in one[name]["test"].rows] == [row.score for row in other[name]["test"].rows]


def test_judged_sets_without_rows_are_left_out_and_one_prompt_is_too_few(caplog):
    assert set(fit_baselines(made(30, seed=0), {"selection": [], "test": made(5, seed=1)}, seed=0)["length only"]) == {
        "test"
    }
    same = [group(number, [11, 12], [13], prompt=0) for number in range(10)]
    assert fit_baselines(same, {"test": made(5, seed=1)}, seed=0) == {}
    assert "at least two prompts" in caplog.text


def test_large_data_are_sampled_with_the_seed(monkeypatch):
    monkeypatch.setattr(baselines, "MAX_GROUPS", 40)
    train, test = made(200, seed=0, word=99), made(30, seed=1, word=99)
    scores = [
        [row.score for row in fit_baselines(train, {"test": test}, seed=seed)["bag of words"]["test"].rows]
        for seed in (0, 0, 1)
    ]
    assert scores[0] == scores[1] != scores[2]


@pytest.mark.parametrize("most", [10_000, 30])
def test_the_penalty_is_chosen_on_folds_of_whole_conversations(monkeypatch, most):
    seen, original = [], baselines.cross_validate
    monkeypatch.setattr(baselines, "MAX_GROUPS", most)
    monkeypatch.setattr(baselines, "cross_validate", lambda data, **how: (seen.append(data), original(data, **how))[1])
    fit_baselines(stored(made(40, seed=0), together=4), {"test": made(4, seed=1)}, seed=0)
    for data in seen:
        numbers = [int(key, 16) for key in data.prompt_keys]  # as they were stored
        conversations = [int(f"{number:x}") // 4 for number in numbers]
        assert len(numbers) == min(40, most)
        assert (
            len(set(zip(conversations, data.roots.tolist(), strict=True))) == len(set(conversations)) == data.num_roots
        )
    assert len(seen) == 2


@pytest.mark.parametrize("count", [2, 3])
def test_very_small_data_do_not_fail(count):
    found = fit_baselines(made(count, seed=0), {"test": made(4, seed=1)}, seed=0)
    assert set(found) == {"length only", "bag of words"}


def test_where_all_compared_prompts_are_one_conversation_there_is_no_baseline_and_the_run_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(baselines, "roots_of", lambda groups: (np.zeros(len(groups), dtype=np.int64), "reply"))
    assert fit_baselines(made(5, seed=0), {"test": made(20, seed=1)}, seed=0) == {}
    assert "no baseline 'length only': cross-validation needs at least two prompts" in caplog.text
