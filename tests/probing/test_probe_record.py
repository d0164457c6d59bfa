"""What a probe writes down and finds again: settings that repeat it, states that outlive a move."""

from __future__ import annotations

import json

import pytest
import torch

import rewardlab.probing.run as probe_module
from common import make_groups, make_model
from rewardlab.cli import main
from rewardlab.probing.states import fingerprint
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setattr(probe_module, "verify_in_clean_process", verify)
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_the_saved_settings_repeat_a_probe_and_replace_nothing(base_model, pairs_file, tmp_path, capsys):
    named = ["--model", str(base_model), "--dataset", str(pairs_file), "--output-dir", str(tmp_path / "run")]
    main(["probe", *named, "--max-seq-len", "128", "--bootstrap", "0", "--overwrite"])
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["overwrite"], saved["attention"], saved["save_dtype"]) == (False, "shared", "float32")
    assert saved["precision"] in ("fp32", "bf16")
    assert "auto" not in [saved[name] for name in ("attention_backend", "linear_backend", "allocator")]
    chosen = f"compute: attention {saved['attention_backend']}"
    assert capsys.readouterr().out.count(chosen) == 1
    again = tmp_path / "again.json"
    again.write_text(json.dumps(saved))
    with pytest.raises(SystemExit):
        main(["probe", "--config", str(again)])
    assert "already holds a run" in capsys.readouterr().err
    main(["probe", "--config", str(again), "--output-dir", str(tmp_path / "other")])
    first, second = (json.loads((tmp_path / name / "probe.json").read_text()) for name in ("run", "other"))
    assert first["layers"] == second["layers"]


def test_neither_a_model_s_path_nor_a_library_s_version_names_another_folder():
    model, groups = make_model(), make_groups(2)
    name = fingerprint(model, groups)
    model.backbone.config._name_or_path = "elsewhere"
    model.backbone.config.transformers_version = "0"
    assert fingerprint(model, groups) == name
    model.backbone.config.rms_norm_eps *= 2
    assert fingerprint(model, groups) != name


def test_a_buffer_without_dimensions_counts_too():
    model, groups = make_model(), make_groups(2)
    model.backbone.register_buffer("scale", torch.tensor(1.0))
    name = fingerprint(model, groups)
    model.backbone.scale += 1
    assert fingerprint(model, groups) != name
