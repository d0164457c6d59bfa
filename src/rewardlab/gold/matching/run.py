"""Runs `rewardlab gold match`: reads rows and scores, computes the numbers of every proxy, and judges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from rewardlab.analysis.distributions import quantile
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.matching import IntArray, Match, SliceMatch, match_of, slice_matches
from rewardlab.analysis.multiple import Standing, holm, standings
from rewardlab.analysis.paired import Difference, Verdicts, compare_metric, mcnemar, verdicts_of
from rewardlab.analysis.power import smallest_difference
from rewardlab.analysis.signflip import Significance
from rewardlab.analysis.stats import mean_share, numbered
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import at_home
from rewardlab.core.spec import RewardSpec
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.findings import Finding
from rewardlab.gold.foreign import is_hub_name
from rewardlab.gold.matching.built import least_loss_of, marked
from rewardlab.gold.matching.columns import Part, part_of, slice_columns
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.examples import Examples, examples_of
from rewardlab.gold.matching.judged import Judged, Limits
from rewardlab.gold.matching.order import Alternative, order_of
from rewardlab.gold.matching.pictures import drawn_of
from rewardlab.gold.matching.runs import RunFacts, read_run, run_folder_of, spec_of, step_of, what_of
from rewardlab.gold.matching.texts import other_texts, texts_of
from rewardlab.gold.matching.verdicts import judge, together
from rewardlab.gold.proxies import Proxy, pinned, proxy_scores
from rewardlab.gold.scoring import ScoringConfig
from rewardlab.report.charts import Point

PERCENTS: Final = (5, 25, 50, 75, 95)
PAIR_BYTES: Final = 350
"""Memory that the comparison of two replies takes at the peak, as measured with one proxy."""
ANYWHERE_BYTES: Final = 100_000_000
"""Memory that any machine has."""
Scores = Callable[[Sequence[str], Sequence[GoldRow], Path, ScoringConfig, int | None], list[Proxy]]


@dataclass(frozen=True, kw_only=True)
class PartMatch:
    """One part of the data: its counts, and what each proxy came to on it."""

    name: str
    num_rows: int
    num_prompts: int
    num_replies: int
    num_pairs: int
    """Pairs of replies to one prompt whose texts differ."""
    gold_ties: int
    """Pairs among these that are left out because gold gives both replies one score."""
    identical: int
    """Pairs of one text, left out."""
    without_text: int
    without_gold: int
    without_score: Mapping[str, int]
    gold_percentiles: Mapping[str, Estimate]
    percentiles: Mapping[str, Mapping[str, Estimate]]
    """Proxy -> percentile of its scores."""
    matches: Mapping[str, Match]
    slices: Mapping[str, tuple[SliceMatch, ...]]
    built: Mapping[str, Estimate] = field(default_factory=dict)
    """Proxy -> match on the pairs that `gold build` made comparisons of; empty where that is all, or not known."""
    drawn: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    """Proxy -> (gold's difference, its own) of the pairs that are in its chart, see `drawn_of`."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A proxy against the first one, on the same test pairs."""

    first: str
    second: str
    difference: Difference
    adjusted: float
    """p-value after Holm's correction for the number of proxies."""
    verdicts: Verdicts
    mcnemar: Significance | None
    smallest: Estimate
    """Smallest true difference that these pairs show with 80 % power."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known about a proxy whose model is at hand."""

    spec: RewardSpec
    texts: tuple[Alternative, ...] | None = None
    """Its match on some of the rows with other system turns; None where no rows were scored again."""


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Everything that a report says."""

    source: str
    proxies: tuple[str, ...]
    test: PartMatch
    """The rows that all verdicts are on: the test part, or the training part (by its name) where there is no other."""
    train: PartMatch | None
    """The training part beside a test part."""
    beside: tuple[Beside, ...]
    standings: Mapping[str, Standing]
    """Each proxy's place among the others, by name; empty for fewer than three proxies."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    examples: Mapping[str, Examples] = field(default_factory=dict)
    """Proxy -> test pairs that it orders against gold; empty if none are to be shown."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Proxy -> where its scores are from: a folder, a file, or a hub name with its commit."""


def match(config: MatchConfig, *, scores: Scores = proxy_scores) -> Matched:
    """Return what the scores of the proxies say beside gold's, on test rows, training rows, or both.

    Raises ConfigError and DataError for files that cannot be read, or hold too little to judge.
    """
    folder = config.output_dir / "scores"
    own = config.matching
    first = config.rows if config.rows.is_given else config.train
    test_rows = list(first.rows(labelled=True))
    require_memory(test_rows[: own.num_samples])
    named = pinned(own.proxies)
    proxies = scores(named, test_rows, folder, config.scoring, own.num_samples)
    if len(proxies) != len(named):
        raise ConfigError(f"--proxies: {len(named)} were named and {len(proxies)} have scores.")
    sources = dict(zip([proxy.name for proxy in proxies], named, strict=True))
    test = marked(
        part_of("test" if first is config.rows else "train", test_rows[: own.num_samples], proxies), first.input
    )
    train_rows, train_proxies = _train(config, sources, folder, scores)
    train = part_of("train", train_rows[: own.num_samples], train_proxies) if train_proxies else None
    train = None if train is None else marked(train, config.train.input)
    notes = [
        f"Only the first {own.num_samples:,} of the {len(rows):,} {name} rows are judged (--num-samples)."
        for name, rows in (("test" if test.name == "test" else "training", test_rows), ("training", train_rows))
        if own.num_samples is not None and own.num_samples < len(rows)
    ]
    notes += [proxy.note for proxy in proxies if proxy.note] + ([] if train is None else _shared(test, train))
    if config.train.is_given and train is None and test.name == "test":
        notes.append("No proxy has scores of the training rows: name them with --train-proxies NAME=FILE.")
    models = {
        proxy.name: Model(spec=spec, texts=_texts(sources[proxy.name], proxy, test.rows, folder, config, scores))
        for proxy in proxies
        if (spec := spec_of(sources[proxy.name])) is not None
    }
    found = match_parts(
        test,
        train,
        source=_named(first),
        runs=_runs(config, sources, {name: step_of(model.spec) for name, model in models.items()}),
        models=models,
        limits=Limits(good_match=own.good_match, least_spread=own.least_spread),
        notes=notes,
        seed=own.seed,
    )
    return replace(
        found,
        sources={name: str(what_of(source)) for name, source in sources.items()},
        examples={name: examples_of(test, name, own.num_examples) for name in sources if own.num_examples},
    )


def require_memory(rows: Sequence[GoldRow]) -> None:
    """Raise DataError if all pairs of replies of rows take more memory than can be had. They grow with the square."""
    judged = [sum(score is not None for score in row.gold or ()) for row in rows]
    pairs = sum(count * (count - 1) // 2 for count in judged)
    if pairs * PAIR_BYTES <= ANYWHERE_BYTES:
        return
    # Here, since it imports torch, which the match of files of scores needs for nothing else.
    from rewardlab.training.cost.memory import available

    has = available()
    if has is None or pairs * PAIR_BYTES <= has:
        return
    raise DataError(
        f"{number_of(len(rows), 'row')} with up to {number_of(max(judged), 'reply')} have {pairs:,} pairs of replies, "
        f"which together take about {pairs * PAIR_BYTES / 1e9:,.1f} GB of memory, and {has / 1e9:,.1f} GB can be had. "
        f"Take fewer replies of each row with --num-responses, or fewer rows with --num-samples."
    )


def _texts(
    source: str, proxy: Proxy, rows: Sequence[GoldRow], folder: Path, config: MatchConfig, scores: Scores
) -> tuple[Alternative, ...] | None:
    """Return the match of a model on some of the rows with other system turns; None if none are to be scored."""
    if not config.matching.num_rescored:
        return None
    places, forms = other_texts(rows, config.matching.num_rescored)
    if not forms:
        return ()
    changed = [row for several in forms.values() for row in several]
    (again,) = scores([f"{proxy.name}={what_of(source)}"], changed, folder, config.scoring, None)
    there = {name: again.scores[k * len(places) : (k + 1) * len(places)] for k, name in enumerate(forms)}
    return texts_of([rows[place] for place in places], [proxy.scores[place] for place in places], there)


def match_parts(
    test: Part,
    train: Part | None = None,
    *,
    source: str = "",
    runs: Mapping[str, RunFacts] | None = None,
    models: Mapping[str, Model] | None = None,
    limits: Limits | None = None,
    notes: Sequence[str] = (),
    seed: int = 0,
) -> Matched:
    """Return the numbers of parts that were read, and the verdicts; `match` reads them."""
    names = tuple(test.scores)
    done = _part(test)
    trained = None if train is None else _part(train)
    findings: list[Finding] = []
    for name in names:
        model, run = (models or {}).get(name), (runs or {}).get(name)
        template, differs = _template(test, None if model is None else model.spec)
        judged = Judged(
            name=name,
            test=done.matches[name],
            train=done.matches[name]
            if done.name == "train"
            else None
            if trained is None
            else trained.matches.get(name),
            order=order_of(test.table[name], test.table["gold"], test.replies.prompts),
            train_order=None
            if train is None or name not in train.table
            else order_of(train.table[name], train.table["gold"], train.replies.prompts),
            run=run,
            template=template,
            template_differs=differs,
            texts=None if model is None else model.texts,
            test_built=done.built.get(name),
            train_built=done.built.get(name)
            if done.name == "train"
            else None
            if trained is None
            else trained.built.get(name),
            least_loss=0.0 if run is None else least_loss_of(test if train is None else train, run),
            is_of_training=done.name == "train",
        )
        findings += judge(judged, limits or Limits())
    return Matched(
        source=source,
        proxies=names,
        test=done,
        train=trained,
        beside=_beside(test, seed),
        standings=_standings(test),
        findings=tuple(together(findings)),
        notes=tuple(notes),
    )


def _named(rows: InputConfig) -> str:
    return ", ".join(str(path) for path in (*rows.input, rows.responses_path) if path is not None)


def _train(
    config: MatchConfig, sources: Mapping[str, str], folder: Path, scores: Scores
) -> tuple[list[GoldRow], list[Proxy]]:
    """Return the training rows, and the proxies that have scores of them: models, and those given for them."""
    own = config.matching
    if not (config.train.is_given and config.rows.is_given):
        return [], []
    rows = list(config.train.rows(labelled=True))
    require_memory(rows[: own.num_samples])
    given = {source.partition("=")[0]: source for source in own.train_proxies}
    for name in given:
        if name not in sources:
            raise ConfigError(f"--train-proxies {name}: no proxy has this name; there are {', '.join(sources)}.")
    asked = [
        given.get(name) or f"{name}={what_of(source)}"
        for name, source in sources.items()
        if name in given or what_of(source).is_dir() or is_hub_name(str(what_of(source)))
    ]
    return rows, scores(asked, rows, folder, config.scoring, own.num_samples) if asked else []


def _shared(test: Part, train: Part) -> list[str]:
    """Return a note on prompts that both parts hold, if any: test rows that were trained on prove nothing."""
    both = set(test.replies.prompts) & set(train.replies.prompts)
    if not both:
        return []
    return [
        f"{len(both):,} prompts are in both parts: the match on test is that of prompts which were trained on. "
        f"Split the rows again by prompt."
    ]


def _runs(config: MatchConfig, sources: Mapping[str, str], steps: Mapping[str, int | None]) -> dict[str, RunFacts]:
    """Return what the run of each proxy says, as far as there is one. `steps` has those at which models were saved."""
    given = {}
    for source in config.matching.runs:
        name, _, folder = source.partition("=")
        if name not in sources:
            raise ConfigError(f"--runs {name}: no proxy has this name; there are {', '.join(sources)}.")
        given[name] = at_home(folder)
    found = {name: given.get(name) or run_folder_of(source) for name, source in sources.items()}
    return {name: read_run(folder, steps.get(name)) for name, folder in found.items() if folder is not None}


def _part(part: Part) -> PartMatch:
    own = part.replies
    columns = slice_columns(part)
    prompt_R = own.prompt_L[own.row_R]
    return PartMatch(
        name=part.name,
        num_rows=len(part.rows),
        num_prompts=len(set(own.prompts)),
        num_replies=len(own.gold_R),
        num_pairs=len(own.first_N),
        gold_ties=int((~own.decided_N).sum()),
        identical=own.num_identical,
        without_text=part.without_text,
        without_gold=part.without_gold,
        without_score=part.without_score,
        gold_percentiles=_percentiles(own.gold_R, prompt_R),
        percentiles={name: _percentiles(scores_R, prompt_R) for name, scores_R in part.scores.items()},
        matches={name: match_of(own, scores_R) for name, scores_R in part.scores.items()},
        slices={name: slice_matches(own, scores_R, columns) for name, scores_R in part.scores.items()},
        built=_match_on_built(part),
        drawn={name: drawn_of(own, scores_R) for name, scores_R in part.scores.items()},
    )


def _match_on_built(part: Part) -> dict[str, Estimate]:
    own = part.replies
    if part.built_N is None:
        return {}
    built_D = part.built_N[own.decided_N]
    keys = [key for key, keep in zip(own.decided_keys, built_D.tolist(), strict=True) if keep]
    return {name: mean_share(own.outcomes(scores_R)[built_D], keys) for name, scores_R in part.scores.items()}


def _percentiles(scores_R: FloatArray, prompt_R: IntArray) -> dict[str, Estimate]:
    return {f"p{percent}": quantile(scores_R, prompt_R, share=percent / 100) for percent in PERCENTS}


def _beside(part: Part, seed: int) -> tuple[Beside, ...]:
    """Return every other proxy against the first, on the same decided pairs."""
    names, keys = list(part.scores), part.replies.decided_keys
    outcomes = {name: part.replies.outcomes(scores_R) for name, scores_R in part.scores.items()}
    first = outcomes[names[0]]
    found = [(name, compare_metric("accuracy", first, outcomes[name], keys)) for name in names[1:]]
    adjusted = holm([difference.test.p for _, difference in found])
    return tuple(
        Beside(
            first=names[0],
            second=name,
            difference=difference,
            adjusted=p,
            verdicts=verdicts_of(first, outcomes[name]),
            mcnemar=mcnemar(first, outcomes[name], keys),
            smallest=smallest_difference(outcomes[name] - first, tuple(keys)),
        )
        for (name, difference), p in zip(found, adjusted, strict=True)
    )


def _standings(part: Part) -> dict[str, Standing]:
    if len(part.scores) < 3:
        return {}
    prompts_N, _ = numbered(part.replies.decided_keys)
    return standings({name: part.replies.outcomes(scores_R) for name, scores_R in part.scores.items()}, prompts_N)


def _template(part: Part, spec: RewardSpec | None) -> tuple[str, bool]:
    """Return what a folder says about the system turn, beside that of the rows, and whether they differ."""
    if spec is None:
        return "", False
    given = [next((turn.content for turn in row.prompt if turn.role == "system"), None) for row in part.rows]
    adds = spec.renderer.system_prompt
    template = f"{spec.renderer.template_source} template {spec.renderer.template_hash[:12]}"
    with_turn = sum(text is not None for text in given)
    told = (
        f"Its folder renders with the {template}, at most {spec.renderer.max_length:,} tokens, and adds "
        f"{'no system turn' if adds is None else f'the system turn {adds!r:.60}'}; {with_turn:,} of {len(given):,} "
        f"rows bring a system turn."
    )
    other = sum(text is not None and adds is not None and text != adds for text in given)
    if other:
        told += f" In {other:,} rows it is not the one that the folder adds."
    # Where the folder adds none and only some rows have one, these rows are rendered differently from the others.
    mixed = 0 < with_turn < len(given) and adds is None
    return told, bool(other) or mixed
