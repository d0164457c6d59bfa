"""A model whose length limit cuts its own canaries is asked and verified like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.fake_engine import FakeEngine, app_of, running
from live_endpoint import said
from reward_models import save_tiny, served
from rewardlab.artifact.load import load
from rewardlab.client import RewardClient
from rewardlab.core.spec import read_spec
from rewardlab.data.chat import to_messages
from rewardlab.score import Scorer

LIMIT = 96
RULES = ("prompt-left", "reply-middle")
REPLIES = ["Water it.", "no"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each rule that cuts."""
    root = tmp_path_factory.mktemp("short")
    return {rule: save_tiny(root / rule, max_seq_len=LIMIT, truncation=rule) for rule in RULES}


@pytest.fixture(scope="module")
def urls(folders: dict[str, Path]) -> Iterator[dict[str, str]]:
    """A server of each."""
    with served(folders[RULES[0]]) as one, served(folders[RULES[1]]) as other:
        yield dict(zip(RULES, (one, other), strict=True))


def lengths(scorer: Scorer, folder: Path) -> list[tuple[int, int]]:
    """(tokens of the whole conversation, tokens that are kept) of each canary."""
    return [
        (len(scorer.renderer.token_ids(to_messages(canary.messages))), len(canary.token_ids))
        for canary in read_spec(folder).canaries
    ]


@pytest.mark.parametrize("rule", RULES)
def test_a_client_connects_whether_or_not_it_lets_conversations_be_cut(
    folders: dict[str, Path], urls: dict[str, str], rule: str
) -> None:
    folder, url = folders[rule], urls[rule]
    scorer = load(folder)
    cut = [kept for whole, kept in lengths(scorer, folder) if whole > kept]
    assert cut, "what this test is about"
    # The rule that takes whole exchanges away leaves fewer tokens than the limit allows.
    assert (min(cut) < LIMIT) == (rule == "prompt-left")

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        tokens: list[int] = scorer.renderer.token_ids(to_messages(messages)).tolist()
        return tokens

    wanted = scorer.score_replies("How do I keep basil?", REPLIES)
    for settings in ({}, {"truncate": True}, {"artifact": folder}, {"render_fn": rendered}):
        with RewardClient(url, **settings) as client:
            assert client.score_replies("How do I keep basil?", REPLIES) == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_its_server_is_verified_in_every_form(
    folders: dict[str, Path], urls: dict[str, str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ((), ("--model", folders[rule])):
        status, out, err = said(capsys, urls[rule], *given)
        assert (status, err) == (0, "")
        assert "messages, POST /v1/score: right in float32" in out


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_other_engines_get_the_canaries_that_are_whole(
    folders: dict[str, Path], dialect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders["prompt-left"]
    num_cut = sum(whole > kept for whole, kept in lengths(load(folder), folder))
    engine = FakeEngine(folder)
    with running(app_of(engine)) as url:
        engine.be(dialect=dialect)
        status, out, _ = said(capsys, url, "--model", folder)
        assert status == 0
        assert "WRONG" not in out
        assert f"{num_cut} canaries are above the model's length limit, and are left out" in out
        for settings in ({}, {"truncate": True}):
            with RewardClient(url, artifact=folder, **settings) as client:
                assert len(client.score_replies("How do I keep basil?", REPLIES)) == 2


def test_what_a_framework_gets_is_judged_by_the_canaries_that_are_whole(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(folders["prompt-left"])
    with running(app_of(engine)) as url:
        engine.be(adds_bos=True)
        status, out, _ = said(capsys, url, "--model", folders["prompt-left"], "--as", "verl")
        assert "canaries are above the model's length limit, and are left out" in out
        assert status == 0


def test_that_nothing_whole_could_be_sent_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "m", max_seq_len=16, truncation="reply-middle")
    assert all(whole > kept for whole, kept in lengths(load(folder), folder))
    with running(app_of(FakeEngine(folder))) as url:
        out = said(capsys, url, "--model", folder)[1]
    assert "nothing whole could be sent, and all were sent" in out
    assert "left out" not in out
