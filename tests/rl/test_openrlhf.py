"""OpenRLHF: our function as OpenRLHF runs it, and the requests that its own client sends to our server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loop_doubles import NOISE, ServedScorer, TableScorer, scores_of
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.rl import openrlhf
from rewardlab.rl.configured import FILE, SOURCE, from_parts
from rewardlab.rl.openrlhf import OpenRLHFReward, RewardStop
from rewardlab.serve.http.config import HttpConfig

pytest_plugins = ["served_apps"]

URL = "http://127.0.0.1:8000"
MESSAGES = [{"role": "user", "content": "Who wrote Emma?"}]
PROMPT = "<user>Who wrote Emma?</><assistant>"
"""As the template of the policy renders it, which here is that of the made-up engine."""
END = "<|im_end|>"
ATTEMPTS = 5

Make = Callable[..., OpenRLHFReward]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes rewards and ends their threads."""
    rewards: list[OpenRLHFReward] = []

    def made(scorer: Any, **settings: Any) -> OpenRLHFReward:
        configured = from_parts([("f", {"source": URL, "reply_ends": [END], **settings})], takes=openrlhf.TAKES)
        rewards.append(OpenRLHFReward(configured, scorer=scorer))
        return rewards[-1]

    yield made
    for reward in rewards:
        reward.close()


async def execute(reward_func: Callable[..., Any], reply: str, label: Any, prompt: str = PROMPT) -> dict[str, Any]:
    """What OpenRLHF's executor makes of a reward function: in a thread, with lists of one, each Exception swallowed."""
    output: dict[str, Any] = {"reward": None, "scores": None}
    try:
        (info,) = await asyncio.gather(asyncio.to_thread(reward_func, [prompt + reply], [prompt], [label]))
        scores = info.get("scores")
        output = {"reward": info.get("rewards"), "scores": info.get("rewards") if scores is None else scores}
    except Exception as error:
        output["log"] = str(error)
    return output


@pytest.mark.parametrize("label", [MESSAGES, json.dumps(MESSAGES)])
@pytest.mark.parametrize("end", ["", END])
def test_the_reward_is_the_score_of_the_messages_with_the_reply(client: Any, make: Make, label: Any, end: str) -> None:
    (want,) = scores_of(client, [[*MESSAGES, {"role": "assistant", "content": "Jane."}]])
    got = asyncio.run(execute(make(ServedScorer(client)), f"Jane.{end}", label))
    assert got == {"reward": want, "scores": want}


def test_many_threads_share_one_scorer(make: Make) -> None:
    scorer = TableScorer({str(number): float(number) for number in range(8)})
    reward = make(scorer)

    async def all_of_them() -> list[dict[str, Any]]:
        return await asyncio.gather(*[execute(reward, str(number), MESSAGES) for number in range(8)])

    assert [one["reward"] for one in asyncio.run(all_of_them())] == [float(number) for number in range(8)]
    assert len(scorer.asked) == 8
    reward.close()
    assert scorer.closed
    reward.close()


def test_a_text_as_label_is_the_only_turn_where_the_settings_say_so(make: Make) -> None:
    reward = make(TableScorer({"Jane.": 1.0}), prompt_as="text")
    assert reward([f"{PROMPT}Jane."], [PROMPT], ["Who wrote Emma?"])["rewards"] == 1.0


@pytest.mark.parametrize(
    ("scorer", "label", "prompt", "said"),
    [
        (TableScorer({"Jane.": float("nan")}), MESSAGES, PROMPT, "the score is nan"),
        (TableScorer({"Jane.": None}), MESSAGES, PROMPT, "the score is None"),
        (TableScorer({}, error=EndpointError("http://rm: nobody answers")), MESSAGES, PROMPT, "nobody answers"),
        (TableScorer({"Jane.": 1.0}), "42", PROMPT, r"the label \(--data.label_key\) is a text of 2 characters"),
        (TableScorer({"Jane.": 1.0}), "", PROMPT, "is empty"),
        (TableScorer({"Jane.": 1.0}), MESSAGES, "<user>Another?</>", "belongs to other prompts"),
    ],
)
def test_a_rollout_without_a_reward_ends_training_though_openrlhf_swallows_exceptions(
    make: Make, scorer: Any, label: Any, prompt: str, said: str
) -> None:
    with pytest.raises(RewardStop, match=f"OpenRLHF's rollout .*{said}") as caught:
        asyncio.run(execute(make(scorer), "Jane.", label, prompt))
    assert not isinstance(caught.value, Exception)
    assert "Emma" not in str(caught.value)


