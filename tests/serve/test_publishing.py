"""A running training hands its newest model to a server, and no failure of that ends it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, LlamaConfig

from common import make_tokenizer, write_pairs
from harness.fake_engine import running
from harness.tiny import GROUPED, SIZES
from rewardlab.cli import main
from rewardlab.client.publishing import Publisher
from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import read_spec
from rewardlab.distributed.sharding import MAX_WAIT
from rewardlab.training.publishing import publisher_of
from rewardlab.training.run import TrainResult, train
from rewardlab.training.settings.config import PublishConfig, RewardTrainerConfig


@dataclass
class Admin:
    """A server that swaps, or answers with one of these codes."""

    codes: list[int] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    """Code -> the word for programs that comes with it."""
    digest: str = ""
    """The digest that it says, in place of the folder's."""
    asked: list[tuple[str | None, dict[str, Any]]] = field(default_factory=list)
    """(authorization, body) of each request."""
    steps: list[Any] = field(default_factory=list)
    """The step of each folder at the moment of the request."""

    async def swap(self, request: Request) -> JSONResponse:
        """Answer as `rewardlab serve` does."""
        body = await request.json()
        self.asked.append((request.headers.get("authorization"), body))
        if (Path(body["folder"]) / "reward_spec.json").is_file():
            self.steps.append(read_spec(Path(body["folder"])).provenance["step"])
        code = self.codes.pop(0) if self.codes else 200
        if code != 200:
            kind = self.kinds.get(code, "invalid_request")
            error = {"message": "not this one", "type": kind, "code": code, "param": None}
            return JSONResponse({"error": error}, status_code=code, headers={"retry-after": "0"})
        digest = json.loads((Path(body["folder"]) / "config.json").read_text())["rewardlab_spec_sha256"]
        return JSONResponse({"model": body["model"], "digest": self.digest or digest})


@pytest.fixture
def admin() -> Admin:
    """What the server does."""
    return Admin()


@pytest.fixture
def url(admin: Admin) -> Iterator[str]:
    """The server."""
    with running(Starlette(routes=[Route("/admin/swap", admin.swap, methods=["POST"])])) as address:
        yield address


@pytest.fixture(autouse=True)
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what a swap is told by of a run's folders."""
    for name in ("best", "step_5", "run/best", "run/step_10"):
        folder = tmp_path / "here" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"rewardlab_spec_sha256": "d" * 64}))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def publisher(url: str, every: str = "best", **more: Any) -> Publisher:
    return Publisher(url, model="rm", token="secret-1", every=every, **({"timeout_s": 20.0} | more))


def test_the_server_is_asked_with_the_token_for_the_folder_as_an_absolute_path(admin, url, saved, caplog):
    one = publisher(url)
    one.saved(Path("run/best"), 5)
    one.saved(Path("run/step_10"), 10)
    assert admin.asked == [("Bearer secret-1", {"model": "rm", "folder": str(saved / "run/best")})]
    assert (one.swaps, one.failures, one.digest) == (1, 0, "d" * 64)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        one.finish(Path("run/best"), 5)
    assert len(admin.asked) == 1, "the server has it already"
    assert "published 1 time to http" in caplog.text


@pytest.mark.parametrize("code", [401, 403, 404, 409, 422])
def test_a_refusal_is_warned_about_counted_and_the_next_model_is_tried(admin, url, caplog, code):
    admin.codes = [code]
    one = publisher(url)
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        one.saved(Path("best"), 5)
    (record,) = caplog.records
    assert "step 5  best is not published (failure 1): " in record.message
    assert "not this one" in record.message
    assert "The run goes on; the next one is tried again." in record.message
    assert "secret-1" not in caplog.text
    one.saved(Path("best"), 10)
    assert (one.swaps, one.failures) == (1, 1)


def test_a_swap_that_has_to_wait_for_another_one_is_asked_for_until_it_is_done(admin, url, caplog):
    admin.codes, admin.kinds = [409] * 6, {409: "swap_goes_on"}
    one = publisher(url)
    assert one.publish(Path("best"), step=5)
    assert (one.swaps, one.failures, len(admin.asked)) == (1, 0, 7)
    admin.codes = [409] * 10_000
    short = publisher(url, timeout_s=0.2)
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        assert not short.publish(Path("best"), step=5)
    assert "no swap within 0.2 s (--publish-timeout-s)" in caplog.text


def test_a_server_that_took_another_folder_has_not_taken_this_one(admin, url, caplog):
    admin.digest = "e" * 64
    one = publisher(url)
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        assert not one.publish(Path("best"), step=5)
    assert "answers with the digest eeeeeeeeeeee…, and the folder has dddddddddddd…" in caplog.text
    assert (one.published, one.failures) == (None, 1)


def test_what_failed_last_is_asked_for_once_more_at_the_end(admin, url):
    admin.codes = [422]
    one = publisher(url)
    one.saved(Path("best"), 5)
    one.finish(Path("best"), 5)
    assert (one.swaps, one.failures) == (1, 1)
    assert [body["folder"] for _, body in admin.asked] == [str(Path("best").resolve())] * 2


