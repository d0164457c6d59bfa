"""Warning signs of a run: which were seen at which step, and what to try, from the rows of metrics.csv alone.

A sign is reported when it appears, and again only after it was gone. Nothing here uses a clock, files or torch: a
running trainer passes its rows one by one, and the history of a finished run is judged by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

from rewardlab.analysis.metrics import current_columns
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.analysis.signs import AT_EVALUATION, MOSTLY, WHILE_TRAINING, History, Look, RunFacts
from rewardlab.analysis.signs_at_ends import behind_at_the_end, one_side_cut, reversed_at_the_end, shallow_labels
from rewardlab.core.types import Estimate

GONE: Final = 3
"""Consecutive checks without a sign after which it is reported again if it returns."""

ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "overfitting": "best/ keeps the best evaluation. Try fewer --epochs or --steps, a lower --lr, "
        "--early-stopping-patience 3, --score-regularization-lambda 0.1, or more data.",
        "reversed_labels": "Look whether --dataset, --eval-dataset and --test-dataset mean the same reply by `chosen` "
        "(samples.txt shows training rows), and each of their sources; for soft labels and K-wise scores, which end of "
        "the scale is good.",
        "shallow_labels": "A model may learn this and nothing else, and test data made the same way do not show it. "
        "Look with `rewardlab data inspect --samples 20` at what marks the preferred replies (length, an opening, a "
        "format) and whether it should count; `rewardlab diagnose` and the report's part on length show what a model "
        "knows beyond.",
        "behind_baseline": "The model has not learned what simpler means find in the same training pairs, or, where "
        "the one before training is better, has lost what it knew. Try a --lr three to ten times lower or higher, or "
        "more data; `rewardlab probe` shows what a head on the frozen model finds, and `rewardlab data mislabels` "
        "which labels look wrong.",
        "no_skill": "Try a --lr three to ten times higher (lower, if the loss has been far above log 2 or the gradient "
        "norm has fallen to next to nothing), and with --lora the --lora-target-modules all-linear; look at "
        "samples.txt: are the replies cut, and do the labels follow from them?",
        "exploding": "Try a --lr three to ten times lower, a longer --warmup-ratio, a lower --max-grad-norm or "
        "--weight-decay, or --precision fp32.",
        "oscillating": "Try a lower --lr, a schedule that falls (--lr-scheduler cosine), or a larger --batch-size.",
        "narrow_scores": "Try a higher --lr or more --epochs, and less of --label-smoothing, "
        "--score-regularization-lambda, --regularization-lambda and --center-lambda.",
        "growing_scores": "Try --score-regularization-lambda 0.1, more --label-smoothing, or fewer --epochs.",
        "frozen_head": "The head must train: look at what changed requires_grad or detached the scores.",
        "frozen_backbone": "Only the head learns. With --lora look at --lora-target-modules; `rewardlab probe` fits a "
        "head on a frozen model in seconds.",
        "live_differs": "The evaluations on the way chose by another model than the one that was saved; judge it by "
        "the closing tables. Nearer to it: after a run in half precision --half-rounding stochastic or --precision "
        "fp32; on quantised weights --quantization int8, or none; after --save-dtype in half precision, float32.",
        "other_precision": "In half precision another model is served than in float32. Serve it in float32; train "
        "with --precision fp32, or, if it was not, with --half-rounding stochastic.",
        "one_side_cut": "A model may learn who was cut, and nothing else. Raise --max-seq-len, or leave long rows out "
        "with --truncation drop; --diagnostic-mode length_matched shows what is left among replies of nearly equal "
        "length.",
        "truncated": "Raise --max-seq-len, or leave long rows out with --truncation drop.",
    }
)
"""Name of every sign -> what to try."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class WarningSign:
    """A sign that was seen at a step, and what to try."""

    step: int
    name: str
    """A key of `ADVICE`."""
    text: str
    """What was seen: a sentence with the numbers."""
    advice: str

    def as_dict(self) -> dict[str, object]:
        """Return the sign as a JSON mapping."""
        return asdict(self)

    def line(self) -> str:
        """Return the sign as one line for the log and the report."""
        return f"{self.name}: {self.text} {self.advice}"


