"""Viewers get what metrics.jsonl has, by step; one that fails is dropped and the run goes on; one that is not installed
stops it before anything is read.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import inspect
import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import runs
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.monitoring import sinks
from rewardlab.training.monitoring.sinks import HEADLINE, choose_viewers, open_sinks, scalars, tag
from rewardlab.training.run import train

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=4, log_every=2, eval_every=2, baselines=False)


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> tag -> value, of metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row.pop("step"): scalars(row) for row in rows}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that hides packages."""
    own = importlib.util.find_spec

    def hide(*packages: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in packages else own(name, *a))

    return hide


# --- TensorBoard -----------------------------------------------------------------------------------------------


@pytest.fixture
def event_files() -> Any:
    """Reads the event files of a folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> Any:
        found = EventAccumulator(str(folder))
        found.Reload()
        return found

    return read


def test_a_full_disk_ends_the_thread_of_tensorboard_without_a_traceback(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    (viewer,) = open_sinks(("tensorboard",), tmp_path, {})
    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        any(viewer.row(step, {"lr": 0.1}) for step in range(1, 100))
    assert told == []
    other = threading.Thread(target=full)
    other.start()
    other.join()
    assert [str(one.exc_value) for one in told] == ["[Errno 28] No space left on device"]


@pytest.mark.slow
def test_tensorboard_gets_every_value_by_step_and_the_settings(base_model, pairs_file, tmp_path, event_files):
    train(config_for(base_model, pairs_file, tmp_path / "run", report_to=("auto",)))
    settings = json.loads((tmp_path / "run/config.json").read_text())
    assert settings["report_to"] == ["auto"], "a run repeated where there is no TensorBoard is the same run"
    found = event_files(tmp_path / "run/tensorboard")
    written: dict[int, dict[str, float]] = {}
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            written.setdefault(event.step, {})[name] = event.value
    wanted = rows_of(tmp_path / "run")
    assert set(wanted[4]) >= {"eval/loss", "train/loss", "run/lr", "run/grad_norm", "eval/score_std"}
    assert set(written) == set(wanted) == {0, 2, 4}
    for step, values in wanted.items():
        assert written[step] == pytest.approx(values, rel=1e-6), "event files hold float32"
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| batch_size | {settings['batch_size']} |" in text
    parameters = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    start = HParamsPluginData.FromString(parameters).session_start_info.hparams
    assert start["batch_size"].number_value == 8
    assert start["attention"].string_value == "shared"
    names = HParamsPluginData.FromString(found.SummaryMetadata("_hparams_/experiment").plugin_data.content)
    assert [info.name.tag for info in names.experiment.metric_infos] == [tag(column) for column in HEADLINE]
    assert list((tmp_path / "run/tensorboard").iterdir()) == [
        path for path in (tmp_path / "run/tensorboard").iterdir() if path.is_file()
    ], "one run, not one more for the settings"


@pytest.mark.slow
def test_a_resumed_run_shows_every_step_once(base_model, pairs_file, tmp_path, event_files, monkeypatch):
    config = config_for(
        base_model, pairs_file, tmp_path / "run", steps=6, log_every=1, checkpoint_every=2, report_to=("auto",)
    )
    with monkeypatch.context() as patched:
        train_step = Trainer.train_step

        def fails(trainer, batches):
            if trainer.step == 3:
                raise MemoryError("killed")
            return train_step(trainer, batches)

        patched.setattr(Trainer, "train_step", fails)
        with pytest.raises(MemoryError):
            train(config)
    assert 3 in {event.step for event in event_files(tmp_path / "run/tensorboard").Scalars("train/loss")}
    # TensorBoard reads files in the order of their names: the second, then the process, then a counter as text, so that
    # 10 comes before 9. A real run resumes in another process, and never in the same second.
    time.sleep(1)
    train(config.replace(resume="auto"))
    found = event_files(tmp_path / "run/tensorboard").Scalars("train/loss")
    assert [event.step for event in found] == [1, 2, 3, 4, 5, 6]


def test_without_tensorboard_a_run_has_no_viewer_and_one_line_says_so(without, log):
    assert choose_viewers(("auto",)) == (("tensorboard",) if importlib.util.find_spec("tensorboard") else ("none",))
    without("tensorboard")
    log.clear()
    assert choose_viewers(("auto",)) == ("none",)
    (line,) = log.messages
    assert "pip install tensorboard" in line
    assert choose_viewers(("wandb", "mlflow")) == ("wandb", "mlflow")


@pytest.mark.parametrize("viewer", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_viewer_that_is_not_installed_is_refused_before_anything_is_read(tmp_path, without, viewer):
    without(viewer)
    config = config_for("nowhere", "no.jsonl", tmp_path / "run", report_to=(viewer,))
    with pytest.raises(ConfigError, match=f"--report-to {viewer}: .*`pip install {viewer}`"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_names_are_grouped_and_what_is_no_number_is_left_out():
    columns = ("train_eval_accuracy_low", "train_loss", "eval_accuracy", "gap_loss", "lr", "mfu")
    assert [tag(name) for name in columns] == [
        *("train_eval/accuracy_low", "train/loss", "eval/accuracy", "gap/loss", "run/lr", "run/mfu"),
    ]
    assert scalars({"lr": 1, "mfu": float("nan"), "eval_accuracy": None}) == {"run/lr": 1.0}


# --- services, by fakes with the signatures of the packages ------------------------------------------------------


class Fakes:
    """wandb 0.31, trackio 0.43 and mlflow 3.17 as far as they are called, and what they were told."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[str, Any]]] = {"wandb": [], "trackio": [], "mlflow": []}
        self.fail_at: dict[str, int] = {}

    def note(self, package: str, what: str, value: Any) -> None:
        """Remember a call; fail if it is the planted one."""
        self.told[package].append((what, value))
        if len(self.rows(package)) == self.fail_at.get(package):
            raise ConnectionError(f"{package} is not there\nand more")

    def rows(self, package: str) -> list[tuple[int, dict[str, float]]]:
        """(step, values) of every row."""
        return [value for what, value in self.told[package] if what == "log"]

    def merged(self, package: str) -> dict[int, dict[str, float]]:
        """Step -> all values of it."""
        steps: dict[int, dict[str, float]] = {}
        for step, values in self.rows(package):
            steps.setdefault(step, {}).update(values)
        return steps


