"""The sections that follow from the score rows of one evaluation: calibration, rewards, length, slices and ROC.

All numbers are those of `analysis.judgement`; here they are laid out and drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from rewardlab.analysis.distributions import Distribution, quantile
from rewardlab.analysis.judgement import Judgement
from rewardlab.analysis.measures import AT_THRESHOLD
from rewardlab.analysis.slices import BUILT_IN, Slice
from rewardlab.core.terminal import number_of
from rewardlab.report.charts import Axis, Bar, Chart, Dot, Rule, axis, band, line, share_axis
from rewardlab.report.document import (
    Beside,
    Block,
    Charts,
    Section,
    Table,
    shown,
    with_intervals,
)
from rewardlab.report.folder import Record
from rewardlab.report.tables import MOST_DECIMALS, column_notes, digits_of, format_count, missing_intervals

RATES: Final = {"eval_tpr": "preferred above", "eval_fnr": "preferred below", "eval_fpr": "other above"}
"""Rate at a threshold -> its column."""
RANKS: Final = {
    "eval_kendall_tau": "mean Kendall's τ of the replies to a prompt",
    "eval_kwise_spearman": "mean Spearman's ρ of the replies to a prompt",
    "eval_ndcg": "mean NDCG of the replies to a prompt",
    "eval_best_of_k": "share of prompts whose best reply has the highest score",
    "eval_regret": "mean loss of taking the highest score (0 the best reply, 1 the worst)",
    "eval_gold_regret": "mean gold score lost by taking the highest score",
    "eval_gold_spearman": "Spearman's ρ of scores and gold scores over all replies",
}
"""Number about rankings -> what a reader is told that it is."""
DECIMALS: Final = 3
IN_SCORES: Final = {
    *("eval_margin", "eval_margin_std", "eval_score_mean", "eval_score_std", "eval_chosen_mean", "eval_rejected_mean")
}
"""Numbers in units of the score, which may be of any size."""
SIDE_BY_SIDE: Final = 33
"""Characters that fit below a chart in spans such as −231…−20, in wide fonts."""


def calibration_section(judgement: Judgement) -> Section:
    """Return the reliability curve with its null band, and the numbers about probabilities."""
    names = {
        "expected calibration error": "eval_ece",
        "negative log-likelihood": "eval_loss",
        "Brier score": "eval_brier",
        "of it miscalibration": "eval_brier_miscalibration",
        "of it discrimination": "eval_brier_discrimination",
        "of it uncertainty": "eval_brier_uncertainty",
        "slope (1 if calibrated, below 1 if too sure)": "eval_calibration_slope",
        "intercept (0 if calibrated)": "eval_calibration_intercept",
    }
    table = _numbers(judgement, names, caption="How far probabilities can be believed")
    curve = judgement.reliability
    if not curve.probability:
        return Section(title="Calibration", blocks=(table,))
    miscalibration = judgement["eval_brier_miscalibration"]
    at_value = miscalibration.high == miscalibration.value
    drawn = band(0, zip(curve.band_probability, curve.band_low, curve.band_high, strict=True), null=True)
    half = Axis(label="the model's probability", low=0.5, high=1.0, ticks=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    chart = Chart(
        title="Reliability of the model's probabilities",
        words=f"On the diagonal a probability is what it says; below it the model is too sure. Miscalibration "
        f"{shown(miscalibration)} of the Brier score, where a calibrated model would have "
        f"{curve.null_miscalibration[0]:.3f} to {curve.null_miscalibration[1]:.3f}. "
        + ("Its interval ends at the value, which noise makes too high. " if at_value else "")
        + "Steps are by isotonic regression.",
        x=half,
        y=Axis(
            label="share of its choices that are right", low=0.4, high=1.0, ticks=(0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        ),
        lines=(line(0, zip(curve.probability, curve.recalibrated, strict=True)),),
        bands=() if drawn is None else (drawn,),
        rules=(Rule(axis="segment", at=0.5),),
        legend=((0, "this model"),),
        notes=("The grey band holds 95% of the curves of a calibrated model with the same probabilities.",),
    )
    return Section(title="Calibration", blocks=(Beside(chart=chart, table=table),))


def rewards_section(judgement: Judgement, record: Record) -> Section:
    """Return histograms of rewards and of margins, margins over time, and their means."""
    distributions, digits = judgement.distributions, score_digits(judgement)
    charts = [
        _histogram(
            "Rewards of preferred and other replies",
            {"preferred": distributions["chosen"], "other": distributions["rejected"]},
            "reward (score)",
            digits=digits,
        ),
        _histogram("Margins", {"": distributions["margin"]}, "margin (score difference)", digits=digits),
        _margins_over_time(record),
    ]
    names = {
        "margin, mean": "eval_margin",
        "margin, standard deviation": "eval_margin_std",
        "share of margins below 0": "eval_negative_margin_rate",
        "reward of preferred replies, mean": "eval_chosen_mean",
        "reward of other replies, mean": "eval_rejected_mean",
        "reward of all replies, mean": "eval_score_mean",
        "reward of all replies, standard deviation": "eval_score_std",
    }
    table = _numbers(judgement, names, caption="Rewards and margins", digits=digits)
    drawn = Charts(charts=tuple(chart for chart in charts if chart))
    return Section(title="Rewards and margins", blocks=(drawn, table, _percentiles(distributions, digits=digits - 1)))


def _percentiles(distributions: Mapping[str, Distribution], *, digits: int) -> Table:
    """Return a table of the lowest value, the percentiles and the highest value of rewards and margins."""
    titles = {
        "chosen": "reward of preferred replies",
        "rejected": "reward of other replies",
        "score": "reward of all replies",
        "margin": "margin",
    }
    columns = {
        titles[key]: {
            "lowest": own.lowest,
            **{f"{name[1:]} %": estimate for name, estimate in own.percentiles.items()},
            "highest": own.highest,
        }
        for key in titles
        if (own := distributions.get(key)) is not None
    }
    shares = list(dict.fromkeys(share for own in columns.values() for share in own))
    known = {name: [one for one in own.values() if not math.isnan(one.low)] for name, own in columns.items()}
    lacking = {share: [own[share] for own in columns.values() if share in own] for share in shares}
    return Table(
        caption="Percentiles and extremes",
        header=("share of values below", *columns),
        rows=tuple((share, *(shown(own.get(share), digits=digits) for own in columns.values())) for share in shares),
        notes=(*column_notes(known), *missing_intervals(lacking)),
        notes_folded=True,
    )


def ranking_section(judgement: Judgement) -> Section:
    """Return the ROC curve, and the numbers about rankings where preferences have more than two replies."""
    names = {
        "area under the ROC curve": "eval_roc_auc",
        "accuracy": "eval_accuracy",
        "accuracy, mean over sources": "eval_accuracy_macro",
        "accuracy, mean over prompts": "eval_accuracy_by_prompt",
        "accuracy, weighted by how sure the labels are": "eval_accuracy_soft",
        "agreement with soft labels": "eval_agreement",
        "the most agreement that these labels allow": "eval_agreement_ceiling",
    }
    known = set(names.values())
    soft = judgement.counts.soft_labels > 0 or judgement.counts.label_ties > 0
    if not soft:
        names = {name: metric for name, metric in names.items() if "soft" not in name and "sure" not in name}
        names.pop("the most agreement that these labels allow")
    kwise = ("kendall", "ndcg", "best", "gold", "regret", "kwise")
    names |= {
        RANKS.get(metric, metric.removeprefix("eval_").replace("_", " ")): metric
        for metric in judgement.estimates
        if metric not in known and any(word in metric for word in kwise)
    }
    table = _numbers(judgement, names, caption="Ranks")
    rates = _rates(judgement)
    roc = judgement.roc
    if len(roc.false_positive) < 2:
        return Section(title="ROC and ranks", blocks=(table, *rates))
    chart = Chart(
        title="ROC: preferred and other replies, by score",
        words=f"Area under the curve {shown(judgement['eval_roc_auc'])}; one half is chance. Scores of different "
        "prompts are compared here, which accuracy never does.",
        x=share_axis("other replies at or above the threshold"),
        y=share_axis("preferred replies, likewise"),
        lines=(line(0, zip(roc.false_positive, roc.true_positive, strict=True)),),
        rules=(Rule(axis="diagonal"),),
    )
    return Section(title="ROC and ranks", blocks=(Beside(chart=chart, table=table), *rates))


def _rates(judgement: Judgement) -> tuple[Table, ...]:
    """Return the rates of wrong and right acceptance at the requested thresholds; nothing without thresholds."""
    thresholds = dict.fromkeys(at for stem, _, at in (name.partition("@") for name in judgement.estimates) if at)
    found = {at: {stem: judgement.estimates.get(f"{stem}@{at}") for stem in RATES} for at in thresholds}
    rows = [(at, *map(shown, own.values())) for at, own in found.items() if any(own.values())]
    if not rows:
        return ()
    made = {RATES[stem]: [one for own in found.values() if (one := own[stem]) is not None] for stem in RATES}
    return (
        Table(
            caption="Replies accepted at thresholds of the score",
            header=("threshold", *RATES.values()),
            rows=tuple(rows),
            notes=(*(f"{title}: {AT_THRESHOLD[stem]}." for stem, title in RATES.items()), *column_notes(made)),
        ),
    )


def length_section(judgement: Judgement) -> Section:
    """Return how the model depends on length: accuracy by length difference, and with length controlled for."""
    names = {
        "accuracy": "eval_accuracy",
        "accuracy with length taken away": "eval_accuracy_length_controlled",
        "reward and length, rank correlation": "eval_score_length_spearman",
        "margin and length difference, rank correlation": "eval_margin_length_spearman",
        "log odds that length adds to what the scores say (below 0: they overrate it)": "eval_length_coefficient",
    }
    blocks: list[Block] = []
    for name in ("length_difference", "reply_tokens"):
        if found := judgement.slices.get(name, ()):
            blocks.append(_slice_table(name, found, digits=score_digits(judgement)))
    chart = _accuracy_by_length(judgement.slices.get("length_difference", ()))
    table = _numbers(judgement, names, caption="What length has to do with it")
    return Section(title="Length", blocks=(table if chart is None else Beside(chart=chart, table=table), *blocks))


def slices_section(judgement: Judgement) -> Section:
    """Return accuracy by source, truncation, size of the margin, and every other column that was asked for."""
    # The slices by length have their own section.
    left = [name for name in judgement.slices if name not in ("length_difference", "reply_tokens")]
    return Section(
        title="Slices",
        blocks=tuple(
            _slice_table(name, judgement.slices[name], digits=score_digits(judgement))
            for name in left
            if len(judgement.slices[name]) > 1 or name not in BUILT_IN
        ),
    )


def _numbers(judgement: Judgement, names: Mapping[str, str], *, caption: str, digits: int = DECIMALS) -> Table:
    """Return estimates as a table, with more `digits` than usual for those in units of the score; missing ones are left
    out."""
    there = {name: judgement.estimates[metric] for name, metric in names.items() if metric in judgement.estimates}
    notes = [
        "observations: comparisons, or prompts where one has several comparisons",
        *column_notes({name: [estimate] for name, estimate in there.items()}),
    ]
    return Table(
        caption=caption,
        header=("number", "value", "observations"),
        rows=tuple(
            (
                name,
                shown(estimate, digits=digits_of(estimate, least=digits if names[name] in IN_SCORES else DECIMALS)),
                format_count(estimate.n),
            )
            for name, estimate in there.items()
        ),
        notes=tuple(notes),
        notes_folded=True,
    )


def score_digits(judgement: Judgement) -> int:
    """Return how many decimals tell rewards apart: as usual, or more where they differ by less than a tenth."""
    spreads = (judgement.estimates[name].value for name in ("eval_score_std", "eval_margin_std"))
    known = [spread for spread in spreads if spread > 0]
    return max(DECIMALS, min(2 - math.floor(math.log10(min(known))), MOST_DECIMALS)) if known else DECIMALS


def _slice_table(name: str, found: Sequence[Slice], *, digits: int = DECIMALS) -> Table:
    """Return a table of accuracy, NLL and margin by slice, with the accuracy also drawn."""
    what = BUILT_IN.get(name, "column of the data")
    columns = {"accuracy": "eval_accuracy", "NLL": "eval_loss", "margin": "eval_margin"}
    return with_intervals(
        caption=f"By {name.replace('_', ' ')}: {what}",
        header=(name.replace("_", " "), *columns, "comparisons"),
        rows=[
            [
                own.label or "(empty)",
                *(
                    shown(own.estimates.get(metric), digits=digits if metric in IN_SCORES else DECIMALS)
                    for metric in columns.values()
                ),
                format_count(own.num_comparisons),
            ]
            for own in found
        ],
        estimates=[own.estimates.get("eval_accuracy") for own in found],
        label="accuracy",
        mark=0.5,
        notes=column_notes(
            {
                column: [own.estimates[metric] for own in found if metric in own.estimates]
                for column, metric in columns.items()
            }
        ),
        notes_folded=True,
    )


def _accuracy_by_length(found: Sequence[Slice]) -> Chart | None:
    """Return a chart of accuracy by length difference: a point with an interval for each slice, in order."""
    drawn = [(number, own) for number, own in enumerate(found) if "eval_accuracy" in own.estimates]
    if len(drawn) < 2:
        return None
    places = tuple(float(number) for number, _ in enumerate(found))
    labels = tuple(own.label.replace(" to ", "…").replace("-", "−") for own in found)
    staggered = any(len(one) + len(other) > 2 * SIDE_BY_SIDE / len(found) for one, other in pairwise(labels))
    across = "preferred reply minus the other (tokens)"
    dots = [
        Dot(
            series=0,
            at=(float(number), own.estimates["eval_accuracy"].value),
            low=own.estimates["eval_accuracy"].low,
            high=own.estimates["eval_accuracy"].high,
            text=f"{own.label} tokens: {shown(own.estimates['eval_accuracy'])}",
        )
        for number, own in drawn
        if math.isfinite(own.estimates["eval_accuracy"].value)
    ]
    return Chart(
        title="Accuracy by length difference",
        words="; ".join(f"{own.label} tokens: {shown(own.estimates['eval_accuracy'])}" for _, own in drawn) + ".",
        x=Axis(
            label=across,
            low=-0.5,
            high=len(found) - 0.5,
            ticks=places,
            names=labels,
            staggered=staggered,
        ),
        y=share_axis("share ranked as labelled"),
        dots=tuple(dots),
        rules=(Rule(axis="y", at=0.5),),
        notes=(*([f"Across: {across}."] if staggered else []), "The dotted line is chance."),
    )


def _histogram(title: str, named: Mapping[str, Distribution], label: str, *, digits: int) -> Chart | None:
    """Return a chart of histograms over one axis: the first as filled bars, the others as outlines over them."""
    if not any(own.counts for own in named.values()):
        return None
    first, *others = named.values()
    bars = [
        Bar(series=0, left=left, right=right, height=float(count))
        for (left, right), count in zip(pairwise(first.edges), first.counts, strict=True)
    ]
    ends = [edge for own in named.values() for edge in own.edges]
    heights = [float(count) for own in named.values() for count in own.counts]
    means = "; ".join(
        f"{f'{name}: ' if name else ''}mean {shown(own.mean, digits=digits)}" for name, own in named.items()
    )
    return Chart(
        title=title,
        words=f"{means[0].upper()}{means[1:]}. {number_of(first.num_values, 'comparison')}.",
        x=axis(label, ends),
        y=axis("comparisons", heights, include=(0.0,), num_ticks=4, whole=True),
        bars=tuple(bars),
        lines=tuple(line(series, _outline(own)) for series, own in enumerate(others, start=1)),
        rules=(Rule(axis="x", at=0.0),) if min(ends) < 0 < max(ends) else (),
        legend=tuple((series, name) for series, name in enumerate(named) if name),
    )


def _outline(own: Distribution) -> list[tuple[float, float]]:
    """Return the outline of a histogram as points."""
    if not own.counts:
        return []
    steps = [
        point
        for (left, right), count in zip(pairwise(own.edges), own.counts, strict=True)
        for point in ((left, float(count)), (right, float(count)))
    ]
    return [(own.edges[0], 0.0), *steps, (own.edges[-1], 0.0)]


def _margins_over_time(record: Record) -> Chart | None:
    """Return the median of the margins with its middle half and middle 80 %, at every evaluation on the way."""
    shares = (0.1, 0.25, 0.5, 0.75, 0.9)
    course: list[tuple[float, list[float]]] = []
    for step, scores in sorted(record.distributions.items()):
        # A damaged file may have lost scores; without pairs there are no margins.
        if len(scores["chosen"]) != len(scores["rejected"]):
            continue
        margins = np.subtract(scores["chosen"], scores["rejected"])
        margins = margins[np.isfinite(margins)]
        if margins.size:
            # Only the value of the quantile is used, so every margin counts as a cluster by itself.
            each = np.arange(margins.size)
            course.append((float(step), [quantile(margins, each, share=share).value for share in shares]))
    if len(course) < 2:
        return None
    outer = band(0, ((step, values[0], values[-1]) for step, values in course))
    inner = band(0, ((step, values[1], values[3]) for step, values in course))
    (_, first), (last_step, last) = course[0], course[-1]
    return Chart(
        title="Margins over time, evaluation data",
        words=f"Median {first[2]:.2f} at first, {last[2]:.2f} at step {last_step:g}, where the middle 80% lie from "
        f"{last[0]:.2f} to {last[4]:.2f}. Bands: middle half and middle 80% of the comparisons.",
        x=axis("optimiser step", [step for step, _ in course], include=(0.0,), whole=True),
        y=axis("margin (score difference)", [value for _, values in course for value in values], include=(0.0,)),
        lines=(line(0, ((step, values[2]) for step, values in course), marked=True),),
        bands=tuple(made for made in (outer, inner) if made is not None),
        rules=(Rule(axis="y", at=0.0),),
        legend=((0, "median"),),
    )
