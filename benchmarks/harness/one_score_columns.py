"""The ways to a score that are compared, each a function that gives one or several columns, or why it could not run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness import engine_process
from harness.command import rewardlab
from harness.conversations import ROWS, Case, write_score_data
from harness.engine_process import EngineError, Running
from harness.http_scores import Session, input_bodies, message_bodies, read_classify, read_pooling, read_score
from harness.one_score_model import Made
from rewardlab.artifact.load import load
from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import read_jsonl
from rewardlab.rl import BlockingScorer

BATCH: Final = 4
"""Inputs of a request, so that engines batch them."""
PADDED_ROWS: Final = 8
MAX_REASON: Final = 300
OUR_CLIENT: Final = "rewardlab.client → rewardlab serve"
VLLM_CLIENT: Final = "rewardlab.client → vLLM"
OUR_SCORER: Final = "rewardlab.rl"
TRANSFORMERS_ALONE: Final = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, dtype, threads, rows, source, target = sys.argv[1:]
torch.set_num_threads(int(threads))
given = json.load(open(source))
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in given["messages"]]
found = {"messages": [], "token ids": []}
with torch.no_grad():
    for start in range(0, len(texts), int(rows)):
        batch = tokenizer(texts[start : start + int(rows)], add_special_tokens=False, padding=True, return_tensors="pt")
        found["messages"] += model(**batch).logits[:, 0].float().tolist()
    for ids in given["token_ids"]:
        found["token ids"] += model(torch.tensor([ids])).logits[:, 0].float().tolist()
json.dump(found, open(target, "w"))
assert "rewardlab" not in sys.modules
"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What columns are made from."""

    made: Made
    work: Path
    threads: int
    vllm_python: str | None
    server_url: str | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A way to the scores of all conversations."""

    name: str
    scores: Sequence[float] | None
    """None if it was not run."""
    reason: str = ""
    """Why it was not run."""
    reads_text: bool = False
    """Whether the engine tokenises whole texts, so that control tokens typed in a reply are obeyed."""
    facts: Mapping[str, Any] | None = None
    """Of the engine: its command, say."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What `rewardlab verify` said of an endpoint, by the canaries of the folder."""

    name: str
    right: bool | None
    """None if it was not run."""
    said: str
    """Its verdict, or why it was not run."""
    largest_distance: float | None = None
    forms: int = 0
    """Forms of a request whose scores were compared."""


Columns = Iterator[Column | Proof]


def not_run(names: Sequence[str], reason: object) -> Iterator[Column]:
    """Columns that could not run, with the reason."""
    for name in names:
        yield Column(name=name, scores=None, reason=_one_line(reason))


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:MAX_REASON]


def of_training(asked: Asked) -> Columns:
    """The evaluation that the run made of the model in its memory."""
    yield Column(name="training evaluation", scores=asked.made.evaluated)


def of_reload(asked: Asked) -> Columns:
    """`rewardlab.load`: the reference itself, once more, a conversation at a time and then all in another order."""
    scorer = load(asked.made.folder, precision=asked.made.precision)
    messages = [case.messages for case in asked.made.cases]
    yield Column(name="load, one at a time", scores=[scorer.score([one])[0] for one in messages])
    yield Column(name="load, in reverse order", scores=scorer.score(messages[::-1])[::-1])


def of_score_file(asked: Asked) -> Columns:
    """`rewardlab score`, in a process of its own."""
    yield from _scored(asked, "rewardlab score", ["--precision", asked.made.precision])


def of_score_by_server(asked: Asked, backend: str, url: str) -> Columns:
    """`rewardlab score` by a server."""
    more = ["--backend", backend, "--url", url]
    yield from _scored(asked, f"rewardlab score --backend {backend}", more)


def _scored(asked: Asked, name: str, more: Sequence[str]) -> Columns:
    made, source, target = asked.made, asked.work / "conversations.jsonl", asked.work / "scored.jsonl"
    write_score_data(source)
    command = ["score", "--model", str(made.folder), "--input", str(source), "--output", str(target), "--overwrite"]
    answer = _python(["-m", "rewardlab", *command, "--restart", *more])
    if answer.returncode:
        yield from not_run([name], answer.stderr)
        return
    rows: list[Any] = [row["scores"] for _, row in read_jsonl(target)]
    yield Column(name=name, scores=[rows[case.row][case.reply] for case in made.cases])


