"""Verdicts on what a proxy learned: its training rows, new ones, hardly anything, and the losses of its run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from rewardlab.analysis import stats
from rewardlab.core.types import Estimate
from rewardlab.gold.findings import Finding, Status, is_above, is_below, number, percent, points
from rewardlab.gold.matching.judged import CHANCE, POOR_TEST, Judged, Limits, more_prompts, more_training
from rewardlab.gold.matching.runs import RunFacts

ALIKE: Final = " (pairs that were built alike)"
LEARNED: Final = 0.9
"""Match on its own training rows above which a proxy has learned them."""
END_LOSS: Final = 0.3
"""Loss that a run should end below."""
EPOCH_LOSS: Final = 0.5
"""Loss above which a run that has had an epoch has learned little."""


def _trained(judged: Judged) -> tuple[Estimate | None, str]:
    """Return how well the proxy fits its training rows, or None, and words for where that is known from."""
    if judged.train is not None and judged.train_built is not None:
        every = percent(judged.train.agreement.match)
        built = (
            f"of the pairs that `gold build` made of the training rows are ordered as gold orders them (of all {every})"
        )
        return judged.train_built, built
    if judged.train is not None:
        return judged.train.agreement.match, "of the pairs of the training rows are ordered as gold orders them"
    if judged.run is not None and judged.run.train_accuracy is not None:
        return judged.run.train_accuracy, "is the accuracy on training pairs that its run recorded"
    return None, ""


def _while_learning(judged: Judged) -> str:
    """Return over which steps its training accuracy was measured, where it was learning in them; else nothing."""
    return "" if judged.train is not None or judged.run is None else judged.run.learned_over


def training_accuracy(judged: Judged, limits: Limits) -> Finding:
    """Judge whether it learned the rows that it was trained on."""
    found, is_what = _trained(judged)
    name = "training accuracy"
    if found is None:
        return Finding(
            name=name,
            about=judged.name,
            status="undecided",
            evidence="Nothing is known of its training: no training rows were given, and no run of it was found.",
            advice="Name the rows that it was trained on with --train-input, or its run with --runs.",
        )
    told = f"{percent(found)} {is_what}; under {limits.good_match:.0%} it has not learned them."
    while_learning = _while_learning(judged)
    if while_learning and not is_above(found, limits.good_match):
        return Finding(
            name=name,
            about=judged.name,
            status="undecided",
            evidence=f"{percent(found)} {is_what}, measured while it learned ({while_learning}).",
            advice="Name the rows that it was trained on with --train-input: the proxy itself is then judged on them.",
        )
    if is_above(found, limits.good_match):
        return Finding(name=name, about=judged.name, status="pass", evidence=told)
    if is_below(found, limits.good_match):
        more = more_training(judged.run)
        check = "" if "gold check" in more else ": check the files with `rewardlab gold check`"
        return Finding(
            name=name,
            about=judged.name,
            status="fail",
            evidence=told,
            advice=f"It is not learning, or its labels are noise{check}. {more}",
        )
    return Finding(name=name, about=judged.name, status="undecided", evidence=told, advice=more_prompts(found))


def generalisation(judged: Judged) -> Finding:
    """Judge whether it learned its rows by heart."""
    found, _ = _trained(judged)
    # What it was trained on is held against pairs that were chosen alike: the best and the worst reply are told apart
    # more easily than two at random.
    alike = judged.test_built if judged.train is None or judged.train_built is not None else None
    test = judged.test.agreement.match if alike is None else alike
    name = "generalisation"
    if found is None:
        return Finding(
            name=name,
            about=judged.name,
            status="undecided",
            evidence="Without its match on training rows nothing can be said about what it carries over to others.",
            advice="Name the rows that it was trained on with --train-input.",
        )
    if (while_learning := _while_learning(judged)) and not is_above(test, POOR_TEST):
        return Finding(
            name=name,
            about=judged.name,
            status="undecided",
            evidence=f"What is known of its training rows was measured while it learned ({while_learning}), so what it "
            f"lost on new prompts is not known. Its match on test is {percent(test)}.",
            advice="Name the rows that it was trained on with --train-input.",
        )
    gap = stats.difference(found, test)
    lost = "" if while_learning else f": {points(gap)} lost on new prompts"
    told = (
        f"{percent(found)} on what it was trained on, {percent(test)} on test{ALIKE if alike else ''}{lost}. "
        f"Above {LEARNED:.0%} with a test match under {POOR_TEST:.0%} is learning by heart."
    )
    status: Status = "undecided"
    advice = ""
    if is_above(found, LEARNED) and is_below(test, POOR_TEST):
        status = "fail"
        advice = "Train for fewer epochs or with a smaller learning rate, on more prompts; a larger proxy helps too."
    elif is_above(test, POOR_TEST) or is_below(found, LEARNED):
        status = "pass"
    else:
        advice = more_prompts(test)
    return Finding(name=name, about=judged.name, status=status, evidence=told, advice=advice)


def hardly_learned(judged: Judged, limits: Limits) -> Finding:
    """Judge whether it was trained too little to tell replies apart."""
    found, _ = _trained(judged)
    match = judged.test.agreement.match
    told = f"The match on test is {percent(match)}."
    name = "hardly learned"
    if is_above(match, min(POOR_TEST, limits.good_match)):
        return Finding(name=name, about=judged.name, status="pass", evidence=f"{told} About 66% would show it.")
    if found is not None and is_above(found, limits.good_match):
        told += f" It has learned its training rows ({percent(found)}), so too little training is not the cause."
        return Finding(name=name, about=judged.name, status="pass", evidence=told)
    if is_below(match, CHANCE):
        told += " Below chance it has learned something, if the reverse."
        return Finding(name=name, about=judged.name, status="pass", evidence=told)
    if not is_below(match, POOR_TEST):
        told += " About 66% is not excluded."
        return Finding(name=name, about=judged.name, status="undecided", evidence=told, advice=more_prompts(match))
    like = (
        "Around 66% is what too small a learning rate and a single epoch have led to"
        if is_above(match, CHANCE)
        else "That is not shown to be better than chance, which too small a learning rate leads to"
    )
    return Finding(
        name=name,
        about=judged.name,
        status="warn",
        evidence=f"{told} {like}; a proxy that is too small, or gold that cannot be told from the text, looks the "
        f"same.{_had(judged.run)}",
        advice=more_training(judged.run),
    )


def _had(run: RunFacts | None) -> str:
    """Return which rate and epochs the run had, as far as it says so."""
    rate = [] if run is None or run.learning_rate is None else [f"--lr {run.learning_rate:g}"]
    epochs = [] if run is None or math.isnan(run.epochs) else [f"--epochs {run.epochs:.3g}"]
    return f" Its run had {' and '.join([*rate, *epochs])}." if rate or epochs else ""


def losses_of(judged: Judged) -> Iterator[Finding]:
    """Judge the losses of its run: at the end, and after an epoch."""
    run = judged.run
    if run is None or run.end_loss is None:
        yield Finding(
            name="loss at the end",
            about=judged.name,
            status="undecided",
            evidence="No run of it with losses was found.",
            advice="Name its run with --runs NAME=FOLDER to have its losses judged.",
        )
        return
    end = run.end_loss
    once = " Each pair was seen once, so this is a loss on new pairs." if run.epochs <= 1 + 1e-6 else ""
    yield _loss("loss at the end", judged, end, END_LOSS, "warn", f"over the last steps ({run.loss_is}).{once}")
    if run.epoch_loss is None:
        had = (
            f"It has had {run.epochs:.2f} epochs" if not math.isnan(run.epochs) else "How many epochs it had is unknown"
        )
        yield Finding(
            name="loss after an epoch",
            about=judged.name,
            status="undecided",
            evidence=f"{had}, so there is no such loss.",
        )
        return
    yield _loss("loss after an epoch", judged, run.epoch_loss, EPOCH_LOSS, "fail", f"({run.loss_is}).")


def _loss(name: str, judged: Judged, loss: Estimate, limit: float, grave: Status, where: str) -> Finding:
    about = judged.name
    least, soft = judged.least_loss, ""
    # A loss below what the labels allow is not of these labels, whatever the settings of its run say.
    if least and not (loss.value < least if math.isnan(loss.high) else is_below(loss, least)):
        # As far from knowing nothing to the least that there is as the limit is of certain labels.
        limit = round(least + limit * (1 - least / math.log(2)), 3)
        soft = f" Its labels are soft, and no proxy gets below {least:.3g} on all of them."
    told = f"{number(loss)} {where}{soft} It should be below {limit:g}; log 2 = 0.69 is that of knowing nothing."
    if is_below(loss, limit):
        return Finding(name=name, about=about, status="pass", evidence=told)
    if is_above(loss, limit):
        return Finding(name=name, about=about, status=grave, evidence=told, advice=more_training(judged.run))
    return Finding(
        name=name,
        about=about,
        status="undecided",
        evidence=told,
        advice=(
            "Fewer than ten logged steps have no interval: log more of them (--log-every 1)."
            if math.isnan(loss.low)
            else f"The interval holds {limit:g}: log more steps (--log-every 1), or train on."
        ),
    )
