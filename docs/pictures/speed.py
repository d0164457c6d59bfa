"""Draws docs/pictures/speed.svg from the records of benchmarks/train_cpu.py: python docs/pictures/speed.py

Standard library only. Each bar is a median over the rounds of a record, its whisker the slowest and the fastest round.
The card has a background of its own, so that it can be read on light and dark pages alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
PANELS = {
    "train_cpu.headline-fp32.2026-11-21.json": "float32, two Intel cores",
    "train_cpu.headline-bf16.2026-11-22.json": "bf16, two AMD cores",
}
NAMES = {
    "trl": "TRL, its defaults",
    "trl-best": "TRL, no checkpointing, by length",
    "sorted": "plain loop, sorted by length",
    "packed": "rewardlab, prompts not shared",
    "ours": "rewardlab",
}
WIDTH, LEFT, RIGHT = 860, 268, 90
BAR, STEP, GAP = 18, 27, 50
INK, QUIET, RULE = "#1f2328", "#59636e", "#d0d7de"
OURS, THEIRS = "#0969da", "#9aa4b0"


def rates(record: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Pairs a second of a variant: of the slowest round, the median and the fastest."""
    variant, pairs = record["variants"][name], record["cell"]["pairs"]
    return pairs / variant["wall_high"], pairs / variant["wall"], pairs / variant["wall_low"]


def text(x: float, y: float, words: str, **more: str) -> str:
    """A text element; `_` in an attribute's name is a dash."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="1.4"/>'


def draw() -> str:
    """The picture."""
    records = {name: json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in PANELS}
    shown = {name: [key for key in NAMES if key in record["variants"]] for name, record in records.items()}
    most = max(rates(record, key)[2] for name, record in records.items() for key in shown[name])
    scale = (WIDTH - LEFT - RIGHT) / most
    parts: list[str] = []
    y = 62.0
    for name, title in PANELS.items():
        record = records[name]
        parts.append(text(24, y, title, font_weight="600"))
        y += 14
        for key in shown[name]:
            low, median, high = rates(record, key)
            middle = y + BAR / 2
            ours = key == "ours"
            parts.append(text(LEFT - 12, middle + 5, NAMES[key], text_anchor="end", fill=INK if ours else QUIET))
            colour = OURS if ours else THEIRS
            parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{median * scale:.1f}" height="{BAR}" fill="{colour}"/>')
            left, right = LEFT + low * scale, LEFT + high * scale
            parts += [line(left, middle, right, middle, INK)]
            parts += [line(x, middle - 4, x, middle + 4, INK) for x in (left, right)]
            parts.append(text(right + 10, middle + 5, f"{median:.2f}", font_weight="600" if ours else "400"))
            y += STEP
        y += GAP - BAR
    cell, rounds = records[next(iter(PANELS))]["cell"], {record["cell"]["repeats"] for record in records.values()}
    assert len(rounds) == 1, "the foot says how many rounds there were"
    foot = (
        f"A step of full fine-tuning of SmolLM2-135M over {cell['pairs']} real HH pairs.",
        f"Bars: median of {rounds.pop()} interleaved rounds. Whiskers: slowest and fastest round.",
    )
    for words in foot:
        parts.append(text(24, y - 6, words, font_size="12", fill=QUIET))
        y += 18
    height = y
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
        f'font-size="14" fill="{INK}" role="img" aria-label="Preference pairs trained a second">'
    )
    card = (
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="#ffffff" stroke="{RULE}"/>'
    )
    title = text(24, 32, "Preference pairs trained a second", font_size="17", font_weight="600")
    return "\n".join([head, card, title, *parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "speed.svg").write_text(draw(), encoding="utf-8")
