"""How long a conversation of a run may be, by what is on this machine of its model: nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.files import read_json
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.data.config import USUAL_LENGTH
from rewardlab.model.hub import cached_file


def length_of(settings: Mapping[str, Any]) -> float:
    """Return the tokens that a conversation of a run may have; infinite where only its model says, which is not here.

    `auto` and `model` are as in `artifact.base.settle_length`.
    """
    asked, model = settings.get("max_seq_len"), str(settings.get("model"))
    if isinstance(asked, int):
        return asked
    try:
        limit = limit_of_reward_model(model) if asked == "auto" else None
    except RewardlabError:
        limit = None  # it is damaged, which the check of models says
    config = config_of(model) or {}
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    most = positions if isinstance(positions, int) else float("inf")
    return limit or (min(USUAL_LENGTH, most) if asked == "auto" else most)


def limit_of_reward_model(model: str) -> int | None:
    """Return the length limit of a reward model in a folder, or in the cache of the hub; None for another model, or for
    one that is in neither.

    Raises ArtifactError for a damaged spec.
    """
    spec = cached_file(model, SPEC_FILE)
    return None if spec is None else read_spec(spec.parent).renderer.max_length


def config_of(model: str) -> dict[str, Any] | None:
    """Return what config.json says of the text model, in a folder or in the cache of the hub; None without the file."""
    path = cached_file(model, "config.json")
    try:
        config = None if path is None else read_json(path)
    except (DataError, OSError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config
