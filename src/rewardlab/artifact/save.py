"""RewardModel -> a folder that Hugging Face, vLLM and SGLang load as it is, with its spec and canaries.

The folder is written under a temporary name, read back from the disk, scored, and only then given its name.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rewardlab.artifact.canaries import make_canaries, render_canaries, score_tokens, separated
from rewardlab.artifact.halves import HALVES, stored, with_half_precision
from rewardlab.artifact.load import assemble, require_head
from rewardlab.artifact.seal import METADATA, seal
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, replacing_folder, sha256_file, write_json
from rewardlab.core.spec import SCORE_TOLERANCE, SPEC_FILE, RewardSpec
from rewardlab.data.chat import Renderer
from rewardlab.model import lora
from rewardlab.model.config import ComputeConfig, ModelConfig
from rewardlab.model.quantization import num_weights
from rewardlab.model.reward import RewardModel, disk_state
from rewardlab.score import Scorer

PORTABLE_TOKENIZER: Final = "PreTrainedTokenizerFast"
"""Read by transformers 4 and 5 alike; version 5 writes a name that version 4 does not know."""
QUANTIZED: Final = ("quantization_config", "_pre_quantization_dtype")
PLAIN_COMPUTE: Final = ComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
"""Kernels by which canaries are scored: those that are there in every precision, on every machine."""
NOTABLE_ROUNDING: Final = 0.05
"""Rounding that moves a canary's score further than this, in units of max(1, |score|), is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """A model that trains in parts on several devices, as a whole copy of it on the CPU cannot be asked."""

    scores: Sequence[float]
    """`live_scores` of it."""
    device: torch.device
    """One of its devices."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The folder of which another is made."""

    folder: Path
    save_dtype: str

    def as_dict(self) -> dict[str, str]:
        """For the spec: where it was, the dtype of its weights, and the SHA-256 of its own spec."""
        digest = sha256_file(self.folder / SPEC_FILE)
        return {"folder": str(self.folder), "save_dtype": self.save_dtype, "spec_sha256": digest}


def save_reward_model(
    folder: Path,
    model: RewardModel,
    renderer: Renderer,
    *,
    beta: float,
    save_dtype: torch.dtype,
    provenance: Mapping[str, Any],
    adapter: tuple[ModelConfig, str] | Exported | None = None,
    live: Live | None = None,
) -> RewardSpec:
    """Write the model, adapters merged, as `folder`; an existing folder is replaced only at the very end.

    `adapter` = (settings, base model's name) also writes the unmerged adapters to `folder/adapter`; those of an
    exported folder are copied. `live` says what the model that trains does, where `model` is a copy of it.

    Raises ArtifactError if the folder would not give the model's own scores, float16 has not the range for its
    weights, or no pad token can be found; OSError if the disk is full. Either way nothing that was there is lost.
    """
    dtype_name = str(save_dtype).removeprefix("torch.")
    pad = choose_pad(renderer, model.config.vocab_size)
    with replacing_folder(folder) as temporary:
        written = _write_weights(temporary, model, save_dtype)
        _write_config(temporary, model, pad, dtype_name)
        _write_tokenizer(temporary, renderer, pad)
        exported = adapter if isinstance(adapter, Exported) else None
        if exported is not None and (exported.folder / "adapter").is_dir():
            shutil.copytree(exported.folder / "adapter", temporary / "adapter")
        elif isinstance(adapter, tuple):
            _write_adapter(temporary / "adapter", model, *adapter)
        draft = RewardSpec(
            renderer=renderer.spec,
            beta=beta,
            head_dtype=dtype_name,
            save_dtype=dtype_name,
            rounding="stochastic" if dtype_name in HALVES else "none",
            exported_from=exported.as_dict() if exported is not None else None,
            max_rounding_error=0.0,
            canaries=[],
            files={},
            provenance=dict(provenance),
        )
        require_head(temporary)
        where = _spare_device(model, live.device if live is not None else model.device)
        saved = assemble(
            temporary, draft, device=where, precision="fp32", attention_mode="padded", compute=PLAIN_COMPUTE
        )
        _require_same_weights(saved.model, written)
        scores = live.scores if live is not None else live_scores(model, renderer)
        # With weights held rounded or quantised, or in another arithmetic, the live model's scores are others.
        same = saved.model.compute_dtype == model.compute_dtype and model.read_originals is None
        spec = _complete(draft, saved, scores, same, temporary)
        write_json(temporary / SPEC_FILE, spec.to_dict())
    return spec


