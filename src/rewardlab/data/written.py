"""Turns that a chat template leaves out: a score that does not depend on what was said there is refused, not given.

Many templates write turns of users and assistants alone, and pass over tool turns, or over system turns after the
first turn, without an error. Some write the last question alone, or pass over an assistant's turn that opens the
conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rewardlab.core.errors import RenderError
from rewardlab.core.types import Conversation, Message

TRIED: Final = ("user", "assistant")
"""The roles of the conversations that a renderer is tried out with when it is built."""
MOST_KEPT: Final = 4096
"""Orders of roles whose answer is kept. Long agent conversations have ever new ones, and a server runs for months."""


class WrittenTurns:
    """Knows for conversations of some roles whether a template writes their turns. `template` renders, or raises
    RenderError."""

    def __init__(self, template: Callable[[Conversation], str]) -> None:
        self._template = template
        self._left_out: dict[tuple[str, ...], tuple[int | None]] = {}

    def require(self, conversation: Conversation) -> None:
        """Raise RenderError if the template leaves out a turn, other than a system turn that is the first one.

        It does not look at content, since a template may well take thoughts out of turns. That system turn may be left
        out, because that is the same for all conversations and told when the renderer is built.
        """
        roles = tuple(message.role for message in conversation)
        if roles == TRIED:
            return
        # A tuple, since None is an answer; another thread may empty the dictionary at any time.
        known = self._left_out.get(roles)
        if known is None:
            if len(self._left_out) >= MOST_KEPT:
                self._left_out.clear()
            known = self._left_out[roles] = (self._find(roles),)
        (place,) = known
        if place is not None:
            raise RenderError(
                f"the chat template leaves out turn {place + 1} ({roles[place]}), so no score would depend on it. "
                f"Write it into another turn, or take it out."
            )

    def _find(self, roles: tuple[str, ...]) -> int | None:
        """Return the number of the first such turn, from 0; None if there is none or the template refuses the roles."""
        turns = tuple(Message(role, f"said{number}here") for number, role in enumerate(roles))
        try:
            text = self._template(turns)
            for place, turn in enumerate(turns):
                if (turn.role == "system" and not place) or turn.content in text:
                    continue
                # It may be written in another form: what counts is that another content makes another text.
                other = (*turns[:place], replace(turn, content="otherwise"), *turns[place + 1 :])
                if self._template(other) == text:
                    return place
        except RenderError:
            return None
        return None
