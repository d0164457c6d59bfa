"""Settings of the commands that have no configuration of their own, one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.core.config import require_between, require_seed
from rewardlab.core.values import require
from rewardlab.evaluation.compare_config import CompareConfig
from rewardlab.model.config import BUDGETS, ComputeConfig, ScoringPrecision
from rewardlab.serve.http.config import LimitsConfig, ServeConfig

OutputAs = Literal["raw", "calibrated", "probability"]


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Settings of `rewardlab verify`."""

    folder: Annotated[str, tyro.conf.Positional]
    """Reward-model folder, or the URL of a live endpoint: a rewardlab server, vLLM or SGLang."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic in which the canaries are scored and compared; files and tokens are checked in any. `auto` is fp32
    for a folder; for an endpoint it is what our server says, and found out from the scores of other engines."""
    model: Path | None = None
    """For a URL: the folder whose model the endpoint is to serve. Required for engines that are not ours; for our
    server it also finds stale weights."""
    served_name: str | None = None
    """For a URL: name of the model there, if it serves several; by default the first one of our server. Other engines
    with several models need it."""
    consumer: Literal["none", "openrlhf", "verl", "slime"] = "none"
    """For a URL, also `--as`: send the canaries as this framework would, and say what it would get."""
    token_env: str = ""
    """For a URL: environment variable that holds the token of the endpoint."""
    timeout_s: float = 120.0
    """For a URL: seconds to wait for each answer."""
    json: Path | None = None
    """For a URL: also write everything that was found to this file."""

    def __post_init__(self) -> None:
        require(bool(self.folder), "FOLDER '': must be a path or a URL.")
        require_between(self, timeout_s=(0.001, 86_400))
        live = self.is_live
        for name, given in (
            ("model", self.model),
            ("served-name", self.served_name),
            ("as", self.consumer != "none"),
            ("token-env", self.token_env),
            ("json", self.json),
        ):
            require(live or not given, f"--{name} is for a live endpoint, and {self.folder} is a folder.")
        require(
            self.consumer == "none" or self.model is not None,
            f"--as {self.consumer}: give the folder that the endpoint is to serve, whose template this framework "
            f"renders with: --model FOLDER.",
        )

    @property
    def is_live(self) -> bool:
        """Return whether a live endpoint is to be verified."""
        return self.folder.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Settings of `rewardlab export`."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Reward-model folder, such as `runs/…/best`; best one in float32."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the new folder's weights: that in which the engine is to compute."""
    output_dir: Path
    """The new folder."""
    max_shard_size: str | None = None
    """Largest size of a file of weights, such as `5GB`; by default all weights are in one file."""
    zero_bias: bool = False
    """Also write a bias of zero for the head, for engines and converters that expect one."""
    text_only: bool = False
    """Leave out what reads images or sound: the folder is one of its text model alone, with the same scores."""
    adapter: bool = False
    """Write the adapters and the head unmerged, as a folder that PEFT loads on their base model, in place of merged
    weights."""
    base: str | None = None
    """With `--adapter`: the base model, if it is no longer where the run found it."""
    with_base: bool = False
    """With `--adapter`: also write the base model as a sequence classifier with a head of zeros, into `base/`; vLLM
    wants that to serve adapters on."""
    overwrite: bool = False
    """Replace the reward model that is there; a run or any other folder stays."""

    def __post_init__(self) -> None:
        require(
            not self.adapter or (self.max_shard_size is None and not self.zero_bias and not self.text_only),
            "--adapter: its weights are float32 in one file, as trained. Leave --max-shard-size, --zero-bias and "
            "--text-only out.",
        )
        require(
            self.adapter or (self.base is None and not self.with_base),
            "--base and --with-base: are for --adapter. Merged weights need no base model.",
        )


@dataclass(frozen=True, kw_only=True)
class AverageArguments:
    """Settings of `rewardlab average`."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Reward-model folders, such as `runs/…/best`, that began from one model, its head included."""
    weights: tuple[float, ...] = ()
    """A positive number for each folder, in their order; by default all count alike."""
    output_dir: Path
    """The new folder."""
    overwrite: bool = False
    """Replace the reward model that is there; a run or any other folder stays."""


@dataclass(frozen=True, kw_only=True)
class CardArguments:
    """Settings of `rewardlab card`."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, a probe or an evaluation, or the reward-model folder in one."""
    overwrite: bool = False
    """Replace a README.md that is not an unchanged card."""


@dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Settings of `rewardlab push`."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Reward-model folder."""
    repo: str
    """Repository on the hub, OWNER/NAME; created if it is not there."""
    private: bool = True
    """Push to a private repository; `--no-private` to a public one."""
    card: bool = True
    """Require the model card; `--no-card` pushes without one."""
    dry_run: bool = False
    """Verify, and print what would be sent."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Settings of `rewardlab import`."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a reward model that another project saved, whole or as adapters of PEFT."""
    output_dir: Path | None = None
    """The new reward-model folder; the source stays as it is."""
    in_place: bool = False
    """Put the new folder in the place of the source, which is renamed to NAME.original."""
    overwrite: bool = False
    """Replace the reward model that is there; a run or any other folder stays."""
    foreign: ImportConfig = ImportConfig()

    def __post_init__(self) -> None:
        require(
            (self.output_dir is None) == self.in_place,
            "--output-dir is missing: name the new folder, or say --in-place; not both.",
        )
        require(not (self.in_place and self.overwrite), "--in-place: replaces nothing. Leave --overwrite out.")


@dataclass(frozen=True, kw_only=True)
class ScoreArguments:
    """Settings of `rewardlab score`."""

    model: str = ""
    """Reward-model folder, such as `runs/…/best`; required unless `--ensemble` names several, or our own server scores.
    It renders conversations for vLLM, and its canaries prove what a server scores with."""
    backend: Literal["local", "http", "vllm"] = "local"
    """What scores: the model in this process; our own server (`http`); a vLLM or SGLang server (`vllm`)."""
    url: str = ""
    """Address of the server, such as http://127.0.0.1:8000."""
    served_model_name: str | None = None
    """Name of the model on the server; by default its only one, or its default."""
    token_env: str | None = None
    """Environment variable with the token that the server wants."""
    concurrency: int = 16
    """Most requests to the server that are under way at a time."""
    ensemble: tuple[str, ...] = ()
    """Several reward-model folders that score as one; each must hold a calibration (`rewardlab calibrate --store`). A
    single one must be a probe, whose bootstrap heads are the members."""
    ensemble_as: Literal["mean", "minimum", "lower"] = "mean"
    """What is made of the members' scores: their mean, the smallest, or the mean minus `--ensemble-penalty` standard
    deviations over members."""
    ensemble_penalty: float = 1.0
    """λ of `--ensemble-as lower`."""
    input: Path
    """Rows (JSONL, also .gz, JSON, CSV, Parquet) with `messages`, or `prompt` and `response`, or `prompt` and
    `responses`."""
    output: Path
    """The same rows with `score` (or `scores`) added; null and a cause for a reply above the model's limit. Its ending
    says the format: .jsonl, .jsonl.gz, .json, .csv or .parquet."""
    overlong: Literal["auto", "cut", "refuse"] = "auto"
    """A conversation above the model's length limit: `cut` cuts it by the rule of training, and `truncated_tokens` (or
    `truncated_reply_tokens`) says how much; `refuse` gives it null and the cause; `auto` refuses if the model was
    trained without such conversations (`--truncation drop` or `error`), and cuts otherwise."""
    pick: Literal["all", "best"] = "all"
    """`best` writes of several `responses` the one with the highest score, its index and its score."""
    on_error: Literal["refuse", "write"] = "refuse"
    """A row that cannot be scored: `refuse` names it before anything is scored; `write` gives it null and the cause."""
    max_error_fraction: float = 0.5
    """The command fails, after the output is written, if a larger share of the replies has no score."""
    processes: int = 1
    """Processes that score, each with a model of its own: on the CPU, or one a GPU."""
    precision: ScoringPrecision = "fp32"
    """fp32 gives the canonical scores; bf16 and fp16 are faster on hardware that has them."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; in float32 it moves a score by less than 1e-5. By default 8192, on a GPU 32768."""
    output_as: OutputAs = "raw"
    """`raw` scores; `calibrated`: log odds that a reply is a preferred one, by the map that `rewardlab calibrate`
    stored in the model; or the `probability` of that."""
    overwrite: bool = False
    """Replace `--output` if it is there."""
    restart: bool = False
    """Begin again: discard what an interrupted run left. Without it, the same command goes on from there."""
    compute: ComputeConfig = ComputeConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.model or self.ensemble) or self.backend == "http",
            "--model is missing; see `rewardlab score --help`.",
        )
        self._require_backend()
        require(
            not (self.ensemble and (self.model or self.output_as != "raw")),
            "--ensemble: leave out --model and --output-as; the members are all named by --ensemble, and its scores "
            "are in standard deviations.",
        )
        require_between(self, micro_token_budget=BUDGETS, ensemble_penalty=(0, 1000), concurrency=(1, 1024))
        require(
            bool(self.ensemble) or self.ensemble_as == "mean",
            f"--ensemble-as {self.ensemble_as}: says what is made of several models. Name them with --ensemble.",
        )
        require(
            self.ensemble_as == "lower" or self.ensemble_penalty == 1,
            f"--ensemble-penalty {self.ensemble_penalty:g}: is the λ of --ensemble-as lower. Name that too.",
        )
        require_between(self, max_error_fraction=(0, 1), processes=(1, 1024))
        require(not self.output.is_dir(), f"--output {self.output}: is a folder. Name the file to write.")
        require(str(self.output) != "-", "--output -: nothing is written to standard output. Name the file to write.")

    def _require_backend(self) -> None:
        local = self.backend == "local"
        of_server = {"--url": self.url, "--served-model-name": self.served_model_name, "--token-env": self.token_env}
        named = [flag for flag, value in of_server.items() if value]
        require(not local or not named, f"{', '.join(named)}: only with --backend http or vllm.")
        require(local or bool(self.url), f"--backend {self.backend}: --url is missing: name the server's address.")
        of_process = {
            "--ensemble": bool(self.ensemble),
            "--processes": self.processes != 1,
            "--precision": self.precision != "fp32",
        }
        named = [flag for flag, given in of_process.items() if given]
        require(local or not named, f"{', '.join(named)}: only with --backend local; a server has its own.")
        require(
            local or self.output_as == "raw" or bool(self.model),
            f"--output-as {self.output_as}: name the folder that holds the calibration with --model.",
        )


