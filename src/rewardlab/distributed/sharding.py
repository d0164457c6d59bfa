"""Joins the processes that torchrun started, and divides a model among them.

There are two ways. FSDP2 shards weights, gradients and optimiser state by decoder layer, over all ranks (`full`) or
within each node with copies over the nodes (`hybrid`). `none` leaves a whole model on every rank and adds the gradients
up once a step.
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import compress
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rewardlab.core.errors import ConfigError, RunInterrupted
from rewardlab.core.pending import let_finish
from rewardlab.distributed.meeting import end_meeting, meet, require_alone, tell_of_failure
from rewardlab.distributed.others import Others
from rewardlab.distributed.ranks import ALONE, Parallel, Ranks
from rewardlab.model.half import HalfWeights
from rewardlab.model.half_experts import are_joined_experts, weights_of_experts
from rewardlab.model.layers import decoder_layers
from rewardlab.model.reward import RewardModel
from rewardlab.model.rounded_parts import RoundedParts
from rewardlab.model.sharded_weights import drop_gathered

logger = logging.getLogger("rewardlab")
Sharding = Literal["full", "hybrid", "none"]
TIMEOUT_S: Final = 600.0
"""Seconds that a rank may give no sign of life."""
MAX_WAIT: Final = timedelta(hours=1)
"""How long a collective may wait for the slowest rank. Long, because the first rank saves while the others wait."""
BUCKET_BYTES: Final = 256 << 20
"""Bytes of gradients in one all-reduce where every rank has the whole model.

Gradients are copied into one flat tensor each time, so this is also the extra memory that the all-reduce takes.
"""
_meshes: Final[list[DeviceMesh]] = []
"""Device meshes made since the ranks joined; `_leave` empties them.

Of the process, as the process groups of torch.distributed are, which meshes keep alive: they have to end with the
process group, and by then the `Parts` that made them may be gone.
"""


def device_of_rank() -> torch.device:
    """Return this process's device: the GPU of its local rank, or the CPU.

    Raises ConfigError if there are more processes on the machine than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number, seen = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())), torch.cuda.device_count()
    # A scheduler may show each process a GPU of its own (Slurm with --gpus-per-task), which is number 0 for all of
    # them. torchrun shows every process all GPUs.
    if number >= seen and (seen > 1 or "TORCHELASTIC_RUN_ID" in os.environ):
        raise ConfigError(
            f"LOCAL_RANK is {number}, and this process sees {seen} GPU{'s' * (seen > 1)}: start at most as many "
            f"processes on a machine as it has GPUs."
        )
    return torch.device("cuda", number if number < seen else 0)


