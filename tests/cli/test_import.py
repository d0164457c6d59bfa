"""`rewardlab import` on the command line: what it prints, and what it says about folders that it cannot import."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from command_line import refusal
from common import CHATML, make_tokenizer, write_base_model
from foreign_models import ENDED, edit_config, linear_head, seq_cls, trl_value_head, value_head_file
from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.artifact.foreign.layouts import ForeignModel, recognise
from rewardlab.artifact.foreign.source import PARITY, WholeModel
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import read_spec
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.folders import import_model as importing
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is quick."""
    monkeypatch.setattr(importing, "verify_in_clean_process", verify)


@pytest.fixture
def said(tmp_path, capsys):
    """What the user reads when a folder is refused; nothing is written then."""

    def of(source: Path, *flags: object) -> str:
        words = refusal(capsys, "import", source, "--output-dir", tmp_path / "rm", *flags)
        assert not (tmp_path / "rm").exists()
        return words

    return of


def change_weights(folder: Path, change) -> None:
    """Rewrite model.safetensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_the_report_says_what_was_found_how_it_renders_and_which_constant_is_left_out(tmp_path, capsys):
    made = value_head_file(tmp_path / "source")
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm"), "--max-seq-len", "128", "--beta", "2"])
    out = capsys.readouterr().out
    assert "(value-head head v_head.summary), verified" in out
    assert "canaries in float32 (1e-05 allowed)" in out
    assert "Rendering: tokenizer template, 1 BOS, read at token" in out
    assert "up to 128 tokens" in out
    spec = read_spec(tmp_path / "rm")
    assert spec.beta == 2
    constant = load_file(made.folder / "value_head.safetensors")["v_head.summary.bias"].item()
    assert spec.provenance["import"]["constant_left_out"] == pytest.approx(constant)
    assert f"The source adds {constant:.6g} to every score (bias {constant:.6g})" in out
    assert not (made.folder / "reward_spec.json").exists(), "the source stays as it is"


def test_several_outputs_are_refused_with_the_reason(tmp_path, said):
    assert "score [3, 32] in model.safetensors has 3 outputs, and a reward is one number" in said(
        seq_cls(tmp_path / "classes", labels=3).folder
    )
    made = linear_head(tmp_path / "armo", name="regression_layer", said=None, outputs=19)
    assert "regression_layer [19, 32] in model.safetensors has 19 outputs" in said(made.folder)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(0.0, 0.0, 1.0), (-1.0, 0.5, 0.0)])
def test_several_outputs_become_one_by_what_each_counts(tmp_path, capsys, counts):
    source = seq_cls(tmp_path / "classes", labels=3).folder
    words = [f"{number}={count:g}" for number, count in enumerate(counts) if count]
    main(["import", str(source), "--output-dir", str(tmp_path / "rm"), "--outputs", *words])
    assert f"(seq-cls head score, outputs {' '.join(words)}), verified" in " ".join(capsys.readouterr().out.split())
    spec = read_spec(tmp_path / "rm")
    assert spec.provenance["import"]["outputs"] == list(counts)
    theirs, ours = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in (source, tmp_path / "rm")
    )
    with torch.no_grad():
        for canary in spec.canaries:
            ids = torch.tensor([canary.token_ids])
            wanted = float(theirs(ids).logits[0] @ torch.tensor(counts))
            assert float(ours(ids).logits[0, 0]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_outputs_with_biases_and_statistics_are_verified_by_the_files_own_head(tmp_path, capsys, monkeypatch):
    made = linear_head(tmp_path / "classes", bias=True, outputs=3, statistics=(0.5, 2.0))
    command = ["import", str(made.folder), "--outputs", "0=2", "2=-1", "--output-dir"]
    main([*command, str(tmp_path / "rm")])
    assert "verified" in capsys.readouterr().out
    imported = read_spec(tmp_path / "rm").provenance["import"]
    biases = load_file(made.folder / "model.safetensors")["value_head.bias"]
    assert imported["bias"] == pytest.approx(float(2 * biases[0] - biases[2]))
    weight = ForeignModel.weight.fget
    monkeypatch.setattr(ForeignModel, "weight", property(lambda found: -weight(found)))
    with pytest.raises(SystemExit):
        main([*command, str(tmp_path / "other")])
    assert not (tmp_path / "other" / "config.json").exists()


def test_outputs_that_make_no_reward_are_refused(tmp_path, said):
    source = seq_cls(tmp_path / "classes", labels=2).folder
    assert "Say it: --outputs 0=1 takes the first alone, --outputs 0=-1 1=1 the second minus" in said(source)
    assert "--outputs 2: score [2, 32] in model.safetensors has 2 outputs, numbered from 0." in said(
        source, "--outputs", "2=1"
    )
    for words in (["good=1"], ["0=0"], ["-1=1"], ["00=1"]):
        assert f"--outputs {words[0]}: wanted NUMBER=WEIGHT" in said(source, "--outputs", *words)


def test_a_gate_over_several_objectives_is_refused_by_its_weights(tmp_path, said):
    made = linear_head(tmp_path / "armo", name="regression_layer", said=None, outputs=19)
    change_weights(made.folder, lambda weights: weights.update({"gating.layers.0.weight": torch.zeros(4, 32)}))
    edit_config(made.folder, num_objectives=19)
    words = said(made.folder)
    assert "1 weights belong neither to llama nor to a linear head: gating.layers.0.weight" in words
    assert "num_objectives 19: several scores, which a gate mixes" in words


def test_a_length_limit_above_the_positions_is_refused_as_in_training(tmp_path, said):
    made = seq_cls(tmp_path / "source")
    positions = json.loads((made.folder / "config.json").read_text())["max_position_embeddings"]
    words = said(made.folder, "--max-seq-len", positions + 1)
    assert f"--max-seq-len {positions + 1} is above the {positions} positions of this model. Use at most" in words


def test_a_missing_head_is_refused_with_what_was_found(tmp_path, said):
    words = said(write_base_model(tmp_path / "base"))
    assert "no head, so every reward is lost: a base model is not a reward model." in words
    assert "Found: no linear layer beside the backbone." in words
    words = said(seq_cls(tmp_path / "classes").folder, "--layout", "openrlhf", "--head", "value_head")
    assert "no head of --layout openrlhf called 'value_head', though there is another" in words
    assert "Found: score [1, 32] in model.safetensors" in words


@pytest.mark.slow
def test_two_heads_are_refused_until_one_is_named(tmp_path, said, capsys):
    made = trl_value_head(tmp_path / "source")
    change_weights(made.folder, lambda weights: weights.update({"value_head.weight": torch.ones(1, 32)}))
    words = said(made.folder)
    assert "2 heads, so it is not clear which one gives the reward" in words
    assert "value_head [1, 32] in model.safetensors" in words
    assert "v_head.summary [1, 32] in model.safetensors" in words
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm"), "--layout", "trl"])
    assert "(v_head head v_head.summary)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_layer_of_an_unknown_name_is_a_head_only_if_it_is_named(tmp_path, said, capsys):
    made = linear_head(tmp_path / "source", name="judge", said=None)
    assert "a linear layer of an unknown name. Found: judge [1, 32]" in said(made.folder)
    assert "--layout linear-head --head judge" in said(made.folder)
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm"), "--head", "judge"])
    assert "(linear-head head judge)" in capsys.readouterr().out


def test_wrong_shapes_are_refused(tmp_path, said):
    made = linear_head(tmp_path / "wide", width=48)
    assert "value_head [1, 48] in model.safetensors is for hidden states of width 48, and the model's are 32" in said(
        made.folder
    )
    made = value_head_file(tmp_path / "flat")
    save_file({"weight": torch.ones(1, 32)}, made.folder / "value_head.safetensors")
    assert "expected v_head.summary.weight and perhaps v_head.summary.bias, found weight" in said(made.folder)
    made = seq_cls(tmp_path / "nan")
    change_weights(made.folder, lambda weights: weights["score.weight"].fill_(float("nan")))
    assert "score [1, 32] in model.safetensors holds numbers that are not finite" in said(made.folder)
    made = seq_cls(tmp_path / "layers")
    edit_config(made.folder, hidden_size=48)
    assert "these files belong to different models" in said(made.folder)


@pytest.mark.slow
def test_a_bias_that_transformers_ignores_has_to_be_meant(tmp_path, said, capsys):
    made = seq_cls(tmp_path / "source", template=ENDED)
    change_weights(made.folder, lambda weights: weights.update({"score.bias": torch.tensor([0.5])}))
    assert "score.bias is 0.5. transformers ignores it and vLLM adds it" in said(made.folder)
    flags = ["--layout", "linear-head", "--head", "score"]
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm"), *flags])
    assert "The source adds 0.5 to every score" in capsys.readouterr().out
    change_weights(made.folder, lambda weights: weights.update({"score.bias": torch.tensor([0.0])}))
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "zero")])


@pytest.mark.slow
def test_a_mean_and_std_of_which_nothing_is_said_are_not_guessed(tmp_path, said, capsys):
    made = linear_head(tmp_path / "source", statistics=(0.5, 2.0), normalize=None)
    words = said(made.folder)
    assert "it holds mean 0.5 and std 2, and its configuration has no normalize_reward" in words
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "yes"), "--normalize-reward", "yes"])
    assert "The source adds -0.25 to every score (normalised by mean 0.5 and std 2)" in capsys.readouterr().out
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "no"), "--normalize-reward", "no"])
    yes, no = (load_file(tmp_path / name / "model.safetensors")["score.weight"] for name in ("yes", "no"))
    torch.testing.assert_close(yes * 2, no)
    left = json.loads((tmp_path / "yes" / "config.json").read_text())
    assert not {"mean", "std", "normalize_reward", "value_head_prefix"} & left.keys(), "or it would be done twice"
    edit_config(made.folder, std=0.0)
    assert "scores cannot be normalised by mean 0.5 and std 0" in said(made.folder, "--normalize-reward", "yes")


@pytest.mark.parametrize("statistics", [{"mean": None}, {"std": None}, {"std": "2.0"}])
def test_a_normalisation_without_both_numbers_is_not_made_up(tmp_path, said, statistics):
    made = linear_head(tmp_path / "source", statistics=(0.5, 2.0), normalize=True)
    edit_config(made.folder, **statistics)
    assert "says normalize_reward, and mean and std are not both numbers" in said(made.folder)


def test_heads_and_configurations_of_strange_form_are_named(tmp_path, said):
    made = value_head_file(tmp_path / "source")
    for shape in ([32], []):
        save_file({"v_head.summary.weight": torch.ones(shape)}, made.folder / "value_head.safetensors")
        assert f"v_head.summary.weight has shape {shape}, wanted [1, width" in said(made.folder)
    (made.folder / "value_head.safetensors").unlink()
    torch.save({0: torch.ones(1, 32)}, made.folder / "value_head.bin")
    assert "value_head.bin: it is not a table of weights by name" in said(made.folder)
    edit_config(made.folder, architectures=[1])
    # Earlier releases of transformers refuse to read it at all.
    assert re.search(r"has architectures \[1\], wanted names of classes|config.json cannot be read", said(made.folder))


def test_an_encoder_is_told_that_its_kind_is_not_supported(tmp_path, said):
    made = seq_cls(tmp_path / "source")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=512, max_position_embeddings=64, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(made.folder)
    words = said(made.folder)
    assert "BertForSequenceClassification has no head called `score`. Encoders, and models whose head" in words


@pytest.mark.slow
def test_a_classifier_whose_scores_are_said_to_be_normalised_is_not_read_without(tmp_path, said, capsys):
    made = seq_cls(tmp_path / "source", template=ENDED)
    edit_config(made.folder, mean=0.5, std=2.0)
    words = said(made.folder, "--normalize-reward", "yes")
    assert "--normalize-reward yes (mean 0.5, std 2), and the head was read as seq-cls" in words
    edit_config(made.folder, normalize_reward=True)
    assert "its configuration says normalize_reward (mean 0.5, std 2)" in said(made.folder)
    flags = ["--layout", "openrlhf", "--head", "score"]
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm"), *flags])
    assert "The source adds -0.25 to every score (normalised by mean 0.5 and std 2)" in capsys.readouterr().out
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "no"), "--normalize-reward", "no"])


@pytest.mark.parametrize("name", ["../outside.bin", "inner/part.bin", "..", "C:part.bin", "inner\\part.bin"])
def test_an_index_names_no_file_of_another_folder(tmp_path, said, name):
    made = trl_value_head(tmp_path / "source", pickled=True)
    (made.folder / "inner").mkdir()
    for place in (tmp_path / "outside.bin", made.folder / "inner/part.bin"):
        shutil.copy(made.folder / "pytorch_model.bin", place)
    (made.folder / "pytorch_model.bin").unlink()
    index = made.folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"v_head.summary.weight": name}}))
    assert f"weight_map names {name!r}, and weights lie beside their index" in said(made.folder)
    index.write_text(json.dumps({"weight_map": {"v_head.summary.weight": str(tmp_path / "outside.bin")}}))
    assert "weights lie beside their index" in said(made.folder)


@pytest.mark.slow
def test_a_link_in_an_index_leads_nowhere_but_into_the_cache_of_the_hub(tmp_path, said):
    made = trl_value_head(tmp_path / "models--me--rm/snapshots/1", pickled=True)
    blobs = tmp_path / "models--me--rm/blobs"
    blobs.mkdir()
    (made.folder / "pytorch_model.bin").rename(blobs / "abc")
    (made.folder / "part.bin").symlink_to(blobs / "abc")
    index = {"metadata": {}, "weight_map": {"v_head.summary.weight": "part.bin"}}
    (made.folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "good")])
    shutil.copytree(made.folder, tmp_path / "elsewhere", symlinks=True)
    assert f"it is a link to {blobs / 'abc'}, outside the folder" in said(tmp_path / "elsewhere")


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path, said):
    made = trl_value_head(tmp_path / "source", pickled=True)

    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    torch.save({"v_head.summary.weight": Harm()}, made.folder / "pytorch_model.bin")
    assert "would run code when it is opened, which is never allowed" in said(made.folder)
    assert not (tmp_path / "harm").exists()
    (made.folder / "pytorch_model.bin").write_bytes(pickle.dumps({})[:3])
    assert "pytorch_model.bin" in said(made.folder)


def test_damaged_and_missing_files_are_named(tmp_path, said):
    made = seq_cls(tmp_path / "source")
    weights = (made.folder / "model.safetensors").read_bytes()
    (made.folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors: damaged, or cut off" in said(made.folder)
    (made.folder / "model.safetensors").unlink()
    assert "no weights: neither model.safetensors nor pytorch_model.bin" in said(made.folder)
    assert "no such folder. Download a model on a hub first" in said(tmp_path / "nowhere")


def test_adapters_beside_a_model_and_quantised_weights_are_told_what_to_do(tmp_path, said):
    made = seq_cls(tmp_path / "source")
    edit_config(made.folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert "its weights are quantised" in said(made.folder)
    (made.folder / "adapter_config.json").write_text("{}")
    assert "it holds adapters and a whole model, so it is not clear which is meant" in said(made.folder)


@pytest.mark.slow
def test_a_folder_of_rewardlab_and_one_that_exists_are_left_alone(tmp_path, capsys):
    made = seq_cls(tmp_path / "source")
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm")])
    words = refusal(capsys, "import", made.folder, "--output-dir", tmp_path / "rm")
    assert "it exists and is not empty" in words
    assert "a reward-model folder of rewardlab already" in refusal(
        capsys, "import", tmp_path / "rm", "--output-dir", tmp_path / "other"
    )
    assert f"it is {made.folder}, the folder that is read" in refusal(
        capsys, "import", made.folder, "--output-dir", made.folder, "--overwrite"
    )
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "rm"), "--overwrite"])


@pytest.mark.slow
def test_without_a_template_the_choices_are_explained(tmp_path, said, capsys):
    made = seq_cls(tmp_path / "source", template=None)
    words = said(made.folder)
    assert "its tokenizer has no chat template. Say with --chat-template how its training data were rendered" in words
    assert "neither one of auto, template, plain, concat nor a file" in said(made.folder, "--chat-template", "chat.txt")
    file = tmp_path / "chat.jinja"
    file.write_text("{{ nothing }}")
    assert "does not mention `messages`" in said(made.folder, "--chat-template", file)
    file.write_text(CHATML)
    rendered = {}
    for name in (str(file), "plain", "concat"):
        main(["import", str(made.folder), "--output-dir", str(tmp_path / Path(name).stem), "--chat-template", name])
        spec = read_spec(tmp_path / Path(name).stem)
        rendered[name] = spec.canaries[0].token_ids
        assert spec.renderer.template_source == {str(file): "tokenizer"}.get(name, name)
    tokenizer = make_tokenizer(CHATML)
    assert rendered[str(file)] == tokenizer.apply_chat_template(
        read_spec(tmp_path / "chat").canaries[0].messages, return_dict=False
    )
    assert len({tuple(token_ids) for token_ids in rendered.values()}) == 3


@pytest.mark.slow
def test_a_bos_and_an_eos_are_added_only_when_asked_for(tmp_path, said):
    made = seq_cls(tmp_path / "source", template=CHATML)
    assert "--bos add: the template begins with <|im_start|> already" in said(made.folder, "--bos", "add")
    plain = "{% for message in messages %}{{ message['content'] + '!' }}{% endfor %}\n"
    file = tmp_path / "chat.jinja"
    file.write_text(plain)
    main(f"import {made.folder} --output-dir {tmp_path / 'both'} --chat-template {file} --bos add --eos add".split())
    both = read_spec(tmp_path / "both")
    assert both.renderer.num_bos == 1
    assert both.renderer.final_token_id == 2
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "none"), "--chat-template", str(file)])
    none = read_spec(tmp_path / "none")
    assert [1, *none.canaries[0].token_ids, 2] == both.canaries[0].token_ids
    assert "--eos add: renderings end in <|im_end|> already" in said(
        made.folder, "--chat-template", tmp_path / "both" / "chat_template.jinja", "--eos", "add"
    )
    assert "--chat-template plain begins as the tokenizer does" in said(
        made.folder, "--chat-template", "plain", "--bos", "add"
    )


@pytest.mark.slow
def test_where_a_score_is_read_is_asked_for_if_text_follows_the_last_eos(tmp_path, said, capsys):
    made = linear_head(tmp_path / "source", template=CHATML)
    words = said(made.folder)
    assert "write '\\n' behind the last EOS (<|im_end|>)" in words
    assert "Say --eos strip for OpenRLHF" in words
    for eos, read_at in (("template", "('\\n')"), ("strip", "2 ('<|im_end|>')")):
        main(["import", str(made.folder), "--output-dir", str(tmp_path / eos), "--eos", eos])
        out = capsys.readouterr().out
        assert "read at token " in out
        assert f"{read_at}, up to" in out
    made = value_head_file(tmp_path / "other")
    make_tokenizer(CHATML.replace("<|im_end|>", "")).save_pretrained(made.folder)
    assert "and not in EOS (<|im_end|>)" in said(made.folder)
    made = seq_cls(tmp_path / "classifier")
    assert "changed this between their versions" in said(made.folder, "--layout", "ms-swift")


@pytest.mark.slow
def test_a_tokenizer_that_adds_a_bos_behind_the_templates_back_has_to_be_decided_about(tmp_path, said):
    from tokenizers.processors import TemplateProcessing

    made = seq_cls(tmp_path / "source", template="{% for message in messages %}{{ message['content'] }}!{% endfor %}")
    tokenizer = make_tokenizer("{% for message in messages %}{{ message['content'] }}!{% endfor %}")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save_pretrained(made.folder)
    words = said(made.folder)
    assert "its tokenizer puts <|im_start|> in front of every text, and its template writes none" in words
    for bos, first in (("template", False), ("add", True)):
        main(["import", str(made.folder), "--output-dir", str(tmp_path / bos), "--bos", bos])
        assert (read_spec(tmp_path / bos).canaries[0].token_ids[0] == 1) == first


@pytest.mark.slow
def test_a_source_that_reads_its_score_before_the_end_is_not_imported_as_another(tmp_path, said):
    template = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    made = seq_cls(tmp_path / "source", template=template)
    edit_config(made.folder, pad_token_id=2)
    words = said(made.folder)
    assert "by the source's own forward pass" in words
    assert "Its pad token 2 is also the token that ends a conversation, so its own class skips that token" in words


@pytest.mark.slow
def test_rounding_that_moves_scores_is_refused(tmp_path, said, capsys):
    made = seq_cls(tmp_path / "source")
    assert "Its weights are not bfloat16 values, so rounding moved them. Use --dtype float32" in said(
        made.folder, "--dtype", "bfloat16"
    )
    change_weights(made.folder, lambda weights: weights.update({n: w.bfloat16() for n, w in weights.items()}))
    main(["import", str(made.folder), "--output-dir", str(tmp_path / "half"), "--dtype", "bfloat16"])
    assert read_spec(tmp_path / "half").save_dtype == "bfloat16"


def test_a_large_constant_hides_no_difference_of_scores(tmp_path):
    made = recognise(value_head_file(tmp_path / "source").folder, ImportConfig())
    source = WholeModel(found=replace(made, biases=torch.tensor([1000.0])))
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    own = [float(torch.tensor(1000.0) + torch.tensor(score)) for score in (0.123, -0.7)]
    assert importing._require_parity(source, renderer, own, [0.123, -0.7], "float32") <= PARITY
    with pytest.raises(ArtifactError, match="canary 1 scores 999.29.* as imported"):
        importing._require_parity(source, renderer, own, [0.123, -0.704], "float32")
