"""Every command of the pages goes through the parser of its program; what is wrong is named by page and line.

The first study of docs/plans.md is run as it stands there: see test_plan_pages.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path

import pytest

import rewardlab
from helpers.page_commands import commands, spans
from pages import DOCS, PAGES, ROOT, module_at
from rewardlab import cli
from rewardlab.commands.parsing import EXAMPLES, PURPOSES, TOOL_PURPOSES, parse_command
from rewardlab.commands.training import parse_train
from rewardlab.flags import SHORTHANDS
from rewardlab.gold.rmood_flags import theirs, translated

COMMANDS = tuple(cli.commands())
SETTINGS_PAGE = module_at(DOCS / "site" / "settings.py")
READ = [*PAGES, "CHANGELOG.md", "benchmarks/README.md"]
FILES = {
    "trl.yaml": "model_name_or_path: m\ndataset_name: d\n",
    "runs/mine/config.json": '{"model": "m", "dataset": "d"}',
}
"""Files that lines read settings from; other files that a line names need not be there."""
PLACEHOLDER = "…"
"""Stands for a value, or at the end for more words: a value is read as text, and an end is cut off."""
OTHERS: Mapping[str, str] = {
    **dict.fromkeys(("vllm", "trl", "ray"), "programs of other projects, in environments of their own"),
    **dict.fromkeys(
        ("curl", "du", "echo", "grep", "mkdir", "printf", "rm", "export", "."), "of the shell or the system"
    ),
}
"""Programs whose words are not read -> why."""
OTHER_MODULES: Mapping[str, str] = {
    "sglang.launch_server": "an engine in an environment of its own",
    "openrlhf.cli.serve_rm": "of OpenRLHF",
    "openrlhf.cli.train_ppo_ray": "of OpenRLHF",
    "verl.trainer.main_ppo": "of verl",
    "venv": "of Python",
    "train.py": "of slime",
}
"""What `python` is given besides programs of this repository -> whose it is."""
RUN_ELSEWHERE: Mapping[str, str] = {
    "examples/first_study/make_files.py": "takes a folder alone; test_plan_pages.py runs it",
    "examples/plans/tiny_data.py": "takes a folder alone",
}
"""Programs without a parser -> what shows that they run."""


class Parsed(Exception):
    """The parser of a program took its words."""


# --- what becomes of the words of a program --------------------------------------------------------------------


def read_rewardlab(words: Sequence[str]) -> None:
    """Parse what is given to `rewardlab`, without running it."""
    cut = list(words[:-1]) if words and words[-1] == PLACEHOLDER and len(words) > 2 else list(words)
    command, *rest = cut
    assert command in COMMANDS, f"there is no command {command}"
    if command in TOOL_PURPOSES:
        assert {*rest[:1]} & {*TOOL_PURPOSES[command]}, f"there is no {command} {' '.join(rest[:1])}"
        command, rest = f"{command} {rest[0]}", rest[1:]
    if command == "gold train":
        # It names a folder that `gold build` wrote, in place of the data.
        parse_train(["--dataset" if word == "--data" else word for word in rest])
    elif command == "train":
        parse_train(rest)
    else:
        rest = translated(rest, command.removeprefix("gold "), say=print) if command.startswith("gold") else rest
        parse_command(SETTINGS_PAGE.COMMANDS[command], rest, command)


def read_python(words: Sequence[str]) -> None:
    """Parse what is given to `python`: a module that is rewardlab, or a program of the repository."""
    if words[0] == "-m":
        words = words[1:]
        if words[0] == "rewardlab":
            return read_rewardlab(words[1:])
    if words[0] in OTHER_MODULES:
        return None
    path = ROOT / words[0]
    assert path.is_file(), f"there is no {words[0]}"
    if words[0] in RUN_ELSEWHERE:
        return None
    return read_example(path, words[1:])


def read_example(path: Path, words: Sequence[str]) -> None:
    """Hand words to the parser of a program, which goes no further."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Parsed):
            module_at(path).main(list(words))


