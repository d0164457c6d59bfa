"""Which evaluation another one may replace: with --overwrite any, and without it the same one, if it is unfinished."""

from __future__ import annotations

from pathlib import Path

from rewardlab.core.config import to_mapping
from rewardlab.core.run_folder import clear_evaluation
from rewardlab.core.unfinished import are_unfinished, begin_results
from rewardlab.evaluation.config import EvalConfig


def may_replace(config: EvalConfig, folder: Path) -> bool:
    """Return whether `config` may replace the evaluation in a folder, if there is one."""
    return config.run.overwrite or are_unfinished(folder, _asked(config))


def mark_unfinished(config: EvalConfig, folder: Path) -> None:
    """Mark what `config` begins to write, until `end_results`."""
    begin_results(folder, _asked(config))


def begin_evaluation(config: EvalConfig, folder: Path) -> None:
    """Remove an earlier evaluation that `may_replace`, and mark the folder as unfinished until `end_results`."""
    mark_unfinished(config, folder)
    clear_evaluation(folder)


def _asked(config: EvalConfig) -> dict[str, object]:
    # One model is named by `model` or as the only one of `models`.
    return {**to_mapping(config), "model": None, "models": list(config.run.folders)}
