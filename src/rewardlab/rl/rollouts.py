"""Rollouts: the replies of a policy that are rewarded in reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rewardlab.core.errors import RewardlabError
from rewardlab.core.types import Conversation


class RolloutError(RewardlabError):
    """A rollout has no reward that could be trained on. `rollouts` are the numbers of the rollouts concerned."""

    def __init__(self, message: str, *, rollouts: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rollouts = rollouts

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel whole to another process, as trainers send errors from their workers."""
        return _rollout_error, (str(self), self.rollouts)


def _rollout_error(message: str, rollouts: tuple[int, ...]) -> RolloutError:
    return RolloutError(message, rollouts=rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One reply to be rewarded: a conversation that ends with it, or the text or tokens that the model is to read."""

    name: str
    """Name in messages, such as `rollout 3`."""
    conversation: Conversation = ()
    """All turns, the reply last; empty if `rendered` is given."""
    rendered: str | tuple[int, ...] | None = None
    """The conversation as the reward model is to read it: a text, or its token ids. No template is applied."""


def named(rollouts: Sequence[Rollout]) -> str:
    """Return the name of the first of some rollouts, and how many more there are."""
    if not rollouts:
        return "no rollouts"
    more = f" and {len(rollouts) - 1} more" if len(rollouts) > 1 else ""
    return f"{rollouts[0].name}{more}"


@contextmanager
def naming(rollouts: Sequence[Rollout]) -> Iterator[None]:
    """Put the names of the rollouts concerned before the message of a RolloutError that knows only their numbers."""
    try:
        yield
    except RolloutError as error:
        concerned = [rollouts[number] for number in error.rollouts]
        raise RolloutError(f"{named(concerned)}: {error}", rollouts=error.rollouts) from error
