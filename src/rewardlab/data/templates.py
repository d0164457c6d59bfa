"""The chat template of a renderer: it is chosen, frozen to one text, and tried out until its end token is known."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal

from rewardlab.core.errors import RenderError
from rewardlab.core.spec import TRUNCATION_OF, RendererSpec
from rewardlab.core.types import Conversation, Message
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.template_files import WORDS, parse_arguments, template_of

logger = logging.getLogger("rewardlab")
FROZEN_DATE: Final = {
    **{"%d": "26", "%-d": "26", "%e": "26", "%m": "07", "%-m": "7", "%b": "Jul", "%h": "Jul", "%B": "July"},
    **{"%Y": "2024", "%y": "24", "%j": "208", "%a": "Fri", "%A": "Friday", "%F": "2024-07-26", "%D": "07/26/24"},
    **{"%H": "00", "%I": "12", "%p": "AM", "%M": "00", "%S": "00", "%T": "00:00:00", "%%": "%"},
}
"""Part of a date format -> what it is on the day that templates print in place of today: a score must not change
overnight. Written out, since names of months depend on the machine's language."""
ISO_DATE: Final = "2024-07-26"
"""The same day for formats of other parts, or that are not written out in the template."""

PROBES: Final = ("Yes.", "No, 12", "Certainly! Here is more", "fine\n")
"""Replies that are rendered to learn how renderings end: words, punctuation, digits and a line break."""

TIMES: Final = 4
"""How often these are rendered to see that a template draws nothing at random."""

THOUGHTS: Final = tuple(f"<think>\n{thought}\n</think>\n\nYes." for thought in ("It is.", "They ask twice."))
"""Replies that differ in what the model thought alone."""

PLAIN_TEMPLATE: Final = (
    "{{ bos }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{ message['content'] + '\\n\\n' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ 'Assistant: ' + message['content'] }}"
    "{%- if loop.last -%}{{ eos }}{%- else -%}{{ '\\n\\n' }}{%- endif -%}"
    "{%- else -%}{{ 'Human: ' + message['content'] + '\\n\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"
)

CONCAT_TEMPLATE: Final = (
    "{{ bos }}"
    "{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}"
    "{%- if not add_generation_prompt and not messages[-1]['content'].endswith(eos) -%}{{ eos }}{%- endif -%}"
)
"""Texts as they are, the way TRL joins plain-text rows: prompt, reply, and EOS unless the reply ends in it."""


def build_renderer(tokenizer: Any, config: RenderingConfig) -> Renderer:
    """Return the renderer for a tokenizer, with a frozen template and a known final token.

    Raises RenderError if the requested template does not exist, fails, writes more than one BOS, or leaves out what is
    said.
    """
    template, source = _choose_template(tokenizer, config.chat_template)
    given = parse_arguments(config.template_arguments)
    arguments = _arguments(given, template) if source == "tokenizer" else _plain_arguments(tokenizer)
    if given and source != "tokenizer":
        raise RenderError(
            "--template-arguments: this tokenizer has no chat template to take them. Name one with --chat-template "
            "FILE, or leave them out."
        )
    draft = RendererSpec(
        chat_template=_bake(template, arguments, config.system_prompt),
        template_source=source,
        system_prompt=config.system_prompt,
        max_length=config.length_limit,
        truncation=TRUNCATION_OF[config.truncation],
        final_token_id=None,
        bos_token_id=tokenizer.bos_token_id,
        num_bos=0,
        special_tokens_in_text=_choose_reading(config.special_tokens_in_text, template),
    )
    if source == "concat":
        _require_bare_texts(Renderer(tokenizer, replace(draft, chat_template=_bake(template, arguments, None))))
    endings, num_bos = _probe(Renderer(tokenizer, draft))
    if num_bos > 1:
        raise RenderError(
            f"the chat template writes {num_bos} BOS tokens; a score after a double BOS is another score. "
            f"Fix the template of this tokenizer, or use --no-chat-template."
        )
    final = endings.pop() if len(endings) == 1 else None
    _tell_idle_arguments(tokenizer, draft, template, arguments if source == "tokenizer" else {})
    _tell_split_marks(tokenizer)
    _tell_lost_thoughts(Renderer(tokenizer, draft))
    _tell_lost_system(Renderer(tokenizer, draft))
    return Renderer(tokenizer, replace(draft, final_token_id=final, num_bos=num_bos))


