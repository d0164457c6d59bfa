"""Adapters of PEFT on a sequence classifier, such as TRL's RewardTrainer leaves with a `peft_config`.

Such a folder holds the trained head and the adapters. Base model, pad token and rendering are elsewhere, or nowhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.artifact.foreign.convert import in_our_form
from rewardlab.artifact.foreign.layouts import HEAD_FILES, KINDS_OF, ForeignModel, counts_of, require_living_head
from rewardlab.artifact.foreign.weights import Entry, entries_in, read_weight
from rewardlab.artifact.peft_folder import (
    BASE,
    OLDER_WEIGHTS,
    REVISION,
    WEIGHTS,
    find_base,
    load_base,
    put_on,
    scores_of,
)
from rewardlab.core.errors import ArtifactError, ModelError
from rewardlab.core.files import sha256_file
from rewardlab.core.schema import read_object
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.core.types import IntArray
from rewardlab.core.values import require
from rewardlab.data.chat import load_tokenizer
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.files import ADAPTER_CONFIG, CONFIG, DAMAGED_BASE, require_same_sizes, told, weight_files
from rewardlab.model.hub import commit_of
from rewardlab.model.load import read_config
from rewardlab.model.reward import HEAD_ON_DISK, RewardModel, width_of

logger = logging.getLogger("rewardlab")
MERGED: Final = ("LORA", "LOHA", "LOKR", "OFT", "IA3")
"""Kinds of adapters whose file is complete, and which PEFT merges into the weights."""
UNMERGEABLE: Final[Mapping[str, str]] = {
    "alora_invocation_tokens": "they act on some tokens alone, so they cannot be merged",
    "layer_replication": "they make several layers of one, which share their weights, so they cannot be merged",
}
"""Fields of adapter_config.json that no merge can follow -> why."""
TASK: Final = "SEQ_CLS"
HEAD_KEY: Final = re.compile(rf"(base_model\.model\.)?{HEAD_ON_DISK}(\.modules_to_save(\.default)?)?\.weight")
"""Names of the trained head in the file of the adapters, by newer and older versions of PEFT."""
TOKENIZER_FILES: Final = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(kw_only=True)
class AdapterModel:
    """Adapters and the base model that they are put on."""

    found: ForeignModel
    """The classifier that the two make; its folder is that of the adapters, and its configuration has their pad."""
    settings: Mapping[str, Any]
    """The content of adapter_config.json."""
    model: str
    """The base model: a hub name or a folder."""
    base_said_by: str
    """What named it: `--base`, or adapter_config.json."""
    pad_said_in: str
    allowed: float = SCORE_TOLERANCE["float32"]
    """W x + B A x and (W + B A) x are rounded in different places."""
    _on_base: Any = field(default=None, repr=False)

    @property
    def words(self) -> str:
        head = f"{HEAD_ON_DISK}{self.found.outputs_in_words}"
        return f"{_kind(self.settings)} adapters and head {head} on {self.model}, named by {self.base_said_by}"

    def tokenizer(self) -> Any:
        return _tokenizer(self.found.folder, self.model)

    def own_scores(self, sequences: Sequence[IntArray]) -> list[float]:
        """Return the score of each sequence by PEFT, with the adapters beside the weights of the base model.

        Raises ModelError or ArtifactError if the two do not fit.
        """
        folder = self.found.folder
        pad = self.found.config.get_text_config().pad_token_id
        classifier = load_base(self.model, pad=pad)
        if len(self.found.counts) > 1:
            # Of the shape of the trained head, which PEFT puts in its place.
            _set_head(classifier, torch.zeros_like(self.found.rows))
        self._on_base = put_on(classifier, folder, self.model)
        with told(str(folder), "PEFT cannot compute its own score"):
            return scores_of(self._on_base, [tokens.tolist() for tokens in sequences], self.found.counts)

    def as_reward_model(self) -> RewardModel:
        """Return the model with its adapters merged by PEFT, in float32.

        Raises ArtifactError if PEFT cannot merge them, or if the head is then not the one in the file.
        """
        on_base, self._on_base = self._on_base, None
        assert on_base is not None, "own_scores put the adapters on the base model"
        try:
            classifier = on_base.merge_and_unload(safe_merge=True)
        except (RuntimeError, ValueError) as error:  # PEFT's own classes, for layers and settings without a merge
            said = " ".join(str(error).split()).rstrip(".")
            raise ArtifactError(f"{self.found.folder}: PEFT cannot merge these adapters: {said}.") from error
        if not torch.equal(classifier.get_submodule(HEAD_ON_DISK).weight, self.found.rows):
            raise ArtifactError(
                f"{self.found.folder}: after the merge the head is not the one in its file. It may have adapters of "
                f"its own, which is not supported."
            )
        _set_head(classifier, self.found.weight)
        return in_our_form(classifier)

    def origin(self) -> dict[str, Any]:
        folder = self.found.folder
        config = Path(self.model) / CONFIG
        base = {
            "name": self.model,
            "said_by": self.base_said_by,
            "commit": commit_of(self.model),
            "config_sha256": sha256_file(config) if config.is_file() else None,
        }
        adapter = {
            "kind": _kind(self.settings),
            BASE: self.settings.get(BASE),
            REVISION: self.settings.get(REVISION),
            "weights_sha256": sha256_file(_weights(folder)),
        }
        return {"config_sha256": sha256_file(folder / ADAPTER_CONFIG), "adapter": adapter, "base": base}


def holds_adapters(folder: Path) -> bool:
    """Return whether a folder holds adapters of PEFT."""
    return (folder / ADAPTER_CONFIG).is_file()


def open_adapters(folder: Path, settings: ImportConfig) -> AdapterModel:
    """Return the adapters in a folder with their base model, of which nothing but the configuration is read yet.

    Raises ArtifactError for adapters that make no reward model: without a trained head, of another task, of a kind that
    cannot be merged; and for a base model that is not there or quantised. ConfigError for settings of other layouts.
    """
    require(
        settings.normalize_reward != "yes" and "seq-cls" in KINDS_OF[settings.layout] and not settings.head,
        "--layout, --head, --normalize-reward: the head of adapters is that of a sequence classifier. Leave them out.",
    )
    values = read_object(folder / ADAPTER_CONFIG, DAMAGED_BASE)
    if (folder / CONFIG).is_file() and weight_files(folder):
        raise ArtifactError(
            f"{folder}: it holds adapters and a whole model, so it is not clear which is meant. Move {ADAPTER_CONFIG}, "
            f"or {CONFIG} and the model's weights, to another folder."
        )
    _require_kind(folder, values)
    key, head = _require_head(folder)
    counts = counts_of(f"{key} {list(head.shape)} in {head.file.name}", head.shape[0], folder, settings)
    said_by = ADAPTER_CONFIG if settings.base is None else "--base"
    named = values if settings.base is None else {BASE: settings.base}
    base = find_base(named, str(folder / ADAPTER_CONFIG) if settings.base is None else said_by)
    config = read_config(base)
    _require_plain(base, config)
    if head.shape[1] != (width := width_of(config)):
        raise ArtifactError(
            f"{folder}: its head is for hidden states of width {head.shape[1]}, and those of {base} are {width} wide. "
            f"Is this the base model that the adapters were trained on? Name it with --base."
        )
    if said_by == "--base" and values.get(BASE) not in (None, settings.base):
        logger.info("base model: %s, though %s names %s", base, folder / ADAPTER_CONFIG, values[BASE])
    config.num_labels = 1
    pad_said_in = _set_pad(folder, base, config)
    weight = read_weight(head, key)
    if not bool(torch.isfinite(weight).all()):
        raise ArtifactError(f"{folder}: {key} in {head.file.name} holds numbers that are not finite.")
    found = ForeignModel(
        folder=folder,
        kind="seq-cls",
        head=HEAD_ON_DISK,
        rows=weight,
        biases=torch.zeros(len(counts)),
        counts=counts,
        config=config,
        disk_class=disk_class_of(config),
        renamed=False,
    )
    require_living_head(found)
    _tell_untrained(_weights(folder))
    return AdapterModel(found=found, settings=values, model=base, base_said_by=said_by, pad_said_in=pad_said_in)


def _kind(settings: Mapping[str, Any]) -> str:
    """Return the kind of adapters in words."""
    plain = str(settings.get("peft_type"))
    more = [name for flag, name in (("use_dora", "DoRA"), ("use_rslora", "rsLoRA")) if settings.get(flag)]
    return " ".join(more) or ("LoRA" if plain == "LORA" else plain)


def _require_kind(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless these are adapters of a sequence classifier that PEFT can merge."""
    kind, task = settings.get("peft_type"), settings.get("task_type")
    if kind not in MERGED:
        raise ArtifactError(
            f"{folder / ADAPTER_CONFIG}: peft_type is {kind!r}, and only adapters that can be merged into weights are "
            f"imported: {', '.join(MERGED)}. Prompts and prefixes have no place in a model's weights."
        )
    if own := [name for name in HEAD_FILES if (folder / name).is_file()]:
        raise ArtifactError(
            f"{folder}: its head is in {own[0]}, as LLaMA-Factory's. Merge the adapters there, keep {own[0]} beside "
            f"the merged model, and import that."
        )
    if task not in (None, TASK):
        raise ArtifactError(
            f"{folder / ADAPTER_CONFIG}: task_type is {task!r}, and a reward model of PEFT is a sequence classifier "
            f"({TASK}). If these adapters were trained on one all the same, correct it there."
        )
    for name, why in UNMERGEABLE.items():
        if settings.get(name):
            raise ArtifactError(f"{folder / ADAPTER_CONFIG}: {name} is {settings[name]!r}: {why}.")
    if str(settings.get("init_lora_weights")).startswith("pissa_niter"):
        raise ArtifactError(
            f"{folder / ADAPTER_CONFIG}: init_lora_weights is {settings['init_lora_weights']!r}: PEFT takes what it "
            f"drew at random off the base model again, so no two loads are the same. Save them once more with "
            f"path_initial_model_for_weight_conversion of PEFT, which makes them plain LoRA."
        )


