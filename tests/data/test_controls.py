"""Data changed on purpose: what a control changes, and all that it leaves as it was, against plain oracles."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from common import make_groups, make_tokenizer, pair
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.data.config import Control, DataConfig, DiagnosticConfig, Mode, RenderingConfig, TrainingDataConfig
from rewardlab.data.controls import (
    EMPTY,
    changed_by,
    gather,
    length_matched,
    open_pool,
    permuted,
    pool_of,
    shuffled,
    turned_around,
)
from rewardlab.data.prepare import Prepared, load_data
from rewardlab.data.splits import Texts, find_roots
from rewardlab.data.templates import build_renderer

SHUFFLE = Control(mode="label_shuffle", shuffle_rate=0.5, seed=0)
NEGATIVES = Control(mode="random_negatives", seed=0)


def said(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


def of_many(count: int, *, id: str = "row", label: float = 1.0) -> Preference:
    """A preference of so many replies, all compared, the first the best."""
    return Preference(
        id=id,
        source="test",
        prompt=(Message("user", f"Question of {id}?"),),
        replies=tuple(said(f"Reply {n} of {id}.") for n in range(count)),
        comparisons=tuple(
            Comparison(first=i, second=j, label=label, margin=0.3 * (label != 0.5))
            for i, j in itertools.combinations(range(count), 2)
        ),
        ranking=tuple(range(count)),
    )


def win_of(preference: Preference, reply: int, other: int) -> float | None:
    """The label of a reply against another, however the comparison is written; None if they are not compared."""
    for one in preference.comparisons:
        if (one.first, one.second) == (reply, other):
            return one.label
        if (one.first, one.second) == (other, reply):
            return 1 - one.label
    return None


# --- label_shuffle -------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_two_replies_are_swapped_as_often_as_is_said(rate):
    control = replace(SHUFFLE, shuffle_rate=rate)
    rows = [of_many(2, id=f"f:{n}") for n in range(2000)]
    swapped = [win_of(changed_by(control, row)[0], 0, 1) == 0.0 for row in rows]
    assert swapped == [changed_by(control, row)[1] for row in rows]
    assert binomtest(sum(swapped), len(rows), rate).pvalue > 1e-3 if 0 < rate < 1 else sum(swapped) == rate * len(rows)


@pytest.mark.parametrize("replies", [2, 3, 4])
def test_at_one_half_every_order_is_equally_likely_whatever_the_number_of_replies(replies):
    generator = np.random.default_rng(0)
    row = of_many(replies)
    orders = list(itertools.permutations(range(replies)))
    seen = Counter(shuffled(row, rate=0.5, generator=generator).ranking for _ in range(100 * len(orders)))
    assert set(seen) == set(orders)
    assert chisquare(list(seen.values())).pvalue > 1e-3


@given(st.permutations(range(5)), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
def test_a_permutation_moves_labels_margins_and_the_ranking_together(order, label):
    row = of_many(5, label=label)
    moved = permuted(row, order)
    for one in row.comparisons:
        assert win_of(moved, order[one.first], order[one.second]) == one.label
    assert moved.ranking == tuple(order[k] for k in row.ranking)
    assert sorted(one.margin for one in moved.comparisons) == sorted(one.margin for one in row.comparisons)
    assert (moved.prompt, moved.replies) == (row.prompt, row.replies)
    back = permuted(moved, [order.index(k) for k in range(5)])
    assert back == row


@given(st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=3, max_size=3), st.floats(0, 1), st.integers(0, 99))
def test_shuffling_keeps_as_many_ties_and_as_much_certainty(labels, rate, seed):
    row = of_many(3)
    row = replace(row, comparisons=tuple(replace(c, label=y) for c, y in zip(row.comparisons, labels, strict=True)))
    made = shuffled(row, rate=rate, generator=np.random.default_rng(seed))
    certainty = [sorted(abs(one.label - 0.5) for one in of.comparisons) for of in (row, made)]
    assert certainty[0] == certainty[1]


def test_turning_around_twice_is_nothing():
    row = of_many(4)
    assert turned_around(turned_around(row)) == row
    assert all(win_of(turned_around(row), c.first, c.second) == 0.0 for c in row.comparisons)


def test_a_tie_of_two_replies_cannot_be_swapped():
    control = replace(SHUFFLE, shuffle_rate=1.0)
    tie = replace(of_many(2, label=0.5), ranking=None)
    made, changed = changed_by(control, tie)
    assert not changed
    assert win_of(made, 0, 1) == 0.5


def test_what_is_drawn_for_a_row_depends_on_seed_source_and_id_alone():
    rows = [of_many(2, id=f"f:{n}") for n in range(50)]
    changed = [changed_by(SHUFFLE, row)[1] for row in rows]
    assert [changed_by(SHUFFLE, row)[1] for row in reversed(rows)] == changed[::-1]
    assert [changed_by(replace(SHUFFLE, seed=1), row)[1] for row in rows] != changed
    assert [changed_by(SHUFFLE, replace(row, source="other"))[1] for row in rows] != changed


# --- prompt_only, response_only ------------------------------------------------------------------------------


def test_without_replies_all_are_the_same_text_and_the_prompt_is_not_touched():
    row = of_many(3)
    made, changed = changed_by(Control(mode="prompt_only"), row)
    assert changed
    assert made.replies == (said(EMPTY),) * 3
    assert (made.prompt, made.comparisons, made.ranking) == (row.prompt, row.comparisons, row.ranking)


def test_without_a_prompt_system_and_earlier_turns_go_too():
    row = replace(pair("Hello", "a", "b", system="Be rude."), id="f:1")
    row = replace(row, prompt=(*row.prompt, Message("assistant", "Yes?"), Message("user", "Go on.")))
    made, changed = changed_by(Control(mode="response_only"), row)
    assert changed
    assert made.prompt == (Message("user", EMPTY),)
    assert made.replies == row.replies


# --- random_negatives ----------------------------------------------------------------------------------------


def conversations(count: int) -> list[Preference]:
    """Rows of which three in a row belong to one conversation: one first turn, prompts that go on from it."""
    rows = []
    for n in range(count):
        row = of_many(2 + n % 2, id=f"f:{n}")
        turns = (Message("user", f"Topic {n // 3}"), Message("assistant", "Go on."), Message("user", f"And {n}?"))
        rows.append(replace(row, prompt=turns))
    return rows


def test_rejected_replies_come_from_other_conversations_and_are_other_texts():
    rows = conversations(60)
    owner = {reply: number for number, row in enumerate(rows) for reply in row.replies}
    roots = find_roots(Texts.of(rows))[0]
    donors: Counter[int] = Counter()
    with pool_of([gather(rows[:20]), gather(rows[20:])]) as folder:
        pool = open_pool(folder)
        for number, row in enumerate(rows):
            made, changed = changed_by(NEGATIVES, row, pool)
            assert changed
            assert made.replies[0] == row.replies[0]
            assert len(set(made.replies)) == len(row.replies)
            for reply in made.replies[1:]:
                assert roots[owner[reply]] != roots[number]
                donors[owner[reply]] += 1
            assert {(c.first, c.second, c.label) for c in made.comparisons} == {
                (0, k, 1.0) for k in range(1, len(row.replies))
            }
            assert changed_by(NEGATIVES, row, pool)[0] == made
    assert len(donors) > 30


@pytest.mark.parametrize("goes_on", [False, True])
def test_where_hardly_any_donor_may_be_used_each_is_drawn_from_those_that_may(goes_on):
    rows = [of_many(2, id=f"f:{n}") for n in range(3)]
    same = tuple(replace(row, prompt=rows[0].prompt) for row in rows[:2])
    own = replace(rows[2], replies=(rows[0].replies[0], said("the only text that is new"), said("and another")))
    crowd = [replace(of_many(2, id=f"f:{n}"), prompt=rows[0].prompt) for n in range(3, 300)]
    if goes_on:
        # Prompts that go on from the first turn of the row belong to its conversation too; as many others have its own
        # texts alone.
        more = [(Message("assistant", "Go on."), Message("user", f"And {n}?")) for n in range(297)]
        crowd = [replace(row, prompt=(*row.prompt, *turns)) for row, turns in zip(crowd, more, strict=True)]
        crowd += [replace(same[0], id=f"g:{n}", prompt=(Message("user", f"Another {n}?"),)) for n in range(400)]
    with pool_of([gather([*same, own, *crowd])]) as folder:
        pool = open_pool(folder)
        drawn = [pool.draw(same[0], 1, np.random.default_rng(seed)) for seed in range(60)]
    found = {donors[0][0].content if donors else None for donors in drawn}
    assert found == {"the only text that is new", "and another"}


def test_a_row_without_a_donor_or_without_a_rejected_reply_stays_as_it_is():
    one = of_many(2)
    other = of_many(2, id="f:2", label=0.5)
    with pool_of([gather([one])]) as folder:
        assert changed_by(NEGATIVES, one, open_pool(folder)) == (one, False)
    open_pool.cache_clear()
    with pool_of([gather([one, other])]) as folder:
        assert changed_by(NEGATIVES, other, open_pool(folder)) == (other, False)
        assert changed_by(NEGATIVES, one, open_pool(folder))[1]


@pytest.mark.parametrize("label", [0.0, 0.2, 0.7])
def test_the_reply_that_is_more_likely_preferred_is_kept_and_then_certain(label):
    rows = [of_many(2, id=f"f:{n}", label=label) for n in range(5)]
    with pool_of([gather(rows)]) as folder:
        made, _ = changed_by(NEGATIVES, rows[0], open_pool(folder))
    best = int(label < 0.5)
    assert made.replies[best] == rows[0].replies[best]
    assert win_of(made, best, 1 - best) == 1.0


# --- length_matched ------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_comparisons_are_kept_by_the_tokens_of_their_replies(threshold, seed):
    (group,) = make_groups(1, seed=seed, replies=4)
    lengths = [len(group.conversation(k)) - group.prompt_tokens[k] for k in range(group.num_replies)]
    wanted = [c for c in group.comparisons if abs(lengths[c.first] - lengths[c.second]) < threshold]
    found = length_matched(group, threshold=threshold)
    assert list(found.comparisons if found is not None else ()) == wanted
    whole = length_matched(group, threshold=threshold, whole=True)
    assert (whole is group) == (len(wanted) == len(group.comparisons))


# --- from rows to groups -------------------------------------------------------------------------------------


def write(path: Path, count: int = 40) -> Path:
    rows = [
        {
            "prompt": f"Question number {n}, please?",
            "chosen": f"Certainly {n}, " + "here is more " * (n % 5),
            "rejected": f"no {n}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path, *, seed: int = 0, **changes) -> Prepared:
    names = {"dataset": (str(path),), "eval_fraction": 0.25, "cache_dir": "none", **changes}
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    return load_data(data_config(**names), renderer, seed=seed)


def data_config(**names) -> TrainingDataConfig:
    from rewardlab.core.config import from_mapping

    return from_mapping(TrainingDataConfig, names, where="test")


def rows_of(part) -> dict[str, tuple[float | None, ...]]:
    """Row -> its judgements, each as the label of the first reply."""
    return {
        group.preference_id: tuple(c.label if c.first < c.second else 1 - c.label for c in group.comparisons)
        for group in part.groups()
    }


def test_training_labels_are_shuffled_and_those_that_are_held_out_are_not(tmp_path):
    path = write(tmp_path / "pairs.jsonl")
    plain = load(path)
    made = load(path, diagnostic_mode="label_shuffle", diagnostic_seed=3)
    assert list(rows_of(made.train)) == list(rows_of(plain.train))
    assert rows_of(made.eval) == rows_of(plain.eval)
    (count,) = made.reports["control"]["counts"]["train"]
    swapped = sum(labels == (0.0,) for labels in rows_of(made.train).values())
    assert 0 < swapped == count["changed"] < count["rows"] == len(plain.train)
    assert count["left"] + count["changed"] == count["rows"] == count["kept"]
    assert made.reports["held_out"] == plain.reports["held_out"]
    both = load(path, diagnostic_mode="label_shuffle", diagnostic_splits=("train", "eval"), diagnostic_seed=3)
    assert rows_of(both.train) == rows_of(made.train)
    assert rows_of(both.eval) != rows_of(plain.eval)
    assert "control" not in plain.reports


@pytest.mark.slow
def test_the_cache_and_a_limit_give_the_same_rows(tmp_path):
    path = write(tmp_path / "pairs.jsonl")
    names = {"diagnostic_mode": "label_shuffle", "cache_dir": str(tmp_path / "cache"), "limit": 20}
    alone = load(path, **{**names, "cache_dir": "none"})
    first, again = load(path, **names), load(path, **names)
    load(path, **{**names, "limit": None})
    of_whole = load(path, **names, eval_fraction=0.25)
    assert rows_of(alone.train) == rows_of(first.train) == rows_of(again.train) == rows_of(of_whole.train)
    other = load(path, **names, diagnostic_shuffle_rate=0.1)
    assert rows_of(other.train) != rows_of(first.train)


@pytest.mark.parametrize("mode", ["prompt_only", "response_only", "random_negatives"])
def test_a_changed_row_keeps_its_prompt_and_what_is_held_out(tmp_path, mode):
    path = write(tmp_path / "pairs.jsonl")
    plain = load(path)
    made = load(path, diagnostic_mode=mode, diagnostic_splits=("train", "eval", "test"))
    for mine, own in ((made.train, plain.train), (made.eval, plain.eval)):
        assert [group.preference_id for group in mine.groups()] == [group.preference_id for group in own.groups()]
        assert [group.prompt_key for group in mine.groups()] == [group.prompt_key for group in own.groups()]
        np.testing.assert_array_equal(mine.texts().replies_R, own.texts().replies_R)
    assert made.reports["control"]["counts"]["train"][0]["changed"] == len(plain.train)


def test_without_replies_no_row_is_dropped_though_all_tokens_are_equal(tmp_path):
    made = load(write(tmp_path / "pairs.jsonl"), diagnostic_mode="prompt_only")
    groups = made.train.groups()
    assert len(groups) == len(made.train) == 30
    for group in groups:
        np.testing.assert_array_equal(group.conversation(0), group.conversation(1))


def test_length_matched_selects_rows_and_drops_none(tmp_path, log):
    path = write(tmp_path / "pairs.jsonl")
    plain, made = load(path), load(path, diagnostic_mode="length_matched", diagnostic_length_threshold=25)
    wanted = [
        group.preference_id
        for group in plain.train.groups()
        if abs(len(group.suffixes[0]) - len(group.suffixes[1])) < 25
    ]
    assert 0 < len(wanted) < len(plain.train)
    assert list(rows_of(made.train)) == wanted
    assert len(made.train) == len(wanted)
    (count,) = made.reports["control"]["counts"]["train"]
    assert (count["rows"], count["kept"]) == (len(plain.train), len(wanted))
    assert "THIS IS A CONTROL, NOT A MODEL TO USE" in log.text
    assert "took nothing out" not in log.text
    load(path, diagnostic_mode="length_matched", diagnostic_length_threshold=10_000)
    assert "took nothing out, since all replies differ by fewer than 10000 tokens" in log.text
    with pytest.raises(DataError, match="Raise --diagnostic-length-threshold"):
        load(path, diagnostic_mode="length_matched", diagnostic_length_threshold=1)


@pytest.mark.slow
def test_workers_change_rows_as_this_process_does(tmp_path, monkeypatch):
    monkeypatch.setattr("rewardlab.data.pipeline.ALONE", 0)
    monkeypatch.setattr("rewardlab.data.pipeline.CHUNK", 7)
    path = write(tmp_path / "pairs.jsonl")
    for mode in ("label_shuffle", "random_negatives"):
        one, two = (load(path, diagnostic_mode=mode, num_workers=number) for number in (1, 2))
        for mine, other in zip(one.train.groups(), two.train.groups(), strict=True):
            assert mine.comparisons == other.comparisons
            np.testing.assert_array_equal(mine.conversation(1), other.conversation(1))


def test_data_of_a_single_conversation_have_no_random_negatives(tmp_path):
    path = tmp_path / "one.jsonl"
    rows = [{"prompt": "The same?", "chosen": f"Yes {n}", "rejected": f"no {n}"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="It needs two conversations or more"):
        load(path, diagnostic_mode="random_negatives", eval_fraction=0)


# --- settings ------------------------------------------------------------------------------------------------


def test_each_mode_changes_the_data_that_it_needs():
    by_mode = {mode: DiagnosticConfig(diagnostic_mode=mode).splits for mode in get_args(Mode)}
    everything = ("train", "eval", "test")
    assert by_mode == {
        "none": (),
        "label_shuffle": ("train",),
        "random_negatives": ("train",),
        "prompt_only": everything,
        "response_only": everything,
        "length_matched": everything,
    }


def test_the_seed_of_the_run_is_that_of_the_control_unless_it_has_its_own():
    of_run = DiagnosticConfig(diagnostic_mode="label_shuffle").control("train", seed=7)
    own = DiagnosticConfig(diagnostic_mode="label_shuffle", diagnostic_seed=3).control("train", seed=7)
    assert (of_run.seed, own.seed) == (7, 3)
    assert DiagnosticConfig(diagnostic_mode="prompt_only").control("test", seed=7).seed is None
    assert DataConfig().diagnostic.control("train", seed=0) is None


@pytest.mark.parametrize(
    "names",
    [
        {"diagnostic_shuffle_rate": 1.5},
        {"diagnostic_length_threshold": 0},
        {"diagnostic_seed": -1},
        {"diagnostic_splits": ("train",)},
    ],
)
def test_settings_that_mean_nothing_are_refused(names):
    with pytest.raises(ConfigError, match="--diagnostic-"):
        DiagnosticConfig(**names)
