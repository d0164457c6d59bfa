"""How objects become rollouts: conversations, (prompt, reply), and whatever a function of the user makes of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.types import UNLISTED, Conversation, Message, is_readable
from rewardlab.data.chat import to_messages
from rewardlab.data.prompts import conversations_of
from rewardlab.data.rows import show
from rewardlab.rl.config import TEXT_AS, RenderFn, TextAs
from rewardlab.rl.rollouts import Rollout, RolloutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How objects become rollouts."""

    joins_texts: bool
    """Whether every model takes texts without a template, so that plain texts need no `text_as`."""
    text_as: TextAs | None = None
    render_fn: RenderFn | None = None

    def rollouts(self, given: Iterable[Any]) -> list[Rollout]:
        """Return a rollout for each object, in order.

        An object is a `Rollout`, a conversation (messages, the reply last), (prompt, reply), or whatever `render_fn`
        makes one of these, a text or token ids of.

        Raises RolloutError naming an object of any other kind, and ConfigError for plain texts if `text_as` does not
        say how to read them.
        """
        if isinstance(given, str | Mapping | Message):
            raise RolloutError("wanted a list of rollouts, got a single one. Put it into a list.")
        if isinstance(given, UNLISTED) or not isinstance(given, Iterable):
            raise RolloutError(f"wanted a list of rollouts, got {show(given)}.")
        return [self.rollout(one, name=f"rollout {number}", number=number) for number, one in enumerate(given)]

    def rollout(self, given: Any, *, name: str, number: int = 0) -> Rollout:
        """Return the rollout of one object. Raises as `rollouts` does."""
        try:
            return self._checked(self._read(given, name=name), name)
        except RolloutError as error:
            raise RolloutError(str(error), rollouts=(number,)) from error.__cause__
        except RenderError as error:
            raise RolloutError(f"{name}: {error}", rollouts=(number,)) from error

    def _read(self, given: Any, *, name: str) -> Rollout:
        if isinstance(given, Rollout):
            return given
        if self.render_fn is not None:
            made = self.render_fn(given)
            if isinstance(made, Rollout):
                return made
            if isinstance(made, str):
                return Rollout(name=name, rendered=made)
            if (tokens := _tokens(made)) is not None:
                return Rollout(name=name, rendered=tokens)
            given = made
        if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], Mapping | Message):
            return self._pair(*given, name=name)
        turns = _listed(given)
        if turns is None:
            raise RolloutError(
                f"{name}: it is {_kind(given)}; wanted a list of messages that ends with the reply, or (prompt, "
                f"reply). For objects of your own give render_fn, a function that makes one of these."
            )
        return Rollout(name=name, conversation=to_messages(turns))

    def _pair(self, prompt: Any, reply: Any, *, name: str) -> Rollout:
        """Return the rollout of a prompt and a reply, each a text or messages."""
        turns = None if isinstance(reply, str) else _listed(reply)
        if not isinstance(reply, str) and turns is None:
            raise RolloutError(f"{name}: the reply is {_kind(reply)}; wanted a text or a list of messages.")
        if isinstance(prompt, str):
            if turns is None and self.text_as == "rendered":
                return Rollout(name=name, rendered=prompt + str(reply))
            return Rollout(name=name, conversation=self._after_text(prompt, reply, turns))
        prompt_turns = _listed(prompt)
        if prompt_turns is None:
            raise RolloutError(f"{name}: the prompt is {_kind(prompt)}; wanted a text or a list of messages.")
        before = to_messages(prompt_turns)
        if not before:
            raise RolloutError(f"{name}: the prompt has no messages.")
        if before[-1].role == "assistant":
            raise RolloutError(
                f"{name}: the prompt ends with a turn of the assistant, and the reply would be a part of it. A reward "
                f"model scores a whole turn: end the prompt with another role."
            )
        return Rollout(name=name, conversation=(*before, *_reply_turns(reply, turns)))

    def _after_text(self, prompt: str, reply: Any, turns: list[Any] | None) -> Conversation:
        """Return the conversation of a prompt that is a text. Raises ConfigError unless it is said how to read it."""
        text_as = self.text_as or ("transcript" if self.joins_texts else None)
        if text_as is None:
            choices = "; ".join(f"{name!r}: {meaning}" for name, meaning in TEXT_AS.items())
            raise ConfigError(
                f"text_as: the prompts are plain texts, and the reward model was trained with a chat template, so it "
                f"has to be said how they are read. Give messages, or text_as, one of {choices}."
            )
        if text_as == "rendered":
            raise ConfigError("text_as='rendered' joins two texts, and the replies are messages. Give texts for both.")
        if text_as == "turns":
            return (Message("user", prompt), *_reply_turns(reply, turns))
        if turns is None:
            return conversations_of(prompt, [reply], bare=self.joins_texts)[0]
        return (*conversations_of(prompt, [""], bare=self.joins_texts)[0][:-1], *_reply_turns(reply, turns))

    def _checked(self, rollout: Rollout, name: str) -> Rollout:
        """Return a rollout that can be scored. Raises RolloutError."""
        if rollout.rendered is not None:
            if rollout.conversation or not len(rollout.rendered):
                what = "it has both turns and a rendering" if rollout.conversation else "its rendering is empty"
                raise RolloutError(f"{name}: {what}. Give the turns, or what the model is to read.")
            return replace(rollout, rendered=_readable_rendering(rollout.rendered, name))
        turns = to_messages(rollout.conversation)
        if not turns or turns[-1].role != "assistant":
            last = f"a turn of the {turns[-1].role}" if turns else "nothing"
            raise RolloutError(f"{name}: it ends with {last}; wanted the assistant's reply, which is what is rewarded.")
        for turn in turns:
            _require_readable(turn.content, name)
        return replace(rollout, conversation=turns)


def _readable_rendering(rendered: Any, name: str) -> str | tuple[int, ...]:
    """Return the text or the token ids that a model is to read. Raises RolloutError for anything else."""
    if isinstance(rendered, str):
        _require_readable(rendered, name)
        return rendered
    tokens = _tokens(rendered)
    if tokens is None or min(tokens) < 0:
        raise RolloutError(f"{name}: its rendering is {_kind(rendered)}; wanted a text, or token ids from 0 up.")
    return tokens


def _require_readable(text: str, name: str) -> None:
    """Raise RolloutError for half of a surrogate pair, which no tokenizer can read."""
    if not is_readable(text):
        raise RolloutError(
            f"{name}: a text has half a surrogate pair, which no tokenizer can read. Replace it in the data."
        )


def _reply_turns(reply: Any, turns: list[Any] | None) -> Conversation:
    return (Message("assistant", reply),) if turns is None else to_messages(turns)


def _listed(value: Any) -> list[Any] | None:
    """Return a sequence as a list, None for anything else. Arrays of objects, which trainers send, are sequences."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return list(listed) if isinstance(listed, list | tuple) else None


def _tokens(value: Any) -> tuple[int, ...] | None:
    """Return token ids as a tuple, None for anything else."""
    listed = _listed(value)
    if not listed or any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        return None
    return tuple(listed)


def _kind(value: Any) -> str:
    """Return, in words, what kind of object this is, without repeating its contents."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"a text of {len(value):,} characters"
    return f"a {type(value).__name__}"
