"""`reward_spec.json`: everything besides the weights that decides what score a conversation gets.

A reward is weights + head + pooled position + exact tokens + activation/affine. The spec records the parts that
a plain checkpoint loses, and canaries: conversations with their tokens and scores, by which any copy of the
model, in any engine, can be checked (docs/design/artifact.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import sha256_json, sha256_text, to_json
from rewardlab.core.schema import Refusal, read_object, typed
from rewardlab.core.terminal import listed, quoted, short

SPEC_FILE = "reward_spec.json"
SCHEMA_VERSION = 2
UNPROTECTED = 1
"""The schema version before specs had digests and canaries had reference scores in half precision."""
SOURCES: Final = ("tokenizer", "plain", "concat")
ROUNDINGS: Final = ("none", "stochastic", "nearest")
MAX_CANARIES: Final = 64
MAX_CANARY_TOKENS: Final = 16_384
"""Most tokens of a canary. All canaries are computed whenever a folder is checked."""
WANTED: Final = "Give the folder that `rewardlab train` wrote (…/best or …/step_N)."
REMEDY: Final = "Restore the folder from where it was saved, or save the model again."
DAMAGED: Final = Refusal(error=ArtifactError, remedy=REMEDY)
"""The error for a file of a reward-model folder that is not as it was saved."""

CUT_BY_STEPS = "oldest_turns_first"
"""The truncation of older models: a turn loses as many tokens as are in excess, repeatedly until it fits, which
sometimes cuts one token more than necessary."""
CUT_FEWEST = "oldest_turns_first_fewest_tokens"
"""The truncation of newer models: a turn loses the fewest tokens that suffice."""
CUT_MIDDLE = "reply_middle_fewest_tokens"
"""The prompt stays whole, and the middle of the last turn goes: the fewest tokens that suffice."""
LEAVE_OUT = "drop"
"""Nothing is cut: conversations above the limit are left out and counted in training, and refused in scoring."""
STOP = "error"
"""Nothing is cut: a conversation above the limit ends a training run, and is refused in scoring."""
REFUSING: Final = (LEAVE_OUT, STOP)
"""The truncations that cut nothing. A caller that asks for a cut all the same gets that of `CUT_FEWEST`."""
TRUNCATIONS: Final = (CUT_BY_STEPS, CUT_FEWEST, CUT_MIDDLE, *REFUSING)
TRUNCATION_OF: Final[Mapping[str, str]] = {
    "prompt-left": CUT_FEWEST,
    "drop": LEAVE_OUT,
    "error": STOP,
    "reply-middle": CUT_MIDDLE,
}
"""Value of `--truncation` -> what the spec of a newer model says."""

OutputAs = Literal["raw", "calibrated", "probability"]
"""What a score may be: itself; or the log odds, or the probability, that a reply is a preferred one, by the calibration
that is stored in the model."""

SCORE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.05}
"""How far a score computed in this dtype may be from the reference of that dtype, in units of `max(1, |score|)`.

