"""A live view of a run in the terminal: progress, the last training row, every evaluation, and warning signs.

It only reads the folder that the run writes, and of that only what is new. So watching neither slows the run down nor
ends it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep, time
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rewardlab.core.errors import ConfigError
from rewardlab.core.screen import Screen
from rewardlab.core.terminal import plural, visible
from rewardlab.core.types import Estimate
from rewardlab.report.folder import Record, read_folder
from rewardlab.report.rereading import Known
from rewardlab.report.sections import duration, status
from rewardlab.report.tables import digits_of, format_estimate

BARS: Final = "▁▂▃▄▅▆▇█"
WIDE: Final = 98
"""Width from which a terminal has room for every column of the evaluations."""
MOST_EVALUATIONS: Final = 8
MOST_SIGNS: Final = 5
TRAINED: Final = {
    "loss": ("train_loss", "{:.4f}"),
    "accuracy": ("train_accuracy", "{:.3f}"),
    "margin": ("train_margin", "{:+.3f}"),
    "gradient norm": ("grad_norm", "{:.4g}"),
    "learning rate": ("lr", "{:.1e}"),
    "comparisons/s": ("pairs_per_second", "{:.1f}"),
    "memory (GiB)": ("peak_memory_gib", "{:.2f}"),
}
"""The values shown from the last training row: name -> (column, form)."""
EVALUATED: Final = (
    ("accuracy", "eval_accuracy", 3),
    ("loss", "eval_loss", 3),
    ("margin", "eval_margin", 2),
    ("ECE", "eval_ece", 2),
)
"""Values of an evaluation: (name, column, digits); a narrow terminal has the first two."""
NO_LIMITS: Final = "[—]"


def watch(folder: Path, *, every_s: float, once: bool = False, console: Console | None = None) -> None:
    """Show the run in a folder until it is finished or something else ended it, or one frame of it with `once`.

    Raises ConfigError if there is no such folder, and with `once` if it holds no run.
    """
    console = console or Screen(highlight=False)
    if once:
        console.print(frame(read_folder(folder), age_s=_age_s(folder), width=console.width))
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: not found. Name the folder of a run that goes on, or start one first.")
    known = Known()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            record = _read(folder, known)
            shown = _waiting(folder) if record is None else frame(record, age_s=_age_s(folder), width=console.width)
            live.update(shown, refresh=True)
            if record is not None and (record.finished or record.ended):
                break
            sleep(every_s)
    # In a terminal the cursor is below the last frame already; a file or a pipe has only this frame.
    if not console.is_terminal:
        console.line()


def frame(record: Record, *, age_s: float | None = None, width: int = WIDE) -> RenderableType:
    """Return one frame for a terminal of `width` columns. `age_s` is the time since the record was last written, in
    seconds."""
    parts: list[RenderableType] = [
        Text(visible(record.name), style="bold"),
        Text(status(record)),
        *_progress(record, age_s),
        *_training(record),
        *_course(record),
        *_evaluations(record, width),
        *_signs(record),
        *(Text(visible(problem), style="yellow") for problem in record.problems),
    ]
    return Group(*parts)


def _read(folder: Path, known: Known) -> Record | None:
    """Return the record, or None while there is nothing to read yet."""
    try:
        return read_folder(folder, known)
    except ConfigError:
        return None


def _waiting(folder: Path) -> RenderableType:
    return Text(f"{visible(str(folder))}: nothing written yet; waiting. Ctrl-C ends the view.")


def _progress(record: Record, age_s: float | None) -> list[RenderableType]:
    if record.kind != "train" or not record.num_steps:
        return []
    done = round(40 * min(record.step / record.num_steps, 1.0))
    said = f"step {record.step:,} of {record.num_steps:,}"
    if not (record.finished or record.ended):
        left = _seconds_left(record)
        said += "" if left is None else f", about {duration(left)} of training left"
        said += "" if age_s is None else f"; last row {duration(age_s)} ago"
    return [Text(f"{'█' * done}{'░' * (40 - done)} {said}")]


def _seconds_left(record: Record) -> float | None:
    """Return the seconds that the remaining steps take at the rate of the last ones; None before a rate is known."""
    rows = [row for row in record.rows if row.get("seconds", 0.0) > 0]
    if not rows or record.num_steps is None:
        return None
    before = max((row["step"] for row in record.rows if row["step"] < rows[-1]["step"]), default=0.0)
    # A single row with seconds counts them from step 0.
    steps = rows[-1]["step"] - (rows[-2]["step"] if len(rows) > 1 else min(before, 0.0))
    return (record.num_steps - record.step) * rows[-1]["seconds"] / steps if steps > 0 else None


def _training(record: Record) -> list[RenderableType]:
    last = next((row for row in reversed(record.rows) if "train_loss" in row), None)
    if last is None:
        return []
    line = "  ".join(
        f"{name} {form.format(last[column])}" for name, (column, form) in TRAINED.items() if column in last
    )
    return [Text(f"training, step {last['step']:,.0f}: {line}")]


def _course(record: Record) -> list[RenderableType]:
    """Return the course of the training loss and of the evaluation accuracy as bars of text."""
    drawn = []
    for name, column in (("training loss", "train_loss"), ("evaluation accuracy", "eval_accuracy")):
        values = [row[column] for row in record.rows if column in row]
        if len(values) > 1:
            drawn.append(Text(f"{name:<20} {_bars(values)}  {values[0]:.3f} → {values[-1]:.3f}"))
    return list(drawn)


def _bars(values: Sequence[float], width: int = 40) -> str:
    """Return values as bars, at most `width` of them; of more values evenly spaced ones are drawn, with the last."""
    if len(values) > width:
        values = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    low, high = min(values), max(values)
    if not high > low:
        return BARS[0] * len(values)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in values)


def _evaluations(record: Record, width: int) -> list[RenderableType]:
    rows = [row for row in record.rows if "eval_accuracy" in row]
    if not rows:
        return []
    judged = EVALUATED if width >= WIDE else EVALUATED[:2]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", *(name for name, _, _ in judged), *(("compared",) if width >= WIDE else ())):
        table.add_column(name, justify="right", no_wrap=True)
    shown = rows[-MOST_EVALUATIONS:]
    best = max(row["eval_accuracy"] for row in rows)
    lacking = False
    for row in shown:
        cells = [_interval(row, column, least) for _, column, least in judged]
        lacking = lacking or any(cell.endswith(NO_LIMITS) for cell in cells)
        count = [f"{row['eval_pairs']:,.0f}" if "eval_pairs" in row else ""] if width >= WIDE else []
        table.add_row(f"{row['step']:,.0f}", *cells, *count, style="bold" if row["eval_accuracy"] == best else "")
    left = len(rows) - len(shown)
    return [
        table,
        *([Text(f"{NO_LIMITS}: without an interval, as with too few comparisons.")] if lacking else []),
        *([Text(f"{left} earlier {plural(left, 'evaluation is', 'evaluations are')} not shown.")] if left else []),
    ]


def _interval(row: Mapping[str, float], column: str, least: int) -> str:
    """Return a value of metrics.csv with its interval, in `least` decimals or more; nothing if it is not there."""
    if column not in row:
        return ""
    low, high = row.get(f"{column}_low", math.nan), row.get(f"{column}_high", math.nan)
    estimate = Estimate(value=row[column], low=low, high=high, n=0, method="")
    return format_estimate(estimate, digits=digits_of(estimate, least=least))


def _signs(record: Record) -> list[RenderableType]:
    signs = list(record.signs)[-MOST_SIGNS:]
    left = len(record.signs) - len(signs)
    told: list[RenderableType] = [
        Text(f"step {sign.step:,}: {visible(sign.line())}", style="bold yellow") for sign in signs
    ]
    return [
        *([Text(f"{left} earlier {plural(left, 'warning sign is', 'warning signs are')} not shown.")] if left else []),
        *told,
    ]


def _age_s(folder: Path) -> float | None:
    """Return how long ago metrics.csv was written, in seconds; None without one."""
    try:
        return max(time() - (folder / "metrics.csv").stat().st_mtime, 0.0)
    except OSError:
        return None
