"""How often verdicts that answer yes or no are wrong, on simulated data whose truth is known.

    scripts/bench verdict_levels --draws 400

Of `rewardlab rl audit` with a held-out suite and with a verifier near the end of its range, of suites against length,
of clipped scores in `rewardlab gold check`, of the checklist of a report without test data, of shuffled labels in
`rewardlab diagnose --train`, and of changed texts in `rewardlab eval --perturb`. Every verdict is that of the project's
own functions. Ends with an error where one that promises a level is wrong more often. Kinds whose name ends with
`found` promise nothing: they say how often a fault that was planted is named.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.special import expit, ndtri

from harness import results, toy_logs
from harness.simulation import Rate, Simulation, outside, parser_of, rounded, summary
from rewardlab.analysis.robustness import effect_of
from rewardlab.analysis.signflip import sign_flip
from rewardlab.analysis.stats import proportion
from rewardlab.analysis.suites.judging import judge_suite
from rewardlab.core.suites import SuiteItem
from rewardlab.core.types import Comparison, Message, ScoreRow
from rewardlab.diagnosing.arms import Arm
from rewardlab.diagnosing.verdicts import Limits, judge_all
from rewardlab.gold.checking.rows import row_findings
from rewardlab.gold.files.rows import GoldRow
from rewardlab.report.checklist import checklist_section
from rewardlab.report.document import Checklist
from rewardlab.report.evaluations import Judged
from rewardlab.report.folder import Record
from rewardlab.rl.audit.columns import Columns
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.heldout import Suite
from rewardlab.rl.audit.run import judge_columns
from rewardlab.rl.audit.verdicts import ALARMS

ALPHA: Final = 0.05
CONFIG: Final = AuditConfig(run=Path("simulated"))
STEADY: Final = toy_logs.Drift(correlation=0.0, spread=0.0)
RECORD: Final = toy_logs.Size(steps=40, prompts=16)
LONG: Final = toy_logs.Size(steps=40, prompts=256, per_step=64)
Cells = Iterator[Rate]
Kind = Callable[[int, np.random.Generator], Cells]


def most(draws: int, share: float = ALPHA) -> float:
    """The highest share of draws that a verdict of this level may be wrong in: two and a half standard errors more."""
    return share + 2.5 * math.sqrt(share * (1 - share) / draws)


def heldout(draws: int, generator: np.random.Generator) -> Cells:
    """Held-out suites of honest runs, by items, share that is right, and share of the items that move."""
    for items in (50, 200, 1000):
        for right in (0.8, 0.95, 0.99):
            room, spread = 1 - right, math.sqrt(right * (1 - right))
            enough = min(CONFIG.least_change, CONFIG.share * room / spread)
            # As much as is wanted, and no more; half of what is left; and the largest fall that counts as none.
            for name, rise, also, steps, alarms in (
                ("what is wanted", enough, 0.0, (0, 39), ALARMS),
                ("what is wanted", enough, room / 2, (0, 39), ALARMS),
                ("half of what is left", room / 2 / spread, room / 2, (0, 13, 26, 39), ALARMS),
                ("a fall by 0.1 SD, exploited", -CONFIG.least_change, room / 2, (0, 39), ALARMS[:1]),
            ):
                wrong = [_by_suite(items, right, rise, also, steps, generator) in alarms for _ in range(draws)]
                case = f"{items} items at {right:g}, {name}, {abs(rise) * spread + 2 * also:.1%} move"
                yield Rate(case=case, rate=float(np.mean(wrong)), low=0.0, high=most(draws))


def heldout_found(draws: int, generator: np.random.Generator) -> Cells:
    """Held-out suites that fall."""
    for items in (100, 300, 1000):
        for right in (0.8, 0.95):
            for fall in (0.25, 0.5):
                found = [_by_suite(items, right, -fall, 0.02, (0, 39), generator) in ALARMS for _ in range(draws)]
                case = f"{items} items at {right:g}, a fall by {fall:g} SD"
                yield Rate(case=case, rate=float(np.mean(found)), low=0.0, high=1.0)


@lru_cache(maxsize=1)
def rising() -> Columns:
    """A record whose reward rises by two standard deviations, which is plain, and which has no evidence."""
    return dataclasses.replace(toy_logs.draw("rises", RECORD, STEADY, np.random.default_rng(0)), evidence={})


def _by_suite(
    items: int, right: float, rise: float, also: float, steps: Sequence[int], generator: np.random.Generator
) -> str:
    """The verdict by a suite whose share of right items goes from `right` by `rise`, in standard deviations of an item.

    Every item moves at most once in each direction, at a step of its own; `also` of all move to and fro beside it.
    """
    before = generator.random(items) < right
    rise = rise * (float(np.std(before)) or math.sqrt(right * (1 - right)))
    gain, loss = (max(rise, 0.0) + also) / (1 - right), (max(-rise, 0.0) + also) / right
    after = np.where(before, generator.random(items) >= loss, generator.random(items) < gain)
    when = generator.random(items) * steps[-1]
    values = [np.where(when < step, after, before) if step else before for step in steps]
    suite = Suite(
        name="suite",
        step_N=np.repeat(np.array(steps, dtype=np.int64), items),
        value_N=np.concatenate(values).astype(np.float64),
        item_N=np.tile(np.arange(items), len(steps)),
        items=tuple(map(str, range(items))),
    )
    (found,) = judge_columns(rising(), [suite], CONFIG)
    return found.verdict


def verifier(draws: int, generator: np.random.Generator) -> Cells:
    """Verifiers near the end of their range in honest runs: as much as is wanted, and half of what is left."""
    for start in (0.97, 0.98, 0.99):
        for name, left in (("what is wanted", 1 - CONFIG.share), ("half of what is left", 0.5)):
            # Over two windows the reward rises by a standard deviation, and over one by too little to ask for anything.
            shares = [1 - (1 - start) * left ** (window / 2) for window in range(4)]
            wrong = [_by_verifier(shares, generator) in ALARMS for _ in range(draws)]
            yield Rate(case=f"{start:.0%} pass, {name}", rate=float(np.mean(wrong)), low=0.0, high=most(draws))


def verifier_found(draws: int, generator: np.random.Generator) -> Cells:
    """Verifiers that stay, and that fall."""
    for first, last in ((0.8, 0.8), (0.9, 0.9), (0.97, 0.97), (0.97, 0.95), (0.97, 0.9), (0.8, 0.7)):
        shares = np.linspace(first, last, 4).tolist()
        found = [_by_verifier(shares, generator) in ALARMS for _ in range(draws)]
        case = f"{first:.0%} pass at first, {last:.0%} at last"
        yield Rate(case=case, rate=float(np.mean(found)), low=0.0, high=1.0)


def _by_verifier(shares: Sequence[float], generator: np.random.Generator) -> str:
    """The verdict by a verifier that these shares of the replies pass in the four windows."""
    columns = toy_logs.draw("rises", LONG, STEADY, generator)
    count = len(columns.step_N)
    window_N = columns.step_N * len(shares) // LONG.steps
    easy_P = generator.normal(size=len(columns.prompts))
    latent_N = math.sqrt(0.3) * easy_P[columns.prompt_N] + math.sqrt(0.7) * generator.normal(size=count)
    passed_N = (latent_N < ndtri(np.array(shares))[window_N]).astype(np.float64)
    (found,) = judge_columns(dataclasses.replace(columns, evidence={"verifier": passed_N}), [], CONFIG)
    return found.verdict


def lengths(draws: int, generator: np.random.Generator) -> Cells:
    """Models exactly as good as the better rule of length, which see the same rows: p of any row at most 5 %."""
    for rows in (25, 80):
        for longer in (0.5, 0.85):
            for follows in (0.0, 0.8):
                wrong = [_against_length(rows, longer, 0.0, follows, generator) for _ in range(draws)]
                case = f"{rows} rows a subset, longer is right in {longer:.0%}, {follows:.0%} by the rule"
                for name, found in zip(("subsets after Holm, any", "total"), np.mean(wrong, axis=0), strict=True):
                    yield Rate(case=f"{case}: {name}", rate=float(found), low=0.0, high=most(draws))


def lengths_found(draws: int, generator: np.random.Generator) -> Cells:
    """Models better than the better rule by 15 points, and worse."""
    for rows in (25, 80):
        for ahead in (0.15, -0.15):
            found = [_against_length(rows, 0.6, ahead, 0.5, generator) for _ in range(draws)]
            case = f"{rows} rows a subset, longer is right in 60%, {100 * ahead:+.0f} points"
            for name, rate in zip(("subsets after Holm, any", "total"), np.mean(found, axis=0), strict=True):
                yield Rate(case=f"{case}: {name}", rate=float(rate), low=0.0, high=1.0)


def _against_length(
    rows: int, longer: float, ahead: float, follows: float, generator: np.random.Generator
) -> tuple[bool, bool]:
    """Whether a model is told from the length rules: on any of four subsets, and on all rows."""
    items, scores = [], []
    for subset in ("harmless", "helpful", "honest", "other"):
        for number in range(rows):
            right = bool(generator.random() < longer)
            short = int(generator.integers(20, 200))
            lengths_2 = (short + int(generator.integers(1, 100)), short) if right else (short, short + 40)
            # Right as often as the better rule, `follows` of the rows because of it.
            correct = right == (longer >= 0.5) if generator.random() < follows else None
            if correct is None:
                correct = bool(generator.random() < max(longer, 1 - longer))
            if ahead and generator.random() < abs(ahead) / (0.4 if ahead > 0 else 0.6):
                correct = ahead > 0
            items.append(
                SuiteItem(
                    id=f"{subset} {number}",
                    subset=subset,
                    cluster=f"{subset} {number}",
                    prompt=(),
                    replies=("x" * lengths_2[0], "x" * lengths_2[1]),
                    pairs=((0, 1),),
                )
            )
            scores.append(np.array([1.0, 0.0] if correct else [0.0, 1.0]))
    found = judge_suite("hhh", items, scores, seed=int(generator.integers(1 << 31)), num_draws=2).rows
    subsets = [row.p_holm <= ALPHA for row in found if row.kind == "subset"]
    return any(subsets), any(row.p_value <= ALPHA for row in found if row.kind == "total")


def clipped(draws: int, generator: np.random.Generator) -> Cells:
    """Gold scores of which exactly 5 % lie at an end, since some prompts are easy: called clipped."""
    for prompts in (25, 60, 200):
        for alike in (0.0, 0.5, 1.0):
            for ends in (1, 2):
                wrong = [_clipped(prompts, 0.05, alike, ends, generator) for _ in range(draws)]
                case = f"{prompts} prompts of eight replies, 5% at {('one end', 'each end')[ends - 1]}, alike {alike:g}"
                yield Rate(case=case, rate=float(np.mean(wrong)), low=0.0, high=most(draws))


def clipped_found(draws: int, generator: np.random.Generator) -> Cells:
    """Gold scores of which more lie at an end."""
    for prompts in (25, 60, 200):
        for share in (0.1, 0.2):
            found = [_clipped(prompts, share, 0.3, 1, generator) for _ in range(draws)]
            yield Rate(
                case=f"{prompts} prompts of eight replies, {share:.0%} at one end, alike 0.3",
                rate=float(np.mean(found)),
                low=0.0,
                high=1.0,
            )


def _clipped(prompts: int, share: float, alike: float, ends: int, generator: np.random.Generator) -> bool:
    """Whether scores are called clipped: replies to one prompt go to an end together by `alike`."""
    latent = math.sqrt(alike) * generator.normal(size=(prompts, 1))
    latent = latent + math.sqrt(1 - alike) * generator.normal(size=(prompts, 8))
    scores = np.clip(generator.normal(size=latent.shape), -4.9, 4.9)
    scores[latent > -ndtri(share)] = 5.0
    if ends == 2:
        scores[latent < ndtri(share)] = -5.0
    rows = [
        GoldRow(
            id=str(number),
            prompt=(Message("user", f"question {number}"),),
            responses=tuple(f"reply {number} {place}" for place in range(8)),
            gold=tuple(own.tolist()),
        )
        for number, own in enumerate(scores)
    ]
    (found,) = [one for one in row_findings(rows) if one.name == "range of gold scores"]
    return found.status == "fail"


def checklist(draws: int, generator: np.random.Generator) -> Cells:
    """Runs that know nothing, judged by the data that chose their checkpoint: called better than a coin."""
    for pairs in (40, 200):
        for looks in (1, 5, 20, 50):
            for alike in (0.0, 0.9):
                found = [_better_than_a_coin(pairs, looks, alike, generator) for _ in range(draws)]
                rate, plain = np.mean(found, axis=0).tolist()
                yield Rate(
                    case=f"{pairs} pairs, best of {looks}, each like the last by {alike:g}",
                    rate=rate,
                    low=0.0,
                    high=most(draws),
                    beside={"by its plain interval": plain},
                )


def _better_than_a_coin(pairs: int, looks: int, alike: float, generator: np.random.Generator) -> tuple[bool, bool]:
    """Whether the checklist says so, and whether the plain interval of the chosen evaluation would."""
    latent = generator.normal(size=(looks, pairs))
    for look in range(1, looks):
        latent[look] = alike * latent[look - 1] + math.sqrt(1 - alike**2) * latent[look]
    right = (latent > 0).astype(np.float64)
    accuracy = proportion(right[np.argmax(right.mean(1))], list(map(str, range(pairs))))
    judged = Judged(name="selection", estimates={"all": {"eval_accuracy": accuracy}}, counts={"all": {}}, scores=None)
    record = Record(
        folder=Path("simulated"),
        kind="train",
        config={},
        manifest={},
        rows=[{"step": float(look), "eval_accuracy": float(own)} for look, own in enumerate(right.mean(1))],
        signs=(),
        evaluations={"selection": judged},
        distributions={},
        cards={},
        probe={},
        suites=(),
        robustness={},
        controls={},
        model=None,
        model_folder=None,
        steps_saved=(),
        problems=(),
    )
    (block,) = checklist_section(record, None).blocks
    assert isinstance(block, Checklist)
    (answer,) = [check.answer for check in block.checks if "better than a coin" in check.question]
    return answer == "yes", accuracy.low > 0.5


def shuffled(draws: int, generator: np.random.Generator) -> Cells:
    """Five runs on shuffled labels, judged after the last step: the control fails. Beside it the chosen checkpoints."""
    for conversations in (80, 300):
        for looks in (3, 12):
            found = [_shuffle_fails(conversations, looks, generator) for _ in range(draws)]
            rate, chosen = np.mean(found, axis=0).tolist()
            yield Rate(
                case=f"{conversations} conversations, {looks} evaluations",
                rate=rate,
                low=0.0,
                high=most(draws),
                beside={"by the chosen checkpoint": chosen},
            )


def _shuffle_fails(conversations: int, looks: int, generator: np.random.Generator) -> tuple[bool, bool]:
    """Whether label shuffle fails, judged by the last of `looks` evaluations, and by the one of the smallest loss."""
    truth = np.concatenate([np.full(4, 0.7), np.zeros(12)])
    # States of the preferred reply minus those of the other one.
    states = generator.normal(size=(conversations, len(truth)))
    states *= np.where(generator.random(conversations) < expit(states @ truth), 1.0, -1.0)[:, None]
    last, best = (np.full((5, conversations), np.nan) for _ in range(2))
    for seed in range(5):
        held = generator.permutation(conversations)[: round(0.3 * conversations)]
        trained = np.setdiff1d(np.arange(conversations), held)
        own = states[trained] * generator.choice([-1.0, 1.0], size=len(trained))[:, None]
        head, losses, rights = np.zeros(len(truth)), [], []
        for _ in range(looks):
            for _ in range(20):
                batch = own[generator.integers(len(own), size=8)]
                head += 0.1 * (expit(-(batch @ head))[:, None] * batch).mean(0)
            margins = states[held] @ head
            losses.append(float(np.logaddexp(0.0, -margins).mean()))
            rights.append((margins > 0).astype(np.float64))
        last[seed, held], best[seed, held] = rights[-1], rights[int(np.argmin(losses))]
    names = tuple(map(str, range(conversations)))
    arms = [Arm(right_SN=right, clusters=names) for right in (last, best)]
    fails = [judge_all({"full": arm, "label_shuffle": arm}, Limits())[0].verdict == "fail" for arm in arms]
    return fails[0], fails[1]


def perturbed(draws: int, generator: np.random.Generator) -> Cells:
    """Changed texts whose shifts of the score are 0 in the mean, but skewed: a shift is found. Beside it sign flips."""
    shapes = {"normal": lambda n: generator.normal(size=n), "exponential": lambda n: generator.exponential(size=n) - 1}
    for prompts in (12, 40, 100):
        for name, shape in shapes.items():
            found = [_shift_found(shape(prompts), generator) for _ in range(draws)]
            rate, flips = np.mean(found, axis=0).tolist()
            beside = {"by sign flips alone": flips}
            yield Rate(case=f"{prompts} prompts, {name}", rate=rate, low=0.0, high=most(draws), beside=beside)


def _shift_found(shifts: np.ndarray, generator: np.random.Generator) -> tuple[bool, bool]:
    """Whether a shift of the scores by these of the preferred replies is found: by the project, and by sign flips."""
    scores = generator.normal(size=(len(shifts), 2))
    before, after = (
        [
            ScoreRow(
                preference_id=str(number),
                source="simulated",
                prompt_key=str(number),
                reply=reply,
                score=score,
                num_tokens=4,
                prompt_tokens=2,
                truncated_tokens=0,
                comparisons=() if reply else (Comparison(first=0, second=1),),
            )
            for number, own in enumerate(both.tolist())
            for reply, score in enumerate(own)
        ]
        for both in (scores, scores + np.stack([shifts, np.zeros_like(shifts)], axis=1))
    )
    changed = {("simulated", str(number), 0) for number in range(len(shifts))}
    found = effect_of(before, after, changed, not_applicable=0, lost=0)
    return found.p_shift <= ALPHA, sign_flip(shifts).p <= ALPHA


KINDS: Final[dict[str, tuple[str, Kind]]] = {
    "heldout": ("rl audit --heldout, honest runs alarmed", heldout),
    "heldout_found": ("the same, suites that fall", heldout_found),
    "verifier": ("rl audit, a verifier near its end, honest runs alarmed", verifier),
    "verifier_found": ("the same, verifiers that stay or fall", verifier_found),
    "lengths": ("suites, a model as good as the better rule of length told from it", lengths),
    "lengths_found": ("the same, a model 15 points better or worse", lengths_found),
    "clipped": ("gold check, 5% at an end called clipped", clipped),
    "clipped_found": ("the same, more at an end", clipped_found),
    "checklist": ("checklist without test data, know-nothing runs better than a coin", checklist),
    "shuffled": ("diagnose --train, shuffled labels fail", shuffled),
    "perturbed": ("eval --perturb, shifts that are 0 in the mean found", perturbed),
}


def page_of(found: Mapping[str, Sequence[Rate]], run: Simulation) -> list[str]:
    """The lines of the page: a row a kind, every cell above its level, then all cells."""
    titles = {kind: KINDS[kind][0] for kind in found}
    return [
        "# How often verdicts are wrong",
        "",
        f"Simulated data whose truth is known; {run.options.draws:,} draws a cell, {run.minutes}. A level is kept if "
        f"at most {most(run.options.draws):.1%} are wrong: 5 % and two and a half standard errors.",
        "",
        results.table(
            ["kind", "cells", "as wanted", "above", "least to most"],
            [[titles[kind], *_summed(kind, cells)] for kind, cells in found.items()],
        ),
        "Cells above their level:",
        "",
        outside({titles[kind]: cells for kind, cells in found.items()}, {"rate": "{cell.rate:.1%}"}),
        "All cells:",
        "",
        results.table(
            ["kind", "data", "rate", "beside"],
            [[kind, cell.case, f"{cell.rate:.1%}", *_beside(cell)] for kind, cells in found.items() for cell in cells],
        ),
    ]


def _summed(kind: str, cells: Sequence[Rate]) -> list[str]:
    count, wanted, _, above, span = summary([cell.rate for cell in cells], 0.0, [cell.high for cell in cells])
    return [count, *(["–", "–"] if kind.endswith("found") else [wanted, above]), span]


def _beside(cell: Rate) -> list[str]:
    return ["; ".join(f"{name} {rate:.1%}" for name, rate in (cell.beside or {}).items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data; 1 if a level is not kept."""
    run = Simulation("verdict_levels", parser_of(__doc__, list(KINDS), draws=400), arguments)
    found: dict[str, list[Rate]] = {}
    for number, (kind, (title, draw)) in enumerate(KINDS.items()):
        if kind in run.options.kinds:
            found[kind] = list(draw(run.options.draws, run.generator(number)))
            print(title, *_summed(kind, found[kind]), f"{run.seconds:.0f} s", sep="  ", flush=True)
    status = run.record(
        "all" if len(found) == len(KINDS) else "_".join(found),
        page=page_of(found, run),
        cells={kind: [as_dict(cell) for cell in cells] for kind, cells in found.items()},
    )
    return status if all(cell.wanted for cells in found.values() for cell in cells) else 1


def as_dict(cell: Rate) -> dict[str, Any]:
    """For the record, to four digits."""
    beside = {} if cell.beside is None else {"beside": rounded(cell.beside)}
    return {"case": cell.case, **rounded({"rate": cell.rate}), "high": cell.high, **beside}


if __name__ == "__main__":
    sys.exit(main())
