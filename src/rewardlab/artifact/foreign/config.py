"""The settings of an import. Imports no third-party package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require
from rewardlab.data.config import parse_numbers
from rewardlab.data.template_files import parse_arguments

Layout = Literal["auto", "trl", "openrlhf", "llama-factory", "ms-swift", "seq-cls", "linear-head"]


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Section):
    """How the files of a foreign reward model are read, and how its conversations are rendered."""

    base: str | None = None
    """Base model of adapters (of PEFT): a hub name or a folder; by default the one that their adapter_config.json
    names."""
    layout: Layout = "auto"
    """The project that saved the model, or what its head is; `auto` takes what the files say."""
    head: str | None = None
    """Name of the head among the weights, where there are several or its name is uncommon."""
    outputs: tuple[str, ...] = ()
    """What each of several outputs counts in the reward, as `NUMBER=WEIGHT`, numbered from 0: `4=1` takes the fifth
    alone, `0=-1 1=1` the second minus the first. Outputs that are not named count nothing."""
    normalize_reward: Literal["auto", "yes", "no"] = "auto"
    """Whether scores are normalised by the mean and std that the model holds (OpenRLHF); `auto` asks its
    configuration."""
    chat_template: str = "auto"
    """How conversations become text: `template`, the tokenizer's own; a FILE with the Jinja text of one; `plain`, a
    transcript; `concat`, the texts one after the other and EOS. `auto` is `template` and never another."""
    template_arguments: tuple[str, ...] = ()
    """What the chat template was given in training, as `NAME=VALUE` with values of JSON (`enable_thinking=false`). It
    is written into the template of the new folder."""
    system_prompt: str | None = None
    """System turn for conversations that have none."""
    max_seq_len: int | Literal["model"] = "model"
    """Tokens a conversation may have after truncation; `model` is as many as the model has positions."""
    bos: Literal["auto", "template", "add"] = "auto"
    """BOS as the template writes it, or one added in front; `auto` is an error where the tokenizer adds one and the
    template writes none."""
    eos: Literal["auto", "template", "add", "strip"] = "auto"
    """The end as the template writes it; an EOS added behind it; or `strip`, OpenRLHF's: line breaks at the end taken
    away, then an EOS unless there is one. `auto` is `template`, and an error where something stands behind the EOS or
    there is none, unless the head is a sequence classifier's of another project than ms-swift."""
    special_tokens_in_text: Literal["auto", "text", "keep"] = "auto"
    """Control tokens typed in a message: letters like any others (`text`), or obeyed (`keep`); `auto` is `text`, and
    `keep` with `concat`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the new folder's weights."""
    beta: float = 1.0
    """σ(beta · score difference) is the probability that the first reply is preferred."""

    def __post_init__(self) -> None:
        require_between(self, beta=(1e-6, 1e6))
        parse_arguments(self.template_arguments)  # raises for a word that is none
        weights = parse_numbers(self.outputs, "--outputs", low=-1e6, high=1e6)
        require(
            all(name.isdecimal() and name == str(int(name)) for name in weights)
            and (not weights or any(weights.values())),
            f"--outputs {' '.join(self.outputs)}: wanted NUMBER=WEIGHT with numbers from 0, such as --outputs 4=1.",
        )
        require(self.base != "", "--base: the name is empty. Name a model, or leave the flag out.")
        require(self.head != "", "--head: the name is empty. Name a layer, or leave the flag out.")
        require(
            isinstance(self.max_seq_len, str) or self.max_seq_len >= 16,
            f"--max-seq-len {self.max_seq_len}: must be at least 16 to hold a chat template and a reply.",
        )

    @property
    def output_weights(self) -> dict[int, float]:
        """Number of an output -> what it counts, from `--outputs`."""
        weights = parse_numbers(self.outputs, "--outputs", low=-1e6, high=1e6)
        return {int(name): weight for name, weight in weights.items()}
