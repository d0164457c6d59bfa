"""Every command of the README and the pages is run on what lies there or is made for it, or has a reason why not.

Each page is run from its first command to its last in one folder, so that what one command writes the next ones read.
Models are of two layers, runs of a few steps. test_page_commands.py reads the words of all commands, also of programs
that are not rewardlab's.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from helpers.page_commands import Command, commands
from page_places import KINDS, make_store
from page_runs import SMALL, made_small, name_of, reads_of, run, suites_of
from page_servers import TOKEN
from pages import PAGES, ROOT
from rewardlab.artifact import calibrated
from rewardlab.commands.training import train
from rewardlab.experiments import running
from rewardlab.experiments.local import run_all
from rewardlab.experiments.one_run import do
from rewardlab.experiments.plan import Run
from rewardlab.experiments.study import Study
from rewardlab.probing import run as probing
from rewardlab.serve.folders import export, import_model
from rewardlab.training import run as training
from suite_folders import WRITERS
from telling import tell

OTHERS: Mapping[str, str] = {
    **dict.fromkeys(("vllm", "trl", "ray", "python3", "ENV/bin/pip"), "a program of another project"),
    **dict.fromkeys(("curl", "du", "grep", "rm", "mkdir", "printf", "echo", "export", "."), "of the shell"),
    **dict.fromkeys(("pip", "make", "python3.11", "scripts/setup", "scripts/docs"), "sets up, builds or tests all"),
    "scripts/bench": "a benchmark, of hours; tests/benchmarks test them",
    "sbatch": "needs a cluster: test_slurm_examples.py and test_gold_slurm.py run these scripts under a stand-in",
    "torchrun": "needs eight GPUs; tests/distributed run several processes",
    "python -m": "a program of another project",
}
"""Program that is only looked at by test_page_commands.py -> why."""
EXCEPTED: Mapping[str, str] = {
    "rewardlab push runs/mine/best --repo me/my-reward-model": "uploads to the hub",
    "python examples/grpo_with_reward_model.py --smoke": "trains by TRL; tests/test_examples.py runs it",
    "python examples/grpo_with_reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --data pairs.jsonl --policy "
    "Qwen/Qwen2.5-0.5B-Instruct --prompts prompts.jsonl --gold runs/gold/best": "the same with models of the hub",
}
"""Command that is only read by test_page_commands.py -> why."""


def reason(command: Command) -> str | None:
    """Why a command is not run here; None for one that is."""
    words = command.words
    program = "python -m" if words[:2] == ("python", "-m") else words[0]
    return OTHERS.get(program, EXCEPTED.get(" ".join(words)))


def page_commands(page: str) -> list[Command]:
    """The commands of a page."""
    return commands((ROOT / page).read_text("utf-8"))


WITH_COMMANDS = [page for page in PAGES if page_commands(page)]
ALL = [command for page in WITH_COMMANDS for command in page_commands(page)]
WITH_RUNS = [page for page in WITH_COMMANDS if not all(map(reason, page_commands(page)))]


def done_here(study: Study, runs: Sequence[Run], *, say: Callable[[str], None], **how: Any) -> list[Run]:
    """`run_all`, in this process but for runs that are to have a GPU each."""
    if how.get("gpus"):
        return run_all(study, runs, say=say, **how)
    for one in runs:
        do(study, one, train)
    return []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is copied into the folders of pages."""
    folder = tmp_path_factory.mktemp("store")
    make_store(folder)
    return folder


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_of_a_page_can_be_run_here_or_has_a_reason_why_not(page: str) -> None:
    wrong = []
    for command in page_commands(page):
        if reason(command) is None:
            try:
                words = made_small(command.words)
                assert {one.kind for one in reads_of(words)} <= {*KINDS}
                assert {*suites_of(words)} <= {*WRITERS}, "a suite of which no folder can be made"
            except AssertionError as error:
                wrong.append(f"{page}:{command.line}: {error}")
    assert wrong == []


def test_nothing_is_excepted_or_made_small_that_no_page_has() -> None:
    run_here = [command for command in ALL if reason(command) is None]
    assert {*EXCEPTED} <= {" ".join(command.words) for command in ALL}
    assert {*OTHERS} <= {name for command in ALL for name in (command.words[0], " ".join(command.words[:2]))}
    assert {*SMALL} == {name_of(command.words) for command in run_here}
    assert len(run_here) > 150


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rewardlab data invent pairs.jsonl", "how it is made small"),
        ("rewardlab train --model MODEL --dataset DATA", "a placeholder"),
        ("rewardlab train --model m --dataset pairs.jsonl --notes notes.md", "is it read or written"),
        ("rewardlab compare evals/a …", "a placeholder"),
    ],
)
def test_a_command_that_nobody_knows_how_to_run_is_told(command: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        reads_of(made_small(command.split()))


@pytest.fixture
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out second processes, but on the README: other tests have them."""
    monkeypatch.setenv("ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    if request.node.callspec.params["page"] == "README.md":
        return
    monkeypatch.setattr(running, "run_all", done_here)
    for module in (training, probing, import_model, export, calibrated):
        monkeypatch.setattr(module, "verify_in_clean_process", lambda folder: None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("default")  # a shell shows them and goes on
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("page", WITH_RUNS)
def test_the_commands_of_a_page_run(page: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    with chdir(tmp_path):
        for command in page_commands(page):
            if reason(command):
                continue
            begun = time.monotonic()
            try:
                said = run(command.words, store)
            except Exception:
                said = f"{' '.join(command.words)}:\n{traceback.format_exc(limit=-6)}"
            if said:
                wrong.append(f"{page}:{command.line}: {said}")
            tell(capsys, f"{page}:{command.line}: {time.monotonic() - begun:.1f} s {said or ''}")
    assert not wrong, "\n".join(wrong)
