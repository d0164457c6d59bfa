"""The page about reward models in reinforcement learning: its examples run and print what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import promised_and_printed, read
from reward_models import save_tiny, served
from rewardlab.core.config import settings_of
from rewardlab.rl.config import TEXT_AS
from rewardlab.rl.rewarding import RewardConfig


@pytest.mark.slow
def test_the_examples_run_and_print_what_they_say(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "rm")
    with served(folder) as url:
        promised, printed = promised_and_printed("rl.md", folder=folder, url=url)
    assert printed == promised
    assert len(promised) == 4


def test_the_tables_have_every_way_to_read_texts_and_every_setting() -> None:
    table = read("rl.md").partition("| `text_as` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(TEXT_AS)
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", read("grpo.md"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*settings_of(RewardConfig), "name"}
