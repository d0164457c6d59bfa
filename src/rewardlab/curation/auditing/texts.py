"""Defects of one text: left-over marks of templates, refusals, cut-off endings, damage. Each function is pure.

All of these are found by patterns, which can be wrong: a reply that explains chat templates has their marks, and a list
may end without a full stop. A match is a reason to look at the row, not a proof.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_CONTROL: Final = re.compile(
    r"<\|[A-Za-z0-9_ ]{2,40}\|>"  # ChatML, Llama 3, Phi
    r"|<\uff5c[^\uff5c\n]{2,40}\uff5c>"  # DeepSeek
    r"|\[/?INST\]|<</?SYS>>"  # Llama 2, Mistral
    r"|\[/?(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
    r"|</?(?:start|end)_of_(?:turn|image)>"  # Gemma
    r"|\A\s*<s>|</s>(?=\s*\Z|\s*<s>)|<(?:unk|pad|bos|eos)>|\[(?:CLS|SEP|MASK|PAD)\]"
)
"""Control tokens of well-known tokenizers. `<s>` also strikes text out in HTML, so it counts only at the beginning."""
_SECTION: Final = re.compile(
    r"^[ \t]*#{2,3} ?(?:Instruction|Input|Response|Human|Assistant|User|System):", re.MULTILINE
)
"""Headers of Alpaca and Vicuna. Each match begins at the start of a line and stays in it, so searching takes linear
time."""
_SPEAKER: Final = re.compile(r"^[ \t]*(Human|Assistant|User|AI|Bot) ?:", re.MULTILINE | re.IGNORECASE)
_REFUSAL: Final = re.compile(
    r"i(?:'m| am) (?:really |very |so )?sorry,? (?:but|i |that i )"
    r"|(?:i'm|i am) (?:unable|not able) to (?:\w+ ){0,3}(?:assist|help|provide|fulfil|comply|answer|do that|discuss)"
    r"|i (?:can't|cannot|can not|won't|will not) (?:\w+ ){0,2}(?:assist|help|provide|fulfil|comply|answer|do that)"
    r"|i (?:must|have to) (?:respectfully )?(?:decline|refuse)"
    r"|i apologi[sz]e,? but"
    r"|(?:it(?:'s| is) )?against my (?:programming|guidelines|policy|policies)"
)
_REFUSAL_HEAD: Final = 250
"""A refusal is looked for in this many characters at the beginning of a reply."""
_LANGUAGE_MODEL: Final = re.compile(
    r"as an? (?:ai|artificial intelligence|large language|language)(?: language)? model"
)
_SENTENCE_END: Final = ".!?…:;。!?。”’\"'»」』)]}>*`|~_-–—=/\\^&%$#+0123456789"
"""Last characters after which a text may be complete: ends of sentences, quotes, code, mark-up, numbers."""
_LINE_WORDS: Final = 8
"""A last line of at least this many words counts as a sentence; a shorter one may be a heading, a list item or a
signature."""
_HALF_WORDS: Final = frozenset(
    re.findall(r"\w+", "a an the and or but of to in on at for with by from as is are was were that which")
)
_CONTROL_CHARACTERS: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ufffe\uffff]")
_MOJIBAKE: Final = re.compile(
    "[\u00c3\u00c2][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]"
    "|\u00e2\u20ac[\u0080-\u00bf\u0152\u0153\u0161\u201c\u201d\u2122\u02dc\u00a6]|\u00ef\u00bb\u00bf|\u00f0\u0178"
)
"""UTF-8 read as Latin-1 or Windows-1252: the most common damage, searched for if ftfy, which knows more, is not
installed."""


def control_tokens(text: str) -> list[str]:
    """Return the control tokens of well-known tokenizers that are typed in a text."""
    return _CONTROL.findall(text) if "<" in text or "[" in text else []


def residue(text: str) -> list[str]:
    """Return the marks of chat templates in a reply: control tokens and headers of turns."""
    found = control_tokens(text)
    if "##" in text:
        found += [mark.strip() for mark in _SECTION.findall(text)]
    return found + _speakers(text)


def _speakers(text: str) -> list[str]:
    """Return the names of speakers that look like headers: at either end of a reply, or after a blank line."""
    if ":" not in text:
        return []
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    found = []
    for match in _SPEAKER.finditer(text):
        speaker = match[1].casefold()
        line_before = text[text.rfind("\n", 0, max(match.start() - 1, 0)) + 1 : match.start()]
        starts_reply = match.start() <= begin and speaker in ("assistant", "ai", "bot")
        after_blank = match.start() > begin and not line_before.strip() and speaker in ("human", "assistant")
        ends_reply = match.end() >= end and match.start() > begin and speaker in ("human", "user")
        if starts_reply or after_blank or ends_reply:
            found.append(match[0].strip())
    return found


def refusal(text: str) -> str | None:
    """Return the words by which a reply begins like a refusal, or speaks of itself as a model; None if it does not."""
    head = text[:_REFUSAL_HEAD].replace("\u2019", "'").casefold()
    found = _REFUSAL.search(head)
    if found is None and ("model" in text):
        found = _LANGUAGE_MODEL.search(text.casefold())
    return found[0].strip() if found else None


def is_cut_off(text: str) -> bool:
    """Return whether a reply stops in the middle: within a block of code, after a comma, after a word that needs
    another, or, if its last line is a sentence, after a letter."""
    text = text.rstrip()
    if text.count("```") % 2:
        return True
    if not text or text[-1] in _SENTENCE_END or len(text.encode("utf-8", "surrogatepass")) < 20:
        return False
    last = text[text.rfind("\n") + 1 :].split()
    if text[-1] == ",":
        return True
    return text[-1].isalpha() and ((last[-1] in _HALF_WORDS and len(last) > 1) or len(last) >= _LINE_WORDS)


def damage_finder() -> tuple[Callable[[str], str | None], str]:
    """Return (a function that returns the damaged part of a text or None, the name of its method)."""
    try:
        from ftfy.badness import is_bad
    except ImportError:
        return _listed_damage, "a list of common mojibake (ftfy is not installed)"
    return _any_damage(is_bad), "ftfy"


def _any_damage(is_bad: Callable[[str], bool]) -> Callable[[str], str | None]:
    def find(text: str) -> str | None:
        if text.isascii():
            return _control_character(text)
        return _control_character(text) or ("mojibake" if is_bad(text) else None)

    return find


def _listed_damage(text: str) -> str | None:
    if (found := _control_character(text)) is not None or text.isascii():
        return found
    return "mojibake" if _MOJIBAKE.search(text) else None


def _control_character(text: str) -> str | None:
    found = _CONTROL_CHARACTERS.search(text)
    return None if found is None else f"U+{ord(found[0]):04X}"
