"""Loads a reward-model folder as a Scorer, with all checks: nothing is guessed or filled in."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec

import torch
from safetensors import safe_open

from rewardlab.analysis.faults import largest_distance, name_fault, name_token_fault, reference_scores
from rewardlab.artifact.canaries import score_tokens
from rewardlab.artifact.config import require_agreement, require_config, require_sizes
from rewardlab.artifact.seal import one_model_of, require_seal
from rewardlab.artifact.shards import BIAS
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import ArtifactError, ConfigError, ModelError, RenderError
from rewardlab.core.files import sha256_file
from rewardlab.core.spec import REMEDY, RewardSpec, read_spec
from rewardlab.core.terminal import brief
from rewardlab.core.types import Log
from rewardlab.core.values import one_of, path_of, require, truth_of
from rewardlab.data.chat import Renderer, load_tokenizer, to_messages
from rewardlab.data.cut_canaries import faults_of_cuts
from rewardlab.model import attention
from rewardlab.model.applying import apply_compute
from rewardlab.model.attention_backends import HALF
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import LIBRARY_COMPUTE, ComputeConfig, ModelConfig
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.files import (
    INDEX,
    ONE_FILE,
    read_headers,
    require_no_pointer,
    require_same_sizes,
    told,
    weight_files,
)
from rewardlab.model.forked import computing
from rewardlab.model.half import hold_half, line_about_others
from rewardlab.model.load import PRECISION, choose_layout, divide_and_fill, read_classifier, read_config, wrap
from rewardlab.model.reward import HEAD_ON_DISK, AttentionLayout
from rewardlab.model.sharded_weights import Division, fill_head, outline_of, places_in
from rewardlab.score import Scorer

READ_BY_ENGINES: Final = (
    *("added_tokens.json", "special_tokens_map.json", "*.model", "*.tiktoken", "tekken.json"),
    *("additional_chat_templates/*", "adapter_config.json", "adapter_model.*"),
    *("modules.json", "sentence_*_config.json", "hf_quant_config.json"),
    *("*.safetensors", "*.safetensors.index.json"),
)
"""Files that a folder may hold only if its spec lists them: transformers and engines read tokens, templates, adapters,
pooling, quantisation or weights from them whenever they are there. By the files of sentence-transformers vLLM takes the
mean of all positions, or writes texts in small letters. It loads every safetensors file, or those that an index names,
where transformers takes `model.safetensors` alone."""


Given = ParamSpec("Given")
_MAKING: Final = threading.RLock()
"""Of the process, as the default dtype of torch is, which transformers changes while it makes a model: of two threads
one would find that of the other's model, and put it back when it should be gone."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where a model is loaded to."""

    device: torch.device
    division: Division | None = None
    """The ranks that load the model together and hold a part each; None for a process that holds all of it."""


def _silent(line: str) -> None:
    """Ignore a line of the log."""


def load(
    folder: str | Path,
    *,
    device: str | torch.device | None = None,
    precision: str = "fp32",
    attention: str = "auto",
    check: bool = True,
    trust_remote_code: bool = False,
    compute: ComputeConfig = LIBRARY_COMPUTE,
    log: Log = _silent,
) -> Scorer:
    """Load the reward model in `folder`, ready to score.

    With ``precision="fp32"`` its scores are the canonical ones; with `bf16` and `fp16` linear layers compute with
    weights rounded stochastically, the same on every machine. `device` is by default CUDA if there is one, else the
    CPU. `check` compares files, tokens and canary scores with those recorded when the model was saved.
    `trust_remote_code` runs Python code that comes with the folder. `compute` names kernels; by default the allocator
    of the process is left alone. `log` gets a line on what was chosen.

    Raises ArtifactError if anything that decides a score is missing, changed or different, or if another model is put
    into the folder meanwhile; ConfigError for an argument of another type, and for a `device`, `precision`, `attention`
    or kernel that does not exist or cannot be used here; ModelError if `attention` is "shared" and that is not exact
    for this model.
    """
    path = path_of(folder, "folder")
    precision = one_of(precision, PRECISION, "precision")
    attention = one_of(attention, ("auto", "shared", "padded"), "attention")
    check, trust_remote_code = truth_of(check, "check"), truth_of(trust_remote_code, "trust_remote_code")
    wanted = "a ComputeConfig (rewardlab.model.config.ComputeConfig), or leave it out"
    require(isinstance(compute, ComputeConfig), f"compute: expected {wanted}; got {brief(compute)}.")
    require(callable(log), f"log: expected a function of a line, such as print; got {brief(log)}.")
    with one_model_of(path):
        spec = read_spec(path)
        if check:
            require_files(path, spec)
        scorer = assemble(
            path,
            spec,
            where=Where(device=_device(device)),
            precision=precision,
            attention_mode=attention,
            trust=trust_remote_code,
            compute=compute,
            log=log,
        )
        if check:
            require_canaries(scorer, spec, where=str(path))
    return scorer


