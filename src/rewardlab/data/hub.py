"""Read datasets of the Hugging Face hub, whole or as a stream, with the package datasets (extra `hub`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from rewardlab.core.errors import DataError
from rewardlab.core.optional import import_optional
from rewardlab.data.rows import Row

logger = logging.getLogger("rewardlab")

CONVERTED = "refs/convert/parquet"
"""The branch in which the hub keeps what it made of a dataset that is not Parquet."""

_COMMIT = re.compile(r"@([0-9a-f]{40})/")


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A hub name in its parts."""

    repository: str
    configuration: str | None
    revision: str | None
    """A branch, a tag or a commit; None for the newest state of the main branch."""


def parse_hub_name(name: str) -> HubName:
    """Return the parts of `organisation/name:configuration@revision`; the last two are optional.

    Raises DataError for an empty part, and for a revision that stands before the configuration.
    """
    before, at, revision = name.partition("@")
    repository, colon, configuration = before.partition(":")
    if not repository or (at and (not revision or ":" in revision)) or (colon and not configuration):
        raise DataError(
            f"dataset {name!r}: not the name of a dataset on the hub. Wanted organisation/name, "
            f"organisation/name:configuration, and @revision at the end of either."
        )
    return HubName(repository=repository, configuration=configuration or None, revision=revision or None)


def load_hub(name: str, split: str, *, streaming: bool = False) -> Any:
    """Return a dataset of the hub, or with `streaming` an iterable dataset that reads its rows as they arrive.

    A dataset with a script of its own, which the package no longer runs, comes from the hub's conversion to Parquet.

    Raises DataError if the hub does not give it, or without the package datasets.
    """
    hub_name = parse_hub_name(name)
    datasets = import_optional(
        "datasets", f"dataset {name!r} is not a local file or folder, and reading it from the hub"
    )
    _say_sought(name)
    options: dict[str, object] = {"revision": hub_name.revision} if hub_name.revision else {}
    options |= {"streaming": True} if streaming else {}
    wanted = (hub_name.repository, hub_name.configuration)
    try:
        return datasets.load_dataset(*wanted, split=split, **options)
    except Exception as error:
        if not hub_name.revision and "scripts are no longer supported" in str(error):
            return _converted(datasets, name, wanted, error, split=split, **options)
        # The library raises its own errors, those of the hub and those of the network, which have no common base.
        raise DataError(
            f"dataset {name!r}, split {split!r}: no local file or folder, and the hub did not give it "
            f"({type(error).__name__}: {one_line(error)}). Check name, split and network, or give a local path."
        ) from error


@cache
def _say_sought(name: str) -> None:
    """Say, once, that a dataset is looked for on the hub: without a network that takes most of a minute."""
    logger.info(
        "dataset %s: there is no such file here, so it is looked for on the Hugging Face hub, or in its cache", name
    )


def _converted(datasets: Any, name: str, wanted: tuple[str, str | None], script: Exception, **options: object) -> Any:
    """Return what the hub made of a dataset with a script. Raises DataError where the hub made nothing of it."""
    try:
        dataset = datasets.load_dataset(*wanted, revision=CONVERTED, **options)
    except Exception as error:
        raise DataError(
            f"dataset {name!r}: {one_line(script)}, and the hub gives no rows of its branch {CONVERTED} "
            f"({type(error).__name__}: {one_line(error)}). Get its files with: hf download {wanted[0]} "
            f"--repo-type dataset --local-dir FOLDER, and name them in place of the dataset."
        ) from error
    logger.warning("dataset %s: read from %s, since a script makes its main branch", name, CONVERTED)
    return dataset


def read_hub(name: str, split: str, *, streaming: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, row). Raises DataError as `load_hub`, and where the stream breaks off."""
    number = 0
    rows = iter(load_hub(name, split, streaming=streaming))
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            # As above: errors of the network and of the library have no common base.
            raise DataError(
                f"dataset {name!r}, split {split!r}: the hub gave no more rows after row {number} "
                f"({type(error).__name__}: {one_line(error)}). Check the network and start again."
            ) from error
        if row is None:
            return
        number += 1
        yield number, row


def hub_facts(name: str, split: str, *, streaming: bool, shuffle_buffer: int | None) -> dict[str, object]:
    """Return what a manifest says about a dataset of the hub; `shuffle_buffer` is None unless a limit drew from a
    stream. Raises DataError as `load_hub`."""
    facts: dict[str, object] = {"revision": parse_hub_name(name).revision, "streamed": streaming}
    if streaming:
        return facts | {"shuffle_buffer": shuffle_buffer}
    return facts | {"commit": commit_of(load_hub(name, split))}


def commit_of(dataset: Any) -> str | None:
    """Return the commit that a dataset of the hub came from; None if it does not say.

    The library keeps it in the addresses of the files that it downloaded.
    """
    addresses = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    commits = {match[1] for address in addresses if (match := _COMMIT.search(str(address)))}
    return commits.pop() if len(commits) == 1 else None


def one_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]
