"""Commands of pages made ready to be run: tiny, on what lies there, and with servers beside them."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from page_places import KINDS, MODEL, SHIPPED
from page_servers import ADDRESS, TOKEN, backend_of, cluster, language_model, rewardlab_server, vllm_server
from pages import ROOT
from rewardlab.cli import main
from rewardlab.commands.parsing import TOOL_PURPOSES

PLACEHOLDERS: Mapping[str, str] = {
    "MODEL": MODEL,
    SHIPPED: MODEL,
    "Qwen/Qwen3-0.6B": MODEL,
    f"model={SHIPPED}-3-layers": f"model={MODEL}-1-layers",
}
"""Word of a page -> what is given in its place."""
FILLED: Mapping[str, str] = {"--model": MODEL, "--dataset": "pairs.jsonl"}
"""Flag -> what is given in place of its `…`."""
WRITES = ("--output", "--output-dir", "--html", "--json", "--csv", "--target-path")
"""Flags of files and folders that a command writes."""
READS: Mapping[str, str] = {
    "--dataset": "preferences",
    "--test-dataset": "preferences",
    "--config": "trl_config",
    "--model": "a model",
    "--model-name": "a model",
    "--models": "a model",
    "--ensemble": "calibrated_model",
    "--gold": "reward_model",
    "--resume": "run_folder",
    "--train-config": "few_steps",
    "--suite-data": "suite",
    "--prompts": "prompts",
    "--proxies": "proxy",
    "--train-input": "labels",
    "--samples": "samples",
    "--labels": "labels",
    "--pairs": "gold_pairs",
    "--data": "gold_pairs",
    "--folder": "gold_stages",
    "--ood": "labels",
    "--prompts-path": "one_fact",
    "--responses-path": "one_fact",
    "--rewards-path": "one_fact",
    "--data-path": "one_fact",
    "--heldout": "held_out",
    "--allow-swap-from": "some_folder",
    "--chat-template": "a template",
    "gold sample --prompts": "prompts",
    "score --input": "conversations",
    "gold label --input": "samples",
    "gold build --input": "labels",
    "gold match --input": "labels",
    "gold curve --input": "labels",
    "gold curve --ensemble": "",
    "rl audit": "rollouts",
    "gold run": "gold_plan",
    "compare": "evaluation",
    "report": "run_folder",
    "watch": "run_folder",
    "import": "foreign_model",
    "import --base": "",
    "plan --set": "set",
    "examples/best_of_n.py": "a model",
    "examples/best_of_n.py --file": "labels",
    "examples/rejection_sampling.py": "by its name",
    "examples/first_study/make_files.py": "",
    **dict.fromkeys(("plan check", "plan freeze"), "plan"),
    **dict.fromkeys(("plan run", "plan report", "plan submit", "plan status", "plan amend"), "study"),
    **dict.fromkeys(("eval", "calibrate", "verify", "export", "average", "serve", "push", "card"), "a model"),
    **dict.fromkeys((f"data {tool}" for tool in TOOL_PURPOSES["data"]), "preferences"),
}
"""What a command is given first, or a flag, alone or of one command -> the kind of what it names; `` for names."""
VALUES = ("--row", "--max-shard-size", "--repo", "--fractions", "--fail-on", "--map-label", "--reason", "--redo")
"""Flags whose values look like paths and are none."""
PATH = re.compile(r"/|\.(jsonl|json|yaml|csv|parquet|html|gz|zst|toml|txt|md|jinja)$")
IF_PATH: Mapping[str, str] = {"set": "preferences", "a template": "chat_template"}
"""What may be a path or a word -> the kind of the path."""


NEW_STUDY = {"amend", "--past-gate"}
"""Words of commands that need another study than those before them: one with a closed gate, and nothing done."""


class Small(NamedTuple):
    """How a command is made small."""

    more: tuple[str, ...] = ()
    """Flags with a value that are given besides, or in place of others."""
    findings: tuple[int, ...] = ()
    """Exit statuses besides 0 that tell what was found, and no error."""


IF_THERE: Mapping[str, str] = {
    "--layers": "1 last",
    "--freeze-layers": "1",
    "--limit": "60",
    "--eval-limit": "40",
    "--train-eval-limit": "20",
    "--warmup-steps": "1",
    "--eval-every": "2",
    "--plant-seeds": "2",
    "--max-seq-len": "512",
    "--max-tokens": "16",
    "--most": "2",
    "--num-responses": "2",
    "--concurrency": "4",
    "--ray-workers": "1",
    "--early-stopping-patience": "2",
}
"""Flag -> its value here, wherever a page gives it another one."""
SMALL: Mapping[str, Small] = {
    "train": Small(("--steps", "4", "--batch-size", "8", "--no-baselines")),
    "probe": Small(("--limit", "60")),
    "diagnose": Small(findings=(1,)),
    "eval": Small(),
    "calibrate": Small(),
    "compare": Small(),
    "report": Small(),
    "watch": Small(),
    "import": Small(),
    "card": Small(),
    "push": Small(),
    "score": Small(),
    "serve": Small(),
    "verify": Small(),
    "export": Small(),
    "average": Small(),
    "data inspect": Small(),
    "data audit": Small(findings=(1,)),
    "data mislabels": Small(),
    "data convert": Small(),
    "data split": Small(),
    "data mix": Small(),
    "data show": Small(),
    "gold sample": Small(("--max-tokens", "16")),
    "gold label": Small(),
    "gold build": Small(("--test-fraction", "0.5")),
    "gold train": Small(("--steps", "4", "--batch-size", "8", "--no-baselines")),
    "gold match": Small(findings=(1,)),
    "gold curve": Small(),
    "gold check": Small(findings=(1,)),
    "gold run": Small(findings=(1,)),
    "rl audit": Small(findings=(1,)),
    "benchmarks/cut_model.py": Small(("--layers", "1")),
    "examples/best_of_n.py": Small(),
    "examples/first_study/make_files.py": Small(),
    "examples/rejection_sampling.py": Small(),
    "plan check": Small(findings=(1,)),
    "plan freeze": Small(),
    "plan amend": Small(),
    "plan run": Small(findings=(1, 2)),
    "plan report": Small(findings=(1, 2)),
    "plan submit": Small(),
    "plan status": Small(findings=(1, 2)),
}
"""Command -> how it is made small; every command of a page is here."""


class Read(NamedTuple):
    """A file or folder that a command reads."""

    path: str
    kind: str


def name_of(words: Sequence[str]) -> str:
    """The command, with its tool; of a program of the repository, its path."""
    return " ".join(words[1:3]) if words[1] in TOOL_PURPOSES else words[1]


def kind_of(name: str, flag: str, path: str) -> str | None:
    """What a command expects at a path, empty for a name that is no path; None where nothing says it."""
    places = (f"{name} {flag}".strip(), f"{name.split()[0]} {flag}".strip(), flag)
    kind = next((READS[place] for place in places if place in READS), None)
    last = path.rpartition("/")[2]
    if kind == "by its name":
        return {"samples.jsonl": "labels", "sft.jsonl": ""}.get(path, "reward_model")
    if kind in IF_PATH:
        return IF_PATH[kind] if PATH.search(path) else ""
    if kind == "prompts" and not PATH.search(path):
        return "preferences"
    if kind == "run_folder" and flag == "--resume" and path == "auto":
        return ""
    if kind == "foreign_model" and last == "adapters":
        return "foreign_adapters"
    if kind == "run_folder" and last == "judged":
        return "evaluation"
    if kind != "a model":
        return kind
    if path.startswith("evals/"):
        return "evaluation"
    if last == "best" or path == "gold-folder":
        return "reward_model"
    return "run_folder" if path.startswith("runs/") else "model"


def walked(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, word) of what a command is given; the flag is empty for what comes first, and the word for a switch."""
    flag = ""
    rest = words[3:] if words[1] in TOOL_PURPOSES else words[2:]
    for word in rest:
        if word.startswith("--"):
            flag = "--" + word[2:].replace("_", "-")
            yield flag, ""
        else:
            yield flag, word


