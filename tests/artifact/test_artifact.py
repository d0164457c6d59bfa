"""The artifact: loads everywhere, gives its canonical scores, and names what was done to it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from artifacts import save
from common import make_model
from rewardlab.analysis.faults import FAULTS, name_fault
from rewardlab.artifact import save as save_module
from rewardlab.artifact.load import load
from rewardlab.artifact.save import saved_dtype, verify_in_clean_process
from rewardlab.artifact.seal import METADATA
from rewardlab.core.errors import ArtifactError, RenderError
from rewardlab.core.spec import SCORE_TOLERANCE, read_spec
from rewardlab.model.config import ModelConfig
from rewardlab.model.load import load_reward_model
from rewardlab.serve.verifying.folder import verify
from sealing import edit, edit_weights, seal_again

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "rm"
    save(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of a sound artifact, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_gives_the_canary_scores(tmp_path, family):
    _, _, spec = save(tmp_path / "rm", family)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert len(spec.canaries) == 7, "all but the long one, with a tokenizer of bytes and 256 tokens"
    canaries = [canary for canary in spec.canaries if canary.name != "control tokens"]
    assert len(canaries) == 6, "what transformers reads as text is another conversation there"
    for canary in canaries:
        text = tokenizer.apply_chat_template(canary.messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == canary.token_ids
        with torch.no_grad():
            score = float(model(ids).logits)
        assert abs(score - canary.score) <= 1e-5 * max(1, abs(canary.score))
    padded = tokenizer.pad(
        {"input_ids": [canary.token_ids for canary in spec.canaries]}, padding_side="right", return_tensors="pt"
    )
    with torch.no_grad():
        scores = model(**padded).logits[:, 0]
    assert torch.allclose(scores, torch.tensor([canary.score for canary in spec.canaries]), atol=2e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_scores_as_the_live_one_did(tmp_path, family):
    model, renderer, _ = save(tmp_path / "rm", family)
    from rewardlab.score import Scorer

    conversations = [
        [{"role": "user", "content": "How do I keep basil?"}, {"role": "assistant", "content": reply}]
        for reply in ("Water it.", "no", "Paris, certainly")
    ]
    live = Scorer(model, renderer).score(conversations)
    loaded = load(tmp_path / "rm")
    assert loaded.score(conversations) == pytest.approx(live, abs=1e-5)
    assert loaded.beta == 1.5
    assert loaded.score_replies(conversations[0][:1], ["Water it.", "no"]) == pytest.approx(live[:2], abs=1e-5)


@pytest.mark.slow
def test_a_clean_process_minds_no_file_of_the_current_folder(copy, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    verify_in_clean_process(copy)
    # Typed by hand, without -P, it is no other.
    by_hand = [sys.executable, "-m", "rewardlab", "verify", "nosuch"]
    said = subprocess.run(by_hand, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.stderr.startswith("error: nosuch: no such folder.")


@pytest.mark.slow
def test_every_process_that_is_started_keeps_the_current_folder_off_its_path():
    """`-P` stands before each `-m` that a program or a batch script gives to Python."""
    root = Path(__file__).resolve().parents[2]
    files = [*root.glob("src/**/*.py"), *root.glob("examples/**/*.sbatch"), *root.glob("examples/**/*.slurm")]
    starts = [
        start
        for path in files
        for start in re.findall(r"""(\S+) ["']?-m["']?,? ["']?(?:rewardlab|pip)\b""", path.read_text(encoding="utf-8"))
        if not start.strip('f"').startswith("`")  # words of a message
    ]
    assert len(starts) >= 9
    assert {start.strip("\"',") for start in starts} == {"-P"}


def test_the_folder_says_what_engines_need_to_know(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["problem_type"] == "regression"
    assert len(config["id2label"]) == 1
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 777.0
    weights = load_file(saved / "model.safetensors")
    assert weights["score.weight"].shape == (1, 32)
    assert all(name.startswith(("model.", "score.")) for name in weights)
    assert json.loads((saved / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (saved / "model.safetensors").stat().st_mode & 0o444


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    ],
    ids=["llama3", "linear", "partial"],
)  # fmt: skip
def test_position_settings_stand_where_older_transformers_look_and_read_back_unchanged(tmp_path, rope):
    config = make_model("llama").config
    config.rope_parameters = dict(rope)
    _, _, spec = save(tmp_path / "rm", config=config)
    written = json.loads((tmp_path / "rm/config.json").read_text())
    assert written["rope_theta"] == rope["rope_theta"]
    if rope["rope_type"] != "default":
        assert written["rope_scaling"] == {name: value for name, value in rope.items() if name != "rope_theta"}
    assert written.get("partial_rotary_factor") == rope.get("partial_rotary_factor")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert {name: plain.config.rope_parameters[name] for name in rope} == rope
    for canary in spec.canaries:
        with torch.no_grad():
            assert float(plain(torch.tensor([canary.token_ids])).logits) == pytest.approx(canary.score, abs=1e-5)


@pytest.mark.slow
def test_verification_in_a_clean_process_passes_for_a_sound_folder_and_fails_for_a_damaged_one(
    copy,
):
    command = [sys.executable, "-m", "rewardlab", "verify", str(copy)]
    sound = subprocess.run(command, capture_output=True, text=True, check=False)
    assert sound.returncode == 0, sound.stderr
    assert "verified" in sound.stdout
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-64])
    damaged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert damaged.returncode == 2
    assert "damaged" in damaged.stderr
    assert "Traceback" not in damaged.stderr


def test_a_removed_head_is_refused(copy):
    edit_weights(copy, lambda weights: weights.pop("score.weight"))
    for check in (verify, load):
        with pytest.raises(
            ArtifactError, match=r"no score.weight in its files: the head, and so every reward, is lost"
        ):
            check(copy)


def test_a_zero_head_is_named(copy):
    edit_weights(copy, lambda weights: weights["score.weight"].zero_())
    with pytest.raises(ArtifactError, match="a head that is zero or was never loaded"):
        verify(copy)


def test_a_dropped_rope_base_is_named(copy):
    def drop(config):
        config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 10000.0

    edit(copy / "config.json", drop)
    with pytest.raises(ArtifactError, match=r"the default position settings \(rope\)"):
        verify(copy)


def test_a_missing_layer_is_refused(copy):
    edit_weights(copy, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ArtifactError, match="weights are missing: .*up_proj"):
        verify(copy)


def test_any_edited_file_is_noticed(copy):
    with (copy / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ArtifactError, match="tokenizer_config.json was changed after the model was saved"):
        load(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_clone_without_git_lfs_is_told_what_fetches_its_files(copy, name):
    (copy / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4379510\n")
    with pytest.raises(ArtifactError, match=rf"{name}: this is a git-lfs pointer.*`git lfs pull` in [^`]*\(git-lfs"):
        load(copy)


def test_a_changed_template_is_refused(copy):
    path = copy / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    with pytest.raises(ArtifactError, match=r"chat_template.jinja was changed"):
        verify(copy)
    seal_again(copy)
    with pytest.raises(ArtifactError, match="chat template is not the one the model was trained with"):
        verify(copy)
    spec = json.loads((copy / "reward_spec.json").read_text())
    spec["renderer"]["chat_template"] = path.read_text()
    (copy / "reward_spec.json").write_text(json.dumps(spec))
    with pytest.raises(ArtifactError, match="does not match its recorded hash"):
        verify(copy)


def test_a_wrong_pad_id_is_refused(copy):
    final = read_spec(copy).renderer.final_token_id
    edit(copy / "config.json", lambda config: config.update(pad_token_id=final))
    with pytest.raises(ArtifactError, match=f"pad_token_id {final} must be set and differ from the final token"):
        load(copy)
    edit(copy / "config.json", lambda config: config.update(pad_token_id=None))
    with pytest.raises(ArtifactError, match="pad_token_id None"):
        load(copy)


def test_a_probability_in_place_of_a_score_is_refused(copy):
    edit(copy / "config.json", lambda config: config.update(problem_type="single_label_classification"))
    with pytest.raises(ArtifactError, match="engines would return a probability"):
        verify(copy)


def test_another_tokenizer_is_refused(copy):
    path = copy / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["merges"] = values["model"]["merges"][: len(values["model"]["merges"]) // 2]
    path.write_text(json.dumps(values))
    seal_again(copy)
    with pytest.raises(ArtifactError, match=r"canary 'short' now renders to other tokens from token \d+ on"):
        verify(copy)


def test_a_folder_without_a_spec_is_not_taken_for_a_reward_model(copy):
    (copy / "reward_spec.json").unlink()
    with pytest.raises(ArtifactError, match=r"no reward_spec.json.*Give the folder that `rewardlab train` wrote"):
        load(copy)


def test_a_wrong_path_names_the_models_beside_it_and_a_run_those_in_it(copy, tmp_path):
    run = tmp_path / "run"
    for name in ("best", "step_4"):
        shutil.copytree(copy, run / name)
    with pytest.raises(ArtifactError, match=r"run/bset: no such folder. Reward models in .*run: best, step_4\."):
        load(run / "bset")
    with pytest.raises(ArtifactError, match=r"no reward_spec.json.* Reward models in .*run: best, step_4\."):
        load(run)


def test_a_base_model_is_called_one_that_has_to_be_trained_first(base_model):
    said = r"this LlamaForCausalLM is not a rewardlab reward model.* train it first \(`rewardlab train --model"
    with pytest.raises(ArtifactError, match=said):
        load(base_model)
    with pytest.raises(ArtifactError, match=r"no such folder\. Give the folder that .* A base model gives no scores"):
        load("smollm2-135m-instruct")


def test_a_spec_of_another_version_is_refused(copy):
    rewrite_spec = json.loads((copy / "reward_spec.json").read_text()) | {"schema_version": 99}
    (copy / "reward_spec.json").write_text(json.dumps(rewrite_spec))
    with pytest.raises(ArtifactError, match="schema version 99"):
        load(copy)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fitted", [{"temperature": 2.0}, {"affine": [0.5, 1.0]}])
def test_a_calibration_in_the_spec_changes_no_score_unasked(copy, fitted):
    raw = load(copy).score_replies("How?", ["So."])
    edit(copy / "reward_spec.json", lambda spec: spec.update(fitted))
    verify(copy)
    assert load(copy).score_replies("How?", ["So."]) == raw


@pytest.mark.parametrize(
    ("fitted", "message"),
    [({"temperature": 0.0}, "temperature: expected above 0"), ({"affine": [-1.0, 0.0]}, "affine: expected a scale")],
)
def test_a_calibration_that_cannot_be_meant_is_refused(copy, fitted, message):
    path = copy / "reward_spec.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fitted))
    with pytest.raises(ArtifactError, match=message):
        load(copy, check=False)


def test_code_in_the_folder_runs_only_if_it_is_trusted(copy):
    code = (
        "from transformers import PreTrainedTokenizerFast\n\n\nclass Mine(PreTrainedTokenizerFast):\n    mine = True\n"
    )
    (copy / "tokenization_mine.py").write_text(code)
    own = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "tokenization_mine.Mine"]}}
    edit(copy / "tokenizer_config.json", lambda config: config.update(own))
    with pytest.raises(RenderError, match="no tokenizer for"):
        load(copy)
    assert load(copy, trust_remote_code=True).renderer.tokenizer.mine


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"dropped_rope_scaling"}))
def test_every_known_fault_is_named_by_its_decoys(saved, fault):
    canaries = read_spec(saved).canaries
    scores = [canary.decoys.get(fault, canary.score) for canary in canaries]
    found = name_fault(canaries, scores, tolerance=SCORE_TOLERANCE["float32"])
    assert found == f"{FAULTS[fault]} ({fault})"


def test_right_scores_are_no_fault_and_strange_ones_are_unknown(saved):
    canaries = read_spec(saved).canaries
    scores = [canary.score for canary in canaries]
    assert name_fault(canaries, scores, tolerance=1e-4) is None
    assert name_fault(canaries, [score + 5 for score in scores], tolerance=1e-4).startswith("unknown")
    assert name_fault(canaries, [float("nan")] * len(scores), tolerance=1e-4).startswith("unknown")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_canonical_score_is_that_of_the_saved_weights_in_float32(tmp_path, dtype):
    _, _, spec = save(tmp_path / "rm", dtype=dtype)
    assert 0 < spec.max_rounding_error < 0.5
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    assert {tensor.dtype for tensor in load_file(tmp_path / "rm/model.safetensors").values()} == {dtype}
    for canary in spec.canaries:
        with torch.no_grad():
            assert float(plain(torch.tensor([canary.token_ids])).logits) == pytest.approx(canary.score, abs=1e-5)
    assert verify(tmp_path / "rm").largest_distance < 1e-5


def test_a_save_that_would_not_give_the_live_scores_is_refused(tmp_path, monkeypatch):
    from rewardlab.artifact import save as module

    real = module.write_weights

    def write_others(path, *arguments, **more):
        written = real(path, *arguments, **more)
        weights = {name: tensor * (2.0 if "mlp" in name else 1.0) for name, tensor in load_file(path).items()}
        save_file(weights, path, metadata=METADATA)
        return written

    monkeypatch.setattr(module, "write_weights", write_others)
    with pytest.raises(ArtifactError, match="is not what was saved when the folder is read back"):
        save(tmp_path / "rm")
    assert not (tmp_path / "rm").exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", [0, 3])
def test_a_canary_without_a_finite_live_score_is_told_and_left_out_of_the_comparison(
    tmp_path, monkeypatch, caplog, number
):
    real = save_module.live_scores

    def broken(*given):
        return [math.nan if place == number else score for place, score in enumerate(real(*given))]

    monkeypatch.setattr(save_module, "live_scores", broken)
    _, _, spec = save(tmp_path / "rm")
    assert spec.max_rounding_error < 1e-5
    name = spec.canaries[number].name
    assert f"the live model has no finite score for the canaries {name}, so evaluations on the way" in caplog.text
    monkeypatch.setattr(save_module, "live_scores", lambda *_: [math.inf] * len(spec.canaries))
    with pytest.raises(ArtifactError, match="no finite score for any canary. Train with --precision bf16 or fp32"):
        save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_saved_dtype_is_that_of_the_trained_weights_unless_told_otherwise():
    assert saved_dtype("auto") is torch.float32
    assert saved_dtype("bfloat16") is torch.bfloat16


def test_a_saved_model_is_a_base_to_continue_from(saved):
    lines = []
    model = load_reward_model(
        str(saved),
        ModelConfig(precision="fp32"),
        seed=3,
        layout="shared",
        device=torch.device("cpu"),
        log=lines.append,
    )
    assert any(line.startswith("head: kept") for line in lines)
    assert torch.equal(model.head.weight, load_file(saved / "model.safetensors")["score.weight"])