def wandb_of(fakes: Fakes) -> dict[str, Any]:
    """wandb.login, wandb.init and the Run that it returns."""

    class Run:
        def log(self, data, step=None, commit=None):
            fakes.note("wandb", "log", (step, data))

        def finish(self, exit_code=None):
            fakes.note("wandb", "finish", exit_code)

    def init(
        entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
        config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None, mode=None,
        force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None, tensorboard=None,
        sync_tensorboard=None, monitor_gym=None, settings=None, anonymous=None,
    ):  # fmt: skip
        fakes.note("wandb", "init", (project, name, config))
        return Run()

    def login(
        key=None, relogin=None, host=None, force=None, timeout=None, verify=True, referrer=None, prompt=True,
        anonymous=None,
    ):  # fmt: skip
        fakes.note("wandb", "login", None)
        return True

    return {"init": init, "login": login, "Run": Run}


def trackio_of(fakes: Fakes) -> dict[str, Any]:
    """trackio.init and the Run that it returns."""

    class Run:
        def log(self, metrics, step=None):
            fakes.note("trackio", "log", (step, metrics))

        def finish(self):
            fakes.note("trackio", "finish", None)

    def init(
        project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
        resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
        auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None,
    ):  # fmt: skip
        fakes.note("trackio", "init", (project, name, config))
        return Run()

    return {"init": init, "Run": Run}


def mlflow_of(fakes: Fakes) -> dict[str, Any]:
    """The fluent functions of mlflow."""

    def set_experiment(experiment_name=None, experiment_id=None, trace_location=None):
        fakes.note("mlflow", "experiment", experiment_name)

    def start_run(
        run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None, description=None,
        log_system_metrics=None,
    ):  # fmt: skip
        fakes.note("mlflow", "start", run_name)

    def log_params(params, synchronous=None, run_id=None):
        assert len(params) <= 100
        fakes.note("mlflow", "params", params)

    def log_metrics(
        metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None
    ):  # fmt: skip
        fakes.note("mlflow", "log", (step, metrics))

    def end_run(status="FINISHED"):
        fakes.note("mlflow", "finish", status)

    found = (set_experiment, start_run, log_params, log_metrics, end_run)
    return {function.__name__: function for function in found}


MAKE = {"wandb": wandb_of, "trackio": trackio_of, "mlflow": mlflow_of}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """The three packages as they would be imported."""
    found = Fakes()
    for name, make in MAKE.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(make(found))
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(variable, raising=False)
    return found


ALL = ("wandb", "trackio", "mlflow")


