"""Chat templates of files, and arguments for templates: read once, tried early, written into what is saved."""

from __future__ import annotations

import json

import pytest

from common import CHATML, make_tokenizer
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.types import Message
from rewardlab.data.config import RenderingConfig
from rewardlab.data.template_files import MAX_TEMPLATE, file_of, parse_arguments, read_template, shown, template_of
from rewardlab.data.templates import build_renderer

OWN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
SWITCHED = "{% if thinking is defined and not thinking %}quick {% endif %}{% if tone == 'dry' %}dry {% endif %}" + OWN
TURNS = (Message("user", "Why?"), Message("assistant", "Because."))


def text_by(template: str | None, **settings) -> str:
    return build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=64, **settings)).text(TURNS)


@pytest.mark.parametrize("own", [CHATML, None])
def test_the_template_of_a_file_takes_the_place_of_the_tokenizers(tmp_path, own):
    (tmp_path / "own.txt").write_text(OWN, encoding="utf-8")
    wanted = "user: Why?<|im_end|>\nassistant: Because.<|im_end|>\n"
    assert text_by(own, chat_template=str(tmp_path / "own.txt")) == wanted
    assert text_by(own, chat_template=OWN) == wanted, "the text says the same as its file"
    renderer = build_renderer(make_tokenizer(own), RenderingConfig(chat_template=OWN))
    assert (renderer.spec.chat_template, renderer.tokenizer.chat_template) == (OWN, OWN)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", OWN.encode()),
        ("chat_template.jinja", b"\xef\xbb\xbf" + OWN.encode()),
        ("tokenizer_config.json", json.dumps({"chat_template": OWN}).encode()),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": OWN}]}).encode()),
    ],
)
def test_the_folder_of_a_tokenizer_has_a_template(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_template(tmp_path) == OWN
    assert file_of(str(tmp_path)) == tmp_path / name


def test_the_text_is_known_by_its_content(tmp_path):
    for name in ("one.jinja", "other.jinja"):
        (tmp_path / name).write_text(OWN, encoding="utf-8")
    one, other = (template_of(str(tmp_path / name)) for name in ("one.jinja", "other.jinja"))
    assert one == other == template_of(one)
    assert shown(one) == shown(other) != shown(one + " ")
    assert len(shown(one)) < 60
    assert [template_of(word) for word in ("auto", "plain")] == ["auto", "plain"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty. Name the file"),
        (b" \n", "it is empty. Name the file"),
        (b"Hello", "does not mention `messages`"),
        (b"messages", "has neither"),
        (b"\n{% for m in messages %}", "line 2 is not Jinja: .* Mend it"),
        (b"{{ messages }", "line 1 is not Jinja"),
        (b"\xff\xfe{{ messages }}", "not a text in UTF-8"),
        (b"{{ messages }}" * MAX_TEMPLATE, "has more than 1048576 bytes"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path, content, said):
    (tmp_path / "it.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=f"--chat-template .*it.jinja: .*{said}"):
        template_of(str(tmp_path / "it.jinja"))


@pytest.mark.parametrize(
    ("name", "said"), [("none.jinja", "there is no such file"), ("x" * 999 + ".jinja", "name too long")]
)
def test_a_file_that_is_not_there_is_refused(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"(?i){said}. Name the file"):
        template_of(RenderingConfig(chat_template=name).chat_template)


def test_a_folder_without_a_template_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="this folder has no template"):
        template_of(str(tmp_path))
    for values in ({}, {"chat_template": {"a": 1}}, []):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(ConfigError, match="there is no template in tokenizer_config.json"):
            template_of(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="--chat-template .*tokenizer_config.json"):
        template_of(str(tmp_path))


def test_marks_of_replies_are_no_mistake(tmp_path):
    marked = "{% for m in messages %}{% generation %}{{ m['content'] }}<|im_end|>{%- endgeneration -%}{% endfor %}"
    assert text_by(None, chat_template=marked) == "Why?<|im_end|>Because.<|im_end|>"


def test_a_template_that_fails_says_what_to_do():
    with pytest.raises(RenderError, match=r"no. Use another template \(--chat-template FILE\)"):
        text_by(CHATML, chat_template="{{ raise_exception('no') }}{{ messages }}")


# --- arguments -----------------------------------------------------------------------------------------------


def test_arguments_are_written_into_the_template():
    assert text_by(SWITCHED).startswith("user:")
    for name in ("auto", "template", SWITCHED):
        text = text_by(SWITCHED, chat_template=name, template_arguments=("thinking=false", "tone=dry"))
        assert text.startswith("quick dry user:")
    spec = build_renderer(make_tokenizer(SWITCHED), RenderingConfig(template_arguments=("thinking=false",))).spec
    assert spec.template_arguments == {}, "nobody has to pass them again"
    assert (
        make_tokenizer(spec.chat_template)
        .apply_chat_template([turn.as_dict() for turn in TURNS], tokenize=False)
        .startswith("quick user:")
    )


def test_values_are_those_of_json_and_single_words():
    words = ("a=true", "b=null", "c=-1.5", 'd="x = y"', "e=high", 'f="true"', "_g=1", "h=1")
    assert parse_arguments(words) == {
        "a": True,
        "b": None,
        "c": -1.5,
        "d": "x = y",
        "e": "high",
        "f": "true",
        "_g": 1,
        "h": 1,
    }
    template = "{{ value is string }} {{ value }} " + OWN
    for text in ("it's {{ x }} %} \\ é\n", "none"):
        argument = f"value={json.dumps(text)}"
        assert text_by(template, template_arguments=(argument,)).startswith(f"True {text} ")
    assert text_by("{{ value is none }} " + OWN, template_arguments=("value=null",)).startswith("True ")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("thinking", "wanted NAME=VALUE"),
        ("=1", "wanted NAME=VALUE"),
        ("a-b=1", "wanted NAME=VALUE"),
        ("a=", "wanted true, false, null, a number or a text as value"),
        ("a=False", "Write true, false or null"),
        ("a=None", "Write true, false or null"),
        ("a=two words", "Put a text in double quotes"),
        ("a=[1]", "Lists, mappings"),
        ("a=NaN", "Lists, mappings"),
        ("messages=1", "every rendering gives messages itself"),
    ],
)
def test_a_word_that_is_no_argument_is_refused(word, said):
    with pytest.raises(ConfigError, match=f"--template-arguments .*{said}"):
        RenderingConfig(template_arguments=(word,))


