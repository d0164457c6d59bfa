"""The Trainer's partner that judges reward models: it evaluates, knows which is the best, and writes it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewardlab.analysis.stats import difference
from rewardlab.core.folders import remove
from rewardlab.core.run_folder import saved_step, saved_steps
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.terminal import plural
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets
from rewardlab.data.step_order import steps_per_epoch
from rewardlab.distributed.ranks import Parallel
from rewardlab.evaluation.evaluate import (
    EvalResult,
    distributions,
    evaluate_groups,
    read_evaluation,
    read_scores,
    score_spread,
    write_evaluation,
)
from rewardlab.model.reward import RewardModel
from rewardlab.report.tables import format_estimate
from rewardlab.training.checkpoints.model_folders import copies_model_of
from rewardlab.training.loop.selection import Selection, selection_of
from rewardlab.training.loop.tally import unit_of
from rewardlab.training.monitoring.observers import Observers
from rewardlab.training.monitoring.records import Records, evaluation_columns
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")
Save = Callable[[Path, int], None]


class RewardJudge:
    """Evaluates on held-out preferences, knows the best model so far and writes it. `Judge` of a Trainer.

    `save` writes the model as it is, after a step, to a folder; it is called for `best/` and `step_N/`.
    """

    def __init__(
        self,
        config: RewardTrainerConfig,
        model: RewardModel,
        data: Datasets,
        *,
        num_steps: int,
        records: Records,
        save: Save,
        parallel: Parallel,
        observers: Observers,
    ) -> None:
        self.config = config
        self.model = model
        self.data = data
        self.records = records
        self.save_to = save
        self.baseline: EvalResult | None = None
        """Of the untrained model."""
        self.selection = selection_of(config)
        self._num_steps = num_steps
        self._parallel = parallel
        self._ranks = parallel.ranks
        self._observers = observers
        self._best_on_disk: int | None = None
        """The step of `best/`."""
        self._saved: list[Path] = []

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.records.folder

    def evaluate(self, step: int, budget: int) -> None:
        """Evaluate on held-out data and on the fixed part of the training data, record both, and select."""
        if not self.data.eval:
            return
        started = time.perf_counter()
        result = self._judge(self.data.eval, budget, "evaluating")
        estimates = result.overall.estimates
        values = {
            **evaluation_columns(estimates),
            "eval_pairs": result.overall.sums.comparisons,
            **score_spread(result.rows),
            "epoch": step / steps_per_epoch(len(self.data.train), self.config.run.batch_size),
        } | self._evaluate_training_part(step, budget, result)
        values["eval_seconds"] = time.perf_counter() - started
        self.records.add(step, values)
        self.records.add_distribution(step, distributions(result.rows))
        if self._ranks.is_first:
            write_evaluation(self.folder / "evals", f"step_{step}", result)
        logger.info(
            "step %d/%d  EVAL  accuracy %s  loss %s  margin %s  %d %s",
            step,
            self._num_steps,
            format_estimate(estimates["eval_accuracy"]),
            format_estimate(estimates["eval_loss"]),
            format_estimate(estimates["eval_margin"]),
            result.overall.sums.comparisons,
            unit_of(self.data.eval),
        )
        self._observers.row(step, values)
        self._offer(step, result)

    def _judge(self, groups: Sequence[TokenGroup], budget: int, progress: str) -> EvalResult:
        result = evaluate_groups(
            self.model,
            groups,
            beta=self.config.loss.beta,
            budget=budget,
            progress=progress,
            ranks=self._ranks,
        )
        # Evaluating runs forward passes without a backward pass, after which FSDP keeps the gathered weights.
        self._parallel.drop_gathered()
        return result

    def _evaluate_training_part(self, step: int, budget: int, result: EvalResult) -> dict[str, float]:
        """Evaluate on the fixed part of the training data; return its columns and those of the train–eval gap.

        A gap is positive where the model does better on the training data.
        """
        if not self.data.train_eval:
            return {}
        seen, held_out = self._judge(self.data.train_eval, budget, "evaluating training rows").overall, result.overall
        values: dict[str, float] = {}
        gaps = {}
        for name, metric, sign in (("accuracy", "eval_accuracy", 1), ("loss", "eval_loss", -1)):
            estimate = seen.estimates[metric]
            pair = (estimate, held_out.estimates[metric])
            # More accuracy is better and less loss is: the order of the two is turned so that a positive gap means the
            # same.
            gaps[name] = gap = difference(*pair[::sign])
            values |= {
                f"train_eval_{name}": estimate.value,
                f"gap_{name}": gap.value,
                f"gap_{name}_low": gap.low,
                f"gap_{name}_high": gap.high,
            }
        accuracy = seen.estimates["eval_accuracy"]
        logger.info(
            "step %d/%d  GAP   accuracy %s on %d training rows, above the evaluation by %s",
            step,
            self._num_steps,
            format_estimate(accuracy),
            len(self.data.train_eval),
            format_estimate(gaps["accuracy"]),
        )
        return values | {"train_eval_accuracy_low": accuracy.low, "train_eval_accuracy_high": accuracy.high}

    @property
    def best_step(self) -> int | None:
        """The step of `best/`; None as long as no evaluation beat the untrained model."""
        return self.selection.best_step

    def _offer(self, step: int, result: EvalResult) -> None:
        """Update the selection with an evaluation, and warn if the metric is not finite."""
        if self.baseline is None:
            # The first evaluation is at step 0, before any update.
            self.baseline = result
        row = self.records.rows[step]
        values = {name: value for name, value in row.items() if value is not None}
        non_finite = result.overall.sums.non_finite
        better = self.selection.offer(step, values, sound=not non_finite)
        # A column of training steps is not there before the first one, and None where it is not finite.
        if not better and (non_finite or row.get(self.selection.metric, math.inf) is None):
            logger.warning(
                "step %d/%d  %s is not finite%s, so this evaluation cannot be the best",
                step,
                self._num_steps,
                self.config.run.early_stopping_metric,
                f" ({non_finite} {plural(non_finite, 'pair has', 'pairs have')} no finite scores)"
                if non_finite
                else "",
            )

    def best_is_due(self, step: int) -> bool:
        """See `Judge`."""
        return self.best_step == step and self._best_on_disk != step

    def save_best(self, step: int) -> None:
        """See `Judge`."""
        self.save_to(self.folder / "best", step)
        self._best_on_disk = step

    def should_stop(self) -> str:
        """Return a message if patience has run out, else an empty string."""
        patience = self.config.run.early_stopping_patience
        if patience is None or self.selection.since_best < patience:
            return ""
        since = (
            f"{self.selection.since_best} {plural(self.selection.since_best, 'evaluation')} since "
            f"{self.selection.holder}"
        )
        return (
            f"no better {self.config.run.early_stopping_metric} in {since} "
            f"({self.selection.bar:.4f}; --early-stopping-patience)"
        )

    def save(self, step: int) -> None:
        """Write `step_N/`, and remove the oldest folders above --save-total-limit."""
        folder = self.folder / f"step_{step}"
        if folder not in self._saved:
            self.save_to(folder, step)
            self._saved.append(folder)
        # Only after the new folder is complete, so that a failed save never costs the last model.
        while self.config.run.save_total_limit and len(self._saved) > self.config.run.save_total_limit:
            self._remove(self._saved.pop(0))

    def _remove(self, folder: Path) -> None:
        if self._ranks.is_first:
            remove(folder)

    def state(self) -> dict[str, Any]:
        """Return the state of the selection, as JSON."""
        return {"selection": self.selection.state()}

    def take_up_baseline(self, budget: int) -> None:
        """Restore the evaluation of the untrained model of a resumed run; call it before `restore`.

        It is read from the run folder, or, if it is missing or damaged there, computed again, at most `budget` tokens
        at a time.
        """
        if not self.data.eval:
            return
        folder, beta = self.folder / "evals", self.config.loss.beta
        self.baseline = read_evaluation(folder, "step_0", beta=beta, ranks=self._ranks)
        if self.baseline is None:
            # The checkpoint is not loaded yet, so the model still is the untrained one.
            self.baseline = self._judge(self.data.eval, budget, "evaluating the untrained model")
            if self._ranks.is_first:
                write_evaluation(folder, "step_0", self.baseline)

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the selection, and remove models that the run saved after `step`."""
        asked = {name: getattr(self.selection, name) for name in ("metric", "mode", "min_delta")}
        # The metric and its threshold may be changed on resuming, so they come from the settings and not from the
        # checkpoint.
        self.selection = Selection(**{**state["selection"], **asked})
        if self.records.writes:
            folder, rows = self.folder / "evals", self.records.rows
            # Rows without this column are of training steps alone, and have no scores on the disk.
            evaluated = [number for number in sorted(rows) if rows[number].get("eval_pairs") is not None]
            # One at a time: rows of scores take far more memory than what is kept of them.
            by_step = ((number, read_scores(folder, f"step_{number}")) for number in evaluated)
            self.records.restore_distributions(
                (number, distributions(scores)) for number, scores in by_step if scores is not None
            )
        self._best_on_disk, saved = saved_step(self.folder / "best"), saved_steps(self.folder)
        # Every rank must have looked at the folders before the first one removes some of them below.
        self._ranks.wait()
        for saved_at, folder in saved:
            if not (folder / SPEC_FILE).is_file():
                continue  # not a folder that this run wrote
            if saved_at > step:
                self._remove(folder)  # the run writes it again when it gets there
            else:
                self._saved.append(folder)
        self._restore_best(step)

    def _restore_best(self, step: int) -> None:
        """Make `best/` the model that was the best after `step`, or note that it is lost."""
        chosen, found, best = self.selection.best_step, self._best_on_disk, self.folder / "best"
        # The model of this very step is the one that was just loaded, which `fit` saves before it goes on.
        if chosen in (found, step):
            return
        earlier = self.folder / f"step_{chosen}"
        if chosen is not None and self._ranks.by_first(lambda: copies_model_of(chosen, earlier, best)):
            logger.warning("RESUME: best/ is not that of step %d, so it is copied from %s", chosen, earlier)
            self._best_on_disk = chosen
            return
        logger.warning(
            "RESUME: best/ is %s, so there is none until another model beats %s %.4f%s",
            "missing"
            if found is None
            else f"of the {'later' if found > step else 'other'} step {found} and is removed",
            self.config.run.early_stopping_metric,
            self.selection.bar,
            "" if chosen is None else f" of step {chosen}, whose model was not kept",
        )
        if found is not None:
            self._remove(best)
        self._best_on_disk = None
        self.selection.lose()
