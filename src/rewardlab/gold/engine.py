"""Where the models that a stage loads itself are at work: in this process, or on a Ray cluster. Needs nothing but the
standard library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Section):
    """Where the model is at work with `--backend local`."""

    engine: Literal["process", "ray"] = "process"
    """This process; or workers of a Ray cluster (`ray`), each of which loads the model and takes parts of the work. The
    results are the same."""
    ray_workers: int = 1
    """Workers that load the model: each takes a GPU where the cluster has any, else a core."""
    ray_address: str | None = None
    """Address of the cluster, `auto` for the one that runs on this machine; by default that in RAY_ADDRESS, and without
    one a cluster of this machine alone, which ends with the command."""

    def __post_init__(self) -> None:
        require_between(self, ray_workers=(1, 65_536))
        ray = self.engine == "ray"
        require(ray or self.ray_workers == 1, "--ray-workers: only with --engine ray.")
        require(ray or self.ray_address is None, "--ray-address: only with --engine ray.")

    def require_local(self, backend: str) -> None:
        """Raise ConfigError if Ray is to load a model that a server has."""
        require(
            self.engine == "process" or backend == "local",
            f"--engine ray: its workers load the model themselves, and with --backend {backend} servers have it. "
            f"Divide the work among several servers with several --url.",
        )


DEFAULT_ENGINE: Final = EngineConfig()
