"""Many preferences at once give, token for token, what one at a time gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common import CHATML, make_tokenizer
from rewardlab.core.errors import RenderError
from rewardlab.core.types import Comparison, Message, Preference, TokenGroup
from rewardlab.data import bulk
from rewardlab.data.bulk import Overlong, render_all, render_conversations, render_replies, render_uncut
from rewardlab.data.chat import Renderer, ReplyTooLong
from rewardlab.data.config import RenderingConfig
from rewardlab.data.layout import Rendered, common_text
from rewardlab.data.store import LeftOut
from rewardlab.data.templates import build_renderer

REFUSES = (
    "{% for m in messages %}{% if 'forbidden' in m['content'] %}{{ raise_exception('no ' + m['role']) }}{% endif %}"
    "{% endfor %}"
)
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
ENDS_ODDLY = CHATML + "{% if messages[-1]['content'] == 'odd' %}!{% endif %}"


def preferences() -> list[Preference]:
    """Prompts and replies of every kind, some of which cannot be used."""
    draw = np.random.default_rng(0)
    words = ["light", "water", " soil", "\n", "@home", "# title", "Paris ", "forbidden", "é漢🙂", "odd", "", "  "]
    rows = []
    for number in range(60):

        def text(most: int) -> str:
            return " ".join(draw.choice(words[:7] + words[8:9], int(draw.integers(1, most))))

        prompt = [Message("user", text(12)), Message("assistant", text(12)), Message("user", text(40))]
        prompt = prompt[2 * int(draw.integers(2)) :]
        if draw.random() < 0.3:
            prompt.insert(0, Message("system", text(4)))
        replies = [
            (Message("assistant", text(int(draw.choice([3, 12, 90])))),) for _ in range(int(draw.integers(2, 5)))
        ]
        if number % 7 == 0:
            replies[0] = (Message("assistant", ""), Message("user", text(5)), Message("assistant", text(30)))
        if number % 5 == 0:
            replies[1] = (Message("assistant", words[number // 5]),)
        if number % 13 == 0:
            replies[1] = replies[0]
        pairs = [(i, j) for i in range(len(replies)) for j in range(i + 1, len(replies))]
        rows.append(
            Preference(
                id=f"row {number}",
                source="s",
                prompt=tuple(prompt),
                replies=tuple(replies),
                comparisons=tuple(Comparison(first=i, second=j) for i, j in pairs),
            )
        )
    return rows


def one_at_a_time(preference: Preference, renderer: Renderer) -> TokenGroup | LeftOut:
    """What `tokenize` did before there was `render_all`."""
    try:
        group = renderer.group(preference)
    except RenderError as error:
        return LeftOut("template_refuses", str(error))
    return LeftOut(group, preference.id) if isinstance(group, str) else group


def boundary(renderer: Renderer, prompt: Any, reply: Any, token_ids: list[int]) -> int:
    """Tokens before the reply's content, found character by character."""
    text = renderer.text(prompt + reply)
    mark = next(mark for mark in ("@", "#") if not reply[0].content.lstrip().startswith(mark))
    other = renderer.text((*prompt, Message(reply[0].role, mark), *reply[1:]))
    end = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(text))
    before = renderer.tokenizer(text[:end], add_special_tokens=False)["input_ids"]
    return next((n for n, (a, b) in enumerate(zip(before, token_ids, strict=False)) if a != b), len(before))


