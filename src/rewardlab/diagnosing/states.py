"""Reads data as they are and as the controls change them, and computes the states of all of them with one model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rewardlab.artifact.base import Base, open_base, settle_rendering
from rewardlab.core.files import cache_folder
from rewardlab.core.types import TokenGroup
from rewardlab.data.config import Mode, Purpose
from rewardlab.data.controlled import NothingChangedError
from rewardlab.data.groups import Groups, roots_of
from rewardlab.data.prepare import load_data, token_groups
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.diagnosing.heads import TestData, Variants, require_roots
from rewardlab.model.layers import resolve_layers
from rewardlab.probing.backbone import decide_frozen, load_frozen
from rewardlab.probing.heads import Features, fit_layer
from rewardlab.probing.states import states_of

logger = logging.getLogger("rewardlab")
CHANGED: Final[Mapping[Mode, tuple[Purpose, ...]]] = {
    "prompt_only": ("train",),
    "response_only": ("train", "test"),
    "random_negatives": ("train",),
}
"""Control with states of its own -> the data that it changes."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The states to which heads are fitted, and facts about them."""

    variants: Variants
    test: TestData | None
    layer: int
    facts: Mapping[str, Any]


def compute_states(config: DiagnoseConfig) -> Computed:
    """Return the states of all data on the layer with the smallest held-out loss.

    Raises as `rewardlab.probing.run.probe` does for data and models that cannot be used.
    """
    config = config.replace(**settle_rendering(config.model, config.data.rendering))
    base = open_base(config.model, config.data.rendering)
    plain, report = _read(config, base, "none")
    require_roots(roots_of(plain["training"])[0])
    read, not_run = _read_changed(config, base)
    changed = {mode: groups for mode, (groups, _) in read.items()}
    train = _common(plain["training"], {name: groups["training"] for name, groups in changed.items()})
    test = None
    if "test" in plain:
        test = _common(plain["test"], {"response_only": changed["response_only"]["test"]})
    layers = resolve_layers(config.run.layers, base.config.get_text_config().num_hidden_layers)
    decided = decide_frozen(base, config.model, config.compute, max_length=config.data.rendering.length_limit)
    config = config.replace(**decided.settings)
    model = load_frozen(base, config.model, config.compute, layers, decided=decided, seed=config.run.seed)
    cache = cache_folder(os.environ) if config.run.cache else None

    def states(groups: Sequence[TokenGroup], layers: Sequence[int], name: str) -> dict[int, Any]:
        found = states_of(model, groups, layers, budget=config.run.micro_token_budget, cache=cache, name=name)
        return dict(found)

    roots_G = roots_of(train["full"])[0]
    require_roots(roots_G)
    of_layers = states(train["full"], layers, "training")
    layer = _best_layer(train["full"], of_layers, config)
    weighed = _weigh(config)
    variants = Variants(
        groups=list(weighed(train["full"])),
        roots_G=roots_G,
        states={
            "full": np.asarray(of_layers[layer]),
            **{name: states(train[name], [layer], f"{name} training")[layer] for name in changed},
        },
        negatives=list(weighed(train["random_negatives"])) if "random_negatives" in train else [],
    )
    judged = None
    if test is not None:
        judged = TestData(
            groups=list(test["full"]),
            roots_G=roots_of(test["full"])[0],
            states={name: states(groups, [layer], f"{name} test")[layer] for name, groups in test.items()},
        )
    left_out = len(plain["training"]) - len(train["full"])
    if left_out:
        logger.info("controls: %d preferences left out, which a control cannot keep whole", left_out)
    facts = {
        "data": report,
        "control_data": {mode: of["control"] for mode, (_, of) in read.items()},
        "left_out": left_out,
        "layer": layer,
        "not_run": not_run,
    }
    return Computed(variants=variants, test=judged, layer=layer, facts=facts)


def _read_changed(
    config: DiagnoseConfig, base: Base
) -> tuple[dict[Mode, tuple[dict[str, Groups], dict[str, Any]]], dict[str, str]]:
    """Return (control -> what `_read` returns, control -> why it is not run).

    Data may hold no replies to other prompts that could take the place of their own, such as data whose replies are all
    "yes" and "no"; that must not stop the other controls.
    """
    read: dict[Mode, tuple[dict[str, Groups], dict[str, Any]]] = {}
    not_run: dict[str, str] = {}
    for mode in CHANGED:
        try:
            read[mode] = _read(config, base, mode)
        except NothingChangedError as error:
            logger.warning("control: %s is left out: %s", mode, error)
            not_run[mode] = str(error).rstrip(".")
    return read, not_run


def _read(config: DiagnoseConfig, base: Base, mode: Mode) -> tuple[dict[str, Groups], dict[str, Any]]:
    """Return (`training` and `test` -> groups, counts of the rows) with the data changed by a control."""
    splits = CHANGED.get(mode, ())
    if not config.data.test_dataset and not config.data.test_split:
        splits = tuple(split for split in splits if split == "train")
    data = replace(
        config.data,
        diagnostic=replace(
            config.data.diagnostic, diagnostic_mode=mode, diagnostic_splits=splits, diagnostic_seed=config.run.seed
        ),
    )
    prepared = load_data(data, base.renderer, seed=config.run.seed)
    most = config.data.reading.max_drop_fraction
    groups = {
        name: token_groups(part, base.renderer, most, name if mode == "none" else f"{mode} {name}")[0]
        for name, part in (("training", prepared.train), ("test", prepared.test))
        if len(part)
    }
    return groups, prepared.reports


def _common(plain: Groups, changed: Mapping[str, Groups]) -> dict[str, Groups]:
    """Return, by control (`full` for none), the preferences of which every control has the same replies, in the same
    order.
    """
    everything = {"full": plain, **changed}
    held = [{(group.source, group.preference_id): group.numbers for group in groups} for groups in everything.values()]
    kept = [key for key, numbers in held[0].items() if all(other.get(key) == numbers for other in held[1:])]
    found = {}
    for (name, groups), own in zip(everything.items(), held, strict=True):
        position = {key: number for number, key in enumerate(own)}
        found[name] = groups.take(np.array([position[key] for key in kept], dtype=np.int64))
    return found


def _weigh(config: DiagnoseConfig) -> Callable[[Groups], Groups]:
    def weighed(groups: Groups) -> Groups:
        return groups.weighed() if config.run.kwise_weight == "prompt" else groups

    return weighed


def _best_layer(groups: Groups, states: Mapping[int, Any], config: DiagnoseConfig) -> int:
    """Return the layer whose head has the smallest held-out loss."""
    if len(states) == 1:
        return min(states)
    weighed = _weigh(config)(groups)
    losses: dict[int, float] = {}
    for layer, of in states.items():
        fitted = fit_layer(Features.of(weighed, of), layer=layer, num_folds=config.run.folds, seed=config.run.seed)
        losses[layer] = float(fitted.result.overall.sums.mean_nll)
    best: int = min(losses, key=lambda layer: losses[layer])
    logger.info("layer %d has the smallest held-out loss of %s", best, ", ".join(map(str, losses)))
    return best
