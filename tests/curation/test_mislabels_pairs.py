"""Judged pairs in which wrong labels are looked for: each once, near duplicates held out together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.wrongly_labelled import preference, simulated
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison
from rewardlab.curation.mislabels.crossfit import hear
from rewardlab.curation.mislabels.pairs import Near, held_together, nearly_equal, opposites, pairs_of


def test_pairs_enter_once_and_are_turned_at_random_so_that_there_are_two_classes():
    pairs, _, _ = simulated(1000)
    assert len(pairs) == 1000
    assert 0.45 < (pairs.label_N > 0.5).mean() < 0.55
    again, _, _ = simulated(1000)
    np.testing.assert_array_equal(pairs.first_N, again.first_N)
    for number in range(0, 1000, 100):
        preferred = pairs.first_N[number] if pairs.label_N[number] > 0.5 else pairs.second_N[number]
        assert preferred == 0, "turning a pair turns its label with it"


def test_which_way_round_pairs_are_turned_changes_no_probability():
    pairs, heads, _ = simulated(200)
    turned = replace(pairs, first_N=pairs.second_N, second_N=pairs.first_N, label_N=1 - pairs.label_N)
    mirrored = replace(heads[0], differences_NF=-heads[0].differences_NF)
    one = hear(heads[0], pairs, num_folds=5, seed=0).probability_N(pairs)
    other = hear(mirrored, turned, num_folds=5, seed=0).probability_N(turned)
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_ties_are_left_out_and_counted_and_judgements_share_the_weight_of_their_row():
    several = [Comparison(first=0, second=1), Comparison(first=1, second=0), Comparison(first=0, second=1, label=0.5)]
    preferences = [preference(number, comparisons=several if number == 0 else ()) for number in range(60)]
    pairs = pairs_of(preferences, held_together(preferences, None)[0], seed=0)
    assert (len(pairs), pairs.num_ties) == (61, 1)
    assert pairs.weight_N[:3].tolist() == [0.5, 0.5, 1.0]


def test_too_few_pairs_are_refused():
    preferences = [preference(number) for number in range(49)]
    with pytest.raises(DataError, match="49 judged pairs are too few"):
        pairs_of(preferences, held_together(preferences, None)[0], seed=0)


LONG = "take two eggs and a cup of flour, beat them until they are smooth, and leave the bowl to rest for an hour"


def test_near_duplicates_are_held_out_together():
    pytest.importorskip("datasketch")
    preferences = [preference(number) for number in range(20)]
    words = [f"w{number}" for number in range(40)]
    preferences[3] = preference(3, prompt=" ".join(words))
    preferences[7] = preference(7, prompt=" ".join([*words, "please"]))
    preferences[11] = preference(11, replies=(LONG, "no"))
    preferences[15] = preference(15, replies=(f"{LONG} or so", "yes"))
    apart, rule = held_together(preferences, None)
    assert len(set(apart.tolist())) == 20
    near = nearly_equal(preferences)
    roots, rule = held_together(preferences, near)
    assert roots[3] == roots[7]
    assert roots[11] == roots[15]
    assert len(set(roots.tolist())) == 18
    assert "near duplicates together" in rule


def test_near_duplicates_that_join_most_rows_are_a_template_and_do_not_count():
    pytest.importorskip("datasketch")
    words = " ".join(f"w{number}" for number in range(60))
    preferences = [preference(number, prompt=f"{words} {number}") for number in range(20)]
    roots, rule = held_together(preferences, nearly_equal(preferences))
    assert len(set(roots.tolist())) == 20
    assert "do not count" in rule


def test_a_near_duplicate_with_the_opposite_label_is_named():
    pytest.importorskip("datasketch")
    preferences = [preference(number) for number in range(60)]
    replies = (LONG, f"{LONG} and then some more of all that again and again")
    preferences[4] = preference(4, prompt="how do I bake", replies=replies)
    preferences[9] = preference(9, prompt="How do I  bake", replies=replies[::-1])
    preferences[12] = preference(12, prompt="how do I bake", replies=replies)
    near = nearly_equal(preferences)
    pairs = pairs_of(preferences, held_together(preferences, near)[0], seed=0)
    found = opposites(pairs, near)
    assert found[4] == ("pairs.jsonl:10",)
    assert found[9] == ("pairs.jsonl:5", "pairs.jsonl:13")
    assert found[0] == ()


def test_of_thousands_of_rows_with_the_opposite_label_the_first_are_named():
    judged = (Comparison(first=0, second=1), Comparison(first=1, second=0))
    rows = [preference(number, comparisons=[judged[number % 2]]) for number in range(60)]
    pairs = pairs_of(rows, np.arange(60), seed=0)
    found = opposites(pairs, Near(prompts_P=np.zeros(60, dtype=np.int64), replies=((0, 1),) * 60))
    assert found[0] == tuple(row.id for row in rows[1:40:2])
    assert found[59] == tuple(row.id for row in rows[0:40:2])
