"""What the page draws stands out from what it stands on, in the light, in the dark and in print (WCAG 2.2, AA)."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

TEXT = 4.5
"""Least contrast of text (1.4.3)."""
SHAPE = 3.0
"""Least contrast of what must be seen to read a chart (1.4.11)."""
WRITTEN = ("ink", "soft", "link", "good", "bad", "look")
DRAWN = ("s0", "s1", "s2", "s3", "null")


def themes() -> dict[str, dict[str, str]]:
    """Theme -> name -> colour, #rrggbb or shorter."""
    sheet = (files("rewardlab.report") / "templates" / "page.css").read_text(encoding="utf-8")
    found = [dict(re.findall(r"--(\w+):(#\w+)", root)) for root in re.findall(r":root\{([^}]*)\}", sheet)]
    return dict(zip(("light", "dark", "print"), found, strict=True))


def luminance(colour: str) -> float:
    """The relative luminance of WCAG, 0 to 1."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """1 for the same colour, 21 for black on white."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_black_on_white_has_a_contrast_of_21() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_what_is_written_and_drawn_stands_out(theme: str) -> None:
    colours = themes()[theme]

    for least, names in ((TEXT, WRITTEN), (SHAPE, DRAWN)):
        for name in names:
            for ground in ("paper", "raised"):
                assert contrast(colours[name], colours[ground]) >= least, f"{name} on {ground}"