def read_script(words: Sequence[str]) -> None:
    """Check a script of the repository, and what it is given: a benchmark with flags that it has, or a known word."""
    path = ROOT / words[0]
    assert os.access(path, os.X_OK), f"{words[0]} cannot be run"
    if path.name != "bench" or len(words) == 1:
        text = path.read_text(encoding="utf-8")
        assert all(re.search(rf"\b{re.escape(word)}\b", text) for word in words[1:]), "a word that it does not know"
        return
    name, *rest = words[1:]
    program = ROOT / "benchmarks" / f"{name}.py"
    assert program.is_file(), f"there is no benchmark {name}"
    known = set(re.findall(r'"(--[\w-]+)"', program.read_text(encoding="utf-8")))
    assert [word for word in rest if word.startswith("--") and word not in known] == []


def read_pip(words: Sequence[str]) -> None:
    """Check the extras of rewardlab that are installed; other packages are their own matter."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words:
        if found := re.match(r"(?:rewardlab|\.)\[([\w,-]+)\]", word):
            assert [one for one in found[1].split(",") if one not in extras] == []


def read_sbatch(words: Sequence[str]) -> None:
    """Read what a job script of the examples hands on; its own flags begin the line."""
    at = next(number for number, word in enumerate(words) if word.endswith((".sbatch", ".slurm")))
    script = ROOT / words[at]
    assert script.is_file(), f"there is no {words[at]}"
    read_rewardlab(["gold" if script.stem == "gold" else "train", *words[at + 1 :]])


def read_make(words: Sequence[str]) -> None:
    """Check targets."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [word for word in words if not re.search(rf"^{word}:", makefile, re.MULTILINE)] == []


def read_torchrun(words: Sequence[str]) -> None:
    """Read what several processes do alike."""
    read_python(words[words.index("-m") :])


PROGRAMS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "rewardlab": read_rewardlab,
    "python": read_python,
    "python3": read_python,
    "python3.11": read_python,
    "torchrun": read_torchrun,
    "pip": read_pip,
    "make": read_make,
    "sbatch": read_sbatch,
}


def read(words: Sequence[str]) -> None:
    """Read one command; raises or exits if its program would refuse it."""
    program = words[0]
    if program in OTHERS:
        return
    if program.startswith("scripts/"):
        read_script(words)
        return
    name = program.rpartition("/")[2]
    assert name in PROGRAMS, f"{name} is no program that pages may use without saying why (OTHERS)"
    PROGRAMS[name](words[1:])


def wrong(page: str, read_one: Callable[[Sequence[str]], None] = read, name: str = "page") -> list[str]:
    """What is wrong with the commands of a page, each as `page:line: command: cause`."""
    found = []
    for command in commands(page):
        try:
            read_one(command.words)
        except (rewardlab.RewardlabError, AssertionError, SystemExit, pytest.fail.Exception) as error:
            text = " ".join(command.words)
            found.append(f"{name}:{command.line}: {text[:100]}: {error}")
    return found


@pytest.fixture
def _files(tmp_path: Path) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    with chdir(tmp_path):
        yield


@pytest.mark.usefixtures("_files")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", READ)
def test_every_command_of_a_page_is_one_that_its_program_takes(page: str) -> None:
    assert wrong((ROOT / page).read_text(encoding="utf-8"), name=page) == []


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_example_of_a_help_is_a_command(command: str) -> None:
    read_rewardlab(shlex.split(f"{command} {EXAMPLES[command]}"))
    assert len(f"Example: rewardlab {command} {EXAMPLES[command]}") <= 100


def test_every_command_that_people_give_has_an_example() -> None:
    tools = {f"{group} {tool}" for group, purposes in TOOL_PURPOSES.items() for tool in purposes}
    assert {*EXAMPLES} == ({*PURPOSES} - {*TOOL_PURPOSES} | tools) - {"plan task"}