@dataclass(frozen=True, kw_only=True)
class QuickstartArguments:
    """Settings of `rewardlab quickstart`."""

    output_dir: Path = Path("runs/quickstart")
    """Run folder; an earlier quickstart in it is replaced."""
    steps: int | None = None
    """Training steps; by default what fits in five minutes on two CPU cores."""
    test_pairs: int = 300
    """Test pairs to generate, on topics that no training pair is about."""
    seed: int = 0
    """Decides data, head and order."""

    def __post_init__(self) -> None:
        require_between(self, steps=(1, 100_000), test_pairs=(1, 100_000))
        require_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """Settings of `rewardlab compare`."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of `rewardlab eval`, runs, probes, or score files; the first is the reference. Of one run alone: its
    baselines and the model after training, against the model before it."""
    comparison: CompareConfig = CompareConfig()


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Settings of `rewardlab report`."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, probes or evaluations; several are set side by side."""
    output_dir: Path | None = None
    """Where report.html and report.md are written; by default the folder, if it is one. Several need a place."""
    mistakes: int = 5
    """Worst mistakes that are shown as conversations."""
    texts: bool = True
    """Show texts of the data; `--no-texts` leaves them out of the report, where they may not be passed on."""
    card: bool = False
    """Also write the model card, README.md, into the reward-model folder of each run."""
    controls: Path | None = None
    """Folder of `rewardlab diagnose` with the controls of this model and data; by default what lies in the run's
    folder, itself or in `diagnose/`."""
    overwrite: bool = False
    """Replace a report.html or report.md that no report wrote, or that is about a run in `--output-dir` that is not
    among these, and a README.md that is not an unchanged card."""

    def __post_init__(self) -> None:
        require(len(self.runs) > 0, "RUNS is missing: name the folder of a run, or several.")
        require(
            len(self.runs) == 1 or self.output_dir is not None,
            "--output-dir is missing: name a folder for the report of several, since each may hold its own.",
        )
        require(
            self.controls is None or len(self.runs) == 1,
            "--controls: are those of one model. Name one run, or put a diagnose.json into the folder of each.",
        )
        require_between(self, mistakes=(0, 1000))


@dataclass(frozen=True, kw_only=True)
class WatchArguments:
    """Settings of `rewardlab watch`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, finished or going on."""
    port: int | None = None
    """Show the report as a page on this port of this machine, which loads itself again while the run goes on; 0 takes
    a free one."""
    every: float = 2.0
    """Seconds between two looks at the folder."""
    once: bool = False
    """Print one frame and end, for logs."""

    def __post_init__(self) -> None:
        require_between(self, port=(0, 65535), every=(0.2, 3600.0))
        require(not (self.once and self.port is not None), "--once and --port: choose one.")


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """Settings of `rewardlab serve`."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Reward-model folders, the default one first; `NAME=FOLDER` gives a name other than the folder's own."""
    serving: ServeConfig = ServeConfig()
    limits: LimitsConfig = LimitsConfig()
    compute: ComputeConfig = ComputeConfig()

    def __post_init__(self) -> None:
        require(
            len(self.models) + len(self.serving.adapters) > 0,
            "MODELS is missing: name a reward-model folder, such as runs/mine/best.",
        )
