"""A stand-in for Slurm on one machine: `sbatch` does a job at once, and its tasks one after the other.

`FakeSlurm(folder)` writes the programs into a folder for PATH; each is this file under another name. It does what the
batch scripts rely on: options from `#SBATCH` lines by Slurm's own rules for quotes, a copy of the script, dependencies,
numbers of jobs as arrays have them, one process for each rank, `scontrol requeue`, and jobs queued again when a node
fails.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "srun", "scontrol", "squeue", "sacct", "scancel")
NODE_FAILED = 200
"""Exit status of a process that stands for the failure of its node."""

SHORTCUTS = {
    # One process needs no Python to start it.
    "srun": 'if [ "$SLURM_NTASKS" = 1 ]; then while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"; fi\n'
}


class FakeSlurm:
    """The queue of a test."""

    def __init__(self, folder: Path, *, programs: Sequence[str] = PROGRAMS) -> None:
        self.state = folder / "state"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.state.mkdir()
        for name in programs:
            path = self.bin / name
            starts = f"exec {sys.executable} -S {Path(__file__).resolve()} {name} {self.state}"
            path.write_text(f'#!/usr/bin/env bash\n{SHORTCUTS.get(name, "")}{starts} "$@"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """Number -> job, as submitted."""
        return read(self.state)

    def tasks(self, name: str) -> dict[str, dict[str, Any]]:
        """Index -> task, of the newest job of that name."""
        return next(job for job in reversed(self.jobs.values()) if job["name"] == name)["tasks"]

    def hold(self) -> None:
        """Let jobs wait from now on."""
        (self.state / "hold").touch()

    def refuse(self, name: str) -> None:
        """Refuse jobs whose script has this name."""
        (self.state / f"refuse-{name}").touch()

    def answer(self, program: str, text: str, *, status: int = 0, error: str = "") -> None:
        """Let squeue or sacct answer this."""
        (self.state / f"{program}.json").write_text(json.dumps({"text": text, "status": status, "error": error}))

    def asked(self, program: str) -> list[list[str]]:
        """The words with which a program was called."""
        path = self.state / f"{program}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read(state: Path) -> dict[str, dict[str, Any]]:
    path = state / "jobs.json"
    return json.loads(path.read_text()) if path.exists() else {}


def arguments_of(line: str) -> list[str]:
    """Split what follows `#SBATCH`, as `get_argument` of Slurm's src/sbatch/opt.c does."""
    found: list[str] = []
    word: str | None = None
    quote, escaped = "", False
    for letter in line:
        if escaped:
            word, escaped = (word or "") + letter, False
        elif letter == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if letter == quote else (quote, (word or "") + letter)
        elif letter in "\"'":
            quote, word = letter, word or ""
        elif letter == "#":
            break
        elif letter.isspace():
            found += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + letter
    assert not quote, f"unterminated quote: {line}"
    return found + ([] if word is None else [word])


def options_in(script: str) -> dict[str, str]:
    """Option -> value, of the lines before the first command."""
    found = {}
    for line in script.splitlines()[1:]:
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            for word in arguments_of(line.removeprefix("#SBATCH")):
                name, _, value = word.removeprefix("--").partition("=")
                found[name] = value
    return found


def log_path(pattern: str, symbols: dict[str, str]) -> Path:
    return Path(re.sub(r"%(.)", lambda found: symbols[found[1]], pattern))


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")


# --- the programs --------------------------------------------------------------------------------------------------


def sbatch(state: Path, words: list[str]) -> int:
    given = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    path = Path(next(word for word in words if not word.startswith("--")))
    if (state / f"refuse-{path.name}").exists():
        sys.stderr.write("sbatch: error: Batch job submission failed: Invalid account\n")
        return 1
    script = path.read_text()
    options = options_in(script)
    jobs = read(state)
    number = 100 * (len(jobs) + 1)
    copy = state / f"{number}.sbatch"
    copy.write_text(script)
    array = options.get("array")
    indices = [] if array is None else range(int(array.partition("%")[0].partition("-")[2]) + 1)
    names = [str(index) for index in indices] if array is not None else [""]
    before = [one.split(":") for one in given.get("dependency", "").split(",") if one]
    job: dict[str, Any] = {"name": options["job-name"], "dependency": before}
    job |= {"options": options, "tasks": {name: {"state": "PENDING", "status": None, "restarts": 0} for name in names}}
    jobs[str(number)] = job
    (state / "jobs.json").write_text(json.dumps(jobs))
    if not (state / "hold").exists():
        ended = [(kind, task) for kind, *ids in before for one in ids for task in jobs[one]["tasks"].values()]
        may_run = all(kind == "afterany" or task["status"] == 0 for kind, task in ended)
        for name in names:
            job["tasks"][name] = (
                do(state, number, copy, options, name, names)
                if may_run
                else {"state": "CANCELLED", "status": None, "restarts": 0}
            )
        (state / "jobs.json").write_text(json.dumps(jobs))
    say(f"{number};here" if (state / "clusters").exists() else number)
    return 0


