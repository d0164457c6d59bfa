"""Renders a report as one self-contained HTML page.

The page needs no network and no script: its content-security policy allows one style sheet, by its hash, and nothing
else. The templates escape all texts, and control characters are made visible (core.terminal).
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rewardlab.core.terminal import visible
from rewardlab.report import charts
from rewardlab.report.document import Document, number_columns


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
    return environment


def _shown(value: Any) -> Any:
    """Make control characters of every text that a template prints visible; line feeds stay."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, lines=True)
    return value
