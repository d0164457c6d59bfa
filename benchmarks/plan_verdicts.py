"""How often verdicts on hypotheses of a plan are wrong, and whether its power is what it says, on simulated studies.

    scripts/bench plan_verdicts --draws 400

Arms are trained with several seeds and judged on the same prompts. Whether a comparison is ranked right follows from a
normal number with parts of the arm, the seed, the prompt, the comparison, and what of it an arm, or one run alone, sees
otherwise. So the true accuracy of an arm, over all seeds and prompts, is known.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import expit, ndtri, stdtr

from harness import results, simulated
from harness.forecasts import forecasts
from harness.near_other_ends import near_other_ends, power_near_the_end
from harness.near_the_end import near_the_end
from harness.simulation import Rate, Simulation, outside, parser_of, rounded, summary
from harness.slopes_at_limits import slopes_at_limits
from rewardlab.analysis.calibration import ece_influence
from rewardlab.analysis.crossed import Crossed, Observed, combined
from rewardlab.experiments.assumed import Assumed
from rewardlab.experiments.claims import parse
from rewardlab.experiments.design import Design, claim_power
from rewardlab.experiments.expressions import Claim, Term
from rewardlab.experiments.power import chance, needed, noise_of
from rewardlab.experiments.verdicts import contrast_of, judge

ALPHA = 0.05
SHARED, OF_PROMPT, OF_ARM, OF_RUN = 0.55, 0.15, 0.10, 0.20
"""Parts of the variance of what decides a comparison: its own, its prompt's, what an arm and what a run alone sees."""


Cells = Iterator[Rate]
Kind = Callable[[int, np.random.Generator], Cells]


def most(share: float, draws: int) -> float:
    """The highest share of draws that a test of this level may find: two standard errors more."""
    return share + 2 * math.sqrt(share * (1 - share) / draws)


class Study:
    """Test data that all arms meet: comparisons in prompts."""

    def __init__(self, generator: np.random.Generator, prompts: int, *, each: str = "1") -> None:
        """`each` is 1, or the sizes of prompts as in harness/simulated.py."""
        self.generator = generator
        sizes = np.ones(prompts, int) if each == "1" else simulated.sizes(each, 1, prompts, generator)[0]
        self.prompt_N = np.repeat(np.arange(prompts), sizes)
        self.prompts = tuple(map(str, range(prompts)))
        count = len(self.prompt_N)
        self.shared_N = math.sqrt(SHARED) * generator.normal(size=count)
        self.shared_N += math.sqrt(OF_PROMPT) * generator.normal(size=prompts)[self.prompt_N]

    def arm(self, accuracy: float, seeds: int, sd: float = 0.0) -> Observed:
        """An arm of this true accuracy, whose runs differ by about `sd` in theirs."""
        count = len(self.prompt_N)
        steep = sd / float(np.exp(-(ndtri(accuracy) ** 2) / 2) / math.sqrt(2 * math.pi))
        middle = float(ndtri(accuracy)) * math.sqrt(1 + steep**2)
        latent_SN = middle + self.shared_N + steep * self.generator.normal(size=(seeds, 1))
        latent_SN = latent_SN + math.sqrt(OF_ARM) * self.generator.normal(size=count)
        latent_SN = latent_SN + math.sqrt(OF_RUN) * self.generator.normal(size=(seeds, count))
        right_SN = (latent_SN > 0).astype(np.float64)
        by_seed_S = right_SN.mean(1)
        totals = [np.bincount(self.prompt_N, row, len(self.prompts)) for row in right_SN - by_seed_S[:, None]]
        return Observed(
            by_seed_S=by_seed_S,
            seeds=tuple(range(seeds)),
            influence_SC=np.stack(totals) / count,
            clusters=self.prompts,
            weight_SC=np.tile(np.bincount(self.prompt_N, minlength=len(self.prompts)) / count, (seeds, 1)),
        )


def disagreement(*, arms: bool, accuracy: float = 0.7, size: int = 100_000) -> float:
    """Share of comparisons that exactly one of two arms, or of two seeds of an arm, ranks right."""
    study = Study(np.random.default_rng(0), size)
    first = study.arm(accuracy, 2)
    second = study.arm(accuracy, 1) if arms else first
    assert first.influence_SC is not None
    assert second.influence_SC is not None
    one, other = first.influence_SC[0] > 0, second.influence_SC[0 if arms else 1] > 0
    return float(np.mean(one != other))


