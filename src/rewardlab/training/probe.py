"""`rewardlab probe`: a reward model without fine-tuning, in the time of one forward pass.

The backbone stays as it is; the head is the one answer of a convex problem on its final-token states. What it
reaches is what fine-tuning has to beat, and fitting it a thousand times shows how much of it is luck of the data.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model, saved_dtype, verify_in_clean_process
from rewardlab.core.config import config_hash, to_mapping
from rewardlab.core.errors import ArtifactError, DataError
from rewardlab.core.files import provenance, write_json, write_jsonl
from rewardlab.core.types import TokenGroup
from rewardlab.data.loader import weigh
from rewardlab.data.pack import require_fit
from rewardlab.model.builtin import cache_folder
from rewardlab.model.config import ModelConfig
from rewardlab.model.layers import cut_off, resolve_layers
from rewardlab.model.load import choose_layout, load_reward_model
from rewardlab.model.reward import RewardModel
from rewardlab.score import score_groups
from rewardlab.training.baselines import fit_baselines
from rewardlab.training.config import ProbeConfig
from rewardlab.training.evaluate import EvalResult, jsonable, write_evaluation
from rewardlab.training.heads import (
    CurvePoint,
    Heads,
    LayerFit,
    Uncertainty,
    fit_heads,
    fit_layer,
    judge_scores,
    learning_curve,
    uncertainty,
)
from rewardlab.training.prepare import Base, Prepared, load_data, open_base, token_groups
from rewardlab.training.run_folder import claim_folder, clear_folder
from rewardlab.training.states import states_of

logger = logging.getLogger("rewardlab")
CHECKED = 32
"""Training preferences whose scores by the saved folder are compared with those from the states."""
CLOSE = 1e-3
"""How far the two may be apart, in units of max(1, |score|): states were computed in batches, and once."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe left behind."""

    output_dir: Path
    model: Path
    """The reward model: the backbone, cut off after the chosen layer, and the fitted head."""
    layers: Sequence[LayerFit]
    chosen: LayerFit
    """Of `layers`, the one with the smallest held-out loss."""
    curve: Sequence[CurvePoint]
    test: EvalResult | None
    baselines: Mapping[str, EvalResult]
    """Length only and bag of words on the test data; empty without test data."""
    uncertainty: Uncertainty | None
    seconds: float


def probe(config: ProbeConfig) -> ProbeResult:
    """Fit a head on frozen states as `config` says, save it as a reward model, and judge it; see docs/probe.md.

    Raises RewardlabError for anything the user can mend.
    """
    started = time.perf_counter()
    claim_folder(config.output_dir, (config.model, *config.dataset, *config.test_dataset), overwrite=config.overwrite)
    prepared = load_data(config, seed=config.seed)
    base = open_base(config, config)
    groups, tokens = _tokenize(config, prepared, base)
    layers = resolve_layers(config.layers, base.config.get_text_config().num_hidden_layers)
    model = _load(config, base, groups)
    cache = cache_folder(os.environ) if config.cache else None
    states = {
        name: states_of(model, part, layers, budget=config.micro_token_budget, cache=cache, name=name)
        for name, part in groups.items()
    }
    train, test = groups["training"], groups.get("test", [])
    fits = [
        fit_layer(train, states["training"][layer], layer=layer, num_folds=config.folds, seed=config.seed)
        for layer in layers
    ]
    chosen = min(fits, key=lambda found: found.result.overall.sums.mean_nll)
    final = {name: of[chosen.layer] for name, of in states.items()}
    heads = fit_heads(train, final["training"], penalty=chosen.penalty, num_draws=config.bootstrap, seed=config.seed)
    logger.info("fitted: %d layers, %d bootstrap heads", len(fits), config.bootstrap)
    clear_folder(config.output_dir)
    _write_start(config, prepared, tokens)
    folder = _save(config, model, base, heads, chosen.layer)
    _require_same_scores(folder, train[:CHECKED], final["training"], heads.head_W, config)
    np.savez(config.output_dir / "heads.npz", head=heads.head_W, bootstrap=heads.bootstrap_WB.T, layer=chosen.layer)
    judged = judge_scores(test, final["test"] @ heads.head_W) if test else None
    spread = uncertainty(test, final["test"], heads) if test and config.bootstrap else None
    result = ProbeResult(
        output_dir=config.output_dir,
        model=folder,
        layers=fits,
        chosen=chosen,
        curve=learning_curve(
            train, final["training"], penalty=chosen.penalty, num_folds=config.folds, seed=config.seed
        ),
        test=judged,
        baselines={name: of["test"] for name, of in fit_baselines(train, {"test": test}, seed=config.seed).items()}
        if test
        else {},
        uncertainty=spread,
        seconds=time.perf_counter() - started,
    )
    _write_results(result)
    return result


