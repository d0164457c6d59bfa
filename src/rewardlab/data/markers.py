"""Control tokens typed inside a message: by default they stay text, so that nobody can forge a turn.

A chat template writes control tokens such as `<|im_end|>` as text, and a tokenizer cannot tell them from the same
letters in a message: a reply that holds `<|im_end|>\\n<|im_start|>user\\n…` would be a conversation of more turns. A
conversation whose tokens hold more of them than its turns account for is therefore rendered again with quoted numbers
in place of what is typed, which shows which of them are the template's own. Its tokens then come from a copy of the
tokenizer in which control tokens have other names. The template's own are exchanged for these, and whatever stands in
messages is letters like any others, also where a normalizer would have made a control token of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from rewardlab.core.errors import RenderError
from rewardlab.core.types import Conversation, Message

SIGNS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Noncharacters of Unicode: what quotes a number is one, or a sequence, that the text at hand does not hold."""
OF_REPLIES: Final = re.compile(r"think|reason|scratch|tool_call", re.IGNORECASE)
"""Added tokens that models write inside their replies, such as `<think>`."""
RESERVED: Final = ("<pad", "[pad", "|pad", "_pad", "reserved", "unused")
"""Parts of the names of added tokens that are nobody's text: one of them may be chosen to pad."""
REMEDY: Final = "Leave such text out, or read it as control tokens with --special-tokens-in-text keep."
_copies: dict[str, Any] = {}
"""The copies of tokenizers made last, by a hash of what they were made from: making one takes seconds."""
NUM_COPIES: Final = 4

Template = Callable[[Conversation], str]


class ControlTokensError(RenderError):  # a condition of one conversation, which callers count
    """A conversation whose control tokens cannot be told apart."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """The text of a conversation, and which control tokens in it are the template's own."""

    text: str
    own: tuple[tuple[int, int], ...] | None = None
    """(the character at which it begins, its number among `Markers.names`) of each; None where all of them are."""

    def beginning(self, num_characters: int) -> RenderedText:
        """Its first characters."""
        return RenderedText(self.text[:num_characters], self.own)


