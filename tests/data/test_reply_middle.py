"""Laws of `--truncation`: the middle of a reply goes by the fewest tokens that suffice; what may not be cut is left out
or ends the run; and every path renders by the same rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import CHATML, make_tokenizer, pair
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.spec import CUT_FEWEST, CUT_MIDDLE, LEAVE_OUT, REFUSING, STOP, TRUNCATION_OF
from rewardlab.core.types import Comparison, Conversation, IntArray, Message, Preference, TokenGroup
from rewardlab.data.bulk import render_all, render_replies, render_uncut
from rewardlab.data.chat import Overlong, PromptTooLong, Renderer, ReplyTooLong
from rewardlab.data.config import RenderingConfig
from rewardlab.data.cut_canaries import faults_of_cuts, make_cut_canaries
from rewardlab.data.layout import Rendered
from rewardlab.data.store import LeftOut
from rewardlab.data.templates import build_renderer
from rewardlab.data.token_report import tokenize

TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
TEMPLATES = {"chatml": CHATML, "trims": TRIMS, "plain": None}
RENDERERS = {
    name: build_renderer(make_tokenizer(template), RenderingConfig(truncation="reply-middle"))
    for name, template in TEMPLATES.items()
}

words = st.lists(
    st.sampled_from(["basil", "water ", "é", "日本🙂", "\n", "  ", "", "12", "x", "<|im_end|>", "<|im_", "end|>"]),
    max_size=14,
).map("".join)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), max_size=4)


def talk(drawn: list[tuple[str, str]], reply: str) -> tuple[Conversation, Conversation]:
    return tuple(Message(role, text) for role, text in drawn), (Message("assistant", reply),)


def slow_cut(renderer: Renderer, prompt: Conversation, reply: str) -> tuple[str, IntArray] | None:
    """Every cut from the smallest to the largest, each encoded."""
    starts = sorted(set(renderer._token_starts(reply)))
    for number in range(1, len(starts) - 1):
        before = -(-(len(starts) - number) // 2)
        kept = reply[: starts[before]] + reply[starts[before + number] :]
        token_ids = renderer.token_ids((*prompt, Message("assistant", kept)))
        if len(token_ids) <= renderer.spec.max_length:
            return kept, token_ids
    return None


@pytest.mark.slow
@pytest.mark.parametrize("template", sorted(TEMPLATES))
@given(drawn=turns, reply=words.map(lambda text: text * 3), limit=st.integers(30, 90))
@example(drawn=[("user", "why?")], reply="water basil " * 30, limit=40)
@settings(max_examples=50, deadline=None)
def test_the_fewest_tokens_go_from_the_middle_of_the_reply(
    template: str, drawn: list[tuple[str, str]], reply: str, limit: int
) -> None:
    renderer = RENDERERS[template].by(max_length=limit)
    prompt, last = talk(drawn, reply)
    try:
        whole = renderer.token_ids(prompt + last)
        wanted = slow_cut(renderer, prompt, reply) if len(whole) > limit else None
    except RenderError:
        return
    if len(whole) <= limit:
        assert np.array_equal(renderer.render(prompt, last).token_ids, whole)
        return
    if wanted is None:
        with pytest.raises(PromptTooLong, match="leaves no room for a beginning and an end"):
            renderer.render(prompt, last)
        return
    rendered = renderer.render(prompt, last)
    kept, token_ids = wanted
    assert np.array_equal(rendered.token_ids, token_ids)
    assert len(token_ids) <= limit
    assert (rendered.truncated_tokens, rendered.truncated_reply_tokens) == (0, len(whole) - len(token_ids))
    assert rendered.full_length == len(whole)
    assert kept[0] == reply[0]
    assert kept[-1] == reply[-1]
    assert rendered.token_ids[-1] == whole[-1], "the score is read where it would be read"


@pytest.mark.slow
@given(drawn=turns, reply=words.map(lambda text: text * 3), limit=st.integers(30, 90), ends=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_what_is_cut_depends_on_the_conversation_alone(
    drawn: list[tuple[str, str]], reply: str, limit: int, ends: int
) -> None:
    renderer = RENDERERS["chatml"].by(max_length=limit)
    prompt, last = talk(drawn, reply)
    conversation = prompt + last
    place = min(ends, len(conversation) - 1)
    one, other = (outcome(renderer, conversation[:n], conversation[n:]) for n in (len(prompt), place))
    assert one == other


def outcome(renderer: Renderer, prompt: Conversation, reply: Conversation) -> tuple[Any, ...]:
    try:
        rendered = renderer.render(prompt, reply)
    except RenderError as error:
        return type(error).__name__, str(error)
    return rendered.token_ids.tolist(), rendered.truncated_tokens, rendered.truncated_reply_tokens


def test_prompt_headers_and_both_ends_of_the_reply_stay() -> None:
    renderer = RENDERERS["chatml"].by(max_length=100)
    prompt = (Message("system", "Be brief."), Message("user", "Count."))
    reply = " ".join(f"w{number}" for number in range(200))
    rendered = renderer.render(prompt, (Message("assistant", reply),))
    text = renderer.tokenizer.decode(rendered.token_ids.tolist())
    before = renderer.text(prompt) + "<|im_start|>assistant\n"
    assert text.startswith(before + "w0 w1 w2 ")
    assert text.endswith(" w198 w199<|im_end|>\n")
    assert len(rendered.token_ids) == 100
    assert renderer.tokenizer.decode(rendered.token_ids[: rendered.prompt_tokens].tolist()) == before
    left, right = text.removeprefix(before).removesuffix("<|im_end|>\n"), reply
    assert any(left == right[:n] + right[-(len(left) - n) :] for n in range(1, len(left)))


def test_of_a_reply_of_several_turns_the_last_one_loses_its_middle() -> None:
    renderer = RENDERERS["chatml"].by(max_length=110)
    reply = (Message("assistant", "first " * 4), Message("user", "and?"), Message("assistant", "second " * 30))
    rendered = renderer.render((Message("user", "why?"),), reply)
    text = renderer.tokenizer.decode(rendered.token_ids.tolist())
    assert "first " * 4 in text
    assert 0 < text.count("second") < 30
    assert renderer.tokenizer.decode(rendered.token_ids[rendered.prompt_tokens :].tolist()).startswith("first")


def test_too_many_prompts_that_leave_no_room_name_the_rule_that_cuts_prompts() -> None:
    renderer = RENDERERS["chatml"].by(max_length=90)
    with pytest.raises(DataError, match="cut prompts instead of replies with --truncation prompt-left"):
        tokenize([pair("why? " * 60, "yes", "no", id="long prompt")], renderer, max_drop_fraction=0.0, name="t")


def test_siblings_keep_their_whole_prompt_and_what_was_cut_is_counted() -> None:
    renderer = RENDERERS["chatml"].by(max_length=90)
    rows = [
        pair("why so?", "because " * 30, "yes", id="long reply"),
        pair("why? " * 60, "yes", "no", id="long prompt"),
        pair("why?", "yes", "no", id="short"),
    ]
    groups, report = tokenize(rows, renderer, max_drop_fraction=0.5, name="t")
    assert [group.preference_id for group in groups] == ["long reply", "short"]
    assert dict(report.dropped) == {"prompt_too_long": 1}
    assert report.dropped_ids["prompt_too_long"] == ("long prompt",)
    assert (report.truncated_replies, report.shortened_replies, report.prompts_differ_after_cut) == (0, 1, 0)
    whole = renderer.token_ids(rows[0].prompt + rows[0].replies[0])
    assert groups[0].truncated_reply_tokens == (len(whole) - 90, 0)
    assert groups[0].truncated_tokens == (0, 0)
    assert len(groups[0].shared) >= groups[0].prompt_tokens[0] > 0
    assert len(groups[0].suffixes[0]) + len(groups[0].shared) == 90


def test_replies_without_room_leave_their_siblings() -> None:
    renderer = RENDERERS["chatml"]
    three = Preference(
        id="k",
        source="t",
        prompt=(Message("user", "why so? " * 4),),
        replies=tuple((Message("assistant", text),) for text in ("yes", "no", "🙂" * 60)),
        comparisons=(Comparison(first=0, second=1), Comparison(first=2, second=0)),
    )
    shortest = len(renderer.token_ids(three.prompt + three.replies[0]))
    for limit, kept in ((shortest, 2), (shortest + 20, 3)):
        group = renderer.by(max_length=limit).group(three)
        assert isinstance(group, TokenGroup)
        assert group.num_replies == kept
    assert renderer.by(max_length=shortest - 1).group(three) == "prompt_too_long"


LONG = pair("why? " * 60, "yes", "no", id="rows.jsonl:7")


def test_drop_leaves_a_row_out_and_error_names_it() -> None:
    cutting = RENDERERS["chatml"].by(max_length=90, truncation=CUT_FEWEST)
    rows = [pair("why?", "yes", "no", id="rows.jsonl:6"), LONG]
    num_tokens = len(cutting.token_ids(LONG.prompt + LONG.replies[0]))
    assert [type(found) for found in render_all(rows, cutting)] == [TokenGroup, TokenGroup]
    dropping = cutting.by(truncation=LEAVE_OUT)
    assert render_all(rows, dropping)[1] == LeftOut("overlong", "rows.jsonl:7")
    assert dropping.group(LONG) == "overlong"
    stopping = cutting.by(truncation=STOP)
    assert isinstance(render_all(rows[:1], stopping)[0], TokenGroup)
    for render in (lambda: render_all(rows, stopping), lambda: stopping.group(LONG)):
        with pytest.raises(
            DataError, match=rf"rows.jsonl:7: a conversation takes {num_tokens} tokens, above the limit of 90 \(--trunc"
        ):
            render()


def test_a_refusal_of_the_template_comes_before_the_length() -> None:
    template = "{% if messages | length > 2 %}{{ raise_exception('two turns') }}{% endif %}" + CHATML
    renderer = build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=60, truncation="drop"))
    row = Preference(
        id="r",
        source="t",
        prompt=(Message("user", "q"),),
        replies=(
            (Message("assistant", "no " * 90),),
            (Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")),
        ),
        comparisons=(Comparison(first=0, second=1),),
    )
    (found,) = render_all([row], renderer)
    assert isinstance(found, LeftOut)
    assert found.cause == "template_refuses"
    with pytest.raises(RenderError, match="two turns"):
        renderer.group(row)


@pytest.mark.parametrize("truncation", sorted(TRUNCATION_OF))
def test_whoever_asks_for_a_cut_gets_one_and_whoever_does_not_may_be_refused(truncation: Any) -> None:
    config = RenderingConfig(max_seq_len=90, truncation=truncation)
    renderer = build_renderer(make_tokenizer(CHATML), config)
    renderer.pad_token_id = 5
    assert renderer.spec.truncation == TRUNCATION_OF[truncation]
    assert renderer.refuses == (renderer.spec.truncation in REFUSING)
    asked = renderer.that_cuts
    assert asked.pad_token_id == 5
    assert asked.spec.truncation == (CUT_MIDDLE if truncation == "reply-middle" else CUT_FEWEST)
    long_reply = pair("why?", "because " * 30, "yes")
    for row in (LONG, long_reply):
        ((found, _),) = render_replies([row], renderer)
        ((cut, _),) = render_replies([row], asked)
        ((refused, _),) = render_uncut([row], renderer)
        assert isinstance(refused, Overlong)
        if renderer.refuses:
            assert isinstance(found, Overlong)
            with pytest.raises(Overlong, match=r"takes \d+ tokens, above the model's limit of 90"):
                renderer.render(row.prompt, row.replies[0])
        elif isinstance(found, Rendered):
            assert isinstance(cut, Rendered)
            assert np.array_equal(found.token_ids, cut.token_ids)
        fits = (row is long_reply) == (truncation == "reply-middle")
        assert isinstance(cut, Rendered if fits else ReplyTooLong)


@pytest.mark.parametrize("truncation", sorted(TRUNCATION_OF))
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_conversation_that_is_cut_proves_the_rule_of_a_folder(truncation: Any, template: str) -> None:
    renderer = build_renderer(make_tokenizer(TEMPLATES[template]), RenderingConfig(truncation=truncation))
    (canary,) = canaries = make_cut_canaries(renderer)
    assert len(canary.token_ids) <= canary.max_length
    assert list(faults_of_cuts(renderer, canaries)) == []
    other = renderer.by(truncation=CUT_FEWEST if truncation == "reply-middle" else CUT_MIDDLE)
    (fault,) = faults_of_cuts(other, canaries)
    assert "'cut'" in fault