def proof(asked: Asked, url: str, engine: str, *more: str) -> Iterator[Proof]:
    """`rewardlab verify URL`, in a process of its own."""
    made, found = asked.made, asked.work / "verified.json"
    found.unlink(missing_ok=True)
    command = ["verify", url, "--model", str(made.folder), "--precision", made.precision, "--json", str(found)]
    answer = _python(["-m", "rewardlab", *command, *more])
    name = " ".join(["rewardlab verify URL", *more, "→", engine])
    if not found.is_file():
        yield Proof(name=name, right=None, said=_one_line(answer.stderr))
        return
    told = json.loads(found.read_text(encoding="utf-8"))
    # A way that is no fault of the endpoint, such as a function copied from a page, is told in the notes.
    forms = [one for one in told["forms"] if one["right"] and one["largest_distance"] is not None]
    yield Proof(
        name=name,
        right=told["right"] and answer.returncode == 0,
        said=_one_line(told["verdict"].removeprefix(f"{url}: ")),
        largest_distance=max((one["largest_distance"] for one in forms), default=None),
        forms=len(forms),
    )


def of_transformers(asked: Asked) -> Columns:
    """AutoModelForSequenceClassification in a process that knows nothing of rewardlab, from the folder alone."""
    made = asked.made
    source, target = asked.work / "given.json", asked.work / "transformers.json"
    given = {"messages": [case.messages for case in made.cases], "token_ids": made.token_ids}
    source.write_text(json.dumps(given), encoding="utf-8")
    arguments = [str(made.folder), made.dtype, str(asked.threads), str(PADDED_ROWS), str(source), str(target)]
    answer = _python(["-c", TRANSFORMERS_ALONE, *arguments])
    names = ("transformers, messages in padded batches", "transformers, token ids")
    if answer.returncode:
        yield from not_run(names, answer.stderr[-MAX_REASON:])
        return
    found = json.loads(target.read_text(encoding="utf-8"))
    yield Column(name=names[0], scores=found["messages"], reads_text=True)
    yield Column(name=names[1], scores=found["token ids"])


def of_trl(asked: Asked) -> Columns:
    """TRL's GRPOTrainer with the folder as its reward function."""
    made, name = asked.made, "TRL GRPOTrainer, reward_funcs=FOLDER"
    try:
        from harness.trl_rewards import trl_rewards

        groups = [[case.messages for case in own] for own in _rows_of(made)]
        found = trl_rewards(str(made.folder), groups, asked.work, half=made.precision == "bf16")
    except ImportError as error:
        yield from not_run([name], f"TRL is not installed ({error.name})")
        return
    yield Column(name=name, scores=found, reads_text=True)


def _rows_of(made: Made) -> list[list[Case]]:
    """The conversations of each prompt."""
    rows = sorted({case.row for case in made.cases})
    return [[case for case in made.cases if case.row == row] for row in rows]


def of_server(asked: Asked) -> Columns:
    """rewardlab's own server, in every form of a request, and its client."""
    made = asked.made
    forms = _our_forms(made)
    names = [f"rewardlab serve, {form}" for form in forms]
    with contextlib.ExitStack() as stack:
        url, facts = asked.server_url, None
        if url is None:
            log = asked.work / "serve.log"
            try:
                running = stack.enter_context(
                    engine_process.ours(str(made.folder), precision=made.precision, log=log, threads=asked.threads)
                )
            except EngineError as error:
                yield from not_run([*names, OUR_CLIENT, OUR_SCORER], error)
                return
            url, facts = running.url, {"command": running.command, "start_s": running.start_s}
        with Session(url, concurrency=BATCH) as session:
            for name, (path, bodies, read, counts, reads_text) in zip(names, forms.values(), strict=True):
                with _told() as told:
                    found = session.score(path, bodies, read, counts=counts)
                    yield Column(name=name, scores=found, reads_text=reads_text, facts=facts)
                yield from not_run([name] if told else [], told)
        yield from of_client(asked, url)
        yield from of_scorer(asked, url, name=f"{OUR_SCORER} → rewardlab serve")
        yield from of_score_by_server(asked, "http", url)
        yield from proof(asked, url, "rewardlab serve")


