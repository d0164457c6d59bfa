"""Records drawn from a formula, in which reward and gold of every step are known: honest runs, and the edge.

Legend: N rollouts, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rewardlab.rl.audit.columns import Columns

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a record holds."""

    steps: int
    prompts: int
    """Different prompts; 0 for new ones in every step."""
    per_step: int = 8
    replies: int = 4

    @property
    def name(self) -> str:
        """For a table."""
        which = f"{self.prompts} prompts" if self.prompts else "no prompt twice"
        return f"{self.steps} steps, {which}"


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What all replies of a step have in common, which follows an autoregression over steps."""

    correlation: float
    spread: float
    """Standard deviation, in those of replies to one prompt."""

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.spread:g} SD, correlation {self.correlation:g}" if self.spread else "none"


SIZES = (
    Size(steps=20, prompts=12),
    Size(steps=60, prompts=32),
    Size(steps=60, prompts=0),
    Size(steps=200, prompts=400),
)
DRIFTS = (Drift(correlation=0.0, spread=0.0), Drift(correlation=0.5, spread=0.1), Drift(correlation=0.9, spread=0.2))
KINDS = ("flat", "rises", "plateau", "weak", "edge")
"""Honest runs, in which gold follows; and the edge, where gold rises by exactly the share that is wanted of it, so that
an alarm is wrong in the strictest sense."""
SLOPE = {"flat": 0.7, "rises": 0.7, "plateau": 0.7, "weak": 0.25, "edge": 0.7}
SHARE = 0.25


def rise(kind: str, steps: int) -> tuple[FloatArray, FloatArray]:
    """[S] reward and gold, in standard deviations of replies to one prompt."""
    time = np.arange(steps) / max(steps - 1, 1)
    if kind == "flat":
        return np.zeros(steps), np.zeros(steps)
    if kind == "plateau":
        reward = 2 * np.minimum(3 * time, 1.0)
    else:
        reward = 2 * time
    return reward, reward * SLOPE[kind] * (SHARE if kind == "edge" else 1.0)


def draw(kind: str, size: Size, drift: Drift, generator: np.random.Generator) -> Columns:
    """A new record. Prompts differ in reward and gold, and in how much of the rise they take part in."""
    per = size.per_step * size.replies
    count = size.steps * per
    step_N = np.repeat(np.arange(size.steps), per)
    if size.prompts:
        asked = [generator.choice(size.prompts, size.per_step, replace=False) for _ in range(size.steps)]
        prompt_N = np.repeat(np.concatenate(asked), size.replies)
    else:
        prompt_N = np.repeat(np.arange(size.steps * size.per_step), size.replies)
    number = int(prompt_N.max()) + 1
    slope = SLOPE[kind]
    # Some tails are heavy: every tenth reply lies three times as far from its mean.
    far = np.where(generator.random(count) < 0.1, 3.0, 1.0) / np.sqrt(1.8)
    common = generator.normal(size=count) * far
    reward_N, gold_N = common, slope * common + np.sqrt(1 - slope**2) * generator.normal(size=count)
    rising, following = rise(kind, size.steps)
    part_P = generator.gamma(4.0, 0.25, size=number)
    of_prompt = generator.normal(size=(2, number))
    both, own, other = (_drifts(size.steps, drift, generator) for _ in range(3))
    reward_N = reward_N + rising[step_N] * part_P[prompt_N] + of_prompt[0, prompt_N] + (both + own)[step_N]
    # What gold does with a prompt is not only what the reward does: half of it is its own.
    part_P = 0.5 * part_P + 0.5 * generator.gamma(4.0, 0.25, size=number)
    gold_N = gold_N + following[step_N] * part_P[prompt_N] + of_prompt[1, prompt_N] + (slope * both + other)[step_N]
    return Columns(
        step_N=step_N,
        prompt_N=prompt_N,
        prompts=tuple(map(str, range(number))),
        reward_N=reward_N,
        digest_N=np.zeros(count, dtype=np.int64),
        digests=("simulated",),
        reply_N=np.arange(count, dtype=np.uint64),
        evidence={"gold": gold_N},
        shown={},
        place_N=np.zeros((count, 2), dtype=np.int64),
        files=(Path("simulated"),),
    )


def _drifts(steps: int, drift: Drift, generator: np.random.Generator) -> FloatArray:
    """[S] a stationary autoregression."""
    noise = generator.normal(size=steps)
    found = np.empty(steps)
    state = generator.normal()
    for step in range(steps):
        state = drift.correlation * state + np.sqrt(1 - drift.correlation**2) * noise[step]
        found[step] = state
    return drift.spread / np.sqrt(2) * found
