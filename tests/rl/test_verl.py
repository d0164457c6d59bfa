"""verl's reward manager: the messages and the reply that are scored, what verl gets back, and what is an error."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from common import make_tokenizer
from loop_doubles import NOISE, ServedScorer, TableScorer, scores_of
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.rl.configured import FILE, SOURCE
from rewardlab.rl.loops import LoopScorer
from rewardlab.rl.rollouts import RolloutError
from rewardlab.rl.verl_rollouts import configured_by, plain, special_ids, without_special_end
from verl_stand_in import MODULE, Data, Section, config_of, trajectory, verl_importable

pytest_plugins = ["served_apps"]

URL = "http://127.0.0.1:8000"
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who wrote Emma?"}]
END, START, PAD = 1, 2, 3
"""Special tokens of the policy; token 4 + n is the n-th character."""
SPECIAL = {END: "<|im_end|>", START: "<|im_start|>", PAD: "<|endoftext|>"}
ASKED = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "Jane Austen"}}


class Tokenizer:
    """The policy's: characters, and three special tokens."""

    all_special_ids = tuple(SPECIAL)

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **more: Any) -> str:
        assert more.get("clean_up_tokenization_spaces") is not True
        listed = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        return "".join(
            ("" if skip_special_tokens else SPECIAL[one]) if one in SPECIAL else chr(one - 4) for one in listed
        )


def ids(text: str) -> list[int]:
    return [ord(one) + 4 for one in text]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SOURCE, FILE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with verl_importable() as imported:
        monkeypatch.setattr(imported, "combine", combined)
        yield imported


Make = Callable[..., Any]


def combined(scores: Sequence[float], rules: Sequence[float] | None, *, how: str, coefficient: float = 1.0) -> Any:
    """Two of credit's rules, in a line each."""
    rewards = np.array(scores) * coefficient
    return SimpleNamespace(rewards_R={"replace": rewards, "add": rewards + (0.0 if rules is None else rules)}[how])


@pytest.fixture
def make(module: ModuleType) -> Make:
    """Makes a manager as verl does, with a scorer in place of the configured one."""

    def made(scorer: Any, compute_score: Any = None, settings: Any = None, **more: Any) -> Any:
        config = config_of({"source": URL, **(settings or {})})
        given = {"tokenizer": Tokenizer(), "compute_score": compute_score, **more}
        manager = module.RewardlabRewardManager(config=config, **given)
        manager._scorer = LoopScorer(lambda: scorer)
        return manager

    return made


def run(manager: Any, *data: Data) -> list[dict[str, Any]]:
    """What verl's worker gets for trajectories that it asks for together."""

    async def all_of_them() -> list[dict[str, Any]]:
        return await asyncio.gather(*[manager.run_single(one) for one in data])

    return asyncio.run(all_of_them())


def test_without_verl_the_import_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ConfigError, match=r"loaded by verl .*pkg://rewardlab\.rl\.verl.*RewardScorer"):
        importlib.import_module(MODULE)


def test_the_score_is_that_of_the_messages_with_the_reply(client: Any, make: Make) -> None:
    manager = make(ServedScorer(client))
    replies = ["Jane Austen.", "I forgot ."]
    got = run(manager, *[trajectory(PROMPT, [*ids(one), END], __num_turns__=2) for one in replies])
    talks = [[*PROMPT, {"role": "assistant", "content": one}] for one in replies]
    assert [one["reward_score"] for one in got] == scores_of(client, talks)


def test_padding_changes_nothing(make: Make) -> None:
    scorer = TableScorer({"Yes": 1.25})
    plain_one = trajectory(PROMPT, [*ids("Yes"), END], __num_turns__=np.int64(2), response_len=np.int64(4))
    (a, b) = run(make(scorer), plain_one, trajectory(PROMPT, [*ids("Yes"), END], pad=7))
    assert a == b
    assert scorer.asked[0].conversation == scorer.asked[1].conversation
    # With several outputs in a trajectory verl pads prompts and replies as one, so its own count is what holds.
    counted = trajectory(PROMPT, [*ids("Yes"), END], pad=3, response_len=4)
    counted.rows[0].batch["attention_mask"][-1] = 1
    assert run(make(scorer), counted) == [a]


def test_what_verl_gets_is_a_score_and_numbers(make: Make) -> None:
    (got,) = run(make(TableScorer({"Yes": 1.25})), trajectory(PROMPT, ids("Yes")))
    known = {"rewardlab_score": 1.25, "rewardlab_noise": NOISE, "rewardlab_truncated_tokens": 0.0}
    assert got == {"reward_score": 1.25, "reward_extra_info": known}
    assert all(type(value) is float for value in got["reward_extra_info"].values())


