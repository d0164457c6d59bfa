"""Runs `rewardlab train` from a configuration to a verified reward model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from rewardlab.analysis.health import WarningSign
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.artifact.save import verify_in_clean_process
from rewardlab.core.config import require_kind
from rewardlab.core.signals import StopRequests
from rewardlab.core.spec import read_spec
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.core.values import require
from rewardlab.data.dataset_names import Given, given_rows
from rewardlab.data.groups import Datasets
from rewardlab.data.pack import largest_cost, require_fit
from rewardlab.distributed.ranks import ALONE, Ranks
from rewardlab.distributed.sharding import Parts, joined_ranks, parts_of, ranks_here, share
from rewardlab.evaluation.evaluate import EvalResult, evaluate_groups, read_evaluation, write_evaluation
from rewardlab.evaluation.precision import require_range
from rewardlab.model.config import DEFAULT_BUDGET
from rewardlab.model.load import load_reward_model
from rewardlab.model.reward import RewardModel
from rewardlab.model.trainable import parameter_counts
from rewardlab.training.budget import choose_budget
from rewardlab.training.checkpoints.model_folders import Saver
from rewardlab.training.checkpoints.resume import frozen_fingerprint
from rewardlab.training.closing import accuracies_of, computed_in, differences_of, judge_chosen
from rewardlab.training.cost.flops import linear_shapes
from rewardlab.training.cost.peak_flops import peak_flops_of
from rewardlab.training.default_budget import budget_by_size
from rewardlab.training.ended import KeptEnd
from rewardlab.training.full_disk import told_when_full
from rewardlab.training.loop.partners import Machine
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.monitor import Watch, watch_run
from rewardlab.training.monitoring.records import Records
from rewardlab.training.publishing import publisher_of
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.presets import rate_notice
from rewardlab.training.start import Ready, log_settings, make_ready, write_run_start
from rewardlab.training.states import LookedUp

logger = logging.getLogger("rewardlab")
Rows = Iterable[Mapping[str, Any] | Preference]


@runtime_checkable
class Trial(Protocol):
    """Makes a run one that is only tried."""

    def shorten(self, ready: Ready) -> Ready:
        """Return the run to carry out, once its model is loaded."""
        ...

    def settings(self, config: RewardTrainerConfig) -> RewardTrainerConfig:
        """Return the settings to log, given those of the run that is carried out."""
        ...

    def trained(self, trainer: RewardTrainer, model: RewardModel, ready: Ready) -> None:
        """Use the model that trained once more, after its last step; what it becomes is not kept."""


@runtime_checkable
class Publish(Protocol):
    """Receives the models that a run saves; for example, it makes a server load the newest one."""

    def saved(self, folder: Path, step: int) -> None:
        """Take note that a model was saved. Must not raise."""

    def finish(self, folder: Path, step: int) -> None:
        """Take note that the run is over and has chosen this model. Must not raise."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run."""

    output_dir: Path
    best: Path | None
    """The folder of the best model; None without evaluation data, or if none beat the untrained model."""
    best_step: int | None
    last: Path
    last_step: int
    baseline: EvalResult | None
    """The untrained model on the evaluation data."""
    selected: EvalResult | None
    """The chosen model on the evaluation data by which it was chosen."""
    test_baseline: EvalResult | None
    """The untrained model on the test data."""
    test: EvalResult | None
    """The chosen model on the test data, reloaded from its folder in float32."""
    baselines: Mapping[str, Mapping[str, EvalResult]]
    """`length only` and `bag of words`, fitted on the training data -> `selection` and `test` -> evaluation."""
    computed_in: Mapping[str, str]
    """`before`, `after` and `baselines` -> the precision in which their numbers were computed."""
    shared: Mapping[str, Mapping[str, int]]
    """What parts of the data have in common, such as `test_with_evaluation` -> `prompts`, `rows` -> their number."""
    card: PrecisionCard | None
    """The chosen model in other precisions, on test data or else on evaluation data; None after a run in float32."""
    live: PrecisionCard | None
    """The chosen model as evaluated during training, compared with its folder in float32, on the evaluation data.

    None without evaluation data, and after a run in float32 that was saved in float32, where the two are the same.
    """
    train_seconds: float
    speed: str
    """Rates of the training steps and peak memory, in a line."""
    warnings: Sequence[WarningSign]
    """Warning signs of the run, in the order in which they were seen."""

    @property
    def model(self) -> Path:
        """The folder of the chosen model: `best`, or the last step's."""
        return self.best if self.best is not None else self.last

    @property
    def step(self) -> int:
        """The step of `model`."""
        return self.last_step if self.best_step is None else self.best_step

    def compared(self, on: Literal["selection", "test"]) -> dict[str, EvalResult]:
        """Return evaluations on the same data by name: the baselines, `before` and `after` training."""
        before, after = (self.baseline, self.selected) if on == "selection" else (self.test_baseline, self.test)
        by_name = {name: results.get(on) for name, results in self.baselines.items()}
        by_name |= {"before": before, "after": after}
        return {name: result for name, result in by_name.items() if result is not None}


