"""Parts of work divided among sources that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.gold.pool import PATIENCE, PassingError, Pool


class Squaring:
    """A source that squares, where `fails` does not say otherwise."""

    def __init__(self, fails: Callable[[Sequence[int], int], Exception | None], *, name: str = "one", places: int = 2):
        self.name, self.places, self.fails, self.asked = name, places, fails, 0
        self.identity: dict[str, str] = {}

    async def open(self) -> None: ...

    async def ask(self, items: Sequence[int]) -> Sequence[int]:
        self.asked += 1
        number = self.asked
        await asyncio.sleep(0)
        if (error := self.fails(items, number)) is not None:
            raise error
        return [item**2 for item in items]

    async def close(self) -> None: ...


def honest(items: Sequence[int], asked: int) -> None:
    return None


def done_by(sources: Sequence[Squaring], *, num: int = 40, size: int = 4) -> dict[int, int | str]:
    found: dict[int, int | str] = {}

    def keep(finished):
        for items, results in finished:
            for place, item in enumerate(items):
                assert item not in found
                found[item] = results if isinstance(results, str) else results[place]

    parts = iter([list(range(start, start + size)) for start in range(0, num, size)])
    asyncio.run(Pool(sources, keep).run(parts))
    return found


def test_everything_is_done_once() -> None:
    assert done_by([Squaring(honest), Squaring(honest, name="two")]) == {item: item**2 for item in range(40)}


def test_what_fails_now_and_then_is_done_later() -> None:
    source = Squaring(lambda items, asked: PassingError("busy") if asked % 3 == 0 else None)
    assert done_by([source]) == {item: item**2 for item in range(40)}


def test_an_item_at_fault_is_found_and_costs_no_other() -> None:
    found = done_by([Squaring(lambda items, asked: PassingError("it breaks") if {7, 30} & set(items) else None)])
    assert {item: why for item, why in found.items() if isinstance(why, str)} == {7: "it breaks", 30: "it breaks"}
    assert len(found) == 40


def test_a_source_that_is_gone_is_left_out(log) -> None:
    gone = Squaring(lambda items, asked: PassingError("gone") if asked > 3 else None)
    assert done_by([gone, Squaring(honest, name="two")], num=200) == {item: item**2 for item in range(200)}
    assert "one: left out" in log.text
    assert gone.asked <= 3 + PATIENCE + gone.places * 2


class Slow(Squaring):
    async def ask(self, items: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(0.05)
        return await super().ask(items)


def test_an_item_at_fault_costs_no_source_while_the_other_is_at_work(log) -> None:
    def broken(items: Sequence[int], asked: int) -> Exception | None:
        return PassingError("it breaks") if 0 in items else None

    found = done_by([Squaring(broken, places=1), Slow(broken, name="two", places=1)], num=2, size=1)
    assert found == {0: "it breaks", 1: 1}
    assert "left out" not in log.text


def test_a_part_that_one_source_alone_failed_is_not_given_up_before_another_tried_it() -> None:
    """The last parts fail at one that is gone and free, while the other is at work."""

    gone = Squaring(lambda items, asked: PassingError("gone"), name="gone", places=1)
    assert done_by([gone, Slow(honest, places=1)], num=4, size=1) == {item: item**2 for item in range(4)}


def test_two_that_are_gone_cost_no_item_while_a_third_is_at_work() -> None:
    gone = [Squaring(lambda items, asked: PassingError("gone"), name=name, places=1) for name in ("one", "two")]
    found = done_by([*gone, Slow(honest, name="three", places=1)], num=4, size=1)
    assert found == {item: item**2 for item in range(4)}


def test_when_nobody_is_left_the_error_says_so_and_what_was_done_is_kept() -> None:
    found: list[int] = []
    source = Squaring(lambda items, asked: PassingError("gone.") if asked > 3 else None, places=1)
    pool = Pool([source], lambda finished: found.extend(item for items, _ in finished for item in items))
    with pytest.raises(EndpointError, match="gone. Nothing else can go on with it; what is finished is kept"):
        asyncio.run(pool.run(iter([[item] for item in range(100)])))
    assert found == [0, 1, 2]


def test_what_will_not_pass_ends_the_work_at_once() -> None:
    source = Squaring(lambda items, asked: ConfigError("wrong token") if asked == 2 else None, places=1)
    with pytest.raises(ConfigError, match="wrong token"):
        done_by([source])
    assert source.asked == 2