@given(st.lists(st.sampled_from([END, START, PAD, 70, 71]), max_size=8))
def test_special_tokens_leave_the_end_of_a_reply_and_nothing_else(tokens: list[int]) -> None:
    kept = without_special_end(tokens, tuple(SPECIAL))
    assert tokens[: len(kept)] == kept
    assert not kept or kept[-1] not in SPECIAL
    assert all(one in SPECIAL for one in tokens[len(kept) :])


def test_a_token_that_is_special_in_the_tokenizers_file_alone_leaves_the_end_too(make: Make) -> None:
    # Gemma 3 and Phi-3 end a turn with one: transformers has no name for it, so `all_special_ids` lacks it.
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True), AddedToken("</think>", special=False)])
    written = tokenizer("Yes.</think><end_of_turn>", add_special_tokens=False)["input_ids"]
    assert written[-1] not in tokenizer.all_special_ids
    special = special_ids(tokenizer)
    assert special >= {*tokenizer.all_special_ids, written[-1]}
    assert tokenizer.decode(without_special_end(written, special)) == "Yes.</think>"

    class Named(Tokenizer):
        all_special_ids = (END, START)
        added_tokens_decoder = MappingProxyType({PAD: AddedToken("<|endoftext|>", special=True)})

    scorer = TableScorer({"Yes": 1.0})
    run(make(scorer, tokenizer=Named()), trajectory(PROMPT, [*ids("Yes"), PAD]))
    assert scorer.asked[0].conversation[-1].content == "Yes"


def test_a_control_token_that_the_policy_wrote_is_part_of_its_reply(make: Make) -> None:
    scorer = TableScorer({"No.<|im_end|>Yes": 2.0})
    run(make(scorer), trajectory(PROMPT, [*ids("No."), END, *ids("Yes"), END, PAD]))
    assert scorer.asked[0].conversation[-1].content == "No.<|im_end|>Yes"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "1.0", True])
def test_a_score_that_is_none_is_an_error_naming_the_rollout(make: Make, bad: Any) -> None:
    manager = make(TableScorer({"Yes": bad}))
    rollout = trajectory(PROMPT, ids("Yes"), uid="u7", session_id=2, extra_info={"index": 5}, data_source="hh")
    with pytest.raises(RolloutError, match=r"rollout \(uid u7, session 2, source hh, index 5\): the score is"):
        run(manager, rollout)


def test_a_server_that_is_away_is_an_error_naming_the_rollout_that_can_be_sent_on(make: Make) -> None:
    class Unsendable(EndpointError):
        def __init__(self, message: str, *, status: int) -> None:
            super().__init__(message)

    manager = make(TableScorer({}, error=Unsendable("http://rm: nobody answers", status=503)))
    with pytest.raises(RolloutError, match="uid u7.*nobody answers") as caught:
        run(manager, trajectory(PROMPT, ids("Yes"), uid="u7"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (trajectory(PROMPT, ids("a"), __num_turns__=4), "4 turns"),
        (Data([*trajectory(PROMPT, ids("a")).rows] * 2), "2 sequences"),
        (trajectory(None, ids("a")), "no raw_prompt"),
        (trajectory("<|im_start|>user", ids("a")), "wanted a list of messages"),
        (trajectory([{"role": "user", "content": [{"type": "image"}]}], ids("a")), "a message has more than text"),
        (
            trajectory([*PROMPT, {"role": "assistant", "content": "It was"}], ids("a")),
            "ends with a turn of the assistant",
        ),
    ],
)
def test_what_is_not_one_prompt_and_one_reply_is_refused(make: Make, data: Data, said: str) -> None:
    scorer = TableScorer({"a": 1.0})
    with pytest.raises(RolloutError, match=said):
        run(make(scorer), data)
    assert not scorer.asked


