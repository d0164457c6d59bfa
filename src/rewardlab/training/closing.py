"""Judges the model that a run has chosen, reloaded from its folder, on the run's evaluation and test data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.analysis.paired import change_of_shares, columns_of
from rewardlab.analysis.precision import CANONICAL, CARD_WORTH, PrecisionCard
from rewardlab.artifact.load import Where, assemble
from rewardlab.core.errors import DataError
from rewardlab.core.spec import read_spec
from rewardlab.core.terminal import visible
from rewardlab.core.types import Estimate
from rewardlab.distributed.ranks import Ranks
from rewardlab.distributed.sharding import Parts
from rewardlab.evaluation.evaluate import EvalResult, evaluate_groups, read_scores, write_evaluation
from rewardlab.evaluation.precision import CARD_FILE, LIVE_FILE, judge_live, write_card
from rewardlab.score import Scorer
from rewardlab.training.closing_card import card_of_chosen
from rewardlab.training.loop.reward_trainer import RewardTrainer
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.start import Ready
from rewardlab.training.states import LookedUp

AS_TRAINED: Final = ", as it trains"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The chosen model, reloaded from its folder, on the data that there are; see `TrainResult`."""

    selected: EvalResult | None = None
    test: EvalResult | None = None
    live: PrecisionCard | None = None
    card: PrecisionCard | None = None


def judge_chosen(
    config: RewardTrainerConfig,
    trainer: RewardTrainer,
    ready: Ready,
    chosen: Path,
    ranks: Ranks,
    parts: Parts | None,
    looked_up: LookedUp | None,
) -> Judged:
    """Reload the chosen model, judge it on evaluation and test data, and write the results."""
    if not (trainer.judge.data.eval or ready.test or looked_up is not None):
        return Judged()
    evals, saved_as = config.run.output_dir / "evals", read_spec(chosen).save_dtype
    scorer = _reload(chosen, ready.device, parts)
    if looked_up is not None:
        looked_up.attach_saved(scorer.model)
    results: dict[str, EvalResult] = {}
    for name, groups in (("selection", trainer.judge.data.eval), ("test", ready.test)):
        if groups:
            results[name] = evaluate_groups(
                scorer.model,
                groups,
                beta=config.loss.beta,
                budget=config.run.token_budget,
                progress=f"judging on {name} data",
                ranks=ranks,
            )
            if ranks.is_first:
                write_evaluation(evals, name, results[name])
    if looked_up is not None:
        looked_up.check_saved(scorer.model, chosen)
    selected, test = results.get("selection"), results.get("test")
    live = _live_card(config, trainer, selected, saved_as)
    if ranks.is_first:
        # Resuming may have chosen another model than the shorter run before, whose card would no longer be true.
        (evals / LIVE_FILE).unlink(missing_ok=True)
        if live is not None:
            write_card(evals, live, LIVE_FILE)
        (evals / CARD_FILE).unlink(missing_ok=True)
    card = None
    if wants_card(config, trainer.step):
        groups, known = ready.test or trainer.judge.data.eval, test or selected
        card = card_of_chosen(config, scorer, groups, known, saved_as, ranks, is_sharded=parts is not None)
    return Judged(selected=selected, test=test, live=live, card=card)


def accuracies_of(judged: Judged) -> dict[str, Estimate]:
    """Return the accuracies of the chosen model by the words for the data: of the test data, and of each source where
    there are several. The evaluation data as a whole were watched on the way."""
    found: dict[str, Estimate] = {}
    if judged.test is not None:
        found["the test data"] = judged.test.overall.estimates["eval_accuracy"]
    for name, result in (("evaluation", judged.selected), ("test", judged.test)):
        if result is not None and len(result.by_source) > 1:
            for part, one in result.by_source.items():
                found[f"the {name} data of {visible(part)}"] = one.estimates["eval_accuracy"]
    return found


def differences_of(judged: Mapping[str, EvalResult]) -> dict[str, Estimate]:
    """Return by how much the last of several models on the same data is ahead of each other one, in accuracy; empty
    where nothing can be compared."""
    *others, (last, model) = judged.items()
    found: dict[str, Estimate] = {}
    for name, other in others:
        with suppress(DataError):  # such as too few comparisons: without a comparison there is no sign
            two = align([ScoreSet(name=name, rows=other.rows), ScoreSet(name=last, rows=model.rows)])
            columns = columns_of(two, "accuracy")
            assert columns is not None
            change_N = columns.values_MN[1] - columns.values_MN[0]
            found[name] = change_of_shares(change_N, columns.prompt_keys)
    return found


def wants_card(config: RewardTrainerConfig, steps: int) -> bool:
    """Return whether a run of this many steps ends with a precision card."""
    wanted = config.monitor.precision_card
    if wanted == "auto":
        return config.model.precision != "fp32" or steps * config.run.batch_size >= CARD_WORTH
    return wanted == "always"


def _live_card(
    config: RewardTrainerConfig, trainer: RewardTrainer, selected: EvalResult | None, saved_as: str
) -> PrecisionCard | None:
    """Return how far the evaluations that chose the model are from its saved folder; None where they cannot differ."""
    step = trainer.step if trainer.judge.best_step is None else trainer.judge.best_step
    live = _live_arithmetic(config)
    if selected is None or (live == CANONICAL and saved_as == "float32"):
        return None
    if (seen := read_scores(config.run.output_dir / "evals", f"step_{step}")) is None:
        return None
    name = f"{live.removesuffix(AS_TRAINED)}{AS_TRAINED}"
    return judge_live(seen, selected.rows, name=name, beta=config.loss.beta, seed=config.run.seed)


def _reload(folder: Path, device: torch.device, parts: Parts | None) -> Scorer:
    """Return the saved model in float32, as every reader of the folder computes it: whole on each rank, or sharded."""
    return assemble(
        folder, read_spec(folder), where=Where(device=device, division=parts), precision="fp32", attention_mode="auto"
    )


def computed_in(config: RewardTrainerConfig, saved_as: str) -> dict[str, str]:
    """Return in which arithmetic, and with which weights, the numbers of the closing tables were computed."""
    saved = CANONICAL if saved_as == "float32" else f"float32 by the saved {saved_as} weights"
    return {"baselines": "float64", "before": _live_arithmetic(config), "after": saved}


def _live_arithmetic(config: RewardTrainerConfig) -> str:
    """Return in which arithmetic, and with which weights, the model computes while it trains."""
    held = "" if config.model.quantization == "none" else f" on {config.model.quantization} weights"
    arithmetic = CANONICAL if config.model.precision == "fp32" else config.model.precision
    return arithmetic if arithmetic == CANONICAL and not held else f"{arithmetic}{held}{AS_TRAINED}"
