"""Programs of torch.compile: counted, and told when there are more of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter

import pytest

import rewardlab.training.monitoring.progress as compiled_module
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.run import train
from runs import config_for


@pytest.fixture
def counter(monkeypatch):
    counter = Counter(unique_graphs=5)
    monkeypatch.setattr(compiled_module, "counters", {"stats": counter})
    return counter


@pytest.mark.slow
def test_new_programs_are_told_with_each_evaluation(base_model, pairs_file, tmp_path, monkeypatch, counter, caplog):
    made = {1: 3, 2: 1, 5: 2}
    step = Trainer.train_step

    def compiling(self, batches):
        counter["unique_graphs"] += made.get(self.step + 1, 0)
        return step(self, batches)

    monkeypatch.setattr(Trainer, "train_step", compiling)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        train(config_for(base_model, pairs_file, tmp_path / "run", steps=6, eval_every=2))
    lines = [line for line in caplog.messages if "COMPILED" in line]
    assert lines == [
        "step 2/6  COMPILED  9 programs so far, 4 of them after step 0",
        "step 6/6  COMPILED  11 programs so far, 2 of them after step 4",
    ]


INDUCTOR = pytest.param("inductor", marks=pytest.mark.soak)
"""Parts are traced and split as for `eager`, which ends there, as what is of ours does; inductor then writes C++, which
takes half a minute to be compiled.
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory, request):
    """The lines that one of PROGRAMS prints with a backend.

    Those of all tests that were asked for run one after the other in a process of their own for each backend,
    without the checks of annotations that tests run with: they cannot be compiled.
    """
    asked: dict[str, list[str]] = {}
    for item in request.session.items:
        if (program := PROGRAMS.get(getattr(item, "originalname", ""))) and item.path == request.path:
            asked.setdefault(item.callspec.params["backend"], []).append(program)
    known: dict[str, list[list[str]]] = {}

    def lines(program, backend):
        if backend not in known:
            known[backend] = run(backend, asked[backend], tmp_path_factory.mktemp("compiled"))
        return known[backend][asked[backend].index(program)]

    return lines


def run(backend, programs, folder):
    parts = "print('next')\ntorch._dynamo.reset()\n".join(programs)
    found = subprocess.run(
        [sys.executable, "-c", COMMON + parts, backend, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAXTYPING_DISABLE": "1"},
    )
    assert found.returncode == 0, found.stderr
    return [part.splitlines() for part in found.stdout.split("next\n")]


COMMON = """
import sys
from pathlib import Path

import torch

from common import make_groups, make_model
from rewardlab.batch import pack
from rewardlab.data.groups import Datasets
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ModelConfig, TrainComputeConfig
from rewardlab.model.lora import add_adapters
from rewardlab.model.trainable import choose_trainable
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.progress import compiled_programs
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig

backend, folder = sys.argv[1], Path(sys.argv[2])
compile_any = torch.compile  # by which modules are compiled too
torch.compile = lambda part, **how: compile_any(part, **{"backend": backend, **how})
"""

LOSS = """
def trainer(compiled):
    torch.manual_seed(0)
    return reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=6, micro_token_budget=120, compile=compiled),
        make_model("llama", dtype=torch.float64).train(),
        Datasets(train=make_groups(30, replies=3)),
        num_steps=5,
        records=Records(folder),
        save=lambda folder, step: None,
    )

plain, compiled = trainer(False), trainer(True)
for step in range(5):
    expected, found = (each.train_step(each._planned(step)) for each in (plain, compiled))
    print(*[value for each in (expected, found) for value in (each.sums.mean_loss, each.grad_norm, each.sums.correct)])
    print(compiled_programs())
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_a_compiled_loss_is_the_loss_and_needs_no_program_for_every_length(said, backend):
    lines = said(LOSS, backend)
    for line in lines[::2]:
        numbers = [float(word) for word in line.split()]
        assert numbers[3:] == pytest.approx(numbers[:3], rel=1e-9)
    programs = [int(line) for line in lines[1::2]]
    assert programs[0] > 0
    assert programs[-1] == programs[0], "few, and at the start"


HALF = """
torch.compile = lambda part, **how: compile_any(part, **{"backend": backend, **how})
def built(compiled, lora=False):
    model = make_model("qwen2" if lora else "llama").train()
    if lora:
        torch.manual_seed(0)
        add_adapters(model.backbone, ModelConfig(model="m", lora=True))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.compute_dtype = torch.bfloat16
    settings = TrainComputeConfig(
        attention_backend="segments", linear_backend="torch", allocator="system", compile=compiled
    )
    apply_compute(model, settings, half_rounding="stochastic")
    return model

def step(model, draw):
    model.step_draw = (draw,)
    model.zero_grad()
    scores = model(pack(make_groups(4, replies=3)))
    scores.square().sum().backward()
    return scores.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])

