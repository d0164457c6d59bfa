"""Where the values of metrics.csv go besides: TensorBoard, or a service by its own package. The record is our JSONL.

A package that is missing is an error before anything runs; a sink that fails later is dropped (see observers.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import visible
from rewardlab.training.monitoring.observers import Observer, Observers
from rewardlab.training.settings.config import Viewer

logger = logging.getLogger("rewardlab")

PROJECT: Final = "rewardlab"
"""Project or experiment in a service, unless its own environment variable names another."""
GROUPS: Final = ("train_eval", "train", "eval", "gap")
"""First words of columns by which viewers group them."""
HEADLINE: Final = ("eval_accuracy", "eval_loss", "eval_margin", "eval_ece", "train_loss")
"""What TensorBoard's table of hyper-parameters shows."""
MOST_PARAMETERS: Final = 100
"""Parameters that MLflow takes at once."""


def require_viewers(asked: Sequence[Viewer]) -> None:
    """Raise ConfigError for a package that is not installed, or a service that lets nobody in: before there is a run
    folder, and before anything is computed.
    """
    for viewer in asked:
        if viewer not in ("auto", "none") and not _installed(viewer):
            raise ConfigError(
                f"--report-to {viewer}: the package is not installed. Install it with `pip install {viewer}`, or leave "
                f"it out; the values are in metrics.csv and metrics.jsonl in any case."
            )
        if viewer in SIGN_IN:
            try:
                SIGN_IN[viewer]()
            except Exception as error:
                raise _not_started(viewer, error) from error


def choose_viewers(asked: Sequence[Viewer]) -> tuple[Viewer, ...]:
    """What `--report-to` means here: `auto` decided."""
    if tuple(asked) != ("auto",):
        return tuple(asked)
    if _installed("tensorboard"):
        return ("tensorboard",)
    logger.info("viewers: none, since tensorboard is not installed (pip install tensorboard)")
    return ("none",)


def open_sinks(
    viewers: Sequence[Viewer], folder: Path, settings: Mapping[str, object], *, resumed_at: int | None = None
) -> list[Observer]:
    """An observer for each viewer; `settings` is the configuration as JSON, the run is named after its folder.

    With `resumed_at` the run goes on after that step.

    Raises ConfigError where one cannot be started, a service without a login, say.
    """
    opened: list[Observer] = []
    for viewer in viewers:
        if viewer == "none":
            continue
        try:
            opened.append(OPEN[viewer](folder, settings, resumed_at))
        except Exception as error:  # every package has errors of its own
            with Observers(opened):
                raise _not_started(viewer, error) from error
    return opened


def _not_started(viewer: Viewer, error: Exception) -> ConfigError:
    first = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"--report-to {viewer}: cannot be started ({type(error).__name__}: {first}). See to its login and settings, or "
        f"leave it out."
    )


def tag(column: str) -> str:
    """`eval_loss` as `eval/loss`, `lr` as `run/lr`: viewers group names by what is before the stroke."""
    for group in GROUPS:
        if column.startswith(f"{group}_"):
            return f"{group}/{column.removeprefix(f'{group}_')}"
    return f"run/{column}"


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers, by their tags."""
    return {
        tag(name): float(value) for name, value in values.items() if value is not None and math.isfinite(float(value))
    }


def _plain(settings: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Settings as viewers take them: lists as words, nothing for what is not set, text that any file can hold."""
    return {
        name: value if isinstance(value, (bool, int, float)) else visible(_words(value))
        for name, value in settings.items()
        if value is not None
    }


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --- the viewers -----------------------------------------------------------------------------------------------


def _open_tensorboard(folder: Path, settings: Mapping[str, object], resumed_at: int | None) -> Observer:
    tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    # What an earlier process wrote of later steps is shown no more: these steps come again.
    purge_step = None if resumed_at is None else resumed_at + 1
    writer = tensorboard.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge_step)
    # Not add_hparams: it would make a run of its own, in a folder below.
    for summary in tensorboard.summary.hparams(_plain(settings), {tag(column): 0.0 for column in HEADLINE}):
        writer.file_writer.add_summary(summary)
    lines = ["| setting | value |", "| --- | --- |"]
    cells = {name: str(value).replace("|", "\\|") for name, value in _plain(settings).items()}
    writer.add_text("config", "\n".join([*lines, *(f"| {name} | {cell} |" for name, cell in cells.items())]))
    writer.flush()

    def row(step: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()  # whoever watches sees it now

    return Observer(name="TensorBoard", row=row, close=lambda failed: writer.close())


def _sign_in_to_wandb() -> None:
    wandb: Any = importlib.import_module("wandb")
    wandb.login()  # asks on a terminal, and raises where nobody can be asked; of no account if it is used offline


def _open_wandb(folder: Path, settings: Mapping[str, object], _resumed_at: int | None) -> Observer:
    wandb: Any = importlib.import_module("wandb")
    run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=visible(folder.name), config=dict(settings))
    return Observer(
        name="wandb",
        row=lambda step, values: run.log(scalars(values), step=step),
        close=lambda failed: run.finish(exit_code=int(failed)),
    )


def _open_trackio(folder: Path, settings: Mapping[str, object], _resumed_at: int | None) -> Observer:
    trackio: Any = importlib.import_module("trackio")
    run = trackio.init(project=PROJECT, name=visible(folder.name), config=dict(settings), embed=False)
    return Observer(
        name="trackio",
        row=lambda step, values: run.log(scalars(values), step=step),
        close=lambda failed: run.finish(),
    )


def _find_mlflow() -> None:
    """Ask its server for the experiment, which the runs of this process then belong to."""
    mlflow: Any = importlib.import_module("mlflow")
    if (number := os.environ.get("MLFLOW_EXPERIMENT_ID")) is not None:
        mlflow.set_experiment(experiment_id=number)
    else:
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))


def _open_mlflow(folder: Path, settings: Mapping[str, object], _resumed_at: int | None) -> Observer:
    mlflow: Any = importlib.import_module("mlflow")
    mlflow.start_run(run_name=visible(folder.name))
    parameters = list(_plain(settings).items())
    for start in range(0, len(parameters), MOST_PARAMETERS):
        mlflow.log_params(dict(parameters[start : start + MOST_PARAMETERS]))
    return Observer(
        name="MLflow",
        row=lambda step, values: mlflow.log_metrics(scalars(values), step=step),
        close=lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"),
    )


SIGN_IN: Final[Mapping[str, Callable[[], None]]] = {"wandb": _sign_in_to_wandb, "mlflow": _find_mlflow}
"""Services that can say whether they let anybody in before there is a run. Any error is one."""
OPEN: Final[Mapping[str, Callable[[Path, Mapping[str, object], int | None], Observer]]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}
