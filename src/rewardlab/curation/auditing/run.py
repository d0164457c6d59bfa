"""Read datasets once, row by row in all workers, and score every row by every check.

Checks of single rows run in the workers, which return only scores and hashes (`facts`); checks across rows then run in
this process on those. So no text has to stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import STOP, TRUNCATION_OF
from rewardlab.core.terminal import number_of, plural
from rewardlab.curation.auditing.across import FAMILIES, Scored, numbers_of
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.facts import CUTS, ROW_CHECKS, Facts, Scores, joined
from rewardlab.curation.auditing.measuring import Plan, measure
from rewardlab.curation.auditing.overlaps import LENGTHS, MOST_PROMPTS, Others, read_others
from rewardlab.curation.auditing.registry import CHECKS, LEAKS, Check, adjusted
from rewardlab.curation.auditing.result import Audit, Finding, ReadSource, share_of
from rewardlab.curation.auditing.texts import damage_finder
from rewardlab.curation.models import UNCUT, counting_renderer
from rewardlab.curation.rows import map_rows
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.sources import chosen_by_limit
from rewardlab.data.unread import tell_texts_before
from rewardlab.data.winners import tell_other_winners
from rewardlab.data.workers import Crew, available_cores

EVALUATING: Final = ("validation", "valid", "val", "dev", "eval", "test")
"""Splits that come after all others, in this order, unless `--splits` gives the order."""
SEED: Final = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Audited:
    """An audit, and all that is needed to clean the datasets."""

    audit: Audit
    facts: Facts
    sources: Sequence[Source]
    rules: Sequence[Rules]
    """How the rows of each source were read."""
    checks: Mapping[str, Check]
    near: float


def audit_rows(config: AuditConfig) -> Audited:
    """Audit the datasets that the configuration names.

    Raises DataError if one cannot be read, ConfigError if a split is asked of a single file, RenderError if there is no
    tokenizer for `--model`.
    """
    sources = sources_of(config)
    renderer, cutting = _renderers(config)
    bare = renderer is not None and renderer.spec.joins_texts
    rules = [Rules(source=source.name, reading=config.reading, seed=SEED, bare=bare) for source in sources]
    parts = _parts(sources, config.splits)
    others = _others(config, rules[0])
    reading = config.reading
    facts: list[Facts] = []
    read: list[ReadSource] = []
    with Crew(available_cores() if reading.num_workers is None else reading.num_workers) as crew:
        for number, (source, rule, part) in enumerate(zip(sources, rules, parts, strict=True)):
            plan = Plan(
                source=number,
                part=part,
                limit=config.max_seq_len,
                renderer=renderer,
                cutting=cutting,
                others=others,
            )
            title = f"auditing {source.label}"
            own = joined(map_rows(source, rule, partial(measure, plan), crew, title=title, may_be_damaged=True))
            kept = int(own.kept_U.sum())
            tell_other_winners(source, reading)
            tell_texts_before(source, reading)
            read.append(
                ReadSource(
                    label=source.label,
                    split=source.split,
                    read=len(own.kept_U),
                    kept=kept,
                    dropped=own.causes,
                    left_out=own.unused,
                    left_out_example=own.example,
                )
            )
            facts.append(own.only(_used(own, rule, config.limit)) if config.limit is not None else own)
    everything = joined(facts)
    checks = adjusted(config.threshold, config.fail_on)
    notes = _notes(config, others, None if cutting is None else cutting.spec.truncation)
    audit = judge(everything, checks, config, sources=read, notes=notes)
    return Audited(audit=audit, facts=everything, sources=sources, rules=rules, checks=checks, near=config.near)


def judge(
    facts: Facts,
    checks: Mapping[str, Check],
    config: AuditConfig,
    *,
    sources: Sequence[ReadSource],
    notes: Sequence[str],
) -> Audit:
    """Return the audit of rows by their facts: every check that was asked for, its flagged rows and its counts."""
    across = across_scores(facts, config.near)
    unasked = config.unasked
    # Checks for leaks give no scores if all rows belong to one split.
    if not across.scores.keys() >= set(LEAKS):
        unasked |= dict.fromkeys(LEAKS, "--splits, or files of several splits")
    scores = {name: facts.scores_UC[:, column] for column, name in enumerate(ROW_CHECKS)} | dict(across.scores)
    scores = {name: scores[name] for name in CHECKS if name not in unasked}
    clusters_U = _clusters(facts)
    unit = "words" if config.model is None else "tokens"
    counts = dict(across.counts)
    for name in ("overlong", "overlong-replies"):
        counts[name] = {f"{unit} that do not fit": int(facts.scores_UC[:, ROW_CHECKS.index(name)].sum(dtype=np.int64))}
    if config.model is not None:
        counts["overlong"] = {
            **counts["overlong"],
            **dict(zip(CUTS, facts.cuts_UX.sum(axis=0).tolist(), strict=True)),
        }
    labels = [source.label for source in sources]
    details = dict(facts.details)
    for name, partners in across.partners.items():
        details[name] = {
            row: f"the other way: {labels[facts.sources_U[other]]}:{facts.numbers_U[other]}"
            for row, other in partners.items()
        }
    findings = []
    for name, scores_U in scores.items():
        flagged_U = scores_U >= np.float32(checks[name].threshold)
        rows_F = np.flatnonzero(flagged_U)
        # A row of the last split that has preferences cannot leak.
        rows = facts.parts_U < facts.parts_P.max(initial=0) if name in LEAKS else slice(None)
        findings.append(
            Finding(
                check=checks[name],
                rows_F=rows_F,
                scores_F=scores_U[rows_F],
                share=share_of(flagged_U[rows], clusters_U[rows]),
                counts=counts.get(name, {}),
                details=details.get(name, {}),
                num_rows=len(scores_U),
            )
        )
    if any(one.check.name == "contradictions" and one.flagged for one in findings):
        notes = [
            *notes,
            "several people who judged the same replies in a row each contradict each other here, and their equal "
            "judgements are duplicates: `rewardlab data convert --join pairs` makes one row of them",
        ]
    return Audit(
        sources=sources,
        findings=findings,
        not_run={name: unasked[name] for name in CHECKS if name in unasked},
        notes=notes,
        labels_U=labels,
        sources_U=facts.sources_U.astype(np.int64),
        numbers_U=facts.numbers_U,
        scores=scores,
    )


def across_scores(facts: Facts, near: float) -> Scored:
    """Return the scores of all checks that look at rows together."""
    scores: dict[str, Scores] = {}
    counts: dict[str, Mapping[str, int]] = {}
    partners: dict[str, Mapping[int, int]] = {}
    # One function may compute several checks: call each only once.
    for compute in dict.fromkeys(FAMILIES.values()):
        scored = compute(facts, near)
        scores |= scored.scores
        counts |= scored.counts
        partners |= scored.partners
    return Scored(scores=scores, counts=counts, partners=partners)


def sources_of(config: AuditConfig) -> tuple[Source, ...]:
    """Return the datasets that are audited, with every split that is asked for.

    Raises DataError if one is not found, ConfigError if a split is asked of a single file.
    """
    streaming = config.reading.streaming
    if not config.splits:
        return find_sources(config.dataset, config.hf_split, streaming=streaming)
    for name in config.dataset:
        if Path(name).is_file():
            raise ConfigError(
                f"--splits: {name} is one file and has no splits. Name the files of the splits, or their folder."
            )
    return tuple(
        source for split in config.splits for source in find_sources(config.dataset, split, streaming=streaming)
    )


def _parts(sources: Sequence[Source], splits: Sequence[str]) -> list[int]:
    """Return the index of each source's split, in the order in which splits are used."""
    order = splits or sorted(
        dict.fromkeys(source.split for source in sources),
        key=lambda split: EVALUATING.index(split) + 1 if split in EVALUATING else 0,
    )
    return [list(order).index(source.split) for source in sources]


