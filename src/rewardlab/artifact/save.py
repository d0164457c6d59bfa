"""RewardModel -> a folder that Hugging Face, vLLM and SGLang load as it is, with its spec and canaries.

The folder is written under a temporary name, read back from the disk, scored, and only then given its name.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from rewardlab.artifact.canaries import make_canaries, render_canaries, score_tokens, separated
from rewardlab.artifact.config import ACTIVATIONS, OLDER_ROPE, older_rope
from rewardlab.artifact.halves import HALVES, stored, with_half_precision
from rewardlab.artifact.load import Where, assemble, require_head
from rewardlab.artifact.seal import METADATA, seal
from rewardlab.artifact.weights import digest, write_weights
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, replacing_folder, sha256_file, write_json
from rewardlab.core.spec import SCORE_TOLERANCE, SPEC_FILE, Canary, RewardSpec
from rewardlab.core.terminal import quoted
from rewardlab.data.chat import Renderer
from rewardlab.model import lora
from rewardlab.model.config import ComputeConfig, ModelConfig
from rewardlab.model.parts import ALONE, Division, Weight, Writers, drop_gathered, whole_of
from rewardlab.model.quantization import num_weights
from rewardlab.model.reward import RewardModel, disk_name

PORTABLE_TOKENIZER: Final = "PreTrainedTokenizerFast"
"""Read by transformers 4 and 5 alike; version 5 writes a name that version 4 does not know."""
QUANTIZED: Final = ("quantization_config", "_pre_quantization_dtype")
PLAIN_COMPUTE: Final = ComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
"""Kernels by which canaries are scored: those that are there in every precision, on every machine."""
logger = logging.getLogger("rewardlab")
NOTABLE_ROUNDING: Final = 0.05
"""Rounding that moves a canary's score further than this, in units of max(1, |score|), is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The folder of which another is made."""

    folder: Path
    save_dtype: str
    rounding: str

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
    division: Division | None = None,
) -> RewardSpec:
    """Write the model, adapters merged, as `folder`; an existing folder is replaced only at the very end.

    `adapter` = (settings, base model's name) also writes the unmerged adapters to `folder/adapter`; those of an
    exported folder are copied. Where the model is in parts, all processes of the `division` call this; the first
    writes, and they read the folder back in parts.

    Raises ArtifactError if the folder would not give the model's own scores, float16 has not the range for its
    weights, or no pad token can be found; OSError if the disk is full. Either way nothing that was there is lost.
    """
    ranks: Writers = ALONE if division is None else division
    dtype_name = str(save_dtype).removeprefix("torch.")
    pad = choose_pad(renderer, model.config.vocab_size)

    def write_others() -> None:
        _write_config(temporary, model, pad, dtype_name)
        _write_tokenizer(temporary, renderer, pad)

    exported = adapter if isinstance(adapter, Exported) else None
    with ExitStack() as stack:
        temporary: Path = ranks.by_first(lambda: stack.enter_context(replacing_folder(folder)))
        written = _write_merged(temporary, model, save_dtype, ranks)
        ranks.by_first(write_others)
        if exported is not None and (exported.folder / "adapter").is_dir():
            shutil.copytree(exported.folder / "adapter", temporary / "adapter")
        elif isinstance(adapter, tuple):
            _write_adapter(temporary / "adapter", model, *adapter, ranks)
        draft = RewardSpec(
            renderer=renderer.spec,
            beta=beta,
            head_dtype=dtype_name,
            save_dtype=dtype_name,
            rounding=_rounding(dtype_name, exported),
            exported_from=exported.as_dict() if exported is not None else None,
            max_rounding_error=0.0,
            canaries=[],
            files={},
            provenance=dict(provenance),
        )
        ranks.by_first(lambda: require_head(temporary))
        scores = live_scores(model, renderer)
        drop_gathered(model)
        saved = assemble(
            temporary,
            draft,
            where=Where(device=_spare_device(model, division), division=division),
            precision="fp32",
            attention_mode="padded",
            compute=PLAIN_COMPUTE,
        )
        _require_same_weights(saved.model, written, ranks)
        # With weights held rounded or quantised, or in another arithmetic, the live model's scores are others.
        same = saved.model.compute_dtype == model.compute_dtype and model.read_originals is None
        canaries = with_half_precision(make_canaries(saved.model, saved.renderer), saved.model, draft.save_dtype)
        spec: RewardSpec = ranks.by_first(lambda: _complete(draft, canaries, scores, same, temporary))
        ranks.by_first(stack.close)
    return spec


def verify_in_clean_process(folder: Path) -> None:
    """Run `rewardlab verify` on the folder in a fresh interpreter; ArtifactError with its words if it fails."""
    answer = subprocess.run(
        # -P: a `random.py` in the current folder is none of its business.
        [sys.executable, "-P", "-m", "rewardlab", "verify", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | _where_this_package_is(),
    )
    if answer.returncode != 0:
        said = answer.stderr.strip() or (
            f"it ended with status {answer.returncode} and said nothing. It holds the whole model in float32; is there "
            f"memory for it? If not, run `rewardlab verify {quoted(str(folder))}` where there is."
        )
        raise ArtifactError(f"{folder} does not pass verification in a clean process: {said}")


def _where_this_package_is() -> dict[str, str]:
    """PYTHONPATH for another process, where the package is not installed."""
    home = Path(__file__).resolve().parents[2]
    if {"site-packages", "dist-packages"} & set(home.parts):
        return {}
    earlier = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(home) if not earlier else f"{home}{os.pathsep}{earlier}"}


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