@pytest.mark.slow
def test_services_get_every_value_by_step_the_settings_and_the_end(base_model, pairs_file, tmp_path, fakes):
    train(config_for(base_model, pairs_file, tmp_path / "run", report_to=ALL))
    wanted, settings = rows_of(tmp_path / "run"), json.loads((tmp_path / "run/config.json").read_text())
    assert settings["report_to"] == list(ALL)
    for package in ALL:
        assert fakes.merged(package) == wanted, package
        steps = [step for step, _ in fakes.rows(package)]
        assert steps == sorted(steps), "wandb refuses a step behind the last"
    assert fakes.told["wandb"][:2] == [("login", None), ("init", ("rewardlab", "run", settings))]
    assert fakes.told["trackio"][0] == ("init", ("rewardlab", "run", settings))
    assert fakes.told["mlflow"][:2] == [("experiment", "rewardlab"), ("start", "run")]
    parameters = {k: v for what, part in fakes.told["mlflow"] if what == "params" for k, v in part.items()}
    assert (parameters["batch_size"], parameters["report_to"]) == (8, "wandb trackio mlflow")
    assert [fakes.told[package][-1] for package in ALL] == [("finish", 0), ("finish", None), ("finish", "FINISHED")]
    assert not (tmp_path / "run/tensorboard").exists()


def test_environment_variables_name_project_and_experiment(monkeypatch, tmp_path, fakes):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    sinks.open_sinks(("wandb", "mlflow"), tmp_path, {})
    assert fakes.told["wandb"][0][1][0] == "mine"
    assert [what for what, _ in fakes.told["mlflow"]] == ["start"]
    sinks.require_viewers(("mlflow",))
    assert fakes.told["mlflow"][-1] == ("experiment", "mine")


@pytest.mark.parametrize(("package", "call"), [("wandb", "login"), ("mlflow", "set_experiment")])
def test_a_service_that_lets_nobody_in_is_an_error_before_there_is_a_folder(
    package, call, base_model, pairs_file, tmp_path, fakes, monkeypatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no API key configured\nlog in")

    monkeypatch.setattr(sys.modules[package], call, refuse)
    with pytest.raises(ConfigError, match=rf"--report-to {package}: cannot be started \(PermissionError: no API key"):
        train(config_for(base_model, pairs_file, tmp_path / "run", report_to=(package,)))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_service_that_fails_on_the_way_is_dropped_with_one_warning_and_the_run_goes_on(
    base_model, pairs_file, tmp_path, fakes, caplog
):
    fakes.fail_at = {"wandb": 2}
    result = train(config_for(base_model, pairs_file, tmp_path / "run", report_to=ALL))
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert line.startswith("wandb failed (ConnectionError: wandb is not there) and is left out from here on")
    assert len(fakes.rows("wandb")) == 2
    assert ("finish", 0) not in fakes.told["wandb"], "not called again at all"
    assert fakes.merged("trackio") == fakes.merged("mlflow") == rows_of(tmp_path / "run")
    assert result.last.exists()


@pytest.mark.slow
def test_a_run_that_ends_with_an_error_is_told_to_those_who_mark_it(
    base_model, pairs_file, tmp_path, fakes, monkeypatch
):
    from rewardlab.training.loop.reward_judge import RewardJudge

    monkeypatch.setattr(RewardJudge, "save", lambda judge, step: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        train(config_for(base_model, pairs_file, tmp_path / "run", report_to=ALL))
    assert [fakes.told[package][-1] for package in ALL] == [("finish", 1), ("finish", None), ("finish", "FAILED")]


def test_a_service_that_cannot_be_started_is_an_error_and_those_before_it_are_closed(tmp_path, fakes, monkeypatch):
    def refuse(**settings: Any) -> None:
        raise PermissionError("no API key configured\nlog in")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match=r"--report-to wandb: cannot be started \(PermissionError: no API key conf"):
        sinks.open_sinks(("trackio", "wandb"), tmp_path, {})
    assert fakes.told["trackio"][-1][0] == "finish"


def test_a_full_disk_is_no_fault_of_the_viewer(tmp_path, fakes, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "tensorboard/events")

    monkeypatch.setitem(sinks.OPEN, "tensorboard", full)
    with pytest.raises(OSError, match="No space left on device: 'tensorboard/events'"):
        sinks.open_sinks(("trackio", "tensorboard"), tmp_path, {})
    assert fakes.told["trackio"][-1][0] == "finish"


@pytest.mark.parametrize("package", ALL)
def test_the_fakes_take_what_the_packages_take(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    real = importlib.import_module(package)
    for name, fake in MAKE[package](Fakes()).items():
        pairs = [(fake, getattr(real, name))]
        if inspect.isclass(fake):
            pairs = [(getattr(fake, part), getattr(getattr(real, name), part)) for part in ("log", "finish")]
        for ours, theirs in pairs:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_settings_become_what_viewers_take():
    config = runs.config_for(Path("m"), Path("d.jsonl"), Path("out"), lora_target_modules=("q", "v"))
    plain = sinks._plain(to_mapping(config))
    assert (plain["lora_target_modules"], plain["output_dir"], plain["batch_size"]) == ("q v", "out", 8)
    assert "eval_every" not in plain, "nothing is set"