def _choose_template(tokenizer: Any, wanted: str) -> tuple[str, str]:
    """Return (template, its source as in `RendererSpec`).

    Raises RenderError if the wanted one cannot be used, ConfigError for a file that cannot be one.
    """
    if (named := template_of(wanted)) not in WORDS:
        return named, "tokenizer"
    own = tokenizer.chat_template
    if isinstance(own, dict):
        if own and "default" not in own and wanted in ("auto", "template"):
            raise RenderError(
                f"this tokenizer has chat templates called {', '.join(sorted(own))}, and none called default. Name the "
                f"file of the one that is meant with --chat-template FILE, or use --no-chat-template."
            )
        own = own.get("default")
    if wanted == "plain" or (wanted == "auto" and not own):
        return PLAIN_TEMPLATE, "plain"
    if wanted == "concat":
        if not tokenizer.eos_token:
            raise RenderError("--chat-template concat: this tokenizer has no EOS token, which ends a reply. Use plain.")
        return CONCAT_TEMPLATE, "concat"
    if not own:
        raise RenderError(
            "--use-chat-template: this tokenizer has no chat template. Use --no-chat-template for a plain "
            "transcript, --chat-template FILE for a template, or a chat model."
        )
    return own, "tokenizer"


def _choose_reading(wanted: Literal["auto", "text", "keep"], template: str) -> Literal["text", "keep"]:
    """Return how typed control tokens are read. Texts that are joined as they are contain control tokens on purpose."""
    if wanted == "auto":
        return "keep" if template.endswith(CONCAT_TEMPLATE) else "text"
    return wanted


def _arguments(given: Mapping[str, object], template: str) -> dict[str, object]:
    """Return the arguments that are to be written into a template, without those that it holds already.

    Raises RenderError for one that would do nothing: the template does not know it, or was given another one before.
    """
    (before,) = re.findall(r"\A(?:\{%- set \w+ = [^\n]*? -%\})*", template)
    for name, value in given.items():
        if not mentions(template, name):
            raise RenderError(
                f"--template-arguments {name}: the chat template does not mention it, so it would do nothing. Look for "
                f"its name in the template, or leave it out."
            )
        if setting(name, value) not in before and f"{{%- set {name} = " in before:
            raise RenderError(
                f"--template-arguments {name}: the template of this model has another value of it written into it, "
                f"with which the model was trained. Leave it out, or name another template with --chat-template FILE."
            )
    return {name: value for name, value in given.items() if setting(name, value) not in before}


