"""`rewardlab gold label --backend chat`: a language model behind HTTP as judge, whatever fails on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_server import ChatServer, chatting
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.labelling.run import Labelled, label
from rewardlab.gold.proxies import proxy_scores
from rewardlab.gold.scoring import ScoringConfig

NUM = 12
REPLIES = ("poor 1", "good 9", "fair 5", "fair 5")


def prefers_larger(text: str) -> str:
    """A judge that reads the number of each reply, and says so at some length."""
    first, second = (int(found) for found in re.findall(r"(?:poor|fair|good) (\d)", text)[-2:])
    return f"I see {first} and {second}.\n[[{'A' if first > second else 'B' if second > first else 'C'}]]"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewardlab.client.http.MAX_WAIT_S", 0.01)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"question {number}?"}], "responses": list(REPLIES)}
        for number in range(NUM)
    ]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def judge() -> Iterator[tuple[ChatServer, str]]:
    server = ChatServer(says=prefers_larger)
    with chatting(server) as url:
        yield server, url


def config(samples: Path, *urls: str, output: str = "labels.jsonl", **more: Any) -> LabelConfig:
    judged = JudgeConfig(**more.pop("judge", {}))
    scoring = ScoringConfig(backend="chat", url=urls, concurrency=4, attempts=2)
    rows = InputConfig(input=(samples,))
    return LabelConfig(output=samples.parent / output, rows=rows, scoring=scoring, judge=judged, **more)


def content(found: Labelled) -> bytes:
    return found.place.rows.read_bytes()


def test_scores_are_the_share_of_pairs_that_a_reply_wins(samples, judge) -> None:
    server, url = judge
    found = label(config(samples, url))
    rows = list(read_gold_rows(found.place.rows, labelled=True))
    assert [row.gold for row in rows] == [(0.0, 1.0, 0.5, 0.5)] * NUM
    assert len(rows[0].extra["judgements"]) == 6
    # Both orders of each of five pairs; two replies are equal, and of those with an equal third one is asked.
    assert len(server.asked) == NUM * 2 * 3
    assert found.judge is not None
    assert found.judge.disagreement.value == 0
    assert {(body["temperature"], body["seed"]) for body in server.asked} == {(0.0, 0)}


def test_a_judge_that_sees_places_alone_is_told_and_scores_say_nothing(samples, judge, capsys) -> None:
    server, url = judge
    server.says = lambda text: "The first.\n[[A]]"
    main(["gold", "label", "--backend", "chat", "--url", url, "--input", str(samples), "--concurrency", "4",
          "--output", str(samples.parent / "labels.jsonl"), "--price-in", "1", "--price-out", "2"])  # fmt: skip
    rows = list(read_gold_rows(samples.parent / "labels.jsonl", labelled=True))
    assert rows[0].gold == (0.5,) * 4
    told = " ".join(capsys.readouterr().out.split())
    assert "it prefers what it sees first" in told
    assert "cost:" in told


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("faults", [[429, 500, 503], ["drop"] * 3, ["none", "garbage", "null"], [0.1, 0.0, 0.2]])
def test_faults_that_pass_change_nothing(samples, judge, faults) -> None:
    server, url = judge
    whole = content(label(config(samples, url, output="whole.jsonl")))
    server.faults = list(faults)
    assert content(label(config(samples, url))) == whole
    assert not server.faults


@pytest.mark.slow
def test_what_was_said_is_kept_when_the_server_goes(samples, judge) -> None:
    server, url = judge
    whole = content(label(config(samples, url, output="whole.jsonl")))
    gone = ChatServer(says=prefers_larger, faults=[None] * 30 + [503] * 1000)
    with chatting(gone) as dying, pytest.raises(EndpointError, match="what is finished is kept"):
        label(config(samples, dying))
    before = len(server.asked)
    assert content(label(config(samples, url))) == whole
    assert len(server.asked) - before == NUM * 6 - 30


def test_no_verdict_is_missing_and_never_a_number(samples, judge) -> None:
    server, url = judge
    server.says = lambda text: prefers_larger(text) if "question 3?" not in text else "Hard to say."
    found = label(config(samples, url))
    rows = list(read_gold_rows(found.place.rows, labelled=True))
    assert rows[3].gold == (None, None, 0.5, 0.5), "equal replies need no judge"
    assert found.counts["errors"] == 2
    assert "does not end with a verdict" in rows[3].gold_errors["0"]


def test_a_refused_question_is_asked_again_by_the_next_run(samples, judge) -> None:
    server, url = judge
    server.refused = "question 5?"
    first = list(read_gold_rows(label(config(samples, url)).place.rows))
    assert first[5].gold[0] is None
    server.refused, before = "", len(server.asked)
    assert list(read_gold_rows(label(config(samples, url)).place.rows))[5].gold == (0.0, 1.0, 0.5, 0.5)
    assert len(server.asked) - before == 6, "what was answered is not paid for again"


def test_another_prompt_of_the_judge_is_another_judge(samples, judge, tmp_path) -> None:
    url = judge[1]
    label(config(samples, url))
    own = tmp_path / "own.txt"
    own.write_text("{question}\n{answer_a}\n{answer_b}\nEnd with [[A]], [[B]] or [[C]].")
    with pytest.raises(ConfigError, match="judge_prompt was"):
        label(config(samples, url, judge={"judge_prompt": own}))


def test_arguments_of_its_template_go_to_the_judge_and_make_another_one(samples, judge) -> None:
    server, url = judge
    label(config(samples, url))
    assert not any("chat_template_kwargs" in body for body in server.asked)
    quiet = {"judge_template_arguments": ("enable_thinking=false",)}
    with pytest.raises(ConfigError, match="judge_template_arguments"):
        label(config(samples, url, judge=quiet))
    asked = len(server.asked)
    label(config(samples, url, judge=quiet, overwrite=True))
    assert len(server.asked) == 2 * asked
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in server.asked[asked:])
    with pytest.raises(ConfigError, match="--judge-template-arguments quiet: wanted NAME=VALUE"):
        JudgeConfig(judge_template_arguments=("quiet",))


def test_a_judge_is_no_proxy(samples, judge, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "reward_spec.json").write_text("{}")
    with pytest.raises(ConfigError, match="a language model as judge gives no scores"):
        proxy_scores([str(folder)], [], tmp_path, ScoringConfig(backend="chat", url=(judge[1],)))
    with pytest.raises(ConfigError, match="a judge is named by its server"):
        LabelConfig(output=tmp_path / "x.jsonl", model="m", scoring=ScoringConfig(backend="chat", url=("http://x",)))