class _Whole:
    """A `Trial` that changes nothing: the run itself."""

    def shorten(self, ready: Ready) -> Ready:
        return ready

    def settings(self, config: RewardTrainerConfig) -> RewardTrainerConfig:
        return config

    def trained(self, trainer: RewardTrainer, model: RewardModel, ready: Ready) -> None:
        pass


def train(
    config: RewardTrainerConfig,
    *,
    preferences: Rows | None = None,
    eval_preferences: Rows | None = None,
    test_preferences: Rows | None = None,
    publish: Publish | None = None,
) -> TrainResult:
    """Train a reward model as `config` says, or resume a run that was interrupted; see docs/api.md.

    `preferences` are rows in memory to train on, in place of data that `config` names: mappings in any schema of
    docs/data.md, `Preference`s, a `datasets.Dataset`, or any iterable of such rows. `eval_preferences` choose the
    checkpoint, and `test_preferences` are judged once, at the end. They are read, checked and counted like rows of
    files.

    `publish` is called for every model that the first rank has saved, and for the one chosen at the end; by default it
    is the server of `publish_to`, if there is one.

    Raises a subclass of RewardlabError for anything the user can fix, also DiskFullError, and RunInterrupted if a
    signal or `max_hours` ended the run early. Nothing of an earlier run is overwritten unless asked for. With `dry_run`
    it is a ConfigError, since `rehearse` tries a run.
    """
    require_kind(config, RewardTrainerConfig)
    require(not config.run.dry_run, "dry_run: this would train. Call rewardlab.rehearse with the same configuration.")
    publish = publisher_of(config.publish) if publish is None else publish
    given = given_rows(preferences=preferences, eval_preferences=eval_preferences, test_preferences=test_preferences)
    return carry_out(config, given, publish)


def carry_out(
    config: RewardTrainerConfig, given: Given, publish: Publish | None, *, trial: Trial | None = None
) -> TrainResult:
    """Do what `train` does, with rows that are `given`; `trial` changes the run.

    Raises what `train` does.
    """
    stops = StopRequests(max_hours=config.run.max_hours)
    run = config.run.output_dir
    joined = joined_ranks(timeout_s=config.monitor.rank_timeout_s)
    with KeptEnd(run) as end, told_when_full(run), joined as ranks, ExitStack() as held:
        result = _train(config, ranks, stops, held, end, given, trial or _Whole(), publish if ranks.is_first else None)
        end.finish()
        if publish is not None and ranks.is_first:
            publish.finish(result.model, result.step)
        return result


