"""`rewardlab gold run`: all stages from one file, done once, refused where something changed, gone on after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from chat_server import ChatServer, chatting
from reward_models import save_tiny
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, RunInterrupted
from rewardlab.core.files import read_summed_json, write_summed_json
from rewardlab.gold.pipeline import run as stages
from rewardlab.gold.pipeline.config import RunConfig
from rewardlab.gold.pipeline.plan import flags_of, read_plan, require_makers
from rewardlab.gold.pipeline.run import run
from tiny_chat import save_chat_model

ALL = ["sample", "label", "build", "train", "match", "curve", "check"]
PROMPTS = [f"Question {n} about {word}?" for n, word in enumerate(["basil", "light", "water", "frost", "soil"] * 8)]


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


def write_plan(folder: Path, models: Path, url: str, **changes: Any) -> Path:
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    plan: dict[str, Any] = {
        "folder": str(folder / "out"),
        "sample": {
            "prompts": str(folder / "prompts.json"),
            "backend": "http",
            "url": [url],
            "num-responses": 4,
            "max_tokens": 16,
            "concurrency": 4,
        },
        "label": {"model": str(models / "gold")},
        "build": {"test_fraction": 0.3, "near": "none"},
        "train": {
            "model": str(models / "base"),
            "steps": 2,
            "batch_size": 4,
            "max_seq_len": 128,
            "baselines": False,
        },
        "match": None,
        "curve": {},
        "check": {"num_samples": 1},
    }
    for stage, section in changes.items():
        plan[stage] = {**(plan[stage] or {}), **section} if isinstance(section, dict) else section
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def words(path: Path, *more: str) -> list[str]:
    return ["gold", "run", str(path), *more]


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


class Tools:
    """Stages that only write what they would."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.called = folder, list[tuple[str, list[str]]]()

    def by_name(self) -> dict[str, Callable[[Sequence[str]], None]]:
        return {name: lambda arguments, name=name: self._do(name, list(arguments)) for name in ALL}

    def _do(self, name: str, arguments: list[str]) -> None:
        self.called.append((name, arguments))
        files = {
            "sample": ["samples.jsonl"],
            "label": ["labels.jsonl"],
            "build": ["pairs/train.jsonl", "pairs/test.jsonl", "pairs/labels.train.jsonl", "pairs/labels.test.jsonl"],
            "train": ["proxy/best/reward_spec.json"],
            "match": ["match/match.json"],
            "curve": ["curve/curve.json"],
            "check": ["check/check.json"],
        }
        for file in files[name]:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {arguments}")
        if name in ("match", "check"):
            raise SystemExit(1 if name == "match" else 0)


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path / "out")


def go(path: Path, tools: Tools, **settings: Any) -> tuple[list[str], list[str]]:
    """(stages that were done, what was said)."""
    tools.called.clear()
    said: list[str] = []
    with suppress(SystemExit):
        run(read_plan(path), RunConfig(plan=path, **settings), tools.by_name(), say=said.append)
    return [name for name, _ in tools.called], said


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


