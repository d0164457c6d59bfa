"""Runs on several ranks, over gloo: the numbers of one process, and one end for all."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runs
from common import write_pairs
from many_ranks import trainer_for
from rewardlab.artifact.load import load
from rewardlab.distributed.ranks import ALONE, Parallel
from rewardlab.distributed.sharding import joined_ranks
from rewardlab.training.rehearsal import rehearse
from rewardlab.training.run import train
from runs import history_of, rows_of, settings_of

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=6, log_every=2, eval_every=3, checkpoint_every=2, save_every=3)


FLOAT16 = {"dtype": "float32", "half": "float16", "stochastic": True, "loss_scale": 2.0**40}
CASES = {
    "two": (2, {}),
    "two, deferred": (2, {"defer_sync": True}),
    "four": (4, {"budget": 60}),
    "four in two nodes": (4, {"sharding": "hybrid", "per_node": 2}),
    "four in two nodes, dealt in turn": (4, {"sharding": "hybrid", "per_node": 2, "local_ranks": [0, 0, 1, 1]}),
    "four, whole models": (4, {"sharding": "none"}),
    "four, two groups": (4, {"groups": 2, "batch_size": 2}),
    "four, two groups, whole models": (4, {"groups": 2, "batch_size": 2, "sharding": "none"}),
    "lora": (2, {"lora": True}),
    "lora, whole models": (2, {"lora": True, "sharding": "none"}),
    "lora with dropout": (2, {"lora": True, "dropout": 0.3}),
    "four, lora with dropout, whole models": (4, {"lora": True, "dropout": 0.3, "sharding": "none", "budget": 60}),
    "padded": (2, {"layout": "padded", "budget": 200}),
    "k-wise": (2, {"replies": 4, "budget": 200}),
    "float32": (2, {"dtype": "float32"}),
    "bf16": (2, {"dtype": "float32", "half": "bfloat16"}),
    "bf16, rounded stochastically": (2, {"dtype": "float32", "half": "bfloat16", "stochastic": True}),
    "bf16, lora, rounded stochastically": (
        2,
        {"dtype": "float32", "half": "bfloat16", "lora": True, "stochastic": True},
    ),
    "bf16, lora": (2, {"dtype": "float32", "half": "bfloat16", "lora": True}),
    "float16, scaled too much at first": (2, FLOAT16),
    "float16, deferred": (2, FLOAT16 | {"defer_sync": True}),
    "float16, lora": (2, FLOAT16 | {"lora": True}),
    "float16, whole models": (2, FLOAT16 | {"sharding": "none"}),
    "float16, no copies": (2, FLOAT16 | {"stochastic": False}),
    "experts without tokens, whole models": (
        2,
        {"experts": [n / 10 for n in range(2, 15)], "groups": 2, "batch_size": 2, "sharding": "none"},
    ),
    "regularised": (2, {"settings": {"score_regularization_lambda": 0.1, "center_lambda": 0.01}}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "lora" else pytest.mark.slow) for case in CASES]
)
def test_ranks_compute_what_one_process_does(case, tmp_path, on_ranks):
    size, how = CASES[case]
    ends, said, _ = on_ranks("one_step", size, tmp_path, name="many", **how)
    assert set(ends.values()) == {0}, said[-3000:]
    found = torch.load(tmp_path / "many.pt", weights_only=True)
    alone = one_process(tmp_path, how)
    bound = 1e-10 if how.get("dtype", "float64") == "float64" else 1e-5
    if how.get("half"):
        bound = 2e-3  # sums of half-precision products in another order
    for what in ("gradients", "weights"):
        assert found[what].keys() == alone[what].keys()
        for name, tensor in alone[what].items():
            distance = float((found[what][name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
            assert distance <= bound or float(tensor.norm()) < 1e-12, (what, name, distance)
    assert found["pairs"] == alone["pairs"]
    assert found["tokens"] == alone["tokens"]
    assert found["losses"] == pytest.approx(alone["losses"], rel=bound)
    assert torch.tensor(found["norms"]).flatten().tolist() == pytest.approx(
        torch.tensor(alone["norms"]).flatten().tolist(), rel=10 * bound
    )
    assert found["scores"] == pytest.approx(alone["scores"], rel=max(bound, 1e-6))
    assert found["scales"] == [alone["scale"]] * size, "all ranks computed the same steps again"
    if "loss_scale" in how:
        assert alone["scale"][0] < how["loss_scale"]
    if "experts" in how:
        assert len(alone["gradients"]) < len(alone["weights"]), "some experts had nothing to do"
    if "two groups" in case:
        assert sum(json.loads((tmp_path / "many.empty").read_text())) >= 2, "some ranks had nothing to do"


def one_process(folder, how):
    trainer = trainer_for(folder, {**how, "ranks": ALONE}, Parallel())
    gradients = {}
    update = trainer._update

    def keep_gradients():
        if not gradients:
            gradients.update(
                {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
            )
        return update()

    trainer._update = keep_gradients
    reports = []
    for _ in range(2):
        reports.append(trainer.train_step(trainer._planned(trainer.step)))
        trainer.step += 1
    return {
        "gradients": gradients,
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "losses": [report.sums.mean_loss for report in reports],
        "norms": [(report.grad_norm, report.head_grad_norm) for report in reports],
        "pairs": [report.sums.comparisons for report in reports],
        "tokens": [report.throughput.work.unshared_tokens for report in reports],
        "scores": [row.score for row in trainer.judge._judge(trainer.judge.data.eval, trainer.token_budget, "").rows],
        "scale": trainer.loss_scale.state(),
    }


def close(first: Path, second: Path, *, bound: float = 1e-4) -> None:
    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).norm()) <= bound * max(float(tensor.norm()), 1e-6), name


NOT_EQUAL = {"tokens", "padding_share", "sharing_ratio"}
"""Columns that depend on how rows are packed."""


def require_like_one(folder: Path, alone: Path) -> None:
    ours, theirs = history_of(folder), history_of(alone)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        for name in row:
            assert bool(row[name]) == bool(other[name]), name
            if row[name] and name not in NOT_EQUAL:
                slack = 0.0 if name == "lr" else 1e-3
                assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-3, abs=slack), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "changes"),
    [
        ("full", {}),
        ("full", {"lora": True, "lora_rank": 2}),
        ("full", {"precision": "fp16"}),
        ("none", {}),
    ],
    ids=["full", "lora", "float16", "whole models"],
)
def test_a_run_on_two_ranks_leaves_what_a_run_on_one_leaves(
    sharding, changes, base_model, pairs_file, tmp_path, on_ranks
):
    test = write_pairs(tmp_path / "test.jsonl", 12, offset=500)
    config = config_for(base_model, pairs_file, tmp_path / "alone", test_dataset=(str(test),), lr=1e-3, **changes)
    result = train(config)
    many = settings_of(config.replace(output_dir=tmp_path / "many", sharding=sharding))
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=many)
    assert set(ends.values()) == {0}, said[-3000:]
    require_like_one(tmp_path / "many", tmp_path / "alone")
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "many").iterdir()} == names
    close(tmp_path / "many/step_6", tmp_path / "alone/step_6", bound=1e-3)
    assert (tmp_path / "many/step_6/adapter").exists() == ("lora" in changes)
    scores = json.loads((tmp_path / "result.json").read_text())
    assert scores == pytest.approx([row.score for row in result.test.rows], rel=1e-3, abs=1e-3)
    assert load(tmp_path / "many/best")
    assert len(rows_of(tmp_path / "many")) == len(rows_of(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("decided", [40, 1])
def test_a_dry_run_on_two_ranks_keeps_nothing(decided, base_model, pairs_file, tmp_path, on_ranks):
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    rows = [{**row, "label": 1.0 if number < decided else 0.5} for number, row in enumerate(rows)]
    pairs_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_for(base_model, pairs_file, tmp_path / "many", sharding="full", lr=1e-3, eval_fraction=0.0)
    alone = rehearse(config.replace(sharding="none"))
    before = sorted(path.name for path in tmp_path.iterdir())
    ends, said, _ = on_ranks("rehearsal", 2, tmp_path, config=settings_of(config))
    assert set(ends.values()) == {0}, said[-3000:]
    taken, steps, (low, high), found = json.loads((tmp_path / "result.json").read_text())
    assert (taken, steps) == (5, alone.num_steps)
    assert 0 < low <= high
    learned = alone.by_heart
    assert found == pytest.approx([min(8, decided), learned.nll_before, learned.nll_after], rel=1e-3, abs=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "result.json", "said"])


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(base_model, pairs_file, tmp_path, on_ranks):
    config = config_for(base_model, pairs_file, tmp_path / "alone", lr=1e-3)
    train(config)
    many = config.replace(output_dir=tmp_path / "many")
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=settings_of(many), stop_after=2)
    assert set(ends.values()) == {75}, said[-3000:]
    many = many.replace(resume="auto")
    ends, said, _ = on_ranks("whole_run", 3, tmp_path, config=settings_of(many), stop_after=4)
    assert set(ends.values()) == {75}, said[-3000:]
    train(many)
    require_like_one(tmp_path / "many", tmp_path / "alone")
    close(tmp_path / "many/step_6", tmp_path / "alone/step_6", bound=1e-3)
    manifest = json.loads((tmp_path / "many/manifest.json").read_text())
    assert [entry["step"] for entry in manifest["resumed"]] == [2, 4]


@pytest.mark.quick_cases(1)
@pytest.mark.slow
def test_nodes_with_different_numbers_of_ranks_are_refused_on_all_of_them(tmp_path, on_ranks):
    ends, said, _ = on_ranks("one_step", 4, tmp_path, name="uneven", sharding="hybrid", per_node=[2, 2, 1, 1])
    assert set(ends.values()) == {2}
    assert "here a node has 1 or 2 of the 4" in said


@pytest.mark.parametrize("sharding", ["full", "none"])
@pytest.mark.parametrize("by", ["error", "dying"])
def test_one_rank_that_fails_ends_all(by, sharding, tmp_path, on_ranks):
    ends, said, seconds = on_ranks("crash", 3, tmp_path, by=by, sharding=sharding)
    assert all(status != 0 for status in ends.values())
    assert seconds < 60
    if by == "error":
        assert "error: this row is unreadable" in said
        assert "this process ended, because rank 2 failed: this row is unreadable" in said
    else:
        assert "error: another process of the run is gone, or answers no more" in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_one_rank_out_of_memory_makes_all_take_less(tmp_path, on_ranks):
    ends, said, _ = on_ranks("runs_out_of_memory", 2, tmp_path, sharding="none", budget=100)
    assert set(ends.values()) == {0}, said[-3000:]
    (first, second) = json.loads((tmp_path / "told.json").read_text())
    assert first == second
    assert first[0] < 100
    alone = one_process(tmp_path, {})
    assert first[1] == pytest.approx(alone["losses"][0], rel=1e-10)


def test_one_rank_out_of_memory_in_a_sharded_model_ends_all_with_what_to_do(tmp_path, on_ranks):
    ends, said, seconds = on_ranks("runs_out_of_memory", 2, tmp_path, budget=100)
    assert all(status != 0 for status in ends.values())
    assert seconds < 60
    assert "out of memory on rank 1 with --micro-token-budget 100. Start again with --micro-token-budget 50" in said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_one_rank_out_of_memory_among_collectives_ends_all(sharding, tmp_path, on_ranks):
    ends, said, seconds = on_ranks("runs_out_of_memory_while_clipping", 2, tmp_path, sharding=sharding)
    assert all(status != 0 for status in ends.values())
    assert seconds < 60
    assert "out of memory" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_a_signal_ends_ends_all(rank, tmp_path, on_ranks):
    ends, said, seconds = on_ranks("stopped_at_once", 2, tmp_path, rank=rank)
    assert ends[rank] == 75
    assert ends[1 - rank] not in (0, 75)
    assert seconds < 60
    assert "error: stopped at once by SIGUSR1" in said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_what_gets_no_gradient_is_named_on_ranks_too(sharding, tmp_path, on_ranks):
    ends, said, _ = on_ranks("leaves_one_out", 2, tmp_path, sharding=sharding)
    assert all(status == 2 for status in ends.values())
    assert "trained tensors without a gradient: backbone.unread" in said


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_told_with_its_rank(tmp_path, on_ranks):
    ends, said, _ = on_ranks("not_finite", 2, tmp_path)
    assert all(status == 2 for status in ends.values())
    assert "step 1: gradient norm nan" in said
    assert "rank 1: loss [nan" in said
    assert "rank 0: loss" not in said


@pytest.mark.slow
def test_all_stop_when_one_is_asked_to(tmp_path, on_ranks):
    on_ranks("checkpointed", 2, tmp_path)
    told = {path.name: path.read_text() for path in tmp_path.glob("stopped-*")}
    assert len(told) == 2
    assert all("stopped by --max-hours 1e-09 after step 1" in text for text in told.values())


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list the threads of a process")
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"sharding": "none"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "hybrid", "per_node": 1}, marks=pytest.mark.slow),
    ],
    ids=["full", "none", "hybrid"],
)
def test_ranks_that_part_leave_no_thread_that_could_abort_the_end_of_the_process(how, interrupted, tmp_path, on_ranks):
    """A thread of gloo that lets go of its last tensor while the interpreter ends is an abort (SIGABRT)."""
    ends, said, _ = on_ranks("threads_after", 2, tmp_path, interrupted=interrupted, **how)
    assert set(ends.values()) == {2 if interrupted else 0}, said[-3000:]
    for rank in range(2):
        during, after = (json.loads((tmp_path / f"{when}-{rank}").read_text()) for when in ("during", "after"))
        assert any("gloo" in name for name in during), during
        assert not [name for name in after if "gloo" in name]


def test_a_process_without_the_environment_of_torchrun_is_alone():
    with joined_ranks() as ranks:
        assert ranks == ALONE
        assert ranks.any(True, False) == (True, False)
        assert ranks.gather("x") == ["x"]


def test_a_folder_that_the_ranks_do_not_share_is_refused_before_anything_is_trained(
    base_model, pairs_file, tmp_path, on_ranks
):
    config = config_for(base_model, pairs_file, Path("run"))
    ends, said, _ = on_ranks("on_two_disks", 2, tmp_path, config=settings_of(config))
    assert set(ends.values()) == {2}, said[-3000:]
    assert "error: --output-dir run: process 1 of the run, counted from 0, does not see there" in said
    assert [path.name for path in (tmp_path / "0/run").iterdir()] == [".lock"]
    assert not (tmp_path / "1/run").exists()


def test_a_rank_that_cannot_write_into_the_folder_of_the_run_is_told_before_anything_is_trained(
    base_model, pairs_file, tmp_path, on_ranks
):
    config = config_for(base_model, pairs_file, tmp_path / "run")
    ends, said, _ = on_ranks("cannot_write", 2, tmp_path, config=settings_of(config))
    assert set(ends.values()) == {2}, said[-3000:]
    assert said.count("process 1 of the run, counted from 0, cannot write there: No such file or directory") == 2
    assert "this process ended, because" not in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_the_trial_of_a_token_budget_needs_a_whole_model_on_each_device(base_model, pairs_file, tmp_path, on_ranks):
    config = config_for(base_model, pairs_file, tmp_path / "many", micro_token_budget="auto")
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=settings_of(config))
    assert set(ends.values()) == {2}
    assert "--micro-token-budget auto tries a whole model. Use --sharding none, or give a number" in said


@pytest.mark.slow
def test_ranks_with_whole_models_take_the_smallest_budget_that_a_trial_found(
    base_model, pairs_file, tmp_path, on_ranks
):
    config = config_for(base_model, pairs_file, tmp_path / "many", micro_token_budget="auto", sharding="none")
    ends, said, _ = on_ranks("whole_run", 2, tmp_path, config=settings_of(config), ceilings=[190, 150])
    assert set(ends.values()) == {0}, said[-3000:]
    saved = json.loads((tmp_path / "many/config.json").read_text())
    assert saved["micro_token_budget"] == 150
    train(config.replace(output_dir=tmp_path / "one", micro_token_budget=150))
    for one, many in zip(history_of(tmp_path / "one"), history_of(tmp_path / "many"), strict=True):
        assert float(many["train_loss"] or 0) == pytest.approx(float(one["train_loss"] or 0), rel=1e-5)
