"""The layouts in which other projects save reward models, and which of them a folder has.

All of them are a decoder with one linear layer over its last hidden states, read at the last token. They differ in
where that layer is stored, what its name is, and what is done to its output:

    seq-cls        score.weight in a …ForSequenceClassification     TRL RewardTrainer, ms-swift (seq_cls), Skywork
    v_head         v_head.summary.* among the weights, with a bias  TRL AutoModelForCausalLMWithValueHead
    value-head     value_head.safetensors or .bin beside them       LLaMA-Factory, ms-swift (older)
    linear-head    one layer of another name, mean and std          OpenRLHF (value_head_prefix), UltraRM

The files decide. If they hold no head, or more than one, nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from rewardlab.artifact.foreign.config import ImportConfig, Layout
from rewardlab.artifact.foreign.weights import Entry, entries_in, entries_of, read_weight
from rewardlab.core.errors import ArtifactError, ModelError
from rewardlab.core.files import is_number
from rewardlab.core.terminal import number_of
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.files import require_same_sizes, told, transformers_names
from rewardlab.model.heads import is_classifier
from rewardlab.model.load import read_config
from rewardlab.model.reward import width_of

Kind = Literal["seq-cls", "v_head", "value-head", "linear-head"]
KINDS_OF: Final[Mapping[str, tuple[Kind, ...]]] = {
    "auto": get_args(Kind),
    "trl": ("v_head", "seq-cls"),
    "openrlhf": ("linear-head",),
    "llama-factory": ("value-head",),
    "ms-swift": ("value-head", "seq-cls"),
    "seq-cls": ("seq-cls",),
    "linear-head": ("linear-head",),
}
"""Value of `--layout` -> the kinds of heads that it stands for."""
HEAD_FILES: Final = ("value_head.safetensors", "value_head.bin")
V_HEAD: Final = "v_head.summary"
SCORE: Final = "score"
KNOWN_HEADS: Final = ("value_head", SCORE, "regression_head", "regression_layer", "reward_head")
"""Names by which a linear head is recognised; others need `--head`."""
PREFIX: Final = "pretrained_model."
"""The prefix that TRL's wrapper puts before the names of the model inside it under DeepSpeed ZeRO-3."""
IGNORED: Final = re.compile(
    r"(^|\.)(lm_head|embed_out|output_layer)\.(weight|bias)$|rotary_emb\.inv_freq$|\.(attn|attention)\.(bias|masked_bias)$"
)
"""Weights beside the backbone that do not affect a score: the output over the vocabulary, and buffers of older
versions."""
STATISTICS: Final = ("mean", "std")


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A foreign reward model as its files describe it. Of its weights, only those of the head have been read.

    Its score of a conversation is (w · h + bias − mean) / std, with h the last hidden state of the last token.
    """

    folder: Path
    kind: Kind
    head: str
    """The name of the head's module in the files."""
    rows: torch.Tensor
    """[O, W] the weight of the head in float32, as the file has it."""
    biases: torch.Tensor
    """[O] its bias; zeros if it has none."""
    counts: tuple[float, ...] = (1.0,)
    """What each of the head's outputs counts in the reward."""
    mean: float = 0.0
    std: float = 1.0
    config: Any
    """The configuration of transformers."""
    disk_class: Any
    """The sequence-classification class of its architecture."""
    renamed: bool
    """Whether the names of its weights begin with `pretrained_model.`."""

    @property
    def weight(self) -> torch.Tensor:
        """[1, W] the weight by which the reward is read, in float32: of several outputs the sum of what each counts."""
        return (torch.tensor([self.counts], dtype=torch.float64) @ self.rows.double()).float()

    @property
    def bias(self) -> float:
        """The bias of the reward, before `mean` and `std`."""
        return float(torch.tensor(self.counts, dtype=torch.float64) @ self.biases.double())

    @property
    def outputs_in_words(self) -> str:
        """What of several outputs counts, as the end of the name of the head; empty for one output."""
        said = [f"{number}={count:g}" for number, count in enumerate(self.counts) if count]
        return f", outputs {' '.join(said)}" if len(self.counts) > 1 else ""

    @property
    def constant(self) -> float:
        """The constant that the source adds to every score: (bias − mean) / std."""
        return (self.bias - self.mean) / self.std

    @property
    def key_mapping(self) -> dict[str, str] | None:
        """The mapping by which transformers renames the weights; None if it need not."""
        return {f"^{re.escape(PREFIX)}": ""} if self.renamed else None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One head among the files."""

    kind: Kind
    name: str
    entries: Mapping[str, tuple[str, Entry]]
    """`weight` or `bias` -> (name in the file, entry)."""

    def __str__(self) -> str:
        _, entry = self.entries["weight"]
        return f"{self.name} {list(entry.shape)} in {entry.file.name}"


def recognise(folder: Path, settings: ImportConfig) -> ForeignModel:
    """Return the reward model in a folder of another project, read as `settings` say.

    Raises ModelError for files that are missing or damaged; ArtifactError for a head that is missing, ambiguous, or has
    several outputs or the wrong width, and for weights that belong to no known layout.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder. Download a model on a hub first: `hf download NAME --local-dir DIR`."
        )
    config = _config_of(folder)
    disk_class = disk_class_of(config)
    entries = entries_of(folder)
    require_same_sizes(folder, config, disk_class)
    statistics, rest = _beside_backbone(folder, config, disk_class, entries)
    found = _choose(_heads(folder, config, rest), folder, config, settings)
    counts = counts_of(found, found.entries["weight"][1].shape[0], folder, settings)
    rows, biases = _read_head(found, folder, config)
    mean, std = _statistics(folder, config, found.kind, statistics, settings.normalize_reward)
    model = ForeignModel(
        folder=folder,
        kind=found.kind,
        head=found.name,
        rows=rows,
        biases=biases,
        counts=counts,
        mean=mean,
        std=std,
        config=config,
        disk_class=disk_class,
        renamed=any(name.startswith(PREFIX) for name in entries),
    )
    require_living_head(model)
    if model.kind == "seq-cls" and model.bias:
        raise ArtifactError(
            f"{folder}: score.bias is {model.bias:.6g}. transformers ignores it and vLLM adds it, so this folder has "
            f"two scores. Say which is meant: remove the bias from the file, or use --layout linear-head --head score."
        )
    return model


