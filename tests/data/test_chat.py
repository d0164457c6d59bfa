"""The renderer: one path from messages to tokens, one BOS, a known end, truncation by conversation alone."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import CHATML, make_tokenizer, pair
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.data.chat import ReplyTooLong, load_tokenizer, to_messages
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import PLAIN_TEMPLATE, build_renderer
from rewardlab.data.token_report import tokenize

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '[' + m['role'] + ']\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<' + m['role'] + '>\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML


def renderer_for(template, max_length=128, **settings):
    return build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=max_length, **settings))


def decoded(renderer, token_ids):
    return renderer.tokenizer.decode([int(token) for token in token_ids])


@pytest.mark.parametrize(
    "template", [CHATML, THINKING, LLAMA3, GEMMA, None], ids=["chatml", "thinking", "llama3", "gemma", "plain"]
)
def test_shared_and_suffix_are_exactly_the_rendered_conversation(template):
    renderer = renderer_for(template)
    preference = pair("How do I keep basil alive?", "Water it. Yes.", "Water no")
    group = renderer.group(preference)
    for reply in range(2):
        whole = renderer.token_ids(preference.prompt + preference.replies[reply])
        assert np.array_equal(group.conversation(reply), whole)
        assert len(group.suffixes[reply]) >= 1
    assert group.shared.tolist() == group.conversation(1)[: len(group.shared)].tolist()
    first, second = group.conversation(0), group.conversation(1)
    assert first[len(group.shared)] != second[len(group.shared)], "the shared part is the longest there is"


@pytest.mark.parametrize(
    "template", [CHATML, THINKING, LLAMA3, GEMMA, None], ids=["chatml", "thinking", "llama3", "gemma", "plain"]
)
def test_the_prompt_boundary_lies_where_the_reply_begins_whatever_the_template_writes_before_it(template):
    renderer = renderer_for(template)
    group = renderer.group(pair("What is the capital?", "Paris is.", "Paris, no"))
    for reply, content in enumerate(("Paris is.", "Paris, no")):
        rest = decoded(renderer, group.conversation(reply)[group.prompt_tokens[reply] :])
        assert rest.strip().startswith(content)
        before = decoded(renderer, group.conversation(reply)[: group.prompt_tokens[reply]])
        assert "capital" in before
        assert "Paris" not in before
    assert len(group.shared) > group.prompt_tokens[0], "`Paris` is shared layout, but part of the reply"


def test_the_boundary_works_for_replies_that_begin_like_the_probe():
    renderer = renderer_for(CHATML)
    for content in ("@home", "#1", " @", "@"):
        group = renderer.group(pair("q", content, "zz"))
        assert decoded(renderer, group.conversation(0)[group.prompt_tokens[0] :]).startswith(content)


def test_every_rendering_has_the_bos_that_the_template_writes_and_no_other():
    for template, expected in ((LLAMA3, 1), (GEMMA, 1), ("{% for m in messages %}{{ m['content'] }}{% endfor %}", 0)):
        renderer = renderer_for(template)
        token_ids = renderer.token_ids((Message("user", "Hello"), Message("assistant", "yes")))
        assert (token_ids == renderer.tokenizer.bos_token_id).sum() == expected == renderer.spec.num_bos


def test_a_template_with_two_bos_is_refused():
    with pytest.raises(RenderError, match="writes 2 BOS"):
        renderer_for("{{ bos_token }}" + LLAMA3)
    with_system = "{% if messages[0]['role'] == 'system' %}{{ bos_token }}{% endif %}"
    with pytest.raises(RenderError, match="writes 2 BOS"):
        renderer_for(with_system + LLAMA3)


def test_a_template_that_draws_at_random_is_refused():
    drawing = CHATML.replace("message['content']", "message['content'] + range(1000) | random | string")
    with pytest.raises(RenderError, match="another text each time it is used .*--chat-template FILE"):
        renderer_for(drawing)


def test_the_final_token_is_known_or_said_to_be_unknown():
    assert decoded(renderer_for(CHATML), [renderer_for(CHATML).spec.final_token_id]) == "\n"
    assert renderer_for(LLAMA3).spec.final_token_id == renderer_for(LLAMA3).tokenizer.eos_token_id
    assert renderer_for("{% for m in messages %}{{ m['content'] }}{% endfor %}").spec.final_token_id is None


def test_a_model_without_a_template_gets_a_plain_transcript_that_ends_in_eos():
    renderer = renderer_for(None)
    assert renderer.spec.template_source == "plain"
    assert PLAIN_TEMPLATE in renderer.spec.chat_template
    messages = (
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yes"),
        Message("user", "Why?"),
        Message("assistant", "So."),
    )
    assert (
        renderer.text(messages) == "Be brief.\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: Why?\n\nAssistant: So.<|im_end|>"
    )
    assert renderer.spec.final_token_id == renderer.tokenizer.eos_token_id
    with pytest.raises(RenderError, match="no chat template. Use --no-chat-template"):
        renderer_for(None, chat_template="template")


def test_a_plain_transcript_can_be_asked_for():
    assert renderer_for(CHATML, chat_template="plain").spec.template_source == "plain"


def test_templates_that_print_the_date_print_the_same_one_for_ever():
    renderer = renderer_for(DATED)
    assert renderer.text((Message("user", "Hello"),)).startswith("26 Jul 2024<|im_start|>")


def test_an_explicit_empty_system_turn_survives_and_a_system_prompt_fills_only_where_there_is_none():
    empty = (Message("system", ""), Message("user", "Hi"), Message("assistant", "Yes"))
    bare = empty[1:]
    renderer = renderer_for(CHATML)
    assert renderer.text(empty).startswith("<|im_start|>system\n<|im_end|>")
    assert not renderer.text(bare).startswith("<|im_start|>system")
    with_prompt = renderer_for(CHATML, system_prompt="Be brief.")
    assert "Be brief." in with_prompt.text(bare)
    assert "Be brief." not in with_prompt.text(empty)
    assert renderer_for(CHATML, system_prompt="").text(bare) == renderer.text(empty)


def test_a_template_that_refuses_a_role_says_so_with_the_row():
    with pytest.raises(RenderError, match=r"row: the chat template refuses .*system.*System role not supported"):
        renderer_for(GEMMA).group(pair("q", "yes", "no", system="Be brief."))


LONG = tuple(
    message
    for number in range(4)
    for message in (Message("user", f"question {number} " + "basil " * 5), Message("assistant", f"answer {number}"))
)


def test_truncation_drops_whole_old_turns_first_and_keeps_system_turn_and_reply():
    renderer = renderer_for(CHATML, max_length=110)
    prompt = (Message("system", "Be brief."), *LONG, Message("user", "last question"))
    rendered = renderer.render(prompt, (Message("assistant", "The reply."),))
    text = decoded(renderer, rendered.token_ids)
    assert len(rendered.token_ids) <= 110
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert text.endswith("<|im_start|>user\nlast question<|im_end|>\n<|im_start|>assistant\nThe reply.<|im_end|>\n")
    assert "question 0" not in text
    kept = [number for number in range(4) if f"question {number}" in text]
    assert kept == list(range(kept[0], 4)), "what is kept is the most recent"
    whole = renderer.token_ids((*prompt, Message("assistant", "The reply.")))
    assert rendered.truncated_tokens == len(whole) - len(rendered.token_ids) > 0
    assert text.count("question") * 2 == text.count("question") + text.count("answer") + 1, "no exchange is torn apart"


def test_the_oldest_turn_left_loses_its_beginning():
    renderer = renderer_for(CHATML, max_length=60)
    content = " ".join(f"w{number}" for number in range(60))
    rendered = renderer.render((Message("user", content),), (Message("assistant", "yes"),))
    text = decoded(renderer, rendered.token_ids)
    assert len(rendered.token_ids) <= 60
    assert "w59<|im_end|>" in text
    assert "w0 " not in text
    assert text.endswith("<|im_start|>assistant\nyes<|im_end|>\n")


def test_a_reply_too_long_by_itself_is_an_error_and_never_cut():
    renderer = renderer_for(CHATML, max_length=40)
    with pytest.raises(ReplyTooLong, match="above the limit of 40"):
        renderer.render((Message("user", "q"),), (Message("assistant", "no " * 60),))


def test_truncation_is_a_function_of_the_conversation_alone_and_siblings_may_then_differ():
    renderer = renderer_for(CHATML, max_length=80)
    prompt = (*LONG, Message("user", "so?"))
    short, long = Message("assistant", "yes"), Message("assistant", "certainly " * 14)
    preference = Preference(
        id="row", source="t", prompt=prompt, replies=((short,), (long,)), comparisons=(Comparison(first=0, second=1),)
    )
    group = renderer.group(preference)
    for reply, message in enumerate((short, long)):
        alone = renderer.render(prompt, (message,))
        assert np.array_equal(group.conversation(reply), alone.token_ids)
        assert group.truncated_tokens[reply] == alone.truncated_tokens
    assert group.truncated_tokens[0] != group.truncated_tokens[1]
    _, report = tokenize([preference], renderer, max_drop_fraction=0.0, name="t")
    assert (report.prompts_differ_after_cut, report.truncated_replies) == (1, 2)


words = st.lists(st.sampled_from(["basil", "water", "é", "日本", "\n", "  ", "<|im_start|>", "x"]), max_size=12).map(
    " ".join
)


@pytest.mark.slow
@given(turns=st.lists(words, min_size=1, max_size=7), reply=words, limit=st.integers(24, 90))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_conversation_fits_its_limit_or_is_refused(turns, reply, limit):
    renderer = renderer_for(CHATML, max_length=limit, special_tokens_in_text="keep")
    prompt = tuple(Message("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(turns))
    try:
        rendered = renderer.render(prompt, (Message("assistant", reply),))
    except ReplyTooLong:
        return
    assert len(rendered.token_ids) <= limit
    assert rendered.prompt_tokens <= len(rendered.token_ids)
    tail = renderer.tokenizer(f"<|im_start|>assistant\n{reply}<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert rendered.token_ids[-len(tail) :].tolist() == tail


def test_a_conversation_is_cut_alike_wherever_its_prompt_ends():
    renderer = renderer_for(CHATML, max_length=90)
    conversation = (*LONG, Message("user", "so?"), Message("assistant", "yes, certainly"))
    cuts = [renderer.render(conversation[:n], conversation[n:]) for n in range(1, len(conversation), 2)]
    assert all(np.array_equal(cut.token_ids, cuts[-1].token_ids) for cut in cuts)
    assert cuts[-1].truncated_tokens > 0
    assert cuts[0].prompt_tokens <= cuts[-1].prompt_tokens


def test_a_system_turn_inside_a_conversation_stays_in_its_place():
    renderer = renderer_for(CHATML, max_length=60)
    prompt = (Message("system", "first"), *LONG[:4], Message("system", "later"), Message("user", "so?"))
    text = decoded(renderer, renderer.render(prompt, (Message("assistant", "yes"),)).token_ids)
    assert text.startswith("<|im_start|>system\nfirst<|im_end|>")
    assert text.index("so?") > 0
    assert "later" not in text or text.index("later") > text.index("answer 1")


def test_a_conversation_of_a_reply_alone_gets_no_invented_turn():
    renderer = renderer_for(CHATML, max_length=40)
    with pytest.raises(ReplyTooLong):
        renderer.render((), (Message("assistant", "no " * 60),))
    assert "user" not in decoded(renderer, renderer.render((), (Message("assistant", "no"),)).token_ids)


def test_rows_that_the_template_refuses_are_counted_with_its_words():
    renderer = renderer_for(GEMMA)
    rows = [pair("q", "yes", "no", id="a"), pair("q", "yes", "no", id="b", system="Be brief.")]
    _, report = tokenize(rows, renderer, max_drop_fraction=0.5, name="t")
    assert report.dropped == {"template_refuses": 1}
    assert "System role not supported" in report.dropped_ids["template_refuses"][0]
    assert report.dropped_ids["template_refuses"][0].startswith("b: ")


@pytest.mark.parametrize(
    ("own_limit", "remedy"),
    [
        (False, r"Change these .*, or choose another --chat-template, or allow it with --max-drop-fraction 0\.667\.$"),
        (True, r"\. Change these conversations or leave them out, or allow it with --max-drop-fraction 0\.667\.$"),
    ],
)
def test_what_the_template_refuses_is_not_blamed_on_the_length(own_limit, remedy):
    rows = [pair("q", "yes", "no", id=f"{n}", system="Be brief." if n else None) for n in range(3)]
    with pytest.raises(DataError, match=r"t: 2 of 3 preferences cannot be used \(template_refuses: 2 .*" + remedy):
        tokenize(rows, renderer_for(GEMMA), max_drop_fraction=0.5, name="t", own_limit=own_limit)


def test_the_cause_of_most_rows_decides_what_to_do():
    long = pair("q", "no " * 200, "no", id="long")
    refused = pair("q", "yes", "no", id="refused", system="Be brief.")
    with pytest.raises(DataError, match=r"cannot be used with --max-seq-len 128 .*\. Raise --max-seq-len\.$"):
        tokenize([refused, long, long], renderer_for(GEMMA), max_drop_fraction=0.5, name="t")
    with pytest.raises(DataError, match=r"cannot be used \(.*or choose another --chat-template\.$"):
        tokenize([refused, long, refused], renderer_for(GEMMA), max_drop_fraction=0.5, name="t")
    dropping = renderer_for(GEMMA, truncation="drop")
    # Rows that are left out because the user asked for it are not what is wrong.
    with pytest.raises(DataError, match=r"cannot be used \(.*or choose another --chat-template, or allow it"):
        tokenize([pair("q", "a", "b"), refused, long, long], dropping, max_drop_fraction=0.1, name="t")


def test_replies_that_are_the_same_tokens_are_to_be_left_out():
    with pytest.raises(DataError, match=r"cannot be used \(identical_tokens: 1 .*\. Leave them out: to the model"):
        tokenize([pair("q", "yes", "yes ")], renderer_for(GEMMA), max_drop_fraction=0.5, name="t")


def test_replies_that_do_not_fit_leave_their_siblings():
    renderer = renderer_for(CHATML, max_length=40)
    three = Preference(
        id="k",
        source="t",
        prompt=(Message("user", "q"),),
        replies=tuple((Message("assistant", text),) for text in ("yes", "no " * 60, "maybe")),
        comparisons=(Comparison(first=0, second=1), Comparison(first=2, second=0)),
        ranking=(2, 0, 1),
    )
    group = renderer.group(three)
    assert group.num_replies == 2
    assert group.comparisons == (Comparison(first=1, second=0),)
    assert group.ranking == (1, 0)
    assert renderer.group(replace(three, comparisons=(Comparison(first=0, second=1),))) == "reply_too_long"


def test_dropped_preferences_are_counted_and_too_many_stop_the_run():
    renderer = renderer_for("{% for m in messages %}{{ m['content'] | trim + '\n' }}{% endfor %}", max_length=40)
    rows = [pair("q", "yes", "no", id="a"), pair("q", "yes ", "yes", id="b"), pair("q", "yes " * 60, "no", id="c")]
    groups, report = tokenize(rows, renderer, max_drop_fraction=0.7, name="t")
    assert report.kept == len(groups) == 1
    assert report.dropped == {"identical_tokens": 1, "reply_too_long": 1}
    assert report.kept + sum(report.dropped.values()) == report.preferences == 3
    with pytest.raises(DataError, match=r"2 of 3 .*such as b.*such as c.*--max-drop-fraction 0.667"):
        tokenize(rows, renderer, max_drop_fraction=0.1, name="t")


def test_a_message_that_is_none_is_told_by_its_keys_and_never_by_what_it_holds():
    with pytest.raises(
        RenderError, match="a message needs a role and a text.* with the keys 'role', 'content'"
    ) as told:
        to_messages([{"role": "user", "content": ["SECRET" * 100]}])
    assert "SECRET" not in str(told.value)
    assert len(str(told.value)) < 200
    with pytest.raises(RenderError, match="with the keys none"):
        to_messages([{}])


def test_a_long_text_brings_no_warning_of_the_tokenizer(tmp_path, caplog):
    """It would say that the model fails on a text which is cut before."""
    made = make_tokenizer()
    made.model_max_length = 8
    made.save_pretrained(tmp_path)
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        renderer = build_renderer(load_tokenizer(str(tmp_path)), RenderingConfig(max_seq_len=64))
        tokenize([pair("Water? " * 40, "yes", "no")], renderer, max_drop_fraction=1.0, name="data")
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert "longer than" not in caplog.text


def test_an_installed_package_does_not_change_the_tokenizer(tmp_path, monkeypatch):
    """With mistral-common, transformers takes it for a model that has its `tekken.json`."""
    from transformers.models.auto import tokenization_auto as auto

    make_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    monkeypatch.setitem(auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    monkeypatch.setattr(auto, "_use_mistral_format", lambda *_, mistral_format=None, **__: mistral_format is None)
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML


def test_a_conversation_of_as_many_tokens_as_the_limit_stays_whole():
    prompt = (Message("user", "a b"), Message("assistant", "c"), Message("user", "d"))
    reply = (Message("assistant", "e"),)
    whole = renderer_for(CHATML, 1000).token_ids(prompt + reply)
    fits, short = (renderer_for(CHATML, len(whole) - fewer).render(prompt, reply) for fewer in (0, 1))
    assert np.array_equal(fits.token_ids, whole)
    assert fits.truncated_tokens == 0
    assert len(short.token_ids) < len(whole)
    assert short.truncated_tokens == len(whole) - len(short.token_ids)