The weights are the same. The tolerance covers the differences between kernels and, in half precision, between engines
that do more or less of the arithmetic in it (measurements: docs/one-score.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererSpec:
    """How messages become token ids."""

    chat_template: str
    """Jinja text, as saved with the tokenizer."""
    template_source: str
    """`tokenizer` for the model's own template or one given in its place, `plain` for the built-in transcript format,
    `concat` for bare texts."""
    template_arguments: dict[str, object] = field(default_factory=dict)
    """Keyword arguments that every rendering passes to the template."""
    system_prompt: str | None = None
    """System turn added to conversations that have none; None adds none."""
    max_length: int
    """Tokens a conversation may have after truncation."""
    truncation: str = CUT_FEWEST
    """One of `TRUNCATIONS`: what becomes of conversations above `max_length`, in training and wherever they are scored.
    Older models keep `CUT_BY_STEPS`."""
    final_token_id: int | None
    """Last token of every rendering, where the score is read; None if renderings end differently."""
    bos_token_id: int | None
    num_bos: int
    """How many BOS tokens every rendering begins with: 0 or 1."""
    special_tokens_in_text: Literal["text", "keep"] = "keep"
    """How control tokens typed in messages are read: as ordinary text (`text`), or as control tokens (`keep`, which is
    also the meaning of a folder without this entry)."""

    @property
    def joins_texts(self) -> bool:
        """Return whether texts are joined as they are, so that a transcript stays one text and is not split into
        turns."""
        return self.template_source == "concat"

    @property
    def template_hash(self) -> str:
        """The hex SHA-256 of the template text."""
        return sha256_text(self.chat_template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A built-in conversation, its tokens, its canonical score, and its score under each known fault."""

    name: str
    messages: list[dict[str, str]]
    token_ids: list[int]
    score: float
    """Score of the saved weights, computed in float32."""
    decoys: dict[str, float]
    """Fault name -> score under that fault."""
    references: dict[str, float] = field(default_factory=dict)
    """dtype -> score of the saved weights in the half precision of this dtype, as rewardlab computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCanary:
    """A built-in conversation above a limit of its own, and the tokens that the rule of truncation leaves of it.

    It has no score: which tokens are read does not depend on the weights.
    """

    name: str
    messages: list[dict[str, str]]
    max_length: int
    """The limit to which it is cut, below that of the model, so that it stays short."""
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec:
    """Where `temperature` and `affine` of a spec come from, and the scores that they were fitted on."""

    reward_mean: float
    """Mean of the raw scores of the replies that were fitted on, for RL."""
    reward_std: float
    """Their standard deviation."""
    num_replies: int
    num_comparisons: int
    precision: str
    """Arithmetic in which they were scored: `fp32`, `bf16` or `fp16`."""
    data: dict[str, Any]
    """Purpose (`fitted`, `judged`) -> datasets, as in a manifest."""
    judged: dict[str, Any]
    """The judgement of the calibration on data that it was not fitted on, with intervals."""


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
    """How the weights were rounded to `save_dtype`: `none` if they are as trained, `stochastic`, or `nearest`."""
    exported_from: dict[str, str] | None = None
    """Origin of an exported folder: `folder`, `save_dtype`, and `spec_sha256` of its spec's bytes. Otherwise None."""
    temperature: float = 1.0
    """Temperature fitted on held-out data: σ(beta · score difference / temperature) is calibrated; 1 where none was
    fitted. Scores are not divided by it."""
    affine: tuple[float, float] | None = None
    """(scale, shift) fitted on held-out data: σ(scale · score + shift) is the probability that a reply is a preferred
    one; None where none was fitted. Scores are raw unless a consumer is asked for calibrated ones."""
    calibration: CalibrationSpec | None = None
    """Where the two come from; None where none was fitted, and then the file has no such entry."""
    max_rounding_error: float
    """Largest distance on the canaries between the scores before and after rounding to `save_dtype`."""
    canaries: list[Canary]
    cut_canaries: list[CutCanary] = field(default_factory=list)
    """Conversations by which the rule of truncation is checked; older folders have none, and then no such entry."""
    files: dict[str, str]
    """File name -> SHA-256 of everything else in the folder that decides the score."""
    provenance: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    """Part of this spec -> SHA-256 (`part_digests`). Their own digest is stored in config.json and with the weights."""

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as a JSON mapping."""
        values = asdict(self)
        values["renderer"]["template_hash"] = self.renderer.template_hash
        # Folders without a calibration, or without conversations to cut, are the same files as before these existed.
        if self.calibration is None:
            del values["calibration"]
        if not self.cut_canaries:
            del values["cut_canaries"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> RewardSpec:
        """Return the spec from a JSON mapping: the inverse of `to_dict`. `where` names the file in messages.

        Raises ArtifactError for another schema version, no canaries, an edited template, or a field that is missing,
        unknown, of another type, or outside its possible values.
        """
        version = values.get("schema_version")
        if isinstance(version, bool) or version not in (UNPROTECTED, SCHEMA_VERSION):
            raise ArtifactError(
                f"{where}: schema version {version!r:.60}; this rewardlab reads {UNPROTECTED} and {SCHEMA_VERSION}. "
                f"Use the rewardlab version that wrote it, or save the model again."
            )
        if not values.get("canaries"):
            raise ArtifactError(
                f"{where}: it holds no canaries, so the scores of the model cannot be verified. "
                f"Restore the file, or save the model again."
            )
        if version == UNPROTECTED:
            # That version recorded no rounding, and always rounded to the nearest.
            values = {"rounding": "none" if values.get("save_dtype") == "float32" else "nearest", **values}
        renderer, template_hash = values.get("renderer"), None
        if isinstance(renderer, Mapping):
            # The hash of the template is not a field of `RendererSpec`, since it follows from the template.
            template_hash = renderer.get("template_hash")
            values = {**values, "renderer": {name: v for name, v in renderer.items() if name != "template_hash"}}
        spec = typed(cls, values, where=where, refusal=DAMAGED)
        if spec.renderer.template_hash != template_hash:
            raise ArtifactError(
                f"{where}: the chat template does not match its recorded hash; the file was edited after it was "
                f"saved. Restore it, or save the model again."
            )
        for wrong in _implausible(spec):
            raise DAMAGED.of(f"{where}: {wrong}.")
        return spec


def _implausible(spec: RewardSpec) -> Iterator[str]:
    """Yield a sentence for each field whose value has the right type but is not possible."""
    renderer = spec.renderer
    rules = {
        "renderer.truncation": (renderer.truncation, renderer.truncation in TRUNCATIONS, one_of(TRUNCATIONS)),
        "renderer.template_source": (renderer.template_source, renderer.template_source in SOURCES, one_of(SOURCES)),
        "renderer.max_length": (renderer.max_length, renderer.max_length >= 1, "at least 1"),
        "renderer.num_bos": (renderer.num_bos, renderer.num_bos in (0, 1), "0 or 1"),
        "beta": (spec.beta, spec.beta > 0, "above 0"),
        "head_dtype": (spec.head_dtype, spec.head_dtype in SCORE_TOLERANCE, one_of(SCORE_TOLERANCE)),
        "save_dtype": (spec.save_dtype, spec.save_dtype in SCORE_TOLERANCE, one_of(SCORE_TOLERANCE)),
        "rounding": (spec.rounding, spec.rounding in ROUNDINGS, one_of(ROUNDINGS)),
        "temperature": (spec.temperature, spec.temperature > 0, "above 0"),
        "affine": (spec.affine, spec.affine is None or spec.affine[0] > 0, "a scale above 0"),
        "max_rounding_error": (spec.max_rounding_error, spec.max_rounding_error >= 0, "at least 0"),
    }
    several: dict[str, Sequence[Canary | CutCanary]] = {"canaries": spec.canaries, "cut_canaries": spec.cut_canaries}
    rules |= {
        name: (f"{len(canaries)} of them", len(canaries) <= MAX_CANARIES, f"at most {MAX_CANARIES}")
        for name, canaries in several.items()
    }
    for name, (found, plausible, expected) in rules.items():
        if not plausible:
            yield f"{name}: expected {expected}, found {found!r:.60}"
    for name, canaries in several.items():
        for number, canary in enumerate(canaries):
            for wrong in _implausible_canary(canary):
                yield f"{name}[{number}].{wrong}"


def _implausible_canary(canary: Canary | CutCanary) -> Iterator[str]:
    """Yield a sentence for each field of a canary whose value is not possible, beginning with its name."""
    count = len(canary.token_ids)
    if not 1 <= count <= MAX_CANARY_TOKENS:
        yield f"token_ids: expected 1 to {MAX_CANARY_TOKENS} tokens, found {count}"
    if any(not 0 <= token < 2**31 for token in canary.token_ids):
        yield "token_ids: expected token ids, found a number outside 0 to 2**31 - 1"
    if not canary.messages or any(set(message) != {"role", "content"} for message in canary.messages):
        yield "messages: expected one message or more, each with a role and a content"
    if isinstance(canary, CutCanary) and not count <= canary.max_length:
        yield f"max_length: expected at least its {count} tokens, found {canary.max_length}"


def one_of(names: Mapping[str, object] | tuple[str, ...]) -> str:
    """Return the names as part of a sentence: `one of a, b`."""
    return f"one of {', '.join(names)}"


def carries_digest(name: str) -> bool:
    """Return whether a file of the folder holds the digest of the spec, so that the spec's digest cannot cover its
    hash."""
    return name == "config.json" or ("/" not in name and name.endswith(".safetensors"))


def part_digests(spec: RewardSpec) -> dict[str, str]:
    """Return part of the spec -> SHA-256 of its canonical JSON, with one digest for each part of the renderer.

    One digest a part lets a message name the part that was changed. The digests themselves are left out, and in
    `files` the hashes (but not the names) of the files that hold the digest of the spec.
    """
    # Digests are taken over the values as they will be read back: tuples become lists.
    values = json.loads(to_json(spec.to_dict(), indent=None))
    del values["digests"]
    values["files"] = {name: None if carries_digest(name) else digest for name, digest in values["files"].items()}
    values |= {f"renderer.{name}": value for name, value in values.pop("renderer").items()}
    # Folders saved before this entry existed have no digest of it. They mean `keep`, so `keep` gets no digest either.
    if values["renderer.special_tokens_in_text"] == "keep":
        del values["renderer.special_tokens_in_text"]
    return {name: sha256_json(value) for name, value in values.items()}


def parts_by_default(spec: RewardSpec) -> set[str]:
    """Return the parts that have their default value. A file older than a field lacks it, so it means the default."""
    return {
        prefix + item.name
        for prefix, part in (("", spec), ("renderer.", spec.renderer))
        for item in fields(part)
        if (item.default is not MISSING and getattr(part, item.name) == item.default)
        or (item.default_factory is not MISSING and getattr(part, item.name) == item.default_factory())
    }


def read_spec(folder: Path) -> RewardSpec:
    """Return the spec of a reward-model folder.

    Raises ArtifactError if there is no spec or it is damaged.
    """
    path = folder / SPEC_FILE
    if not path.is_file():
        if left := sorted(folder.parent.glob(f".{folder.name}.old-*")):
            raise ArtifactError(
                f"{folder} is not there, but {left[-1]} is: a save was interrupted while it replaced the folder. "
                f"Rename the latter to {folder.name} to have the previous model back."
            )
        if not folder.exists():
            _require_no_address(folder)
            near = _models_near(folder) or _address(folder) or f" {WANTED} A base model gives no scores."
            raise ArtifactError(f"{folder}: no such folder.{near}")
        raise ArtifactError(f"{folder}: no {SPEC_FILE}, so {_without_spec(folder)}{_models_near(folder / 'best')}")
    return RewardSpec.from_dict(read_object(path, DAMAGED), where=str(path))


def _without_spec(folder: Path) -> str:
    """Return what a folder without a spec is, by the class in its config.json, and what to do with it."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return (
            f"these are adapters alone, without the model that scores. {WANTED} In it lie the merged weights, beside "
            f"its folder adapter/. Those of another project are merged by `rewardlab import {quoted(str(folder))} "
            f"--output-dir NEW`."
        )
    try:
        names = read_object(folder / "config.json", DAMAGED).get("architectures")
    except (ArtifactError, OSError):
        names = None
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name:
        return f"this is not a rewardlab reward model. {WANTED}"
    path = quoted(str(folder))
    base = ""
    if name.endswith("ForCausalLM"):
        base = f" A base model has no reward head: train it first (`rewardlab train --model {path} --dataset …`)."
    return (
        f"this {short(name)} is not a rewardlab reward model.{base} {WANTED} A reward model of another project becomes "
        f"one by `rewardlab import {path} --output-dir NEW`."
    )


def why_no_model(name: str) -> str:
    """Return why no model can be at a path; an empty text for a name that may be on a hub, and for a model's folder."""
    path = Path(name)
    if path.is_file():
        return "it is a file, and a model is a folder."
    if not path.is_dir():
        return "there is no such folder." if name.count("/") > 1 else ""
    config = path / "config.json"
    try:
        if isinstance(read_object(config, DAMAGED).get("model_type"), str):
            return ""
    except FileNotFoundError:
        return f"it holds no config.json.{_models_near(path / 'best')}"
    except (ArtifactError, OSError):  # the reader of the model says what is wrong with the file
        return ""
    return f"its config.json is not that of a model.{_models_near(path / 'best')}"


def _require_no_address(folder: Path) -> None:
    """Raise ArtifactError for the address of a server, of which a path keeps a single slash."""
    scheme, _, rest = str(folder).partition(":/")
    if scheme.lower() in ("http", "https"):
        address = f"{scheme}://{rest}"
        raise ArtifactError(
            f"{address}: this is the address of a server, and a reward-model folder is wanted here. A server is asked "
            f"by `rewardlab score --backend http --url {address}`, and in Python by rewardlab.client.RewardClient."
        )


def _address(folder: Path) -> str:
    """Return a hint for a name that looks like the address of a server."""
    name, colon, port = str(folder).rpartition(":")
    return f" If it is a server, write http://{folder}." if colon and name and port.isdigit() else ""


def _models_near(folder: Path) -> str:
    """Return ` Reward models in PARENT: …` with those beside `folder`; an empty text if there are none."""
    names = sorted(path.parent.name for path in folder.parent.glob(f"*/{SPEC_FILE}"))
    return f" Reward models in {folder.parent}: {listed(names, 5)}." if names else ""
