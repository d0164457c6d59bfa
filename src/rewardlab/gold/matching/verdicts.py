"""Verdicts on a proxy in plain words, each with its evidence, how sure it is, and what to do.

A verdict passes or fails by where the whole interval lies, never by the value alone; what the interval cannot decide is
`undecided`. The thresholds are those by which a failed and a repaired run of a published pipeline (RMOOD) were told
apart: a match of about 66 % with scores of 4 to 6.5 beside gold's 3 to 29, against more than 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rewardlab.analysis import stats
from rewardlab.core.types import Estimate
from rewardlab.gold.findings import Finding, Status, is_above, is_below, number, percent, points
from rewardlab.gold.matching.judged import CHANCE, POOR_TEST, Judged, Limits, more_prompts, more_training
from rewardlab.gold.matching.learning import generalisation, hardly_learned, losses_of, training_accuracy
from rewardlab.gold.matching.order import Alternative, Order

COLLAPSE: Final = 0.1
"""Difference between the accuracy that a run measured itself and the match on the same kind of rows that counts."""
UNKNOWN: Final = "training"
"""Name of the one finding on all proxies without known training rows and without a known run."""
ORDERS: Final = ("order of scores", "order of scores, train rows")
OF_BUILT: Final = ", on the pairs that `gold build` made"
FIRST: Final = "First put the scores in order (see the order of scores), and match again: this may follow from it."


def judge(judged: Judged, limits: Limits) -> list[Finding]:
    """Return the verdicts on one proxy, those on its scores first, then those on its training."""
    found = list(_order(judged))
    found += [] if judged.is_of_training else [_test_match(judged, limits)]
    found.append(_spread(judged, limits))
    if judged.is_of_training:
        found += [training_accuracy(judged, limits), *losses_of(judged), _template(judged)]
    elif judged.train is None and judged.run is None:
        found += [hardly_learned(judged, limits), *([_template(judged)] if judged.template else []), _unknown(judged)]
    else:
        found += [training_accuracy(judged, limits), generalisation(judged), hardly_learned(judged, limits)]
        found += [*losses_of(judged), _template(judged)]
    if judged.order.named is None:
        return found
    # What follows from scores in the wrong place is not a finding of its own, but it is shown.
    grave = ("fail", "warn")
    return [one if one.name in ORDERS or one.status not in grave else replace(one, advice=FIRST) for one in found]


def together(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with those on proxies whose training is unknown merged into one at the end."""
    unknown = [one for one in findings if one.name == UNKNOWN]
    rest = [one for one in findings if one.name != UNKNOWN]
    return [*rest, *(replace(one, about=", ".join(own.about for own in unknown)) for one in unknown[:1])]


def _unknown(judged: Judged) -> Finding:
    return Finding(
        name=UNKNOWN,
        about=judged.name,
        status="undecided",
        evidence="No training rows were given, and no run was found, so what they would show is not judged: training "
        "accuracy, generalisation, losses, and whether the texts are those that it was trained on.",
        advice="Name the rows that it was trained on with --train-input, or its run with --runs NAME=FOLDER.",
    )


def _order(judged: Judged) -> Iterator[Finding]:
    for part, order in (("test", judged.order), ("train", judged.train_order)):
        if order is None:
            continue
        yield _order_of(judged.name, "train" if judged.is_of_training else part, order)