def mentions(template: str, name: str) -> bool:
    """Return whether the text of a template has a name in it."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def setting(name: str, value: object) -> str:
    """Return the code by which a template holds an argument."""
    return f"{{%- set {name} = {value!r} -%}}"


def _plain_arguments(tokenizer: Any) -> dict[str, object]:
    """Return `bos`, empty unless the tokenizer itself adds one, and `eos`, which ends a reply."""
    first = tokenizer("a")["input_ids"][:1]
    adds_bos = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return {"bos": tokenizer.bos_token if adds_bos else "", "eos": tokenizer.eos_token or ""}


def _require_bare_texts(renderer: Renderer) -> None:
    """Raise RenderError unless rendering two texts gives the tokens that the tokenizer gives for the joined text."""
    tokenizer = renderer.tokenizer
    for probe in PROBES:
        ours = renderer.token_ids(_probe_turns(probe, "Hello "))
        if ours.tolist() != list(tokenizer("Hello " + probe + tokenizer.eos_token)["input_ids"]):
            raise RenderError(
                "--chat-template concat: this tokenizer adds tokens of its own around a text, besides BOS, which no "
                "template can repeat. Use --chat-template plain."
            )


def _bake(template: str, arguments: Mapping[str, object], system_prompt: str | None) -> str:
    """Return the template with arguments, system prompt and a frozen date written into it.

    Engines that load the saved folder pass no arguments, so anything outside the template would be missing there.
    """
    # The template is saved to a file, and read back with line breaks of this kind.
    template = template.replace("\r\n", "\n").replace("\r", "\n")
    head = "".join(setting(name, value) for name, value in arguments.items())
    formats = set(re.findall(r"strftime_now\(\s*[\"']([^\"']+)[\"']\s*\)", template))
    if "strftime_now" in template:
        cases = "".join(
            f"{{%- {'if' if number == 0 else 'elif'} format == '{fmt}' -%}}{_literal(frozen_date(fmt))}"
            for number, fmt in enumerate(sorted(formats))
        )
        body = f"{cases}{{%- else -%}}{ISO_DATE}{{%- endif -%}}" if cases else ISO_DATE
        head += f"{{%- macro strftime_now(format) -%}}{body}{{%- endmacro -%}}"
    if system_prompt is not None:
        head += (
            "{%- if messages | selectattr('role', 'equalto', 'system') | list | length == 0 -%}"
            f"{{%- set messages = [{{'role': 'system', 'content': {system_prompt!r}}}] + messages -%}}{{%- endif -%}}"
        )
    return head + template


def frozen_date(form: str) -> str:
    """Return the frozen day in the format of `strftime`."""
    parts = re.findall(r"%-?.?", form, re.DOTALL)
    return re.sub(r"%-?.", lambda part: FROZEN_DATE[part[0]], form) if set(parts) <= FROZEN_DATE.keys() else ISO_DATE


def _literal(text: str) -> str:
    """Return a template for a text, which is itself if the engine would leave every character."""
    return text if text == text.strip() and "{" not in text else f"{{{{ {text!r} }}}}"


def _probe(renderer: Renderer) -> tuple[set[int], int]:
    """Return the last tokens of short conversations, and the number of BOS that they begin with.

    Raises RenderError if one of them fails, renders to no tokens or to another text each time, or if prompt or reply is
    not written.
    """
    try:
        renderings = [renderer.token_ids(_probe_turns(probe)) for probe in PROBES]
        if not all(map(len, renderings)):
            raise RenderError("the chat template renders a conversation to nothing.")
        _require_one_text(renderer)
        _require_written(renderer)
    except RenderError as error:
        said = str(error).rstrip(".")
        raise RenderError(f"{said}. Use another template (--chat-template FILE), or --no-chat-template.") from error
    endings = {int(token_ids[-1]) for token_ids in renderings}
    with suppress(RenderError):  # a template may refuse system turns
        renderings.append(renderer.token_ids((Message("system", "Be kind."), *_probe_turns("Yes."))))
    bos = renderer.spec.bos_token_id
    num_bos = max(next((n for n, token in enumerate(ids) if token != bos), len(ids)) for ids in renderings)
    return endings, num_bos


def _require_one_text(renderer: Renderer) -> None:
    """Raise RenderError if the template writes another text each time: a score must be the same every time."""
    conversations = [_probe_turns(probe) for probe in PROBES]
    if len({tuple(renderer.texts(conversations)) for _ in range(TIMES)}) > 1:
        raise RenderError(
            "the chat template writes another text each time it is used (does it draw by `random`?), so no score would "
            "be the same twice."
        )


def _require_written(renderer: Renderer) -> None:
    """Raise RenderError if the template leaves out what the user or the assistant says."""
    turns = {"prompt": [_probe_turns("Yes.", prompt) for prompt in PROBES], "reply": list(map(_probe_turns, PROBES))}
    for what, conversations in turns.items():
        if len(set(renderer.texts(conversations))) == 1:
            raise RenderError(
                f"the chat template writes nothing of a {what}. It may be one for contents in parts, as models that "
                f"read images have; here a content is a text."
            )


def _tell_split_marks(tokenizer: Any) -> None:
    """Log a warning if the tokenizer reads no control token at all, not even those that the template writes."""
    if getattr(tokenizer, "split_special_tokens", False):
        logger.warning(
            "template: the tokenizer has the setting split_special_tokens, so the control tokens that the template "
            "writes are read as the letters of their names, which the model has not seen in their place; take the "
            "setting out of tokenizer_config.json"
        )


def _tell_lost_system(renderer: Renderer) -> None:
    """Log a warning if the template leaves system turns out.

    Raises RenderError if a system prompt was asked for, which would be left out too.
    """
    try:
        one, other = (renderer.text((Message("system", said), *_probe_turns("Yes."))) for said in PROBES[:2])
    except RenderError:
        return  # a template that refuses system turns loses none silently: such rows are counted
    if one != other:
        return
    if renderer.spec.system_prompt is not None:
        raise RenderError("--system-prompt: the chat template leaves system turns out. Use --no-chat-template.")
    logger.warning(
        "template: system turns are left out by the chat template, so no score depends on them; --no-chat-template "
        "keeps them, as does a template that writes them"
    )


def _tell_idle_arguments(tokenizer: Any, draft: RendererSpec, template: str, arguments: Mapping[str, object]) -> None:
    """Log a warning for arguments without which the template renders as it does with them."""
    for name in arguments:
        others = {other: value for other, value in arguments.items() if other != name}
        without = replace(draft, chat_template=_bake(template, others, draft.system_prompt))
        if _samples(Renderer(tokenizer, without)) == _samples(Renderer(tokenizer, draft)):
            logger.warning(
                "template: --template-arguments %s changes nothing in conversations that were tried out: the template "
                "sets it itself, has this value anyway, or asks for it only before a reply is generated",
                name,
            )


def _samples(renderer: Renderer) -> list[str]:
    """Return renderings of conversations with whatever a template may treat in its own way, where it takes them."""
    thought = f"{THOUGHTS[0]}\n"
    turns = (*_probe_turns(thought), *_probe_turns(thought))
    texts = []
    for conversation in (_probe_turns("Yes."), turns, (Message("system", "Be kind."), *turns)):
        try:
            texts.append(renderer.text(conversation))
        except RenderError:
            texts.append("")
    return texts


def _tell_lost_thoughts(renderer: Renderer) -> None:
    """Log a warning if the template takes thoughts out of replies: scores would not depend on what is written there."""
    try:
        one, other = (renderer.text(_probe_turns(reply)) for reply in THOUGHTS)
    except RenderError:
        return  # a template that refuses thoughts loses none silently: such rows are counted
    if one == other:
        logger.warning(
            "template: what stands between <think> and </think> in a reply is left out by the chat template, so no "
            "score depends on it; --no-chat-template keeps it, as does a template that does not take it out"
        )


def _probe_turns(reply: str, prompt: str = "Hello") -> Conversation:
    return Message("user", prompt), Message("assistant", reply)
