"""Judges several models, or the bootstrap heads of a probe, as one."""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.ensembles import (
    COMBINATIONS,
    Disagreement,
    Ensemble,
    How,
    Scale,
    combine,
    disagreement,
    ensemble_of,
    scale_of,
)
from rewardlab.analysis.json_form import encode
from rewardlab.artifact.adapters import Members
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.files import write_json
from rewardlab.core.spec import RewardSpec, read_spec
from rewardlab.core.types import ScoreRow
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.evaluate import EvalResult, judge, read_groups, write_evaluation
from rewardlab.evaluation.saved import SavedModel
from rewardlab.score import compute_groups, score_rows

logger = logging.getLogger("rewardlab")
ENSEMBLE: Final = "ensemble"
"""Beginning of the names of combinations and their files."""
ENSEMBLE_FILE: Final = "ensemble.json"
HEADS: Final = "heads.npz"
"""File of a probe's run folder with its head and the bootstrap heads."""
CANARIES: Final = "canaries"
"""Name, in that file, of the scores of the canaries of the model that the heads belong to."""
CLOSE: Final = 1e-6
"""How far those scores may be from the model's, in units of max(1, |score|), for rounding by exports apart."""


@dataclass(frozen=True, kw_only=True)
class JudgedEnsemble:
    """The results of an ensemble."""

    members: Sequence[str]
    """Names of the models, or a single name with the number of heads."""
    results: Mapping[str, EvalResult]
    """Combination -> evaluation."""
    disagreement: Disagreement
    scaled_by: str
    """What put the members on one scale, in words."""
    penalty: float
    left_out: int
    """Number of preferences whose rows differ between members, and which are left out."""


def stored_scale(spec: RewardSpec, *, calibrated: bool) -> Scale | None:
    """Return the scale that a calibration stored in a model; None without a calibration. With `calibrated`, its β is
    divided by the stored temperature."""
    if spec.calibration is None or spec.calibration.reward_std <= 0:
        return None
    return Scale(
        mean=spec.calibration.reward_mean, std=spec.calibration.reward_std, beta=_beta(spec, calibrated=calibrated)
    )


def stored_scales(models: Sequence[str]) -> list[Scale]:
    """Return the scale that a calibration stored in each of several models. Raises ConfigError if one has none."""
    scales = []
    for model in models:
        scale = stored_scale(read_spec(Path(model)), calibrated=False)
        if scale is None:
            raise ConfigError(
                f"--ensemble: {model} holds no calibration, so its scores cannot be put on the scale of the others. "
                f"Store one with `rewardlab calibrate {model} --dataset … --store`, on the same data for all members."
            )
        scales.append(scale)
    return scales


def tell_of_other_data(specs: Mapping[str, RewardSpec]) -> None:
    """Warn if members of an ensemble were calibrated on different data, which puts them on different scales."""
    fitted = {
        name: sorted(
            str([one.get("sha256") or one.get("name"), one.get("split")])
            for one in spec.calibration.data.get("fitted", ())
        )
        for name, spec in specs.items()
        if spec.calibration is not None
    }
    first, *others = fitted.items()
    if apart := [name for name, data in others if data != first[1]]:
        logger.warning(
            "--ensemble: %s %s calibrated on other data than %s, so their scales may be too; calibrate all members on "
            "the same data",
            ", ".join(apart),
            "was" if len(apart) == 1 else "were",
            first[0],
        )


def _beta(spec: RewardSpec, *, calibrated: bool) -> float:
    return spec.beta / spec.temperature if calibrated else spec.beta


def members_of(config: EvalConfig) -> Members | None:
    """Return the models of `--ensemble`, which share a backbone if they can; None for fewer than two."""
    folders = [Path(folder) for folder in config.run.ensemble]
    return Members(folders, precision=config.run.precision) if len(folders) > 1 else None


