"""Clients of reward-model servers, and the wire format of our own server. Imports no torch.

`RewardClient` and `AsyncRewardClient` are imported when they are first used: the server uses only the wire format of
this package, and should not need the packages of the extra `client`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewardlab.core.errors import ConfigError

if TYPE_CHECKING:
    from rewardlab.client.asynchronous import AsyncRewardClient as AsyncRewardClient
    from rewardlab.client.blocking import RewardClient as RewardClient
    from rewardlab.client.config import ClientConfig as ClientConfig
    from rewardlab.client.endpoint import EndpointSpec as EndpointSpec
    from rewardlab.client.failures import BadAnswerError as BadAnswerError
    from rewardlab.client.failures import CanaryError as CanaryError
    from rewardlab.client.failures import ModelChangedError as ModelChangedError
    from rewardlab.client.failures import RefusedError as RefusedError
    from rewardlab.client.failures import UnavailableError as UnavailableError
    from rewardlab.client.rows import Answered as Answered
    from rewardlab.core.errors import EndpointError as EndpointError

# Public name -> the module that defines it. The same names stand in the imports above: a type checker has to see
# imports, and a run must not do them. A test holds the two together.
_HOME = {
    "Answered": "client.rows",
    "AsyncRewardClient": "client.asynchronous",
    "BadAnswerError": "client.failures",
    "CanaryError": "client.failures",
    "ClientConfig": "client.config",
    "EndpointError": "core.errors",
    "EndpointSpec": "client.endpoint",
    "ModelChangedError": "client.failures",
    "RefusedError": "client.failures",
    "RewardClient": "client.blocking",
    "UnavailableError": "client.failures",
}
__all__ = list(_HOME)
EXTRA = ("httpx2", "pydantic", "stamina")
"""Packages of the extra `client`."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'rewardlab.client' has no attribute {name!r}")
    try:
        return getattr(import_module(f"rewardlab.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise ConfigError(
            f'rewardlab.client.{name} needs the package {error.name}. Install it with: pip install "rewardlab[client]"'
        ) from error


def __dir__() -> list[str]:
    """List the public names, which `dir` would not show before they are used."""
    return sorted(__all__)
