"""Preparing preferences at scale: pairs a second, peak memory, and the second start from the cache.

    scripts/bench data_path --pairs 100000

Generates short pairs, each on a prompt of its own, and prepares them as `rewardlab train` does, every time in a
fresh process: without the cache's help, from the cache, with `--limit`, and (the fewest pairs alone) in one process.
After the first preparation comes the rest of the start of a run, up to the batches of its first step, with a model too
small to matter: baselines, the micro-token budget by trial, the plan. Peak memory is that of the process while it
prepares, and of its largest worker; what the process takes before any data are read stands beside it. While it starts,
files that it maps are not counted: the system takes them back when it needs them. Seconds depend on what else the
machine does, which the load average tells; processor time hardly does. Linux only (/proc).
Exits with 1 if the second start takes longer than 5 s at 100,000 pairs, if memory grows by more than 25 % from the
fewest pairs to the most, or if another number of workers gives other tokens.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rewardlab.core.files import write_json
from rewardlab.training.cost.memory import process_peak, resident

if TYPE_CHECKING:
    from rewardlab.core.types import TokenGroup
    from rewardlab.data.groups import Datasets
    from rewardlab.training.settings.config import RewardTrainerConfig

TEXT = """how do I keep basil alive when the soil is dry and cold in a small garden with little light what should we
write about rivers bridges numbers letters music bread coffee winter travel give it water every week because plants
need less than people think never always perhaps certainly first then finally compare explain describe list seven"""
WORDS = TEXT.split()
LIMIT = 1000
SECOND_START_S = 5.0
GROWTH = 1.25
MIB = 1 << 20
SMALL_MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def write_pairs(path: Path, num_pairs: int) -> None:
    """Prompts of 8 to 40 words, replies of 5 to 60; every prompt has its number in it."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_pairs):
            lengths = rng.integers((8, 5, 5), (41, 61, 61))
            drawn = iter(rng.integers(len(WORDS), size=int(lengths.sum())).tolist())
            prompt, chosen, rejected = (" ".join(WORDS[next(drawn)] for _ in range(length)) for length in lengths)
            row = {"prompt": f"{number}: {prompt}?", "chosen": f"{chosen}.", "rejected": f"{rejected}!"}
            file.write(json.dumps(row) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What preparing one file takes; runs in a process of its own."""
    from rewardlab.data.chat import load_tokenizer
    from rewardlab.data.prepare import load_data
    from rewardlab.data.templates import build_renderer
    from rewardlab.training.settings.config import RewardTrainerConfig
    from rewardlab.training.start import to_groups

    logging.getLogger("rewardlab").setLevel(logging.WARNING)
    config = RewardTrainerConfig.of(
        model=options.model[0],
        dataset=(options.measure,),
        limit=options.limit,
        eval_limit=LIMIT,
        num_workers=options.num_workers,
        cache_dir=options.cache_dir,
    )
    renderer = build_renderer(load_tokenizer(config.model.model), config.data.rendering)
    before, cpu = round((resident() or 0) / MIB, 1), _cpu_seconds()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: importing takes more than it leaves
    started = time.perf_counter()
    with Watch(_largest_worker_mib, every=0.2) as workers:
        data, test, reports = to_groups(config, load_data(config.data, renderer, seed=0), renderer)
    seconds = time.perf_counter() - started
    found = {
        "seconds": seconds,
        "cpu_seconds": _cpu_seconds() - cpu,
        "load_average": os.getloadavg()[0],
        "used": len(data.train) + len(data.eval),
        "tokens": sum(report.tokens for report in reports.values()),
        "peak_mib": _peak_mib(),
        "peak_mib_before": before,
        "peak_mib_of_largest_worker": workers.most,
    }
    if options.with_start:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, Watch(_own_mib, every=0.01) as own:
            start_run(config, data, test, vocabulary=len(renderer.tokenizer), folder=Path(folder))
        found |= {"start_seconds": time.perf_counter() - started, "peak_mib_of_start": own.most}
    digest = hashlib.sha256()
    for index in range(0, len(data.train), max(len(data.train) // LIMIT, 1)):
        group = data.train[index]
        digest.update(f"{group.preference_id} {group.prompt_tokens} {group.comparisons}".encode())
        digest.update(b"".join(part.tobytes() for part in (group.shared, *group.suffixes)))
    return found | {"sample": digest.hexdigest()[:16]}


def start_run(
    config: RewardTrainerConfig, data: Datasets, test: Sequence[TokenGroup], *, vocabulary: int, folder: Path
) -> None:
    """What a run does with its data between preparing them and its first step."""
    import torch

    from harness import ours
    from harness.random_model import config_folder, random_weights
    from rewardlab.training import run as training_run
    from rewardlab.training import start

    shape = SMALL_MODEL | {"vocab_size": vocabulary, "max_position_embeddings": config.data.rendering.length_limit}
    config = config.replace(
        model=config_folder(folder / "model", shape),
        output_dir=folder,
        precision="fp32",
        micro_token_budget="auto",
    )
    start.fit_all_baselines(config, data, test)
    cpu = torch.device("cpu")
    with random_weights(seed=0, device=cpu):
        model = ours.build_model(config, sharing=True, device=cpu)
    settled = training_run._settle_budget(config, model, data)
    trainer = ours.trainer_of(settled, model, data.train)
    trainer.steps.least_budget()  # what a step asks that has run out of memory
    trainer._planned(0)


class Watch:
    """The most that `look` returned while the block ran, looked at every so many seconds."""

    def __init__(self, look: Callable[[], float], *, every: float) -> None:
        self.most = 0.0
        self._look, self._every = look, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            self.most = max(self.most, self._look())
        self.most = max(self.most, self._look())


def _largest_worker_mib() -> float:
    """The peak memory of the largest child of this process."""
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    return max(map(_peak_mib, children), default=0.0)


def _own_mib() -> float:
    """Memory of this process without the files that it maps, which the system takes back when it needs them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024, 1)


