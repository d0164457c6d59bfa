"""Folders saved by this version, loaded and scored by plain transformers of another version: do the canaries agree?

    python benchmarks/old_transformers.py --python OTHER/bin/python

OTHER is a virtual environment with torch, jinja2 and the other transformers; it needs no rewardlab. Tiny models with
random weights and uncommon position settings are saved here; there, each folder is loaded by name, and each canary
rendered and scored.
Exits with 1 if tokens differ or a score is further off than float32 arithmetic explains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from harness import machine, results, tiny
from rewardlab.analysis.faults import largest_distance
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.model.attention import padded_implementation
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import wrap
from rewardlab.model.reward import RewardModel

SIZES = tiny.SIZES
GROUPED = SIZES | tiny.GROUPED
GEMMA: dict[str, Any] = GROUPED | {"head_dim": 8, "sliding_window": 64}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
PLAIN = {"rope_type": "default", "rope_theta": 777.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 256,
}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama, another base": lambda: LlamaConfig(**GROUPED, rope_parameters=dict(PLAIN)),
    "Llama 3 scaling": lambda: LlamaConfig(**GROUPED, rope_parameters=dict(tiny.LLAMA3)),
    "Llama, linear scaling": lambda: LlamaConfig(
        **GROUPED, rope_parameters=PLAIN | {"rope_type": "linear", "factor": 4}
    ),
    "Mistral, sliding window": lambda: MistralConfig(**GROUPED, sliding_window=64, rope_parameters=dict(PLAIN)),
    "Qwen2, yarn": lambda: Qwen2Config(**GROUPED, rope_parameters=dict(YARN)),
    "Qwen3, yarn": lambda: Qwen3Config(**GROUPED, head_dim=8, rope_parameters=dict(YARN)),
    "Phi-3, longrope": lambda: Phi3Config(**SIZES, original_max_position_embeddings=256, rope_parameters=dict(LONG)),
    "Phi, partial rotary": lambda: PhiConfig(**SIZES, rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}),
    "StableLM, partial rotary": lambda: StableLmConfig(
        **GROUPED, rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}
    ),
    "GPT-NeoX, partial rotary": lambda: GPTNeoXConfig(**SIZES, rope_parameters=PLAIN | {"partial_rotary_factor": 0.5}),
    "Gemma 2, local and global": lambda: Gemma2Config(
        **GEMMA, **BOTH_KINDS, attn_logit_softcapping=2.0, rope_parameters=dict(PLAIN)
    ),
    "Gemma 3, local and global": lambda: Gemma3TextConfig(**GEMMA, **BOTH_KINDS, rope_parameters=GEMMA3),
    "GPT-2": lambda: GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3),
}

THERE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
print(transformers.__version__, file=sys.stderr)
for folder in sys.argv[1:]:
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        scores, same = [], True
        for canary in json.load(open(folder + "/reward_spec.json"))["canaries"]:
            text = tokenizer.apply_chat_template(canary["messages"], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            same = same and ids[0].tolist() == canary["token_ids"]
            with torch.no_grad():
                scores.append(float(model(ids).logits))
        print(json.dumps({"scores": scores, "same": same}))
    except Exception as error:
        print(json.dumps({"error": repr(error)[:300]}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Save here, score there, and write how far apart they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with the other version")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as scratch:
        specs = {name: save(Path(scratch) / str(n), make()) for n, (name, make) in enumerate(MODELS.items())}
        folders = [str(Path(scratch) / str(n)) for n in range(len(MODELS))]
        there = subprocess.run([options.python, "-c", THERE, *folders], capture_output=True, text=True, check=False)
    if there.returncode != 0:
        print(there.stderr)
        return 1
    version, compared, worst = there.stderr.strip().splitlines()[-1], dict[str, Any](), 0.0
    for (name, spec), line in zip(specs.items(), there.stdout.splitlines(), strict=True):
        found = json.loads(line)
        if "error" not in found:
            found["largest_distance"] = largest_distance([canary.score for canary in spec.canaries], found["scores"])
        worst = max(worst, found["largest_distance"] if found.get("same") else float("inf"))
        compared[name] = found
    allowed = SCORE_TOLERANCE["float32"]
    results.write(
        "old_transformers",
        version,
        page=page_of(compared, version, allowed),
        data={"transformers": version, "allowed": allowed, "compared": compared},
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )
    return int(worst > allowed)


def page_of(compared: Mapping[str, Any], version: str, allowed: float) -> list[str]:
    """The page."""
    rows = [
        [
            name,
            f"**{found['error']}**" if "error" in found else f"{found['largest_distance']:.1e}",
            "–" if "error" in found else "the same" if found["same"] else "**others**",
        ]
        for name, found in compared.items()
    ]
    return [
        f"# Folders of this version in transformers {version}",
        "",
        f"Tiny models with random weights, saved by transformers {transformers.__version__} and loaded by their names "
        f"in {version}; canaries rendered and scored there. Largest distances from the canonical scores, in units of "
        f"max(1, abs(score)); {allowed:g} is allowed.",
        "",
        results.table(["model", "largest distance", "tokens"], rows),
    ]


def save(folder: Path, config: Any) -> Any:
    """A tiny reward model of this configuration as a folder; returns its spec."""
    model, renderer = tiny_model(config)
    return save_reward_model(folder, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})


def tiny_model(config: Any, *, seed: int = 0) -> tuple[RewardModel, Renderer]:
    """A reward model of this configuration with random weights, and its renderer."""
    torch.manual_seed(seed)
    config.num_labels = 1
    implementation = padded_implementation(config)
    classifier = disk_class_of(config)._from_config(config, dtype=torch.float32, attn_implementation=implementation)
    model = wrap(classifier, layout="padded", compute_dtype=torch.float32).eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    tokenizer = tiny.byte_tokenizer([], vocab_size=260, pad="<|endoftext|>")
    return model, build_renderer(tokenizer, RenderingConfig(max_seq_len=256, special_tokens_in_text="keep"))


if __name__ == "__main__":
    sys.exit(main())
