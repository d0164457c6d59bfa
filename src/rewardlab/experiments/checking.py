"""What a plan would do and could show, before anything is run: its runs, what they cost, and what can come of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import brief, number_of
from rewardlab.experiments.assumed import Assumed
from rewardlab.experiments.bands import Bands
from rewardlab.experiments.claims import parse, parse_term
from rewardlab.experiments.costs import Cost, cost_of, sizes_of_test
from rewardlab.experiments.design import ClaimPower, Design, claim_power
from rewardlab.experiments.expressions import Claim, Range, Term, require_arms
from rewardlab.experiments.gates import asked_of, gate_claim
from rewardlab.experiments.observed_noise import noise_seen
from rewardlab.experiments.overlap import about_shared_rows
from rewardlab.experiments.pitfalls import (
    Look,
    Problem,
    about_data,
    about_models,
    about_reach,
    about_slurm,
    about_test_rows,
    about_trl,
    about_values,
    ranges_in,
    unpinned,
)
from rewardlab.experiments.plan import WINNER, Phase, Plan, Run
from rewardlab.experiments.power import ALPHA, Reach, reach_of
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.resolving import runs_of
from rewardlab.experiments.sweeps import with_stand_ins
from rewardlab.training.settings.config import LORA_LR
from rewardlab.training.settings.presets import rate_notice

FEW_SEEDS: Final = 3
ONE_SEED: Final = ". By one, intervals are over prompts alone: the noise of seeds is not in them"
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Tested:
    """What can come of testing a hypothesis."""

    reach: Reach
    power: ClaimPower | None
    """None where the size of the test data is not known."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` found."""

    plan: Plan
    runs: Sequence[Run]
    costs: Mapping[str, Cost]
    """Arm -> what one run of it takes."""
    tested: Mapping[str, Tested]
    """Hypothesis -> what can come of it."""
    problems: Sequence[Problem]
    unpinned: Sequence[str]
    """Models and data of the hub without a revision."""
    num_prompts: int
    num_comparisons: int
    sizes_are: str
    """Where the numbers of test prompts and comparisons are from."""
    noise_is: str
    """Where the noise is from."""

    @property
    def errors(self) -> list[str]:
        """What keeps the plan from being frozen."""
        return [problem.text for problem in self.problems if problem.level == "error"]


def check(plan: Plan, *, look: Look | None = None) -> Checked:
    """Return what the plan would do. `look` looks at the models of its runs.

    Raises ConfigError for settings that cannot be used.
    """
    whole = with_stand_ins(plan)
    runs = runs_of(whole, winner={"arm": "the best of the search", "settings": {}})
    arms = list(dict.fromkeys(run.arm for run in runs if run.reads_test))
    problems = [
        *_about_metric("primary", plan.primary),
        *_about_runs(plan, runs),
        *_about_gates(plan, runs),
        *_about_bands(plan, arms, runs),
        *about_slurm(plan, runs),
        *about_data(runs),
        *about_shared_rows(runs),
        *about_models(runs, look),
        *about_test_rows(runs),
        *about_trl(whole, runs),
    ]
    claims: dict[str, Claim] = {}
    for name, hypothesis in plan.hypotheses.items():
        try:
            claims[name] = parse(hypothesis.claim)
            claims[name].require_arms([*arms, *plan.left_out])
        except ConfigError as error:
            problems.append(Problem(level="error", text=f"{name}: {error}"))
            claims.pop(name, None)
    prompts, comparisons, where = sizes_of_test(plan, runs)
    assumed, noise_is = assumed_of(plan)
    problems += _about_narrow_ranges(plan, arms, runs, prompts, comparisons, assumed)
    tested: dict[str, Tested] = {}
    for name, claim in claims.items():
        if left := sorted({term.arm for term in claim.terms if term.arm in plan.left_out}):
            problems.append(Problem(level="warning", text=f"{name}: is not tested at this scale: no {', '.join(left)}"))
            continue
        problems += [*about_values(name, claim, runs), *_about_few_prompts(name, claim, prompts, assumed)]
        design = Design(
            seeds=min(len(_seeds(runs, term.arm)) for term in claim.terms),
            prompts=prompts,
            comparisons=comparisons,
            hypotheses=len(claims),
            pooled_arms=max(len(arms), 1) if plan.pooled else 1,
        )
        ranges = ranges_in(claim.terms, runs)
        tested[name] = _tested(claim, design, ranges, assumed)
        problems += [
            *about_reach(name, tested[name].reach, ranges, "it is not a test"),
            *_about_power(name, tested[name]),
        ]
    if plan.hypotheses and not tested:
        what = "no hypothesis is left to be tested: nothing can turn out to be wrong"
        problems.append(Problem(level="warning", text=what))
    # Costs are computed once for each arm, since the data are read for them.
    first = {run.arm: run for run in reversed(runs)}
    costs = {arm: cost_of(run, tflops=plan.assume.tflops) for arm, run in first.items()}
    problems += [*_about_rates(reversed(first.values()), costs), *_about_budget(plan, runs, costs)]
    return Checked(
        plan=plan,
        runs=runs,
        costs={run.arm: costs[run.arm] for run in runs},
        tested=tested,
        problems=problems,
        unpinned=unpinned(runs),
        num_prompts=prompts,
        num_comparisons=comparisons,
        sizes_are=where,
        noise_is=noise_is,
    )


