"""`rewardlab score --processes`: rows in order whatever finishes first, and a process that dies loses none."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.data.workers import WorkerDiedError
from rewardlab.serve.file_scoring import processes as processes_module
from rewardlab.serve.file_scoring import rows as rows_module
from rewardlab.serve.file_scoring.backends import Answer, LocalModel, LocalScorer
from rewardlab.serve.file_scoring.file import score_with
from rewardlab.serve.file_scoring.journal import partial_of
from rewardlab.serve.file_scoring.processes import Job, ProcessBackend, environments_of
from rewardlab.serve.file_scoring.rows import Asked
from scoring_stub import Stub, StubJob, score_of


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "response": f"So {n}"}) + "\n" for n in range(20)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=64))
    folder = tmp_path_factory.mktemp("processes") / "model"
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return str(folder)


class FakeWorker:
    """In place of a process: answers in a thread, and dies over rows with a deadly reply, at most so often."""

    made: list[FakeWorker]
    deadly = ""
    deaths = 9
    unloadable: tuple[int, ...] = ()

    def __init__(self, environment: object, *, fewer: str) -> None:
        self.fewer = fewer
        self.ended = False
        self.alive = True
        self.made.append(self)

    def run(self, job: bytes, rows: Sequence[Asked] | None) -> Answer | dict:
        assert self.alive, "a dead process is asked nothing"
        if rows is None:
            if self.made.index(self) in type(self).unloadable:
                self.alive = False
                raise WorkerDiedError(f"a worker process ended with exit code -9. {self.fewer}")
            return {"kernels": "those"}
        own = type(self)
        if own.deaths and any(row.replies[0] == own.deadly for row in rows):
            own.deaths -= 1
            self.alive = False
            raise WorkerDiedError("a worker process ended with exit code -9.")
        return Answer([[score_of(reply) for reply in row.replies] for row in rows])

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def workers(monkeypatch) -> type[FakeWorker]:
    class Worker(FakeWorker):
        made: ClassVar[list[FakeWorker]] = []

    monkeypatch.setattr(processes_module, "Worker", Worker)
    monkeypatch.setattr(processes_module, "environments_of", lambda number: [{}] * number)
    return Worker


def test_rows_of_a_process_that_dies_are_scored_by_another(model, source, tmp_path, workers, caplog):
    workers.deadly, workers.deaths = "So 7", 1
    backend = ProcessBackend(LocalModel(folder=model), 3)
    counts = score_with(backend, source, tmp_path / "scored.jsonl")
    assert counts.scored == 20
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [score_of(f"So {n}") for n in range(20)]
    assert sum(not worker.alive for worker in workers.made) == 1
    assert all(worker.ended for worker in workers.made)
    assert "exit code -9. Its rows are scored again by another one of 2" in caplog.text


def test_rows_over_which_two_die_are_named_and_the_rest_is_kept(model, source, tmp_path, workers, caplog):
    before = threading.enumerate()
    workers.deadly = "So 7"
    with pytest.raises(
        RewardlabError, match=r"rows\.jsonl:7 to .*rows\.jsonl:9: not scored\. .*2 ended over these rows"
    ):
        score_with(ProcessBackend(LocalModel(folder=model), 3), source, tmp_path / "scored.jsonl")
    assert "rows are scored and kept in" in caplog.text
    assert all(worker.ended for worker in workers.made)
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in started if thread.name.startswith("ThreadPool")]
    workers.deadly = ""
    assert score_with(ProcessBackend(LocalModel(folder=model), 2), source, tmp_path / "scored.jsonl").scored == 20


def test_the_last_process_that_dies_ends_the_run(model, source, tmp_path, workers):
    workers.deadly = "So 1"
    with pytest.raises(RewardlabError, match=r"rows\.jsonl:1 to .*rows\.jsonl:3: not scored\. .*No process is left"):
        score_with(ProcessBackend(LocalModel(folder=model), 1), source, tmp_path / "scored.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"], "nothing was scored"


def test_a_process_that_ends_while_it_loads_its_model_is_left_out(model, source, tmp_path, workers, caplog):
    workers.unloadable = (1, 2)
    counts = score_with(ProcessBackend(LocalModel(folder=model), 3), source, tmp_path / "scored.jsonl")
    assert counts.scored == 20
    assert "while it loaded its model, a worker process ended with exit code -9. Use fewer --processes" in caplog.text


def test_the_first_process_that_ends_while_it_loads_its_model_ends_the_run(model, source, tmp_path, workers):
    workers.unloadable = (0,)
    with pytest.raises(RewardlabError, match="while it loaded its model, .*Use fewer --processes; 1 scores in this"):
        score_with(ProcessBackend(LocalModel(folder=model), 2), source, tmp_path / "scored.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_parts_that_finish_in_any_order_are_rows_in_order(source, tmp_path):
    class Backwards(Stub):
        """Answers the parts that wait in the opposite order."""

        def __init__(self) -> None:
            super().__init__(num_parts=3)
            self.waiting: list[asyncio.Future[None]] = []

        async def score_rows(self, rows):
            turn = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            if len(self.waiting) == 3 or rows[-1].replies == ("So 19",):
                for number, other in enumerate(reversed(self.waiting)):
                    asyncio.get_running_loop().call_later(0.001 * number, other.set_result, None)
                self.waiting = []
            await turn
            return await super().score_rows(rows)

    backend = Backwards()
    score_with(backend, source, tmp_path / "scored.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [row["response"] for row in rows] == [f"So {n}" for n in range(20)]
    assert backend.asked != [f"So {n}" for n in range(20)], "they were scored in another order"


@pytest.mark.slow
def test_real_processes_write_the_bytes_of_one(model, source, tmp_path, monkeypatch):
    """Two processes, one of which is killed from outside as soon as it is ready. They score by letters, as no process
    then loads torch: that a model scores the same there is shown below."""
    run, killed = processes_module.Worker.run, []

    def killing(worker, job, rows):
        if rows is not None and not killed:
            killed.append(worker._process.pid)
            worker._process.kill()
        return run(worker, job, rows)

    monkeypatch.setattr(processes_module.Worker, "run", killing)
    monkeypatch.setattr(processes_module, "Job", StubJob)
    score_with(ProcessBackend(LocalModel(folder=model), 2), source, tmp_path / "two.jsonl")
    score_with(Stub(), source, tmp_path / "one.jsonl")
    assert len(killed) == 1
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert not partial_of(tmp_path / "two.jsonl").exists()


def test_the_job_of_a_process_arrives_there_with_its_model_and_what_was_decided(model):
    """Pickled as for a process, and asked as there."""
    local = LocalModel(folder=model, overlong="refuse")
    rows = [Asked("How?", ("So.", "why " * 30)), Asked("Why " * 60, ("No.",))]
    here = LocalScorer(local, {})
    job = pickle.loads(pickle.dumps(Job(local, here.decided)))
    assert job(None) == here.decided
    assert job(rows) == here.score(rows)
    assert job(rows).scores[1][0].endswith("--overlong cut.")


def test_each_process_has_a_gpu_of_its_own_or_its_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processes_module, "available_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [one["OMP_NUM_THREADS"] for one in environments_of(3)] == ["2"] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments_of(2)] == ["5", "7"]
    with pytest.raises(ConfigError, match="--processes 3: each takes a GPU of its own, and there are 2"):
        environments_of(3)
    assert "CUDA_VISIBLE_DEVICES" in os.environ
