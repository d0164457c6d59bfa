"""Settings of a scorer of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rewardlab.client.config import ClientConfig, require_function
from rewardlab.core.config import settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.remaking import writable
from rewardlab.core.spec import OutputAs
from rewardlab.core.values import Section, did_you_mean, require
from rewardlab.rl.noise import LARGEST_TOLERANCE

TextAs = Literal["turns", "transcript", "rendered"]
"""How a prompt and a reply that are plain texts are read: the prompt as one user turn and the reply as the assistant's
(`turns`), the prompt as in training data, where an open transcript is split into turns (`transcript`), or both joined
as the very text that the reward model reads, without a template (`rendered`)."""
TEXT_AS: Mapping[str, str] = {
    "turns": "the prompt is one turn of the user, the reply the assistant's",
    "transcript": "as training data are read: a prompt that is an open transcript is split into its turns",
    "rendered": "prompt and reply, joined, are the text that the model reads; no template is applied",
}
"""Value of `text_as` -> what it means."""
How = Literal["mean", "minimum", "lower"]
RenderFn = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(Section):
    """Settings of a `RewardScorer`, besides its models."""

    text_as: TextAs | None = None
    """How plain texts are read; None refuses them where a model was trained with a template."""
    render_fn: RenderFn | None = None
    """Object of the user -> its conversation (messages, the reply last), (prompt, reply), the text or token ids that
    the model is to read, or a `Rollout`."""
    truncate: bool = False
    """Whether conversations above a model's length limit may be cut, by its rule of training; otherwise one is an
    error."""
    output: OutputAs = "raw"
    """What a single model's scores are: raw, or, by the calibration that `rewardlab calibrate --store` kept in it, the
    log odds (`calibrated`) or the `probability` that a reply is a preferred one."""
    noise_tolerance: float | None = None
    """How far a score may be from its reference, in units of max(1, |score|), where it was measured; None takes the
    artifact's tolerance for the arithmetic in use."""
    combination: How = "mean"
    """What an ensemble makes of its members' scores: their mean, the score of the member that likes the reply least, or
    the mean minus `penalty` standard deviations over the members (`lower`)."""
    penalty: float = 1.0
    """Number of standard deviations that `lower` takes off the mean."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of a model in this process. A server has its own."""
    device: str | None = None
    """Device of a model in this process; by default the GPU of the process (`LOCAL_RANK`) or, without one, the CPU."""
    token_budget: int = 8192
    """Most tokens that a model in this process computes at a time; changes no score."""
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings of `ClientConfig` for servers, such as `token`, `model`, `artifact`, `timeout_s`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that cannot be used."""
        require(self.penalty >= 0, f"penalty: at least 0, got {self.penalty!r:.40}.")
        tolerance = self.noise_tolerance
        require(
            tolerance is None or 0 <= tolerance <= LARGEST_TOLERANCE,
            f"noise_tolerance: expected a number from 0 to {LARGEST_TOLERANCE}, got {tolerance!r:.40}.",
        )
        require(self.token_budget >= 1, f"token_budget: expected at least 1, got {self.token_budget}.")
        require_function(self.render_fn)
        require(isinstance(self.client, Mapping), f"client: expected a mapping, got {self.client!r:.40}.")
        object.__setattr__(self, "client", writable(self.client))
        for name in self.client:
            if name not in settings_of(ClientConfig):
                known = settings_of(ClientConfig)
                raise ConfigError(
                    f"client: unknown setting {name!r:.60}.{did_you_mean(name, known)} Settings: {', '.join(known)}."
                )
        for name in ("render_fn", "truncate", "output"):
            require(
                name not in self.client,
                f"client: {name} is a setting of the scorer itself, for every source. Give it there.",
            )


def require_known(settings: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for a setting that is not known, with what was probably meant."""
    known, of_client = list(known), settings_of(ClientConfig)
    for name in settings:
        if name in known:
            continue
        if name in of_client:
            raise ConfigError(f"{name} is a setting of the client of a server: give client={{{name!r}: …}}.")
        raise ConfigError(f"unknown setting {name!r:.60}.{did_you_mean(name, known)} Settings: {', '.join(known)}.")


def is_address(source: str | Path) -> bool:
    """Return whether a source is the address of a server."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def at_address(source: str, client: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the address of a server, and the settings of its client, with the model that is named behind `#`.

    Raises ConfigError for an empty name, and where the settings name a model too.
    """
    address, mark, name = source.partition("#")
    if not mark:
        return source, client
    require(bool(name), f"{source}: behind # stands the name of a model on that server. Give one, or leave # out.")
    require(
        client.get("model") is None,
        f"{source}: the model is named in the address and in the client's settings (model). Leave one of them out.",
    )
    return address, {**client, "model": name}
