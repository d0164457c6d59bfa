"""Split datasets so that no conversation is in two splits: neither its prompts nor near duplicates of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from rewardlab.core.files import write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.curation.files.config import SplitConfig
from rewardlab.curation.files.converting import lines_again
from rewardlab.curation.files.grouping import Groups, assign, find_groups, joined, look, take, taken
from rewardlab.curation.files.reading import (
    Mask,
    Numbers,
    Reading,
    as_mask,
    count_rows,
    crew_of,
    manifest,
    open_all,
)
from rewardlab.curation.files.writing import (
    MANIFEST,
    facts_of,
    only_writer,
    own_columns,
    require_output,
    require_output_folder,
    require_place,
    writing,
)
from rewardlab.data.splits import count_shared
from rewardlab.data.workers import Crew

TOOL: Final = "rewardlab data split"


@dataclass(frozen=True, kw_only=True)
class Divided:
    """The result of a split."""

    folder: Path
    splits: Mapping[str, Mapping[str, object]]
    """Split -> its counts."""
    shared: Mapping[str, Mapping[str, int]]
    """Two splits -> what they share."""
    groups: Mapping[str, object]
    """Counts of the groups."""


def split(config: SplitConfig) -> Divided:
    """Divide the rows of the datasets into splits, a file each, with a manifest beside them.

    Raises ConfigError for an output folder that may not be written, or that another process writes or has written
    meanwhile, DataError for datasets that cannot be read, for a
    group that fits into no split, and for a split that would be empty.
    """
    config.require_named("split")
    readings = open_all(config, config.dataset, config.seed)
    inputs = [path for one in readings for path in one.files]
    _require_folder(config, inputs)
    with crew_of(config) as crew:
        seen = []
        for reading in readings:
            looking = partial(look, config.near != "none")
            seen.append(joined(count_rows(reading, looking, crew)))
        wanted = [as_mask(reading.chosen(), reading.tally.kept) for reading in readings]
        found = find_groups([taken(one, mask) for one, mask in zip(seen, wanted, strict=True)], config.near)
        splits_P = assign(found, config.shares, config.seed)
        with only_writer(config.output_dir), replacing_folder(config.output_dir, is_result=True) as folder:
            _require_folder(config, inputs)  # another process may have written it meanwhile
            files = _write(folder, config, readings, wanted, splits_P, crew)
            told = _report(found, splits_P, config.shares)
            used = [int(mask.sum()) for mask in wanted]
            write_json(folder / MANIFEST, manifest("split", config, readings, used, files, **told))
    return Divided(folder=config.output_dir, **told)


def _require_folder(config: SplitConfig, inputs: Sequence[Path]) -> None:
    """Raise ConfigError for a folder that holds files that this tool did not write, or that it reads."""
    require_output(config.output_dir / f"train.{config.ending}", (), overwrite=True)
    require_output_folder(config.output_dir, inputs, tool=TOOL, what="splits", overwrite=config.overwrite)
    require_place(config.output_dir, "--output-dir")


# --- files ---------------------------------------------------------------------------------------------------


def _write(
    folder: Path,
    config: SplitConfig,
    readings: Sequence[Reading],
    wanted: Sequence[Mask],
    splits_P: Numbers,
    crew: Crew,
) -> list[dict[str, object]]:
    """Write the rows of each split in the order in which they were read, and return the facts of the files."""
    paths = [folder / f"{name}.{config.ending}" for name in config.shares]
    with ExitStack() as stack:
        files = [stack.enter_context(writing(path, own_columns)) for path in paths]
        number = 0
        for reading, mask in zip(readings, wanted, strict=True):
            for line in lines_again(reading, crew, mask):
                files[splits_P[number]].write(line)
                number += 1
    return [facts_of(path, file.num_rows) for path, file in zip(paths, files, strict=True)]


def _report(found: Groups, splits_P: Numbers, shares: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return counts of the splits, of what each two of them share, and of the groups."""
    names = list(shares)
    masks = [splits_P == k for k in range(len(names))]
    texts = [take(found.texts, mask) for mask in masks]
    splits = {
        name: {
            "rows": int(mask.sum()),
            "share_wanted": shares[name],
            "share": round(float(mask.mean()), 6),
            "prompts": len(np.unique(own.prompts_P)),
            "groups": len(np.unique(found.groups_P[mask])),
        }
        for name, mask, own in zip(names, masks, texts, strict=True)
    }
    shared = {}
    for i, j in combinations(range(len(names)), 2):
        alike = len(np.intersect1d(found.near_P[masks[i]], found.near_P[masks[j]]))
        counts = count_shared(texts[j], texts[i]) | {"near_duplicate_prompts": alike}
        assert not counts["prompts"], counts
        assert not alike, counts
        shared[f"{names[j]}_with_{names[i]}"] = counts
    sizes_G = np.bincount(found.groups_P)
    groups = {
        "rule": found.rule,
        "groups": len(sizes_G),
        "largest_rows": int(sizes_G.max()),
        "prompts": len(np.unique(found.texts.prompts_P)),
        "groups_of_alike_prompts": int(found.near_P.max()) + 1,
    }
    return {"splits": splits, "shared": shared, "groups": groups}
