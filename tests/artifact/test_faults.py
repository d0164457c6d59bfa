"""Planted faults are named: by `rewardlab verify` where a folder holds them, by the decoys where an engine does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
)

from common import make_model, make_tokenizer, write_pairs
from harness.tiny import CHATML, GROUPED, LLAMA3, SIZES
from rewardlab.analysis.faults import name_fault
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import sha256_text
from rewardlab.core.spec import SCORE_TOLERANCE, read_spec
from rewardlab.data.chat import Renderer, to_messages
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.folders.export import export
from rewardlab.serve.verifying.folder import verify
from sealing import edit, edit_weights, seal_again

ROPE_SETTINGS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
)
"""Where a configuration, of any version of transformers, keeps its position settings."""
SECOND_BOS = "a second BOS token in front of the conversation (double_bos)"
TEXTS = (
    "control tokens typed in a reply read as control tokens, so that a reply can forge turns, and nothing else: what "
    "every engine does that is given texts; give it token ids (special_tokens)"
)
"""What is said of every engine that is given texts and is right otherwise."""
EARLY = "the score read one token before the end"
BARE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request, tmp_path_factory) -> Path:
    """A reward model trained from the command line, positions scaled as in Llama 3."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **GROUPED, rope_parameters=LLAMA3)
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    pairs = write_pairs(folder / "pairs.jsonl", 16)
    line = f"train --model {folder / 'base'} --dataset {pairs} --output-dir {folder / 'run'} --steps 2 --batch-size 8"
    switch = "--lora" if request.param == "lora" else "--no-lora"
    flags = [switch, "--lr", "1e-2", "--max-seq-len", "256", "--precision", "fp32", "--eval-fraction", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewardlab.training.run.verify_in_clean_process", verify)  # where it is quick
        main([*line.split(), *flags])
    return folder / "run/step_2"


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of a sound folder, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def write_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    seal_again(folder)


def agree_on_template(folder: Path, template: str, *, final: int | None) -> None:
    """As `write_template`, and the spec says the same."""
    write_template(folder, template)
    renderer = {"chat_template": template, "template_hash": sha256_text(template), "final_token_id": final}
    edit(folder / "reward_spec.json", lambda spec: spec["renderer"].update(renderer))


def agree_on_tokens(folder: Path) -> None:
    """The canaries' tokens are those that the folder's template writes: only the scores are left to tell."""
    renderer = Renderer(AutoTokenizer.from_pretrained(folder), read_spec(folder).renderer)

    def rewrite(spec: Any) -> None:
        for canary in spec["canaries"]:
            canary["token_ids"] = renderer.token_ids(to_messages(canary["messages"])).tolist()

    edit(folder / "reward_spec.json", rewrite)


def plant_second_bos(folder: Path, depth: int) -> None:
    template = "{{ bos_token }}" + (folder / "chat_template.jinja").read_text()
    if depth == 1:
        return write_template(folder, template)
    agree_on_template(folder, template, final=read_spec(folder).renderer.final_token_id)
    return agree_on_tokens(folder) if depth == 3 else None


def plant_other_template(folder: Path, depth: int) -> None:
    if depth == 1:
        return write_template(folder, BARE)
    agree_on_template(folder, BARE, final=None)
    return agree_on_tokens(folder) if depth == 3 else None


def plant_shifted_position(folder: Path, depth: int) -> None:
    if depth == 1:
        final = read_spec(folder).renderer.final_token_id
        return edit(folder / "config.json", lambda config: config.update(pad_token_id=final))
    template = CHATML.replace("'<|im_end|>\n' }}", "'<|im_end|>' }}{% if not loop.last %}{{ '\n' }}{% endif %}")
    agree_on_template(folder, template, final=2)
    return agree_on_tokens(folder) if depth == 3 else None


def plant_lost_head(folder: Path, depth: int) -> None:
    if depth == 1:
        edit_weights(folder, lambda weights: weights.pop("score.weight"))
    else:
        edit_weights(folder, lambda weights: weights["score.weight"].zero_())


def plant_sigmoid(folder: Path, depth: int) -> None:
    edit(folder / "config.json", lambda config: config.update(problem_type="multi_label_classification"))


def plant_dropped_rope(folder: Path, depth: int) -> None:
    kept = {"rope_theta": LLAMA3["rope_theta"]} if depth == 2 else {}

    def drop(config: Any) -> None:
        for name in ROPE_SETTINGS:
            config.pop(name, None)
        config.update(kept)

    edit(folder / "config.json", drop)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plant", "depth", "named"),
    [
        (plant_second_bos, 1, f"would score {SECOND_BOS}"),
        (plant_second_bos, 2, f"canary 'short' now renders to {SECOND_BOS}"),
        (plant_second_bos, 3, f"What fits: {SECOND_BOS}"),
        (plant_shifted_position, 1, f"the score is read one token too early ({EARLY})"),
        (plant_shifted_position, 2, "canary 'short' now renders to other tokens from token"),
        (plant_shifted_position, 3, f"What fits: {EARLY} (shifted_position)"),
        (plant_other_template, 1, "the tokenizer's chat template is not the one the model was trained with"),
        (plant_other_template, 2, "canary 'short' now renders to other tokens from token 0 on"),
        (plant_other_template, 3, "What fits: plain text in place of the chat template (no_template)"),
        (plant_lost_head, 1, "no score.weight in its files: the head, and so every reward, is lost"),
        (plant_lost_head, 2, "What fits: a head that is zero or was never loaded (zero_head)"),
        (plant_sigmoid, 1, "return a probability instead of the score (a sigmoid applied to the score)"),
        (plant_dropped_rope, 1, "What fits: the default position settings (rope) in place of the model's"),
        (plant_dropped_rope, 2, "What fits: the scaling of the positions (rope) dropped, their base kept"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_verify_names_a_fault_planted_in_a_folder(copy, capsys, plant, depth, named, precision):
    verify(copy, precision=precision)
    plant(copy, depth)
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(copy), "--precision", precision])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith(f"error: {copy}")
    assert named in said
    with pytest.raises(ArtifactError, match=re.escape(str(copy))):
        load(copy, precision=precision)


def scores_of(
    folder: Path, *, special: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> list[float]:
    """The canaries' scores as an engine gets them that reads text with plain transformers."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    texts = [tokenizer.apply_chat_template(c.messages, tokenize=False) for c in read_spec(folder).canaries]
    with torch.no_grad():
        return [
            float(model(**tokenizer(text, add_special_tokens=special, return_tensors="pt")).logits) for text in texts
        ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_decoys_name_what_an_engine_does_wrong(trained, tmp_path, monkeypatch, precision):
    """In bfloat16 with a folder for it, where the faults are told from the noise of the arithmetic."""
    folder, dtype = trained, getattr(torch, precision)
    if precision != "float32":
        folder = tmp_path / "half"
        monkeypatch.setattr("rewardlab.serve.folders.export.verify_in_clean_process", verify)  # where it is quick
        export(trained, folder, dtype=precision)
    spec = read_spec(folder)

    def named(**fault: Any) -> str | None:
        return name_fault(spec.canaries, scores_of(folder, dtype=dtype, **fault), precision=precision)

    right = scores_of(folder, dtype=dtype)
    assert named() == TEXTS
    assert named(special=True) == SECOND_BOS
    assert named(pad_token_id=spec.renderer.final_token_id) == f"{EARLY} (shifted_position)"
    for scores, fault in (
        (torch.sigmoid(torch.tensor(right)).tolist(), "(sigmoid)"),
        (torch.softmax(torch.tensor(right)[:, None], 1)[:, 0].tolist(), "(softmax)"),
    ):
        assert fault in name_fault(spec.canaries, scores, precision=precision)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert "(dropped_rope)" in named(rope_parameters=plain)
    assert "(dropped_rope_scaling)" in named(rope_parameters=plain | {"rope_theta": 5e5})


NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0] * 4}
GEMMA = {"head_dim": 8, "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
SCALED: dict[str, tuple[Any, Any, Any]] = {
    # configuration, settings when all are dropped, settings when the scaling is (None: the same)
    "yarn": (
        Qwen2Config(**SIZES, **GROUPED, rope_parameters={**YARN, "rope_theta": 1e6}),
        PLAIN,
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "yarn on the default base": (
        Qwen2Config(**SIZES, **GROUPED, rope_parameters={**YARN, "rope_theta": 1e4}),
        PLAIN,
        None,
    ),
    "longrope": (
        Phi3Config(
            **SIZES,
            original_max_position_embeddings=256,
            rope_parameters={**LONG, "rope_theta": 1e4, "original_max_position_embeddings": 256},
        ),
        PLAIN,
        None,
    ),
    "one for each kind of layer": (
        Gemma3TextConfig(**SIZES, **GROUPED, **GEMMA, rope_parameters=NESTED),
        {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        },
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", SCALED)
def test_dropped_position_settings_are_named_for_every_kind_of_scaling(tmp_path, kind):
    config, dropped, unscaled = SCALED[kind]
    folder = tmp_path / "rm"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    spec = save_reward_model(
        folder, make_model(config=config), renderer, beta=1.0, save_dtype=torch.float32, provenance={}
    )
    assert spec.provenance["faults_noticed"]["dropped_rope"]
    tolerance = SCORE_TOLERANCE["float32"]
    assert name_fault(spec.canaries, scores_of(folder), tolerance=tolerance) == TEXTS
    fault = name_fault(spec.canaries, scores_of(folder, rope_parameters=dropped), tolerance=tolerance)
    assert fault is not None
    assert fault.endswith("(dropped_rope)")
    assert ("dropped_rope_scaling" in spec.canaries[0].decoys) == (unscaled is not None)
    if unscaled is not None:
        fault = name_fault(spec.canaries, scores_of(folder, rope_parameters=unscaled), tolerance=tolerance)
        assert fault is not None
        assert fault.endswith("(dropped_rope_scaling)")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "older"),
    [
        ("yarn", {"rope_theta": 1e6, "rope_scaling": YARN}),
        ("longrope", {"rope_theta": 1e4, "rope_scaling": {**LONG, "type": "longrope"}}),
        (
            "one for each kind of layer",
            {
                "rope_theta": 5e5,
                "rope_local_base_freq": 3e3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_older_names_of_position_settings_say_the_same_and_change_nothing_here(tmp_path, kind, older):
    config = SCALED[kind][0]
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    save_reward_model(
        tmp_path / "rm", make_model(config=config), renderer, beta=1.0, save_dtype=torch.float32, provenance={}
    )
    written = json.loads((tmp_path / "rm/config.json").read_text())
    if kind == "longrope":
        older["rope_scaling"].pop("rope_type")
        assert written["original_max_position_embeddings"] == 256
    assert {name: written[name] for name in older} == older
    read = AutoConfig.from_pretrained(tmp_path / "rm").rope_parameters
    own = config.rope_parameters
    assert {name: read[name] for name in own} == own


@pytest.mark.slow
def test_default_position_settings_have_no_decoy(tmp_path):
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    for family in ("llama", "gemma3"):
        spec = save_reward_model(
            tmp_path / family, make_model(family), renderer, beta=1.0, save_dtype=torch.float32, provenance={}
        )
        assert not [fault for fault in spec.canaries[0].decoys if "rope" in fault]