def compare(plain, compiled, draw):
    (scores, gradient), (found, found_gradient) = step(plain, draw), step(compiled, draw)
    print(*(float((a - b).norm() / a.norm()) for a, b in ((scores, found), (gradient, found_gradient))))

plain, compiled = built(False), built(True)
for draw in range(2):
    compare(plain, compiled, draw)
if backend == "inductor":  # for long: adapters alone are compiled in DROPPED
    compare(built(False, lora=True), built(True, lora=True), 0)
print(float((step(compiled, 0)[0] - step(compiled, 1)[0]).abs().max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_compiled_layers_compute_by_the_copies_of_the_step(said, backend):
    *steps, moved = said(HALF, backend)
    for line in steps:
        scores, gradient = map(float, line.split())
        assert scores < 0.02
        assert gradient < 0.05
    assert float(moved) > 0, "another step, other copies"


DROPPED = """
def built(compiled, rate):
    model = make_model("llama").train()
    model.draws = add_adapters(model.backbone, ModelConfig(lora=True, lora_rank=2, lora_dropout=rate))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    settings = TrainComputeConfig(
        attention_backend="segments", linear_backend="torch", allocator="system", compile=compiled
    )
    apply_compute(model, settings)
    return model

def step(model, draw):
    model.step_draw = (draw,)
    model.zero_grad()
    scores = model(pack(make_groups(4 + draw, replies=3, seed=draw)))
    scores.square().sum().backward()
    return torch.cat([scores.detach(), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])

for rate in (0.0, 0.3):
    torch._dynamo.reset()
    before, (plain, compiled) = compiled_programs(), (built(how, rate) for how in (False, True))
    for draw in range(3):
        wanted, found = step(plain, draw), step(compiled, draw)
        print(float((wanted - found).norm() / wanted.norm()), compiled_programs() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_compiled_layers_drop_what_others_drop_and_share_their_program(said, backend):
    found = [(float(distance), int(programs)) for distance, programs in map(str.split, said(DROPPED, backend))]
    assert max(distance for distance, _ in found) < 1e-5
    without, with_dropout = found[:3], found[3:]  # one for any layer, any number of tokens, any step
    assert [programs for _, programs in with_dropout] == [programs for _, programs in without]
    assert len(with_dropout) == 3


FLOATS = """
given = []

def noting(graph, inputs):
    given.extend(inputs)
    return graph.forward

torch.compile = lambda part, **how: compile_any(part, **{**how, "backend": noting})
for config in ({"lora": True}, {}):
    model = make_model("qwen2").train()
    torch._dynamo.reset()
    choose_trainable(model, ModelConfig(model="m", **config), seed=0)
    model.compute_dtype = torch.bfloat16
    settings = TrainComputeConfig(
        attention_backend="segments", linear_backend="torch", allocator="system", compile=True
    )
    apply_compute(model, settings, half_rounding="stochastic")
    trainer = reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=6, compile=True, **config),
        model,
        Datasets(train=make_groups(6, replies=3)),
        num_steps=2,
        records=Records(folder),
        save=lambda folder, step: None,
    )
    trainer.train_step(trainer._planned(0))
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    print(len(tensors), sum(one.ndim == 0 for one in tensors))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager"])
def test_no_float_is_given_to_a_program_as_a_tensor_of_the_cpu(said, backend):
    """For which inductor writes C++, also beside the kernels of a GPU."""
    for line in said(FLOATS, backend):
        tensors, floats = map(int, line.split())
        assert tensors > 10
        assert floats == 0


PROGRAMS = {
    test.__name__: program
    for test, program in (
        (test_a_compiled_loss_is_the_loss_and_needs_no_program_for_every_length, LOSS),
        (test_compiled_layers_compute_by_the_copies_of_the_step, HALF),
        (test_compiled_layers_drop_what_others_drop_and_share_their_program, DROPPED),
        (test_no_float_is_given_to_a_program_as_a_tensor_of_the_cpu, FLOATS),
    )
}