def _tokenize(
    config: ProbeConfig, prepared: Prepared, base: Base
) -> tuple[dict[str, list[TokenGroup]], dict[str, object]]:
    groups: dict[str, list[TokenGroup]] = {}
    tokens: dict[str, object] = {}
    for name, preferences in (("training", prepared.train.preferences), ("test", prepared.test)):
        if preferences:
            groups[name], report = token_groups(preferences, base.renderer, config, name)
            tokens[name] = report.as_dict()
    groups["training"] = weigh(groups["training"], by=config.kwise_weight)
    num_prompts = len({group.prompt_key for group in groups["training"]})
    if num_prompts < 2:
        raise DataError("the training data have one prompt; cross-validation needs at least two. Name more data.")
    return groups, tokens


def _load(config: ProbeConfig, base: Base, groups: Mapping[str, Sequence[TokenGroup]]) -> RewardModel:
    layout = choose_layout(
        base.config, base.disk_class, config, max_length=config.max_seq_len, share=True, log=logger.info
    )
    require_fit([group for part in groups.values() for group in part], config.micro_token_budget, layout=layout)
    return load_reward_model(
        base.path,
        ModelConfig(
            model=config.model,
            attention=config.attention,
            precision=config.precision,
            trust_remote_code=config.trust_remote_code,
            new_head=True,
        ),
        seed=config.seed,
        layout=layout,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        log=lambda line: None if line.startswith(("head:", "parameters:")) else logger.info(line),
    )


def _write_start(config: ProbeConfig, prepared: Prepared, tokens: Mapping[str, object]) -> None:
    write_json(config.output_dir / "config.json", to_mapping(config))
    write_json(
        config.output_dir / "manifest.json",
        {"config_hash": config_hash(config), "data": prepared.reports, "tokens": tokens, "provenance": provenance()},
    )


def _save(config: ProbeConfig, model: RewardModel, base: Base, heads: Heads, layer: int) -> Path:
    """The model, cut off after `layer`, with the fitted head, as `best/`; verified."""
    cut_off(model, layer)
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(heads.head_W)[None])
        if model.head.bias is not None:
            model.head.bias.zero_()  # differences of scores say nothing about it
    folder = config.output_dir / "best"
    facts = {"config": to_mapping(config), "config_hash": config_hash(config), "layer": layer, **provenance()}
    save_reward_model(
        folder, model, base.renderer, beta=1.0, save_dtype=saved_dtype(config.save_dtype), provenance=facts
    )
    verify_in_clean_process(folder)
    logger.info("saved %s and verified it in a clean process", folder)
    return folder


def _require_same_scores(
    folder: Path, groups: Sequence[TokenGroup], states: Any, head_W: Any, config: ProbeConfig
) -> None:
    """Raise ArtifactError unless the saved folder gives the scores that the states give."""
    scorer = load(folder, check=False, trust_remote_code=config.trust_remote_code)
    saved = np.concatenate(score_groups(scorer.model, groups, budget=config.micro_token_budget))
    fitted = states[: len(saved)] @ head_W
    distance = float((np.abs(saved - fitted) / np.maximum(1.0, np.abs(fitted))).max())
    logger.info("one score: the saved folder is %.0e away from the fitted scores", distance)
    exact = config.save_dtype in ("auto", "float32") and scorer.model.compute_dtype == torch.float32
    if exact and distance > CLOSE and config.precision != "bf16":
        raise ArtifactError(
            f"{folder} scores {distance:.1e} away from the head on the states it was fitted to. Please report this "
            f"with the model's name; --layers last may help."
        )


def _write_results(result: ProbeResult) -> None:
    """Score rows, uncertainty, and everything else as `probe.json`."""
    evals = result.output_dir / "evals"
    write_evaluation(evals, "cross_validated", result.chosen.result)
    if result.test is not None:
        write_evaluation(evals, "test", result.test)
    for name, judged in result.baselines.items():
        write_evaluation(evals, f"test_{name.replace(' ', '_')}", judged)
    if result.uncertainty is not None:
        write_jsonl(evals / "test.uncertainty.jsonl", result.uncertainty.comparisons)
    write_json(
        result.output_dir / "probe.json",
        {
            "chosen_layer": result.chosen.layer,
            "layers": [
                {
                    "layer": found.layer,
                    "penalty": found.penalty,
                    "penalty_at_edge": found.at_edge,
                    "folds": found.num_folds,
                    "held_out": {
                        name: jsonable(asdict(estimate)) for name, estimate in found.result.overall.estimates.items()
                    },
                }
                for found in result.layers
            ],
            "learning_curve": [
                {
                    "share_of_prompts": point.share,
                    "comparisons": point.comparisons,
                    "eval_accuracy": jsonable(asdict(point.accuracy)),
                    "eval_loss": jsonable(asdict(point.loss)),
                }
                for point in result.curve
            ],
            "uncertainty": None
            if result.uncertainty is None
            else {
                name: jsonable(asdict(getattr(result.uncertainty, name))) for name in ("over_heads", "sure", "unsure")
            },
            "seconds": result.seconds,
        },
    )
