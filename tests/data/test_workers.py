"""Worker processes give what this process would, in order, errors included."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.files import sha256_text
from rewardlab.data.workers import Crew


def test_results_come_in_order_and_the_first_of_them_from_this_process():
    with Crew(2) as crew:
        assert list(crew.map(sha256_text, map(str, range(40)), alone=5)) == [sha256_text(str(n)) for n in range(40)]
        processes = list(crew.map(os.getenv, ["OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"], alone=0))
        assert processes == ["1", "false"]
        ids = list(crew.map(eval, ["__import__('os').getpid()"] * 20, alone=4))
        assert set(ids[:4]) == {os.getpid()}
        assert os.getpid() not in ids[4:]


def test_one_worker_or_few_items_start_no_process():
    for crew, items in ((Crew(1), 30), (Crew(0), 30), (Crew(4), 3)):
        with crew:
            assert set(crew.map(eval, ["__import__('os').getpid()"] * items, alone=3)) == {os.getpid()}


def test_an_error_in_a_worker_comes_after_the_results_before_it():
    with Crew(2) as crew:
        found = crew.map(int, ["1", "2", "three", "4"], alone=0)
        assert [next(found), next(found)] == [1, 2]
        with pytest.raises(ValueError, match="invalid literal for int.*three"):
            next(found)
        assert list(crew.map(int, ["5"], alone=0)) == [5]


def test_an_error_of_the_items_comes_after_the_results_before_it():
    def items() -> Iterator[str]:
        yield from ("1", "2", "3")
        raise DataError("line 4 is torn")

    with Crew(2) as crew:
        found = crew.map(int, items(), alone=0)
        assert [next(found) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(DataError, match="line 4"):
            next(found)


def test_what_a_worker_prints_is_not_taken_for_an_answer():
    with Crew(2) as crew:
        assert list(crew.map(eval, ["print('noise') or 7"] * 4, alone=0)) == [7] * 4


def test_an_error_that_cannot_be_sent_is_sent_in_words():
    hostile = "type('Odd', (Exception,), {})('its words')"
    with Crew(2) as crew, pytest.raises(RuntimeError, match="Odd in a worker process: its words"):
        list(crew.map(eval, [f"(_ for _ in ()).throw({hostile})"], alone=0))


def test_a_worker_that_dies_is_said_with_the_flag():
    with Crew(2) as crew, pytest.raises(RewardlabError, match="exit code 9.*--num-workers"):
        list(crew.map(eval, ["__import__('os')._exit(9)"], alone=0))


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_what_a_terminal_or_slurm_sends_to_every_process_ends_no_worker(name: str) -> None:
    signalled = f"__import__('os').kill(__import__('os').getpid(), __import__('signal').{name}) or 7"
    with Crew(2) as crew:
        assert list(crew.map(eval, [signalled], alone=0)) == [7]


def test_what_cannot_be_sent_is_done_here(caplog: pytest.LogCaptureFixture) -> None:
    with Crew(2) as crew:
        assert list(crew.map(partial(lambda a, b: a + b, 1), [1, 2, 3], alone=1)) == [2, 3, 4]
    assert "no worker processes" in caplog.text


def test_what_a_worker_cannot_load_is_done_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A class of a module that only this process has, as a tokenizer from a model's own code may be."""
    ghost = types.ModuleType("ghost")
    exec("import os\nclass Job:\n    def __call__(self, item):\n        return int(item), os.getpid()", vars(ghost))
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    wanted = [(n, os.getpid()) for n in range(30)]
    with Crew(2) as crew:
        assert list(crew.map(ghost.Job(), map(str, range(30)), alone=3)) == wanted
        assert caplog.text.count("no worker processes: the tokenizer cannot be loaded in them") == 1
        assert "No module named 'ghost'" in caplog.text
        assert list(crew.map(int, ["5", "6"], alone=0)) == [5, 6]

        def items() -> Iterator[str]:
            yield from ("1", "2", "3")
            raise DataError("line 4 is torn")

        found = crew.map(ghost.Job(), items(), alone=0)
        assert [next(found)[0] for _ in range(3)] == [1, 2, 3]
        with pytest.raises(DataError, match="line 4"):
            next(found)
        with pytest.raises(ValueError, match="invalid literal"):
            list(crew.map(ghost.Job(), ["1", "two"], alone=0))


def test_a_script_without_a_main_guard_may_use_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from rewardlab.data.workers import Crew\n"
        "with Crew(2) as crew:\n"
        "    print(list(crew.map(int, ['1', '2', '3'], alone=0)))\n"
    )
    answer = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("[1, 2, 3]\n", "", 0)
