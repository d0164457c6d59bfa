"""The conditions of each warning sign, as functions of the rows so far, with their thresholds and the reasons for them.

Evaluations are compared by their intervals, as in `stats.difference`, so that noise raises no sign. Where a value or an
interval is missing, no sign is raised either.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from rewardlab.analysis.stats import wilson

LOG_2: Final = math.log(2)
"""Loss of a model that always predicts one half."""
SURE: Final = 1.5
"""Half widths of a 95 % interval (z = 2.9) by which a difference must be clear. The usual 1 would raise false signs,
since a run is checked dozens of times."""
SKILLED: Final = 0.6
"""Accuracy of a run that learns. One that is told to learn nothing must be clearly below it."""
LEARNED: Final = 0.02
"""How far below log 2 a loss shows skill: the distance for a calibrated model with that accuracy."""
NOTABLE: Final = 0.01
"""Smallest rise of a loss that is reported, in nats. Smaller ones occur in models that are nearly certain, and
right."""
SETTLED_STEPS: Final = 20
"""Steps past the warm-up before a model is expected to have learned anything."""
SETTLED_SHARE: Final = 0.4
"""Share of the run after which the same is expected."""
MANY_PAIRS: Final = 5_000
"""Comparisons past the warm-up after which the same is expected in a run of any length."""
ENOUGH_PAIRS: Final = 200
"""Comparisons without which a mean training loss is too uncertain (± 0.05) to say that nothing was learned."""
EARLY_SHARE: Final = 0.2
"""Share of the run in which an untrained head may still disagree with the labels by accident."""
MOST_ROWS: Final = 500
"""Most rows that a check reads, so that it takes no longer in a long run."""
SPIKE_PAIRS: Final = 64
"""Comparisons (and at least two rows) over which an explosion must last: a single bad batch does not warn."""
LOSS_TIMES: Final = 3.0
"""Multiple of its running median, and of log 2, above which a loss counts as exploding."""
GRADIENT_TIMES: Final = 10.0
"""The same for a gradient norm, which moves by factors of two or three in healthy runs."""
COLLAPSED: Final = 30.0
"""Factor by which a gradient norm has fallen where a model has lost what it could tell apart. Of labels that follow
from nothing, and with a rate that is too low, the norm stays of one size."""
MEDIAN_ROWS: Final = 50
"""Rows over which a running median is taken."""
FEWEST_ROWS: Final = 5
"""Rows that a median of gradient norms needs."""
LATE_SHARE: Final = 2 / 3
"""Where the last third of a run begins."""
MOST_LATE: Final = 30
"""Most evaluations of the last third that are compared."""
NEEDED_SPREAD: Final = 0.88
"""Standard deviation of β · score over the log odds of the accuracy, for a calibrated model with normal differences."""
NARROW: Final = 1 / 3
"""Part of the needed spread below which scores are too close together."""
CONSTANT: Final = 0.02
"""Standard deviation of β · score at which every reply has the same probability to within a per cent."""
GROWING_EVALUATIONS: Final = 5
"""Evaluations in a row over which scores must have grown."""
GROWTH: Final = 1.5
"""Factor by which they must have grown."""
LARGE_MARGIN: Final = 3.0
"""β · margin above which growth hardly changes a probability: σ(3) is 0.95."""
LARGE_SCORE: Final = 5.0
"""The same for scores, whose differences are √2 as wide."""
FROZEN_ROWS: Final = 3
"""Consecutive rows in which a gradient must be zero."""
ROUNDING: Final = 1e-6
"""Relative difference of two gradient norms up to which they count as equal in float32."""
MOSTLY: Final = 0.5
"""Share of truncated replies from which the data differ too much from what was collected."""
REVERSED: Final = (("eval_accuracy", 0.5), ("eval_margin", 0.0))
"""Values, and the borders below which they show labels the other way round."""


Values = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that its rows do not hold."""

    num_steps: int
    """Steps of the whole run."""
    warmup_steps: int = 0
    beta: float = 1.0
    """σ(β · score difference) is the probability of the preferred reply."""
    label_certainty: float = 1.0
    """Mean label of the better replies of the evaluation data: a calibrated model is as sure as soft labels at most."""
    head_alone: bool = False
    """Whether nothing but the head is meant to train."""
    intended: frozenset[str] = frozenset()
    """Signs of what the run is for, as of a control that shows that nothing can be learnt. They are not told."""