def _our_forms(made: Made) -> dict[str, tuple[str, list[Any], Any, list[int], bool]]:
    """Form -> (path, requests, reader, scores of each request, whether whole texts are tokenised)."""
    groups = _rows_of(made)
    of_rows = [
        {"prompt": case[0].messages[:-1], "replies": [one.messages[-1]["content"] for one in case]} for case in groups
    ]
    counts = [len(case) for case in groups]
    messages = [{"conversations": [case.messages]} for case in made.cases]
    ones = [1] * len(made.cases)
    token_ids = [{"token_ids": [list(ids)]} for ids in made.token_ids]
    # A prompt of one user turn may be given as a text; the others have no such form and are given as messages.
    texts = [
        {**row, "prompt": case[0].messages[0]["content"]} if len(ROWS[case[0].row].prompt) == 1 else row
        for row, case in zip(of_rows, groups, strict=True)
    ]
    sizes = [min(BATCH, len(ones) - start) for start in range(0, len(ones), BATCH)]
    rendered = input_bodies(made.texts, size=BATCH, model=None)
    ids = input_bodies([list(ids) for ids in made.token_ids], size=BATCH, model=None)
    return {
        "text and replies": ("/v1/score", texts, read_score, counts, False),
        "groups": ("/v1/score", [{"groups": of_rows}], read_score, [len(ones)], False),
        "messages": ("/v1/score", messages, read_score, ones, False),
        "token ids": ("/v1/score", token_ids, read_score, ones, False),
        "/classify, rendered texts": ("/classify", rendered, read_classify, sizes, True),
        "/classify, token ids": ("/classify", ids, read_classify, sizes, False),
        "/pooling, token ids": ("/pooling", ids, read_pooling, sizes, False),
    }


def of_client(asked: Asked, url: str, *, name: str = OUR_CLIENT, **settings: Any) -> Columns:
    """`rewardlab.client` against the server at `url`: conversations, and groups of replies."""
    made = asked.made
    names = [f"{name}, {form}" for form in ("messages", "groups")]
    try:
        from rewardlab.client import RewardClient
    except ImportError:
        yield from not_run(names, "this version of rewardlab has no client")
        return
    groups = _rows_of(made)
    with _told() as told, RewardClient(url, **settings) as client:
        yield Column(name=names[0], scores=client.score([case.messages for case in made.cases]))
        asking = [(case[0].messages[:-1], [one.messages[-1]["content"] for one in case]) for case in groups]
        yield Column(name=names[1], scores=[score for own in client.score_groups(asking) for score in own])
    yield from not_run(names if told else [], told)


def of_reinforcement(asked: Asked) -> Columns:
    """`rewardlab.rl`'s scorer of rollouts with the folder, in this process."""
    yield from of_scorer(asked, asked.made.folder, name=f"{OUR_SCORER} → folder")


def of_scorer(asked: Asked, source: str | Path, *, name: str, **settings: Any) -> Columns:
    """The scores that trainers in reinforcement learning get, all conversations as one step's rollouts."""
    made = asked.made
    with _told() as told, BlockingScorer(source, precision=made.precision, **settings) as scorer:
        yield Column(name=name, scores=scorer.score([case.messages for case in made.cases]))
    yield from not_run([name] if told else [], told)


