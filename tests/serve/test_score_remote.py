"""`rewardlab score --backend http|vllm`: a file scored by a server, through the client."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rewardlab.cli import main
from rewardlab.client import Answered, UnavailableError
from rewardlab.core.errors import ConfigError
from rewardlab.serve.file_scoring import rows as rows_module
from rewardlab.serve.file_scoring import servers
from rewardlab.serve.file_scoring.file import ScoreSettings, score_with
from rewardlab.serve.file_scoring.remote import RemoteBackend
from rewardlab.serve.file_scoring.servers import Server, score_remotely
from scoring_stub import score_of


@dataclass
class Endpoint:
    engine: str = "rewardlab"
    digest: str | None = "d" * 64
    precision: str | None = "float32"


class FakeClient:
    """In place of the client: scores by letters, refuses replies with `!`, is away after some calls."""

    url = "http://127.0.0.1:1"

    def __init__(self, endpoint: Endpoint = Endpoint(), *, calls: int = 99) -> None:  # noqa: B008
        self.endpoint = endpoint
        self.calls = calls
        self.groups: list[tuple] = []
        self.is_closed = False

    async def connect(self):
        return self.endpoint

    async def answer_groups(self, groups):
        self.calls -= 1
        if self.calls < 0:
            raise UnavailableError("nobody answers")
        self.groups += groups
        return [
            [
                Answered(score=None, error="too long") if "!" in reply else Answered(score=score_of(reply))
                for reply in replies
            ]
            for _, replies in groups
        ]

    async def aclose(self):
        self.is_closed = True


ROWS = [
    {"prompt": "Human: Hi\n\nAssistant:", "responses": ["a", "b!"]},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "c"}]},
    {"prompt": "p", "response": "d"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_groups_reach_the_server_as_they_are_and_causes_come_back(source, tmp_path):
    client = FakeClient()
    score_with(RemoteBackend(client, "http"), source, tmp_path / "scored.jsonl")
    first, second, third = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert first["scores"] == [score_of("a"), None]
    assert first["score_errors"] == {"1": "too long"}
    assert (second["score"], third["score"]) == (score_of("c"), score_of("d"))
    assert client.groups[0] == (ROWS[0]["prompt"], ("a", "b!")), "the server reads transcripts, as its model does"
    assert [turn.content for turn in client.groups[1][0]] == ["Why?"]
    assert client.is_closed


def test_what_a_server_cut_is_said_and_cutting_is_asked_for_as_elsewhere(source, tmp_path, monkeypatch, capsys):
    made: list[dict] = []

    class Cutting(FakeClient):
        async def answer_groups(self, groups):
            answers = await super().answer_groups(groups)
            cut = {"a": 7}
            return [
                [replace(one, truncated_tokens=cut.get(reply, 0)) for one, reply in zip(own, replies, strict=True)]
                for own, (_, replies) in zip(answers, groups, strict=True)
            ]

    def client(url, **settings):
        made.append(settings)
        return Cutting()

    monkeypatch.setattr("rewardlab.client.asynchronous.AsyncRewardClient", client)
    line = ["score", "--backend", "http", "--url", "http://a", "--input", str(source), "--output"]
    main([*line, str(tmp_path / "scored.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [row.get("truncated_tokens") for row in rows] == [[7, 0], None, None]
    main([*line, str(tmp_path / "other.jsonl"), "--overlong", "refuse"])
    main([*line, str(tmp_path / "third.jsonl"), "--overlong", "cut"])
    assert [one["truncate"] for one in made] == [None, False, True], "None: as the model was trained"
    assert "in 1 row a prompt was cut to the model's length limit" in capsys.readouterr().out


def test_a_server_that_goes_away_leaves_what_it_scored_and_another_model_is_not_mixed_in(source, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 1)
    target, client = tmp_path / "scored.jsonl", FakeClient(calls=2)
    with pytest.raises(UnavailableError):
        score_with(RemoteBackend(client, "http"), source, target)
    assert client.is_closed
    kept = (tmp_path / ".scored.jsonl.partial/scores.jsonl").read_bytes()
    for other, said in ((Endpoint(digest="e"), "digest was d+, now e"), (Endpoint(precision="bfloat16"), "precision")):
        with pytest.raises(ConfigError, match=f"scored by another model .{said}"):
            score_with(RemoteBackend(FakeClient(other), "http"), source, target)
    assert (tmp_path / ".scored.jsonl.partial/scores.jsonl").read_bytes() == kept
    again = FakeClient()
    score_with(RemoteBackend(again, "http"), source, target)
    assert len(again.groups) == 3 - kept.count(b"\n")
    assert len(target.read_text().splitlines()) == 3


@pytest.mark.parametrize(("kind", "engine", "other"), [("http", "vllm", "vllm"), ("vllm", "rewardlab", "http")])
def test_another_engine_than_was_named_is_told(source, tmp_path, kind, engine, other):
    with pytest.raises(ConfigError, match=f"--backend {kind}: .* is {engine}. Say --backend {other}"):
        score_with(RemoteBackend(FakeClient(Endpoint(engine=engine)), kind), source, tmp_path / "scored.jsonl")


def test_the_command_makes_the_client_with_its_flags(source, tmp_path, monkeypatch, capsys):
    made = {}

    def client(url, **settings):
        made.update(settings, url=url)
        return FakeClient()

    monkeypatch.setattr("rewardlab.client.asynchronous.AsyncRewardClient", client)
    monkeypatch.setenv("TOKEN_OF_THE_SERVER", "secret\n")
    line = ["score", "--backend", "http", "--url", "http://127.0.0.1:1", "--input", str(source)]
    line += ["--output", str(tmp_path / "scored.jsonl"), "--token-env", "TOKEN_OF_THE_SERVER", "--concurrency", "3"]
    main([*line, "--served-model-name", "rm"])
    assert made == {
        "url": "http://127.0.0.1:1",
        "model": "rm",
        "token": "secret",
        "artifact": None,
        "max_concurrency": 3,
        "truncate": None,
    }
    printed = capsys.readouterr().out
    assert "3 replies scored by http://127.0.0.1:1, 1 not (the file says why)" in printed
    assert "secret" not in printed
    with pytest.raises(ConfigError, match="--token-env NOPE: the environment has no such variable"):
        score_remotely(Server(url="http://127.0.0.1:1", token_env="NOPE"), source, tmp_path / "other.jsonl")
    assert ScoreSettings() == servers.DEFAULT


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--backend http", "--backend http: --url is missing"),
        ("--backend vllm --url http://a", "--model is missing"),
        ("--model m --url http://a", "--url: only with --backend http or vllm"),
        ("--model m --backend vllm --url http://a --processes 2", "--processes: only with --backend local"),
        ("--model m --backend vllm --url http://a --precision bf16", "--precision: only with --backend local"),
        ("--backend http --url http://a --output-as probability", "name the folder that holds the calibration"),
        ("--model m --max-error-fraction 2", "--max-error-fraction 2.0: must be at most 1"),
        ("--model m --pick worst", "--pick worst: must be one of all, best"),
    ],
)
def test_flags_that_do_not_go_together_are_told(source, tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["score", "--input", str(source), "--output", str(tmp_path / "o.jsonl"), *flags.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_too_many_replies_without_a_score_are_an_error_after_the_output_is_written(
    source, tmp_path, monkeypatch, capsys
):
    source.write_text("".join(json.dumps({"prompt": "p", "response": reply}) + "\n" for reply in ("a", "b!", "c!")))
    monkeypatch.setattr("rewardlab.client.asynchronous.AsyncRewardClient", lambda url, **settings: FakeClient())
    line = ["score", "--backend", "http", "--url", "http://a", "--input", str(source), "--output"]
    target = tmp_path / "scored.jsonl"
    with pytest.raises(SystemExit) as ended:
        main([*line, str(target)])
    assert ended.value.code == 2
    assert "2 of 3 replies have no score, more than --max-error-fraction 0.5. The first: too long" in (
        capsys.readouterr().err
    )
    assert len(target.read_text().splitlines()) == 3
    main([*line, str(tmp_path / "again.jsonl"), "--max-error-fraction", "0.7"])
