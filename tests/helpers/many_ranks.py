"""Runs functions of this file on several ranks over gloo, forked from one process that has imported everything:

each line of stdin is [function, ranks, folder, how] as JSON, and each line of stdout what became of the ranks.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import held_in_parts
from common import make_groups, make_model
from in_half import make_gpt2
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import RewardlabError, RunInterrupted
from rewardlab.core.pending import Pending
from rewardlab.core.signals import StopRequests, ending_with_status
from rewardlab.data.groups import Datasets
from rewardlab.distributed import meeting, others
from rewardlab.distributed.ranks import Parallel, Ranks
from rewardlab.distributed.sharding import joined_ranks, parts_of, share
from rewardlab.model import lora
from rewardlab.model.config import ModelConfig
from rewardlab.model.half import HalfWeights
from rewardlab.model.lora_sums import sum_before_rounding
from rewardlab.model.reward import RewardModel
from rewardlab.model.trainable import half_frozen
from rewardlab.training import budget
from rewardlab.training import run as run_module
from rewardlab.training.ended import KeptEnd
from rewardlab.training.loop.partners import Machine
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.rehearsal import rehearse
from rewardlab.training.settings.config import RewardTrainerConfig

run_module.verify_in_clean_process = lambda folder: None


class Experts(torch.nn.Module):
    """Each token goes to one of several feed-forward parts, by its first number; some get none."""

    def __init__(self, part: torch.nn.Module, bounds: Sequence[float]) -> None:
        super().__init__()
        self.bounds = [-math.inf, *bounds, math.inf]
        self.experts = torch.nn.ModuleList(copy.deepcopy(part) for _ in range(len(bounds) + 1))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(states)
        for expert, (low, high) in zip(self.experts, pairwise(self.bounds), strict=True):
            own = (states[..., 0] > low) & (states[..., 0] <= high)
            if own.any():
                out = out.index_put(own.nonzero(as_tuple=True), expert(states[own]))
        return out


def model_for(how: Mapping[str, Any], dtype: torch.dtype) -> RewardModel:
    family, layout = how.get("family", "llama"), how.get("layout", "shared")
    model = make_gpt2() if family == "gpt2" else make_model(family, layout=layout, dtype=dtype)
    if how.get("experts"):
        model.backbone.layers[0].mlp = Experts(model.backbone.layers[0].mlp, how["experts"])
    return model


def trainer_for(folder: Path, how: Mapping[str, Any], alone: Parallel | None = None) -> RewardTrainer:
    """On a tiny model and a few groups, as `how` says; divided among the ranks, if any have joined."""
    dtype = getattr(torch, how.get("dtype", "float64"))
    model = model_for(how, dtype)
    if how.get("lora"):
        torch.manual_seed(3)
        dropout, dora = how.get("dropout", 0.0), how.get("dora", False)
        settings = ModelConfig(lora=True, lora_rank=2, lora_dropout=dropout, dora=dora)
        model.draws = lora.add_adapters(model.backbone, settings)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:  # zero at the start, which would hide half of the gradients
                torch.nn.init.normal_(parameter, std=0.02)
    if how.get("half"):
        for parameter in model.parameters():
            if parameter.ndim < 2:  # off the grid of half precision, as training leaves them
                parameter.data += 0.003 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        model.compute_dtype = half = getattr(torch, how["half"])
        if how.get("stochastic"):
            half_frozen(model.backbone, half)  # as a run holds them
            model.half_weights = HalfWeights(model.backbone, "backbone", half, "stochastic")
            sum_before_rounding(model.backbone)
    model.train()
    config = RewardTrainerConfig.of(
        model="tiny",
        dataset=("none",),
        output_dir=folder,
        batch_size=how.get("batch_size", 8),
        micro_token_budget=how.get("budget", 100),
        max_grad_norm=1e6,
        steps=4,
        lr=1e-3,
        lr_scheduler="constant",
        checkpoints=False,
        **how.get("settings", {}),
    )
    groups = make_groups(how.get("groups", 8), replies=how.get("replies", 2))
    together = alone
    if together is None:
        ranks = how["ranks"]
        parts = parts_of(how.get("sharding", "full"), ranks)
        together = share(model, parts, ranks, defer_sync=how.get("defer_sync", False))
    trainer = reward_trainer(
        config,
        model,
        Datasets(train=groups, eval=groups),
        num_steps=4,
        records=Records(folder, writes=False),
        save=lambda _folder: None,
        machine=Machine(parallel=together),
    )
    if "loss_scale" in how:
        trainer.loss_scale.value = trainer.loss_scale.goal = how["loss_scale"]
    return trainer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_step(folder: Path, how: Mapping[str, Any]) -> dict[str, Any]:
    """Loss and gradients of the first step, and the weights and scores after two."""
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        gradients: dict[str, torch.Tensor] = {}
        update = trainer._update

        def keep_gradients() -> bool:
            if not gradients:
                for name, parameter in trainer.model.named_parameters():
                    if parameter.grad is not None:
                        gradients[name] = whole(parameter.grad).clone()
                    else:
                        assert ".experts." in name or not parameter.requires_grad, name
            return update()

        trainer._update = keep_gradients
        reports = []
        for _ in range(2):
            batches = trainer._planned(trainer.step)
            reports.append(trainer.train_step(batches))
            trainer.step += 1
        scores = trainer.judge._judge(trainer.judge.data.eval, trainer.token_budget, "").rows
        found = {
            "gradients": gradients,
            "weights": {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()},
            "losses": [report.sums.mean_loss for report in reports],
            "norms": [(report.grad_norm, report.head_grad_norm) for report in reports],
            "pairs": [report.sums.comparisons for report in reports],
            "tokens": [report.throughput.work.unshared_tokens for report in reports],
            "scores": [row.score for row in scores],
            "empty": sum(not batch.indices for batch in batches),
        }
        found["scales"] = ranks.gather(trainer.loss_scale.state())
        if ranks.is_first:
            torch.save(found, folder / f"{how['name']}.pt")
        counts = ranks.gather(found["empty"])
        if ranks.is_first:
            (folder / f"{how['name']}.empty").write_text(json.dumps(counts))
        return found


def threads_after(folder: Path, how: Mapping[str, Any]) -> None:
    """Which threads a rank still has after the ranks have parted, at the end of a run or interrupted."""

    def train(ranks: Ranks) -> None:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        trainer.train_step(trainer._planned(trainer.step))
        (folder / f"during-{ranks.rank}").write_text(json.dumps(thread_names()))
        trainer._next = Pending("a plan", lambda: [] if threading.Event().wait(0.3) else trainer)
        if how["interrupted"]:
            raise RunInterrupted("stopped", exit_status=75)

    try:
        with joined_ranks() as ranks:
            train(ranks)
    finally:
        (folder / f"after-{os.environ['RANK']}").write_text(json.dumps(thread_names()))


def thread_names() -> list[str]:
    """Of all threads of this process, those outside of Python among them."""
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def whole_run(folder: Path, how: Mapping[str, Any]) -> None:
    """`train` with the settings in `how`, interrupted after step `stop_after` if that is given.

    `ceilings` are the largest token budgets that the trials of each rank find.
    """
    if "ceilings" in how:
        budget.CEILING["cpu"] = how["ceilings"][int(os.environ["RANK"])]
    config = from_mapping(RewardTrainerConfig, how["config"], where="settings")
    if stop := how.get("stop_after"):
        train_step = Trainer.train_step

        def asks(trainer: Trainer, batches: Any) -> Any:
            report = train_step(trainer, batches)
            if trainer.step + 1 == stop and trainer.ranks.rank == trainer.ranks.size - 1:
                trainer.keeper.stops._received = "SIGUSR1"  # one rank hears of it; all must stop
            return report

        Trainer.train_step = asks
    try:
        result = run_module.train(config)
    except RunInterrupted as interrupted:
        sys.exit(interrupted.exit_status)
    if int(os.environ.get("RANK", "0")) == 0:
        rows = result.test.rows if result.test is not None else []
        (folder / "result.json").write_text(json.dumps([row.score for row in rows]))


def on_two_disks(folder: Path, how: Mapping[str, Any]) -> None:
    """`train` where the same path is another folder for each rank, as on machines that share none."""
    meeting.SEEN_WITHIN_S = 0.0
    place = folder / os.environ["RANK"]
    place.mkdir()
    os.chdir(place)
    whole_run(folder, how)


def cannot_write(folder: Path, how: Mapping[str, Any]) -> None:
    """`train` where the last rank may read the folder of the run and not write there."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Path.touch = Path.open
    whole_run(folder, how)


