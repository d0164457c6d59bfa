"""Comparing engines: what they are asked, how their answers are read, and that their processes end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foreign_imports
import live_faults
import old_transformers
import serve_throughput
from harness import engine_process, one_score_columns, one_score_page, results
from harness.conversations import ROWS, cases, rows_as_json, write_evaluation_data
from harness.engine_process import EngineError
from harness.http_scores import (
    Session,
    input_bodies,
    message_bodies,
    read_classify,
    read_pooling,
    read_score,
)
from harness.in_memory import load_preferences
from harness.one_score_columns import Asked, Column, Proof, not_run
from harness.one_score_model import Made
from harness.serve_load import CELLS, Cell, ahead_of, load_of
from harness.tiny import write_tiny
from rewardlab.core.signals import Terminated
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.config import ReadingConfig

Answer = Callable[[str, Any], tuple[int, Any]]


@pytest.fixture
def serving() -> Iterator[Callable[[Answer], str]]:
    """Starts an HTTP server that answers as it is told, and ends it."""
    started: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._send(*answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def do_GET(self) -> None:
                self._send(404, {})

            def _send(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_there_are_twenty_conversations_each_ending_in_the_reply_that_is_scored():
    found = cases()
    assert len(found) == len({case.name for case in found}) == 20
    assert all(
        case.messages[-1] == {"role": "assistant", "content": ROWS[case.row].replies[case.reply]} for case in found
    )
    assert [case.name for case in found if case.typed] == ["typed control tokens 2"]


def test_a_run_reads_the_conversations_as_they_are(tmp_path):
    write_evaluation_data(tmp_path / "rows.jsonl")
    read = load_preferences([str(tmp_path / "rows.jsonl")], split="train", reading=ReadingConfig(), seed=0, limit=None)
    by_line = {int(one.id.rpartition(":")[2]) - 1: one for one in read.preferences}
    for case in cases():
        preference = by_line[case.row]
        turns = (*preference.prompt, *preference.replies[case.reply])
        assert [turn.as_dict() for turn in turns] == case.messages
    assert len(list(rows_as_json())) == len(by_line)


def test_every_request_asks_for_raw_scores_and_for_no_second_bos():
    bodies = input_bodies(["a", "b", "c"], size=2)
    assert [body["input"] for body in bodies] == [["a", "b"], ["c"]]
    assert all(body["use_activation"] is False and body["add_special_tokens"] is False for body in bodies)
    assert all(body["use_activation"] is False for body in message_bodies([[{"role": "user", "content": "x"}]]))


def test_answers_are_read_in_the_order_of_their_numbers():
    shuffled = {"data": [{"index": 1, "probs": [2.5]}, {"index": 0, "probs": [-1.5]}]}
    assert read_classify(shuffled) == [-1.5, 2.5]
    assert read_pooling({"data": [{"index": 0, "data": [3.0]}]}) == [3.0]
    assert read_score({"groups": [{"scores": [1.0, 2.0]}, {"scores": [3.0]}]}) == [1.0, 2.0, 3.0]
    with pytest.raises(EngineError, match="numbers"):
        read_classify({"data": [{"index": 1, "probs": [2.5]}]})
    with pytest.raises(EngineError, match="2 values"):
        read_classify({"data": [{"index": 0, "probs": [0.4, 0.6]}]})


@pytest.mark.slow
def test_scores_come_in_the_order_of_the_requests_however_many_are_under_way(serving):
    def answer(path: str, body: Any) -> tuple[int, Any]:
        return 200, {"data": [{"index": n, "probs": [float(text)]} for n, text in enumerate(body["input"])]}

    texts = [str(n) for n in range(30)]
    with Session(serving(answer), concurrency=8) as session:
        bodies = input_bodies(texts, size=1)
        assert session.score("/classify", bodies, read_classify, counts=[1] * 30) == [float(text) for text in texts]


@pytest.mark.parametrize(
    ("status", "value", "says"),
    [
        (200, {"data": []}, "wanted 1 finite"),
        (200, {"data": [{"index": 0, "probs": [float("nan")]}]}, "wanted 1 finite"),
        (429, {"error": "busy"}, "answered 429"),
    ],
)
def test_a_missing_score_and_a_refusal_are_errors_and_no_scores(serving, status, value, says):
    with (
        Session(serving(lambda path, body: (status, value))) as session,
        pytest.raises(EngineError, match=says),
    ):
        session.score("/classify", input_bodies(["a"], size=1), read_classify, counts=[1])


SLEEPY = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_server_ends_with_the_processes_that_it_started(tmp_path):
    port, child = engine_process.free_port(), tmp_path / "child"
    command = [sys.executable, "-c", SLEEPY, str(port), str(child)]
    log = tmp_path / "engine.log"
    with engine_process.server(command, port=port, log=log, environment={}) as running:
        pid = int(child.read_text())
        assert (tmp_path / "engine.pid").is_file()
        assert running.url.endswith(str(port))
        os.kill(pid, 0)
    assert not (tmp_path / "engine.pid").exists()
    assert _ends(pid)


@pytest.mark.slow
def test_a_script_that_is_asked_to_end_leaves_no_server_behind(tmp_path):
    port, child = engine_process.free_port(), tmp_path / "child"
    command = [sys.executable, "-c", SLEEPY, str(port), str(child)]
    with (
        pytest.raises(Terminated),
        engine_process.server(command, port=port, log=tmp_path / "engine.log", environment={}),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert not (tmp_path / "engine.pid").exists()
    assert _ends(int(child.read_text()))


def _ends(pid: int) -> bool:
    """Whether a process that was told to end does so soon: a signal to another's child is not waited for.

    One that ended and that nobody has waited for yet is a zombie.
    """
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_server_that_dies_is_an_error_with_its_last_words(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    port = engine_process.free_port()
    with (
        pytest.raises(EngineError, match=r"status 1(.|\n)*no such model"),
        engine_process.server(command, port=port, log=tmp_path / "engine.log", environment={}),
    ):
        pass
    assert not (tmp_path / "engine.pid").exists()


def test_vllm_is_told_to_give_raw_scores_and_no_folder_is_shown():
    command = engine_process.vllm_command("/env/bin/python", "/models/best", port=1, dtype="float32", max_length=9)
    assert command[:3] == ["/env/bin/vllm", "serve", "/models/best"]
    assert json.loads(command[command.index("--pooler-config") + 1]) == {"use_activation": False}
    words = [*command[:3], "adapter=/models/best/adapter", '{"a": "/b"}', "--flag=1"]
    plain = [engine_process.plain(word) for word in words]
    assert plain == ["vllm", "serve", "best", "adapter=adapter", '{"a": "/b"}', "--flag=1"]


def made(**changes: Any) -> Made:
    """Two conversations, in the second of which control tokens are typed."""
    two = [case for case in cases() if case.row == len(ROWS) - 1]
    values: dict[str, Any] = {
        "precision": "fp32",
        "base": "base",
        "folder": Path("folder"),
        "adapter": None,
        "cases": two,
        "left_out": [],
        "evaluated": [0.5, 1.0],
        "token_ids": [[1], [1, 2]],
        "texts": ["a", "b"],
        "reference": [0.5, 1.0],
        "obeyed": [0.5, -3.0],
        "tolerance": 2e-4,
    }
    return Made(**{**values, **changes})


def test_an_engine_that_is_given_texts_has_to_obey_typed_tokens_and_any_other_must_not():
    obeying, literal = [0.5, -3.0], [0.5, 1.0]
    for reads_text, right, wrong in ((True, obeying, literal), (False, literal, obeying)):
        assert one_score_page.right(Column(name="x", scores=right, reads_text=reads_text), made())
        assert not one_score_page.right(Column(name="x", scores=wrong, reads_text=reads_text), made())


def test_a_way_that_is_off_fails_the_script_and_one_that_was_not_run_is_named_with_its_reason():
    columns = [
        Column(name="good", scores=[0.5001, 1.0]),
        *not_run(["server a", "server b"], "no such\ncommand"),
    ]
    table = one_score_page.Table(made=made(), columns=columns)
    said: list[str] = []
    assert one_score_page.verdict([table], require_all=False, say=said.append) == 0
    assert one_score_page.verdict([table], require_all=True, say=said.append) == 1
    page = "\n".join(one_score_page.page([table], model="m", versions={"vllm": "1"}))
    assert "- Not run: `server a`, `server b`: no such command" in page
    assert "**1 of 1**" in page
    off = one_score_page.Table(made=made(), columns=[Column(name="bad", scores=[0.501, 1.0])])
    assert one_score_page.verdict([off], require_all=False, say=said.append) == 1
    assert "bad: at most 1.0e-03 off, allowed 0.0002" in said[-1]
    assert off.as_dict()["columns"][0]["largest_distance"] == pytest.approx(1e-3)


def test_an_endpoint_that_verify_calls_wrong_fails_the_script_and_the_engines_left_out_are_named():
    name = "rewardlab verify URL → vLLM"
    good = Proof(name=name, right=True, said="verified", largest_distance=1e-6, forms=3)
    said: list[str] = []
    for proof, status in (
        (good, 0),
        (replace(good, right=False, said="a sigmoid"), 1),
        (Proof(name=name, right=None, said="no server"), 0),
    ):
        table = one_score_page.Table(made=made(), columns=[], proofs=[proof])
        assert one_score_page.verdict([table], require_all=False, say=said.append) == status
        assert table.as_dict()["verified"][0]["right"] == proof.right
    assert said == [f"fp32 {name}: a sigmoid"]
    assert one_score_page.verdict([table], require_all=True, say=said.append) == 1
    page = "\n".join(one_score_page.page([table], model="m", versions={}))
    assert f"| `{name}` | – | 0 | **not run**: no server |" in page
    assert all(f"- {engine}: " in page for engine in ("SGLang", "verl", "OpenRLHF", "slime"))


def test_what_verify_finds_of_an_endpoint_is_read_from_its_file(tmp_path, monkeypatch):
    form = {"form": "token_ids", "right": True, "largest_distance": 1e-6}
    trap = {"form": "verl, a copied function", "right": False, "largest_distance": 0.4}
    told = {"right": True, "verdict": "http://x: verified", "forms": [form, trap]}
    asked = Asked(made=made(), work=tmp_path, threads=1, vllm_python=None, server_url=None)

    def run(words: list[str]) -> Any:
        assert words[words.index("--precision") + 1] == "fp32"
        (tmp_path / "verified.json").write_text(json.dumps(told))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(one_score_columns, "_python", run)
    (found,) = one_score_columns.proof(asked, "http://x", "vLLM", "--as", "verl")
    assert (found.right, found.said, found.largest_distance, found.forms) == (True, "verified", 1e-6, 1)
    monkeypatch.setattr(one_score_columns, "_python", lambda words: SimpleNamespace(returncode=2, stderr="no\nserver"))
    (found,) = one_score_columns.proof(asked, "http://x", "vLLM")
    assert (found.right, found.said) == (None, "no server")


def test_the_tables_on_the_page_of_vllm_are_those_of_the_record_that_it_links():
    page = (results.RESULTS.parents[1] / "docs/in-vllm.md").read_text(encoding="utf-8")
    (record,) = set(re.findall(r"results/(one_score\.\S+?)\.md", page))
    tables = json.loads((results.RESULTS / f"{record}.json").read_text(encoding="utf-8"))["tables"]
    there = [line for line in page.splitlines() if line[2:].partition(" | ")[0] in one_score_page.ON_THE_PAGE]
    assert there == [row for table in tables for row in one_score_page.rows_on_page(table)]
    tables[0]["columns"][0]["name"] = "another way"
    with pytest.raises(ValueError, match="another way: no row of the page has it"):
        one_score_page.rows_on_page(tables[0])


def test_prompts_of_a_round_are_new_and_cost_what_others_do(tmp_path):
    tokenizer = load_tokenizer(write_tiny(tmp_path / "model", "tiny-llama"))
    for cell in CELLS.values():
        first, again, second = (load_of(cell, draw=draw) for draw in ((1, 0), (1, 0), (1, 1)))
        assert first == again
        assert len({one.prompt for one in (*first, *second)}) == 2 * cell.prompts
        assert all(len(one.replies) == cell.replies for one in first)
        assert [one.replies for one in first] == [one.replies for one in second]
        assert [one.prompt for one in ahead_of(first)] == [one.prompt for one in first]
        lengths = [[len(tokenizer(one.prompt)["input_ids"]) for one in asked] for asked in (first, second)]
        assert lengths[0] == pytest.approx(lengths[1], abs=4), "digits may merge in this small vocabulary"
        replies = [reply for one in first for reply in one.replies]
        assert len(set(replies)) > len(replies) / 2


def test_a_warm_server_has_seen_each_prompt_once_with_another_reply_and_a_cold_one_none():
    cell = Cell(prompts=2, replies=2, paragraphs=0)
    seen: list[list[Any]] = []

    def score(asked: Any) -> list[float]:
        seen.append(list(asked))
        return [0.0] * sum(len(one.replies) for one in asked)

    for warm in (False, True):
        seen.clear()
        step = serve_throughput._stepper(serve_throughput.Variant(score=score, warm=warm), cell, draw=(7,))
        step()
        step()
        assert len(seen) == (4 if warm else 2)
        timed = seen[1::2] if warm else seen
        assert {one.prompt for one in timed[0]}.isdisjoint(one.prompt for one in timed[1])
        if warm:
            assert [one.prompt for one in seen[0]] == [one.prompt for one in seen[1]]
            assert seen[0][0].replies != seen[1][0].replies


@pytest.mark.slow
def test_throughput_is_measured_beside_the_loop_with_the_scores_compared(tmp_path, serving):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write_tiny(tmp_path / "model", "tiny-llama")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(path: str, body: Any) -> tuple[int, Any]:
        assert path == "/classify"
        with torch.no_grad():
            ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in body["input"]]
            scores = [float(model(**one).logits[0, 0]) for one in ids]
        return 200, {"data": [{"index": n, "probs": [score]} for n, score in enumerate(scores)]}

    given = ["--folders", f"fp32={folder}", "--servers", f"other={serving(answer)}", "--cells", "best-of-8-short"]
    more = ["--quick", "--no-server", "--threads", "1", "--results", str(tmp_path / "results")]
    assert serve_throughput.main([*given, *more]) == 0
    (path,) = (tmp_path / "results").glob("serve_throughput.fp32-quick.*.json")
    cell = json.loads(path.read_text())["phases"][0]["cells"]["best-of-8-short"]
    assert set(cell["times"]) == {serve_throughput.LOOP, "other, cold", "other, warm"}
    assert 0 <= cell["largest_difference"]["other, cold"] < 1e-4
    assert "shows that everything runs, and no speed" in path.with_suffix(".md").read_text()
    assert str(tmp_path) not in path.read_text()


def test_a_server_with_other_scores_than_the_loop_is_told_by_the_exit_status(monkeypatch):
    loop = [0.5, -3.0]
    scores = {serve_throughput.LOOP: loop, "near": [0.50005, -3.0002], "far": [0.5, -3.001]}
    assert serve_throughput.beyond_allowed(scores, "fp32") == ["far"]
    assert serve_throughput.beyond_allowed(scores, "bf16") == []
    phase = {"cells": {"one": {"beyond_allowed": ["far"]}, "two": {"beyond_allowed": []}}}
    monkeypatch.setattr(serve_throughput, "_write", lambda *given: None)
    for phases, status in (([phase], 1), ([{"cells": {}}], 0)):
        monkeypatch.setattr(serve_throughput, "_phases", lambda *given, found=phases: iter(found))
        assert serve_throughput.main(["--folders", "fp32=model", "--threads", "1"]) == status


def test_a_sabotage_that_nobody_noticed_fails_the_measurement(monkeypatch):
    written: list[Any] = []
    monkeypatch.setattr(live_faults.results, "write", lambda *given, **more: written.append(more))
    monkeypatch.setattr(live_faults.fault_names, "tiny_folders", lambda *given: ())
    for found, status in ((("sigmoid",), 0), ((), 1), (("softmax",), 1)):
        count = live_faults.Count()
        count.add(found, "sigmoid")
        monkeypatch.setattr(live_faults, "measure", lambda folders, one=count: ({"vllm": {"sigmoid": one}}, []))
        assert live_faults.main([]) == status
    assert len(written) == 3


def test_an_imported_model_that_is_off_fails_the_script_and_a_project_that_cannot_run_is_named(tmp_path, monkeypatch):
    good = foreign_imports.Compared(name="TRL", distance=2e-7)
    for number, (found, status, shown) in enumerate(
        (
            (good, 0, "**2.0e-07**"),
            (replace(good, distance=1e-4), 1, "**1.0e-04**"),
            (replace(good, distance=None, reason="no such module"), 0, "not run: no such module"),
            (replace(good, distance=None, reason="two heads", refused=True), 1, "**refused**: two heads"),
        )
    ):
        monkeypatch.setattr(foreign_imports, "compare", lambda *given, one=found: one)
        out = tmp_path / str(number)
        assert foreign_imports.main(["--python", "python", "--only", "TRL", "--results", str(out)]) == status
        (page,) = out.glob("foreign_imports.trl.*.md")
        assert shown in page.read_text()


def test_folders_of_this_version_that_another_transformers_reads_otherwise_are_marked():
    compared = {
        "right": {"largest_distance": 1e-7, "same": True},
        "other tokens": {"largest_distance": 0.5, "same": False},
        "not loaded": {"error": "KeyError"},
    }
    page = "\n".join(old_transformers.page_of(compared, "4.57.6", 1e-4))
    assert "| right | 1.0e-07 | the same |" in page
    assert "| other tokens | 5.0e-01 | **others** |" in page
    assert "| not loaded | **KeyError** | – |" in page
