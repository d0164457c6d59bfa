"""The record of rollouts: what is written is never lost, and what is read is exactly what was written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import write_pairs
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Message
from rewardlab.rl.rollout_log import FIELDS, ONE, RolloutLog, RolloutRow, find_logs, key_of, read_rollouts
from rewardlab.rl.rollouts import RolloutError


def row(step: int = 0, reward: float = 0.5, reply: str = "yes", **more: object) -> RolloutRow:
    conversation = (Message("user", "Is it?"), Message("assistant", reply))
    values = {"step": step, "prompt_key": key_of(conversation), "conversation": conversation, "reward": reward}
    return RolloutRow(**{**values, **more})


numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(), max_size=20)
named = st.dictionaries(texts, numbers, max_size=3)
values = st.fixed_dictionaries(
    {
        "step": st.integers(0, 5),
        "prompt_key": st.text(min_size=1, max_size=4),
        "turns": st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
        "reward": numbers,
    },
    optional={
        "trained_on": numbers,
        "num_tokens": st.integers(0, 10**6),
        "spread": numbers,
        "digest": texts,
        "evidence": named,
        "shown": named,
    },
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(values, max_size=5))
def test_what_is_read_is_what_was_written_by_step(drawn: list[dict], tmp_path_factory: pytest.TempPathFactory) -> None:
    written = []
    for one in drawn:
        turns = tuple(Message(*turn) for turn in one["turns"])
        written.append(RolloutRow(conversation=turns, **{name: one[name] for name in one if name != "turns"}))
    folder = tmp_path_factory.mktemp("run")
    log = RolloutLog(folder)
    log.write(written[:2])
    log.write(written[2:])
    assert list(read_rollouts(folder)) == sorted(written, key=lambda own: own.step)


def test_rows_of_several_ranks_come_by_step_and_a_file_may_be_named_itself(tmp_path: Path) -> None:
    for rank in range(2):
        RolloutLog(tmp_path, rank=rank, world_size=2).write([row(3, rank), row(1, rank)])
    assert [(own.step, own.reward) for own in read_rollouts(tmp_path)] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert [own.reward for own in read_rollouts(tmp_path / "rollouts-1.jsonl")] == [1, 1]


@pytest.mark.parametrize(
    "wrong",
    [{"reward": math.nan}, {"evidence": {"gold": math.inf}}, {"spread": math.nan}, {"conversation": ()}, {"step": -1}],
)
def test_a_row_that_could_not_be_read_is_refused_by_its_number_and_nothing_is_written(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    log = RolloutLog(tmp_path)
    with pytest.raises(RolloutError, match="rollout 1 of step") as refused:
        log.write([row(), row(**wrong)])
    assert refused.value.rollouts == (1,)
    assert list(read_rollouts(tmp_path)) == []


def test_a_torn_last_line_is_told_and_left_out_and_the_next_writer_takes_it_off(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    RolloutLog(tmp_path).write([row(0, 0.1, "é"), row(1, 0.2, "é")])
    path = tmp_path / ONE
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        assert [own.reward for own in read_rollouts(tmp_path)] == [0.1]
        assert f"{path}:2: the last line is torn" in log.text
        RolloutLog(tmp_path).write([row(2, 0.3)])
        assert [own.reward for own in read_rollouts(tmp_path)] == [0.1, 0.3]


def test_a_last_line_that_lacks_only_its_line_feed_is_kept(tmp_path: Path) -> None:
    RolloutLog(tmp_path).write([row(0, 0.1)])
    path = tmp_path / ONE
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert [own.reward for own in read_rollouts(tmp_path)] == [0.1]
    RolloutLog(tmp_path).write([row(1, 0.2)])
    assert [own.reward for own in read_rollouts(tmp_path)] == [0.1, 0.2]


KILLED = """
import os, signal, sys
import numpy as np
from rewardlab.core.types import Message
from rewardlab.rl.rollout_log import find_logs, RolloutLog, RolloutRow
turns = (Message("user", "q"), Message("assistant", "a"))
log = RolloutLog(sys.argv[1])
for step in range(5):
    log.write([RolloutRow(step=np.int64(step), prompt_key="k", conversation=turns, reward=np.float32(0.25))])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_with_numbers_of_numpy_survive_a_process_that_is_killed_right_after_they_are_written(
    tmp_path: Path,
) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode < 0
    assert [(own.step, own.reward) for own in read_rollouts(tmp_path)] == [(step, 0.25) for step in range(5)]


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RolloutLog(tmp_path)
    log.write([row(0)])

    def full(path: Path, text: str) -> None:
        with path.open("a") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rewardlab.rl.rollout_log.append_text", full)
        with pytest.raises(OSError, match="No space"):
            log.write([row(1)])
    log.write([row(2)])
    assert [own.step for own in read_rollouts(tmp_path)] == [0, 2]