def _weights(folder: Path) -> Path:
    """Return the file of the adapters. Raises ModelError if there is none."""
    for name in (WEIGHTS, OLDER_WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    raise ModelError(f"{folder}: no weights beside {ADAPTER_CONFIG}: neither {WEIGHTS} nor {OLDER_WEIGHTS}.")


def _require_head(folder: Path) -> tuple[str, Entry]:
    """Return name and entry of the trained head. Raises ArtifactError if there is none."""
    file = _weights(folder)
    entries = entries_in(file)
    heads = [(name, entry) for name, entry in entries.items() if HEAD_KEY.fullmatch(name)]
    if not heads:
        others = sorted({name.rpartition(".")[0] for name in entries if ".layers." not in name and ".h." not in name})
        beside = f" Beside the layers it holds: {', '.join(others[:4])}." if others else ""
        raise ArtifactError(
            f"{file}: no trained head `{HEAD_ON_DISK}` among its weights, so every reward is lost: the base model's "
            f"would be drawn at random.{beside} Train again with modules_to_save=[{HEAD_ON_DISK!r}] in the "
            f"configuration of PEFT."
        )
    name, entry = heads[0]
    if len(entry.shape) != 2 or entry.shape[0] == 0:
        raise ArtifactError(
            f"{file}: {name} has shape {list(entry.shape)}, wanted [outputs, width of the hidden states]."
        )
    return name, entry


def _tell_untrained(file: Path) -> None:
    """Warn of LoRA's second matrices that are zero, as they are before training: such adapters change nothing."""
    seconds = {name: entry for name, entry in entries_in(file).items() if ".lora_B." in name}
    zero = [name for name, entry in seconds.items() if not bool(read_weight(entry, name).any())]
    if zero:
        logger.warning(
            "%s: %d of %d adapters are zero, such as %s, and change nothing in the base model. Training begins with "
            "such adapters, so these have not trained: look whether gradients reached them (with gradient "
            "checkpointing the base's inputs need enable_input_require_grads)",
            file,
            len(zero),
            len(seconds),
            zero[0],
        )


def _set_head(classifier: Any, weight: torch.Tensor) -> None:
    """Give a classifier a head with this weight, [outputs, width of the hidden states]."""
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = torch.nn.Parameter(weight)
    classifier.set_submodule(HEAD_ON_DISK, head)


def _require_plain(base: str, config: Any) -> None:
    """Raise ArtifactError for a base model that is quantised, or whose class has no head of this name; ModelError for
    a folder whose configuration and weights are of different models."""
    if getattr(config, "quantization_config", None) is not None:
        raise ArtifactError(
            f"{base}: the base model is quantised, and merging would round once more. Name the model that it was "
            f"quantised from with --base."
        )
    if Path(base).is_dir():
        require_same_sizes(Path(base), config, disk_class_of(config))
    with told(base, f"no model can be built from its {CONFIG}"), torch.device("meta"):
        classifier = disk_class_of(config)._from_config(config)
    if not hasattr(classifier, HEAD_ON_DISK):
        raise ArtifactError(
            f"{base}: {type(classifier).__name__} has no head `{HEAD_ON_DISK}`. Only causal models are supported."
        )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _tokenizer(folder: Path, base: str) -> Any:
    """Return the tokenizer beside the adapters, or that of the base model; likewise the chat template."""
    if not _has_tokenizer(folder):
        logger.info("tokenizer: that of %s, since there is none in %s", base, folder)
        return load_tokenizer(base)
    tokenizer = load_tokenizer(str(folder))
    if not tokenizer.chat_template and (of_base := load_tokenizer(base).chat_template):
        logger.warning("chat template: that of %s, since the tokenizer in %s has none", base, folder)
        tokenizer.chat_template = of_base
    return tokenizer


def _set_pad(folder: Path, base: str, config: Any) -> str:
    """Give the configuration the pad token of training, and return where it is said.

    Adapters have no configuration of their model. TRL sets the pad token of its tokenizer in the model, and saves that
    tokenizer beside the adapters.

    Raises ArtifactError if tokens were added in training, for which the base model has no embeddings.
    """
    text_config = config.get_text_config()
    if not _has_tokenizer(folder):
        return f"pad_token_id in the config.json of {base}"
    tokenizer = load_tokenizer(str(folder))
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= text_config.vocab_size:
        raise ArtifactError(
            f"{folder}: its tokenizer has tokens up to {highest}, and {base} has embeddings of "
            f"{text_config.vocab_size}: tokens were added in training. Merge these adapters in the project that "
            f"trained them (`merge_and_unload` of PEFT), and import the result."
        )
    if tokenizer.pad_token_id is None:
        return f"pad_token_id in the config.json of {base}"
    text_config.pad_token_id = tokenizer.pad_token_id
    return f"pad_token in its {TOKENIZER_FILES[0]}"
