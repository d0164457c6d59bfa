"""config.json of a reward-model folder: what every engine, old or new, reads off it, says one thing.

Engines take the same setting from different fields: position settings have one place in transformers 5 and others
before, an activation has a field for each library. A field that only some engines read would give them another score
while the canaries, which one engine computes, stay right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rewardlab.artifact.canaries import FAULTS
from rewardlab.core.errors import ArtifactError
from rewardlab.core.schema import MAX_BYTES, read_object, typed
from rewardlab.core.spec import DAMAGED, REMEDY, RewardSpec

CONFIG: Final = "config.json"
LARGEST: Final = {"tokenizer.json": 256 << 20, ".json": MAX_BYTES, ".jinja": 1 << 20}
"""Bytes that a file may have which is read into memory as a whole, by its name or its ending."""
OLDER_ROPE: Final = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
)
"""Where transformers 4 looks for position settings; it silently drops those it cannot find."""
NEUTRAL: Final = {"partial_rotary_factor": 1, "rotary_pct": 1}
"""What says as much as nothing does."""
ACTIVATIONS: Final = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Where sentence-transformers and vLLM look for a function to apply to the score."""


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """Fields that decide how an engine reads the score, with their types; all others are the architecture's."""

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
    """Raise ArtifactError for a file of the folder that is too large to be what its name says."""
    for file in sorted(path.iterdir()):
        most = LARGEST.get(file.name, LARGEST.get(file.suffix))
        if most is not None and file.is_file() and (size := file.stat().st_size) > most:
            raise ArtifactError(f"{file}: it has {size} bytes, and at most {most} are read. {REMEDY}")


def read_config_file(path: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises ArtifactError if it is missing or no object.
    """
    if not (path / CONFIG).is_file():
        raise ArtifactError(f"{path}: {CONFIG} is missing. {REMEDY}")
    return read_object(path / CONFIG, DAMAGED)


def require_config(path: Path, spec: RewardSpec) -> int:
    """The pad token.

    Raises ArtifactError unless config.json makes every engine return the raw score of the right token.
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
            f"{file}: {extra[0]} names a function that engines would apply to the score, which is to stay as it is "
            f"({FAULTS['sigmoid']}). {REMEDY}"
        )
    pad = values.get("pad_token_id", (config.text_config or {}).get("pad_token_id"))
    final, ends = spec.renderer.final_token_id, {canary.token_ids[-1] for canary in spec.canaries}
    if not isinstance(pad, int) or pad == final or pad in ends:
        raise ArtifactError(
            f"{file}: pad_token_id {pad!r:.60} must be set and differ from the final token {final} of every rendering, "
            f"or the score is read one token too early ({FAULTS['shifted_position']}). {REMEDY}"
        )
    return pad


def require_agreement(path: Path, spec: RewardSpec, model_config: Any, disk_class: Any) -> None:
    """Raise ArtifactError if config.json tells other engines of another model than `model_config`, the loaded one's."""
    values = read_config_file(path)
    for name in ("dtype", "torch_dtype"):
        dtype = values.get(name)
        if dtype is not None and dtype.removeprefix("torch.") != spec.save_dtype:
            raise ArtifactError(
                f"{path / CONFIG}: {name} is {dtype!r:.60}, and the weights are saved in {spec.save_dtype}; engines "
                f"that go by it would round them. {REMEDY}"
            )
    if values["architectures"] != [disk_class.__name__]:
        raise ArtifactError(
            f"{path / CONFIG}: architectures is {values['architectures']!r:.80}, wanted [{disk_class.__name__!r}], "
            f"which has these weights; engines go by it. {REMEDY}"
        )
    # As the file has them: transformers adds to its own what stands in other fields.
    told = older_rope(values if "rope_parameters" in values else model_config.to_dict())
    for name in OLDER_ROPE:
        found, wanted = values.get(name), told.get(name, NEUTRAL.get(name))
        if found is not None and not _same(found, wanted):
            raise ArtifactError(
                f"{path / CONFIG}: {name} is {found!r:.80}, and the positions of the model say {wanted!r:.80}: engines "
                f"that read the one would give other scores than those that read the other. {REMEDY}"
            )


def older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The position settings of a configuration under the names by which transformers 4 looks for them."""
    rope = config.get("rope_parameters")
    older: dict[str, Any] = {}
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):  # one for each kind of layer: Gemma 3
        local = rope.get("sliding_attention") or {}
        older |= {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        rope = rope["full_attention"]
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return older
    older["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        if config.get("model_type") == "phi3":  # refuses every field but three
            scaling["type"] = scaling.pop("rope_type")
            for name in ("original_max_position_embeddings", "partial_rotary_factor"):
                scaling.pop(name, None)  # stands at the top level
        older["rope_scaling"] = scaling
    if "partial_rotary_factor" in rope:
        older |= {"partial_rotary_factor": rope["partial_rotary_factor"], "rotary_pct": rope["partial_rotary_factor"]}
        older["rotary_emb_base"] = rope["rope_theta"]
    return older


def _applies(named: object) -> bool:
    """Whether what a field says of an activation is more than nothing."""
    function = named.get("activation_fn") if isinstance(named, dict) else named
    return function is not None and not str(function).endswith("Identity")


def _same(found: Any, wanted: Any) -> bool:
    """Whether two settings are equal, as numbers or item by item."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[name], wanted[name]) for name in found)
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(_same(a, b) for a, b in zip(found, wanted, strict=True))
    return isinstance(found, bool) == isinstance(wanted, bool) and bool(found == wanted)
