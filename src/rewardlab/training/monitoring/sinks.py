"""Sends the values of metrics.csv to viewers: TensorBoard, or a service by its own package.

The record is our own JSONL in any case. A missing package is an error before anything runs; a viewer that fails later
is dropped (see observers.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import NO_ROOM, ConfigError
from rewardlab.core.terminal import visible
from rewardlab.training.monitoring.observers import Observer, Observers
from rewardlab.training.settings.config import Viewer

logger = logging.getLogger("rewardlab")

PROJECT: Final = "rewardlab"
"""Name of the project or experiment in a service, unless its own environment variable gives another one."""
GROUPS: Final = ("train_eval", "train", "eval", "gap")
"""First words of columns, by which viewers group them."""
HEADLINE: Final = ("eval_accuracy", "eval_loss", "eval_margin", "eval_ece", "train_loss")
"""Columns that TensorBoard's table of hyper-parameters shows."""
MOST_PARAMETERS: Final = 100
"""The most parameters that MLflow accepts in one call."""


def require_viewers(asked: Sequence[Viewer]) -> None:
    """Raise ConfigError if a package is not installed, or a service accepts no login.

    Called before the run folder exists and before anything is computed.
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
    """Return the viewers that `--report-to` means here, with `auto` decided."""
    if tuple(asked) != ("auto",):
        return tuple(asked)
    if _installed("tensorboard"):
        return ("tensorboard",)
    logger.info("viewers: none, since tensorboard is not installed (pip install tensorboard)")
    return ("none",)


def open_sinks(
    viewers: Sequence[Viewer], folder: Path, settings: Mapping[str, object], *, resumed_at: int | None = None
) -> list[Observer]:
    """Return an observer for each viewer.

    `settings` is the configuration as JSON; the run is named after its folder. `resumed_at` is the step after which a
    resumed run goes on. Raises ConfigError if a viewer cannot be started, such as a service without a login, and
    OSError if the disk is full.
    """
    opened: list[Observer] = []
    for viewer in viewers:
        if viewer == "none":
            continue
        try:
            opened.append(OPEN[viewer](folder, settings, resumed_at))
        # Each package has errors of its own, and all of them mean that this viewer cannot be used.
        except Exception as error:
            # Closes the viewers that were opened before this one failed.
            with Observers(opened):
                if isinstance(error, OSError) and error.errno in NO_ROOM:
                    raise  # told as for everything that a run writes
                raise _not_started(viewer, error) from error
    return opened


def _not_started(viewer: Viewer, error: Exception) -> ConfigError:
    first = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"--report-to {viewer}: cannot be started ({type(error).__name__}: {first}). Check its login and settings, or "
        f"leave it out."
    )


def tag(column: str) -> str:
    """Return `eval_loss` as `eval/loss` and `lr` as `run/lr`: viewers group names by what is before the slash."""
    for group in GROUPS:
        if column.startswith(f"{group}_"):
            return f"{group}/{column.removeprefix(f'{group}_')}"
    return f"run/{column}"


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers, by their tags."""
    return {
        tag(name): float(value) for name, value in values.items() if value is not None and math.isfinite(float(value))
    }


def _plain(settings: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Return settings as viewers accept them: lists as words, unset ones left out, text escaped so that any file can
    hold it.
    """
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
    ended = ExitStack()
    # Hides what an earlier process wrote about later steps, since these steps are trained again.
    purge_step = None if resumed_at is None else resumed_at + 1
    writer = tensorboard.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge_step)
    ended.enter_context(_without_traceback())
    ended.callback(writer.close)
    # Not SummaryWriter.add_hparams, which would show a second run in a folder below this one.
    for summary in tensorboard.summary.hparams(_plain(settings), {tag(column): 0.0 for column in HEADLINE}):
        writer.file_writer.add_summary(summary)
    lines = ["| setting | value |", "| --- | --- |"]
    cells = {name: str(value).replace("|", "\\|") for name, value in _plain(settings).items()}
    writer.add_text("config", "\n".join([*lines, *(f"| {name} | {cell} |" for name, cell in cells.items())]))
    writer.flush()

    def row(step: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(values).items():
            writer.add_scalar(name, value, step)
        # Flushed at every row, so that somebody who watches sees it now and not after two minutes.
        writer.flush()

    return Observer(name="TensorBoard", row=row, close=lambda failed: ended.close())


@contextmanager
def _without_traceback() -> Iterator[None]:
    """Let the thread by which TensorBoard writes end silently, as on a full disk: the next flush raises its error.

    A viewer that is dropped is not closed, and then this stays: the thread may end later.
    """
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        if not type(ended.thread).__module__.startswith("tensorboard."):
            before(ended)

    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:
            threading.excepthook = before


def _sign_in_to_wandb() -> None:
    wandb: Any = importlib.import_module("wandb")
    # Asks for a key on a terminal and raises where nobody can be asked; used offline, it needs no account.
    wandb.login()


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
    """Ask MLflow's server for the experiment, to which the runs of this process then belong."""
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
"""Checks whether a service accepts a login before there is a run; any error means that it does not."""
OPEN: Final[Mapping[str, Callable[[Path, Mapping[str, object], int | None], Observer]]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}
