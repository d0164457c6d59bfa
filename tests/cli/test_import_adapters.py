"""`rewardlab import` of adapters of PEFT: their scores are kept, and what would lose them is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from command_line import refusal
from common import CHATML, CONFIGS, make_tokenizer, write_base_model
from foreign_models import ENDED, PAD, Made, adapters, edit_config, seq_cls
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.core.files import sha256_file
from rewardlab.core.spec import SCORE_TOLERANCE, read_spec
from rewardlab.serve.folders import import_model as importing
from rewardlab.serve.verifying.folder import verify

LAYERS = ["q_proj", "v_proj", "down_proj"]
SEQ_CLS: dict[str, Any] = {"task_type": "SEQ_CLS", "target_modules": LAYERS}
LORA: dict[str, Any] = SEQ_CLS | {"r": 4}
KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(**LORA | {"target_modules": "all-linear"}),
    "DoRA": lambda: LoraConfig(**LORA, use_dora=True),
    "rsLoRA": lambda: LoraConfig(**LORA, use_rslora=True),
    "DoRA rsLoRA": lambda: LoraConfig(**LORA, use_dora=True, use_rslora=True),
    "LoRA, no task said": lambda: LoraConfig(target_modules=LAYERS, modules_to_save=["score"]),
    "LoRA, whole modules": lambda: LoraConfig(**LORA, modules_to_save=["embed_tokens", "norm"]),
    "LoRA, embeddings": lambda: LoraConfig(**LORA | {"target_modules": [*LAYERS, "embed_tokens"]}),
    "LoRA, some tokens": lambda: LoraConfig(**LORA, trainable_token_indices={"embed_tokens": [5, 40]}),
    "LoRA, PiSSA": lambda: LoraConfig(**LORA, init_lora_weights="pissa"),
    "LOHA": lambda: LoHaConfig(**SEQ_CLS, r=4),
    "LOKR": lambda: LoKrConfig(**SEQ_CLS, r=4),
    "OFT": lambda: OFTConfig(**SEQ_CLS, r=0, oft_block_size=4),
    "IA3": lambda: IA3Config(**SEQ_CLS, feedforward_modules=["down_proj"]),
}


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch, few_canaries: None) -> None:
    """Where it is quick."""
    monkeypatch.setattr(importing, "verify_in_clean_process", verify)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The base model."""
    return write_base_model(tmp_path / "base")


@pytest.fixture
def made(tmp_path: Path, base: Path) -> Made:
    """LoRA adapters on it, with a tokenizer beside them."""
    return adapters(tmp_path / "adapter", base)


@pytest.fixture
def said(tmp_path, capsys):
    """What the user reads when a folder is refused; nothing is written then."""

    def of(source: Path, *flags: object) -> str:
        words = refusal(capsys, "import", source, "--output-dir", tmp_path / "rm", *flags)
        assert not (tmp_path / "rm").exists()
        return words

    return of


def imported(source: Path, target: Path, *flags: str) -> Path:
    """The folder that the command makes."""
    main(["import", str(source), "--output-dir", str(target), "--max-seq-len", "128", *flags])
    return target


