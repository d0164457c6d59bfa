"""Pages as pages: short, of narrow lines, with links that lead somewhere, each with its place in the site."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
import yaml

from pages import DOCS, PAGES, ROOT, blocks, module_at, prose, read

MAX_WORDS, MAX_COLUMNS, MAX_README_LINES = 2000, 119, 149
GENERATED = ("docs/settings.md",)
"""Written by a program from the code, as long as that is."""
READ = [*PAGES, "CHANGELOG.md", "benchmarks/README.md"]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: str) -> set[str]:
    """The names by which GitHub and MkDocs know the headings of a page."""
    titles = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [name for name in PAGES if name.startswith(("docs/", "CONTRIBUTING")) and name not in GENERATED]
)
def test_a_page_is_read_in_one_go(page: str) -> None:
    words = [word for word in prose((ROOT / page).read_text(encoding="utf-8")).split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS


@pytest.mark.parametrize("page", [name for name in READ if name not in GENERATED])
def test_lines_fit_a_screen(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > MAX_COLUMNS and not line.startswith("|")] == []


def test_the_readme_wins_nobody_who_has_to_scroll_far() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", READ)
def test_every_link_inside_the_repository_leads_somewhere(page: str) -> None:
    here = ROOT / page
    for target in (text or picture for text, picture in LINK.findall(prose(here.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (here.parent / path).resolve() if path else here
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text(encoding="utf-8")), target


NAMED_FILE = re.compile(
    r"`((?:src/rewardlab|tests|benchmarks|docs|scripts|examples|[a-z_]+)/[\w./]+\.(?:py|md|svg|sbatch))`"
)
TO_COME = {"artifact/convert.py"}
"""Planned, or written by a command."""


@pytest.mark.parametrize("page", READ)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = set(NAMED_FILE.findall((ROOT / page).read_text(encoding="utf-8"))) - TO_COME
    places = (ROOT, ROOT / "src" / "rewardlab", ROOT / "tests")
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


NAMED_TEST = re.compile(r"`(tests/[\w./]+\.py)::(\w+)`")


def missing_tests(page: str) -> list[str]:
    """The tests that a page names and that are not defined in the file that it names."""

    def is_there(path: str, name: str) -> bool:
        file = ROOT / path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        return re.search(rf"^ *def {name}\(", text, re.MULTILINE) is not None

    return [f"{path}::{name}" for path, name in NAMED_TEST.findall(page) if not is_there(path, name)]


@pytest.mark.parametrize("page", READ)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    assert missing_tests((ROOT / page).read_text(encoding="utf-8")) == []


def test_every_row_of_the_page_on_hardening_names_a_test() -> None:
    page = read("design/hardening.md")
    figures = page[page.index("| run | tried |") :].partition("\n\n")[0]
    rows = [line for line in page.replace(figures, "").splitlines() if re.match(r"\| (?!---|tried)", line)]
    assert len(rows) > 80
    assert [row for row in rows if row.count("::") != len(NAMED_TEST.findall(row)) or "::" not in row] == []


@pytest.mark.parametrize(
    "name", ["tests/docs/test_pages.py::test_no_such", "tests/docs/test_none.py::test_lines_fit_a_screen"]
)
def test_a_test_that_is_not_there_would_be_noticed(name: str) -> None:
    assert missing_tests(f"| a | b | `tests/docs/test_pages.py::test_lines_fit_a_screen`, `{name}` |") == [name]


def test_every_page_has_its_place_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

    def listed(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            for part in entry.values():
                yield from listed(part)
        elif isinstance(entry, list):
            for part in entry:
                yield from listed(part)

    places = list(listed(yaml.safe_load(text)["nav"]))
    assert len(places) == len(set(places))
    ours = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert set(places) == ours | {"CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"}


def test_the_log_in_the_readme_is_from_the_log_of_the_quickstart() -> None:
    (short,) = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "text")
    (whole,) = blocks(read("quickstart.md"), "text")
    assert [line for line in short.text.splitlines() if line not in whole.text.splitlines()] == []


def test_the_picture_of_speed_is_drawn_from_the_records() -> None:
    assert module_at(DOCS / "pictures" / "speed.py").draw() == read("pictures/speed.svg")


def pages_that(page: str) -> set[str]:
    """The pages of docs/ to which a page of docs/ links."""
    here = DOCS / page
    targets = (target.partition("#")[0] for target, _ in LINK.findall(prose(here.read_text(encoding="utf-8"))))
    found = ((here.parent / target).resolve() for target in targets if target.endswith(".md") and ":" not in target)
    return {path.relative_to(DOCS).as_posix() for path in found if path.is_relative_to(DOCS)}


def test_every_page_is_at_most_two_links_from_the_index_and_those_for_users_one() -> None:
    ours = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    first = pages_that("index.md")
    assert sorted(ours - first - set().union(*map(pages_that, first))) == []
    assert sorted(page for page in ours - first if not page.startswith("design/")) == []


ITEM_IN_A_LINE = re.compile(r"^(?!\|).*[.:)] [2-9]\. (?:\*\*|[A-Z`\[])", re.MULTILINE)


@pytest.mark.parametrize("page", READ)
def test_each_item_of_a_list_has_a_line_of_its_own(page: str) -> None:
    assert ITEM_IN_A_LINE.findall(prose((ROOT / page).read_text(encoding="utf-8"))) == []