def _train(
    config: RewardTrainerConfig,
    ranks: Ranks,
    stops: StopRequests,
    held: ExitStack,
    end: KeptEnd,
    given: Given,
    trial: Trial,
    publish: Publish | None,
) -> TrainResult:
    ready = make_ready(config, ranks, held, given)
    config = ready.config
    # Before the model is loaded, so that nothing drawn while it loads depends on what ran in this process before.
    torch.manual_seed(config.run.seed)
    # A process that is the only one has nothing to divide, also if torchrun started it.
    parts = parts_of(config.run.sharding, ranks) if ranks.size > 1 else None
    model = _load(ready, parts)
    ready = replace(ready, config=_settle_budget(config, model, ready.data, ranks))
    ready = trial.shorten(ready)
    config = ready.config
    looked_up = LookedUp(config, model, ready.data, ready.test) if config.model.cache_states else None
    peak_flops = peak_flops_of(ready.device, model.compute_dtype, linear_shapes(model), count=ranks.size)
    logger.info("peak: %s", peak_flops.line())
    # Checkpoints hold only weights that train, so resuming compares the frozen ones by this.
    fingerprint = frozen_fingerprint(model)
    ready = replace(ready, facts={**ready.facts, "parameters": parameter_counts(model)})
    ranks.by_first(lambda: write_run_start(ready, fingerprint, peak_flops))
    log_settings(trial.settings(config))
    # From here on the folder is this run's.
    end.begin(is_first=ranks.is_first)
    saver = Saver(config, ready.base, model, ranks, parts)

    def save(folder: Path, step: int) -> None:
        saver.save(folder, step)
        if publish is not None:
            publish.saved(folder, step)

    parallel = share(model, parts, ranks, defer_sync=config.run.defer_gradient_sync)
    assert config.run.steps is not None
    watch = _watch(ready) if ranks.is_first else Watch()
    trainer = reward_trainer(
        config,
        model,
        ready.data,
        num_steps=config.run.steps,
        records=Records(config.run.output_dir, writes=ranks.is_first),
        save=save,
        machine=Machine(peak_flops=peak_flops, parallel=parallel, stops=stops),
        observers=watch.observers,
    )
    started = time.perf_counter()
    with watch.observers:
        # Both baselines are of the untrained model, so they are taken before a checkpoint is loaded. A signal ends this
        # one at once: it may take minutes, and there is nothing yet to keep.
        test_baseline = _judge_untrained(config, model, ready, ranks)
        with stops:
            if ready.interrupted is not None:
                trainer.judge.take_up_baseline(config.run.token_budget)
                trainer.restore(ready.interrupted.checkpoint)
                watch.resume(trainer.records.rows)
            trainer.fit()
            trainer.heed_late_signal()
        trial.trained(trainer, model, ready)
    trained = _Trained(
        trainer=trainer, test_baseline=test_baseline, seconds=time.perf_counter() - started, speed=trainer.speed()
    )
    # The chosen model is loaded again below, and may not fit beside the one that trained.
    trainer.release()
    return _finish(trained, ready, watch, ranks, parts, looked_up)


def _load(ready: Ready, division: Parts | None) -> RewardModel:
    """Return the model to train. Warns about a learning rate that is unusual for it."""
    config = ready.config
    model = load_reward_model(
        ready.base.path,
        config.model,
        config.compute,
        seed=config.run.seed,
        layout=ready.layout,
        device=ready.device,
        log=logger.info,
        division=division,
    )
    said = rate_notice(weights=parameter_counts(model)["total"], lora=config.model.lora, lr=config.learning_rate)
    if said:
        logger.warning("rate: %s", said)
    # A model may overflow in float16 whatever is trained. The canaries show that now, and not as NaN at some later
    # step.
    require_range(model, ready.base.renderer)
    return model


def _watch(ready: Ready) -> Watch:
    """Start watching the run."""
    data = {"selection": "evaluation"}
    baselines = {
        name: {data.get(on, on): result.overall.estimates["eval_accuracy"] for on, result in judged.items()}
        for name, judged in ready.baselines.items()
    }
    return watch_run(
        ready.config,
        ready.device,
        ready.tokens,
        baselines,
        label_certainty=_label_certainty(ready.data.eval),
        resumed_at=ready.resumed_at,
    )


def _label_certainty(groups: Iterable[TokenGroup]) -> float:
    """Return the mean label of the better replies; 1 where nothing is decided."""
    sure = [max(one.label, 1 - one.label) for group in groups for one in group.comparisons if one.label != 0.5]
    return sum(sure) / len(sure) if sure else 1.0