@pytest.mark.parametrize("error", [MemoryError("Emma"), RuntimeError("Emma"), OSError("Emma")])
def test_an_error_that_nobody_foresaw_ends_training_too_without_its_words(make: Make, error: Exception) -> None:
    with pytest.raises(RewardStop, match=f"failed with {type(error).__name__}; see above where") as caught:
        asyncio.run(execute(make(TableScorer({}, error=error)), "Jane.", MESSAGES))
    assert caught.value.__cause__ is error
    assert "Emma" not in str(caught.value)


def test_a_prompt_that_was_cut_is_an_error(make: Make) -> None:
    with pytest.raises(RewardStop, match="does not begin with the prompt"):
        make(TableScorer({"Jane.": 1.0}))([f"{PROMPT[5:]}Jane."], [PROMPT], [MESSAGES])


def test_more_than_one_sample_at_a_time_is_an_error(make: Make) -> None:
    with pytest.raises(RewardStop, match="gave 2 samples"):
        make(TableScorer({}))(["a", "b"], ["a", "b"], ["", ""])


def test_what_is_logged_beside_the_reward_are_numbers(make: Make) -> None:
    got = make(TableScorer({"Jane.": 1.5}))([f"{PROMPT}Jane."], [PROMPT], [MESSAGES])
    assert got["extra_logs"] == {"rewardlab_score": 1.5, "rewardlab_noise": NOISE}


def test_a_file_of_one_line_is_all_that_openrlhf_needs(
    client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (SOURCE, FILE):
        monkeypatch.delenv(name, raising=False)
    openrlhf._configured_reward.cache_clear()
    path = tmp_path / "reward.py"
    path.write_text("from rewardlab.rl.openrlhf import reward_func\n")
    # As OpenRLHF loads it.
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RewardStop, match=SOURCE):
        asyncio.run(execute(module.reward_func, "Jane.", MESSAGES))
    settings = tmp_path / "reward.yaml"
    settings.write_text(f"source: {URL}\nreply-ends: ['{END}']\n")
    monkeypatch.setenv(FILE, str(settings))
    monkeypatch.setattr("rewardlab.rl.configured.Configured.make_scorer", lambda self: ServedScorer(client))
    (want,) = scores_of(client, [[*MESSAGES, {"role": "assistant", "content": "Jane."}]])
    try:
        assert asyncio.run(execute(module.reward_func, f"Jane.{END}", MESSAGES))["reward"] == want
    finally:
        openrlhf._configured_reward().close()
        openrlhf._configured_reward.cache_clear()


def test_threads_that_come_first_together_make_one_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    together, made = threading.Barrier(8), []

    def read(*, takes: Any) -> Any:
        made.append(openrlhf._MAKING.locked())
        return from_parts([("f", {"source": URL, "reply_ends": []})], takes=takes)

    def first(number: int) -> Any:
        together.wait(timeout=60)
        return openrlhf.reward_func([f"{PROMPT}a"], [PROMPT], [MESSAGES])["rewards"]

    openrlhf._configured_reward.cache_clear()
    monkeypatch.setattr(openrlhf, "from_environment", read)
    monkeypatch.setattr("rewardlab.rl.configured.Configured.make_scorer", lambda self: TableScorer({"a": 1.0}))
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(first, range(8))) == [1.0] * 8
    openrlhf._configured_reward().close()
    openrlhf._configured_reward.cache_clear()
    assert made == [True]


def test_the_texts_that_end_a_reply_have_to_be_said() -> None:
    with pytest.raises(ConfigError, match="reply_ends is missing"):
        OpenRLHFReward(from_parts([("f", {"source": URL})], takes=openrlhf.TAKES))


def fetched(client: Any, query: str, label: str = "") -> tuple[Any, int]:
    """(The reward that OpenRLHF's own client ends up with, requests that it sent): None after five failures."""
    for attempt in range(1, ATTEMPTS + 1):
        answer = client.post("/get_reward", json={"query": [query], "prompts": [PROMPT], "labels": [label]})
        if answer.status_code < 400:
            return answer.json().get("rewards"), attempt
    return None, attempt


def test_openrlhfs_own_request_gets_the_same_number_where_the_text_is_what_the_model_reads(
    client_of: Callable[..., Any],
) -> None:
    client = client_of(HttpConfig(accept_rendered=True))
    want = scores_of(client, [[*MESSAGES, {"role": "assistant", "content": "Jane."}]])
    # With what the template writes behind a turn; OpenRLHF's query ends where the policy stopped.
    assert fetched(client, f"{PROMPT}Jane.</>") == (want, 1)


def test_openrlhfs_own_request_is_refused_and_the_reward_is_lost_where_the_text_is_the_policys(client: Any) -> None:
    assert fetched(client, f"{PROMPT}Jane.{END}") == (None, ATTEMPTS)
