"""What a plan says: arms, seeds, phases with gates, hypotheses, bands. `plan_file` reads it.

A plan is written before its runs. It says which runs there are (`Run`: an arm with a seed), what is expected of them,
and what would change that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

DEFAULT_SEEDS: Final = (0, 1, 2)
"""Three runs of each arm: one run says nothing about how far another would be from it."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]{0,79}")
"""What arms, phases and hypotheses may be called: their names are those of folders and job names too."""
WINNER: Final = "winner"
"""Arm of a later phase that stands for the best of a search."""
Way = tuple[Literal["log", "uniform", "integers", "choice"], tuple[Any, ...]]
"""How a setting is drawn: between two numbers, on a logarithmic scale, evenly or as whole numbers; or one of values."""
Settings = Mapping[str, Any]
"""Settings of `rewardlab train` by their flat names."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way of training, which is run once with every seed."""

    name: str
    settings: Settings
    """What differs from the base."""
    says: str = ""
    """What it is for, in words."""
    program: tuple[str, ...] = ()
    """Words of another program that is run in place of `rewardlab train`. `{python}`, `{plan_folder}`, `{settings}`,
    `{output_dir}` and `{seed}` are filled in, and it leaves `evals/test.scores.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A search by Optuna: each trial is an arm, drawn when those before it are known."""

    trials: int
    settings: Mapping[str, Way]
    """Setting -> how it is drawn."""
    sampler: Literal["tpe", "random"] = "tpe"
    pruner: Literal["none", "wilcoxon"] = "none"
    seed: int = 0
    """Seed of the draws."""
    p_threshold: float = 0.1
    """A trial is dropped by `wilcoxon` below this p-value of its seeds against those of the best trial."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Arms that are tried to find the best by validation data. They never read the test data."""

    arms: tuple[Arm, ...]
    metric: str = "accuracy"
    """Quantity that chooses, on validation data."""
    optuna: Sweep | None = None
    """Draws the arms while the search goes; None where all are known before. `arms` are those drawn so far."""
    pruned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Arms that were dropped, and the seeds with which they were run till then."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Arms that are run together, and what must hold before the next phase."""

    name: str
    arms: tuple[str, ...]
    """Names of its arms; those of a search are in `search`."""
    seeds: tuple[int, ...]
    gate: Mapping[str, str] = field(default_factory=dict)
    """Name -> claim about validation data of arms of this phase or an earlier one."""
    search: Search | None = None


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """What is expected, so that it can turn out to be wrong."""

    name: str
    claim: str
    """An expression over arms, such as `accuracy(lora) >= accuracy(full) - 0.03`."""
    expects: str = ""
    """Why it is expected."""
    would_change: str = ""
    """What would change our mind."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Where a quantity of an arm counts as a failure or a success, and where it is expected to lie.

    It has both edges, or a range, or all of them. What lies between the edges is acceptable.
    """

    about: str
    """A quantity of an arm, such as `accuracy(full)`."""
    failure: float | None = None
    """Where failure begins; above `success` if less is better."""
    success: float | None = None
    """Where success begins."""
    expected: tuple[float, float] | None = None
    """The least and the largest value that are expected."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the power of the design is computed from, before anything is known; None takes the default of `power`."""

    study: str | None = None
    """Folder of an earlier study, whose finished runs show the noise. What the plan states itself takes precedence."""
    seed_sd: float | None = None
    """Standard deviation of accuracy over seeds."""
    disagreeing: float | None = None
    """Share of comparisons that exactly one of two arms ranks right."""
    disagreeing_seeds: float | None = None
    """The same for two seeds of one arm."""
    accuracy: float | None = None
    """Accuracy that the arms reach, about."""
    within_prompt: float | None = None
    """Correlation of two comparisons of one prompt."""
    test_comparisons: float | None = None
    """Comparisons of the test data, where they cannot be counted before."""
    test_prompts: float | None = None
    tflops: float | None = None
    """What the devices of one run reach in training, in 10¹² floating-point operations a second, for the hours."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What all runs together may cost. `check` refuses a plan that is expected to need more."""

    hours: float | None = None
    """Hours of all runs together, on the devices that they use."""
    runs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: an arm with a seed."""

    phase: str
    arm: str
    seed: int
    settings: Settings
    """All settings that it is started with, except its folder."""
    program: tuple[str, ...] = ()
    reads_test: bool = True
    """Whether it is judged on test data. Runs of a search are not."""

    @property
    def name(self) -> str:
        """Its name, such as `full/seed_0`, which is also its folder in that of the runs."""
        return f"{self.arm}/seed_{self.seed}"

    @property
    def knows_settings(self) -> bool:
        """Whether its settings reach it: another program may be started without them."""
        return not self.program or any("{settings}" in word for word in self.program)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan as it was read, at one scale."""

    title: str
    question: str
    base: Settings
    arms: Mapping[str, Arm]
    phases: tuple[Phase, ...]
    hypotheses: Mapping[str, Hypothesis]
    bands: tuple[Band, ...] = ()
    baseline: str | None = None
    """The arm that others are compared with."""
    waterfall: tuple[str, ...] = ()
    """Arms of an ablation, each the one before with one change."""
    primary: str = "accuracy"
    """The quantity that tables and charts are about."""
    pooled: bool = False
    """Whether the noise over seeds is that of all arms together, which assumes that they vary alike."""
    assume: Assumptions = Assumptions()
    budget: Budget = Budget()
    slurm: Mapping[str, Any] = field(default_factory=dict)
    scale: str | None = None
    probes: bool = False
    """Whether the arms train heads on a frozen backbone."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Arm -> why it is not run at this scale."""


Kind = Literal["validation", "test"]
"""What data a number is from."""
