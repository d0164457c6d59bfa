"""Draws the pictures of docs/performance.md: python docs/pictures/draw.py (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "rewardlab", "font.size": 10, "font.family": "sans-serif"})
HERE = Path(__file__).parent
PAIRS = [(9, (5, 7)), (14, (3, 4)), (6, (8, 2))]
PROMPTS = ["#2b5c8a", "#3f7d57", "#7a5195"]
REPLIES = ["#8fb8de", "#9fd3b4", "#c9a9e0"]
PADDING = "#e3e3e3"


def tokens(axis: plt.Axes, row: float, start: int, count: int, colour: str) -> int:
    """A stretch of tokens; returns where it ends."""
    for n in range(count):
        axis.add_patch(plt.Rectangle((start + n, row), 0.9, 0.82, color=colour, linewidth=0))
    return start + count


def rows() -> None:
    """The same three pairs padded, packed, and with shared prompts."""
    figure, axis = plt.subplots(figsize=(8.4, 4.2))
    longest = max(prompt + max(replies) for prompt, replies in PAIRS)
    row, computed = 12.0, 0
    for number, (prompt, replies) in enumerate(PAIRS):
        for reply in replies:
            end = tokens(axis, row, 0, prompt, PROMPTS[number])
            end = tokens(axis, row, end, reply, REPLIES[number])
            tokens(axis, row, end, longest - end, PADDING)
            computed += longest
            row -= 1
    axis.text(0, 13.2, f"padded: one row a reply, {computed} tokens computed", fontweight="bold")
    end = 0
    for number, (prompt, replies) in enumerate(PAIRS):
        for reply in replies:
            end = tokens(axis, 4.4, end, prompt, PROMPTS[number])
            end = tokens(axis, 4.4, end, reply, REPLIES[number])
    axis.text(0, 5.6, f"packed: one row, no padding, {end} tokens", fontweight="bold")
    shared = 0
    for number, (prompt, replies) in enumerate(PAIRS):
        shared = tokens(axis, 1.6, shared, prompt, PROMPTS[number])
        for reply in replies:
            shared = tokens(axis, 1.6, shared, reply, REPLIES[number])
            axis.plot(shared - 0.55, 1.35, marker="^", color="black", markersize=5)
    axis.text(0, 2.8, f"shared: each prompt once, {shared} tokens", fontweight="bold")
    axis.text(0, 0.3, "dark: prompt    light: replies    grey: padding    ▲: a score is read here")
    axis.set_xlim(-0.5, end + 0.5)
    axis.set_ylim(0, 14.2)
    axis.axis("off")
    save(figure, "rows.svg")


def mask() -> None:
    """Who sees whom in a shared row of two groups, and the positions that each token is given."""
    groups = [(4, (3, 4)), (2, (2, 3, 2))]
    owner: list[tuple[int, int]] = []
    positions: list[int] = []
    for number, (prompt, replies) in enumerate(groups):
        owner += [(number, -1)] * prompt
        positions += range(prompt)
        for reply, length in enumerate(replies):
            owner += [(number, reply)] * length
            positions += range(prompt, prompt + length)
    size = len(owner)
    picture = np.ones((size, size, 3))
    for q in range(size):
        for k in range(q + 1):
            if owner[q][0] == owner[k][0] and owner[k][1] in (-1, owner[q][1]):
                colours = PROMPTS if owner[k][1] == -1 else REPLIES
                picture[q, k] = matplotlib.colors.to_rgb(colours[owner[k][0]])
    figure, axis = plt.subplots(figsize=(5.6, 5.6))
    axis.imshow(picture)
    axis.set_xticks(np.arange(-0.5, size), minor=True)
    axis.set_yticks(np.arange(-0.5, size), minor=True)
    axis.grid(which="minor", color="#dddddd", linewidth=0.6)
    axis.tick_params(which="both", length=0)
    axis.set_xticks(range(size), positions)
    axis.set_yticks(range(size), positions)
    axis.set_xlabel("sees this token (numbers: position given to the model)")
    axis.set_ylabel("this token …")
    axis.set_title("Two groups in one row: 2 and 3 replies", fontsize=11)
    save(figure, "mask.svg")


def save(figure: plt.Figure, name: str) -> None:
    """Write one picture, the same bytes each time."""
    figure.savefig(HERE / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    rows()
    mask()
