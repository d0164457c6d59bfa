"""The Trainer's hooks for reward models: what a micro-batch is, what its loss is, what counts as better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from rewardlab.analysis.stats import difference
from rewardlab.batch import PackedBatch, pack
from rewardlab.core.config import did_you_mean
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import remove
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.types import Sums, TokenGroup
from rewardlab.data.groups import origin
from rewardlab.data.level import plan_micro_batches
from rewardlab.data.loader import macro_batch, steps_per_epoch
from rewardlab.data.pack import largest_cost
from rewardlab.model.lora import require_adapter_gradients
from rewardlab.model.reward import RewardModel
from rewardlab.report.tables import format_estimate
from rewardlab.training import losses
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.evaluate import (
    EvalResult,
    distributions,
    evaluate_groups,
    read_evaluation,
    read_scores,
    score_spread,
    write_evaluation,
)
from rewardlab.training.observers import Observers
from rewardlab.training.optimizer import build_optimizer
from rewardlab.training.records import COLUMNS, Records
from rewardlab.training.run_folder import saved_step, saved_steps
from rewardlab.training.selection import Selection, column, direction
from rewardlab.training.throughput import Work
from rewardlab.training.trainer import Machine, Trainer
from rewardlab.training.work import shape_of, work_of

logger = logging.getLogger("rewardlab")
Save = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run trains on and what it watches."""

    train: Sequence[TokenGroup]
    eval: Sequence[TokenGroup] = ()
    train_eval: Sequence[TokenGroup] = ()
    """A fixed part of the training data, evaluated like `eval`."""


def selection_of(config: RewardTrainerConfig) -> Selection:
    """The rule that a configuration asks for. Raises ConfigError for a metric that is not logged."""
    metric = column(config.early_stopping_metric)
    logged = [name for name in COLUMNS if name != "step"]
    if metric not in logged:
        raise ConfigError(
            f"--early-stopping-metric {config.early_stopping_metric}: not a column of metrics.csv"
            f"{did_you_mean(metric, logged)}"
        )
    return Selection(
        metric=metric,
        mode=direction(config.early_stopping_metric, config.early_stopping_mode),
        min_delta=config.early_stopping_min_delta,
    )


