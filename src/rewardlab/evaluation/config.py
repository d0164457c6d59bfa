"""The settings of `rewardlab eval`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.suite_names import SuiteName
from rewardlab.core.values import Section, require
from rewardlab.data.config import ReadingConfig, require_limits
from rewardlab.model.config import BUDGETS, ComputeConfig, ScoringPrecision, require_model


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig(Section):
    """Which preferences a model is judged on. Template and length limit come with the model."""

    dataset: tuple[str, ...] = ()
    """Data to evaluate on: files, folders (also those that `save_to_disk` of datasets wrote) or hub names, one or
    several (also `--hf-dataset`)."""
    hf_split: str = "test"
    """Split to evaluate on."""
    limit: int | None = None
    """Rows used from each dataset, after a seeded shuffle."""
    reading: ReadingConfig = ReadingConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit out of its range."""
        require_limits(self, "limit")


@dataclass(frozen=True, kw_only=True)
class EvalRunConfig(Section):
    """Which model is judged, in which arithmetic, and where the results go."""

    model: str = ""
    """Reward-model folder, such as `runs/…/best`."""
    models: tuple[str, ...] = ()
    """Several reward-model folders, judged one after the other on the same data; also the first words of the command,
    as in `rewardlab eval runs/a/best runs/b/best --dataset pairs.jsonl`."""
    suite: tuple[SuiteName, ...] = ()
    """Public test suites to judge the model on, each by its own rule, in place of `--dataset`."""
    suite_data: Path | None = None
    """Folder with the files of the suite as published (for several, a folder of each one's name); else the hub."""
    output_dir: Path = Path("runs/eval")
    """Where score rows and metrics are written; of several models, each in a folder of its own inside."""
    overwrite: bool = False
    """Replace an earlier evaluation in `--output-dir`."""
    precision: ScoringPrecision = "fp32"
    """Arithmetic; fp32 gives the canonical scores."""
    precision_card: bool = True
    """Also compare float32, half precision and weights rounded to the nearest on up to 200 of the preferences, and
    say which the model may be served in."""
    attention: Literal["auto", "shared", "padded"] = "auto"
    """As in `rewardlab train`."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; changes numbers by rounding alone. By default 8192, on a GPU 32768."""
    reuse: bool = True
    """Take the scores of a model from the cache where it has scored the same tokens in the same precision before."""
    slice: tuple[str, ...] = ()
    """Columns of the data by whose values the metrics are divided, beside the number of turns."""
    thresholds: tuple[float, ...] = ()
    """Scores at which a reply counts as accepted, for the rates of wrong and right acceptance (FPR, FNR,
    TPR)."""
    gold: Path | None = None
    """Scores of a gold model for the same replies, as in `rewardlab compare`, or the data themselves if their rows hold
    `scores`: rank correlation, regret in gold scores, and rankings judged by them."""
    perturb: bool = False
    """Also score up to 500 of the preferences with white space, markdown, the order of lists, politeness and typos
    changed, and compare."""
    ensemble: tuple[str, ...] = ()
    """Reward-model folders that are judged as one too, besides each for itself: mean, minimum, and mean minus
    `--ensemble-penalty` standard deviations of their scores on one scale. A single one must be a probe, whose bootstrap
    heads are the members. With `--suite` each must hold a calibration (`rewardlab calibrate --store`)."""
    ensemble_penalty: float = 1.0
    """λ, the standard deviations over members that are subtracted from their mean."""
    calibrated: bool = False
    """Judge probabilities with the temperature that `rewardlab calibrate` stored; scores stay raw."""
    seed: int = 0
    """Decides which rows `--limit` keeps."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, micro_token_budget=BUDGETS)
        require_between(self, ensemble_penalty=(0, 1000))
        named = (*((self.model,) if self.model else ()), *self.models)
        twice = [folder for some in (named, self.ensemble) for folder in _named_again(some)]
        require(self.suite_data is None or bool(self.suite), "--suite-data names the files of a --suite. Name it too.")
        require(not twice, f"{' '.join(twice)}: the model is named twice. Name it once.")

    @property
    def folders(self) -> tuple[str, ...]:
        """Every reward-model folder that is named, those of the ensemble last."""
        return tuple(dict.fromkeys((*((self.model,) if self.model else ()), *self.models, *self.ensemble)))

    def inputs(self, data: EvalDataConfig) -> tuple[str, ...]:
        """Return the names of what is read, which nothing that is written may replace."""
        gold = () if self.gold is None else (str(self.gold), str(self.gold / "eval.scores.jsonl"))
        return (*data.dataset, *gold)


def _named_again(folders: tuple[str, ...]) -> list[str]:
    """Return the names whose folder an earlier name stands for already, also by a link or another spelling."""
    places = [Path(folder).resolve() for folder in folders]
    return [folder for number, folder in enumerate(folders) if places[number] in places[:number]]


def _reads_other_data(data: EvalDataConfig) -> list[str]:
    """Return the flags that say how a data set is read, which no suite is, of those that have been set."""
    anywhere = ("num_workers", "cache_dir")
    said = {one.name: (getattr(data.reading, one.name), one.default) for one in fields(ReadingConfig)}
    said["hf_split"] = (data.hf_split, EvalDataConfig.hf_split)
    changed = [name for name, (value, default) in said.items() if value != default and name not in anywhere]
    return [f"--{name.replace('_', '-')}" for name in changed]


@composed
@dataclass(frozen=True, kw_only=True)
class EvalConfig(Composed):
    """Every setting of `rewardlab eval`. Template, length limit and β come with the model."""

    run: EvalRunConfig = EvalRunConfig()
    data: EvalDataConfig = EvalDataConfig()
    compute: ComputeConfig = ComputeConfig()

    def require_complete(self) -> None:
        """Raise ConfigError unless model and data are named."""
        for model in self.run.folders or ("",):
            require_model(model, model_is="a reward-model folder, such as runs/…/best")
        run, data = self.run, self.data
        require(bool(data.dataset or run.suite), "--dataset is missing: name a file, a folder or a hub dataset.")
        require(not (run.suite and data.dataset), "--suite and --dataset: judge one after the other.")
        require(not (run.suite and data.limit), "--limit and --suite: a suite is judged whole.")
        more = run.perturb or run.slice or run.thresholds or run.calibrated or run.gold
        require(
            not (run.suite and more),
            "--suite judges by the rule of the suite alone. Use --perturb, --slice, --thresholds, --calibrated and "
            "--gold with a --dataset.",
        )
        idle = ", ".join(_reads_other_data(data)) if run.suite else ""
        require(not idle, f"{idle} and --suite: a suite is read by its own layout, so that this would change nothing.")


@dataclass(frozen=True, kw_only=True)
class CalibrationRunConfig(Section):
    """Which model is calibrated, on what it is judged, and where the calibration goes."""

    model: str = ""
    """Reward-model folder, such as `runs/…/best`; also the first word of the command."""
    judge_dataset: tuple[str, ...] = ()
    """Data that judge the calibration and fit nothing; by default a share of the prompts of `--dataset`."""
    judge_fraction: float = 0.5
    """Share of the prompts that judge, whole conversations, where no `--judge-dataset` is named."""
    output_dir: Path = Path("runs/calibration")
    """Where score rows and the calibration are written."""
    store: bool = False
    """Also write the calibration into the reward-model folder, in place of an earlier one. Scores stay raw."""
    overwrite: bool = False
    """Replace an earlier calibration in `--output-dir`."""
    precision: ScoringPrecision = "fp32"
    """Arithmetic; fp32 gives the canonical scores."""
    attention: Literal["auto", "shared", "padded"] = "auto"
    """As in `rewardlab train`."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; changes numbers by rounding alone. By default 8192, on a GPU 32768."""
    reuse: bool = True
    """Take the scores of the model from the cache where it has scored the same tokens in the same precision before."""
    seed: int = 0
    """Decides which rows `--limit` keeps and which prompts judge."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, micro_token_budget=BUDGETS)
        require(0 < self.judge_fraction < 1, f"--judge-fraction {self.judge_fraction}: must be above 0 and below 1.")


@composed
@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Composed):
    """Every setting of `rewardlab calibrate`. Template, length limit and β come with the model."""

    run: CalibrationRunConfig = CalibrationRunConfig()
    data: EvalDataConfig = EvalDataConfig()
    compute: ComputeConfig = ComputeConfig()

    def require_complete(self) -> None:
        """Raise ConfigError unless model and data are named."""
        self.evaluation().require_complete()

    def evaluation(self, dataset: tuple[str, ...] | None = None) -> EvalConfig:
        """Return the settings by which the model scores data, by default those that it is calibrated on."""
        run = self.run
        return EvalConfig(
            compute=self.compute,
            data=self.data if dataset is None else replace(self.data, dataset=dataset),
            run=EvalRunConfig(
                model=run.model,
                precision=run.precision,
                attention=run.attention,
                micro_token_budget=run.micro_token_budget,
                reuse=run.reuse,
                seed=run.seed,
            ),
        )
