"""Named datasets -> preferences as stored tokens: taken from the cache, or read, tokenised and kept there.

It is the only way from rows to tokens, for training, evaluation, probes and tools alike.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.files import at_home, cache_folder
from rewardlab.core.terminal import listed, plural
from rewardlab.data.cache import Cache, key_of
from rewardlab.data.chat import Renderer
from rewardlab.data.config import Control, ReadingConfig
from rewardlab.data.dataset_names import Named
from rewardlab.data.finding import Source
from rewardlab.data.formats import SCHEMAS, Schema, unit_of
from rewardlab.data.formats.kwise import CODE_ULTRAFEEDBACK, RATED, STACK_EXCHANGE, ULTRAFEEDBACK
from rewardlab.data.formats.shp import SHP, SHP_BY_POST
from rewardlab.data.groups import Part
from rewardlab.data.hub import hub_facts
from rewardlab.data.judgements import Rules, seeded_generator
from rewardlab.data.pipeline import write_store
from rewardlab.data.readers import fingerprint
from rewardlab.data.sources import chosen_by_limit, tell_streamed
from rewardlab.data.store import TokenStore
from rewardlab.data.tally import SourceReport, Tally
from rewardlab.data.unread import unread
from rewardlab.data.weights import counts_by_share, report_shares, shares_in_words
from rewardlab.data.winners import first_of, tell_other_winners
from rewardlab.data.workers import Crew, available_cores

logger = logging.getLogger("rewardlab")
_OF_SHP: Final = ("rows of SHP", (SHP, SHP_BY_POST))
FOR_FORMATS: Final[Mapping[str, tuple[str, tuple[Schema, ...]]]] = {
    "shp": _OF_SHP,
    "max_per_post": _OF_SHP,
    "min_score_ratio": _OF_SHP,
    "attributes": (
        "rated replies, as of HelpSteer and UltraFeedback",
        (RATED, ULTRAFEEDBACK, CODE_ULTRAFEEDBACK, STACK_EXCHANGE),
    ),
    "strength_column": (
        "rows that take their strength from a column, not from votes or ratings",
        tuple(schema for schema in SCHEMAS if not schema.own_strength),
    ),
}
"""Flag that has a meaning in some formats alone -> these in words, and these."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """Datasets read and tokenised, by purpose."""

    parts: Mapping[str, Part]
    """Purpose -> its preferences."""
    sources: Mapping[str, Sequence[SourceReport]]
    """Purpose -> reports on the rows, one for each dataset."""
    preparation: Sequence[dict[str, object]]
    """How long each dataset took, and whether it came from the cache."""
    weights: Mapping[str, Mapping[str, object]]
    """Purpose -> the shares of its datasets, where they have weights."""


def read_named(
    named: Sequence[Named],
    reading: ReadingConfig,
    renderer: Renderer,
    *,
    seed: int,
    kwise_loss: str = "pairs",
    bare: bool = False,
    controls: Mapping[str, Control] = MappingProxyType({}),
    shows_row: bool = False,
) -> Read:
    """Read and tokenise datasets, or take them from the cache.

    `bare` takes texts as they are, without splitting transcripts into turns. `controls` are purpose -> what is changed
    in its data on purpose. With `shows_row` the first row of each file is logged as it was understood.

    Raises DataError if a dataset cannot be read, or if too many of its rows cannot be used.
    """
    parts: dict[str, Part] = {}
    sources: dict[str, Sequence[SourceReport]] = {}
    preparation: list[dict[str, object]] = []
    weights: dict[str, dict[str, object]] = {}
    with Crew(available_cores() if reading.num_workers is None else reading.num_workers) as crew:
        for wanted in named:
            prepared = [
                _prepare(
                    source,
                    Rules(
                        source=source.name,
                        reading=reading,
                        seed=seed,
                        kwise_loss=kwise_loss,
                        bare=bare,
                        control=controls.get(wanted.purpose),
                    ),
                    wanted.limit,
                    renderer,
                    crew,
                    shows_row=shows_row,
                )
                for source in wanted.sources()
            ]
            if wanted.weighted is not None:
                prepared, weights[wanted.purpose] = _weigh(prepared, wanted, seed)
                logger.info(shares_in_words(weights[wanted.purpose]))
            parts[wanted.purpose] = Part.join([(done.store, done.numbers) for done in prepared])
            sources[wanted.purpose] = [done.report for done in prepared]
            preparation += [done.preparation for done in prepared]
    reports = [report for several in sources.values() for report in several]
    for said in idle_flags(reading, [report.format for report in reports]):
        logger.warning("data: %s", said)
    for said in partly_idle_flags(reading, reports):
        logger.info("data: %s", said)
    # What is held out for evaluation comes from the same sources as training data.
    told: set[tuple[object, ...]] = set()
    training_first = sorted(named, key=lambda wanted: wanted.purpose != "train")
    for purpose, source in ((wanted.purpose, source) for wanted in training_first for source in wanted.sources()):
        if (known := (source.path, source.name, source.split)) in told:
            continue
        told.add(known)
        tell_other_winners(source, reading, rows := first_of(source))
        for said in unread(rows, reading, renderer) if purpose == "train" else ():
            logger.warning("data: %s: %s", source.label, said)
    return Read(parts=parts, sources=sources, preparation=preparation, weights=weights)


def idle_flags(reading: ReadingConfig, formats: Sequence[str]) -> list[str]:
    """Return a line for each flag that is for other formats than those in which the data were found to be."""
    usual = ReadingConfig()
    return [
        f"--{name.replace('_', '-')} does nothing: it is for {what}, and none of the data are. Leave it out, or see "
        f"which format was recognised above."
        for name, (what, schemas) in FOR_FORMATS.items()
        if getattr(reading, name) != getattr(usual, name)
        and not any(one.startswith(f"{schema.name}, ") for one in formats for schema in schemas)
    ]


def partly_idle_flags(reading: ReadingConfig, reports: Sequence[SourceReport]) -> list[str]:
    """Return a line for each flag that is for the formats of some of these data and does nothing for the others."""
    usual, lines = ReadingConfig(), []
    for name, (what, schemas) in FOR_FORMATS.items():
        reads = {
            f"{report.name}[{report.split}]": any(report.format.startswith(f"{one.name}, ") for one in schemas)
            for report in reports
        }
        if getattr(reading, name) != getattr(usual, name) and len({*reads.values()}) == 2:
            others = listed([data for data, is_read in reads.items() if not is_read], 5)
            lines.append(f"--{name.replace('_', '-')} does nothing for {others}: it is for {what}.")
    return lines


def tell_oddities(report: SourceReport, *, replies: bool = True) -> None:
    """Log a warning if texts of a dataset are messages as JSON and, with `replies`, if replies were left out of rows
    that are kept.
    """
    if replies and (left_out := report.left_out_in_words()):
        logger.warning("data: %s[%s]: %s", report.name, report.split, left_out)
    if report.json_texts:
        logger.warning(
            "data: %s[%s]: in %d %s a text is messages written as JSON, and is read as a text; if messages are meant, "
            "store them as lists, not as text",
            report.name,
            report.split,
            report.json_texts,
            plural(report.json_texts, "row"),
        )


def log_source(report: SourceReport) -> None:
    """Log how many rows of a dataset were read, kept and dropped."""
    dropped = ", ".join(f"{cause} {count}" for cause, count in report.dropped.items()) or "none"
    logger.info(
        "data: %s[%s]: %d %s read, %d kept, dropped: %s",
        report.name,
        report.split,
        report.rows_read,
        plural(report.rows_read, unit_of(report.format)),
        report.kept,
        dropped,
    )
    if report.skipped:
        causes = ", ".join(f"{cause} {count}" for cause, count in report.skipped.items())
        logger.info("data: %s[%s]: judgements of kept posts left out: %s", report.name, report.split, causes)
    if report.labelled:
        logger.log(
            logging.WARNING if report.swapped else logging.INFO,
            "data: %s[%s]: 'label' of %d %s is read as the probability that chosen is preferred%s",
            report.name,
            report.split,
            report.labelled,
            plural(report.labelled, "row"),
            f"; in {report.swapped} it is below 1/2, so that rejected is preferred" if report.swapped else "",
        )
    tell_oddities(report)
    if report.second_preferred:
        logger.info(
            "data: %s[%s]: %d of the comparisons %s a label below 1/2, so that their second reply is preferred",
            report.name,
            report.split,
            report.second_preferred,
            plural(report.second_preferred, "has", "have"),
        )


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A prepared dataset."""

    store: TokenStore
    numbers: npt.NDArray[np.int64]
    """Indices of the preferences that are used, in order."""
    report: SourceReport
    preparation: dict[str, object]


