"""The effect of a control on data that were read with it: the rows that it keeps, and exact counts of its changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from rewardlab.core.controls import notice
from rewardlab.core.errors import DataError
from rewardlab.data.config import Control, DataConfig, Purpose
from rewardlab.data.groups import Part
from rewardlab.data.pipeline import NOT_MATCHED
from rewardlab.data.store import LEFT_OUT, TokenStore

logger = logging.getLogger("rewardlab")


class NothingChangedError(DataError):
    """Data in which a control finds nothing to change."""


def controls_of(config: DataConfig, seed: int) -> dict[str, Control]:
    """Return purpose -> control, for the purposes whose data are changed."""
    purposes: tuple[Purpose, ...] = ("train", "eval", "test")
    found = {purpose: config.diagnostic.control(purpose, seed=seed) for purpose in purposes}
    return {purpose: control for purpose, control in found.items() if control is not None}


def selected(part: Part) -> Part:
    """Return the preferences that the control `length_matched` keeps; without it, all."""
    return part.take(part.causes() != 1 + LEFT_OUT.index(NOT_MATCHED))


def report_control(config: DataConfig, parts: Mapping[str, Part], seed: int) -> dict[str, Any]:
    """Return what a control did, with counts for each kind of data and dataset, and log it.

    Raises NothingChangedError if it changed nothing at all, DataError if it left nothing to train on.
    """
    settings = config.diagnostic
    counts: dict[str, list[dict[str, object]]] = {}
    for purpose, part in parts.items():
        if purpose in settings.splits and len(part):
            counts[purpose] = [_count(store, own) for store, own in part.by_store() if len(own)]
    told = [
        f"{count['kept']} of {count['rows']} rows of {count['dataset']} ({purpose}) kept"
        if settings.diagnostic_mode == "length_matched"
        else f"{count['changed']} of {count['rows']} rows of {count['dataset']} ({purpose}) changed"
        for purpose, several in counts.items()
        for count in several
    ]
    logger.warning("%s: %s", notice(settings.diagnostic_mode, settings.splits), "; ".join(told) or "no rows")
    everything = [count for several in counts.values() for count in several]
    if settings.diagnostic_mode == "random_negatives" and not any(count["changed"] for count in everything):
        raise NothingChangedError(
            "--diagnostic-mode random_negatives: no row has a reply to another prompt that could take the place of its "
            "rejected one. It needs two conversations or more whose replies differ, and preferences that are not ties."
        )
    if settings.diagnostic_mode == "length_matched" and not len(selected(parts["train"])):
        raise DataError(
            f"--diagnostic-mode length_matched: no two replies differ by fewer than "
            f"{settings.diagnostic_length_threshold} tokens. Raise --diagnostic-length-threshold."
        )
    if settings.diagnostic_mode == "length_matched" and all(
        count["kept"] == count["rows"] and not count["changed"] for count in everything
    ):
        logger.warning(
            "--diagnostic-mode length_matched took nothing out, since all replies differ by fewer than %d tokens: this "
            "run is as one without it, and says nothing about length. Lower --diagnostic-length-threshold",
            settings.diagnostic_length_threshold,
        )
    return {
        "mode": settings.diagnostic_mode,
        "splits": list(settings.splits),
        "settings": {
            purpose: asdict(control)
            for purpose in settings.splits
            if (control := settings.control(purpose, seed=seed)) is not None
        },
        "counts": counts,
    }


def _count(store: TokenStore, part: Part) -> dict[str, object]:
    """Return how many rows of a dataset a control changed, left as they were, and kept."""
    kept, changed = len(selected(part)), int(np.count_nonzero(part.changed()))
    return {
        "name": store.source,
        "dataset": store.facts["dataset"],
        "rows": len(part),
        "changed": changed,
        "left": len(part) - changed,
        "kept": kept,
    }
