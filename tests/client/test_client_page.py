"""The page about the client: its examples run and print what they say, its table has every setting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields

import pytest

from fake_engines import Fake, FakeOwn, FakeVllm
from loopback import Answering, listening
from pages import promised_and_printed, read
from rewardlab.client import failures
from rewardlab.client.config import ClientConfig
from served import folder, table

PAGE = "client.md"


@contextmanager
def served(fake: Fake) -> Iterator[str]:
    """The address of a fake server on this machine."""

    class Handler(Answering):
        def do_GET(self) -> None:
            body = self.body()
            status, values, _ = fake.reply(self.path, json.loads(body) if body else None)
            self.answer(status, json.dumps(values).encode())

        do_POST = do_GET

    with listening(Handler) as address:
        yield address


def test_the_examples_run_and_print_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with (
        served(FakeOwn(table())) as url,
        served(FakeVllm(table())) as vllm_url,
        served(FakeVllm(table(fault="sigmoid"))) as sigmoid_url,
    ):
        promised, printed = promised_and_printed(
            PAGE, url=url, vllm_url=vllm_url, sigmoid_url=sigmoid_url, folder=folder()
        )
    assert printed == promised
    assert len(promised) == 9


def section(heading: str) -> str:
    """What stands below a heading."""
    return read(PAGE).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_table_of_settings_is_the_configuration() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section("Settings"), re.MULTILINE))
    assert listed == {
        each.name: "{}"
        if each.default is MISSING
        else json.dumps(each.default).replace("null", "None").replace("true", "True").replace("false", "False")
        for each in fields(ClientConfig)
    }


def test_the_table_of_errors_has_every_error() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", section("Errors"), re.MULTILINE)
    assert set(listed) == {name for name in vars(failures) if name.endswith("Error") and name != "EndpointError"}
