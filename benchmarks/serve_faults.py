"""The server under load and faults on loopback: no wrong, lost or mixed answer, bounded memory, right codes.

    scripts/bench serve_faults --clients 50 --seconds 10
    scripts/bench serve_faults --model runs/a/best --other runs/b/best     # the real engine
    scripts/bench serve_faults --model runs/a/best --other runs/b/best --adapters runs/a/best runs/b/best

Without `--model` an engine made up from a hash stands behind the server, so that what is tried is the server alone. The
clients send requests whose scores by either model are known, with `--adapters` also by these folders, which share one
backbone. Meanwhile others send or read slowly, go away, close their side, and send what is no JSON, NaN, 10 MB and
unknown names; the model is swapped to and fro (`--swaps`), a worker is killed,
and SIGTERM ends the server while the clients go on. Ends with an error if anything is wrong. The server ends with the
script, whatever ends that.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import machine, results
from harness.known_scores import NUM_REQUESTS, adapters_of, digests_of, expectations, requests
from harness.raw_http import Connection, Log, children, head, memory_mb, read_answer

HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers"
ADMIN_TOKEN = "admin-0123456789"
NUM_FAULTS = 9
SLOW_BYTES, SLOW_S = 64, 0.02
"""What a slow reader takes at a time, and how long it waits then."""
TEN_MB = 10 * 2**20
WENT_AWAY = ("gone", "half-closed", "slow body", "10 MB broken")
GROWTH = 1.25
"""Most that memory may grow after the first swap."""
SLACK_MB = 64.0
PR_SET_PDEATHSIG = 1
SWAP_AGAIN_S = 60.0
"""Seconds in which a swap is asked for again while a worker starts."""


@dataclass
class Tally:
    """What came of everything that was sent."""

    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: list[float] = field(default_factory=list)
    digests: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)
    """When a connection broke before its answer was whole, in seconds since the beginning."""
    refused: list[float] = field(default_factory=list)
    """When no connection could be had."""


class Trial:
    """The server, those who ask it, and what they saw."""

    def __init__(self, options: argparse.Namespace, folders: Sequence[Path], process: Any, port: int, log: Log) -> None:
        self.options = options
        self.folders = folders
        self.process = process
        self.port = port
        self.log = log
        self.asked = requests()
        self.bodies = [json.dumps(one).encode() for one in self.asked]
        self.adapters = adapters_of(options.adapters)
        # The first is the model that is swapped; None names no model.
        self.names: list[str | None] = [None, *self.adapters]
        self.known = expectations([*folders, *self.adapters.values()], self.asked, fake=options.model is None)
        self.digest_of = digests_of(self.adapters)
        self.tally = Tally()
        self.began = time.monotonic()
        self.memory_mb: list[tuple[float, float]] = []
        self.stopped = False

    def now(self) -> float:
        return time.monotonic() - self.began

    async def client(self, number: int) -> None:
        """Ask until the end, and check every answer."""
        connection, draw = Connection(self.port), random.Random(number)
        while not self.stopped:
            which, name = draw.randrange(NUM_REQUESTS), draw.choice(self.names)
            body = self.bodies[which] if name is None else json.dumps(self.asked[which] | {"model": name}).encode()
            sent = time.monotonic()
            try:
                status, told = await connection.ask(body)
            except ConnectionResetError:
                self.tally.broken.append(self.now())
                continue
            except OSError:
                self.tally.refused.append(self.now())
                await asyncio.sleep(0.05)
                continue
            self.tally.codes[f"good {status}"] += 1
            if status == 200:
                self.tally.seconds.append(time.monotonic() - sent)
                self.check(which, json.loads(told), name)
            elif status in (429, 503):
                await asyncio.sleep(0.05 + 0.2 * draw.random())
            else:
                self.tally.wrong.append(f"a good request got {status}: {told[:200]!r}")
        connection.close()

    def check(self, which: int, answer: dict[str, Any], name: str | None = None) -> None:
        """Note an answer that is not, as a whole, that of one model, or that is not of the adapter that was named."""
        digest, scores = answer["digest"], [group["scores"] for group in answer["groups"]]
        self.tally.digests[digest if name is None else f"adapter {name}"] += 1
        known = self.known.get(digest)
        meant = name is None or digest == self.digest_of[name]
        right = (
            meant
            and known is not None
            and all(
                len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=0, atol=1e-4)
                for ours, theirs in zip(known[which], scores, strict=True)
            )
        )
        if not right:
            self.tally.wrong.append(f"request {which} got other scores than those of {digest[:12]}")

    async def fault(self, name: str, wanted: Sequence[int | None], send: Callable[[], Awaitable[int | None]]) -> None:
        """Send a fault again and again, and note a code that is not a right one."""
        while not self.stopped:
            try:
                status = await send()
            except (OSError, asyncio.IncompleteReadError):
                self.tally.codes[f"{name} broken"] += 1
                await asyncio.sleep(0.05)
                continue
            self.tally.codes[f"{name} {'closed' if status is None else status}"] += 1
            if status is None and None not in wanted:
                self.tally.broken.append(self.now())
            elif status not in (*wanted, 429, 503):
                self.tally.wrong.append(f"{name} got {status}, not {wanted}")
            await asyncio.sleep(0.02)

    async def once(self, body: bytes, *, length: int | None = None, half: bool = False) -> int | None:
        """Send a request on a connection of its own; None if the server closes it without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head("/v1/score", len(body) if length is None else length) + body)
            if half:
                writer.write_eof()
            with suppress(ConnectionError):
                await writer.drain()
            return (await read_answer(reader))[0]
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        finally:
            writer.close()

    async def gone(self) -> int | None:
        """Send a request and go away."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head("/v1/score", len(self.bodies[0])) + self.bodies[0])
        await writer.drain()
        writer.transport.abort()
        return None

    async def read_slowly(self) -> int | None:
        """Send a good request, and read its answer a few bytes at a time; it has to be whole, and right."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=SLOW_BYTES)
        try:
            writer.write(head("/v1/score", len(self.bodies[0]), "connection: close\r\n") + self.bodies[0])
            await writer.drain()
            told = b""
            while part := await reader.read(SLOW_BYTES):
                told += part
                await asyncio.sleep(SLOW_S)
        finally:
            writer.close()
        if not told:
            return None
        status, body = int(told.split()[1]), told.partition(b"\r\n\r\n")[2]
        if status == 200:
            self.check(0, json.loads(body))
        return status

    def faults_of_adapters(self) -> list[Awaitable[None]]:
        unknown = json.dumps(self.asked[0] | {"model": "adapter0-none"}).encode()
        return [self.fault("unknown adapter", (404,), lambda: self.once(unknown))]

    def faults(self) -> list[Awaitable[None]]:
        body = self.bodies[0]
        faults = self.faults_of_adapters() if self.adapters else []
        return [
            *faults,
            self.fault("slow reader", (200,), self.read_slowly),
            self.fault("slow body", (408,), lambda: self.once(body[:20], length=len(body))),
            self.fault("half-closed", (None, 200), lambda: self.once(body, half=True)),
            self.fault("gone", (None,), self.gone),
            self.fault("not JSON", (400,), lambda: self.once(body[:-2])),
            self.fault("NaN", (400,), lambda: self.once(b'{"prompt": "x", "replies": ["y"], "truncate": NaN}')),
            self.fault("twice", (400,), lambda: self.once(b'{"prompt": "x", "prompt": "x", "replies": ["y"]}')),
            self.fault(
                "10 MB", (413, 408), lambda: self.once(b'{"prompt": "' + b"x" * TEN_MB + b'", "replies": ["y"]}')
            ),
            self.fault("no model", (404,), lambda: self.once(b'{"model": "none", "prompt": "x", "replies": ["y"]}')),
        ]

    async def swap(self, folder: Path) -> None:
        """Swap, through whichever worker answers."""
        body = json.dumps({"model": "m", "folder": str(folder)}).encode()
        connection, until = Connection(self.port), time.monotonic() + SWAP_AGAIN_S
        while True:
            status, told = await connection.ask(body, "/admin/swap", f"authorization: Bearer {ADMIN_TOKEN}\r\n")
            self.tally.codes[f"swap {status}"] += 1
            if status != 409 or time.monotonic() > until:
                break
            await asyncio.sleep(0.2)
        if status != 200 or json.loads(told)["digest"] not in self.known:
            self.tally.wrong.append(f"the swap got {status}: {told[:200]!r}")
        connection.close()

    async def watch(self) -> None:
        while not self.stopped:
            if (used := memory_mb(self.process.pid)) > 0:
                self.memory_mb.append((self.now(), used))
            await asyncio.sleep(0.25)

    async def run(self) -> dict[str, float]:
        """Everything in its time; return when what happened."""
        seconds, when = self.options.seconds, dict[str, float]()
        tasks = [asyncio.ensure_future(self.client(number)) for number in range(self.options.clients)]
        tasks += [asyncio.ensure_future(one) for one in (*self.faults(), self.watch())]
        swaps = self.options.swaps
        events = [(seconds * number / (swaps + 1), f"swap {number}") for number in range(1, swaps + 1)]
        if self.options.workers > 1:
            # Halfway between two swaps.
            events.append((seconds * (swaps // 2 + 0.5) / (swaps + 1), "kill"))
        for at, what in sorted(events):
            await asyncio.sleep(max(0.0, at - self.now()))
            when[what] = self.now()
            if what == "kill":
                os.kill(children(self.process.pid)[0], signal.SIGKILL)
            else:
                await self.swap(self.folders[int(what.split()[1]) % 2])
        await asyncio.sleep(max(0.0, seconds - self.now()))
        when["SIGTERM"] = self.now()
        self.process.send_signal(signal.SIGTERM)
        when["status"] = await self.process.wait()
        when["ended"] = self.now()
        self.stopped = True
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.tally.wrong.append(f"a client failed: {outcome!r}")
        return when

    def judge(self, when: dict[str, float]) -> list[str]:
        """What was wrong."""
        failed = sorted(set(self.tally.wrong))[:20]
        if when["status"] != 0:
            failed.append(f"the server ended with {when['status']}")
        # A connection may break with the worker that is killed, or before its request was taken at the end. That what
        # was taken is answered is what the server's log says: it calls a request without an answer 499.
        kill = when.get("kill", float("inf"))
        before_end = [one for one in self.tally.broken if one < when["SIGTERM"]]
        lost = [one for one in before_end if not kill - 0.1 <= one <= kill + 5]
        if lost or len(before_end) > self.options.clients + NUM_FAULTS:
            failed.append(f"{len(before_end)} connections broke before the end, {len(lost)} of them without a reason")
        left = sum(count for name, count in self.tally.codes.items() if name.startswith(WENT_AWAY))
        if self.log.unanswered > left:
            failed.append(f"{self.log.unanswered} requests were not answered, but only {left} clients went away")
        if early := [one for one in self.tally.refused if one < when["SIGTERM"]]:
            failed.append(f"{len(early)} connections were refused before the end")
        if len(self.tally.digests) != 2 + len(self.adapters):
            failed.append(f"answers of {len(self.tally.digests)} models, not of both and of every adapter")
        # A swap holds two models for a time, so the first one belongs to what is compared with.
        begun = 1.5 * self.options.seconds / (self.options.swaps + 1)
        first = max((used for at, used in self.memory_mb if at <= begun), default=0.0)
        later = max((used for at, used in self.memory_mb if at > begun), default=0.0)
        if later > GROWTH * first + SLACK_MB:
            failed.append(f"memory grew from {first:.0f} to {later:.0f} MB")
        return failed


async def start(options: argparse.Namespace, folders: Sequence[Path]) -> tuple[Any, int, Log, asyncio.Task[None]]:
    """The server's process, its port once it answers, its log, and what reads that."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "ADMIN": ADMIN_TOKEN}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS), *sys.path])
    if options.model is None:
        command = ["-m", "fake_workers", str(options.workers), str(folders[0]), "30", str(options.body_timeout)]
        environment["FAKE_ENGINE_SECONDS"] = str(options.engine_seconds)
    else:
        command = [
            *(
                "-m",
                "rewardlab",
                "serve",
                f"m={folders[0]}",
                "--port",
                "0",
                "--log-requests",
                "--admin-token-env",
                "ADMIN",
            ),
            *("--workers", str(options.workers), "--body-timeout", str(options.body_timeout), "--allow-swap-from"),
            *map(str, sorted({folder.parent for folder in folders})),
            *(["--adapters"] if options.adapters else []),
            *(f"{name}={folder}" for name, folder in adapters_of(options.adapters).items()),
        ]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, env=environment, preexec_fn=_end_with_parent
    )
    assert process.stdout is not None
    async for line in process.stdout:
        if b"http://127.0.0.1:" in line:
            log = Log()
            port = int(line.rpartition(b"127.0.0.1:")[2].split()[0])
            return process, port, log, asyncio.ensure_future(log.read(process.stdout))
    raise SystemExit("the server did not start")


def _end_with_parent() -> None:
    """Have the system end this process when the script ends, also by SIGKILL; workers end with their parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def tried(options: argparse.Namespace, folders: Sequence[Path]) -> tuple[Trial, dict[str, float]]:
    """Start the server, try it, and end it whatever happens."""
    process, port, log, reading = await start(options, folders)
    try:
        trial = Trial(options, folders, process, port, log)
        when = await trial.run()
        await reading
        return trial, when
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", type=Path, help="reward-model folder; without one the engine is made up")
    parser.add_argument("--other", type=Path, help="the folder that is swapped in")
    parser.add_argument("--adapters", nargs="+", type=Path, default=[], help="folders trained with LoRA from one base")
    parser.add_argument("--swaps", type=int, default=2, help="at even distances, to the other folder and back")
    parser.add_argument("--engine-seconds", type=float, default=0.001, help="of the made-up engine, for a request")
    parser.add_argument("--body-timeout", type=float, default=5.0)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(HELPERS))
    if options.swaps < 1 or (options.model is None) != (options.other is None):
        parser.error("--swaps: at least one. --model and --other belong together.")
    if options.adapters and options.model is None:
        parser.error("--adapters: the made-up engine has none. Give --model and --other.")
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as made:
        folders = [Path(made) / "one", Path(made) / "two"]
        if options.model is not None:
            folders = [options.model.resolve(), options.other.resolve()]
        else:
            for folder in folders:
                folder.mkdir()
                (folder / "model").write_text(folder.name, encoding="utf-8")
        trial, when = asyncio.run(tried(options, folders))
    failed = trial.judge(when)
    write(trial, when, failed, load)
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


def write(trial: Trial, when: dict[str, float], failed: Sequence[str], load: Any) -> None:
    """The record."""
    tally, options = trial.tally, trial.options
    middle, high, top = np.percentile(tally.seconds or [float("nan")], [50, 99, 100])
    memory = [used for _, used in trial.memory_mb] or [0.0]
    went = sum(count for name, count in tally.codes.items() if name.startswith(WENT_AWAY))
    engine = "made up from a hash" if options.model is None else "the real one"
    page = [
        "# The server under load and faults",
        "",
        f"{options.clients} clients for {options.seconds:g} s, {options.workers} worker(s), {options.swaps} swaps, "
        f"{len(trial.adapters)} adapters, the engine {engine}; "
        f"{len(tally.seconds):,} answers with scores, every one checked against the known scores of its digest: "
        f"**{len(failed)} things wrong**. Clients and server share the machine, so the times are no measure of speed.",
        "",
        results.table(
            ["what", "figure"],
            [
                ["answers a second", results.show(len(tally.seconds) / options.seconds)],
                ["seconds to an answer: median, 99 %, longest", f"{middle:.3f}, {high:.3f}, {top:.3f}"],
                [
                    "answers by either digest, and by each adapter",
                    ", ".join(f"{count:,}" for count in tally.digests.values()),
                ],
                ["connections that broke: with the killed worker, or not taken at the end", len(tally.broken)],
                [
                    "requests without an answer by the server's log; clients that went away",
                    f"{trial.log.unanswered}; {went}",
                ],
                ["memory of all processes: least and most, MB", f"{min(memory):.0f} to {max(memory):.0f}"],
                ["from SIGTERM to the end, s", results.show(when["ended"] - when["SIGTERM"])],
                ["exit status", int(when["status"])],
            ],
        ),
        results.table(["sent and answered", "times"], sorted(tally.codes.items())),
        *(f"**Wrong**: {line}." for line in failed),
    ]
    results.write(
        "serve_faults",
        f"{'fake' if options.model is None else 'adapters' if options.adapters else 'real'}.{options.clients}",
        page=page,
        data={
            "codes": dict(tally.codes),
            "answers": len(tally.seconds),
            "seconds": {"median": float(middle), "p99": float(high), "most": float(top)},
            "broken": tally.broken,
            "when": when,
            "memory_mb": trial.memory_mb,
            "failed": list(failed),
        },
        options=options,
        device=torch.device("cpu"),
        load=(load, machine.load_average()),
    )


if __name__ == "__main__":
    sys.exit(main())
