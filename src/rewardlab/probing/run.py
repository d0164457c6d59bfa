"""Runs `rewardlab probe`: fits a reward model without fine-tuning, in the time of one forward pass.

The backbone stays as it is, and the head is the unique solution of a convex problem on its final-token states. Its
accuracy is what fine-tuning has to beat. Fitting it a thousand times shows how much of that is due to chance in the
data.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.artifact.base import Base, open_base, require_inputs, settle_rendering
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model, saved_dtype, verify_in_clean_process
from rewardlab.core.config import config_hash, require_kind, to_mapping
from rewardlab.core.errors import ArtifactError, DataError, RewardlabError
from rewardlab.core.files import cache_folder, provenance, write_json, write_jsonl
from rewardlab.core.placing import placing
from rewardlab.core.run_folder import MANIFEST, claim_folder, only_writer, written_by_run
from rewardlab.core.spec import read_spec
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Groups, roots_of
from rewardlab.data.prepare import Prepared, load_data, token_groups
from rewardlab.data.weights import without_weights
from rewardlab.evaluation.baselines import fit_baselines
from rewardlab.evaluation.ensembles import HEADS, canary_scores
from rewardlab.evaluation.evaluate import EvalResult, evaluate_groups, write_evaluation
from rewardlab.evaluation.precision import judge_precisions, write_card
from rewardlab.model.layers import cut_off, require_cuttable, resolve_layers
from rewardlab.model.reward import RewardModel
from rewardlab.probing.backbone import Decided, decide_frozen, load_frozen
from rewardlab.probing.config import ProbeConfig
from rewardlab.probing.heads import (
    CurvePoint,
    Features,
    Heads,
    LayerFit,
    Uncertainty,
    fit_heads,
    fit_layer,
    judge_scores,
    judged_of,
    learning_curve,
    uncertainty,
)
from rewardlab.probing.states import states_of
from rewardlab.score import Scorer, score_groups

logger = logging.getLogger("rewardlab")
CHECKED = 32
"""Training preferences whose scores by the saved folder are compared with those computed from the states."""
BEST = "best"
CLOSE = 1e-3
"""How far the two may differ, in standard deviations of the scores: both are float32, but from different batches."""
TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of a probe."""

    output_dir: Path
    model: Path
    """The reward model: the backbone, cut off after the chosen layer, and the fitted head."""
    layers: Sequence[LayerFit]
    chosen: LayerFit
    """The one of `layers` with the smallest held-out loss."""
    curve: Sequence[CurvePoint]
    test: EvalResult | None
    card: PrecisionCard | None
    """The saved model in other precisions, on the test data; None without these, or where it was not wanted or not
    possible."""
    baselines: Mapping[str, EvalResult]
    """Length only and bag of words on the test data; empty without test data."""
    uncertainty: Uncertainty | None
    seconds: float


def probe(config: ProbeConfig, *, finish: Callable[[ProbeResult, Path], object] | None = None) -> ProbeResult:
    """Fit a head on frozen states as `config` says, save it as a reward model, and judge it; see docs/probe.md.

    The files get their places together, once `finish` has added to those in a folder.

    Raises a subclass of RewardlabError for anything the user can fix.
    """
    require_kind(config, ProbeConfig)
    require_inputs(config.model, config.data)
    folder = config.run.output_dir
    with only_writer(folder):
        claim_folder(
            folder,
            (config.model.model, *without_weights(config.data.dataset, "--dataset"), *config.data.test_dataset),
            overwrite=config.run.overwrite,
        )
        with placing(folder, lambda: written_by_run(folder), whole=(BEST,)) as place:
            result = _probe(place, config)
            if finish is not None:
                finish(result, place)
    return result


def _probe(place: Path, config: ProbeConfig) -> ProbeResult:
    """Do as `probe` does, and write the files to `place`, which is empty."""
    started = time.perf_counter()
    config = config.replace(**settle_rendering(config.model, config.data.rendering))
    base = open_base(config.model, config.data.rendering)
    prepared = load_data(config.data, base.renderer, seed=config.run.seed)
    groups, tokens = _tokenize(config, prepared, base)
    layers = resolve_layers(config.run.layers, base.config.get_text_config().num_hidden_layers)
    require_cuttable(base.config.get_text_config(), layers)
    decided = decide_frozen(base, config.model, config.compute, max_length=config.data.rendering.length_limit)
    config = _resolve(config, decided)
    model = load_frozen(base, config.model, config.compute, layers, decided=decided, seed=config.run.seed)
    cache = cache_folder(os.environ) if config.run.cache else None
    states = {
        name: states_of(model, part, layers, budget=config.run.micro_token_budget, cache=cache, name=name)
        for name, part in groups.items()
    }
    fitted = _fit(config, groups, states)
    _write_start(place, config, prepared, tokens)
    folder = _save(place, config, model, base, fitted)
    scorer = load(folder, check=False, trust_remote_code=config.model.trust_remote_code)
    test = _judge_folder(config, scorer, fitted, groups)
    result = ProbeResult(
        output_dir=config.run.output_dir,
        model=config.run.output_dir / BEST,
        layers=fitted.layers,
        chosen=fitted.chosen,
        curve=fitted.curve,
        test=test,
        # It comes last, since it changes the model.
        card=_card(place, config, scorer, groups.get("test", []), test),
        baselines=fitted.baselines,
        uncertainty=fitted.uncertainty,
        seconds=time.perf_counter() - started,
    )
    _write_results(place, result)
    return result


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    """Everything that follows from the states."""

    layers: Sequence[LayerFit]
    chosen: LayerFit
    heads: Heads
    centre_W: Any
    """Mean state of the training replies, for which all heads give 0."""
    curve: Sequence[CurvePoint]
    scores: Mapping[str, Any]
    """Scores of every reply by the head, for each kind of data."""
    uncertainty: Uncertainty | None
    baselines: Mapping[str, EvalResult]