def rehearsal(folder: Path, how: Mapping[str, Any]) -> None:
    """`rehearse` with the settings in `how`."""
    tried = rehearse(from_mapping(RewardTrainerConfig, how["config"], where="settings"))
    assert (tried is None) == (os.environ["RANK"] != "0")
    if tried is not None:
        found = [tried.by_heart.preferences, tried.by_heart.nll_before, tried.by_heart.nll_after]
        (folder / "result.json").write_text(
            json.dumps([tried.steps_taken, tried.num_steps, tried.train_seconds, found])
        )


def crash(folder: Path, how: Mapping[str, Any]) -> None:
    """The last rank fails in the second step, by an error or by dying where it stands."""
    others.GRACE_S = 2.0
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        forward = trainer.steps.forward

        def fails(batch: Any, step: int) -> Any:
            if trainer.step == 1 and ranks.rank == ranks.size - 1:
                if how["by"] == "dying":
                    os._exit(9)
                raise RewardlabError("this row is unreadable")
            return forward(batch, step)

        trainer.steps.forward = fails
        for _ in range(3):
            trainer.train_step(trainer._planned(trainer.step))
            trainer.step += 1


def runs_out_of_memory(folder: Path, how: Mapping[str, Any]) -> None:
    """One rank runs out of memory in its first micro-batch, once."""
    others.GRACE_S = 2.0
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        forward, calls = trainer.steps.forward, [0]

        def fails(batch: Any, step: int) -> Any:
            calls[0] += 1
            if calls[0] == 1 and ranks.rank == 1:
                raise torch.OutOfMemoryError("out of memory")
            return forward(batch, step)

        trainer.steps.forward = fails
        report = trainer.train_step(trainer._planned(0))
        told = ranks.gather((trainer.token_budget, report.sums.mean_loss))
        if ranks.is_first:
            (folder / "told.json").write_text(json.dumps(told))


