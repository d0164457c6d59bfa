"""`reward_spec.json`: everything beside the weights that decides what number a conversation gets.

A reward is weights + head + pooled position + exact tokens + activation/affine. The spec records the parts that
a plain checkpoint loses, and canaries: conversations with their tokens and scores, by which any copy of the
model, in any engine, can be checked (docs/design.md, section 6).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, sha256_json, sha256_text, to_json

SPEC_FILE = "reward_spec.json"
SCHEMA_VERSION = 2
UNPROTECTED = 1
"""The schema before specs had digests, and canaries references in half precision."""

CUT_BY_STEPS = "oldest_turns_first"
"""The truncation of older models: a turn loses as many tokens as are in excess, again until it fits, sometimes one more
than it has to."""
CUT_FEWEST = "oldest_turns_first_fewest_tokens"
"""A turn loses the fewest tokens that suffice."""

SCORE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.05}
"""How far a score computed in this dtype may be from the reference of that dtype, in units of `max(1, |score|)`.

The weights are the same; it covers other kernels, and in half precision how much of the arithmetic is in it
(docs/artifact.md says what was measured).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererSpec:
    """How messages become token ids."""

    chat_template: str
    """Jinja text, as saved with the tokenizer."""
    template_source: str
    """`tokenizer` for the model's own template, `plain` for the built-in transcript format, `concat` for bare texts."""
    template_arguments: dict[str, object] = field(default_factory=dict)
    """Keyword arguments frozen into every rendering."""
    system_prompt: str | None = None
    """System turn given to conversations that have none; None adds none."""
    max_length: int
    """Tokens a conversation may have after truncation."""
    truncation: str = CUT_FEWEST
    """Whole old turns go first, then the start of the oldest one left; never the reply or the system turn. Or
    `CUT_BY_STEPS`, which older models keep."""
    final_token_id: int | None
    """Last token of every rendering, where the score is read; None if renderings end differently."""
    bos_token_id: int | None
    num_bos: int
    """How many BOS tokens every rendering begins with: 0 or 1."""
    special_tokens_in_text: Literal["text", "keep"] = "keep"
    """What control tokens are that stand in messages: letters like any others, or, as in folders without this entry,
    the control tokens themselves."""

    @property
    def joins_texts(self) -> bool:
        """Whether texts are taken as they are, so that a transcript is a text and not its turns."""
        return self.template_source == "concat"

    @property
    def template_hash(self) -> str:
        """Hex SHA-256 of the template text."""
        return sha256_text(self.chat_template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A built-in conversation, its tokens, its canonical score, and what each known fault would make of it."""

    name: str
    messages: list[dict[str, str]]
    token_ids: list[int]
    score: float
    """From the saved weights, computed in float32."""
    decoys: dict[str, float]
    """Fault name -> score under that fault."""
    references: dict[str, float] = field(default_factory=dict)
    """dtype -> score of the saved weights in the half precision of this dtype, as rewardlab computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """The content of `reward_spec.json`."""

    schema_version: int = SCHEMA_VERSION
    renderer: RendererSpec
    beta: float
    """σ(beta · score difference) is the model's probability that the first reply is preferred."""
    head_dtype: str
    save_dtype: str
    rounding: str
    """How the weights came to `save_dtype`: `none` if they are as trained, `stochastic`, or `nearest`."""
    exported_from: dict[str, str] | None = None
    """Of the folder it was made from: `folder`, `save_dtype`, and `spec_sha256`, of its spec's bytes; else None."""
    temperature: float = 1.0
    """Fitted on held-out data; 1 where none was fitted."""
    affine: tuple[float, float] | None = None
    """(scale, shift) fitted on held-out data, applied to raw scores; None leaves them raw."""
    max_rounding_error: float
    """Largest distance on the canaries between the scores before and after rounding to `save_dtype`."""
    canaries: list[Canary]
    files: dict[str, str]
    """File name -> SHA-256 of everything else in the folder that decides the score."""
    provenance: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    """Part of this spec -> SHA-256 (`part_digests`). Their own digest stands in config.json and with the weights."""

    def to_dict(self) -> dict[str, Any]:
        """JSON mapping."""
        values = asdict(self)
        values["renderer"]["template_hash"] = self.renderer.template_hash
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> RewardSpec:
        """Inverse of `to_dict`.

        Raises ArtifactError for another schema version, missing or unknown fields, no canaries, or an edited template.
        """
        version = values.get("schema_version")
        if version not in (UNPROTECTED, SCHEMA_VERSION):
            raise ArtifactError(
                f"{where}: schema version {version!r}, this rewardlab reads {UNPROTECTED} and {SCHEMA_VERSION}. "
                f"Use the rewardlab version that wrote it, or save the model again."
            )
        if not values.get("canaries"):
            raise ArtifactError(
                f"{where}: it holds no canaries, so nothing could tell whether the scores are still those of the "
                f"model. Restore the file, or save the model again."
            )
        if version == UNPROTECTED:  # which rounded to the nearest
            values = {"rounding": "none" if values.get("save_dtype") == "float32" else "nearest", **values}
        try:
            renderer = dict(values["renderer"])
            template_hash = renderer.pop("template_hash")
            spec = cls(
                **{
                    **values,
                    "renderer": RendererSpec(**renderer),
                    "canaries": [Canary(**canary) for canary in values["canaries"]],
                    "affine": tuple(values["affine"]) if values["affine"] is not None else None,
                }
            )
        except (KeyError, TypeError) as error:
            known = ", ".join(item.name for item in fields(cls))
            raise ArtifactError(f"{where}: not a complete reward spec ({error}). Fields: {known}.") from error
        if spec.renderer.truncation not in (CUT_BY_STEPS, CUT_FEWEST):
            raise ArtifactError(
                f"{where}: the truncation {spec.renderer.truncation!r} is unknown; this rewardlab has {CUT_BY_STEPS} "
                f"and {CUT_FEWEST}. Use the rewardlab version that wrote it."
            )
        if spec.renderer.template_hash != template_hash:
            raise ArtifactError(
                f"{where}: the chat template does not match its recorded hash; the file was edited after it was "
                f"saved. Restore it, or save the model again."
            )
        return spec


def carries_digest(name: str) -> bool:
    """Whether a file of the folder holds the digest of the spec, so that its own hash cannot be in there."""
    return name == "config.json" or ("/" not in name and name.endswith(".safetensors"))


def part_digests(spec: RewardSpec) -> dict[str, str]:
    """Part of the spec -> SHA-256 of its canonical JSON; the renderer's parts each on their own.

    A part that is changed is named by its own digest. Left out are the digests themselves, and of `files` the hashes
    of those files that hold the digest of all this (but not their names).
    """
    values = json.loads(to_json(spec.to_dict()))  # as it will be read back
    del values["digests"]
    values["files"] = {name: None if carries_digest(name) else digest for name, digest in values["files"].items()}
    values |= {f"renderer.{name}": value for name, value in values.pop("renderer").items()}
    if values["renderer.special_tokens_in_text"] == "keep":  # what holds where there is no such entry
        del values["renderer.special_tokens_in_text"]
    return {name: sha256_json(value) for name, value in values.items()}


def read_spec(folder: Path) -> RewardSpec:
    """The spec of a reward-model folder.

    Raises ArtifactError if there is none or it is damaged.
    """
    path = folder / SPEC_FILE
    if not path.is_file():
        if left := sorted(folder.parent.glob(f".{folder.name}.old-*")):
            raise ArtifactError(
                f"{folder} is not there, but {left[-1]} is: a save was interrupted while it replaced the folder. "
                f"Rename the latter to {folder.name} to have the previous model back."
            )
        raise ArtifactError(
            f"{folder}: no {SPEC_FILE}, so this is not a rewardlab reward model. "
            f"Give the folder that `rewardlab train` wrote (…/best or …/step_N)."
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: expected a JSON object.")
    return RewardSpec.from_dict(values, where=str(path))
