"""Batch scripts of a study: an array of runs a phase, and small jobs for gates and the report.

A script holds everything that its job needs, the names of the runs too: Slurm keeps a copy of it from the moment of
submission, so nothing that is written later changes what a queued job does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.signals import RESUME_LATER
from rewardlab.core.terminal import brief
from rewardlab.experiments.slurm_config import SlurmConfig, is_one_line

MOST_TASKS: Final = 1000
"""Runs of one array: Slurm's own default (MaxArraySize 1001) allows no more."""
LIGHT_TIME: Final = "00:30:00"
"""Time limit of a gate or a report."""
LIGHT_OPTIONS: Final = frozenset(("comment", "mail-type", "mail-user", "nice", "reservation", "wckey"))
"""Options of `extra` that gates and reports get too: those that say who asks and where, not for what devices. A
reservation belongs to the runs' partition, so a `light_partition` goes without it."""
UNHEARD: Final = 128 + 12
"""Exit status of a process that SIGUSR2 ended, which is number 12 on Linux: one that had not begun to listen."""
PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=@%,+-]+")
"""Text that needs no quotes in an option of sbatch."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where jobs work."""

    study: Path
    """Folder of the study, absolute."""
    work: Path
    """Folder in which jobs start, absolute: names of data in the plan may be relative to it."""
    python: str = "python"
    """Interpreter that the jobs take unless the plan names another, a virtual environment or a container."""
    reads: tuple[Path, ...] = ()
    """Folders that runs read, absolute."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a path that cannot stand in a batch script."""
        for path in (self.study, self.work):
            if not is_one_line(str(path)) or "\\" in str(path):
                raise ConfigError(f"{brief(str(path))}: Slurm cannot use a path with a backslash or line break.")


def array_script(config: SlurmConfig, place: Place, *, name: str, phase: str, runs: Sequence[str]) -> str:
    """Return the batch script of an array with a task for each of the runs, in this order."""
    assert 0 < len(runs) <= MOST_TASKS
    assert not any("'" in run for run in runs), "names of arms hold no quotes"
    limit = "" if config.array_limit is None else f"%{config.array_limit}"
    options = [
        *_who(config, name, config.partition, config.qos),
        _option("array", f"0-{len(runs) - 1}{limit}"),
        _option("nodes", config.nodes),
        _option("ntasks-per-node", config.processes_per_node),
        *_devices(config),
        _option("cpus-per-task", config.cpus_per_task),
        *([] if config.mem is None else [_option("mem", config.mem)]),
        *([] if config.constraint is None else [_option("constraint", config.constraint)]),
        _option("time", config.time),
        _option("signal", f"USR2@{config.signal_s}"),
        _option("requeue", None),
        *_where(config, place, f"{name}-%A_%a.log"),
        *(_option(option, value) for option, value in config.extra.items()),
    ]
    says = f"# Runs of the phase {phase}, one array task a run. Written by `rewardlab plan submit`."
    names = ["runs=(", *(f"    '{run}'" for run in runs), ")"]
    return _script(
        [says, *options],
        _setup(config),
        [
            *names,
            "run=${runs[${SLURM_ARRAY_TASK_ID:?This is a script for sbatch}]}",
            *_processes(config),
            "",
            f"# {config.signal_s} seconds before the time limit Slurm sends USR2 to what srun started, and not to this "
            "script (that would take `B:`),",
            f"# so srun needs no background and no trap. The run then saves a checkpoint and ends with {RESUME_LATER}.",
            *(
                ["# shellcheck disable=SC2016  # the variables are those of each process"]
                if config.processes > 1
                else []
            ),
            _srun(config, place, ["plan", "task", str(place.study), "--run"], '"$run"'),
            "status=$?",
            f"# {UNHEARD}: USR2 came before Python could hear it.",
            f'[ "$status" -ne {UNHEARD} ] || status={RESUME_LATER}',
            "",
            f'if [ "$status" -ne {RESUME_LATER} ]; then',
            '    exit "$status"',
            "fi",
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {config.max_restarts} ]; then',
            f'    echo "$run: has work left after {config.max_restarts} restarts (slurm.max_restarts); '
            'submit the study again to go on" >&2',
            '    exit "$status"',
            "fi",
            'echo "$run: queued again, to go on from its checkpoint"',
            "# Not SLURM_JOB_ID: that of an array's last task is the number of the whole array.",
            'exec scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        ],
    )


def light_script(config: SlurmConfig, place: Place, *, name: str, says: str, words: Sequence[str]) -> str:
    """Return the batch script of a small job that runs `rewardlab` with these words and has its exit status."""
    partition = config.light_partition or config.partition
    # What a cluster allows on the partition of the runs, it may refuse on another one.
    qos = config.light_qos or (None if config.light_partition is not None else config.qos)
    allowed = LIGHT_OPTIONS - {"reservation"} if config.light_partition is not None else LIGHT_OPTIONS
    options = [
        *_who(config, name, partition, qos),
        _option("ntasks", 1),
        _option("cpus-per-task", 2),
        _option("time", LIGHT_TIME),
        _option("requeue", None),
        *_where(config, place, f"{name}-%j.log"),
        *(_option(option, value) for option, value in config.extra.items() if option in allowed),
    ]
    return _script(
        [f"# {says} Written by `rewardlab plan submit`.", *options],
        _setup(config),
        [*_passed_on(), "", _srun(config, place, words, "", light=True)],
    )


def directive(text: str) -> str:
    """Return a text as an option of sbatch may hold it: in quotes where it needs some.

    sbatch splits `#SBATCH` lines itself: a backslash escapes any letter, in quotes of either kind too, and `#` outside
    of quotes begins a comment (`get_argument` in Slurm's `sbatch/opt.c`).
    """
    if PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def options_of(script: str) -> frozenset[str]:
    """Return the long names of the options that a batch script gives sbatch."""
    return frozenset(re.findall(r"^#SBATCH --([a-z0-9-]+)", script, flags=re.MULTILINE))


