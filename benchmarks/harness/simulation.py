"""The frame of a simulation: its flags, its clock, what cells come to in a row of its page, and its record."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from harness import machine, results

WANTED = (0.93, 0.97)
"""Coverage that an interval of 95 % is to have."""
SUMMARY = ("cells", "93 to 97 %", "below", "above", "coverage, least to most")
"""Heads of `summary` for coverages."""


class Judged(Protocol):
    """What one kind of data of one size showed."""

    @property
    def case(self) -> str:
        """The data, in words."""

    @property
    def wanted(self) -> bool:
        """Whether it is as it should be."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How often something was found in one kind of data."""

    case: str
    rate: float
    """Share of draws in which the test found something, or the interval held the truth."""
    low: float
    high: float
    """Between which the rate is to lie."""
    beside: Mapping[str, float] | None = None
    """The same by other rules, for comparison."""

    @property
    def wanted(self) -> bool:
        """Whether it does."""
        return self.low <= self.rate <= self.high


class Simulation:
    """One call of a script: its flags, and since when it runs."""

    def __init__(self, benchmark: str, parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
        """`parser` is that of `parser_of`, with what the script adds."""
        self.benchmark = benchmark
        results.add_flags(parser)
        self.options = parser.parse_args(arguments)
        torch.set_num_threads(1)
        self.load, self.began = machine.load_average(), time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def minutes(self) -> str:
        """The same in words."""
        return f"{self.seconds / 60:.1f} minutes"

    def generator(self, number: int) -> np.random.Generator:
        """The numbers of one kind: the same whichever other kinds are drawn."""
        return np.random.default_rng((self.options.seed, number))

    def record(self, tag: str, *, page: Sequence[str], cells: object) -> int:
        """Write the page and the data; return the exit status."""
        results.write(
            self.benchmark,
            self.options.tag or tag,
            page=page,
            data={"cells": cells},
            options=self.options,
            device=torch.device("cpu"),
            load=(self.load, machine.load_average()),
        )
        return 0


def parser_of(description: str | None, kinds: Sequence[str], *, draws: int) -> argparse.ArgumentParser:
    """Return a parser with the flags that all simulations have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=draws)
    parser.add_argument("--kinds", nargs="+", default=list(kinds), choices=list(kinds))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tag", default=None, help="in the names of files; by default the kinds, or all")
    return parser


def summary(
    values: Sequence[float], low: float | Sequence[float] = WANTED[0], high: float | Sequence[float] = WANTED[1]
) -> list[str]:
    """Number of cells, shares inside, below and above what is wanted of each, and the range."""
    found, least, most = (np.asarray(one, dtype=np.float64) for one in (values, low, high))
    return [
        str(len(found)),
        f"**{np.mean((least <= found) & (found <= most)):.0%}**",
        f"{np.mean(found < least):.0%}",
        f"{np.mean(found > most):.0%}",
        f"{found.min():.1%} to {found.max():.1%}",
    ]


def outside(found: Mapping[str, Sequence[Judged]], columns: Mapping[str, str]) -> str:
    """A table of every cell that is not as wanted; `columns`: head -> format of a cell (`{cell.width:.3g}`)."""
    return results.table(
        ["kind", "data", *columns],
        [
            [kind, cell.case, *(column.format(cell=cell) for column in columns.values())]
            for kind, cells in found.items()
            for cell in cells
            if not cell.wanted
        ],
    )


def rounded(values: Mapping[str, float | None]) -> dict[str, Any]:
    """For the record: to four digits, without those that are not there."""
    return {name: float(f"{value:.4g}") for name, value in values.items() if value is not None}
