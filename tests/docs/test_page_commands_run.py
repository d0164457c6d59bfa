"""The commands of the README are run one after the other, with a tiny model, and those of the pages on what they left.

What a page would need besides (data of others, a GPU, hours, a trainer of another project) is named with its reason;
test_page_commands.py reads the words of all commands.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.page_commands import Command, commands
from pages import PAGES, ROOT, module_at
from rewardlab.cli import main
from rewardlab.commands.parsing import TOOL_PURPOSES
from rewardlab.data.synthetic import generate, reply_texts

SHIPPED, MODEL = "smollm2-135m-instruct", "tiny-model"
TRL = f"""\
model_name_or_path: {MODEL}
dataset_name: pairs.jsonl
use_peft: true
lora_r: 4
per_device_train_batch_size: 16
report_to: none
"""
LONGER = ("--lr", "5e-3", "--steps", "40", "--eval-fraction", "0.3")
"""Added to what trains, so that a model of random weights gets better than it was, and there is a best/."""
PAIRS = 240
NOT_ON_README: Mapping[str, str] = {
    "rl audit": "runs/grpo is a run of TRL's; tests/rl audit such runs",
    "gold run": "plan.yaml is a plan of one's own; tests/gold/test_gold_run.py runs one from sampling to check",
}
"""Commands of the README that are not run here -> why."""
NOT_ON_PAGES: Mapping[str, str] = {
    **dict.fromkeys(
        ("train", "diagnose", "probe", "data mislabels"), "the README's chain and other tests train; pages for longer"
    ),
    **dict.fromkeys(("serve", "watch", "push"), "stay until they are stopped, or talk to the hub; run by their tests"),
    "plan": "test_plan_pages.py and tests/experiments/test_plans_shipped_runs.py run them",
    **dict.fromkeys(("gold", "rl"), "their files are of stages that tests/gold and tests/rl run"),
    **dict.fromkeys(("data mix", "data split", "data convert"), "write what later lines read; tests/curation run them"),
    **dict.fromkeys(
        ("calibrate", "import", "ensemble"), "need other models; tests/evaluation and tests/serve run them"
    ),
    "quickstart": "make quickstart is its test",
}
"""Commands of other pages that are not run here, or all tools of one -> why."""
RUN_ON_PAGES = (
    "data inspect",
    "data audit",
    "data show",
    "export",
    "card",
    "score",
    "report",
    "eval",
    "compare",
    "verify",
)
FILES = (".jsonl", ".json", ".yaml", ".csv", ".parquet", ".html", ".gz", ".toml", ".txt", ".md")


def name_of(words: Sequence[str]) -> str:
    """The command, with its tool."""
    return " ".join(words[1:3]) if words[1] in TOOL_PURPOSES else words[1]


def ready(command: Command, folder: Path) -> bool:
    """Whether every file and folder that a command reads is there."""
    words = command.words
    if "…" in words or any(word.isupper() for word in words):
        return False
    if {"--suite", "--output-as", "--calibrated"} & {*words}:  # data of others; a calibration, which is not stored here
        return False
    for before, word in pairwise(words[1:]):
        written = before.startswith(("--output", "--html", "--csv", "--json"))
        named = "/" in word or word.endswith(FILES) or before in ("--input", "--dataset", "--model", name_of(words))
        if named and not written and not word.startswith("-") and not (folder / word).exists() and word != SHIPPED:
            return False
    return True


def run(words: Sequence[str]) -> None:
    """Run a command here; the exit status of a comparison or a check is its finding."""
    status: object = 0
    try:
        main([MODEL if word == SHIPPED else word for word in words[1:]])
    except SystemExit as ended:
        status = ended.code
    assert status in (0, 1, None), f"{' '.join(words)}: exit status {status}"


def clear(output: Path) -> None:
    """Remove what a command wrote, with the files beside it that have its name (`cleaned.removed.jsonl`)."""
    for path in (output, *output.parent.glob(f"{output.stem}.*")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def served(words: Sequence[str]) -> Iterator[str]:
    """The address of a server while it runs as a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    program = [sys.executable, "-m", *words, "--port", str(port)]
    with subprocess.Popen(program, env=environment) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, "the server ended"
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                        break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the README's commands begin from."""
    folder = tmp_path_factory.mktemp("readme")
    for name, topics in (("pairs", "train"), ("other-pairs", "test")):
        rows = []
        for pair in generate(PAIRS, seed=0, topics=topics):
            chosen, rejected = reply_texts(pair)
            rows.append({"prompt": pair.preference.prompt[0].content, "chosen": chosen, "rejected": rejected})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    replies = [{"prompt": row["prompt"], "responses": [row["chosen"], row["rejected"]]} for row in rows[:8]]
    (folder / "replies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in replies), encoding="utf-8")
    (folder / "trl.yaml").write_text(TRL, encoding="utf-8")
    text = (folder / "pairs.jsonl").read_text(encoding="utf-8")
    module_at(ROOT / "examples" / "first_study" / "make_files.py").write_model(folder / MODEL, text)
    return folder


def readme_commands() -> list[Command]:
    return [one for one in commands((ROOT / "README.md").read_text("utf-8")) if one.words[0] == "rewardlab"]


def page_commands() -> list[tuple[str, Command]]:
    return [
        (page, one)
        for page in PAGES
        for one in commands((ROOT / page).read_text("utf-8"))
        if one.words[0] == "rewardlab" and page != "README.md" and len(one.words) > 1
    ]


def test_every_command_of_a_page_is_run_here_or_has_a_reason_why_not() -> None:
    known = {*RUN_ON_PAGES, *NOT_ON_PAGES}
    names = {name_of(command.words) for _, command in page_commands()}
    assert {name for name in names if name not in known and name.split()[0] not in known} == set()
    assert {*NOT_ON_README} <= {name_of(command.words) for command in readme_commands()}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_commands_of_the_readme_run_and_those_of_pages_on_what_they_left(place: Path, tmp_path: Path) -> None:
    """A quarter of an hour on an idle machine, most of it for the controls of `diagnose`."""
    with chdir(place):
        for command in readme_commands():
            words, name = list(command.words), name_of(command.words)
            if name in NOT_ON_README:
                continue
            if name == "serve":
                with served(words) as address:
                    run(["rewardlab", "verify", address, "--model", "runs/mine/best"])
                continue
            if name == "train" and Path("runs/mine").exists():
                words[words.index("runs/mine")] = "runs/other"  # the README shows two ways to the same folder
            run([*words, *LONGER] if name == "train" else words)
    done = []
    for number, (page, command) in enumerate(page_commands()):
        if name_of(command.words) not in RUN_ON_PAGES or not ready(command, place):
            continue
        copy = tmp_path / str(number)
        shutil.copytree(place, copy)
        for before, word in pairwise(command.words):
            if before in ("--output", "--output-dir"):  # the README's command may have written it already
                clear(copy / word)
        with chdir(copy):
            run(command.words)
        shutil.rmtree(copy)
        done.append(f"{page}:{command.line}")
    assert len(done) >= 15, done