def bare(word: str) -> str:
    """The path in `name=path` and in `path:weight`."""
    return re.sub(r":[\d.]+$", "", word.rpartition("=")[2])


def reads_of(words: Sequence[str]) -> list[Read]:
    """What a command reads, in order; raises AssertionError for a word that looks like a path nobody knows."""
    name = name_of(words)
    found = []
    for flag, word in walked(words):
        if not word or flag in WRITES or ADDRESS.match(word):
            continue
        path = bare(word) if PATH.search(bare(word)) else word
        kind = kind_of(name, flag, path)
        if kind is None:
            assert flag in VALUES or not PATH.search(word), f"{flag} {word}: is it read or written? (READS, WRITES)"
            continue
        is_placeholder = "…" in path or path.isupper()
        assert not is_placeholder, f"{flag} {word}: a placeholder (PLACEHOLDERS, FILLED)"
        if kind:
            found.append(Read(path, kind))
    return found


def writes_of(words: Sequence[str]) -> list[str]:
    """What a command writes, as far as flags say it."""
    return [word for flag, word in walked(words) if word and flag in WRITES]


def suites_of(words: Sequence[str]) -> list[str]:
    """The public suites that a command names."""
    return [word for flag, word in walked(words) if word and flag in ("--suite", "--against")]