def test_arguments_that_would_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="a=2: this name is given twice"):
        RenderingConfig(template_arguments=("a=1", "a=2"))
    with pytest.raises(RenderError, match="thinkin: the chat template does not mention it"):
        text_by(SWITCHED, template_arguments=("thinkin=false",))
    with pytest.raises(RenderError, match="this tokenizer has no chat template to take them"):
        text_by(None, template_arguments=("thinking=false",))


def test_a_model_that_was_trained_with_arguments_keeps_them():
    trained = build_renderer(make_tokenizer(SWITCHED), RenderingConfig(template_arguments=("thinking=false",))).spec
    again = build_renderer(
        make_tokenizer(trained.chat_template), RenderingConfig(template_arguments=("thinking=false",))
    )
    assert again.spec.chat_template == trained.chat_template
    with pytest.raises(RenderError, match="thinking: the template of this model has another value of it"):
        text_by(trained.chat_template, template_arguments=("thinking=true",))
    assert text_by(trained.chat_template, template_arguments=("tone=dry",)).startswith("quick dry user:")


def test_an_argument_that_changes_nothing_is_told(caplog):
    own = "{% set tone = 'kind' %}" + SWITCHED
    later = OWN + "{% if add_generation_prompt and thinking %}<think>{% endif %}"
    for template, words, idle in (
        (SWITCHED, ("thinking=false", "tone=dry"), []),
        (SWITCHED, ("thinking=true", "tone=dry"), ["thinking"]),
        (own, ("thinking=false", "tone=dry"), ["tone"]),
        (later, ("thinking=true",), ["thinking"]),
    ):
        caplog.clear()
        text_by(template, template_arguments=words)
        assert [said.split()[2] for said in caplog.messages] == idle
        assert all("changes nothing in conversations" in said for said in caplog.messages)


def test_an_argument_that_changes_earlier_thoughts_alone_is_not_idle(caplog):
    said = "{% if keep or loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}"
    keeping = OWN.replace("{{ m['content'] }}", said)
    text_by(keeping, template_arguments=("keep=true",))
    assert not caplog.messages


# --- several templates ---------------------------------------------------------------------------------------


def test_of_several_templates_none_is_guessed():
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = {"default": OWN, "tool_use": CHATML}
    assert build_renderer(tokenizer, RenderingConfig()).spec.chat_template == OWN
    for wanted in ("auto", "template"):
        tokenizer.chat_template = {"tool_use": CHATML, "rag": OWN}
        with pytest.raises(RenderError, match="called rag, tool_use, and none called default"):
            build_renderer(tokenizer, RenderingConfig(chat_template=wanted))
    assert build_renderer(tokenizer, RenderingConfig(chat_template="plain")).spec.template_source == "plain"


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_breaks_of_other_systems_are_read_back_as_they_are_saved(tmp_path, end):
    renderer = build_renderer(make_tokenizer(OWN.replace("\n", end)), RenderingConfig())
    renderer.tokenizer.save_pretrained(tmp_path)
    assert read_template(tmp_path) == renderer.spec.chat_template == OWN
