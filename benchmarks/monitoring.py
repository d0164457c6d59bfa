"""What watching a run costs: steps with a row of metrics, with and without those who watch.

    scripts/bench monitoring --layers 8 --repeats 20

Every variant trains the same model, with an optimiser of its own; a unit is `--steps` macro-steps and the row of
metrics.csv that follows them. Beside the ratios stands the time spent in observers, measured inside the run: a ratio of
two noisy times cannot show a thousandth, that can.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from growth import SIZES
from harness import machine, ours, results, timing, workload
from harness.random_model import config_folder, random_weights
from rewardlab.core.pending import Pending
from rewardlab.data.groups import Datasets
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.monitor import watch_run
from rewardlab.training.monitoring.observers import Observers
from rewardlab.training.monitoring.records import Records
from rewardlab.training.monitoring.sinks import choose_viewers
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
VARIANTS: Mapping[str, str] = {
    "alone": "nobody watches, and the next step is planned by the training thread",
    "planned": "the next step is planned beside it",
    "default": "and the warning signs and TensorBoard (where it is installed) get every row",
    "memory": "and `--profile-memory`",
}
COMPARED = (("planned", "alone"), ("default", "alone"), ("memory", "alone"))


class Timed(Observers):
    """Observers whose time is counted."""

    seconds = 0.0

    def _tell(self, event: str, *what: object) -> None:
        started = time.perf_counter()
        super()._tell(event, *what)
        self.seconds += time.perf_counter() - started


class Variant:
    """A run of one kind, some steps at a time."""

    def __init__(self, name: str, config: RewardTrainerConfig, model: Any, groups: Sequence[Any], folder: Path) -> None:
        self.observers = Timed()
        folder.mkdir(parents=True)
        config = config.replace(output_dir=folder, profile_memory=name == "memory")
        if name in ("default", "memory"):
            made = watch_run(config, CPU, {})
            self.observers._told = made.observers._told
        assert config.run.steps is not None
        self.trainer = reward_trainer(
            config,
            model,
            Datasets(train=groups),
            num_steps=config.run.steps,
            records=Records(folder),
            save=lambda folder, step: None,
            observers=self.observers,
        )
        if name == "alone":
            self.trainer._begin_plan = self._plan_here

    def _plan_here(self, step: int) -> Pending[Any]:
        key = (step, self.trainer.token_budget)
        if self.trainer._next is None or self.trainer._next.key != key:
            made = self.trainer.steps.plan(step, self.trainer.token_budget)
            self.trainer._next = Ready(key, made)
        return self.trainer._next

    def unit(self, steps: int) -> Callable[[], Mapping[str, float]]:
        """`steps` steps and a row."""

        def run() -> Mapping[str, float]:
            trainer, before = self.trainer, self.observers.seconds
            for _ in range(steps):
                trainer.log.progress.add(trainer.train_step(trainer._planned(trainer.step)))
                trainer.step += 1
                trainer.observers.step_done(trainer.step)
            trainer.observers.row(trainer.step, trainer.log.note_steps(trainer.step))
            return {"seconds_in_observers": self.observers.seconds - before}

        return run


class Ready(Pending[Any]):
    """A plan that is there."""

    def __init__(self, key: Any, made: Any) -> None:
        self.key = key
        self._made = made

    def wait(self, timeout_s: float) -> bool:
        """At once."""
        return True

    def result(self) -> Any:
        """The plan."""
        return self._made


def main(arguments: Sequence[str] | None = None) -> int:
    """All variants in turn, and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="smollm2", choices=list(SIZES), help="widths of the random model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of a unit: --log-every of a run")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of all variants")
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    num_steps = options.steps * (options.repeats + 1) + 1
    fixed = {
        "batch_size": options.batch_size,
        "max_seq_len": 256,
        "precision": "fp32",
        "steps": num_steps,
        "eval_every": num_steps,
        "warmup_steps": 1,
        "report_to": list(choose_viewers(("auto",))),
    }
    with tempfile.TemporaryDirectory() as work:
        folder = config_folder(Path(work) / "model", SIZES[options.size] | {"num_hidden_layers": options.layers})
        config = ours.settings(folder, fixed | ours.parse_settings(options.set))
        with random_weights(seed=0, device=CPU):
            model = ours.build_model(config, sharing=True, device=CPU)
        groups = [
            workload.random_group(96, [64, 96], vocabulary=model.config.vocab_size, seed=seed)
            for seed in range(4 * options.batch_size)
        ]
        variants = {name: Variant(name, config, model, groups, Path(work) / name) for name in VARIANTS}
        units = {name: variant.unit(options.steps) for name, variant in variants.items()}
        steppers = {name: lambda unit=unit: timing.timed(unit) for name, unit in units.items()}
        found = timing.interleave(steppers, repeats=options.repeats)
        for variant in variants.values():
            variant.observers.__exit__(None, None, None)
    write(found, config, options, load)
    return 0


def write(found: timing.Interleaved, config: RewardTrainerConfig, options: argparse.Namespace, load: float) -> None:
    """The page and its data."""
    timings = {name: timing.Timing.of(samples) for name, samples in found.samples.items()}
    ratios = {f"{slow} over {fast}": timing.ratio(found.samples[slow], found.samples[fast]) for slow, fast in COMPARED}
    shares = {
        name: times.facts["seconds_in_observers"] / times.wall for name, times in timings.items() if name != "alone"
    }
    page = [
        f"# Watching a run: {options.size}, {options.layers} layers, {options.batch_size} pairs a step\n",
        f"{found.rounds} interleaved rounds of {options.steps} steps and a row of metrics; medians. Viewers: "
        f"{' '.join(config.monitor.report_to)}.\n",
        results.table(
            ["times longer", "wall (median)", "rounds, low to high", "CPU seconds"],
            [
                [name, f"**{ratio.value:.4f}**", f"{ratio.low:.3f} to {ratio.high:.3f}", f"{ratio.cpu:.4f}"]
                for name, ratio in ratios.items()
            ],
        ),
        results.table(
            ["variant", "seconds a step (range)", "in observers, a step", "share"],
            [
                [
                    name,
                    f"{times.wall / options.steps:.4f} ({times.wall_low / options.steps:.4f} to "
                    f"{times.wall_high / options.steps:.4f})",
                    f"{1e6 * times.facts['seconds_in_observers'] / options.steps:.0f} µs",
                    f"{100 * times.facts['seconds_in_observers'] / times.wall:.3f} %",
                ]
                for name, times in timings.items()
            ],
        ),
        "\n".join(f"- `{name}`: {text}." for name, text in VARIANTS.items()) + "\n",
    ]
    results.write(
        "monitoring",
        f"{options.size}-{options.layers}",
        page=page,
        data={
            "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
            "shares": shares,
            "variants": {name: asdict(times) for name, times in timings.items()},
            "samples": {name: [asdict(sample) for sample in samples] for name, samples in found.samples.items()},
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )


if __name__ == "__main__":
    raise SystemExit(main())