def test_a_resumed_run_writes_its_steps_again_and_files_of_ranks_that_are_gone_are_cut_too(tmp_path: Path) -> None:
    for rank in range(3):
        RolloutLog(tmp_path, rank=rank, world_size=3).write([row(step, rank) for step in range(4)])
    for rank in range(2):
        log = RolloutLog(tmp_path, rank=rank, world_size=2)
        log.resume_at(2)
        log.write([row(2, 10 + rank)])
    assert [(own.step, own.reward) for own in read_rollouts(tmp_path)] == [
        *((step, rank) for step in (0, 1) for rank in range(3)),
        *((2, 10 + rank) for rank in range(2)),
    ]


def test_a_record_in_a_folder_below_is_named(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts")
    log.close()
    with pytest.raises(DataError, match=r"There is a record in .*rollouts\."):
        find_logs(tmp_path)


def test_a_closed_log_refuses_rows(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.close()
    with pytest.raises(ConfigError, match="closed"):
        log.write([row()])


GOOD = {"step": 0, "prompt_key": "k", "conversation": [{"role": "assistant", "content": "a"}], "reward": 1.0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", 'expected a JSON object, got list. Each line must look like {"step"'),
        ({"step": "0"}, "step: expected a whole number, found a text, '0'"),
        ({"step": True}, "step: expected a whole number, found true"),
        ({"reward": None}, "reward: expected a number, found null"),
        ({"reward": math.nan}, "reward is nan, which is not a finite number"),
        ({"rewards": 1.0}, "rewards: unknown field. Did you mean 'reward'? Fix or remove this line."),
        ({"conversation": []}, "conversation has no turn"),
        ({"conversation": [{"role": "user"}]}, "conversation[0].content: is missing"),
        ({"evidence": {"gold": "1"}}, "evidence.gold: expected a number"),
        ({"step": -1}, "step is -1; steps are counted from 0"),
        ({"prompt_key": ""}, "prompt_key is empty"),
        ({"step": 10**30}, "step is 1000000000000000000000000000000; steps are counted from 0 to 9007199254740992"),
        ({"num_tokens": 10**400}, "num_tokens is 1000"),
        ({"num_tokens": -1}, "num_tokens is -1; expected a number from 0"),
        ({"reward": 10**400}, "which is not a finite number"),
    ],
)
def test_a_line_that_is_no_rollout_is_an_error_with_file_and_line(tmp_path: Path, line: object, said: str) -> None:
    text = line if isinstance(line, str) else json.dumps({**GOOD, **line})
    (tmp_path / ONE).write_text(f"{json.dumps(GOOD)}\n{text}\n{json.dumps(GOOD)}\n")
    with pytest.raises(DataError) as refused:
        list(read_rollouts(tmp_path))
    assert str(refused.value).startswith(f"{tmp_path / ONE}:2: ")
    assert said in str(refused.value)


def test_preferences_in_place_of_rollouts_are_told_for_what_they_are(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", 3)
    with pytest.raises(DataError, match="pairs.jsonl:1: no rollout: the line has 'prompt', 'chosen', 'rejected'. Name"):
        list(read_rollouts(path))


def test_every_field_of_a_row_may_be_in_a_line() -> None:
    assert {*GOOD, "trained_on", "num_tokens", "spread", "digest", "evidence", "shown"} == FIELDS


def test_a_folder_without_a_record_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no rollouts.jsonl and no rollouts-RANK.jsonl"):
        list(read_rollouts(tmp_path))
    with pytest.raises(DataError, match="there is no such file or folder"):
        list(read_rollouts(tmp_path / "missing"))


def test_a_rank_beyond_the_number_of_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 2 of 2 processes"):
        RolloutLog(tmp_path, rank=2, world_size=2)
