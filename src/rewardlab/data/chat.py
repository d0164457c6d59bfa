"""The renderer: messages -> token ids. It is the only such path, in training, evaluation, scoring, serving and RL.

A conversation becomes text through one chat template: the tokenizer's own, or the plain transcript below for base
models without one. The text becomes tokens with nothing added, so there is a BOS exactly if the template writes one.
The score is read at the last token of that rendering.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.spec import CUT_FEWEST, CUT_MIDDLE, REFUSING, STOP, RendererSpec, why_no_model
from rewardlab.core.terminal import brief
from rewardlab.core.types import UNLISTED, Conversation, IntArray, Message, Preference, TokenGroup
from rewardlab.data.cutting import cut, cut_middle
from rewardlab.data.layout import Rendered, build_group, common_prefix_length, common_text
from rewardlab.data.limits import require_embedded, within_limits
from rewardlab.data.longest import longest_token
from rewardlab.data.markers import Markers, RenderedText
from rewardlab.data.rows import ROLES, UnusableRowError, beside_content, joined_parts, media_of, said_by
from rewardlab.data.written import WrittenTurns

SENTINELS: Final = ("@", "#")
"""Replies that replace the real one to find where its content begins. One of them differs from its first character."""
OVERLONG: Final = "overlong"
"""Cause of rows that `--truncation drop` leaves out."""
PROMPT_TOO_LONG: Final = "prompt_too_long"
"""Cause of rows whose prompt may not be cut and is too long."""


class ReplyTooLong(RenderError):
    """A reply does not fit the limit even without its prompt. Callers count such replies."""


class PromptTooLong(ReplyTooLong):
    """The prompt may not be cut, and leaves no room for a beginning and an end of the reply."""


class Overlong(RenderError):
    """A conversation is above the limit and may not be cut; `prompt` says whether its prompt alone is."""

    def __init__(self, said: str, *, prompt: bool = False, num_tokens: int | None = None) -> None:
        super().__init__(f"the {'prompt' if prompt else 'conversation'} {said}")
        self.prompt = prompt
        self.num_tokens = num_tokens
        """Tokens of the conversation; None if they were not counted."""

    @classmethod
    def counted(cls, num_tokens: int, limit: int) -> Overlong:
        """Return the error for a conversation of this many tokens."""
        return cls(f"takes {num_tokens} tokens, above the model's limit of {limit}.", num_tokens=num_tokens)


class EndsInPadding(RenderError):
    """A rendering ends in the padding token, which engines would ignore as padding. Callers count such rows."""


class Renderer:
    """Turns conversations into tokens, as its spec says.

    `tokenizer` is a Hugging Face tokenizer. Its chat template is replaced by that of the spec.
    """

    def __init__(self, tokenizer: Any, spec: RendererSpec) -> None:
        self.tokenizer = tokenizer
        self.spec = spec
        self.pad_token_id: int | None = None
        """The token with which engines pad batches, if known: they read the score at the last other token."""
        self.num_embeddings: int | None = None
        """How many tokens the model has embeddings for, if known."""
        tokenizer.chat_template = spec.chat_template

    @property
    def refuses(self) -> bool:
        """Return whether conversations above the limit are not cut, because the model was trained without any."""
        return self.spec.truncation in REFUSING

    @property
    def what_is_cut(self) -> str:
        """The part that a conversation above the limit loses, if it may be cut."""
        return "the middle of the reply" if self.spec.truncation == CUT_MIDDLE else "old turns"

    @cached_property
    def that_cuts(self) -> Renderer:
        """A renderer that cuts conversations at the left of the prompt where this one refuses them."""
        return self.by(truncation=CUT_FEWEST) if self.refuses else self

    def by(self, *, truncation: str | None = None, max_length: int | None = None) -> Renderer:
        """Return a renderer that is like this one in all but its rule of truncation or its limit."""
        rule = truncation or self.spec.truncation
        limit = self.spec.max_length if max_length is None else max_length
        other = Renderer(self.tokenizer, replace(self.spec, truncation=rule, max_length=limit))
        other.pad_token_id, other.num_embeddings = self.pad_token_id, self.num_embeddings
        # Finding them takes longer than rendering a conversation, and neither rule nor limit changes them.
        other.__dict__ |= {name: self.__dict__[name] for name in ("markers", "written") if name in self.__dict__}
        return other

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the rendered text of a conversation. Raises RenderError with the template's words if it refuses."""
        return self._apply_template([messages], add_generation_prompt=add_generation_prompt)[0]

    @cached_property
    def markers(self) -> Markers:
        """The control tokens of this tokenizer and its template."""
        return Markers(self.tokenizer, self._render, prompt=self.spec.system_prompt or "")

    @cached_property
    def written(self) -> WrittenTurns:
        """What this template does with turns of tools, and of the system in between."""
        return WrittenTurns(self._render)

    @cached_property
    def most_characters(self) -> int | None:
        """Most characters that the text of a conversation within the limit has; None if that is not known."""
        longest = longest_token(self.tokenizer)
        return None if longest is None else longest * self.spec.max_length

    def num_typed(self, messages: Sequence[Message]) -> int:
        """Return the number of control tokens typed in the messages."""
        return self.markers.count(messages)

    def texts(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return `text` of each conversation, in one call, which is faster.

        A conversation alone that the template refuses for control tokens typed in it, where these are text, is rendered
        without showing them to the template. Raises RenderError if the template refuses any of them.
        """
        try:
            return self._apply_template(conversations, add_generation_prompt=False) if conversations else []
        except RenderError:
            keeps = self.spec.special_tokens_in_text == "keep"
            if keeps or len(conversations) > 1 or not self.num_typed(conversations[0]):
                raise
            return [self.markers.hiding_typed(conversations[0]).text]

    def encode_all(
        self, conversations: Sequence[Conversation], texts: Sequence[str]
    ) -> list[tuple[RenderedText, IntArray] | RenderError]:
        """Return text and tokens of each conversation, or the error for it. `texts` are their rendered texts.

        One call of the tokenizer for all texts is faster than one for each.
        """
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [self._reread(*each) for each in zip(conversations, texts, encoded, strict=True)]

    def _reread(
        self, conversation: Conversation, text: str, token_ids: Sequence[int]
    ) -> tuple[RenderedText, IntArray] | RenderError:
        """Return text and tokens of a conversation, with typed control tokens read as the spec says, or the error."""
        rendered, is_text = RenderedText(text), self.spec.special_tokens_in_text == "text"
        try:
            self.written.require(conversation)
            if is_text and (told := self.markers.tell_apart(conversation, token_ids)) is not None:
                rendered, token_ids = told, self.markers.encode(told)
            require_embedded(token_ids, self.num_embeddings, self.tokenizer)
        except RenderError as error:
            return error
        return rendered, np.asarray(token_ids, dtype=np.int32)

    def encode_beginnings(self, texts: Sequence[RenderedText]) -> list[IntArray]:
        """Return the tokens of each beginning of a text that was encoded before."""
        plain = [one.text for one in texts if one.own is None]
        encoded = iter(self.tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else [])
        return [
            np.asarray(next(encoded) if one.own is None else self.markers.encode(one), dtype=np.int32) for one in texts
        ]

    def _encode(self, conversation: Conversation) -> tuple[RenderedText, IntArray]:
        """Return text and tokens of one conversation. Raises RenderError."""
        (outcome,) = self.encode_all([conversation], self.texts([conversation]))
        if isinstance(outcome, RenderError):
            raise outcome
        return outcome

    def _render(self, conversation: Conversation) -> str:
        return self._apply_template([conversation], add_generation_prompt=False)[0]

    def _apply_template(self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool) -> list[str]:
        """Render conversations in one call of the template engine. Raises RenderError if it refuses any of them."""
        try:
            rendered = within_limits(
                lambda: self.tokenizer.apply_chat_template(
                    [[message.as_dict() for message in messages] for messages in conversations],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.spec.template_arguments,
                ),
                self.spec.chat_template,
                [sum(len(message.content) for message in messages) for messages in conversations],
            )
        except Exception as error:
            # A template is a program by somebody else and may raise anything.
            roles = ", ".join(message.role for message in conversations[0])
            raise RenderError(f"the chat template refuses a conversation with roles [{roles}]: {error}") from error
        return [str(text) for text in rendered]

    def token_ids(self, messages: Sequence[Message]) -> IntArray:
        """Return the whole conversation as tokens, without truncation. Raises RenderError as `text` does."""
        return self._encode(tuple(messages))[1]

    def render(self, prompt: Conversation, reply: Conversation) -> Rendered:
        """Return prompt and reply as tokens, cut to the limit by the rule that training, evaluation and serving share.

        By most rules whole exchanges are cut first, oldest first, then the start of the oldest one left. Opening system
        turns, the headers and the last turn stay. By `CUT_MIDDLE` only the last turn loses its middle. The tokens
        depend on the conversation alone, not on where the prompt ends, so a reply of several turns may lose its own
        oldest ones.

        Raises Overlong if the rule cuts nothing, ReplyTooLong if the last turn alone does not fit (PromptTooLong if the
        prompt leaves no room for it), RenderError if the template refuses the conversation, if control tokens cannot be
        told apart, or if the rendering ends in an unexpected token.
        """
        text, token_ids = self._encode(prompt + reply)
        if len(token_ids) > self.spec.max_length:
            return self.render_cut(prompt, reply, full_length=len(token_ids))
        return self._finish(prompt, reply, text, token_ids, truncated_tokens=0)

    def render_cut(self, prompt: Conversation, reply: Conversation, *, full_length: int) -> Rendered:
        """Return what `render` does, for a conversation known to take `full_length` tokens, above the limit.

        Raises as it does.
        """
        if self.refuses:
            raise Overlong.counted(full_length, self.spec.max_length)
        conversation, text, token_ids = self._cut((prompt + reply)[:-1], reply[-1:])
        num_reply = min(len(reply), sum(message.role != "system" for message in conversation))
        prompt, reply = conversation[:-num_reply], conversation[-num_reply:]
        lost = full_length - len(token_ids)
        if self.spec.truncation == CUT_MIDDLE:
            rendered = self._finish(prompt, reply, text, token_ids, truncated_tokens=0)
            return replace(rendered, truncated_reply_tokens=lost)
        return self._finish(prompt, reply, text, token_ids, truncated_tokens=lost)

    def _finish(
        self,
        prompt: Conversation,
        reply: Conversation,
        text: RenderedText,
        token_ids: IntArray,
        *,
        truncated_tokens: int,
    ) -> Rendered:
        """Return the rendering, of which text and tokens are known, with the number of tokens before the content of the
        reply."""
        self.require_known_end(token_ids)
        (other,) = self.texts([with_sentinel(prompt, reply)])
        (before,) = self.encode_beginnings([common_beginning(text, other)])
        return Rendered(
            token_ids=token_ids,
            prompt_tokens=common_prefix_length([before, token_ids]),
            truncated_tokens=truncated_tokens,
            num_typed=self.num_typed(prompt + reply),
        )

    def group(self, preference: Preference) -> TokenGroup | str:
        """Return a preference as tokens, or the cause for which it cannot be used, as `build_group` does."""
        return self.build_group(preference, [self._rendered(preference.prompt, reply) for reply in preference.replies])

    def _rendered(self, prompt: Conversation, reply: Conversation) -> Rendered | RenderError:
        try:
            return self.render(prompt, reply)
        except RenderError as error:
            return error

    def build_group(
        self, preference: Preference, results: Sequence[Rendered | RenderError], *, keep_identical: bool = False
    ) -> TokenGroup | str:
        """Return the group of the replies that could be rendered, or the cause why there is none.

        `results` are the rendering of each reply, or its error. With `keep_identical`, equal tokens are compared too.
        Causes: `reply_too_long` (no judgement left within the limit; `prompt_too_long` where the prompt may not be
        cut), `identical_tokens` (of all judged replies), `overlong` (such rows are left out, and this is one).

        Raises RenderError, naming the row, if no judgement is left without replies that have none for other reasons;
        DataError if conversations above the limit are to end the run.
        """
        errors = {number: result for number, result in enumerate(results) if isinstance(result, RenderError)}
        refused = {number: error for number, error in errors.items() if not isinstance(error, ReplyTooLong | Overlong)}
        overlong = next((error for error in results if isinstance(error, Overlong)), None)
        if overlong and any(one.first not in refused and one.second not in refused for one in preference.comparisons):
            return self.left_out(preference, overlong)
        rendered = {number: result for number, result in enumerate(results) if isinstance(result, Rendered)}
        group = build_group(preference, rendered, keep_identical=keep_identical)
        if refused and group == "reply_too_long":
            first = next(iter(refused.values()))
            raise type(first)(f"{preference.id}: {first}") from first
        return PROMPT_TOO_LONG if group == "reply_too_long" and self.spec.truncation == CUT_MIDDLE else group

    def left_out(self, preference: Preference, error: Overlong) -> str:
        """Return the cause of a preference with a conversation above the limit that is left out for it.

        Raises DataError, naming the row, if such a row is to end the run.
        """
        if self.spec.truncation == STOP:
            raise DataError(
                f"{preference.id}: a conversation takes {error.num_tokens} tokens, above the limit of "
                f"{self.spec.max_length} (--truncation error). Shorten the row or take it out; a training run may also "
                f"raise --max-seq-len, or take another --truncation: prompt-left, reply-middle, drop."
            )
        return OVERLONG

    def _cut(self, prompt: Conversation, reply: Conversation) -> tuple[Conversation, RenderedText, IntArray]:
        """Return (what is kept of prompt + reply, its text, its tokens). Raises ReplyTooLong if the reply does not
        fit."""
        texts: dict[Conversation, RenderedText] = {}

        def encode(conversation: Conversation) -> IntArray:
            texts[conversation], token_ids = self._encode(conversation)
            return token_ids

        limit = self.spec.max_length
        if self.spec.truncation == CUT_MIDDLE:
            kept, token_ids = cut_middle(prompt + reply, encode=encode, starts_of=self._token_starts, limit=limit)
            if kept is None:
                raise PromptTooLong(
                    f"the prompt leaves no room for a beginning and an end of the reply: {len(token_ids)} tokens are "
                    f"above the limit of {limit} (--max-seq-len when the model was trained)."
                )
            return kept, texts[kept], token_ids
        kept, token_ids = cut(
            prompt + reply,
            num_last=len(reply),
            encode=encode,
            starts_of=self._token_starts,
            limit=limit,
            rule=self.spec.truncation,
        )
        if kept is None:
            raise ReplyTooLong(
                f"a reply takes {len(token_ids)} tokens with its headers, above the limit of {limit} "
                f"(--max-seq-len when the model was trained)."
            )
        return kept, texts[kept], token_ids

    def _token_starts(self, content: str) -> list[int]:
        """Return the character at which each token of `content` begins."""
        if self.spec.special_tokens_in_text == "text" and self.num_typed([Message("user", content)]):
            return self.markers.starts(content)
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)
            return [start for start, _ in encoded["offset_mapping"]]
        # A tokenizer written in Python gives no positions: every character is taken for a token, so cuts are finer.
        return list(range(len(content)))

    def require_known_end(self, token_ids: IntArray) -> None:
        """Raise RenderError unless a rendering ends like every other, EndsInPadding if it ends in the padding token."""
        final = self.spec.final_token_id
        if final is None and token_ids[-1] == self.pad_token_id:
            raise EndsInPadding(
                f"a rendering ends in token {token_ids[-1]}, by which this model's batches are padded, so engines "
                f"would read its score one token too early. Leave it out, or use a chat template that ends each turn."
            )
        if final is not None and token_ids[-1] != final:
            raise RenderError(
                f"a rendering ends in token {token_ids[-1]} where every other ends in {final}; the chat template "
                f"treats this conversation differently, so its score could not be compared."
            )


def load_tokenizer(folder_or_name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model folder or hub name.

    Raises RenderError if there is none, or if it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        # Else transformers takes mistral-common for Mistral's models where it is installed, without chat templates.
        tokenizer = AutoTokenizer.from_pretrained(
            folder_or_name, trust_remote_code=trust_remote_code, mistral_format=False
        )
        # Long texts are cut by the rule and counted here; transformers would warn of "indexing errors" in the model.
        getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer
    except Exception as error:
        # For damaged files transformers and tokenizers raise errors of any type.
        said = why_no_model(folder_or_name) or next(iter(str(error).splitlines()), type(error).__name__)
        raise RenderError(
            f"no tokenizer for {folder_or_name!r}: {said} "
            f"Give a hub name, or a folder that holds config.json, tokenizer files and weights."
        ) from error


def to_messages(messages: Sequence[object]) -> Conversation:
    """Return messages from `Message`s and from mappings, which are read as those of training data: with role and
    content, as in chat APIs, or with from and value; a content in text parts is joined.

    Raises RenderError for anything else, and for what would be lost or misread: tool calls or reasoning beside the
    content, unknown roles, content that is not text.
    """
    if isinstance(messages, UNLISTED) or not isinstance(messages, Iterable):
        raise RenderError(f"a conversation is a list of messages, got {_shortened(messages)}. Put it into a list.")
    turns = []
    for message in messages:
        if not isinstance(message, Message | Mapping):
            raise RenderError(f"a message has a role and a content, got {_shortened(message)}.")
        if not isinstance(message, Message):
            if beside := beside_content(message):
                raise RenderError(
                    f"a message has {beside}, and its content alone would be scored. Write it into the content as the "
                    f"model read it in training, or take {beside} out."
                )
            if media := media_of(message):
                raise RenderError(f"a message has {media} beside its text, which no model here reads. Leave it out.")
            role, content, roles = said_by(message)
            try:
                content = joined_parts(content)
            except UnusableRowError as error:
                raise RenderError(f"a message has more than text: {error.detail}. Leave it out.") from error
            if not isinstance(role, str) or not isinstance(content, str):
                # Show only the keys: the contents of messages may be private, and errors get into logs.
                keys = ", ".join(repr(key)[:40] for key in list(message)[:8]) or "none"
                had = f"got one with the keys {keys}, and content of type {type(content).__name__}"
                raise RenderError(f"a message needs a role and a text as content, {had}.")
            message = Message(roles.get(role, role), content)
        if message.role not in ROLES:
            raise RenderError(f"unknown role {brief(message.role)}. Roles are {', '.join(ROLES)}.")
        turns.append(message)
    return tuple(turns)


def _shortened(value: object) -> str:
    return text if len(text := repr(value)) <= 80 else f"{text[:80]} …"


def with_sentinel(prompt: Conversation, reply: Conversation) -> Conversation:
    """Return the conversation with another text in place of the reply's content.

    The content begins where the two renderings differ. The generation prompt would not do: templates may write more
    before a reply than their generation prompt contains.
    """
    start = reply[0].content.lstrip()
    sentinel = next(mark for mark in SENTINELS if not start.startswith(mark))
    return (*prompt, Message(reply[0].role, sentinel), *reply[1:])


def common_beginning(first: RenderedText, second: str) -> RenderedText:
    """Return the beginning of the first text up to where the second differs."""
    return first.beginning(len(common_text(first.text, second)))