def test_verls_own_score_is_added_if_asked_for(make: Make) -> None:
    asked: list[dict[str, Any]] = []

    def rule(**given: Any) -> float:
        asked.append(given)
        return 1.0

    async def detailed(**given: Any) -> dict[str, Any]:
        return {"score": 0.5, "acc": True, "pred": "Jane"}

    settings = {"how": "add", "coefficient": 2}
    fields = {**ASKED, "extra_info": {"index": 1}, "tool_extra_fields": {"steps": 3}, "__num_turns__": 2}
    data = trajectory(PROMPT, [*ids("Jane"), END], **fields)
    (got,) = run(make(TableScorer({"Jane": 1.5}), rule, settings), data)
    assert got["reward_score"] == 4.0
    assert got["reward_extra_info"]["acc"] == 1.0
    assert (asked[0]["solution_str"], asked[0]["ground_truth"]) == ("Jane", "Jane Austen")
    assert asked[0]["extra_info"] == {"index": 1, "steps": 3, "num_turns": 2, "rollout_reward_scores": {}}
    assert fields["extra_info"] == {"index": 1}
    (got,) = run(make(TableScorer({"Jane": 1.5}), detailed, settings, reward_router_address="r:1"), data)
    assert got["reward_score"] == 3.5
    assert {"acc": True, "pred": "Jane", "rewardlab_rule": 0.5, "rewardlab_score": 1.5}.items() <= got[
        "reward_extra_info"
    ].items()


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.bool_(True), np.array([1.0]), torch.tensor(1.0)])
def test_verls_own_score_is_read_as_verl_reads_it(make: Make, value: Any) -> None:
    manager = make(TableScorer({"a": 0.5}), lambda **given: {"score": value}, {"how": "add"})
    assert run(manager, trajectory(PROMPT, ids("a"), **ASKED))[0]["reward_score"] == 1.5


def test_verls_own_score_has_to_be_a_number_too(make: Make) -> None:
    settings = {"how": "add"}
    for rule in (lambda **given: None, lambda **given: {"acc": 1}, lambda **given: float("nan")):
        with pytest.raises(RolloutError, match="verl's own score"):
            run(make(TableScorer({"a": 1.0}), rule, settings), trajectory(PROMPT, ids("a"), **ASKED))
    with pytest.raises(RolloutError, match="ground_truth"):
        run(make(TableScorer({"a": 1.0}), lambda **given: 1.0, settings), trajectory(PROMPT, ids("a")))


def test_verls_own_function_is_not_called_unless_asked_for(make: Make) -> None:
    def never(**given: Any) -> float:
        raise AssertionError("verl's function was called")

    assert run(make(TableScorer({"a": 1.0}), never), trajectory(PROMPT, ids("a")))[0]["reward_score"] == 1.0


def test_a_coefficient_alone_scales_the_score(make: Make) -> None:
    manager = make(TableScorer({"a": 1.5}), settings={"coefficient": 0.5})
    (got,) = run(manager, trajectory(PROMPT, ids("a")))
    assert (got["reward_score"], got["reward_extra_info"]["rewardlab_score"]) == (0.75, 1.5)


def test_each_event_loop_gets_a_scorer_of_its_own(module: ModuleType) -> None:
    made: list[TableScorer] = []

    def new() -> TableScorer:
        made.append(TableScorer({"a": 1.0}))
        return made[-1]

    manager = module.RewardlabRewardManager(
        config=config_of({"source": URL}), tokenizer=Tokenizer(), compute_score=None
    )
    manager._scorer = LoopScorer(new)
    run(manager, trajectory(PROMPT, ids("a")), trajectory(PROMPT, ids("a")))
    run(manager, trajectory(PROMPT, ids("a")))
    assert [len(one.asked) for one in made] == [2, 1]


def test_settings_come_from_verls_section_or_the_environment_and_not_from_both(monkeypatch: pytest.MonkeyPatch) -> None:
    made = configured_by(config_of({"source": (URL,), "attempts": 2}))
    assert (made.sources, made.client) == ((URL,), {"attempts": 2})
    monkeypatch.setenv(SOURCE, URL)
    assert configured_by(config_of()).sources == (URL,)
    with pytest.raises(ConfigError, match=rf"{SOURCE}: source is also given by reward\.rewardlab"):
        configured_by(config_of({"source": URL}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of(), "no source of rewards"),
        (config_of({"source": "/models/rm"}), "each of verl's 8 reward workers would load it"),
        (config_of({"source": URL}, reward_model=Section(enable=True)), "never ask this manager"),
        (config_of({"source": URL, "reply_ends": []}), "reply_ends is not followed here"),
        (config_of({"source": URL, "cofficient": 1}), "Did you mean 'coefficient'"),
        (Section(reward=Section(rewardlab=URL)), "expected settings"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_when_the_manager_is_made(
    module: ModuleType, config: Section, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        module.RewardlabRewardManager(config=config, tokenizer=Tokenizer(), compute_score=None)


def test_a_folder_is_taken_where_there_is_one_worker() -> None:
    assert configured_by(config_of({"source": "/models/rm"}, num_workers=1)).sources == ("/models/rm",)


def test_containers_of_a_configuration_become_plain_ones() -> None:
    assert plain(Section(a=Section(b=(1, 2.0)), c=None, d="x")) == {"a": {"b": [1, 2.0]}, "c": None, "d": "x"}
