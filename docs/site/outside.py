"""A hook of MkDocs: pages of the repository that lie outside docs/ are pages of the site too, and links lead to them.

On GitHub a page links to files where they lie (`../benchmarks/README.md`). In the site those files stand beside the
pages of docs/, under the same paths.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
IN_NAV = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
BESIDE = ("benchmarks/results/*.md", "benchmarks/results/*.json", "benchmarks/results/*.svg", "examples/**/*")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files outside docs/."""
    beside = sorted(path for pattern in BESIDE for path in ROOT.glob(pattern) if path.is_file())
    for path in [*(ROOT / name for name in IN_NAV), *beside]:
        name = path.relative_to(ROOT).as_posix()
        inclusion = InclusionLevel.UNDEFINED if name in IN_NAV else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from the place of a page in the repository, as links from its place in the site."""
    here = page.file.src_uri
    in_repository = here if page.file.generated_by else f"docs/{here}"

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
        in_site = "index.md" if found == "README.md" else found.removeprefix("docs/")
        return posixpath.relpath(in_site, posixpath.dirname(here) or ".") + anchor

    return LINK.sub(moved, markdown)