def assumed_of(plan: Plan) -> tuple[Assumed, str]:
    """Return what is assumed about noise, and where it is from: the plan, an earlier study that it names, or defaults.

    Raises ConfigError if the earlier study cannot be read, or if arms of the accuracy cannot disagree as stated.
    """
    given = plan.assume
    default, source = Assumed(), "as assumed by default"
    if given.study is not None:
        asked = [term.quantity for one in plan.hypotheses.values() for term in parse(one.claim).terms]
        default, source = noise_seen(Path(given.study), asked)
    elif given.accuracy is not None:
        default = default.at_accuracy(given.accuracy)
    named = {"disagreeing", "disagreeing_seeds", "accuracy", "within_prompt"}
    said = {name: value for name in named if (value := getattr(given, name)) is not None}
    if given.seed_sd is not None:
        said["over_seeds"] = {**default.over_seeds, "accuracy": given.seed_sd}
    if "disagreeing" in said:
        said.setdefault("disagreeing_seeds", min(default.disagreeing_seeds, said["disagreeing"]))
    elif "disagreeing_seeds" in said:
        said["disagreeing"] = max(default.disagreeing, said["disagreeing_seeds"])
    assumed = replace(default, **said)
    if {"disagreeing", "disagreeing_seeds"} & said.keys():
        assumed = replace(assumed, alike={})
        _require_possible(assumed)
    return assumed, f"{source}, except for what the plan states" if said else source


def _require_possible(assumed: Assumed) -> None:
    """Raise ConfigError if arms of this accuracy cannot disagree so often, or agree more often than seeds of one do."""
    wrong = min(assumed.accuracy, 1 - assumed.accuracy)
    if assumed.disagreeing > 2 * wrong * (1 + _ROUNDING):
        raise ConfigError(
            f"assume.disagreeing: {assumed.disagreeing:.3g} is not possible: two arms of accuracy "
            f"{assumed.accuracy:.3g} disagree on at most {2 * wrong:.3g} of the comparisons. State less, or as "
            f"`accuracy` the mean of both."
        )
    if assumed.disagreeing_seeds > assumed.disagreeing * (1 + _ROUNDING):
        raise ConfigError(
            f"assume.disagreeing_seeds: {assumed.disagreeing_seeds:.3g} is more than disagreeing, "
            f"{assumed.disagreeing:.3g}: seeds of one arm are at least as alike as two arms. State both."
        )


def _about_few_prompts(name: str, claim: Claim, prompts: int, assumed: Assumed) -> Iterator[Problem]:
    """Yield a warning for a claim about test data that have too few prompts for any verdict, or for a forecast."""
    judged = [term for term in claim.terms if term.step is None and quantity_named(term.quantity).source == "scores"]
    if 0 < prompts < MIN_CLUSTERS and any(term.on == "test" for term in judged):
        text = f"{name}: the test data have {number_of(prompts, 'prompt')}, and a verdict needs at least {MIN_CLUSTERS}"
        yield Problem(level="warning", text=f"{text}: it will stay undecided, whatever the runs do")
    elif prompts and assumed.is_rough(prompts) and any(quantity_named(term.quantity).has_ends for term in judged):
        text = (
            f"{name}: by an accuracy of {assumed.accuracy:.3g} few of {number_of(prompts, 'prompt')}, or none, hold a "
            f"comparison that is ranked wrongly, so what is said of power is rough: in simulations chances were up to "
            f"41 points off"
        )
        yield Problem(level="warning", text=text)


# --- parts ---------------------------------------------------------------------------------------------------------


