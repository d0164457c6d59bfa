"""The chat template that a TRL file names: `chat_template_path`."""

from __future__ import annotations

from pathlib import Path

from rewardlab.core.errors import ConfigError
from rewardlab.data.template_files import read_template


def template_named(named: object, where: str) -> tuple[str, str]:
    """Return (the value of `--chat-template` for a `chat_template_path`, a remark on it).

    Raises ConfigError where no template can be read. TRL then takes the path for a tokenizer of the hub.
    """
    path = Path(str(named))
    try:
        read_template(path)
    except ConfigError as error:
        said = str(error).removeprefix(f"--chat-template {path}: ")
        hub = "" if "no such file" not in said else " A tokenizer of the hub is downloaded first (`hf download NAME`)."
        raise ConfigError(f"{where}: chat_template_path: {path}: {said}{hub}") from error
    # TRL would give the model every token that this tokenizer has besides, with new embeddings.
    return str(path), "its template alone; no tokens are added to those of the model" if path.is_dir() else ""
