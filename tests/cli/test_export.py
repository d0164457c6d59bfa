"""A folder in another dtype: as saving in it would have given, with its own canaries and a line on where it is from."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import refusal
from common import make_model, make_tokenizer, write_pairs
from rewardlab.artifact.calibrated import store_calibration
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.files import sha256_file
from rewardlab.core.spec import SPEC_FILE, CalibrationSpec, read_spec
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.folders import export as export_module
from rewardlab.serve.verifying.folder import verify


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is quick."""
    for place in ("serve.folders.export", "training.run"):
        monkeypatch.setattr(f"rewardlab.{place}.verify_in_clean_process", verify)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model in float32."""
    folder = tmp_path_factory.mktemp("saved") / "rm"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    save_reward_model(folder, make_model(), renderer, beta=1.5, save_dtype=torch.float32, provenance={"step": 7})
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "rm"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float16", "float32"])
def test_an_exported_folder_is_the_one_that_saving_in_its_dtype_gives(
    tmp_path, folder, renderer, capsys, monkeypatch, dtype
):
    if dtype != "bfloat16":  # which alone is verified in a clean process
        monkeypatch.setattr("rewardlab.serve.folders.export.verify_in_clean_process", verify)
    out = tmp_path / "out"
    main(["export", str(folder), "--dtype", dtype, "--output-dir", str(out)])
    assert f"{out}: {folder} in {dtype}" in capsys.readouterr().out
    save_reward_model(
        tmp_path / "direct", make_model(), renderer, beta=1.5, save_dtype=getattr(torch, dtype), provenance={}
    )
    direct, exported = weights_of(tmp_path / "direct"), weights_of(out)
    assert direct.keys() == exported.keys()
    assert all(torch.equal(direct[name], exported[name]) for name in direct)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    spec = read_spec(out)
    assert spec.exported_from == {
        "folder": str(folder),
        "save_dtype": "float32",
        "spec_sha256": sha256_file(folder / SPEC_FILE),
    }
    assert spec.rounding == ("none" if dtype == "float32" else "stochastic")
    assert spec.provenance["step"] == 7
    assert spec.beta == 1.5
    assert spec.renderer == read_spec(folder).renderer
    verify(out, precision="bf16")


def test_there_and_back_the_scores_are_those_of_the_half_precision_folder(tmp_path, folder, verified_here, capsys):
    main(["export", str(folder), "--output-dir", str(tmp_path / "half")])
    main(["export", str(tmp_path / "half"), "--dtype", "float32", "--output-dir", str(tmp_path / "back")])
    assert "holds weights that were rounded stochastically" in capsys.readouterr().out
    half, back = read_spec(tmp_path / "half"), read_spec(tmp_path / "back")
    assert [a.score for a in half.canaries] == [b.score for b in back.canaries]
    assert all(
        torch.equal(tensor.float(), weights_of(tmp_path / "back")[name])
        for name, tensor in weights_of(tmp_path / "half").items()
    )
    assert back.exported_from["save_dtype"] == "bfloat16"
    assert back.rounding == half.rounding == "stochastic", "float32 holds what was rounded"
    main(["export", str(tmp_path / "back"), "--dtype", "float32", "--output-dir", str(tmp_path / "again")])
    assert read_spec(tmp_path / "again").rounding == "stochastic", "and so does a copy of it"
    assert back.max_rounding_error == 0


def test_a_calibration_goes_along_where_no_weight_is_rounded(tmp_path, folder, verified_here, capsys, monkeypatch):
    monkeypatch.setattr("rewardlab.artifact.calibrated.verify_in_clean_process", verify)
    record = CalibrationSpec(
        reward_mean=0.5, reward_std=2.0, num_replies=9, num_comparisons=9, precision="fp32", data={}, judged={}
    )
    store_calibration(folder, temperature=1.5, affine=(2.0, -1.0), calibration=record)
    rounded, half, back, copy = (tmp_path / name for name in ("rounded", "half", "back", "copy"))
    main(["export", str(folder), "--dtype", "float32", "--max-shard-size", "20KB", "--output-dir", str(copy)])
    assert "not carried over" not in capsys.readouterr().out
    main(["export", str(folder), "--dtype", "bfloat16", "--output-dir", str(rounded)])
    assert "is not carried over, since rounding moves scores" in capsys.readouterr().out
    store_calibration(rounded, temperature=1.5, affine=(2.0, -1.0), calibration=record)
    main(["export", str(rounded), "--dtype", "bfloat16", "--output-dir", str(half)])
    main(["export", str(rounded), "--dtype", "float32", "--output-dir", str(back)])
    for exported in (copy, half, back):
        spec = read_spec(exported)
        assert (spec.temperature, spec.affine, spec.calibration) == (1.5, (2.0, -1.0), record)
        verify(exported)
    assert load(copy).probabilities([0.3]) == load(folder).probabilities([0.3])


def test_adapters_are_copied_as_trained(base_model, tmp_path, verified_here):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    run = tmp_path / "run"
    line = f"train --model {base_model} --dataset {pairs} --output-dir {run} --steps 1 --batch-size 8 --lora"
    main([*line.split(), "--max-seq-len", "128", "--precision", "fp32", "--eval-fraction", "0", "--report-to", "none"])
    main(["export", str(run / "step_1"), "--output-dir", str(tmp_path / "half")])
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "half/adapter" / name).read_bytes() == (run / "step_1/adapter" / name).read_bytes()
    assert read_spec(tmp_path / "half").files["adapter/adapter_config.json"]


@pytest.mark.slow
def test_what_is_there_is_replaced_only_when_asked_for(tmp_path, folder, capsys, verified_here):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    said = refusal(capsys, "export", str(folder), "--output-dir", str(out))
    assert (
        said == f"--output-dir {out}: it exists and is not empty. Name another folder, or replace it with --overwrite. "
        "What an ended command left under this name is whole.\n"
    )
    assert (out / "precious").read_text() == "mine"
    said = refusal(capsys, "export", str(folder), "--output-dir", str(out), "--overwrite")
    assert f"--output-dir {out}: it holds files that are not a reward model's" in said
    assert (out / "precious").read_text() == "mine"
    said = refusal(capsys, "export", str(folder), "--output-dir", str(out / "precious"), "--overwrite")
    assert "it is there and is not a folder" in said
    shutil.copytree(folder, out, dirs_exist_ok=True)
    main(["export", str(folder), "--output-dir", str(out), "--overwrite"])
    assert not (out / "precious").exists()
    assert load(out, precision="bf16").beta == 1.5


def test_a_run_is_never_replaced(tmp_path, folder, capsys):
    run = Path(shutil.copytree(folder, tmp_path / "run" / "best")).parent
    (run / "manifest.json").write_text(json.dumps({"config_hash": "0", "provenance": {}}))
    said = refusal(capsys, "export", str(folder), "--output-dir", str(run), "--overwrite")
    assert f"--output-dir {run}: it holds a run, with files of its own" in said
    assert verify(run / "best").num_files > 0


@pytest.mark.parametrize(("place", "how"), [(".", "is"), ("inside", "lies in"), ("..", "contains")])
def test_a_folder_is_not_exported_over_itself(folder, capsys, place, how):
    said = refusal(capsys, "export", str(folder), "--output-dir", str(folder / place), "--overwrite")
    assert f"it {how} {folder}, the folder that is read. Name another folder." in said
    assert verify(folder).num_files > 0


@pytest.mark.slow
def test_a_damaged_folder_and_one_out_of_range_export_nothing(tmp_path, folder, renderer, capsys):
    out = tmp_path / "out"
    wide = make_model()
    with torch.no_grad():
        wide.head.weight[0, 0] = 1e5
    save_reward_model(tmp_path / "wide", wide, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    said = refusal(capsys, "export", str(tmp_path / "wide"), "--dtype", "float16", "--output-dir", str(out))
    assert "the largest float16 value is 65504" in said
    with (folder / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert "was changed after the model was saved" in refusal(capsys, "export", str(folder), "--output-dir", str(out))
    assert not out.exists()


@pytest.mark.slow
def test_an_export_that_does_not_verify_leaves_what_was_there(tmp_path, folder, monkeypatch):
    def refuse(place: Path) -> None:
        assert (place / SPEC_FILE).is_file()
        raise ArtifactError("no memory for it")

    out = tmp_path / "half"
    monkeypatch.setattr(export_module, "verify_in_clean_process", refuse)
    with pytest.raises(ArtifactError, match="no memory for it"):
        export_module.export(folder, out, dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["rm"]
    shutil.copytree(folder, out)
    (out / "mine").touch()
    with pytest.raises(ArtifactError, match="no memory for it"):
        export_module.export(folder, out, dtype="bfloat16", overwrite=True)
    assert {path.name for path in out.iterdir()} == {"mine", *(path.name for path in folder.iterdir())}


def test_a_signal_leaves_no_half_of_an_export(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setattr("rewardlab.core.folders.fsync_folder", lambda _: signal.raise_signal(signal.SIGTERM))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(["export", str(folder), "--dtype", "bfloat16", "--output-dir", str(tmp_path / "half")])
    assert ended.value.code == 75
    assert "stopped by SIGTERM. The same command begins anew." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_came_there_while_it_was_exported_is_not_replaced(tmp_path, folder, monkeypatch):
    out = tmp_path / "half"

    def meanwhile(_: Path) -> None:
        out.mkdir()
        (out / "mine").touch()

    monkeypatch.setattr(export_module, "verify_in_clean_process", meanwhile)
    with pytest.raises(ConfigError, match="half: it exists and is not empty"):
        export_module.export(folder, out, dtype="bfloat16")
    assert [path.name for path in out.iterdir()] == ["mine"]
