"""Each plan of examples/plans goes from check to archive at its tiny scale, as it is shipped but for its model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import ROOT, module_at
from rewardlab.cli import main
from rewardlab.commands.training import train
from rewardlab.experiments import running
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.plan import Run
from rewardlab.experiments.records import record_of
from rewardlab.experiments.study import Study, open_study
from rewardlab.training import run as run_module

PLANS = ROOT / "examples" / "plans"
SHIPPED = "smollm2-135m-instruct"
MODEL = "tiny-model"
SEEDS = 1
GRID = {"lr": [1.0e-6, 1.0e-3], "label_smoothing": [0.0, 0.1]}
"""In place of the grid of sensitivity.yaml, which has 81 arms."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of the plans, generated preferences and a model of two layers."""
    folder = tmp_path_factory.mktemp("plans")
    shutil.copytree(PLANS, folder / "plans")
    module_at(PLANS / "tiny_data.py").main(folder)
    text = "".join((folder / f"{kind}.train.jsonl").read_text(encoding="utf-8") for kind in ("pairs", "kwise"))
    module_at(ROOT / "examples" / "first_study" / "make_files.py").write_model(folder / MODEL, text)
    return folder


def made_smaller(path: Path) -> None:
    """Change a plan to fewer seeds, a smaller grid and the tiny model."""
    values = yaml.safe_load(path.read_text(encoding="utf-8").replace(SHIPPED, MODEL))
    values["seeds"] = SEEDS
    for number, phase in enumerate(values.get("phases", ())):
        if "seeds" in phase:
            phase["seeds"] = [10 * number + seed for seed in range(SEEDS)]
        if "search" in phase:
            phase["search"]["grid"] = GRID
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def done_here(study: Study, runs: Sequence[Run], *, say: Callable[[str], None], **how: Any) -> list[Run]:
    """`run_all`, in this process."""
    for run in runs:
        do(study, run, train)
    return []


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
def test_each_plan_runs_at_its_tiny_scale(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some seven arms, a few seconds each. A second process does not prove each model; other tests do that."""
    monkeypatch.setattr(running, "run_all", done_here)
    monkeypatch.setattr(run_module, "verify_in_clean_process", lambda folder: None)
    path, folder = Path("plans") / f"{name}.yaml", Path("studies") / name
    with chdir(place):
        made_smaller(path)
        main(["plan", "freeze", str(path), "--scale", "tiny", "--output-dir", str(folder)])
        gates = [phase.name for phase in open_study(folder).plan.phases if phase.gate]
        for gate in [*gates, ""]:
            config = RunConfig(study=folder, past_gate=gate or None, reason="one seed decides nothing" if gate else "")
            running.run_study(config, say=print, redo=redo)
        study = open_study(folder)
        assert [run.name for run in study.runs if not record_of(study, run).is_over] == []
        with suppress(SystemExit):
            main(["plan", "report", str(folder)])  # what its verdicts are says its exit status
        main(["plan", "archive", str(folder)])
        page = (folder / "report" / "report.md").read_text(encoding="utf-8")
    for arm in study.plan.arms:
        assert arm in page
