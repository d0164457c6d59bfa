"""Benchmarks of speed and memory run on a tiny model and write what they promise; none is held to a time."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import data_path
import data_tools
import gpu
import growth
import layer_parts
import memory_rounds
import monitoring
import norms
import profile_step
import score_cpu
import shared_cores
import train_cpu
from benchmark_results import page_in, result
from harness import machine, peers
from harness.tiny import write_tiny
from rewardlab.batch import pack
from rewardlab.training import start

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HAS_TRL = importlib.util.find_spec("trl") is not None
README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


TINY = ["--model", "tiny-llama", "--data", "generated", "--threads", "1", "--peak-seconds", "0.01"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["headline-fp32", "hh-lora"])
def test_training_beside_trl_and_a_sorted_loop(tmp_path, cell):
    arguments = ["--cells", cell, "--pairs", "16", "--repeats", "2", "--in-process", "--results", str(tmp_path)]
    more = ["--set", "micro_token_budget=512", "--also", "small", "micro_token_budget=256", "--warm", "small"]
    assert train_cpu.main([*arguments, *TINY, *more, "--keep-memory", "ours"]) == 0
    found = result(tmp_path)
    variants = found["variants"]
    assert set(variants) == {name for name in train_cpu.VARIANTS if HAS_TRL or not name.startswith("trl")} | {"small"}
    assert len(found["samples"]["ours"]) == 2
    packed, ours = variants["packed"], variants["ours"]
    assert packed["tokens_computed"] == packed["tokens_useful"] > ours["tokens_computed"] == ours["tokens_useful"]
    assert variants["sorted"]["tokens_useful"] == packed["tokens_useful"] < variants["sorted"]["tokens_computed"]
    assert variants["small"]["facts"]["micro_batches"] > ours["facts"]["micro_batches"]
    assert found["token_ratios"]["packed → ours"] == packed["tokens_computed"] / ours["tokens_computed"]
    assert all(facts["mfu"] > 0 for facts in variants.values())
    budgets = {name: facts["micro_token_budget"] for name, facts in variants.items()}
    assert budgets == dict.fromkeys(variants) | {"sorted": 512, "packed": 512, "ours": 512, "small": 256}
    assert "at most, padding counted: `sorted` 512, `packed` 512, `ours` 512, `small` 256." in page_in(tmp_path)
    assert variants["sorted"]["facts"]["micro_batches"] >= packed["facts"]["micro_batches"] > 1
    assert "sorted → small" in found["ratios"]
    assert "`ours` keeps its memory from round to round." in page_in(tmp_path)
    if HAS_TRL:
        trl, best = variants["trl"]["facts"], variants["trl-best"]["facts"]
        assert packed["tokens_useful"] < best["tokens"] <= trl["tokens"], "grouped by length, it pads less"
        assert (trl["layer_calls"], best["layer_calls"]) == (4, 2), "two micro-batches; checkpointing computes twice"


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers come from a process that has imported what they need, instead of importing it once each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_cpu", "memory_rounds", "shared_cores"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_variant_in_a_process_of_its_own_has_its_peak_memory(tmp_path):
    arguments = ["--variants", "packed", "ours", "--pairs", "8", "--repeats", "1", "--results", str(tmp_path)]
    assert train_cpu.main([*arguments, *TINY]) == 0
    variants = result(tmp_path)["variants"]
    assert all(facts["peak_memory_gb"] >= facts["memory_built_gb"] > 0 for facts in variants.values())


def test_bf16_is_measured_where_it_is_native_or_said_to_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(train_cpu.machine, "has_bf16", lambda device: False)
    assert train_cpu.main(["--cells", "headline-bf16", "--results", str(tmp_path), *TINY]) == 0
    (page,) = tmp_path.glob("train_cpu.headline-bf16.*.md")
    assert "no bf16" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_scoring_differs_by_rounding_alone(tmp_path):
    arguments = ["--cells", "best-of-8", "--groups", "3", "--repeats", "2", "--in-process", "--results", str(tmp_path)]
    assert score_cpu.main([*arguments, *TINY]) == 0
    variants = result(tmp_path)["variants"]
    assert set(variants) == set(score_cpu.VARIANTS)
    assert variants["padded"]["tokens_per_group"] > variants["packed"]["tokens_per_group"]
    assert variants["packed"]["tokens_per_group"] > variants["ours"]["tokens_per_group"]
    for name in ("packed", "ours"):
        assert 0 < variants[name]["mean_difference"] <= variants[name]["max_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_memory_is_told_after_every_step(tmp_path, monkeypatch):
    size = ["--model", "tiny-llama", "--layers", "0", "--data", "generated", "--pairs", "4", "--rounds", "3"]
    more = ["--arms", memory_rounds.SAME, memory_rounds.GIVEN, "--threads", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(memory_rounds, "MOST_GROWTH", 10.0)
    assert memory_rounds.main([*size, *more]) == 0
    arms = result(tmp_path)["arms"]
    assert set(arms) == {memory_rounds.SAME, memory_rounds.GIVEN}
    for arm in arms.values():
        assert len(arm["peak_gb"]) == 3
        assert arm["peak_gb"] == pytest.approx(sorted(arm["peak_gb"]), abs=1e-3), "the system counts in batches"
        assert all(now <= peak + 1e-3 for now, peak in zip(arm["now_gb"], arm["peak_gb"], strict=True))
        assert len(set(arm["tokens"])) == 1, "the same rows"
    monkeypatch.setattr(memory_rounds, "MOST_GROWTH", -1.0)
    monkeypatch.setattr(memory_rounds, "measure", lambda *_: arms)  # what was measured just now
    assert memory_rounds.main([*size, "--threads", "1", "--no-result"]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_step_is_timed_beside_other_work_and_the_environment_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv(shared_cores.POLICY, "active")
    size = ["--model", "tiny-llama", "--layers", "0", "--data", "generated", "--pairs", "4", "--repeats", "2"]
    assert shared_cores.main([*size, "--busy", "0", "1", "--threads", "1", "--results", str(tmp_path)]) == 0
    seconds = result(tmp_path)["seconds"]
    assert set(seconds) == {shared_cores.label(wait, count) for wait in shared_cores.WAITS for count in (0, 1)}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in seconds.values())
    assert os.environ[shared_cores.POLICY] == "active"


@pytest.mark.slow
def test_a_profile_gives_every_operation_one_kind(tmp_path):
    size = ["--model", "tiny-llama", "--data", "generated", "--pairs", "4", "--repeats", "1", "--threads", "1"]
    assert profile_step.main([*size, "--results", str(tmp_path)]) == 0
    found = result(tmp_path)["found"]
    for arm in found.values():
        assert set(arm["kinds"]) == {*profile_step.KINDS, "other"}
        assert arm["kinds"]["products"] > 0
        # By names, since seconds are those of whatever else the machine does: what computes is known.
        unknown = [name for name in arm["operations"] if profile_step.kind_of(name) == "other"]
        assert not [name for name in unknown if re.search(r"aten::.*(mm|dot_product|softmax|norm|_foreach|adam)", name)]
    assert found["casts"]["attention"] == "segments"
    assert found["casts"]["kinds"]["attention, kernels"] > 0


@pytest.mark.slow
def test_norms_are_timed_with_the_rows_of_a_step_and_keep_every_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(norms, "ROWS_A_SAMPLE", 200)
    size = ["--model", "tiny-llama", "--data", "generated", "--pairs", "4", "--rounds", "3", "--threads", "1"]
    more = ["--precision", "bf16", "--rows", "7", "--results", str(tmp_path)]
    assert norms.main([*size, *more]) == 0
    found = result(tmp_path)
    losses = {name: [sample["facts"]["loss"] for sample in samples] for name, samples in found["steps"].items()}
    assert losses[norms.TORCH] == losses[norms.BLOCKWISE]
    assert len(losses[norms.TORCH]) == 3
    assert found["lr"] == 0, "no weight moved"
    tokens = found["steps"][norms.TORCH][0]["facts"]["tokens"]
    in_step = {one["rows"]: one["in_step"] for one in found["norms"]}
    assert in_step == {tokens: 5, 7: 0}, "two a layer and the last; seven rows were asked for"
    assert all(one["equal"] and one["gradients_apart"] < 1e-5 for one in found["norms"])
    monkeypatch.setattr(norms.norm.ReplacedNorm, "forward", lambda layer, rows: layer.weight * rows)
    assert norms.main([*size, "--no-result"]) == 1, "another norm, other losses"
    assert "not the same to the bit: loss of round 3, " in capsys.readouterr().err


@pytest.mark.slow
def test_parts_of_a_layer_are_timed_and_weighed_and_keep_every_bit(tmp_path, monkeypatch, capsys):
    size = ["--model", "tiny-llama", "--data", "generated", "--pairs", "4", "--rounds", "2", "--threads", "1"]
    assert layer_parts.main([*size, "--results", str(tmp_path)]) == 0
    found = result(tmp_path)
    assert list(found["steps"]) == ["transformers", "norms", "rotary", "gated", "all three"]
    kept = found["kept"]
    assert kept["all three"] < min(kept["norms"], kept["gated"]) < kept["transformers"] == kept["rotary"]
    losses = {name: [sample["facts"]["loss"] for sample in samples] for name, samples in found["steps"].items()}
    assert all(own == losses["transformers"] for own in losses.values())

    def harm(backbone, **how):
        backbone.norm.weight.data.mul_(1.001)

    monkeypatch.setattr(layer_parts.applying, "use_gated_products", harm)
    assert layer_parts.main([*size, "--no-result"]) == 1
    assert "not the same to the bit: gated, loss of round 1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::addmm", "products"),
        ("aten::add_", "norms, rotary, activations"),
        ("aten::bmm", "attention, products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention, kernels"),
        ("aten::_to_copy", "casts and copies"),
        ("aten::_foreach_norm", "optimiser and norms of gradients"),
        ("aten::linalg_vector_norm", "optimiser and norms of gradients"),
        ("aten::native_layer_norm", "norms, rotary, activations"),
        ("aten::_fused_adamw_", "optimiser and norms of gradients"),
        ("aten::bitwise_xor_", "rounding of copies"),
        ("aten::index_select", "cat, split, index"),
        ("aten::expand", "other"),
        ("aten::split_with_sizes", "cat, split, index"),
        ("aten::item", "other"),
    ],
)
def test_operations_are_sorted_by_their_names(operation, kind):
    assert profile_step.kind_of(operation) == kind


@pytest.mark.slow
def test_growth_measures_the_tokens_that_the_formula_promises(tmp_path):
    arguments = ["--size", "tiny", "--replies", "2", "4", "--shares", "0.25", "0.75", "--tokens", "256", "512"]
    sizes = ["--at-tokens", "256", "--length", "32", "--repeats", "1", "--threads", "1", "--results", str(tmp_path)]
    assert growth.main([*arguments, *sizes]) == 0
    points = result(tmp_path)["points"]
    assert [point["sweep"] for point in points] == ["share"] * 4 + ["tokens"] * 2
    for point in points:
        tokens = point["packed"]["facts"]["tokens"] / point["ours"]["facts"]["tokens"]
        assert point["predicted"] == pytest.approx(tokens)
        assert point["packed"]["facts"]["tokens"] == point["tokens"]
    if importlib.util.find_spec("matplotlib") is not None:
        (plot,) = tmp_path.glob("*.svg")
        assert plot.name in next(tmp_path.glob("*.md")).read_text(encoding="utf-8")


@pytest.mark.slow
def test_watching_is_timed_beside_a_run_that_nobody_watches(tmp_path):
    flags = ["--size", "tiny", "--layers", "1", "--steps", "2", "--batch-size", "2", "--repeats", "2", "--threads", "1"]
    assert monitoring.main([*flags, "--results", str(tmp_path)]) == 0
    found = result(tmp_path)
    assert set(found["variants"]) == set(monitoring.VARIANTS)
    assert set(found["ratios"]) == {"planned over alone", "default over alone", "memory over alone"}
    seconds = {name: facts["facts"]["seconds_in_observers"] for name, facts in found["variants"].items()}
    assert seconds["alone"] < seconds["default"], "somebody watches"
    assert all(0 < share < 1 for share in found["shares"].values())


def test_growth_names_what_it_had_no_time_for(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--size", "tiny", "--replies", "2", "--shares", "0.5", "--tokens", "64", "--at-tokens", "64"]
    rest = ["--repeats", "1", "--threads", "1", "--minutes", "0", "--results", str(tmp_path)]
    assert growth.main([*sizes, *rest]) == 0
    assert "64 tokens, K 2, 50%" in next(tmp_path.glob("*.md")).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_gpu_script_runs_on_a_cpu(tmp_path):
    flags = [
        "--device",
        "cpu",
        "--tiny",
        "--data",
        "hh",
        "--repeats",
        "1",
        "--warmup",
        "1",
        "--pairs",
        "8",
        "--peak-seconds",
        "0.01",
    ]
    settings = ["--set", "micro_token_budget=512", "--also", "again", "beta=2.0"]
    assert gpu.main([*flags, *settings, "--results", str(tmp_path)]) == 0
    full, lora = result(tmp_path)["cells"]
    page = page_in(tmp_path)
    assert (full["cell"], lora["cell"]) == ("tiny hh full", "tiny hh lora")
    for cell in (full, lora):
        assert set(cell["variants"]) == {*gpu.VARIANTS, "again"}
        assert cell["failed"] == {}
        tokens = {name: facts["tokens_computed"] for name, facts in cell["variants"].items()}
        assert tokens["trl"] >= tokens["packed"] > tokens["ours"] == tokens["again"]
        budgets = {name: facts["micro_token_budget"] for name, facts in cell["variants"].items()}
        assert budgets == {"trl": None, "trl-no-gc": None} | dict.fromkeys(("ours", "packed", "sorted", "again"), 512)
        assert cell["mfu_peak"]["source"].startswith(f"measured, {cell['precision']} matmul of 256×")
        assert cell["mfu_peak"]["source"] in page
        assert all(facts["mfu"] == pytest.approx(facts["of_measured_peak"]) for facts in cell["variants"].values())
    assert "`sorted` 512" in page


def test_utilisation_is_over_the_makers_number_for_the_arithmetic_of_the_run(monkeypatch):
    measured = machine.Peak(gflops=5e5, shape=(8192, 896, 4864), kernel="F.linear", rates={})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 PCIe")
    cuda = torch.device("cuda")
    assert gpu.parse([]).peak_tflops is None
    assert gpu.mfu_peak(None, cuda, "bf16", measured).flops == 756e12
    assert gpu.mfu_peak(None, cuda, "fp32", measured).flops == 51e12
    assert gpu.mfu_peak(400.0, cuda, "bf16", measured).flops == 400e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H20")
    assert gpu.mfu_peak(None, cuda, "bf16", measured).flops == 5e14
    said = gpu.mfu_peak(None, torch.device("cpu"), "fp32", measured).source
    assert said == "measured, fp32 matmul of 8192×896×4864"


class Options:
    """Flags of the GPU script that its Bench reads."""

    device, tiny, pairs, set, also = "cpu", True, 4, (), ()
    precision, variants, peer_attention, max_seq_len = "fp32", (), "sdpa", 128


@pytest.mark.slow
def test_the_padded_peer_holds_frozen_matrices_as_ours_does(tmp_path):
    for precision, held in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        options = type("Chosen", (Options,), {"precision": precision})
        bench = gpu.Bench("tiny", "hh", "lora", options, tmp_path / precision)
        peer, optimizer = bench._peer()
        assert optimizer is None
        for model in (peer, bench.trainer.model):
            frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
            assert {parameter.dtype for parameter in frozen if parameter.ndim >= 2} == {held}
            assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        loop = peers.PaddedLoop(
            peer, bench.groups, bench.config, order=peers.random_order(2), half=bench.half, pad=0, optimizer=optimizer
        )
        assert 0.3 < loop.step()["loss"] < 2.0


def test_the_padded_peer_on_the_gpu_has_our_weights(tmp_path):
    bench = gpu.Bench("tiny", "hh", "full", Options, tmp_path)
    model = bench.trainer.model
    peer, optimizer = bench._peer()
    assert optimizer is bench.trainer.optimizer
    assert peer.score.weight is model.head.weight
    rows = peers.collate(bench.groups, pad=0)
    ours = model(pack(bench.groups)).reshape(-1, 2).T.reshape(-1)
    torch.testing.assert_close(peers.scores(peer, rows, half=False), ours, atol=1e-5, rtol=1e-5)
    assert not gpu.adopt(peer, {"score.weight": model.head.weight}), "other names, other model"


def test_preparing_as_it_stands_is_what_the_readme_says():
    options = data_path.parse([])
    (line,) = [line for line in README.splitlines() if line.startswith("| `data_path.py`")]
    assert options.pairs == [100_000, 1_000_000]
    assert options.alone
    assert not data_path.parse(["--no-alone"]).alone
    assert all(word in line for word in ("100,000 and 1,000,000", "one process beside several", "--no-alone"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_start_of_a_run_is_measured_and_builds_two_steps_of_the_data(tmp_path, monkeypatch, built):
    numbers, start_run = [], data_path.start_run

    def watched(*data: Any, **more: Any) -> None:
        numbers.append(len(built))
        start_run(*data, **more)
        numbers.append(len(built))

    monkeypatch.setattr(data_path, "start_run", watched)
    monkeypatch.setattr(start, "fit_all_baselines", lambda *_: {})  # fitted on at most 10,000
    path, model = tmp_path / "pairs.jsonl", write_tiny(tmp_path / "model", "tiny-llama")
    data_path.write_pairs(path, 400)
    given = ["--model", model, "--measure", str(path), "--cache-dir", "none", "--num-workers", "1"]
    found = data_path.measure(data_path.parse([*given, "--with-start"]))
    assert found["used"] == 400
    assert found["start_seconds"] > 0
    assert found["peak_mib_of_start"] > 0
    assert numbers == [0, 32], "the largest for the trial and those of the first step, 16 each"
    few = data_path.measure(data_path.parse(given))
    assert few["sample"] == found["sample"]
    assert "start_seconds" not in few


def test_the_readme_lists_every_script():
    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in README] == []


def test_no_benchmark_is_longer_than_a_person_reads_in_one_go():
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in BENCHMARKS.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


@pytest.mark.slow
def test_what_inspecting_and_auditing_cost_with_a_bar_on_the_terminal(tmp_path, base_model):
    tools = ["inspect", "audit-tokens"]
    asked = ["--rows", "200", "--model", str(base_model), "--results", str(tmp_path), "--tools", *tools]
    assert data_tools.main(asked) == 0
    found = result(tmp_path)
    assert [one["name"] for one in found["tools"]] == tools
    assert all(one["bars"] > 0 and one["seconds"] > 0 for one in found["tools"])
    assert "--max-seq-len 1024" in page_in(tmp_path)
