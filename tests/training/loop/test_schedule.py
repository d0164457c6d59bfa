"""The learning rate over a run: which course, how long a warm-up, and what each step was given."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from rewardlab.core.errors import ConfigError
from rewardlab.training.loop.schedule import (
    batch_notice,
    build_schedule,
    decay_notice,
    floor_notice,
    warmup_notice,
    warmup_steps,
)
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import config_for, rows_of


def config_of(**settings) -> RewardTrainerConfig:
    return RewardTrainerConfig.of(model="m", dataset=("d",), **settings)


def rates(config: RewardTrainerConfig, num_steps: int) -> list[float]:
    """Share of the learning rate in every step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = build_schedule(optimizer, config.schedule, num_steps)
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_scheduler": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"lr_scheduler": "constant_with_warmup", "warmup_steps": 2}, [0, 0.5, 1, 1, 1, 1]),
        ({"lr_scheduler": "linear", "warmup_ratio": 0.0}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"lr_scheduler": "linear", "warmup_steps": 2}, [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler": "cosine"}, [(1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]),
        (
            {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.2},
            [0.2 + 0.8 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)],
        ),
    ],
)
def test_every_schedule_runs_its_course(settings, expected):
    assert rates(config_of(**settings), 6) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "num_steps", "expected"),
    [
        ({}, 1000, 50),
        ({}, 50, 3),
        ({}, 20, 1),
        ({}, 19, 0),  # a warm-up of one step would be a run whose first step does nothing
        ({"lr_scheduler": "constant"}, 1000, 0),
        ({"lr_scheduler": "constant_with_warmup"}, 1000, 50),
        ({"warmup_ratio": 0.3}, 10, 3),
        ({"warmup_ratio": 0.0}, 1000, 0),
        ({"warmup_steps": 7}, 1000, 7),
        ({"warmup_steps": 7, "warmup_ratio": 0.0}, 1000, 7),
        ({"warmup_steps": 0}, 1000, 0),
    ],
)
def test_the_length_of_the_warm_up(settings, num_steps, expected):
    assert warmup_steps(config_of(**settings).schedule, num_steps) == expected


@pytest.mark.parametrize(("warmup", "num_steps"), [(10, 3), (5, 5), (5, 6), (1, 1), (0, 1), (7, 1000)])
def test_a_rate_that_is_never_reached_is_told_with_the_highest(warmup, num_steps):
    settings = {"lr": 1e-3, "warmup_steps": warmup, "lr_scheduler": "constant_with_warmup"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = build_schedule(optimizer, config_of(**settings).schedule, num_steps)
    rates = []
    for _ in range(num_steps):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    said = warmup_notice(warmup, num_steps, 1e-3)
    assert (f"its rate ends at {max(rates):.2g} and never reaches --lr 0.001" in said) == (max(rates) < 1e-3)
    assert bool(said) == (max(rates) < 1e-3)


def test_advice_on_the_warm_up_names_both_of_its_flags():
    assert "Lower --warmup-steps or --warmup-ratio, or train longer." in warmup_notice(5, 3, 1e-3)


def test_a_last_rate_that_the_schedule_does_not_use_is_told():
    assert "--min-lr-ratio 0.2 does nothing with --lr-scheduler cosine;" in floor_notice(
        config_of(min_lr_ratio=0.2).schedule
    )
    assert floor_notice(config_of().schedule) == ""
    assert floor_notice(config_of(min_lr_ratio=0.2, lr_scheduler="cosine_with_min_lr").schedule) == ""


@pytest.mark.parametrize("ratio", [0.03, 0.05, 0.1, 0.07])
@pytest.mark.parametrize("num_steps", [100, 130, 1000])
def test_a_share_is_as_many_steps_as_in_transformers(ratio, num_steps):
    arguments = transformers.TrainingArguments(output_dir="unused", warmup_steps=ratio, use_cpu=True)
    assert warmup_steps(config_of(warmup_ratio=ratio).schedule, num_steps) == arguments.get_warmup_steps(num_steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "--warmup-steps -1"),
        ({"warmup_ratio": 1.0}, "--warmup-ratio 1.0: a share"),
        ({"warmup_ratio": 50}, "for steps there is --warmup-steps"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "give only one of them"),
        ({"lr_scheduler": "constant", "warmup_steps": 5}, "use constant_with_warmup"),
        ({"min_lr_ratio": 1.0}, "--min-lr-ratio 1.0"),
    ],
)
def test_what_makes_no_schedule_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)


@pytest.mark.slow
def test_a_run_takes_the_rate_of_each_step_and_records_it(base_model, pairs_file, tmp_path, verified_here):
    import json

    config = config_for(
        *(base_model, pairs_file, tmp_path / "run"),
        **{"steps": 6, "lr": 1e-3, "log_every": 1, "lr_scheduler": "linear", "warmup_ratio": 0.34},
    )
    train(config)
    found = [float(row["lr"]) for row in rows_of(tmp_path / "run") if row["lr"]]
    assert found == pytest.approx([0, 1e-3 / 3, 2e-3 / 3, 1e-3, 2e-3 / 3, 1e-3 / 3])
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["warmup_steps"], saved["warmup_ratio"]) == (3, None)


def test_a_weight_decay_that_leaves_nothing_of_the_weights_is_told():
    assert decay_notice(0.05, 20_000, 1e-3) == decay_notice(0.1, 100_000, 2e-5) == decay_notice(1.0, None, 1.0) == ""
    said = decay_notice(1000, 120, 3e-3)
    assert said.startswith(
        "a step takes up to 3 of each weight away (--lr 0.003 times --weight-decay 1000), 3.6e+02 in"
    )
    assert ", or the weights explode. Lower --weight-decay" in said
    assert "explode" not in decay_notice(100, 120, 3e-4)


def test_batches_larger_than_the_data_are_told():
    assert batch_notice(16, 16) == ""
    assert batch_notice(1000, 200).startswith("--batch-size 1000 is more than the 200 training preferences, so every")
