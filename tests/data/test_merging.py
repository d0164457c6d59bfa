"""Groups with equal prompts become one: every conversation is there once, and none costs more than before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common import make_groups, stored
from rewardlab.core.types import Comparison, TokenGroup
from rewardlab.data.merging import Limits, MergedGroups, Merging, merged
from rewardlab.data.pack import plan_replies


def group(prompt: list[int], replies: list[list[int]], common: list[int] | None = None, **fields) -> TokenGroup:
    """A group whose replies begin with `common`, which lies in its shared part."""
    count = len(replies)
    whole = TokenGroup(
        preference_id="",
        source="",
        prompt_key=str(prompt),
        shared=np.array([*prompt, *(common or [])], np.int32),
        suffixes=tuple(np.array(reply, np.int32) for reply in replies),
        prompt_tokens=(len(prompt),) * count,
        truncated_tokens=(0,) * count,
        comparisons=tuple(Comparison(first=0, second=k, label=1.0, weight=1.0 + k) for k in range(1, count)),
    )
    return replace(whole, **fields)


def said(one: TokenGroup, reply: int) -> tuple[int, ...]:
    return tuple(one.conversation(reply).tolist())


texts = st.lists(st.integers(0, 3), min_size=1, max_size=6)
prompts = st.sampled_from([[], [0], [0, 1], [0, 1, 2]])
drawn_groups = st.lists(
    st.tuples(prompts, st.lists(texts, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3))
)


@given(drawn_groups, st.sampled_from([None, 6, 15]), st.sampled_from([1, 2, 8]), st.sampled_from([None, 2]))
@settings(max_examples=200, deadline=None)
def test_every_conversation_is_there_once_and_nothing_costs_more(drawn, most, spread, members_allowed):
    groups = [group(*parts) for parts in drawn]
    limits = Limits(tokens=most, spread=spread, groups=members_allowed)
    together, places = merged(groups, limits)
    members: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        members.setdefault(place.cluster, []).append(number)
        found = [said(together[place.cluster], reply) for reply in place.replies]
        assert found == [said(groups[number], reply) for reply in range(groups[number].num_replies)]
    assert sorted(members) == list(range(len(together)))
    for cluster, one in enumerate(together):
        own = [groups[number] for number in members[cluster]]
        assert sorted(said(one, reply) for reply in range(one.num_replies)) == sorted(
            {said(member, reply) for member in own for reply in range(member.num_replies)}
        )
        assert all(len(suffix) for suffix in one.suffixes)
        assert one.num_tokens <= sum(member.num_tokens for member in own)
        if len(own) > 1:
            assert most is None or max(one.num_tokens, one.num_unshared_tokens / spread) <= most
            assert members_allowed is None or len(own) <= members_allowed


@given(drawn_groups, st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_a_sequence_of_merged_groups_is_built_as_it_was_planned(drawn, most):
    groups = [group(*parts) for parts in drawn]
    together = MergedGroups(groups, Limits(tokens=most, spread=2))
    assert together.num_tokens().tolist() == [one.num_tokens for one in together]
    assert together.num_replies().tolist() == [one.num_replies for one in together]
    values = [np.array([hash(said(one, reply)) for reply in range(one.num_replies)]) for one in together]
    for one, own in zip(groups, together.apart(values), strict=True):
        assert own.tolist() == [hash(said(one, reply)) for reply in range(one.num_replies)]


def test_judgements_are_of_the_same_conversations_as_before():
    groups = [
        group([1, 2], [[5], [6, 7]]),
        group([1, 2], [[6, 7], [5], [8]]),
        group([9], [[5], [6, 7]]),
    ]
    together, _ = merged(groups)

    def judged(several: list[TokenGroup]) -> list[tuple]:
        return sorted(
            (said(one, c.first), said(one, c.second), c.label, c.weight) for one in several for c in one.comparisons
        )

    assert [one.num_replies for one in together] == [3, 2]
    assert judged(together) == judged(groups)


def test_a_group_whose_replies_begin_alike_is_left_apart_where_joining_would_cost_more():
    alike = group([1, 2], [[5], [6]], common=[3] * 8)
    together, places = merged([alike, group([1, 2], [[7]])])
    assert len(together) == 2
    assert together[0] is alike
    # With a longer prompt the copies of the beginning cost less than a second prompt.
    longer = [group([1] * 20, [[5], [6]], common=[3] * 8), group([1] * 20, [[7]])]
    together, places = merged(longer)
    assert [place.replies for place in places] == [(0, 1), (2,)]
    assert together[0].num_tokens == 20 + 9 + 9 + 1


def test_what_a_group_would_add_is_what_it_then_adds():
    merging = Merging()
    for one in [group([1, 2], [[5], [6]]), group([1, 2], [[5]]), group([1, 2], [[7, 7]]), group([3], [[5]])]:
        before, added = sum(cluster.num_tokens for cluster in merging.clusters), merging.cost_of(one)
        merging.add(one)
        assert sum(cluster.num_tokens for cluster in merging.clusters) - before == added


def test_equal_replies_of_one_row_in_memory_are_computed_once():
    rows = [group([1, 2], [[5], [6], [5], [5]]), group([3], [[5], [6], [7]])]
    together = MergedGroups(rows, Limits(tokens=100))
    assert [one.num_replies for one in together] == [2, 3]
    values = [np.arange(one.num_replies) for one in together]
    assert [own.tolist() for own in together.apart(values)] == [[0, 1, 0, 0], [0, 1, 2]]


def test_copies_of_a_long_prompt_count_as_a_burden():
    rows = [group([1] * 50, [[k], [k, 2]]) for k in range(20)]
    limits = Limits(tokens=200, spread=2)
    together = MergedGroups(rows, limits)
    assert all(one.num_unshared_tokens <= 400 for one in together)
    assert len(together) > 1
    assert together.burdens().tolist() == [limits.burden(one.num_tokens, one.num_unshared_tokens) for one in together]
    for row in plan_replies(together, 200, layout="shared"):
        assert sum(together[piece.group].num_unshared_tokens for piece in row) <= 400


def test_stored_groups_are_found_by_the_keys_of_their_prompts_and_told_apart_by_their_tokens(built):
    # Three rows a prompt, one of them with another beginning, as after a cut: the same key, other tokens.
    rows = [replace(one, prompt_key=f"{number // 3:x}") for number, one in enumerate(make_groups(9, replies=3))]
    for number in range(0, 9, 3):
        first, second = rows[number : number + 2]
        rows[number + 1] = replace(second, shared=first.shared, prompt_tokens=(len(first.shared),) * second.num_replies)
    kept = stored(rows)
    assert len(set(kept.prompt_keys().tolist())) == 3
    together = MergedGroups(kept, Limits(tokens=10_000, spread=8))
    assert len(together) == 6
    assert sum(together.num_replies().tolist()) == sum(one.num_replies for one in kept)
    values = [np.array([hash(said(one, reply)) for reply in range(one.num_replies)]) for one in together]
    for one, own in zip(kept, together.apart(values), strict=True):
        assert own.tolist() == [hash(said(one, reply)) for reply in range(one.num_replies)]
    # A plan needs their sizes alone, and groups whose prompt no other has are not even looked at.
    built.clear()
    assert sum(len(row) for row in plan_replies(together, 10_000, layout="shared")) == 6
    MergedGroups(kept.take(np.array([0, 3, 6])), Limits(tokens=10_000))
    assert not built


def test_many_rows_of_one_prompt_stay_within_the_tokens_that_are_computed_at_once():
    rows = [group([1, 2, 3], [[number // 90, number % 90, 4], [4]]) for number in range(500)]
    together = MergedGroups(rows, Limits(tokens=60, spread=4))
    assert max(one.num_tokens for one in together) <= 60
    assert sum(one.num_tokens for one in together) < 0.6 * sum(one.num_tokens for one in rows)
