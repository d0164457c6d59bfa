"""What `check` and `amend` print."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from rewardlab.core.terminal import folded, number_of
from rewardlab.experiments.checking import Checked
from rewardlab.experiments.costs import Cost
from rewardlab.experiments.records import record_of
from rewardlab.experiments.study import Study
from rewardlab.report.tables import format_count, report_width, text_table

GUESSED: Final = (
    "tokens: guessed from characters, four to a token, and so are PFLOP and hours. A tokenizer of bytes makes four "
    "times as many; a run counts them."
)


def check_report(checked: Checked) -> str:
    """Return what a plan would do and could show, for a terminal."""
    plan = checked.plan
    scale = f" at scale {plan.scale}" if plan.scale else ""
    probes = ", heads on a frozen backbone" if plan.probes else ""
    arms = list(dict.fromkeys(run.arm for run in checked.runs))
    blocks = [
        _wrapped(f"{plan.title}{scale}{probes}: {plan.question}"),
        "",
        f"{number_of(len(checked.runs), 'run')} of {number_of(len(arms), 'arm')} in "
        f"{number_of(len(plan.phases), 'phase')}",
        text_table(
            ("arm", "phase", "seeds", "steps", "tokens", "weights", "PFLOP", "hours", "GiB"), _arm_rows(checked, arms)
        ),
    ]
    if any(cost.tokens is not None for cost in checked.costs.values()):
        blocks.append(_wrapped(GUESSED))
    if any(cost.gib is not None for cost in checked.costs.values()):
        blocks.append(_wrapped(_memory(checked.costs, arms)))
    if plan.left_out:
        blocks += ["", "left out:", *(folded(f"  {arm}: {why}", report_width()) for arm, why in plan.left_out.items())]
    rows = [
        (name, part.text, part.source if math.isnan(part.visible) else f"{part.visible:.3g}")
        for name, one in checked.tested.items()
        if one.power is not None
        for part in one.power.parts
    ]
    if rows or (checked.tested and not checked.num_prompts):
        blocks += ["", _wrapped(_power(checked))]
    if rows:
        blocks.append(text_table(("hypothesis", "comparison", "smallest difference seen"), rows))
    if checked.unpinned:
        blocks += [
            "",
            _wrapped(
                f"not here, so sought on the hub, and without a revision: {', '.join(checked.unpinned)}. Their owners "
                f"may change them between two runs; {checked.unpinned[0]}@COMMIT names one state."
            ),
        ]
    told = Counter(problem.level for problem in checked.problems)
    blocks += ["", *(folded(f"{problem.level}: {problem.text}", report_width()) for problem in checked.problems)]
    ending = (
        "ready to freeze"
        if not told["error"]
        else f"{number_of(told['error'], 'error')}: mend what is named before freezing"
    )
    return "\n".join([*blocks, ending])


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, report_width(), break_on_hyphens=False) for line in text.splitlines())


def amendment_lines(study: Study) -> list[str]:
    """Return what the last amendment of a study changed, and which runs it makes outdated."""
    entry = study.amendments[-1]
    lines = [f"amended: version {study.version}. The report lists it among the deviations."]
    lines += [f"  {line}" for line in entry["changes"]]
    lines += [f"  another file: {name}" for name in entry["data_changed"]]
    outdated = [run for run in study.runs if record_of(study, run).state == "outdated"]
    if outdated:
        arms = list(dict.fromkeys(run.arm for run in outdated))
        what = f"{len(outdated)} run{'s' * (len(outdated) > 1)} of {', '.join(arms)}"
        lines.append(
            f"{what} began with other settings or data. To do them again: rewardlab plan run {study.word} --redo "
            f"{' '.join(arms)}"
        )
    return lines


def _arm_rows(checked: Checked, arms: Sequence[str]) -> list[tuple[str, ...]]:
    rows = []
    for arm in arms:
        runs = [run for run in checked.runs if run.arm == arm]
        rows.append((arm, runs[0].phase, str(len(runs)), *_cost_cells(checked.costs[arm])))
    return rows


def _cost_cells(cost: Cost) -> tuple[str, ...]:
    def short(value: float | None, unit: float, form: str = "{:.3g}") -> str:
        return "–" if value is None else form.format(value / unit)

    return (
        "–" if cost.steps is None else format_count(cost.steps),
        _large(cost.tokens),
        _large(cost.weights),
        short(cost.flops, 1e15),
        short(cost.hours, 1.0),
        short(None if cost.gib is None else cost.gib + (cost.activations_gib or 0.0), 1.0),
    )


def _memory(costs: Mapping[str, Cost], arms: Sequence[str]) -> str:
    """Return what the numbers of memory hold."""
    text = (
        "GiB: weights, gradients, optimiser and activations of a micro-batch, on a device that holds them whole. Where "
        "an arm sets no micro_token_budget it is taken to have 8,192 tokens; on a GPU a run may take more."
    )
    counted = [arm for arm in arms if costs[arm].gib is not None]
    without = [arm for arm in counted if costs[arm].activations_gib is None]
    if not without:
        return text
    which = "" if without == counted else f" of {', '.join(without)}"
    return (
        f"{text}\nThe activations{which} come on top, and may be more: config.json of the model is not on this "
        "machine, or its micro_token_budget is auto."
    )


def _large(count: float | None) -> str:
    """Return a count in millions or billions: `135 M`, `7 B`."""
    if count is None:
        return "–"
    return f"{count / 1e9:.3g} B" if count >= 0.9995e9 else f"{count / 1e6:.3g} M"


def _power(checked: Checked) -> str:
    if not checked.num_prompts:
        return f"power: not known: {checked.sizes_are}. State assume.test_comparisons and assume.test_prompts."
    return (
        f"power: {format_count(checked.num_comparisons)} comparisons of {format_count(checked.num_prompts)} test "
        f"prompts ({checked.sizes_are}). The smallest difference that is seen with 80 % chance, all hypotheses "
        f"accounted for; noise {checked.noise_is}:"
    )