@final
class RewardTrainer(Trainer[PackedBatch]):
    """Trains a RewardModel on TokenGroups whose comparisons carry their weights (see data.loader.weigh).

    `save` writes the model as it is to a folder; it is called for `best/` and `step_N/`.
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
        machine: Machine | None = None,
        observers: Observers | None = None,
    ) -> None:
        super().__init__(
            model,
            config,
            optimizer=build_optimizer(
                model,
                config,
                lr=config.learning_rate,
                head=[name for name, _ in model.named_parameters() if name.startswith("head.")],
                decay_exempt=frozenset(model.decay_exempt()),
            ),
            num_steps=num_steps,
            records=records,
            machine=machine,
            observers=observers,
            in_float16=model.compute_dtype is torch.float16,
        )
        self.batch_timeout_s = config.batch_timeout_s
        self.reward_model = model
        self._to_loss = self._loss_and_statistics
        if config.compile:
            self._to_loss = torch.compile(self._loss_and_statistics, dynamic=True)
        self._shape = shape_of(model)
        self.settings = config
        self.data = data
        self.save = save
        self.baseline: EvalResult | None = None
        self.selection = selection_of(config)
        self._best_on_disk: int | None = None
        """The step of `best/`."""
        self._saved: list[Path] = []

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.records.folder

    def _plan(self, step: int) -> list[PackedBatch]:
        config, groups = self.settings, self.data.train
        chosen = macro_batch(step, num_groups=len(groups), batch_size=config.batch_size, seed=config.seed)
        built, layout = [groups[index] for index in chosen], self.reward_model.layout
        plans = plan_micro_batches(built, self.token_budget, layout=layout, num_ranks=self.ranks.size)
        return [
            pack([built[n] for n in row], share=layout != "unshared", indices=[chosen[n] for n in row])
            for row in plans[self.ranks.rank]
        ]

    def _reads(self, step: int) -> str:
        config, groups = self.settings, self.data.train
        rows = macro_batch(step, num_groups=len(groups), batch_size=config.batch_size, seed=config.seed)
        return f"preferences {_some(list(map(str, rows)))} of {origin(groups)}"

    def _least_budget(self) -> int:
        return largest_cost([self.data.train], self.reward_model.layout)

    def _move(self, batch: PackedBatch) -> PackedBatch:
        return batch.to(self.device)

    def _weight(self, batch: PackedBatch) -> float:
        return losses.total_weight(batch)

    def _forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        # Another draw each step, the same for all its micro-batches, and on all ranks.
        self.reward_model.step_draw = (self.settings.seed, self.step)
        return self._to_loss(self.reward_model(batch), batch)

    def _loss_and_statistics(self, rewards: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return (
            losses.preference_loss(rewards, batch, self.settings),
            losses.statistics(rewards, batch, beta=self.settings.beta),
        )

    def _to_sums(self, loss: float, weight: float, statistics: list[float]) -> Sums:
        return losses.to_sums(loss, weight, statistics)

    def _describe(self, batch: PackedBatch) -> str:
        return _some([self.data.train[index].preference_id for index in batch.indices])

    def _work(self, batch: PackedBatch) -> Work:
        model = self.reward_model
        return work_of(batch, self._shape, layout=model.layout, row_tokens=model.row_length(batch.num_tokens))

    def _head(self) -> nn.Module:
        return self.reward_model.head

    def _require_gradients(self) -> None:
        require_adapter_gradients(self.reward_model)

    def _evaluate(self) -> None:
        if not self.data.eval:
            return
        result = self._judge(self.data.eval, "evaluating")
        accuracy, loss, margin = (
            result.overall.estimates[name] for name in ("eval_accuracy", "eval_loss", "eval_margin")
        )
        values = {
            "eval_loss": loss.value,
            "eval_loss_low": loss.low,
            "eval_loss_high": loss.high,
            "eval_acc": accuracy.value,
            "eval_acc_low": accuracy.low,
            "eval_acc_high": accuracy.high,
            "eval_margin": margin.value,
            "eval_margin_low": margin.low,
            "eval_margin_high": margin.high,
            "eval_ece": result.overall.estimates["eval_ece"].value,
            "eval_pairs": result.overall.sums.comparisons,
            **score_spread(result.rows),
            "epoch": self.step / steps_per_epoch(len(self.data.train), self.settings.batch_size),
        } | self._evaluate_training_part(result)
        self.records.add(self.step, values)
        self.records.add_distribution(self.step, distributions(result.rows))
        if self.ranks.is_first:
            write_evaluation(self.folder / "evals", f"step_{self.step}", result)
        logger.info(
            "step %d/%d  EVAL  acc %s  loss %s  margin %+.3f  %d pairs",
            self.step,
            self.num_steps,
            format_estimate(accuracy),
            format_estimate(loss),
            margin.value,
            result.overall.sums.comparisons,
        )
        self.observers.row(self.step, values)
        self._offer(result)

    def _judge(self, groups: Sequence[TokenGroup], progress: str) -> EvalResult:
        result = evaluate_groups(
            self.reward_model,
            groups,
            beta=self.settings.beta,
            budget=self.token_budget,
            progress=progress,
            ranks=self.ranks,
        )
        self.parallel.drop_gathered()
        return result

    def _evaluate_training_part(self, result: EvalResult) -> dict[str, float]:
        """The fixed part of the training data, and how much better the model does there: the train–eval gap."""
        if not self.data.train_eval:
            return {}
        seen, held_out = self._judge(self.data.train_eval, "evaluating training rows").overall, result.overall
        values: dict[str, float] = {}
        gaps = {}
        for name, metric, sign in (("acc", "eval_accuracy", 1), ("loss", "eval_loss", -1)):
            estimate = seen.estimates[metric]
            pair = (estimate, held_out.estimates[metric])
            gaps[name] = gap = difference(*pair[::sign])  # positive where the model does better on what it has seen
            values |= {
                f"train_eval_{name}": estimate.value,
                f"gap_{name}": gap.value,
                f"gap_{name}_low": gap.low,
                f"gap_{name}_high": gap.high,
            }
        accuracy = seen.estimates["eval_accuracy"]
        logger.info(
            "step %d/%d  GAP   acc %s on %d training rows, above the evaluation by %s",
            self.step,
            self.num_steps,
            format_estimate(accuracy),
            len(self.data.train_eval),
            format_estimate(gaps["acc"]),
        )
        return values | {"train_eval_acc_low": accuracy.low, "train_eval_acc_high": accuracy.high}

    @property
    def best_step(self) -> int | None:
        """The step of `best/`; None as long as nothing beat the untrained model."""
        return self.selection.best_step

    def _offer(self, result: EvalResult) -> None:
        """Let the rule see an evaluation."""
        if self.baseline is None:
            self.baseline = result
        values = {name: value for name, value in self.records.rows[self.step].items() if value is not None}
        non_finite = result.overall.sums.non_finite
        better = self.selection.offer(self.step, values, sound=not non_finite)
        if not better and (non_finite or self.selection.metric not in values):
            logger.warning(
                "step %d/%d  %s is no number%s, so this evaluation is not the best",
                self.step,
                self.num_steps,
                self.settings.early_stopping_metric,
                f" ({non_finite} pairs have no finite scores)" if non_finite else "",
            )

    def _best_is_due(self) -> bool:
        return self.best_step == self.step and self._best_on_disk != self.step

    def _save_best(self) -> None:
        self.save(self.folder / "best")
        self._best_on_disk = self.step

    def _should_stop(self) -> str:
        patience = self.settings.early_stopping_patience
        if patience is None or self.selection.since_best < patience:
            return ""
        best = "the untrained model" if self.best_step is None else f"step {self.best_step}"
        return (
            f"no better {self.settings.early_stopping_metric} in {self.selection.since_best} evaluations since {best} "
            f"({self.selection.bar:.4f}; --early-stopping-patience)"
        )

    def _save(self) -> None:
        folder = self.folder / f"step_{self.step}"
        if folder not in self._saved:
            self.save(folder)
            self._saved.append(folder)
        while self.settings.save_total_limit and len(self._saved) > self.settings.save_total_limit:
            self._remove(self._saved.pop(0))

    def _remove(self, folder: Path) -> None:
        if self.ranks.is_first:
            remove(folder)

    def _task_state(self) -> dict[str, Any]:
        return {"selection": self.selection.state()}

    def take_up_baseline(self) -> None:
        """In a run that goes on, before `restore`: the evaluation of the untrained model, as the run wrote it, or made
        again if that is gone or damaged.
        """
        if not self.data.eval:
            return
        folder, beta = self.folder / "evals", self.settings.beta
        self.baseline = read_evaluation(folder, "step_0", beta=beta, ranks=self.ranks)
        if self.baseline is None:
            self.baseline = self._judge(self.data.eval, "evaluating the untrained model")
            if self.ranks.is_first:
                write_evaluation(folder, "step_0", self.baseline)

    def _restore_task(self, state: Mapping[str, Any]) -> None:
        asked = {name: getattr(self.selection, name) for name in ("metric", "mode", "min_delta")}
        self.selection = Selection(**{**state["selection"], **asked})
        if self.records.writes:
            folder, rows = self.folder / "evals", self.records.rows
            evaluated = [step for step in rows if rows[step].get("eval_pairs") is not None]
            found = {step: read_scores(folder, f"step_{step}") for step in evaluated}
            self.records.restore_distributions(
                {step: distributions(scores) for step, scores in found.items() if scores is not None}
            )
        self._best_on_disk, saved = saved_step(self.folder / "best"), saved_steps(self.folder)
        self.ranks.wait()  # until all have looked: below, the first removes what lies ahead
        if self._best_on_disk is not None and self._best_on_disk > self.step:
            logger.warning(
                "RESUME: best/ is of step %d, which lies ahead; it is removed, and made anew by what beats %s %.4f",
                self._best_on_disk,
                self.settings.early_stopping_metric,
                self.selection.bar,
            )
            self._remove(self.folder / "best")
            self._best_on_disk = self.selection.best_step = None
        for step, folder in saved:
            if not (folder / SPEC_FILE).is_file():
                continue  # not of this run
            if step > self.step:
                self._remove(folder)  # the run writes it again when it gets there
            else:
                self._saved.append(folder)


def _some(names: Sequence[str]) -> str:
    """The first eight, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
