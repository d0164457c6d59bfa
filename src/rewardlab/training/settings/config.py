"""The settings of `rewardlab train`. Needs nothing but the standard library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.errors import ConfigError
from rewardlab.core.values import Section, require
from rewardlab.data.config import TrainingDataConfig
from rewardlab.model.config import BUDGETS, DEFAULT_BUDGET, ModelConfig, TrainComputeConfig, require_model
from rewardlab.training.settings.presets import fill

FULL_LR = 5e-6
LORA_LR = 5e-5
HEAD_LR = 1e-3
"""Default learning rates of AdamW by what trains: every weight, adapters and head, the head alone."""
BACKBONE_LR_MULT = 0.1
WARMUP_RATIO = 0.05
MOST_STEPS: Final = 1_000_000_000
COUNTS: Final = (1, math.inf)
FACTORS: Final = (0, 1_000_000)
"""Lowest and highest values: COUNTS of a count, FACTORS of learning rates, β and λ.

Above a million, float32 has no numbers left for what they multiply.
"""
SHORTEST_INTERVAL: Final = 5
"""The default is at least this many steps between evaluations, so that a short trial run mostly trains."""
Viewer = Literal["auto", "tensorboard", "wandb", "trackio", "mlflow", "none"]
SchedulerName = Literal["cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr"]
PresetName = Literal["none", "0.5b-trial", "3b-lora-shp", "7b-lora-shp", "full-finetuning", "proxy-rm", "plain"]
Trained = TypeVar("Trained", bound="RewardTrainerConfig")
OptimizerName = Literal["adamw", "sgd", "adafactor", "adamw8bit"]


def interval_of(eval_every: int | None, num_steps: int) -> int:
    """Return the steps between evaluations: a tenth of the run, unless they are given."""
    return eval_every or max(SHORTEST_INTERVAL, num_steps // 10)


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """The loss that is minimised (formulas: docs/design/formulas.md)."""

    beta: float = 1.0
    """σ(beta · score difference) is the probability of the preferred reply."""
    label_smoothing: float = 0.05
    """ε: labels 1 and 0 become 1 − ε and ε."""
    regularization_lambda: float = 0.0
    """λ of the margin regulariser: mean of (score difference)², or of its absolute value."""
    regularization_type: Literal["l2", "l1"] = "l2"
    """Squared or absolute margin regulariser."""
    score_regularization_lambda: float = 0.0
    """λ of the score regulariser: mean of (first score² + second score²)."""
    center_lambda: float = 0.0
    """c of the centring regulariser: mean of (first score + second score)²."""
    kwise_loss: Literal["pairs", "plackett-luce"] = "pairs"
    """For K > 2: Bradley-Terry over the judged pairs, or Plackett-Luce over the ranking."""
    kwise_weight: Literal["prompt", "comparison"] = "prompt"
    """Where a prompt has several comparisons: whether each prompt counts once, or each comparison."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require(self.beta > 0, f"--beta {self.beta}: must be above 0.")
        # At ½ both directions would count the same, and nothing could be learned.
        require(
            0 <= self.label_smoothing < 0.5,
            f"--label-smoothing {self.label_smoothing}: must be at least 0 and below 0.5 (0.05 trains towards 0.95).",
        )
        require_between(
            self,
            beta=FACTORS,
            regularization_lambda=FACTORS,
            score_regularization_lambda=FACTORS,
            center_lambda=FACTORS,
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over a run."""

    lr_scheduler: SchedulerName = "cosine"
    """Course of the learning rate after the warm-up: down to 0, down to a share of it, or constant."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises from 0; by default `warmup_ratio` of the run."""
    warmup_ratio: float | None = None
    """Share of the run in which the learning rate rises from 0; by default 0.05, and none for `constant`."""
    min_lr_ratio: float = 0.1
    """Where `cosine_with_min_lr` ends, as a share of the learning rate."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range, and for settings that contradict each other."""
        require_between(self, warmup_steps=(0, MOST_STEPS))
        require(
            self.warmup_ratio is None or 0 <= self.warmup_ratio < 1,
            f"--warmup-ratio {self.warmup_ratio}: a share of the run, at least 0 and below 1; for steps there is "
            f"--warmup-steps.",
        )
        require(
            not (self.warmup_steps and self.warmup_ratio),
            "--warmup-steps and --warmup-ratio set the same thing; give only one of them.",
        )
        require(
            self.lr_scheduler != "constant" or not (self.warmup_steps or self.warmup_ratio),
            "--lr-scheduler constant has no warm-up; use constant_with_warmup.",
        )
        require(0 <= self.min_lr_ratio < 1, f"--min-lr-ratio {self.min_lr_ratio}: must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """How gradients change the weights."""

    optimizer: OptimizerName = "adamw"
    """AdamW; plain SGD, which keeps no state; Adafactor, which keeps little; or AdamW with moments in 8 bits (CUDA and
    the package `bitsandbytes`)."""
    lr: float | None = None
    """Highest learning rate; by default 5e-6 for full fine-tuning, 5e-5 for LoRA and 1e-3 for the head alone."""
    differential_lr: bool = False
    """Give the backbone, adapters included, a lower learning rate than the head. The backbone must adapt too: in one
    study all runs with this ended near 51 % accuracy.
    """
    backbone_lr_mult: float | None = None
    """With `--differential-lr`, the backbone's learning rate as a share of `--lr`; by default 0.1."""
    weight_decay: float = 0.01
    """Weight decay, decoupled from the gradient; never applied to norms, biases and the head's bias."""
    head_only_weight_decay: bool = False
    """Apply weight decay to the head alone."""
    max_grad_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range, and for an optimiser that needs `lr` without one."""
        require(self.lr is None or self.lr > 0, f"--lr {self.lr}: must be above 0.")
        # SGD's step grows with the gradient, and Adafactor's with the size of the weights, so AdamW's rates do not fit.
        require(
            self.lr is not None or self.optimizer not in ("sgd", "adafactor"),
            f"--optimizer {self.optimizer}: the default learning rates are those of AdamW. Give one with --lr.",
        )
        require(
            self.backbone_lr_mult is None or self.differential_lr,
            f"--backbone-lr-mult {self.backbone_lr_mult}: without --differential-lr there is one rate. Add it.",
        )
        require(
            self.backbone_lr_mult is None or self.backbone_lr_mult > 0,
            f"--backbone-lr-mult {self.backbone_lr_mult}: must be above 0; --train-head-only freezes the backbone.",
        )
        require(self.max_grad_norm > 0, f"--max-grad-norm {self.max_grad_norm}: must be above 0; 1e9 clips nothing.")
        require_between(self, lr=FACTORS, backbone_lr_mult=FACTORS, weight_decay=FACTORS)

    @property
    def backbone_share(self) -> float:
        """The backbone's learning rate divided by the head's."""
        if not self.differential_lr:
            return 1.0
        return BACKBONE_LR_MULT if self.backbone_lr_mult is None else self.backbone_lr_mult


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Steps, cadence and output of a run."""

    compat: Literal["none", "trl"] = "none"
    """Whose defaults hold for settings that neither flags nor file give: rewardlab's, or TRL's RewardTrainer's."""
    preset: PresetName = "none"
    """Recommended settings, used where neither flags nor file give one; docs/presets.md says which for what."""
    output_dir: Path = Path("runs/reward-model")
    """Run folder: configuration, metrics, samples and the saved models."""
    overwrite: bool = False
    """Replace an existing run in `--output-dir`."""
    dry_run: bool = False
    """Try the run in small, keep nothing, and say what the whole run would take: time, memory and disk."""
    steps: int | None = None
    """Optimiser steps; without it, `--epochs` decides."""
    epochs: float = 1.0
    """Passes over the training data, when `--steps` is not given."""
    batch_size: int = 16
    """Preferences a step: pairs, or prompts where a prompt has more than two replies."""
    rows_per_prompt: int = 1
    """Rows of one prompt that are drawn together: a step computes their prompt, and equal replies to it, once. With 1
    each row is drawn by itself."""
    micro_token_budget: int | Literal["auto"] | None = None
    """Tokens computed at a time; smaller needs less memory and changes numbers by rounding alone: gradients are
    accumulated over the whole batch. By default 8192, and on a GPU up to 65536 where its size leaves ample room. `auto`
    takes the most that fits, by a trial at the start."""
    seed: int = 0
    """Decides the head, the order of the data and every other draw."""
    log_every: int = 10
    """Steps between lines of the log, which the first step and the last have, too."""
    eval_every: int | None = None
    """Steps between evaluations; by default a tenth of the run, at least 5. Step 0 and the last step are always
    evaluated."""
    save_every: int | None = None
    """Steps between `step_N/` folders; the last step is always saved."""
    log_samples: int = 2
    """Rendered pairs written to `samples.txt`; with 0 the log shows no row of the data either."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of saved weights; `auto` is float32. In half the size they are rounded stochastically, the same each time,
    which moves the scores a little; by how much is printed and saved."""
    save_total_limit: int | None = None
    """`step_N/` folders kept, the newest ones; `best/` and the last step's are always kept."""
    resume: str | None = None
    """Resume an interrupted run: `auto` for the one in `--output-dir`, if there is one, or the folder of a run or of
    one of its checkpoints, whose settings then hold.
    """
    reschedule: bool = False
    """When resuming with changed `--steps`, let the learning rate follow the new schedule from here on."""
    checkpoints: bool = True
    """Keep what an exact resume needs in `checkpoints/`: before each new `best/`, and at the interval of
    `--checkpoint-minutes` or `--checkpoint-every`.
    """
    checkpoint_minutes: float = 15.0
    """Minutes between checkpoints."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, instead of minutes."""
    checkpoint_limit: int = 2
    """Checkpoints kept during the run, the newest ones; a finished run keeps one."""
    max_hours: float | None = None
    """Stop after this many hours with a checkpoint and exit status 75, so that a batch job can queue itself again."""
    sharding: Literal["full", "hybrid", "none"] = "full"
    """With several devices (torchrun): shard weights, gradients and optimiser over all of them, or within each node, or
    keep them whole on each. `none` is fastest for what fits; only there do all go on with less memory when one runs out
    of it.
    """
    defer_gradient_sync: bool = False
    """With `--sharding full` or `hybrid`: sum gradients over the devices once a step, not in every micro-batch; faster,
    but takes the memory of all gradients.
    """
    early_stopping_metric: str = "eval_accuracy"
    """What decides which checkpoint is `best/`, and whether training stops: any column of metrics.csv, also by
    names in use elsewhere (`eval_pairwise_accuracy`, `eval_mean_margin`). Equal accuracies are decided by the loss."""
    early_stopping_mode: Literal["auto", "max", "min"] = "auto"
    """Whether higher or lower values of it are better; `auto` knows accuracies, margins, losses and ECE."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without a better one; by default never."""
    early_stopping_min_delta: float = 0.0
    """By how much an evaluation must be better to count as better."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range, and for settings that contradict each other."""
        require(self.epochs > 0, f"--epochs {self.epochs}: must be above 0.")
        for name in ("checkpoint_minutes", "max_hours"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name.replace('_', '-')} {value}: must be above 0.")
        require_seed(self.seed)
        require_between(
            self,
            steps=(1, MOST_STEPS),
            epochs=(0, 1_000_000),
            batch_size=(1, 1_000_000),
            rows_per_prompt=(1, 1_000_000),
            micro_token_budget=BUDGETS,
            log_every=COUNTS,
            eval_every=COUNTS,
            save_every=COUNTS,
            log_samples=(0, math.inf),
            save_total_limit=COUNTS,
            checkpoint_every=COUNTS,
            checkpoint_limit=COUNTS,
            checkpoint_minutes=(0, 1_000_000),
            max_hours=(0, 1_000_000),
            early_stopping_patience=COUNTS,
            early_stopping_min_delta=(0, math.inf),
        )
        require(self.resume != "", "--resume: the name is empty; give auto, a run's folder or a checkpoint's.")
        require(
            not (self.resume and self.overwrite),
            "--resume goes on with a run and --overwrite replaces it; give only one of them.",
        )
        require(
            not (self.reschedule and self.resume is None),
            "--reschedule is for resuming a run; give --resume with it.",
        )

    @property
    def token_budget(self) -> int:
        """`micro_token_budget` as a number of tokens; the default where it is not decided yet."""
        return self.micro_token_budget if isinstance(self.micro_token_budget, int) else DEFAULT_BUDGET

    def interval(self, num_steps: int) -> int:
        """Return the steps between evaluations for a run of `num_steps`."""
        return interval_of(self.eval_every, num_steps)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Section):
    """How a run is monitored; changes none of its numbers."""

    report_to: tuple[Viewer, ...] = ("auto",)
    """Viewers that also get the values of metrics.csv, one or several; `auto` is TensorBoard where it is installed."""
    precision_card: Literal["auto", "always", "never"] = "auto"
    """End with a precision card of the chosen model, which costs two evaluations of at most 200 preferences. `auto`:
    after runs in half precision, and after runs in float32 of at least 10,000 preferences, of which it is a small part.
    """
    profile_memory: bool = False
    """Write the memory of every step, forward and backward separately, to `memory.csv`."""
    track_gpu: bool = False
    """Write utilisation, memory, power and temperature of the run's GPU, sampled through NVML, to `gpu.csv`."""
    gpu_sample_interval_ms: int = 500
    """Milliseconds between samples of the GPU."""
    profile: bool = False
    """Trace some steps with torch's profiler, to `profile/`."""
    profile_steps: int = 3
    """Steps to trace, after two steps that warm up."""
    thresholds: tuple[float, ...] = ()
    """Scores at which a reply counts as accepted: the report has the rates of wrong and right acceptance there (FPR,
    FNR, TPR), as `rewardlab eval --thresholds` prints them."""
    batch_timeout_s: float = 60.0
    """Seconds to wait for the data of a step before the run ends with an error."""
    rank_timeout_s: float = 600.0
    """With several processes, seconds after which one that gives no sign of life (it is stopped, or its machine hangs)
    ends the run; one that is alive may take longer."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range, and for viewers that cannot be combined."""
        alone = [viewer for viewer in self.report_to if viewer in ("auto", "none")]
        require(len(self.report_to) > 0, "--report-to: it is empty; name one or several viewers, or `none`.")
        require(
            not alone or len(self.report_to) == 1,
            f"--report-to {' '.join(self.report_to)}: {' and '.join(alone)} cannot be given with others. Leave it out.",
        )
        require(
            len(set(self.report_to)) == len(self.report_to),
            f"--report-to {' '.join(self.report_to)}: a viewer is named twice. Name each once.",
        )
        require(self.batch_timeout_s > 0, f"--batch-timeout-s {self.batch_timeout_s}: must be above 0.")
        require_between(
            self,
            gpu_sample_interval_ms=(1, 3_600_000),
            profile_steps=(1, 10_000),
            batch_timeout_s=(0, 1_000_000_000),
            rank_timeout_s=(30, 1_000_000_000),
        )


@dataclass(frozen=True, kw_only=True)
class PublishConfig(Section):
    """A running rewardlab server that gets the newest model; changes none of the run's numbers."""

    publish_to: str | None = None
    """Address of a `rewardlab serve` that is asked to swap to each new model, such as http://127.0.0.1:8000. A swap
    that fails ends no run: it is warned about, counted, and tried again with the next model."""
    publish_every: Literal["best", "eval", "end"] = "best"
    """Which models: each new best one; each that is evaluated (which also saves it); or the chosen one at the end. That
    one is published in any case."""
    publish_as: str = "best"
    """Name of the model on the server that is replaced."""
    publish_token_env: str = "REWARDLAB_ADMIN_TOKEN"
    """Environment variable that holds the server's admin token."""
    publish_timeout_s: float = 120.0
    """Seconds that a swap may take; the run waits for it. At most 3000: the processes of a run wait an hour for each
    other."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range, or an address that holds a password."""
        require_between(self, publish_timeout_s=(0.001, 3000))
        require(self.publish_to != "", "--publish-to: the address is empty.")
        require(
            self.publish_to is None or "@" not in self.publish_to,
            "--publish-to: the address holds a user or a password, which config.json would keep. Put the token into "
            "the environment variable of --publish-token-env.",
        )
        require(bool(self.publish_as), "--publish-as: the name is empty.")
        require(bool(self.publish_token_env), "--publish-token-env: the name is empty.")


@composed
@dataclass(frozen=True, kw_only=True)
class RewardTrainerConfig(Composed):
    """Every setting of `rewardlab train`, in sections; `of` takes them by the names of their flags."""

    data: TrainingDataConfig = TrainingDataConfig()
    model: ModelConfig = ModelConfig()
    compute: TrainComputeConfig = TrainComputeConfig()
    loss: LossConfig = LossConfig()
    monitor: MonitorConfig = MonitorConfig()
    publish: PublishConfig = PublishConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    @classmethod
    def of(cls: type[Trained], **settings: Any) -> Trained:
        """Return the configuration with these settings, given by their flat names; a `preset` fills in what is not
        given.

        Raises ConfigError as `Composed.of` does.
        """
        given = {name.replace("-", "_"): value for name, value in settings.items()}
        filled = fill(given)
        require(
            given.get("compat", "none") == "none",
            "compat: TRL's defaults are filled in where flags and files are read. Use `rewardlab train --compat trl`, "
            "or give the settings themselves.",
        )
        made: Trained = super().of(**given, **filled)
        return made

    def __post_init__(self) -> None:
        """Raises ConfigError for settings of different sections that contradict each other, and without a model."""
        reading, loss, model = self.data.reading, self.loss, self.model
        require_model(model.model, model_is="a hub model, a folder, or smollm2-135m-instruct")
        if loss.kwise_loss == "plackett-luce":
            if reading.ties == "half":
                raise ConfigError("--ties half has no meaning for a ranking; use --ties skip or --kwise-loss pairs.")
            if reading.strength_as in ("margin", "soft") or reading.margin_column:
                raise ConfigError("a margin or a soft label has no meaning for a ranking; use --kwise-loss pairs.")
        if self.run.rows_per_prompt > 1:
            self._require_shared_prompts()
        require(
            not (model.train_head_only and self.optimizer.differential_lr),
            "--differential-lr: with --train-head-only the backbone does not train. Leave one of the two out.",
        )

    def _require_shared_prompts(self) -> None:
        run, model = self.run, self.model
        flag = f"--rows-per-prompt {run.rows_per_prompt}"
        require(
            run.rows_per_prompt <= run.batch_size,
            f"{flag}: a step has --batch-size {run.batch_size} rows, so at most as many of one prompt.",
        )
        for name, is_given, cause in (
            ("--lora-dropout", model.lora_dropout > 0, "each row has masks of its own"),
            ("--attention padded", model.attention == "padded", "each reply has its own copy of the prompt"),
            ("--cache-states", model.cache_states, "no prompt is computed in a step"),
        ):
            require(not is_given, f"{flag}: with {name} {cause}, so nothing is saved. Leave one of the two out.")

    def require_evaluation(self) -> None:
        """Raise ConfigError for a patience without evaluation data, unless some are given in memory."""
        selection = self.data.selection
        require(
            self.run.early_stopping_patience is None
            or selection.eval_fraction > 0
            or bool(selection.eval_dataset or selection.eval_split),
            f"--early-stopping-patience {self.run.early_stopping_patience}: without evaluation data nothing stops the "
            f"run. Name some (--eval-split, --eval-dataset, --eval-fraction), or set it to None.",
        )

    @property
    def learning_rate(self) -> float:
        """`lr`, or the default for the kind of training."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return HEAD_LR if self.model.train_head_only else LORA_LR if self.model.lora else FULL_LR
