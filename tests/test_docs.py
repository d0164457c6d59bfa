"""The pages say what the code does: examples run, and names, flags, defaults and lists are those of the code."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, get_args

import pytest
import torch

import rewardlab
import rewardlab.training.run as run_module
from conftest import write_base_model, write_pairs
from rewardlab import cli, flags
from rewardlab.analysis.health import ADVICE
from rewardlab.analysis.metrics import METRICS
from rewardlab.artifact.canaries import FAULTS
from rewardlab.core.config import settings_of
from rewardlab.core.run_folder import PROBE_FILES, RUN_FILES
from rewardlab.core.spec import SCORE_TOLERANCE, Canary, RendererSpec, RewardSpec
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats import LAYOUTS
from rewardlab.data.readers import EXTENSIONS
from rewardlab.data.rows import CAUSES
from rewardlab.data.sources import load_preferences
from rewardlab.evaluation.config import EvalConfig
from rewardlab.probing.config import ProbeConfig, ProbeRunConfig
from rewardlab.training.monitoring import gpu, memory_watch
from rewardlab.training.monitoring.records import COLUMNS
from rewardlab.training.monitoring.sinks import OPEN
from rewardlab.training.settings.config import (
    BACKBONE_LR_MULT,
    FULL_LR,
    HEAD_LR,
    LORA_LR,
    OptimizerName,
    RewardTrainerConfig,
)
from rewardlab.training.settings.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OTHER_PROGRAMS = re.compile(r"^\s*(?:\$ )?(?:pip|uv|git|python3?|make|torchrun)\b.*$", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def read(name: str) -> str:
    """A page of the documentation."""
    return (DOCS / name).read_text(encoding="utf-8")


# --- examples ------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    """Of the page, where its first line stands; from 1."""
    text: str


def blocks(page: str, language: str) -> Iterator[Block]:
    """The blocks of one language."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(page[: match.start(1)].count("\n") + 1, match[1])


def promised_lines(page: str) -> dict[int, str]:
    """Line number -> what its comment says it prints."""
    return {
        block.line + number: line.rpartition("  # -> ")[2]
        for block in blocks(page, "python")
        for number, line in enumerate(block.text.splitlines())
        if "  # -> " in line
    }


def run_examples(name: str, namespace: dict[str, Any]) -> dict[int, str]:
    """Run every python block of a page in one namespace; line number -> what was printed there last."""
    printed: dict[int, str] = {}
    source = str(DOCS / name)

    def note(*values: object) -> None:
        caller: FrameType = sys._getframe(1)
        if caller.f_code.co_filename == source:  # examples also hand `print` to functions, as a log
            printed[caller.f_lineno] = " ".join(map(str, values))

    namespace["print"] = note
    for block in blocks(read(name), "python"):
        code = compile("\n" * (block.line - 1) + block.text, source, "exec")
        exec(code, namespace)
    return printed


class Session(NamedTuple):
    """The examples of docs/api.md after they ran."""

    folder: Path
    namespace: dict[str, Any]
    printed: dict[int, str]


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """One thread, as in every test; and the last check of a run is made here instead of in a new process."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "verify_in_clean_process", rewardlab.verify)
        yield


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Runs docs/api.md on a tiny model and forty pairs."""
    folder = tmp_path_factory.mktemp("docs")
    namespace: dict[str, Any] = {
        "__name__": "docs_api",
        "base_model": write_base_model(folder / "base"),
        "pairs": write_pairs(folder / "pairs.jsonl", 40),
    }
    with chdir(folder):
        printed = run_examples("api.md", namespace)
    return Session(folder, namespace, printed)


def test_every_example_of_the_api_page_runs_and_prints_what_it_says(session: Session) -> None:
    promised = promised_lines(read("api.md"))
    assert len(promised) > 20
    assert {line: session.printed.get(line) for line in promised} == promised


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A base model and a reward-model folder with adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    base = write_base_model(folder / "base")
    config = RewardTrainerConfig.of(
        model=str(base),
        dataset=(str(write_pairs(folder / "pairs.jsonl", 20)),),
        output_dir=folder / "run",
        eval_fraction=0.0,
        steps=3,
        lr=1e-2,
        max_seq_len=128,
        precision="fp32",
        lora=True,
    )
    return {"base_model": base, "folder": rewardlab.train(config).model}


def test_the_examples_of_the_artifact_page_run_and_print_what_they_say(adapted: dict[str, Any]) -> None:
    promised = promised_lines(read("artifact.md"))
    printed = run_examples("artifact.md", adapted)
    assert len(promised) == 2
    assert {line: printed.get(line) for line in promised} == promised


def test_a_wrong_promise_on_a_page_would_be_noticed() -> None:
    page = "text\n```python\nx = 1\nprint(x)  # -> 2\n```\n"
    assert promised_lines(page) == {4: "2"}
    assert list(blocks(page, "python")) == [Block(3, "x = 1\nprint(x)  # -> 2\n")]


# --- names ---------------------------------------------------------------------------------------------------


