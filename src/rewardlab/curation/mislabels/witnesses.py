"""The witnesses: heads on layers of a model, reward models that score the data, and scores that exist already.

Legend: N pairs, G groups, R replies, F features.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from rewardlab.analysis.aligned import ScoreSet
from rewardlab.core.errors import DataError
from rewardlab.core.files import cache_folder
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.core.types import ScoreRow, TokenGroup
from rewardlab.core.values import require
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.mislabels.crossfit import Witness
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs
from rewardlab.curation.mislabels.reading import ReadData
from rewardlab.data.chat import Renderer
from rewardlab.data.dataset_names import Named
from rewardlab.data.finding import ALL_ROWS, Source
from rewardlab.data.groups import Groups
from rewardlab.data.splits import Numbers
from rewardlab.data.weights import without_weights
from rewardlab.evaluation.score_files import read_scores

logger = logging.getLogger("rewardlab")
DEPTHS: Final = (1 / 2, 5 / 6)
"""Relative depths of the two layers that testify by default. Middle layers often predict judgements better than the
last one; two layers that are a third of the model apart make different mistakes."""


def gather(config: MislabelsConfig, data: ReadData, pairs: Pairs) -> list[Witness]:
    """Return all witnesses, the heads first.

    Raises ConfigError for fewer than two, and a subclass of RewardlabError for a model or file that cannot be used.
    """
    witnesses = list(_heads(config, pairs)) if config.model.model else []
    for name in config.run.witness:
        path = Path(name)
        if (path / SPEC_FILE).is_file():
            witnesses.append(_scored_by(config, path, data, pairs))
        else:
            witnesses.append(
                of_scores(read_scores(path, name=name).scores, pairs, data, config.rows.reading.max_replies)
            )
    names = [witness.name for witness in witnesses]
    require(len(set(names)) == len(names), f"--witness: {', '.join(names)} name a witness twice. Name each once.")
    require(
        len(witnesses) >= 2,
        f"{len(witnesses)} witness: at least two are needed, since one alone cannot tell a wrong label from its own "
        f"mistake. Name two --layers, or a --witness.",
    )
    return witnesses


# --- scores that are there -----------------------------------------------------------------------------------


def of_scores(scores: ScoreSet, pairs: Pairs, data: ReadData, max_replies: int | None = None) -> Witness:
    """Return the witness of score rows.

    Rows are matched to pairs by source, id and reply, or by id and reply. Without ids they are matched by their place
    in the file, which must then have as many rows as the dataset. Where `max_replies` of a longer row were drawn, they
    were numbered anew, so scores of all replies of the row say nothing of them.

    Raises DataError if no pair has scores, if a row scores another prompt, or if places cannot be matched.
    """
    by_key: dict[tuple[str, str, int], ScoreRow] = {}
    longer = {(row.source, row.preference_id) for row in scores.rows if max_replies and row.reply >= max_replies}
    for row in scores.rows:
        if (row.source, row.preference_id) in longer:
            continue
        for source in {row.source, ""}:
            by_key[source, row.preference_id, row.reply] = row
    placed = _by_place(scores, data) if scores.by_place else None

    def found(owner: int, reply: int) -> ScoreRow | None:
        preference = pairs.preferences[owner]
        if placed is not None:
            return by_key.get(("", placed[data.positions[owner]], reply))
        keys = ((preference.source, preference.id), ("", preference.id))
        return next((row for key in keys if (row := by_key.get((*key, reply))) is not None), None)

    margins_N = np.full(len(pairs), np.nan)
    for number, owner in enumerate(pairs.owners_N.tolist()):
        first, second = (found(owner, int(side[number])) for side in (pairs.first_N, pairs.second_N))
        if first is None or second is None:
            continue
        # Keys can be compared only with our own evaluations, which hash prompts as is done here.
        if scores.layout == "rewardlab" and first.prompt_key != pairs.preferences[owner].key:
            raise DataError(
                f"--witness {scores.name}: scores another prompt for {pairs.preferences[owner].id}. These are scores "
                f"of other data, or the data have changed since. Score them again."
            )
        margins_N[number] = first.score - second.score
    margins_N[~np.isfinite(margins_N)] = np.nan
    if not np.isfinite(margins_N).any():
        raise DataError(
            f"--witness {scores.name}: has no score for any of the {len(pairs)} pairs. Rows are known by source and "
            f"id, or by their place; score this very dataset"
            + (", with the same --max-replies and --seed." if longer else ".")
        )
    return Witness(name=scores.name, margins_N=margins_N)


def _by_place(scores: ScoreSet, data: ReadData) -> list[str]:
    """Return the ids of the rows of a file without ids, in order. Raises DataError unless it has as many as the
    dataset."""
    ids = list(dict.fromkeys(row.preference_id for row in scores.rows))
    count = sum(report.rows_read for report in data.reports)
    if len(data.reports) != 1 or len(ids) != count:
        raise DataError(
            f"--witness {scores.name}: its {len(ids)} rows have no ids, so they belong to rows of the same place, and "
            f"{len(data.reports)} dataset(s) with {count} rows are searched. Write a column `id` with the places of "
            f"the rows, such as {data.preferences[0].id}."
        )
    return ids


# --- models --------------------------------------------------------------------------------------------------


def _heads(config: MislabelsConfig, pairs: Pairs) -> Iterator[Witness]:
    """Yield a head for each layer, whose features are the states of that layer."""
    from rewardlab.model.layers import resolve_layers
    from rewardlab.probing.heads import Features, judged_of

    groups, states = _states(config, resolve_layers)
    rows_N2, judged = replies_of(groups, pairs), judged_of(groups)
    for layer, states_RW in states.items():
        features_RF = Features.of(groups, states_RW, judged).features_RF
        differences_NF = _differences(features_RF, rows_N2)
        del features_RF  # before those of the next layer are made
        yield Witness(name=f"layer {layer}", differences_NF=differences_NF)


def _differences(features_RF: FloatArray, rows_N2: Numbers) -> FloatArray:
    """Return [N, F] the features of the first reply of each pair minus those of the second; NaN where one is
    missing."""
    # Where a reply is missing another one stands, for a moment.
    differences_NF: FloatArray = features_RF[rows_N2[:, 0]]
    differences_NF -= features_RF[rows_N2[:, 1]]
    differences_NF[(rows_N2 < 0).any(1)] = np.nan
    return differences_NF


def _states(config: MislabelsConfig, resolve_layers: Any) -> tuple[Groups, Mapping[int, Any]]:
    """Return the groups of the data, and layer -> [R, W] states of their replies, kept as `rewardlab probe` does."""
    from rewardlab.artifact.base import open_base, settle_rendering
    from rewardlab.probing.backbone import decide_frozen, load_frozen
    from rewardlab.probing.states import states_of

    config = config.replace(**settle_rendering(config.model, config.rendering))
    base = open_base(config.model, config.rendering)
    groups = _groups(config, base.renderer, own_limit=False)
    decided = decide_frozen(base, config.model, config.compute, max_length=config.rendering.length_limit)
    config = config.replace(**decided.settings)
    depth = base.config.get_text_config().num_hidden_layers
    words = config.run.layers or tuple(dict.fromkeys(str(max(1, round(part * depth))) for part in DEPTHS))
    layers = resolve_layers(words, depth)
    model = load_frozen(base, config.model, config.compute, layers, decided=decided, seed=config.run.seed)
    cache = cache_folder(os.environ) if config.run.cache else None
    states = states_of(model, groups, layers, budget=config.run.micro_token_budget, cache=cache, name="searched")
    return groups, states


def _groups(config: MislabelsConfig, renderer: Renderer, *, own_limit: bool) -> Groups:
    """Return the groups of the data, by the one way from rows to tokens."""
    from rewardlab.data.prepare import token_groups
    from rewardlab.data.reading import read_named

    rows = config.rows
    read = read_named(
        [Named(purpose="train", names=rows.dataset, split=rows.hf_split, limit=rows.limit)],
        rows.reading,
        renderer,
        seed=config.run.seed,
        bare=renderer.spec.joins_texts,
    )
    return token_groups(read.parts["train"], renderer, rows.reading.max_drop_fraction, "searched", own_limit=own_limit)[
        0
    ]


def replies_of(groups: Sequence[TokenGroup], pairs: Pairs) -> Numbers:
    """Return [N, 2] the numbers of both replies of each pair among the replies of all groups, −1 where missing.

    A reply that was too long for the model is missing.
    """
    places: dict[tuple[str, str], dict[int, int]] = {}
    offset = 0
    for group in groups:
        places[group.source, group.preference_id] = {n: offset + place for place, n in enumerate(group.numbers)}
        offset += group.num_replies
    rows_N2 = np.full((len(pairs), 2), -1, dtype=np.int64)
    for number, owner in enumerate(pairs.owners_N.tolist()):
        preference = pairs.preferences[owner]
        own = places.get((preference.source, preference.id), {})
        ends = int(pairs.first_N[number]), int(pairs.second_N[number])
        if all(end in own for end in ends):
            rows_N2[number] = [own[end] for end in ends]
    return rows_N2


def _scored_by(config: MislabelsConfig, folder: Path, data: ReadData, pairs: Pairs) -> Witness:
    """Return the witness of a reward-model folder, which scores the data."""
    from rewardlab.evaluation.config import EvalConfig
    from rewardlab.evaluation.saved import SavedModel
    from rewardlab.score import score_rows

    _tell_trained_on(folder, data)
    model = SavedModel(
        EvalConfig.of(
            model=str(folder),
            dataset=config.rows.dataset,
            micro_token_budget=config.run.micro_token_budget,
            cache_dir=config.rows.reading.cache_dir,
        )
    )
    groups = _groups(config, model.renderer, own_limit=True)
    scores = model.scores(groups, progress=f"scores by {folder}")
    return of_scores(ScoreSet(name=str(folder), rows=score_rows(groups, scores)), pairs, data)


def _tell_trained_on(folder: Path, data: ReadData) -> None:
    """Warn if the record of a model says that it was trained on a dataset that is searched."""
    trained = _names_trained_on(read_spec(folder).provenance.get("config"))
    if both := {name for source in data.sources for name in _names_of(source) & trained}:
        logger.warning(
            "witness %s: its record says that it was trained on %s. A model agrees with labels that it has learned, so "
            "it is not a witness about these",
            folder,
            ", ".join(sorted(both)),
        )


def _names_trained_on(config: object) -> set[str]:
    """Return what datasets are called in the settings of a training, in the words of `_names_of`."""
    named = config.get("dataset") if isinstance(config, Mapping) else None
    if not isinstance(named, (list, tuple)):
        return set()
    assert isinstance(config, Mapping)
    split = config.get("hf_split")
    found: set[str] = set()
    for name in without_weights([name for name in named if isinstance(name, str)], "dataset"):
        found |= {Path(name).name, f"{Path(name).name}/{split}", f"{name.partition('@')[0]}[{split}]"}
    return found


def _names_of(source: Source) -> set[str]:
    """Return what a dataset may be called: its file, `folder/split`, or `organisation/name[split]` of the hub."""
    if source.path is None:
        return {f"{source.name.partition('@')[0]}[{source.split}]"}
    in_folder = set() if source.split == ALL_ROWS else {f"{Path(source.name).name}/{source.split}"}
    return {source.path.name} | in_folder
