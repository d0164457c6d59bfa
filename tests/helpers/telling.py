"""What a soak test tells whoever reads along, whether pytest captures or not."""

from __future__ import annotations

import sys

import pytest


def tell(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Write a line to the terminal."""
    with capsys.disabled():
        sys.stdout.write(f"\n{line}\n")
