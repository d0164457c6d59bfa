"""What a conversation above the limit loses: whole old exchanges, then the start of the oldest one left.

How many tokens a cut leaves is known only once it is encoded: the first characters left may merge with the header
before them, so tokens neither add up nor fall strictly. Both searches therefore start where the answer must be close,
double their steps and halve what is left, and then look at the neighbours that could still be better. They encode a
number of times that grows with the logarithm of the turns and the tokens, each time not much more than the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rewardlab.core.spec import CUT_BY_STEPS
from rewardlab.core.types import Conversation, IntArray, Message

SLACK: Final = 32
"""Tokens above the limit within which one more exchange might still merge into fewer."""
NEIGHBOURS: Final = 3
"""Smaller cuts that all have to fail before a cut counts as the smallest."""
MAX_NEIGHBOURS: Final = 64
"""The most exchanges, or cuts, that are looked at one by one."""
Encode = Callable[[Conversation], IntArray]


def cut(
    conversation: Conversation,
    *,
    num_last: int,
    encode: Encode,
    starts_of: Callable[[str], Sequence[int]],
    limit: int,
    rule: str,
) -> tuple[Conversation | None, IntArray]:
    """(what is kept of a conversation of more than `limit` tokens, its tokens); the last `num_last` turns stay whole.

    Opening system turns stay. Exchanges, which begin at user turns, go while what is left does not fit, and of the last
    one the first turn loses its start: as few tokens as suffice, or under the older rule `CUT_BY_STEPS` what is in
    excess, again and again. `starts_of` gives the characters at which the tokens of a text begin.

    (None, the tokens of the shortest that is left) if even that does not fit.
    """
    prompt, last = conversation[:-num_last], conversation[-num_last:]
    num_system = next((n for n, message in enumerate(prompt) if message.role != "system"), len(prompt))
    system, exchanges = prompt[:num_system], split_exchanges(prompt[num_system:])

    def keeping(number: int) -> Conversation:
        return (*system, *(message for exchange in exchanges[len(exchanges) - number :] for message in exchange), *last)

    found = _most_exchanges(lambda number: encode(keeping(number)), len(exchanges), limit)
    if found is not None:
        return keeping(found[0]), found[1]
    if not exchanges:
        return None, encode(conversation)
    oldest, *others = exchanges[-1]
    starts = starts_of(oldest.content)

    def without(number: int) -> Conversation:
        content = oldest.content[starts[number] :] if number < len(starts) else ""
        return (*system, Message(oldest.role, content), *others, *last)

    whole = encode((*system, oldest, *others, *last))
    search = _cut_by_steps if rule == CUT_BY_STEPS else _fewest_tokens
    number, token_ids = search(lambda number: encode(without(number)), len(starts), limit, whole)
    return (without(number) if len(token_ids) <= limit else None), token_ids


def split_exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Split at user turns, so that what is left still begins with one, as templates require."""
    exchanges: list[list[Message]] = []
    for message in messages:
        if message.role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    return exchanges


def _most_exchanges(encode: Callable[[int], IntArray], count: int, limit: int) -> tuple[int, IntArray] | None:
    """(the most of the last exchanges that fit, their tokens), fewer than `count`, which do not; None if none do."""
    best: tuple[int, IntArray] | None = None
    fitting, failing, excess = 0, count, SLACK + 1
    number = 1
    while failing - fitting > 1:
        token_ids = encode(number)
        if len(token_ids) <= limit:
            best, fitting = (number, token_ids), number
        else:
            failing, excess = number, len(token_ids) - limit
        number = min(2 * number, count - 1) if failing == count else (fitting + failing) // 2
    neighbours = 0
    while excess <= SLACK and failing + 1 < count and neighbours < MAX_NEIGHBOURS:
        failing, neighbours = failing + 1, neighbours + 1
        token_ids = encode(failing)
        excess = len(token_ids) - limit
        if excess <= 0:
            best = (failing, token_ids)
    return best


def _fewest_tokens(encode: Callable[[int], IntArray], count: int, limit: int, whole: IntArray) -> tuple[int, IntArray]:
    """(the fewest tokens whose loss suffices, what is left): none of the next `NEIGHBOURS` smaller cuts does.

    All of the text where nothing suffices.
    """
    failing, number = 0, 0
    best, step = whole, 1
    while len(best) > limit and number < count:  # up, to a cut that suffices
        failing = number
        number = min(count, number + max(len(best) - limit, step))
        best, step = encode(number), 2 * step
    if len(best) > limit or not count:
        return number, best
    step = 1
    while number - failing > 1:  # down again: by doubled steps, and then halving
        tried = max(number - step, (number + failing) // 2)
        token_ids = encode(tried)
        if len(token_ids) <= limit:
            number, best, step = tried, token_ids, 2 * step
        else:
            failing = tried
    tried, misses = failing - 1, 1
    while tried > 0 and misses < NEIGHBOURS and failing - tried <= MAX_NEIGHBOURS:
        token_ids = encode(tried)
        misses += 1
        if len(token_ids) <= limit:
            number, best, misses = tried, token_ids, 0
        tried -= 1
    return number, best


def _cut_by_steps(encode: Callable[[int], IntArray], count: int, limit: int, whole: IntArray) -> tuple[int, IntArray]:
    """(tokens cut, what is left) by the older rule: as many as are in excess, again until it fits or nothing is left.

    Models saved with it keep their scores.
    """
    number, token_ids = 0, whole
    while len(token_ids) > limit and number < count:
        number = min(count, number + len(token_ids) - limit)
        token_ids = encode(number)
    return number, token_ids