def _judge_untrained(config: RewardTrainerConfig, model: RewardModel, ready: Ready, ranks: Ranks) -> EvalResult | None:
    """Evaluate the untrained model on the test data, the first half of a before-and-after; None without test data.

    The result chooses nothing. A resumed run reads it from its folder, since its model is trained already.
    """
    folder, name = config.run.output_dir / "evals", "test_before_training"
    if not ready.test:
        return None
    if ready.interrupted is not None:
        earlier = read_evaluation(folder, name, beta=config.loss.beta, ranks=ranks)
        if earlier is not None:
            return earlier
    result = evaluate_groups(
        model,
        ready.test,
        beta=config.loss.beta,
        budget=config.run.token_budget,
        progress="test data before training",
        ranks=ranks,
    )
    if ranks.is_first:
        write_evaluation(folder, name, result)
    return result


def _settle_budget(
    config: RewardTrainerConfig, model: RewardModel, data: Datasets, ranks: Ranks = ALONE
) -> RewardTrainerConfig:
    """Return the configuration with a number of tokens as `micro_token_budget`: the smallest that a rank finds.

    Raises ConfigError if a preference is larger than what a GPU's size gives.
    """
    if isinstance(config.run.micro_token_budget, int):
        return config
    if config.run.micro_token_budget is None:
        choice = min(ranks.gather(budget_by_size(model, data.train, config)), key=lambda choice: choice.budget)
        logger.info("micro-token budget: %d (%s)", choice.budget, choice.reason)
        require_fit([data.train], choice.budget, layout=model.layout)
        return config.replace(micro_token_budget=choice.budget)
    largest = largest_cost([data.train], model.layout)
    if config.model.cache_states:
        # Nothing is computed backward through the model, so a trial would measure what never happens.
        return config.replace(micro_token_budget=max(DEFAULT_BUDGET, largest))
    choice = choose_budget(
        model,
        data.train,
        config.loss,
        batch_size=config.run.batch_size,
        floor=largest,
        optimizer=config.optimizer.optimizer,
        processes=ranks_here(ranks),
    )
    choice = min(ranks.gather(choice), key=lambda choice: choice.budget)
    logger.info("micro-token budget: %d by trial (%s)", choice.budget, choice.reason)
    return config.replace(micro_token_budget=choice.budget)


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """A run whose steps are done; the model that trained has been released."""

    trainer: RewardTrainer
    test_baseline: EvalResult | None
    seconds: float
    speed: str


def _finish(
    trained: _Trained, ready: Ready, watch: Watch, ranks: Ranks, parts: Parts | None, looked_up: LookedUp | None
) -> TrainResult:
    """Verify the chosen model in a clean process, evaluate it on the test data, once, and compose the result."""
    config, trainer = ready.config, trained.trainer
    last = config.run.output_dir / f"step_{trainer.step}"
    best = config.run.output_dir / "best" if trainer.judge.best_step is not None else None
    if trainer.judge.baseline is not None and best is None:
        logger.warning("%s, so there is no best/; the last one is %s", trainer.judge.selection.why_none(), last)
    chosen = best or last
    # A process of its own proves that the folder alone gives the scores, with nothing left over from training.
    ranks.by_first(lambda: verify_in_clean_process(chosen))
    logger.info("verified %s in a clean process", chosen)
    judged = judge_chosen(config, trainer, ready, chosen, ranks, parts, looked_up)
    watch.judge_chosen(accuracies_of(judged))
    if judged.live is not None:
        watch.judge_live(judged.live)
    if judged.card is not None:
        watch.judge_precisions(judged.card)
    result = TrainResult(
        output_dir=config.run.output_dir,
        best=best,
        best_step=trainer.judge.best_step,
        last=last,
        last_step=trainer.step,
        baseline=trainer.judge.baseline,
        selected=judged.selected,
        test_baseline=trained.test_baseline,
        test=judged.test,
        baselines=ready.baselines,
        computed_in=computed_in(config, read_spec(chosen).save_dtype),
        shared=ready.facts["data"]["shared"],
        card=judged.card,
        live=judged.live,
        train_seconds=trained.seconds,
        speed=trained.speed,
        warnings=(),
    )
    if ranks.is_first and (judged.test or judged.selected) is not None:
        # Evaluation data chose the model, which flatters it: one that is behind all the same is behind for sure.
        on: Literal["selection", "test"] = "selection" if judged.test is None else "test"
        data = "the evaluation data" if judged.test is None else "the test data"
        watch.judge_beside(differences_of(result.compared(on)), data)
    return replace(result, warnings=tuple(watch.signs))