def earlier_rule(found: Crossed) -> float:
    """The p-value where both margins are added, so that the interaction counts twice (that of `diagnose`)."""
    own, shared = sum(part.variance for part in found.seeds), found.prompts.variance + found.within
    return _satterthwaite(found.value, [(own, found.seeds[0].freedom), (shared, found.num_prompts - 1)])


def satterthwaite(found: Crossed) -> float:
    """The p-value with Satterthwaite's degrees of freedom of A + B."""
    assert found.prompts is not None
    return _satterthwaite(found.value, [(part.variance, part.freedom) for part in (*found.seeds, found.prompts)])


def _satterthwaite(value: float, parts: Sequence[tuple[float, float]]) -> float:
    total = sum(variance for variance, _ in parts)
    if total <= 0:
        return float(value <= 0)
    freedom = total**2 / sum(variance**2 / own for variance, own in parts)
    return float(stdtr(freedom, -value / math.sqrt(total)))


# --- kinds -----------------------------------------------------------------------------------------------------

A, B = Term("accuracy", "a"), Term("accuracy", "b")
BETTER, CLOSE = parse("accuracy(a) > accuracy(b)"), parse("accuracy(a) >= accuracy(b) - 0.03")


def level(draws: int, generator: np.random.Generator) -> Cells:
    """Two arms that are equally good: how often the one is found to be better, at 5 %."""
    for seeds in (2, 3, 5, 10):
        for prompts, each in ((100, "1"), (100, simulated.UNEVEN), (1000, "1")):
            for sd in (0.0, 0.005, 0.03):
                tests = []
                for _ in range(draws):
                    study = Study(generator, prompts, each=each)
                    found = contrast_of(BETTER.parts[0], {A: study.arm(0.7, seeds, sd), B: study.arm(0.7, seeds, sd)})
                    tests.append((found.p_above(), earlier_rule(found), satterthwaite(found)))
                rates = [float(np.mean(np.array(p) <= ALPHA)) for p in zip(*tests, strict=True)]
                yield Rate(
                    case=f"{seeds} seeds, sd {sd:g}, {prompts} prompts, {each.removesuffix(' each')} each",
                    rate=rates[0],
                    low=0.0,
                    high=most(ALPHA, len(tests)),
                    beside={"both margins added": rates[1], "Satterthwaite": rates[2]},
                )


def low_levels(draws: int, generator: np.random.Generator) -> Cells:
    """The same at 1 %, the first step of Holm's rule over five hypotheses, and with one arm alone."""
    claims = {"a > b": BETTER, "a > 0.7": parse("accuracy(a) > 0.7")}
    for name, claim in claims.items():
        for seeds in (2, 3, 5):
            for sd in (0.0, 0.005, 0.03):
                tests = []
                for _ in range(3 * draws):
                    study = Study(generator, 200)
                    observed = {A: study.arm(0.7, seeds, sd), B: study.arm(0.7, seeds, sd)}
                    found = contrast_of(claim.parts[0], observed)
                    tests.append((found.p_above(), satterthwaite(found)))
                rates = [float(np.mean(np.array(p) <= ALPHA / 5)) for p in zip(*tests, strict=True)]
                yield Rate(
                    case=f"{name}, {seeds} seeds, sd {sd:g}",
                    rate=rates[0],
                    low=0.0,
                    high=most(ALPHA / 5, len(tests)),
                    beside={"Satterthwaite": rates[1]},
                )


def family(draws: int, generator: np.random.Generator) -> Cells:
    """Studies of five hypotheses, each exactly on its boundary: any that is supported, any that is refuted."""
    texts = (
        "accuracy(a) > accuracy(b)",
        "accuracy(c) >= accuracy(a) - 0.03 and accuracy(a) > 0.7",
        "accuracy(d) > 0.7",
        "accuracy(c) / accuracy(d) > 0.67 / 0.7",
        "accuracy(b) < mean(accuracy(a), accuracy(d))",
    )
    claims = {text: parse(text) for text in texts}
    truths = {"a": 0.7, "b": 0.7, "c": 0.67, "d": 0.7}
    sizes = [(3, sd, pooled) for sd in (0.0, 0.005, 0.03) for pooled in (False, True)] + [(5, 0.005, False)]
    for seeds, sd, pooled in sizes:
        supported = refuted = 0
        for _ in range(draws):
            study = Study(generator, 300)
            observed = {Term("accuracy", name): study.arm(truth, seeds, sd) for name, truth in truths.items()}
            verdicts = {one.verdict for one in judge(claims, observed, pooled=pooled)}
            supported += "supported" in verdicts
            refuted += "refuted" in verdicts
        case = f"{seeds} seeds, sd {sd:g}{', noise over seeds pooled' * pooled}"
        yield Rate(case=f"{case}: any supported", rate=supported / draws, low=0.0, high=most(ALPHA, draws))
        yield Rate(case=f"{case}: any refuted", rate=refuted / draws, low=0.0, high=most(ALPHA, draws))


