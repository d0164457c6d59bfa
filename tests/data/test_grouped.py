"""Laws of formats in which several rows make one preference: every judgement is kept or counted, wherever it stands."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import make_tokenizer
from loading import ALLOW_DROPS, load, write
from parsing import cause, preference, read, replies
from rewardlab.core.types import Preference
from rewardlab.data.bulk import render_all
from rewardlab.data.config import RenderingConfig
from rewardlab.data.groups import weigh
from rewardlab.data.templates import build_renderer


def judgement(post: int, a: str, b: str, *, labels: int = 1, ratio: float = 2.0) -> dict[str, object]:
    return {
        "post_id": f"p{post}",
        "history": f"question {post}",
        "human_ref_A": a,
        "human_ref_B": b,
        "labels": labels,
        "score_ratio": ratio,
    }


def edges(found: Preference) -> Counter[tuple[str, str]]:
    """(preferred, other) of each judgement."""
    texts = replies(found)
    return Counter((texts[one.first], texts[one.second]) for one in found.comparisons)


posts = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from("abcde"),
        st.sampled_from("vwxyz"),
        st.integers(0, 1),
        st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    ),
    min_size=1,
    max_size=25,
)


class TestPosts:
    @pytest.mark.slow
    @given(judged=posts, least=st.sampled_from([None, 2.0]), most=st.sampled_from([None, 1, 3]))
    @settings(max_examples=40, deadline=None)
    def test_every_judgement_is_kept_or_counted(
        self, tmp_path_factory: pytest.TempPathFactory, judged: list[Any], least: float | None, most: int | None
    ) -> None:
        rows = [judgement(post, a, b, labels=labels, ratio=ratio) for post, a, b, labels, ratio in judged]
        path = write(tmp_path_factory.mktemp("posts") / "shp.jsonl", rows)
        flags: dict[str, Any] = {"min_score_ratio": least, "max_per_post": most}
        together = load(path, shp="kwise", **flags, **ALLOW_DROPS) if least is None else None
        wanted = Counter[str]()
        kept = [row for row in rows if least is None or row["score_ratio"] >= least]
        by_post = Counter(row["post_id"] for row in kept)
        wanted["low_score_ratio"] = len(rows) - len(kept)
        wanted["over_post_cap"] = sum(
            count - (count if most is None else min(count, most)) for count in by_post.values()
        )
        if len(kept) == 0:
            return
        pairs = load(path, **flags, **ALLOW_DROPS)
        (report,) = pairs.reports
        assert dict(report.dropped) == {cause: count for cause, count in wanted.items() if count}
        if together is not None:
            assert len(together.preferences) == len(by_post)
            assert sum(together.reports[0].skipped.values()) == wanted["over_post_cap"]
            # Both ways keep the same judgements.
            edges_together = sum((edges(one) for one in together.preferences), Counter[tuple[str, str]]())
            assert edges_together == sum((edges(one) for one in pairs.preferences), Counter[tuple[str, str]]())

    def test_only_what_people_compared_is_compared(self) -> None:
        rows = [judgement(1, "a", "b"), judgement(1, "c", "b"), judgement(1, "d", "c", labels=0, ratio=3.0)]
        found = preference(*rows, shp="kwise")
        assert replies(found) == ["a", "b", "c", "d"]
        assert [(one.first, one.second, one.strength) for one in found.comparisons] == [
            (0, 1, 2 / 3),
            (2, 1, 2 / 3),
            (2, 3, 0.75),
        ]
        assert found.ranking is None

    def test_strengths_are_used_as_for_pairs(self) -> None:
        rows = [judgement(1, "a", "b"), judgement(1, "c", "b", ratio=4.0)]
        assert [one.weight for one in preference(*rows, shp="kwise", strength_as="weight").comparisons] == [2 / 3, 0.8]
        assert [one.label for one in preference(*rows, shp="kwise", strength_as="soft").comparisons] == [2 / 3, 0.8]

    def test_without_a_ratio_the_votes_give_it(self) -> None:
        row = {**judgement(1, "a", "b"), "score_ratio": None, "score_A": 12, "score_B": 4}
        assert preference(row).comparisons[0].strength == 0.75
        assert preference({**row, "score_B": -3}).comparisons[0].strength is None
        assert preference({**row, "labels": 0}).comparisons[0].strength is None
        assert cause({**row, "score_B": -3}, min_score_ratio=2) == "missing_field"

    def test_the_filter_and_the_cap_do_not_count_as_faults(self, tmp_path: Path) -> None:
        rows = [judgement(1, "a", f"b{k}", ratio=1.0 + k) for k in range(10)]
        path = write(tmp_path / "shp.jsonl", rows)
        (report,) = load(path, min_score_ratio=3, max_per_post=2, max_drop_fraction=0.0).reports
        assert dict(report.dropped) == {"over_post_cap": 6, "low_score_ratio": 2}
        (report,) = load(path, min_score_ratio=3, max_per_post=2, max_drop_fraction=0.0, shp="kwise").reports
        assert (report.rows_read, report.kept) == (1, 1)
        assert dict(report.skipped) == {"over_post_cap": 6, "low_score_ratio": 2}

    def test_which_judgements_are_kept_depends_on_the_seed_alone(self, tmp_path: Path) -> None:
        path = write(tmp_path / "shp.jsonl", [judgement(k % 2, "a", f"b{k}") for k in range(30)])
        chosen = [[one.id for one in load(path, max_per_post=4, seed=seed).preferences] for seed in (0, 0, 1)]
        assert chosen[0] == chosen[1] != chosen[2]
        assert [len(ids) for ids in chosen] == [8, 8, 8]
        numbers = [int(name.rpartition(":")[2]) for name in chosen[0]]
        assert numbers == sorted(numbers)

    def test_a_post_with_two_texts_or_a_broken_row_is_dropped_whole(self) -> None:
        good = judgement(1, "a", "b")
        assert cause(good, {**good, "history": "other"}, shp="kwise") == "prompt_differs"
        assert cause(good, {**good, "labels": 3}, shp="kwise") == "bad_label"

    @pytest.mark.parametrize("text", ["a", " a"])
    def test_a_comment_compared_with_itself_is_counted(self, text: str) -> None:
        good = judgement(1, "a", "b")
        found = read(good, {**good, "human_ref_B": text}, shp="kwise")
        assert (edges(found.preference), found.skipped_identical) == ({("a", "b"): 1}, 1)
        assert cause({**good, "human_ref_B": text}, shp="kwise") == "identical_replies"


class TestRatedReplies:
    def test_rows_of_one_prompt_are_one_preference_wherever_they_stand(self, tmp_path: Path) -> None:
        rows = [
            {"prompt": f"question {prompt}", "response": f"answer {reply}", "helpfulness": reply}
            for prompt in range(20)
            for reply in range(4)
        ]
        together = load(write(tmp_path / "a.jsonl", rows)).preferences
        random.Random(0).shuffle(rows)
        shuffled = load(write(tmp_path / "b.jsonl", rows)).preferences
        assert {one.key: edges(one) for one in together} == {one.key: edges(one) for one in shuffled}
        assert all(len(one.comparisons) == 6 for one in together)

    def test_attributes_weigh_the_ratings(self) -> None:
        rows = [
            {"prompt": "q", "response": "a", "helpfulness": 3, "verbosity": 4},
            {"prompt": "q", "response": "b", "helpfulness": 2, "verbosity": 0},
        ]
        assert edges(preference(*rows)) == {("a", "b"): 1}
        assert edges(preference(*rows, attributes=("helpfulness=1", "verbosity=-0.5"))) == {("b", "a"): 1}
        assert preference(*rows, attributes=("verbosity=0.5",)).comparisons[0].strength == 2.0
        assert cause(*rows, {**rows[0], "verbosity": "N/A"}, attributes=("verbosity=1",)) == "bad_scores"

    def test_columns_that_the_flag_names_make_a_rated_reply(self) -> None:
        rows = [{"prompt": "q", "response": text, "quality": number} for text, number in (("a", 1), ("b", 2))]
        assert edges(preference(*rows, attributes=("quality=1",))) == {("b", "a"): 1}

    def test_equal_ratings_are_ties(self) -> None:
        rows = [{"prompt": "q", "response": text, "helpfulness": 1} for text in "ab"]
        assert cause(*rows) == "no_comparison"
        assert preference(*rows, ties="half").comparisons[0].label == 0.5
        found = read(*rows, {**rows[0], "response": "c", "helpfulness": 3}, ties="half", strength_as="weight")
        assert [one.weight for one in found.preference.comparisons] == [2.0, 2.0]
        assert found.skipped_ties == 1


@pytest.mark.parametrize("labels", [[1], [1, 0], [1, 1, 0, 0.5], [1] * 5])
@pytest.mark.parametrize(("strength", "row_weighs"), [("none", 1.0), ("weight", 3.0)])
def test_a_row_counts_once_however_many_votes_it_has_or_each_vote_does(labels, strength, row_weighs) -> None:
    row = {"prompt": "How?", "chosen": "So.", "rejected": "No.", "labels": labels, "strength": 3}
    found = preference(row, strength_as=strength)
    groups = render_all([found], build_renderer(make_tokenizer(), RenderingConfig()))
    for by, wanted in (("prompt", row_weighs), ("comparison", row_weighs * len(found.comparisons))):
        (group,) = weigh(groups, by=by)
        assert sum(one.weight for one in group.comparisons) == pytest.approx(wanted)


def test_labels_that_are_no_votes_leave_a_pair_a_pair() -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "labels": ["spam", "long"]}
    assert len(preference(row).comparisons) == 1
    assert preference({**row, "labels": 7}).comparisons[0].annotator is None