def _complete(
    draft: RewardSpec, canaries: list[Canary], live: Sequence[float], live_is_same: bool, folder: Path
) -> RewardSpec:
    """Write the sealed spec with canaries of the saved weights, after comparing them with the live model, which
    computes the same way or not.
    """
    if lost := [canary.name for canary, score in zip(canaries, live, strict=True) if not math.isfinite(score)]:
        logger.warning(
            "the live model has no finite score for the canaries %s, so evaluations on the way may lack some as well; "
            "those of the saved folder in float32 are finite",
            ", ".join(lost),
        )
    known = [(canary.score, score) for canary, score in zip(canaries, live, strict=True) if math.isfinite(score)]
    if not known:
        raise ArtifactError(
            "the live model has no finite score for any canary. Train with --precision bf16 or fp32; float16 ends at "
            "65,504."
        )
    error = max(abs(saved - score) / max(1.0, abs(saved)) for saved, score in known)
    exact = live_is_same and draft.save_dtype == "float32"
    if exact and not error <= SCORE_TOLERANCE["float32"]:
        raise ArtifactError(
            f"the saved folder scores {error:.3g} away from the live model on the canaries, with the same weights and "
            f"arithmetic. It was not kept. Please report this with the model's name."
        )
    provenance = draft.provenance | {"faults_noticed": separated(canaries, tolerance=SCORE_TOLERANCE["float32"])}
    spec = seal(folder, replace(draft, max_rounding_error=error, canaries=canaries, provenance=provenance))
    write_json(folder / SPEC_FILE, spec.to_dict())
    return spec


def _rounding(dtype: str, exported: Exported | None) -> str:
    """How the weights came to the values that a file in this dtype holds."""
    if exported is not None and exported.rounding != "none" and dtype in ("float32", exported.save_dtype):
        return exported.rounding  # of which each has all values
    return "stochastic" if dtype in HALVES else "none"


def _spare_device(model: RewardModel, division: Division | None) -> torch.device:
    """The device of the model if a copy in float32 and one in half precision, or everyone's part of them, fit there;
    else the CPU.
    """
    device = model.device
    if device.type != "cuda":
        return device
    counts = [num_weights(parameter) for parameter in model.parameters()]
    needed = 6.0 * sum(counts)
    if division is not None:
        torch.cuda.empty_cache()
        own = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()]
        # A part beside what it was before it was rounded, and as much as a forward pass gathers: a layer, the next one,
        # embeddings and head.
        needed = 8.0 * sum(own) + 6.0 * 4 * max(counts)
    free, _ = torch.cuda.mem_get_info(device)
    fits = free > 1.2 * needed
    if division is not None:
        fits = all(division.gather(fits))
    return device if fits else torch.device("cpu")


def _require_same_weights(saved: RewardModel, written: Mapping[str, str], ranks: Writers) -> None:
    """Raise ArtifactError unless what was read back is, bit for bit, what was to be written: digests by names of the
    model, which the first rank has.
    """
    read: dict[str, str] = {}
    for name, tensor in saved.state_dict().items():
        gathered = whole_of(tensor)
        if ranks.is_first:
            read[name] = digest(gathered)

    def compare() -> None:
        if different := sorted(set(read) ^ set(written)):
            raise ArtifactError(f"weights are missing or extra after reading the folder back: {different[:5]}.")
        for name, found in read.items():
            if found != written[name]:
                raise ArtifactError(f"{name} is not what was saved when the folder is read back. It was not kept.")

    ranks.by_first(compare)


def _array(token_ids: list[int]) -> Any:
    import numpy as np

    return np.asarray(token_ids, dtype=np.int32)


def _write_merged(folder: Path, model: RewardModel, dtype: torch.dtype, ranks: Writers) -> dict[str, str]:
    """Write the merged weights in `dtype`; returns what each is to be read back as, under the names of the model."""
    found: dict[str, Weight] = {}

    def plan() -> None:
        found.update(lora.merged_weights(model))

    ranks.by_first(plan)  # which reads files
    weights = found if ranks.is_first else lora.merged_weights(model, wanted=False)
    names = {disk_name(name, model.disk_class): name for name in weights}
    on_disk = {there: weights[name] for there, name in names.items()}
    written = write_weights(
        folder / "model.safetensors",
        on_disk,
        ranks,
        cast=(dtype, lambda tensor, there: stored(tensor, dtype, names[there])),
        metadata=METADATA,
    )
    return {names[there]: text for there, text in written.items()}


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
    # The folder holds plain weights, however those of the live model were held, and a raw score.
    for name in ("_attn_implementation", "attn_implementation", "_name_or_path", *QUANTIZED, *ACTIVATIONS, *OLDER_ROPE):
        values.pop(name, None)
    values |= older_rope(values)
    write_json(folder / "config.json", json.loads(json.dumps(values, default=str)))


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


def _write_adapter(folder: Path, model: RewardModel, config: ModelConfig, base: str, ranks: Writers) -> None:
    ranks.by_first(folder.mkdir)
    write_weights(folder / "adapter_model.safetensors", lora.adapter_weights(model), ranks)
    ranks.by_first(lambda: write_json(folder / "adapter_config.json", lora.adapter_config(config, model, base)))