def uneven_arms(draws: int, generator: np.random.Generator) -> Cells:
    """Pooled noise where it should not be pooled: one of two equal arms differs over seeds more than all others."""
    for times in (1.0, 2.0, 3.0):
        tests = []
        for _ in range(3 * draws):
            study = Study(generator, 500)
            observed = {Term("accuracy", name): study.arm(0.7, 3, 0.02) for name in "bcd"}
            observed[A] = study.arm(0.7, 3, times * 0.02)
            tests.append([judge({"h": BETTER}, observed, pooled=pooled)[0].p_supported for pooled in (True, False)])
        for share in (ALPHA, ALPHA / 5):
            rates = np.mean(np.array(tests) <= share, axis=0)
            case = f"3 seeds, 4 arms, one with {times:g} times the noise, at {share:.0%}"
            beside = {"not pooled": float(rates[1])}
            yield Rate(case=case, rate=float(rates[0]), low=0.0, high=most(share, len(tests)), beside=beside)


def power(draws: int, generator: np.random.Generator) -> Cells:
    """The smallest visible difference by the design alone, with assumptions that are right: found in 80 %."""
    assumed = {
        sd: Assumed(
            disagreeing=disagreement(arms=True),
            disagreeing_seeds=disagreement(arms=False),
            accuracy=0.7,
            within_prompt=0.0,
            over_seeds={"accuracy": sd},
        )
        for sd in (0.0, 0.005, 0.02)
    }
    ranges = {A: (0.0, 1.0), B: (0.0, 1.0)}
    for claim in (BETTER, parse("accuracy(a) > 0.7")):
        for seeds, prompts, hypotheses, pooled in (
            (2, 500, 1, False), (3, 200, 1, False), (3, 500, 1, False), (3, 500, 5, False), (3, 500, 5, True),
            (5, 500, 5, False), (10, 1000, 1, False),
        ):  # fmt: skip
            for sd, own in assumed.items():
                design = Design(
                    seeds=seeds,
                    prompts=prompts,
                    comparisons=prompts,
                    hypotheses=hypotheses,
                    pooled_arms=4 if pooled else 1,
                )
                [part] = claim_power(claim, design, ranges, assumed=own).parts
                # From ½ of the difference below 0.7 to as much above it, where the assumed accuracy is right.
                low = 0.7 if claim is not BETTER else 0.7 - part.visible / 2
                if part.visible > 0.2:
                    continue
                found = []
                for _ in range(draws):
                    study = Study(generator, prompts)
                    observed = {A: study.arm(low + part.visible, seeds, sd), B: study.arm(low, seeds, sd)}
                    if pooled:
                        observed |= {Term("accuracy", name): study.arm(0.7, seeds, sd) for name in "cd"}
                    [one] = judge({"h": claim}, observed, alpha=ALPHA / hypotheses, pooled=pooled)
                    found.append(one.verdict == "supported")
                yield Rate(
                    case=f"{claim}, {seeds} seeds, sd {sd:g}, {prompts} prompts, 1 of {hypotheses}"
                    f"{', pooled' * pooled}: {part.visible:.3f}",
                    rate=float(np.mean(found)),
                    low=0.72,
                    high=0.88,
                )


def stated_rates(draws: int, generator: np.random.Generator) -> Cells:
    """Claims of two parts and of one at stated true values: supported, or refuted, as often as the design says."""
    claims: list[tuple[Claim, float, float]] = [
        (CLOSE, 0.70, 0.70), (CLOSE, 0.62, 0.70), (BETTER, 0.74, 0.70), (BETTER, 0.66, 0.70),
        (parse("accuracy(a) > accuracy(b) and accuracy(a) > 0.7"), 0.75, 0.70),
        (parse("accuracy(a) > accuracy(b) and accuracy(a) > 0.9"), 0.72, 0.70),
    ]  # fmt: skip
    own = Assumed(
        disagreeing=disagreement(arms=True),
        disagreeing_seeds=disagreement(arms=False),
        within_prompt=0.0,
        over_seeds={"accuracy": 0.005},
    )
    for claim, first, second in claims:
        design = Design(seeds=3, prompts=600, comparisons=600)
        expected = {A: first, B: second}
        said = claim_power(claim, design, {A: (0.0, 1.0), B: (0.0, 1.0)}, assumed=own, expected=expected)
        verdicts = []
        for _ in range(draws):
            study = Study(generator, 600)
            [one] = judge({"h": claim}, {A: study.arm(first, 3, 0.005), B: study.arm(second, 3, 0.005)})
            verdicts.append(one.verdict)
        for side, rate in (("supported", said.supported), ("refuted", said.refuted)):
            assert rate is not None
            # Of claims of two parts the design says the least chance that it can have.
            least = max(0.9 * rate - 0.02, 0.0)
            highest = 1.1 * rate + 0.02 if len(claim.parts) == 1 else 1.0
            case = f"{claim} at {first:g} and {second:g}: {side}, said {rate:.0%}"
            yield Rate(case=case, rate=verdicts.count(side) / draws, low=least, high=min(highest, 1.0))