def _peak_mib(process: str = "self") -> float:
    """0 if the process is no more."""
    return round((process_peak(process) or 0) / MIB, 1)


def _cpu_seconds() -> float:
    """Of this process and of those it waited for."""
    return sum(
        of.ru_utime + of.ru_stime for of in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def run(
    model: str,
    path: Path,
    cache: Path | str,
    *,
    workers: int | None,
    limit: int | None = None,
    with_start: bool = False,
) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--model", model, "--measure", str(path), "--cache-dir", str(cache)]
    command += [] if workers is None else ["--num-workers", str(workers)]
    command += [] if limit is None else ["--limit", str(limit)]
    command += ["--with-start"] if with_start else []
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(f"error: a measurement failed:\n{answer.stderr}")
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def run_case(model: str, num_pairs: int, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one size."""
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder, "pairs.jsonl"), Path(folder, "cache")
        write_pairs(path, num_pairs)
        case: dict[str, Any] = {"pairs": num_pairs, "file_mib": round(path.stat().st_size / (1 << 20), 1)}
        workers = options.num_workers
        first = run(model, path, cache, workers=workers, with_start=True)
        case["first_start"] = first | {"pairs_per_second": num_pairs / first["seconds"]}
        case["second_starts"] = [run(model, path, cache, workers=workers) for _ in range(options.repeats)]
        case["store_mib"] = round(sum(file.stat().st_size for file in cache.rglob("*.bin")) / (1 << 20), 1)
        case["limited_start"] = run(model, path, "none", workers=workers, limit=LIMIT)
        if options.alone and num_pairs == min(options.pairs):
            alone = run(model, path, "none", workers=1)
            case["one_process"] = alone | {"pairs_per_second": num_pairs / alone["seconds"]}
        return case


def failures_of(cases: list[dict[str, Any]]) -> list[str]:
    """What was promised and is not so."""
    failures = []
    for case in cases:
        slowest = max(start["seconds"] for start in case["second_starts"])
        if case["pairs"] <= 100_000 and slowest > SECOND_START_S:
            failures.append(f"{case['pairs']} pairs: the second start took {slowest:.1f} s")
        samples = {start["sample"] for start in [case["first_start"], *case["second_starts"]]}
        samples |= {case["one_process"]["sample"]} if "one_process" in case else set()
        if len(samples) > 1:
            failures.append(f"{case['pairs']} pairs: the starts gave different tokens")
    for name in ("peak_mib", "peak_mib_of_start", "peak_mib_of_largest_worker"):
        few, many = (case["first_start"][name] for case in (cases[0], cases[-1]))
        if many > GROWTH * few:
            failures.append(f"{name} grew from {few} to {many} between {cases[0]['pairs']} and {cases[-1]['pairs']}")
    return failures


def table(case: dict[str, Any]) -> str:
    """One size in a few lines."""
    first, limited = case["first_start"], case["limited_start"]
    seconds = sorted(start["seconds"] for start in case["second_starts"])
    lines = [
        f"{case['pairs']} pairs, {case['file_mib']} MiB of JSONL, {case['store_mib']} MiB prepared",
        f"  first start    {first['seconds']:8.1f} s  {first['pairs_per_second']:8.0f} pairs/s, "
        f"processor {first['cpu_seconds']:.1f} s, load {first['load_average']:.1f}, "
        f"peak {first['peak_mib']:.0f} MiB ({first['peak_mib_before']:.0f} before), "
        f"largest worker {first['peak_mib_of_largest_worker']:.0f} MiB",
        f"  up to a step   {first['start_seconds']:8.1f} s, peak {first['peak_mib_of_start']:.0f} MiB",
        f"  second start   {seconds[0]:8.2f} to {seconds[-1]:.2f} s, {len(seconds)} times, "
        f"peak {max(start['peak_mib'] for start in case['second_starts']):.0f} MiB",
        f"  --limit {LIMIT}   {limited['seconds']:8.1f} s",
    ]
    if "one_process" in case:
        alone = case["one_process"]
        lines.append(f"  one process    {alone['seconds']:8.1f} s  {alone['pairs_per_second']:8.0f} pairs/s")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=1, default=["smollm2-135m-instruct"], help="whose tokenizer is used")
    parser.add_argument("--pairs", nargs="+", type=int, default=[100_000, 1_000_000], help="sizes, from few to many")
    parser.add_argument("--num-workers", type=int, default=None, help="by default one a core")
    parser.add_argument("--repeats", type=int, default=5, help="second starts")
    parser.add_argument(
        "--alone",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also prepare the fewest pairs in one process, to compare",
    )
    parser.add_argument("--no-result", action="store_true", help="write nothing to benchmarks/results")
    for name in ("--measure", "--cache-dir"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--with-start", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    options = parse(arguments)
    if options.measure:
        print(json.dumps(measure(options)))
        return 0
    from harness.results import RESULTS, new_path
    from rewardlab.data.workers import available_cores
    from rewardlab.model.builtin import resolve_model_name

    (model,) = options.model
    folder = resolve_model_name(model, print)
    cases = []
    for num_pairs in sorted(options.pairs):
        cases.append(run_case(folder, num_pairs, options))
        print(table(cases[-1]), flush=True)
    failures = failures_of(cases)
    if not options.no_result:
        now = datetime.datetime.now(datetime.UTC)
        path = new_path(RESULTS, "data_path", Path(model).name).with_suffix(".json")
        packages = ("rewardlab", "transformers", "tokenizers", "numpy")
        write_json(
            path,
            {
                "benchmark": "data_path",
                "date": now.isoformat(timespec="seconds"),
                "options": {name: getattr(options, name) for name in ("pairs", "num_workers", "repeats", "alone")},
                "model": Path(model).name,
                "cores": available_cores(),
                "versions": {"python": platform.python_version()}
                | {name: importlib.metadata.version(name) for name in packages},
                "cases": cases,
                "failures": failures,
            },
        )
        print(f"written: benchmarks/results/{path.name}")
    for text in failures:
        print(f"error: {text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