def _order_of(name: str, part: str, order: Order) -> Finding:
    title = ORDERS[part == "train"]
    found = order.named
    if not order.alternatives:
        return Finding(
            name=title,
            about=name,
            status="undecided",
            evidence=f"The {part} rows have too few replies or prompts to hold the scores against other places.",
        )
    if found is None:
        best = max(order.alternatives, key=lambda one: one.change.value)
        told = (
            f"Nowhere else are the scores shown to agree better with gold. Next: {percent(best.other)} in place of "
            f"{percent(best.match)} in {best.where} if they are {_done(best.name)} (p {best.p:.2g} with all places "
            f"tried accounted for)."
        )
        if is_above(order.match, CHANCE):
            return Finding(name=title, about=name, status="pass", evidence=told)
        return Finding(
            name=title,
            about=name,
            status="undecided",
            evidence=f"{told} Without a match above chance, rows in another order would not be noticed.",
            advice="See the match: more prompts, or a proxy that has learned more, would tell.",
        )
    told = (
        f"{percent(found.match)} of the pairs in {found.where} are ordered as gold orders them, and "
        f"{percent(found.other)} if the scores are {_done(found.name)} (difference {points(found.change)}, "
        f"p {found.p:.2g} with all places tried accounted for)."
    )
    if order.first_row is not None and order.first_row > 1:
        told += f" They seem to be in place up to about row {order.first_row - 1}, and shifted from there on."
    return Finding(name=title, about=name, status="fail", evidence=told, advice=_repair(found.name))


def _done(name: str) -> str:
    words = {"swapped": "taken in the reverse order of the replies", "turned round": "taken with the opposite sign"}
    return words.get(name, f"taken from {name}")


def _repair(name: str) -> str:
    if name == "swapped":
        return (
            "The scores belong to the replies in reverse order, or the proxy prefers what gold rejects: look whether "
            "response_1 and response_2 (or chosen and rejected) were swapped in labelling or in building the pairs, "
            "label again, and train again if the proxy was trained on them."
        )
    if name == "turned round":
        return (
            "The proxy prefers what gold rejects: look whether chosen and rejected were swapped when it was trained, "
            "or whether its score is a loss or a penalty."
        )
    return (
        "The scores are shifted against the rows: a row is missing or was written twice in one of the files. Label the "
        "rows again, or run `rewardlab gold check` on all files to see which of them has moved."
    )


def _test_match(judged: Judged, limits: Limits) -> Finding:
    match = judged.test.agreement.match
    told = (
        f"It orders {percent(match)} of the test pairs as gold does; 50% is chance, above {limits.good_match:.0%} good."
    )
    status: Status = "undecided"
    advice = more_prompts(match)
    if is_above(match, limits.good_match):
        status, advice = "pass", ""
    elif is_below(match, CHANCE):
        status, advice = "fail", "Below chance is an order that is turned round: see the order of scores."
    elif is_below(match, POOR_TEST):
        status = "fail"
        chance = " This is not shown to be better than chance." if not is_above(match, CHANCE) else ""
        told += chance
        advice = "See its training below; with more rows that gold labels, a larger proxy, or both, it learns more."
    elif is_below(match, limits.good_match):
        status, advice = (
            "warn",
            "Train on more labelled rows, or a larger proxy; look at the slices where it is weakest.",
        )
    return Finding(name="match on test", about=judged.name, status=status, evidence=told, advice=advice)


def _spread(judged: Judged, limits: Limits) -> Finding:
    spread, match = _exact_if_all_alike(judged.test.spread), judged.test.agreement.match
    least = limits.least_spread
    told = (
        f"Its margins are {number(judged.test.spread)} times as large as gold's (root mean square), its scores spread "
        f"{number(judged.test.score_spread)} times as far; one point of gold margin is {number(judged.test.slope)} of "
        f"its own. Below {least:g} counts as compressed (4 to 6.5 beside 3 to 29 is 0.1)."
    )
    harmless = " A scale of its own alone does no harm: the choice among replies does not depend on it."
    if is_below(spread, least):
        poor = is_below(match, limits.good_match)
        return Finding(
            name="compressed scores",
            about=judged.name,
            status="fail" if poor else "warn",
            evidence=told + ("" if poor else f"{harmless} The match is {percent(match)}."),
            advice="Nothing, unless the size of the scores is used, as in averages with other models."
            if not poor
            else f"With a match of {percent(match)} it has hardly learned to tell replies apart. "
            f"{more_training(judged.run)}",
        )
    if least > 0 and is_above(spread, 1 / least):
        return Finding(
            name="compressed scores",
            about=judged.name,
            status="fail",
            evidence=f"{told} Here gold's own scores are the narrow ones.",
            advice="Look whether gold's scores were squashed (a sigmoid, a clip), rounded, or averaged on their way, "
            "and label again with the raw scores.",
        )
    status: Status = "pass" if is_above(spread, least) else "undecided"
    return Finding(
        name="compressed scores",
        about=judged.name,
        status=status,
        evidence=told,
        advice="" if status == "pass" else more_prompts(spread),
    )


