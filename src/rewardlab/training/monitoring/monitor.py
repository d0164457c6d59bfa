"""Sets up who watches a run: viewers, memory, GPU and profiler as the settings ask, and always the warning signs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from rewardlab.analysis.health import Health, WarningSign
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.analysis.signs import RunFacts
from rewardlab.core.config import to_mapping
from rewardlab.core.files import append_text, to_json, write_text
from rewardlab.core.types import Estimate
from rewardlab.data.config import DiagnosticConfig
from rewardlab.data.token_report import TokenReport
from rewardlab.training.monitoring.gpu import require_nvml, watch_gpu
from rewardlab.training.monitoring.memory_watch import MemoryWatch
from rewardlab.training.monitoring.observers import Cadence, Observer, Observers
from rewardlab.training.monitoring.profiler import StepProfiler, require_steps
from rewardlab.training.monitoring.sinks import choose_viewers, open_sinks, require_viewers
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")
WARNINGS: Final = "warnings.jsonl"
NOTHING_LEARNT: Final = frozenset({"behind_baseline", "no_skill", "narrow_scores"})
INTENDED: Final[Mapping[str, frozenset[str]]] = {
    "label_shuffle": NOTHING_LEARNT,
    "prompt_only": NOTHING_LEARNT | {"frozen_head", "frozen_backbone"},
    "response_only": frozenset({"behind_baseline"}),
    "random_negatives": frozenset({"behind_baseline"}),
}
"""Control -> the warning signs that are what it is for. Prompts alone give a gradient of exactly zero."""


class HealthWatch:
    """Reports every warning sign at once, in the log and in warnings.jsonl; `signs` are all that were reported."""

    def __init__(self, folder: Path, health: Health, cadence: Cadence) -> None:
        self.health = health
        self.cadence = cadence
        self.path = folder / WARNINGS
        self.signs: list[WarningSign] = []
        write_text(self.path, "")

    def start(self, tokens: Mapping[str, TokenReport]) -> None:
        """Check the data for warning signs, by what tokenising did to each kind of them."""
        self._tell(
            self.health.start(
                {name: (report.truncated_replies, report.replies) for name, report in tokens.items()},
                {name: (report.shortened_replies, report.replies) for name, report in tokens.items()},
                {name: (report.cut_preferred, report.cut_other, report.kept) for name, report in tokens.items()},
            )
        )

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Check the values of a row for warning signs."""
        self._tell(self.health.offer({**values, "step": step}))

    def judge_baselines(self, baselines: Mapping[str, Mapping[str, Estimate]]) -> None:
        """Check how much the baselines leave to learn: name -> data -> accuracy."""
        self._tell(self.health.judge_baselines(baselines))

    def judge_chosen(self, accuracies: Mapping[str, Estimate]) -> None:
        """Check the accuracies of the chosen model on the data that judge it, and on their sources."""
        self._tell(self.health.judge_chosen(accuracies))

    def judge_beside(self, differences: Mapping[str, Estimate], data: str) -> None:
        """Check the accuracy of the chosen model minus those of baselines on the same pairs."""
        self._tell(self.health.judge_beside(differences, data=data))

    def judge_live(self, card: PrecisionCard) -> None:
        """Check the chosen model as it was evaluated during training."""
        self._tell(self.health.judge_live(card))

    def judge_precisions(self, card: PrecisionCard) -> None:
        """Check the saved model in other precisions."""
        self._tell(self.health.judge_precisions(card))

    def resume(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the signs of a resumed run from its rows; they are not reported again."""
        for step in sorted(rows):
            self.signs += self.health.offer({**rows[step], "step": step})
        write_text(self.path, "".join(to_json(sign.as_dict(), indent=None) + "\n" for sign in self.signs))

    def _tell(self, signs: list[WarningSign]) -> None:
        for sign in signs:
            logger.warning("%s  WARNING  %s", self.cadence.label(sign.step), sign.line())
            self.signs.append(sign)
            append_text(self.path, to_json(sign.as_dict(), indent=None) + "\n")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The monitors of a run, and what they have seen. Only the first rank has them; the others have an empty watch."""

    observers: Observers = field(default_factory=Observers)
    health: HealthWatch | None = None

    @property
    def signs(self) -> Sequence[WarningSign]:
        """The warning signs so far."""
        return self.health.signs if self.health is not None else ()

    def judge_chosen(self, accuracies: Mapping[str, Estimate]) -> None:
        """Check the accuracies of the chosen model on the data that judge it, and on their sources."""
        if self.health is not None:
            self.health.judge_chosen(accuracies)

    def judge_beside(self, differences: Mapping[str, Estimate], data: str) -> None:
        """Check the accuracy of the chosen model minus those of baselines on the same pairs."""
        if self.health is not None:
            self.health.judge_beside(differences, data)

    def judge_live(self, card: PrecisionCard) -> None:
        """Check the chosen model as it was evaluated during training."""
        if self.health is not None:
            self.health.judge_live(card)

    def judge_precisions(self, card: PrecisionCard) -> None:
        """Check the saved model in other precisions."""
        if self.health is not None:
            self.health.judge_precisions(card)

    def resume(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the warning signs of a resumed run from its rows."""
        if self.health is not None:
            self.health.resume(rows)


def require_monitoring(config: RewardTrainerConfig) -> None:
    """Raise ConfigError for what cannot be watched here, as far as that is known before anything runs."""
    require_viewers(config.monitor.report_to)
    if config.monitor.track_gpu:
        require_nvml(torch.cuda.is_available())
    if config.monitor.profile and config.run.steps is not None:
        require_steps(config.monitor.profile_steps, config.run.steps)


def _intended(control: DiagnosticConfig) -> frozenset[str]:
    """Return the signs of what a control is for: that nothing is learnt from data with nothing to learn."""
    return INTENDED.get(control.diagnostic_mode, frozenset()) if "train" in control.splits else frozenset()


def watch_run(
    config: RewardTrainerConfig,
    device: torch.device,
    tokens: Mapping[str, TokenReport],
    baselines: Mapping[str, Mapping[str, Estimate]] = MappingProxyType({}),
    *,
    label_certainty: float = 1.0,
    resumed_at: int | None = None,
) -> Watch:
    """Start watching a run, by its resolved configuration; `tokens` reports what tokenising did to each kind of data,
    and `baselines` maps the name of each to the data on which it was judged, and its accuracy there.
    `label_certainty` is the mean label of the better replies of the evaluation data.

    `resumed_at` is the step after which a resumed run goes on. With several ranks only the first one calls this. Raises
    ConfigError for a viewer or a GPU that is not available.
    """
    assert config.run.steps is not None
    assert config.run.eval_every is not None
    folder, cadence = config.run.output_dir, Cadence(num_steps=config.run.steps, every=config.run.eval_every)
    observers: list[Observer] = []
    if config.monitor.profile:
        # Checked again, since with --epochs the number of steps was not known at the first check.
        require_steps(config.monitor.profile_steps, config.run.steps)
        observers.append(StepProfiler(device, folder / "profile", num_traced=config.monitor.profile_steps).observer())
    if config.monitor.profile_memory:
        observers.append(MemoryWatch(device, folder / "memory.csv", cadence).observer())
    if config.monitor.track_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        observers.append(
            watch_gpu(device, visible, folder / "gpu.csv", cadence, interval_ms=config.monitor.gpu_sample_interval_ms)
        )
    # `auto` is not replaced in the configuration, so that the run has the same hash on machines without TensorBoard.
    observers += open_sinks(choose_viewers(config.monitor.report_to), folder, to_mapping(config), resumed_at=resumed_at)
    facts = RunFacts(
        num_steps=config.run.steps,
        warmup_steps=config.schedule.warmup_steps or 0,
        beta=config.loss.beta,
        label_certainty=label_certainty,
        head_alone=config.model.train_head_only,
        intended=_intended(config.data.diagnostic),
    )
    health = HealthWatch(folder, Health(facts), cadence)
    health.start(tokens)
    health.judge_baselines(baselines)
    return Watch(
        observers=Observers([*observers, Observer(name="the watch for warning signs", row=health.row)]), health=health
    )
