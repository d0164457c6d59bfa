"""Imported reward models give the scores of their sources, by the modules from which these were saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, OPTConfig

from common import CHATML, make_tokenizer, write_base_model
from foreign_models import Made, linear_head, seq_cls, trl_value_head, value_head_file
from harness.tiny import SIZES
from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.artifact.foreign.rendering import foreign_renderer
from rewardlab.artifact.foreign.source import PARITY
from rewardlab.artifact.load import load
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.spec import read_spec
from rewardlab.serve.folders import import_model as importing
from rewardlab.serve.folders.import_model import import_model
from rewardlab.serve.verifying.folder import verify

LAYOUTS: dict[str, tuple[Callable[[Path], Made], str, bool]] = {
    "ms-swift": (seq_cls, "seq-cls", False),
    "ms-swift, older": (partial(value_head_file, pickled=True), "value-head", True),
    "seq-cls": (partial(seq_cls, family="gemma2"), "seq-cls", False),
    "a projection of another width": (
        partial(seq_cls, make=lambda: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=16)),
        "seq-cls",
        False,
    ),
    "trl pickled under ZeRO-3": (partial(trl_value_head, pickled=True, prefix="pretrained_model."), "v_head", True),
    "trl gpt-neox": (partial(trl_value_head, family="gpt_neox"), "v_head", True),
    "llama-factory": (value_head_file, "value-head", True),
    "openrlhf": (partial(linear_head, name="score", said="score", statistics=(0.7, 2.5)), "linear-head", True),
    "openrlhf buffers": (partial(linear_head, statistics=(0.7, 2.5), buffers=True), "linear-head", True),
    "regression_layer": (partial(linear_head, name="regression_layer", said=None), "linear-head", False),
    "regression_head": (partial(linear_head, name="regression_head", said=None), "linear-head", False),
}
SAID: dict[str, dict[str, Any]] = {
    "ms-swift": {"layout": "ms-swift", "eos": "template"},
    "ms-swift, older": {"layout": "ms-swift"},
}
"""What has to be said of a layout, which its files leave open."""


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch, few_canaries: None) -> None:
    """Where it is quick."""
    monkeypatch.setattr(importing, "verify_in_clean_process", verify)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_imported_folder_gives_the_scores_of_its_source(tmp_path, layout):
    make, kind, has_constant = LAYOUTS[layout]
    made = make(tmp_path / "source")
    result = import_model(made.folder, tmp_path / "rm", ImportConfig(max_seq_len=256, **SAID.get(layout, {})))
    assert result.source.kind == kind
    assert result.distance <= PARITY
    spec = read_spec(tmp_path / "rm")
    origin = spec.provenance["import"]
    assert origin["parity"]["largest_distance"] == result.distance
    constant = origin["constant_left_out"]
    assert (constant != 0) == has_constant
    scorer = load(tmp_path / "rm", device="cpu")
    for canary, ours in zip(spec.canaries, scorer.score([c.messages for c in spec.canaries]), strict=True):
        own = made.own(canary.token_ids)
        assert ours + constant == pytest.approx(own, abs=PARITY * max(1, abs(own)))
        assert ours == pytest.approx(_plain(tmp_path / "rm", canary.token_ids), abs=1e-4)


@pytest.mark.parametrize("ending", ["<|im_end|>\n", "<|im_end|>", "\n", "", "<|im_end|>!"])
def test_eos_strip_gives_the_tokens_that_openrlhf_gives(tmp_path, ending):
    """Its RewardDataset: the text without line breaks at the end, a blank and EOS unless it ends in EOS, no BOS."""
    template = CHATML.replace("<|im_end|>\n' }}", f"{ending}' }}}}").replace("\n", "\\n") + "\n"
    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(tmp_path)
    settings = ImportConfig(eos="strip", special_tokens_in_text="keep", system_prompt="Be brief.")
    renderer = foreign_renderer(tokenizer, tmp_path, settings, max_seq_len=256, end_known=False)
    renderer.tokenizer.save_pretrained(tmp_path / "rm")
    saved = AutoTokenizer.from_pretrained(tmp_path / "rm")
    for _, messages, token_ids in render_canaries(renderer):
        turns = [message.as_dict() for message in messages]
        if turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": "Be brief."})
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
        if not text.endswith(tokenizer.eos_token):
            text += " " + tokenizer.eos_token
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert token_ids.tolist() == wanted
        assert saved.apply_chat_template(turns, return_dict=False) == wanted, "as any engine gets them"
        prompt = {"conversation": turns[:-1], "add_generation_prompt": True, "tokenize": False}
        assert saved.apply_chat_template(**prompt) == tokenizer.apply_chat_template(**prompt), "a prompt is left alone"


@pytest.mark.parametrize("eos", ["template", "strip", "add"])
def test_template_arguments_are_written_into_the_template_of_the_folder(tmp_path, eos):
    """As the code that trained the model passed them to apply_chat_template; nobody passes them later."""
    plain = CHATML.replace("\n", "\\n")
    thinks = plain + "{% if thinking is not defined or thinking %}<think>{% endif %}"
    rendered = {}
    for name, template, arguments in (("switched", thinks, ("thinking=false",)), ("without", plain, ())):
        settings = ImportConfig(eos=eos, template_arguments=arguments)
        tokenizer = make_tokenizer(template)
        renderer = foreign_renderer(tokenizer, tmp_path, settings, max_seq_len=256, end_known=False)
        renderer.tokenizer.save_pretrained(tmp_path / name)
        saved = AutoTokenizer.from_pretrained(tmp_path / name)
        rendered[name] = [
            (ids.tolist(), saved.apply_chat_template([turn.as_dict() for turn in messages], return_dict=False))
            for _, messages, ids in render_canaries(renderer)
        ]
    assert rendered["switched"] == rendered["without"]


def test_template_arguments_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--template-arguments a: wanted NAME=VALUE"):
        ImportConfig(template_arguments=("a",))
    made = seq_cls(tmp_path / "source")
    with pytest.raises(RenderError, match="thinkin: the chat template does not mention it"):
        import_model(made.folder, tmp_path / "rm", ImportConfig(template_arguments=("thinkin=false",)))
    settings = ImportConfig(chat_template="plain", template_arguments=("thinking=false",))
    with pytest.raises(ConfigError, match="--chat-template plain takes none"):
        import_model(made.folder, tmp_path / "rm", settings)
    assert not (tmp_path / "rm").exists()


@torch.no_grad()
def _plain(folder: Path, token_ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    return float(model(torch.tensor([token_ids])).logits[0, 0])


def test_a_length_that_an_import_cannot_take_says_what_it_takes():
    for length in ("auto", "512", 512.0):
        settings = ImportConfig()
        # Types are checked in tests, and not where people run it.
        object.__setattr__(settings, "max_seq_len", length)
        with pytest.raises(ConfigError, match=f"ImportConfig: max_seq_len: expected int or 'model', got {length!r}"):
            settings.__post_init__()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own calls of transformers and torch
def test_a_model_that_trls_own_trainer_saved_gives_its_scores(tmp_path):
    """The peer itself: RewardTrainer trains, evaluates and saves; the folder that it wrote is imported."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    base = write_base_model(tmp_path / "base", family="qwen3")
    rows = [
        {"chosen": turns("Yes, gladly."), "rejected": turns("No.")},
        {"chosen": turns("A"), "rejected": turns("B!")},
    ]
    settings = trl.RewardConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        pad_token="<|unused|>",
    )
    trainer = trl.RewardTrainer(model=str(base), args=settings, train_dataset=datasets.Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    result = import_model(tmp_path / "saved", tmp_path / "rm", ImportConfig(max_seq_len=256))
    assert result.source.kind == "seq-cls"
    assert result.distance <= PARITY
    live = trainer.model.float().eval()
    for canary in result.spec.canaries:
        ids = trainer.processing_class.apply_chat_template(canary.messages, return_dict=False)
        if canary.name != "control tokens":
            assert ids == canary.token_ids
        with torch.no_grad():
            own = float(live(torch.tensor([canary.token_ids])).logits[0, 0])
        assert canary.score == pytest.approx(own, abs=PARITY * max(1, abs(own)))


def turns(reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "May I?"}, {"role": "assistant", "content": reply}]
