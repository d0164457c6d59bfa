"""Turns that a template leaves out: what a tool answered, system turns in between, and earlier turns are not lost
silently."""

from __future__ import annotations

from typing import Any

import pytest

from common import CHATML, make_tokenizer
from rewardlab.core.errors import RenderError
from rewardlab.core.types import Comparison, Message, Preference, TokenGroup
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.store import LeftOut
from rewardlab.data.templates import build_renderer
from rewardlab.data.written import MOST_KEPT, WrittenTurns

# As those of Phi-4, OLMo 2, Falcon 3 and Yi.
PASSING_OVER = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') or loop.first %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
)
LAST_QUESTION = "{{ messages[-2]['content'] + '\n' + messages[-1]['content'] + '<|im_end|>' }}"
NOT_THE_FIRST = (
    "{% for m in messages %}{% if not (loop.first and m['role'] == 'assistant') %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
RENAMING = CHATML.replace("message['content']", "message['content'] | upper")


def build(template: str = PASSING_OVER, **config: Any) -> Renderer:
    return build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=256, **config))


def talk(*roles: str) -> tuple[Message, ...]:
    return tuple(Message(role, f"{role} says {number}") for number, role in enumerate(roles))


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        (("user", "assistant", "tool"), r"turn 3 \(tool\)"),
        (("system", "user", "tool", "tool"), r"turn 3 \(tool\)"),
        (("user", "system"), r"turn 2 \(system\)"),
        (("system", "system", "user"), r"turn 2 \(system\)"),
    ],
)
@pytest.mark.parametrize("reading", ["text", "keep"])
def test_a_turn_that_is_left_out_is_named(roles: tuple[str, ...], named: str, reading: str) -> None:
    renderer, prompt = build(special_tokens_in_text=reading), talk(*roles)
    with pytest.raises(RenderError, match=f"leaves out {named}, so no score would depend on it"):
        renderer.render(prompt, (Message("assistant", "Yes."),))
    replies = tuple((Message("assistant", said),) for said in ("Yes.", "No."))
    row = Preference(
        id="rows:1", source="s", prompt=prompt, replies=replies, comparisons=(Comparison(first=0, second=1),)
    )
    (found,) = render_all([row], renderer)
    assert isinstance(found, LeftOut)
    assert (found.cause, found.place.startswith("rows:1: the chat template leaves out turn")) == (
        "template_refuses",
        True,
    )
    for template in (CHATML, RENAMING):
        assert isinstance(render_all([row], build(template))[0], TokenGroup), "it writes every turn"


def test_what_is_left_out_of_turns_that_are_written_is_the_templates_own_choice() -> None:
    renderer = build()
    thought = Message("assistant", "<think>So?</think>Yes.")
    for prompt in (talk("user"), talk("system", "user"), (*talk("user"), thought, *talk("user"))):
        assert renderer.render(prompt, (thought,)).token_ids.size


def test_no_more_is_rendered_for_a_question_and_its_reply_and_once_for_other_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = build()
    renderer.render(talk("system", "user", "assistant", "user"), talk("assistant"))
    monkeypatch.setattr(renderer.written, "_template", None)
    renderer.render(talk("system", "user", "assistant", "user"), talk("assistant"))
    renderer.render(talk("user"), talk("assistant"))


@pytest.mark.parametrize(
    ("template", "prompt", "named"),
    [
        (LAST_QUESTION, ("user", "assistant", "user"), r"turn 1 \(user\)"),
        (LAST_QUESTION, ("user", "user"), r"turn 1 \(user\)"),
        (LAST_QUESTION, ("user", "assistant"), r"turn 1 \(user\)"),
        (NOT_THE_FIRST, ("assistant", "user"), r"turn 1 \(assistant\)"),
    ],
)
def test_an_earlier_turn_of_a_user_or_the_assistant_is_not_lost(
    template: str, prompt: tuple[str, ...], named: str
) -> None:
    reply = (Message("assistant", "Yes."),)
    with pytest.raises(RenderError, match=f"leaves out {named}, so no score would depend on it"):
        build(template).render(talk(*prompt), reply)
    assert len(build(template).render(talk("user"), reply).token_ids)
    assert len(build(CHATML).render(talk(*prompt), reply).token_ids), "it writes every turn"


def test_ever_new_orders_of_roles_take_no_more_memory_and_get_the_answers_of_before() -> None:
    asked = 0

    def template(conversation: tuple[Message, ...]) -> str:
        nonlocal asked
        asked += 1
        return "".join(turn.content for turn in conversation if turn.role != "system")

    written = WrittenTurns(template)
    for turns in range(1, MOST_KEPT + 10):
        written.require((*[Message("user", "")] * (turns % 64), Message("tool", ""), *talk(*["user"] * (turns // 64))))
    assert asked == MOST_KEPT + 9
    assert len(written._left_out) <= MOST_KEPT
    for _ in range(2):
        with pytest.raises(RenderError, match=r"leaves out turn 2 \(system\)"):
            written.require(talk("user", "system"))
        written.require(talk("user", "tool"))