TEMPLATES = {"chatml": CHATML, "trims": TRIMS, "refuses": REFUSES + CHATML, "odd": ENDS_ODDLY, "plain": None}
TRUNCATIONS = ("prompt-left", "drop", "reply-middle")
ALWAYS = {("trims", "prompt-left"), ("refuses", "drop"), ("odd", "reply-middle"), ("plain", "prompt-left")}
"""Templates that are tried with one truncation each, and ChatML with all; the other pairs for long."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("template", "truncation"),
    [
        pytest.param(
            template,
            truncation,
            id=f"{truncation}-{name}",
            marks=() if name == "chatml" or (name, truncation) in ALWAYS else pytest.mark.slow,
        )
        for truncation in TRUNCATIONS
        for name, template in TEMPLATES.items()
    ],
)
def test_all_at_once_and_one_at_a_time_give_the_same(template: str | None, truncation: Any) -> None:
    renderer = build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=120, truncation=truncation))
    rows = preferences()
    found = render_all(rows, renderer)
    wanted = [one_at_a_time(row, renderer) for row in rows]
    for row, group, expected in zip(rows, found, wanted, strict=True):
        if isinstance(expected, LeftOut) or isinstance(group, LeftOut):
            assert group == expected
            continue
        names = ("preference_id", "prompt_key", "prompt_tokens", "truncated_tokens", "truncated_reply_tokens")
        for name in (*names, "comparisons"):
            assert getattr(group, name) == getattr(expected, name)
        assert not (any(group.truncated_tokens) and truncation != "prompt-left")
        assert not (any(group.truncated_reply_tokens) and truncation != "reply-middle")
        assert [group.conversation(n).tolist() for n in range(group.num_replies)] == [
            expected.conversation(n).tolist() for n in range(expected.num_replies)
        ]
        assert len(group.shared) == len(expected.shared)
        whole = not any((*group.truncated_tokens, *group.truncated_reply_tokens))
        if whole and group.num_replies == len(row.replies):
            assert group.prompt_tokens == tuple(
                boundary(renderer, row.prompt, reply, group.conversation(n).tolist())
                for n, reply in enumerate(row.replies)
            )
    kinds = {group.cause if isinstance(group, LeftOut) else "kept" for group in found}
    assert "kept" in kinds
    assert ("overlong" in kinds) == (truncation == "drop")
    assert ("prompt_too_long" in kinds) == (truncation == "reply-middle")
    pairs = list(zip(rows, found, strict=True))
    fewer = any(isinstance(group, TokenGroup) and group.num_replies < len(row.replies) for row, group in pairs)
    refused = template in (REFUSES + CHATML, ENDS_ODDLY)
    # With `drop` the rows with such a reply are left out for another one, which is too long.
    assert fewer or "template_refuses" in kinds or not refused or truncation == "drop"
    assert refused or "template_refuses" not in kinds


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_conversations_rendered_part_by_part_are_those_of_the_renderer(monkeypatch, truncation):
    monkeypatch.setattr(bulk, "CHARACTERS_AT_A_TIME", 500)
    renderer = build_renderer(make_tokenizer(ENDS_ODDLY), RenderingConfig(max_seq_len=120, truncation=truncation))
    conversations = [row.prompt + reply[-1:] for row in preferences() for reply in row.replies]
    assert len(set(conversations)) < len(conversations), "some come twice"
    found = render_conversations(conversations, renderer)
    assert list(found) == list(dict.fromkeys(conversations))
    kinds = set()
    for turns, outcome in found.items():
        kinds.add(type(outcome))
        if isinstance(outcome, RenderError):
            with pytest.raises(type(outcome)) as refused:
                renderer.render(turns[:-1], turns[-1:])
            assert str(refused.value) == str(outcome)
        else:
            wanted = renderer.render(turns[:-1], turns[-1:])
            assert outcome.token_ids.tolist() == wanted.token_ids.tolist()
            assert replace(outcome, token_ids=wanted.token_ids) == wanted
    assert {Rendered, RenderError} <= kinds
    assert render_conversations([], renderer) == {}


def test_the_beginning_that_two_texts_share_is_found_where_they_part():
    draw = np.random.default_rng(0)
    for _ in range(300):
        first, second = ("".join(draw.choice(list("ab"), int(draw.integers(0, 9)))) for _ in range(2))
        end = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if end is None:
            end = len(first)
        assert common_text(first, second) == first[:end]


def test_a_reply_that_does_not_fit_is_one_kind_of_refusal():
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=40))
    with pytest.raises(ReplyTooLong):
        renderer.render((Message("user", "a"),), (Message("assistant", "xyz " * 60),))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bounded", [True, False])
def test_uncut_replies_are_those_of_the_renderer_and_the_others_are_told_apart(bounded):
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=160))
    if not bounded:
        renderer.__dict__["most_characters"] = None
    rows = preferences()
    found = {"whole": 0, "conversation": 0, "prompt": 0}
    for row, got, cut in zip(rows, render_uncut(rows, renderer), render_replies(rows, renderer), strict=True):
        for reply, ours, theirs in zip(row.replies, got, cut, strict=True):
            length = len(renderer.token_ids(row.prompt + reply))
            if length > 160:
                assert isinstance(ours, Overlong)
                found["prompt" if ours.prompt else "conversation"] += 1
                assert ours.prompt or f"takes {length} tokens" in str(ours) or "characters" in str(ours)
            elif isinstance(ours, Rendered):
                found["whole"] += 1
                assert isinstance(theirs, Rendered)
                np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
                assert (ours.prompt_tokens, ours.num_typed) == (theirs.prompt_tokens, theirs.num_typed)
            else:
                assert str(ours) == str(theirs)
    assert min(found.values()) > 10, found


@pytest.mark.parametrize("bounded", [True, False])
def test_of_a_prompt_above_the_limit_at_most_one_reply_is_encoded(bounded, monkeypatch):
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=64))
    if not bounded:
        renderer.__dict__["most_characters"] = None
    encoded: list[str] = []
    own = renderer.encode_all
    monkeypatch.setattr(
        renderer, "encode_all", lambda conversations, texts: encoded.extend(texts) or own(conversations, texts)
    )
    monkeypatch.setattr(renderer, "render_cut", lambda *given, **named: 1 / 0)
    replies = tuple((Message("assistant", str(number)),) for number in range(50))
    rows = [
        Preference(id=prompt, source="s", prompt=(Message("user", prompt),), replies=replies, comparisons=())
        for prompt in ("word " * 2000, "How?")
    ]
    long, short = render_uncut(rows, renderer)
    assert all(isinstance(result, Overlong) and result.prompt for result in long)
    assert all(isinstance(result, Rendered) for result in short)
    assert len(encoded) == 50 + (not bounded)


def test_a_reply_of_too_many_characters_is_refused_without_being_encoded(monkeypatch) -> None:
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=60))
    most = renderer.most_characters
    assert most is not None
    prompt = (Message("user", "light water " * most),)
    replies = [Message("assistant", text) for text in ("soil " * most, "soil")]
    pair = Preference(
        id="a",
        source="s",
        prompt=prompt,
        replies=tuple((reply,) for reply in replies),
        comparisons=(Comparison(first=0, second=1),),
    )
    encoded: list[int] = []
    encode_all = Renderer.encode_all

    def counts(renderer, conversations, texts):
        encoded.extend(map(len, texts))
        return encode_all(renderer, conversations, texts)

    monkeypatch.setattr(Renderer, "encode_all", counts)
    ((long, short),) = render_replies([pair], renderer)
    assert isinstance(long, ReplyTooLong)
    assert "too many for the limit of 60 tokens" in str(long)
    assert isinstance(short, Rendered)
    assert short.truncated_tokens > 0, "its prompt is cut, whatever its length"
    assert max(encoded) < len(renderer.text((*prompt, replies[0]))), "the long reply was not among them"
    assert render_all([pair], renderer) == [LeftOut("reply_too_long", "a")]
