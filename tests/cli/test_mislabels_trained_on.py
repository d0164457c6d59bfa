"""`rewardlab data mislabels` warns of a witness that was trained on the rows that are searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import tiny_reward_model
from rewardlab.core.files import write_jsonl
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.mislabels.reading import read_data
from rewardlab.curation.mislabels.witnesses import _tell_trained_on

ROW = {"prompt": "What does a plant need?", "chosen": "Water.", "rejected": "No idea."}


@pytest.mark.parametrize(
    ("trained", "split", "searched", "is_told"),
    [
        (["prefs"], "train", "prefs", True),
        (["prefs"], "train", "prefs/train.jsonl", True),
        (["prefs/train.jsonl"], "train", "prefs", True),
        (["elsewhere/hh"], "train", "hh.train.jsonl", True),
        (["prefs/train.jsonl:0.7", "other.jsonl:0.3"], "train", "prefs/train.jsonl", True),
        (["prefs"], "test", "prefs", False),
        (["other.jsonl"], "train", "prefs", False),
        (None, "train", "prefs", False),
    ],
)
def test_a_record_is_understood_however_it_names_the_data(
    trained: list[str] | None, split: str, searched: str, is_told: bool, tmp_path: Path, log: Any
) -> None:
    (tmp_path / "prefs").mkdir()
    for file in ("prefs/train.jsonl", "hh.train.jsonl"):
        write_jsonl(tmp_path / file, [ROW])
    folder = tiny_reward_model(tmp_path / "model", provenance={"config": {"dataset": trained, "hf_split": split}})
    _tell_trained_on(folder, read_data(MislabelsConfig.of(dataset=(str(tmp_path / searched),))))
    assert ("it was trained on" in log.text) == is_told
