"""What a judge said, in numbers: how often its two orders differ, how much it prefers a position, and what it cost."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rewardlab.analysis.stats import proportion
from rewardlab.core.types import Estimate
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.judging.judge import CAUSES, Verdict
from rewardlab.report.tables import format_count, format_estimate, interval_note, report_width

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What became of the pairs. pairs = equal + judged + missing."""

    pairs: int
    equal: int
    """Pairs of the same text, about which no one is asked."""
    judged: int
    missing: int
    """Pairs without a label, since an order has no verdict."""
    causes: dict[str, int]
    """Cause -> questions without a verdict, see `judge.CAUSES`."""
    labels: dict[str, int]
    """Label (what the first reply wins) -> judged pairs."""
    disagreement: Estimate
    """Share of judged pairs whose two orders say different things; by prompt."""
    first_shown: Estimate
    """What the reply that is shown first wins, over both orders of judged pairs: ½ without bias of position; by
    prompt."""
    questions: int
    prompt_tokens: int
    tokens: int
    uncounted: int
    """Questions for which the server did not say how many tokens they took."""

    def cost(self, config: JudgeConfig) -> float | None:
        """Return the price of the tokens that are counted; None without prices."""
        if config.price_in is None or config.price_out is None:
            return None
        return (self.prompt_tokens * config.price_in + self.tokens * config.price_out) / MILLION


class Tally:
    """Adds up verdicts."""

    def __init__(self) -> None:
        self._pairs = self._equal = self._missing = 0
        self._causes: Counter[str] = Counter()
        self._labels: Counter[str] = Counter()
        self._keys: list[str] = []
        self._differ: list[float] = []
        self._first: list[float] = []
        self._questions = self._prompt_tokens = self._tokens = self._uncounted = 0

    def see(self, key: str, verdicts: Iterable[Verdict]) -> None:
        """Add the verdicts on pairs of replies to the prompt with this key."""
        for verdict in verdicts:
            self._pairs += 1
            self._count(verdict)
            if not verdict.orders:
                self._equal += 1
            elif verdict.label is None:
                self._missing += 1
            else:
                self._labels[f"{verdict.label:g}"] += 1
                for one in verdict.orders:
                    assert one.share is not None
                    self._keys.append(key)
                    self._first.append(one.share)
                    self._differ.append(float(not verdict.agrees))

    def _count(self, verdict: Verdict) -> None:
        self._causes.update(verdict.causes)
        for one in verdict.orders:
            self._questions += 1
            self._prompt_tokens += one.prompt_tokens or 0
            self._tokens += one.tokens or 0
            self._uncounted += one.prompt_tokens is None or one.tokens is None

    def summary(self) -> Summary:
        """Return what was seen."""
        return Summary(
            pairs=self._pairs,
            equal=self._equal,
            judged=self._pairs - self._equal - self._missing,
            missing=self._missing,
            causes=dict(sorted(self._causes.items())),
            labels=dict(sorted(self._labels.items())),
            # Only one of the two entries of a pair is taken, so that it counts once.
            disagreement=proportion(self._differ[::2], self._keys[::2]),
            first_shown=proportion(self._first, self._keys),
            questions=self._questions,
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            uncounted=self._uncounted,
        )


def text_report(summary: Summary, config: JudgeConfig) -> str:
    """Return what a judge said and cost, for a terminal."""
    width = report_width()
    return "\n".join(textwrap.fill(line, width=width, subsequent_indent="  ") for line in _lines(summary, config))


def _lines(summary: Summary, config: JudgeConfig) -> Iterator[str]:
    equal = f", {format_count(summary.equal)} of equal replies (½, not asked)" if summary.equal else ""
    yield (
        f"pairs: {format_count(summary.pairs)}, {format_count(summary.judged)} judged in both orders{equal}, "
        f"{format_count(summary.missing)} missing"
    )
    for cause, count in summary.causes.items():
        yield f"  {format_count(count)} of {format_count(summary.questions)} questions: {CAUSES[cause]}"
    if summary.judged:
        labels = ", ".join(f"{label}: {format_count(count)}" for label, count in summary.labels.items())
        yield f"labels (what the first reply wins): {labels}"
        yield (
            f"the two orders differ in {format_estimate(summary.disagreement, percent=True)} of the judged pairs; the "
            f"reply that is shown first wins {format_estimate(summary.first_shown, percent=True)}"
            f" ({_bias(summary.first_shown)}; {interval_note([summary.disagreement, summary.first_shown])})"
        )
    told = f"tokens: {format_count(summary.prompt_tokens)} of questions, {format_count(summary.tokens)} of answers"
    cost = summary.cost(config)
    yield told + ("" if cost is None else f"; cost: {cost:,.4g}") + _uncounted(summary)


def _bias(first: Estimate) -> str:
    """Return in words what an interval says about a bias of position."""
    if math.isnan(first.low):
        return "too few prompts to tell a bias of position"
    if first.low > 0.5:
        return "it prefers what it sees first"
    return "it prefers what it sees last" if first.high < 0.5 else "no bias of position is shown"


def _uncounted(summary: Summary) -> str:
    if not summary.uncounted:
        return ""
    few, all_of_them = format_count(summary.uncounted), format_count(summary.questions)
    return f"; for {few} of {all_of_them} questions the server does not say"
