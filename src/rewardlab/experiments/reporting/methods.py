"""A paragraph on methods, ready for a paper: model, data, seeds, statistics, and what was frozen when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rewardlab.core.terminal import number_of, plural
from rewardlab.experiments.gates import GateVerdict
from rewardlab.experiments.outcomes import Outcome
from rewardlab.experiments.plan import Plan
from rewardlab.experiments.power import ALPHA
from rewardlab.experiments.reporting.arms import Arms, natural
from rewardlab.experiments.reporting.choices import Selection
from rewardlab.experiments.reporting.history import Deviation, Frozen, Progress, frozen_of
from rewardlab.experiments.reporting.numbers import LEVEL, Reader, search_named
from rewardlab.experiments.study import Study


def methods_of(
    study: Study,
    reader: Reader,
    arms: Arms,
    gates: Sequence[GateVerdict],
    selections: Sequence[Selection],
    deviations: Sequence[Deviation],
    progress: Progress,
    *,
    num_tested: int,
) -> str:
    """Return the paragraph: it describes runs that finished, and says how many did not.

    `num_tested` are the hypotheses over which p-values are adjusted.
    """
    plan = study.plan
    sentences = [
        *_trained(study, reader, arms),
        *(_searched(study, one) for one in selections),
        *(_gate(study, one) for one in gates),
        _judged(arms),
        f"The primary quantity was {natural(plan.primary).title}, of the checkpoint that each run chose on validation "
        f"data; test data chose nothing.",
        _means(plan),
    ]
    if count := len(plan.hypotheses):
        gone = ", with those that were taken out or replaced," if num_tested > count else ""
        held = f", adjusted over the {num_tested} hypotheses of the plan{gone} (Holm)" if num_tested > 1 else ""
        sentences.append(
            f"Each hypothesis was tested from both sides at a level of {ALPHA:.0%}{held}: supported if its negation is "
            f"rejected, refuted if it is rejected itself, else undecided."
        )
    if plan.baseline:
        sentences.append("p-values of differences from the baseline are two-sided and adjusted over the arms (Holm).")
    sentences += [_frozen(frozen_of(study)), *_departures(deviations, progress)]
    return " ".join(sentences)


def _means(plan: Plan) -> str:
    """Return what means and intervals are over."""
    if all(len(phase.seeds) == 1 for phase in plan.phases):
        return (
            f"Every arm had one seed, so {LEVEL:.0%} intervals are over prompts alone and say nothing of other seeds; "
            f"arms were compared paired by prompt."
        )
    return (
        f"Means are over seeds. {LEVEL:.0%} intervals treat seeds and prompts as crossed random effects (a t interval "
        f"whose parts are the variance that seeds do not share and the variance over prompts that they share); arms "
        f"were compared paired by seed and prompt."
    )


def _trained(study: Study, reader: Reader, arms: Arms) -> Iterable[str]:
    """Yield how the judged arms were trained, as far as their runs finished."""
    done = {row.arm: own for row in arms.rows if (own := reader.done(row.arm))}
    outcomes = [outcome for own in done.values() for outcome in own]
    planned = sum(row.planned for row in arms.rows)
    if outcomes:
        yield _training(reader, done, outcomes)
        if sizes := _kept(outcomes, "evaluation"):
            yield f"Checkpoints were chosen on {sizes} of validation data."
    others = sum(bool(outcome.run.program) for own in done.values() for outcome in own[:1])
    if others:
        yield f"{others} of the arms {'was' if others == 1 else 'were'} run by another program."
    if left := planned - len(outcomes):
        names = [
            f"{row.arm} ({row.planned - row.seeds} of {row.planned})" for row in arms.rows if row.seeds < row.planned
        ]
        are = plural(left, "is", "are")
        yield (
            f"{left} of {planned} runs of judged arms {are} not done, or cannot be read, and {are} not described here: "
            f"{', '.join(names)}."
        )


def _training(reader: Reader, done: Mapping[str, Sequence[Outcome]], outcomes: Sequence[Outcome]) -> str:
    settings = [reader.settings(outcome.run) for outcome in outcomes if not outcome.run.program]
    heads = bool(settings) and all(own.get("cache_states") for own in settings)
    what = "Heads were trained on the frozen states of" if heads else "Reward models were trained from"
    seeds = sorted({outcome.run.seed for outcome in outcomes})
    each = _range([len(own) for own in done.values()])
    arms = f"{number_of(len(done), 'arm')} of {each} seed{'' if each == '1' else 's'} ({', '.join(map(str, seeds))})"
    if not settings:
        # What other programs trained, and how, is not known.
        return f"Reward models were trained in {arms}."
    kept = _kept(outcomes, "training")
    steps, epochs, rate = (_several(name, settings) for name in ("steps", "epochs", "lr"))
    at = f"a learning rate of {rate}" if rate else "the default rate of the model"
    length = f"{steps} steps" if steps else f"{epochs} epochs"
    return (
        f"{what} {_several('model', settings) or 'a base that is not named'} on {_several('dataset', settings)}"
        f"{f' ({kept} after validation data were held out)' if kept else ''}, in {arms}, for {length} of "
        f"{_several('batch_size', settings)} comparisons at {at}."
    )


def _kept(outcomes: Sequence[Outcome], data: str) -> str:
    """Return how many preferences runs had of some data, as their manifests say; empty if none says so."""
    found = []
    for outcome in outcomes:
        told = outcome.record.manifest.get("tokens")
        own = told.get(data) if isinstance(told, Mapping) else None
        if isinstance(own, Mapping) and isinstance(own.get("kept"), int):
            found.append(own["kept"])
    return f"{_range(found)} preferences" if found else ""


def _range(counts: Sequence[int]) -> str:
    return " to ".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))


def _searched(study: Study, found: Selection) -> str:
    """Return what a search tried, by what it chose, and who was chosen."""
    phase = next(phase for phase in study.plan.phases if phase.name == found.phase)
    metric = found.metric.replace("_", " ")
    without = f", {len(found.untold)} of them without a finished run" if found.untold else ""
    dropped = f", {len(found.pruned)} dropped before their last seed" if found.pruned else ""
    seeds = f"{number_of(len(phase.seeds), 'seed')} each ({', '.join(map(str, phase.seeds))})"
    fresh = sorted(found.fresh.by_seed, key=int) if found.fresh is not None else []
    judged = f", and was run again with fresh seeds ({', '.join(fresh)}), on which it is judged" if fresh else ""
    return (
        f"The {search_named(found.phase)} tried {number_of(found.tried, 'arm')} with {seeds}{without}{dropped}, by "
        f"{metric} on validation data: "
        + (f"{found.chosen} was chosen{judged}." if found.chosen else "nothing is chosen yet.")
    )


def _gate(study: Study, found: GateVerdict) -> str:
    """Return what a gate asked on validation data, and whether it was open."""
    phase = next(phase for phase in study.plan.phases if phase.name == found.phase)
    claims = "; ".join(f"{name}: {claim}" for name, claim in phase.gate.items())
    why = f" ({found.reason})" if found.reason else ""
    return f"The gate of {found.phase}, on validation data ({claims}), was {found.state}{why}."


def _judged(arms: Arms) -> str:
    if len(arms.data) == 1 and not arms.apart:
        return f"Every run was judged on {arms.data[0]}."
    told = "; ".join(f"{row.arm}: {row.data}" for row in arms.rows if row.seeds)
    return f"Runs were judged on different data ({told})." if arms.data else "No run has been judged yet."


def _frozen(frozen: Frozen) -> str:
    return (
        f"Arms, seeds, hypotheses and bands were frozen at {frozen.time} (SHA-256 {frozen.sha256[:12]}…) before any "
        f"run, with {frozen.code}."
    )


def _departures(deviations: Sequence[Deviation], progress: Progress) -> Iterable[str]:
    amended = [one for one in deviations if one.kind == "amendment"]
    if amended:
        told = " ".join(f"{one.text.rstrip('.')}." for one in amended)
        yield f"The plan was amended {'once' if len(amended) == 1 else f'{len(amended)} times'} afterwards. {told}"
    if not progress.is_complete:
        yield f"{progress.done} of {progress.total} runs were done when this was written."
    others = len(deviations) - len(amended)
    if others:
        yield f"{others} other deviation{'s are' if others > 1 else ' is'} listed in the report."


def _several(name: str, settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the values of a setting over all runs, each once; empty if no run has any."""
    values = dict.fromkeys(_said(own.get(name)) for own in settings)
    known = [value for value in values if value]
    return " or ".join([*known, "the default"] if known and len(known) < len(values) else known)


def _said(value: Any) -> str:
    if value is None or value in ((), []):
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " and ".join(_base(str(one)) for one in value)
    return f"{value:g}" if isinstance(value, float) else _base(str(value))


def _base(name: str) -> str:
    """Return a name without the folders of one machine, which say nothing to a reader; names of the hub stay."""
    return name.rsplit("/", 1)[-1] if name.startswith(("/", "~", ".")) else name
