"""How large proxies are: by the weights that were trained, which their runs record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json
from rewardlab.core.run_folder import MANIFEST
from rewardlab.core.values import require
from rewardlab.gold.foreign import find_model, is_hub_name
from rewardlab.gold.proxies import folder_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a proxy."""

    num: int
    """Weights."""
    is_trained: bool
    """Whether these are the weights that were trained; else they are all weights, as its run is not there to tell."""

    def __str__(self) -> str:
        unit, scale = next(
            ((unit, scale) for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if self.num >= scale), ("", 1.0)
        )
        return f"{self.num / scale:.3g}{unit} {'trained' if self.is_trained else 'weights'}"


Sizes = Mapping[str, Size | None]
"""Proxy -> its size; None if nothing tells it."""


def sizes_of(named: Mapping[str, str], sizes: Sequence[str] = ()) -> Sizes:
    """Return the size of every proxy of `named_sources`, the smallest first and those without a size last.

    It is what `sizes` says (`--sizes`), else what the run of a proxy recorded, else all weights of a model. A file of
    scores has none. Raises ConfigError for a name that no proxy has.
    """
    given = {name: int(number) for name, _, number in (one.partition("=") for one in sizes)}
    unknown = [name for name in given if name not in named]
    require(not unknown, f"--sizes {', '.join(unknown)}: --proxies has no proxy of this name.")
    found = {
        name: Size(num=given[name], is_trained=True) if name in given else _size_of(what)
        for name, what in named.items()
    }
    return dict(sorted(found.items(), key=lambda one: math.inf if one[1] is None else one[1].num))


def _size_of(what: str) -> Size | None:
    if Path(what).is_file():
        return None
    if is_hub_name(what):
        return _all_weights(find_model(what, flag="--proxies").folder)
    trained = next((num for place in (Path(what), Path(what).parent) if (num := _trained(place)) is not None), None)
    return _all_weights(folder_of(what)) if trained is None else Size(num=trained, is_trained=True)


def _trained(run: Path) -> int | None:
    """Return how many weights a run trained; None if the folder is not a run, or does not say."""
    try:
        manifest = read_json(run / MANIFEST)
    except (OSError, DataError):
        return None
    counts = manifest.get("parameters") if isinstance(manifest, dict) else None
    trained = counts.get("trainable") if isinstance(counts, dict) else None
    return trained if isinstance(trained, int) else None


def _all_weights(folder: Path) -> Size | None:
    """Return how many weights the files of a model hold; None where they are in files of another kind."""
    from rewardlab.model.files import read_headers, weight_files

    shapes: Sequence[Sequence[int]] = [one.shape for one in read_headers(weight_files(folder)).values()]
    return Size(num=sum(map(math.prod, shapes)), is_trained=False) if shapes else None
