"""`rewardlab rl audit --gold` with real models: a policy that climbs its reward model, up or down a gold model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import rewardlab
from reward_models import save_tiny, served
from rewardlab.cli import main
from rewardlab.core.errors import DataError
from rewardlab.core.types import Message
from rewardlab.rl import BlockingScorer, RolloutLog, RolloutRow
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.run import audit
from rewardlab.rl.rollout_log import key_of

STEPS, PROMPTS, REPLIES = 24, 12, 4
POOL = [f"{word} {number}" for word in ("yes", "no", "perhaps", "water", "never mind") for number in range(12)]
NONE: Mapping[str, float] = {}
QUESTIONS = [f"question {number}?" for number in range(PROMPTS)]


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("gold") / "gold", seed=3)


@pytest.fixture(scope="module")
def known(gold: Path) -> np.ndarray:
    """Gold score of each question's reply [PROMPTS, POOL]."""
    model = rewardlab.load(gold)
    return np.array([model.score_replies(question, POOL) for question in QUESTIONS])


def write_run(
    folder: Path, known: np.ndarray, *, drift: float, digest: str = "proxy", evidence: Mapping[str, float] = NONE
) -> Path:
    """Replies whose gold drifts from step to step; the reward has the gold of a reply in it, and rises in any case."""
    generator = np.random.default_rng(0)
    ranks = [np.argsort(row) for row in known]
    rows = []
    for step in range(STEPS):
        for prompt, question in enumerate(QUESTIONS):
            middle = len(POOL) / 2 + drift * len(POOL) * (step / STEPS - 0.5)
            for _ in range(REPLIES):
                place = int(np.clip(generator.normal(middle, 8), 0, len(POOL) - 1))
                reply = ranks[prompt][place]
                turns = (Message("user", question), Message("assistant", POOL[reply]))
                reward = (known[prompt, reply] - known[prompt].mean()) / known[prompt].std()
                reward += 4 * step / STEPS + generator.normal(0, 0.5)
                rows.append(
                    RolloutRow(
                        step=step,
                        prompt_key=key_of(turns),
                        conversation=turns,
                        reward=float(reward),
                        digest=digest,
                        evidence=dict(evidence),
                    )
                )
    log = RolloutLog(folder)
    log.write(rows)
    log.close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("drift", "status", "verdict"), [(0.5, 0, "sound"), (-0.5, 1, "exploited")])
def test_a_gold_model_tells_a_run_that_it_likes_from_one_that_it_does_not(
    drift: float, status: int, verdict: str, gold: Path, known: np.ndarray, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", known, drift=drift)
    ended = 0
    try:
        main(["rl", "audit", str(run), "--gold", str(gold), "--gold-rows", "48"])
    except SystemExit as left:
        ended = int(left.code or 0)
    report = json.loads((run / "audit" / "audit.json").read_text(encoding="utf-8"))
    assert report["verdict"] == verdict
    assert ended == status
    (finding,) = report["findings"]
    assert finding["evidence"] == "gold score"


def test_evidence_of_that_name_in_the_record_is_not_written_over(
    gold: Path, known: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", known, drift=0.5, evidence={"gold score": 1.0})
    with pytest.raises(SystemExit) as ended:
        main(["rl", "audit", str(run), "--gold", str(gold)])
    assert ended.value.code == 2
    assert "the record has evidence called gold score already" in capsys.readouterr().err


def test_a_server_gives_the_evidence_that_its_folder_gives(
    gold: Path, known: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", known, drift=0.5)
    with served(gold) as url:
        main(["rl", "audit", str(run), "--gold", url, "--gold-rows", "8", "--output-dir", str(tmp_path / "there")])
    main(["rl", "audit", str(run), "--gold", str(gold), "--gold-rows", "8", "--output-dir", str(tmp_path / "here")])
    there, here = (json.loads((tmp_path / name / "audit.json").read_text()) for name in ("there", "here"))
    for one, other in zip(there["findings"][0]["pairs"], here["findings"][0]["pairs"], strict=True):
        assert one["evidence"]["value"] == pytest.approx(other["evidence"]["value"], abs=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("trained_on", ["{}", "other+{}"], ids=["alone", "in an ensemble"])
def test_the_model_that_the_run_was_trained_on_is_refused_by_its_digest(
    trained_on: str, gold: Path, known: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with BlockingScorer(gold) as scorer:
        digest = scorer.details([[Message("user", "Why?"), Message("assistant", "So.")]])[0].digest
    assert digest
    run = write_run(tmp_path / "run", known, drift=0.5, digest=trained_on.format(digest))
    with pytest.raises(SystemExit) as ended:
        main(["rl", "audit", str(run), "--gold", str(gold)])
    assert ended.value.code == 2
    assert "is the model that the run was trained on" in capsys.readouterr().err


def test_a_reply_without_the_turns_before_it_is_not_read_as_a_conversation(gold: Path, tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    text = (Message("assistant", "<user> Why? <assistant> So."),)
    log.write([RolloutRow(step=step, prompt_key="why", conversation=text, reward=1.0) for step in range(16)])
    log.close()
    with pytest.raises(DataError, match=r"rollouts\.jsonl:1 has no turns before it.*keep the score as evidence"):
        audit(AuditConfig(run=tmp_path, gold=str(gold)))
