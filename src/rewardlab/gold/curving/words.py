"""What the curves say, in sentences."""

from __future__ import annotations

import math
from typing import Final

from rewardlab.analysis.overoptimisation import Contrast, Fit, Overoptimisation, size_at
from rewardlab.analysis.turnover import ALPHA
from rewardlab.core.types import Estimate
from rewardlab.gold.curving.run import Result

FAR: Final = 100.0
"""Times the largest n from which on a size that a fit names is only said to be larger."""


def headline(result: Result) -> str:
    """Return what is found of all curves, in a sentence."""
    turned = [one for one in result.curves if one.verdict == "turns over"]
    if all(one.verdict == "undecided" for one in result.curves):
        return "UNDECIDED: too few prompts for a verdict."
    if not turned:
        return f"NO TURN-OVER within n ≤ {result.most}: in no curve is gold shown to fall after its maximum."
    names = ", ".join(f"{one.proxy} ({one.prompts})" for one in turned)
    return f"TURNS OVER: gold falls before n = {result.most} in {len(turned)} of {len(result.curves)} curves: {names}."


def sentence(one: Overoptimisation) -> str:
    """Return what one curve says."""
    turn, most = one.turn, one.most
    if one.verdict == "undecided":
        return f"Gold is highest at n = {turn.peak.value:g} of {most}; {turn.peak.method}, so nothing is said of it."
    if one.verdict == "turns over":
        where = (
            "Gold falls from the start: no n is better than a single reply. It"
            if turn.may_be == (1,)
            else f"Gold is highest at n = {turn.peak.value:g} ({sizes(one)} at 95%) and"
        )
        return (
            f"{where} has fallen by {interval(turn.fall)} from there to n = {most} (90% interval; "
            f"p {p_value(one.adjusted_p)} with all curves accounted for).{_no_gain(one)}"
        )
    alone = (
        f" Alone it would be called a turn-over (p {p_value(turn.p)}); beside the other curves it is not enough."
        if turn.p <= ALPHA
        else ""
    )
    return (
        f"No turn-over within n ≤ {most}: gold there is not shown to lie below that at a smaller n "
        f"(p {p_value(one.adjusted_p)}), and a fall of more than {number(turn.fall.high)} is ruled out at 95%. It is "
        f"highest at n = {sizes(one)} at 95%.{alone}{_no_gain(one)}"
    )


def _no_gain(one: Overoptimisation) -> str:
    if one.turn.is_gain_shown or one.turn.may_be == (1,):
        return ""
    return " At no n is the pick shown to be better than a single reply."


def sizes(one: Overoptimisation) -> str:
    """Return the sizes at which gold may be highest: ``5 to 8``, ``9 to 16 or beyond``."""
    low, high = one.turn.may_be[0], one.turn.may_be[-1]
    span = f"{low}" if low == high else f"{low} to {high}"
    return f"{span} or beyond" if high == one.most else span


def fit_sentence(fit: Fit, most: int) -> str:
    """Return what the fit says, or why it cannot tell."""
    if fit.why_not:
        return f"Fit of d(α − βd): the data cannot tell: {fit.why_not}."
    words = (
        f"Fit of d(α − βd), d = √(bound of the KL divergence): α {interval(fit.alpha)}, β {interval(fit.beta)}; the "
        f"curve is at most {number(fit.furthest)} away from it (p {p_value(fit.misfit)} of having exactly this form)."
    )
    if fit.highest is None:
        return f"{words} It bends upwards, so it has no highest point."
    n, low, high = (_size(value, most) for value in (fit.highest.value, fit.highest.low, fit.highest.high))
    beyond = " That is beyond the data." if fit.highest.value > fit.reach else ""
    return f"{words} It is highest at d = {interval(fit.highest)}, which is n = {n} ({low} to {high}).{beyond}"


def _size(d: float, most: int) -> str:
    n = size_at(d)
    return f"over {FAR * most:,.0f}" if n > FAR * most else f"{n:,.1f}" if n < 10 else f"{n:,.0f}"


def contrast_sentence(one: Contrast) -> str:
    """Return which of two proxies has the better gold at the largest n."""
    if math.isnan(one.adjusted):
        return f"{one.first} and {one.second}: {one.difference.method}."
    better = one.second if one.difference.value > 0 else one.first
    said = f"{better} is better" if one.adjusted <= ALPHA else "not told apart"
    return f"{one.second} less {one.first}: {interval(one.difference)} (p {p_value(one.adjusted)}): {said}."


def p_value(p: float) -> str:
    """Return a p-value as it is printed."""
    return "—" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def number(value: float) -> str:
    """Return a number with three digits that say something, and a true minus."""
    if math.isnan(value):
        return "—"
    size = abs(value)
    decimals = 2 if size >= 1 or value == 0 else min(2 + max(-math.floor(math.log10(size)) - 1, 0), 8)
    return f"{value:.{decimals}f}".replace("-", "−")


def interval(estimate: Estimate) -> str:
    """Return ``0.40 [0.20, 0.60]`` with true minus signs; without limits ``0.40 [—]``."""
    limits = "—" if math.isnan(estimate.low) else f"{number(estimate.low)}, {number(estimate.high)}"
    return f"{number(estimate.value)} [{limits}]"
