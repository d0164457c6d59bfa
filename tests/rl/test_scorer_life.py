"""Who may use a scorer, and when: many tasks, other loops and processes, one that is closed, dropped or cancelled."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reward_models import served
from rewardlab.analysis.ensembles import Scale
from rewardlab.client import EndpointError
from rewardlab.core.errors import ConfigError
from rewardlab.rl import RewardScorer, Rollout
from rewardlab.rl.members import Found
from rewardlab.serve.engine.local import LocalEngine
from rollouts_scored import NEAR, TALKS, Told, scores

pytest_plugins = ["reward_fixtures"]


def test_many_tasks_ask_at_the_same_time_and_each_gets_its_own_in_order(folder: Path) -> None:
    async def done() -> tuple[list[float], list[list[float]]]:
        async with RewardScorer(folder) as scorer:
            whole = await scorer.score(TALKS)
            return whole, await asyncio.gather(*(scorer.score(TALKS[n : n + 5]) for n in range(10)))

    whole, parts = asyncio.run(done())
    for first, part in enumerate(parts):
        np.testing.assert_allclose(part, whole[first : first + 5], atol=NEAR)


@pytest.mark.parametrize(
    ("asked", "local_rank", "taken"), [(None, "2", "cuda:2"), ("cpu", "2", "cpu"), (None, None, None)]
)
def test_each_process_of_a_trainer_has_its_model_on_its_own_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, local_rank: str | None, taken: str | None
) -> None:
    chosen: list[Any] = []

    def load(models: Any, *, device: Any, **settings: Any) -> LocalEngine:
        chosen.append(device)
        raise ConfigError("seen")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(LocalEngine, "load", load)
    with pytest.raises(ConfigError, match="seen"):
        asyncio.run(RewardScorer(folder, device=asked).score(TALKS[:1]))
    assert [None if one is None else str(one) for one in chosen] == [taken]


def test_an_error_of_one_member_ends_the_call_and_all_are_closed(told: Any) -> None:
    class Failing(Told):
        async def score(self, rollouts: Sequence[Rollout]) -> list[Found]:
            raise EndpointError("gone")

    scale = Scale(mean=0.0, std=1.0)
    told |= {"a": Told("a", [0.5], scale), "b": Failing("b", [], scale)}
    with pytest.raises(EndpointError, match="gone"):
        scores(["a", "b"], TALKS[:1])
    assert [told[name].closed for name in "ab"] == [1, 1]


@pytest.mark.slow
def test_a_server_that_is_gone_is_an_error_that_says_who_waited(folder: Path) -> None:
    async def done() -> list[float]:
        scorer = RewardScorer(address, client={"attempts": 1, "timeout_s": 2.0})
        with served_once:
            await scorer.score(TALKS[:2])
        try:
            return await scorer.score(TALKS[:2])
        finally:
            await scorer.aclose()

    with ExitStack() as served_once:
        address = served_once.enter_context(served(folder))
        with pytest.raises(EndpointError) as caught:
            asyncio.run(done())
    assert caught.value.__notes__ == ["rollout 0 to rollout 1 waited for these scores; none of them is used."]


def test_a_closed_scorer_another_loop_and_another_process_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = RewardScorer(folder)
    asyncio.run(scorer.score(TALKS[:1]))
    with pytest.raises(ConfigError, match="first used in another event loop"):
        asyncio.run(scorer.score(TALKS[:1]))
    asyncio.run(scorer.aclose())
    asyncio.run(scorer.aclose())
    with pytest.raises(ConfigError, match="the scorer is closed"):
        asyncio.run(scorer.score(TALKS[:1]))
    scorer = RewardScorer(folder)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(ConfigError, match="made in another process"):
        asyncio.run(scorer.score(TALKS[:1]))


@pytest.mark.parametrize("where", ["folder", "url"])
def test_calls_that_wait_for_a_scorer_that_is_closed_end_in_an_error_and_no_model_is_left(
    where: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(where)

    async def done() -> list[Any]:
        scorer = RewardScorer(source)
        tasks = [asyncio.create_task(scorer.score(TALKS[:1])) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await scorer.aclose()
        return await asyncio.gather(*tasks, return_exceptions=True)

    before = _engines()
    found = asyncio.run(done())
    assert [type(one) for one in found] == [ConfigError] * 3
    assert "closed" in str(found[0])
    assert _engines() == before


def test_a_scorer_that_is_dropped_lets_its_model_go_and_holds_up_no_thread(folder: Path) -> None:
    """Garbage collection may find it in a thread that its own one waits for."""
    scorer, begun, go = RewardScorer(folder), threading.Event(), threading.Event()
    asyncio.run(scorer.score(TALKS[:1]))
    batcher = scorer._members[0]._engine._batcher
    engine, thread = weakref.ref(scorer._members[0]._engine), batcher._thread
    batcher.call(lambda: (begun.set(), go.wait()))
    begun.wait()
    del scorer
    gc.collect()
    assert (engine(), thread.is_alive()) == (None, True)
    go.set()
    thread.join()


def _engines() -> int:
    """Models in this process, each of which has a thread."""
    return sum(thread.name == "rewardlab-engine" for thread in threading.enumerate())


@pytest.mark.parametrize("where", ["folder", "url"])
def test_a_scorer_reaches_another_process_as_what_it_was_made_of(where: str, request: pytest.FixtureRequest) -> None:
    scorer = RewardScorer(request.getfixturevalue(where), truncate=True)
    again = pickle.loads(pickle.dumps(scorer))
    assert again.config == scorer.config

    async def done() -> list[list[float]]:
        async with scorer, again:
            return [await scorer.score(TALKS[:2]), await again.score(TALKS[:2])]

    one, other = asyncio.run(done())
    np.testing.assert_allclose(one, other, atol=NEAR)


def test_settings_that_are_shown_hold_no_token() -> None:
    scorer = RewardScorer("http://127.0.0.1:1", truncate=True, client={"token": "secret"})
    assert "truncate=True" in repr(scorer.config)
    assert "secret" not in repr(scorer.config)


def test_a_cancelled_call_leaves_the_scorer_in_order(folder: Path) -> None:
    async def done() -> list[float]:
        async with RewardScorer(folder) as scorer:
            task = asyncio.create_task(scorer.score(TALKS * 20))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await scorer.score(TALKS)

    assert len(asyncio.run(done())) == len(TALKS)


def test_a_call_that_is_cancelled_while_it_is_rendered_is_not_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, prepare = threading.Event(), threading.Event(), LocalEngine.prepare

    def slowly(engine: LocalEngine, request: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return prepare(engine, request)

    queued: list[Future[Any]] = []
    submit = LocalEngine.submit

    def noted(engine: LocalEngine, prepared: Any) -> Future[Any]:
        # The thread that computes is busy, as it is with the batches of others.
        engine._batcher.call(lambda: cancelled.wait(30))
        queued.append(submit(engine, prepared))
        return queued[-1]

    cancelled = threading.Event()

    async def done() -> None:
        async with RewardScorer(folder) as scorer:
            monkeypatch.setattr(LocalEngine, "prepare", slowly)
            monkeypatch.setattr(LocalEngine, "submit", noted)
            task = asyncio.create_task(scorer.score(TALKS))
            await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            async with asyncio.timeout(20):
                while not (queued and queued[0].cancelled()):
                    await asyncio.sleep(0.01)
            cancelled.set()

    asyncio.run(done())


NO_TORCH = """
import sys
import rewardlab.rl as rl