def would_decide(draws: int, generator: np.random.Generator) -> Cells:
    """What an undecided study says would decide: the factor by which it is off, by noise as it was estimated.

    The rate is the share of studies that name at most twice, and at least half, the number that is right for the true
    difference and the true noise.
    """
    for ahead, sd, seeds in ((0.015, 0.002, 3), (0.02, 0.005, 3), (0.02, 0.005, 5), (0.03, 0.01, 5)):
        noises = []
        for _ in range(draws):
            study = Study(generator, 400)
            observed = {A: study.arm(0.7 + ahead, seeds, sd), B: study.arm(0.7, seeds, sd)}
            noises.append(noise_of(contrast_of(BETTER.parts[0], observed)))
        true = type(noises[0])(
            seeds=2 * sd**2,
            within=float(np.mean([one.within for one in noises])),
            prompts=float(np.mean([one.prompts for one in noises])),
            num_prompts=400,
        )
        right = needed(ahead, true, seeds=seeds, prompts=400)
        named = [needed(ahead, one, seeds=seeds, prompts=400) for one in noises[: min(draws, 300)]]
        for what in ("seeds", "prompts"):
            wanted = getattr(right, what)
            if wanted is None:
                continue
            got = np.array([math.inf if getattr(one, what) is None else getattr(one, what) for one in named])
            case = f"{ahead:g} ahead, {seeds} seeds of sd {sd:g}, 400 prompts: {wanted:,} {what}"
            middle = float(np.median(got)) / wanted
            yield Rate(case=f"{case}, median over right", rate=middle, low=0.5, high=2.0)
            # With the named number, the chance is the one that is stated.
            of_seeds, of_prompts = (wanted, 400) if what == "seeds" else (seeds, wanted)
            found = []
            for _ in range(min(draws, 400)):
                study = Study(generator, of_prompts)
                observed = {A: study.arm(0.7 + ahead, of_seeds, sd), B: study.arm(0.7, of_seeds, sd)}
                found.append(contrast_of(BETTER.parts[0], observed).p_above() <= ALPHA)
            said = chance(ahead, true, seeds=of_seeds, prompts=of_prompts)
            yield Rate(case=f"{case}: found there, said {said:.0%}", rate=float(np.mean(found)), low=0.72, high=0.9)


def of_calibration(draws: int, generator: np.random.Generator) -> Cells:
    """ECE of three seeds exactly at the limit that is claimed: found above it, and found below it."""
    for temperature in (1.0, 1.5, 2.0, 3.0):
        truth = float(np.mean([_ece_study(60_000, 1, temperature, generator)[1] for _ in range(60)]))
        for prompts in (200, 500, 1000, 2000):
            tests = []
            for _ in range(min(draws, 800)):
                arm, _ = _ece_study(prompts, 3, temperature, generator)
                found = combined([(arm, 1.0)], arm.mean - truth)
                tests.append((found.p_above() <= ALPHA, found.p_below() <= ALPHA))
            rates = np.mean(tests, axis=0)
            case = f"{prompts} prompts, ECE {truth:.3f}"
            yield Rate(case=f"{case}: found above", rate=float(rates[0]), low=0.0, high=most(ALPHA, len(tests)))
            yield Rate(case=f"{case}: found below", rate=float(rates[1]), low=0.0, high=most(ALPHA, len(tests)))