def judge_ensemble(place: Path, config: EvalConfig, rows: Mapping[str, Sequence[ScoreRow]]) -> JudgedEnsemble:
    """Judge the models of `--ensemble` as one, from their score rows (name -> rows), and write the results to `place`.

    Members are put on one scale by the mean and standard deviation that `rewardlab calibrate` stored in each, or, if
    one of them has no calibration, all by those of the data at hand. Their temperatures are used only with
    --calibrated. A single model must be a probe with bootstrap heads.

    Raises ConfigError for a single model that is not a probe, and as `combine` does.
    """
    folders = config.run.ensemble
    if len(folders) == 1:
        return _judge_heads(place, config, folders[0])
    specs = {name: read_spec(Path(folder)) for name, folder in zip(rows, folders, strict=True)}
    stored = {name: stored_scale(spec, calibrated=config.run.calibrated) for name, spec in specs.items()}
    scales = [scale for scale in stored.values() if scale is not None]
    scaled_by = "the mean and standard deviation of the calibration rows that each member holds"
    if len(scales) == len(stored):
        tell_of_other_data(specs)
    else:
        missing = [name for name, scale in stored.items() if scale is None]
        betas = {name: _beta(spec, calibrated=config.run.calibrated) for name, spec in specs.items()}
        scales = [scale_of(own, beta=betas[name]) for name, own in rows.items()]
        scaled_by = (
            f"the mean and standard deviation of its scores on these data, since {', '.join(missing)} "
            f"{'holds' if len(missing) == 1 else 'hold'} no calibration"
        )
    ensemble = combine(list(rows.values()), scales, penalty=config.run.ensemble_penalty)
    return _judged(place, config, ensemble, list(rows), scaled_by)


def heads_file(folder: Path) -> Path | None:
    """Return the file with the bootstrap heads of a probe, given its run folder or the model in it; None if there is
    none."""
    return next((place / HEADS for place in (folder, folder.absolute().parent) if (place / HEADS).is_file()), None)


def require_heads(folder: str) -> Path:
    """Return the file with the bootstrap heads of a probe. Raises ConfigError for a model that is not a probe."""
    path = heads_file(Path(folder))
    if path is None:
        raise ConfigError(
            f"--ensemble {folder}: one model is not an ensemble. Name two or more, or a probe whose folder has {HEADS}."
        )
    return path


def _judge_heads(place: Path, config: EvalConfig, folder: str) -> JudgedEnsemble:
    """Judge the bootstrap heads of a probe, with one pass through the backbone for all of them."""
    path = require_heads(folder)
    model = SavedModel(config.replace(model=folder, models=(), ensemble=()))
    groups, _, _ = read_groups(config, model)
    scorer = model.scorer()
    heads_BW = read_heads(path, width=scorer.model.head.in_features, spec=model.spec)
    states = compute_groups(
        scorer.model,
        groups,
        lambda batch: scorer.model.final_states(batch).float(),
        budget=config.run.micro_token_budget,
        progress="states for the heads",
    )
    states_RW = np.concatenate(states).astype(np.float64)
    scores_BR = heads_BW @ states_RW.T
    # Heads may differ by a constant, which comparisons do not depend on: centre each. All keep the common scale on
    # which they were fitted.
    scores_BR -= scores_BR.mean(axis=1, keepdims=True)
    rows = score_rows(groups, [own[:, 0] for own in states])  # the scores are replaced
    ensemble = ensemble_of(rows, scores_BR, beta=model.beta, penalty=config.run.ensemble_penalty)
    num_heads = len(heads_BW)
    scaled_by = "the fit: all heads are of one probe, each centred here"
    return _judged(place, config, ensemble, [f"{num_heads} bootstrap heads"], scaled_by)


def read_heads(path: Path, *, width: int, spec: RewardSpec) -> np.ndarray:
    """Return [B, W] the bootstrap heads of the probe with this spec.

    Raises ArtifactError if the file does not hold at least two, or if it belongs to another model.
    """
    _require_same_model(path, spec)
    heads = _read(path, "bootstrap")
    if heads.ndim != 2 or heads.shape[1] != width or len(heads) < 2:
        raise ArtifactError(
            f"{path}: holds heads of shape {heads.shape}, wanted two or more of width {width}. Is it the probe of this "
            f"model, with --bootstrap above 1?"
        )
    return heads


def canary_scores(spec: RewardSpec) -> np.ndarray:
    """Return the scores of a model's canaries, by which a file of heads tells that it belongs to the model: storing a
    calibration changes the hash of every file, and these stay."""
    return np.array([canary.score for canary in spec.canaries], dtype=np.float64)


