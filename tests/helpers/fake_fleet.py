"""Workers around the made-up engine in processes of their own, and questions to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

COMMAND = (sys.executable, "-m", "fake_workers")


def environment() -> dict[str, str]:
    """The environment in which `COMMAND` runs: unbuffered, with these helpers."""
    return os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }


def model(folder: Path, told: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model").write_text(told)
    return folder


class Fleet:
    """A parent with its workers, and questions to whichever of them accepts."""

    def __init__(self, count: int, folder: Path, drain_timeout_s: float = 30) -> None:
        command = [*COMMAND, str(count), str(folder), str(drain_timeout_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("http"):
                self.url, *pids = line.split()
                self.pids = list(map(int, pids))
                break

    def wait_for_line(self, part: str) -> None:
        assert self.process.stdout is not None
        while not any(part in line for line in self.lines):
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line.strip())

    def ask(self, path: str, body: object = None, token: str = "") -> tuple[int, str]:
        headers = {"content-type": "application/json", "connection": "close", "authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def score(self) -> dict:
        status, told = self.ask("/v1/score", {"token_ids": [[1, 2]]})
        assert status == 200, told
        return json.loads(told)

    def metric(self, line: str) -> float:
        status, told = self.ask("/metrics")
        assert status == 200, told
        return sum(float(one.rpartition(" ")[2]) for one in told.splitlines() if one.startswith(line))
