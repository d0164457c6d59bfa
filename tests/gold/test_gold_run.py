"""`rewardlab gold run`: all stages from one file, done once, refused where something changed, gone on after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from chat_server import ChatServer, chatting
from gold_pipeline import ALL, PROMPTS, Tools, go, words, write_plan
from reward_models import save_tiny
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, RunInterrupted
from rewardlab.gold.pipeline.config import RunConfig
from rewardlab.gold.pipeline.plan import flags_of, read_plan, require_makers
from rewardlab.gold.pipeline.run import run
from tiny_chat import save_chat_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "gold")
    save_chat_model(folder / "base")
    return folder


@pytest.fixture
def server() -> Iterator[tuple[ChatServer, str]]:
    chat = ChatServer()
    with chatting(chat) as url:
        yield chat, url


def run_cli(arguments: Sequence[str]) -> int:
    """The exit status; a proxy of two steps need not match."""
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_all_stages_are_done_once(tmp_path, models, server, verified_here, capsys) -> None:
    chat, url = server
    path = write_plan(tmp_path, models, url)
    assert run_cli(words(path)) in (0, 1), capsys.readouterr().err
    out = tmp_path / "out"
    for name in ("samples.jsonl", "labels.json", "pairs/train.trl.jsonl", "proxy/step_2/reward_spec.json"):
        assert (out / name).is_file(), name
    for name in ("match/match.html", "curve/curve.csv", "check/check.json", "run.json"):
        assert (out / name).is_file(), name
    asked, first = len(chat.asked), capsys.readouterr().out
    assert asked == 4 * len(PROMPTS)
    assert [f"== {stage}: rewardlab gold {stage}" in first for stage in ("sample", "train", "check")] == [True] * 3
    faults = json.loads((out / "check" / "check.json").read_text())["findings"]
    assert not [one for one in faults if one["status"] == "fail"]

    assert run_cli(words(path)) in (0, 1)
    again = capsys.readouterr().out
    assert len(chat.asked) == asked
    for stage in ("build", "train", "match", "curve", "check"):
        assert f"== {stage}: complete" in again
    assert again.count("(all of them before)") == 2


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path / "out")


def test_stages_are_given_each_others_files(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    assert go(path, tools)[0] == ALL
    out, given = tmp_path / "out", dict(tools.called)
    assert f"--output={out / 'samples.jsonl'}" in given["sample"]
    assert f"--input={out / 'samples.jsonl'}" in given["label"]
    assert f"--data={out / 'pairs'}" in given["train"]
    assert given["train"][-2:] == ["--resume", "auto"]
    assert {f"--input={out / 'pairs' / 'labels.test.jsonl'}", f"proxy={out / 'proxy'}"} <= set(given["match"])
    assert "--no-baselines" in given["train"]


def test_what_is_complete_is_left_alone_and_its_status_kept(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    go(path, tools)
    done, said = go(path, tools)
    assert done == ["sample", "label"], "these look for themselves what is missing"
    assert [line for line in said if line.endswith(": complete")] == [f"== {name}: complete" for name in ALL[2:]]
    with pytest.raises(SystemExit, match="1"):
        run(read_plan(path), RunConfig(plan=path), tools.by_name(), say=said.append)
    page = tmp_path / "out" / "match" / "match.md"
    assert said[-1] == f"exit status 1: a verdict of match failed; see {page}", "though the stage was complete"


def test_other_settings_of_a_stage_are_refused_and_redone_when_asked(tmp_path, models, tools) -> None:
    go(write_plan(tmp_path, models, "http://x"), tools)
    path = write_plan(tmp_path, models, "http://x", build={"min_margin": 0.5})
    with pytest.raises(ConfigError, match="build: was done with less, now --min-margin=0.5. `--redo build`"):
        go(path, tools)
    done, _ = go(path, tools, redo="build")
    assert done == ALL
    given = dict(tools.called)
    assert "--overwrite" in given["build"]
    assert "--overwrite" in given["train"]
    assert "--overwrite" not in given["label"]


@pytest.mark.parametrize(
    "text",
    ["Not one step was done; raise --max-hours.", "It cannot be resumed from here, because of --no-checkpoints."],
)
def test_an_end_that_cannot_be_resumed_is_told_as_it_is(tmp_path, models, tools, text) -> None:
    def fails(arguments: Sequence[str]) -> None:
        raise RunInterrupted(text, exit_status=1)

    path = write_plan(tmp_path, models, "http://x")
    with pytest.raises(RunInterrupted) as told:
        run(read_plan(path), RunConfig(plan=path), tools.by_name() | {"train": fails}, say=lambda _: None)
    assert str(told.value) == text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RunInterrupted("Start it again with --resume auto.", exit_status=130),
            "Here that is the same `rewardlab gold",
        ),
        (ConfigError("--resume: --lr 2, it was 1."), "Here that is `rewardlab gold run` with --redo train."),
    ],
)
def test_what_training_says_of_its_flags_is_said_in_those_of_a_plan(tmp_path, models, tools, error, told) -> None:
    def fails(arguments: Sequence[str]) -> None:
        raise error

    path = write_plan(tmp_path, models, "http://x")
    with pytest.raises(type(error), match=told):
        run(read_plan(path), RunConfig(plan=path), tools.by_name() | {"train": fails}, say=lambda _: None)


def test_until_a_stage_and_dry_runs(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    done, said = go(path, tools, dry_run=True)
    assert done == []
    assert [line.split()[1] for line in said] == [f"{name}:" for name in ALL]
    assert go(path, tools, until="build")[0] == ["sample", "label", "build"]


def test_preferences_that_were_written_before_a_kill_are_written_again(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")

    class Ending(Tools):
        def _do(self, name, arguments):
            super()._do(name, arguments)
            if name == "build":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(path, Ending(tmp_path / "out"))
    assert go(path, tools)[0] == ALL
    assert "--overwrite" in dict(tools.called)["build"], "the folder is there, and its own"


def test_preferences_of_somebody_else_are_never_overwritten(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    (tmp_path / "out" / "pairs").mkdir(parents=True)

    class Refusing(Tools):
        def _do(self, name, arguments):
            super()._do(name, arguments)
            if name == "build":
                raise ConfigError("--output-dir: holds preferences")

    refusing = Refusing(tmp_path / "out")
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds preferences"):
            go(path, refusing)
        assert "--overwrite" not in dict(refusing.called)["build"]


def test_preferences_that_were_changed_are_not_lost(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    go(path, tools)
    (tmp_path / "out" / "pairs" / "train.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"build: what it wrote has changed: pairs/train\.jsonl\. `--redo build`"):
        go(path, tools)
    assert go(path, tools, redo="build")[0] == ALL


def test_a_stage_that_fails_is_not_complete(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")

    class Failing(Tools):
        def _do(self, name, arguments):
            super()._do(name, arguments)
            if name == "train":
                raise SystemExit(1)

    failing = Failing(tmp_path / "out")
    assert go(path, failing)[0] == ["sample", "label", "build", "train"], "a verdict ends with 1, this is an error"
    assert "train" in go(path, tools)[0]


def test_a_stage_behind_the_last_one_cannot_be_redone(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    with pytest.raises(ConfigError, match="--redo train is behind --until build"):
        go(path, tools, until="build", redo="train")


def test_a_stage_that_is_killed_is_done_again(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")

    class Ending(Tools):
        def _do(self, name, arguments):
            super()._do(name, arguments)
            if name == "train":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(path, Ending(tmp_path / "out"))
    assert go(path, tools)[0] == ["sample", "label", "train", "match", "curve", "check"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sample: {}\n", "`folder` is missing"),
        ("folder: x\n", "has no stage"),
        ("folder: x\nlable: {}\n", "unknown stage 'lable'. Did you mean 'label'"),
        ("folder: x\nlabel: [1]\n", "label: wanted settings by name"),
        ("folder: x\nlabel: {2nd: y}\n", "label: unknown setting '2nd'. `rewardlab gold label --help` lists"),
        ("folder: x\nlabel: {--input: y}\n", "label: unknown setting '--input'."),
        ("folder: x\nlabel: {output: y}\n", "label: output is set by the plan"),
        ("folder: x\nlabel: {target-path: y}\n", "label: target_path is set by the plan"),
    ],
)
def test_plans_that_cannot_be_used(tmp_path, content, message) -> None:
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.yaml")


def test_settings_as_they_are_written() -> None:
    given = {"a_b": True, "c": False, "d": [1, "x y"], "e": -0.5, "f": None, "g": ""}
    assert flags_of(given) == ["--a-b", "--no-c", "--d", "1", "x y", "--e=-0.5", "--f=None", "--g="]


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        ("sample", {"max_token": 3}, "sample: unknown flag '--max-token"),
        ("train", {"lrr": 3}, "train: unknown flag '--lrr"),
        ("curve", {"mosst": 3}, "curve: unknown flag '--mosst"),
        ("match", {"good_match": 7}, "match: --good-match"),
    ],
)
def test_a_flag_of_a_late_stage_is_read_before_any_begins(tmp_path, models, capsys, stage, change, message) -> None:
    path = write_plan(tmp_path, models, "http://127.0.0.1:9", **{stage: change})
    assert run_cli(words(path, "--dry-run")) == 2
    assert message in capsys.readouterr().err


def test_a_stage_whose_files_nobody_writes_is_told_before_any_begins(tmp_path, models) -> None:
    plan = yaml.safe_load(write_plan(tmp_path, models, "http://x").read_text())
    del plan["label"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(
        ConfigError, match=r"build reads .*labels\.jsonl, which is not there, and the plan has no label"
    ):
        require_makers(read_plan(tmp_path / "plan.yaml"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "labels.jsonl").touch()
    require_makers(read_plan(tmp_path / "plan.yaml"))


@pytest.mark.slow
def test_labels_go_on_where_failed_replies_came_later(tmp_path, models, server, capsys) -> None:
    chat, url = server
    chat.refused = "basil"
    lenient = {"max_error_fraction": 1}
    path = write_plan(tmp_path, models, url, sample=lenient, label=lenient)
    assert run_cli(words(path, "--until", "label")) == 0
    labels = tmp_path / "out" / "labels.jsonl"
    assert labels.read_text().count("no reply was sampled") == 4 * len(PROMPTS) // 5
    chat.refused = ""
    assert run_cli(words(path, "--until", "label")) == 0, capsys.readouterr().err
    assert "gold_errors" not in labels.read_text()

    other = write_plan(tmp_path, models, url, sample=lenient, label={**lenient, "max_length": 64})
    assert run_cli(words(other, "--until", "label")) == 2
    assert "max_length was 2048, now 64" in (told := capsys.readouterr().err)
    assert "Here that is `rewardlab gold run` with --redo label." in told
    labels.write_text("mine\n")
    with (tmp_path / "out" / "samples.jsonl.manifest.json").open() as file:
        assert json.load(file)["counts"]["errors"] == 0
    assert run_cli(words(path, "--until", "label")) == 2
    assert "labels.jsonl: it was changed after it was written" in capsys.readouterr().err
    assert labels.read_text() == "mine\n"


def test_a_dry_run_writes_nothing(tmp_path, models, tools) -> None:
    go(write_plan(tmp_path, models, "http://x"), tools, dry_run=True)
    assert not (tmp_path / "out").exists()
