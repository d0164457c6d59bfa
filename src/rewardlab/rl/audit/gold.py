"""Scores logged replies with a gold or second reward model now: whole prompts, drawn with the seed.

Which replies are scored depends on the seed, the steps and the prompts alone, never on a reward: replies chosen for
their reward would make the evidence fall back by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.core.types import Conversation
from rewardlab.rl.audit.columns import Columns, IntArray, read_conversations
from rewardlab.rl.rollouts import Rollout
from rewardlab.rl.scorer import AND, RewardScorer

NAME: Final = "gold score"
AT_A_TIME: Final = 256
"""Replies handed to the scorer together."""


def choose(columns: Columns, most: int, seed: int) -> IntArray:
    """Return the numbers of the rows to score: for each step, whole prompts up to `most` replies.

    The order of the prompts is drawn with the seed. If the first prompt alone has more than `most` replies, `most` of
    them are drawn.
    """
    edges = np.flatnonzero(np.diff(columns.step_N)) + 1
    chosen = []
    for rows in np.split(np.arange(len(columns.step_N)), edges):
        # The 5 separates this draw from others that use the same seed.
        generator = np.random.default_rng((seed, 5, int(columns.step_N[rows[0]])))
        prompts, own = np.unique(columns.prompt_N[rows], return_inverse=True)
        # Keys rather than numbers: the order must not depend on how rows lie in the files.
        by_key = sorted(range(len(prompts)), key=lambda number: columns.prompts[prompts[number]])
        room = most
        for number in generator.permutation(by_key):
            replies = rows[own == number]
            if len(replies) > room:
                if room < most:
                    continue
                replies = generator.choice(replies, most, replace=False)
            chosen.append(replies)
            room -= len(replies)
    return np.sort(np.concatenate(chosen))


def score(columns: Columns, source: str, *, most: int, seed: int) -> FloatArray:
    """Return [N] scores by the model at `source`, a folder or an address; NaN for rows that were not drawn.

    Raises DataError if the run was trained on that model or if it changes meanwhile, and naming file and line for a
    reply without the turns before it; RolloutError naming a reply that gets no score, and what `RewardScorer` raises
    for a model or server that cannot be used.
    """
    wanted = choose(columns, most, seed)
    scores_N = np.full(len(columns.step_N), np.nan)
    digests = asyncio.run(_score(source, _whole(columns, wanted, source), scores_N, len(wanted)))
    if len(digests) > 1:
        raise DataError(
            f"--gold {source}: answered with {len(digests)} different models ({', '.join(sorted(digests))}). Audit "
            f"again when the server keeps one."
        )
    # Of an ensemble the record has the digests of all members.
    if same := digests & {own for digest in columns.digests if digest is not None for own in digest.split(AND)}:
        raise DataError(
            f"--gold {source}: is the model that the run was trained on, or one of its ensemble ({same.pop()}). It "
            f"cannot be evidence against itself; name another one."
        )
    return scores_N


def _whole(columns: Columns, wanted_N: IntArray, source: str) -> Iterator[tuple[int, Conversation]]:
    """Yield what `read_conversations` does. Raises DataError for a reply without a prompt.

    Such a reply is a whole rendering or token ids (`rewarding.rows_of`), of which another model cannot make turns.
    """
    for row, turns in read_conversations(columns, wanted_N):
        if len(turns) < 2:
            file, line = columns.place_N[row].tolist()
            raise DataError(
                f"--gold {source}: the reply of {columns.files[file]}:{line} has no turns before it, as where rendered "
                f"texts or tokens are rewarded, so another model cannot read it. Have it scored in the run, and keep "
                f"the score as evidence."
            )
        yield row, turns


async def _score(
    source: str, conversations: Iterator[tuple[int, Conversation]], scores_N: FloatArray, total: int
) -> set[str]:
    """Fill in `scores_N`, and return the digests of the models that gave the scores."""
    digests: set[str] = set()
    async with RewardScorer(source) as scorer:
        with bar(title=f"scoring with {source}", total=total) as progress:
            while chunk := list(islice(conversations, AT_A_TIME)):
                rollouts = [Rollout(name=f"logged reply {row}", conversation=turns) for row, turns in chunk]
                for (row, _), scored in zip(chunk, await scorer.details(rollouts), strict=True):
                    scores_N[row] = scored.score
                    digests |= set() if scored.digest is None else {scored.digest}
                progress.update(len(chunk))
    return digests