def test_every_public_name_is_on_the_api_page_and_can_be_imported() -> None:
    table, _, rest = read("api.md").partition("\n## ")
    code = "".join(block.text for block in blocks(f"## {rest}", "python"))
    for name in rewardlab.__all__:
        assert f"`{name}`" in table, f"{name} is not in the table at the head of the page"
        assert re.search(rf"\b{name}\b", code + rest), f"{name} is nowhere below it"
        assert getattr(rewardlab, name) is not None
    named = set(re.findall(r"`(\w+)`", "".join(line for line in table.splitlines() if line.startswith("| ["))))
    assert named == set(rewardlab.__all__)


def test_dir_lists_the_public_names_and_others_are_refused() -> None:
    assert dir(rewardlab) == sorted(rewardlab.__all__)
    assert set(rewardlab._HOME) == set(rewardlab.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = rewardlab.nosuch


def test_importing_rewardlab_alone_imports_no_torch() -> None:
    program = "import sys, rewardlab; dir(rewardlab); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# --- flags and defaults --------------------------------------------------------------------------------------


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def known_flags() -> set[str]:
    """Every flag of every command."""
    others = [item for item in vars(cli).values() if isinstance(item, type) and dataclasses.is_dataclass(item)]
    parts = [RewardTrainerConfig, EvalConfig, ProbeConfig, *others]
    settings = [setting for part in parts for setting in settings_of(part).values()]
    switches = {f"--no-{flag(setting.name)[2:]}" for setting in settings if isinstance(setting.default, bool)}
    return (
        {flag(setting.name) for setting in settings} | switches | {*flags.SHORTHANDS, "--config", "--help", "--version"}
    )


@pytest.mark.parametrize(
    "page",
    [
        *("docs/training.md", "docs/data.md", "docs/artifact.md", "docs/api.md", "docs/coming-from-trl.md"),
        *("docs/probe.md", "docs/guidelines.md"),
        "README.md",
    ],
)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    text = OTHER_PROGRAMS.sub("", (ROOT / page).read_text(encoding="utf-8"))
    assert sorted(set(FLAG.findall(text)) - known_flags()) == []


def test_a_flag_that_does_not_exist_would_be_noticed() -> None:
    assert FLAG.findall("| --- | `--lora-rank 4` and --nosuch=1, not a--b") == ["--lora-rank", "--nosuch"]
    assert "--nosuch" not in known_flags()
    assert {"--lora", "--no-lora", "--hf-dataset", "--config", "--input"} <= known_flags()


# --- command lines -------------------------------------------------------------------------------------------

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]
ASSIGNMENT = re.compile(r"^([A-Z]\w*)=(\"[^\"]*\"|\S+)$", re.MULTILINE)
SETTINGS: dict[str, type] = {
    "eval": EvalConfig,
    "probe": ProbeConfig,
    "score": cli.ScoreArguments,
    "verify": cli.VerifyArguments,
    "export": cli.ExportArguments,
    "quickstart": cli.QuickstartArguments,
}
FILES = {
    "trl.yaml": "model_name_or_path: m\ndataset_name: d\n",
    "runs/mine/config.json": '{"model": "m", "dataset": "d"}',
}
"""Files that lines read settings from."""


def command_lines(page: str) -> list[str]:
    """What a page gives to `rewardlab` in its shell blocks, variables written out."""
    found: list[str] = []
    for block in blocks(page, "bash"):
        text = block.text.replace("\\\n", " ")
        for name, value in ASSIGNMENT.findall(text):
            text = text.replace(f"${name}", value.strip('"'))
        lines = (re.match(r"\s*(?:torchrun .* -m |\S+/)?rewardlab (.*)", line) for line in text.splitlines())
        found += [line[1] for line in lines if line]
    return found


def test_every_command_line_in_the_documentation_can_be_read(tmp_path: Path) -> None:
    found = {line: page for page in PAGES for line in command_lines((ROOT / page).read_text(encoding="utf-8"))}
    assert len(found) >= 15
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    with chdir(tmp_path):
        for line, page in found.items():
            command, *words = shlex.split(line, comments=True)
            try:
                _ = cli.parse_train(words) if command == "train" else cli._parse(SETTINGS[command], words, command)
            except rewardlab.RewardlabError as error:
                pytest.fail(f"{page}: rewardlab {line}: {error}")


def test_command_lines_are_found_in_every_form() -> None:
    shell = (
        'A="--lora \\\n  --lr 1"\n. .venv/bin/activate\nrewardlab train $A --seed 3  # note\nbin/rewardlab verify x\n'
    )
    page = f"```bash\n{shell}```\n"
    assert [shlex.split(line, comments=True) for line in command_lines(page)] == [
        ["train", "--lora", "--lr", "1", "--seed", "3"],
        ["verify", "x"],
    ]


# --- tables of settings --------------------------------------------------------------------------------------


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


def test_the_training_page_has_every_setting_once_by_room_with_its_default() -> None:
    rows = table_rows(read("training.md").partition("## Settings")[2].partition("\n## ")[0])
    printed = {cells[0].strip("`"): cells[1].strip("`") for cells in rows}
    assert len(printed) == len(rows), "a flag has two rows"
    assert printed == {flag(name): shown(setting.default) for name, setting in settings_of(RewardTrainerConfig).items()}