def _exact_if_all_alike(spread: Estimate) -> Estimate:
    """Return a spread that is the same in all of enough prompts with itself as both limits; any other as it is.

    Such are the scores of gold itself, on whatever scale, and a proxy that gives all replies one score.
    """
    exact = spread.method == stats.NO_VARIATION and spread.n >= stats.MIN_CLUSTERS
    return replace(spread, low=spread.value, high=spread.value) if exact else spread


def _rescored(texts: Sequence[Alternative] | None) -> str:
    """Return in words what scoring rows again with other system turns showed."""
    if texts is None:
        return (
            "Whether another system turn would fit better is not seen: rows are scored again only by a proxy that is a "
            "model, and --num-rescored above 0."
        )
    told = [
        f"{percent(one.other)} of the pairs in {one.where} are ordered as gold orders them {one.name}, and "
        f"{percent(one.match)} as they are (difference {points(one.change)}, p {one.p:.2g})."
        for one in texts
    ]
    return " ".join(told) or "No other system turn could be tried."


def _own_and_here(judged: Judged) -> Iterator[tuple[Estimate, Estimate, str]]:
    """Yield the accuracies that its run measured, each with its match here on pairs of the same kind, and on what."""
    run = judged.run
    if run is None:
        return
    for own, match, built, where in (
        (run.train_accuracy, judged.train, judged.train_built, "on training rows"),
        (run.own_accuracy, judged.test, judged.test_built, f"on held-out rows ({run.own_accuracy_on})"),
    ):
        if own is None or match is None or (match is judged.test and judged.is_of_training):
            continue
        yield own, match.agreement.match if built is None else built, where if built is None else where + OF_BUILT


def _template(judged: Judged) -> Finding:
    """Judge whether the scored texts are those that the proxy was trained to score."""
    name = "template and texts"
    facts = [judged.template] if judged.template else []
    facts.append(_rescored(judged.texts))
    better = max((one for one in judged.texts or () if one.is_shown), key=lambda one: one.change.value, default=None)
    if better is not None and judged.order.named is None:
        return Finding(
            name=name,
            about=judged.name,
            status="fail",
            evidence=" ".join(facts),
            advice=f"It agrees better with gold {better.name}, so it was probably trained so: give every stage the "
            f"--system of its training, and match again.",
        )
    pairs = list(_own_and_here(judged))
    for own, here, where in pairs:
        gap = stats.difference(own, here)
        facts.append(
            f"Its run measured {percent(own)} {where}, its scores here reach {percent(here)} (lost: {points(gap)})."
        )
        if is_above(gap, COLLAPSE) and judged.order.named is None:
            return Finding(
                name=name,
                about=judged.name,
                status="fail",
                evidence=" ".join(facts),
                advice="The scores are not of the conversations that it was trained on: another template, another "
                "system turn, a cut at another length, another model, or rows of other data. Score a few rows with "
                "`rewardlab score` on the folder, compare, and give --system to every stage alike.",
            )
    limit = (
        "The numbers cannot tell which of these it would be, nor see a template that changes little; compare rendered "
        "rows with `rewardlab data show`."
    )
    if judged.template_differs:
        return Finding(
            name=name,
            about=judged.name,
            status="warn",
            evidence=" ".join(facts),
            advice="Give the same --system to sampling, labelling, training and matching.",
        )
    if not pairs:
        told = "Its run says nothing that its scores here could be held against."
        return Finding(
            name=name, about=judged.name, status="undecided", evidence=" ".join([*facts, told]), advice=limit
        )
    known = all(not math.isnan(stats.difference(own, here).low) for own, here, _ in pairs)
    return Finding(
        name=name,
        about=judged.name,
        status="pass" if known else "undecided",
        evidence=" ".join([*facts, limit]),
    )