def _prepare(
    source: Source, rules: Rules, limit: int | None, renderer: Renderer, crew: Crew, *, shows_row: bool
) -> _Done:
    """Take a dataset from the cache, or read, tokenise and cache it. Log how long that took.

    Raises DataError if it cannot be read, if it changes while it is read, and if too many rows would be dropped.
    """
    started = time.perf_counter()
    # Without a fingerprint the key would not change with the content, so nothing is cached.
    content = fingerprint(source)
    # Rows in memory may be private, so they are not kept on the disk unless the user names a folder.
    keeps = content is not None and (source.rows is None or rules.reading.cache_dir != "auto")
    cache = Cache(_cache_folder(rules.reading.cache_dir) if keeps else None)

    def key(of_limit: int | None) -> str:
        return key_of(source, content or "", rules=rules, limit=of_limit, renderer=renderer)

    def write(folder: Path) -> None:
        write_store(folder, source, rules=rules, limit=limit, renderer=renderer, crew=crew)
        if (source.path is not None or source.rows is not None) and content != fingerprint(source):
            raise DataError(f"{source.label} changed while it was read. Start again when it is complete.")

    # A store of the whole dataset serves a run with a limit too: the chosen rows are taken from it.
    whole = cache.find(key(None)) if limit is not None else None
    store, made = (whole, False) if whole is not None else cache.make(key(limit), write)
    tally = Tally.from_dict(store.facts)
    chosen = chosen_by_limit(rules, tally.kept, limit)
    # A store that was written for a limit holds the chosen preferences alone, in the order of the file.
    numbers = np.argsort(np.argsort(chosen)) if limit is not None and whole is None else chosen
    seconds = time.perf_counter() - started
    sha256 = content if source.path or source.rows is not None else None
    report = tally.report(source, used=len(chosen), sha256=sha256)
    logger.info("data: %s[%s]: format: %s", report.name, report.split, report.format)
    if shows_row:
        _log_first_row(source, tally.first)
    if source.is_on_hub:
        report = replace(report, hub=_hub_facts(source, rules.reading, limit))
    counted = f"{report.rows_read} {plural(report.rows_read, unit_of(report.format))}"
    _log_preparation(source, made, counted, len(chosen), seconds)
    report.require_usable(source.label, rules.reading.max_drop_fraction)
    preparation = {"name": source.name, "from_cache": not made, "seconds": round(seconds, 3)}
    return _Done(store=store, numbers=numbers, report=report, preparation=preparation)


