"""The queue: everyone gets their own answer, in order, within the budget, whoever else fails, leaves or waits."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rewardlab.client.protocol import ScoredGroup, Usage
from rewardlab.core.types import TokenGroup
from rewardlab.serve.engine.api import DrainingError, EngineFailedError, QueueFullError, Scored
from rewardlab.serve.engine.batching import Batcher
from rewardlab.serve.engine.queued import Work
from rewardlab.serve.engine.request_tokens import Unit

POISON = 666


class Adder:
    """A made-up model: the score of a conversation is a polynomial of its tokens."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.go = threading.Event()
        self.go.set()
        self.started = threading.Event()
        self.batches: list[list[TokenGroup]] = []
        self.failure: Callable[[Sequence[TokenGroup]], Exception | None] = lambda groups: None
        self.freed = 0
        self.usable = True

    def score(self, groups: Sequence[TokenGroup], *, budget: int):
        self.batches.append(list(groups))
        self.started.set()
        assert self.go.wait(30)
        if (error := self.failure(groups)) is not None:
            raise error
        return [np.array([self.of(group.conversation(n)) for n in range(group.num_replies)]) for group in groups], [
            0
        ] * len(groups)

    def of(self, token_ids: np.ndarray) -> float:
        return self.factor * float(np.polyval(token_ids % 7, 0.9))

    def num_known(self, group: TokenGroup) -> int:
        return 0

    def free_memory(self) -> None:
        self.freed += 1

    def is_usable(self) -> bool:
        return self.usable


def unit(prompt: Sequence[int], replies: Sequence[Sequence[int]], first: int = 0) -> Unit:
    return Unit(
        group=TokenGroup(
            preference_id="",
            source="",
            prompt_key="",
            shared=np.array(prompt, np.int32),
            suffixes=tuple(np.array(reply, np.int32) for reply in replies),
            prompt_tokens=(len(prompt),) * len(replies),
            truncated_tokens=(0,) * len(replies),
            comparisons=(),
        ),
        places=tuple(range(first, first + len(replies))),
    )


def work(model: Adder, *units: Unit) -> Work:
    def finish(done: Work) -> Scored:
        usage = Usage(computed_tokens=done.computed_tokens, cached_tokens=done.cached_tokens)
        return Scored(
            model="m",
            digest=str(model.factor),
            groups=[ScoredGroup(scores=done.scores, num_tokens=[], truncated_tokens=[])],
            usage=usage,
        )

    return Work(model=model, units=units, num_replies=sum(len(one.places) for one in units), finish=finish)


def wanted(asked: Work) -> list[float]:
    return [asked.model.of(one.group.conversation(n)) for one in asked.units for n in range(one.group.num_replies)]


@pytest.fixture
def start() -> Iterator[Callable[..., Batcher]]:
    started: list[Batcher] = []

    def begin(**limits: float) -> Batcher:
        given = {"token_budget": 64, "max_waiting_tokens": 10**6, "max_batch_wait_ms": 0.0} | limits
        started.append(Batcher(**given))
        return started[-1]

    yield begin
    for batcher in started:
        batcher.close()


def held(model: Adder, batcher: Batcher) -> Future:
    """Something that the thread computes until `model.go` is set."""
    model.go.clear()
    first = work(model, unit([9], [[9]]))
    batcher.submit(first)
    assert model.started.wait(30)
    return first.future


def test_answers_are_everyones_own_in_any_interleaving(start):
    batcher, models = start(max_batch_wait_ms=1.0), [Adder(1.0), Adder(-3.0)]
    draw = random.Random(0)
    prompts = [[draw.randrange(100) for _ in range(draw.randrange(1, 30))] for _ in range(6)]
    asked = []
    for _ in range(200):
        units, first = [], 0
        for _ in range(draw.randrange(1, 4)):
            replies = [[draw.randrange(100) for _ in range(draw.randrange(1, 9))] for _ in range(draw.randrange(1, 5))]
            units.append(unit(draw.choice(prompts), replies, first))
            first += len(replies)
        asked.append(work(draw.choice(models), *units))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(batcher.submit, asked))
    for one in asked:
        got = one.future.result(timeout=30)
        assert list(got.groups[0].scores) == wanted(one)
        assert got.digest == str(one.model.factor)
    assert sum(len(model.batches) for model in models) == batcher.counts.batches
    assert batcher.counts.computed_tokens == sum(one.computed_tokens for one in asked)
    assert batcher.waiting == (0, 0)


