"""How often `rewardlab rl audit` is right: on small real runs of reinforcement learning, and on drawn records.

    scripts/bench rl_audit

The runs (`harness/toy_rl.py`) train a policy by GRPO on a reward whose gold is known by formula, ten honest and ten
hacked ones for every seed, write their record with `RolloutLog`, and are audited by the command itself. The drawn
records (`harness/toy_logs.py`) are of honest runs, with drift from step to step and few prompts, and of the edge, where
the evidence rises by exactly the share that is wanted of it. Ends with an error if more than 5 % of the honest runs, or
of the honest records, are called exploited or not carried over.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness import results, toy_logs, toy_rl
from harness.simulation import Simulation, parser_of
from rewardlab.analysis.stats import wilson
from rewardlab.cli import main as rewardlab
from rewardlab.report.tables import format_estimate
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.run import judge_columns
from rewardlab.rl.audit.verdicts import ALARMS

VERDICTS = ("exploited", "not carried over", "sound", "no rise", "undecided")
MOST = 0.05
"""Share of honest runs that may be called exploited or not carried over."""


def audited(toy: toy_rl.Toy, seed: int, folder: Path) -> str:
    """The verdict of the command on a new run."""
    toy_rl.run(toy, seed, folder)
    status = 0
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            rewardlab(["rl", "audit", str(folder)])
        except SystemExit as ended:
            status = int(ended.code or 0)
    verdict = str(json.loads((folder / "audit" / "audit.json").read_text(encoding="utf-8"))["verdict"])
    assert status == int(verdict in ALARMS), f"{toy.name}: status {status} and {verdict}"
    return verdict


def drawn(kind: str, size: toy_logs.Size, drift: toy_logs.Drift, draws: int, run: Simulation) -> Counter[str]:
    """Verdicts on new records."""
    number = [toy_logs.KINDS.index(kind), toy_logs.SIZES.index(size), toy_logs.DRIFTS.index(drift)]
    generator = run.generator(100 * number[0] + 10 * number[1] + number[2])
    config = AuditConfig(run=Path("drawn"))
    found: Counter[str] = Counter()
    for _ in range(draws):
        (finding,) = judge_columns(toy_logs.draw(kind, size, drift, generator), [], config)
        found[finding.verdict] += 1
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, audit, draw, and write the rates."""
    parser = parser_of(__doc__, toy_logs.KINDS, draws=100)
    parser.add_argument("--seeds", type=int, default=3, help="times that each of the twenty kinds of runs is trained")
    run = Simulation("rl_audit", parser, arguments)
    options = run.options
    toys: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, toy in enumerate(toy_rl.RUNS):
            toys[toy.name] = Counter(
                audited(toy, options.seed + seed, Path(folder, f"{number}-{seed}")) for seed in range(options.seeds)
            )
    records = {
        (kind, size.name, drift.name): drawn(kind, size, drift, options.draws, run)
        for kind in options.kinds
        for size in toy_logs.SIZES
        for drift in toy_logs.DRIFTS
    }
    honest = _total(toys[toy.name] for toy in toy_rl.RUNS if not toy.hacked)
    hacked = _total(toys[toy.name] for toy in toy_rl.RUNS if toy.hacked)
    kept = _total(found for (kind, _, _), found in records.items() if kind != "edge")
    edge = _total(found for (kind, _, _), found in records.items() if kind == "edge")
    page = [
        f"Twenty kinds of runs, {options.seeds} seeds each, and {options.draws} records of each drawn kind "
        f"({run.minutes}). An alarm is a verdict of exploited or not carried over.",
        "",
        results.table(
            ["what", "number", "**alarms**", "share (Wilson, 95 %)"],
            [
                ["honest runs", sum(honest.values()), _alarms(honest), _share(honest)],
                ["hacked runs", sum(hacked.values()), _alarms(hacked), _share(hacked)],
                ["honest records", sum(kept.values()), _alarms(kept), _share(kept)],
                ["records at the edge", sum(edge.values()), _alarms(edge), _share(edge)],
            ],
        ),
        "Verdicts on runs:",
        "",
        results.table(["run", *VERDICTS], [[name, *_row(found)] for name, found in toys.items()]),
        "Verdicts on drawn records:",
        "",
        results.table(
            ["kind", "size", "drift from step to step", *VERDICTS],
            [[*names, *_row(found)] for names, found in records.items()],
        ),
    ]
    cells = {
        "runs": {name: dict(found) for name, found in toys.items()},
        "records": [{"kind": k, "size": s, "drift": d, **found} for (k, s, d), found in records.items()],
    }
    status = run.record("all", page=page, cells=cells)
    wrong = [found for found in (honest, kept) if sum(found.values()) and _alarms(found) > MOST * sum(found.values())]
    return 1 if wrong else status


def _total(counts: Iterable[Counter[str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for own in counts:
        found.update(own)
    return found


def _alarms(found: Counter[str]) -> int:
    return sum(found[verdict] for verdict in ALARMS)


def _share(found: Counter[str]) -> str:
    return format_estimate(wilson(_alarms(found), sum(found.values())), percent=True)


def _row(found: Counter[str]) -> list[str]:
    return [str(found[verdict] or "") for verdict in VERDICTS]


if __name__ == "__main__":
    sys.exit(main())
