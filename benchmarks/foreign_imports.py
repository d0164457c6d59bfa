"""Reward models saved by other projects' own classes, imported: are the scores theirs?

    scripts/bench foreign_imports --python ENV/bin/python

ENV is an environment with torch, transformers, peft and accelerate, and whichever of trl (with its value-head class:
below 0.29), openrlhf, llamafactory and ms-swift it has; it needs no rewardlab, and the projects may be installed
without what they depend on (`pip install --no-deps`). There, each project's own class makes a tiny model with random
weights, scores lists of token ids on the CPU and saves it by the project's own function. Here, the folder is imported,
and the new one scores the same tokens.
Exits with 1 if a score is further off than an import allows. What a project cannot do there is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from harness import machine, results, tiny
from rewardlab.analysis.faults import largest_distance
from rewardlab.artifact.canaries import score_tokens
from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.artifact.foreign.source import PARITY
from rewardlab.artifact.load import load
from rewardlab.core.errors import RewardlabError
from rewardlab.serve.folders.import_model import import_model

ENDED: Final = tiny.CHATML.replace("<|im_end|>\n", "<|im_end|>")
"""ChatML that ends in EOS, so that nothing has to be said of the end."""
PAD: Final = 3
NUM_LISTS: Final = 8
COMMON: Final = f"""
import importlib.machinery, importlib.metadata, json, sys, types, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
out = Path(sys.argv[1])
lists = json.loads(sys.argv[2])
SIZES = {tiny.SIZES | tiny.GROUPED | {"pad_token_id": PAD}!r}
base = str(out.with_name(out.name + "-base"))
LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(base)
def told(scores, *packages):
    versions = {{name: importlib.metadata.version(name) for name in (*packages, "transformers")}}
    print(json.dumps({{"scores": scores, "versions": versions}}))
def stand_in(*names):
    # Imported where the module is loaded, and not called for a model on the CPU.
    class Anything(types.ModuleType):
        __path__ = []
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {{}})
    for name in names:
        sys.modules[name] = Anything(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
def value_head():
    from trl import AutoModelForCausalLMWithValueHead
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base).eval()
    torch.nn.init.normal_(model.v_head.summary.weight, std=0.3)
    torch.nn.init.constant_(model.v_head.summary.bias, 0.4)
    with torch.no_grad():
        return model, [float(model(input_ids=torch.tensor([ids]))[2][0, -1]) for ids in lists]
"""
TRL: Final = """
model, scores = value_head()
model.save_pretrained(str(out))
told(scores, "trl")
"""
LLAMA_FACTORY: Final = """
from llamafactory.train.callbacks import fix_valuehead_checkpoint
model, scores = value_head()
# As its trainer saves: the state of the whole wrapper, which the callback then divides.
model.pretrained_model.save_pretrained(str(out), state_dict=model.state_dict())
from safetensors.torch import save_file
save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, out / "model.safetensors",
          metadata={"format": "pt"})
fix_valuehead_checkpoint(model, str(out), safe_serialization=True)
told(scores, "llamafactory", "trl")
"""
OPENRLHF: Final = """
stand_in("deepspeed", "deepspeed.utils", "flash_attn", "flash_attn.bert_padding", "flash_attn.utils",
         "flash_attn.utils.distributed")
from openrlhf.models import get_llm_for_sequence_regression
model = get_llm_for_sequence_regression(base, "reward", attn_implementation="eager", normalize_reward=True,
                                        init_value_head=True, value_head_prefix=PREFIX).float().eval()
torch.nn.init.normal_(getattr(model, PREFIX).weight, std=0.3)
model.mean[0], model.std[0] = 0.7, 2.5
# As its trainer writes them when training ends.
model.config.mean, model.config.std = 0.7, 2.5
model.config.value_head_prefix = PREFIX
with torch.no_grad():
    scores = [float(model(torch.tensor([ids]), torch.ones(1, len(ids)))[0]) for ids in lists]
model.save_pretrained(str(out))
told(scores, "openrlhf")
"""
MS_SWIFT: Final = """
from swift.model.patcher import patch_automodel_for_sequence_classification
from transformers import AutoModelForSequenceClassification
config = LlamaConfig(**SIZES, num_labels=1)
with patch_automodel_for_sequence_classification(model_config=config, patch_from_pretrained=False):
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config).eval()
torch.nn.init.normal_(model.score.weight, std=0.3)
with torch.no_grad():
    scores = [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in lists]
model.save_pretrained(str(out))
told(scores, "ms-swift")
"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a project makes, scores and saves a reward model."""

    code: str
    what: str
    """What of the project's is run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What an import has to be told."""