def _fit(
    config: ProbeConfig, groups: Mapping[str, Sequence[TokenGroup]], states: Mapping[str, Mapping[int, Any]]
) -> _Fitted:
    train, test = groups["training"], groups.get("test", [])
    _log_folds(roots_of(train)[1])
    fits: list[LayerFit] = []
    best: tuple[LayerFit, Features] | None = None
    judged = judged_of(train)
    for layer, of in states["training"].items():
        features = Features.of(train, of, judged)
        fits.append(fit_layer(features, layer=layer, num_folds=config.run.folds, seed=config.run.seed))
        # Choose by the loss, which distinguishes layers with equal accuracies.
        if best is None or fits[-1].result.overall.sums.mean_nll < best[0].result.overall.sums.mean_nll:
            best = fits[-1], features
    assert best is not None, "at least one layer was asked for"
    chosen, features = best
    heads = fit_heads(features, chosen, num_draws=config.run.bootstrap, seed=config.run.seed)
    logger.info("fitted: %d layers, %d bootstrap heads", len(fits), config.run.bootstrap)
    final = {name: np.asarray(of[chosen.layer], dtype=np.float64) for name, of in states.items()}
    baselines = fit_baselines(train, {"test": test}, seed=config.run.seed) if test else {}
    return _Fitted(
        layers=fits,
        chosen=chosen,
        heads=heads,
        centre_W=final["training"].mean(axis=0),
        curve=learning_curve(features, chosen, seed=config.run.seed),
        scores={name: of @ heads.head_W for name, of in final.items()},
        uncertainty=uncertainty(test, final["test"], heads) if test and config.run.bootstrap else None,
        baselines={name: results["test"] for name, results in baselines.items()},
    )


def _log_folds(rule: str) -> None:
    """Log what a held-out fold shares with the other folds."""
    shared = {
        "reply": "no first turn and no reply but for phrases",
        "first_turn": "no first turn, but replies, which join more than half of the prompts",
        "prompt": "no prompt, but first turns, since more than half of the prompts have the same",
    }
    level = logging.INFO if rule == "reply" else logging.WARNING
    logger.log(level, "cross-validation: a fold shares with the others %s", shared[rule])


def _tokenize(config: ProbeConfig, prepared: Prepared, base: Base) -> tuple[dict[str, Groups], dict[str, object]]:
    groups: dict[str, Groups] = {}
    tokens: dict[str, object] = {}
    for name, part in (("training", prepared.train), ("test", prepared.test)):
        if len(part):
            groups[name], report = token_groups(part, base.renderer, config.data.reading.max_drop_fraction, name)
            tokens[name] = report.as_dict()
    if config.run.kwise_weight == "prompt":
        groups["training"] = groups["training"].weighed()
    if len(np.unique(groups["training"].prompt_keys())) < 2:
        raise DataError("the training data have one prompt; cross-validation needs at least two. Name more data.")
    return groups, tokens


def _resolve(config: ProbeConfig, decided: Decided) -> ProbeConfig:
    """Return the configuration with every default decided: what is hashed and saved, and can be repeated."""
    settings: dict[str, Any] = decided.settings | {
        # This is a permission for one start, not a property of the probe.
        "overwrite": False,
        "save_dtype": str(saved_dtype(config.run.save_dtype)).removeprefix("torch."),
    }
    return config.replace(**settings)


def _write_start(place: Path, config: ProbeConfig, prepared: Prepared, tokens: Mapping[str, object]) -> None:
    write_json(
        place / MANIFEST,
        {"config_hash": config_hash(config), "data": prepared.reports, "tokens": tokens, "provenance": provenance()},
    )
    write_json(place / "config.json", to_mapping(config))


def _save(place: Path, config: ProbeConfig, model: RewardModel, base: Base, fitted: _Fitted) -> Path:
    """Save the model, cut off after the chosen layer, with the fitted head, as `best/`, and verify it; return the
    folder.
    """
    layer, head_W = fitted.chosen.layer, fitted.heads.head_W
    cut_off(model, layer)
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(head_W)[None])
        if model.head.bias is not None:
            # The fit sees only differences of scores, which say nothing about the bias.
            model.head.bias.zero_()
    folder = place / BEST
    facts = {
        "config": to_mapping(config),
        "config_hash": config_hash(config),
        "layer": layer,
        **config.data.diagnostic.provenance,
        **provenance(),
    }
    save_reward_model(
        folder, model, base.renderer, beta=1.0, save_dtype=saved_dtype(config.run.save_dtype), provenance=facts
    )
    verify_in_clean_process(folder)
    logger.info("saved the model and verified it in a clean process")
    np.savez(
        place / HEADS,
        head=head_W,
        bootstrap=fitted.heads.bootstrap_WB.T,
        layer=layer,
        centre=fitted.centre_W,
        std=fitted.scores["training"].std(ddof=1),
        canaries=canary_scores(read_spec(folder)),
    )
    return folder


