"""What an import needs of a foreign reward model, whether it is a whole model or adapters beside their base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.artifact.foreign.convert import as_reward_model
from rewardlab.artifact.foreign.forward import own_scores
from rewardlab.artifact.foreign.layouts import ForeignModel
from rewardlab.core.files import sha256_file
from rewardlab.core.types import IntArray
from rewardlab.data.chat import load_tokenizer
from rewardlab.model.files import CONFIG
from rewardlab.model.reward import RewardModel

PARITY: Final = 1e-5
"""Largest distance in float32 between a whole model's own score and the imported one."""


@runtime_checkable
class Source(Protocol):
    """A foreign reward model: what it is, and its scores by the modules of its own project."""

    @property
    def found(self) -> ForeignModel:
        """What it is."""
        ...

    @property
    def model(self) -> str:
        """Folder or hub name of the model whose configuration it has."""
        ...

    @property
    def words(self) -> str:
        """What it is, for the report."""
        ...

    @property
    def pad_said_in(self) -> str:
        """The field and the file that say its pad token."""
        ...

    @property
    def allowed(self) -> float:
        """Largest distance of its own scores from those of the new folder, in units of max(1, |score|) without the
        constant that it adds."""
        ...

    def tokenizer(self) -> Any:
        """Return its tokenizer. Raises RenderError if there is none."""
        ...

    def own_scores(self, sequences: Sequence[IntArray]) -> list[float]:
        """Return the float32 score of each sequence of tokens by its own project's modules."""
        ...

    def as_reward_model(self) -> RewardModel:
        """Return it in rewardlab's form, in float32 on the CPU; called once, after `own_scores`."""
        ...

    def origin(self) -> dict[str, Any]:
        """Return what the new spec says about the files."""
        ...


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """A folder with a whole model."""

    found: ForeignModel
    pad_said_in: str = "pad_token_id in its config.json"
    allowed: float = PARITY

    @property
    def model(self) -> str:
        return str(self.found.folder)

    @property
    def words(self) -> str:
        return f"{self.found.kind} head {self.found.head}{self.found.outputs_in_words}"

    def tokenizer(self) -> Any:
        return load_tokenizer(self.model)

    def own_scores(self, sequences: Sequence[IntArray]) -> list[float]:
        return own_scores(self.found, sequences)

    def as_reward_model(self) -> RewardModel:
        return as_reward_model(self.found)

    def origin(self) -> dict[str, Any]:
        return {"config_sha256": sha256_file(self.found.folder / CONFIG)}
