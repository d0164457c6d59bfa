"""The spec is protected: whatever is changed in it is named, case by case, and older folders load with a word."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from artifacts import refusal
from common import make_model, make_tokenizer
from lessons import slightly_trained, wide_renderer
from rewardlab.artifact import save as save_module
from rewardlab.artifact.load import load, require_files
from rewardlab.artifact.save import save_reward_model
from rewardlab.artifact.seal import KEY, OF_THE_RUN
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import sha256_file, sha256_json
from rewardlab.core.spec import SPEC_FILE, part_digests, read_spec
from rewardlab.core.types import Message
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.verifying.folder import verify
from sealing import write_spec


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound folder."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("seal") / "rm"
    save_reward_model(
        path,
        slightly_trained(),
        wide_renderer(),
        beta=1.5,
        save_dtype=torch.float32,
        provenance={"lr": 1e-5, 7: ("a",)},
    )
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be tampered with."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def spec_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SPEC_FILE).read_text())


CHANGES: dict[str, tuple[str, Any]] = {
    "beta": ("beta", 2.0),
    "final_token_id": ("renderer.final_token_id", 7),
    "system_prompt": ("renderer.system_prompt", "Be kind."),
    "max_length": ("renderer.max_length", 128),
    "affine": ("affine", [2.0, 1.0]),
    "temperature": ("temperature", 2.0),
    "save_dtype": ("save_dtype", "bfloat16"),
    "rounding": ("rounding", "nearest"),
    "provenance": ("provenance", {}),
    "exported_from": ("exported_from", {"folder": "elsewhere"}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_part_of_the_spec_is_named(copy, case):
    name, value = CHANGES[case]
    values = spec_of(copy)
    place = values["renderer"] if name.startswith("renderer.") else values
    place[name.rpartition(".")[2]] = value
    write_spec(copy, values)
    assert refusal(copy).startswith(f"{copy / SPEC_FILE}: {name} changed after the model was saved")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "added_tokens.json",
            "special_tokens_map.json",
            "tokenizer.model",
            "additional_chat_templates/tool_use.jinja",
        ),
        *("adapter_config.json", "modules.json", "sentence_bert_config.json", "hf_quant_config.json"),
    ],
)
def test_an_unlisted_file_that_engines_read_is_refused_by_name(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text(json.dumps({"zebra": 3}))
    for check in (load, verify):
        with pytest.raises(ArtifactError, match=rf"{name} was not saved with the model, .* Remove the file"):
            check(copy)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "a.safetensors", "model.safetensors.index.json"])
def test_weights_left_by_another_model_are_refused_since_engines_would_load_them(copy, name):
    if name.endswith(".json"):
        (copy / name).write_text(json.dumps({"weight_map": {"score.weight": "model-00001-of-00002.safetensors"}}))
    else:
        shutil.copy(copy / "model.safetensors", copy / name)
    assert f"{name} was not saved with the model" in refusal(copy)


def test_unlisted_files_that_nothing_reads_are_allowed(copy):
    for name in ("README.md", "notes.txt", ".gitattributes", ".cache/huggingface/download/added_tokens.json.metadata"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("beside the model")
    load(copy)


def test_a_shorter_list_of_files_is_named_and_so_is_another_hash(copy):
    values = spec_of(copy)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + "\n")
    values["files"]["tokenizer.json"] = sha256_file(copy / "tokenizer.json")
    write_spec(copy, values)
    assert "files changed after" in refusal(copy)
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        values = spec_of(copy)
        del values["files"][name]
        write_spec(copy, values)
        assert "files changed after" in refusal(copy)


def test_canaries_that_were_changed_taken_away_or_emptied_are_named(copy):
    sound = spec_of(copy)
    for change in (
        lambda canaries: canaries[0].update(score=canaries[0]["score"] + 1),
        lambda canaries: canaries.pop(),
        lambda canaries: canaries[1]["decoys"].clear(),
        lambda canaries: canaries[1]["references"].update(bfloat16=0.0),
    ):
        values = json.loads(json.dumps(sound))
        change(values["canaries"])
        write_spec(copy, values)
        assert "canaries changed after" in refusal(copy)
    for nothing in ({"canaries": []}, {"canaries": None}):
        write_spec(copy, sound | nothing)
        assert "it holds no canaries, so the scores of the model cannot be verified" in refusal(copy)
    write_spec(copy, {name: value for name, value in sound.items() if name != "canaries"})
    assert "it holds no canaries" in refusal(copy)
    with pytest.raises(ArtifactError, match="it holds no canaries"):
        load(copy, check=False)


def test_digests_that_were_made_to_fit_a_change_do_not_fit_the_other_files(copy):
    values = spec_of(copy) | {"beta": 9.0}
    write_spec(copy, values)
    values["digests"] = part_digests(read_spec(copy))
    write_spec(copy, values)
    assert "config.json holds the digest of another reward_spec.json" in refusal(copy)
    config = json.loads((copy / "config.json").read_text())
    covered = {name: digest for name, digest in values["digests"].items() if name not in OF_THE_RUN}
    (copy / "config.json").write_text(json.dumps(config | {KEY: sha256_json(covered)}))
    values["files"]["config.json"] = sha256_file(copy / "config.json")
    write_spec(copy, values)
    assert "model.safetensors holds the digest of another reward_spec.json" in refusal(copy)


def test_digests_that_were_taken_away_are_missed(copy):
    write_spec(copy, spec_of(copy) | {"digests": {}})
    assert "beta" in refusal(copy)


@pytest.mark.slow
def test_a_spec_beside_the_files_of_another_model_is_noticed(copy, tmp_path):
    save_reward_model(
        tmp_path / "other", make_model(), wide_renderer(), beta=1.0, save_dtype=torch.float32, provenance={}
    )
    shutil.copy(tmp_path / "other" / SPEC_FILE, copy / SPEC_FILE)
    assert "config.json holds the digest of another reward_spec.json" in refusal(copy)


def test_weights_that_another_program_wrote_anew_are_noticed(copy):
    save_file(load_file(copy / "model.safetensors"), copy / "model.safetensors", metadata={"format": "pt"})
    values = spec_of(copy)
    values["files"]["model.safetensors"] = sha256_file(copy / "model.safetensors")
    write_spec(copy, values)
    assert "model.safetensors holds no digest of its spec" in refusal(copy)


def test_the_digest_stands_in_config_and_weights_which_plain_transformers_reads_as_ever(saved):
    spec = read_spec(saved)
    digest = sha256_json({name: part for name, part in part_digests(spec).items() if name not in OF_THE_RUN})
    assert json.loads((saved / "config.json").read_text())[KEY] == digest
    with safe_open(saved / "model.safetensors", framework="pt") as weights:
        assert weights.metadata() == {"format": "pt", KEY: digest}
    assert sorted(spec.files) == sorted(path.name for path in saved.iterdir() if path.name != SPEC_FILE)
    assert all(spec.files[name] == sha256_file(saved / name) for name in spec.files)
    plain = AutoModelForSequenceClassification.from_pretrained(saved)
    with torch.no_grad():
        score = float(plain(torch.tensor([spec.canaries[0].token_ids])).logits)
    assert score == pytest.approx(spec.canaries[0].score, abs=1e-5)


def test_weights_are_written_once_and_sealed_in_place(tmp_path, monkeypatch):
    written: list[tuple[int, int]] = []
    own = save_module.write_weights

    def counted(path: Path, *given: Any, **settings: Any) -> dict[str, str]:
        digests = own(path, *given, **settings)
        written.append((path.stat().st_ino, path.stat().st_size))
        return digests

    monkeypatch.setattr(save_module, "write_weights", counted)
    save_reward_model(tmp_path / "rm", make_model(), wide_renderer(), beta=1.0, save_dtype=torch.float32, provenance={})
    (first,) = written
    found = (tmp_path / "rm/model.safetensors").stat()
    assert first == (found.st_ino, found.st_size)


def test_the_same_model_gives_the_same_files_wherever_it_was_trained(tmp_path):
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        save_reward_model(
            folder, make_model(), wide_renderer(), beta=1.0, save_dtype=torch.float32, provenance={"run": folder.name}
        )
    for name in ("model.safetensors", "config.json"):
        assert len({sha256_file(folder / name) for folder in folders}) == 1
    assert len({sha256_file(folder / SPEC_FILE) for folder in folders}) == 4


@pytest.mark.slow
def test_a_model_trained_on_from_a_folder_has_a_digest_of_its_own(saved, tmp_path):
    scorer = load(saved)
    assert getattr(scorer.model.config, KEY) == json.loads((saved / "config.json").read_text())[KEY]
    save_reward_model(
        tmp_path / "next", scorer.model, scorer.renderer, beta=3.0, save_dtype=torch.float32, provenance={}
    )
    assert verify(tmp_path / "next").num_canaries == 7


# --- older folders ---------------------------------------------------------------------------------------------


def make_older(folder: Path, *, sealed: bool = False) -> None:
    """As the first version wrote it; `sealed` leaves the digests in the other files."""
    values = spec_of(folder)
    for name in ("digests", "rounding", "exported_from"):
        del values[name]
    del values["renderer"]["special_tokens_in_text"]
    values["canaries"] = [canary for canary in values["canaries"] if canary["name"] != "control tokens"]
    for canary in values["canaries"]:
        del canary["references"]
        del canary["decoys"]["precision_mismatch"]
    if not sealed:
        config = json.loads((folder / "config.json").read_text())
        del config[KEY]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
        for name in ("config.json", "model.safetensors"):
            values["files"][name] = sha256_file(folder / name)
    write_spec(folder, values | {"schema_version": 1})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_folder_of_the_first_version_loads_with_a_line_on_what_is_not_known(copy, caplog, precision):
    make_older(copy)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        scorer = load(copy, precision=precision)
    (line,) = [record.getMessage() for record in caplog.records if "earlier version" in record.getMessage()]
    assert "a change of its reward_spec.json would not be noticed, and there are no references for half" in line
    assert scorer.beta == 1.5
    assert read_spec(copy).rounding == "none"
    assert verify(copy, precision=precision).num_canaries == 6


@pytest.mark.slow
def test_a_folder_without_word_on_typed_control_tokens_reads_them_as_it_did(tmp_path):
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256, special_tokens_in_text="keep"))
    folder = tmp_path / "rm"
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    values = spec_of(folder)
    assert values["renderer"].pop("special_tokens_in_text") == "keep"
    write_spec(folder, values)
    typed = [Message("user", "Hi"), Message("assistant", "No.<|im_end|>")]
    assert load(folder).renderer.token_ids(typed).tolist() == renderer.token_ids(typed).tolist()
    values["renderer"]["special_tokens_in_text"] = "text"
    write_spec(folder, values)
    assert "renderer.special_tokens_in_text changed after the model was saved" in refusal(folder)


def test_the_first_version_rounded_to_the_nearest(copy):
    make_older(copy)
    write_spec(copy, spec_of(copy) | {"save_dtype": "bfloat16"})
    assert read_spec(copy).rounding == "nearest"


def test_a_spec_that_only_calls_itself_older_is_refused(copy):
    make_older(copy, sealed=True)
    assert "schema_version in reward_spec.json was changed after the model was saved" in refusal(copy)


@pytest.mark.parametrize("check", [load, verify])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_folder_into_which_another_model_is_put_meanwhile_is_told(copy, tmp_path, monkeypatch, check, precision):
    """A run puts its best model there again and again; in bf16 the other's weights may be within the tolerance."""
    other, model = tmp_path / "other", slightly_trained()
    with torch.no_grad():
        model.head.weight.mul_(1.001)
    save_reward_model(other, model, wide_renderer(), beta=1.5, save_dtype=torch.float32, provenance={})

    def racing(path, spec):
        require_files(path, spec)
        shutil.rmtree(copy)
        shutil.copytree(other, copy)

    monkeypatch.setattr(sys.modules[check.__module__], "require_files", racing)
    with pytest.raises(ArtifactError, match=f"{copy}: another model was put there while it was loaded"):
        check(copy, precision=precision)
