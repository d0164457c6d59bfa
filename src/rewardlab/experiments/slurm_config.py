"""What the section `slurm` of a plan may say: what a job asks for, and what it needs before it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.config import from_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import brief
from rewardlab.core.values import did_you_mean

TIME: Final = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")
"""What Slurm takes for a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
MEMORY: Final = re.compile(r"\d+[KMGT]?")
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPTION: Final = re.compile(r"[a-z][a-z0-9]+(-[a-z0-9]+)*")
SHELL: Final = re.compile(r"^~|\$[A-Za-z_{(]")
"""Text that a shell would replace."""
SECRET: Final = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_?KEY)", re.IGNORECASE
)
"""Names of variables that hold what nobody else may know."""
SET: Final = re.compile(r"""(?:^|[\s;])([A-Za-z_]\w*)=["']?([^\s"';]+)""")
"""A variable that a line of bash sets, and its value."""
SHORTEST_SECRET: Final = 8
"""Characters; shorter values are switches, such as 1 or false."""
PLACES: Final = ("venv", "python", "container", "mounts", "log_folder")
"""Keys that name files and folders."""
MEMORIES: Final = ("mem-per-cpu", "mem-per-gpu")
"""Options of sbatch that stand in place of `mem`."""
MAPPINGS: Final = ("environment", "extra")
DECIDED: Final = frozenset(
    (
        *("array", "chdir", "dependency", "error", "hold", "ignore-pbs", "input", "kill-on-invalid-dep", "no-requeue"),
        *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "quiet", "requeue", "signal", "test-only"),
        *("uid", "wait", "wrap"),
    )
)
"""Options of sbatch that decide whether a study works, so `extra` may not say them."""
MOST_SIGNAL_S: Final = 65_535
"""Most seconds that Slurm takes."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The section `slurm` of a plan. Text goes into scripts quoted; none of it may hold a line break."""

    partition: str | None = None
    """Partition of the runs; the cluster's default if not given."""
    light_partition: str | None = None
    """Partition of gates and the report, which need no GPU; that of the runs if not given."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    light_qos: str | None = None
    """That of gates and the report; by default `qos`, and none where they have a partition of their own."""
    time: str = "04:00:00"
    """Time limit of a job. A run that needs more goes on in the same job, queued again."""
    nodes: int = 1
    """Nodes of a run."""
    gpus_per_node: int = 1
    """GPUs of a run on each node, with a process each; with 0 one process a node."""
    gpu_type: str | None = None
    """Kind of GPU, such as `a100`."""
    cpus_per_task: int = 8
    """Processor cores of each process."""
    mem: str | None = None
    """Memory of a node, such as `64G`; the cluster's default if not given."""
    constraint: str | None = None
    """Features that nodes must have."""
    array_limit: int | None = None
    """Most runs at a time."""
    signal_s: int = 90
    """Seconds before the time limit when runs are told to save a checkpoint and end. Slurm may be a minute early."""
    max_restarts: int = 20
    """How often a run is queued again; those of failed nodes count too."""
    job_name: str | None = None
    """What the names of jobs begin with; the folder of the study if not given."""
    log_folder: str | None = None
    """Folder of what jobs print; `slurm/logs` in the study if not given."""
    modules: tuple[str, ...] = ()
    """Environment modules that are loaded."""
    venv: str | None = None
    """Folder of a virtual environment that is activated."""
    python: str | None = None
    """Interpreter; that of the virtual environment or container, or else the one that submits, if not given."""
    container: str | None = None
    """Image in which `python` has rewardlab: a file for Apptainer, a file or registry name for Pyxis."""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """What runs the container."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees, besides the study and the working folder: `/data` or `/data:/inside`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    setup: tuple[str, ...] = ()
    """Lines of bash before the run. One that fails ends the job."""
    extra: Mapping[str, str | None] = field(default_factory=dict)
    """Other options of sbatch by their long names, such as `reservation: mine`; None stands for one without a value."""

    def __post_init__(self) -> None:
        _require_lines(self)
        _require_times(self)
        for name, least in {"nodes": 1, "gpus_per_node": 0, "cpus_per_task": 1, "max_restarts": 0}.items():
            _require(getattr(self, name) >= least, name, f"wanted at least {least}, got {getattr(self, name)}")
        _require(self.array_limit is None or self.array_limit >= 1, "array_limit", "wanted at least 1, or leave it out")
        _require(self.mem is None or MEMORY.fullmatch(self.mem), "mem", f"wanted such as 64G, got {brief(self.mem)}")
        _require(not (self.container and self.venv), "venv", "is not seen inside the container. Keep one of them")
        _require(self.container or not self.mounts, "mounts", "they belong to a container, and none is named")
        for name, text in _places(self):
            _require(not text.startswith("~"), name, f"{brief(text)}: jobs do not replace ~. Write {_at_home(text)}")
        _require(self.gpus_per_node or not self.gpu_type, "gpu_type", "there are no GPUs. Leave it out")

    @property
    def processes_per_node(self) -> int:
        """One a GPU; one without GPUs."""
        return max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        """Processes of a run."""
        return self.nodes * self.processes_per_node


def slurm_config(values: Mapping[str, Any]) -> SlurmConfig:
    """Return what the section `slurm` of a plan says. Raises ConfigError, naming the key, for what it may not say."""
    known = [one.name for one in fields(SlurmConfig)]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"slurm: unknown key {brief(key)}.{did_you_mean(str(key), known)}")
        if key in TEXTS and isinstance(value, int | float):
            # YAML reads 12:00:00 without quotes as 43,200.
            raise ConfigError(f"slurm: {key}: {brief(value)} was read as a number. Put it into quotes.")
    plain = {key: value for key, value in values.items() if key not in MAPPINGS and value is not None}
    try:
        made = from_mapping(SlurmConfig, plain, where="slurm")
    except _SlurmError as error:
        raise ConfigError(f"slurm: {error}") from None
    extra = _extra(values.get("extra"), "slurm: extra", known)
    said = [*(["mem"] if made.mem is not None else []), *(name for name in MEMORIES if name in extra)]
    if len(said) > 1:
        raise ConfigError(f"slurm: extra: {said[1]}: sbatch takes one of {' and '.join(said)}. Keep one.")
    return replace(made, environment=_environment(values.get("environment"), "slurm: environment"), extra=extra)


def literal_values(config: SlurmConfig) -> list[str]:
    """Return a warning for each value that jobs take as it is, though a shell would replace parts of it."""
    said = [*((f"environment: {name}", text) for name, text in config.environment.items()), *_places(config)]
    return [
        f"slurm: {name}: {brief(text)}: jobs take it as it is: neither ~ nor variables are replaced. Write the whole "
        f"value, or export it in a line of `setup`."
        for name, text in said
        if SHELL.search(text)
    ]


def secrets_in(config: SlurmConfig) -> list[str]:
    """Return a warning for each variable whose value seems to be a secret, since many see what stands in a plan."""
    said = [("environment", name, text) for name, text in config.environment.items()]
    said += [("setup", name, text) for line in config.setup for name, text in SET.findall(line)]
    return [
        f"slurm: {where}: {name}: its value seems to be a secret, and what stands in a plan stands in the report of "
        f"the study, its scripts and its archive. Export it before `plan submit`, or read it from a file in `setup`."
        for where, name, text in said
        if SECRET.fullmatch(name) and len(text) >= SHORTEST_SECRET and text[0] not in "/~$`"
    ]


def _places(config: SlurmConfig) -> list[tuple[str, str]]:
    """Return (key, text) of the files and folders that are named."""
    values = {name: getattr(config, name) for name in PLACES}
    several = [(name, text) for name, value in values.items() if isinstance(value, tuple) for text in value]
    return [*((name, value) for name, value in values.items() if isinstance(value, str)), *several]


TEXTS: Final = frozenset(one.name for one in fields(SlurmConfig) if str(one.type).startswith("str"))


class _SlurmError(ConfigError):
    """A value that cannot be used; the message begins with its key."""


def _require(condition: object, key: str, message: str) -> None:
    if not condition:
        raise _SlurmError(f"{key}: {message}.")


def _require_lines(config: SlurmConfig) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        for text in value if isinstance(value, tuple) else [value]:
            if isinstance(text, str):
                _require(text.strip(), one.name, "is empty. Leave it out")
                _require(is_one_line(text), one.name, f"{brief(text)} holds a line break or another control character")


def _at_home(text: str) -> str:
    """Return a path with the home folder in place of a leading `~`."""
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        return "the whole path"


def _require_times(config: SlurmConfig) -> None:
    seconds = seconds_of(config.time)
    _require(seconds, "time", f'wanted such as "04:00:00" or "2-00:00:00" (days-hours), got {brief(config.time)}')
    top = min(seconds - 1, MOST_SIGNAL_S)
    _require(
        1 <= config.signal_s <= top,
        "signal_s",
        f"wanted 1 to {top:,} seconds, within the time limit of {config.time}, got {config.signal_s}",
    )


def is_one_line(text: str) -> bool:
    """Return whether a text has no line break and no other control character, and can be written as UTF-8."""
    return not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 or letter in "\u2028\u2029" for letter in text) and (
        text == text.encode("utf-8", "ignore").decode("utf-8")
    )


def seconds_of(time: str) -> int:
    """Return the seconds of a time in one of Slurm's forms; 0 for any other text."""
    found = TIME.fullmatch(time)
    if found is None:
        return 0
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        return 86_400 * days + 3_600 * (first or 0) + 60 * (second or 0) + (third or 0)
    if third is not None:
        return 3_600 * (first or 0) + 60 * (second or 0) + third
    return 60 * (first or 0) + (second or 0)