@pytest.mark.parametrize(("every", "asked"), [("best", ["best"]), ("eval", ["step_5", "best"]), ("end", ["best"])])
def test_each_kind_of_model_is_published_where_it_was_asked_for(admin, url, every, asked):
    one = publisher(url, every)
    one.saved(Path("best"), 5)
    one.saved(Path("step_5"), 5)
    one.finish(Path("best"), 5)
    assert [Path(body["folder"]).name for _, body in admin.asked] == asked


@pytest.mark.slow
def test_a_server_that_is_not_there_or_answers_something_else_ends_no_run(caplog):
    gone = publisher("http://127.0.0.1:9", timeout_s=0.5)
    with caplog.at_level(logging.WARNING, logger="rewardlab"):
        gone.saved(Path("best"), 1)
    assert "is not published (failure 1): " in caplog.text
    with running(Starlette(routes=[Route("/admin/swap", lambda request: JSONResponse([1]), methods=["POST"])])) as url:
        other = publisher(url)
        other.saved(Path("best"), 1)
        assert other.failures == 1
    assert "the answer has no digest" in caplog.text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model and pairs."""
    folder = tmp_path_factory.mktemp("publish")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **GROUPED)
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    write_pairs(folder / "pairs.jsonl", 16)
    return folder


def line(base: Path, out: Path, url: str, *more: str) -> list[str]:
    words = (
        f"train --model {base / 'base'} --dataset {base / 'pairs.jsonl'} --output-dir {out} --steps 2 --batch-size 4"
    )
    return [*words.split(), "--eval-every", "1", "--max-seq-len", "256", "--publish-to", url, *more]


@pytest.mark.slow
def test_a_training_publishes_every_evaluated_model_and_the_chosen_one(
    admin, url, base, tmp_path, monkeypatch, verified_here
):
    monkeypatch.setenv("REWARDLAB_ADMIN_TOKEN", "secret-1")
    admin.codes = [404]
    main(line(base, tmp_path / "run", url, "--publish-every", "eval", "--publish-as", "policy-rm"))
    assert [Path(body["folder"]).name for _, body in admin.asked[:2]] == ["step_1", "step_2"]
    assert admin.steps[:2] == [1, 2], "each folder is complete when the server is asked for it"
    assert {body["model"] for _, body in admin.asked} == {"policy-rm"}
    chosen = admin.asked[2:]
    assert len(chosen) == 1
    written = (tmp_path / "run/config.json").read_text()
    assert "secret-1" not in written
    assert json.loads(written)["publish_token_env"] == "REWARDLAB_ADMIN_TOKEN"


def test_a_run_in_python_publishes_by_its_settings(monkeypatch):
    monkeypatch.setenv("REWARDLAB_ADMIN_TOKEN", "secret-1")
    told: list[Any] = []
    config = RewardTrainerConfig.of(
        model="base",
        dataset=("pairs.jsonl",),
        output_dir="out",
        publish_to="http://127.0.0.1:9",
        publish_as="rm",
        publish_every="eval",
    )
    kept = object.__new__(TrainResult)
    kept.__dict__.update(best=Path("best"), best_step=5)
    monkeypatch.setattr("rewardlab.training.run._train", lambda *given: told.append(given[-1]) or kept)
    monkeypatch.setattr(Publisher, "finish", lambda self, folder, step: told.append((folder, step)))
    train(config)
    one, finished, *_ = told
    assert (one.url, one.model, one.every, one.timeout_s) == ("http://127.0.0.1:9", "rm", "eval", 120.0)
    assert finished == (Path("best"), 5)
    assert train(config.replace(publish_to=None)) is kept
    assert told[2:] == [None]
    monkeypatch.setenv("RANK", "1")
    assert publisher_of(config.publish) is None


def test_a_swap_may_take_no_longer_than_the_processes_of_a_run_wait_for_each_other():
    assert PublishConfig(publish_timeout_s=3000.0).publish_timeout_s < MAX_WAIT.total_seconds()
    with pytest.raises(ConfigError, match="publish-timeout-s"):
        PublishConfig(publish_timeout_s=3001.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--publish-token-env REWARDLAB_ADMIN_TOKEN: the environment has no such variable"),
        (["--publish-to", "http://me:secret@127.0.0.1"], "--publish-to: the address holds a user or a password"),
        (["--publish-to", "nowhere"], "'nowhere' is not an address of http"),
        (["--publish-every", "eval", "--save-every", "2"], "--publish-every eval saves the model at every evaluation"),
    ],
)
def test_what_cannot_be_published_is_told_before_the_run(base, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.delenv("REWARDLAB_ADMIN_TOKEN", raising=False)
    if more:
        monkeypatch.setenv("REWARDLAB_ADMIN_TOKEN", "secret-1")
    with pytest.raises(SystemExit) as stop:
        main(line(base, tmp_path / "run", "http://127.0.0.1:9", *more))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run/best").exists()
