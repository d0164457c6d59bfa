"""Control tokens typed inside a message: by default they stay text, so that nobody can forge a turn.

A chat template writes control tokens such as `<|im_end|>` as text, and a tokenizer cannot tell them from the same
letters in a message: a reply that holds `<|im_end|>\n<|im_start|>user\n…` would be a conversation of more turns. So the
places of such letters are remembered while a conversation is rendered, and the tokens come from a copy of the
tokenizer in which the control tokens have other names. The names of the template's own are exchanged for these; what
stands in messages is then letters like any others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from rewardlab.core.errors import RenderError
from rewardlab.core.types import Conversation, Message

SIGNS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Noncharacters of Unicode: what quotes a name is one that the text at hand does not hold."""
OF_REPLIES: Final = re.compile(r"think|reason|tool|scratch", re.IGNORECASE)
"""Added tokens without the mark `special` that models write inside their replies, such as `<think>`."""
REMEDY: Final = "Leave such text out, or read it as control tokens with --special-tokens-in-text keep."


@dataclass(frozen=True, slots=True)
class RenderedText:
    """The text of a conversation, and whose the control tokens in it are."""

    text: str
    own: tuple[int, ...] | None = None
    """Characters at which the template's own control tokens begin; None where messages hold none, so that every one is
    the template's."""

    def beginning(self, num_characters: int) -> RenderedText:
        """Its first characters."""
        return RenderedText(self.text[:num_characters], self.own)


class Markers:
    """The control tokens of a tokenizer: those marked `special`, and what its template writes around messages.

    `written` is what the template writes for a few conversations whose messages hold none.
    """

    def __init__(self, tokenizer: Any, written: str) -> None:
        self.tokenizer = tokenizer
        self.names = tuple(sorted(_control_tokens(tokenizer, written), key=lambda name: (-len(name), name)))
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or "(?!)")
        self._beginnings = tuple({name[0] for name in self.names})
        self._renamed: dict[str, Any] = {}

    def count(self, messages: Iterable[Message]) -> int:
        """How many control tokens stand in the messages."""
        return sum(
            len(self._pattern.findall(message.content))
            for message in messages
            if any(character in message.content for character in self._beginnings)  # far quicker, and mostly false
        )

    def render(self, conversation: Conversation, template: Callable[[Conversation], str]) -> RenderedText:
        """The text that a template makes of a conversation, its own control tokens told from those in messages.

        The template sees quoted numbers in place of the latter, so it cannot take them for its own either.

        Raises RenderError as the template does.
        """
        sign = _sign_for(message.content for message in conversation)
        number_of = {name: f"{sign}{number}{sign}" for number, name in enumerate(self.names)}
        hidden = tuple(
            Message(message.role, self._pattern.sub(lambda found: number_of[found.group()], message.content))
            for message in conversation
        )
        pieces: list[str] = []
        own: list[int] = []
        length = 0
        for position, piece in enumerate(template(hidden).split(sign)):
            if position % 2:  # between two signs
                piece = self.names[int(piece)]
            else:
                own += [length + found.start() for found in self._pattern.finditer(piece)]
            pieces.append(piece)
            length += len(piece)
        return RenderedText("".join(pieces), tuple(own))

    def encode(self, rendered: RenderedText) -> list[int]:
        """Its tokens, none of them a control token but for the template's own.

        Raises RenderError if this tokenizer cannot keep control tokens as letters.
        """
        text, sign = rendered.text, _sign_for([rendered.text])
        number_of = {name: f"{sign}{number}{sign}" for number, name in enumerate(self.names)}
        pieces, end = [], 0
        for start in rendered.own or ():
            if found := self._pattern.match(text, start):  # else the text was cut inside of it
                pieces += [text[end:start], number_of[found.group()]]
                end = found.end()
        tokens: list[int] = self._copy(sign).encode("".join([*pieces, text[end:]]), add_special_tokens=False).ids
        return tokens

    def _copy(self, sign: str) -> Any:
        """The tokenizer with other names for its control tokens: their number, quoted by this sign."""
        if sign not in self._renamed:
            self._renamed[sign] = _with_other_names(
                self.tokenizer, {name: f"{sign}{number}{sign}" for number, name in enumerate(self.names)}
            )
        return self._renamed[sign]


def _control_tokens(tokenizer: Any, written: str) -> set[str]:
    if getattr(tokenizer, "split_special_tokens", False):
        return set()  # it reads none, not even the template's
    added = {str(token.content): bool(token.special) for token in tokenizer.added_tokens_decoder.values()}
    special = {name for name, is_special in added.items() if is_special} | set(tokenizer.all_special_tokens)
    around = {name for name in added if name in written and not OF_REPLIES.search(name)}
    return {name for name in special | around if name.strip()}


def _sign_for(texts: Iterable[str]) -> str:
    """A sign that none of the texts holds. Raises RenderError if they hold all of them."""
    present = {character for text in texts for character in SIGNS if character in text}
    free = next((sign for sign in SIGNS if sign not in present), None)
    if free is None:
        raise RenderError(
            "a text holds control tokens and all 32 noncharacters U+FDD0 to U+FDEF, none of which has a meaning in a "
            "text. Leave it out."
        )
    return free


def _with_other_names(tokenizer: Any, names: Mapping[str, str]) -> Any:
    """A copy of a tokenizer's core with the same tokens, some of them under other names.

    Raises RenderError if it cannot be made: only tokenizers of the `tokenizers` library have such a core.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RenderError(
            f"{type(tokenizer).__name__} cannot tell control tokens typed in a text from its own. {REMEDY}"
        )
    content = json.loads(backend.to_str())
    content |= {"post_processor": None, "truncation": None, "padding": None}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    copy = Tokenizer.from_str(json.dumps(content))
    wrong = [name for name in names if copy.token_to_id(names[name]) != backend.token_to_id(name)]
    if wrong:
        raise RenderError(f"this tokenizer has no place of its own for {wrong[0]!r}. {REMEDY}")
    return copy
