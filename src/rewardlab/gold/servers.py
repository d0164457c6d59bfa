"""Sources of one kind that are to do the same work, such as several servers of one model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.gold.pool import Source

logger = logging.getLogger("rewardlab")


Kind = TypeVar("Kind", bound=Source[Any, Any])


async def open_all(sources: Sequence[Kind]) -> list[Kind]:
    """Open sources of one model; those that are away are left out, with a warning.

    Raises ConfigError if they are of different models, and what the last one raises if none can be opened.
    """
    opened: list[Kind] = []
    away: list[tuple[Kind, EndpointError]] = []
    for source in sources:
        try:
            await source.open()
        except EndpointError as error:
            if not may_pass(error):
                raise
            away.append((source, error))
        else:
            opened.append(source)
    # If none could be opened, the last failure is raised, and only the others are logged.
    for source, why in away if opened else away[:-1]:
        logger.warning("%s: left out: %s", source.name, why)
    if not opened:
        raise away[-1][1]
    for source in opened[1:]:
        if source.identity != opened[0].identity:
            raise ConfigError(
                f"--url: {opened[0].name} and {source.name} have different models, or compute in different precision "
                f"({opened[0].identity} and {source.identity}). All results of a file are of one model."
            )
    return opened


def may_pass(error: EndpointError) -> bool:
    """Return whether a failure of a server may be better a moment later, or elsewhere."""
    from rewardlab.client.failures import BadAnswerError, UnavailableError

    return isinstance(error, UnavailableError | BadAnswerError)
