"""`rewardlab serve`: who may reach it, with what token, and models by their names; spans without texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fake_engine import UNSCORABLE, FakeEngine
from rewardlab.core.errors import ConfigError
from rewardlab.model.config import ComputeConfig
from rewardlab.serve import server as command
from rewardlab.serve.http.config import LOOPBACK, LimitsConfig, ServeConfig
from rewardlab.serve.http.telemetry import Spans
from rewardlab.serve.http.tokens import read_token, require_token_for

pytest_plugins = ["served_apps"]

LIMITS = LimitsConfig()


def test_models_have_the_names_of_their_folders_or_those_given():
    assert command.models_of(["a/best", "other=b/best"]) == {"best": Path("a/best"), "other": Path("b/best")}
    assert command.models_of(["./x=y"]) == {"x=y": Path("x=y")}
    for words, message in ((["a/best", "b/best"], "two models are called best"), (["=x"], "NAME=FOLDER")):
        with pytest.raises(ConfigError, match=message):
            command.models_of(words)


def test_a_token_comes_from_the_environment_or_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("T", "0123456789abcdef\n")
    file = tmp_path / "token"
    file.write_text("fedcba9876543210\n")
    assert read_token("T", None, flag="--token") == b"0123456789abcdef"
    assert read_token(None, file, flag="--token") == b"fedcba9876543210"
    assert read_token(None, None, flag="--token") is None


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "é" * 20, "tab\tinside-it-all"])
def test_a_token_that_protects_nothing_is_refused_without_being_shown(monkeypatch, tmp_path, token):
    monkeypatch.setenv("T", token)
    (tmp_path / "token").write_text(token)
    for where in ({"variable": "T", "file": None}, {"variable": None, "file": tmp_path / "token"}):
        with pytest.raises(ConfigError) as error:
            read_token(**where, flag="--token")
        assert token == "" or token not in str(error.value)
    with pytest.raises(ConfigError, match="no such variable"):
        read_token("NOT_THERE_AT_ALL", None, flag="--token")
    with pytest.raises(ConfigError, match="name one"):
        read_token("T", tmp_path / "token", flag="--token")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org", ""])
def test_an_address_that_others_reach_needs_a_token(host):
    with pytest.raises(ConfigError, match="others can reach"):
        require_token_for(host, None)
    require_token_for(host, b"0123456789abcdef")


def test_settings_of_the_app_follow_from_the_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("T", "0123456789abcdef")
    monkeypatch.setenv("A", "fedcba9876543210")
    alone = command.http_config(ServeConfig(), LIMITS)
    assert (alone.token, alone.admin_token, alone.hosts) == (None, None, LOOPBACK)
    settings = ServeConfig(host="0.0.0.0", token_env="T", admin_token_env="A", allow_swap_from=(tmp_path,))
    shared = command.http_config(settings, LIMITS)
    assert (shared.token, shared.admin_token, shared.hosts) == (b"0123456789abcdef", b"fedcba9876543210", ())
    assert shared.allow_swap_from == (tmp_path.resolve(),)
    for wrong, message in (
        (ServeConfig(token_env="T", admin_token_env="T"), "token of everybody"),
        (ServeConfig(admin_token_env="A", allow_swap_from=(tmp_path / "no",)), "no such folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            command.http_config(wrong, LIMITS)
    with pytest.raises(ConfigError, match="nobody may swap"):
        ServeConfig(allow_swap_from=(tmp_path,))


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"uvicorn: pip install \"rewardlab\[serve\]\""):
        command.serve(["m"], ServeConfig(), limits=LIMITS, compute=ComputeConfig(), say=list)


def test_a_port_that_is_taken_is_reported_before_a_model_is_loaded(tmp_path):
    from rewardlab.serve.http.run import listen, url_of

    with listen("127.0.0.1", 0) as bound:
        settings = ServeConfig(port=int(url_of(bound).rpartition(":")[2]))
        with pytest.raises(ConfigError, match="cannot be had"):
            command.serve([str(tmp_path)], settings, limits=LIMITS, compute=ComputeConfig(), say=list)


def test_spans_continue_the_callers_and_hold_no_text(client_of, engine: FakeEngine):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    client = client_of(spans=Spans(provider))
    caller = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    client.post("/v1/score", json={"prompt": "whispered", "replies": ["y", "z"]}, headers=caller)
    client.post("/v1/score", json={"prompt": f"whispered {UNSCORABLE}", "replies": ["y"]})
    good, bad = exporter.get_finished_spans()
    assert good.name == "POST /v1/score"
    assert f"{good.context.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    assert good.attributes["rewardlab.conversations"] == 2
    assert good.attributes["rewardlab.digest"] == engine.digests["tiny"][:12]
    assert (bad.attributes["http.response.status_code"], bad.status.description) == (422, "unscorable")
    assert "whispered" not in good.to_json() + bad.to_json()
