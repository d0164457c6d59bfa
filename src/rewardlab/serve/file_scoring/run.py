"""Score the rows that are not scored yet, part by part, and keep the outcome of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rewardlab.core.bars import bar
from rewardlab.core.errors import RewardlabError
from rewardlab.data.workers import WorkerDiedError
from rewardlab.serve.file_scoring.backends import Answer, Backend
from rewardlab.serve.file_scoring.journal import Journal, Outcome
from rewardlab.serve.file_scoring.rows import Part, Survey, parts

logger = logging.getLogger("rewardlab")


def score_missing(source: Path, survey: Survey, backend: Backend, journal: Journal, *, as_json: bool) -> None:
    """Score the rows of `source` that are not in the journal, and put them there.

    Raises RewardlabError, naming the rows, if the backend gives up on some; those that were scored are kept.
    """
    if journal.num_rows:
        logger.info("%d of %d rows were scored before; going on", journal.num_rows, survey.num_rows)
    if journal.num_rows == survey.num_rows:
        return
    with _told_what_is_kept(journal, survey):
        asyncio.run(_score_missing(parts(source, bare=backend.bare, as_json=as_json), survey, backend, journal))


@contextmanager
def _told_what_is_kept(journal: Journal, survey: Survey) -> Iterator[None]:
    """If the block ends early, log where the scores are kept, if there are any."""
    try:
        yield
    except BaseException:
        if journal.num_rows:
            logger.warning(
                "%d of %d rows are scored and kept in %s; the same command goes on from there",
                journal.num_rows,
                survey.num_rows,
                journal.folder,
            )
        raise


async def _score_missing(of_file: Iterator[Part], survey: Survey, backend: Backend, journal: Journal) -> None:
    waiting: dict[asyncio.Task[Answer | None], Part] = {}
    progress = bar(title="scoring", unit=" rows", total=survey.num_rows, done=journal.num_rows)
    try:
        journal.begin(await backend.start(journal.decided))
        for part in of_file:
            if part.number in journal:
                continue
            waiting[asyncio.create_task(_score(backend, part))] = part
            if len(waiting) >= backend.num_parts:
                await _keep_some(waiting, journal, progress.update)
        while waiting:
            await _keep_some(waiting, journal, progress.update)
    finally:
        progress.close()
        for task in waiting:
            task.cancel()
        await backend.close()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _score(backend: Backend, part: Part) -> Answer | None:
    """Return the scores of the rows of a part that can be asked, None if there are none."""
    asked = [row for row in part.rows if not isinstance(row, str)]
    return await backend.score_rows(asked) if asked else None


async def _keep_some(
    waiting: dict[asyncio.Task[Answer | None], Part], journal: Journal, told: Callable[[int], object]
) -> None:
    """Wait until some part is scored, keep all that are, and call `told` with the number of rows of each.

    Raises what went wrong with one, after the others.
    """
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    failed: list[tuple[Part, BaseException]] = []
    for task in sorted(done, key=lambda task: waiting[task].number):
        part = waiting.pop(task)
        error = task.exception()
        if error is not None:
            failed.append((part, error))
            continue
        answer = task.result()
        found = iter(answer.scores if answer is not None else [])
        outcomes: list[Outcome] = [row if isinstance(row, str) else row.of_all(next(found)) for row in part.rows]
        journal.append(part.number, outcomes, num_typed=answer.num_typed if answer is not None else 0)
        told(len(part.rows))
    for part, error in failed:
        if isinstance(error, WorkerDiedError):
            raise RewardlabError(f"{part.places[0]} to {part.places[1]}: not scored. {error}") from error
        raise error
