"""Checks across rows against what a slow search over all pairs and paths finds."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.analysis.stats import proportion
from rewardlab.core.files import write_jsonl
from rewardlab.curation.auditing.across import FAMILIES, near_duplicates, numbers_of
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.facts import ARRAYS, OWNERS, TEXTS, Facts, joined
from rewardlab.curation.auditing.fixing import removals
from rewardlab.curation.auditing.measuring import Plan, measure
from rewardlab.curation.auditing.result import share_of
from rewardlab.curation.auditing.run import Audited, audit_rows
from rewardlab.curation.rows import walk
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import source_of_rows
from rewardlab.data.judgements import Rules

Judged = tuple[int, int, int, float]
JUDGED = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 4), st.sampled_from([0.0, 0.3, 0.5, 1.0])).filter(
        lambda one: one[1] != one[2]
    ),
    min_size=1,
    max_size=14,
)


def rows_of(judged: list[Judged]) -> list[dict[str, object]]:
    return [
        {"prompt": f"prompt {p}", "chosen": f"reply {a}", "rejected": f"reply {b}", "label": label}
        for p, a, b, label in judged
    ]


def facts_of(rows: list[dict[str, object]]) -> Facts:
    reading = ReadingConfig(num_workers=1)
    read = list(walk(source_of_rows(rows, "rows"), Rules(source="rows", reading=reading, seed=0)))
    return measure(Plan(source=0, part=0, limit=None, renderer=None, cutting=None, others=None), read)


def scores(check: str, facts: Facts) -> list[int]:
    return FAMILIES[check](facts, 0.8).scores[check].astype(int).tolist()


def preferred(one: Judged) -> tuple[int, int, int] | None:
    """Return (prompt, better, worse); None for a tie."""
    p, a, b, label = one
    return None if label == 0.5 else (p, a, b) if label > 0.5 else (p, b, a)


@pytest.mark.slow
@given(JUDGED)
@settings(max_examples=60, deadline=None)
def test_contradictions_are_the_pairs_that_some_row_judges_the_other_way(judged: list[Judged]) -> None:
    said = {preferred(one) for one in judged}
    expected = [int((own := preferred(one)) is not None and (own[0], own[2], own[1]) in said) for one in judged]
    assert scores("contradictions", facts_of(rows_of(judged))) == expected


@pytest.mark.slow
@given(JUDGED)
@settings(max_examples=60, deadline=None)
def test_a_row_is_in_a_cycle_exactly_if_a_path_leads_back_to_it(judged: list[Judged]) -> None:
    votes: Counter[tuple[int, int, int]] = Counter()
    for one in judged:
        if (own := preferred(one)) is not None:
            p, better, worse = own
            votes[p, min(better, worse), max(better, worse)] += 1 if better < worse else -1
    beats = defaultdict(set)
    for (p, low, high), lean in votes.items():
        if lean:
            beats[p, low if lean > 0 else high].add(high if lean > 0 else low)

    def reached(p: int, start: int) -> set[int]:
        seen: set[int] = set()
        waiting = [start]
        while waiting:
            for other in beats[p, waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    expected = []
    for one in judged:
        p, a, b, _ = one
        is_edge = preferred(one) is not None and votes[p, min(a, b), max(a, b)] != 0
        around = {k for k in range(5) if k in reached(p, a) and a in reached(p, k)}
        expected.append(len(around) if is_edge and b in around else 0)
    assert scores("cycles", facts_of(rows_of(judged))) == expected


@given(JUDGED)
@settings(max_examples=40, deadline=None)
def test_duplicates_are_rows_that_say_what_an_earlier_row_says(judged: list[Judged]) -> None:
    rows, pairs = [], []
    for p, a, b, label in judged:
        rows.append((p, a, b, label) if a < b else (p, b, a, 1 - label))
        pairs.append(preferred((p, a, b, label)) or (p, "tie", frozenset((a, b))))
    facts = facts_of(rows_of(judged))
    earlier = [rows[:number].count(row) for number, row in enumerate(rows)]
    assert scores("duplicate-rows", facts) == earlier
    repeated = [int(pair in pairs[:number] and not earlier[number]) for number, pair in enumerate(pairs)]
    assert scores("duplicate-pairs", facts) == repeated


def test_annotators_of_one_row_vote_together_and_others_for_themselves() -> None:
    judgements = [{"first": 0, "second": 1, "label": label} for label in (1, 0)]
    row: dict[str, object] = {"prompt": "p", "replies": ["one", "two"], "comparisons": judgements}
    alone = facts_of([row])
    assert scores("contradictions", alone) == [2]
    of_annotators = replace(alone, has_annotator_J=np.ones(2, dtype=bool))
    assert scores("contradictions", of_annotators) == [0]


def test_ties_are_neither_contradictions_nor_part_of_cycles() -> None:
    facts = facts_of(rows_of([(0, 0, 1, 1.0), (0, 0, 1, 0.5), (0, 1, 2, 1.0), (0, 2, 0, 0.5)]))
    assert scores("contradictions", facts) == scores("cycles", facts) == [0] * 4


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=1, max_size=60))
@settings(deadline=None)
def test_the_share_is_that_of_the_statistics_by_prompt(flags: list[tuple[bool, int]]) -> None:
    outcomes = np.array([flag for flag, _ in flags])
    clusters = numbers_of(np.array([cluster for _, cluster in flags]))
    ours = share_of(outcomes, clusters)
    wanted = proportion(outcomes.astype(float), [str(cluster) for cluster in clusters])
    assert [ours.value, ours.low, ours.high] == pytest.approx([wanted.value, wanted.low, wanted.high], nan_ok=True)


def leaking(tmp_path: Path) -> tuple[str, ...]:
    long = "the quick brown fox jumps over the lazy dog and then it runs away from the angry farmer who owns the field"
    reply = "a distinctive reply that is long enough to join the rows of a conversation"
    train = [
        {"prompt": "What is  it?", "chosen": "one a", "rejected": "two b"},
        {"prompt": f"{long} today?", "chosen": "three", "rejected": "four"},
        {"prompt": "own prompt", "chosen": reply, "rejected": "five"},
        {"prompt": "sound", "chosen": "six", "rejected": "seven"},
    ]
    test = [
        {"prompt": "what is it?", "chosen": "eight", "rejected": "nine"},
        {"prompt": f"{long} tonight?", "chosen": "ten", "rejected": "eleven"},
        {"prompt": "another prompt", "chosen": reply, "rejected": "twelve"},
    ]
    write_jsonl(tmp_path / "d.train.jsonl", train)
    write_jsonl(tmp_path / "d.test.jsonl", test)
    return str(tmp_path / "d.test.jsonl"), str(tmp_path / "d.train.jsonl")


def found(audited: Audited) -> dict[str, list[str]]:
    audit = audited.audit
    return {
        finding.check.name: [audit.place(row) for row in finding.rows_F.tolist()]
        for finding in audit.findings
        if finding.check.name.startswith("leak")
    }


@pytest.mark.parametrize("by_name", [True, False])
def test_rows_of_which_a_later_split_knows_something_leak(tmp_path: Path, by_name: bool) -> None:
    files = leaking(tmp_path)
    reading = ReadingConfig(num_workers=1)
    # The test file is named first, and comes later all the same.
    config = AuditConfig(dataset=files, reading=reading)
    if by_name:
        config = AuditConfig(dataset=(str(tmp_path / "d"),), splits=("train", "test"), reading=reading)
    audited = audit_rows(config)
    assert found(audited) == {
        "leaked-prompts": ["d.train.jsonl:1"],
        "leaked-conversations": ["d.train.jsonl:1", "d.train.jsonl:3"],
        "leaked-near-prompts": ["d.train.jsonl:1", "d.train.jsonl:2"],
        "leaks": ["d.train.jsonl:1", "d.train.jsonl:2", "d.train.jsonl:3"],
    }
    # Rows of the last split cannot leak and are not in the share.
    (leaks,) = (one for one in audited.audit.findings if one.check.name == "leaks")
    assert leaks.share.value == 3 / 4
    gone, stays = removals(audited, ["leaks"])
    assert [audited.audit.place(one.row) for one in gone] == found(audited)["leaks"]
    assert stays.sum() == 4


def test_a_later_split_without_a_usable_row_changes_no_share_of_leaks(tmp_path: Path) -> None:
    leaking(tmp_path)
    write_jsonl(tmp_path / "d.last.jsonl", [{"prompt": "p", "chosen": "a", "rejected": None}])
    splits = ("train", "test", "last")
    config = AuditConfig(dataset=(str(tmp_path / "d"),), splits=splits, reading=ReadingConfig(num_workers=1))
    (leaks,) = (one for one in audit_rows(config).audit.findings if one.check.name == "leaks")
    assert leaks.share.value == 3 / 4


def test_without_splits_leaks_are_not_looked_for(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    audit = audit_rows(AuditConfig(dataset=(str(tmp_path / "a.jsonl"),), reading=ReadingConfig(num_workers=1))).audit
    assert set(audit.not_run) >= {"leaked-prompts", "leaked-conversations", "leaked-near-prompts", "leaks"}


def test_majorities_of_annotators_that_go_round_are_no_defect_of_the_file() -> None:
    orders = {"ann": (0, 1, 2), "bob": (1, 2, 0), "eve": (2, 0, 1)}
    judged = [
        {"first": order[a], "second": order[b], "annotator": who}
        for who, order in orders.items()
        for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    row = {"prompt": "p", "replies": ["one", "two", "three"], "comparisons": judged}
    # Each annotator has an order of the replies; two of three prefer one to two, two to three, and three to one.
    assert scores("cycles", facts_of([row])) == [0]
    unnamed = [{"first": a, "second": b} for a, b in ((0, 1), (1, 2), (2, 0))]
    assert scores("cycles", facts_of([{**row, "comparisons": unnamed}])) == [3]
    parts = [{**row, "comparisons": judged[number::3]} for number in range(3)]
    assert max(scores("cycles", facts_of(parts))) == 3, "rows that go round are a defect of the file"


def essay(number: int, words: int, *, seed: str = "") -> str:
    """A text of its own words."""
    return " ".join(f"{seed}{number}w{place}" for place in range(words))


def pair(prompt: str, chosen: str, rejected: str, *, system: str | None = None) -> dict[str, object]:
    turns = [] if system is None else [{"role": "system", "content": system}]
    return {"prompt": [*turns, {"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected}


ARTICLE, BASIL, FERN, MOSS = (essay(number, words) for number, words in enumerate((400, 40, 40, 40)))


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        pytest.param(pair(ARTICLE, BASIL, FERN + " end"), [0, 2], id="the same judgement, a word longer"),
        pytest.param(pair(ARTICLE + " end", BASIL, FERN), [0, 2], id="the same judgement, of a prompt a word longer"),
        pytest.param(pair(ARTICLE, BASIL, MOSS), [0, 0], id="another reply to a long prompt"),
        pytest.param(pair(ARTICLE + " end", FERN, BASIL), [0, 0], id="judged the other way"),
        pytest.param(pair(ARTICLE, BASIL, FERN + " end", system="Be brief."), [0, 0], id="under another system turn"),
        pytest.param(pair(ARTICLE, FERN, BASIL, system="Be brief."), [0, 0], id="steered by the system turn"),
    ],
)
def test_rows_are_near_duplicates_if_they_judge_similar_replies_alike(
    second: dict[str, object], expected: list[int]
) -> None:
    assert scores("near-duplicates", facts_of([pair(ARTICLE, BASIL, FERN), second])) == expected


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        pytest.param(pair(ARTICLE + " end", FERN, BASIL), [1, 1], id="of a prompt a word longer"),
        pytest.param(pair(ARTICLE, FERN + " end", BASIL), [1, 1], id="of a reply a word longer"),
        pytest.param(pair(ARTICLE, FERN, BASIL), [0, 0], id="of the same texts, which are contradictions"),
        pytest.param(pair(ARTICLE + " end", BASIL, FERN), [0, 0], id="judged alike"),
        pytest.param({**pair(ARTICLE + " end", FERN, BASIL), "label": 0}, [0, 0], id="told the other way round"),
        pytest.param({**pair(ARTICLE + " end", FERN, BASIL), "label": 0.5}, [0, 0], id="a tie"),
        pytest.param(pair(ARTICLE, MOSS, BASIL), [0, 0], id="another reply"),
        pytest.param(pair(ARTICLE + " end", FERN, BASIL, system="Be brief."), [0, 0], id="under another system turn"),
    ],
)
def test_rows_are_near_contradictions_if_they_judge_similar_replies_both_ways(
    second: dict[str, object], expected: list[int]
) -> None:
    facts = facts_of([pair(ARTICLE, BASIL, FERN), second])
    assert scores("near-contradictions", facts) == expected
    assert near_duplicates(facts, 0.8).counts["near-contradictions"] == {"pairs of similar replies": expected[0]}


def test_equal_texts_judged_both_ways_are_contradictions_whatever_else_their_rows_hold() -> None:
    more = {"prompt": ARTICLE, "replies": [BASIL, FERN, BASIL + " end"], "comparisons": [{"first": 1, "second": 0}]}
    facts = facts_of([{**more, "replies": [BASIL, FERN], "comparisons": [{"first": 0, "second": 1}]}, more])
    assert scores("contradictions", facts) == [1, 1]
    assert scores("near-contradictions", facts) == [0, 0]


def test_pairs_of_similar_replies_are_near_duplicates_only_if_their_texts_are_the_same() -> None:
    """Which of two similar replies is better is told by their few differences, which similarity does not see."""
    rows = [pair(ARTICLE, BASIL, BASIL + " end"), pair(ARTICLE + " end", BASIL + " end", BASIL)]
    assert scores("near-duplicates", facts_of(rows)) == [0, 0]
    rows = [pair(ARTICLE, BASIL, BASIL + " end"), pair(ARTICLE + " end", BASIL, BASIL + " end")]
    assert scores("near-duplicates", facts_of(rows)) == [0, 2]


def test_each_comparison_of_a_prompt_with_many_replies_stays() -> None:
    replies = [essay(number, 40) for number in range(1, 5)]
    rows = [pair(ARTICLE, better, worse) for place, better in enumerate(replies) for worse in replies[place + 1 :]]
    facts = facts_of(rows)
    assert scores("near-duplicates", facts) == [0] * 6
    # The same facts, twice: the second half copies the first, with a word more.
    rows += [pair(ARTICLE + " end", str(row["chosen"]), str(row["rejected"])) for row in rows]
    assert scores("near-duplicates", facts_of(rows)) == [0] * 6 + [2] * 6


def lines_run(facts: Facts) -> int:
    """Return how many lines of Python the search for near duplicates runs."""
    count = 0

    def trace(frame: FrameType, event: str, value: object) -> object:
        nonlocal count
        count += event == "line" and frame.f_code.co_filename.endswith("across.py")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        near_duplicates(facts, 0.8)
    finally:
        sys.settrace(before)
    return count


def test_similar_rows_that_are_judged_both_ways_are_not_all_compared_with_each_other() -> None:
    sides = ((BASIL, FERN), (FERN, BASIL))
    rows = [pair(f"{ARTICLE} end{number}", *sides[number % 2]) for number in range(80)]
    few, many = facts_of(rows[:20]), facts_of(rows)
    assert scores("near-contradictions", many) == [1] * 80
    assert lines_run(many) <= 4.5 * lines_run(few), "four times as many rows"


def test_the_facts_of_one_dataset_are_not_copied() -> None:
    facts = facts_of([pair(ARTICLE, BASIL, FERN), pair(BASIL, MOSS, FERN)])
    once = joined([facts])
    assert np.shares_memory(once.whole_signatures_PH, facts.whole_signatures_PH)
    assert np.shares_memory(once.texts.replies_R, facts.texts.replies_R)
    np.testing.assert_array_equal(once.owners_J, facts.owners_J)


def test_the_facts_of_all_rows_are_those_of_its_parts_put_together_and_no_part_is_kept() -> None:
    """Parts of one row to nine, with rows that are no preferences, held against a plain concatenation."""
    rows = [
        {"prompt": f"prompt {n % 7}", "chosen": f"reply {n}"} | ({} if n % 5 == 4 else {"rejected": f"other {n % 3}"})
        for n in range(45)
    ]
    sizes = list(range(1, 10))
    ends = np.cumsum(sizes).tolist()
    parts = [facts_of(rows[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    alive: list[weakref.ref[Facts]] = []
    most = 0

    def one_by_one() -> Iterator[Facts]:
        nonlocal most
        for end, size in zip(ends, sizes, strict=True):
            made = facts_of(rows[end - size : end])
            alive.append(weakref.ref(made))
            yield made
            del made
            most = max(most, sum(own() is not None for own in alive))

    found = joined(one_by_one())
    assert most <= 3, "the first two, and the one that is added"
    before = np.cumsum([0, *(len(part.rows_P) for part in parts)]).tolist()
    for whole, names, of_part in ((found, ARRAYS, parts), (found.texts, TEXTS, [part.texts for part in parts])):
        for name in names:
            shifts = before if name in OWNERS else [0] * len(before)
            own = [getattr(part, name) for part in of_part]
            wanted = np.concatenate(
                [array + shift if shift else array for array, shift in zip(own, shifts, strict=False)]
            )
            np.testing.assert_array_equal(getattr(whole, name), wanted, err_msg=name)
            assert getattr(whole, name).dtype == wanted.dtype, name
    assert found.causes == dict(sum((Counter(part.causes) for part in parts), Counter()).most_common())
    assert sum(found.causes.values()) == 9
