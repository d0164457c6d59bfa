"""A rank that hangs is named, and the others do not wait for it; one that is alive may take as long as it likes."""

from __future__ import annotations

import re
import threading

import pytest
from torch.distributed import DistNetworkError

from rewardlab.core.files import read_json
from rewardlab.core.run_folder import ENDED
from rewardlab.distributed import others
from rewardlab.distributed.others import Others, Silence


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("by", "rank", "said"),
    [
        ("a signal", 1, r"rank 1 \(process \d+ on .+\) has given no sign of life for 1 s, the last after step \d"),
        ("a signal", 0, r"rank 0, by which the ranks meet at 127.0.0.1:\d+, has not answered for 1 s, after step 7"),
        ("a library", 0, r"rank 0 \(process \d+ on .+\) has given no sign of life for 1 s, the last after step \d"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_step_and_ends_the_others(by, rank, said, tmp_path, on_ranks):
    ends, told, _ = on_ranks("hangs", 2, tmp_path, by=by, rank=rank)
    assert re.search(said, told), told
    assert re.search(rf"error: rank {1 - rank} ended, because rank {rank}.* for 2 s.*--rank-timeout-s", told), told
    assert "--resume auto goes on" in told
    assert ends[1 - rank] == 1
    # The folder of the run has what was printed, for the report.
    assert f"error: {read_json(tmp_path / ENDED)['text']}\n" in told


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_works_for_longer_than_the_limit_is_named_and_nothing_ends(rank, tmp_path, on_ranks):
    ends, told, _ = on_ranks("hangs", 2, tmp_path, by="work", rank=rank)
    assert set(ends.values()) == {0}, told
    line = (
        rf"rank {1 - rank} has waited for 2 s for others, which is alive: rank {rank} \(process \d+ on .+\), after step"
    )
    assert re.search(line, told), told
    assert "no sign of life" not in told
    assert not (tmp_path / ENDED).exists()


def test_time_in_which_this_process_did_not_look_is_no_silence_of_others():
    """As when Slurm suspends all of them: each one's clock jumps, and no rank is to blame."""
    silence = Silence()
    for sign in ("a", "b", "b", "b"):
        silence.hear({0: sign, 1: f"{sign} and more", 2: None}, 5.0)
    assert silence.seconds == {0: 10.0, 1: 10.0, 2: 15.0}
    silence.hear({0: "c", 1: "b and more", 2: None}, 5.0)
    assert silence.longer_than(15.0) == [1, 2]
    assert silence.longer_than(16.0) == [2]


@pytest.mark.parametrize(("agent", "server"), [("True", "torchrun"), ("False", "rank 0")])
def test_a_rank_names_the_process_that_is_gone_with_the_store(agent, server, monkeypatch):
    def gone(_meeting):
        raise DistNetworkError("the connection broke")

    said = []
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(others, "GRACE_S", 0.0)
    monkeypatch.setattr(others, "_store", gone)
    watcher = object.__new__(Others)
    watcher._meeting, watcher._ended = "here", threading.Event()
    monkeypatch.setattr(Others, "_exit", lambda _self, reason: said.append(reason))
    watcher._look()
    assert said == [f"{server}, by which the ranks meet, is gone. {others.GO_ON}"]
