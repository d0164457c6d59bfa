"""The files of a model folder before a model is built from them: are they what their names say, and of one model.

A configuration is a recipe that transformers follows without asking how large the result will be. So what is built is
held against the weights first: layers without end are told by their number, and wrong sizes by their name.
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
POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""How a file begins that git leaves in place of a large one."""
POINTER_BYTES: Final = 1024
FETCH: Final = "Fetch it again from where it came from."
DAMAGED_BASE: Final = Refusal(error=ModelError, remedy=FETCH)
COUNTS: Final = re.compile(r"layer|label|expert|block|depth|stage", re.IGNORECASE)
MAX_COUNT: Final = 100_000
"""Of layers, labels and the like; transformers makes a list of as many before anything else is known."""
MORE_WEIGHTS: Final = 1_000
"""What a model may have beyond three times as many weights as its files: a class may join several, or split one."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a file says of a weight."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@contextmanager
def told(name: str, doing: str) -> Iterator[None]:
    """Meanwhile whatever transformers raises is a ModelError: of files that it does not expect it raises anything."""
    try:
        yield
    except (RewardlabError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise ModelError(
            f"{name}: {doing}: {_in_short(error)} Install what is missing, or take another model."
        ) from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{name}: {doing}: a file of weights is a damaged pickle, or one that would run code, which is never done. "
            f"Take the model's safetensors files, or fetch it again."
        ) from error
    except Exception as error:
        raise ModelError(f"{name}: {doing} ({type(error).__name__}: {_in_short(error)}).{_cause(name)}") from error


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} …"


def _cause(name: str) -> str:
    """What in a folder's own files may be the cause, and what to do."""
    if not Path(name).is_dir():
        return ""
    try:
        require_whole_files(Path(name))
    except ModelError as error:
        return f" {error}"
    return " Is everything in the folder of one model, and whole? If in doubt, fetch it again."


def require_whole_files(folder: Path) -> None:
    """Raise ModelError for files that are not what their names say: pointers of git-lfs, weights that are cut off."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size <= POINTER_BYTES:
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise ModelError(
                        f"{path}: a pointer of git-lfs lies in place of the file. Run `git lfs pull` in {folder} "
                        f"(git-lfs has to be installed), or download the file."
                    )
    read_headers(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers takes the weights from; none where they are in others.

    Raises ModelError for an index that is damaged or names a file that is not there.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / INDEX
    if not index.is_file():
        return []
    files = [folder / name for name in shards_in(index)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise DAMAGED_BASE.of(f"{folder}: {', '.join(missing[:3])} is missing, which {INDEX} names.")
    return files


def shards_in(index: Path) -> list[str]:
    """Names of the files that an index names."""
    names = read_object(index, DAMAGED_BASE).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DAMAGED_BASE.of(f"{index}: weight_map: expected an object, from names of weights to names of files.")
    return sorted(set(names.values()))


def read_headers(files: Sequence[Path]) -> dict[str, Found]:
    """What safetensors files hold, by name, without their numbers.

    Raises ModelError for one that is damaged or cut off.
    """
    found: dict[str, Found] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as weights:
                for key in sorted(weights.keys()):
                    lying = weights.get_slice(key)
                    found[key] = Found(file=str(path), shape=tuple(lying.get_shape()), dtype=lying.get_dtype())
        except (SafetensorError, OSError) as error:
            raise DAMAGED_BASE.of(
                f"{path}: damaged, or cut off: {path.stat().st_size} bytes are no whole safetensors file ({error})."
            ) from error
    return found


def require_counts(values: Mapping[str, Any], *, where: str) -> None:
    """Raise ModelError for a configuration with more layers, labels or experts than any model has, nested or not."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            require_counts(value, where=f"{where}: {name}")
        elif isinstance(value, int | float) and COUNTS.search(name) and value > MAX_COUNT:
            raise ModelError(f"{where}: {name}: expected at most {MAX_COUNT}, found {value:.4g}. {FETCH}")


def require_same_sizes(folder: Path, config: Any, disk_class: Any) -> None:
    """Raise ModelError unless a model of this configuration has weights of the sizes that the folder's files hold.

    Weights that have other names there, or none, are left to whoever reads them; so are quantised ones, and folders
    without safetensors files.
    """
    found = read_headers(weight_files(folder))
    if not found or getattr(config, "quantization_config", None) is not None:
        return
    most = 3 * len(found) + MORE_WEIGHTS
    with told(str(folder), f"{CONFIG} describes no model"), _no_more_weights_than(most, folder), torch.device("meta"):
        classifier = disk_class._from_config(config)
    wanted = classifier.state_dict()
    try:
        named = transformers_names(classifier, wanted)
    except ImportError:  # another version of transformers
        return
    for key, weight in found.items():
        name, converted = named(key)
        if converted or name not in wanted or name.startswith(f"{HEAD_ON_DISK}."):
            continue
        if weight.shape != (shape := tuple(wanted[name].shape)):
            raise ModelError(
                f"{folder}: by {CONFIG} {key} has the shape {list(shape)}, and in {Path(weight.file).name} "
                f"{list(weight.shape)}: they are not of one model. {FETCH}"
            )


Named = Callable[[str], tuple[str, bool]]
"""A weight's name in a file -> its name in the classifier, and whether its numbers are converted on the way."""


def transformers_names(classifier: Any, wanted: Mapping[str, Tensor]) -> Named:
    """By transformers' own rules. ImportError if this version keeps them elsewhere."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(classifier)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = classifier.base_model_prefix

    def named(key: str) -> tuple[str, bool]:
        name, converted = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, converted = rename_source_key(key, [], [], prefix, wanted)
        return name, converted is not None

    return named


@contextmanager
def _no_more_weights_than(most: int, folder: Path) -> Iterator[None]:
    """Meanwhile a model that is built may have `most` weights; one more is a ModelError."""
    count = 0

    def counted(module: nn.Module, name: str, weight: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ModelError(
                f"{folder}: {CONFIG} describes a model of more than {most} weights, and its files hold far fewer: they "
                f"are not of one model. {FETCH}"
            )

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()
