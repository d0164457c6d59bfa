"""The parts that every benchmark's numbers go through: turns, FLOPs, rows, processes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness import flops, lockstep, ours, peers, results, timing, workload
from harness.random_model import config_folder, random_weights
from rewardlab.core.errors import ConfigError

SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def sample(wall: float, **facts: float) -> timing.Sample:
    return timing.Sample(wall=wall, cpu=wall / 2, facts=facts)


def test_every_round_runs_every_variant_and_begins_with_another():
    calls: list[str] = []

    def stepper(name):
        def step():
            calls.append(name)
            return sample(1.0)

        return step

    found = timing.interleave({n: stepper(n) for n in "abc"}, repeats=3, warmup=1, say=lambda line: None)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(samples) for name, samples in found.samples.items()} == dict.fromkeys("abc", 3)


def test_a_variant_that_fails_in_a_tolerated_way_is_left_out_and_named():
    def fails():
        raise MemoryError("too big\nreally")

    steppers = {"a": lambda: sample(1.0), "b": fails}
    found = timing.interleave(steppers, repeats=2, tolerate=(MemoryError,), say=lambda line: None)
    assert set(found.samples) == {"a"}
    assert found.failed == {"b": "MemoryError: too big"}
    with pytest.raises(MemoryError):
        timing.interleave(steppers, repeats=2, say=lambda line: None)


def test_no_round_begins_after_the_time_but_one_is_measured():
    found = timing.interleave({"a": lambda: sample(1.0)}, repeats=5, until=0.0, say=lambda line: None)
    assert (found.rounds, len(found.samples["a"])) == (1, 1)


def test_a_ratio_is_of_medians_and_its_range_is_of_rounds():
    slow, fast = [sample(4.0), sample(6.0), sample(50.0)], [sample(2.0), sample(2.0), sample(5.0)]
    found = timing.ratio(slow, fast)
    assert (found.value, found.low, found.high, found.cpu) == (3.0, 2.0, 10.0, 3.0)
    ratios, tokens = results.compare([("s", "f"), ("s", "x")], {"s": slow, "f": fast}, {"s": 9.0, "f": 3.0})
    assert set(ratios) == {"s → f"}
    assert tokens == {"s → f": 3.0}


def trainer_of(folder, *, lora: bool, sharing: bool):
    chosen = {"precision": "fp32", "lora": lora, "lora_rank": 3, "batch_size": 3}
    config = ours.settings(config_folder(folder, SIZES), chosen)
    groups = [workload.random_group(20, [5, 9, 7], vocabulary=64, seed=seed) for seed in range(3)]
    with random_weights(seed=0, device=torch.device("cpu")):
        return config, groups, ours.build_trainer(config, groups, sharing=sharing, device=torch.device("cpu"))


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_model_flops_are_the_matrix_products_that_torch_counts(tmp_path, lora, sharing):
    config, groups, trainer = trainer_of(tmp_path, lora=lora, sharing=sharing)
    step = ours.step_of(trainer)
    with FlopCounterMode(display=False) as counter:
        facts = step()
    counted = sum(
        number
        for operation, number in counter.get_flop_counts()["Global"].items()
        if str(operation) in ("aten.mm", "aten.addmm")
    )
    work = flops.useful_work(groups, sharing=sharing)
    assert facts["tokens"] == work.tokens == 3 * (20 + 21 if sharing else 3 * 20 + 21)
    assert facts["pairs"] == work.pairs
    shape = flops.shape_of(ours.config_of(config.model.model), lora_rank=3 if lora else 0)
    linear_alone = shape.train_flops(flops.Work(tokens=work.tokens, unread=work.unread))
    head = 6 * 32 * 9
    # Of a frozen model the first layer's inputs need no gradient.
    spared = 2 * 32 * (32 + 16 + 16) * work.tokens if lora else 0
    adapters_spared = 2 * 3 * 32 * 3 * work.tokens if lora else 0
    assert counted == pytest.approx(linear_alone + head - spared - adapters_spared, rel=1e-6)


def test_attention_pairs_are_what_a_causal_mask_leaves():
    mask = np.tril(np.ones((12, 12)))
    assert flops.segment(0, 12) == mask.sum()
    assert flops.segment(7, 5) == mask[7:].sum()
    assert flops.layout_work([(7, [5, 2])]).pairs == mask[:9].sum() - mask[7:9].sum() + mask[7:].sum() + mask[7:9].sum()
    assert flops.padded_work(2, 12) == flops.Work(tokens=24, pairs=2 * int(mask.sum()))


def test_the_padded_orders_hold_every_pair_once_and_keep_to_their_budget():
    groups = [workload.random_group(10 + n, [3, n + 1], vocabulary=64, seed=n) for n in range(23)]
    for order in (peers.sorted_order(128), peers.random_order(8)):
        assert sorted(index for batch in order(0, groups) for index in batch) == list(range(23))
    for batch in peers.sorted_order(128)(0, groups):
        assert peers.collate([groups[n] for n in batch], 0)["input_ids"].numel() <= 128
    assert peers.random_order(8)(0, groups) != peers.random_order(8)(1, groups)


def test_rows_are_fixed_by_their_hash(tmp_path):
    lines = [json.dumps({"prompt": f"p{n}", "chosen": "good", "rejected": "bad"}) + "\n" for n in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    expected = hashlib.sha256("".join(lines[:3]).encode()).hexdigest()
    rows = workload.read_rows("data", 3, folder=tmp_path, expected=expected)
    assert [turns.prompt[0].content for turns in rows.preferences] == ["p0", "p1", "p2"]
    with pytest.raises(SystemExit, match="--any-rows"):
        workload.read_rows("data", 4, folder=tmp_path, expected=expected)
    with pytest.raises(SystemExit, match="has 5 rows"):
        workload.read_rows("data", 6, folder=tmp_path)
    with pytest.raises(SystemExit, match="--data-folder"):
        workload.read_rows("nosuch", 6, folder=tmp_path)


def test_a_cut_off_model_has_the_first_layers(tmp_path):
    folder = Path(workload.model_folder("tiny-llama", tmp_path, layers=None))
    cut = workload.model_folder(str(folder), tmp_path / "cut", layers=1)
    assert ours.config_of(cut).num_hidden_layers == 1
    config = ours.settings(cut, {"precision": "fp32"})
    model = ours.build_model(config, sharing=True, device=torch.device("cpu"))
    assert len(model.backbone.layers) == 1


def test_best_of_groups_have_their_own_replies_first_and_no_reply_twice():
    groups = [workload.random_group(6, [n + 2, n + 3], vocabulary=60, seed=n) for n in range(8)]
    made = workload.best_of(groups, count=3, replies=5, seed=0)
    assert [group.num_replies for group in made] == [5, 5, 5]
    for index, group in enumerate(made):
        assert [list(reply) for reply in group.suffixes[:2]] == [list(reply) for reply in groups[index].suffixes]
        assert len({tuple(reply) for reply in group.suffixes}) == 5
    with pytest.raises(SystemExit, match="too few"):
        workload.best_of(groups, count=1, replies=20, seed=0)


def test_settings_are_those_of_a_run():
    chosen = ours.parse_settings(["micro-token-budget=512", "lora=true"])
    assert chosen == {"micro_token_budget": 512, "lora": True}
    assert ours.settings("m", chosen).model.lora is True
    with pytest.raises(ConfigError, match="--set: unknown setting 'nosuch'"):
        ours.settings("m", {"nosuch": 1})
    with pytest.raises(SystemExit, match="name=value"):
        ours.parse_settings(["lora"])


def test_moments_given_back_between_turns_come_back_as_zeros():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.sum().backward()
    optimizer.step()
    lockstep.release_moments(optimizer)
    assert optimizer.state[weight]["exp_avg"].device.type == "meta"
    lockstep.restore_moments(optimizer)
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.0] * 4
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


def fails(session: lockstep.Session, job: str) -> None:
    session.wait()
    raise ValueError(job)


def counts(session: lockstep.Session, job: int) -> None:
    while session.wait():
        session.done({"job": job})


def test_a_worker_steps_when_told_and_ends(monkeypatch):
    worker = lockstep.Worker("w", counts, 7, processes=False)
    assert worker.ready()["now_gb"] > 0
    assert [worker.step().facts["job"] for _ in range(2)] == [7, 7]
    assert worker.close() == {}


def test_an_error_in_a_worker_is_shown_by_the_parent():
    worker = lockstep.Worker("w", fails, "no such kernel", processes=False)
    worker.ready()
    with pytest.raises(SystemExit, match=r"w: (?s:.*)no such kernel"):
        worker.step()