def of_vllm(asked: Asked) -> Columns:
    """vLLM in its own environment and process, over HTTP, as docs/in-vllm.md starts it."""
    made = asked.made
    token_ids = [list(ids) for ids in made.token_ids]
    conversations = [case.messages for case in made.cases]
    counts = [min(BATCH, len(token_ids) - start) for start in range(0, len(token_ids), BATCH)]
    ways = {
        f"vLLM {path}, {form}": (path, bodies, read, each, reads_text)
        for path, read in (("/classify", read_classify), ("/pooling", read_pooling))
        for form, bodies, each, reads_text in (
            ("rendered texts", input_bodies(made.texts, size=BATCH), counts, True),
            ("token ids", input_bodies(token_ids, size=BATCH), counts, False),
            ("messages", message_bodies(conversations), [1] * len(conversations), True),
        )
    }
    with _vllm(asked, str(made.folder), "vllm", ()) as running:
        if not isinstance(running, Running):
            yield from not_run([*ways, VLLM_CLIENT, f"{OUR_SCORER} → vLLM", "rewardlab score --backend vllm"], running)
            return
        facts = {"command": running.command, "start_s": running.start_s}
        with Session(running.url, concurrency=BATCH) as session:
            for name, (path, bodies, read, each, reads_text) in ways.items():
                with _told() as told:
                    found = session.score(path, bodies, read, counts=each)
                    yield Column(name=name, scores=found, reads_text=reads_text, facts=facts)
                yield from not_run([name] if told else [], told)
        settings = {"artifact": made.folder, "engine": "vllm"}
        yield from of_client(asked, running.url, name=VLLM_CLIENT, **settings)
        yield from of_scorer(asked, running.url, name=f"{OUR_SCORER} → vLLM", client=settings)
        yield from of_score_by_server(asked, "vllm", running.url)
        yield from proof(asked, running.url, "vLLM")
        yield from proof(asked, running.url, "vLLM", "--as", "verl")


def of_vllm_adapter(asked: Asked) -> Columns:
    """vLLM with adapters, which bring the head: on the base model that was trained on, and as both are exported."""
    made, names = asked.made, ("vLLM --enable-lora, token ids", "vLLM on base/ of --adapter --with-base, token ids")
    if made.adapter is None:
        yield from not_run(names, "this model was trained with all its weights and has no adapter")
        return
    yield from _of_adapter(asked, names[0], made.base, made.adapter, ["--hf-overrides", '{"num_labels": 1}'])
    out = asked.work / "adapter"
    if not out.is_dir():
        rewardlab("export", str(made.folder), "--adapter", "--with-base", "--output-dir", str(out))
    yield from _of_adapter(asked, names[1], str(out / "base"), out, ())


def _of_adapter(asked: Asked, name: str, base: str, adapter: Path, more: Sequence[str]) -> Columns:
    """vLLM with an adapter on a base model."""
    rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    more = [
        *(*more, "--enable-lora", "--max-lora-rank", str(max(8, rank))),
        *("--lora-modules", f"adapter={adapter}"),
    ]
    bodies = input_bodies([list(ids) for ids in asked.made.token_ids], size=1, model="adapter")
    with _vllm(asked, base, f"vllm-lora-{Path(base).name}", more) as running:
        if not isinstance(running, Running):
            yield from not_run([name], running)
            return
        with Session(running.url, concurrency=BATCH) as session, _told() as told:
            found = session.score("/classify", bodies, read_classify, counts=[1] * len(bodies))
            yield Column(name=name, scores=found, facts={"command": running.command, "start_s": running.start_s})
        yield from not_run([name] if told else [], told)
        yield from proof(asked, running.url, name.partition(",")[0], "--served-name", "adapter")


@contextlib.contextmanager
def _vllm(asked: Asked, model: str, log: str, more: Sequence[str]) -> Iterator[Running | str]:
    """A running vLLM, or why there is none."""
    if asked.vllm_python is None:
        yield "no environment with vLLM was named (--vllm-python)"
        return
    length = max(map(len, asked.made.token_ids)) + 1
    with contextlib.ExitStack() as stack:
        try:
            running: Running | str = stack.enter_context(
                engine_process.vllm(
                    asked.vllm_python,
                    model,
                    dtype=asked.made.dtype,
                    max_length=max(length, 512),
                    log=asked.work / f"{log}.log",
                    threads=asked.threads,
                    more=more,
                )
            )
        except EngineError as error:
            running = str(error)
        yield running


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """Meanwhile an error of an engine is no end: it is put into the list."""
    told: list[str] = []
    try:
        yield told
    except (RewardlabError, OSError, KeyError, TypeError) as error:
        told.append(f"{type(error).__name__}: {error}")


def _python(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


KINDS: Final[Mapping[str, Callable[[Asked], Columns]]] = {
    "training": of_training,
    "reload": of_reload,
    "file": of_score_file,
    "transformers": of_transformers,
    "trl": of_trl,
    "rl": of_reinforcement,
    "server": of_server,
    "vllm": of_vllm,
    "vllm-adapter": of_vllm_adapter,
}
"""Name of a way -> its columns, in the order of the table."""
