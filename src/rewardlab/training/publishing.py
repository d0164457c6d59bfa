"""Makes the publisher of a run from its settings. Needs no torch, so that a wrong setting is reported at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rewardlab.core.errors import ConfigError
from rewardlab.training.settings.config import PublishConfig

if TYPE_CHECKING:
    from rewardlab.client.publishing import Publisher


def publisher_of(settings: PublishConfig) -> Publisher | None:
    """Return the publisher that asks a server to swap to the models of a run; None without --publish-to, and in all
    processes but the first.

    Raises ConfigError for an invalid address, or a token or a package that is missing.
    """
    if settings.publish_to is None or (os.environ.get("RANK") or "0") != "0":
        return None
    try:
        from rewardlab.client.publishing import Publisher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'--publish-to: needs {error.name}. Install it with: pip install "rewardlab[client]"'
        ) from error
    from rewardlab.client.config import token_in

    return Publisher(
        settings.publish_to,
        model=settings.publish_as,
        token=token_in(settings.publish_token_env, flag="--publish-token-env"),
        every=settings.publish_every,
        timeout_s=settings.publish_timeout_s,
    )
