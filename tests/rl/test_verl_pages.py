"""The pages about verl, OpenRLHF and slime: what they tell people to write is taken, and every setting is listed."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import yaml

from pages import blocks, first_cells, read
from rewardlab.core.config import settings_of
from rewardlab.rl import openrlhf, slime, trl
from rewardlab.rl.configured import ALWAYS, FILE, SOURCE, LoopConfig, from_parts
from rewardlab.rl.verl_rollouts import SECTION, TAKES, configured_by
from verl_stand_in import config_of, verl_importable

EVERY = ("how", "coefficient", "reply_ends", "prompt_as")


@pytest.mark.parametrize("page", ["rl-settings.md", "openrlhf.md", "slime.md"])
def test_the_files_of_settings_on_the_pages_are_taken(page: str) -> None:
    takes = {"openrlhf.md": openrlhf.TAKES, "slime.md": slime.TAKES}.get(page, EVERY)
    files = [yaml.safe_load(block.text) for block in blocks(read(page), "yaml")]
    assert files
    for settings in files:
        assert from_parts([(page, settings)], takes=takes).loop.reply_ends == ("<|im_end|>",)


def test_every_setting_is_listed_with_its_default_and_with_who_follows_it() -> None:
    page = read("rl-settings.md")
    assert first_cells(page) == [SOURCE, FILE, *settings_of(LoopConfig)]
    rows = {
        cells[0].strip(" `"): cells for cells in (line.split("|")[1:-1] for line in page.splitlines() if "|" in line)
    }
    for name, setting in settings_of(LoopConfig).items():
        default = "" if setting.default in ((), None) else str(setting.default)
        assert rows[name][1].strip(" `") == default
        followed = {"TRL": trl.TAKES, "verl": TAKES, "OpenRLHF": openrlhf.TAKES, "slime": slime.TAKES}
        by = "all" if name in ALWAYS else ", ".join(who for who, takes in followed.items() if name in takes)
        assert rows[name][3].strip().partition(" (")[0] == by


def test_the_overrides_of_verl_on_the_page_make_a_manager() -> None:
    page = read("verl.md")
    given = dict(re.findall(r"^ +\+?(reward\.[\w.]+)=(\S+) \\$", page, re.MULTILINE))
    assert given.pop("reward.reward_manager.source") == "importlib"
    module, name = given.pop("reward.reward_manager.module.path"), given.pop("reward.reward_manager.name")
    settings = {key.removeprefix(f"{SECTION}."): value for key, value in given.items()}
    assert configured_by(config_of(settings)).is_remote
    with verl_importable() as imported:
        assert module == f"pkg://{imported.__name__}"
        made: Any = getattr(imported, name)(config=config_of(settings), tokenizer=None, compute_score=None)
        assert (type(made).__module__, type(made).__qualname__) == (imported.__name__, name)


def test_the_names_that_frameworks_import_are_there() -> None:
    (path,) = re.findall(r"--custom-rm-path (\S+)", read("slime.md"))
    # As slime finds it.
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is slime.reward
    (code,) = blocks(read("openrlhf.md"), "python")
    namespace: dict[str, Any] = {}
    exec(code.text, namespace)
    assert namespace["reward_func"] is openrlhf.reward_func
