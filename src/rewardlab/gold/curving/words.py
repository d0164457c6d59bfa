"""What the curves say, in sentences."""

from __future__ import annotations

import math
from typing import Final

from rewardlab.analysis.overoptimisation import Contrast, Fit, Overoptimisation, size_at
from rewardlab.analysis.stats import too_few_differ
from rewardlab.analysis.turnover import ALPHA
from rewardlab.core.types import Estimate
from rewardlab.gold.curving.run import Result
from rewardlab.report.tables import format_p

FAR: Final = 100.0
"""Multiple of the largest n at which a size that a fit gives is cut off."""


def headline(result: Result) -> str:
    """Return what all curves show, in a sentence."""
    turned = [one for one in result.curves if one.verdict == "turns over"]
    open_ = [one for one in result.curves if one.verdict == "undecided"]
    if len(open_) == len(result.curves):
        if all(one.turn.peak.method == too_few_differ(0) for one in open_):
            return (
                "UNDECIDED: gold is the same at every n for every prompt. It gives all replies to a prompt the same "
                "score, or the proxies do."
            )
        if all(math.isnan(one.adjusted_p) for one in open_):
            return "UNDECIDED: too few prompts for a verdict."
        return (
            f"UNDECIDED within n ≤ {result.most}: no fall of gold is shown, nor is one of all that it gained ruled out."
        )
    if not turned:
        most = max(one.turn.fall.high for one in result.curves if one.verdict == "no turn-over")
        ruled_out = f"a fall of more than {number(most)}" if most > 0 else "any fall"
        which = f" Undecided: {', '.join(f'{one.proxy} ({one.prompts})' for one in open_)}." if open_ else ""
        return (
            f"NO TURN-OVER within n ≤ {result.most}: gold is not shown to fall after its maximum, and {ruled_out} is "
            f"ruled out at 95%.{which}"
        )
    names = ", ".join(f"{one.proxy} ({one.prompts})" for one in turned)
    return f"TURNS OVER: gold falls before n = {result.most} in {len(turned)} of {len(result.curves)} curves: {names}."


def sentence(one: Overoptimisation) -> str:
    """Return what one curve says."""
    turn, most = one.turn, one.most
    if math.isnan(one.adjusted_p):
        return f"Gold is highest at n = {turn.peak.value:g} of {most}; {turn.peak.method}, so nothing is said about it."
    if one.verdict == "turns over":
        where = (
            "Gold falls from the start: no n is better than a single reply. It"
            if turn.may_be == (1,)
            else f"Gold is highest at n = {turn.peak.value:g} ({sizes(one)} at 95%) and"
        )
        return (
            f"{where} has fallen by {interval(turn.fall)} from there to n = {most} (90% interval; "
            f"p {format_p(one.adjusted_p)} with all curves accounted for).{_no_gain(one)}"
        )
    alone = (
        f" Alone it would be called a turn-over (p {format_p(turn.p)}); beside the other curves it is not enough."
        if turn.p <= ALPHA
        else ""
    )
    if one.verdict == "undecided":
        return (
            f"Undecided: gold at n = {most} is not shown to lie below that at a smaller n "
            f"(p {format_p(one.adjusted_p)}), but a fall of up to {number(turn.fall.high)} is not ruled out at 95%, "
            f"and the most that it gained is {interval(one.gain)}. Take more prompts.{alone}{_no_gain(one)}"
        )
    if turn.may_be == (most,):
        return f"Gold still rises: at n = {most} it is shown to be higher than at any smaller n."
    return (
        f"No turn-over within n ≤ {most}: gold there is not shown to lie below that at a smaller n "
        f"(p {format_p(one.adjusted_p)}), and a fall of more than {number(turn.fall.high)} is ruled out at 95%. It is "
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
        f"curve is at most {number(fit.furthest)} away from it (p {format_p(fit.misfit)} of having exactly this form)."
    )
    if fit.highest is None:
        return f"{words} It bends upwards, so it has no highest point."
    highest = f"{words} It is highest at d = {interval(fit.highest)}, which is n"
    low, high = _size(fit.highest.low, most), _size(fit.highest.high, most)
    if fit.highest.value > fit.reach:
        return (
            f"{highest} = {low} or more, beyond the data."
            if size_at(fit.highest.low) > most
            else f"{highest} > {most}."
        )
    return f"{highest} = {_size(fit.highest.value, most)} ({low} to {high})."


def _size(d: float, most: int) -> str:
    n = size_at(d)
    return f"{FAR * most:,.0f}" if n > FAR * most else f"{n:,.1f}" if n < 10 else f"{n:,.0f}"


def told_apart(one: Contrast) -> str:
    """Return which of two proxies has the better gold at the largest n."""
    if math.isnan(one.adjusted):
        return "undecided"
    better = one.second if one.difference.value > 0 else one.first
    return f"{better} is better" if one.adjusted <= ALPHA else "not told apart"


def number(value: float, decimals: int | None = None) -> str:
    """Return a number with a true minus sign; by default with three significant digits."""
    if math.isnan(value):
        return "—"
    if decimals is None:
        decimals = _decimals(abs(value) / 10) if value else 2
    text = f"{value:.{decimals}f}"
    return (text.removeprefix("-") if not text.strip("-0.") else text).replace("-", "−")


def interval(estimate: Estimate) -> str:
    """Return ``0.40 [0.20, 0.60]``, with digits by the width of the limits, or ``0.40 [—]`` without limits."""
    width = estimate.high - estimate.low
    if math.isnan(width):
        return f"{number(estimate.value)} [—]"
    decimals = _decimals(width) if width > 0 else 2
    return " ".join(
        (number(estimate.value, decimals), f"[{number(estimate.low, decimals)}, {number(estimate.high, decimals)}]")
    )


def _decimals(size: float) -> int:
    """Return the decimals that show two digits of a number."""
    return min(max(1 - math.floor(math.log10(size)), 0), 8) if math.isfinite(size) else 2
