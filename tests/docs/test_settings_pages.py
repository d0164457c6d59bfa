"""The flags, defaults and tables of settings on the pages are those of the code; commands: test_page_commands.py."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import pytest

from pages import DOCS, PAGES, ROOT, first_cells, module_at, read
from rewardlab import flags
from rewardlab.commands.parsing import GOLD_PURPOSES
from rewardlab.core.run_folder import PROBE_FILES
from rewardlab.gold.rmood_flags import theirs
from rewardlab.model.attention_backends import BACKENDS
from rewardlab.training.settings.config import (
    BACKBONE_LR_MULT,
    FULL_LR,
    HEAD_LR,
    LORA_LR,
    OptimizerName,
)
from rewardlab.training.settings.presets import PRESETS

SETTINGS_PAGE = module_at(DOCS / "site" / "settings.py")
OTHER_PROGRAMS = re.compile(
    r"^\s*(?:\$ )?(?:\S*/)?(?:pip|uv|git|python3?|make|torchrun|ray job submit|vllm serve|scripts/bench one_score)\b"
    r"(?:.*\\\n)*.*$",
    re.MULTILINE,
)
"""Lines of a shell with the lines that continue them."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


OF_SCRIPTS = {
    "--array",
    "--dependency",
    "--number",
    "--parsable",
    "--responses",
    "--rewards",
    "--max-restarts",
    "--nproc-per-node",
    "--per-device",
    "--before",
    "--slow",
    "--soak",
    "--hinge-margin",
    "--pair-loss",
}
"""Flags of torchrun and benchmarks, and of a loss that is only an example."""
OF_EXAMPLES = {
    name
    for path in (ROOT / "examples").rglob("*.py")
    for name in re.findall(r'add_argument\("(--[\w-]+)"', path.read_text(encoding="utf-8"))
}
OF_ENGINES = {
    *(
        "--runner",
        "--convert",
        "--pooler-config",
        "--dtype",
        "--max-model-len",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--enable-lora",
    ),
    *("--reward", "--allow-auto-truncate", "--custom-rm-path", "--lora-modules", "--data", "--algo", "--group-rm"),
    *("--input-key", "--label-key", "--metadata-key", "--apply-chat-template", "--rollout-skip-special-tokens"),
    *("--disable-grpo-std-normalization", "--logprobs-mode", "--max-num-batched-tokens"),
}
"""Flags of vLLM, SGLang, OpenRLHF and slime that a page explains."""
OF_SLURM = {"--exclude", "--gpus-per-node", "--requeue", "--signal"}
"""Options of sbatch that a page explains."""


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def known_flags() -> set[str]:
    """Every flag of every command."""
    found = [setting for part in SETTINGS_PAGE.COMMANDS.values() for setting in SETTINGS_PAGE.settings_of(part)]
    switches = {f"--no-{setting.flag[2:]}" for setting in found if isinstance(setting.default, bool)}
    # Up to the underscore, as they are found on pages.
    earlier = {f"--{name.partition('_')[0]}" for stage in GOLD_PURPOSES for name in theirs(stage)}
    return {one.flag for one in found} | switches | earlier | {*flags.SHORTHANDS, "--config", "--help", "--version"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    text = OTHER_PROGRAMS.sub("", (ROOT / page).read_text(encoding="utf-8"))
    assert sorted(set(FLAG.findall(text)) - known_flags() - OF_SCRIPTS - OF_ENGINES - OF_SLURM - OF_EXAMPLES) == []


def test_a_flag_that_does_not_exist_would_be_noticed() -> None:
    assert FLAG.findall("| --- | `--lora-rank 4` and --nosuch=1, not a--b") == ["--lora-rank", "--nosuch"]
    assert "--nosuch" not in known_flags()
    assert {"--lora", "--no-lora", "--hf-dataset", "--config", "--input"} <= known_flags()


def shown(default: object) -> str:
    """A default as the table prints it."""
    if default is None or default in ("", ()):
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def table_rows(page: str) -> list[list[str]]:
    """The cells of every table row that begins with a flag."""
    lines = [line for line in page.splitlines() if line.startswith("| `--")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_of_settings_is_what_the_code_says() -> None:
    """`python docs/site/settings.py` writes it."""
    assert read("settings.md") == SETTINGS_PAGE.page()


@pytest.mark.parametrize("command", SETTINGS_PAGE.COMMANDS)
def test_the_page_of_settings_has_every_setting_of_a_command_once_with_its_default(command: str) -> None:
    section = read("settings.md").partition(f"\n## rewardlab {command}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines()]
    printed = [(cells[0].strip("`"), cells[2].strip("`")) for cells in rows if len(cells) > 3 and "`" in cells[0]]
    listed = re.findall(r"`(--[a-z-]+)`", section.partition("As in `rewardlab train`: ")[2].partition("Its own:")[0])
    assert len({*listed, *(name for name, _ in printed)}) == len(listed) + len(printed), "a flag is there twice"
    settings = {setting.flag: setting.default for setting in SETTINGS_PAGE.settings_of(SETTINGS_PAGE.COMMANDS[command])}
    assert {*listed, *(name for name, _ in printed)} == set(settings)
    for name, default in printed:
        assert default == ("required" if settings[name] is dataclasses.MISSING else shown(settings[name])), name


def test_every_reason_for_a_default_gives_that_default() -> None:
    defaults = {
        setting.flag: shown(setting.default) for setting in SETTINGS_PAGE.settings_of(SETTINGS_PAGE.COMMANDS["train"])
    }
    rows = table_rows(read("defaults.md"))
    assert len(rows) > 20
    assert {cells[0].strip("`"): cells[1].strip("`") for cells in rows} == {
        cells[0].strip("`"): defaults[cells[0].strip("`")] for cells in rows
    }


def test_the_probe_page_lists_the_files_of_a_probe() -> None:
    assert [name for name in PROBE_FILES if name not in first_cells(read("probe.md"), "The run folder")] == []


def test_the_page_of_presets_has_every_one_with_its_purpose_source_and_settings() -> None:
    page = read("presets.md")
    described = page.partition("What each sets")[0]
    listed = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \|$", described, re.MULTILINE)
    assert listed == [(preset.name, preset.purpose, preset.source) for preset in PRESETS.values()]
    assert sorted(first_cells(page, "How far to trust them")) == sorted(PRESETS)
    assert sorted(first_cells(page, "When it underfits or overfits")) == sorted(set(PRESETS) - {"plain"})
    (head,) = [line for line in page.splitlines() if line.startswith("| setting | `")]
    assert re.findall(r"`([^`]+)`", head) == list(PRESETS)
    table = {cells[0].strip("`"): cells[1:] for cells in table_rows(page)}
    names = {name for preset in PRESETS.values() for name in preset.settings}
    assert set(table) == {flag(name) for name in names}
    for column, preset in enumerate(PRESETS.values()):
        printed = {name: cells[column] for name, cells in table.items() if cells[column]}
        assert printed == {flag(name): shown(value) for name, value in preset.settings.items()}, preset.name


def test_the_three_learning_rates_are_those_of_the_code() -> None:
    (row,) = [cells for cells in table_rows(read("settings.md")) if cells[0] == "`--lr`"]
    full, lora, head = (float(number) for number in re.findall(r"\d\.?\d*e-\d", row[3])[:3])
    assert (full, lora, head) == (FULL_LR, LORA_LR, HEAD_LR)
    (row,) = [cells for cells in table_rows(read("settings.md")) if cells[0] == "`--backbone-lr-mult`"]
    assert row[3].endswith(f"by default {BACKBONE_LR_MULT:g}.")


def test_the_table_of_what_trains_has_the_learning_rates_of_the_code() -> None:
    rows = re.findall(r"^\| [^|]* \| (no flag|`--[^|]*`) \| (\d\.?\d*e-\d) \|$", read("training.md"), re.MULTILINE)
    wanted = {"no flag": FULL_LR, "`--freeze-layers N`": FULL_LR, "`--lora`": LORA_LR, "`--train-head-only`": HEAD_LR}
    assert {name: float(rate) for name, rate in rows} == wanted


def test_the_table_of_optimisers_has_every_one() -> None:
    page = read("training.md")
    assert [name for name in get_args(OptimizerName) if f"\n| `{name}` | " not in page] == []


def test_the_table_of_kernels_has_every_backend() -> None:
    table = read("kernels.md").partition("\n## Attention\n")[2].partition("\n## ")[0]
    assert sorted(first_cells(table)) == sorted(BACKENDS)