def verify_in_clean_process(folder: Path) -> None:
    """Run `rewardlab verify` on the folder in a fresh interpreter; ArtifactError with its words if it fails."""
    answer = subprocess.run(
        [sys.executable, "-m", "rewardlab", "verify", str(folder)], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise ArtifactError(f"{folder} does not pass verification in a clean process: {answer.stderr.strip()}")


def choose_pad(renderer: Renderer, num_embeddings: int) -> int:
    """A token that exists, is never the last of a rendering, and, where there is one, occurs in none.

    Hugging Face reads the score at the last token that is not padding, older versions before the first that is.

    Raises ArtifactError if there is none.
    """
    tokenizer, final = renderer.tokenizer, renderer.spec.final_token_id
    special = sorted(
        (token_id, token)
        for token, token_id in tokenizer.get_vocab().items()
        if token in set(tokenizer.all_special_tokens)
        or any(mark in token.lower() for mark in ("<pad", "[pad", "|pad", "_pad", "reserved", "unused"))
    )
    named = [token_id for token_id, token in special if "pad" in token.lower()]
    candidates = [
        int(candidate)
        for candidate in (
            tokenizer.pad_token_id,
            *named,
            tokenizer.unk_token_id,
            *(token_id for token_id, _ in special),
        )
        # Without a known final token any ordinary token may come last, but no special token does.
        if candidate is not None
        and candidate < num_embeddings
        and candidate != final
        and (final is not None or candidate != tokenizer.eos_token_id)
    ]
    if not candidates:
        raise ArtifactError(
            f"no token can serve as padding: every special token is also the final token {final} of a rendering, and "
            f"Hugging Face reads the score at the last token that is not padding. Use a chat template that ends in "
            f"another token."
        )
    rendered = {int(token) for _, _, token_ids in render_canaries(renderer) for token in token_ids}
    return next((candidate for candidate in candidates if candidate not in rendered), candidates[0])


def saved_dtype(wanted: str) -> torch.dtype:
    """The dtype for `--save-dtype`; `auto` is float32, the dtype of what was trained.

    Half the size has its price: once trained, no weight lies on a half-precision grid any more. Rounded to the nearest
    they would forget most of the training; rounded stochastically (model/rounding.py) they keep it, and scores move by
    the noise of that.
    """
    dtype: torch.dtype = torch.float32 if wanted == "auto" else getattr(torch, wanted)
    return dtype


def live_scores(model: RewardModel, renderer: Renderer) -> list[float]:
    """Scores of the canaries, in their order, by a model as it computes while it trains."""
    was_training = model.training
    model.eval()
    scores = score_tokens(model, [token_ids for _, _, token_ids in render_canaries(renderer)])
    model.train(was_training)
    return scores


def _complete(draft: RewardSpec, saved: Scorer, live: Sequence[float], live_is_same: bool, folder: Path) -> RewardSpec:
    """The spec with canaries of the saved weights, after comparing them with the live model, which computes the same
    way or not.
    """
    canaries = make_canaries(saved.model, saved.renderer)
    canaries = with_half_precision(canaries, saved.model, draft.save_dtype)
    error = max(abs(a.score - b) / max(1.0, abs(a.score)) for a, b in zip(canaries, live, strict=True))
    exact = live_is_same and draft.save_dtype == "float32"
    if exact and not error <= SCORE_TOLERANCE["float32"]:
        raise ArtifactError(
            f"the saved folder scores {error:.3g} away from the live model on the canaries, with the same weights and "
            f"arithmetic. It was not kept. Please report this with the model's name."
        )
    provenance = draft.provenance | {"faults_noticed": separated(canaries, tolerance=SCORE_TOLERANCE["float32"])}
    return seal(folder, replace(draft, max_rounding_error=error, canaries=canaries, provenance=provenance))


def _spare_device(model: RewardModel, device: torch.device) -> torch.device:
    """The device if a copy of the model in float32, and then in half precision too, fits there, else the CPU."""
    if device.type != "cuda":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    needed = 6 * sum(map(num_weights, model.parameters()))
    return device if free > 1.2 * needed else torch.device("cpu")


def _require_same_weights(saved: RewardModel, written: Mapping[str, Tensor]) -> None:
    """Raise ArtifactError unless what was read back is, bit for bit, what was to be written."""
    read = saved.state_dict()
    if different := sorted(set(read) ^ set(written)):
        raise ArtifactError(f"weights are missing or extra after reading the folder back: {different[:5]}.")
    for name, tensor in written.items():
        if not torch.equal(read[name].cpu(), tensor.to(read[name].dtype)):
            raise ArtifactError(f"{name} is not what was saved when the folder is read back. It was not kept.")


def _array(token_ids: list[int]) -> Any:
    import numpy as np

    return np.asarray(token_ids, dtype=np.int32)


def _write_weights(folder: Path, model: RewardModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Write the merged weights in `dtype`; returns them under the names of the live model."""
    state = {name: stored(tensor, dtype, name) for name, tensor in lora.merged_state(model).items()}
    path = folder / "model.safetensors"
    on_disk = {name: tensor.contiguous() for name, tensor in disk_state(state, model.disk_class).items()}
    _save_tensors(path, on_disk, METADATA)
    return state


def _save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file as readable as its folder; OSError if the disk is full."""
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error
    path.chmod((path.parent.stat().st_mode | 0o600) & 0o666)  # safetensors makes it readable to the owner alone


def _write_config(folder: Path, model: RewardModel, pad: int, dtype_name: str) -> None:
    config: Any = model.backbone.config
    values: dict[str, Any] = config.to_dict()
    values |= {
        "architectures": [model.disk_class.__name__],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "problem_type": "regression",
        "pad_token_id": pad,
        "dtype": dtype_name,
        "use_cache": True,
    }
    values |= _rope_for_older_transformers(values)
    # The folder holds plain weights, however those of the live model were held.
    for name in ("_attn_implementation", "attn_implementation", "_name_or_path", *QUANTIZED):
        values.pop(name, None)
    write_json(folder / "config.json", json.loads(json.dumps(values, default=str)))


def _rope_for_older_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The names under which transformers 4 looks for the position settings; it silently drops those it cannot find."""
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


def _write_tokenizer(folder: Path, renderer: Renderer, pad: int) -> None:
    tokenizer = renderer.tokenizer
    previous = tokenizer.pad_token
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    try:
        tokenizer.save_pretrained(str(folder))
    finally:
        tokenizer.pad_token = previous
    path = folder / "tokenizer_config.json"
    values = read_json(path)
    assert isinstance(values, dict)
    values["padding_side"] = "right"  # on the left it would move positions that are counted from the row's beginning
    if tokenizer.is_fast:
        values["tokenizer_class"] = PORTABLE_TOKENIZER
    write_json(path, values)


def _write_adapter(folder: Path, model: RewardModel, config: ModelConfig, base: str) -> None:
    folder.mkdir()
    state = {name: tensor.cpu().contiguous() for name, tensor in lora.adapter_state(model).items()}
    _save_tensors(folder / "adapter_model.safetensors", state, {"format": "pt"})
    write_json(folder / "adapter_config.json", lora.adapter_config(config, model, base))
