"""Calibrated scores of rollouts: from a folder and a server alike, with their noise, and never unasked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from reward_models import save_tiny, served
from rewardlab.core.errors import ConfigError
from rewardlab.rl import BlockingScorer, RewardScorer
from rollouts_scored import TALKS, details, scores

SCALE, SHIFT = 0.7, -0.4
NEAR = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("rl") / "rm", scale=(0.3, 2.0), affine=(SCALE, SHIFT))


@pytest.mark.slow
@pytest.mark.parametrize("output", ["calibrated", "probability"])
def test_folder_and_server_give_what_the_model_holds(folder: Path, output: str) -> None:
    raw = details(folder, TALKS)
    odds = SCALE * np.array([one.score for one in raw]) + SHIFT
    wanted = odds if output == "calibrated" else expit(odds)
    with served(folder) as url:
        for source in (folder, url):
            found = details(source, TALKS, output=output)
            np.testing.assert_allclose([one.score for one in found], wanted, atol=NEAR)
    with BlockingScorer(folder, output=output) as scorer:
        np.testing.assert_allclose(scorer.score(TALKS), wanted, atol=NEAR)
    moved = SCALE * np.array([one.noise for one in raw])
    if output == "calibrated":
        np.testing.assert_allclose([one.noise for one in found], moved, rtol=1e-3)
    else:
        ends = np.abs(expit(np.stack([odds - moved, odds + moved])) - expit(odds)).max(axis=0)
        np.testing.assert_allclose([one.noise for one in found], ends, rtol=1e-2)


@pytest.mark.slow
def test_scores_are_raw_unless_others_are_asked_for(folder: Path, tmp_path: Path) -> None:
    import rewardlab

    np.testing.assert_allclose(scores(folder, TALKS), rewardlab.load(folder).score(TALKS), atol=NEAR)


@pytest.mark.slow
def test_a_model_without_a_calibration_is_refused(tmp_path: Path) -> None:
    bare = save_tiny(tmp_path / "rm")
    with served(bare) as url:
        for source in (bare, url):
            with pytest.raises(ConfigError, match="output='calibrated' needs a calibration, and it has none"):
                scores(source, TALKS, output="calibrated")


@pytest.mark.parametrize(
    ("sources", "settings", "said"),
    [
        (["a", "b"], {"output": "calibrated"}, "an ensemble gives scores in standard deviations"),
        ("http://a", {"output": "probability", "client": {"on_swap": "follow"}}, "does not follow swaps"),
        ("a", {"client": {"output": "calibrated"}}, "output is a setting of the scorer itself"),
        ("http://a#b", {"client": {"model": "c"}}, "the model is named in the address and in the client's settings"),
        ("http://a#", {}, "behind # stands the name of a model"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(sources, settings, said) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardScorer(sources, **settings)
