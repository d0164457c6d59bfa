"""Renders a report as one self-contained HTML page.

The page needs no network and no script: its content-security policy allows one style sheet, by its hash, and nothing
else. The templates escape all texts, and control characters are made visible (core.terminal).
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rewardlab.core.terminal import visible
from rewardlab.report import charts
from rewardlab.report.document import CODE, Document, number_columns

FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
"""A flag of a command, at whose hyphens a browser would begin a new line."""


def html_page(document: Document, *, refresh_s: int | None = None) -> str:
    """Return the report as one HTML page. With `refresh_s` it reloads itself after that many seconds."""
    style = _environment().get_template("page.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            document=document,
            style=Markup(style),  # our own file
            style_hash=f"sha256-{digest}",
            refresh_s=refresh_s,
            width=charts.WIDTH,
            height=charts.HEIGHT,
            left=charts.LEFT,
            right=charts.RIGHT,
            top=charts.TOP,
            bottom=charts.BOTTOM,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rewardlab.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        keep_trailing_newline=False,
    )
    environment.filters["number_columns"] = number_columns
    environment.filters["prose"] = _prose
    environment.filters["flags"] = _with_flags
    return environment


def _prose(text: str) -> Markup:
    """Return a sentence of ours, with what stands between backticks as code, and every flag in one piece."""
    return _with_flags(text, code=True)


def _with_flags(text: str, *, code: bool = False) -> Markup:
    """Return a text with every flag in one piece, and with `code` what stands between backticks as code."""
    parts = [str(escape(_shown(part))) for part in (CODE.split(text) if code else [text])]
    made = "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', made))  # all else was escaped before


def _shown(value: Any) -> Any:
    """Make control characters of every text that a template prints visible; line feeds stay."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, lines=True)
    return value
