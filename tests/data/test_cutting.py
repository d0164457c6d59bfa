"""Laws of cutting: the exchanges kept are those of a slow search, the tokens lost the fewest that suffice, and one long
conversation does not stall a run."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import CHATML, make_tokenizer
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import CUT_BY_STEPS, CUT_FEWEST, Canary, RewardSpec
from rewardlab.core.types import Conversation, IntArray, Message
from rewardlab.data.chat import Renderer, ReplyTooLong
from rewardlab.data.config import RenderingConfig
from rewardlab.data.cutting import NEIGHBOURS, cut, cut_middle, split_exchanges
from rewardlab.data.templates import build_renderer

TEMPLATES = ("template", "plain", "concat")
RENDERERS = {name: build_renderer(make_tokenizer(CHATML), RenderingConfig(chat_template=name)) for name in TEMPLATES}


def renderer_for(template: str, limit: int, rule: str = CUT_FEWEST) -> Renderer:
    built = RENDERERS[template]
    return Renderer(built.tokenizer, replace(built.spec, max_length=limit, truncation=rule))


def slow_cut(renderer: Renderer, prompt: Conversation, reply: Conversation) -> tuple[Conversation, IntArray] | None:
    """The older rule as it was first written: everything encoded anew for each exchange that goes."""
    num_system = next((n for n, message in enumerate(prompt) if message.role != "system"), len(prompt))
    system, exchanges = prompt[:num_system], split_exchanges(prompt[num_system:])
    limit = renderer.spec.max_length
    while len(exchanges) > 1:
        exchanges = exchanges[1:]
        kept = system + tuple(message for exchange in exchanges for message in exchange)
        token_ids = renderer.token_ids(kept + reply)
        if len(token_ids) <= limit:
            return kept + reply, token_ids
    excess = len(renderer.token_ids((*system, *(exchanges[0] if exchanges else ()), *reply))) - limit
    oldest, *others = exchanges[0] if exchanges else reply
    starts = renderer._token_starts(oldest.content) if exchanges else []
    num_cut = 0
    while excess > 0 and num_cut < len(starts):
        num_cut = min(len(starts), num_cut + excess)
        content = oldest.content[starts[num_cut] :] if num_cut < len(starts) else ""
        kept = (*system, Message(oldest.role, content), *others)
        token_ids = renderer.token_ids(kept + reply)
        excess = len(token_ids) - limit
        if excess <= 0:
            return kept + reply, token_ids
    return None


words = st.lists(st.sampled_from(["basil", "water", "é", "日", "\n", " ", "", "12", "x"]), max_size=9).map("".join)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), words), max_size=24)


def conversation(drawn: list[tuple[str, str]], system: str | None) -> Conversation:
    opening = (Message("system", system),) if system is not None else ()
    return opening + tuple(Message(role, text) for role, text in drawn)


def cut_or_none(renderer: Renderer, prompt: Conversation, reply: Conversation) -> tuple[Conversation, IntArray] | None:
    try:
        kept, _, token_ids = renderer._cut(prompt, reply)
        return kept, token_ids
    except ReplyTooLong:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@given(drawn=turns, system=st.none() | words, reply=words, limit=st.integers(16, 80))
@settings(max_examples=150, deadline=None)
def test_what_is_kept_is_that_of_a_slow_search(template, drawn, system, reply, limit):
    renderer = renderer_for(template, limit, CUT_BY_STEPS)
    prompt, last = conversation(drawn, system), (Message("assistant", reply),)
    if len(renderer.token_ids(prompt + last)) <= limit:
        return
    expected, found = slow_cut(renderer, prompt, last), cut_or_none(renderer, prompt, last)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found[0] == expected[0]
        assert np.array_equal(found[1], expected[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("template", TEMPLATES)
@given(drawn=turns, content=words.map(lambda text: text * 6), reply=words, limit=st.integers(24, 60))
@example(drawn=[], content="x 12 1212 12 12 x", reply="x", limit=24)
@settings(max_examples=100, deadline=None)
def test_the_fewest_tokens_go_that_suffice(template, drawn, content, reply, limit):
    renderer, older = (renderer_for(template, limit, rule) for rule in (CUT_FEWEST, CUT_BY_STEPS))
    prompt, last = (Message("user", content), *conversation(drawn[:2], None)), (Message("assistant", reply),)
    if len(renderer.token_ids(prompt + last)) <= limit:
        return
    found, before = (cut_or_none(one, prompt, last) for one in (renderer, older))
    assert (found is None) == (before is None)
    if found is None or before is None:
        return
    (kept, token_ids), oldest = found, split_exchanges(prompt)[-len(split_exchanges(found[0][:-1])) :][0][0]
    assert len(token_ids) <= limit
    assert len(kept) == len(before[0])
    starts = renderer._token_starts(oldest.content)
    lost = len(oldest.content) - len(kept[0].content)
    number = starts.index(lost) if lost in starts[1:] else len(starts) if lost else 0
    for fewer in range(max(1, number - NEIGHBOURS), number):
        longer = (Message(oldest.role, oldest.content[starts[fewer] :]), *kept[1:])
        assert len(renderer.token_ids(longer)) > limit
    assert len(kept[0].content) >= len(before[0][0].content) or number


def toy_encode(messages: Conversation) -> IntArray:
    """Words, and white space between them, which merges with the line break of the header before it."""
    text = "".join(f"{message.role}\n{message.content}!" for message in messages)
    return np.array([hash(piece) % 999 for piece in TOY.findall(text)], dtype=np.int32)


TOY = re.compile(r"\s+|\w+|!")


def toy_cut(content: str, limit: int, rule: str) -> tuple[int, int] | None:
    """(characters left of the content, tokens); None if nothing suffices."""
    kept, token_ids = cut(
        (Message("user", content), Message("assistant", "yes")),
        num_last=1,
        encode=toy_encode,
        starts_of=lambda text: [found.start() for found in TOY.finditer(text)],
        limit=limit,
        rule=rule,
    )
    return None if kept is None else (len(kept[0].content), len(token_ids))


@given(content=st.text("ab \n", min_size=20, max_size=120), limit=st.integers(3, 40))
@settings(max_examples=200, deadline=None)
def test_where_headers_merge_with_what_is_left_still_the_fewest_go(content, limit):
    pair = (Message("user", content), Message("assistant", "yes"))
    if len(toy_encode(pair)) <= limit:
        return
    rest = [*(content[found.start() :] for found in TOY.finditer(content)), ""][1:]
    fitting = [text for text in rest if len(toy_encode((Message("user", text), pair[1]))) <= limit]
    found = toy_cut(content, limit, CUT_FEWEST)
    assert (found and found[0]) == (len(fitting[0]) if fitting else None)


def test_the_older_rule_took_a_token_too_many_where_the_header_merges_with_what_is_left():
    content = "one two three four five six"
    assert toy_cut(content, 12, CUT_BY_STEPS) == (len("four five six"), 12)
    assert toy_cut(content, 12, CUT_FEWEST) == (len(" four five six"), 12)
    assert toy_cut(content, 11, CUT_BY_STEPS) == toy_cut(content, 11, CUT_FEWEST)


@pytest.mark.parametrize("rule", [CUT_FEWEST, CUT_BY_STEPS])
@pytest.mark.parametrize("long", ["turns", "tokens"])
def test_what_is_encoded_grows_with_the_limit_and_not_with_the_conversation(rule, long, monkeypatch):
    renderer = renderer_for("template", 256, rule)
    prompt = tuple(Message("user" if n % 2 == 0 else "assistant", f"turn {n} water") for n in range(6001))
    if long == "tokens":
        prompt = (Message("user", "water basil " * 3000),)
    last = (Message("assistant", "yes"),)
    encode, sizes = renderer._encode, []
    monkeypatch.setattr(renderer, "_encode", lambda text: sizes.append(len(text)) or encode(text))
    renderer.render_cut(prompt, last, full_length=99_999)
    assert len(sizes) < 40
    whole = len(renderer.text(prompt + last)) if long == "tokens" else 0
    assert sum(size for size in sizes if size < whole or not whole) < 40 * 256 * 8


def spec_with(truncation: str) -> RewardSpec:
    renderer = replace(RENDERERS["plain"].spec, truncation=truncation)
    canary = Canary(name="c", messages=[{"role": "user", "content": "a"}], token_ids=[1], score=0.0, decoys={})
    values = {"beta": 1.0, "head_dtype": "float32", "save_dtype": "float32", "rounding": "none"}
    return RewardSpec(renderer=renderer, max_rounding_error=0.0, canaries=[canary], files={}, provenance={}, **values)


def test_a_saved_model_keeps_its_rule_and_an_unknown_one_is_refused():
    for rule in (CUT_BY_STEPS, CUT_FEWEST):
        assert RewardSpec.from_dict(spec_with(rule).to_dict(), where="s").renderer.truncation == rule
    with pytest.raises(
        ArtifactError, match=r"renderer.truncation: expected one of oldest_\w+, .* found 'newest_first'"
    ):
        RewardSpec.from_dict(spec_with("newest_first").to_dict(), where="s")


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(9, "one two three seven eight"), (7, "one two seven eight"), (5, "one two eight"), (3, "one eight")],
)
def test_the_middle_goes_in_whole_tokens_and_the_beginning_keeps_as_many_or_one_more(limit: int, kept: str) -> None:
    pieces = re.compile(r"\w+ ?")

    def encode(messages: Conversation) -> IntArray:
        return np.arange(sum(2 * len(pieces.findall(message.content)) - 1 for message in messages), dtype=np.int32)

    def starts_of(text: str) -> list[int]:
        return [found.start() for found in pieces.finditer(text)]

    talk = (Message("assistant", "one two three four five six seven eight"),)
    shorter, token_ids = cut_middle(talk, encode=encode, starts_of=starts_of, limit=limit)
    assert shorter is not None
    assert shorter[0].content == kept
    assert len(token_ids) == limit
    assert cut_middle(talk, encode=encode, starts_of=starts_of, limit=2)[0] is None
