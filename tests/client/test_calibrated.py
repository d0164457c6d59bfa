"""Calibrated scores by the client: as the model holds them, only by request, and refused where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from dialects_spoken import ENGINES, during
from fake_engines import FakeOwn
from reward_models import save_tiny
from reward_models import served as serving
from rewardlab.client import BadAnswerError, RewardClient
from rewardlab.client.protocol import ScoreRequest
from rewardlab.core.errors import ConfigError
from served import table, talks

SCALE, SHIFT = 0.7, -0.4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model that holds a calibration."""
    folder = save_tiny(tmp_path_factory.mktemp("client") / "rm", scale=(0.3, 2.0), affine=(SCALE, SHIFT))
    with serving(folder) as address:
        yield address


@pytest.mark.slow
def test_scores_are_raw_until_others_are_asked_for(url: str) -> None:
    with RewardClient(url) as client:
        raw = client.score(talks(5))
        assert {one.output for one in client.answers(talks(5))} == {"raw"}
    odds = SCALE * np.array(raw) + SHIFT
    assert np.ptp(raw) > 0.01
    for output, wanted in (("calibrated", odds), ("probability", expit(odds))):
        with RewardClient(url, output=output) as client:
            np.testing.assert_allclose(client.score(talks(5)), wanted, atol=1e-5)
            np.testing.assert_allclose(client.score_replies("Why?", ["a"]), client.score_groups([("Why?", ["a"])])[0])
            answers = client.answers(talks(5))
            np.testing.assert_allclose([one.score for one in answers], wanted, atol=1e-5)
            assert {one.output for one in answers} == {output}
            served = client.spec().served
            assert served is not None
            assert served.affine == (SCALE, SHIFT)


@pytest.mark.slow
def test_a_model_without_a_calibration_is_refused_when_the_client_connects(tmp_path: Path) -> None:
    with (
        serving(save_tiny(tmp_path / "rm")) as address,
        pytest.raises(ConfigError, match="the model 'model' at .* holds no calibration.*rewardlab calibrate"),
        RewardClient(address, output="calibrated"),
    ):
        pass


@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith("rewardlab")])
def test_other_engines_are_refused_before_anything_is_scored(engine: str) -> None:
    fake = ENGINES[engine]()
    with pytest.raises(ConfigError, match=r"output='probability': .* is (vLLM|SGLang), which answers raw scores"):
        during(fake, lambda client: client.score(talks(1)), output="probability")
    assert not {"/classify", "/pooling", "/v1/embeddings"} & set(fake.paths)


def test_an_answer_of_another_kind_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeOwn(table())
    monkeypatch.setattr("rewardlab.client.asynchronous.require_output", lambda endpoint, output: None)
    with pytest.raises(BadAnswerError, match="calibrated scores were asked for, and raw ones answered"):
        during(fake, lambda client: client.score(talks(1)), output="calibrated")


def test_nothing_is_sent_about_raw_scores() -> None:
    assert "output" not in ScoreRequest(token_ids=[[1]], output="raw").model_dump(exclude_defaults=True)
