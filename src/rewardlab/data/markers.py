"""Control tokens typed inside a message: by default they are read as text, so that nobody can forge a turn.

A chat template writes control tokens such as `<|im_end|>` as text, and a tokenizer cannot tell them from the same
letters in a message: a reply that holds `<|im_end|>\\n<|im_start|>user\\n…` would be read as several turns, some of
them by a user who never wrote them. The tokenizer's own option against this (`split_special_tokens`) does not help,
since it would break up the template's control tokens too. Instead:

1. The control tokens of a conversation are counted, and compared with the number that its turns account for. Nearly
   all conversations end here and cost nothing more.
2. A conversation with more of them is rendered again with quoted numbers in place of what is typed. This shows which
   control tokens in the text are the template's own.
3. Its tokens come from a copy of the tokenizer in which control tokens have other names. The template's own are
   replaced by these names. Everything in the messages is then ordinary text, also where a normalizer would have turned
   it into a control token.
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
"""Unicode noncharacters, used as quotes around numbers: one of them, or a sequence, that the text at hand does not
contain. No tokenizer has a token for them, and no text should contain them."""
OF_REPLIES: Final = re.compile(r"think|reason|scratch|tool_call", re.IGNORECASE)
"""Added tokens that models write inside their replies, such as `<think>`."""
RESERVED: Final = ("<pad", "[pad", "|pad", "_pad", "reserved", "unused")
"""Parts of the names of added tokens that never occur in real text. One of them may be chosen as padding token, so they
count as control tokens even where the tokenizer does not mark them `special`."""
REMEDY: Final = "Leave such text out, or read it as control tokens with --special-tokens-in-text keep."
_copies: dict[str, Any] = {}
"""The latest copies of tokenizers, by a hash of what they were made from.

Of the process, since making one takes seconds and several renderers of one tokenizer are made in a run.
"""
NUM_COPIES: Final = 4

Template = Callable[[Conversation], str]


class ControlTokensError(RenderError):
    """Typed control tokens of a conversation cannot be told from the template's own. Callers count such rows."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """The rendered text of a conversation, and which control tokens in it are the template's own."""

    text: str
    own: tuple[tuple[int, int], ...] | None = None
    """For each of the template's own: (the character at which it begins, its index in `Markers.names`). None means that
    all control tokens in the text are the template's own."""

    def beginning(self, num_characters: int) -> RenderedText:
        """Return the first `num_characters` of the text."""
        return RenderedText(self.text[:num_characters], self.own)


