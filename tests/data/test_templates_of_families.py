"""The renderer on templates with every quirk that is known of six families of models, under every rule of truncation.

The templates are written for these tests. Each has what its family is known for: a system turn of its own, BOS in the
template, roles that must alternate, no system turn, a generation prompt that is not how a reply begins, a date that
is inserted, thoughts that are taken out of earlier turns, text behind the reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from common import make_tokenizer
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.spec import TRUNCATION_OF
from rewardlab.core.types import Comparison, Conversation, Message, Preference, TokenGroup
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import Overlong, Renderer, ReplyTooLong
from rewardlab.data.config import RenderingConfig
from rewardlab.data.cut_canaries import faults_of_cuts, make_cut_canaries
from rewardlab.data.store import LeftOut
from rewardlab.data.templates import build_renderer

LONG, RULES = 400, tuple(sorted(TRUNCATION_OF))


@dataclass(frozen=True)
class Family:
    """A template, and what its renderings are to be like."""

    template: str
    opening: str
    """What every rendering of a conversation without a system turn begins with."""
    before: str
    """What stands right before the content of the reply."""
    behind: str
    """What stands behind it."""
    num_bos: int = 0
    system: bool = True
    """Whether a system turn is taken."""
    trims: bool = False
    alternates: bool = False


QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nA helper of nobody else.<|im_end|>\n' }}"
    "{% endif %}{% for turn in messages %}"
    "{{ '<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier thoughts go, the last turn gets an empty one, and the generation prompt ends before it.
QWEN3 = (
    "{% set last = namespace(user=0) %}"
    "{% for turn in messages %}{% if turn['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for turn in messages %}{% set said = turn['content'] %}{% set thought = '' %}"
    "{% if turn['role'] == 'assistant' and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + turn['role'] + '\n' }}"
    "{% if turn['role'] == 'assistant' and loop.index0 > last.user %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Half of the tokenizer's BOS: `<|endoftext|>` stands in for it, and the date for that of today.
LLAMA3 = (
    "{{ bos_token }}{% set first = messages[0] %}"
    "{{ '[system]\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' }}"
    "{% if first['role'] == 'system' %}{{ first['content'] | trim }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ eos_token }}"
    "{% for turn in rest %}{{ '[' + turn['role'] + ']\n\n' + turn['content'] | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    "{% for turn in messages %}{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% set who = 'model' if turn['role'] == 'assistant' else turn['role'] %}"
    "{{ '{' + who + '\n' + turn['content'] | trim + '}' + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{model\n' }}{% endif %}"
)
# The system turn goes into the first user turn; spaces around the markers are part of the text.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{{ bos_token }}{% for turn in turns %}{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{% if turn['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + turn['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + turn['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
SMOLLM2 = (
    "{% for turn in messages %}{% if loop.first and turn['role'] != 'system' %}"
    "{{ '<|im_start|>system\nSmall, and here to help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_BEHIND = (
    "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ 'Was that of use?' + eos_token }}{% endif %}"
)
FAMILIES = {
    "qwen2.5": Family(
        QWEN25,
        opening="<|im_start|>system\nA helper of nobody else.<|im_end|>\n<|im_start|>user\n",
        before="<|im_start|>assistant\n",
        behind="<|im_end|>\n",
        num_bos=1,  # this tokenizer's BOS is the control token that opens a turn
    ),
    "qwen3": Family(
        QWEN3,
        opening="<|im_start|>user\n",
        before="<|im_start|>assistant\n<think>\n\n</think>\n\n",
        behind="<|im_end|>\n",
        num_bos=1,
    ),
    "llama3": Family(
        LLAMA3,
        opening="<|endoftext|>[system]\n\nToday: 26 Jul 2024\n\n<|im_end|>[user]\n\n",
        before="[assistant]\n\n",
        behind="<|im_end|>",
        num_bos=1,
        trims=True,
    ),
    "gemma": Family(
        GEMMA,
        opening="<|endoftext|>{user\n",
        before="{model\n",
        behind="}<|im_end|>\n",
        num_bos=1,
        system=False,
        trims=True,
        alternates=True,
    ),
    "mistral": Family(
        MISTRAL,
        opening="<|endoftext|>[INST] ",
        before="[/INST] ",
        behind="<|im_end|>",
        num_bos=1,
        trims=True,
        alternates=True,
    ),
    "smollm2": Family(
        SMOLLM2,
        opening="<|im_start|>system\nSmall, and here to help.<|im_end|>\n<|im_start|>user\n",
        before="<|im_start|>assistant\n",
        behind="<|im_end|>\n",
        num_bos=1,
    ),
    "text behind the reply": Family(
        TEXT_BEHIND, opening="user: ", before="assistant: ", behind="\nWas that of use?<|im_end|>"
    ),
}
OWN_BOS = ("llama3", "gemma", "mistral")
"""Families whose template writes a BOS that stands nowhere else."""


def renderer_of(name: str, *, limit: int = LONG, truncation: Any = "prompt-left", **config: Any) -> Renderer:
    tokenizer = make_tokenizer(FAMILIES[name].template, pad="<|unused|>")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.bos_token = "<|endoftext|>" if name in OWN_BOS else "<|im_start|>"
    return build_renderer(tokenizer, RenderingConfig(max_seq_len=limit, truncation=truncation, **config))


def talk(*contents: str, system: str | None = None) -> Conversation:
    turns = tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(contents))
    return ((Message("system", system),) if system is not None else ()) + turns


def row(prompt: Conversation, *replies: str) -> Preference:
    pairs = tuple(Comparison(first=0, second=other) for other in range(1, len(replies)))
    turns = tuple((Message("assistant", reply),) for reply in replies)
    return Preference(id="rows:1", source="s", prompt=prompt, replies=turns, comparisons=pairs)


def decoded(renderer: Renderer, token_ids: Any) -> str:
    return str(renderer.tokenizer.decode([int(token) for token in token_ids]))


PROMPTS = {
    "one turn": ("Is it light?",),
    "three turns": ("Is it light?", "Yes, it is.", "And then?"),
    "white space": ("  Is it\n\nlight?  ",),
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_spans_are_where_the_template_puts_them(name: str, prompt: str) -> None:
    renderer, family = renderer_of(name), FAMILIES[name]
    replies = ("Water is light.", "Water, no", "日本🙂", "<think>no</think>yes" if name != "qwen3" else "no")
    group = renderer.group(row(talk(*PROMPTS[prompt]), *replies))
    assert isinstance(group, TokenGroup)
    for number, reply in enumerate(replies):
        ids, boundary = group.conversation(number), group.prompt_tokens[number]
        assert decoded(renderer, ids[boundary:]) == reply + family.behind, "the content begins at the boundary"
        assert decoded(renderer, ids[:boundary]).endswith(family.before)
        assert decoded(renderer, ids).startswith(family.opening)
        assert decoded(renderer, ids) == renderer.text(talk(*PROMPTS[prompt], reply))
        assert ids[-1] == renderer.spec.final_token_id, "the score is read where every rendering ends"
    conversations = [group.conversation(n).tolist() for n in range(len(replies))]
    shared = next(n for n in range(min(map(len, conversations))) if len({ids[n] for ids in conversations}) > 1)
    assert len(group.shared) == shared, "the longest beginning that all have"
    assert min(group.prompt_tokens) <= len(group.shared) or name == "qwen3"


@pytest.mark.parametrize("name", FAMILIES)
def test_there_is_one_bos_if_the_template_writes_one(name: str) -> None:
    renderer, family = renderer_of(name), FAMILIES[name]
    assert renderer.spec.num_bos == family.num_bos
    ids = renderer.token_ids(talk("Why?", "So.", "And?", "No."))
    bos = renderer.tokenizer.bos_token_id
    assert (ids[0] == bos) == bool(family.num_bos)
    assert ids[1] != bos
    if name in OWN_BOS:
        assert (ids == bos).sum() == 1
        typed = renderer.token_ids(talk("Why?", "<|endoftext|> So."))
        assert (typed == bos).sum() == 1, "one that is typed stays letters"


def test_a_default_system_turn_goes_where_the_row_has_its_own() -> None:
    for name, default in (("qwen2.5", "A helper of nobody else."), ("smollm2", "Small, and here to help.")):
        renderer = renderer_of(name)
        assert default in renderer.text(talk("Why?", "So."))
        for own in ("Be brief.", ""):
            text = renderer.text(talk("Why?", "So.", system=own))
            assert text.startswith(f"<|im_start|>system\n{own}<|im_end|>\n<|im_start|>user\n")
            assert default not in text
        assert default not in renderer_of(name, system_prompt="Be kind.").text(talk("Why?", "So."))


def test_a_system_turn_is_merged_refused_or_written() -> None:
    text = renderer_of("mistral").text(talk("Why?", "So.", "And?", "No.", system="Be brief."))
    assert text == "<|endoftext|>[INST] Be brief.\n\nWhy? [/INST] So.<|im_end|>[INST] And? [/INST] No.<|im_end|>"
    group = renderer_of("mistral").group(row(talk("Why?", system="Be brief."), "So.", "No"))
    assert isinstance(group, TokenGroup)
    (found,) = render_all([row(talk("Why?", system="Be brief."), "So.", "No")], renderer_of("gemma"))
    assert isinstance(found, LeftOut)
    assert (found.cause, "no system turns here" in found.place) == ("template_refuses", True)
    assert "\n\nBe brief.<|im_end|>" in renderer_of("llama3").text(talk("Why?", "So.", system="Be brief."))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.alternates])
@pytest.mark.parametrize("truncation", RULES)
def test_roles_that_do_not_alternate_are_refused_by_every_rule(name: str, truncation: Any) -> None:
    renderer = renderer_of(name, truncation=truncation)
    twice = (*talk("Why?", "So."), Message("assistant", "And so."))
    (found,) = render_all([row(twice, "So.", "No")], renderer)
    assert isinstance(found, LeftOut)
    assert found.cause == "template_refuses"


def test_the_generation_prompt_need_not_be_how_a_reply_begins() -> None:
    renderer = renderer_of("qwen3")
    prompt = talk("Is it light?")
    start = renderer.text(prompt, add_generation_prompt=True)
    assert start.endswith("<|im_start|>assistant\n")
    rendered = renderer.render(prompt, (Message("assistant", "Yes."),))
    before = decoded(renderer, rendered.token_ids[: rendered.prompt_tokens])
    assert before == f"{start}<think>\n\n</think>\n\n", "what a reply gets beyond the generation prompt is no reply"


def test_thoughts_of_earlier_turns_are_stripped_and_those_of_the_reply_are_not() -> None:
    renderer = renderer_of("qwen3")
    thought = "<think>\nWhat now?\n</think>\n\nSo."
    text = renderer.text(talk("Why?", thought, "And?", thought))
    assert text.count("What now?") == 1
    assert text.endswith("<|im_start|>assistant\n<think>\nWhat now?\n</think>\n\nSo.<|im_end|>\n")
    assert "<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\nAnd?" in text
    group = renderer.group(row(talk("Why?"), thought, "So."))
    assert isinstance(group, TokenGroup)
    rest = [decoded(renderer, group.conversation(n)[group.prompt_tokens[n] :]) for n in range(2)]
    assert rest[0].endswith("What now?\n</think>\n\nSo.<|im_end|>\n"), "its own thought is part of it"
    assert rest[1] == "So.<|im_end|>\n"


@pytest.mark.parametrize(
    ("written", "date"),
    [
        ("'%B %d, %Y'", "July 26, 2024"),  # Granite
        ('"%Y-%m-%d"', "2024-07-26"),  # GPT-OSS, Mistral
        ("'%d %B %Y'", "26 July 2024"),  # SmolLM3
        ("'%A, %-d %b %H:%M '", "Friday, 26 Jul 00:00 "),
        ("'%c'", "2024-07-26"),
        ("['%Y'][0]", "2024-07-26"),
    ],
)
def test_a_date_has_the_format_that_the_template_asks_for(written: str, date: str) -> None:
    tokenizer = make_tokenizer(f"{{{{ '{{' + strftime_now({written}) + '}}' }}}}{SMOLLM2}")
    text = build_renderer(tokenizer, RenderingConfig(max_seq_len=LONG)).text(talk("Why?", "So."))
    assert text.startswith(f"{{{date}}}<|im_start|>")


def test_a_date_that_is_inserted_is_the_same_on_every_day() -> None:
    renderer = renderer_of("llama3")
    assert "Today: 26 Jul 2024\n" in renderer.text(talk("Why?", "So."))
    assert "strftime_now" in renderer.spec.chat_template


REPLY = " ".join(f"w{number}" for number in range(60))
ASKED = " ".join(f"q{number}" for number in range(60))


@pytest.mark.parametrize("truncation", RULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rule_keeps_what_the_template_writes(name: str, truncation: Any) -> None:
    family = FAMILIES[name]
    whole = renderer_of(name)
    prompt, cut_reply = talk("Old?", "Yes.", ASKED), truncation == "reply-middle"
    reply = REPLY if cut_reply else "So."
    last = (Message("assistant", reply),)
    limit = len(whole.token_ids(prompt + last)) - 40 if cut_reply else len(whole.token_ids(prompt[2:] + last)) - 20
    renderer = whole.by(max_length=limit, truncation=TRUNCATION_OF[truncation])
    if truncation in ("drop", "error"):
        with pytest.raises(Overlong):
            renderer.render(prompt, last)
        renderer = renderer.that_cuts
    rendered = renderer.render(prompt, last)
    text = decoded(renderer, rendered.token_ids)
    content = decoded(renderer, rendered.token_ids[rendered.prompt_tokens :])
    assert len(rendered.token_ids) <= limit
    assert rendered.token_ids[-1] == renderer.spec.final_token_id
    assert text.startswith(family.opening)
    assert content.endswith(family.behind)
    assert decoded(renderer, rendered.token_ids[: rendered.prompt_tokens]).endswith(family.before)
    if renderer.tokenizer.bos_token_id is not None and name in OWN_BOS:
        assert (rendered.token_ids == renderer.tokenizer.bos_token_id).sum() == 1
    if cut_reply:
        assert (rendered.truncated_tokens, rendered.truncated_reply_tokens >= 40) == (0, True)
        assert text.startswith(whole.text(prompt, add_generation_prompt=True)), "the prompt stays whole"
        assert content.startswith("w0 w1 w2")
        assert content.removesuffix(family.behind).endswith("w58 w59")
    else:
        assert (rendered.truncated_tokens >= 20, rendered.truncated_reply_tokens) == (True, 0)
        assert "Old?" not in text
        assert "q59" in text
        assert "q0 " not in text
        assert content == reply + family.behind


@pytest.mark.parametrize("truncation", RULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_and_many_render_alike_and_siblings_share_what_they_can(name: str, truncation: Any) -> None:
    renderer = renderer_of(name, limit=150, truncation=truncation)
    rows = [
        row(talk(ASKED), "So.", "No."),
        row(talk("Why?"), REPLY, "No."),
        row(talk("Why?"), "So.", "No."),
        row(talk("Old?", "Yes.", "Why?"), REPLY + REPLY, "So.", "No."),
    ]
    if truncation == "error":
        with pytest.raises(DataError, match="rows:1: a conversation takes"):
            render_all(rows, renderer)
        rows = rows[2:3]
    found = render_all(rows, renderer)
    for one, outcome in zip(rows, found, strict=True):
        alone = renderer.group(one)
        if isinstance(alone, str) or isinstance(outcome, LeftOut):
            assert outcome == LeftOut(str(alone), one.id)
            continue
        assert outcome.prompt_tokens == alone.prompt_tokens
        assert outcome.truncated_reply_tokens == alone.truncated_reply_tokens
        for number in range(alone.num_replies):
            assert np.array_equal(outcome.conversation(number), alone.conversation(number))
    assert any(isinstance(outcome, TokenGroup) for outcome in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_can_prove_its_rule_for_every_family(name: str) -> None:
    for truncation in RULES:
        renderer = renderer_of(name, truncation=truncation)
        canaries = make_cut_canaries(renderer)
        assert [canary.name for canary in canaries] == ["cut"]
        assert list(faults_of_cuts(renderer, canaries)) == []


def test_a_reply_that_does_not_fit_has_a_cause_by_every_rule() -> None:
    for truncation, kind in (("prompt-left", ReplyTooLong), ("reply-middle", ReplyTooLong), ("drop", Overlong)):
        renderer = renderer_of("mistral", limit=40, truncation=truncation)
        prompt = talk(ASKED) if truncation == "reply-middle" else talk("Why?")
        with pytest.raises(kind):
            renderer.render(prompt, (Message("assistant", REPLY),))


def test_a_template_that_takes_thoughts_out_of_replies_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for name in FAMILIES:
        renderer_of(name)
    assert not caplog.messages
    taken_out = SMOLLM2.replace("turn['content']", "turn['content'].split('</think>')[-1]")
    build_renderer(make_tokenizer(taken_out), RenderingConfig(max_seq_len=LONG))
    (told,) = caplog.messages
    assert "between <think> and </think>" in told
    assert "--no-chat-template" in told


WITHOUT_SYSTEM = SMOLLM2.replace("turn['content']", "(turn['content'] if turn['role'] != 'system' else '')")


def test_a_tokenizer_that_splits_the_marks_of_the_template_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(SMOLLM2)
    build_renderer(tokenizer, RenderingConfig(max_seq_len=LONG))
    assert not caplog.messages
    tokenizer.split_special_tokens = True
    build_renderer(tokenizer, RenderingConfig(max_seq_len=LONG))
    (told,) = caplog.messages
    assert "split_special_tokens, so the control tokens that the template writes are read as the letters" in told


def test_a_template_that_leaves_system_turns_out_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(WITHOUT_SYSTEM)
    build_renderer(tokenizer, RenderingConfig(max_seq_len=LONG))
    (told,) = caplog.messages
    assert "system turns are left out by the chat template" in told
    with pytest.raises(RenderError, match="--system-prompt: the chat template leaves system turns out"):
        build_renderer(make_tokenizer(WITHOUT_SYSTEM), RenderingConfig(max_seq_len=LONG, system_prompt="Be kind."))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "{% for part in turn['content'] %}{{ part['text'] }}{% endfor %}",
            "writes nothing of a prompt. It may be one",
        ),
        ("{% if turn['role'] == 'user' %}{{ turn['content'] }}{% endif %}", "writes nothing of a reply"),
        ("{{ turn['words'] + '.' }}", "refuses a conversation with roles"),
    ],
)
def test_a_template_that_cannot_be_used_says_what_to_do(written: str, said: str) -> None:
    template = f"{{% for turn in messages %}}{{{{ '<|im_start|>' }}}}{written}{{% endfor %}}"
    with pytest.raises(RenderError, match=f"{said}.*\\. Use another template .--chat-template FILE., or --no-chat-"):
        build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=LONG))
