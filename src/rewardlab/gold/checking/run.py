"""Runs `rewardlab gold check`: reads the files of all stages, holds them against each other, and draws rows to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewardlab.core.terminal import number_of
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.checking.manifests import file_findings
from rewardlab.gold.checking.pairs import pair_findings
from rewardlab.gold.checking.reading import Pair, Stages, bare_key, read_stages
from rewardlab.gold.checking.rows import row_findings
from rewardlab.gold.checking.stages import stage_findings
from rewardlab.gold.checking.texts import text_finding
from rewardlab.gold.findings import Finding
from rewardlab.gold.shown import Shown


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Everything that a report says."""

    files: tuple[str, ...]
    """What was read, with its number of rows."""
    findings: tuple[Finding, ...]
    shown: tuple[Shown, ...]


def check(config: CheckConfig) -> Checked:
    """Return what the files of all stages say about each other.

    Raises ConfigError and DataError for files that are not there, or have no known form.
    """
    stages = read_stages(config)
    # Scores near the largest float have an infinite spread; they are judged all the same.
    with np.errstate(over="ignore", invalid="ignore"):
        found = [*stage_findings(stages), *row_findings(stages.rows)]
    text = text_finding(stages.rows, seed=config.seed)
    found += [] if text is None else [text]
    found += [*pair_findings(stages), *file_findings(stages)]
    return Checked(files=tuple(_files(stages)), findings=tuple(found), shown=_shown(stages, config))


def _files(stages: Stages) -> list[str]:
    sizes = {
        "prompts": stages.prompts,
        "samples": stages.samples,
        "responses": stages.responses,
        "rewards": stages.rewards,
        "labels": stages.labels,
    }
    told = [
        f"{path}: {number_of(len(sizes[what] or ()), 'row')}" if what in sizes else str(path)
        for what, path in stages.names.items()
    ]
    return [*told, *(f"{one.path}: {number_of(len(one.pairs), 'pair')}" for one in stages.built)]


def _shown(stages: Stages, config: CheckConfig) -> tuple[Shown, ...]:
    """Return rows drawn with the seed, in the order of the file; pairs where there are no rows."""
    generator = np.random.default_rng((config.seed, 7))
    if not stages.rows:
        pairs = [pair for built in stages.built[:1] for pair in built.pairs]
        return tuple(_pair(pairs[place]) for place in _drawn(len(pairs), config.num_samples, generator))
    by_prompt: dict[str, list[Pair]] = {}
    for built in stages.built:
        for pair in built.pairs:
            by_prompt.setdefault(bare_key(pair.prompt), []).append(pair)
    shown = []
    for place in _drawn(len(stages.rows), config.num_samples, generator):
        row = stages.rows[place]
        pairs = by_prompt.get(bare_key(row.prompt), [])
        gold = row.gold or (None,) * len(row.responses)
        replies = tuple(
            (_facts(number, score, cut, text, pairs), text or "")
            for number, (text, score, cut) in enumerate(zip(row.responses, gold, row.is_cut, strict=True))
        )
        shown.append(Shown(title=f"Row {place + 1} (id {row.id})", prompt=row.prompt, replies=replies))
    return tuple(shown)


def _drawn(count: int, wanted: int, generator: np.random.Generator) -> list[int]:
    chosen: list[int] = sorted(generator.permutation(count)[:wanted].tolist())
    return chosen


def _facts(number: int, score: float | None, cut: bool, text: str | None, pairs: Sequence[Pair]) -> str:
    """Return what is known of a reply, in words."""
    known = [f"reply {number}", "no gold score" if score is None else f"gold {score:g}"]
    known += ["cut at the token limit"] if cut else []
    known += ["could not be sampled"] if text is None else []
    known += ["chosen"] if any(pair.chosen == text for pair in pairs) else []
    known += ["rejected"] if any(pair.rejected == text for pair in pairs) else []
    return ", ".join(known)


def _pair(pair: Pair) -> Shown:
    return Shown(
        title=f"Pair {pair.number}", prompt=pair.prompt, replies=(("chosen", pair.chosen), ("rejected", pair.rejected))
    )