class Markers:
    """The control tokens of a tokenizer: those marked `special`, and those that its template writes around messages.

    `template` renders conversations of any roles, or raises RenderError; `prompt` is the system prompt it may add.
    """

    def __init__(self, tokenizer: Any, template: Template, *, prompt: str = "") -> None:
        self.tokenizer = tokenizer
        self._template = template
        self.names = tuple(sorted(self._find_names(prompt), key=lambda name: (-len(name), name)))
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or "(?!)")
        self._beginnings = tuple({name[0] for name in self.names})
        ids = [tokenizer.convert_tokens_to_ids(name) for name in self.names]
        self._number_of = {token: number for number, token in enumerate(ids) if token is not None}
        self._is_control = np.zeros(max(self._number_of, default=-1) + 1, dtype=bool)
        self._is_control[list(self._number_of)] = True
        self._expected: dict[tuple[str, ...], float] = {}
        self._copies: dict[str, Any] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = None if backend is None else backend.normalizer

    def count(self, messages: Iterable[Message]) -> int:
        """How many control tokens are typed in the messages, as they are or as the tokenizer normalises them."""
        return sum(self._count(message.content) for message in messages)

    def _count(self, text: str) -> int:
        found = 0
        if any(character in text for character in self._beginnings):  # far quicker than the pattern, and mostly false
            found = len(self._pattern.findall(text))
        if found or self._normalizer is None:
            return found
        return len(self._pattern.findall(self._normalizer.normalize_str(text)))

    def num_control_tokens(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> int:
        """How many of the tokens are control tokens."""
        ids = np.asarray(token_ids, dtype=np.int64)
        return int(self._is_control[ids[ids < len(self._is_control)]].sum())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copies": {}}  # other processes make their own, should they need one

    def num_expected(self, conversation: Conversation) -> float:
        """How many control tokens the template writes for these turns, whatever they say; infinite if it refuses to
        say."""
        roles = tuple(message.role for message in conversation)
        if roles not in self._expected:
            neutral = tuple(Message(role, "fine") for role in roles)
            try:
                self._expected[roles] = self.num_control_tokens(self._tokens(self._template(neutral)))
            except RenderError:
                self._expected[roles] = math.inf
        return self._expected[roles]

    def tell_apart(self, conversation: Conversation, token_ids: Sequence[int]) -> RenderedText | None:
        """The text of a conversation with the template's own control tokens marked, where its tokens, as the tokenizer
        gives them, hold others too; else None.

        Raises ControlTokensError where they cannot be told apart, RenderError as the template does.
        """
        num_found, typed = self.num_control_tokens(token_ids), self.count(conversation)
        if not typed and num_found <= self.num_expected(conversation):
            return None
        told = self._render(conversation)
        own = told.own or ()
        if len(own) > self.num_expected(conversation):
            raise ControlTokensError(
                f"texts and chat template together form control tokens, {len(own)} where these turns have "
                f"{self.num_expected(conversation)}. {REMEDY}"
            )
        # Where there are no others, the template has made letters of what was typed.
        return told if num_found > len(own) else None

    def _render(self, conversation: Conversation) -> RenderedText:
        """The template sees quoted numbers in place of what is typed, so it cannot take that for its own either."""
        sign = sign_for(message.content for message in conversation)
        width = len(str(len(self.names)))
        quoted = {name: f"{sign}{number:0{width}}{sign}" for number, name in enumerate(self.names)}
        hidden = tuple(
            Message(message.role, self._pattern.sub(lambda found: quoted[found.group()], message.content))
            for message in conversation
        )
        text = self._template(hidden)
        places = dict(self._own(text))
        pieces: list[str] = []
        own: list[tuple[int, int]] = []
        end = length = 0
        for found in re.finditer(rf"{sign}(\d{{{width}}}){sign}", text):
            pieces += [text[end : found.start()], self.names[int(found[1])]]
            own += [(length + start - end, number) for start, number in places.items() if end <= start < found.start()]
            length += len(pieces[-2]) + len(pieces[-1])
            end = found.end()
        pieces.append(text[end:])
        own += [(length + start - end, number) for start, number in places.items() if start >= end]
        if any(sign in piece for piece in pieces):
            raise ControlTokensError(f"the chat template cuts or changes typed control tokens. {REMEDY}")
        return RenderedText("".join(pieces), tuple(own))

    def _own(self, text: str) -> list[tuple[int, int]]:
        """(character, number among `names`) of every control token that the tokenizer reads by its name in a text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            kind = type(self.tokenizer).__name__
            raise ControlTokensError(f"{kind} cannot tell control tokens typed in a text from its own. {REMEDY}")
        encoded = backend.encode(text, add_special_tokens=False)
        found = []
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            number = self._number_of.get(token)
            if number is not None and (place := text.find(self.names[number], start, stop)) >= 0:
                found.append((place, number))
        return found

    def encode(self, rendered: RenderedText) -> list[int]:
        """Its tokens, of which no others are control tokens than the template's own.

        Raises ControlTokensError if this tokenizer cannot keep control tokens as letters.
        """
        tokens: list[int] = self._encoded(rendered).ids
        return tokens

    def starts(self, text: str) -> list[int]:
        """The character at which each token of a message's text begins, where control tokens are letters."""
        return [start for start, _ in self._encoded(RenderedText(text, ())).offsets]

    def _encoded(self, rendered: RenderedText) -> Any:
        text, sign = rendered.text, sign_for([rendered.text])
        pieces, end = [], 0
        for start, number in rendered.own or ():
            name = self.names[number]
            if text.startswith(name, start):  # else the text was cut inside of it
                pieces += [text[end:start], f"{sign}{number}{sign}"]
                end = start + len(name)
        return self._copy(sign).encode("".join([*pieces, text[end:]]), add_special_tokens=False)

    def _copy(self, sign: str) -> Any:
        """The tokenizer with other names for its control tokens: their number, quoted by this sign."""
        if sign not in self._copies:
            self._copies.clear()
            names = {name: f"{sign}{number}{sign}" for number, name in enumerate(self.names)}
            self._copies[sign] = _copy_of(self.tokenizer, names)
        return self._copies[sign]

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _find_names(self, prompt: str) -> set[str]:
        if getattr(self.tokenizer, "split_special_tokens", False):
            return set()  # it reads none, not even the template's
        added = {str(token.content): bool(token.special) for token in self.tokenizer.added_tokens_decoder.values()}
        special = {name for name, is_special in added.items() if is_special} | set(self.tokenizer.all_special_tokens)
        reserved = {name for name in added if any(part in name.lower() for part in RESERVED)}
        turns = [Message(role, SIGNS[number]) for number, role in enumerate(("system", "user", "assistant") * 2)]
        written: set[int] = set()
        for probe in (turns[1:3], turns[:3], [*turns[1:3], *turns[4:]]):
            try:
                written |= set(self._tokens(self._template(tuple(probe))))
            except RenderError:  # a template without a system role, or for one exchange
                continue
        written -= set(self._tokens(prompt)) if prompt else set()
        around = {name for name in added if self.tokenizer.convert_tokens_to_ids(name) in written}
        # A single character, such as a `!` that pads, is a letter: the copy could not spell it otherwise.
        return {name for name in special | reserved | around if len(name.strip()) > 1 and not OF_REPLIES.search(name)}


def sign_for(texts: Iterable[str]) -> str:
    """A sign, or else a sequence of several, that none of the texts holds."""
    held = "\0".join(texts)
    signs = ("".join(found) for found in chain(*(permutations(SIGNS, size) for size in range(1, len(SIGNS)))))
    return next(sign for sign in signs if sign not in held)


def _copy_of(tokenizer: Any, names: Mapping[str, str]) -> Any:
    """A copy of a tokenizer's core with the same tokens, some of them under other names.

    Raises ControlTokensError if it cannot be made.
    """
    backend = tokenizer.backend_tokenizer
    text = backend.to_str()
    key = hashlib.sha256(f"{text}\0{json.dumps(names)}".encode()).hexdigest()
    if key not in _copies:
        while len(_copies) >= NUM_COPIES:
            _copies.pop(next(iter(_copies)))
        _copies[key] = _renamed(text, names)
        wrong = [name for name in names if _copies[key].token_to_id(names[name]) != backend.token_to_id(name)]
        if wrong:
            del _copies[key]
            raise ControlTokensError(f"this tokenizer has no place of its own for {wrong[0]!r}. {REMEDY}")
    return _copies[key]


def _renamed(text: str, names: Mapping[str, str]) -> Any:
    content = json.loads(text)
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
    return Tokenizer.from_str(json.dumps(content))
