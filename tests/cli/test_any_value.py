"""No value of any flag, in any file, ends in a traceback, and none hangs: it is taken, or refused in plain words."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from common import write_pairs
from made_files import make_files
from rewardlab import arguments, cli
from rewardlab.core.config import Composed, from_mapping, read_settings, settings_of
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.core.terminal import visible, visible_message
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.files.config import ConvertConfig, MixConfig, SplitConfig
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.showing.config import ShowConfig
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.evaluation.config import CalibrateConfig, EvalConfig
from rewardlab.experiments import config as plans
from rewardlab.flags import _read
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.pipeline.config import RunConfig
from rewardlab.gold.sampling.config import SampleConfig
from rewardlab.probing.config import ProbeConfig
from rewardlab.rl.audit.config import AuditConfig as RolloutAuditConfig
from rewardlab.training.settings.config import RewardTrainerConfig
from telling import tell

SETTINGS: dict[str, tuple[type, dict[str, object]]] = {
    "train": (RewardTrainerConfig, {"model": "m", "dataset": "d"}),
    "probe": (ProbeConfig, {"model": "m", "dataset": "d"}),
    "eval": (EvalConfig, {"model": "m", "dataset": "d"}),
    "calibrate": (CalibrateConfig, {"model": "m", "dataset": "d"}),
    "compare": (arguments.CompareArguments, {"models": ["a", "b"]}),
    "report": (arguments.ReportArguments, {"runs": ["a"]}),
    "watch": (arguments.WatchArguments, {"run": "a"}),
    "score": (arguments.ScoreArguments, {"model": "m", "input": "i", "output": "o"}),
    "serve": (arguments.ServeArguments, {"models": ["m"]}),
    "verify": (arguments.VerifyArguments, {"folder": "f"}),
    "export": (arguments.ExportArguments, {"folder": "f", "output_dir": "o"}),
    "average": (arguments.AverageArguments, {"folders": ["f", "g"], "output_dir": "o"}),
    "quickstart": (arguments.QuickstartArguments, {}),
    "import": (arguments.ImportArguments, {"source": "m"}),
    "push": (arguments.PushArguments, {"folder": "f", "repo": "me/mine"}),
    "card": (arguments.CardArguments, {"folder": "f"}),
    "diagnose": (DiagnoseConfig, {"model": "m", "dataset": "d", "output_dir": "o"}),
    "data inspect": (InspectConfig, {"dataset": "d"}),
    "data audit": (AuditConfig, {"dataset": "d"}),
    "data mislabels": (MislabelsConfig, {"dataset": "d", "output_dir": "o"}),
    "data convert": (ConvertConfig, {"dataset": "d", "output": "o"}),
    "data split": (SplitConfig, {"dataset": "d", "output_dir": "o"}),
    "data mix": (MixConfig, {"dataset": "d", "output": "o"}),
    "data show": (ShowConfig, {"dataset": "d"}),
    "gold sample": (SampleConfig, {"model": "m", "prompts": "p", "output": "o"}),
    "gold label": (LabelConfig, {"model": "m", "input": "i", "output": "o"}),
    "gold build": (BuildConfig, {"input": "i", "output_dir": "o"}),
    "gold match": (MatchConfig, {"proxies": ["m"], "input": "i", "output_dir": "o"}),
    "gold curve": (CurveConfig, {"proxies": ["m"], "input": "i", "output_dir": "o"}),
    "gold check": (CheckConfig, {"folder": "gold"}),
    "gold run": (RunConfig, {"plan": "gold.yaml"}),
    "rl audit": (RolloutAuditConfig, {"run": "rl"}),
    "plan check": (plans.ReadConfig, {"plan": "plan.yaml"}),
    "plan freeze": (plans.FreezeConfig, {"plan": "plan.yaml"}),
    "plan amend": (plans.AmendConfig, {"study": "study"}),
    "plan run": (plans.RunConfig, {"study": "study"}),
    "plan task": (plans.TaskConfig, {"study": "study", "run": "plain/seed_0"}),
    "plan gate": (plans.GateConfig, {"study": "study", "phase": "main"}),
    "plan status": (plans.StatusConfig, {"study": "study"}),
    "plan report": (plans.ReportConfig, {"study": "study"}),
    "plan archive": (plans.ArchiveConfig, {"study": "study"}),
    "plan submit": (plans.SubmitConfig, {"study": "study"}),
}
WORDS = (
    *("", " ", "-1", "0", "-0", "1", "None", "none", "auto", "true", "[]", "{}", "%s%n", "a b", "a,b", ","),
    *("nan", "inf", "-inf", "Infinity", "1e308", "-1e308", "1e309", "1e-320", "1e18", "1e12", "0x10", "1_000", "٣"),
    *map(str, (2**31, 2**32, 10**12, 10**18, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, -(10**400))),
    *("9" * 5000, "x" * 10_000, "a\0b", "a\udcff", "\ud800", "\x1b[2J", "\u202e", "a\nb", "💥" * 100, "2001-99-99"),
    *("/", "..", "/dev/null", "/proc/self/mem", "~", "nosuch/../..", "y" * 300, "*", "$(x)", "--lr", "-"),
)
DEEP: object = [1]
WIDE: object = ["lol"]
for _ in range(900):
    DEEP = [DEEP]
for _ in range(30):
    WIDE = [WIDE] * 10
VALUES = (
    *(None, True, False, -1, 0, 1, 2**63, 2**64, 10**18, -(10**18), 10**400, 1 << 40_000),
    *(1e308, -1e308, 5e-324, float("nan"), float("inf"), 0.5, -0.0, b"x", datetime.date(2001, 1, 1), {}, {"a": 1}),
    *([], [[]], [None], [1, "a"], ["a", "a"], [""], DEEP, WIDE, {1, 2}, (), "", "\0", "\ud800", "x" * 10_000),
)


def require_plain(error: Exception) -> None:
    """An error is of our tree, short, and can be printed."""
    message = visible_message(str(error))
    assert len(message) < 1500 or isinstance(error, OSError)
    assert visible(message, lines=True) == message
    message.encode()


def some(values: Sequence[object], field: int, step: int) -> Sequence[object]:
    """One in `step` of the values, others for other fields."""
    return values[field % step :: step]


def try_words(command: str, step: int) -> tuple[int, int]:
    """Words as the flags of a command: (how many were taken, refused)."""
    kind, required = SETTINGS[command]
    taken = refused = 0
    for number, setting in enumerate(settings_of(kind).values()):
        for word in some(WORDS, number, step) if setting.hint is not bool else ():
            try:
                value = _read(((word,),), setting.hint, f"--{setting.name}")
                from_mapping(kind, {**required, setting.name: value}, where="the test")
                taken += 1
            except (RewardlabError, OSError) as error:
                require_plain(error)
                refused += 1
    return taken, refused


def try_values(command: str, step: int) -> tuple[int, int]:
    """Values in a file, and given by Python where that makes the settings of a command: (taken, refused)."""
    kind, required = SETTINGS[command]
    taken = refused = 0
    builders: list[Any] = [lambda values: from_mapping(kind, values, where="the test")]
    if issubclass(kind, Composed):
        builders.append(lambda values: kind.of(**values))
    for number, name in enumerate(settings_of(kind)):
        for value in some(VALUES, number, step):
            values = {**required, name: value}
            for build in builders:
                try:
                    build(values)
                    taken += 1
                except (RewardlabError, OSError) as error:
                    require_plain(error)
                    refused += 1
    return taken, refused


@pytest.mark.parametrize("attempt", [try_words, pytest.param(try_values, marks=pytest.mark.slow)])
def test_any_value_is_taken_or_refused(attempt):
    """A sample of `test_every_value_is_taken_or_refused`."""
    taken, refused = map(
        sum, zip(*(attempt(command, 60 if " " in command else 12) for command in SETTINGS), strict=True)
    )
    assert min(taken, refused) > 20


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        *(("data audit", name) for name in ("threshold", "fail_on", "remove")),
        *(("gold match", name) for name in ("train_proxies", "runs")),
        *(("data split", "fractions"), ("gold sample", "shard"), ("gold curve", "ood_proxies")),
        ("plan run", "past_gate"),
    ],
)
def test_a_word_of_thousands_of_characters_is_not_repeated_whole(command, setting):
    kind, required = SETTINGS[command]
    value = "x" * 5000
    if str(settings_of(kind)[setting].hint) != "str | None":
        value = [value]
    with pytest.raises(RewardlabError) as refused:
        from_mapping(kind, {**required, setting: value}, where="the test")
    require_plain(refused.value)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_value_is_taken_or_refused(capsys):
    started = time.perf_counter()
    counts = [attempt(command, 1) for command in SETTINGS for attempt in (try_words, try_values)]
    taken, refused = map(sum, zip(*counts, strict=True))
    tell(capsys, f"settings: {taken} values taken and {refused} refused in {time.perf_counter() - started:.0f} s")


class NoModel(RewardlabError):
    """Where a model would be loaded."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a file of every kind that a command reads."""
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def without_a_model(monkeypatch, tmp_path, files):
    """A folder with data, in which every command ends where it would load a model."""

    def end(*_: object, **__: object) -> None:
        raise NoModel("no model here")

    for place in (
        "training.start.open_base",
        "probing.run.open_base",
        "evaluation.evaluate.load",
        "evaluation.saved.load",
        "artifact.load.load",
        "serve.verifying.folder.assemble",
        "serve.server.load_engine",
        "serve.http.workers.Workers.run",
        "quickstart.write_dataset",
        "serve.folders.import_model.import_model",
        "serve.folders.import_model.import_in_place",
        "diagnosing.run.compute_states",
        "diagnosing.runs.run_trained",
        "curation.mislabels.run.gather",
        "curation.showing.rows.renderer_of",
        "gold.sampling.run.team_of",
        "gold.labelling.run.team_of",
        "gold.matching.run.proxy_scores",
        "gold.curving.run.proxy_scores",
        "rl.audit.gold.RewardScorer",
        "experiments.running.run_all",
        "commands.training.train",
    ):
        monkeypatch.setattr(f"rewardlab.{place}", end)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_pairs(tmp_path / "pairs.jsonl", 4)
    return tmp_path


