"""A reward by settings alone: from environment and files, strictly, and never the same setting twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.client.config import ClientConfig
from rewardlab.core.config import settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.rl import configured
from rewardlab.rl.config import ScorerConfig
from rewardlab.rl.configured import ALWAYS, FILE, NOT_IN_FILES, SOURCE, LoopConfig, from_environment, from_parts
from rewardlab.rl.scorer import RewardScorer

TAKES = ("how", "coefficient", "reply_ends", "prompt_as")
URL = "http://127.0.0.1:8000"


def written(folder: Path, text: str, name: str = "reward.yaml") -> dict[str, str]:
    """An environment that names a file with this text."""
    path = folder / name
    path.write_text(text)
    return {FILE: str(path)}


def test_an_address_in_the_environment_is_enough() -> None:
    made = from_environment(takes=(), environ={SOURCE: URL})
    assert (made.sources, made.is_remote, made.scorer) == ((URL,), True, {})
    assert made.loop.how == "replace"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", f"source: {URL}\nreply-ends: ['<|im_end|>']\ntimeout-s: 30\ntext_as: turns\n"),
        ("a.toml", f'source = "{URL}"\nreply_ends = ["<|im_end|>"]\ntimeout_s = 30\ntext_as = "turns"\n'),
        ("a.json", json.dumps({"source": [URL], "reply_ends": ["<|im_end|>"], "timeout_s": 30, "text_as": "turns"})),
    ],
)
def test_every_kind_of_file_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    made = from_environment(takes=TAKES, environ=written(tmp_path, text, name))
    assert made.sources == (URL,)
    assert made.loop.reply_ends == ("<|im_end|>",)
    assert (made.scorer, made.client) == ({"text_as": "turns"}, {"timeout_s": 30.0})


def test_a_file_and_an_address_are_one_reward_unless_both_name_a_source(tmp_path: Path) -> None:
    environ = written(tmp_path, "how: add\n") | {SOURCE: URL}
    assert from_environment(takes=TAKES, environ=environ).loop.how == "add"
    environ = written(tmp_path, "source: /models/rm\n") | {SOURCE: URL}
    with pytest.raises(ConfigError, match=rf"{SOURCE}: source is also given by {FILE} .*Keep one"):
        from_environment(takes=TAKES, environ=environ)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sauce": "x"}, "unknown setting 'sauce'. Did you mean 'source'?"),
        ({"zebra": "x"}, "unknown setting 'zebra'. Settings: "),
        ({"time_out_s": 3}, "Did you mean 'timeout_s'?"),
        ({"how": "plus"}, "how: 'plus' is not one of"),
        ({"coefficient": "much"}, "coefficient: expected float"),
        ({"attempts": 0}, "attempts: expected a whole number above 0"),
        ({"token": "s3cret"}, "token_env"),
        ({"render_fn": "f"}, "a function cannot be given here"),
        ({"client": {"attempts": 2}}, "give its settings by their own names"),
        ({"source": URL, "reply_ends": 3}, "reply_ends"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_parts([("reward.yaml", settings)], takes=TAKES)
    assert str(caught.value).startswith("reward.yaml: ")
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)


@given(st.sampled_from(sorted(settings_of(LoopConfig))), st.sets(st.sampled_from(TAKES)))
def test_a_setting_that_the_trainer_does_not_follow_is_refused(name: str, takes: set[str]) -> None:
    values: dict[str, Any] = {"source": URL, "token_env": "T", "how": "add", "coefficient": 2, "reply_ends": []}
    values |= {"noise_floor": False, "group_size": 4, "evidence": ["gold"]}
    parts = [("f", {"source": URL, name: values.get(name, "text")})]
    if name in ALWAYS or name in takes:
        assert getattr(from_parts(parts, takes=takes).loop, name) is not None
    else:
        with pytest.raises(ConfigError, match=f"f: {name} is not followed here"):
            from_parts(parts, takes=takes)


def test_without_a_source_the_message_says_where_to_put_it() -> None:
    with pytest.raises(ConfigError, match=f"{SOURCE}.*{FILE}"):
        from_environment(takes=(), environ={})


def test_a_missing_file_is_named_by_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{FILE} .*no such file"):
        from_environment(takes=(), environ={FILE: str(tmp_path / "none.yaml")})


def test_every_setting_of_a_client_is_either_taken_or_refused_with_a_reason() -> None:
    both = {**settings_of(ClientConfig), **settings_of(ScorerConfig)}
    plain: dict[str, Any] = {name: setting.default for name, setting in both.items() if name not in NOT_IN_FILES}
    made = from_parts([("f", {"source": URL, **plain})], takes=())
    assert {**made.scorer, **made.client} == plain
    assert made.scorer.keys() <= settings_of(ScorerConfig).keys()


def test_the_scorer_gets_what_was_given_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Kept(RewardScorer):
        def __init__(self, source: Any, **settings: Any) -> None:
            made.append((source, settings))

    monkeypatch.setattr(configured, "RewardScorer", Kept)
    monkeypatch.setenv("RM_TOKEN", "s3cret")
    parts = [("f", {"source": [URL, "/b"], "token_env": "RM_TOKEN", "attempts": 2})]
    one = from_parts(parts, takes=())
    one.make_scorer()
    assert made == [([URL, "/b"], {"client": {"attempts": 2, "token": "s3cret"}})]
    assert not one.is_remote
    assert "s3cret" not in repr(one)
    monkeypatch.delenv("RM_TOKEN")
    with pytest.raises(ConfigError, match="token_env RM_TOKEN"):
        one.make_scorer()