def _device(device: str | torch.device | None) -> torch.device:
    """Return the device to load to. Raises ConfigError for one that torch does not know or that is not here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except torch.OutOfMemoryError:
        raise
    # AssertionError: torch was built without that kind of device; TypeError: what was given names none.
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used here ({str(error).splitlines()[0]}). Leave it out for the usual "
            f"one, or name cpu, cuda or one such as cuda:0."
        ) from error
    return chosen


def _in_turn(make: Callable[Given, Scorer]) -> Callable[Given, Scorer]:
    """Let one thread at a time run this function."""

    @wraps(make)
    def waiting(*arguments: Given.args, **named: Given.kwargs) -> Scorer:
        with _MAKING:
            return make(*arguments, **named)

    return waiting


@_in_turn
def assemble(
    path: Path,
    spec: RewardSpec,
    *,
    where: Where,
    precision: str,
    attention_mode: str,
    trust: bool = False,
    compute: ComputeConfig = LIBRARY_COMPUTE,
    log: Log = _silent,
) -> Scorer:
    """Build the Scorer from the files, without comparing canaries; `trust` runs Python code that comes with them.

    Raises ArtifactError for files that are missing, mismatched or contradict each other; ModelError if `attention_mode`
    is "shared" and that is not exact for this model; ConfigError for kernels that cannot be used here.
    """
    device, division = where.device, where.division
    computing.begin()
    require_sizes(path)
    pad = require_config(path, spec)
    with _of_this_folder(path):
        model_config = read_config(str(path), trust_remote_code=trust)
        disk_class = disk_class_of(model_config)
        require_agreement(path, spec, model_config, disk_class)
        require_same_sizes(path, model_config, disk_class)
    # The layout is chosen by a self-test, which may differ on machines of one run; all ranks take that of the first.
    with told(str(path), "a small model of its architecture cannot be computed"):
        layout: AttentionLayout = _agreed(
            choose_layout(
                model_config,
                disk_class,
                from_mapping(ModelConfig, {"attention": attention_mode}, where=str(path)),
                max_length=spec.renderer.max_length,
                share=True,
                log=log,
            ),
            division,
        )
    dtype, implementation = PRECISION[precision], _implementation(model_config, layout)
    outline = None
    if division is not None:
        outline = outline_of(
            disk_class, str(path), implementation, new_head=False, division=division, log=division.tell
        )
    with _of_this_folder(path):
        classifier, missing, extra = (
            read_classifier(disk_class, str(path), implementation, trust_remote_code=trust)
            if outline is None
            else (outline.classifier, outline.missing, outline.extra)
        )
        _require_all_and_no_more(path, disk_class, missing, extra)
        model = wrap(classifier, layout=layout, compute_dtype=dtype).eval()
    if dtype in HALF and division is None:
        hold_half(model.backbone, "backbone", dtype)
        if line := line_about_others(model.backbone):
            log(line)
    places = None if outline is None else places_in(outline, model)
    if places is not None:
        fill_head(model, places, device)
    else:
        (model if division is None else model.head).to(device)
    chosen = _agreed(choose_compute(compute, model.config, device=device, dtype=dtype, train=False, log=log), division)
    apply_compute(model, replace(compute, **chosen))
    if division is not None:
        divide_and_fill(model, places, division)
    renderer = open_renderer(path, spec, trust=trust)
    decided = ComputeConfig(**chosen, compile=compute.compile)
    renderer.pad_token_id, renderer.num_embeddings = pad, model.config.vocab_size
    return Scorer(model, renderer, beta=spec.beta, compute=decided, temperature=spec.temperature, affine=spec.affine)


def open_renderer(path: Path, spec: RewardSpec, *, trust: bool = False) -> Renderer:
    """Return the renderer of a folder alone, without its weights: enough to tokenise for the model.

    Raises ArtifactError if the tokenizer's template is not that of the spec.
    """
    tokenizer = load_tokenizer(str(path), trust_remote_code=trust)
    _require_template(path, tokenizer, spec)
    return Renderer(tokenizer, spec.renderer)


def _require_all_and_no_more(path: Path, disk_class: Any, missing: Collection[str], extra: Collection[str]) -> None:
    """Raise ArtifactError unless the files hold exactly the weights of the class."""
    if missing:
        raise ArtifactError(f"{path}: weights are missing: {', '.join(sorted(missing)[:5])}. {REMEDY}")
    # Extra weights do not change the score here, but an engine with another class may read them.
    if BIAS in extra and _has_zero_bias(path):
        extra = set(extra) - {BIAS}
    if extra:
        raise ArtifactError(
            f"{path}: its files hold weights that {disk_class.__name__} has no place for, and other engines may: "
            f"{', '.join(sorted(extra)[:5])}. {REMEDY}"
        )


def _has_zero_bias(path: Path) -> bool:
    """Return whether the head's bias in the files is a single zero, so that it does not matter whether engines add
    it."""
    entry = read_headers(weight_files(path))[BIAS]
    with safe_open(entry.file, framework="pt") as weights:
        bias = weights.get_tensor(BIAS)
    return bias.numel() == 1 and not bool(bias.any())


@contextmanager
def _of_this_folder(path: Path) -> Iterator[None]:
    """Turn every ModelError raised inside into an ArtifactError about this folder."""
    try:
        yield
    except ModelError as error:
        message = str(error)
        raise ArtifactError(f"{'' if message.startswith(str(path)) else f'{path}: '}{message} {REMEDY}") from error


def _agreed(choice: Any, division: Division | None) -> Any:
    """Return the first rank's choice, on all ranks; choices that are measured may differ from rank to rank."""
    return choice if division is None else division.gather(choice)[0]