LINES = {
    "train": "--model m --dataset pairs.jsonl",
    "probe": "--model m --dataset pairs.jsonl",
    "eval": "--model m --dataset pairs.jsonl",
    "calibrate": "--model m --dataset pairs.jsonl",
    "compare": "a.jsonl b.jsonl",
    "report": "judged",
    "watch": "judged --once",
    "score": "--model m --input pairs.jsonl --output o",
    "serve": "m --port 0",
    "verify": "",
    "export": "f --output-dir o",
    "average": "f g --output-dir o",
    "quickstart": "--test-pairs 1 --steps 1",
    "import": "m --output-dir o",
    "push": "f me/mine --dry-run",
    "card": "",
    "diagnose": "--model m --dataset pairs.jsonl --output-dir o",
    **{f"data {tool}": "pairs.jsonl" for tool in ("inspect", "audit", "show")},
    "data mislabels": "pairs.jsonl --model m --output-dir o",
    "data convert": "pairs.jsonl --output o.jsonl",
    "data mix": "pairs.jsonl --output o.jsonl",
    "data split": "pairs.jsonl --output-dir o",
    "gold sample": "--model m --prompts pairs.jsonl --output o.jsonl",
    "gold label": "--model m --input gold/samples.jsonl --output o.jsonl",
    "gold build": "--input gold/labels.jsonl --output-dir o",
    **{f"gold {stage}": "--input gold/labels.jsonl --proxies m --output-dir o" for stage in ("match", "curve")},
    "gold check": "gold",
    "gold run": "gold.yaml --dry-run",
    "rl audit": "rl",
    **{f"plan {tool}": "plan.yaml" for tool in ("check", "freeze")},
    **{f"plan {tool}": "study" for tool in ("amend", "run", "status", "report", "archive")},
    "plan task": "study --run plain/seed_0",
    "plan gate": "study --phase main",
    "plan submit": "study --dry-run",
}
FIRST = ("folder", "models", "runs", "source", "plan", "study")
OUTPUTS = ("output", "output_dir", "cache_dir")
OUTSIDE = ("/", "..", "nosuch/../..")


