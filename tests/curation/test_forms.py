"""Laws of written rows: the project's own form reads back to the same preference, TRL's pairs are counted exactly."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.files import to_json
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.curation.files.forms import PairCounts, Pairs, as_own_row, as_pairs
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats import read_rows, recognise
from rewardlab.data.judgements import Rules

TEXT = (
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
        | st.sampled_from(["\n\nHuman: ", "\n\nAssistant:", "\x00", "[1]"]),
        min_size=1,
        max_size=4,
    )
    .map("".join)
    .filter(str.strip)
)
ROLE = st.sampled_from(["system", "user", "assistant", "tool"])
FAR = st.floats(0.01, 100, allow_nan=False)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """The parts of any preference that a reader makes. It is built later: its types are checked at random places."""
    prompt = [*draw(st.lists(st.builds(Message, ROLE, TEXT), max_size=3)), Message("user", draw(TEXT))]
    texts = draw(st.lists(TEXT, min_size=2, max_size=5, unique_by=str.strip))
    replies = [(Message("assistant", text),) for text in texts]
    if draw(st.booleans()):
        # A reply of several turns, which may begin like the prompt.
        between = draw(st.sampled_from([(Message("user", "And?"),), tuple(prompt[1:])]))
        start = prompt[:1] if prompt[0].role == "assistant" else [Message("assistant", "Well.")]
        replies[0] = (*start, *between, *replies[0])
    order = draw(st.permutations(range(len(replies))))
    certain = draw(st.booleans())
    comparisons = []
    for _ in range(draw(st.integers(1, 4))):
        first, second = draw(st.permutations(range(len(replies))))[:2]
        label = float(order.index(first) < order.index(second)) if certain else draw(st.floats(0, 1))
        comparisons.append(
            Comparison(
                first=first,
                second=second,
                label=label,
                weight=draw(st.just(1.0) | FAR),
                margin=0.0 if label == 0.5 else draw(st.just(0.0) | FAR),
                strength=draw(st.none() | FAR),
                annotator=draw(st.none() | st.just("ann")),
            )
        )
    return {
        "prompt": tuple(prompt),
        "replies": tuple(replies),
        "comparisons": tuple(comparisons),
        "ranking": tuple(order) if certain and draw(st.booleans()) else None,
    }


def read_back(row: dict[str, Any]) -> Preference:
    """A row as a file of it is read."""
    row = json.loads(to_json(row, indent=None))
    rules = Rules(source="rows", reading=ReadingConfig(), seed=0)
    return read_rows([row], schema=recognise(row, "f:1"), place="f:1", rules=rules).preference


@pytest.mark.slow
@given(parts=parts())
@settings(max_examples=200, deadline=None)
def test_any_preference_reads_back_from_its_row(parts: dict[str, Any]) -> None:
    preference = Preference(id="f:1", source="rows", **parts)
    back = read_back(as_own_row(preference, "f:1", "rows"))
    if preference.ranking is None and back.ranking is not None:
        # One certain comparison of two replies ranks them, said or not.
        assert len(preference.replies) == 2
        back = replace(back, ranking=None)
    assert back == preference


def test_what_a_row_brings_stands_in_it() -> None:
    comparison = Comparison(first=1, second=0, label=0.25, weight=2.0, strength=3.0, annotator="ann")
    row = as_own_row(two(comparison), "a:7", "a")
    assert (row["id"], row["source"]) == ("a:7", "a")
    assert row["comparisons"] == [
        {"first": 1, "second": 0, "label": 0.25, "weight": 2.0, "strength": 3.0, "annotator": "ann"}
    ]


def two(*comparisons: Comparison) -> Preference:
    """A preference of two replies."""
    replies = tuple((Message("assistant", text),) for text in ("good", "bad"))
    return Preference(id="f:1", source="f", prompt=(Message("user", "Why?"),), replies=replies, comparisons=comparisons)


SURE = Comparison(first=0, second=1)
HOW = Pairs(implicit=False, with_margin=False, inexpressible="error")


class TestPairs:
    def test_a_pair_is_messages_with_the_prompt_beside_or_before_them(self) -> None:
        user = {"role": "user", "content": "Why?"}
        good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
        assert as_pairs(two(SURE), "f:1", "f", HOW, PairCounts()) == [
            {"id": "f:1", "source": "f", "prompt": [user], "chosen": [good], "rejected": [bad]}
        ]
        assert as_pairs(two(SURE), "f:1", "f", replace(HOW, implicit=True), PairCounts()) == [
            {"id": "f:1", "source": "f", "chosen": [user, good], "rejected": [user, bad]}
        ]

    def test_a_label_of_0_swaps_the_sides_and_is_counted(self) -> None:
        counts = PairCounts()
        (row,) = as_pairs(two(replace(SURE, label=0.0)), "f:1", "f", HOW, counts)
        assert row["chosen"][0]["content"] == "bad"
        assert (counts.judgements, counts.pairs, counts.swapped) == (1, 1, 1)

    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            ({"label": 0.5}, "tie"),
            ({"label": 0.7}, "soft_label"),
            ({"weight": 2.0}, "weight"),
            ({"margin": 1.0}, "margin"),
        ],
    )
    def test_what_a_pair_cannot_hold_is_left_out_or_hardened_and_counted(
        self, change: dict[str, float], cause: str
    ) -> None:
        preference = two(SURE, replace(SURE, **change))
        for how in ("error", "drop"):
            counts = PairCounts()
            rows = as_pairs(preference, "f:1", "f", replace(HOW, inexpressible=how), counts)
            assert [row["id"] for row in rows] == ["f:1#0"]
            assert counts.left_out == Counter({cause: 1})
            assert counts.examples == {cause: "f:1"}
        counts = PairCounts()
        rows = as_pairs(preference, "f:1", "f", replace(HOW, inexpressible="harden"), counts)
        assert len(rows) == counts.pairs == (1 if cause == "tie" else 2)
        assert counts.judgements == counts.pairs + counts.left_out.total() == 2
        assert counts.hardened == ({} if cause == "tie" else {cause: 1})

    def test_margins_have_a_column_if_one_is_asked_for(self) -> None:
        how = replace(HOW, with_margin=True)
        rows = as_pairs(two(SURE, replace(SURE, margin=1.5)), "f:1", "f", how, PairCounts())
        assert [row["margin"] for row in rows] == [0.0, 1.5]

    def test_what_no_loss_of_trl_uses_is_counted(self) -> None:
        counts = PairCounts()
        as_pairs(two(replace(SURE, strength=3.0, annotator="ann"), SURE), "f:1", "f", HOW, counts)
        assert counts.not_kept == {"strengths": 1, "annotators": 1}