def runs_out_of_memory_while_clipping(folder: Path, how: Mapping[str, Any]) -> None:
    """One rank runs out of memory among collectives."""
    others.GRACE_S = 2.0
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        if ranks.rank == 1:
            trainer.parallel.finish_gradients = fail_for_memory
        trainer.train_step(trainer._planned(0))


def fail_for_memory(_parameters: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def stopped_at_once(folder: Path, how: Mapping[str, Any]) -> None:
    """One rank is told to stop outside of training, while the others wait for it."""
    others.GRACE_S = 2.0
    with ending_with_status(), joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        if ranks.rank == how["rank"]:
            signal.raise_signal(signal.SIGUSR1)
        trainer.train_step(trainer._planned(0))


def hangs(folder: Path, how: Mapping[str, Any]) -> None:
    """One rank is stopped by a signal, held up in a library, or works until the others have said that they wait."""
    others.GRACE_S, others.LOOK_EVERY_S, others.SIGN_EVERY, others.TELL_AFTER_S = 0.2, 0.05, 2, 1.0
    with KeptEnd(folder) as end, joined_ranks(timeout_s=2.0) as ranks:
        end.begin(is_first=ranks.is_first)
        ranks.signs.step = 7
        ranks.wait()
        if ranks.rank == how["rank"]:
            if how["by"] == "a signal":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how["by"] == "a library":
                ctypes.PyDLL(None).sleep(20)  # keeps all threads of Python from running
            else:
                while "has waited for" not in (folder / "said").read_text():
                    threading.Event().wait(0.05)
        ranks.wait()
        end.finish()


def leaves_one_out(folder: Path, how: Mapping[str, Any]) -> None:
    """A parameter beside the adapters that no score depends on."""
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks, "lora": True})
        trainer.model.backbone.register_parameter("unread", torch.nn.Parameter(torch.zeros(2)))
        trainer.train_step(trainer._planned(0))


def not_finite(folder: Path, how: Mapping[str, Any]) -> None:
    """One rank's loss is NaN."""
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        forward = trainer.steps.forward

        def breaks(batch: Any, step: int) -> Any:
            loss, statistics = forward(batch, step)
            return (loss * float("nan") if ranks.rank == 1 and batch.indices else loss), statistics

        trainer.steps.forward = breaks
        trainer.train_step(trainer._planned(0))


def checkpointed(folder: Path, how: Mapping[str, Any]) -> None:
    """Stops that one rank is asked for, and a limit, are heeded by all at the same step."""
    with joined_ranks() as ranks:
        trainer = trainer_for(folder, {**how, "ranks": ranks})
        trainer.keeper.stops = StopRequests(max_hours=1e-9 if ranks.rank == 1 else None)
        trainer.step = 1
        try:
            trainer._heed_stop()
        except RunInterrupted as stopped:
            (folder / f"stopped-{ranks.rank}").write_text(str(stopped))


FUNCTIONS = {
    function.__name__: function
    for function in (
        one_step,
        whole_run,
        on_two_disks,
        cannot_write,
        rehearsal,
        crash,
        runs_out_of_memory,
        runs_out_of_memory_while_clipping,
        stopped_at_once,
        hangs,
        leaves_one_out,
        not_finite,
        threads_after,
        checkpointed,
        held_in_parts.beside_whole,
        held_in_parts.measured,
        held_in_parts.full_disk,
        held_in_parts.keep_tensors,
    )
}


def run(name: str, size: int, folder: Path, how: Mapping[str, Any]) -> list[tuple[int, int, float]]:
    """(rank, exit status, seconds) of every rank as they ended, killed after 240 s; what they say is in `said`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started, children = time.monotonic(), {}
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(child, signal.SIGKILL) for child in children])
    signal.alarm(240)
    for rank in range(size):
        if (child := os.fork()) == 0:
            with (folder / "said").open("a") as said:
                os.dup2(said.fileno(), 2)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            here, numbers = how.get("per_node", size), how.get("local_ranks", range(size))
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(numbers[rank]), "WORLD_SIZE": str(size)}
            os.environ["LOCAL_WORLD_SIZE"] = str(here[rank] if isinstance(here, list) else here)
            status = 0
            try:
                FUNCTIONS[name](folder, how)
            except SystemExit as ended:
                status = int(ended.code or 0)
            except RewardlabError as error:
                sys.stderr.write(f"error: {error}\n")
                status = 2
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stderr.flush()
            os._exit(status)
        children[child] = rank
    ends = []
    while children:
        child, status = os.wait()
        for other in children.keys() - {child}:
            os.kill(other, signal.SIGCONT)  # one that `hangs` stopped
        ends.append((children.pop(child), os.waitstatus_to_exitcode(status), time.monotonic() - started))
    return ends


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, size, folder, how = json.loads(line)
        sys.stdout.write(json.dumps(run(name, size, Path(folder), how)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
