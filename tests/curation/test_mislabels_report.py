"""The report of a search names its clusters conversations, which they are, and the intervals of all its columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.wrongly_labelled import RULE, simulated
from rewardlab.curation.mislabels.crossfit import Witness
from rewardlab.curation.mislabels.lengths import lengths_of
from rewardlab.curation.mislabels.noise import estimate_noise
from rewardlab.curation.mislabels.pairs import Pairs
from rewardlab.curation.mislabels.planting import plant
from rewardlab.curation.mislabels.ranking import rank
from rewardlab.curation.mislabels.reasons import entries_of
from rewardlab.curation.mislabels.text import report
from rewardlab.curation.mislabels.worth import measure_worth


def test_intervals_are_said_to_be_by_conversation_throughout():
    pairs, heads, _ = simulated(200, wrong=0.1)
    pairs = replace(pairs, roots_N=pairs.roots_N // 3)
    ranking = rank(heads, pairs, RULE)
    planted = plant(heads, pairs, RULE, share=0.1, num_seeds=1)
    said = report(
        pairs=pairs,
        ranking=ranking,
        rule=RULE,
        held="by prompts",
        lengths=lengths_of(pairs, ranking.flagged_N),
        noise=estimate_noise(ranking.together, pairs),
        planted=planted,
        worth=measure_worth(heads, pairs, RULE, num_seeds=1),
    ).replace("held out by prompts", "")
    assert "by prompt" not in said
    assert "few prompts" not in said
    assert "by conversation" in said
    (note,) = [line for line in said.splitlines() if line.startswith("precision, recall: ")]
    top = planted.rankings[0].at_depth.values()
    for one in (*(found.recall for found in top), planted.flagged.precision, planted.flagged.recall):
        assert one.method in note


def test_what_a_silent_witness_means_is_said_and_how_many_pairs_can_have_no_flag():
    pairs, heads, _ = simulated(100)
    margin = heads[0].differences_NF[:, 0].copy()
    margin[:40] = np.nan

    def told(witnesses):
        ranking = rank(witnesses, pairs, RULE)
        noise = estimate_noise(ranking.together, pairs)
        made = {"lengths": None, "noise": noise, "planted": None, "worth": None}
        return " ".join(report(pairs=pairs, ranking=ranking, rule=RULE, held="by prompts", **made).split())

    said = told([heads[0], Witness(name="some", margins_N=margin)])
    assert "silent: pairs of which the witness has no score" in said
    assert "40 of 100 pairs have fewer than 2 witnesses, which a flag takes." in said
    assert "silent: pairs" not in told(heads)


def test_the_entries_of_all_pairs_compute_nothing_of_all_pairs_for_each(monkeypatch):
    pairs, heads, _ = simulated(200)
    ranking = rank(heads, pairs, RULE)
    computed, sign_N = [], pairs.sign_N
    monkeypatch.setattr(Pairs, "sign_N", property(lambda own: computed.append(1) or sign_N))
    entries = entries_of(pairs, ranking, [()] * len(pairs))
    assert len(computed) <= 10
    place, number = 7, int(ranking.order_N[7])
    for one in ranking.testimonies:
        said = entries[place]["witnesses"][one.name]["margin"]
        assert said == round(float(one.margin_N[number]) * float(sign_N[number]), 6)


def test_a_search_that_flags_nothing_does_not_say_that_nothing_is_wrong():
    pairs, heads, _ = simulated(100, wrong=0.1)

    def told(below: float) -> str:
        rule = replace(RULE, below=below)
        ranking = rank(heads, pairs, rule)
        noise = estimate_noise(ranking.together, pairs)
        made = {"lengths": None, "noise": noise, "planted": None, "worth": None}
        return " ".join(report(pairs=pairs, ranking=ranking, rule=rule, held="by prompts", **made).split())

    none, some = told(1e-9), told(0.5)
    assert "0 are flagged" in none
    assert "That says nothing of how many labels are wrong: where a third is," in none
    assert "Read the ranking, or raise --below." in none
    assert "A flag is a reason to look, and no proof" not in none
    assert "A flag is a reason to look, and no proof" in some
    assert "raise --below" not in some