def _ece_study(count: int, seeds: int, temperature: float, generator: np.random.Generator) -> tuple[Observed, float]:
    """ECE of a model that is too sure by this factor, and its mean."""
    study = Study(generator, count)
    logit = 1.5 * generator.normal(size=count)
    label = (generator.random(count) < expit(logit)).astype(np.float64)
    values, moved, excess = [], [], []
    for _ in range(seeds):
        steep = temperature * math.exp(0.05 * generator.normal())
        one, influence, above = ece_influence(expit(steep * (logit + 0.5 * generator.normal(size=count))), label)
        values.append(one)
        moved.append(influence)
        excess.append(above)
    arm = Observed(
        by_seed_S=np.array(values),
        seeds=tuple(range(seeds)),
        influence_SC=np.stack(moved) / count,
        clusters=study.prompts,
        excess=float(np.mean(excess)),
    )
    return arm, arm.mean


KINDS: dict[str, tuple[str, Kind]] = {
    "level": ("equal arms, one found better at 5 % (at most 5 %)", level),
    "low_levels": ("the same at 1 % (at most 1 %)", low_levels),
    "family": ("five hypotheses on their boundaries, any decided (at most 5 %)", family),
    "uneven_arms": ("noise pooled over arms that differ in it", uneven_arms),
    "power": ("smallest visible difference found (80 %)", power),
    "stated_rates": ("verdicts at stated values, as often as said", stated_rates),
    "would_decide": ("what would decide, and whether it does", would_decide),
    "of_calibration": ("ECE at its limit, found beyond it (at most 5 %)", of_calibration),
    "near_the_end": ("shares near 1, arms that differ on few prompts (at most 5 and 1 %)", near_the_end),
    "near_other_ends": ("AUC, Brier score, loss, several comparisons a prompt (at most 5 and 1 %)", near_other_ends),
    "power_near_the_end": ("the same 2.5 standard errors ahead, at 5 %", power_near_the_end),
    "forecasts": ("claims found as often as said before, within ten points", forecasts),
    "slopes": ("calibration slopes and intercepts at their limits (at most 5 and 1 %)", slopes_at_limits),
}


def page_of(found: Mapping[str, Sequence[Rate]], run: Simulation) -> list[str]:
    """The lines of the page: a row a kind, other rules beside, then every cell outside what is wanted."""
    rows = []
    for kind, cells in found.items():
        wanted = [cell.low for cell in cells], [cell.high for cell in cells]
        rows.append([KINDS[kind][0], *summary([cell.rate for cell in cells], *wanted)])
    beside = [
        [KINDS[kind][0], cell.case, f"{cell.rate:.1%}", *(f"{name} {rate:.1%}" for name, rate in cell.beside.items())]
        for kind, cells in found.items()
        for cell in cells
        if cell.beside
    ]
    width = max((len(row) for row in beside), default=0)
    lines = [
        "# How often verdicts on hypotheses are wrong",
        "",
        f"Simulated studies whose truth is known; at most {3 * run.options.draws:,} a cell; {run.minutes}.",
        "",
        results.table(["kind", "cells", "as wanted", "below", "above", "least to most"], rows),
        "Cells outside what is wanted:",
        "",
        outside(
            {KINDS[kind][0]: cells for kind, cells in found.items()},
            {"rate": "{cell.rate:.1%}", "wanted": "{cell.low:.0%} to {cell.high:.1%}"},
        ),
    ]
    if beside:
        heads = ["kind", "studies", "found", *[""] * (width - 3)]
        lines += [
            "Other rules on the same studies:",
            "",
            results.table(heads, [[*r, *[""] * (width - len(r))] for r in beside]),
        ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data."""
    run = Simulation("plan_verdicts", parser_of(__doc__, list(KINDS), draws=400), arguments)
    found: dict[str, list[Rate]] = {}
    for number, (kind, (title, draw)) in enumerate(KINDS.items()):
        if kind in run.options.kinds:
            found[kind] = list(draw(run.options.draws, run.generator(number)))
            rates = [cell.rate for cell in found[kind]]
            wanted = [cell.low for cell in found[kind]], [cell.high for cell in found[kind]]
            print(title, *summary(rates, *wanted), f"{run.seconds:.0f} s", sep="  ", flush=True)
    return run.record(
        "all" if len(found) == len(KINDS) else "_".join(found),
        page=page_of(found, run),
        cells={kind: [as_dict(cell) for cell in cells] for kind, cells in found.items()},
    )


def as_dict(cell: Rate) -> dict[str, Any]:
    """For the record, to four digits."""
    beside = {} if cell.beside is None else {"beside": rounded(cell.beside)}
    return {"case": cell.case, **rounded({"rate": cell.rate}), "low": cell.low, "high": cell.high, **beside}


if __name__ == "__main__":
    sys.exit(main())