def test_the_pages_have_many_commands_of_every_kind() -> None:
    """So that a change of how blocks are found cannot let the test above pass with nothing read."""
    found = [one.words[0].rpartition("/")[2] for page in READ for one in commands((ROOT / page).read_text("utf-8"))]
    assert found.count("rewardlab") > 100
    assert {*PROGRAMS} - {*found} <= {"python3"}
    assert {*OTHERS} - {*found} == set(), "no page uses it any more"


def known_flags(command: str) -> set[str]:
    """The flags of one command, by all their names."""
    settings = list(SETTINGS_PAGE.settings_of(SETTINGS_PAGE.COMMANDS.get(command, SETTINGS_PAGE.COMMANDS["train"])))
    stage = command.removeprefix("gold ")
    earlier = {f"--{name}" for name in theirs(stage)}
    flags = {one.flag for one in settings}
    switches = {f"--no-{one.flag[2:]}" for one in settings if isinstance(one.default, bool)}
    own = {"--data"} if command == "gold train" else set()
    return flags | switches | earlier | own | {*SHORTHANDS, "--config", "--help"}


def wrong_spans(page: str, name: str = "page") -> list[str]:
    """What is wrong with the `rewardlab …` in the prose of a page: no such command, or a flag of another one."""
    found = []
    for line, text in spans(page):
        _, command, *words = text.split()
        if command in (*TOOL_PURPOSES, "COMMAND") and words[:1] and re.fullmatch(r"[a-z]+", words[0]):
            command = f"{command} {words[0]}"
        first, _, tool = command.partition(" ")
        if command == "COMMAND" or "|" in text:
            continue  # a word for all commands, or for several tools
        if first not in COMMANDS or (tool and tool not in TOOL_PURPOSES.get(first, ())):
            found.append(f"{name}:{line}: `{text}`: there is no rewardlab {command}")
        elif other := sorted(set(re.findall(r"(?<!\S)--[a-z][\w-]*", text)) - known_flags(command)):
            found.append(f"{name}:{line}: `{text}`: rewardlab {command} has no {', '.join(other)}")
    return found


@pytest.mark.parametrize("page", READ)
def test_every_command_named_in_prose_exists_with_these_flags(page: str) -> None:
    assert wrong_spans((ROOT / page).read_text(encoding="utf-8"), page) == []


# --- that something wrong would be noticed ---------------------------------------------------------------------


BAD = """\
text
```bash
rewardlab train --model m --dataset d \\
    --no-such-flag 3 | grep loss
rewardlab plan freez plan.yaml; scripts/bench one_score --nosuch
A="--model m"
OMP_NUM_THREADS=1 rewardlab train $A --lr fast
pip install "rewardlab[nosuch]" && make nosuch
python examples/best_of_n.py runs/mine/best --nosuch
python examples/nosuch.py
nosuch --flag
rewardlab report runs/mine > page.txt  # right
```

```text
$ rewardlab nosuch
it printed this
```
"""


@pytest.mark.usefixtures("_files")
def test_a_command_that_would_be_refused_is_told_by_page_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [int(one.split(":")[1]) for one in wrong(BAD)]
    assert lines == [3, 5, 5, 7, 8, 8, 9, 10, 11, 16]
    assert "nosuch" in capsys.readouterr().err


def test_a_name_in_prose_that_does_not_exist_is_told_by_line() -> None:
    page = (
        "a `rewardlab plan\nfreeze --reason WHY` and `rewardlab plan amend --reason WHY`\n"
        "```bash\nx\n```\n`rewardlab no`"
    )
    assert [one.split(":")[1] for one in wrong_spans(page)] == ["1", "6"]


def test_commands_are_found_in_every_form() -> None:
    page = (
        '```bash\nA="--lora \\\n  --lr 1"\nX=1 bin/rewardlab train $A --seed 3  # note\n'
        '\n# x\na "b\nc" > d && e f | g\n```\n'
    )
    assert [(one.line, *one.words) for one in commands(page)] == [
        (4, "bin/rewardlab", "train", "--lora", "--lr", "1", "--seed", "3"),
        (7, "a", "b\nc"),
        (7, "e", "f"),
        (7, "g"),
    ]
