"""Read files of settings: YAML, TOML or JSON to a flat mapping, or one error that says where and what is wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import UTF8, absent, parse_json
from rewardlab.core.terminal import brief

MOST_BYTES: Final = 1 << 20
"""Largest size of a file of settings. Files written by hand are a thousandth of it; a larger one is likely data."""


def read_config_file(path: Path, *, given_by: str = "--config") -> dict[str, object]:
    """Return the flat mapping in a YAML, TOML or JSON file; `given_by` is what messages say named it.

    Raises ConfigError if the file is missing, larger than `MOST_BYTES`, unreadable or not a mapping, or if a key
    appears twice.
    """
    if not path.is_file():
        raise ConfigError(f"{given_by} {path}: {absent(path)}. Give a YAML or TOML file with the names of the flags.")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ConfigError(
            f"{given_by} {path}: has {size:,} bytes; a file of settings has at most {MOST_BYTES:,}. Is it the right "
            f"file?"
        )
    try:
        values = _read(path.suffix, path.read_text(encoding=UTF8))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{given_by} {path}: not UTF-8 text ({error}). Save it as UTF-8.") from error
    except RecursionError as error:
        raise ConfigError(f"{given_by} {path}: nested too deep. Settings are `name: value` lines.") from error
    except ValueError as error:
        raise ConfigError(f"{given_by} {path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{given_by} {path}: expected `name: value` lines, got a {type(values).__name__}.")
    names = [name if isinstance(name, str) else brief(name) for name in values]
    return dict(zip(names, values.values(), strict=True))


def _read(suffix: str, text: str) -> object:
    """Return the value in a text. Raises ValueError saying what is wrong, RecursionError for too deep nesting."""
    if suffix == ".json":
        try:
            return parse_json(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error}") from error
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except ValueError as error:
            # From tomllib, or from Python about a number of thousands of digits.
            raise ValueError(f"not valid TOML: {error}") from error
    # Imported here because commands without a YAML file do not need PyYAML.
    from rewardlab.core.config_yaml import parse_yaml

    return parse_yaml(text)