def _option(name: str, value: str | int | None) -> str:
    return f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={directive(str(value))}"


def _who(config: SlurmConfig, name: str, partition: str | None, qos: str | None) -> list[str]:
    said = {"partition": partition, "account": config.account, "qos": qos}
    options = [_option(option, value) for option, value in said.items() if value is not None]
    return [_option("job-name", job_name(config, name)), *options]


def job_name(config: SlurmConfig, name: str) -> str:
    """Return the name of a job in the queue."""
    return name if config.job_name is None else f"{config.job_name}-{name}"


def _where(config: SlurmConfig, place: Place, log: str) -> list[str]:
    return [
        _option("open-mode", "append"),
        _option("chdir", str(place.work)),
        # `%` begins a symbol that Slurm replaces, so those of the folder are doubled.
        _option("output", f"{str(log_folder(config, place)).replace('%', '%%')}/{log}"),
    ]


def log_folder(config: SlurmConfig, place: Place) -> Path:
    """Return where jobs write what they print. Slurm does not make this folder, and a job without it fails silently."""
    return place.study / "slurm" / "logs" if config.log_folder is None else place.work / config.log_folder


def _devices(config: SlurmConfig) -> list[str]:
    if not config.gpus_per_node or any(option.startswith(("gpus", "gres")) for option in config.extra):
        # Some clusters know GPUs by `gres` alone, which `extra` may say.
        return []
    kind = "" if config.gpu_type is None else f"{config.gpu_type}:"
    return [_option("gpus-per-node", f"{kind}{config.gpus_per_node}")]


def _setup(config: SlurmConfig) -> list[str]:
    """Return the lines before `set -u`, under which scripts of modules and environments often fail."""
    lines = [f"module load {_literal(module)} || exit" for module in config.modules]
    if config.venv is not None:
        lines += ["# shellcheck source=/dev/null", f". {_literal(config.venv + '/bin/activate')} || exit"]
    lines += [f"export {name}={_literal(value)}" for name, value in config.environment.items()]
    if config.setup:
        lines += ["set -e", *config.setup, "set +e"]
    return lines


def _words(words: Sequence[str]) -> str:
    return " ".join(_literal(word) for word in words)


def _literal(text: str) -> str:
    """Return a text for bash to take as it is, in double quotes, since single ones make shellcheck ask about `$`."""
    if shlex.quote(text) == text:
        return text
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    return f'"{escaped}"'


def _script(head: Sequence[str], setup: Sequence[str], body: Sequence[str]) -> str:
    blocks = ["\n".join(["#!/usr/bin/env bash", *head]), "\n".join(setup), "\n".join(["set -uo pipefail", "", *body])]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _passed_on() -> list[str]:
    """Return the lines that give what srun starts its share of the cores and all variables of the script."""
    return [
        "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"
        "  # srun does not inherit it",
        "export SLURM_EXPORT_ENV=ALL  # with `export: NONE`, srun would start the run without what is set here",
    ]


def _processes(config: SlurmConfig) -> list[str]:
    """Return the lines that say who is who among the processes of a run."""
    if config.processes == 1:
        return [*_passed_on(), "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE  # of the shell that submitted this"]
    return [
        *_passed_on(),
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
    ]


def _srun(config: SlurmConfig, place: Place, words: Sequence[str], last: str, *, light: bool = False) -> str:
    """Return the command that starts `rewardlab` with these words, and `last`, which bash expands."""
    many = config.processes > 1 and not light
    lines = ["srun --ntasks=1" if light else "srun --kill-on-bad-exit=0"]
    if many:
        # Ranks end at slightly different times; none is killed while another one still saves.
        lines[0] += " --wait=60"
    if config.container is not None and config.container_runtime == "pyxis":
        lines.append(_joined("--container-image", config.container))
        lines.append(_joined("--container-mounts", ",".join(_mounts(config, place, twice=True))))
        lines.append(_joined("--container-workdir", str(place.work)))
    if many:
        lines.append(
            "bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; "
            'export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES)); exec "$@"\' rewardlab'
        )
    if config.container is not None and config.container_runtime == "apptainer":
        binds = [word for mount in _mounts(config, place) for word in ("--bind", mount)]
        nvidia = ["--nv"] if config.gpus_per_node and not light else []
        lines.append(_words(["apptainer", "exec", *nvidia, *binds, "--pwd", str(place.work), config.container]))
    python = config.python or ("python" if config.venv or config.container else place.python)
    lines.append(f"{_words([python, '-P', '-m', 'rewardlab', *words])} {last}".rstrip())
    return " \\\n    ".join(lines)


def _joined(option: str, value: str) -> str:
    return f"{option}={_literal(value)}"


def _mounts(config: SlurmConfig, place: Place, *, twice: bool = False) -> list[str]:
    """Return the folders that a container sees; `twice` names each on both sides, as Pyxis wants it."""
    named = [Path((mount.split(":") * 2)[1]) for mount in config.mounts]
    seen = [*named, place.work, place.study]
    reads = [path for path in place.reads if not any(path.is_relative_to(other) for other in seen)]
    needed = [place.work, place.study, *reads]
    own = [str(path) for path in needed if not any(path.is_relative_to(other) for other in needed if other != path)]
    for folder in own:
        if ":" in folder or "," in folder:
            raise ConfigError(f"{brief(folder)}: a container cannot be given a path with a colon or comma.")
    folders = dict.fromkeys([*own, *config.mounts])
    return [f"{folder}:{folder}" if twice and ":" not in folder else folder for folder in folders]
