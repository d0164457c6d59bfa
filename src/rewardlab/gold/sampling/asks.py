"""What is asked of a language model: one reply to one prompt, with a seed of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rewardlab.core.types import Conversation
from rewardlab.gold.files.prompts import Prompt
from rewardlab.gold.kept_results import key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One reply that is wanted."""

    prompt: Conversation
    index: int
    """Which of the replies to this prompt, from 0."""
    seed: int
    """Its own among all of a file, below 2**63."""

    def key(self, decides: Mapping[str, Any]) -> str:
        """Return the name of the reply: by prompt, index, seed, model and parameters."""
        return key_of(prompt=turns_json(self.prompt), index=self.index, seed=self.seed, decides=dict(decides))


def turns_json(prompt: Conversation) -> list[list[str]]:
    """Return a prompt as JSON has it."""
    return [[turn.role, turn.content] for turn in prompt]


def seed_of(base: int, prompt: Conversation, occurrence: int, index: int) -> int:
    """Return the seed of one reply, from 0 to 2**63 − 1.

    It depends on the texts of the prompt, how often it came before, and which reply it is, but neither on its place in
    the file nor on other prompts: parts of a file, and files with more prompts, have the same seeds. With one seed for
    all requests, engines would give prompts that are drawn at the same moment the same noise.
    """
    named = json.dumps([base, turns_json(prompt), occurrence, index]).encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 1


def asks_of(prompts: Iterable[Prompt], num_responses: int, seed: int) -> Iterator[tuple[Prompt, list[Ask]]]:
    """Yield each prompt with what is asked for it."""
    for one in prompts:
        yield (
            one,
            [
                Ask(prompt=one.prompt, index=index, seed=seed_of(seed, one.prompt, one.occurrence, index))
                for index in range(num_responses)
            ],
        )
