"""`rewardlab data audit` finds what was planted, in exact counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common import CHATML, write_base_model
from helpers.planted import Planted
from rewardlab.core.files import write_jsonl
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.facts import CUTS
from rewardlab.curation.auditing.registry import CHECKS
from rewardlab.curation.auditing.result import Audit
from rewardlab.curation.auditing.run import audit_rows
from rewardlab.data.config import ReadingConfig

LIMIT = 400
"""Words of a conversation, above all sound ones."""
ALONE = ReadingConfig(num_workers=1)


def audit(*datasets: Path, **settings: Any) -> Audit:
    config = AuditConfig(dataset=tuple(map(str, datasets)), reading=ALONE, **settings)
    return audit_rows(config).audit


def flagged(found: Audit) -> dict[str, int]:
    """Return the number of rows flagged by each check that flags any."""
    return {finding.check.name: finding.flagged for finding in found.findings if finding.flagged}


@pytest.mark.slow
def test_planted_defects_of_every_kind_are_found_with_exact_counts(tmp_path: Path) -> None:
    planted = Planted()
    planted.plant_all()
    planted.plant_unreadable()
    planted.plant_lengths(LIMIT)
    later, others = planted.plant_leaks(), planted.plant_overlaps()
    files = [tmp_path / f"planted.{split}.jsonl" for split in ("train", "test")]
    planted.write(files[0], num_rows=10_000)
    write_jsonl(files[1], [*later, *(planted.sound() for _ in range(50))])
    write_jsonl(tmp_path / "suite.jsonl", [*others, *({"prompt": planted.words(15, 30)} for _ in range(50))])
    found = audit(*files, max_seq_len=LIMIT, against=(str(tmp_path / "suite.jsonl"),))
    assert flagged(found) == dict(planted.flagged)
    # What is not planted here needs a model.
    assert planted.flagged.keys() == CHECKS.keys() - {"template-refuses"}
    for name, counts in planted.counts.items():
        own = next(finding for finding in found.findings if finding.check.name == name).counts
        assert {what: own[what] for what in counts} == counts
    source, test = found.sources
    assert (test.read, test.kept) == (65, 65)
    assert source.read == 10_000
    assert dict(source.dropped) == dict(planted.causes)
    assert source.kept + sum(source.dropped.values()) == source.read


@pytest.mark.slow
def test_planted_rows_that_a_model_refuses_or_cannot_read_whole_are_found_with_exact_counts(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML
    folder = write_base_model(tmp_path / "model", template=template)
    planted = Planted(seed=2)
    for _ in range(6):
        asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"{planted.words(15, 30)}?"}]
        planted.add(planted.sound(prompt=asked), template_refuses=1)
    for _ in range(5):
        planted.add(planted.sound(prompt=f"{planted.words(600, 600)}?"), overlong=1)
    for _ in range(3):
        long = {side: f"{planted.words(600, 610)}." for side in ("chosen", "rejected")}
        planted.add(planted.sound(**long), overlong=1, overlong_replies=1)
    planted.write(tmp_path / "planted.jsonl", num_rows=300)
    found = audit(tmp_path / "planted.jsonl", model=str(folder), max_seq_len=2_000)
    assert flagged(found) == dict(planted.flagged)
    counts = next(finding for finding in found.findings if finding.check.name == "overlong").counts
    assert {name: counts[name] for name in CUTS[1:]} == {
        "replies shortened": 0,
        "reply tokens cut": 0,
        "replies left out": 6,
        "rows left out": 3,
    }


def test_equal_replies_of_a_ranking_are_counted_by_pairs_and_ties_that_reading_skips_too(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "responses": ["same", "Same ", "same", "other"], "scores": [1, 2, 3, 4]},
        {"prompt": "q", "responses": ["a", "b", "c"], "scores": [1, 1, 2]},
        {"prompt": "r", "responses": ["a", "b"], "scores": [1, 1]},
    ]
    write_jsonl(tmp_path / "kwise.jsonl", rows)
    scores = audit(tmp_path / "kwise.jsonl").scores
    assert scores["identical-replies"].tolist() == [3, 0, 0]
    assert scores["ties"].tolist() == [0, 1, 1]
    assert scores["unusable-rows"].tolist() == [0, 0, 1]


def test_a_reply_that_is_left_out_beside_others_is_found_though_its_row_is_used(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "responses": ["one of them", " ", "another of them"], "scores": [1, 2, 3]},
        {"prompt": "q", "responses": ["one of these", "half \ud83d", "another of these"], "scores": [1, 2, 3]},
    ]
    write_jsonl(tmp_path / "kwise.jsonl", rows)
    scores = audit(tmp_path / "kwise.jsonl").scores
    assert scores["empty-replies"].tolist() == [1, 0]
    assert scores["encoding-damage"].tolist() == [0, 1]
    assert scores["unusable-rows"].tolist() == [0, 0]
