"""Benchmarks of half precision run on a tiny model and write what they promise; none is held to a time."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

import half_products
import half_rounding
from benchmark_results import page_in, result
from harness import ours, workload
from harness.tiny import write_tiny
from rewardlab.analysis import stats
from rewardlab.artifact.save import save_reward_model
from rewardlab.serve.verifying.folder import verify

HAS_TRL = importlib.util.find_spec("trl") is not None
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture
def exported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of an exported folder, made in this process, where it is quick."""
    monkeypatch.setattr("rewardlab.serve.folders.export.verify_in_clean_process", verify)


@pytest.mark.slow
@pytest.mark.usefixtures("exported_here")
@pytest.mark.parametrize(
    ("kind", "given", "half"),
    [
        ("full", ["1e-3"], "bf16"),
        ("full", ["1e-3", "1e-2"], "bf16"),
        ("lora", ["1e-3"], "bf16"),
        ("lora", ["1e-3"], "fp16"),
    ],
    ids=["full", "two rates", "lora", "float16"],
)
def test_rounding_is_judged_on_the_same_rows_and_seeds_by_everyone(tmp_path, kind, given, half):
    trl_seeds = int(HAS_TRL and half == "bf16")
    size = ["--model", "tiny-llama", "--steps", "2", "--batch-size", "4", "--test-pairs", "12", "--threads", "1"]
    arms = ["--kind", kind, "--seeds", "2", "--lr", *given, "--drift", "--trl-seeds", str(trl_seeds), "--half", half]
    exports = ["--exports", "bfloat16", "float16"]
    assert half_rounding.main([*size, *arms, *exports, "--results", str(tmp_path)]) == 0
    page = page_in(tmp_path)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    rates = record["rates"]
    names = half_rounding.EXACT, f"{half}, stochastic", f"{half}, nearest"
    assert list(map(float, rates)) == list(map(float, given))
    for arms in rates.values():
        assert {name: len(runs) for name, runs in arms.items()} == {
            **dict.fromkeys(names, 2), half_rounding.TRL: trl_seeds
        }  # fmt: skip
        exact, shadow = arms[half_rounding.EXACT], arms[f"{half}, stochastic"]
        assert exact[0]["losses"] != exact[1]["losses"], "other rows, another head"
        for mine, other in zip(exact, shadow, strict=True):
            assert other["losses"][0] == pytest.approx(mine["losses"][0], rel=0.05)
            assert mine["computed_by"]["live"]["margins"] < 1e-5
            assert other["computed_by"]["the folder in fp32"]["scores"] < 1e-5
            assert 0 < other["computed_by"]["live"]["margins"] < 0.2
            assert 0 < other["computed_by"]["live"]["scores"] < 0.2
            fine, coarse = (
                other["computed_by"][f"exported, transformers in {name}"]["scores"] for name in ("fp16", "bf16")
            )
            assert 0 < 2 * fine < coarse < 0.2
        for trl in arms[half_rounding.TRL]:
            assert trl["losses"][0] == pytest.approx(exact[0]["losses"][0], rel=0.05), "the same start and rows"
    assert page.count(f"| not exported, transformers in {half} |") == len(given)
    # The difference of the two roundings, again, from what the record keeps of each pair.
    shadow, nearest = ([run["margins"] for run in arms[name]] for name in names[1:])
    apart = stats.mean(np.mean(np.subtract(shadow, nearest), axis=0), record["pairs"]["prompt"])
    (row,) = (line for line in page.split(f"## lr {float(given[-1]):g}")[1].splitlines() if "– nearest |" in line)
    assert f"| {apart.value:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}] |  |" in row
    assert len(record["pairs"]["label"]) == len(shadow[0]) == 12


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--exports", "float16"], "--exports needs --drift or --folders"),
        (["--drift", "--exports", "float16", "float16"], "--exports names a dtype twice"),
        (["--half", "fp16", "--trl-seeds", "1"], "TRL is trained in bf16 on the CPU alone"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused_before_anything_is_trained(capsys, given, told):
    with pytest.raises(SystemExit) as stop:
        half_rounding.main(["--model", "tiny-llama", *given])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("exported_here")
def test_the_drift_of_saved_folders_is_measured_without_training(tmp_path):
    base, saved = write_tiny(tmp_path / "tiny-llama", "tiny-llama"), tmp_path / "saved"
    model = ours.build_model(ours.settings(base, {}), sharing=True, device=torch.device("cpu"))
    renderer = workload.renderer_of(base, max_seq_len=1024)
    save_reward_model(saved, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    given = ["--folders", str(saved), "--steps", "1", "--batch-size", "1", "--test-pairs", "6"]
    for _ in range(2):
        assert half_rounding.main([*given, "--threads", "1", "--results", str(tmp_path)]) == 0
    paths = sorted(tmp_path.glob("half_rounding.generated.folders.*.json"))
    assert [path.stem[-2:] == "-2" for path in paths] == [True, False], "the second of a day replaces nothing"
    for path in paths:
        (run,) = json.loads(path.read_text(encoding="utf-8"))["rates"]["0"]["folders"]
        assert run["computed_by"]["the folder in fp32"] == {
            "margins": 0,
            "scores": 0,
            "margins_of_pairs": run["margins"],
        }
        assert 0 < run["computed_by"]["the folder in bf16"]["scores"] < 0.2
        assert "margins, seed 0 | scores, seed 0 |" in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_half_precision_is_timed_by_its_own_and_by_pytorchs_products(tmp_path):
    own = half_products.linear.WIDENED
    size = ["--model", "tiny-llama", "--data", "generated", "--pairs", "4", "--rounds", "2", "--threads", "1"]
    assert half_products.main([*size, "--results", str(tmp_path)]) == 0
    found = result(tmp_path)
    for ways in found["samples"].values():
        assert {name: len(samples) for name, samples in ways.items()} == {
            half_products.EXACT: 2,
            half_products.OURS: 2,
            half_products.TORCH: 2,
        }
    assert set(found["samples"]) == {"a training step", "an evaluation"}
    assert found["widened"] == (torch.bfloat16 in own)
    assert half_products.linear.WIDENED is own
