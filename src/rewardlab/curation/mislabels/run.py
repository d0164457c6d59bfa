"""Runs `rewardlab data mislabels`: reads, hears the witnesses, ranks, measures, writes.

Legend: N pairs, P rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rewardlab.analysis.json_form import encode
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import keep_report, provenance, read_json, write_json, write_jsonl, write_text
from rewardlab.core.placing import placing
from rewardlab.core.run_folder import only_writer
from rewardlab.core.terminal import number_of
from rewardlab.core.together import together
from rewardlab.core.values import require
from rewardlab.curation.mislabels.cleaning import Done, require_cleanable, write_cleaned
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.mislabels.lengths import Lengths, lengths_of
from rewardlab.curation.mislabels.noise import Noise, estimate_noise
from rewardlab.curation.mislabels.pairs import Pairs, held_together, nearly_equal, opposites, pairs_of
from rewardlab.curation.mislabels.planting import Planted, plant
from rewardlab.curation.mislabels.ranking import Ranking, Rule, flagged_rows, rank
from rewardlab.curation.mislabels.reading import ReadData, read_data, require_training_data, rules_of, sources_of
from rewardlab.curation.mislabels.reasons import entries_of
from rewardlab.curation.mislabels.text import markdown, report
from rewardlab.curation.mislabels.witnesses import gather
from rewardlab.curation.mislabels.worth import Worth, measure_worth
from rewardlab.curation.rewriting import Stamp, stamp
from rewardlab.data.reading import log_source

FIGURES: Final = "mislabels.json"
FILES: Final = ("mislabels.jsonl", "mislabels.md", FIGURES, "report.txt")
"""Names that a search writes."""
MARK: Final = "rewardlab data mislabels"
"""The entry `written_by` of the figures, which marks a folder that a search wrote."""
REMOVING_BEATS_FLIPPING: Final = (
    "In published comparisons removing suspicious rows does better than turning them round (PrefCleanBench, NeurIPS "
    "2025, arXiv 2509.23564): a wrong flag then costs one row, and not a wrong label more."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """The result of a search."""

    output_dir: Path
    pairs: Pairs
    ranking: Ranking
    rule: Rule
    held: str
    """The rule by which rows are held out together, in words."""
    lengths: Lengths | None
    """How often flagged pairs prefer the shorter reply; None if nothing is flagged."""
    noise: Noise
    planted: Planted | None
    worth: Worth | None
    written: Sequence[str]
    """A sentence for each file that was written outside the output folder."""

    def text(self) -> str:
        """Return the report."""
        return report(
            pairs=self.pairs,
            ranking=self.ranking,
            rule=self.rule,
            held=self.held,
            lengths=self.lengths,
            noise=self.noise,
            planted=self.planted,
            worth=self.worth,
        )


def find_mislabels(config: MislabelsConfig) -> Search:
    """Search a dataset for labels that are probably wrong, as `config` says; see docs/mislabels.md.

    Raises a subclass of RewardlabError for anything the user can fix.
    """
    config.require_complete()
    require_targets(config)
    with only_writer(config.run.output_dir):
        claim(config.run.output_dir, overwrite=config.run.overwrite)
        return _find(config)


def require_targets(config: MislabelsConfig) -> None:
    """Raise ConfigError or DataError unless the files of `--remove` and `--flip` may be written of these data."""
    run = config.run
    require(
        run.remove is None or run.flip is None or run.remove.absolute() != run.flip.absolute(),
        f"--remove and --flip name one file, {run.remove}. Name two.",
    )
    targets: tuple[tuple[Done, Path | None], ...] = (("removed", run.remove), ("flipped", run.flip))
    for done, target in targets:
        if target is not None:
            source = require_training_data(sources_of(config), done)
            rules = rules_of(source, config)
            require_cleanable(source, rules, target, done, overwrite=run.overwrite)


def claim(folder: Path, *, overwrite: bool) -> None:
    """Raise ConfigError unless a search may write to `folder`."""
    there = [name for name in FILES if (folder / name).exists()]
    if not there:
        return
    figures = read_json(folder / FIGURES) if (folder / FIGURES).is_file() else None
    if not isinstance(figures, dict) or figures.get("written_by") != MARK:
        raise ConfigError(
            f"{folder} holds {', '.join(there)}, which `{MARK}` did not write. Choose another --output-dir."
        )
    if not overwrite:
        raise ConfigError(
            f"{folder} already holds a search. Choose another --output-dir, or replace it with --overwrite."
        )


def _find(config: MislabelsConfig) -> Search:
    run = config.run
    stamps = [stamp(source) for source in sources_of(config)]
    data = read_data(config)
    for source in data.reports:
        log_source(source)
    near = nearly_equal(data.preferences) if run.near_duplicates else None
    roots_P, held = held_together(data.preferences, near)
    pairs = pairs_of(data.preferences, roots_P, seed=run.seed)
    witnesses = gather(config, data, pairs)
    agree = max(2, len(witnesses)) if run.agree is None else run.agree
    require(
        agree <= len(witnesses),
        f"--agree {agree}: there are {len(witnesses)} witnesses. Ask for at most so many.",
    )
    rule = Rule(below=run.below, agree=agree, num_folds=run.folds, seed=run.seed)
    ranking = rank(witnesses, pairs, rule)
    noise = estimate_noise(ranking.together, pairs)
    planted = plant(witnesses, pairs, rule, share=run.plant, num_seeds=run.plant_seeds) if run.plant else None
    worth = measure_worth(witnesses, pairs, rule, num_seeds=run.worth_seeds) if run.worth else None
    entries = entries_of(pairs, ranking, opposites(pairs, near))
    with together() as waiting:
        search = Search(
            output_dir=run.output_dir,
            pairs=pairs,
            ranking=ranking,
            rule=rule,
            held=held,
            lengths=lengths_of(pairs, ranking.flagged_N),
            noise=noise,
            planted=planted,
            worth=worth,
            written=_cleaned(config, data, pairs, ranking, entries, since=stamps[0]),
        )
        with placing(run.output_dir, lambda: FILES, beside=waiting) as new:
            _write(new, config, search, data, entries)
    return search


# --- files ---------------------------------------------------------------------------------------------------


def _cleaned(
    config: MislabelsConfig,
    data: ReadData,
    pairs: Pairs,
    ranking: Ranking,
    entries: Sequence[Mapping[str, Any]],
    *,
    since: Stamp,
) -> list[str]:
    """Write the files of `--remove` and `--flip`; return a sentence for each."""
    run = config.run
    told: list[str] = []
    if run.remove is None and run.flip is None:
        return told
    (source,) = data.sources
    rules = rules_of(source, config)
    rows_P = flagged_rows(pairs, ranking.flagged_N)
    ids = {pairs.preferences[owner].id for owner in np.flatnonzero(rows_P).tolist()}
    trace: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if entry["id"] in ids:
            number = int(entry["id"].rpartition(":")[2])
            own = {name: entry[name] for name in ("rank", "probability", "witnesses", "reasons")}
            # The most suspicious pair of a row comes first, and gives the value.
            line = trace.setdefault(
                number,
                {
                    "row": entry["id"],
                    "check": "mislabels",
                    "value": entry["probability"],
                    "rule": _rule_of(config, ranking),
                    "pairs": [],
                },
            )
            line["pairs"].append(own)
    limited = " Rows beyond --limit were not searched, and stay." if config.rows.limit is not None else ""
    if run.remove is not None:
        left = write_cleaned(source, rules, run.remove, trace, done="removed", since=since)
        gone = number_of(len(trace), "preference")
        told.append(f"{gone} removed, {number_of(left, 'row')} left: {run.remove}.{limited}")
    if run.flip is not None:
        count = write_cleaned(source, rules, run.flip, trace, done="flipped", since=since)
        done = f"{len(trace):,} of {number_of(count, 'label')} turned round: {run.flip}."
        told.append(f"{done}{limited} {REMOVING_BEATS_FLIPPING}")
    return told


def _rule_of(config: MislabelsConfig, ranking: Ranking) -> str:
    agree = config.run.agree if config.run.agree is not None else len(ranking.testimonies)
    return f"at least {agree} witnesses below {config.run.below:g}"


def _write(
    out: Path, config: MislabelsConfig, search: Search, data: ReadData, entries: Sequence[dict[str, Any]]
) -> None:
    ranking = search.ranking
    shown = [entry for entry in entries if entry["flagged"]][: config.run.examples]
    shown += [entry for entry in entries if not entry["flagged"]][: config.run.examples - len(shown)]
    shown.sort(key=lambda entry: entry["rank"])
    texts = {}
    for entry in shown:
        preference = search.pairs.preferences[search.pairs.owners_N[ranking.order_N[entry["rank"] - 1]]]
        texts[entry["rank"]] = (
            preference.prompt,
            preference.replies[entry["preferred"]],
            preference.replies[entry["other"]],
        )
    write_jsonl(out / "mislabels.jsonl", entries)
    write_text(out / "mislabels.md", _as_utf8(markdown(shown, texts)))
    keep_report(search.text(), out)
    write_json(
        out / FIGURES,
        {
            "written_by": MARK,
            "config": to_mapping(config.replace(overwrite=False)),
            "data": [one.as_dict() for one in data.reports],
            "pairs": len(search.pairs),
            "label_ties": search.pairs.num_ties,
            "held_out": search.held,
            "flagged": int(ranking.flagged_N.sum()),
            "rule": {"below": search.rule.below, "agree": search.rule.agree, "of": len(ranking.testimonies)},
            "witnesses": {
                one.name: {
                    "agrees_with_labels": encode(one.accuracy),
                    "nll": encode(one.loss),
                    "temperatures": list(one.temperatures),
                    "silent": one.num_silent,
                }
                for one in (*ranking.testimonies, ranking.together)
            },
            "shorter_is_preferred": encode(search.lengths),
            "noise": encode(search.noise),
            "planted": None if search.planted is None else encode(search.planted),
            "worth": None if search.worth is None else encode(search.worth) | {"said": search.worth.sentences()},
            "written": list(search.written),
            "provenance": provenance(),
        },
    )


def _as_utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
