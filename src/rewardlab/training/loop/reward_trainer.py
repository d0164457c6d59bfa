"""The Trainer for reward models, and the partner that makes its steps. The other one, RewardJudge, is beside it.

Together the two are all that the loop is told of preferences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from rewardlab.batch import PackedBatch, pack
from rewardlab.core.terminal import listed
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets, origin
from rewardlab.data.pack import largest_cost
from rewardlab.distributed.ranks import Ranks
from rewardlab.model.applying import floats_as_constants
from rewardlab.model.lora import require_adapter_gradients
from rewardlab.model.reward import RewardModel
from rewardlab.training.cost.flops import shape_of, work_of, work_of_head
from rewardlab.training.cost.throughput import Throughput, Work
from rewardlab.training.loop import losses
from rewardlab.training.loop.failures import Nouns
from rewardlab.training.loop.optimizer import build_optimizer
from rewardlab.training.loop.partners import Machine, Update
from rewardlab.training.loop.reward_judge import RewardJudge, Save
from rewardlab.training.loop.schedule import build_schedule
from rewardlab.training.loop.step_rows import StepRows
from rewardlab.training.loop.tally import PreferenceTally, unit_of
from rewardlab.training.loop.totals import StepTotals
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.monitoring.observers import Observers
from rewardlab.training.monitoring.progress import StepReport
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig


class RewardSteps:
    """Makes steps of TokenGroups whose comparisons carry their weights (see data.groups.weigh)."""

    nouns: Final = Nouns(weighed="comparisons", whole="preference")

    def __init__(
        self, config: RewardTrainerConfig, model: RewardModel, train: Sequence[TokenGroup], ranks: Ranks
    ) -> None:
        self.config = config
        self.model = model
        self.train = train
        self.tally: Final = PreferenceTally(unit=unit_of(train))
        self._rows = StepRows(config, train, layout=model.layout, num_ranks=ranks.size)
        self._ranks = ranks
        self._device = model.device
        self._shape = shape_of(model)
        self._to_loss = self._loss_and_statistics
        if config.compute.compile:
            floats_as_constants()
            # Compiled with dynamic shapes, since every micro-batch has another number of replies and comparisons.
            self._to_loss = torch.compile(self._loss_and_statistics, dynamic=True)

    @property
    def in_float16(self) -> bool:
        """See `Steps`."""
        return self.model.compute_dtype is torch.float16

    def plan(self, step: int, budget: int) -> list[PackedBatch]:
        """Return this rank's micro-batches of the step, of about equal size.

        Raises ConfigError if a preference is larger than `budget`.
        """
        chosen, share = self._rows.of_step(step), self.model.layout != "unshared"
        found = self._rows.together(chosen, budget)
        # Every rank plans for all ranks and takes its own part: planning is cheap, and nothing has to be communicated.
        plans = self._rows.micro_batches(found, budget)
        groups, members = found.groups, found.members
        return [
            replace(
                pack([groups[n] for n in row], share=share, indices=[chosen[members[n][0]] for n in row]),
                indices=tuple(chosen[member] for n in row for member in members[n]),
            )
            for row in plans[self._ranks.rank]
        ]

    def reads(self, step: int) -> str:
        """Return the numbers of the step's preferences, and where they are stored."""
        return f"preferences {listed(list(map(str, self._rows.of_step(step))))} of {origin(self.train)}"

    def least_budget(self) -> int:
        """Return the tokens of the largest preference."""
        return largest_cost([self.train], self.model.layout)

    def weight(self, batch: PackedBatch) -> float:
        """Return Σ w of its comparisons."""
        return losses.total_weight(batch)

    def move(self, batch: PackedBatch) -> PackedBatch:
        """See `Steps`."""
        return batch.to(self._device)

    def forward(self, batch: PackedBatch, step: int) -> tuple[Tensor, Tensor]:
        """Return ([] preference loss, [8] statistics in the order of losses.STATISTICS)."""
        # Seeds stochastic rounding and adapter dropout: new numbers each step, but the same for all its micro-batches
        # and ranks, so that neither the token budget nor the number of ranks changes what is trained.
        self.model.step_draw = (self.config.run.seed, step)
        return self._to_loss(self.model(batch), batch)

    def _loss_and_statistics(self, rewards: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return (
            losses.preference_loss(rewards, batch, self.config.loss),
            losses.statistics(rewards, batch, beta=self.config.loss.beta),
        )

    def require_gradients(self) -> None:
        """Raise ModelError if an adapter got no gradient."""
        require_adapter_gradients(self.model)

    def head(self) -> nn.Module:
        """Return the reward head."""
        return self.model.head

    def work(self, batch: PackedBatch) -> Work:
        """Return the tokens and FLOPs of a micro-batch."""
        model = self.model
        if model.known_states is not None:
            return work_of_head(batch, self._shape)
        return work_of(batch, self._shape, layout=model.layout, row_tokens=model.row_length(batch.num_tokens))

    def describe(self, batch: PackedBatch) -> str:
        """Return the ids of its preferences."""
        return listed([self.train[index].preference_id for index in batch.indices])

    def report(self, totals: StepTotals) -> StepReport:
        """Return the sums over comparisons, the norms and the speed of a step."""
        sums = losses.to_sums(totals.loss, totals.weight, totals.statistics)
        return StepReport(
            sums=sums,
            grad_norm=totals.grad_norm,
            head_grad_norm=totals.head_grad_norm,
            throughput=Throughput(work=totals.work, comparisons=sums.comparisons, seconds=totals.seconds, steps=1),
            lr=totals.lr,
        )


RewardTrainer: TypeAlias = Trainer[PackedBatch, RewardJudge]


def reward_trainer(
    config: RewardTrainerConfig,
    model: RewardModel,
    data: Datasets,
    *,
    num_steps: int,
    records: Records,
    save: Save,
    machine: Machine | None = None,
    observers: Observers | None = None,
) -> RewardTrainer:
    """Return a Trainer for a RewardModel, alone in its process unless `machine` says otherwise.

    `observers` replace those of `machine`. Raises ConfigError as `selection_of` and `build_optimizer` do, and
    ModelError if a trainable parameter is narrower than float32.
    """
    machine = replace(machine or Machine(), batch_timeout_s=config.monitor.batch_timeout_s)
    if observers is not None:
        machine = replace(machine, observers=observers)
    parallel = machine.parallel
    optimizer = build_optimizer(
        model,
        config.optimizer,
        lr=config.learning_rate,
        head=[name for name, _ in model.named_parameters() if name.startswith("head.")],
        decay_exempt=frozenset(model.decay_exempt()),
    )
    return RewardTrainer(
        model,
        config.run,
        steps=RewardSteps(config, model, data.train, parallel.ranks),
        judge=RewardJudge(
            config,
            model,
            data,
            num_steps=num_steps,
            records=records,
            save=save,
            parallel=parallel,
            observers=machine.observers,
        ),
        update=Update(
            optimizer=optimizer,
            schedule=build_schedule(optimizer, config.schedule, num_steps),
            max_grad_norm=config.optimizer.max_grad_norm,
        ),
        num_steps=num_steps,
        records=records,
        machine=machine,
    )