def test_changed_inputs_are_refused_by_their_hash_and_reports_are_made_again(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    go(path, tools)
    (tmp_path / "out" / "proxy" / "best" / "reward_spec.json").write_text("another")
    assert go(path, tools)[0] == ["sample", "label", "train"], "the same proxy is as good as before"
    (tmp_path / "out" / "pairs" / "labels.test.jsonl").write_text("another")
    assert go(path, tools)[0] == ["sample", "label", "match", "curve", "check"]
    (tmp_path / "out" / "pairs" / "test.jsonl").write_text("another")
    with pytest.raises(ConfigError, match=r"train: what it read has changed: pairs/test\.jsonl"):
        go(path, tools)


def test_another_base_model_of_the_same_name_is_refused(tmp_path, models, tools) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "base", base)
    path = write_plan(tmp_path, models, "http://x", train={"model": str(base)})
    go(path, tools)
    # As a version that did not look at base models wrote it.
    record = tmp_path / "out" / "run.json"
    now = read_summed_json(record)
    inputs = {name: digest for name, digest in now["train"]["inputs"].items() if not name.startswith(str(base))}
    assert len(inputs) < len(now["train"]["inputs"])
    write_summed_json(record, {**now, "train": {**now["train"], "inputs": inputs}})
    assert go(path, tools)[0] == ["sample", "label"]
    write_summed_json(record, now)
    assert go(path, tools)[0] == ["sample", "label"]
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ConfigError, match=r"train: what it read has changed: .*base/model\.safetensors. `--redo train`"
    ):
        go(path, tools)
    assert go(path, tools, redo="train")[0] == ["sample", "label", "train", "match", "curve", "check"]
    assert go(path, tools)[0] == ["sample", "label"]


def test_a_base_model_that_is_gone_or_gets_a_card_is_the_same(tmp_path, models, tools) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "base", base)
    path = write_plan(tmp_path, models, "http://x", train={"model": str(base)})
    go(path, tools)
    (base / "README.md").write_text("A card.")
    assert go(path, tools)[0] == ["sample", "label"]
    # As a version that looked at every file wrote it.
    record = tmp_path / "out" / "run.json"
    now = read_summed_json(record)
    inputs = {**now["train"]["inputs"], str(base / "README.md"): "0" * 64}
    write_summed_json(record, {**now, "train": {**now["train"], "inputs": inputs}})
    assert go(path, tools)[0] == ["sample", "label"]
    shutil.rmtree(base)
    done, said = go(path, tools)
    assert done == ["sample", "label"]
    assert f"train: {base} is gone, so the base model is not compared with that of the record" in said
    (tmp_path / "out" / "pairs" / "test.jsonl").write_text("another")
    with pytest.raises(ConfigError, match=r"train: what it read has changed: pairs/test\.jsonl\. "):
        go(path, tools)


def test_a_dry_run_reads_no_weights_of_stages_that_are_to_be_done(tmp_path, models, tools, monkeypatch) -> None:
    path = write_plan(tmp_path, models, "http://x")

    def refuse(file: Path) -> str:
        raise AssertionError(file)

    monkeypatch.setattr(stages, "sha256_file", refuse)
    assert len(go(path, tools, dry_run=True)[1]) == len(ALL)


def test_a_text_that_is_too_long_for_a_name_is_not_a_file(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x", sample={"system_prompt": "Be brief. " * 40})
    assert go(path, tools)[0] == ALL
    assert go(path, tools)[0] == ["sample", "label"]


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


def test_a_proxy_that_the_plan_names_is_an_input(tmp_path, models, tools) -> None:
    other = tmp_path / "other proxy"
    other.mkdir()
    (other / "reward_spec.json").write_text("1")
    path = write_plan(tmp_path, models, "http://x", match={"proxies": [f"other={other}"]})
    go(path, tools)
    assert "match" not in go(path, tools)[0]
    (other / "reward_spec.json").write_text("2")
    assert "match" in go(path, tools)[0]


def test_proxies_of_other_projects_are_inputs_by_their_files_and_their_commit(
    tmp_path, models, tools, monkeypatch
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text('{"architectures": ["XForSequenceClassification"]}')
    commits = ["a"]
    monkeypatch.setattr(stages, "pinned_name", lambda name, flag: f"{name}@{commits[0]}")
    path = write_plan(tmp_path, models, "http://x", match={"proxies": [f"plain={plain}", "hub=their/model"]}, curve={})
    go(path, tools)
    assert "match" not in go(path, tools)[0]
    (plain / "model.safetensors").write_text("2")
    assert "match" in go(path, tools)[0]
    assert "match" not in go(path, tools)[0]
    commits[0] = "b"
    assert "match" in go(path, tools)[0]


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
