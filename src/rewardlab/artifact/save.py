"""Saving a RewardModel as a folder that transformers, vLLM and SGLang load as it is, with its spec and canaries.

The folder is written under a temporary name, read back from disk and scored. Only then does it get its name.
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

from rewardlab.analysis.faults import separated
from rewardlab.artifact.canaries import make_canaries, render_canaries, score_tokens
from rewardlab.artifact.canary_states import LIVE, CanaryStates, backbone_digest
from rewardlab.artifact.config import ACTIVATIONS, OLDER_ROPE, older_rope
from rewardlab.artifact.halves import HALVES, stored, with_half_precision
from rewardlab.artifact.load import Where, assemble, require_head
from rewardlab.artifact.seal import METADATA, seal
from rewardlab.artifact.shards import BIAS, ONE, FileForm, write_files, zero_bias
from rewardlab.artifact.weights import digest, write_weights
from rewardlab.core.errors import ArtifactError, naming_for_rust
from rewardlab.core.files import read_json, sha256_file, write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.core.spec import SCORE_TOLERANCE, SPEC_FILE, Canary, RewardSpec
from rewardlab.core.terminal import quoted
from rewardlab.data.chat import Renderer
from rewardlab.data.cut_canaries import make_cut_canaries
from rewardlab.model import lora
from rewardlab.model.config import ComputeConfig, ModelConfig
from rewardlab.model.disk_class import name_for_engines
from rewardlab.model.files import ADAPTER_CONFIG
from rewardlab.model.quantization import num_weights
from rewardlab.model.reward import RewardModel, disk_name
from rewardlab.model.sharded_weights import ALONE, Division, Weight, Writers, drop_gathered, whole_of
from rewardlab.model.text_part import with_pad

PORTABLE_TOKENIZER: Final = "PreTrainedTokenizerFast"
"""A tokenizer class name that transformers 4 and 5 both know; version 5 writes one that version 4 does not know."""
QUANTIZED: Final = ("quantization_config", "_pre_quantization_dtype")
"""Fields of a configuration that say how the live model's weights are quantised."""
PLAIN_COMPUTE: Final = ComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
"""The kernels that score canaries: those that exist in every precision and on every machine."""
logger = logging.getLogger("rewardlab")
NOTABLE_ROUNDING: Final = 0.05
"""If rounding moves a canary's score by more than this, in units of max(1, |score|), a warning is given."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The folder from which another one is exported."""

    folder: Path
    save_dtype: str
    """dtype of its weights."""
    rounding: str
    """How its weights were rounded: `none`, `nearest` or `stochastic`."""
    form: FileForm = ONE
    """How the weights of the new folder are divided into files."""
    keeps_adapter: bool = True
    """Whether the folder's unmerged adapters, if it has any, are copied."""

    def as_dict(self) -> dict[str, str]:
        """Return the facts about the source for the new spec: its path, the dtype of its weights, its spec's
        SHA-256."""
        digest = sha256_file(self.folder / SPEC_FILE)
        return {"folder": str(self.folder), "save_dtype": self.save_dtype, "spec_sha256": digest}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The run in which a model is saved."""

    adapter: tuple[ModelConfig, str] | None = None
    """Settings and the base model's name, perhaps with a revision; with them the adapters are also written unmerged."""
    states: CanaryStates | None = None
    """The states of canaries that the run keeps from one folder to the next; None if the backbone trains, and for a
    sharded model."""


