"""Checks of a model folder before a model is built from it: are the files complete, and do they belong together.

transformers builds whatever config.json describes, however large it is. So the configuration is compared with the
weights first: too many layers show in the number of weights, and wrong sizes in their shapes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rewardlab.core.errors import ModelError, RewardlabError
from rewardlab.core.schema import Refusal, read_object
from rewardlab.model.reward import HEAD_ON_DISK

ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""The beginning of a git-lfs pointer, the small text file that git leaves in place of a large file."""
POINTER_BYTES: Final = 1024
FETCH: Final = "Fetch it again from where it came from."
DAMAGED_BASE: Final = Refusal(error=ModelError, remedy=FETCH)
COUNTS: Final = re.compile(r"layer|label|expert|block|depth|stage", re.IGNORECASE)
MAX_COUNT: Final = 100_000
"""Highest number of layers, labels and the like. transformers makes a list with so many entries as soon as it reads the
configuration, so a damaged number could take all memory."""
MORE_WEIGHTS: Final = 1_000
"""A model may have three times as many weight tensors as its files, plus this many, since a class may split a weight
of a file into several."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the header of a file says about a weight."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@contextmanager
def told(name: str, doing: str) -> Iterator[None]:
    """Turn every error that transformers raises inside into a ModelError that begins with `name` and `doing`.

    Given files that it does not expect, transformers raises errors of any class. Errors of rewardlab and errors for
    lack of memory pass unchanged.
    """
    try:
        yield
    except (RewardlabError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise ModelError(
            f"{name}: {doing}: {_in_short(error)} Install what is missing, or use another model."
        ) from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{name}: {doing}: a file of weights is a damaged pickle, or one that would run code, which is never "
            f"allowed. Use the model's safetensors files, or download it again."
        ) from error
    except Exception as error:
        raise ModelError(f"{name}: {doing} ({type(error).__name__}: {_in_short(error)}).{_cause(name)}") from error


def _in_short(error: BaseException) -> str:
    """Return an error's message on one line, of at most about 400 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} …"


def _cause(name: str) -> str:
    """Return a sentence on a likely cause in a folder's files and what to do; "" if `name` is not a folder."""
    if not Path(name).is_dir():
        return ""
    try:
        require_whole_files(Path(name))
    except ModelError as error:
        return f" {error}"
    return " Check that the files in the folder are complete and of one model. If in doubt, download it again."


def require_whole_files(folder: Path) -> None:
    """Raise ModelError for a file that is only a git-lfs pointer, and for weights that are damaged or cut off."""
    for path in sorted(folder.iterdir()):
        require_no_pointer(path)
    read_headers(weight_files(folder))


def require_no_pointer(path: Path) -> None:
    """Raise ModelError for a file that is only a git-lfs pointer, as a clone leaves it without git-lfs."""
    if path.is_file() and path.stat().st_size <= POINTER_BYTES:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise ModelError(
                    f"{path}: this is a git-lfs pointer, not the file itself. Run `git lfs pull` in {path.parent} "
                    f"(git-lfs has to be installed), or download the file."
                )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files from which transformers reads the weights; none if they are in files of other kinds.

    Raises ModelError if the index is damaged or names a file that is missing.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / INDEX
    if not index.is_file():
        return []
    return files_in(index)