class History:
    """The rows so far, as numbers."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.step = 0
        self.trained: list[Values] = []
        """Rows with training values."""
        self.evaluated: list[Values] = []
        """Rows with an evaluation."""
        self.best: dict[str, Values] = {}
        """Evaluation loss and accuracy -> the best of these rows but for the last two, of equal ones the first."""
        self.past_warmup = 0.0
        """Comparisons trained on after the warm-up."""

    def add_trained(self, row: Values) -> None:
        """Add a row with training values."""
        self.trained.append(row)
        if row["step"] > self.facts.warmup_steps:
            self.past_warmup += _pairs(row)

    def add_evaluated(self, row: Values) -> None:
        """Add a row with an evaluation."""
        self.evaluated.append(row)
        earlier = self.evaluated[-3] if len(self.evaluated) > 2 else {}
        for name, sign in (("eval_loss", -1), ("eval_accuracy", 1)):
            best = self.best.get(name)
            if name in earlier and (best is None or sign * earlier[name] > sign * best[name]):
                self.best[name] = earlier

    @property
    def settled(self) -> bool:
        """Whether a healthy run would have learned something by now."""
        facts = self.facts
        if self.step < facts.warmup_steps + SETTLED_STEPS:
            return False
        return self.step >= SETTLED_SHARE * facts.num_steps or self.past_warmup >= MANY_PAIRS


Look = Callable[[History], str | None]
"""A check: returns a sentence that says what it sees, or None."""


# --- signs -----------------------------------------------------------------------------------------------------


def _overfitting(history: History) -> str | None:
    """Report that the last two evaluations are both worse than an earlier one, and the training data fitted better."""
    before, now = [{}, {}, *history.evaluated[-2:]][-2:]
    if any(all(_below(row, *limit) for row in (before, now)) for limit in REVERSED):
        # The model learns the opposite of the labels, for which there is another sign.
        return None
    for name, what, went, sign in (
        ("eval_loss", "loss", "rose", -1),
        ("eval_accuracy", "accuracy", "fell", 1),
    ):
        best = history.best.get(name)
        if best is None or not all(_worse(row, best, name, sign) for row in (before, now)):
            continue
        if name == "eval_loss" and min(before[name], now[name]) - best[name] < NOTABLE:
            continue
        if trained := _fitted_better(history, best, now):
            return (
                f"the evaluation {what} {went} from {_shown(best, name)} at step {best['step']:.0f} to "
                f"{_shown(now, name)}, beyond the intervals, while {trained}."
            )
    return None


def _fitted_better(history: History, best: Values, now: Values) -> str | None:
    """Return a text on how the training loss fell since `best`.

    None if it did not fall, or is not below the loss of the evaluation and that of a coin: a model that is worse on
    its training data than a coin has memorised nothing.
    """
    first, last = best.get("train_eval_loss"), now.get("train_eval_loss")
    if first is not None and last is not None:
        better = last < min(first, LOG_2) and now.get("gap_loss_low", 0.0) > 0
        return f"that of the watched training rows went from {first:.3f} to {last:.3f}" if better else None
    end = bisect_right(history.trained, best["step"], key=lambda row: row["step"])
    after = history.trained[end:]
    until = history.trained[max(0, end - len(after)) : end] or after[:1]
    recent = after[-max(1, len(after) // 3) :]
    if not recent or not until:
        return None
    first, last = _mean(until, "train_nll"), _mean(recent, "train_nll")
    if last < min(first, LOG_2) and last < now.get("eval_loss_low", -math.inf):
        return f"the training loss went from {first:.3f} to {last:.3f}"
    return None


def _reversed_labels(history: History) -> str | None:
    """Report an accuracy below one half (or a negative margin) twice in a row, past the beginning, and not rising."""
    facts = history.facts
    first, last = history.evaluated[0], history.evaluated[-2:]
    if len(last) < 2 or any(
        row["step"] <= facts.warmup_steps or row["step"] < EARLY_SHARE * facts.num_steps for row in last
    ):
        return None
    for name, border in REVERSED:
        if all(_below(row, name, border) for row in last) and not _above(last[-1], first, name, SURE):
            return (
                f"the evaluation {name.removeprefix('eval_')} is {_shown(last[-1], name)}, below {border:g} by more "
                f"than its interval, after {history.step} steps."
            )
    return None


def _no_skill(history: History) -> str | None:
    """Report that neither the recent training loss nor the accuracies are better than chance."""
    facts = history.facts
    if not history.settled:
        return None
    latest = history.trained[-MOST_ROWS:]
    rows = [row for row in latest if row["step"] > max(facts.warmup_steps, history.step / 2)]
    pairs = sum(map(_pairs, rows))
    if pairs < ENOUGH_PAIRS or (loss := _mean(rows, "train_nll")) < LOG_2 - LEARNED:
        return None
    accuracy = _mean(rows, "train_accuracy")
    if math.isfinite(accuracy):
        own = wilson(accuracy * pairs, int(pairs))
        # Of few pairs the accuracy of a model that learns may not be above one half either.
        if own.low > 0.5 or own.value + SURE * (own.high - own.value) >= SKILLED:
            return None
    evaluated = ""
    if history.evaluated:
        now = history.evaluated[-1]
        if now.get("eval_accuracy_low", 0.0) > 0.5 or now.get("eval_loss_high", math.inf) < LOG_2:
            return None
        evaluated = f", and the evaluation accuracy {_shown(now, 'eval_accuracy')}" if "eval_accuracy" in now else ""
    right = f"their accuracy is {accuracy:.3f}" if math.isfinite(accuracy) else "all of them are ties"
    return (
        f"the training loss over the last {pairs:.0f} pairs is {loss:.3f}, a coin toss has {LOG_2:.3f}; "
        f"{right}{evaluated}.{_far_too_high(history.trained, rows, loss)}"
    )


def _far_too_high(trained: Sequence[Values], rows: Sequence[Values], loss: float) -> str:
    """Return a sentence if these rows, with a mean loss, show steps that are far too large: a loss far above that of a
    coin, or gradients that are next to nothing beside the first ones."""
    if loss > LOSS_TIMES * LOG_2:
        return " So large a loss shows steps that are far too large: --lr is too high, not too low."
    first = [row["grad_norm"] for row in trained[:FEWEST_ROWS] if "grad_norm" in row]
    now = [row["grad_norm"] for row in rows if "grad_norm" in row]
    if not first or not now or (norm := statistics.median(now)) * COLLAPSED >= max(first):
        return ""
    return (
        f" The gradient norm fell from {max(first):.3g} to {norm:.3g}, as where steps that are far too large have made "
        f"all scores alike: --lr is too high, not too low."
    )


def _exploding(history: History) -> str | None:
    """Report a loss or gradient norm far above what it was, or a loss far above that of a coin where a healthy model
    has learned something, for more than one batch."""
    recent = _recent(history.trained)
    if not recent:
        return None
    end = len(history.trained) - len(recent)
    before = history.trained[max(0, end - MEDIAN_ROWS) : end]
    losses = [row["train_loss"] for row in before if "train_loss" in row]
    if losses and all("train_loss" in row for row in recent):
        usual = statistics.median(losses)
        loss = statistics.median_low(row["train_loss"] for row in recent)
        if loss > LOSS_TIMES * max(usual, LOG_2):
            return f"the training loss is {loss:.3g} over {_rows(recent)}; its median before was {usual:.3g}."
    # A rate that is far too high from the first step has no better median before.
    nlls = [row["train_nll"] for row in recent if "train_nll" in row]
    if history.settled and nlls and (nll := statistics.median_low(nlls)) > LOSS_TIMES * LOG_2:
        return f"the training loss is {nll:.3g} over {_rows(recent)}, where a coin toss has {LOG_2:.3f}."
    norms = [row["grad_norm"] for row in before if "grad_norm" in row]
    now = [row["grad_norm"] for row in recent if "grad_norm" in row]
    if now and len(norms) >= FEWEST_ROWS:
        # The norm must exceed its early level too: once a model fits its data its gradients are small, and that of any
        # single batch is a multiple of their median.
        first = [row["grad_norm"] for row in history.trained[:FEWEST_ROWS] if "grad_norm" in row]
        usual = max(statistics.median(norms), statistics.median(first or norms))
        norm = statistics.median_low(now)
        if norm > GRADIENT_TIMES * usual > 0:
            return f"the gradient norm is {norm:.3g} over {_rows(recent)}; its median before was {usual:.3g}."
    return None


def _recent(rows: Sequence[Values]) -> list[Values]:
    """Return the last rows, at least two, that hold `SPIKE_PAIRS` comparisons; none if there are not so many."""
    pairs = 0.0
    for number in range(1, min(len(rows), MOST_ROWS) + 1):
        pairs += _pairs(rows[-number])
        if number >= 2 and pairs >= SPIKE_PAIRS:
            return list(rows[-number:])
    return []


def _oscillating(history: History) -> str | None:
    """Report that the accuracy falls and rises again late in a run (or the other way), further than intervals allow."""
    late = [row for row in history.evaluated[-MOST_LATE:] if row["step"] >= LATE_SHARE * history.facts.num_steps]
    for middle in range(1, len(late) - 1):
        for sign in (1, -1):
            turn = late[middle]
            before = max(late[:middle], key=lambda row: sign * row.get("eval_accuracy", -sign * math.inf))
            after = max(late[middle + 1 :], key=lambda row: sign * row.get("eval_accuracy", -sign * math.inf))
            if all(_worse(turn, row, "eval_accuracy", sign, width=1.0) for row in (before, after)):
                return (
                    f"the evaluation accuracy went {_shown(before, 'eval_accuracy')}, {_shown(turn, 'eval_accuracy')}, "
                    f"{_shown(after, 'eval_accuracy')} at steps {before['step']:.0f}, {turn['step']:.0f} and "
                    f"{after['step']:.0f}: further than the intervals allow."
                )
    return None


def _narrow_scores(history: History) -> str | None:
    """Report scores that are (nearly) all the same, or too close together for the accuracy that their order shows."""
    now = history.evaluated[-1]
    if not history.settled or "eval_score_std" not in now:
        return None
    spread = history.facts.beta * now["eval_score_std"]
    # An accuracy of 1 would need an infinite spread, and soft labels need no more than they say themselves.
    low = min(now.get("eval_accuracy_low", 0.0), history.facts.label_certainty, 1 - 1e-3)
    needed = NEEDED_SPREAD * math.log(low / (1 - low)) if low > 0.5 else 0.0
    if spread >= max(CONSTANT, NARROW * needed):
        return None
    what = f"; an accuracy of {_shown(now, 'eval_accuracy')} needs {needed:.2g} or more" if needed > CONSTANT else ""
    return (
        f"the scores of the evaluation data lie in a narrow band: {now.get('eval_score_mean', math.nan):.3g} with a "
        f"standard deviation of {now['eval_score_std']:.2g}{what}."
    )


def _growing_scores(history: History) -> str | None:
    """Report that margin or scores grew from evaluation to evaluation, while accuracy and loss did not improve."""
    rows = history.evaluated[-GROWING_EVALUATIONS:]
    first, now = rows[0], rows[-1]
    if len(rows) < GROWING_EVALUATIONS or first["step"] <= history.facts.warmup_steps:
        return None
    if _above(now, first, "eval_accuracy", 1.0) or not now.get("eval_loss", -1.0) >= first.get("eval_loss", math.inf):
        return None
    for what, size, large in (
        ("margin", lambda row: row.get("eval_margin", 0.0), LARGE_MARGIN),
        ("size of the scores", lambda row: _size(row), LARGE_SCORE),
    ):
        sizes = [history.facts.beta * size(row) for row in rows]
        steady = all(later > earlier for earlier, later in pairwise(sizes))
        if steady and sizes[-1] >= max(large, GROWTH * sizes[0]):
            return (
                f"the {what} (times β) grew from {sizes[0]:.2f} at step {first['step']:.0f} to {sizes[-1]:.2f} over "
                f"{len(rows)} evaluations, while the accuracy went from {_shown(first, 'eval_accuracy')} to "
                f"{_shown(now, 'eval_accuracy')} and the loss from {first['eval_loss']:.3f} to {now['eval_loss']:.3f}."
            )
    return None


def _frozen_head(history: History) -> str | None:
    """Report that the gradient of the head has been zero for `FROZEN_ROWS` rows."""
    rows = history.trained[-FROZEN_ROWS:]
    if len(rows) < FROZEN_ROWS or any(row.get("head_grad_norm") != 0 for row in rows):
        return None
    return f"the gradient of the head has been zero since step {rows[0]['step']:.0f}."


def _frozen_backbone(history: History) -> str | None:
    """Report that the whole gradient has been that of the head for `FROZEN_ROWS` rows, so nothing else trains."""
    rows = history.trained[-FROZEN_ROWS:]
    if history.facts.head_alone:
        return None
    if len(rows) < FROZEN_ROWS or not all("grad_norm" in row and "head_grad_norm" in row for row in rows):
        return None
    if not all(0 < row["grad_norm"] <= row["head_grad_norm"] * (1 + ROUNDING) for row in rows):
        return None
    return (
        f"the gradient of everything but the head has been zero since step {rows[0]['step']:.0f}: its norm is "
        f"{rows[-1]['grad_norm']:.3g}, the head's alone {rows[-1]['head_grad_norm']:.3g}."
    )


WHILE_TRAINING: Final[Mapping[str, Look]] = MappingProxyType(
    {"exploding": _exploding, "frozen_head": _frozen_head, "frozen_backbone": _frozen_backbone, "no_skill": _no_skill}
)
AT_EVALUATION: Final[Mapping[str, Look]] = MappingProxyType(
    {
        "overfitting": _overfitting,
        "reversed_labels": _reversed_labels,
        "oscillating": _oscillating,
        "narrow_scores": _narrow_scores,
        "growing_scores": _growing_scores,
    }
)


# --- numbers ---------------------------------------------------------------------------------------------------


def _pairs(row: Values) -> float:
    return row.get("train_pairs", 0.0)


def _mean(rows: Sequence[Values], name: str) -> float:
    """Return the mean of a value, weighted by pairs; NaN if no row has it."""
    known = [(row[name], _pairs(row)) for row in rows if name in row]
    weight = sum(pairs for _, pairs in known)
    return sum(value * pairs for value, pairs in known) / weight if weight else math.nan


def _size(row: Values) -> float:
    """Return the root mean square of the scores."""
    return math.hypot(row.get("eval_score_mean", 0.0), row.get("eval_score_std", 0.0))


def _reach(row: Values, name: str, sign: int, width: float) -> float:
    """Return the value plus (sign 1) or minus (−1) `width` times the half width of its interval; NaN without one."""
    limit = row.get(f"{name}_high" if sign > 0 else f"{name}_low", math.nan)
    return row[name] + width * (limit - row[name])


def _below(row: Values, name: str, border: float) -> bool:
    """Return whether a value is clearly below a border."""
    return name in row and _reach(row, name, 1, SURE) < border


def _above(one: Values, other: Values, name: str, width: float) -> bool:
    """Return whether `one` exceeds `other` by more than `width` intervals of the difference (Zou & Donner 2008).

    False where a value or an interval is missing. Two evaluations of the same pairs are correlated, which the interval
    ignores, so it is conservative.
    """
    if name not in one or name not in other:
        return False
    apart = one[name] - other[name]
    noise = math.hypot(_reach(one, name, -1, 1.0) - one[name], _reach(other, name, 1, 1.0) - other[name])
    return apart > width * noise


def _worse(row: Values, best: Values, name: str, sign: int, width: float = SURE) -> bool:
    """Return whether `row` is clearly worse than `best` where more (sign 1) or less (−1) is better."""
    return _above(best, row, name, width) if sign > 0 else _above(row, best, name, width)


def _shown(row: Values, name: str) -> str:
    """Return a value with its interval: `0.734 [0.695, 0.771]`."""
    if name not in row:
        return "—"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return f"{row[name]:.3f} [{low:.3f}, {high:.3f}]" if low is not None and high is not None else f"{row[name]:.3f}"


def _rows(rows: Sequence[Values]) -> str:
    return f"the last {sum(map(_pairs, rows)):.0f} pairs"