def save_reward_model(
    folder: Path,
    model: RewardModel,
    renderer: Renderer,
    *,
    beta: float,
    save_dtype: torch.dtype,
    provenance: Mapping[str, Any],
    source: Trained | Exported | None = None,
    division: Division | None = None,
) -> RewardSpec:
    """Write the model, adapters merged, as `folder`; an existing folder is replaced only at the very end.

    Adapters are written unmerged to `folder/adapter` for a Trained source that names them, and copied from an Exported
    one. If the model is sharded, all ranks of the `division` call this: the first writes, and all read the folder back
    in parts.

    Raises ArtifactError if the folder would not give the model's own scores, if the weights do not fit float16's range,
    or if no pad token can be found; ModelError if the base model's files changed during training; OSError if the disk
    is full. In every case an earlier folder is left as it was.
    """
    ranks: Writers = ALONE if division is None else division
    dtype_name = str(save_dtype).removeprefix("torch.")
    pad = choose_pad(renderer, model.config.vocab_size)

    def write_others() -> None:
        _write_config(temporary, model, pad, dtype_name)
        _write_tokenizer(temporary, renderer, pad)

    exported = source if isinstance(source, Exported) else None
    run = source if isinstance(source, Trained) else Trained()
    with ExitStack() as stack:
        temporary: Path = ranks.by_first(lambda: stack.enter_context(replacing_folder(folder)))
        written = _write_merged(temporary, model, save_dtype, ranks, ONE if exported is None else exported.form)
        ranks.by_first(write_others)
        if exported is not None and exported.keeps_adapter and (exported.folder / "adapter").is_dir():
            shutil.copytree(exported.folder / "adapter", temporary / "adapter")
        if run.adapter is not None:
            _write_adapter(temporary / "adapter", model, *run.adapter, ranks)
        draft = RewardSpec(
            renderer=renderer.spec,
            beta=beta,
            head_dtype=dtype_name,
            save_dtype=dtype_name,
            rounding=_rounding(dtype_name, exported),
            exported_from=exported.as_dict() if exported is not None else None,
            max_rounding_error=0.0,
            canaries=[],
            cut_canaries=make_cut_canaries(renderer),
            files={},
            provenance=dict(provenance),
        )
        ranks.by_first(lambda: require_head(temporary))
        # Scored before the folder is read back, so that the weights that FSDP gathers for it can be freed first and are
        # not in memory beside the copy that is read.
        if run.states is not None:
            run.states.begin(backbone_digest(written, temporary))
        scores = live_scores(model, renderer, run.states)
        drop_gathered(model)
        # The scores that other people will get are those of the files, so canaries are made by a model read from them,
        # in the padded layout, which is the reference.
        saved = assemble(
            temporary,
            draft,
            where=Where(device=_spare_device(model, division), division=division),
            precision="fp32",
            attention_mode="padded",
            compute=PLAIN_COMPUTE,
        )
        _require_same_weights(saved.model, written, ranks)
        # If the live model holds weights rounded or quantised, or computes in half precision, its scores differ from
        # those of the folder, and the difference is recorded and not an error.
        same = saved.model.compute_dtype == model.compute_dtype and model.read_originals is None
        canaries = make_canaries(saved.model, saved.renderer, run.states)
        canaries = with_half_precision(canaries, saved.model, draft.save_dtype, run.states)
        spec: RewardSpec = ranks.by_first(lambda: _complete(draft, canaries, scores, same, temporary))
        ranks.by_first(stack.close)
    return spec


def verify_in_clean_process(folder: Path) -> None:
    """Run `rewardlab verify` on the folder in a new Python process.

    Nothing that this process has in memory can then make up for something missing in the files.

    Raises ArtifactError with the message of the other process if it fails.
    """
    answer = subprocess.run(
        # -P keeps the current folder off the import path, where a file such as `random.py` would shadow a module.
        [sys.executable, "-P", "-m", "rewardlab", "verify", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | _where_this_package_is(),
    )
    if answer.returncode != 0:
        message = answer.stderr.strip() or (
            f"it ended with status {answer.returncode} and no message. It needs memory for the whole model in float32. "
            f"If there is too little here, run `rewardlab verify {quoted(str(folder))}` on a machine with more."
        )
        raise ArtifactError(f"{folder} does not pass verification in a clean process: {message}")


def _where_this_package_is() -> dict[str, str]:
    """Return the PYTHONPATH by which another process finds this package; nothing if it is installed."""
    home = Path(__file__).resolve().parents[2]
    if {"site-packages", "dist-packages"} & set(home.parts):
        return {}
    earlier = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(home) if not earlier else f"{home}{os.pathsep}{earlier}"}


def choose_pad(renderer: Renderer, num_embeddings: int) -> int:
    """Choose the pad token: one that exists, never ends a rendering and, if possible, occurs in no canary.

    transformers reads the score at the last token that is not padding, and older versions before the first one that is.
    So a pad token at the end of a conversation, or for older versions anywhere in it, would give a wrong score.

    Raises ArtifactError if there is none.
    """
    tokenizer, final = renderer.tokenizer, renderer.spec.final_token_id
    # Look the list up once: the tokenizer builds it anew at every access, and the vocabulary is long.
    marked = set(tokenizer.all_special_tokens)
    special = sorted(
        (token_id, token)
        for token, token_id in tokenizer.get_vocab().items()
        if token in marked
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
            f"no token can serve as padding: the only special token is the final token {final} of every rendering, and "
            f"transformers reads the score at the last token that is not padding. Use a chat template that ends in "
            f"another token."
        )
    rendered = {int(token) for _, _, token_ids in render_canaries(renderer) for token in token_ids}
    return next((candidate for candidate in candidates if candidate not in rendered), candidates[0])


