"""Scores for programs without an event loop: one scorer for any number of threads."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest

from reward_models import save_tiny, served
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.rl import BlockingScorer, RewardScorer, Rollout, RolloutError, Scored
from rewardlab.rl.loops import LoopScorer
from rewardlab.rl.trl import reward_function

pytest_plugins = ["reward_fixtures"]
TALKS = [
    [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": "Yes." * (number + 1)}]
    for number in range(6)
]


def awaited(source: str | Path) -> list[float]:
    async def scores() -> list[float]:
        async with RewardScorer(source) as scorer:
            return await scorer.score(TALKS)

    return asyncio.run(scores())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("where", ["folder", "url"])
def test_threads_share_one_scorer_and_get_the_scores_that_a_loop_gets(
    where: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(where)
    expected = awaited(source)
    with BlockingScorer(source) as scorer, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(scorer.score, [TALKS] * 8))
        details = scorer.details(TALKS)
        noise = scorer.noise()
    for scores in found:
        assert scores == pytest.approx(expected, abs=2e-5)
    expected_noise = noise.between_scorings([one.score for one in details])
    assert [one.noise for one in details] == pytest.approx(expected_noise.tolist())


@pytest.mark.slow
def test_a_model_with_a_limit_below_its_canaries_is_served_and_asked(tmp_path: Path) -> None:
    short = save_tiny(tmp_path / "short", max_seq_len=64)
    with served(short) as url, BlockingScorer(short) as here, BlockingScorer(url) as there:
        assert there.score(TALKS) == pytest.approx(here.score(TALKS), abs=2e-5)
        long = [{"role": "user", "content": "Why? " * 100}, TALKS[0][1]]
        with pytest.raises(RolloutError, match=r"rollout 0 .*tokens"):
            there.score([long])


@pytest.mark.parametrize("where", ["folder", "url"])
def test_it_reaches_another_process_as_what_it_was_made_of(where: str, request: pytest.FixtureRequest) -> None:
    with BlockingScorer(request.getfixturevalue(where), truncate=True) as scorer:
        expected = scorer.score(TALKS)
        again = pickle.loads(pickle.dumps(scorer))
    with again:
        assert again._scorer.config == scorer._scorer.config
        assert again.score(TALKS) == pytest.approx(expected, abs=2e-5)


class Named(BlockingScorer):
    """A scorer with an argument and an attribute of its own."""

    def __init__(self, source: str, name: str, **settings: object) -> None:
        super().__init__(source, **settings)
        self.name = name


class AsyncNamed(RewardScorer):
    """The same for asynchronous programs."""

    def __init__(self, source: str, name: str, **settings: object) -> None:
        super().__init__(source, **settings)
        self.name = name


@pytest.mark.parametrize("kind", [Named, AsyncNamed])
def test_what_a_subclass_has_added_reaches_another_process_with_settings_that_cannot_be_changed(kind: type) -> None:
    made = kind("http://127.0.0.1:1", "mine", client=MappingProxyType({"attempts": 2}))
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), again.name) == (kind, "mine")
    config = again._scorer.config if isinstance(again, BlockingScorer) else again.config
    assert config.client == {"attempts": 2}


def test_inside_a_running_loop_it_waits_too(folder: Path) -> None:
    async def inside() -> list[float]:
        with BlockingScorer(folder) as scorer:
            return scorer.score(TALKS)

    assert asyncio.run(inside()) == pytest.approx(awaited(folder), abs=2e-5)


def test_errors_are_those_of_a_scorer_and_it_goes_on_after_them(folder: Path) -> None:
    with BlockingScorer(folder) as scorer:
        with pytest.raises(RolloutError, match="rollout 1: it ends with a turn of the user"):
            scorer.score([TALKS[0], TALKS[1][:1]])
        assert len(scorer.score(TALKS)) == len(TALKS)
    with pytest.raises(ConfigError, match="the scorer is closed. Make a new one"):
        scorer.score(TALKS)
    scorer.close()
    with pytest.raises(ConfigError, match="unknown setting 'textas'"):
        BlockingScorer(folder, textas="turns")
    with pytest.raises(ConfigError, match=r"timeout_s is a setting of the client of a server: give client="):
        BlockingScorer(folder, timeout_s=5)
    with pytest.raises(ConfigError, match=r"client: unknown setting 'timeoutt'. Did you mean 'timeout_s'"):
        BlockingScorer(folder, client={"timeoutt": 5})
    with (
        BlockingScorer("127.0.0.1:8000") as scorer,
        pytest.raises(RewardlabError, match=r"no such folder.*If it is a server, write http://127.0.0.1:8000"),
    ):
        scorer.score(TALKS)


def test_a_server_that_is_not_there_is_an_error_of_the_client() -> None:
    with (
        BlockingScorer("http://127.0.0.1:1", client={"attempts": 1}) as scorer,
        pytest.raises(RewardlabError, match=r"127\.0\.0\.1:1"),
    ):
        scorer.score(TALKS)


def test_calls_that_wait_when_it_is_closed_end_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    async def never(self: RewardScorer, rollouts: object) -> list[Scored]:
        began.set()
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(RewardScorer, "details", never)
    scorer = BlockingScorer(folder)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scorer.details, TALKS)
        assert began.wait(60)
        scorer.close()
        with pytest.raises(ConfigError, match="the scorer was closed while it waited"):
            waiting.result(60)


def test_one_that_nobody_holds_ends_its_thread(folder: Path) -> None:
    scorer = BlockingScorer(folder)
    scorer.score(TALKS[:1])
    thread = scorer._thread._thread
    del scorer
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


class Counted:
    """A scorer that notes in which loop it was closed."""

    def __init__(self) -> None:
        self.closed_in: list[asyncio.AbstractEventLoop] = []

    async def details(self, rollouts: list[Rollout]) -> list[Scored]:
        return [Scored(score=1.0, noise=0.0) for _ in rollouts]

    async def aclose(self) -> None:
        self.closed_in.append(asyncio.get_running_loop())


def test_the_scorers_of_all_loops_are_closed_where_they_were_used() -> None:
    made: list[Counted] = []

    def make() -> Counted:
        made.append(Counted())
        return made[-1]

    scorer = LoopScorer(make)
    rollouts = [Rollout(name="one", rendered="text")]
    stopped, running = asyncio.new_event_loop(), asyncio.new_event_loop()
    stopped.run_until_complete(scorer.details(rollouts))
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(scorer.details(rollouts), running).result(60)
    scorer.close()
    scorer.close()
    assert [one.closed_in for one in made] == [[stopped], [running]]
    running.call_soon_threadsafe(running.stop)
    thread.join(60)
    stopped.close()
    running.close()


def test_what_a_loop_leaves_that_is_stopped_meanwhile_is_closed_all_the_same() -> None:
    loop, made = asyncio.new_event_loop(), Counted()
    stopping, handed = threading.Event(), threading.Event()
    scorer = LoopScorer(lambda: made)
    loop.run_until_complete(scorer.details([Rollout(name="one", rendered="text")]))

    def stop() -> None:
        loop.stop()
        stopping.set()
        handed.wait()

    loop.call_soon(stop)
    running = threading.Thread(target=loop.run_forever)
    running.start()
    stopping.wait()
    closing = threading.Thread(target=scorer.close)
    closing.start()
    while not loop._ready:
        pass
    handed.set()  # and the loop stops, with all that was handed to it
    closing.join()
    running.join()
    assert made.closed_in == [loop]
    loop.close()


class Unclosable(Counted):
    async def aclose(self) -> None:
        await super().aclose()
        raise ConfigError("the model is not released")


@pytest.mark.parametrize("kind", [Counted, Unclosable])
def test_the_scorer_of_a_stopped_loop_is_closed_where_another_loop_runs(kind: type[Counted]) -> None:
    loop, made = asyncio.new_event_loop(), kind()
    scorer = LoopScorer(lambda: made)
    loop.run_until_complete(scorer.details([Rollout(name="one", rendered="text")]))

    async def cell() -> None:
        with pytest.raises(ConfigError, match="not released") if kind is Unclosable else nullcontext():
            scorer.close()

    inside = threading.Thread(target=asyncio.run, args=(cell(),), daemon=True)
    inside.start()
    inside.join(60)
    assert not inside.is_alive()
    assert made.closed_in == [loop]
    loop.close()


def test_in_a_running_loop_a_reward_function_asks_to_be_awaited(folder: Path) -> None:
    reward = reward_function(folder, noise_floor=False)

    async def inside() -> None:
        await reward([TALKS[0][:1]], [TALKS[0][1:]])
        try:
            with pytest.raises(ConfigError, match="await aclose"):
                reward.close()
        finally:
            await reward.aclose()

    asyncio.run(inside())