def _pairs(given: object, where: str) -> dict[str, str | int | float | bool | None]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: wanted `name: value` lines, got {brief(given)}.")
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where}: {brief(name)} was not read as a text. Put the name into quotes.")
        if value is not None and not isinstance(value, str | int | float):
            raise ConfigError(f"{where}: {brief(name)}: wanted a text or number, got {brief(value)}.")
        if isinstance(value, str) and not is_one_line(value):
            raise ConfigError(
                f"{where}: {brief(name)}: {brief(value)} holds a line break or another control character."
            )
    return dict(given)


def _environment(given: object, where: str) -> dict[str, str]:
    found = {}
    for name, value in _pairs(given, where).items():
        if not VARIABLE.fullmatch(name):
            raise ConfigError(f"{where}: {brief(name)} is not a name of a variable: letters, digits and _.")
        if value is None or isinstance(value, bool):
            raise ConfigError(f"{where}: {name}: {brief(value)} may be meant as text. Put it into quotes.")
        found[name] = str(value)
    return found


def _extra(given: object, where: str, keys: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, value in _pairs(given, where).items():
        option = name.removeprefix("--")
        if not OPTION.fullmatch(option):
            raise ConfigError(f"{where}: {brief(name)} is not a long name of an option of sbatch, such as reservation.")
        if option in DECIDED:
            raise ConfigError(f"{where}: {option} is decided by rewardlab. Leave it out.")
        if option == "clusters":
            raise ConfigError(f"{where}: clusters: jobs of another cluster cannot be followed from here. Submit there.")
        if (key := option.replace("-", "_")) in keys:
            raise ConfigError(f"{where}: {option} has a key of its own. Write `{key}: …` in {where.split(':')[0]}.")
        if value is False:
            raise ConfigError(f"{where}: {option}: leave it out, rather than false.")
        found[option] = None if value is None or value is True else str(value)
    return found