def saved_dtype(wanted: str) -> torch.dtype:
    """Return the dtype for `--save-dtype`; `auto` is float32, the dtype in which weights are trained.

    Half the size has a price, because trained weights are not half-precision values. Rounded to the nearest they would
    lose most of the training. Rounded stochastically (model/rounding.py) they keep it, and scores move by the noise of
    the rounding.
    """
    dtype: torch.dtype = torch.float32 if wanted == "auto" else getattr(torch, wanted)
    return dtype


def live_scores(model: RewardModel, renderer: Renderer, states: CanaryStates | None = None) -> list[float]:
    """Score the canaries, in their order, with the kernels and the precision of the model in training.

    `states` are as in `make_canaries`.
    """
    states = CanaryStates() if states is None else states
    was_training = model.training
    model.eval()
    states.confirm(model, LIVE)
    with states.of(model, LIVE):
        scores = score_tokens(model, [token_ids for _, _, token_ids in render_canaries(renderer)])
    model.train(was_training)
    return scores


def _complete(
    draft: RewardSpec, canaries: list[Canary], live: Sequence[float], live_is_same: bool, folder: Path
) -> RewardSpec:
    """Compare the canaries of the saved weights with the `live` model's scores, then seal and write the spec.

    `live_is_same` says whether the live model has the same weights and arithmetic as the folder. Raises ArtifactError
    if it has and the scores differ nevertheless, or if the live model has no finite score.
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
            "the live model has no finite score for any canary. Train with --precision bf16 or fp32; the range of "
            "float16 ends at 65,504."
        )
    error = max(abs(saved - score) / max(1.0, abs(saved)) for saved, score in known)
    exact = live_is_same and draft.save_dtype == "float32"
    if exact and not error <= SCORE_TOLERANCE["float32"]:
        raise ArtifactError(
            f"the saved folder scores {error:.3g} away from the live model on the canaries, with the same weights and "
            f"arithmetic. The folder was not kept. Please report this with the model's name."
        )
    provenance = draft.provenance | {"faults_noticed": separated(canaries, tolerance=SCORE_TOLERANCE["float32"])}
    spec = seal(folder, replace(draft, max_rounding_error=error, canaries=canaries, provenance=provenance))
    write_json(folder / SPEC_FILE, spec.to_dict())
    return spec


def _rounding(dtype: str, exported: Exported | None) -> str:
    """Return how the weights were rounded to the values that a file in this dtype holds."""
    # An export to float32 or to the dtype of the source rounds nothing more, so the source's rounding is the last.
    if exported is not None and exported.rounding != "none" and dtype in ("float32", exported.save_dtype):
        return exported.rounding
    return "stochastic" if dtype in HALVES else "none"


def _spare_device(model: RewardModel, division: Division | None) -> torch.device:
    """Return the model's device if a float32 copy and a half-precision copy, or each rank's part of them, fit there
    beside it; else the CPU.
    """
    device = model.device
    if device.type != "cuda":
        return device
    # 4 bytes a weight for the float32 copy and 2 for the half-precision one.
    counts = [num_weights(parameter) for parameter in model.parameters()]
    needed = 6.0 * sum(counts)
    if division is not None:
        torch.cuda.empty_cache()
        own = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()]
        # Each part twice in float32, rounded and as it was before; and what a forward pass gathers (a layer, the next
        # one, the embeddings and the head), estimated as four times the largest weight.
        needed = 8.0 * sum(own) + 6.0 * 4 * max(counts)
    free, _ = torch.cuda.mem_get_info(device)
    fits = free > 1.2 * needed
    if division is not None:
        fits = all(division.gather(fits))
    return device if fits else torch.device("cpu")


def _require_same_weights(saved: RewardModel, written: Mapping[str, str], ranks: Writers) -> None:
    """Raise ArtifactError unless the weights that were read back are, bit for bit, those that were written.

    `written` has the digests of the latter by names of the model, on the first rank alone.
    """
    read: dict[str, str] = {}
    for name, tensor in saved.state_dict().items():
        gathered = whole_of(tensor)
        if ranks.is_first:
            read[name] = digest(gathered)

    def compare() -> None:
        if different := sorted(set(read) ^ set(written)):
            raise ArtifactError(f"weights are missing or extra after reading the folder back: {different[:5]}.")
        for name, text in read.items():
            if text != written[name]:
                raise ArtifactError(
                    f"{name} is not what was saved when the folder is read back. The folder was not kept."
                )

    ranks.by_first(compare)


def _write_merged(
    folder: Path, model: RewardModel, dtype: torch.dtype, ranks: Writers, form: FileForm
) -> dict[str, str]:
    """Write the merged weights in `dtype`; return the digests of what should be read back, by names of the model.

    Only the first rank gets the digests.
    """
    planned: dict[str, Weight] = {}

    def plan() -> None:
        planned.update(lora.merged_weights(model))

    # Planning reads the base model's files on the first rank, which may fail; by_first raises the error on all ranks.
    ranks.by_first(plan)
    weights = planned if ranks.is_first else lora.merged_weights(model, wanted=False)
    names = {disk_name(name, model.disk_class): name for name in weights}
    on_disk = {there: weights[name] for there, name in names.items()}
    if form.zero_bias:
        on_disk[BIAS], names[BIAS] = zero_bias(), BIAS

    def write(path: Path, part: Mapping[str, Weight]) -> dict[str, str]:
        cast = (dtype, lambda tensor, there: stored(tensor, dtype, names[there]))
        return write_weights(path, part, ranks, cast=cast, metadata=METADATA)

    written = write_files(folder, on_disk, ranks, form=form, dtype=dtype, write=write)
    # The bias of zero is not a weight of the model, so it is not read back with it; loading checks it.
    return {names[there]: text for there, text in written.items() if there != BIAS}


def _write_config(folder: Path, model: RewardModel, pad: int, dtype_name: str) -> None:
    """Write config.json so that every engine reads the same model and returns its raw score."""
    config: Any = model.backbone.config
    values: dict[str, Any] = with_pad(config, pad)
    values |= {
        "architectures": [name_for_engines(model.disk_class)],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "problem_type": "regression",
        "dtype": dtype_name,
        "use_cache": True,
    }
    # Nothing may remain of how the live model was computed or quantised, since the folder holds plain weights, nor of
    # an activation function on the score, nor of position settings that contradict rope_parameters.
    for name in ("_attn_implementation", "attn_implementation", "_name_or_path", *QUANTIZED, *ACTIVATIONS, *OLDER_ROPE):
        values.pop(name, None)
    values |= older_rope(values)
    write_json(folder / "config.json", _with_infinities(json.loads(json.dumps(values, default=str))))


def _with_infinities(value: Any) -> Any:
    """Return a value of JSON with infinite numbers as transformers writes and reads them: Mamba's limits of time."""
    if isinstance(value, dict):
        return {name: _with_infinities(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_infinities(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def _write_tokenizer(folder: Path, renderer: Renderer, pad: int) -> None:
    """Write the tokenizer's files with this pad token; the tokenizer in memory keeps its own."""
    tokenizer = renderer.tokenizer
    previous = tokenizer.pad_token
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    try:
        with naming_for_rust(folder / "tokenizer.json"):
            tokenizer.save_pretrained(str(folder))
    finally:
        tokenizer.pad_token = previous
    path = folder / "tokenizer_config.json"
    values = read_json(path)
    assert isinstance(values, dict)
    # Padding on the left would shift the positions in models that count them from the beginning of the row.
    values["padding_side"] = "right"
    # Programs that cut texts at the tokenizer's limit would cut some that the model was trained to read.
    limit = values.get("model_max_length")
    if isinstance(limit, int | float) and limit < renderer.spec.max_length:
        values["model_max_length"] = renderer.spec.max_length
    if tokenizer.is_fast:
        values["tokenizer_class"] = PORTABLE_TOKENIZER
    write_json(path, values)


def _write_adapter(folder: Path, model: RewardModel, config: ModelConfig, base: str, ranks: Writers) -> None:
    """Write the unmerged adapters in PEFT's format; `base` is the base model's name."""
    ranks.by_first(folder.mkdir)
    write_weights(folder / "adapter_model.safetensors", lora.adapter_weights(model), ranks)
    ranks.by_first(lambda: write_json(folder / ADAPTER_CONFIG, lora.adapter_config(config, model, base)))