class Health:
    """Judges the rows of a run as they come, and returns the signs that are new."""

    def __init__(self, facts: RunFacts) -> None:
        self.history = History(facts)
        self._gone: dict[str, int] = {}
        """Sign that was reported -> checks since it was last seen."""
        self._told: set[str] = set()
        """The names of all signs so far."""

    def start(
        self,
        truncation: Mapping[str, tuple[int, int]],
        shortened: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        cut_alone: Mapping[str, tuple[int, int, int]] = MappingProxyType({}),
    ) -> list[WarningSign]:
        """Return the signs in the data: whether most of its replies were cut, or cuts tell which reply is preferred.

        `truncation` maps a name of data to (replies whose prompt was cut, replies), `shortened` to (replies of which
        the middle was cut, replies), `cut_alone` to (preferences of which the preferred reply alone was cut, of which
        the other one alone was, preferences). A rule of truncation cuts only one of prompts and middles.
        """
        signs = []
        for what, counts in (("prompts were cut", truncation), ("replies lost their middle", shortened)):
            cut = {name: (part, of) for name, (part, of) in counts.items() if of and part >= MOSTLY * of}
            if cut:
                shares = "; ".join(f"{part} of {of} replies of the {name} data" for name, (part, of) in cut.items())
                signs.append(self._sign("truncated", f"{what} to fit the limit of tokens: {shares}."))
        return [*signs, *self._seen("one_side_cut", one_side_cut(cut_alone))]

    def judge_baselines(self, baselines: Mapping[str, Mapping[str, Estimate]]) -> list[WarningSign]:
        """Return a sign if a baseline leaves next to nothing to learn; see `shallow_labels`."""
        return self._seen("shallow_labels", shallow_labels(baselines))

    def judge_chosen(self, accuracies: Mapping[str, Estimate]) -> list[WarningSign]:
        """Return a sign if the chosen model is clearly worse than a coin on some data; see `reversed_at_the_end`."""
        return self._seen("reversed_labels", reversed_at_the_end(accuracies))

    def judge_beside(self, differences: Mapping[str, Estimate], *, data: str) -> list[WarningSign]:
        """Return a sign if a baseline is clearly better than the chosen model; see `behind_at_the_end`.

        Where labels mean the opposite any coin is better, and that has been told.
        """
        if "reversed_labels" in self._told:
            return []
        return self._seen("behind_baseline", behind_at_the_end(differences, data=data))

    def _seen(self, name: str, text: str | None) -> list[WarningSign]:
        return [] if text is None or name in self.history.facts.intended else [self._sign(name, text)]

    def judge_precisions(self, card: PrecisionCard) -> list[WarningSign]:
        """Return a sign if half precision changes the margins of the saved model beyond the interval of their mean."""
        return self._compare("other_precision", card)

    def judge_live(self, card: PrecisionCard) -> list[WarningSign]:
        """Return a sign if the chosen model, as evaluated during training, differs as much from the saved one."""
        return self._compare("live_differs", card)

    def _compare(self, sign: str, card: PrecisionCard) -> list[WarningSign]:
        """Return `sign` if the card has notable differences."""
        if not (notable := card.notable()):
            return []
        margin = card.margin
        if lost := [f"{card.not_finite[name]} in {name}" for name in notable if card.not_finite[name]]:
            return [self._sign(sign, f"scores are not finite: {' and '.join(lost)}.")]
        errors = " and ".join(f"{card.margin_error[name]:.2f} in {name}" for name in notable)
        return [
            self._sign(
                sign,
                f"margins are off by {errors} (root mean square), beyond what the interval of the mean margin in "
                f"the saved folder in float32, {margin.value:.2f} [{margin.low:.2f}, {margin.high:.2f}], leaves open.",
            )
        ]

    def offer(self, row: Row) -> list[WarningSign]:
        """Return the new signs after a row of metrics.csv, or after a part of it: the values of one step may come in
        parts.

        Cells may be numbers, numbers as text, empty or None. Rows come in the order of their steps.
        """
        values = {name: number for name, cell in current_columns(row).items() if (number := _number(cell)) is not None}
        history = self.history
        history.step = int(values["step"])
        new = []
        if "train_loss" in values or "train_nll" in values:
            history.add_trained(values)
            new += self._look(WHILE_TRAINING)
        if "eval_loss" in values or "eval_accuracy" in values:
            history.add_evaluated(values)
            new += self._look(AT_EVALUATION)
        return new

    def _look(self, looks: Mapping[str, Look]) -> list[WarningSign]:
        """Return the signs that these checks see and that were not reported lately."""
        new = []
        for name, look in looks.items():
            text = None if name in self.history.facts.intended else look(self.history)
            if text is None:
                self._gone[name] = self._gone.get(name, GONE) + 1
            else:
                if self._gone.get(name, GONE) >= GONE:
                    new.append(self._sign(name, text))
                self._gone[name] = 0
        return new

    def _sign(self, name: str, text: str) -> WarningSign:
        self._told.add(name)
        return WarningSign(step=self.history.step, name=name, text=text, advice=ADVICE[name])


def judge(
    rows: Iterable[Row],
    facts: RunFacts | None = None,
    *,
    truncation: Mapping[str, tuple[int, int]] | None = None,
    shortened: Mapping[str, tuple[int, int]] | None = None,
) -> list[WarningSign]:
    """Return every sign of a whole history, in the order in which a running trainer would have reported them.

    Without `facts`, they are derived from the rows.
    """
    rows = list(rows)
    health = Health(facts or _facts_of(rows))
    signs = health.start(truncation or {}, shortened or {})
    for row in rows:
        signs += health.offer(row)
    return signs


def _facts_of(rows: Sequence[Row]) -> RunFacts:
    """Derive the facts of a run: it ends at the last row, and its warm-up ends where the learning rate is highest."""
    steps = [int(number) for row in rows if (number := _number(row.get("step"))) is not None]
    rates = [(rate, row) for row in rows if (rate := _number(row.get("lr"))) is not None]
    highest = max(rates, key=lambda entry: entry[0], default=(0.0, {"step": 0}))
    rising = bool(rates) and rates[0][0] < highest[0]
    return RunFacts(num_steps=max(steps, default=0), warmup_steps=int(highest[1]["step"]) if rising else 0)


def _number(cell: Any) -> float | None:
    """Return a cell as a finite number, or None."""
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
