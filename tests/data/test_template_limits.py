"""A chat template that does not end, or makes too much of a conversation, is stopped in words."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading

import pytest

from common import CHATML, make_tokenizer
from rewardlab.core.errors import RenderError
from rewardlab.core.libc import resident
from rewardlab.core.types import Message
from rewardlab.data import limits
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
ENDLESS = {
    "loops without output": f"{NESTED}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "loops with output": f"{NESTED}{{{{ i }}}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "a text that doubles": (
        "{% set s = namespace(x='a' * 9999) %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}"
    ),
}
UNLIKELY = {
    "{{ 9**9 }}": "of the chat template takes a power",
    "\n{{ 'a' * 10000000000 }}": "of the chat template names 10000000000, which is above 1000000",
    "{% for i in range(1_000_001) %}{% endfor %}": "names 1_000_001, which is above",
    "{{ 'a' * 999999 * 9 }}": "characters of a conversation of 9. Use another",
    "x" * (limits.MAX_TEMPLATE + 1): "and at most 1048576 are read",
}


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are stopped after less than they are given elsewhere."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(limits, "MAX_GROWTH", 64 << 20)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_without_an_end_is_stopped(case):
    with pytest.raises(RenderError, match="the chat template refuses .* it was stopped after") as refused:
        build_renderer(make_tokenizer(CHATML + ENDLESS[case]), RenderingConfig())
    told = re.search(r"after ([0-9.]+) seconds of processor time, (\d+) MiB larger", str(refused.value))
    assert told
    assert float(told[1]) < 5
    assert int(told[2]) < 2048, "a text that doubles would soon be larger"
    # Nothing is raised afterwards.
    renderer = build_renderer(make_tokenizer(), RenderingConfig())
    assert len({renderer.text((Message("user", "Hi"), Message("assistant", "So."))) for _ in range(50)}) == 1


@pytest.mark.parametrize("template", UNLIKELY)
def test_what_could_not_be_interrupted_is_not_begun(template):
    with pytest.raises(RenderError) as refused:
        build_renderer(make_tokenizer(CHATML + template), RenderingConfig())
    assert UNLIKELY[template] in str(refused.value)


def test_nothing_goes_on_while_the_memory_is_looked_at():
    went_on, go = [], threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), went_on.append(True)), daemon=True)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the other thread goes on only where this one lets it
    try:
        go.set()
        sum(range(3_000_000))  # by now it waits for its turn
        sizes = [resident() for _ in range(20)]
        assert not went_on
    finally:
        sys.setswitchinterval(interval)
    thread.join(20)
    assert went_on
    assert all(sizes) == sys.platform.startswith("linux")


def test_what_a_stopped_call_holds_is_not_given_to_the_next(monkeypatch):
    size = [1000]
    monkeypatch.setattr(limits, "resident", lambda: size[0])
    monkeypatch.setattr(limits, "MAX_GROWTH", 100)
    monkeypatch.setattr(limits, "SOON", -1.0)
    monkeypatch.setattr(limits, "_raise_in", lambda thread, error: None)
    monkeypatch.setattr(limits.threading.Thread, "start", lambda thread: None)
    watcher, stopped, following = limits._Watcher(), limits._Watch(60.0), limits._Watch(60.0)
    watcher.add(stopped)
    size[0] = 5000
    watcher._look()
    assert stopped.interrupted
    watcher.add(following)
    assert following.size_before == 1000
    watcher.remove(stopped)
    size[0] = 900
    watcher._look()
    assert not following.interrupted
    assert following.size_before == 900
    size[0] = 1001
    watcher._look()
    assert following.interrupted


def test_a_size_that_cannot_be_read_refuses_nothing(monkeypatch):
    size: list[int | None] = [None]
    monkeypatch.setattr(limits, "resident", lambda: size[0])
    watcher, watch = limits._Watcher(), limits._Watch(60.0)
    watcher.add(watch)
    size[0] = 1 << 40
    assert (watch.grown(), watch.size_before) == (0, 1 << 40)
    size[0] = 1 << 39
    assert watch.grown() == 0
    size[0] = (1 << 39) + 5
    assert watch.grown() == 5
    watcher.remove(watch)


def test_an_interruption_that_comes_too_late_is_taken_back(monkeypatch):
    scheduled = []
    monkeypatch.setattr(limits, "_raise_in", lambda thread, error: scheduled.append((thread, error)))
    watcher, watch = limits._Watcher(), limits._Watch(0.0)
    watcher.add(watch)
    while not watch.interrupted:
        sum(range(10_000))
    watcher.remove(watch)
    here = threading.get_ident()
    assert scheduled == [(here, limits._Endless), (here, None)]


def test_many_calls_share_one_thread_which_ends_when_there_are_no_more(monkeypatch):
    monkeypatch.setattr(limits, "IDLE_S", 0.1)
    begun = []
    monkeypatch.setattr(limits.threading.Thread, "start", _noting(limits.threading.Thread.start, begun))
    monkeypatch.setattr(limits, "_WATCHER", watcher := limits._Watcher())
    for _ in range(300):
        assert limits.within_limits(lambda: ["a"], "a", [1]) == ["a"]
    (thread,) = begun
    thread.join(20)
    assert not thread.is_alive()
    assert limits.within_limits(lambda: ["a"], "a", [1]) == ["a"]
    assert len(begun) == 2
    watcher.forget()


def _noting(start, begun):
    """Thread.start that writes down which threads it started."""

    def started(thread):
        begun.append(thread)
        start(thread)

    return started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("_soon")
def test_a_process_that_was_forked_off_is_watched_too():
    renderer = build_renderer(make_tokenizer(), RenderingConfig())
    renderer.text((Message("user", "Hi"), Message("assistant", "So.")))  # the parent's thread runs now
    child = os.fork()
    if not child:
        status = 1
        try:
            build_renderer(make_tokenizer(CHATML + ENDLESS["loops without output"]), RenderingConfig())
        except RenderError:
            status = 0
        finally:
            os._exit(status)
    try:
        ended = os.waitpid(child, 0)[1]
    except BaseException:  # the time limit of the test: pytest would wait for the child, which holds its pipes
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(ended) == 0


def test_long_conversations_and_many_are_within_the_limits():
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=64))
    turns = tuple(Message("user" if n % 2 == 0 else "assistant", "word " * 50) for n in range(2_000))
    assert len(renderer.text(turns)) > 2_000 * 250
    assert len(renderer.texts([turns[:2]] * 500)) == 500
