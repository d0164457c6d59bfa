"""The hypotheses of a study with their verdicts, based on the runs that are done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rewardlab.experiments.claims import parse
from rewardlab.experiments.reporting.afterwards import WORDS, Afterwards, Change
from rewardlab.experiments.reporting.history import arms_judged
from rewardlab.experiments.reporting.numbers import Cell, Reader
from rewardlab.experiments.study import Study
from rewardlab.experiments.verdicts import THESE_RUNS, Finding, Verdict, judge

ORDER: Final[Sequence[Finding]] = ("supported", "refuted", "undecided", "not tested")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A hypothesis and what the runs say about it."""

    verdict: Verdict
    expects: str
    would_change: str
    terms: tuple[Cell, ...]
    """Each quantity that it asks for."""
    missing_runs: int
    """Runs of its arms that are not done; above 0 the verdict is based on a part of the plan."""
    planned_runs: int
    change: Change
    """What became of its claim after results had been seen; empty if nothing."""
    claim_before: str
    """Its claim before that; empty if it is the same, or there was none."""
    other_runs: str = ""
    """How its runs are not those that were planned before that; empty if they are, or its claim is another one."""

    @property
    def is_provisional(self) -> bool:
        """Whether runs that it is about are not done."""
        return self.missing_runs > 0

    @property
    def changed(self) -> str:
        """What became of its claim, or its runs, after results had been seen, in words; empty if nothing."""
        before = f"; it was: {self.claim_before}" if self.claim_before else ""
        runs = f": {self.other_runs}" if self.other_runs else ""
        return f"{WORDS[self.change]}{before}{runs}"

    @property
    def found(self) -> str:
        """The verdict, and what has to be known with it."""
        so_far = "so far" if self.is_provisional and self.verdict.parts else ""
        whose = THESE_RUNS * self.verdict.is_of_these_runs
        return ", ".join(text for text in (f"{self.verdict.verdict}{whose}", so_far, WORDS[self.change]) if text)


def judged_of(study: Study, reader: Reader, afterwards: Afterwards) -> tuple[Judged, ...]:
    """Return a verdict on every hypothesis of the plan.

    Claims that were taken out, or replaced, after results had been seen are judged with them and not returned: they
    stay in the family over which p-values are adjusted. Otherwise taking out what failed would make the rest hold.
    """
    claims = {name: parse(one.claim) for name, one in study.plan.hypotheses.items()}
    asked = {term for claim in claims.values() for term in claim.terms}
    gone = {f"{name} (before)": parse(claim) for name, claim in {**afterwards.before, **afterwards.removed}.items()}
    family = claims | gone
    asked |= {term for claim in gone.values() for term in claim.terms}
    # Which noise is taken is told before results are seen, or the one that suits them could be.
    pooled = study.plan.pooled if afterwards.pooled is None else afterwards.pooled
    if pooled:
        # The noise is that of all arms, whether a hypothesis names them or not.
        asked |= {replace(term, arm=arm) for term in asked for arm in arms_judged(study.runs)}
    found, missing = reader.observe(sorted(asked, key=str))
    wanted = {term: one for term, one in found.items() if term in asked}
    verdicts = judge(family, wanted, missing=missing, pooled=pooled)
    judged = []
    for verdict in verdicts[: len(claims)]:
        told = study.plan.hypotheses[verdict.name]
        terms = claims[verdict.name].terms
        arms = list(dict.fromkeys(term.arm for term in terms))
        planned = sum(run.arm in arms for run in study.runs)
        judged.append(
            Judged(
                verdict=verdict,
                expects=told.expects,
                would_change=told.would_change,
                terms=tuple(reader.cell(term) for term in terms),
                missing_runs=planned - sum(len(reader.done(arm)) for arm in arms),
                planned_runs=planned,
                change=afterwards.changes.get(verdict.name, ""),
                claim_before=afterwards.before.get(verdict.name, ""),
                other_runs=afterwards.runs.get(verdict.name, ""),
            )
        )
    return tuple(judged)


def counted(judged: Sequence[Judged], removed: Mapping[str, str]) -> str:
    """Return in words how many hypotheses had which verdict.

    Those that were made, or taken out (`removed`: name -> claim), after results had been seen are counted separately,
    and so are those whose runs were changed then.
    """
    planned = [one for one in judged if not one.change]
    later = [one for one in judged if one.change and one.change != "runs"]
    moved = [one for one in judged if one.change == "runs"]
    sentences = [f"Of {_hypotheses(len(planned))}: {_findings(planned)}."] if planned else []
    if not judged:
        sentences = ["The plan has no hypotheses, so nothing was tested."]
    if later:
        sentences += [
            f"Counted apart, {_hypotheses(len(later))} changed or added after results had been seen, which "
            f"{'is' if len(later) == 1 else 'are'} not a test of what was expected: {_findings(later)}."
        ]
    if moved:
        sentences += [
            f"Counted apart, {_hypotheses(len(moved))} whose runs were changed after results had been seen: "
            f"{_findings(moved)}."
        ]
    if removed:
        told = "; ".join(f"{name}: {claim}" for name, claim in removed.items())
        sentences += [f"Taken out after results had been seen: {told}."]
    return " ".join(sentences)


def _findings(judged: Sequence[Judged]) -> str:
    of = Counter(f"{one.verdict.verdict}{THESE_RUNS * one.verdict.is_of_these_runs}" for one in judged)
    told = [f"{finding}{whose}" for finding in ORDER for whose in ("", THESE_RUNS)]
    return ", ".join(f"{of[one]} {one}" for one in told if of[one])


def _hypotheses(count: int) -> str:
    return f"{count} {'hypothesis' if count == 1 else 'hypotheses'}"


def exit_status(judged: Sequence[Judged], removed: Collection[str] = ()) -> int:
    """Return 0 if every hypothesis is supported by all its runs, 1 if any is refuted, else 2.

    With a claim that was changed, added or taken out (`removed`) after results had been seen, or whose runs were
    changed then, the status is never 0.
    """
    found = {one.verdict.verdict for one in judged}
    if "refuted" in found:
        return 1
    stands = not removed and not any(one.is_provisional or one.change for one in judged)
    return 0 if found == {"supported"} and stands else 2