def test_the_probe_page_has_every_setting_of_its_own_with_its_default() -> None:
    printed = {cells[0].strip("`"): cells[1].strip("`") for cells in table_rows(read("probe.md"))}
    own = settings_of(ProbeRunConfig)
    assert printed == {flag(name): shown(setting.default) for name, setting in own.items()}
    assert [name for name in PROBE_FILES if name not in first_cells(read("probe.md"), "The run folder")] == []


def test_the_guidelines_have_every_preset_with_its_purpose_source_and_settings() -> None:
    page = read("guidelines.md")
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
    (row,) = [cells for cells in table_rows(read("training.md")) if cells[0] == "`--lr`"]
    full, lora, head = (float(number) for number in re.findall(r"\d\.?\d*e-\d", row[2])[:3])
    assert (full, lora, head) == (FULL_LR, LORA_LR, HEAD_LR)
    (row,) = [cells for cells in table_rows(read("training.md")) if cells[0] == "`--backbone-lr-mult`"]
    assert row[2].endswith(f"without it {BACKBONE_LR_MULT:g}")


def test_the_table_of_what_trains_has_the_learning_rates_of_the_code() -> None:
    rows = re.findall(r"^\| [^|]* \| (no flag|`--[^|]*`) \| (\d\.?\d*e-\d) \|$", read("training.md"), re.MULTILINE)
    wanted = {"no flag": FULL_LR, "`--freeze-layers N`": FULL_LR, "`--lora`": LORA_LR, "`--train-head-only`": HEAD_LR}
    assert {name: float(rate) for name, rate in rows} == wanted


def test_the_table_of_optimisers_has_every_one() -> None:
    page = read("training.md")
    assert [name for name in get_args(OptimizerName) if f"\n| `{name}` | " not in page] == []


# --- lists ---------------------------------------------------------------------------------------------------


def first_cells(page: str, heading: str) -> list[str]:
    """What stands in backticks in the first column of the tables below a heading."""
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (body,) = [part for part in section if part.startswith(f"{heading}\n")]
    return [
        name for cell in re.findall(r"^\| (`[^|]*) \|", body, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)
    ]


def test_the_training_page_lists_the_files_of_a_run_and_the_columns_of_its_metrics() -> None:
    listed = [name.rstrip("/") for name in first_cells(read("training.md"), "The run folder")]
    assert [name for name in RUN_FILES if name not in listed] == []
    assert sorted(name for name in listed if name in COLUMNS) == sorted(COLUMNS)


def test_the_training_page_lists_every_warning_sign_viewer_and_watched_column() -> None:
    page = read("training.md")
    assert first_cells(page, "Warning signs") == list(ADVICE)
    assert first_cells(page, "Watching a run") == list(OPEN)
    columns = {*gpu.COLUMNS, *memory_watch.COLUMNS}
    section = page.split("## Watching a run")[1].split("\n## ")[0]
    assert [name for name in columns if f"`{name}`" not in section] == []


def test_the_data_page_gives_every_cause_and_extension() -> None:
    page = read("data.md")
    assert first_cells(page, "Why a row is dropped") == [
        *CAUSES,
        "template_refuses",
        "overlong",
        "reply_too_long",
        "identical_tokens",
        "ends_in_padding",
    ]
    assert [extension for extension in EXTENSIONS if f"`{extension}`" not in page] == []


def test_every_row_on_the_data_page_becomes_a_preference_and_no_layout_is_missing(tmp_path: Path) -> None:
    examples = [block.text for block in blocks(read("data.md"), "json")]
    layouts = set()
    for number, text in enumerate(examples):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text, encoding="utf-8")
        loaded = load_preferences(
            [str(path)], split="train", reading=ReadingConfig(max_drop_fraction=0.0), seed=0, limit=None
        )
        assert len(loaded.preferences) == 1, text
        columns = json.loads(text.splitlines()[0])
        layouts.add(next(layout.name for layout in LAYOUTS if layout.fits(columns)))
    assert layouts == {layout.name for layout in LAYOUTS}


def test_the_artifact_page_lists_the_fields_of_the_spec_the_faults_and_the_tolerances() -> None:
    page = read("artifact.md")
    fields = first_cells(page, "reward_spec.json")
    for part, prefix in ((RewardSpec, ""), (RendererSpec, "renderer."), (Canary, "canaries[].")):
        missing = [field.name for field in dataclasses.fields(part) if f"{prefix}{field.name}" not in fields]
        assert missing == [], f"{part.__name__}: not on the page"
    assert first_cells(page, "Canaries and decoys") == list(FAULTS)
    tolerances = dict(re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", page, re.MULTILINE))
    assert {name: float(value) for name, value in tolerances.items()} == SCORE_TOLERANCE


def test_the_api_page_lists_every_metric() -> None:
    assert [name for name in METRICS if f"| `{name}` |" not in read("api.md")] == []