def require_files(path: Path, spec: RewardSpec) -> None:
    """Raise ArtifactError unless the spec belongs to the model and every file recorded in it is there and unchanged, or
    if another file is there by which engines would change scores (READ_BY_ENGINES)."""
    for name in spec.files:
        try:
            require_no_pointer(path / name)
        except ModelError as error:
            raise ArtifactError(str(error)) from error
    require_head(path)
    require_config(path, spec)
    require_seal(path, spec)
    for name, digest in spec.files.items():
        file = path / name
        if not file.is_file():
            raise ArtifactError(f"{path}: {name} is missing. {REMEDY}")
        if sha256_file(file) != digest:
            raise ArtifactError(f"{path}: {name} was changed after the model was saved. {REMEDY}")
    found = (file for pattern in READ_BY_ENGINES for file in path.glob(pattern) if file.is_file())
    for name in sorted(file.relative_to(path).as_posix() for file in found):
        if name not in spec.files:
            raise ArtifactError(
                f"{path}: {name} was not saved with the model, and where an engine reads it scores change. Remove the "
                f"file."
            )


def require_head(path: Path) -> None:
    """Raise ArtifactError unless the weights hold exactly one head, of shape [1, W]."""
    with _of_this_folder(path):
        # With an index the files that it names have to be there; without this a missing one would show as a lost head.
        sharded = (path / INDEX).is_file() and not (path / ONE_FILE).is_file()
        files = weight_files(path) if sharded else sorted(path.glob("*.safetensors"))
        if not files:
            raise ArtifactError(f"{path}: no weights: {ONE_FILE} is missing. {REMEDY}")
        shapes = {name: list(weight.shape) for name, weight in read_headers(files).items()}
    shape = shapes.get(f"{HEAD_ON_DISK}.weight")
    if shape is None:
        raise ArtifactError(
            f"{path}: no {HEAD_ON_DISK}.weight in its files: the head, and so every reward, is lost. {REMEDY}"
        )
    if len(shape) != 2 or shape[0] != 1:
        raise ArtifactError(f"{path}: {HEAD_ON_DISK}.weight has shape {shape}, wanted [1, width]. {REMEDY}")


