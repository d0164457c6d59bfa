"""rewardlab as a run builds it: settings, layout, model and RewardTrainer, one step at a time."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from harness import workload
from harness.flops import Work, layout_work
from rewardlab.core.config import from_mapping
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets, weigh
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import choose_layout, load_reward_model, read_config
from rewardlab.model.reward import RewardModel
from rewardlab.training.loop.partners import Machine
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.loop.schedule import seek
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """`name=value` texts as a mapping; values as in a YAML file."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SystemExit(f"--set {text}: expected name=value, with the name of a setting of rewardlab train.")
        found[name.strip().replace("-", "_")] = yaml.safe_load(value)
    return found


def settings(folder: str, chosen: Mapping[str, object]) -> RewardTrainerConfig:
    """The configuration of a run of the model in `folder`; `chosen` as from a file."""
    fixed = {"model": folder, "dataset": "benchmark", "output_dir": str(Path(tempfile.gettempdir()) / "benchmark")}
    return from_mapping(RewardTrainerConfig, {**fixed, **chosen}, where="--set")


def add_step_flags(parser: argparse.ArgumentParser, *, pairs: int) -> None:
    """What a script that takes steps of ours alone is told: model, rows and settings."""
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", default="hh_helpful.train")
    parser.add_argument("--data-folder", type=Path, default=workload.DATA_FOLDER)
    parser.add_argument("--pairs", type=int, default=pairs, help="of a step")
    parser.add_argument("--set", nargs="+", default=["micro_token_budget=4096"], metavar="NAME=VALUE")
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)


def step_settings(options: argparse.Namespace) -> dict[str, object]:
    """The settings that `add_step_flags` and `--precision` ask for; freed memory is kept, as in a run."""
    return {
        "batch_size": options.pairs,
        "max_seq_len": options.max_seq_len,
        "precision": options.precision,
        "allocator": "keep",
        **parse_settings(options.set),
    }


def build_model(config: RewardTrainerConfig, *, sharing: bool, device: torch.device) -> RewardModel:
    """The model as `rewardlab train` loads it. SystemExit if its layout would not be the one asked for."""
    quiet()
    wanted = "padded" if config.model.attention == "padded" else "shared" if sharing else "unshared"
    said: list[str] = []
    model_config = read_config(config.model.model)
    layout = choose_layout(
        model_config,
        disk_class_of(model_config),
        config.model,
        max_length=config.data.rendering.length_limit,
        share=sharing,
        log=said.append,
    )
    if layout != wanted:
        raise SystemExit(f"this model's layout is {layout}, not {wanted}: {'; '.join(said) or '--set attention'}")
    return load_reward_model(
        config.model.model,
        config.model,
        config.compute,
        seed=config.run.seed,
        layout=layout,
        device=device,
        log=said.append,
    )


def build_trainer(
    config: RewardTrainerConfig, groups: Sequence[TokenGroup], *, sharing: bool, device: torch.device
) -> RewardTrainer:
    """A RewardTrainer on these groups; nothing is written unless it is asked to evaluate or save."""
    return trainer_of(config, build_model(config, sharing=sharing, device=device), groups)


def trainer_of(
    config: RewardTrainerConfig, model: RewardModel, groups: Sequence[TokenGroup], *, machine: Machine | None = None
) -> RewardTrainer:
    """A RewardTrainer of this model; alone in its process unless `machine` says otherwise."""
    return reward_trainer(
        config,
        model,
        Datasets(train=weigh(groups, by=config.loss.kwise_weight)),
        num_steps=1_000_000,
        records=Records(config.run.output_dir),
        save=lambda folder, step: None,
        machine=machine,
    )


def step_of(trainer: RewardTrainer) -> Callable[[], Mapping[str, float]]:
    """One optimiser step of the run, plan and all; facts of what it computed."""

    def step() -> Mapping[str, float]:
        batches = trainer._planned(trainer.step)
        report = trainer.train_step(batches)
        trainer.step += 1
        work = sum((layout_work(batch.groups) for batch in batches), Work())
        assert work.tokens == report.throughput.work.computed_tokens
        return {**work.facts(), "micro_batches": len(batches), "loss": report.sums.mean_loss}

    return step


def hold_weights(trainer: RewardTrainer) -> None:
    """Set the learning rate to zero for all steps to come."""
    trainer.schedule.base_lrs = [0.0] * len(trainer.schedule.base_lrs)
    seek(trainer.schedule, trainer.step)


def step_words(options: argparse.Namespace, data: workload.Rows, model: RewardModel) -> str:
    """What a step is of, for a page."""
    depth = f"the first {options.layers} layers" if options.layers else "all layers"
    return (
        f"{Path(options.model).name}, {depth}, all weights, {options.precision}, {options.pairs} pairs of {data.name}, "
        f"{data.fixed_by}, attention {model.attention_backend}, {' '.join(options.set)}"
    )


def quiet() -> None:
    """No log lines between the numbers."""
    import transformers

    logging.getLogger("rewardlab").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def config_of(folder: str) -> Any:
    """The text configuration of transformers in a folder."""
    return read_config(folder).get_text_config()