def _about_runs(plan: Plan, runs: Sequence[Run]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for run in runs:
        if run.arm == WINNER:
            continue
        said = repr(sorted((name, value) for name, value in run.settings.items() if name != "seed")) + repr(run.program)
        other = seen.setdefault(said, run.arm)
        if other != run.arm and run.seed == next(one.seed for one in runs if one.arm == run.arm):
            yield Problem(level="error", text=f"the arms {other} and {run.arm} are the same runs: their settings agree")
        if run.reads_test and not run.program and not _names_test(run.settings):
            yield Problem(level="error", text=f"{run.name}: names no test data (test_dataset), which verdicts need")
            return
    for phase in plan.phases:
        if phase.search is not None:
            yield from _about_metric(f"phase {phase.name}: search", phase.search.metric)
        if len(phase.seeds) < FEW_SEEDS:
            seeds = number_of(len(phase.seeds), "seed")
            text = f"phase {phase.name}: {seeds}; {FEW_SEEDS} are the fewest that show their noise"
            text += ONE_SEED if len(phase.seeds) == 1 else ""
            yield Problem(level="warning", text=text)
    if not plan.hypotheses:
        yield Problem(level="warning", text="no hypotheses: nothing can turn out to be wrong")


def _about_metric(where: str, name: str) -> Iterator[Problem]:
    """Yield what is wrong with the name of a quantity."""
    try:
        quantity_named(name)
    except ConfigError as error:
        yield Problem(level="error", text=f"{where}: {error}")


def _names_test(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("test_dataset") or settings.get("test_split"))


def _about_gates(plan: Plan, runs: Sequence[Run]) -> Iterator[Problem]:
    before: set[str] = set()
    for phase in plan.phases:
        searched = () if phase.search is None else phase.search.arms
        before |= {*phase.arms, *(arm.name for arm in searched)}
        for name, text in phase.gate.items():
            try:
                claim = gate_claim(text)
                _require_begun(claim, before, plan)
                claim.require_arms([*before, *plan.left_out])
            except ConfigError as error:
                yield Problem(level="error", text=f"gate of {phase.name}: {name}: {error}")
                continue
            where = f"gate of {phase.name}: {name}"
            if left := sorted({term.arm for term in claim.terms if term.arm in plan.left_out}):
                yield Problem(level="warning", text=f"{where}: is not asked at this scale: no {', '.join(left)}")
                continue
            yield from about_values(where, claim, runs)
            ranges = ranges_in(claim.terms, runs)
            yield from about_reach(where, reach_of(claim, ranges), ranges, "it decides nothing")
        yield from _about_closed_gate(plan, phase)


def _about_closed_gate(plan: Plan, phase: Phase) -> Iterator[Problem]:
    """Yield an error for a gate all of whose claims are about arms that are left out: it stays undecided for ever."""
    try:
        claims = asked_of(plan, phase).values()
    except ConfigError:
        return  # The error of the claim is reported already.
    missing = [sorted({term.arm for term in claim.terms} & {*plan.left_out}) for claim in claims]
    if missing and all(missing):
        arms = ", ".join(sorted({arm for left in missing for arm in left}))
        yield Problem(
            level="error",
            text=f"gate of {phase.name}: cannot open at this scale: each of its claims is about an arm that is left "
            f"out ({arms}). Keep that arm, or add a claim about arms that are run.",
        )


def _require_begun(claim: Claim, before: Collection[str], plan: Plan) -> None:
    """Raise ConfigError if a gate asks about an arm that is run only behind it."""
    first = {arm: phase.name for phase in reversed(plan.phases) for arm in phase.arms}
    for term in claim.terms:
        if term.arm in first and term.arm not in before:
            raise ConfigError(
                f"{term}: {term.arm} is run only behind this gate, in {first[term.arm]}. Ask about arms of this phase "
                f"or of those before it."
            )


def _about_bands(plan: Plan, arms: Sequence[str], runs: Sequence[Run]) -> Iterator[Problem]:
    """Yield what is wrong with bands: quantities without a value, and expectations that nothing or everything meets."""
    for band in plan.bands:
        try:
            term = term_of(band.about, [*arms, *plan.left_out])
            Bands(term=term, failure=band.failure, success=band.success, expected=band.expected)
        except ConfigError as error:
            yield Problem(level="error", text=f"bands: {brief(band.about)}: {error}")
            continue
        if term.arm in plan.left_out:
            yield Problem(level="warning", text=f"bands: {band.about} is not looked at at this scale: no {term.arm}")
            continue
        where = f"bands: {band.about}"
        claim = parse(f"{band.about} > 0")
        yield from about_values(where, claim, runs)
        if band.expected is not None:
            low, high = band.expected
            ranges = ranges_in([term], runs)
            inside = reach_of(_inside(band.about, band.expected), ranges)
            yield from about_reach(f"{where}: expected {low:g} to {high:g}", inside, ranges, "it is not a test")


def _inside(about: str, expected: tuple[float, float]) -> Claim:
    """Return the claim that a quantity lies in a range."""
    return parse(f"{about} >= {expected[0]!r} and {about} <= {expected[1]!r}")


def _about_narrow_ranges(
    plan: Plan, arms: Sequence[str], runs: Sequence[Run], prompts: int, comparisons: int, assumed: Assumed
) -> Iterator[Problem]:
    """Yield one warning for ranges so narrow that an arm in the middle would hardly be shown to be inside."""
    narrow: dict[str, list[str]] = {}
    for band in plan.bands:
        if band.expected is None or not prompts:
            continue
        try:
            parse_term(band.about)
            claim = _inside(band.about, band.expected)
        except ConfigError:
            continue  # reported already
        if any(term.arm not in arms for term in claim.terms):
            continue
        # The interval of a band has 95 %, so each of its two limits is one of 97.5 %.
        design = Design(
            seeds=min(len(_seeds(runs, term.arm)) for term in claim.terms),
            prompts=prompts,
            comparisons=comparisons,
            alpha=ALPHA / 2,
            pooled_arms=1,
        )
        power = claim_power(claim, design, ranges_in(claim.terms, runs), assumed=assumed)
        least, most = band.expected
        if (seen := max(part.visible for part in power.parts)) > (most - least) / 2:
            told = f"{most - least:.3g} wide; {2 * seen:.3g} would do"
            narrow.setdefault(told, []).append(band.about)
    if narrow:
        told = "; ".join(f"{', '.join(about)} ({how})" for how, about in narrow.items())
        text = f"bands: an arm in the middle of these ranges would hardly be shown to be inside: {told}"
        yield Problem(level="warning", text=text)


def term_of(text: str, arms: Sequence[str]) -> Term:
    """Return the one quantity of an arm that a text names. Raises ConfigError for anything else."""
    term = parse_term(text)
    require_arms(text, [term], arms)
    return term


def _tested(claim: Claim, design: Design, ranges: Mapping[Term, Range], assumed: Assumed) -> Tested:
    """Return what can come of testing a hypothesis."""
    if not design.prompts:
        return Tested(reach=reach_of(claim, ranges), power=None)
    power = claim_power(claim, design, ranges, assumed=assumed)
    return Tested(reach=power.reach, power=power)


def _about_power(name: str, tested: Tested) -> Iterator[Problem]:
    """Yield a warning for what of a hypothesis this design would hardly support or refute; equal ones are joined."""
    if tested.power is None:
        return
    parts: dict[str, list[str]] = {}
    for text in tested.power.problems:
        if text not in tested.reach.problems:
            part = next((f"{one.text}: " for one in tested.power.parts if text.startswith(f"{one.text}: ")), "")
            parts.setdefault(text.removeprefix(part), []).append(part.removesuffix(": "))
    for text, about in parts.items():
        of = f"{', '.join(about)}: " if any(about) else ""
        yield Problem(level="warning", text=f"{name}: {of}{text}")


def _seeds(runs: Sequence[Run], arm: str) -> list[int]:
    return [run.seed for run in runs if run.arm == arm]


def _about_rates(runs: Iterable[Run], costs: Mapping[str, Cost]) -> Iterator[Problem]:
    """Yield a warning for arms whose adapters have a learning rate that was found for smaller models."""
    said: dict[str, list[str]] = {}
    for run in runs:
        weights, lr = costs[run.arm].weights, run.settings.get("lr")
        if run.program or weights is None:
            continue
        notice = rate_notice(weights=weights, lora=bool(run.settings.get("lora")), lr=LORA_LR if lr is None else lr)
        if notice:
            said.setdefault(notice, []).append(run.arm)
    for notice, arms in said.items():
        yield Problem(level="warning", text=f"{', '.join(arms)}: {notice}")


def _about_budget(plan: Plan, runs: Sequence[Run], costs: Mapping[str, Cost]) -> Iterator[Problem]:
    if plan.budget.runs is not None and len(runs) > plan.budget.runs:
        text = f"budget: {len(runs)} runs, and {plan.budget.runs:g} are allowed. Take fewer arms or seeds."
        yield Problem(level="error", text=text)
    hours = [costs[run.arm].hours for run in runs]
    if plan.budget.hours is not None and (unknown := [run.arm for run in runs if costs[run.arm].hours is None]):
        why = "state assume.tflops" if plan.assume.tflops is None else costs[unknown[0]].note or "no estimate"
        text = f"budget: the hours of {unknown[0]} cannot be estimated ({why}), so they are not held against it"
        yield Problem(level="warning", text=text)
    elif plan.budget.hours is not None and all(one is not None for one in hours):
        whole = sum(one for one in hours if one is not None)
        if whole > plan.budget.hours:
            text = f"budget: about {whole:.3g} hours, and {plan.budget.hours:g} are allowed."
            yield Problem(level="error", text=text)