def test_batches_stay_within_the_budget_and_equal_prompts_are_one_group(start):
    model = Adder()
    batcher = start()
    held(model, batcher)
    asked = [work(model, unit(range(30), [[n, n]])) for n in range(10)]
    asked.append(work(model, unit(range(100), [[1]])))  # alone above the budget
    asked += [work(model, unit([n, *range(20)], [[n]])) for n in range(9)]
    for one in asked:
        batcher.submit(one)
    model.go.set()
    for one in asked:
        assert list(one.future.result(timeout=30).groups[0].scores) == wanted(one)
    sizes = [sum(group.num_tokens for group in batch) for batch in model.batches]
    assert [size for size in sizes if size > 64] == [101]
    assert model.batches[1][0].num_replies == 10
    assert len(model.batches) == 1 + 1 + 1 + 5


def test_small_requests_pass_a_large_one_which_has_every_other_batch(start):
    """Each part of the large request fills a batch; 600 small ones, of another model too, come before and after."""
    model, other = Adder(), Adder(2.0)
    batcher = start()
    held(model, batcher)
    large = work(model, *(unit([n], [[n] * 62], n) for n in range(5)))
    small = [work(model if n % 3 else other, unit([100 + n], [[1]])) for n in range(600)]
    done: list[Work] = []
    batches_at: list[int] = []

    def note(one: Work) -> None:
        done.append(one)
        batches_at.append(len(model.batches) + len(other.batches))

    for one in (*small[:1], large, *small[1:]):
        one.future.add_done_callback(lambda _, one=one: note(one))
        batcher.submit(one)
    model.go.set()
    for one in (large, *small):
        assert list(one.future.result(timeout=30).groups[0].scores) == wanted(one)
    assert batches_at[done.index(large)] <= 1 + 1 + 2 * 5, "it never starves"
    assert batches_at[done.index(small[2])] <= 5, "nobody waits for all of it"
    for one in (model, other):
        assert [work for work in done if work.model is one and work is not large] == [
            work for work in small if work.model is one
        ], "the older ones first"


def test_one_request_takes_half_of_a_batch_while_others_have_work_that_fits(start):
    model = Adder()
    batcher = start()
    held(model, batcher)
    large = work(model, *(unit([n], [[n] * 7], n) for n in range(20)))
    small = [work(model, unit([100 + n], [[1]])) for n in range(3)]
    for one in (large, *small):
        batcher.submit(one)
    model.go.set()
    large.future.result(timeout=30)
    firsts = [[int(group.shared[0]) for group in batch] for batch in model.batches[1:]]
    assert firsts == [[0, 1, 2, 3, 100, 101, 102, 4, 5, 6], [*range(7, 15)], [*range(15, 20)]]


def test_large_requests_do_not_hold_up_a_small_one_together(start):
    model = Adder()
    batcher = start()
    held(model, batcher)
    large = [work(model, *(unit([20 * k + n], [[n] * 63], n) for n in range(9))) for k in range(3)]
    small = work(model, unit([100], [[1]]))
    for one in (*large, small):
        batcher.submit(one)
    small.future.add_done_callback(lambda _: batches.append(len(model.batches)))
    batches: list[int] = []
    model.go.set()
    for one in (*large, small):
        assert list(one.future.result(timeout=30).groups[0].scores) == wanted(one)
    assert batches[0] <= 1 + 2 * 3 + 1


def test_what_a_job_of_the_thread_held_is_freed_after_it(start):
    class Large:
        def forget(self) -> None:
            pass

    batcher, large = start(), Large()
    gone = weakref.ref(large)
    batcher.call(large.forget).result(timeout=30)
    del large
    # Computed after the job, so the thread is past it.
    one = work(Adder(), unit([1], [[1]]))
    batcher.submit(one)
    one.future.result(timeout=30)
    assert gone() is None


def test_cancelled_requests_are_not_computed_and_disturb_nobody(start):
    model = Adder()
    batcher = start(token_budget=8)
    held(model, batcher)
    asked = [work(model, unit([n], [[n, n]])) for n in range(9)]
    for one in asked:
        batcher.submit(one)
    assert batcher.waiting == (9, 27)
    assert all(one.future.cancel() for one in asked[::2])
    assert batcher.waiting == (4, 12)
    model.go.set()
    for number, one in enumerate(asked):
        if number % 2:
            assert list(one.future.result(timeout=30).groups[0].scores) == wanted(one)
        else:
            with pytest.raises(CancelledError):
                one.future.result(timeout=30)
    computed = {int(group.shared[0]) for batch in model.batches for group in batch}
    assert computed == {9, 1, 3, 5, 7}


def test_a_failing_request_fails_alone(start, caplog):
    model = Adder()
    model.failure = lambda groups: next(
        (RuntimeError("quoted text") for group in groups if POISON in group.conversation(0)), None
    )
    batcher = start(token_budget=1000)
    held(model, batcher)
    asked = [work(model, unit([1, 2, 3], [[n]]), unit([n], [[4]], 1)) for n in range(20)]
    bad = [work(model, unit([n, 5], [[n]]), unit([POISON, n], [[4]], 1), unit([n], [[2]], 2)) for n in range(2)]
    for one in (*asked[:9], bad[0], *asked[9:], bad[1]):
        batcher.submit(one)
    model.go.set()
    for one in asked:
        assert list(one.future.result(timeout=30).groups[0].scores) == wanted(one)
    for one in bad:
        with pytest.raises(EngineFailedError, match="could not be computed: the model raised RuntimeError") as failed:
            one.future.result(timeout=30)
        assert "quoted" not in str(failed.value)
    assert batcher.alive()
    assert batcher.waiting == (0, 0)