def require_living_head(model: ForeignModel) -> None:
    """Raise ArtifactError if the weights by which the reward is read are all zero."""
    if not bool(model.weight.any()):
        raise ArtifactError(
            f"{model.folder}: its head {model.head} is zero everywhere, so every conversation would get the same "
            f"score. Is it a base model beside adapters, which hold the trained head? Then import the adapters. Else "
            f"restore the head from where it was trained, or train one: `rewardlab train --new-head`."
        )


def _config_of(folder: Path) -> Any:
    """Return the configuration. Raises ArtifactError for quantised weights and for classes that are not named."""
    config = read_config(str(folder))
    if not all(isinstance(name, str) for name in config.architectures or []):
        raise ArtifactError(
            f"{folder}: config.json has architectures {config.architectures!r}, wanted names of classes. Correct it."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ArtifactError(f"{folder}: its weights are quantised. Import the model that it was quantised from.")
    return config


def _beside_backbone(
    folder: Path, config: Any, disk_class: Any, entries: Mapping[str, Entry]
) -> tuple[dict[str, float], dict[str, tuple[str, Entry]]]:
    """Return (mean and std if they are among the weights, the weights that are not the backbone's by their bare
    names)."""
    with told(str(folder), "no model can be built from config.json"), torch.device("meta"):
        classifier = disk_class._from_config(config)
    wanted = classifier.state_dict()
    if f"{SCORE}.weight" not in wanted:
        raise ArtifactError(
            f"{folder}: {disk_class.__name__} has no head called `{SCORE}`. Encoders, and models whose head is called "
            f"`classifier`, are not supported: only causal models with one linear layer at the last token are."
        )
    try:
        named = transformers_names(classifier, wanted)
    except ImportError:  # this version of transformers keeps its renaming rules elsewhere

        def named(key: str) -> tuple[str, bool]:
            return (key if key in wanted else f"{classifier.base_model_prefix}.{key}"), False

    rest: dict[str, tuple[str, Entry]] = {}
    statistics: dict[str, float] = {}
    for key, entry in entries.items():
        bare = key.removeprefix(PREFIX)
        name, converted = named(bare)
        if bare in STATISTICS and math.prod(entry.shape) == 1:
            statistics[bare] = float(read_weight(entry, key).reshape(()))
        elif name.startswith(f"{SCORE}.") or not (converted or name in wanted or IGNORED.search(bare)):
            rest[bare] = key, entry
    return statistics, rest


def _heads(folder: Path, config: Any, rest: Mapping[str, tuple[str, Entry]]) -> list[_Found]:
    """Return every head in the files. Raises ArtifactError for weights that belong to no head."""
    modules: dict[str, dict[str, tuple[str, Entry]]] = {}
    for bare, (key, entry) in rest.items():
        module, _, part = bare.rpartition(".")
        modules.setdefault(module, {})[part] = key, entry
    heads, strange = list[_Found](), list[str]()
    for module, parts in modules.items():
        flat = "weight" in parts and len(parts["weight"][1].shape) == 2 and parts.keys() <= {"weight", "bias"}
        if flat and (module == V_HEAD or "." not in module):
            heads.append(_Found(kind=_kind_of(module, config), name=module, entries=parts))
        else:
            strange += [f"{module}.{part}".lstrip(".") for part in parts]
    for name in HEAD_FILES:
        if (folder / name).is_file():
            heads.append(_in_own_file(folder / name))
    if strange:
        listed = ", ".join(sorted(strange)[:4]) + (" …" if len(strange) > 4 else "")
        several = getattr(config, "num_objectives", None)
        why = (
            f" Its configuration says num_objectives {several}: several scores, which a gate mixes." if several else ""
        )
        raise ArtifactError(
            f"{folder}: {len(strange)} weights belong neither to {config.model_type} nor to a linear head: {listed}."
            f"{why} "
            f"Only a reward that is one linear layer over the last hidden state can be imported."
        )
    return heads


def _kind_of(module: str, config: Any) -> Kind:
    """Return the kind of a head among the weights, by its name and by the configuration."""
    if module == V_HEAD:
        return "v_head"
    classifier = is_classifier(config)
    if module == SCORE and classifier and getattr(config, "value_head_prefix", None) is None:
        return "seq-cls"
    return "linear-head"


def _in_own_file(file: Path) -> _Found:
    """Return the head in a separate file. Raises ArtifactError if the file holds anything else."""
    parts: dict[str, tuple[str, Entry]] = {}
    entries = entries_in(file)
    for key, entry in entries.items():
        if key in (f"{V_HEAD}.weight", f"{V_HEAD}.bias"):
            parts[key.rpartition(".")[2]] = key, entry
    if len(parts) != len(entries) or "weight" not in parts:
        found = ", ".join(sorted(entries)) or "nothing"
        raise ArtifactError(f"{file}: expected {V_HEAD}.weight and perhaps {V_HEAD}.bias, found {found}.")
    key, entry = parts["weight"]
    if len(entry.shape) != 2:
        raise ArtifactError(f"{file}: {key} has shape {list(entry.shape)}, wanted [1, width of the hidden states].")
    return _Found(kind="value-head", name=V_HEAD, entries=parts)


def _choose(heads: list[_Found], folder: Path, config: Any, settings: ImportConfig) -> _Found:
    """Return the one head. Raises ArtifactError, with a list of all heads, if it is not clear which one is meant."""
    layout, name = settings.layout, settings.head
    found = f"Found: {'; '.join(map(str, heads)) or 'no linear layer beside the backbone'}."
    # A layer called `score` may be OpenRLHF's or a classifier's, whichever kind was recognised.
    fitting = [
        replace(one, kind=_as_asked(one, layout))
        for one in heads
        if _as_asked(one, layout) in KINDS_OF[layout] and name in (None, one.name)
    ]
    asked = (f" of --layout {layout}" if layout != "auto" else "") + (f" called {name!r}" if name else "")
    if not fitting:
        lost = " so every reward is lost: a base model is not a reward model." if not heads else ""
        raise ArtifactError(f"{folder}: no head{asked},{lost or ' though there is another.'} {found}")
    if len(fitting) > 1:
        raise ArtifactError(
            f"{folder}: {len(fitting)} heads{asked}, so it is not clear which one gives the reward. {found} Say it "
            f"with --layout or --head."
        )
    (one,) = fitting
    known = (*KNOWN_HEADS, V_HEAD, getattr(config, "value_head_prefix", None))
    if name is None and one.name not in known:
        raise ArtifactError(
            f"{folder}: a linear layer of an unknown name. {found} If it is the head, and is read at the last token, "
            f"say so with --layout linear-head --head {one.name}."
        )
    return one


def _as_asked(one: _Found, layout: Layout) -> Kind:
    """Return the kind of a head; `layout` decides between the two kinds that a layer called `score` may have."""
    if one.name == SCORE and layout in ("openrlhf", "linear-head"):
        return "linear-head"
    return "seq-cls" if one.name == SCORE and layout == "seq-cls" else one.kind


def counts_of(found: object, outputs: int, folder: Path, settings: ImportConfig) -> tuple[float, ...]:
    """Return what each output of the head counts in the reward; `found` is what the head is called in messages.

    Raises ArtifactError for several outputs of which nothing is said, and for one that the head does not have.
    """
    said = settings.output_weights
    if outputs != 1 and not said:
        raise ArtifactError(
            f"{folder}: {found} has {outputs} outputs, and a reward is one number. Which of them counts, or how they "
            f"are mixed, is not in the file. Say it: --outputs 0=1 takes the first alone, --outputs 0=-1 1=1 the "
            f"second minus the first."
        )
    if beyond := [number for number in said if number >= outputs]:
        raise ArtifactError(
            f"{folder}: --outputs {beyond[0]}: {found} has {number_of(outputs, 'output')}, numbered from 0."
        )
    return tuple(said.get(number, 0.0) for number in range(outputs)) if said else (1.0,)


def _read_head(found: _Found, folder: Path, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [O, W] and bias [O]. Raises ArtifactError for another width."""
    key, entry = found.entries["weight"]
    outputs, width = entry.shape
    if width != (wanted := width_of(config)):
        raise ArtifactError(
            f"{folder}: {found} is for hidden states of width {width}, and the model's are {wanted} wide: these files "
            f"belong to different models."
        )
    rows, biases = read_weight(entry, key), torch.zeros(outputs)
    if "bias" in found.entries:
        key, entry = found.entries["bias"]
        if math.prod(entry.shape) != outputs:
            raise ArtifactError(f"{folder}: {key} has shape {list(entry.shape)}, wanted [{outputs}].")
        biases = read_weight(entry, key).reshape(-1)
    if not (bool(torch.isfinite(rows).all()) and bool(torch.isfinite(biases).all())):
        raise ArtifactError(f"{folder}: {found} holds numbers that are not finite.")
    return rows, biases


def _statistics(
    folder: Path, config: Any, kind: Kind, in_weights: Mapping[str, float], normalize: Literal["auto", "yes", "no"]
) -> tuple[float, float]:
    """Return the mean and std by which the source normalises its score; 0 and 1 if it does not."""
    own = {name: getattr(config, name, None) for name in STATISTICS}
    values = {**{name: float(value) for name, value in own.items() if is_number(value)}, **in_weights}
    mean, std = values.get("mean", 0.0), values.get("std", 1.0)
    if normalize == "yes" and values.keys() != set(STATISTICS):
        raise ArtifactError(f"{folder}: --normalize-reward yes: neither its configuration nor its weights hold both.")
    said = getattr(config, "normalize_reward", None)
    if normalize == "auto" and said is True and values.keys() != set(STATISTICS):
        raise ArtifactError(
            f"{folder}: its configuration says normalize_reward, and mean and std are not both numbers, in it (mean "
            f"{own['mean']!r}, std {own['std']!r}) or in its weights. Write them into config.json, or say "
            f"--normalize-reward no."
        )
    if kind != "linear-head" and normalize != "no" and (normalize == "yes" or (said is True and (mean, std) != (0, 1))):
        asked = "--normalize-reward yes" if normalize == "yes" else "its configuration says normalize_reward"
        raise ArtifactError(
            f"{folder}: {asked} (mean {mean:g}, std {std:g}), and the head was read as {kind}, whose scores no project "
            f"normalises. Say --layout openrlhf --head score if OpenRLHF trained a head called score, or "
            f"--normalize-reward no."
        )
    if normalize == "no" or kind != "linear-head" or (mean, std) == (0.0, 1.0):
        return 0.0, 1.0
    if normalize == "auto" and not isinstance(said, bool):
        raise ArtifactError(
            f"{folder}: it holds mean {mean:g} and std {std:g}, and its configuration has no normalize_reward that "
            f"says whether scores are normalised by them. Say --normalize-reward yes or no."
        )
    if normalize == "auto" and not said:
        return 0.0, 1.0
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ArtifactError(f"{folder}: scores cannot be normalised by mean {mean:g} and std {std:g}.")
    return mean, std