def require_canaries(scorer: Scorer, spec: RewardSpec, *, where: str) -> float:
    """Compare tokens and scores of the canaries with those in the spec.

    Returns the largest distance of a score from its reference in the model's precision, in units of max(1, |score|).

    Raises ArtifactError, naming the fault, if tokens differ or scores differ by more than the precision allows.
    """
    for canary in spec.canaries:
        try:
            messages = to_messages(canary.messages)
            got = scorer.renderer.render(messages[:-1], messages[-1:]).token_ids.tolist()
        except RenderError as error:
            raise ArtifactError(f"{where}: canary {canary.name!r} cannot be rendered: {error} {REMEDY}") from error
        fault = name_token_fault(canary.token_ids, got, bos_token_id=spec.renderer.bos_token_id)
        if fault is not None:
            raise ArtifactError(
                f"{where}: canary {canary.name!r} now renders to {fault}. The tokenizer or chat template differs from "
                f"the one the model was trained with. {REMEDY}"
            )
    with _of_this_folder(Path(where)), told(where, "its canaries cannot be computed"):
        scores = score_tokens(scorer.model, [_tokens(canary.token_ids) for canary in spec.canaries])
    precision = str(scorer.model.compute_dtype).removeprefix("torch.")
    if scorer.model.compute_dtype in HALF and not all(map(math.isfinite, scores)):
        others = "bf16, or fp32" if precision == "float16" else "fp32"
        raise ArtifactError(
            f"{where}: some scores are not finite in {precision}, whose range is too small for this model. Use another "
            f"precision: {others}."
        )
    wanted = reference_scores(spec.canaries, precision)
    fault = name_fault(spec.canaries, scores, precision=precision)
    if fault is not None:
        worst = max(range(len(scores)), key=lambda number: abs(wanted[number] - scores[number]))
        raise ArtifactError(
            f"{where}: canary {spec.canaries[worst].name!r} scores {scores[worst]:.4f} in {precision}, saved as "
            f"{wanted[worst]:.4f}. What fits: {fault}. {REMEDY}"
        )
    # Last, since a fault that scores name shows here too, without its name.
    for wrong in faults_of_cuts(scorer.renderer, spec.cut_canaries):
        raise ArtifactError(f"{where}: {wrong} {REMEDY}")
    return largest_distance(wanted, scores)


def _tokens(token_ids: list[int]) -> Any:
    """Return token ids as an int32 array."""
    import numpy as np

    return np.asarray(token_ids, dtype=np.int32)


def _implementation(model_config: Any, layout: AttentionLayout) -> str:
    """Return the name of the attention implementation for transformers that a layout needs."""
    return attention.padded_implementation(model_config.get_text_config()) if layout == "padded" else attention.NAME


def _require_template(path: Path, tokenizer: Any, spec: RewardSpec) -> None:
    """Raise ArtifactError unless the tokenizer's chat template is the one in the spec.

    Here conversations are rendered by the spec's template, so scores would be right; but other engines read the
    tokenizer's.
    """
    if tokenizer.chat_template != spec.renderer.chat_template:
        own = Renderer(tokenizer, replace(spec.renderer, chat_template=tokenizer.chat_template or ""))
        raise ArtifactError(
            f"{path}: the tokenizer's chat template is not the one the model was trained with, so every engine that "
            f"reads it would score {_what_renders(own, spec)}. {REMEDY}"
        )


def _what_renders(renderer: Renderer, spec: RewardSpec) -> str:
    """Return how a wrong template's rendering of the first canary differs from the right one, for a message."""
    for canary in spec.canaries[:1]:
        try:
            got = renderer.token_ids(to_messages(canary.messages)).tolist()
        except RenderError:
            continue
        if fault := name_token_fault(canary.token_ids, got, bos_token_id=spec.renderer.bos_token_id):
            return fault
    return "other tokens"
