"""Laws of holding out: rows that share a first turn, or a reply that says something, are on one side, and it is said
how much of what was asked for that leaves."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import shared_data
from harness.in_memory import split_by_root
from loading import ids, load
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, Message, Preference, prompt_key
from rewardlab.curation.shingles import words_of
from rewardlab.data.groups import Part
from rewardlab.data.splits import (
    JOINING_BYTES,
    MOST_FIRST_TURNS,
    MOST_TOGETHER,
    Texts,
    count_shared,
    find_roots,
    hold_out,
)
from rewardlab.data.store import LeftOut, TokenStore, encode

PHRASE = "You’re welcome!"
STATEMENT = "Neil Armstrong was the first man to walk on the moon, in "


def row(number: int, *turns: str, replies: Sequence[str] | None = None, system: str | None = None) -> Preference:
    """Turns of user and assistant in turn; the replies, unless given, are its own."""
    said = [Message("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(turns)]
    own = replies or [f"{STATEMENT}{number}", f"{STATEMENT}{number} or later"]
    return Preference(
        id=f"f:{number}",
        source="f",
        prompt=(*([Message("system", system)] if system is not None else []), *said),
        replies=tuple((Message("assistant", text),) for text in own),
        comparisons=(Comparison(first=0, second=1),),
    )


def normal(text: str) -> str:
    return " ".join(text.casefold().split())


class Slow:
    """The rule in sets and loops: what a row says, and the roots by joining two sets at a time."""

    def __init__(self, rows: Sequence[Preference]) -> None:
        self.rows = rows
        turns_after: dict[str, set[str]] = {}
        for one in rows:
            for reply in self.replies(one):
                turns_after.setdefault(reply, set()).add(self.first_turn(one))
        self.joins = {
            reply
            for reply, turns in turns_after.items()
            if len(reply.encode()) >= JOINING_BYTES and len(turns) <= MOST_FIRST_TURNS
        }

    def first_turn(self, one: Preference) -> str:
        return normal(next(turn.content for turn in one.prompt if turn.role == "user"))

    def replies(self, one: Preference) -> list[str]:
        return [normal(reply[0].content) for reply in one.replies]

    def says(self, one: Preference) -> set[tuple[str, str]]:
        return {("turn", self.first_turn(one))} | {("reply", text) for text in self.replies(one) if text in self.joins}

    def roots(self) -> list[set[str]]:
        """Prompt keys of each."""
        found: list[tuple[set[tuple[str, str]], set[str]]] = []
        for one in self.rows:
            said, keys = self.says(one), {one.key}
            apart = []
            for other_said, other_keys in found:
                if said & other_said:
                    said, keys = said | other_said, keys | other_keys
                else:
                    apart.append((other_said, other_keys))
            found = [*apart, (said, keys)]
        return [keys for _, keys in found]


POOL = [PHRASE, "Yes.", *(f"{STATEMENT}{n}" for n in range(9)), f" {STATEMENT.upper()} 3"]
DRAWN = st.lists(
    st.tuples(
        st.integers(0, 14),
        st.none() | st.integers(0, 3),
        st.none() | st.lists(st.sampled_from(POOL), min_size=2, max_size=2),
        st.sampled_from([None, "Be brief."]),
    ),
    min_size=2,
    max_size=30,
)
"""First turn, third turn, replies and system turn of some rows, from small pools."""


def rows_of(drawn: Iterable[tuple]) -> list[Preference]:
    """As drawn; replies that are not drawn are the row's own."""
    return [
        row(
            number,
            f"Question {first}?",
            *([] if third is None else ["Yes?", f"And {third}"]),
            replies=replies,
            system=system,
        )
        for number, (first, third, replies, system) in enumerate(drawn)
    ]


