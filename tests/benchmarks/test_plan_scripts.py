"""The script behind docs/design/verdicts-simulated.md: every kind runs, and the page names what is not as wanted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

import cut_model
import plan_verdicts
from harness import workload
from pages import ROOT, module_at


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [["family", "uneven_arms"], ["stated_rates"], ["near_the_end"], ["near_other_ends"], ["slopes"]]
)
def test_verdicts_are_tried_on_every_kind_of_study(tmp_path: Path, kinds: list[str]) -> None:
    assert plan_verdicts.main(["--draws", "2", "--results", str(tmp_path), "--kinds", *kinds]) == 0
    (path,) = tmp_path.glob("plan_verdicts.*.json")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert set(cells) == set(kinds)
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    outside = [cell for kind in cells.values() for cell in kind if not cell["low"] <= cell["rate"] <= cell["high"]]
    assert all(cell["case"] in page for cell in outside)


def test_the_true_accuracy_of_an_arm_is_what_it_was_made_with() -> None:
    study = plan_verdicts.Study(np.random.default_rng(0), 20_000)
    assert study.arm(0.7, 40, 0.02).mean == pytest.approx(0.7, abs=0.015)
    assert study.arm(0.7, 40, 0.02).by_seed_S.std() == pytest.approx(0.02, rel=0.3)


def test_a_cut_model_has_the_first_layers_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    module_at(ROOT / "examples" / "first_study" / "make_files.py").write_model(whole, "what a text of words has")
    assert cut_model.main(["--model", str(whole), "--layers", "1", "--output-dir", str(tmp_path)]) == 0
    first, cut = (AutoModel.from_pretrained(folder) for folder in (whole, tmp_path / "whole-1-layers"))
    assert (len(first.layers), len(cut.layers)) == (2, 1)
    assert torch.equal(first.layers[0].mlp.up_proj.weight, cut.layers[0].mlp.up_proj.weight)
    monkeypatch.setattr(workload, "resolve_model_name", lambda name, say: str(whole))  # another name than it has here
    cut_model.main(["--layers", "1", "--output-dir", str(tmp_path)])
    assert (tmp_path / "smollm2-135m-instruct-1-layers/config.json").is_file()
    with pytest.raises(SystemExit):
        cut_model.main(["--layers", "0"])
