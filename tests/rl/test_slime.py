"""slime: our function as slime calls it, and the requests that slime's own client sends to our server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from loop_doubles import ServedScorer, TableScorer, scores_of
from rewardlab.core.errors import ConfigError
from rewardlab.rl import slime
from rewardlab.rl.configured import FILE, SOURCE, from_parts
from rewardlab.rl.rollouts import RolloutError
from rewardlab.serve.http.config import HttpConfig

pytest_plugins = ["served_apps"]

URL = "http://127.0.0.1:8000"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Who wrote Emma? "}]
PROMPT = "<system>Be brief.</><user> Who wrote Emma? </>"
"""As the template of the policy renders it, which here is that of the made-up engine."""
END = "<|im_end|>"
ATTEMPTS = 10


@dataclass
class Sample:
    """The fields of slime's sample that a reward function may look at."""

    prompt: Any = PROMPT
    response: str = f"Jane.{END}"
    label: Any = None
    metadata: Any = field(default_factory=lambda: {"messages": MESSAGES})
    loss_mask: list[int] | None = None
    index: int | None = 3
    group_index: int | None = 1


def made(scorer: Any, **settings: Any) -> slime.SlimeReward:
    configured = from_parts([("f", {"source": URL, "reply_ends": [END], **settings})], takes=slime.TAKES)
    return slime.SlimeReward(configured, scorer=scorer)


def scored(reward: slime.SlimeReward, sample: Any) -> Any:
    """As slime calls it: with the arguments of the run."""
    return asyncio.run(reward(SimpleNamespace(rm_url=None), sample))


@pytest.mark.parametrize(
    ("sample", "settings"),
    [
        (Sample(), {}),
        (Sample(prompt=MESSAGES, metadata={}), {}),
        (Sample(metadata={}, label=MESSAGES), {}),
        (Sample(metadata={}, label=json.dumps(MESSAGES)), {}),
        (Sample(response="Jane."), {}),
        (Sample(response="Jane.", loss_mask=[0, 0, 1, 1]), {"reply_ends": []}),
    ],
)
def test_every_way_to_hand_over_the_messages_gets_the_score_of_the_conversation(
    client: Any, sample: Sample, settings: dict[str, Any]
) -> None:
    want = scores_of(client, [[*MESSAGES, {"role": "assistant", "content": "Jane."}]])
    assert scored(made(ServedScorer(client), **settings), sample) == want[0]


def test_a_text_as_label_is_the_only_turn_where_the_settings_say_so() -> None:
    scorer = TableScorer({"Jane.": 1.0})
    sample = Sample(prompt="<user>Who?</>", metadata={}, label="Who?")
    assert scored(made(scorer, prompt_as="text"), sample) == 1.0
    assert [turn.as_dict() for turn in scorer.asked[0].conversation[:-1]] == [{"role": "user", "content": "Who?"}]


def test_a_list_of_samples_gets_its_rewards_in_order() -> None:
    scorer = TableScorer({"a": 1.0, "b": 2.0})
    assert scored(made(scorer), [Sample(response="b"), Sample(response="a" + END)]) == [2.0, 1.0]
    assert scored(made(scorer), []) == []


def test_only_one_end_is_taken_off_and_only_from_the_end() -> None:
    reply = f"{END}Yes{END}"
    assert scored(made(TableScorer({reply: 1.0})), Sample(response=reply + END)) == 1.0


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (Sample(metadata={}, label="42"), r"sample 3 of group 1: the label .* 2 characters"),
        (Sample(metadata=None), "the label .* is empty"),
        (Sample(metadata={"messages": [{"role": "user", "content": "Another?"}]}), "belongs to other prompts"),
        (Sample(metadata={"messages": [{"role": "nobody", "content": "x"}]}), "unknown role"),
        (Sample(loss_mask=[1, 0, 1]), "texts that the policy did not write"),
        ([[Sample()], [Sample()]], "list of lists"),
    ],
)
def test_what_cannot_be_mapped_to_a_conversation_is_an_error_naming_the_sample(sample: Any, said: str) -> None:
    scorer = TableScorer({"Jane.": 1.0})
    with pytest.raises(RolloutError, match=said):
        scored(made(scorer), sample)
    assert not scorer.asked


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf")])
def test_a_missing_score_is_an_error_and_never_a_number(bad: Any) -> None:
    with pytest.raises(RolloutError, match="sample 3 of group 1: the score is"):
        scored(made(TableScorer({"Jane.": bad})), Sample())


def test_the_texts_that_end_a_reply_have_to_be_said() -> None:
    with pytest.raises(ConfigError, match="reply_ends is missing"):
        slime.SlimeReward(from_parts([("f", {"source": URL})], takes=slime.TAKES))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No reward configured before, none after."""
    for name in (SOURCE, FILE):
        monkeypatch.delenv(name, raising=False)
    slime._configured_reward.cache_clear()
    yield monkeypatch
    slime._configured_reward.cache_clear()


def test_the_dotted_path_is_configured_by_the_environment(fresh: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=SOURCE):
        asyncio.run(slime.reward(None, Sample()))
    path = tmp_path / "reward.toml"
    path.write_text(f'source = "{URL}"\nreply_ends = ["{END}"]\n')
    fresh.setenv(FILE, str(path))
    fresh.setattr("rewardlab.rl.configured.Configured.make_scorer", lambda self: TableScorer({"Jane.": 0.25}))
    assert asyncio.run(slime.reward(None, Sample())) == 0.25


class Refused(Exception):
    """What raise_for_status raises."""


def remote_rm(client: Any, sample: Sample) -> tuple[Any, int]:
    """(What slime's own client makes of our answers, requests that it sent): it asks again whatever the code is."""
    for attempt in range(1, ATTEMPTS + 1):
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        answer = client.post("/slime", json=body)
        if answer.status_code < 400:
            return answer.json(), attempt
    return Refused(answer.json()["error"]["type"]), attempt


def test_slimes_own_request_gets_the_same_number_where_the_text_is_what_the_model_reads(
    client_of: Callable[..., Any],
) -> None:
    client = client_of(HttpConfig(accept_rendered=True))
    # The response with what the template writes behind a turn; slime's ends where the policy stopped.
    sample = Sample(prompt=PROMPT + "<assistant>", response="Jane.</>", label=None)
    want = scores_of(client, [[*MESSAGES, {"role": "assistant", "content": "Jane."}]])
    assert remote_rm(client, sample) == (want[0], 1)
    messages = Sample(prompt=MESSAGES, response="Jane.", label={"any": 1})
    assert remote_rm(client, messages) == (want[0], 1)


def test_slimes_own_request_is_refused_and_repeated_where_the_text_is_the_policys(client: Any) -> None:
    refused, requests = remote_rm(client, Sample())
    assert (str(refused), requests) == ("not_mappable", ATTEMPTS)