@pytest.mark.slow
@given(drawn=DRAWN, fraction=st.floats(0.01, 0.5), seed=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_sides_share_nothing_that_joins_and_hold_what_was_asked_for(
    drawn: list[tuple], fraction: float, seed: int
) -> None:
    rows = rows_of(drawn)
    texts, slow = Texts.of(rows), Slow(rows)
    num_prompts = len({one.key for one in rows})
    wanted = max(1, round(fraction * num_prompts))
    if wanted >= num_prompts:
        with pytest.raises(DataError, match=r"nothing to train on.*--eval-dataset.*--eval-fraction"):
            hold_out(texts, fraction=fraction, seed=seed)
        return
    found = hold_out(texts, fraction=fraction, seed=seed)
    train, held_out = split_by_root(rows, fraction=fraction, seed=seed)
    assert sorted(ids([*train, *held_out])) == sorted(ids(rows))
    assert [one for one in rows if one in set(train)] == list(train)
    assert [one.id for one, out in zip(rows, found.mask_P, strict=True) if out] == ids(held_out)
    assert found.prompts == len({one.key for one in held_out}) >= wanted / 2
    shared = count_shared(Texts.of(held_out), Texts.of(train))
    assert shared["prompts"] == 0
    sizes = sorted(map(len, slow.roots()))
    if found.rule == "reply":
        said = [set().union(*map(slow.says, side)) for side in (train, held_out)]
        assert not said[0] & said[1]
        assert shared["first_turns"] == 0
        assert found.largest == sizes[-1]
        assert found.prompts <= wanted or found.prompts == sizes[0]
        whole = [keys for keys in slow.roots() if keys & {one.key for one in held_out}]
        assert (len(whole), sum(map(len, whole))) == (found.roots, found.prompts)
    else:
        assert sizes[-1] > wanted, "nothing but a root larger than that ought to stand in the way"


@pytest.mark.parametrize("seed", range(8))
def test_small_conversations_that_come_first_do_not_keep_a_large_one_out(seed: int) -> None:
    """Conversations of 5, 4 and 2 prompts, 5 of 11 wanted: 2 and then neither of the others would be too few."""
    rows = [
        row(10 * first + turn, f"Question {first}?", "Yes?", f"And {turn}")
        for first, size in enumerate((5, 4, 2))
        for turn in range(size)
    ]
    found = hold_out(Texts.of(rows), fraction=0.45, seed=seed)
    assert found.rule == "reply"
    assert found.prompts in (4, 5)


@pytest.mark.slow
@given(drawn=DRAWN)
@settings(max_examples=150, deadline=None)
def test_folds_go_by_the_same_roots_unless_one_has_more_than_half(drawn: list[tuple]) -> None:
    rows = rows_of(drawn)
    numbers, rule = find_roots(Texts.of(rows))
    slow = Slow(rows)

    def grouped(by: Iterable[object]) -> set[frozenset[str]]:
        found: dict[object, set[str]] = {}
        for one, name in zip(rows, by, strict=True):
            found.setdefault(name, set()).add(one.key)
        return set(map(frozenset, found.values()))

    by_rule = {
        "reply": set(map(frozenset, slow.roots())),
        "first_turn": grouped(map(slow.first_turn, rows)),
        "prompt": grouped(one.key for one in rows),
    }
    num_prompts = len({one.key for one in rows})
    expected = next(
        (name for name, roots in by_rule.items() if max(map(len, roots)) <= MOST_TOGETHER * num_prompts), "prompt"
    )
    assert rule == expected
    assert grouped(numbers.tolist()) == by_rule[rule]


@pytest.mark.slow
@given(drawn=DRAWN, seed=st.integers(0, 3), order=st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_it_depends_on_the_set_of_rows_and_the_seed_and_not_on_their_order(drawn, seed, order) -> None:
    rows = rows_of(drawn)
    if len({one.key for one in rows}) < 3:
        return
    moved = order.sample(rows, len(rows))
    sides = [set(ids(split_by_root(some, fraction=0.3, seed=seed)[1])) for some in (rows, moved)]
    assert sides[0] == sides[1]


@given(prompts=st.lists(st.integers(0, 40), min_size=3, max_size=60), seed=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_rows_that_share_whole_prompts_alone_are_divided_as_by_prompt(prompts: list[int], seed: int) -> None:
    if len(set(prompts)) < 3:
        return
    rows = [row(number, f"Question {prompt}?") for number, prompt in enumerate(prompts)]
    keys = sorted({one.key for one in rows})
    order = np.random.default_rng(seed).permutation(len(keys))
    expected = {keys[n] for n in order[: max(1, round(0.2 * len(keys)))]}
    found = {rule: hold_out(Texts.of(rows), fraction=0.2, seed=seed, rules=[rule]) for rule in ("reply", "prompt")}
    for by_rule in found.values():
        assert {one.key for one, out in zip(rows, by_rule.mask_P, strict=True) if out} == expected
    assert found["reply"].digest == found["prompt"].digest


def roots_of(*rows: Preference) -> int:
    """How many roots the rows have among a hundred that share nothing: all but the last are held out."""
    others = [row(1000 + n, f"Other question {n}?") for n in range(100)]
    num_prompts = len({one.key for one in [*rows, *others]})
    sizes = {hold_out(Texts.of([*rows, *others]), fraction=0.01 * k, seed=0).largest for k in (1, 2)}
    assert num_prompts > 100
    return len({one.key for one in rows}) - max(sizes) + 1


def test_what_joins_two_rows_and_what_does_not() -> None:
    together, apart = 1, 2
    first, system = "What is basil?", "You are a gardener."
    assert roots_of(row(0, first), row(1, " what is  BASIL?", "Yes?", "And mint?")) == together
    assert roots_of(row(0, first, system=system), row(1, "What is mint?", system=system)) == apart
    assert roots_of(row(0, first, system=system), row(1, first, system="You are a cook.")) == together
    said = [f"{STATEMENT}1969.", PHRASE]
    assert roots_of(row(0, first, replies=said), row(1, "Who?", replies=[said[0].upper(), "No."])) == together
    assert roots_of(row(0, first, replies=[PHRASE, "a"]), row(1, "Who?", replies=[PHRASE, "b"])) == apart
    assert roots_of(row(0, first, PHRASE, "And mint?"), row(1, "Who?", PHRASE, "And mint?")) == apart


def test_the_spelling_of_accented_letters_keeps_no_prompt_apart() -> None:
    for text in ("Où est le café\u0301 de Gdańsk?", "πραΰνω"):
        composed, apart = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
        assert composed != apart
        written = (composed, apart, composed.upper(), apart.upper())
        assert len({prompt_key((Message("user", said),)) for said in written}) == 1
        assert words_of(composed) == words_of(apart)
    assert prompt_key((Message("user", "Gdansk"),)) != prompt_key((Message("user", "Gdańsk"),))


def test_half_a_chain_of_replies_is_never_held_out() -> None:
    chain = [row(n, f"Question {n}?", replies=[f"{STATEMENT}{n}", f"{STATEMENT}{n + 1}"]) for n in range(5)]
    assert roots_of(*chain) == 1


def test_a_reply_after_many_first_turns_is_a_phrase_however_long() -> None:
    refusal = "I am sorry, but I can help neither with this question nor with any other like it."
    most = [row(n, f"Question {n}?", replies=[refusal, f"No {n}."]) for n in range(MOST_FIRST_TURNS)]
    assert roots_of(*most) == 1
    more = [*most, row(99, "Question 99?", replies=[refusal, "No 99."])]
    assert roots_of(*more) == len(more)
    again = [*most, row(99, "Question 0?", "Yes?", "Go on.", replies=[refusal, "No 99."])]
    assert roots_of(*again) == 1, "a conversation counts once, however often it goes on"


def test_a_transcript_kept_as_one_text_begins_with_its_first_human_turn() -> None:
    texts = [
        f"\n\nHuman: What is basil?\n\nAssistant: A herb.\n\nHuman: {what}?\n\nAssistant:" for what in ("A", "B", "C")
    ]
    assert roots_of(*(row(n, text) for n, text in enumerate(texts))) == 1
    assert roots_of(row(0, "Human: a word"), row(1, "Human: a word of two")) == 2


def test_one_prompt_that_is_read_as_a_transcript_in_one_of_its_spellings_joins_by_both() -> None:
    text = "\n\nHuman: What is basil?\n\nAssistant:"
    shouted = text.upper()
    rows = [row(0, text), row(1, shouted), row(2, "What is basil?"), row(3, shouted, "Yes?", "And mint?")]
    assert rows[0].key == rows[1].key
    for order in permutations(rows):
        assert roots_of(*order) == 1


def test_a_prompt_without_a_user_turn_stands_for_itself() -> None:
    rows = [row(n, " ", f"I am number {n}", system="Be brief.") for n in range(2)]
    assert roots_of(*rows) == 2


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (lambda n: row(n, f"Question {n}?", replies=[f"{STATEMENT}{n}", f"{STATEMENT}{(n + 1) % 40}"]), "first_turn"),
        (lambda n: row(n, "Rate what follows.", "Yes?", f"Text {n}"), "prompt"),
    ],
    ids=["a ring of replies", "one first turn"],
)
def test_where_all_rows_hang_together_the_next_rule_divides_them_and_says_so(one, expected) -> None:
    rows = [one(n) for n in range(40)]
    found = hold_out(Texts.of(rows), fraction=0.1, seed=0)
    assert (found.rule, found.prompts, found.wanted) == (expected, 4, 4)
    train, held_out = split_by_root(rows, fraction=0.1, seed=0)
    shared = count_shared(Texts.of(held_out), Texts.of(train))
    assert shared["rows"] == 4
    assert (shared["replies"] > 0) == (expected == "first_turn")
    assert (shared["first_turns"] > 0) == (expected == "prompt")


def test_the_smallest_root_is_held_out_where_none_is_small_enough() -> None:
    rows = [row(10 * n + k, f"Question {n}?", "Yes?", f"And {k}?") for n in range(5) for k in range(3 + (n == 2))]
    found = hold_out(Texts.of(rows), fraction=0.01, seed=0)
    assert (found.rule, found.wanted, found.prompts, found.roots, found.largest) == ("reply", 1, 3, 1, 4)


def test_what_is_shared_is_counted_by_kind() -> None:
    train = [row(0, "A?", replies=[f"{STATEMENT}1969.", "Yes."]), row(1, "B?"), row(2, "C?", replies=[PHRASE, "d"])]
    other = [
        row(3, "A?", replies=["x", "y"]),
        row(4, "b?", "So?", "Go on.", replies=["x", PHRASE]),
        row(5, "D?", replies=[f"{STATEMENT}1969. ", "yes."]),
        row(6, "E?", replies=["yes.", "z"]),
    ]
    counts = {"rows": 3, "prompts": 1, "first_turns": 2, "replies": 1, "phrases": 2}
    assert count_shared(Texts.of(other), Texts.of(train)) == counts
    nothing = dict.fromkeys(counts, 0)
    assert count_shared(Texts.of(train), Texts.of([])) == count_shared(Texts.of([]), Texts.of(train)) == nothing


def plain(texts: Texts) -> tuple[list[object], ...]:
    return tuple(np.asarray(column).tolist() for column in vars(texts).values())


@given(drawn=DRAWN, chosen=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_stores_know_of_their_rows_what_the_rows_say(drawn, chosen) -> None:
    rows = rows_of(drawn)
    border = len(rows) // 2
    stores = []
    for part in (rows[:border], rows[border:]):
        stores.append(TokenStore(columns=encode(part, [LeftOut("overlong", "p")] * len(part)), source="s", facts={}))
    numbers = chosen.sample(range(len(rows)), chosen.randint(0, len(rows)))
    part = Part(stores, np.array(numbers, dtype=np.int64))
    assert plain(part.texts()) == plain(Texts.of([rows[n] for n in numbers]))


def spoken(path: Path, fraction: float) -> tuple[list[set[str]], list[set[str]]]:
    """(first user turns, long replies), each of training and of what is held out; read from the rows of the file."""
    sides: Iterable[Sequence[Preference]] = split_by_root(load(path).preferences, fraction=fraction, seed=0)
    slow = [Slow(side) for side in sides]
    turns = [{one.first_turn(preference) for preference in one.rows} for one in slow]
    said = [{text for preference in one.rows for text in one.replies(preference)} for one in slow]
    return turns, [{text for text in texts if len(text.encode()) >= JOINING_BYTES} for texts in said]


@pytest.mark.slow
@pytest.mark.shared_data
def test_of_human_dialogues_no_first_turn_and_no_statement_is_on_both_sides() -> None:
    path = shared_data("dev/hh_helpful.train.jsonl.gz")
    turns, replies = spoken(path, 0.05)
    assert not turns[0] & turns[1]
    assert not replies[0] & replies[1]
    texts = Texts.of(load(path).preferences)
    by_root, by_prompt = (hold_out(texts, fraction=0.05, seed=0, rules=[rule]) for rule in ("reply", "prompt"))
    assert (by_root.prompts, by_root.wanted, by_prompt.prompts) == (83, 83, 83)
    assert json.loads(json.dumps(by_root.as_dict()))["roots"] < 83


def test_texts_of_several_parts_are_those_of_their_rows_together() -> None:
    parts = [[row(1, "a"), row(2, "b", replies=["x", "y", "z"])], [], [row(3, "a")], [row(4, "c"), row(5, "d")]]
    joined, whole = Texts.join([Texts.of(part) for part in parts]), Texts.of([one for part in parts for one in part])
    for name in ("prompts_P", "first_turns_P", "replies_R", "long_R", "owners_R"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name)), name
    assert joined.owners_R.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]