rl.RewardScorer("http://127.0.0.1:1"), rl.advantages, rl.RolloutLog
print("torch" in sys.modules)
for settings in ({"text_as": "turn"}, {"combination": "max"}, {"precision": "fp8"}):
    try:
        rl.RewardScorer("a", **settings)
    except rl.scorer.ConfigError as error:
        print(error)
"""


def test_a_scorer_of_a_server_imports_no_torch_and_words_that_are_no_choice_are_told() -> None:
    ran = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True)
    assert ran.stdout.splitlines() == [
        "False",
        "ScorerConfig: text_as: 'turn' is not one of 'turns', 'transcript', 'rendered'. Did you mean 'turns'?",
        "ScorerConfig: combination: 'max' is not one of 'mean', 'minimum', 'lower'.",
        "ScorerConfig: precision: 'fp8' is not one of 'fp32', 'bf16', 'fp16'.",
    ], ran.stderr


def test_a_scorer_is_closed_when_the_process_begins_no_more_work_in_threads(folder: Path) -> None:
    async def done() -> None:
        scorer = RewardScorer(folder)
        await scorer.score(TALKS[:1])
        ended = ThreadPoolExecutor()
        ended.shutdown()
        asyncio.get_running_loop().set_default_executor(ended)
        await scorer.aclose()

    before = set(threading.enumerate())
    asyncio.run(done())
    assert not [new for new in set(threading.enumerate()) - before if new.name == "rewardlab-engine"]
