"""Errors for users travel between processes."""

from __future__ import annotations

import pickle

import pytest

from rewardlab.client.failures import RefusedError
from rewardlab.core.errors import ConfigError, DiskFullError, RunInterrupted
from rewardlab.data.chat import Overlong


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no such setting"),
        RunInterrupted("stopped after step 3", exit_status=75),
        RefusedError("too long", status=422, kind="too_long"),
        Overlong("takes 9 tokens", prompt=True, num_tokens=9),
        DiskFullError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_whole_out_of_a_pool_of_processes(error):
    copied = pickle.loads(pickle.dumps(error))

    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
