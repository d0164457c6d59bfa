"""The batch scripts that are kept under `tests/experiments/golden`. After a change that is meant, write them anew and
look at what `git diff` says:

    PYTHONPATH=src python tests/helpers/golden_sbatch.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewardlab.experiments.slurm.script import Place, array_script, light_script
from rewardlab.experiments.slurm_config import slurm_config

GOLDEN = Path(__file__).resolve().parents[1] / "experiments" / "golden"
PLACE = Place(study=Path("/home/me/studies/lora"), work=Path("/home/me"), python="/home/me/.venv/bin/python")
RUNS = ("full/seed_0", "lr=1e-06,warmup_steps=50/seed_1", "lora+r8/seed_2")
ONE_GPU: Mapping[str, Any] = {"partition": "gpu", "account": "nlp", "time": "12:00:00", "array_limit": 2}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "one-gpu": ONE_GPU,
    "nodes": {"nodes": 2, "gpus_per_node": 4, "gpu_type": "a100", "mem": "256G", "modules": ["cuda/12.4", "nccl"]},
    "venv": {"venv": "/home/me/my env", "gpus_per_node": 0, "environment": {"HF_HUB_OFFLINE": 1}},
    "apptainer": {"container": "rm.sif", "mounts": ["/data"], "setup": ["ulimit -n 4096"]},
    "pyxis": {"container": "nvcr.io#nvidia/pytorch:26.01-py3", "container_runtime": "pyxis", "nodes": 2},
    "hostile": {
        "job_name": 'a "b" \\ #c $(touch x) é',
        "partition": "it's",
        "environment": {"SAYS": 'it\'s "$HOME" `id` $(id) \\ !'},
        "modules": ["a b;c"],
        "python": "/my $(id)/python",
        "extra": {"comment": "x # y", "exclusive": True, "gres": "gpu:1"},
    },
}


def rendered() -> dict[str, str]:
    """File -> text."""
    arrays = {
        f"{name}.sbatch": array_script(slurm_config(values), PLACE, name="main", phase="main", runs=RUNS)
        for name, values in SETTINGS.items()
    }
    gate = light_script(
        slurm_config({**ONE_GPU, "light_partition": "cpu", "extra": {"mail-user": "me@x.org", "gres": "gpu:1"}}),
        PLACE,
        name="main.gate",
        says="Gate of the phase main.",
        words=["plan", "gate", str(PLACE.study), "--phase", "main"],
    )
    return {**arrays, "gate.sbatch": gate}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
