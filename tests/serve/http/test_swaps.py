"""Hot swap over HTTP: who may, from where, and that no answer mixes two models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from fake_engine import FakeEngine, digest_of, error_of, expected
from rewardlab.client.protocol import DIGEST_HEADER, ScoreRequest
from rewardlab.serve.http.config import HttpConfig

pytest_plugins = ["served_apps"]

TOKEN = "admin-0123456789"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def folders(tmp_path) -> Path:
    """`allowed` with the models one, two and links; `outside` with a model and a secret."""
    for name in ("allowed/one", "allowed/two", "allowed/linked_file", "outside/model_there"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model").write_text(name)
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "allowed" / "link_out").symlink_to(tmp_path / "outside" / "model_there")
    (tmp_path / "allowed" / "link_in").symlink_to(tmp_path / "allowed" / "two")
    (tmp_path / "allowed" / "loop").symlink_to(tmp_path / "allowed" / "loop")
    (tmp_path / "allowed" / "linked_file" / "weights").symlink_to(tmp_path / "outside" / "secret")
    (tmp_path / "allowed" / "empty").mkdir()
    (tmp_path / "allowed" / "loop_inside").mkdir()
    (tmp_path / "allowed" / "loop_inside" / "loop").symlink_to("loop")
    return tmp_path


@pytest.fixture
def client(client_of, folders):
    return client_of(HttpConfig(admin_token=TOKEN.encode(), allow_swap_from=(folders / "allowed",), token=b"x" * 16))


def swap(client, folder: object, model: str = "tiny", headers: dict = BEARER):
    return client.post("/admin/swap", json={"model": model, "folder": str(folder)}, headers=headers)


@pytest.mark.parametrize("name", ["one", "link_in", "two/../one"])
def test_a_folder_that_really_lies_below_an_allowed_one_is_swapped_in(client, folders, engine: FakeEngine, name):
    response = swap(client, f"{folders}/allowed/{name}")
    digest = digest_of((folders / "allowed" / name).resolve())
    assert (response.status_code, response.json()) == (200, {"model": "tiny", "digest": digest})
    assert response.headers[DIGEST_HEADER] == engine.digests["tiny"] == digest


@pytest.mark.parametrize(
    "name",
    [
        *("../outside/model_there", "link_out", "linked_file", "../allowed_not", "../..", "../outside/not_there"),
        *("loop", "loop/x", "loop/../link_out", "none/../loop/../link_out", "loop_inside"),
    ],
)
def test_a_folder_that_leads_outside_is_forbidden_whether_it_is_there_or_not(client, folders, engine, name):
    before = dict(engine.digests)
    error = error_of(swap(client, f"{folders}/allowed/{name}")).error
    assert (error.code, error.type, error.param) == (403, "forbidden", "folder")
    assert engine.digests == before


@pytest.mark.parametrize(
    ("folder", "model", "status", "kind"),
    [
        ("allowed/empty", "tiny", 422, "not_swapped"),
        ("allowed/none", "tiny", 422, "not_swapped"),
        ("allowed/one/model", "tiny", 422, "not_swapped"),
        ("allowed/" + "a" * 300, "tiny", 422, "not_swapped"),
        ("allowed/one", "other", 404, "unknown_model"),
    ],
)
def test_a_swap_that_fails_leaves_the_old_model(client, folders, engine, folder, model, status, kind):
    before = dict(engine.digests)
    error = error_of(swap(client, folders / folder, model)).error
    assert (error.code, error.type) == (status, kind)
    assert engine.digests == before


@pytest.mark.parametrize("folder", ["relative", "", "a\0b", "/x\0y"])
def test_a_path_that_is_not_absolute_is_invalid(client, folder):
    assert error_of(swap(client, folder)).error.code == 422


def test_the_token_of_users_is_not_that_of_administrators(client, folders):
    for token in ("x" * 16, "", TOKEN + "x"):
        assert swap(client, folders / "allowed/one", headers={"authorization": f"Bearer {token}"}).status_code == 401
    assert client.post("/v1/score", json={"token_ids": [[1]]}, headers=BEARER).status_code == 401


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError(), OSError("disk")])
def test_a_model_that_cannot_be_loaded_is_no_failure_of_the_server(client_of, folders, error):
    def fail(name: str, folder: Path):
        raise error

    config = HttpConfig(admin_token=TOKEN.encode(), allow_swap_from=(folders / "allowed",))
    told = error_of(swap(client_of(config, swap=fail), folders / "allowed/one")).error
    assert (told.code, told.type, type(error).__name__ in told.message) == (422, "not_swapped", True)


def test_one_swap_at_a_time(client_of, folders, engine: FakeEngine):
    begun, go_on = threading.Event(), threading.Event()

    def slow(name: str, folder: Path):
        begun.set()
        assert go_on.wait(60)
        return engine.swap(name, folder)

    config = HttpConfig(admin_token=TOKEN.encode(), allow_swap_from=(folders / "allowed",))
    with client_of(config, swap=slow) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(swap, client, folders / "allowed/one")
        assert begun.wait(60)
        second = swap(client, folders / "allowed/two")
        go_on.set()
        assert error_of(second).error.type == "swap_goes_on"
        assert first.result().status_code == 200
        assert swap(client, folders / "allowed/two").status_code == 200


def test_no_answer_under_swaps_mixes_models_or_names_another(client_of, folders, engine: FakeEngine):
    config = HttpConfig(admin_token=TOKEN.encode(), allow_swap_from=(folders / "allowed",))
    digests = {digest_of(folders / "allowed" / name) for name in ("one", "two")} | set(engine.digests.values())
    with client_of(config) as client, ThreadPoolExecutor(5) as threads:

        def ask(number: int) -> str:
            request = {"groups": [{"prompt": f"p{number}", "replies": list("abcd")}, {"prompt": "q", "replies": ["r"]}]}
            answer = client.post("/v1/score", json=request).json()
            scores = [group["scores"] for group in answer["groups"]]
            assert scores == expected(answer["digest"], ScoreRequest.model_validate(request))
            return answer["digest"]

        asked = [threads.submit(ask, number) for number in range(60)]
        for number in range(6):
            assert swap(client, folders / "allowed" / ("one", "two")[number % 2]).status_code == 200
        assert {one.result() for one in asked} <= digests


def test_a_swap_that_still_loads_at_the_end_gets_503_and_holds_nobody_up(
    serve, folders, engine: FakeEngine, monkeypatch
):
    begun, go_on = threading.Event(), threading.Event()

    def slow(name: str, folder: Path):
        begun.set()
        assert go_on.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(engine, "swap", slow)
    config = HttpConfig(admin_token=TOKEN.encode(), allow_swap_from=(folders / "allowed",))
    host, port, _, end = serve(config, drain_timeout_s=0.05)
    with ThreadPoolExecutor(1) as threads, httpx2.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        waiting = threads.submit(swap, client, folders / "allowed/one")
        assert begun.wait(60)
        end()
        assert not go_on.is_set()
        error = error_of(waiting.result()).error
        go_on.set()
    assert (error.code, error.type) == (503, "unavailable")


LOADING = """
import sys
from pathlib import Path
from rewardlab.artifact.load import load
from rewardlab.commands.scoring import serve
from rewardlab.serve.engine.local import LocalEngine

def for_ever(engine, name, folder):
    print("loading", flush=True)
    while True:
        load(folder)

LocalEngine.swap = for_ever
serve([sys.argv[1], "--port", "0", "--drain-timeout", "0.1", "--admin-token-env", "ADMIN",
       "--allow-swap-from", sys.argv[1]])
"""


@pytest.mark.slow
def test_the_process_ends_with_status_0_while_a_model_is_loaded(tmp_path) -> None:
    from reward_models import save_tiny

    folder = save_tiny(tmp_path / "rm")
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": paths, "ADMIN": TOKEN},
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if " at http://" in line).rpartition(" ")[2].strip()
        with ThreadPoolExecutor(1) as threads, httpx2.Client(base_url=url, timeout=60) as client:
            waiting = threads.submit(swap, client, folder, "rm")
            assert any("loading" in line for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            assert error_of(waiting.result()).error.code == 503
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
