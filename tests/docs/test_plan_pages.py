"""The pages of plans: each example is a plan that can be read, and the first study runs as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.page_commands import commands
from pages import PAGES, ROOT, blocks, read
from rewardlab.core.errors import RewardlabError
from rewardlab.experiments.claims import parse
from rewardlab.experiments.gates import gate_claim
from rewardlab.experiments.plan_file import KEYS, read_plan
from rewardlab.experiments.quantities import QUANTITIES, quantity_named
from rewardlab.experiments.resolving import runs_of
from rewardlab.experiments.study import open_study

FIRST = ROOT / "examples" / "first_study" / "first.yaml"
NUM_COMMANDS = 5


def plans_of(page: str) -> list[tuple[int, dict[str, Any]]]:
    """Line and values of the YAML blocks of a page that are plans, or parts of one."""
    read_blocks = [(block.line, one) for block in blocks(page, "yaml") for one in yaml.safe_load_all(block.text)]
    return [
        (line, values) for line, values in read_blocks if isinstance(values, dict) and {"arms", "phases"} & {*values}
    ]


def wrong(page: str, folder: Path, name: str = "page") -> list[str]:
    """What is wrong with the plans of a page; a part of one stands in place of what the first study says."""
    found = []
    rest = {
        key: value for key, value in yaml.safe_load(FIRST.read_text("utf-8")).items() if key in ("question", "base")
    }
    for line, values in plans_of(page):
        path = folder / f"{line}.yaml"
        path.write_text(yaml.safe_dump({**rest, **values}, sort_keys=False), encoding="utf-8")
        try:
            for scale in (None, *values.get("scales", {})):
                plan = read_plan(path, scale=scale)
                runs_of(plan)
                for hypothesis in plan.hypotheses.values():
                    parse(hypothesis.claim)
                for phase in plan.phases:
                    for claim in phase.gate.values():
                        gate_claim(claim).require_arms(list(plan.arms))
        except RewardlabError as error:
            found.append(f"{name}:{line}: {error}")
    return found


@pytest.mark.parametrize("page", [name for name in PAGES if plans_of((ROOT / name).read_text(encoding="utf-8"))])
def test_every_plan_on_a_page_can_be_read(page: str, tmp_path: Path) -> None:
    assert wrong((ROOT / page).read_text(encoding="utf-8"), tmp_path, page) == []


def test_a_plan_that_cannot_be_read_is_told_by_line(tmp_path: Path) -> None:
    page = "x\n```yaml\narms: {a: {}}\n```\n```yaml\narms: {a: {learning: 1}}\n```\n"
    page += "```yaml\narms: {a: {}}\nhypotheses: {h: accuracy(a) ~ 1}\n```\n"
    assert [one.split(":")[1] for one in wrong(page, tmp_path)] == ["6", "9"]


def test_the_page_lists_every_key_of_a_plan_and_every_file_that_is_a_plan() -> None:
    table = read("plans-file.md").partition("## Keys")[2].partition("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == set(KEYS)


@pytest.mark.parametrize("name", [name for name, one in QUANTITIES.items() if one.unit])
def test_the_page_says_the_unit_of_every_quantity_that_has_one(name: str) -> None:
    table = read("plans-file.md").partition("| quantities | from |")[2].partition("\n\n")[0]
    found = re.findall(r"((?:`\w+`(?:, )?)+) \(([\w/]+)", table)
    units = {of: unit for names, unit in found for of in re.findall(r"\w+", names)}
    assert units.get(name) == QUANTITIES[name].unit


def test_the_other_name_of_a_speed_that_the_page_gives_is_one() -> None:
    assert "`throughput`" in read("plans-file.md")
    assert quantity_named("throughput") is QUANTITIES["tokens_per_second"]


def test_the_plan_on_the_page_is_that_of_the_first_study() -> None:
    block = next(blocks(read("plans.md"), "yaml"))
    shipped = "".join(line for line in FIRST.read_text("utf-8").splitlines(True) if not line.startswith("#"))
    assert block.text == shipped
    head = re.findall(r"^#   (.*)$", FIRST.read_text("utf-8"), re.MULTILINE)
    assert [tuple(line.split()) for line in head] == [one.words for one in commands(read("plans.md"))[:NUM_COMMANDS]]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_first_study_runs_as_it_stands_on_the_page(tmp_path: Path) -> None:
    """Six short runs, each a process of its own: a minute or two on an idle machine."""
    shutil.copytree(FIRST.parent, tmp_path / "examples" / "first_study")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    printed = []
    for line, words in commands(read("plans.md"))[:NUM_COMMANDS]:
        program = [sys.executable, "-m", "rewardlab"] if words[0] == "rewardlab" else [sys.executable]
        answer = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        wanted = (0, 1, 2) if "report" in words else (0,)  # what a verdict is says the status of a report
        assert answer.returncode in wanted, f"docs/plans.md:{line}: {' '.join(words)}: {answer.stdout}{answer.stderr}"
        printed.append(answer.stdout)
    study = open_study(tmp_path / "studies" / "first")
    assert len(study.runs) == 6
    assert (study.folder / "report" / "report.html").is_file()
    texts = [block.text for block in blocks(read("plans.md"), "text")]
    assert texts[0].split() == printed[1].split(), "docs/plans.md shows another check"