class Markers:
    """The control tokens of a tokenizer: those marked `special`, and those that its template writes around messages.

    `template` renders conversations of any roles, or raises RenderError. `prompt` is the system prompt that it may add.
    """

    def __init__(self, tokenizer: Any, template: Template, *, prompt: str = "") -> None:
        self.tokenizer = tokenizer
        self._template = template
        # Longest first, so that the pattern does not match a name that is the beginning of a longer one.
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
        """Return how many control tokens are typed in the messages, as they are or after the tokenizer's
        normalisation."""
        return sum(self._count(message.content) for message in messages)

    def _count(self, text: str) -> int:
        number = 0
        # Looking for first characters is much faster than the pattern, and most texts have none of them.
        if any(character in text for character in self._beginnings):
            number = len(self._pattern.findall(text))
        if number or self._normalizer is None:
            return number
        # A normalizer may turn full-width letters, for example, into the name of a control token.
        return len(self._pattern.findall(self._normalizer.normalize_str(text)))

    def num_control_tokens(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> int:
        """Return how many of the tokens are control tokens."""
        ids = np.asarray(token_ids, dtype=np.int64)
        return int(self._is_control[ids[ids < len(self._is_control)]].sum())

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make their own copies if they need one: few rows do, and sending one is slow.
        return self.__dict__ | {"_copies": {}}

    def num_expected(self, conversation: Conversation) -> float:
        """Return how many control tokens the template writes for turns of these roles, whatever their content.

        Infinite if the template refuses neutral content for these roles.
        """
        roles = tuple(message.role for message in conversation)
        if roles not in self._expected:
            neutral = tuple(Message(role, "fine") for role in roles)
            try:
                self._expected[roles] = self.num_control_tokens(self._tokens(self._template(neutral)))
            except RenderError:
                self._expected[roles] = math.inf
        return self._expected[roles]

    def tell_apart(self, conversation: Conversation, token_ids: Sequence[int]) -> RenderedText | None:
        """Return the text with the template's own control tokens marked, if the conversation has others too; else None.

        `token_ids` are the tokens of the conversation as the tokenizer gives them.

        Raises ControlTokensError if the control tokens cannot be told apart, RenderError as the template does.
        """
        num_found, typed = self.num_control_tokens(token_ids), self.count(conversation)
        if not typed and num_found <= self.num_expected(conversation):
            return None
        told = self.hiding_typed(conversation)
        own = told.own or ()
        # A text that ends in `<|im_` before a template that continues `end|>` would forge a token that is in no
        # message.
        if len(own) > self.num_expected(conversation):
            raise ControlTokensError(
                f"texts and chat template together form control tokens, {len(own)} where these turns have "
                f"{self.num_expected(conversation)}. {REMEDY}"
            )
        # If all control tokens are the template's own, the template has escaped or removed what was typed.
        return told if num_found > len(own) else None

    def hiding_typed(self, conversation: Conversation) -> RenderedText:
        """Render a conversation, and mark which control tokens in the text are the template's own.

        The template is given quoted numbers in place of typed control tokens, so every control token in its output is
        its own. Then the numbers are replaced by what was typed. Raises ControlTokensError if the template changes
        them, RenderError as the template does.
        """
        sign = sign_for(message.content for message in conversation)
        width = len(str(len(self.names)))
        quoted = {name: f"{sign}{number:0{width}}{sign}" for number, name in enumerate(self.names)}
        hidden = tuple(
            Message(message.role, self._pattern.sub(lambda typed: quoted[typed.group()], message.content))
            for message in conversation
        )
        text = self._template(hidden)
        places = dict(self._own(text))
        pieces: list[str] = []
        own: list[tuple[int, int]] = []
        end = length = 0
        for number_in_text in re.finditer(rf"{sign}(\d{{{width}}}){sign}", text):
            begin = number_in_text.start()
            pieces += [text[end:begin], self.names[int(number_in_text[1])]]
            # Positions of the template's own tokens move by what the replacements before them have changed.
            own += [(length + start - end, number) for start, number in places.items() if end <= start < begin]
            length += len(pieces[-2]) + len(pieces[-1])
            end = number_in_text.end()
        pieces.append(text[end:])
        own += [(length + start - end, number) for start, number in places.items() if start >= end]
        if any(sign in piece for piece in pieces):
            raise ControlTokensError(f"the chat template cuts or changes typed control tokens. {REMEDY}")
        return RenderedText("".join(pieces), tuple(own))

    def _own(self, text: str) -> list[tuple[int, int]]:
        """Return (character, index in `names`) of every control token that the tokenizer reads by its name in a text.

        Raises ControlTokensError for a tokenizer written in Python, which gives no positions.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            kind = type(self.tokenizer).__name__
            raise ControlTokensError(f"{kind} cannot tell control tokens typed in a text from its own. {REMEDY}")
        encoded = backend.encode(text, add_special_tokens=False)
        own = []
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            number = self._number_of.get(token)
            # The span of a token may begin with white space that it absorbs, so its name is looked for inside the span.
            if number is not None and (place := text.find(self.names[number], start, stop)) >= 0:
                own.append((place, number))
        return own

    def encode(self, rendered: RenderedText) -> list[int]:
        """Return the tokens of a text, in which only the template's own control tokens are control tokens.

        Raises ControlTokensError if this tokenizer cannot read control tokens as text.
        """
        tokens: list[int] = self._encoded(rendered).ids
        return tokens

    def starts(self, text: str) -> list[int]:
        """Return the character at which each token of a message begins, with control tokens read as text.

        Raises ControlTokensError as `encode` does.
        """
        return [start for start, _ in self._encoded(RenderedText(text, ())).offsets]

    def _encoded(self, rendered: RenderedText) -> Any:
        """Encode a text with the renamed copy, after renaming the template's own control tokens in it."""
        text, sign = rendered.text, sign_for([rendered.text])
        pieces, end = [], 0
        for start, number in rendered.own or ():
            name = self.names[number]
            # It does not if the text was cut inside the name.
            if text.startswith(name, start):
                pieces += [text[end:start], f"{sign}{number}{sign}"]
                end = start + len(name)
        return self._copy(sign).encode("".join([*pieces, text[end:]]), add_special_tokens=False)

    def _copy(self, sign: str) -> Any:
        """Return the tokenizer with other names for its control tokens: their index, quoted by this sign."""
        if sign not in self._copies:
            # Nearly all texts take the first sign, so one copy is enough to keep.
            self._copies.clear()
            names = {name: f"{sign}{number}{sign}" for number, name in enumerate(self.names)}
            self._copies[sign] = _copy_of(self.tokenizer, names)
        return self._copies[sign]

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _find_names(self, prompt: str) -> set[str]:
        """Return the names of the control tokens of this tokenizer and its template."""
        # With this option the tokenizer reads no control tokens at all, not even the template's.
        if getattr(self.tokenizer, "split_special_tokens", False):
            return set()
        added = {str(token.content): bool(token.special) for token in self.tokenizer.added_tokens_decoder.values()}
        special = {name for name, is_special in added.items() if is_special} | set(self.tokenizer.all_special_tokens)
        reserved = {name for name in added if any(part in name.lower() for part in RESERVED)}
        turns = [Message(role, SIGNS[number]) for number, role in enumerate(("system", "user", "assistant") * 2)]
        # Some models do not mark the tokens around turns as special, so conversations are rendered to see which added
        # tokens the template writes. Noncharacters as content keep tokens of the content out.
        written: set[int] = set()
        for probe in (turns[1:3], turns[:3], [*turns[1:3], *turns[4:]]):
            try:
                written |= set(self._tokens(self._template(tuple(probe))))
            except RenderError:
                # The template has no system role, or takes a single exchange only.
                continue
        # Control tokens in the system prompt are the user's own words, and no sign that the template writes them.
        written -= set(self._tokens(prompt)) if prompt else set()
        around = {name for name in added if self.tokenizer.convert_tokens_to_ids(name) in written}
        # Some models pad with a single character such as `!`. It stays ordinary text: a copy of the tokenizer in which
        # it has another name could not encode the character.
        return {name for name in special | reserved | around if len(name.strip()) > 1 and not OF_REPLIES.search(name)}


def sign_for(texts: Iterable[str]) -> str:
    """Return a sign, or else a sequence of several signs, that none of the texts contains."""
    held = "\0".join(texts)
    signs = ("".join(several) for several in chain(*(permutations(SIGNS, size) for size in range(1, len(SIGNS)))))
    return next(sign for sign in signs if sign not in held)


def _copy_of(tokenizer: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a tokenizer's backend with the same token ids, some of them under other names.

    Raises ControlTokensError if a renamed token does not keep its id.
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
            raise ControlTokensError(f"this tokenizer cannot give {wrong[0]!r} another name. {REMEDY}")
    return _copies[key]


def _renamed(text: str, names: Mapping[str, str]) -> Any:
    """Return a tokenizer from its serialised `text`, with tokens renamed by `names`: old name -> new name."""
    content = json.loads(text)
    # The chat template has written everything that belongs to the conversation, so nothing may be added or cut.
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
        # A merge that produces the old name would rebuild the control token from its letters.
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    return Tokenizer.from_str(json.dumps(content))