def lines_of(command: str, step: int = 1) -> Iterator[list[str]]:
    """The command with each of its flags at one in `step` of the values."""
    for number, name in enumerate(settings_of(SETTINGS[command][0])):
        first = name in FIRST or (name == "run" and command in ("watch", "rl audit"))
        for word in some(WORDS, number, step):
            if " " in command and name in OUTPUTS and word in OUTSIDE:
                continue  # a tool that writes there has done what it was asked
            own = [word] if first else [f"--{name.replace('_', '-')}={word}"]
            given = LINES[command].split()
            yield [*command.split(), *(given[1:] if first and " " in command else given), *own]


def run_plainly(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """A command ends with status 0, or with 2 and words that a terminal only shows."""
    try:
        cli.main(words)
        status: Any = 0
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    # A tool that judges says by 1 that something is wrong with what it was given.
    judges = words[0] in ("rl", "plan") or words[:2] in (["data", "audit"], ["gold", "check"])
    assert status in ((0, 1, 2) if judges else (0, 2)), words
    assert "Traceback" not in said.err, words
    for text in said:
        assert visible(text, lines=True) == text, words
        assert len(text) < 20_000 + 3 * max(map(len, words)), words
    refused = said.err.startswith("error: ")
    # A tool of `plan` also says by 2 that something is undecided.
    assert refused == (status == 2) or (words[0] == "plan" and not said.err and said.out), (words, said.err)


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(one, marks=pytest.mark.slow) for one in SETTINGS if one != "train")]
)
def test_a_command_with_any_value_ends_in_plain_words(command, without_a_model, capsys):
    """A sample of `test_every_flag_with_a_quarter_of_the_values`: another value for each flag."""
    every = list(lines_of(command))
    count = 4 if " " in command else 8
    for words in every[:: len(WORDS) * max(1, len(every) // len(WORDS) // count) + 7]:
        run_plainly(capsys, words)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", SETTINGS)
def test_every_flag_with_a_quarter_of_the_values(command, without_a_model, capsys):
    """Each flag with other values than its neighbours; all 55,000 lines would take hours."""
    count, slowest = 0, 0.0
    for words in lines_of(command, 4):
        started = time.perf_counter()
        run_plainly(capsys, words)
        count, slowest = count + 1, max(slowest, time.perf_counter() - started)
        assert slowest < 20, words
    flags = len(settings_of(SETTINGS[command][0]))
    tell(capsys, f"{command}: {count} command lines of {flags} flags, slowest {slowest:.1f} s")


names = st.sampled_from(list(settings_of(RewardTrainerConfig))) | st.text(max_size=8)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(WORDS)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=2), max_leaves=5
)


def require_file_is_plain(path: Path, text: str) -> None:
    """A file of settings is taken or refused."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        from_mapping(RewardTrainerConfig, {**SETTINGS["train"][1], **read_settings(path)}, where=f"--config {path}")
    except ConfigError as error:
        require_plain(error)


# The first draw makes the strategies, which a busy machine does slowly.
@pytest.mark.slow
@tried(suppress_health_check=[HealthCheck.too_slow])
@given(settings=st.dictionaries(names, values, max_size=4), kind=st.sampled_from(["json", "yaml", "toml"]))
def test_a_file_with_any_settings_is_taken_or_refused(settings, kind, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"settings.{kind}"
    lines = [
        f"{json.dumps(name)}{' = ' if kind == 'toml' else ': '}{json.dumps(value)}" for name, value in settings.items()
    ]
    require_file_is_plain(path, json.dumps(settings) if kind == "json" else "\n".join(lines))