def _log_first_row(source: Source, first: str) -> None:
    """Log the first row that became a preference, as text, a record a line, each escaped by the log.

    Rows in memory are not shown, since they may be private, nor are those of streams, whose first row may be any row
    that was drawn.
    """
    if source.rows is not None or source.streaming or not first:
        return
    for line in f"first row: {first}".split("\n"):
        logger.info("data: %s[%s]: %s", source.name, source.split, line)


def _hub_facts(source: Source, reading: ReadingConfig, limit: int | None) -> dict[str, object]:
    """Return what the manifest says about data from the hub, and log how a stream was drawn from."""
    if source.streaming and limit is not None:
        tell_streamed(source, limit, reading.shuffle_buffer)
    buffer = None if limit is None else reading.shuffle_buffer
    return hub_facts(source.name, source.split, streaming=source.streaming, shuffle_buffer=buffer)


def _weigh(prepared: Sequence[_Done], wanted: Named, seed: int) -> tuple[list[_Done], dict[str, object]]:
    """Return (the datasets with as many of their preferences as their shares allow, the report on the shares).

    They are drawn as `--limit` draws them. Raises DataError if a dataset would give no row.
    """
    assert wanted.weighted is not None
    available = [len(done.numbers) for done in prepared]
    counts = counts_by_share(available, wanted.weighted.shares, wanted.weighted.names)
    names = [done.report.name for done in prepared]
    drawn = []
    for done, name, count in zip(prepared, names, counts, strict=True):
        # Rows that a limit left are in the random order of its draw already.
        order = done.numbers if wanted.limit else seeded_generator(seed, name).permutation(len(done.numbers))
        drawn.append(replace(done, numbers=order[:count]))
    return drawn, report_shares(wanted.weighted, names, available, counts)


def _cache_folder(setting: str) -> Path | None:
    """Return the folder of the cache for the value of `--cache-dir`; None if nothing is cached."""
    if setting == "none":
        return None
    return cache_folder(os.environ) / "tokens" if setting == "auto" else at_home(setting).absolute()


def _log_preparation(source: Source, made: bool, counted: str, num_used: int, seconds: float) -> None:
    name = f"{source.name}[{source.split}]"
    if made:
        rate = num_used / max(seconds, 1e-9)
        logger.info("prepared: %s: %s in %.1f s, %.0f preferences/s", name, counted, seconds, rate)
    else:
        logger.info("prepared: %s: read from cache in %.1f s", name, seconds)
