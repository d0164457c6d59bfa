"""Rendered replies -> a TokenGroup: the tokens that all replies share once, then one suffix a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rewardlab.core.types import IntArray, Preference, TokenGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One conversation as tokens."""

    token_ids: IntArray
    prompt_tokens: int
    """Tokens before the reply's content."""
    truncated_tokens: int
    """Prompt tokens that were cut to fit the limit."""
    num_typed: int = 0
    """Control tokens typed in the messages."""
    truncated_reply_tokens: int = 0
    """Tokens that were cut from the middle of the reply to fit the limit."""

    @property
    def full_length(self) -> int:
        """Tokens of the conversation before anything was cut."""
        return len(self.token_ids) + self.truncated_tokens + self.truncated_reply_tokens


def build_group(
    preference: Preference, rendered: Mapping[int, Rendered], *, keep_identical: bool = False
) -> TokenGroup | str:
    """Return the group of the replies that could be rendered, or the cause for which nothing is left to compare.

    `rendered` maps the index of a reply to its rendering; replies that do not fit the limit are absent. With
    `keep_identical`, replies of equal tokens are compared too.
    """
    judged = [c for c in preference.comparisons if c.first in rendered and c.second in rendered]
    if not judged:
        return "reply_too_long"
    # Replies that differ only in what truncation cut have equal tokens, and so equal scores: nothing can be learned.
    comparisons = tuple(
        c
        for c in judged
        if keep_identical or not np.array_equal(rendered[c.first].token_ids, rendered[c.second].token_ids)
    )
    if not comparisons:
        return "identical_tokens"
    return lay_out(replace(preference, comparisons=comparisons), rendered)


def lay_out(preference: Preference, rendered: Mapping[int, Rendered]) -> TokenGroup:
    """Return the group of the rendered replies: shared tokens once, and a suffix of at least one token for each reply.

    If some replies could not be rendered, comparisons and ranking count the others; `numbers` says which these are.
    """
    kept = sorted(rendered)
    number = {index: position for position, index in enumerate(kept)}
    conversations = [rendered[index].token_ids for index in kept]
    # Each reply keeps a token of its own, since the score is read at the last token of its suffix.
    num_shared = min(common_prefix_length(conversations), min(len(ids) for ids in conversations) - 1)
    ranking = preference.ranking
    return TokenGroup(
        preference_id=preference.id,
        source=preference.source,
        prompt_key=preference.key,
        shared=conversations[0][:num_shared],
        suffixes=tuple(ids[num_shared:] for ids in conversations),
        prompt_tokens=tuple(rendered[index].prompt_tokens for index in kept),
        truncated_tokens=tuple(rendered[index].truncated_tokens for index in kept),
        truncated_reply_tokens=tuple(rendered[index].truncated_reply_tokens for index in kept),
        num_typed=sum(rendered[index].num_typed > 0 for index in kept),
        comparisons=tuple(replace(c, first=number[c.first], second=number[c.second]) for c in preference.comparisons),
        ranking=tuple(number[index] for index in ranking if index in number) if ranking is not None else None,
        numbers=tuple(kept),
    )


def common_prefix_length(sequences: Sequence[IntArray]) -> int:
    """Return the length of the longest prefix that all sequences share."""
    length = min(len(sequence) for sequence in sequences)
    first = sequences[0][:length]
    for sequence in sequences[1:]:
        differs = np.flatnonzero(first != sequence[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def common_text(first: str, second: str) -> str:
    """Return the beginning that two texts share; all of `first` if it begins with `second`."""
    if first.startswith(second):
        return first
    # Bisection over slices is much faster than comparing characters: they share at least `low` and at most `high`.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return first[:low]
