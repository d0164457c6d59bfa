"""Tokens of users and administrators, from the environment or a file; a command line would show them to everybody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import short
from rewardlab.core.values import require
from rewardlab.serve.http.config import LOOPBACK

SHORTEST: Final = 16
"""Fewest characters of a token."""


def read_token(variable: str | None, file: Path | None, *, flag: str) -> bytes | None:
    """Return the token from an environment variable or a file; None if neither is named.

    Raises ConfigError if it is missing, short, or has characters that a header cannot hold.
    """
    require(variable is None or file is None, f"{flag}-env, {flag}-file: name one of the two.")
    if variable is not None:
        told = os.environ.get(variable)
        require(told is not None, f"{flag}-env {short(variable)}: the environment has no such variable.")
        where = f"{flag}-env {short(variable)}"
    elif file is not None:
        where = f"{flag}-file {short(str(file))}"
        try:
            told = file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read ({type(error).__name__}).") from None
    else:
        return None
    token = (told or "").strip()
    good = token.isascii() and token.isprintable() and " " not in token
    require(len(token) >= SHORTEST and good, f"{where}: a token has at least {SHORTEST} letters, digits and signs.")
    return token.encode()


def require_token_for(host: str, token: bytes | None) -> None:
    """Raise ConfigError for an address that others reach without a token."""
    require(
        host in LOOPBACK or token is not None,
        f"--host {short(host)}: others can reach this address. Name a token with --token-env or --token-file, or "
        "stay at 127.0.0.1.",
    )
