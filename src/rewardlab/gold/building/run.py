"""`rewardlab gold build`: labelled rows become preferences, divided by prompt, in a folder that appears whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rewardlab.analysis.json_form import encode
from rewardlab.core.bars import bar
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import DataError
from rewardlab.core.files import provenance, sha256_file, write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.core.terminal import plural
from rewardlab.core.values import require
from rewardlab.curation.files.writing import MANIFEST, only_writer, require_output_folder
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.facts import Facts, Watcher
from rewardlab.gold.building.files import SideFiles
from rewardlab.gold.building.pairing import PAIR_CAUSES, REPLY_CAUSES, Counts, judge
from rewardlab.gold.building.sides import Sides, divide

TOOL: Final = "rewardlab gold build"
FORMAT: Final = 1
"""Number of the layout of the folder."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was written."""

    folder: Path
    counts: Counts
    sides: Mapping[str, Mapping[str, int]]
    """Side -> rows that were read, prompts, groups, rows of preferences, pairs."""
    shared: Mapping[str, int]
    """What both sides have in common, by kind."""
    rule: str
    facts: Facts


def build(config: BuildConfig) -> Built:
    """Write the preferences that the gold scores say, and return what became of the rows.

    The rows are read twice: first to find what belongs together, then to be written. The same rows and settings give
    the same bytes, except for the manifest.

    Raises ConfigError for an output folder that may not be written, or that another process writes; DataError for rows
    that cannot be read or that change meanwhile, and if a side would have no pair.
    """
    require(config.inputs.is_given, "--input is missing: name a file that `rewardlab gold label` wrote.")
    inputs = config.inputs.files()
    require_output_folder(config.output_dir, inputs, tool=TOOL, what="preferences", overwrite=config.overwrite)
    with only_writer(config.output_dir):
        return _build(config, inputs)


def _build(config: BuildConfig, inputs: list[Path]) -> Built:
    stamps = _stamps(inputs)
    read = [{"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in inputs]
    rows = config.inputs.rows(labelled=True)
    sides = divide(rows, test_fraction=config.test_fraction, near=config.near, seed=config.seed)
    with replacing_folder(config.output_dir, is_result=True) as folder:
        built, outputs = _write(folder, config, sides)
        if _stamps(inputs) != stamps:
            raise DataError(
                f"{', '.join(map(str, inputs))}: changed while it was read. Start again when it is complete."
            )
        told = {
            "tool": TOOL,
            "format": FORMAT,
            "settings": to_mapping(replace(config, overwrite=False)),  # what decides the preferences
            "inputs": read,
            "counts": built.counts.as_dict(),
            "sides": dict(built.sides),
            "shared": dict(built.shared),
            "rule": built.rule,
            "facts": encode(built.facts),
            "outputs": outputs,
            "provenance": provenance(),
        }
        write_json(folder / MANIFEST, told)
    return built


def _stamps(paths: list[Path]) -> list[tuple[int, int]]:
    return [(state.st_size, state.st_mtime_ns) for state in (path.stat() for path in paths)]


def _write(folder: Path, config: BuildConfig, sides: Sides) -> tuple[Built, list[dict[str, object]]]:
    """Write the files of each side; return what they hold, and what the manifest says about them."""
    counts, watcher = Counts(), Watcher()
    with ExitStack() as stack:
        files = [SideFiles(folder, name, stack) for name in sides.names]
        rows = bar(config.inputs.rows(labelled=True), title="writing preferences", total=len(sides.side_R))
        seen: set[int] = set()
        for row, side in zip(rows, sides.side_R.tolist(), strict=True):
            # Hashes take less memory than ids; two ids of one hash would only make this count too high.
            name = hash(row.id)
            counts.rows_of_one_id += name in seen
            seen.add(name)
            judged = judge(row, config, counts)
            watcher.see(row.key, judged)
            files[side].write(row, judged)
    for one in files:
        if not one.num_pairs:
            raise DataError(
                f"the {one.name} side would have no pair: {one.num_labels} "
                f"{plural(one.num_labels, 'row, which does not have', 'rows, of which none has')} two replies with "
                f"different gold scores{_least(config)}. {_remedy(one.name, counts)}"
            )
    told = {
        one.name: {
            "labels": one.num_labels,
            "prompts": sides.prompts[one.name],
            "groups": sides.groups[one.name],
            "rows": one.num_rows,
            "pairs": one.num_pairs,
        }
        for one in files
    }
    built = Built(
        folder=config.output_dir,
        counts=counts,
        sides=told,
        shared=sides.shared,
        rule=sides.rule,
        facts=watcher.facts(),
    )
    return built, [facts for one in files for facts in one.facts()]


def _least(config: BuildConfig) -> str:
    return f" that differ by at least --min-margin {config.min_margin:g}" if config.min_margin else ""


def _remedy(side: str, counts: Counts) -> str:
    if side == "test" and counts.pairs_used:
        return "Hold out more with --test-fraction, or nothing with --test-fraction 0."
    told = [
        f"{num:,} of {counts.replies:,} replies {REPLY_CAUSES[one]}" for one, num in counts.replies_left_out.items()
    ]
    told += [f"{num:,} of {counts.pairs:,} pairs {PAIR_CAUSES[one]}" for one, num in counts.pairs_left_out.items()]
    return f"Left out: {'; '.join(told) or 'nothing'}."
