"""The report of a search names its clusters conversations, which they are, and the intervals of all its columns."""

from __future__ import annotations

from dataclasses import replace

from harness.wrongly_labelled import RULE, simulated
from rewardlab.curation.mislabels.lengths import lengths_of
from rewardlab.curation.mislabels.noise import estimate_noise
from rewardlab.curation.mislabels.planting import plant
from rewardlab.curation.mislabels.ranking import rank
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
