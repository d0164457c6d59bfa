"""Runs `rewardlab data inspect`: reads each dataset and measures what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from rewardlab.analysis.inspection import Baselines, Inspection, Sample, Tongues, spread
from rewardlab.core.terminal import listed
from rewardlab.curation.inspecting import measure
from rewardlab.curation.inspecting.columns import Columns, join, summarise
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.curation.inspecting.texts import MAX_ROWS, Drawn, Guesser, sample_of
from rewardlab.curation.models import UNCUT, counting_renderer
from rewardlab.curation.rows import map_rows, walk
from rewardlab.data.chat import Renderer
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.formats import Schema
from rewardlab.data.judgements import Rules
from rewardlab.data.reading import tell_oddities
from rewardlab.data.sources import Unit, chosen_by_limit, open_streamed, open_units
from rewardlab.data.splits import Numbers, find_roots
from rewardlab.data.unread import tell_texts_before
from rewardlab.data.winners import tell_other_winners
from rewardlab.data.workers import Crew, available_cores

WORDS: Final = "white space"
MOST_COLUMNS: Final = 12
"""Most columns of the first row that are listed."""


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """How lengths are counted: in tokens of a renderer, or in words."""

    renderer: Renderer | None
    """A renderer without a length limit; None counts words."""
    name: str
    limit: int | None

    @property
    def unit(self) -> str:
        """`tokens` or `words`."""
        return "words" if self.renderer is None else "tokens"

    @property
    def within_limit(self) -> Renderer | None:
        """The renderer with its limit, as training has it."""
        if self.renderer is None or self.limit is None:
            return None
        return self.renderer.by(max_length=self.limit)


def inspect_datasets(config: InspectConfig) -> list[Inspection]:
    """Inspect each dataset.

    Raises ConfigError if none is named or for settings that a reward model has itself, DataError if one cannot be found
    or read, and RenderError or ModelError for a model whose tokenizer cannot be used.
    """
    config.rows.require_named("inspect")
    sources = sources_of(config)
    ruler = ruler_of(config)
    workers = config.rows.reading.num_workers
    with Crew(available_cores() if workers is None else workers) as crew:
        return [_inspect(source, config, ruler, crew) for source in sources]


def sources_of(config: InspectConfig) -> tuple[Source, ...]:
    """Return the datasets that are inspected. Raises DataError if one is not found."""
    return find_sources(config.rows.dataset, config.rows.hf_split, streaming=config.rows.reading.streaming)


def ruler_of(config: InspectConfig) -> Ruler:
    """Return how lengths are counted: for a reward model by its own template and limit."""
    name = config.inspection.model or config.inspection.tokenizer
    if not name:
        return Ruler(renderer=None, name=WORDS, limit=None)
    renderer = counting_renderer(name, config.rendering)
    return Ruler(renderer=renderer.by(max_length=UNCUT), name=name, limit=renderer.spec.max_length)


def _inspect(source: Source, config: InspectConfig, ruler: Ruler, crew: Crew) -> Inspection:
    joins = ruler.renderer is not None and ruler.renderer.spec.joins_texts
    rules = Rules(source=source.name, reading=config.rows.reading, seed=config.inspection.seed, bare=joins)
    title = f"inspecting {source.label}"
    summary = partial(summarise, renderer=ruler.renderer)
    stream = open_streamed(source, rules, config.rows.limit)
    opened = None if stream is None else stream[:2]
    read = join(map_rows(source, rules, summary, crew, title=title, opened=opened, may_be_damaged=True))
    if stream is not None:
        read.tally = stream[2]
    columns = read.take(np.sort(chosen_by_limit(rules, read.tally.kept, config.rows.limit)))
    report = read.tally.report(source, used=len(columns["replies_P"]), sha256=None)
    tell_oddities(report, replies=False)  # the report itself says so
    tell_other_winners(source, rules.reading)
    tell_texts_before(source, rules.reading)
    roots_P, rule = find_roots(columns.texts()) if len(columns["replies_P"]) else (np.empty(0, np.int64), "reply")
    baselines, tongues, samples = _read_again(source, rules, columns, roots_P, config, ruler, opened=opened)
    strengths = measure.strengths_of(columns)
    return Inspection(
        name=source.name,
        split=source.split,
        **_format_of(source, rules),
        rows_read=report.rows_read,
        kept=report.kept,
        dropped=report.dropped,
        examples=_examples(report.examples, config.inspection.texts),
        left_out=report.left_out_in_words(with_example=config.inspection.texts),
        used=len(columns["replies_P"]),
        prompts=len(np.unique(columns["prompt_P"])),
        roots=len(np.unique(roots_P)),
        root_rule=rule,
        largest_root=_largest(roots_P, columns["prompt_P"]),
        num_replies=measure.num_replies_of(columns),
        turns=measure.turns_of(columns),
        system=measure.system_of(columns),
        lengths=measure.lengths_of(columns, unit=ruler.unit, counted_by=ruler.name, limit=ruler.limit),
        labels=measure.labels_of(columns, roots_P, unit=ruler.unit),
        strengths=spread(strengths, whole=bool((strengths == np.round(strengths)).all())) if strengths.size else None,
        judges=measure.judges_of(columns),
        baselines=baselines,
        tongues=tongues,
        samples=samples,
    )


def _examples(examples: Mapping[str, tuple[str, ...]], texts: bool) -> dict[str, tuple[str, ...]]:
    """Return the places of dropped rows with what was found there; without `texts`, only the places."""
    return {
        cause: tuple(place if texts else place.partition(": ")[0] for place in places)
        for cause, places in examples.items()
    }


def _format_of(source: Source, rules: Rules) -> dict[str, str]:
    """Return `format`, the format that was recognised, and `why`: the columns of the first row that decided it."""
    schema, _ = open_units(source, rules, may_be_damaged=True)
    first = next((row.rows[0] for row in walk(source, rules, may_be_damaged=True) if row.rows[0]), {})
    names = [str(name).strip() or "a column without a name" for name in first]
    among = listed(names, MOST_COLUMNS)
    return {"format": schema.name, "why": f"the first row has {schema.found or schema.columns}, among {among}"}


def _largest(roots_P: Numbers, prompts_P: np.ndarray) -> int:
    """Return the number of prompts of the root that has most."""
    if not len(roots_P):
        return 0
    _, first = np.unique(prompts_P, return_index=True)
    return int(np.unique(roots_P[first], return_counts=True)[1].max())


def _read_again(
    source: Source,
    rules: Rules,
    columns: Columns,
    roots_P: Numbers,
    config: InspectConfig,
    ruler: Ruler,
    *,
    opened: tuple[Schema, Sequence[Unit]] | None,
) -> tuple[Baselines, Tongues, tuple[Sample, ...]]:
    """Return baselines, languages and samples, which need texts, by reading the rows of the sample again.

    `opened` are the rows that were drawn from a stream.
    """
    wanted = config.inspection
    count = len(columns["replies_P"])
    # The 4 makes this draw independent of others with the same seed, as for the baselines of a run.
    order = np.random.default_rng((wanted.seed, 4)).permutation(count)
    chosen = np.sort(order[:MAX_ROWS])
    numbers = {int(columns["number_P"][place]): int(place) for place in chosen}
    per_row = float(columns["replies_P"].mean()) if count else 1.0
    spoken = {int(place) for place in order[: int(np.ceil(wanted.languages / per_row))]} if wanted.languages else set()
    shown = {int(place) for place in order[: wanted.samples]} if wanted.texts else set()
    drawn, guesser, samples = Drawn(), Guesser(), {}
    places: list[int] = []
    for row in walk(source, rules, numbers=numbers, opened=opened, may_be_damaged=True):
        preference = row.preference
        if preference is None:
            continue
        place = numbers[row.number]
        places.append(place)
        drawn.add(preference)
        if place in spoken:
            for reply in preference.replies:
                guesser.add(reply, preference.key)
        if place in shown:
            samples[place] = sample_of(preference, ruler.within_limit if wanted.model else None)
    return (
        drawn.baselines(roots_P[np.array(places, dtype=np.int64)], seed=wanted.seed),
        guesser.tongues(columns.scripts),
        tuple(samples[place] for place in sorted(samples)),
    )
