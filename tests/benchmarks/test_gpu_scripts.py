"""The scripts for one GPU run here on a tiny model, so that a slip of the pen costs no time on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
import gpu_kernels
import gpu_memory
import gpu_nvml
import gpu_page
import gpu_profile
import gpu_sharded
from harness import gpu_runs
from rewardlab.model.attention_backends import BACKENDS

TINY = ["--device", "cpu", "--tiny"]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
SCRIPTS = {
    "gpu": gpu,
    "gpu_kernels": gpu_kernels,
    "gpu_profile": gpu_profile,
    "gpu_memory": gpu_memory,
    "gpu_sharded": gpu_sharded,
    "gpu_nvml": gpu_nvml,
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def result(folder: Path) -> tuple[dict[str, Any], str]:
    """The one result in a folder: data and page."""
    (path,) = folder.glob("*.json")
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert str(folder) not in page + path.read_text(encoding="utf-8"), "a place on this machine"
    return json.loads(path.read_text(encoding="utf-8")), page


@pytest.mark.slow
def test_kernels_are_held_to_the_law(tmp_path):
    assert gpu_kernels.main([*TINY, "--repeats", "1", "--calls", "1", "--results", str(tmp_path)]) == 0
    found, page = result(tmp_path)
    assert [cell["cell"] for cell in found["cells"]] == [
        f"{what} tiny K={replies}" for what in ("layer", "model") for replies in (2, 8)
    ]
    for cell in found["cells"]:
        assert set(cell["kernels"]) == set(BACKENDS)
        assert all(kind > 0 for part in cell["allowed"].values() for kind in part.values()), "half precision errs"
        for name in ("segments", "mask"):
            facts = cell["kernels"][name]
            assert facts["holds"]
            assert facts["wall"] > 0
            assert max(facts["ratios"].values()) <= 2
        assert cell["kernels"]["varlen"] == {"left_out": "it runs only on CUDA"}
    assert "| layer tiny K=8 | mask | **holds** |" in page


@pytest.mark.slow
def test_a_kernel_that_is_wrong_or_fails_is_told_and_the_others_are_measured(tmp_path, monkeypatch, capsys):
    right = BACKENDS["mask"]

    def wrong_for_one_reply(query, key, value, layout, formula):
        output = right(query, key, value, layout, formula)
        return torch.cat([output[:, :, :-5], output[:, :, -5:] * 1.1], 2)

    def fails(*_):
        raise RuntimeError("no kernel image\nsecond line")

    monkeypatch.setitem(BACKENDS, "mask", wrong_for_one_reply)
    monkeypatch.setitem(BACKENDS, "flex", fails)
    monkeypatch.setattr(gpu_kernels, "unavailable", lambda name, **_: "" if name != "flash" else "not here")
    monkeypatch.setitem(BACKENDS, "varlen", BACKENDS["segments"])
    flags = ["--repeats", "1", "--calls", "1", "--replies", "2", "--results", str(tmp_path)]
    assert gpu_kernels.main([*TINY, *flags]) == 1
    found, page = result(tmp_path)
    for cell in found["cells"]:
        assert cell["kernels"]["mask"]["holds"] is False
        assert cell["kernels"]["flex"] == {"failed": "RuntimeError: no kernel image"}
        assert cell["kernels"]["varlen"]["holds"] is True
    assert "| layer tiny K=2 | mask | **BROKEN** |" in page
    assert "not within the law: layer tiny K=2 mask; layer tiny K=2 flex" in capsys.readouterr().out


def test_not_a_number_is_no_small_error():
    truth = torch.zeros(3)
    errors = {"output": gpu_kernels.distance(torch.tensor([0.0, float("nan"), 0.0]), truth)}
    ratios = gpu_kernels.ratios_of(errors, {"output": {"max": 1.0, "mean": 1.0}})
    assert not all(ratio <= 2 for ratio in ratios.values())
    assert gpu_kernels.worst_of(ratios, "max") == "nan (output)"


def test_rows_of_the_kernels_have_the_shapes_that_go_wrong_first():
    groups = gpu_kernels.draw_groups(8, 4096, vocabulary=100, seed=1)
    shapes = [(len(group.shared), [len(suffix) for suffix in group.suffixes]) for group in groups]
    assert all(len(own) == 8 for _, own in shapes)
    assert shapes[0][0] == 0
    assert 1 in shapes[1][1]
    assert 4096 <= sum(shared + sum(own) for shared, own in shapes) < 6000


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tss_128x168_64x5_1x1_h_bz_NNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float>", "products"),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128>>", "attention"),
        ("void at::native::vectorized_elementwise_kernel<2, at::native::BinaryFunctor<long, long, long>>", "rounding"),
        ("void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>", "rounding"),
        ("_round", "rounding"),
        ("_multiply_backward", "kernels of Triton"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>>", "optimiser"),
        ("void at::native::layer_norm_grad_input_kernel_vectorized<float, float, true>", "norms"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)", "others"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "others"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, kind):
    assert gpu_profile.kind_of(kernel) == kind


@pytest.mark.slow
def test_steps_are_timed_and_one_is_profiled(tmp_path):
    flags = ["--repeats", "2", "--warmup", "1", "--set", "elementwise_backend=torch", "--results", str(tmp_path)]
    assert gpu_profile.main([*TINY, *flags]) == 0
    found, page = result(tmp_path)
    assert [cell["cell"] for cell in found["cells"]] == ["tiny full", "tiny lora"]
    for cell in found["cells"]:
        assert len(cell["samples"]) == 2
        assert cell["busy"] == cell["kernels_started"] == 0, "there is no GPU here"
        assert "aten::mm" in cell["host"]
    assert "random weights, fp32 with elementwise_backend=torch; medians of 2" in page
    assert "| tiny lora | **" in page


@pytest.mark.slow
def test_memory_is_split_by_what_it_is_for(tmp_path):
    assert gpu_memory.main([*TINY, "--results", str(tmp_path)]) == 0
    found, page = result(tmp_path)
    lora, full = found["cells"]
    assert (lora["cell"], full["cell"]) == ("tiny lora none", "tiny full full")
    assert 256 < lora["tokens"] <= 512
    assert set(lora["measured"]) == set(gpu_memory.COLUMNS)
    assert lora["predicted"]["peak"] == pytest.approx(sum(lora["terms"].values()))
    assert "forward" not in full["predicted"], "what is computed again is not there after the forward pass"
    assert full["terms"]["moments"] == 2 * full["terms"]["weights"] == 2 * full["terms"]["gradients"]
    assert "predicted" in page


def test_memory_cells_fill_two_micro_batches_as_far_as_whole_pairs_do():
    options = gpu_memory.parse([])
    groups = gpu_memory.fill(gpu_runs.draw_pairs("3b", options, count=options.tokens // 10), 2 * options.tokens)
    tokens = sum(len(group.shared) + sum(map(len, group.suffixes)) for group in groups)
    assert options.tokens == 8192
    assert 15400 < tokens <= 2 * 8192


@pytest.mark.slow
def test_one_sharded_rank_has_the_losses_of_one_alone(tmp_path):
    assert gpu_sharded.main([*TINY, "--repeats", "2", "--results", str(tmp_path)]) == 0
    found, page = result(tmp_path)
    for cell in found["cells"]:
        assert cell["losses"]["alone"] == pytest.approx(cell["losses"]["sharded"], rel=1e-5)
        assert len(cell["losses"]["alone"]) == 4
        assert cell["losses_moved"] > 0.01, "losses of weights that stand still would be equal anyway"
        assert set(cell["variants"]) == {"alone", "sharded"}
    assert "| same: at most" in page
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_losses_that_differ_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_sharded, "TOLERANCE", {"fp32": -1.0})
    flags = ["--cells", "tiny full", "--repeats", "1", "--warmup", "0", "--results", str(tmp_path)]
    assert gpu_sharded.main([*TINY, *flags]) == 1
    assert "| DIFFERENT: at most" in result(tmp_path)[1]


@pytest.mark.slow
def test_the_gpu_is_sampled_beside_steps(tmp_path):
    flags = ["--steps", "2", "--repeats", "2", "--interval-ms", "1", "--results", str(tmp_path)]
    assert gpu_nvml.main([*TINY, *flags]) == 0
    found, page = result(tmp_path)
    (cell,) = found["cells"]
    assert cell["samples"] >= 2
    assert cell["values"]["utilization_percent"] is None
    assert cell["values"]["power_w"] == {"mean": 3.0, "low": 3.0, "high": 3.0}
    assert set(cell["ratios"]) == {"watched → alone"}
    assert "| tiny full | – | 1 (1 to 1) | 2 (2 to 2) | 3 (3 to 3) | 4 (4 to 4) |" in page


@pytest.fixture
def options(tmp_path):
    return gpu_nvml.parse([*TINY, "--results", str(tmp_path)])


def page_of_names(cells, options):
    return [f"**{cell['cell']}**" for cell in cells]


def test_what_is_finished_is_on_the_disk_when_a_run_is_stopped(tmp_path, options):
    def measure(name, options, work, until):
        if name == "second":
            assert [cell["cell"] for cell in result(tmp_path)[0]["cells"]] == ["first"]
            raise KeyboardInterrupt
        return {"cell": name}

    with pytest.raises(KeyboardInterrupt):
        gpu_runs.run_cells("gpu", options, ["first", "second"], measure=measure, page=page_of_names)
    found, page = result(tmp_path)
    assert [cell["cell"] for cell in found["cells"]] == ["first"]
    assert found["left_out"] == ["second"]
    assert "Left out for want of time: second." in page


def test_a_cell_that_fails_costs_no_other(tmp_path, options):
    def measure(name, options, work, until):
        if name == "first":
            raise RuntimeError("CUDA error: an illegal memory access\nmore")
        return {"cell": name}

    cells, sound = gpu_runs.run_cells("gpu", options, ["first", "second"], measure=measure, page=page_of_names)
    assert (cells, sound) == ([{"cell": "second"}], False)
    assert "Could not run: first: RuntimeError: CUDA error: an illegal memory access." in result(tmp_path)[1]


def test_no_cell_begins_after_the_minutes_are_over(tmp_path):
    options = gpu_nvml.parse([*TINY, "--minutes", "0", "--results", str(tmp_path)])
    names = ["first", "second", "third"]
    gpu_runs.run_cells("gpu", options, names, measure=lambda name, *_: {"cell": name}, page=page_of_names)
    assert result(tmp_path)[0]["left_out"] == ["second", "third"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_it_stands_a_script_ends_within_nine_minutes_and_wants_a_gpu(name, monkeypatch):
    assert SCRIPTS[name].parse([]).minutes <= 8
    assert SCRIPTS[name].parse([]).device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if name != "gpu_sharded":  # whose process group would be one of CPUs
        with pytest.raises(SystemExit, match="there is no GPU here"):
            SCRIPTS[name].main([])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_readme_has_the_command_of_every_script_for_a_gpu(name):
    assert f"scripts/bench {name}\n" in README


@pytest.mark.slow
def test_scripts_for_a_gpu_need_no_package_that_is_not_required():
    """GPUs are lent on machines where little is installed."""
    absent = ["gguf", "tyro", "datasets", "trl", "beartype", "bitsandbytes", "flash_attn", "liger_kernel", "matplotlib"]
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import {', '.join(SCRIPTS)}, gpu_page"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS,
        env={"PYTHONPATH": str(BENCHMARKS.parent / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def write_result(folder: Path, benchmark: str, *, gpu: str | None, date: str, ratio: str) -> None:
    path = folder / f"{benchmark}.some-gpu.{date}.json"
    path.write_text(json.dumps({"date": f"{date}T00:00:00", "machine": {"gpu": gpu}}), encoding="utf-8")
    path.with_suffix(".md").write_text(f"# Title of {benchmark}\n\n**{ratio}**\n", encoding="utf-8")


def test_the_page_has_the_newest_result_of_each_part_from_a_gpu(tmp_path):
    folder, output = tmp_path / "benchmarks" / "results", tmp_path / "docs" / "gpu.md"
    folder.mkdir(parents=True)
    output.parent.mkdir()
    write_result(folder, "gpu", gpu="H", date="2026-01-01", ratio="old")
    write_result(folder, "gpu", gpu="H", date="2026-02-01", ratio="new")
    write_result(folder, "gpu", gpu=None, date="2026-03-01", ratio="from a CPU")
    write_result(folder, "gpu_kernels", gpu="H", date="2026-01-01", ratio="kernels")
    again = folder / "gpu.some-gpu.2026-02-01-2.json"
    again.write_text(json.dumps({"date": "2026-02-01T09:00:00", "machine": {"gpu": "H"}}), encoding="utf-8")
    again.with_suffix(".md").write_text("# Title of gpu\n\n**newest**\n", encoding="utf-8")
    assert gpu_page.main(["--results", str(folder), "--output", str(output)]) == 0
    page = output.read_text(encoding="utf-8")
    assert "**newest**" in page, "the second of a day"
    assert "**new**" not in page
    assert page.index("## Title of gpu\n") < page.index("## Title of gpu_kernels\n")
    assert "old" not in page
    assert "from a CPU" not in page
    link = "../benchmarks/results/gpu.some-gpu.2026-02-01-2.md"
    assert f"({link})" in page
    assert (output.parent / link).is_file()
    assert "No record of: `gpu_profile.py`, `gpu_memory.py`, `gpu_sharded.py`, `gpu_nvml.py`." in page


def test_without_a_result_from_a_gpu_there_is_no_page(tmp_path):
    with pytest.raises(SystemExit, match="no result in results is from a GPU"):
        gpu_page.collect(tmp_path / "results", tmp_path / "gpu.md")