def _require_same_model(path: Path, spec: RewardSpec) -> None:
    """Raise ArtifactError if the file of heads was written beside another model.

    The canaries of an export may differ by its rounding. Files of earlier versions hold no canaries, and pass.
    """
    with _opened(path) as held:
        if CANARIES not in held:
            return
        saved = np.asarray(held[CANARIES], dtype=np.float64)
    now = canary_scores(spec)
    allowed = spec.max_rounding_error if spec.exported_from is not None else 0.0
    if saved.shape != now.shape or not np.all(np.abs(saved - now) <= (allowed + CLOSE) * np.maximum(1, np.abs(saved))):
        raise ArtifactError(
            f"{path}: its heads belong to another model, whose canaries have other scores. Name the model that was "
            f"saved with them, or run `rewardlab probe` again."
        )


@dataclass(frozen=True, kw_only=True)
class ScaledHeads:
    """The bootstrap heads of a probe, with the scale of its scores on the replies that it was fitted to."""

    heads_BW: np.ndarray
    centre_W: np.ndarray
    """Mean of the states of those replies. Heads may differ by a constant, which comparisons do not depend on; so each
    is shifted to give 0 there."""
    std: float
    """Standard deviation of the probe's own scores of those replies."""

    def scores(self, states_RW: np.ndarray) -> np.ndarray:
        """Return [B, R] the scores of all heads, in standard deviations."""
        scores: np.ndarray = self.heads_BW @ (states_RW - self.centre_W).T / self.std
        return scores


def read_scaled_heads(path: Path, *, width: int, spec: RewardSpec) -> ScaledHeads:
    """Return the bootstrap heads of a probe with their scale.

    Raises ArtifactError as `read_heads` does, and for a file of an earlier version, which holds no scale.
    """
    heads_BW = read_heads(path, width=width, spec=spec)
    centre_W, std = _read(path, "centre"), _read(path, "std")
    if centre_W.shape != (width,) or not float(std) > 0:
        raise ArtifactError(f"{path}: the scale of its heads is damaged. Run `rewardlab probe` again.")
    return ScaledHeads(heads_BW=heads_BW, centre_W=centre_W, std=float(std))


def _read(path: Path, name: str) -> np.ndarray:
    """Return an array from the file of heads, in float64. Raises ArtifactError if it is missing or cannot be read."""
    with _opened(path) as held:
        if name not in held:
            raise ArtifactError(
                f"{path}: holds no `{name}`, so another version of rewardlab wrote it. Run `rewardlab probe` again."
            )
        return np.asarray(held[name], dtype=np.float64)


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays in the file of heads. Raises ArtifactError if they cannot be read."""
    try:
        # NumPy leaves a file that it opened itself open where the zip in it is cut off.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            yield held
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ArtifactError(
            f"{path}: damaged: the heads cannot be read ({error}). Run `rewardlab probe` again."
        ) from error


def _judged(
    place: Path, config: EvalConfig, ensemble: Ensemble, members: Sequence[str], scaled_by: str
) -> JudgedEnsemble:
    results = {
        name_of(how): judge(rows, beta=ensemble.beta, calibrated=config.run.calibrated)
        for how, rows in ensemble.rows.items()
    }
    judged = JudgedEnsemble(
        members=members,
        results=results,
        disagreement=disagreement(ensemble),
        scaled_by=scaled_by,
        penalty=config.run.ensemble_penalty,
        left_out=ensemble.left_out,
    )
    for name, result in results.items():
        write_evaluation(place, name.replace(" ", "."), result)
    found = judged.disagreement
    write_json(
        place / ENSEMBLE_FILE,
        {
            "members": list(members),
            "scaled_by": scaled_by,
            "combinations": {name_of(how): meaning for how, meaning in COMBINATIONS.items()},
            "penalty": judged.penalty,
            "beta": ensemble.beta,
            "calibrated": config.run.calibrated,
            "left_out": ensemble.left_out,
            "disagreement": {
                "by_spread": encode(found.by_spread),
                "by_margin": encode(found.by_margin),
                "num_errors": found.num_errors,
                "num_right": found.num_right,
            },
        },
    )
    return judged


def name_of(how: How) -> str:
    """Return the name of a combination in tables."""
    return f"{ENSEMBLE} {how}"
