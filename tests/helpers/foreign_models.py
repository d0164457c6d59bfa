"""Tiny reward models on disk as other projects write them, each with its own score computed from the live modules.

TRL's RewardTrainer is run itself where a test says so. The others are written by hand: TRL 1.16 has no value-head class
any more, and OpenRLHF, LLaMA-Factory and ms-swift are not installed. Names and arithmetic are those of their sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common import CHATML, CONFIGS, make_tokenizer

ENDED = CHATML.replace("<|im_end|>\n", "<|im_end|>")
"""ChatML without the line break behind a turn, so that it is plain where a score is read."""
PAD = 3
"""A token that no rendering has."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A foreign reward model on disk."""

    folder: Path
    own: Callable[[Sequence[int]], float]
    """Its score of token ids, by the modules from which it was saved."""


def causal(family: str = "llama", **settings: Any) -> Any:
    """A tiny causal model with random weights."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.eos_token_id, config.pad_token_id = 2, PAD
    for name, value in settings.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


def linear(*, bias: bool, outputs: int = 1, width: int = 32) -> torch.nn.Linear:
    """A head whose scores differ by more than noise."""
    torch.manual_seed(5)
    head = torch.nn.Linear(width, outputs, bias=bias)
    torch.nn.init.normal_(head.weight, std=0.3)
    return head


def with_tokenizer(folder: Path, template: str | None) -> None:
    """The tokenizer beside the weights."""
    make_tokenizer(template).save_pretrained(folder)


def edit_config(folder: Path, **values: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def read_at_end(model: Any, head: torch.nn.Linear, *, mean: float = 0.0, std: float = 1.0) -> Callable[..., float]:
    """The score of a causal model with a head on its last hidden state."""

    @torch.no_grad()
    def own(token_ids: Sequence[int]) -> float:
        states = model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states[-1]
        return float((head(states)[0, -1, 0] - mean) / std)

    return own


def seq_cls(
    folder: Path,
    *,
    family: str = "llama",
    template: str | None = CHATML,
    labels: int = 1,
    make: Callable[[], Any] | None = None,
) -> Made:
    """A bare sequence classifier, such as TRL's RewardTrainer and ms-swift write and as Skywork's is."""
    torch.manual_seed(0)
    config = (make or CONFIGS[family])()
    config.eos_token_id, config.pad_token_id, config.num_labels = 2, PAD, labels
    # Eager, since earlier versions of transformers drop the soft cap of Gemma 2 in SDPA.
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    with_tokenizer(folder, template)

    @torch.no_grad()
    def own(token_ids: Sequence[int]) -> float:
        return float(model(torch.tensor([list(token_ids)])).logits[0, 0])

    return Made(folder=folder, own=own)


def trl_value_head(folder: Path, *, pickled: bool = False, prefix: str = "", family: str = "llama") -> Made:
    """TRL's former AutoModelForCausalLMWithValueHead: `v_head.summary` among the weights of the causal model."""
    model, head = causal(family), linear(bias=True)
    with_tokenizer(folder, ENDED)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state = {f"{prefix}{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    state |= {f"v_head.summary.{name}": tensor.clone() for name, tensor in head.state_dict().items()}
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return Made(folder=folder, own=read_at_end(model, head))


def value_head_file(folder: Path, *, pickled: bool = False, family: str = "llama") -> Made:
    """LLaMA-Factory and older ms-swift: a causal model, and the head in a file of its own."""
    model, head = causal(family), linear(bias=True)
    model.save_pretrained(folder)
    with_tokenizer(folder, ENDED)
    state = {f"v_head.summary.{name}": tensor.clone() for name, tensor in head.state_dict().items()}
    if pickled:
        torch.save(state, folder / "value_head.bin")
    else:
        save_file(state, folder / "value_head.safetensors", metadata={"format": "pt"})
    return Made(folder=folder, own=read_at_end(model, head))


def linear_head(
    folder: Path,
    *,
    name: str = "value_head",
    said: str | None = "value_head",
    bias: bool = False,
    outputs: int = 1,
    width: int = 32,
    statistics: tuple[float, float] | None = None,
    normalize: bool | None = True,
    buffers: bool = False,
    template: str = ENDED,
) -> Made:
    """OpenRLHF: the base model under its prefix, one layer called `name`, and `said` as its name in config.json.

    `statistics` = (mean, std) are in config.json, or among the weights with `buffers`.
    """
    model, head = causal(), linear(bias=bias, outputs=outputs, width=width)
    with_tokenizer(folder, template)
    model.config.architectures = ["RewardModel"]
    model.config.save_pretrained(folder)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items() if not key.startswith("lm_head")}
    state |= {f"{name}.{key}": tensor.clone() for key, tensor in head.state_dict().items()}
    mean, std = statistics or (0.0, 1.0)
    if buffers:
        state |= {"mean": torch.tensor([mean]), "std": torch.tensor([std])}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    values: dict[str, Any] = {} if said is None else {"value_head_prefix": said}
    if statistics is not None and not buffers:
        values |= {"mean": mean, "std": std}
    if statistics is not None and normalize is not None:
        values["normalize_reward"] = normalize
    edit_config(folder, **values)
    if not normalize:
        mean, std = 0.0, 1.0
    return Made(folder=folder, own=read_at_end(model, head, mean=mean, std=std) if width == 32 else lambda ids: 0.0)


def adapters(
    folder: Path,
    base: Path,
    config: Any = None,
    *,
    template: str | None = CHATML,
    counts: Sequence[float] = (1.0,),
    **settings: Any,
) -> Made:
    """What PeftModel.save_pretrained leaves of a classifier on `base`, as after some training: every weight of the
    adapters and of the head is another one. `template` None leaves the tokenizer out, as save_pretrained does. Of
    several outputs `counts` says what each counts."""
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=len(counts))
    classifier.config.pad_token_id = PAD
    if config is None:
        config = LoraConfig(**({"task_type": "SEQ_CLS", "r": 4, "target_modules": "all-linear"} | settings))
    model = get_peft_model(classifier, config)
    torch.manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            head = name.endswith("score.modules_to_save.default.weight")
            weight.data += torch.randn_like(weight) * (0.3 if head else 0.05)
    model.eval().save_pretrained(folder)
    if template is not None:
        make_tokenizer(template, pad="<|pad|>").save_pretrained(folder)

    @torch.no_grad()
    def own(token_ids: Sequence[int]) -> float:
        return float(model(torch.tensor([list(token_ids)])).logits[0] @ torch.tensor(counts))

    return Made(folder=folder, own=own)