def _judge_folder(
    config: ProbeConfig, scorer: Scorer, fitted: _Fitted, groups: Mapping[str, Sequence[TokenGroup]]
) -> EvalResult | None:
    """Return the evaluation of the saved folder, loaded as `scorer`, on the test data; None without test data.

    It uses the states if the folder gives the same scores as they do, else the folder scores the data. Raises
    ArtifactError if the folder does not give the fitted scores though nothing was rounded.
    """
    some = groups["training"][:CHECKED]
    saved = np.concatenate(score_groups(scorer.model, some, budget=config.run.micro_token_budget)).astype(np.float64)
    wanted = fitted.scores["training"][: len(saved)]
    # Centre both, since only differences of scores mean anything, and the scores may all be far from zero.
    distance = float(np.abs((saved - saved.mean()) - (wanted - wanted.mean())).max() / max(wanted.std(), TINY))
    logger.info("one score: the saved folder is %.0e of a standard deviation away from the fitted scores", distance)
    rounded = _is_rounded(config)
    if distance > CLOSE and not rounded:
        raise ArtifactError(
            f"{config.run.output_dir / BEST} scores {distance:.1e} standard deviations away from the head on the "
            f"states it was fitted to. Please report this with the model's name; --layers last may help."
        )
    test = groups.get("test", [])
    if not test:
        return None
    if not rounded:
        # The folder gives the same scores, so the test data need not be computed again.
        return judge_scores(test, fitted.scores["test"])
    return evaluate_groups(
        scorer.model, test, beta=1.0, budget=config.run.micro_token_budget, progress="judging the saved folder"
    )


def _is_rounded(config: ProbeConfig) -> bool:
    """Return whether the folder gives other scores than the states.

    It is scored in float32, so it does if its weights were rounded or the states were not float32.
    """
    return config.run.save_dtype != "float32" or config.model.precision != "fp32"


def _card(
    place: Path, config: ProbeConfig, scorer: Scorer, test: Sequence[TokenGroup], result: EvalResult | None
) -> PrecisionCard | None:
    """Write and return the precision card of the saved folder, whose `result` on the test data is known.

    None without test data, if it is not wanted and, with a warning, if memory or the model does not allow it. The model
    cannot be used afterwards.
    """
    if result is None or not config.run.precision_card:
        return None
    try:
        card = judge_precisions(
            scorer,
            test,
            # Scores that were made of states are computed: the card is about the model.
            exact=result.rows if _is_rounded(config) else None,
            save_dtype=config.run.save_dtype,
            precision="fp16" if config.model.precision == "fp16" else "bf16",
            budget=config.run.micro_token_budget,
            seed=config.run.seed,
        )
    except (RewardlabError, torch.OutOfMemoryError) as error:
        logger.warning("no precision card (--no-precision-card leaves it out): %s", error)
        return None
    evals = place / "evals"
    evals.mkdir(exist_ok=True)
    write_card(evals, card)
    return card


def _write_results(place: Path, result: ProbeResult) -> None:
    """Write score rows, uncertainty, and everything else as `probe.json`."""
    evals = place / "evals"
    write_evaluation(evals, "cross_validated", result.chosen.result)
    if result.test is not None:
        write_evaluation(evals, "test", result.test)
    for name, judged in result.baselines.items():
        write_evaluation(evals, f"test_{name.replace(' ', '_')}", judged)
    if result.uncertainty is not None:
        write_jsonl(evals / "test.uncertainty.jsonl", result.uncertainty.comparisons)
    write_json(
        place / "probe.json",
        {
            "chosen_layer": result.chosen.layer,
            "layers": [
                {
                    "layer": layer.layer,
                    "penalty": layer.penalty,
                    "penalty_at_edge": layer.at_edge,
                    "folds": layer.num_folds,
                    "held_out": encode(layer.result.overall.estimates),
                }
                for layer in result.layers
            ],
            "learning_curve": [
                {
                    "share_of_prompts": point.share,
                    "comparisons": point.comparisons,
                    "eval_accuracy": encode(point.accuracy),
                    "eval_loss": encode(point.loss),
                }
                for point in result.curve
            ],
            "uncertainty": None
            if result.uncertainty is None
            else {
                **{name: encode(getattr(result.uncertainty, name)) for name in ("over_heads", "sure", "unsure")},
                "bias": result.uncertainty.bias,
                "num_sure": result.uncertainty.num_sure,
                "num_unsure": result.uncertainty.num_unsure,
            },
            "seconds": result.seconds,
        },
    )