def do(state: Path, number: int, copy: Path, options: dict[str, str], index: str, names: list[str]) -> dict[str, Any]:
    # The last task of an array has the number of the whole array.
    own = number if index == names[-1] else number + 1 + int(index)
    symbols = {"A": str(number), "a": index, "j": str(own), "%": "%"}
    log = log_path(options["output"], symbols)
    if not log.parent.is_dir():
        return {"state": "FAILED", "status": 53, "restarts": 0}
    processes = int(options.get("nodes", "1")) * int(options.get("ntasks-per-node", options.get("ntasks", "1")))
    slurm = {
        "SLURM_JOB_ID": str(own),
        "SLURM_NTASKS": str(processes),
        "SLURM_JOB_NUM_NODES": options.get("nodes", "1"),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
    }
    if index:
        slurm |= {"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": index}
    for restarts in range(100):
        again = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        with log.open("ab") as out:
            status = subprocess.run(
                ["bash", str(copy)],
                env={**os.environ, **slurm, **again},
                cwd=options["chdir"],
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        requeued = state / f"requeue-{number}_{index}"
        if requeued.exists():
            requeued.unlink()
        elif not (status in ended_by_node(state) and "requeue" in options):
            return {"state": "FAILED" if status else "COMPLETED", "status": status, "restarts": restarts}
    raise AssertionError("queued again for ever")


def ended_by_node(state: Path) -> tuple[int, ...]:
    """Statuses that stand for the failure of a node; with `kills_are_of_nodes` also that of a killed process."""
    return (NODE_FAILED, 137) if (state / "kills_are_of_nodes").exists() else (NODE_FAILED,)


def srun(state: Path, words: list[str]) -> int:
    while words and words[0].startswith("--"):
        words = words[1:]
    total, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_JOB_NUM_NODES"])
    ranks = [
        subprocess.Popen(
            words, env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % (total // nodes))}
        )
        for rank in range(total)
    ]
    statuses = [rank.wait() for rank in ranks]
    return max(status if status >= 0 else 128 - status for status in statuses)


def scontrol(state: Path, words: list[str]) -> int:
    if words[0] == "show":
        say("node1\nnode2")
        return 0
    assert words[0] == "requeue"
    (state / f"requeue-{words[1]}").touch()
    return 0


def scancel(state: Path, words: list[str]) -> int:
    return 0


def told(state: Path, program: str) -> int | None:
    path = state / f"{program}.json"
    if not path.exists():
        return None
    answer = json.loads(path.read_text())
    sys.stdout.write(answer["text"])
    sys.stderr.write(answer["error"])
    return int(answer["status"])


def squeue(state: Path, words: list[str]) -> int:
    if (status := told(state, "squeue")) is not None:
        return status
    for number, job in read(state).items():
        for index, task in job["tasks"].items():
            if task["state"] == "PENDING":
                say(f"{number}|{index or 'N/A'}|PENDING|{'Dependency' if job['dependency'] else 'Priority'}")
    return 0


def sacct(state: Path, words: list[str]) -> int:
    if (status := told(state, "sacct")) is not None:
        return status
    for number, job in read(state).items():
        for index, task in job["tasks"].items():
            if task["state"] != "PENDING":
                shown = f"{number}_{index}" if index else number
                say(f"{shown}|{task['state']}|{task['status'] or 0}:0|{job['name']}")
    return 0


DOES = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "squeue": squeue, "sacct": sacct, "scancel": scancel}


if __name__ == "__main__":
    program, folder, *rest = sys.argv[1:]
    with (Path(folder) / f"{program}.calls").open("a") as calls:
        calls.write(json.dumps(rest) + "\n")
    sys.exit(DOES[program](Path(folder), rest))