SOURCES: Final[Mapping[str, Source]] = {
    "TRL": Source(code=TRL, what="AutoModelForCausalLMWithValueHead", settings={"layout": "trl"}),
    "OpenRLHF, score": Source(
        code=f"PREFIX = 'score'\n{OPENRLHF}", what="get_llm_for_sequence_regression", settings={"layout": "openrlhf"}
    ),
    "OpenRLHF, value_head": Source(
        code=f"PREFIX = 'value_head'\n{OPENRLHF}",
        what="get_llm_for_sequence_regression",
        settings={"layout": "openrlhf"},
    ),
    "LLaMA-Factory": Source(
        code=LLAMA_FACTORY,
        what="fix_valuehead_checkpoint, on TRL's class as it uses it",
        settings={"layout": "llama-factory"},
    ),
    "ms-swift": Source(
        code=MS_SWIFT, what="patch_automodel_for_sequence_classification", settings={"layout": "ms-swift"}
    ),
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What became of one source."""

    name: str
    distance: float | None = None
    """Largest of the scores there from those of the imported folder, in units of max(1, |score|); None if not run."""
    kind: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    """Why it was not run, or not imported."""
    refused: bool = False
    """Whether it was made there and could not be imported."""

    @property
    def is_wrong(self) -> bool:
        """Whether the import is to blame."""
        return self.refused or (self.distance is not None and not self.distance <= PARITY)


def token_lists() -> list[list[int]]:
    """Made-up conversations, as token ids without the pad token."""
    draw = np.random.default_rng(0)
    return [draw.integers(10, 250, int(length)).tolist() for length in draw.integers(4, 60, NUM_LISTS)]


def compare(name: str, source: Source, python: str, work: Path) -> Compared:
    """Make a model there, import it, and compare."""
    folder, lists = work / "source", token_lists()
    command = [python, "-c", COMMON + source.code, str(folder), json.dumps(lists)]
    there = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if there.returncode:
        return Compared(name=name, reason=" ".join(there.stderr.strip().splitlines()[-1:])[:300])
    told = json.loads(there.stdout.strip().splitlines()[-1])
    tiny.byte_tokenizer([], vocab_size=260, template=ENDED, pad="<|unused|>").save_pretrained(folder)
    try:
        made = import_model(folder, work / "imported", ImportConfig(max_seq_len=256, **source.settings))
    except RewardlabError as error:
        return Compared(name=name, reason=str(error), refused=True, versions=told["versions"])
    ours = score_tokens(load(work / "imported", device="cpu").model, [np.asarray(ids, np.int32) for ids in lists])
    constant = made.source.constant
    return Compared(
        name=name,
        distance=largest_distance(told["scores"], [score + constant for score in ours]),
        kind=f"{made.source.kind}, head {made.source.head}",
        versions=told["versions"],
    )


def page_of(compared: Sequence[Compared]) -> list[str]:
    """The page."""
    rows = [
        [
            one.name,
            f"`{SOURCES[one.name].what}`",
            ", ".join(f"{name} {version}" for name, version in one.versions.items()) or "–",
            one.kind or "–",
            f"**{one.distance:.1e}**"
            if one.distance is not None
            else f"{'**refused**' if one.refused else 'not run'}: {one.reason}",
        ]
        for one in compared
    ]
    return [
        "# Reward models saved by other projects' own classes, imported",
        "",
        f"Tiny Llama models with random weights; {NUM_LISTS} lists of token ids scored by the project's own forward "
        f"pass in float32, and by the imported folder. Largest distances in units of max(1, abs(score)); {PARITY:g} is "
        f"allowed.",
        "",
        results.table(["project", "its own", "versions", "read as", "largest distance"], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every source, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with the other projects")
    parser.add_argument("--only", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = machine.load_average()
    compared = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as scratch:
            compared.append(compare(name, SOURCES[name], options.python, Path(scratch)))
        print(f"{name}: {compared[-1].reason or compared[-1].distance}", flush=True)
    results.write(
        "foreign_imports",
        "all"
        if len(options.only) == len(SOURCES)
        else "-".join(re.sub(r"\W+", "_", name.lower()) for name in options.only),
        page=page_of(compared),
        data={"compared": [asdict(one) for one in compared], "allowed": PARITY},
        options=options,
        device=torch.device("cpu"),
        load=(load_before, machine.load_average()),
    )
    return int(any(one.is_wrong for one in compared))


if __name__ == "__main__":
    sys.exit(main())
