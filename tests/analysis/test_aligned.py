"""Score sets are of the same comparisons, or are refused in words that say why not."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, ScoreRow
from scored import rows_of

SCORES = np.random.default_rng(0).normal(size=(30, 2))
ROWS = rows_of(SCORES)


def sets(*rows, **more) -> list[ScoreSet]:
    return [ScoreSet(name=f"m{number}", rows=own, **more) for number, own in enumerate(rows)]


def test_rows_in_any_order_are_joined_by_their_ids():
    shuffled = [ROWS[index] for index in np.random.default_rng(1).permutation(len(ROWS))]
    aligned = align(sets(ROWS, shuffled))
    assert (aligned.difference_MN[0] == aligned.difference_MN[1]).all()
    assert (aligned.difference_MN[0] == SCORES[:, 0] - SCORES[:, 1]).all()


def test_a_label_below_one_half_is_turned_around():
    turned = [
        replace(row, comparisons=(Comparison(first=1, second=0, label=0.0),) if row.reply == 1 else ()) for row in ROWS
    ]
    assert (align(sets(ROWS, turned)).difference_MN[1] == SCORES[:, 0] - SCORES[:, 1]).all()


def test_scores_alone_are_judged_as_another_file_says():
    bare = [replace(row, comparisons=()) for row in ROWS]
    assert (align(sets(bare, ROWS)).difference_MN[0] == SCORES[:, 0] - SCORES[:, 1]).all()
    with pytest.raises(DataError, match=r"no file says which reply is preferred.*--gold"):
        align(sets(bare, bare))


def test_a_set_without_sources_is_joined_by_id():
    assert len(align(sets(ROWS, [replace(row, source="") for row in ROWS])).pairs) == 30


def test_scores_that_are_not_finite_are_left_out_for_all_and_counted():
    broken = [replace(row, score=math.nan) if row.preference_id == "d.jsonl:3" else row for row in ROWS]
    infinite = [replace(row, score=math.inf) if row.preference_id == "d.jsonl:4" else row for row in ROWS]
    aligned = align(sets(ROWS, broken, infinite))
    assert len(aligned.pairs) == 28
    assert aligned.not_finite == {"m1": 1, "m2": 1}


def test_missing_rows_are_refused_or_counted():
    fewer = ROWS[:-6]
    with pytest.raises(DataError, match=r"m1 lacks 3 of 30 comparisons \(such as 'd\.jsonl:27'\).*the 27 .*--common"):
        align(sets(ROWS, fewer))
    aligned = align(sets(ROWS, fewer), common=True)
    assert len(aligned.pairs) == 27
    assert aligned.missing == {"m1": 3}
    # Whichever comes first.
    assert align(sets(fewer, ROWS), common=True).missing == {"m0": 3}


def k_wise(lost: int | None = None, *, others: bool = True) -> list[ScoreRow]:
    """Rows of three replies of which the first is preferred to both; in the first five one may have no score."""
    rows = []
    for number in range(30):
        gone = lost if number < 5 else None
        for row in rows_of(np.random.default_rng(number).normal(size=(1, 2))):
            row = replace(row, preference_id=f"d.jsonl:{number}", prompt_key=f"p{number}")
            if row.reply == 0:
                seconds = [second for second in ((1, 2) if others else (1,)) if second != gone]
                row = replace(row, comparisons=tuple(Comparison(first=0, second=s, label=1.0) for s in seconds))
            else:
                rows += [replace(row, reply=2)] if gone != 2 else []
            rows += [row] if row.reply != gone else []
    return rows


@pytest.mark.parametrize(("lost", "missing"), [(2, 5), (0, 10)])
def test_a_reply_that_one_set_lacks_is_missing_and_no_other_verdict(lost, missing):
    for models, name in ((sets(k_wise(), k_wise(lost)), "m1"), (sets(k_wise(lost), k_wise()), "m0")):
        with pytest.raises(DataError, match=rf"{name} lacks {missing} of 60 comparisons.*--common"):
            align(models)
        aligned = align(models, common=True)
        assert aligned.missing == {name: missing}
        assert len(aligned.pairs) == 60 - missing


@pytest.mark.parametrize("turn", [False, True])
def test_of_the_same_replies_all_must_judge_the_same(turn):
    given = sets(k_wise(), k_wise(others=False))
    with pytest.raises(DataError, match=r"differently \(30 comparisons differ in replies or label\)"):
        align(given[::-1] if turn else given, common=True)


REFUSED = {
    "another data set": (rows_of(SCORES, name="other.jsonl"), r"no comparison in common.*'d\.jsonl:0'.*other data"),
    "other labels": (
        rows_of(SCORES[:, ::-1], label=0.0),
        r"judge the replies to 'd\.jsonl:0' differently \(60 comparisons differ",
    ),
    "other prompts": (rows_of(SCORES, prompt="q"), r"other prompts under the id 'd\.jsonl:0'"),
    "a reply twice": ([*ROWS, ROWS[7]], r"m1: reply 1 of 'd\.jsonl:3' has two scores"),
    "all NaN": (rows_of(SCORES * math.nan), r"m1: no score is finite"),
    "nothing": ([], r"m1: no scores"),
    "too large a score": (rows_of(SCORES * 1e155), r"m1: a score has the size .*e\+155, but beyond 1e\+150"),
}


@pytest.mark.parametrize(("rows", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("common", [False, True])
def test_what_cannot_be_compared_is_refused(rows, message, common):
    with pytest.raises(DataError, match=message):
        align(sets(ROWS, rows), common=common)


def test_equal_ids_of_other_data_are_told_with_their_sources():
    others = [replace(row, source="there") for row in ROWS]
    with pytest.raises(DataError, match=r"'d\.jsonl:0' of '.*', others 'd\.jsonl:0' of '.*'\): they are of other"):
        align(sets(ROWS, others))


def test_fewer_than_ten_comparisons_are_refused():
    few = rows_of(SCORES[:9])
    with pytest.raises(DataError, match=r"9 comparisons: at least 10"):
        align(sets(few, few))


def test_one_class_of_labels_is_refused():
    ties = rows_of(SCORES, label=0.5)
    with pytest.raises(DataError, match=r"0 comparisons \(30 more are labelled as ties"):
        align(sets(ties, ties))


@given(st.permutations(range(60)))
def test_the_order_of_rows_changes_nothing(order):
    moved = [ROWS[index] for index in order]
    found, wanted = align(sets(moved, ROWS)), align(sets(ROWS, ROWS))
    assert dict(zip(found.pairs, found.difference_MN.T.tolist(), strict=True)) == dict(
        zip(wanted.pairs, wanted.difference_MN.T.tolist(), strict=True)
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_is_aligned_by_columns_is_what_a_search_for_each_comparison_finds(seed):
    """Rankings of up to four replies, ties, labels of both sides, scores that are missing or not finite."""
    rng = np.random.default_rng(seed)
    labels = {(row, first): rng.choice([0.0, 0.3, 0.5, 1.0], 4).tolist() for row in range(40) for first in range(4)}
    scored = []
    for _ in range(3):
        rows = [[reply for reply in range(2 + row % 3) if rng.random() < 0.97] for row in range(40)]
        scored.append(
            [
                replace(
                    ROWS[0],
                    preference_id=f"d.jsonl:{row}",
                    source=f"s{row % 3}",
                    prompt_key=f"{row // 2}",
                    reply=first,
                    score=math.nan if rng.random() < 0.03 else float(rng.normal()),
                    comparisons=tuple(
                        Comparison(first=first, second=second, label=labels[row, first][second])
                        for second in replies
                        if second > first
                    ),
                )
                for row, replies in enumerate(rows)
                for first in replies
            ]
        )
    found = align(sets(*scored), common=True)
    score = [{(row.source, row.preference_id, row.reply): row for row in own} for own in scored]
    wanted, missing, not_finite = {}, [0, 0, 0], [0, 0, 0]
    for row, first, second in [(place, *two) for place in range(40) for two in combinations(range(2 + place % 3), 2)]:
        label = labels[row, first][second]
        preferred, other = (first, second) if label >= 0.5 else (second, first)
        keys = [(f"s{row % 3}", f"d.jsonl:{row}", reply) for reply in (preferred, other)]
        held = [all(key in own for key in keys) for own in score]
        missing = [count + (any(held) and not here) for count, here in zip(missing, held, strict=True)]
        if not all(held):
            continue
        gaps = [own[keys[0]].score - own[keys[1]].score for own in score]
        finite = [math.isfinite(gap) for gap in gaps]
        not_finite = [count + (not known) for count, known in zip(not_finite, finite, strict=True)]
        if all(finite):
            wanted[(*keys[0][:2], preferred, other, max(label, 1 - label))] = gaps
    assert sum(missing) > 0 < sum(not_finite), "the rows hold what is to be left out"
    assert dict(zip(map(tuple, found.pairs), found.difference_MN.T.tolist(), strict=True)) == wanted
    assert [[own.get(name, 0) for name in found.names] for own in (found.missing, found.not_finite)] == [
        missing,
        not_finite,
    ]
    for pair, (preferred, other) in zip(found.pairs, found.rows, strict=True):
        assert preferred == score[0][pair.source, pair.preference_id, pair.preferred]
        assert other == score[0][pair.source, pair.preference_id, pair.other]
