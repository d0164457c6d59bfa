"""Two steps of GRPO with TRL: every reward that TRL saw equals what `rewardlab score` gives the same conversation.

    scripts/bench grpo_parity
    scripts/bench grpo_parity --model tiny-llama --max-seq-len 512

One model is policy and, trained for a step, reward model. Three ways of rewarding: a folder, the address of
`rewardlab serve`, and `trl grpo --reward_funcs rewardlab.rl.trl.reward`, which is configured by the environment. Ends
with an error if a reward is further off than float32 explains, or TRL's log shows another mean.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from harness import engine_process, machine, ours, results
from harness.command import rewardlab, trained
from rewardlab.core.files import read_jsonl
from rewardlab.data.synthetic import generate
from rewardlab.rl import read_rollouts
from rewardlab.rl.trl import reward_function

TOLERANCE: Final = 2e-4
"""In float32, in units of max(1, |score|)."""
PROMPTS, GROUP, STEPS = 8, 4, 2


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a way of rewarding left behind."""

    record: Path
    """Folder of the rollouts."""
    means: Sequence[float]
    """The mean reward of each step, as TRL logs it."""


def settings(output: Path) -> dict[str, Any]:
    """Of the trainer, however it is started."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 24,
        "max_steps": STEPS,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_steps": STEPS,
        "save_only_model": True,
        "seed": 0,
    }


def by_function(source: str, base: str, data: Path, work: Path) -> Trained:
    """Training in this process, with a reward function."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    reward = reward_function(source, noise_floor=False, log_dir=str(work / "record"))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=base,
            reward_funcs=reward,
            args=GRPOConfig(**settings(work / "out"), disable_tqdm=True),
            train_dataset=load_dataset(str(data), split="train"),
        )
        trainer.train()
    reward.close()
    return Trained(record=work / "record", means=_means(trainer.state.log_history))


def by_command(source: str, base: str, data: Path, work: Path) -> Trained:
    """Training by TRL's own command, without code. SystemExit with its words if it fails."""
    file = work / "reward.yaml"
    file.write_text(f"noise-floor: false\nlog-dir: {json.dumps(str(work / 'record'))}\n", encoding="utf-8")
    flags = {
        "model_name_or_path": base,
        "dataset_name": str(data),
        "reward_funcs": "rewardlab.rl.trl.reward",
        "dtype": "float32",
        **settings(work / "out"),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    answer = subprocess.run(
        [str(Path(sys.executable).parent / "trl"), "grpo", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"REWARDLAB_RL_SOURCE": source, "REWARDLAB_RL_CONFIG": str(file)},
    )
    if answer.returncode:
        raise SystemExit(f"trl grpo failed:\n{answer.stdout[-2000:]}\n{answer.stderr[-3000:]}")
    state = json.loads((work / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    return Trained(record=work / "record", means=_means(state["log_history"]))


def _means(history: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(row["reward"]) for row in history if "reward" in row]


def judged(found: Trained, model: Path, work: Path) -> dict[str, float]:
    """How far rewards are from `rewardlab score`, and TRL's means from those of the record."""
    rows = list(read_rollouts(found.record))
    asked, scored = work / "asked.jsonl", work / "scored.jsonl"
    talks = [[message.as_dict() for message in row.conversation] for row in rows]
    asked.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    rewardlab("score", "--model", str(model), "--input", str(asked), "--output", str(scored), "--precision", "fp32")
    expected = np.array([float(str(row["score"])) for _, row in read_jsonl(scored)])
    seen = np.array([row.trained_on for row in rows], dtype=np.float64)
    steps = np.array([row.step for row in rows])
    means = [seen[steps == step].mean() for step in range(STEPS)]
    return {
        "rollouts": len(rows),
        "different rewards": len(set(seen.tolist())),
        "reward": float((np.abs(seen - expected) / np.maximum(1, np.abs(expected))).max()),
        "mean": float(np.abs(np.array(means) - found.means).max()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in three ways, compare, write. Returns 1 if a reward is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="policy, and base of the reward model")
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    results.add_flags(parser)
    options = parser.parse_args(arguments)
    ours.quiet()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base, model = trained(options.model, work, steps=1, max_seq_len=options.max_seq_len)
        data = work / "prompts"
        data.mkdir()
        prompts = [pair.preference.prompt for pair in generate(PROMPTS, seed=1, topics="train")]
        lines = [json.dumps({"prompt": [message.as_dict() for message in prompt]}) + "\n" for prompt in prompts]
        (data / "train.jsonl").write_text("".join(lines), encoding="utf-8")
        found = {}
        with engine_process.ours(
            str(model), precision="fp32", log=work / "server.log", threads=options.threads
        ) as served:
            for name, way, source in (
                ("folder", by_function, str(model)),
                ("server", by_function, served.url),
                ("trl grpo, server", by_command, served.url),
            ):
                print(f"{name}: {STEPS} steps", flush=True)
                place = work / name.partition(",")[0].replace(" ", "-")
                place.mkdir()
                found[name] = judged(way(source, base, data, place), model, place)
    write(found, options, (load, machine.load_average()))
    wrong = [name for name, one in found.items() if max(one["reward"], one["mean"]) > TOLERANCE]
    if wrong:
        print(f"rewards are not those of `rewardlab score`: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def write(found: Mapping[str, Mapping[str, float]], options: argparse.Namespace, load: tuple[float, float]) -> None:
    """The page and its data."""
    head = ["rewards from", "rollouts", "different ones", "furthest from `rewardlab score`", "TRL's means"]
    page = [
        f"# GRPO with TRL: {STEPS} steps, and what `rewardlab score` gives the same conversations",
        "",
        f"{Path(options.model).name} as policy and, trained for one step, as reward model; float32, {GROUP} replies to "
        f"each prompt, without the noise floor. Differences in units of max(1, |score|); those of TRL's means are to "
        f"the means of its rewards.",
        "",
        results.table(
            head,
            [
                [
                    name,
                    f"{one['rollouts']:.0f}",
                    f"{one['different rewards']:.0f}",
                    f"{one['reward']:.1e}",
                    f"{one['mean']:.1e}",
                ]
                for name, one in found.items()
            ],
        ),
        "`trl grpo` is TRL's own command with `--reward_funcs rewardlab.rl.trl.reward`.",
        "",
    ]
    results.write(
        "grpo_parity", "all", page=page, data={"ways": found}, options=options, device=torch.device("cpu"), load=load
    )


if __name__ == "__main__":
    sys.exit(main())