def change(folder: Path, **values: Any) -> None:
    """Change fields of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def require_scores(folder: Path, made: Made) -> None:
    """Ours, and those of plain transformers, are those of PEFT to the rounding of float32."""
    canaries, scorer = read_spec(folder).canaries, load(folder, device="cpu")
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    for canary, ours in zip(canaries, scorer.score([one.messages for one in canaries]), strict=True):
        own = made.own(canary.token_ids)
        allowed = SCORE_TOLERANCE["float32"] * max(1, abs(own))
        assert ours == pytest.approx(own, abs=allowed)
        with torch.no_grad():
            assert float(plain(torch.tensor([canary.token_ids])).logits) == pytest.approx(own, abs=allowed)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # by PEFT, when it saves
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_imported_folder_gives_the_scores_of_peft(tmp_path, base, capsys, kind):
    made = adapters(tmp_path / "adapter", base, KINDS[kind]())
    folder = imported(made.folder, tmp_path / "rm")
    word = kind.partition(",")[0]
    assert f"({word} adapters and head score on {base}, named by adapter_config.json), verified" in (
        capsys.readouterr().out
    )
    require_scores(folder, made)
    origin = read_spec(folder).provenance["import"]
    assert origin["adapter"]["kind"] == word
    assert origin["adapter"]["weights_sha256"] == sha256_file(made.folder / "adapter_model.safetensors")
    assert origin["base"]["config_sha256"] == sha256_file(base / "config.json")
    assert origin["parity"]["largest_distance"] <= origin["parity"]["allowed"] == SCORE_TOLERANCE["float32"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "llama"])
def test_families_of_models(tmp_path, family):
    base = write_base_model(tmp_path / "base", family=family)
    made = adapters(tmp_path / "adapter", base, LoraConfig(**LORA | {"target_modules": "all-linear"}))
    require_scores(imported(made.folder, tmp_path / "rm"), made)


@pytest.mark.slow
def test_files_of_half_precision_and_pickles_are_read(tmp_path, base):
    made = adapters(tmp_path / "adapter", base)
    file = made.folder / "adapter_model.safetensors"
    torch.save(load_file(file), made.folder / "adapter_model.bin")
    file.unlink()
    require_scores(imported(made.folder, tmp_path / "rm"), made)
    weights = torch.load(made.folder / "adapter_model.bin", weights_only=True)
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    (made.folder / "adapter_model.bin").unlink()
    own = load_file(imported(made.folder, tmp_path / "half") / "model.safetensors")["score.weight"]
    assert torch.equal(own, weights["base_model.model.score.weight"].bfloat16().float())


def test_adapters_without_a_trained_head_are_refused(tmp_path, base, said):
    made = adapters(tmp_path / "adapter", base, modules_to_save=["norm"])
    file = made.folder / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({n: w for n, w in weights.items() if "score" not in n}, file, metadata={"format": "pt"})
    words = said(made.folder)
    assert "no trained head `score` among its weights, so every reward is lost" in words
    assert "Beside the layers it holds: base_model.model.model.norm." in words
    assert "Train again with modules_to_save=['score']" in words


def test_other_tasks_and_kinds_are_refused(tmp_path, base, made, said):
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=LAYERS)).save_pretrained(tmp_path / "lm")
    assert "task_type is 'CAUSAL_LM', and a reward model of PEFT is a sequence classifier" in said(tmp_path / "lm")
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    prompts = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    get_peft_model(classifier, prompts).save_pretrained(tmp_path / "prompts")
    assert "peft_type is 'PROMPT_TUNING', and only adapters that can be merged" in said(tmp_path / "prompts")
    (tmp_path / "lm/value_head.safetensors").write_bytes(b"")
    assert "its head is in value_head.safetensors, as LLaMA-Factory's. Merge the adapters there" in said(
        tmp_path / "lm"
    )
    change(made.folder, alora_invocation_tokens=[1, 2])
    assert "alora_invocation_tokens is [1, 2]: they act on some tokens alone" in said(made.folder)
    change(made.folder, alora_invocation_tokens=None, layer_replication=[[0, 2], [1, 2]])
    assert "layer_replication is [[0, 2], [1, 2]]: they make several layers of one" in said(made.folder)
    change(made.folder, layer_replication=None, init_lora_weights="pissa_niter_4")
    assert "no two loads are the same" in said(made.folder)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT says so, too
def test_a_kind_of_lora_that_peft_cannot_merge_is_refused(tmp_path, base, said):
    made = adapters(tmp_path / "adapter", base, lora_bias=True, target_modules=LAYERS)
    assert "PEFT cannot merge these adapters: Impossible to merge LoRA with `lora_bias=True`" in said(made.folder)


@pytest.mark.parametrize("counts", [(-1.0, 1.0), (0.0, 0.5, 0.0, 0.0, 2.0)], ids=["two classes", "attributes"])
def test_several_outputs_become_one_by_what_each_counts(tmp_path, base, said, capsys, counts):
    made = adapters(tmp_path / "adapter", base, counts=counts)
    head = f"base_model.model.score.weight [{len(counts)}, 32] in adapter_model.safetensors has {len(counts)} outputs"
    assert head in said(made.folder)
    assert f"{head}, numbered from 0" in said(made.folder, "--outputs", f"{len(counts)}=1")
    words = [f"{number}={count:g}" for number, count in enumerate(counts) if count]
    folder = imported(made.folder, tmp_path / "rm", "--outputs", *words)
    assert f"(LoRA adapters and head score, outputs {' '.join(words)} on" in " ".join(capsys.readouterr().out.split())
    model, spec = load(folder), read_spec(folder)
    assert spec.provenance["import"]["outputs"] == list(counts)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")).get("num_labels", 1) == 1
    for canary in spec.canaries:
        assert canary.score == pytest.approx(made.own(canary.token_ids), abs=SCORE_TOLERANCE["float32"])
    assert model.renderer.spec == spec.renderer


def test_one_output_may_be_named_too(tmp_path, made):
    folder = imported(made.folder, tmp_path / "rm", "--outputs", "0=-2")
    for canary in read_spec(folder).canaries:
        assert canary.score == pytest.approx(-2 * made.own(canary.token_ids), abs=2 * SCORE_TOLERANCE["float32"])


def test_a_head_that_is_no_matrix_is_refused(made, said):
    file = made.folder / "adapter_model.safetensors"
    weights = load_file(file)
    weights["base_model.model.score.weight"] = torch.ones(32)
    save_file(weights, file, metadata={"format": "pt"})
    assert "base_model.model.score.weight has shape [32], wanted [outputs, width of the hidden states]" in said(
        made.folder
    )


@pytest.mark.parametrize("make", ["adapters", "whole"])
def test_a_head_of_zeros_is_refused(tmp_path, base, said, make):
    """As that of the base that `export --adapter --with-base` writes: its scores would be verified, and all be 0."""
    if make == "adapters":
        file = adapters(tmp_path / "adapter", base).folder / "adapter_model.safetensors"
    else:
        file = seq_cls(tmp_path / "whole").folder / "model.safetensors"
    weights = load_file(file)
    (name,) = [name for name in weights if "score" in name]
    weights[name].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    words = said(file.parent)
    assert "its head score is zero everywhere, so every conversation would get the same score" in words
    assert "Then import the adapters." in words


def test_adapters_that_have_not_trained_are_told(tmp_path, made, caplog):
    file = made.folder / "adapter_model.safetensors"
    weights = load_file(file)
    seconds = [name for name in weights if ".lora_B." in name]
    imported(made.folder, tmp_path / "rm")
    assert "adapters are zero" not in caplog.text
    for name in seconds[1:]:
        weights[name].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    imported(made.folder, tmp_path / "other")
    count = len(seconds)
    assert f"{file}: {count - 1} of {count} adapters are zero, such as {seconds[1]}, and change nothing" in caplog.text


def altered(folder: Path, **settings: Any) -> Path:
    """A base model of other sizes."""
    config = CONFIGS["llama"]()
    for name, value in settings.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_another_base_is_refused(tmp_path, base, said):
    made = adapters(tmp_path / "adapter", base, target_modules=LAYERS)
    layers = CONFIGS["llama"]().num_hidden_layers
    others = {
        "its head is for hidden states of width 32": {"hidden_size": 64},
        "size mismatch for": {"intermediate_size": 96},
        "weights are missing from its file: ": {"num_hidden_layers": layers + 1},
        "the base has no place for ": {"num_hidden_layers": layers - 1},
    }
    for number, (why, sizes) in enumerate(others.items()):
        other = altered(tmp_path / f"other{number}", **sizes)
        words = said(made.folder, "--base", other)
        assert why in words
        assert "Is this the base model that the adapters were trained on? Name it with --base." in words


def test_a_base_that_is_not_there_is_named_with_what_to_do(tmp_path, base, made, said):
    base.rename(tmp_path / "moved")
    words = said(made.folder)
    assert f"adapter_config.json: the base model of these adapters is not there: no model at '{base}'" in words
    assert "Name it with --base, where it is now." in words
    assert "--base: the base model of these adapters is not there" in said(made.folder, "--base", tmp_path / "gone")
    change(made.folder, base_model_name_or_path=None)
    assert "it names no base model (base_model_name_or_path is None). Name it with --base." in said(made.folder)


@pytest.mark.slow
def test_a_base_that_moved_is_named(tmp_path, base, made, capsys, log):
    base.rename(tmp_path / "moved")
    folder = imported(made.folder, tmp_path / "rm", "--base", str(tmp_path / "moved"))
    assert f"adapters and head score on {tmp_path / 'moved'}, named by --base)" in capsys.readouterr().out
    assert f"base model: {tmp_path / 'moved'}, though {made.folder / 'adapter_config.json'} names {base}" in log.text
    require_scores(folder, made)


def test_a_base_whose_files_do_not_belong_together_is_named(base, made, said):
    edit_config(base, intermediate_size=96)
    assert "these files belong to different models" in said(made.folder)


def test_adapters_where_a_model_is_wanted_are_told_of_import(made, pairs_file, capsys):
    told = f"`rewardlab import {made.folder} --output-dir NEW`"
    assert told in refusal(capsys, "verify", made.folder)
    rest = ["--dataset", pairs_file, "--output-dir", made.folder.parent / "run"]
    assert told in refusal(capsys, "train", "--model", made.folder, *rest)


def test_a_quantised_base_is_refused(base, made, said):
    edit_config(base, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert f"{base}: the base model is quantised" in said(made.folder)
    assert "Name the model that it was quantised from with --base." in said(made.folder)


def test_base_is_for_adapters_alone(tmp_path, base, made, said):
    whole = seq_cls(tmp_path / "whole").folder
    assert f"--base {base}: it is for adapters, and {whole} holds none" in said(whole, "--base", base)
    assert "Leave it out." in said(whole, "--base", base)
    for flags in (("--layout", "openrlhf"), ("--head", "score"), ("--normalize-reward", "yes")):
        assert "the head of adapters is that of a sequence classifier" in said(made.folder, *flags)


def test_the_base_is_not_written_over(base, made, capsys):
    words = refusal(capsys, "import", made.folder, "--output-dir", base / "rm")
    assert f"--output-dir {base / 'rm'}: it lies in {base}, the folder that is read" in words


@pytest.mark.slow
def test_tokenizer_and_template_are_those_beside_the_adapters_or_else_those_of_the_base(tmp_path, base, log):
    made = adapters(tmp_path / "bare", base, template=None)
    folder = imported(made.folder, tmp_path / "of-base")
    assert read_spec(folder).renderer.chat_template == CHATML
    assert f"tokenizer: that of {base}, since there is none in {made.folder}" in log.text
    made = adapters(tmp_path / "own", base, template=ENDED)
    make_tokenizer(ENDED, pad="<|endoftext|>").save_pretrained(made.folder)
    assert read_spec(imported(made.folder, tmp_path / "of-adapter")).renderer.chat_template == ENDED
    (made.folder / "chat_template.jinja").unlink()
    assert read_spec(imported(made.folder, tmp_path / "mixed")).renderer.chat_template == CHATML
    assert f"chat template: that of {base}, since the tokenizer in {made.folder} has none" in log.text


@pytest.mark.slow
def test_a_pad_that_ends_conversations_is_refused_as_scores_were_read_before_it(tmp_path, base, said):
    made = adapters(tmp_path / "adapter", base, template=ENDED)
    make_tokenizer(ENDED).save_pretrained(made.folder)
    words = said(made.folder)
    assert "Its pad token 2 is also the token that ends a conversation" in words
    assert "correct pad_token in its tokenizer_config.json" in words
    template = tmp_path / "open.jinja"
    template.write_text(ENDED.replace("<|im_end|>' }}", "' }}"))
    imported(made.folder, tmp_path / "rm", "--chat-template", str(template))


def test_tokens_that_were_added_in_training_are_refused(tmp_path, base, said):
    made = adapters(tmp_path / "adapter", base)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<new {number}>" for number in range(100)])
    tokenizer.save_pretrained(made.folder)
    assert "tokens were added in training" in said(made.folder)


def test_damaged_and_missing_files_are_named(made, said):
    file = made.folder / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "adapter_model.safetensors: damaged, or cut off" in said(made.folder)
    file.unlink()
    assert "neither adapter_model.safetensors nor adapter_model.bin" in said(made.folder)
    (made.folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in said(made.folder)


@pytest.mark.slow
def test_in_place_the_adapters_are_kept_beside(tmp_path, made):
    main(["import", str(made.folder), "--in-place", "--max-seq-len", "128"])
    require_scores(made.folder, made)
    assert (tmp_path / "adapter.original/adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own calls of transformers and torch
def test_adapters_that_trls_own_trainer_saved_give_their_scores(tmp_path):
    """The peer itself: RewardTrainer with a peft_config trains and saves; the folder that it wrote is imported."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    base = write_base_model(tmp_path / "base", family="qwen3")

    def turns(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": text}]

    rows = [{"chosen": turns(good), "rejected": turns(bad)} for good, bad in (("Yes, gladly.", "No."), ("A", "B!"))]
    settings = trl.RewardConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = trl.RewardTrainer(
        model=str(base),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        peft_config=LoraConfig(**LORA, modules_to_save=["score"]),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "theirs"))
    model = trainer.model.eval()

    @torch.no_grad()
    def own(token_ids: Any) -> float:
        return float(model(torch.tensor([list(token_ids)])).logits[0, 0])

    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    require_scores(imported(tmp_path / "theirs", tmp_path / "rm"), Made(folder=tmp_path / "theirs", own=own))
    assert PAD not in read_spec(tmp_path / "rm").canaries[0].token_ids
