"""`--micro-token-budget auto`: the search on invented machines, and on a real model that must not notice it."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rewardlab.training.budget as budget_module
import rewardlab.training.run as run_module
from common import make_groups, make_model, stored
from rewardlab.cli import main
from rewardlab.commands.training import parse_train
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import ConfigError, DeviceMemoryError
from rewardlab.data.groups import Datasets
from rewardlab.data.pack import cost
from rewardlab.model.config import ModelConfig
from rewardlab.model.lora import add_adapters
from rewardlab.training.budget import CEILING, Choice, Trial, choose_budget, fill, search
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.run import train
from rewardlab.training.settings.config import LossConfig, RewardTrainerConfig
from runs import CLOCK, config_for


@pytest.mark.slow
@given(
    start=st.integers(0, 10**9),
    slope=st.integers(1, 10**6),
    bend=st.sampled_from([0.0, 1.0, 30.0]),
    limit=st.integers(1, 10**11),
    room=st.floats(1.0, 3.0),
    floor=st.integers(20, 4000),
    extra=st.integers(0, 70_000),
    slack=st.integers(0, 60),
)
@settings(max_examples=400, deadline=None)
def test_the_budget_is_a_tried_one_that_fits_and_not_much_below_the_largest(
    start, slope, bend, limit, room, floor, extra, slack
):
    """Memory of a + b·tokens, more than that for long rows; above limit · room the machine refuses."""
    ceiling = floor + extra
    tried: dict[int, Trial | None] = {}

    def run(budget: int) -> Trial | None:
        tokens = max(floor, budget - slack)
        taken = int(start + slope * tokens + bend * tokens * tokens)
        tried[budget] = Trial(tokens=tokens, bytes=taken) if taken <= limit * room else None
        return tried[budget]

    try:
        choice = search(run, floor=floor, ceiling=ceiling, limit=limit)
    except DeviceMemoryError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert tried[floor] is None
        assert f"one preference of {floor} tokens" in str(refused)
        return
    assert floor <= choice.budget <= ceiling
    assert choice.budget in tried, "what is chosen was computed"
    found = tried[choice.budget]
    assert found is not None
    assert found.bytes <= limit or choice.budget == floor
    assert len(tried) <= budget_module.MAX_TRIALS + 1
    if choice.budget < ceiling and found.bytes <= limit and bend == 0 and floor < 8192 <= ceiling:
        largest = (limit - start) / slope
        assert choice.budget >= 0.6 * min(largest, ceiling) - budget_module.STEP - slack or len(tried) >= 8


def test_the_search_doubles_once_and_then_follows_the_line():
    tried = []

    def run(budget: int) -> Trial:
        tried.append(budget)
        return Trial(tokens=budget, bytes=1000 + 10 * budget)

    choice = search(run, floor=100, ceiling=65_536, limit=10 * 30_000 + 1000)
    assert tried == [8192, 16_384, 29_952]
    assert choice == Choice(budget=29_952, reason="0.00 GiB of 0.00 to be had")
    tried.clear()
    assert search(run, floor=100, ceiling=4000, limit=10**9).budget == 4000
    assert tried[0] < tried[-1] == 4000


def test_a_trial_that_disproves_the_line_is_followed_by_a_smaller_one():
    tried = []

    def run(budget: int) -> Trial | None:
        tried.append(budget)
        return Trial(tokens=budget, bytes=budget) if budget <= 20_000 else None

    choice = search(run, floor=100, ceiling=65_536, limit=10**9)
    assert 17_000 <= choice.budget <= 20_000
    assert any(budget > 20_000 for budget in tried)


def test_the_largest_preference_is_taken_even_above_the_margin_if_it_runs():
    choice = search(lambda budget: Trial(tokens=budget, bytes=100), floor=300, ceiling=5000, limit=99)
    assert choice == Choice(budget=300, reason="the largest preference; above 85% of the free memory")


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody says how much memory is free")
def test_trials_leave_no_gradient_no_moved_weight_and_no_drawn_number(monkeypatch):
    model = make_model(layout="unshared")
    model.draws = add_adapters(model.backbone, ModelConfig(lora=True, lora_rank=2, lora_dropout=0.5))
    model.train()
    groups = make_groups(12)
    computed = []
    compute = budget_module._compute

    def watched(*arguments) -> bool:
        torch.rand(1)  # as some models do while they train
        computed.append(torch.get_rng_state())
        return compute(*arguments)

    monkeypatch.setattr(budget_module, "_compute", watched)
    before, numbers = state_of(model), torch.get_rng_state()
    floor = max(cost(group, "unshared") for group in groups)
    choice = choose_budget(model, groups, LossConfig(), batch_size=8, floor=floor)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert any(not torch.equal(state, numbers) for state in computed), "some were drawn meanwhile"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    worst = sorted((cost(group, "unshared") for group in groups), reverse=True)[:8]
    assert choice == Choice(budget=sum(worst), reason="no micro-batch is larger, or faster")


@pytest.mark.parametrize(("optimizer", "bytes_a_weight"), [("adamw", 8), ("sgd", 0), ("adamw8bit", 2)])
def test_the_trial_is_with_the_longest_preferences_and_the_state_of_the_optimiser_is_added(
    monkeypatch, optimizer, bytes_a_weight
):
    model = make_model().train()
    groups = make_groups(30)
    seen = []
    monkeypatch.setattr(budget_module, "_compute", lambda _, batch, __: seen.append(batch) or True)
    monkeypatch.setattr(budget_module, "free_memory", lambda _: 10**12)
    monkeypatch.setattr(budget_module, "in_use", lambda _: 0)
    limits = {}

    def search_once(run, **bounds):
        limits.update(bounds)
        limits["trial"] = run(200)
        return Choice(budget=200, reason="")

    monkeypatch.setattr(budget_module, "search", search_once)
    monkeypatch.setattr(budget_module, "HighWater", Still)
    choose_budget(model, groups, LossConfig(), batch_size=16, floor=40, optimizer=optimizer)
    sizes = sorted((group.num_tokens for group in groups), reverse=True)
    longest = sizes[: len(seen[0].groups)]
    assert seen[0].num_tokens >= 0.95 * sum(longest)
    assert 160 <= seen[0].num_tokens <= 200
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert limits["trial"] == Trial(tokens=seen[0].num_tokens, bytes=1000 + bytes_a_weight * weights)
    assert (limits["floor"], limits["ceiling"]) == (40, sum(sizes[:16]))
    assert limits["limit"] == int(0.85 * 10**12)


class Still:
    """A high-water mark of 1000 bytes."""

    bytes = 1000

    def __init__(self, device: torch.device) -> None:
        pass

    def __enter__(self) -> Still:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody says how much memory is free")
def test_the_start_of_a_run_builds_no_more_groups_than_a_step_has(tmp_path, monkeypatch, built):
    listed = make_groups(60)
    groups = stored(listed)
    monkeypatch.setattr(budget_module, "_compute", lambda *_: True)
    model = make_model().train()
    config = RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=8, micro_token_budget="auto")
    settled = run_module._settle_budget(config, model, Datasets(train=groups, eval=groups[:10]))
    assert len(built) == 8
    assert settled == run_module._settle_budget(config, model, Datasets(train=listed, eval=listed[:10]))
    trainer = reward_trainer(
        settled, model, Datasets(train=groups), num_steps=1, records=Records(tmp_path), save=lambda folder, step: None
    )
    assert trainer.steps.least_budget() == max(cost(group, "shared") for group in listed)
    assert len(built) == 8
    trainer._planned(0)
    assert len(built) == 16


def test_no_micro_batch_of_the_trial_is_above_its_budget():
    groups = sorted(make_groups(20, replies=4), key=lambda group: -group.num_tokens)
    for layout in ("shared", "unshared", "padded"):
        for budget in (120, 300):
            chosen = fill(groups, budget, layout)
            size = {
                "shared": sum(group.num_tokens for group in chosen),
                "unshared": sum(group.num_unshared_tokens for group in chosen),
                "padded": max(max(group.lengths) for group in chosen) * sum(group.num_replies for group in chosen),
            }[layout]
            assert 0.7 * budget <= size <= budget


def test_where_free_memory_is_unknown_the_default_is_taken_and_said(monkeypatch):
    monkeypatch.setattr(budget_module, "free_memory", lambda _: None)
    choice = choose_budget(make_model(), make_groups(4), LossConfig(), batch_size=4, floor=40)
    assert choice.budget == sum(group.num_tokens for group in make_groups(4)) < CEILING["cpu"]
    assert "does not say how much memory is free" in choice.reason
    assert choose_budget(make_model(), make_groups(4), LossConfig(), batch_size=4, floor=9000).budget == 9000


def test_a_preference_that_does_not_fit_is_an_error_that_names_the_flags(monkeypatch):
    def full(*_) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(budget_module, "_compute", full)
    model = make_model().train()
    with pytest.raises(DeviceMemoryError, match=r"one preference of 60 tokens.*--max-seq-len.*--lora"):
        choose_budget(model, make_groups(20), LossConfig(), batch_size=16, floor=60)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [{name: row[name] for name in row if name not in CLOCK} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("changes", [{}, {"lora": True, "lora_dropout": 0.3}], ids=["full", "dropout"])
def test_a_run_with_auto_is_the_run_with_the_number_that_it_chose(
    base_model, pairs_file, tmp_path, monkeypatch, changes
):
    monkeypatch.setitem(budget_module.CEILING, "cpu", 190)
    config = RewardTrainerConfig.of(
        model=str(base_model),
        dataset=(str(pairs_file),),
        output_dir=tmp_path / "auto",
        steps=3,
        batch_size=8,
        lr=3e-3,
        log_every=1,
        eval_fraction=0.2,
        max_seq_len=128,
        precision="fp32",
        micro_token_budget="auto",
        baselines=False,
        **changes,
    )
    train(config)
    saved = json.loads((tmp_path / "auto/config.json").read_text())
    assert saved["micro_token_budget"] == 190
    train(config.replace(output_dir=tmp_path / "number", micro_token_budget=190))
    assert rows_of(tmp_path / "auto") == rows_of(tmp_path / "number")
    monkeypatch.setattr(run_module, "choose_budget", lambda *_, **__: pytest.fail("chosen again"))
    again = parse_train(["--config", str(tmp_path / "auto/config.json"), "--output-dir", str(tmp_path / "again")])
    train(again)
    assert rows_of(tmp_path / "auto") == rows_of(tmp_path / "again")


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_only_training_preferences_must_fit_the_budget(base_model, pairs_file, tmp_path, monkeypatch):
    """Evaluation needs no preference as a whole, so one of many replies neither stops a run nor sets its budget."""
    wide = tmp_path / "wide.jsonl"
    replies = [f"reply number {n} is about water" for n in range(24)]
    rows = [{"prompt": f"Say {n}.", "responses": replies, "scores": [*range(24)]} for n in range(3)]
    wide.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = Path(shutil.copy(wide, tmp_path / "judged.jsonl"))
    named = {"eval_dataset": (str(wide),), "test_dataset": (str(judged),), "steps": 1, "baselines": False}
    floors = []

    def choose(model, groups, *_, floor, **__) -> Choice:
        floors.append((floor, max(cost(group, model.layout) for group in groups)))
        return Choice(budget=200, reason="")

    monkeypatch.setattr(run_module, "choose_budget", choose)
    for budget in (200, "auto"):
        folder = tmp_path / str(budget)
        result = train(config_for(base_model, pairs_file, folder, micro_token_budget=budget, **named))
        assert len(result.test.rows) == 3 * 24
    ((floor, largest),) = floors
    assert floor == largest < 200
    with pytest.raises(ConfigError, match="one preference takes .* above --micro-token-budget 200"):
        train(config_for(base_model, wide, tmp_path / "other", micro_token_budget=200, steps=1))


def test_auto_is_read_from_flags_and_files_and_other_words_are_refused(tmp_path, capsys):
    needed = ["--model", "m", "--dataset", "d"]
    assert parse_train([*needed, "--micro-token-budget", "auto"]).run.micro_token_budget == "auto"
    assert parse_train([*needed, "--micro-token-budget", "64"]).run.micro_token_budget == 64
    with pytest.raises(ConfigError, match="--micro-token-budget most: must be a whole number or auto"):
        parse_train([*needed, "--micro-token-budget", "most"])
    with pytest.raises(ConfigError, match="--micro-token-budget 15: must be at least 16"):
        parse_train([*needed, "--micro-token-budget", "15"])
    file = tmp_path / "run.yaml"
    file.write_text("micro-token-budget: auto\n")
    assert parse_train([*needed, "--config", str(file)]).run.micro_token_budget == "auto"
    assert parse_train(needed).run.micro_token_budget is None
    for value in ("64", 6.4, True):
        with pytest.raises(ConfigError, match="micro_token_budget: expected int or 'auto', got"):
            from_mapping(RewardTrainerConfig, {"micro_token_budget": value}, where="here")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--micro-token-budget INT|auto" in " ".join(capsys.readouterr().out.split())