def _renderers(config: AuditConfig) -> tuple[Renderer | None, Renderer | None]:
    """Return (a renderer that counts the tokens of whole conversations, one that cuts them as training does)."""
    if config.model is None:
        return None, None
    renderer = counting_renderer(config.model, RenderingConfig())
    cutting = None
    if config.max_seq_len is not None:
        rule = None if config.truncation is None else TRUNCATION_OF[config.truncation]
        cutting = renderer.by(max_length=config.max_seq_len, truncation=rule)
    return renderer.by(max_length=UNCUT), cutting


def _others(config: AuditConfig, rules: Rules) -> Others | None:
    if not config.against:
        return None
    return read_others(config.against, split=config.hf_split, suite_data=config.suite_data, rules=rules)


def _used(facts: Facts, rules: Rules, limit: int | None) -> np.ndarray:
    """Return [U] whether a row is used under a limit: all dropped rows, and the preferences that the limit draws."""
    used_U = ~facts.kept_U
    used_U[facts.of_P[chosen_by_limit(rules, len(facts.of_P), limit)]] = True
    return used_U


def _clusters(facts: Facts) -> np.ndarray:
    """Return [U] a number for each row's prompt; a row that was dropped counts as a prompt by itself."""
    prompts_P = numbers_of(facts.texts.prompts_P)
    clusters_U = np.zeros(len(facts.kept_U), dtype=np.int64)
    clusters_U[facts.kept_U] = prompts_P
    dropped = int((~facts.kept_U).sum())
    clusters_U[~facts.kept_U] = int(prompts_P.max(initial=-1)) + 1 + np.arange(dropped)
    return clusters_U


def _notes(config: AuditConfig, others: Others | None, rule: str | None) -> list[str]:
    _, how = damage_finder()
    unit = "words" if config.model is None else f"tokens of {config.model}"
    notes = [f"near duplicates: Jaccard similarity of at least {config.near:g} of runs of three words, by MinHash"]
    notes.append(f"encoding damage is found by {how}")
    if config.max_seq_len is not None:
        names = [name for name, truncation in TRUNCATION_OF.items() if truncation == rule]
        cut = "" if rule is None else f"; what is cut is by --truncation {''.join(names) or 'prompt-left'}"
        cut += ", which ends training at the first row that it counts as left out" if rule == STOP else ""
        notes.append(f"lengths are counted in {unit}; --max-seq-len {config.max_seq_len}{cut}")
    if others is not None:
        unread = (
            f"; {others.unread:,} {plural(others.unread, 'row has', 'rows have')} no prompt that could be read"
            if others.unread
            else ""
        )
        common = (
            f"; left out as boilerplate: {number_of(others.boilerplate, 'run')} of {LENGTHS[0]} words in more than "
            f"{MOST_PROMPTS} of them"
            if others.boilerplate
            else ""
        )
        prompts = number_of(len(others.names), "prompt")
        notes.append(f"--against {' '.join(config.against)}: {prompts}{unread}{common}")
    if config.limit is not None:
        whole = "; streams are read whole all the same, and --shuffle-buffer draws nothing"
        told = f"--limit {config.limit}: rows that reading drops, and {config.limit} others of each dataset"
        notes.append(f"{told}{whole if config.reading.streaming else ''}")
    return notes
