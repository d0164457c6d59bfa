"""Checks that config.json of a reward-model folder means the same to every engine, old or new.

Engines read the same setting from different fields: position settings moved in transformers 5, and each library has its
own field for an activation function. A wrong value in a field that only some engines read would change their scores,
while the canaries, which are computed here, stay right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.faults import FAULTS
from rewardlab.core.errors import ArtifactError
from rewardlab.core.schema import MAX_BYTES, read_object, typed
from rewardlab.core.spec import DAMAGED, REMEDY, RewardSpec
from rewardlab.model.disk_class import name_for_engines

CONFIG: Final = "config.json"
LARGEST: Final = {"tokenizer.json": 256 << 20, ".json": MAX_BYTES, ".jinja": 1 << 20}
"""Largest size in bytes of files that are read into memory as a whole, by name or by ending."""
OLDER_ROPE: Final = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
)
"""Fields in which transformers 4 looks for position settings. Where one is missing, it takes a default silently."""
KNOWN_THEN: Final = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
"""Kinds of positions that transformers 4 has. Models with a newer one are read by transformers 5 alone, which takes the
older fields for settings of their own."""
NEUTRAL: Final = {"partial_rotary_factor": 1, "rotary_pct": 1}
"""Values of these fields that mean the same as leaving the field out."""
ACTIVATIONS: Final = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Fields in which sentence-transformers and vLLM look for a function to apply to the score."""


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """The fields that decide how an engine reads the score, with their types; all others belong to the architecture."""

    model_type: str
    architectures: list[str]
    id2label: dict[str, str] | None = None
    problem_type: str | None = None
    num_labels: int | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    text_config: dict[str, Any] | None = None


def require_sizes(path: Path) -> None:
    """Raise ArtifactError if a JSON or template file of the folder is larger than LARGEST allows."""
    for file in sorted(path.iterdir()):
        most = LARGEST.get(file.name, LARGEST.get(file.suffix))
        if most is not None and file.is_file() and (size := file.stat().st_size) > most:
            raise ArtifactError(f"{file}: it has {size} bytes, and at most {most} are allowed. {REMEDY}")


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises ArtifactError if it is missing or not a JSON object.
    """
    if not (path / CONFIG).is_file():
        raise ArtifactError(f"{path}: {CONFIG} is missing. {REMEDY}")
    return read_object(path / CONFIG, DAMAGED)


def require_config(path: Path, spec: RewardSpec) -> int:
    """Return the id of the pad token.

    Raises ArtifactError unless config.json makes every engine return the raw score, read at the final token.
    """
    file = path / CONFIG
    values = read_config_file(path)
    config = typed(_Engine, values, where=str(file), refusal=DAMAGED, open_ended=True)
    labels, problem = config.id2label or {}, config.problem_type
    if len(labels) != 1 or config.num_labels not in (None, 1) or problem != "regression":
        count = len(labels) if config.num_labels in (None, 1) else config.num_labels
        raise ArtifactError(
            f"{file}: {count} labels and problem_type {problem!r:.60}, wanted 1 and 'regression'; engines would "
            f"return a probability instead of the score ({FAULTS['sigmoid']}). {REMEDY}"
        )
    if extra := [name for name in ACTIVATIONS if _applies(values.get(name))]:
        raise ArtifactError(
            f"{file}: {extra[0]} names a function that engines would apply to the score, which has to stay as it is "
            f"({FAULTS['sigmoid']}). {REMEDY}"
        )
    # Engines find the end of a conversation as its last token that is not padding. If the pad token were also the final
    # token, they would skip the final token and read the score one token too early.
    pad = values.get("pad_token_id", (config.text_config or {}).get("pad_token_id"))
    final, ends = spec.renderer.final_token_id, {canary.token_ids[-1] for canary in spec.canaries}
    if not isinstance(pad, int) or pad == final or pad in ends:
        raise ArtifactError(
            f"{file}: pad_token_id {pad!r:.60} must be set and differ from the final token {final} of every rendering, "
            f"or the score is read one token too early ({FAULTS['shifted_position']}). {REMEDY}"
        )
    return pad


def require_agreement(path: Path, spec: RewardSpec, model_config: Any, disk_class: Any) -> None:
    """Raise ArtifactError if config.json describes to other engines a model that differs from the one loaded here.

    `model_config` is the configuration as transformers loaded it.
    """
    values = read_config_file(path)
    for name in ("dtype", "torch_dtype"):
        dtype = values.get(name)
        if dtype is not None and dtype.removeprefix("torch.") != spec.save_dtype:
            raise ArtifactError(
                f"{path / CONFIG}: {name} is {dtype!r:.60}, and the weights are saved in {spec.save_dtype}; engines "
                f"that follow this field would round them. {REMEDY}"
            )
    # Up to version 0.18 the name was that of the class in every case.
    if values["architectures"] not in ([name := name_for_engines(disk_class)], [disk_class.__name__]):
        raise ArtifactError(
            f"{path / CONFIG}: architectures is {values['architectures']!r:.80}, wanted [{name!r}], "
            f"the class of these weights; engines follow this field. {REMEDY}"
        )
    # The file's own rope_parameters are used if it has them: those of the loaded configuration may already contain
    # values that transformers took from the older fields.
    expected = older_rope(values if "rope_parameters" in values else model_config.to_dict())
    for name in OLDER_ROPE:
        value, wanted = values.get(name), expected.get(name, NEUTRAL.get(name))
        if value is not None and not _same(value, wanted):
            raise ArtifactError(
                f"{path / CONFIG}: {name} is {value!r:.80}, and by rope_parameters it should be {wanted!r:.80}: older "
                f"and newer engines would give different scores. {REMEDY}"
            )


def older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position settings of a configuration in the fields in which transformers 4 looks for them."""
    rope = config.get("rope_parameters")
    older: dict[str, Any] = {}
    # Gemma 3 has one set of settings for each kind of layer; transformers 4 has a separate field for the local ones.
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        local = rope.get("sliding_attention") or {}
        rope = rope["full_attention"]
        if "rope_theta" in local and rope.get("rope_type", "default") in KNOWN_THEN:
            older["rope_local_base_freq"] = local["rope_theta"]
    if not isinstance(rope, dict) or "rope_theta" not in rope or rope.get("rope_type", "default") not in KNOWN_THEN:
        return older
    older["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        # Phi-3 in transformers 4 refuses a rope_scaling with other fields than type, short_factor and long_factor; it
        # reads the two that are removed here from the top level.
        if config.get("model_type") == "phi3":
            scaling["type"] = scaling.pop("rope_type")
            for name in ("original_max_position_embeddings", "partial_rotary_factor"):
                scaling.pop(name, None)
        older["rope_scaling"] = scaling
    if "partial_rotary_factor" in rope:
        older |= {"partial_rotary_factor": rope["partial_rotary_factor"], "rotary_pct": rope["partial_rotary_factor"]}
        older["rotary_emb_base"] = rope["rope_theta"]
    return older


def _applies(named: object) -> bool:
    """Return whether a field names an activation function other than the identity."""
    function = named.get("activation_fn") if isinstance(named, dict) else named
    return function is not None and not str(function).endswith("Identity")


def _same(value: Any, wanted: Any) -> bool:
    """Return whether two settings are equal: 1 equals 1.0, True does not equal 1, and lists and objects item by
    item."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_same(value[name], wanted[name]) for name in value)
    if isinstance(value, list) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(_same(a, b) for a, b in zip(value, wanted, strict=True))
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