def groups_of(words: Sequence[str]) -> list[list[str]]:
    """Flags with their values; what stands before the first flag comes first, alone."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def made_small(words: Sequence[str]) -> list[str]:
    """The words of a command with what makes it small and placeholders filled; raises AssertionError for a new one."""
    name = name_of(words)
    assert name in SMALL, f"{name}: nothing says how it is made small (SMALL)"
    num_own = len(name.split()) + 1
    first, *groups = groups_of(words[num_own:])
    more = {one[0]: one for one in groups_of(SMALL[name].more)[1:]}
    instead = {flag: [flag, *text.split()] for flag, text in IF_THERE.items()} | more
    given = {flag for flag, *_ in groups}
    groups = [instead.get(group[0], group) for group in groups] + [more[flag] for flag in more if flag not in given]
    if "--suite" in given and "--suite-data" not in given:
        groups.append(["--suite-data", "suites-of-the-hub"])
    left_out = {"--compile", *(("--steps",) if "--epochs" in given else ())}
    found = [*words[:num_own], *first]
    for flag, *values in groups:
        if flag not in left_out:
            found += [flag, *(FILLED.get(flag, value) if value == "…" else value for value in values)]
    return [PLACEHOLDERS.get(word, word) for word in found]


# --- running --------------------------------------------------------------------------------------------------------


def furnish(words: Sequence[str], store: Path) -> None:
    """Put what a command reads where it is not, and take away what it will write; the tiny model is always there."""
    if not Path(MODEL).exists():
        KINDS["model"](Path(MODEL), store)
    reads = reads_of(words)
    if NEW_STUDY & {*words}:
        shutil.rmtree(reads[0].path, ignore_errors=True)
    for one in reads:
        path = Path(one.path)
        if path.exists() or any(path.parent.glob(f"{path.name}.train.*")):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        more = suites_of(words) if one.kind == "suite" else ()
        KINDS[one.kind](path.absolute(), store, *more)
    if "amend" in words:
        plan = Path(reads[0].path) / "plan.yaml"
        plan.write_text(plan.read_text(encoding="utf-8").replace("seeds: 1", "seeds: 2"), encoding="utf-8")
    if "--resume" not in words:
        for written in writes_of(words):
            clear(Path(written), keep=[Path(one.path) for one in reads])


def clear(output: Path, *, keep: Sequence[Path]) -> None:
    """Remove what a command wrote, with the files beside it that have its name (`cleaned.removed.jsonl`)."""
    for path in (output, *output.parent.glob(f"{output.stem}.*")) if output.name else ():
        if path in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def addressed(words: Sequence[str], store: Path) -> Iterator[list[str]]:
    """The words with addresses of servers that run, in place of those on the page."""
    name = name_of(words)
    with ExitStack() as stack:

        def address(_: re.Match[str]) -> str:
            if name in ("gold sample", "gold run") or backend_of(words) == "chat":
                return stack.enter_context(language_model(judges=name == "gold label"))
            folders = [Path(one.path) for one in reads_of(words) if one.kind == "reward_model"]
            server = vllm_server if backend_of(words) == "vllm" else rewardlab_server
            return stack.enter_context(server(folders[0] if folders else store / "run/best"))

        if name == "gold run":
            path = Path(words[3])
            path.write_text(ADDRESS.sub(address, path.read_text(encoding="utf-8")), encoding="utf-8")
        if name in ("plan submit", "plan status"):
            stack.enter_context(cluster(Path.cwd() / f"slurm-{name[5:]}-{len(words)}"))
        yield [ADDRESS.sub(address, word) for word in words]


def run_here(words: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process: (exit status, what it said)."""
    said = io.StringIO()
    status: object = 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(list(words[1:]))
        except SystemExit as ended:
            status = ended.code or 0
    return (status if isinstance(status, int) else 1), said.getvalue()


def run_program(words: Sequence[str]) -> tuple[int, str]:
    """Run a program of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    program = [sys.executable, str(ROOT / words[1]), *words[2:]]
    answer = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout + answer.stderr


def run_until_it_answers(words: Sequence[str]) -> tuple[int, str]:
    """Run a command that stays, ask it once it answers, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ADMIN_TOKEN": TOKEN}
    path = "/ready" if words[1] == "serve" else "/"
    rest = [word for word in words[1:] if word not in ("--port", "8080")]
    program = [sys.executable, "-m", "rewardlab", *rest, "--port", str(port)]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        answered = False
        try:
            for _ in range(600):
                if process.poll() is not None:
                    break
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                        answered = True
                        break
                except OSError:
                    time.sleep(0.2)
        finally:
            process.terminate()
        assert process.stdout is not None
        said = process.stdout.read().decode()
    return (0 if answered else process.returncode or 1), said


def runner_of(words: Sequence[str]) -> Callable[[Sequence[str]], tuple[int, str]]:
    """How a command is run."""
    if words[0] != "rewardlab":
        return run_program
    stays = name_of(words) == "serve" or (name_of(words) == "watch" and "--port" in words)
    return run_until_it_answers if stays else run_here


def run(words: Sequence[str], store: Path) -> str | None:
    """Run a command of a page in this folder, and return what is wrong, if anything is."""
    words = [re.sub(r"^/data/", f"{Path.cwd()}/data/", word) for word in made_small(words)]
    with redirect_stdout(io.StringIO()):
        furnish(words, store)
    with addressed(words, store) as ready:
        status, said = runner_of(ready)(ready)
    is_finding = status in SMALL[name_of(words)].findings and not re.search("^error: ", said, re.MULTILINE)
    if status == 0 or is_finding:
        return None
    return f"{' '.join(ready)}: exit status {status}\n    " + "\n    ".join(said.strip().splitlines()[-8:])
