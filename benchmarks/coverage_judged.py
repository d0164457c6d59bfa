"""How often further intervals of a judgement hold the truth: rankings, disagreement, calibrations, ECE by prompt.

    scripts/bench coverage_judged --draws 500

As coverage.py does it for shares and means. Each kind of data is drawn at 15, 40 and 200 prompts, with one group or
pair a prompt and with four that are alike. The truth is that of a very large sample, or of a sum over all scores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from scipy.special import expit

from coverage import Cell, as_dict, judge, limits_of, outside_wanted, summary_row
from harness import results, simulated
from harness.simulation import SUMMARY, Simulation, parser_of
from rewardlab.analysis.calibration import ece, ece_estimate, null_band
from rewardlab.analysis.ensembles import Ensemble, disagreement
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.kwise import kwise
from rewardlab.analysis.scaling import fit_temperature, loss_changes
from rewardlab.analysis.score_table import ScoreTable, score_table
from rewardlab.core.types import Comparison, Estimate, ScoreRow

PROMPTS = (15, 40, 200)
ECE_PROMPTS = PROMPTS
EACH = (1, 4)
"""Groups or pairs of a prompt."""
ALIKE = 0.5
"""Part of the variance that those of a prompt have in common."""
Found = Mapping[str, Estimate]
LogitsOf = Callable[[int, int], tuple[FloatArray, FloatArray]]
"""(prompts, pairs of each) -> logits and labels"""
Cells = Iterator[tuple[str, Cell]]
"""(statistic, cell)"""
Kind = Callable[[int, np.random.Generator, int], Cells]
"""(draws, generator, prompts of the sample that is the truth) -> cells"""


def common(prompts: int, each: int, generator: np.random.Generator) -> FloatArray:
    """Normal values [prompts · each], of which those of a prompt are alike."""
    own = generator.normal(size=prompts * each)
    if each == 1:
        return own
    shared = generator.normal(size=prompts).repeat(each)
    mixed: FloatArray = np.sqrt(ALIKE) * shared + np.sqrt(1 - ALIKE) * own
    return mixed


@cache
def table_of(groups: int, each: int, replies: int) -> ScoreTable:
    """Score rows of groups of which `each` belong to a prompt, whose first reply is chosen; all scores are 0."""
    chosen = tuple(Comparison(first=0, second=other, label=1.0) for other in range(1, replies))
    rows = [
        ScoreRow(
            preference_id=f"{group:07}",
            source="simulated",
            prompt_key=f"{group // each:07}",
            reply=reply,
            score=0.0,
            num_tokens=1,
            prompt_tokens=1,
            truncated_tokens=0,
            truncated_reply_tokens=0,
            comparisons=() if reply else chosen,
        )
        for group in range(groups)
        for reply in range(replies)
    ]
    return score_table(rows)


def covered(draw: Callable[[], Found], truth: Mapping[str, float], case: str, draws: int, *, prefix: str = "") -> Cells:
    """A cell for each statistic; one is left out where more than half of the draws give it no interval."""
    drawn = [draw() for _ in range(draws)]
    for name, value in truth.items():
        given = [one[name] for one in drawn if not np.isnan(one[name].low)]
        if len(given) < draws / 2:
            continue
        refused = f", refused {1 - len(given) / draws:.0%}" if len(given) < draws else ""
        yield f"{prefix}{name}", judge(f"{case}, truth {value:.3g}{refused}", value, limits_of(given))


# --- kinds -----------------------------------------------------------------------------------------------------


def ranked(replies: int, noise: float, by_gold: bool, prompts: int, each: int, generator: np.random.Generator) -> Found:
    """What `kwise` says of groups of replies; how noisy the scores of a group are differs from prompt to prompt."""
    gold_GK = generator.normal(size=(prompts * each, replies))
    # The best reply comes first, since it is the one that the comparisons prefer.
    first_G, best_G = gold_GK[:, 0].copy(), gold_GK.argmax(axis=1)
    gold_GK[:, 0] = gold_GK.max(axis=1)
    np.put_along_axis(gold_GK, best_G[:, None], np.where(best_G == 0, gold_GK[:, 0], first_G)[:, None], axis=1)
    noisy_G = noise * np.exp(0.5 * common(prompts, each, generator))
    scores_GK = gold_GK + noisy_G[:, None] * generator.normal(size=gold_GK.shape)
    table = table_of(prompts * each, each, replies)
    keys = [(row.source, row.preference_id, row.reply) for row in table.rows] if by_gold else []
    gold = dict(zip(keys, gold_GK.ravel().tolist(), strict=True)) if by_gold else None
    return kwise(replace(table, replies=replace(table.replies, score=scores_GK.ravel())), gold=gold).estimates


def rankings(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """K-wise numbers by gold scores, and by one chosen reply among rejected ones."""
    designs = [
        ("gold of 4 replies", 4, 0.7, True),
        ("gold of 4 replies, good scores", 4, 0.15, True),
        ("gold of 8 replies", 8, 1.5, True),
        ("1 chosen of 4", 4, 0.7, False),
        ("1 chosen of 4, good scores", 4, 0.15, False),
    ]
    for name, replies, noise, by_gold in designs:
        whole = ranked(replies, noise, by_gold, large, 1, generator)
        truth = {one: estimate.value for one, estimate in whole.items()}
        prefix = "gold: " if by_gold else "comparisons: "
        for prompts in PROMPTS:
            for each in EACH:

                def draw(
                    replies: int = replies, noise: float = noise, by_gold: bool = by_gold,
                    prompts: int = prompts, each: int = each,
                ) -> Found:  # fmt: skip
                    return ranked(replies, noise, by_gold, prompts, each, generator)

                yield from covered(draw, truth, f"{prompts} prompts of {each}, {name}", draws, prefix=prefix)


def disagreeing(easy: float, prompts: int, each: int, generator: np.random.Generator) -> Found:
    """What `disagreement` says of five members that err together and apart, more so on some pairs."""
    pairs = prompts * each
    spread_N = 0.6 * np.exp(0.5 * common(prompts, each, generator))
    margin_N = easy + common(prompts, each, generator) + spread_N * generator.normal(size=pairs)
    margins_MN = margin_N + spread_N * generator.normal(size=(5, pairs))
    scores_MR = np.stack([margins_MN / 2, -margins_MN / 2], axis=2).reshape(5, 2 * pairs)
    # Of the rows of combinations only the comparisons count.
    members = Ensemble(rows={"mean": table_of(pairs, each, 2).rows}, beta=1.0, scores_MR=scores_MR, left_out=0)
    found = disagreement(members)
    return {"AUROC of disagreement": found.by_spread, "AUROC of a small margin": found.by_margin}


def disagreements(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """How well the spread of members, and a small margin, tell mistakes."""
    for easy in (0.5, 1.5):
        whole = disagreeing(easy, large, 1, generator)
        truth = {one: estimate.value for one, estimate in whole.items()}
        for prompts in PROMPTS:
            for each in EACH:

                def draw(easy: float = easy, prompts: int = prompts, each: int = each) -> Found:
                    return disagreeing(easy, prompts, each, generator)

                yield from covered(draw, truth, f"{prompts} prompts of {each}, margin {easy:g} on average", draws)


def calibrations(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """NLL and Brier score after a temperature less before, of pairs on which it was not fitted."""
    for spread, sharpness in ((1.5, 1.0), (1.5, 2.0), (1.5, 5.0), (3.0, 1.0), (3.0, 2.0), (6.0, 1.0)):
        fitted_p, fitted_y = simulated.judged(200, spread, sharpness, generator)
        temperature = fit_temperature(np.log(fitted_p / (1 - fitted_p)), fitted_y)

        def logits_of(
            prompts: int, each: int, spread: float = spread, sharpness: float = sharpness
        ) -> tuple[FloatArray, FloatArray]:
            p, y = simulated.judged(prompts * each, spread, sharpness, generator, each=each, alike=ALIKE * (each > 1))
            return np.log(p) - np.log1p(-p), y

        def changes(prompts: int, each: int, of: LogitsOf = logits_of, temperature: float = temperature) -> Found:
            logits, y = of(prompts, each)
            keys = [f"{row // each}" for row in range(y.size)]
            found = loss_changes(logits, logits / temperature, y, keys)
            return {f"change of {name}": one for name, one in found.items()}

        logits, y = logits_of(50 * large, 1)
        right = float(((logits > 0) == y).mean())
        turned = np.where(y > 0, -logits, logits)
        truth = {
            "change of NLL": float(np.mean(np.logaddexp(0, turned / temperature) - np.logaddexp(0, turned))),
            "change of Brier": float(np.mean(np.square(expit(turned / temperature)) - np.square(expit(turned)))),
        }
        for prompts in PROMPTS:
            for each in EACH:
                case = (
                    f"{prompts} prompts of {each}, accuracy {right:.2f}, sharpness {sharpness:g}, T {temperature:.2f}"
                )
                yield from covered(lambda prompts=prompts, each=each: changes(prompts, each), truth, case, draws)


def calibration_errors(draws: int, generator: np.random.Generator, large: int) -> Cells:
    """ECE of four pairs a prompt that are alike, and that of a calibrated model in its null band."""
    for sharpness in (1.0, 1.3, 2.0):
        truth = simulated.true_ece(1.5, sharpness)
        for prompts in ECE_PROMPTS:
            keys = [f"{row // 4}" for row in range(4 * prompts)]
            found, inside, width = [], 0, 0.0
            for _ in range(draws):
                p, y = simulated.judged(4 * prompts, 1.5, sharpness, generator, each=4, alike=ALIKE)
                found.append(ece_estimate(p, y, keys))
                if sharpness == 1.0:
                    low, high = null_band(p, seed=int(generator.integers(1 << 30)), draws=400)
                    inside += low <= ece(p, y) <= high
                    width += high - low
            case = f"{prompts} prompts of 4, sharpness {sharpness:g}"
            yield "ECE by prompt", judge(f"{case}, ECE {truth:.3f}", truth, limits_of(found))
            if sharpness == 1.0:
                yield "null band of ECE", Cell(case=case, coverage=inside / draws, width=width / draws)


KINDS: Mapping[str, Kind] = {
    "rankings": rankings,
    "disagreement": disagreements,
    "calibrations": calibrations,
    "ece-by-prompt": calibration_errors,
}


def page_of(title: str, found: Mapping[str, Sequence[Cell]], run: Simulation, note: str) -> list[str]:
    """Statistics, then every cell outside what is wanted."""
    head = ["statistic", *SUMMARY]
    return [
        f"# {title}",
        "",
        f"Intervals of 95 % on simulated data; {run.options.draws:,} draws a cell, so a coverage is known to "
        f"{1.96 * (0.05 * 0.95 / run.options.draws) ** 0.5:.1%}; {run.minutes}. {note}A cell is left out where "
        "more than half of the draws get no interval.",
        "",
        results.table(head, [summary_row(name, own)[: len(head)] for name, own in found.items()]),
        *outside_wanted(found),
    ]


def run_kinds(run: Simulation, kinds: Mapping[str, Kind], title: str, *, note: str = "") -> int:
    """Draw the kinds that were asked for, write the page, with a note, and the data, and return the exit status."""
    found: dict[str, list[Cell]] = {}
    for number, (kind, cells) in enumerate(kinds.items()):
        if kind in run.options.kinds:
            for name, cell in cells(run.options.draws, run.generator(number), run.options.large):
                found.setdefault(name, []).append(cell)
                print(name, cell.case, f"{cell.coverage:.1%}", f"{run.seconds:.0f} s", sep="  ", flush=True)
    return run.record(
        "all" if len(run.options.kinds) == len(kinds) else "_".join(run.options.kinds),
        page=page_of(title, found, run, note),
        cells={name: [as_dict(cell) for cell in own] for name, own in found.items()},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Every kind, the page and the data."""
    parser = parser_of(__doc__, list(KINDS), draws=1000)
    parser.add_argument("--large", type=int, default=20_000, help="prompts of the sample that is the truth")
    run = Simulation("coverage_judged", parser, arguments)
    return run_kinds(run, KINDS, "How often further intervals of a judgement hold the truth")


if __name__ == "__main__":
    sys.exit(main())