@pytest.mark.parametrize("token_budget", [2, 100], ids=["in two batches", "in one batch"])
def test_a_device_that_computes_no_more_ends_the_engine(start, token_budget):
    model = Adder()
    model.failure = lambda groups: RuntimeError("sticky") if POISON in groups[0].shared else None
    model.usable = False
    batcher = start(token_budget=token_budget)
    running = held(model, batcher)
    asked = [work(model, unit([POISON], [[1]])), work(model, unit([1], [[1]]))]
    for one in asked:
        batcher.submit(one)
    model.go.set()
    assert running.result(timeout=30).groups
    for one, kind in zip(asked, (EngineFailedError, DrainingError), strict=True):
        assert isinstance(one.future.exception(timeout=5), kind)
    assert not batcher.alive()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory: you tried"),
    ],
    ids=["cuda", "cpu"],
)
def test_what_does_not_fit_into_memory_is_computed_in_parts(start, error):
    model = Adder()
    model.failure = lambda groups: error if sum(group.num_tokens for group in groups) > 40 else None
    batcher = start(token_budget=1000)
    held(model, batcher)
    fitting = work(model, unit(range(10), [[n, 1, 2] for n in range(30)]), unit(range(20), [[1]], 30))
    never = work(model, unit(range(50), [[1], [2]]))
    batcher.submit(fitting)
    batcher.submit(never)
    model.go.set()
    assert list(fitting.future.result(timeout=30).groups[0].scores) == wanted(fitting)
    with pytest.raises(EngineFailedError, match="memory ran out"):
        never.future.result(timeout=30)
    assert model.freed > 0
    assert batcher.alive()


def test_a_full_queue_refuses_with_a_time_and_takes_again_later(start):
    model = Adder()
    batcher = start(max_waiting_tokens=10)
    held(model, batcher)
    first = work(model, unit([1], [[1] * 7]))
    batcher.submit(first)
    with pytest.raises(QueueFullError, match="8 tokens are waiting, and at most 10") as full:
        batcher.submit(work(model, unit([2], [[1, 1]])))
    assert full.value.retry_after_s is not None
    assert 1 <= full.value.retry_after_s <= 60
    batcher.submit(work(model, unit([2], [[1]])))
    model.go.set()
    first.future.result(timeout=30)
    assert batcher.drain(30)
    with pytest.raises(DrainingError) as draining:
        batcher.submit(first)
    assert draining.value.retry_after_s == 1.0


def test_draining_finishes_what_was_taken_and_closing_fails_what_waits(start):
    model = Adder()
    batcher = start(token_budget=4)
    running = held(model, batcher)
    left = work(model, unit([1], [[1]] * 2))
    batcher.submit(left)
    assert not batcher.drain(0.0)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    model.go.set()
    closing.join(30)
    assert running.result(timeout=30).groups
    # It waited or was begun, by whether the thread looked for more before it was closed.
    if isinstance(left.future.exception(timeout=30), DrainingError):
        assert len(model.batches) == 1
    assert not batcher.alive()


def test_what_two_requests_have_in_common_is_computed_once_and_counted_for_the_first(start):
    model = Adder()
    batcher = start(token_budget=100)
    running = held(model, batcher)
    asked = [
        work(model, unit([1, 2, 3], [[4, 5], [6]])),
        work(model, unit([1, 2, 3], [[6], [7, 7], [6]])),
        work(model, unit([8], [[6]])),
    ]
    for one in asked:
        batcher.submit(one)
    model.go.set()
    answers = [one.future.result(timeout=30) for one in asked]
    running.result(timeout=30)
    for one, answer in zip(asked, answers, strict=True):
        assert answer.groups[0].scores == wanted(one)
    assert [answer.usage.computed_tokens for answer in answers] == [3 + 2 + 1, 2, 2]
    assert sorted(group.num_replies for group in model.batches[-1]) == [1, 3]


def test_a_thread_that_ends_leaves_nobody_waiting(start, monkeypatch):
    model = Adder()
    batcher = start()
    running = held(model, batcher)
    waiting = work(model, unit([1], [[1]]))
    batcher.submit(waiting)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(batcher, "_take", lambda: 1 / 0)
    model.go.set()
    assert running.result(timeout=30).groups
    with pytest.raises(DrainingError):
        waiting.future.result(timeout=30)
    assert not batcher.alive()
    with pytest.raises(DrainingError):
        batcher.submit(work(model, unit([1], [[1]])))
