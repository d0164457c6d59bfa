"""A reader that leaves ends text with colours as it ends every other output."""

import io

import pytest

from rewardlab.core.screen import Screen


class Left(io.StringIO):
    """An output whose reader has left."""

    def write(self, _text: str) -> int:
        """Raise what the system does."""
        raise BrokenPipeError


def test_a_reader_that_leaves_is_told_as_such():
    with pytest.raises(BrokenPipeError):
        Screen(file=Left()).print("a line")
