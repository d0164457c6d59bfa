"""What the training run of a proxy says about it: its losses, its accuracy on what it was trained on, its template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.files import at_home
from rewardlab.core.spec import RewardSpec, read_spec
from rewardlab.core.types import Estimate
from rewardlab.gold.foreign import find_model, is_classifier, is_hub_name
from rewardlab.gold.proxies import model_in
from rewardlab.report.folder import Record, read_folder

NEAR_THE_END: Final = 0.1
"""Share of the steps, the last ones, over which the loss at the end is taken."""
ROWS: Final = 10
"""Rows of metrics.csv that an interval needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run says."""

    folder: Path
    epochs: float
    """Epochs that it has had; NaN if that is not recorded."""
    loss_is: str
    """Column that the losses are from."""
    end_loss: Estimate | None
    """Loss over the last steps; None without training rows."""
    epoch_loss: Estimate | None
    """Loss from the end of the first epoch on; None if the run has had less than an epoch."""
    train_accuracy: Estimate | None
    """Accuracy of the proxy, or of the steps before it, on rows that it was trained on; None if it was not measured."""
    own_accuracy: Estimate | None
    """Accuracy of the proxy on the data that the run itself was judged by; None if this model was not judged."""
    own_accuracy_on: str
    learning_rate: float | None
    problems: tuple[str, ...]
    dataset: tuple[str, ...] = ()
    """What it was trained on, as its settings name it."""
    sums: frozenset[str] = frozenset()
    """SHA-256 of each dataset that it was trained on; empty where one of them has none."""
    learned_over: str = ""
    """The steps over which the training accuracy is a mean, and that of the model, where the proxy was learning in
    them; empty where the accuracy is that of the proxy, or of the end of its run."""


def what_of(source: str) -> Path:
    """Return the WHAT of `[NAME=]WHAT`."""
    whole = at_home(source)
    name, sign, what = source.partition("=")
    return whole if whole.exists() or not sign or "/" in name else at_home(what)


def spec_of(source: str) -> RewardSpec | None:
    """Return the spec of a proxy that is a reward-model folder, a run, or an imported model.

    None for anything else, such as a file of scores, and if the spec cannot be read.
    """
    what = what_of(source)
    try:
        if is_classifier(what) or is_hub_name(str(what)):
            return read_spec(find_model(str(what), flag="--proxies").folder)
        folder = model_in(what)
        return None if folder is None else read_spec(folder)
    except ArtifactError:
        return None


def run_folder_of(source: str) -> Path | None:
    """Return the folder of the run that a reward-model folder lies in (`runs/x` of `runs/x/best`); None without one."""
    folder = what_of(source)
    for place in (folder, folder.parent):
        if folder.is_dir() and (place / "metrics.csv").is_file():
            return place
    return None


def step_of(spec: RewardSpec | None) -> int | None:
    """Return the step at which a model was saved; None if its spec does not say so."""
    step = None if spec is None else spec.provenance.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def read_run(folder: Path, step: int | None = None) -> RunFacts:
    """Return what a run says of its losses, and of the accuracy of the model that it saved at `step`.

    Without a step these are of the model that the run chose. Raises ConfigError if the folder holds nothing of a run.
    """
    if not folder.is_dir():
        raise ConfigError(f"--runs {folder}: there is no such folder.")
    record = read_folder(folder, distributions=False)
    column = "train_nll" if any("train_nll" in row for row in record.rows) else "train_loss"
    rows = [row for row in record.rows if column in row]
    epochs = max((row["epoch"] for row in rows if "epoch" in row), default=math.nan)
    chosen = step_of(record.model)
    step = chosen if step is None else step
    judged = record.judged if step == chosen else record.evaluations.get(f"step_{step}")
    accuracy, learned_over = _train_accuracy(record.rows, step)
    dataset = record.config.get("dataset")
    return RunFacts(
        folder=folder,
        epochs=epochs,
        loss_is=column,
        end_loss=_mean_of(_last(rows), column) if rows else None,
        epoch_loss=_mean_of(_from_epoch(rows), column) if epochs >= 1 - 1e-6 else None,
        train_accuracy=accuracy,
        own_accuracy=None if judged is None else judged.estimates.get("all", {}).get("eval_accuracy"),
        own_accuracy_on="" if judged is None else judged.name,
        learning_rate=_setting(record, "lr", "learning_rate"),
        problems=tuple(record.problems),
        dataset=tuple(map(str, dataset)) if isinstance(dataset, list) else (),
        sums=_sums(record.manifest),
        learned_over=learned_over,
    )


def _sums(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return the hashes of the training data that a run wrote down; none where one of them is missing."""
    data = manifest.get("data")
    sources = data.get("train") if isinstance(data, dict) else None
    sums = [one.get("sha256") if isinstance(one, dict) else None for one in sources or ()]
    return frozenset(map(str, sums)) if all(sums) else frozenset()


def _setting(record: Record, *names: str) -> float | None:
    for name in names:
        value = record.config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _last(rows: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Return the rows of the last steps: a tenth of them, or `ROWS` where that is more, but then at most half."""
    count = max(math.ceil(NEAR_THE_END * len(rows)), min(ROWS, len(rows) // 2), 1)
    return rows[-count:]


def _from_epoch(rows: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Return the rows after the first epoch; for a run of one epoch, those of its end."""
    later = [row for row in rows if row.get("epoch", 0.0) > 1.0]
    return later if len(later) >= ROWS else _last(rows)


def _mean_of(rows: Sequence[Mapping[str, float]], column: str) -> Estimate:
    """Return the mean of a column over rows; its interval takes steps for independent."""
    return stats.mean_loss(np.array([max(row[column], 0.0) for row in rows]))


def _train_accuracy(every: Sequence[Mapping[str, float]], step: int | None) -> tuple[Estimate | None, str]:
    """Return the accuracy on training rows at a step (without one, at the end), and the steps that it was learning in.

    It is what the run judged, with its interval, else that of the last steps until then.
    """
    rows = [row for row in every if step is None or row["step"] <= step]
    judged = [row for row in rows if "train_eval_accuracy" in row]
    if judged:
        row = judged[-1]
        low, high = (row.get(f"train_eval_accuracy_{end}", math.nan) for end in ("low", "high"))
        value = row["train_eval_accuracy"]
        return Estimate(value=value, low=low, high=high, n=0, method="by the run, on rows that it was trained on"), ""
    counted = [row for row in rows if "train_accuracy" in row and row.get("train_pairs", 0) > 0]
    if not counted:
        return None, ""
    last = _last(counted)
    pairs = sum(row["train_pairs"] for row in last)
    right = sum(row["train_accuracy"] * row["train_pairs"] for row in last)
    if round(pairs) < right:
        return None, ""
    end = max(row["step"] for row in every)
    went_on = step is not None and step < end
    # A row holds what was seen since the one before it.
    before = [row["step"] for row in counted if row["step"] < last[0]["step"]]
    first, own = int(max(before, default=0.0)) + 1, int(last[-1]["step"])
    told = f"steps {first:,}–{own:,} of {end:,.0f}; the model is of step {own if step is None else step:,}"
    is_learning = went_on or len(counted) < 2 * ROWS
    return stats.wilson(min(right, pairs), round(pairs)), told if is_learning else ""