@contextmanager
def joined_ranks(*, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for the length of a `with` block.

    After `timeout_s` seconds without a sign of life of one, as when it is stopped or its machine hangs, all end.

    A process without torchrun's environment variables is alone. An error on one rank ends all of them: the rank that
    fails tells the others, and those that wait for it in a collective, and so cannot hear it, are ended some seconds
    later.
    Raises RankError on the ranks that end because of another one, LostRankError if that one did not say why, and
    ConfigError if the processes cannot meet.

    Ranks that end together leave no thread of a process group behind (see `_leave`), as long as nobody outside the
    block holds a sharded model.
    """
    if not (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
        require_alone()
        yield ALONE
        return
    try:
        device = device_of_rank()
        if device.type == "cuda":
            torch.cuda.set_device(device)
    # Of any class, as drivers raise their own. The others would wait for this process as long as they wait for any.
    except Exception as error:
        tell_of_failure(str(error))
        raise
    meeting = meet("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=MAX_WAIT)
    ranks = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    level = logger.level
    if not ranks.is_first:
        # All ranks log the same lines, so those of the first one are enough; errors of the others are still shown.
        logger.setLevel(logging.ERROR)
    together = False
    others = Others(ranks, meeting=meeting, timeout_s=timeout_s)
    try:
        yield ranks
        ranks.wait()
        together = True
    # A request to stop is agreed on between the ranks, so all of them raise it at the same step and leave together.
    except RunInterrupted as stopped:
        others.end()
        ranks.wait()
        together = True
        # The frames of the traceback hold sharded models, which hold process groups that `_leave` has to end.
        traceback.clear_frames(stopped.__traceback__)
        raise
    except BaseException as error:
        if (instead := others.cause(error)) is not None:
            raise instead from error
        raise
    finally:
        others.end()
        logger.setLevel(level)
        # If a rank failed, destroying the process groups could hang: it waits for ranks that may be gone.
        (_leave if together else end_meeting)()


def _leave() -> None:
    """Finish background plans, destroy the process groups, and wait for their threads, in this order.

    A gloo thread releases the tensors of a collective only after it has reported the collective as done, and it needs
    the interpreter's lock for that. If the interpreter is already shutting down, it ends that thread inside C++, which
    aborts the process, whatever its exit status was to be. The threads of a group end with the last reference to it.
    Sharded models hold such references: pending plans hold the models, reference cycles keep them alive, and PyTorch
    keeps their meshes in a registry.
    """
    let_finish()
    end_meeting()
    dist.destroy_process_group()
    while _meshes:
        # PyTorch has no public way to drop the process groups that a mesh keeps.
        getattr(_meshes.pop(), "_pg_registry", {}).clear()
    gc.collect()


class Parts:
    """How ranks hold sharded models, over all of them or within each node."""

    def __init__(self, ranks: Ranks, sharding: Sharding) -> None:
        """Raises ConfigError, on all ranks, unless every node has the same number of them (`hybrid`)."""
        self.ranks, self._sharding = ranks, sharding
        self._per_node = ranks.size
        self._nodes: list[list[int]] = []
        """The ranks of each node (`hybrid`)."""
        self._meshes: dict[str, DeviceMesh] = {}
        if sharding != "hybrid":
            return
        told = ranks.gather((ranks_here(ranks), os.environ.get("LOCAL_RANK", "")))
        found = sorted({here for here, _ in told})
        self._per_node = found[0]
        if len(found) > 1 or ranks.size % self._per_node:
            raise ConfigError(
                f"--sharding hybrid needs the same number of ranks on every node; here a node has "
                f"{' or '.join(map(str, found))} of the {ranks.size} (LOCAL_WORLD_SIZE)."
            )
        self._nodes = nodes_of([number for _, number in told], self._per_node)

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that logs and writes."""
        return self.ranks.is_first

    def gather(self, thing: Any) -> list[Any]:
        """Return what every rank passes in, ordered by rank."""
        return self.ranks.gather(thing)

    def by_first(self, do: Callable[[], Any]) -> Any:
        """Run `do` on the first rank alone; return its result, or raise its error, on all ranks."""
        return self.ranks.by_first(do)

    def tell(self, line: str) -> None:
        """Log a line on the first rank."""
        logger.info(line)

    def divide(self, model: RewardModel) -> None:
        """Leave each rank with its shards of a model, in place, on the device of the head.

        No optimiser may hold its parameters yet, since sharding replaces them.
        """
        device = model.device
        # Copies of the weights in half precision are of whole weights; sharded ones are cast by FSDP or by
        # RoundedParts.
        copies, model.half_weights = model.half_weights, None
        if copies is not None:
            copies.drop()
        _shard(model, self._mesh(device.type))
        # FSDP's cast rounds to the nearest number, so only stochastic rounding needs code of our own.
        if isinstance(copies, HalfWeights) and copies.rounding == "stochastic":
            model.half_weights = RoundedParts(model.backbone, "backbone", copies.dtype)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Each rank divides its loss by the weight of all ranks, so gradients must be summed. FSDP averages by
                # default, and with gloo a divide factor of 1 is not enough to change that.
                module.set_gradient_divide_factor(1.0)
                if device.type == "cpu":
                    module.set_force_sum_reduction_for_comms(True)

    def _mesh(self, kind: str) -> DeviceMesh:
        """Return the device mesh for `kind` of device ("cpu", "cuda"): nodes by ranks of a node, or all ranks in one
        dimension.

        Made once, since each mesh creates process groups of its own.
        """
        if kind not in self._meshes:
            self._meshes[kind] = (
                DeviceMesh(kind, self._nodes, mesh_dim_names=("replicate", "shard"))
                if self._sharding == "hybrid"
                else init_device_mesh(kind, (self.ranks.size,), mesh_dim_names=("shard",))
            )
            _meshes.append(self._meshes[kind])
        return self._meshes[kind]

    def line(self) -> str:
        """Return how the ranks share a model, for the log."""
        if self._sharding == "full":
            return f"{self.ranks.size}, the model sharded over all of them"
        copies = self.ranks.size // self._per_node
        return f"{self.ranks.size}, sharded within {self._per_node} and replicated {copies} times"


def ranks_here(ranks: Ranks) -> int:
    """Return how many of the ranks are on this machine; all of them where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))


def nodes_of(local_ranks: Sequence[str], per_node: int) -> list[list[int]]:
    """Return the ranks of each node, from the LOCAL_RANK of every rank.

    A scheduler may place ranks one after the other, or deal them to the nodes in turn (`srun --distribution=cyclic`).
    Either way the n-th rank with some local number is on the n-th node. Where the local numbers are not those of whole
    nodes, ranks that follow each other share one.
    """
    size = len(local_ranks)
    alike = [[rank for rank in range(size) if local_ranks[rank] == str(number)] for number in range(per_node)]
    if any(len(ranks) != size // per_node for ranks in alike):
        return [list(range(first, first + per_node)) for first in range(0, size, per_node)]
    return [list(node) for node in zip(*alike, strict=True)]


def parts_of(sharding: Sharding, ranks: Ranks) -> Parts | None:
    """Return how the ranks hold sharded models; None if each rank has the whole model, or the process is alone.

    Raises ConfigError if the number of ranks does not fit `sharding`.
    """
    return Parts(ranks, sharding) if dist.is_initialized() and sharding != "none" else None


def share(model: RewardModel, parts: Parts | None, ranks: Ranks, *, defer_sync: bool = False) -> Parallel:
    """Return how the ranks share a step of a loaded model.

    With `parts`, the model is sharded here unless that was done when it was loaded. `defer_sync` reduces gradients once
    a step instead of once a micro-batch, which takes the memory of whole gradients.
    """
    if not dist.is_initialized():
        return Parallel(ranks)
    if parts is None:
        logger.info("ranks: %d, each with the whole model", ranks.size)
        return _Replicated(ranks)
    logger.info("ranks: %s", parts.line())
    if not isinstance(model, FSDPModule):
        parts.divide(model)
    return _Sharded(ranks, model, defer_sync=defer_sync)


def _shard(model: RewardModel, mesh: DeviceMesh) -> None:
    """Apply FSDP2 to each decoder layer, then to the rest of the model."""
    as_held = MixedPrecisionPolicy(cast_forward_inputs=False)
    in_half = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder_layers(model.backbone):
        # The matrices of a layer are multiplied in half precision anyway, so gathering them in half precision halves
        # the traffic and changes no number. Norms compute in float32 and are gathered as they are. Layers with adapters
        # hold their frozen weights in half precision already, so nothing is cast there.
        if model.compute_dtype.itemsize < 4 and {p.dtype for p in layer.parameters()} == {torch.float32}:
            if others := _computed_as_held(layer):
                fully_shard(others, mesh=mesh, mp_policy=as_held)
            fully_shard(layer, mesh=mesh, mp_policy=in_half)
        else:
            fully_shard(layer, mesh=mesh, mp_policy=as_held)
    # The rest, which includes the head, computes in the dtype in which it is held: float32 where it trains.
    fully_shard(model, mesh=mesh, mp_policy=as_held)
    # In front of FSDP's own hook: there its streams wait for what was started before, and nowhere after. On a GPU they
    # would gather the first layer's weights while `RoundedParts` rounds them.
    model.register_forward_pre_hook(_round_first, prepend=True)


def _round_first(model: RewardModel, _inputs: object) -> None:
    # Weights outside the decoder layers stay gathered from pass to pass, so those of another rounding are gathered
    # again.
    if model.refresh_half_weights() and isinstance(model, FSDPModule):
        model.reshard()


def _computed_as_held(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that hold only vectors, such as norms, and joined experts without copies."""
    return [
        module
        for module in layer.modules()
        if (own := list(module.parameters(recurse=False)))
        and (
            all(parameter.ndim < 2 for parameter in own)
            or (are_joined_experts(module) and not weights_of_experts(module))
        )
    ]


class _Sharded(Parallel):
    """FSDP2: gradients are reduced, and each rank keeps its shard, in every backward pass or only in the last of a
    step.
    """

    def __init__(self, ranks: Ranks, model: RewardModel, *, defer_sync: bool) -> None:
        super().__init__(ranks)
        # Every layer gathers weights from all ranks, so a rank that runs out of memory leaves the others waiting in a
        # layer.
        self.can_back_off = ranks.size == 1
        assert isinstance(model, FSDPModule)
        self._root, self._defer_sync = model, defer_sync

    def before_micro_batch(self, *, is_last: bool) -> None:
        if self._defer_sync:
            self._root.set_requires_gradient_sync(is_last)

    def drop_gathered(self) -> None:
        drop_gathered(self._root)

    def finish_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore the weights as they were before stochastic rounding; FSDP has already summed the gradients."""
        if self._root.half_weights is not None:
            self._root.half_weights.restore()


class _Replicated(Parallel):
    """A whole model on every rank."""

    def finish_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients up over the ranks, a bucket at a time.

        A parameter without a gradient on this rank alone, such as an expert that no token of it visited, adds zeros.
        One without a gradient on any rank keeps none, as in a process that is alone: the optimiser leaves it as it is.
        """
        if self.ranks.size == 1:
            return
        parameters = list(parameters)
        moves = self.ranks.any(*(parameter.grad is not None for parameter in parameters))
        bucket: list[torch.Tensor] = []
        for parameter in compress(parameters, moves):
            if parameter.grad is None:
                # All ranks must pass tensors of the same size to the all-reduce, whichever of their parameters had a
                # gradient.
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
                self._add_up(bucket)
                bucket = []
        if bucket:
            self._add_up(bucket)

    def _add_up(self, gradients: list[torch.Tensor]) -> None:
        # One all-reduce of a flat tensor takes the place of one for each of hundreds of small parameters.
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
