"""Rows of one prompt computed together: evaluation, and training steps that draw several rows of a prompt.

    scripts/bench rows_of_a_prompt
    scripts/bench rows_of_a_prompt --data gsm8k --together 4

First an evaluation of rows whose prompts come again: each by itself, and those of a prompt together. Then steps of a
run whose rows are drawn one by one, and `--rows-per-prompt` together, in turn. Ends with an error if a score of the two
evaluations differs by more than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from harness import machine, ours, results, timing, workload
from rewardlab.batch import PackedBatch
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.core.types import TokenGroup
from rewardlab.data.merging import Limits, MergedGroups
from rewardlab.model.reward import RewardModel
from rewardlab.score import SPREAD, compute_groups
from rewardlab.training.loop.reward_trainer import RewardTrainer

CPU = torch.device("cpu")
APART, TOGETHER = "each row by itself", "rows of a prompt together"
Work = Callable[[], Mapping[str, float]]


class Judged:
    """Scores rows in either way, and remembers what came out."""

    def __init__(self, model: RewardModel, groups: Sequence[TokenGroup], budget: int) -> None:
        self.model, self.groups, self.budget = model, groups, budget
        self.scores: dict[str, np.ndarray] = {}
        together = MergedGroups(groups, Limits(tokens=budget, spread=SPREAD))
        self.tokens = {APART: sum(group.num_tokens for group in groups), TOGETHER: int(together.num_tokens().sum())}

    def work(self, name: str) -> Work:
        """Scores all rows."""

        def forward(batch: PackedBatch) -> torch.Tensor:
            scores: torch.Tensor = self.model(batch).float()
            return scores

        def score() -> Mapping[str, float]:
            found = compute_groups(self.model, self.groups, forward, budget=self.budget, merge=name == TOGETHER)
            self.scores[name] = np.concatenate(found)
            return {"tokens": float(self.tokens[name])}

        return score

    def apart(self) -> float:
        """The largest difference of a score, in units of max(1, |score|)."""
        one, other = self.scores[APART], self.scores[TOGETHER]
        return float((np.abs(one - other) / np.maximum(1, np.abs(one))).max())


def steps_of(trainer: RewardTrainer, count: int) -> Work:
    """The next steps of a run."""
    step = ours.step_of(trainer)

    def take() -> Mapping[str, float]:
        return {"tokens": sum(step()["tokens"] for _ in range(count))}

    return take


def lines_about(first: str, samples: Mapping[str, Sequence[timing.Sample]], rows: int) -> list[str]:
    """A table and its ratios, against the first way."""
    base, *others = samples
    times = {name: timing.Timing.of(own) for name, own in samples.items()}
    table = results.table(
        [first, "seconds", "tokens a row"],
        [[name, results.spread(asdict(own)), f"{own.facts['tokens'] / rows:.0f}"] for name, own in times.items()],
    )
    lines = [table]
    for name in others:
        gain = timing.ratio(samples[base], samples[name])
        tokens = times[base].facts["tokens"] / times[name].facts["tokens"]
        lines.append(
            f"- {name}: **{gain.value:.2f}** times as fast ({gain.low:.2f} to {gain.high:.2f}), with {tokens:.2f} "
            f"times fewer tokens."
        )
    return [*lines, ""]


def main(arguments: list[str] | None = None) -> int:
    """Measure both, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours.add_step_flags(parser, pairs=16)
    parser.set_defaults(data="qa_feedback")
    parser.add_argument("--layers", type=int, default=8, help="the first ones alone; 0 for all")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--together", type=int, nargs="+", default=[4, 16], help="values of --rows-per-prompt")
    parser.add_argument("--rows", type=int, default=1000, help="training rows that steps are drawn from")
    parser.add_argument("--judged", type=int, default=100, help="rows of an evaluation, of the test file")
    parser.add_argument("--steps", type=int, default=2, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    options.layers = options.layers or None
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    ends = ("", "") if options.data == workload.GENERATED else (".train", ".test")
    with tempfile.TemporaryDirectory() as work:
        folder = workload.model_folder(options.model, Path(work), layers=options.layers)
        train, test = (
            workload.read_rows(f"{options.data}{end}", count, folder=options.data_folder)
            for end, count in zip(ends, (options.rows, options.judged), strict=True)
        )
        groups, judged = (workload.to_groups(one, folder, max_seq_len=options.max_seq_len) for one in (train, test))
        config = ours.settings(folder, ours.step_settings(options))
        trainers = {
            number: ours.build_trainer(config.replace(rows_per_prompt=number), groups, sharing=True, device=CPU)
            for number in (1, *options.together)
        }
    model = trainers[1].model
    assert isinstance(model, RewardModel)
    scoring = Judged(model, judged, config.run.token_budget)
    evaluations = _timed({name: scoring.work(name) for name in (APART, TOGETHER)}, options.rounds)
    names = {number: "one by one" if number == 1 else f"{number} rows of a prompt" for number in trainers}
    steps = _timed({names[number]: steps_of(one, options.steps) for number, one in trainers.items()}, options.rounds)
    error, allowed = scoring.apart(), SCORE_TOLERANCE[str(scoring.model.compute_dtype).removeprefix("torch.")]
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    kind = "LoRA" if config.model.lora else "all weights"
    prompts = [len({group.prompt_key for group in some}) for some in (judged, groups)]
    results.write(
        "rows_of_a_prompt",
        f"{options.data}.{'lora' if config.model.lora else 'full'}."
        f"{options.layers or 'all'}-layers.{options.precision}",
        page=[
            "# Rows of one prompt, computed together",
            "",
            f"{Path(options.model).name}, {depth}, {kind}, {options.precision}. {options.rounds} interleaved rounds; "
            f"medians of seconds, with the lowest and the highest round in brackets.",
            "",
            f"**An evaluation** of {len(judged)} pairs on {prompts[0]} prompts ({test.name}, {test.fixed_by}). Scores "
            f"are at most {error:.1e} apart, in units of max(1, |score|); {allowed:g} is allowed.",
            "",
            *lines_about("evaluated", evaluations, len(judged)),
            f"**Training**: {options.steps} steps of {options.pairs} pairs a round, from {len(groups)} pairs on "
            f"{prompts[1]} prompts ({train.name}, {train.fixed_by}).",
            "",
            *lines_about("drawn", steps, options.steps * options.pairs),
        ],
        data={
            "scores_apart": error,
            "samples": {
                what: {name: [asdict(one) for one in each] for name, each in own.items()}
                for what, own in (("evaluation", evaluations), ("training", steps))
            },
        },
        options=options,
        device=CPU,
        load=(load, machine.load_average()),
    )
    return int(not error <= allowed)


def _timed(works: Mapping[str, Work], rounds: int) -> Mapping[str, Sequence[timing.Sample]]:
    return timing.interleave(
        {name: partial(timing.timed, work) for name, work in works.items()}, repeats=rounds, warmup=1
    ).samples


if __name__ == "__main__":
    sys.exit(main())