def files_in(index: Path) -> list[Path]:
    """Return the weight files beside an index that it lists, sorted, each once.

    Raises ModelError if the index is damaged, or names a file that is missing or lies outside its folder. A link from
    a snapshot in the cache of the hub to that cache's `blobs` counts as inside.
    """
    folder = index.parent
    files = [folder / name for name in shards_in(index)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise DAMAGED_BASE.of(f"{folder}: {', '.join(missing[:3])} is missing, which {index.name} names.")
    inside = [folder.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    for path in files:
        if not any(path.resolve().is_relative_to(place) for place in inside):
            raise ModelError(
                f"{path}: {index.name} names it, and it is a link to {path.resolve()}, outside the folder. Put the "
                f"file itself there."
            )
    return files


def shards_in(index: Path) -> list[str]:
    """Return the names of the weight files that an index lists, sorted, each once.

    Raises ModelError if the index is damaged, or names a file of another folder.
    """
    names = read_object(index, DAMAGED_BASE).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DAMAGED_BASE.of(f"{index}: weight_map: expected an object of weight names and file names.")
    if outside := [name for name in names.values() if name in ("", ".", "..") or re.search(r"[/\\:\0]", name)]:
        raise DAMAGED_BASE.of(f"{index}: weight_map names {outside[0]!r}, and weights lie beside their index.")
    return sorted(set(names.values()))


def read_headers(files: Sequence[Path]) -> dict[str, Found]:
    """Return the name, shape and dtype of every weight in the files, from their headers alone.

    Raises ModelError for a file that is damaged or cut off.
    """
    headers: dict[str, Found] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as weights:
                for key in sorted(weights.keys()):
                    entry = weights.get_slice(key)
                    headers[key] = Found(file=str(path), shape=tuple(entry.get_shape()), dtype=entry.get_dtype())
        except (SafetensorError, OSError) as error:
            if not path.exists():
                raise DAMAGED_BASE.of(f"{path}: missing, or a link to a file that is missing.") from error
            raise DAMAGED_BASE.of(
                f"{path}: damaged, or cut off: its {path.stat().st_size} bytes are not a complete safetensors file "
                f"({error})."
            ) from error
    return headers


def require_counts(values: Mapping[str, Any], *, where: str) -> None:
    """Raise ModelError if a configuration, or one nested in it, has more than MAX_COUNT layers, labels or experts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            require_counts(value, where=f"{where}: {name}")
        elif isinstance(value, int | float) and COUNTS.search(name) and value > MAX_COUNT:
            raise ModelError(f"{where}: {name}: expected at most {MAX_COUNT}, found {value:.4g}. {FETCH}")


def require_same_sizes(folder: Path, config: Any, disk_class: Any) -> None:
    """Raise ModelError unless a model of this configuration has weights of the shapes that the folder's files hold.

    Weights that are missing or have other names in the files are not checked here; loading reports them. Nor are
    quantised weights, the head, and folders without safetensors files.
    """
    in_files = read_headers(weight_files(folder))
    if not in_files or getattr(config, "quantization_config", None) is not None:
        return
    most = 3 * len(in_files) + MORE_WEIGHTS
    # On the meta device weights have shapes and take no memory, however large the configuration says they are.
    doing = f"no model can be built from {CONFIG}"
    with told(str(folder), doing), _no_more_weights_than(most, folder), torch.device("meta"):
        classifier = disk_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    wanted = classifier.state_dict()
    try:
        named = transformers_names(classifier, wanted)
    except ImportError:  # this version of transformers keeps its renaming rules elsewhere, so names cannot be matched
        return
    for key, weight in in_files.items():
        name, converted = named(key)
        if converted or name not in wanted or name.startswith(f"{HEAD_ON_DISK}."):
            continue
        if weight.shape != (shape := tuple(wanted[name].shape)):
            raise ModelError(
                f"{folder}: {key} has the shape {list(shape)} by {CONFIG} and {list(weight.shape)} in "
                f"{Path(weight.file).name}: these files belong to different models. {FETCH}"
            )


Named = Callable[[str], tuple[str, bool]]
"""A weight's name in a file -> its name in the classifier, and whether its numbers are converted on the way."""


def transformers_names(classifier: Any, wanted: Mapping[str, Tensor]) -> Named:
    """Return the function that takes names in files to names in the classifier, by transformers' own rules.

    Raises ImportError if the installed version of transformers keeps these rules elsewhere.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(classifier)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = classifier.base_model_prefix

    def named(key: str) -> tuple[str, bool]:
        name, converted = rename_source_key(key, renamings, converters, prefix, wanted)
        # A rule for older files may rename a weight that has its present name already; then it is kept.
        if name not in wanted and key in wanted:
            name, converted = rename_source_key(key, [], [], prefix, wanted)
        return name, converted is not None

    return named


@contextmanager
def _no_more_weights_than(most: int, folder: Path) -> Iterator[None]:
    """Raise ModelError as soon as a model that is built inside has more than `most` weight tensors.

    The limit acts while the model is built, because a configuration with a damaged number of layers would otherwise
    keep the process building, even on the meta device.
    """
    count = 0

    def counted(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ModelError(
                f"{folder}: {CONFIG} describes a model of more than {most} weights, and its files hold far fewer: "
                f"these files belong to different models. {FETCH}"
            )

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()
