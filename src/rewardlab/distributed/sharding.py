"""A run on many devices: joining the processes that torchrun started, and dividing a model among them.

Two ways: FSDP2 shards weights, gradients and optimiser by decoder layer (over all ranks, or within each node and
replicated over nodes), and `none` leaves a whole model on every rank and adds the gradients up once a step.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rewardlab.core.errors import ConfigError, RankError, RunInterrupted
from rewardlab.core.pending import let_finish
from rewardlab.core.signals import signals_as_ever
from rewardlab.core.terminal import visible_message
from rewardlab.distributed.ranks import ALONE, Parallel, Ranks
from rewardlab.model.half import HalfWeights, RoundedParts
from rewardlab.model.layers import decoder_layers
from rewardlab.model.parts import drop_gathered
from rewardlab.model.reward import RewardModel

logger = logging.getLogger("rewardlab")
Sharding = Literal["full", "hybrid", "none"]
FAILED: Final = "rewardlab/failed"
"""Key under which the first rank that fails says why."""
LOOK_EVERY_S: Final = 1.0
GRACE_S: Final = 10.0
"""For a rank to end by itself once another has failed; after it the process is ended where it stands."""
MAX_WAIT: Final = timedelta(hours=1)
"""For the slowest rank: the first one saves while the others wait."""
BUCKET_BYTES: Final = 256 << 20
"""Gradients added up at a time where every rank has all of them."""
_meshes: Final[list[DeviceMesh]] = []
"""Made since the ranks have joined."""


def device_of_rank() -> torch.device:
    """This process's device: its own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that torchrun started, joined; a process without its environment is alone.

    An error on one rank ends all of them: whoever fails says so to the others, and those that cannot hear it because
    they wait for the failed one are ended after GRACE_S. Raises RankError on ranks that end because of another.

    Ranks that end together leave no thread of a process group behind (see `_leave`), so long as nobody outside of the
    block holds a model in parts.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    device = device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with signals_as_ever():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=MAX_WAIT)
    ranks = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    level = logger.level
    if not ranks.is_first:
        logger.setLevel(logging.ERROR)
    ended, together = threading.Event(), False
    store = _store()
    watch = threading.Thread(target=_end_with_others, args=(ranks.rank, ended), daemon=True)
    watch.start()
    try:
        yield ranks
        ranks.wait()
        together = True
    except RunInterrupted as stopped:  # on all ranks together
        ended.set()
        ranks.wait()
        together = True
        traceback.clear_frames(stopped.__traceback__)  # they hold models, and models in parts hold process groups
        raise
    except BaseException as error:
        told = _tell(store, f"rank {ranks.rank} failed: {error or type(error).__name__}")
        if told.startswith(f"rank {ranks.rank} "):
            raise
        raise RankError(f"rank {ranks.rank} ended, because {told}") from error
    finally:
        ended.set()
        watch.join()
        logger.setLevel(level)
        if together:  # otherwise others may be gone, and there is nobody to say goodbye to
            _leave()


def _leave() -> None:
    """End what is planned ahead, destroy the process groups, and wait for their threads, in this order.

    A thread of gloo lets go of the tensors of a collective only after it has told that the collective is done, and
    takes the interpreter's lock for that. If the interpreter is ending by then, it ends the thread inside of C++, which
    aborts the process, whatever its exit status was to be. The threads of a group end with the last that refers to it:
    models in parts, which plans hold and which are circles of references, and their meshes, which PyTorch keeps beside
    what it knows of their tensors.
    """
    let_finish()
    dist.destroy_process_group()
    while _meshes:
        getattr(_meshes.pop(), "_pg_registry", {}).clear()
    gc.collect()


def _store() -> Any:
    """A connection of one's own to the TCPStore by which the ranks met: no other call holds it up."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    namespace: Any = dist  # does not say that it exports the class
    return namespace.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))


def _tell(store: Any, text: str) -> str:
    """What the first rank that failed says; `text` if it is this one."""
    with suppress(dist.DistError):
        return str(store.compare_set(FAILED, "", text).decode())
    return "the first rank is gone"


def _end_with_others(rank: int, ended: threading.Event) -> None:
    """End this process soon after another rank has failed, whatever it waits for."""
    try:
        store = _store()
        while not ended.wait(LOOK_EVERY_S):
            if store.check([FAILED]):
                text = store.get(FAILED).decode()
                break
        else:
            return
    except dist.DistError:
        text = "the first rank is gone"
    if not ended.wait(GRACE_S):
        sys.stderr.write(f"error: rank {rank} ended, because {visible_message(text)}\n")
        sys.stderr.flush()
        os._exit(1)


class Parts:
    """Ranks that hold models in parts, over all of them or within each node."""

    def __init__(self, ranks: Ranks, sharding: Sharding) -> None:
        """Raises ConfigError where the ranks do not fit the way."""
        self.ranks, self._sharding = ranks, sharding
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)) if sharding == "hybrid" else ranks.size
        self._meshes: dict[str, DeviceMesh] = {}
        if ranks.size % self._per_node:
            raise ConfigError(f"--sharding hybrid: {ranks.size} ranks are not a multiple of {self._per_node} a node.")

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that logs and writes."""
        return self.ranks.is_first

    def gather(self, thing: Any) -> list[Any]:
        """What every rank hands in, by rank."""
        return self.ranks.gather(thing)

    def by_first(self, do: Callable[[], Any]) -> Any:
        """What the first rank alone does: its result on all ranks, or its error."""
        return self.ranks.by_first(do)

    def tell(self, line: str) -> None:
        """Say something, as the first rank."""
        logger.info(line)

    def divide(self, model: RewardModel) -> None:
        """Leave each rank with its part of a model, in place, on the device of the head; no optimiser may know its
        parameters yet.
        """
        device = model.device
        copies, model.half_weights = model.half_weights, None
        if copies is not None:
            copies.drop()
        _shard(model, self._mesh(device.type))
        if isinstance(copies, HalfWeights) and copies.rounding == "stochastic":  # else FSDP rounds, to the nearest
            model.half_weights = RoundedParts(model.backbone, "backbone", copies.dtype)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Each rank's loss is divided by the weight of all, so gradients are to be added; by default they are
                # averaged, and on gloo the factor alone is not enough.
                module.set_gradient_divide_factor(1.0)
                if device.type == "cpu":
                    module.set_force_sum_reduction_for_comms(True)

    def _mesh(self, kind: str) -> DeviceMesh:
        """The ranks by node and within it; made once, since each has process groups of its own."""
        if kind not in self._meshes:
            shape: tuple[int, ...] = (self.ranks.size,)
            names: tuple[str, ...] = ("shard",)
            if self._sharding == "hybrid":
                shape, names = (self.ranks.size // self._per_node, self._per_node), ("replicate", "shard")
            self._meshes[kind] = init_device_mesh(kind, shape, mesh_dim_names=names)
            _meshes.append(self._meshes[kind])
        return self._meshes[kind]

    def line(self) -> str:
        """How the ranks share a model."""
        if self._sharding == "full":
            return f"{self.ranks.size}, the model sharded over all of them"
        copies = self.ranks.size // self._per_node
        return f"{self.ranks.size}, sharded within {self._per_node} and replicated {copies} times"


def parts_of(sharding: Sharding, ranks: Ranks) -> Parts | None:
    """How the ranks hold models in parts; None where each has the whole model, or is alone.

    Raises ConfigError where the ranks do not fit the way.
    """
    return Parts(ranks, sharding) if dist.is_initialized() and sharding != "none" else None


def share(model: RewardModel, parts: Parts | None, ranks: Ranks, *, defer_sync: bool = False) -> Parallel:
    """How the ranks share a step of a loaded model, which is divided here unless it was when it was loaded."""
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
    """FSDP2, a decoder layer at a time."""
    as_held = MixedPrecisionPolicy(cast_forward_inputs=False)
    in_half = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder_layers(model.backbone):
        # Matrices are multiplied in half precision anyway, so they travel in it; norms are not, and adapters share
        # their layer with frozen weights, which are held in it.
        if model.compute_dtype.itemsize < 4 and {p.dtype for p in layer.parameters()} == {torch.float32}:
            if norms := _norms(layer):
                fully_shard(norms, mesh=mesh, mp_policy=as_held)
            fully_shard(layer, mesh=mesh, mp_policy=in_half)
        else:
            fully_shard(layer, mesh=mesh, mp_policy=as_held)
    # What is left, the head among it, is computed as it is held: float32 where it trains.
    fully_shard(model, mesh=mesh, mp_policy=as_held)


def _norms(layer: nn.Module) -> list[nn.Module]:
    """Modules of a layer that hold vectors alone."""
    return [
        module
        for module in layer.modules()
        if (own := list(module.parameters(recurse=False))) and all(parameter.ndim < 2 for parameter in own)
    ]


class _Sharded(Parallel):
    """FSDP2: gradients are added up, and each rank is left with its shard, in every backward pass or in the last."""

    def __init__(self, ranks: Ranks, model: RewardModel, *, defer_sync: bool) -> None:
        super().__init__(ranks)
        self.can_back_off = ranks.size == 1
        assert isinstance(model, FSDPModule)
        self._root, self._defer_sync = model, defer_sync

    def before_micro_batch(self, *, is_last: bool) -> None:
        if self._defer_sync:
            self._root.set_requires_gradient_sync(is_last)

    def drop_gathered(self) -> None:
        drop_gathered(self._root)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """FSDP has added them up; what is updated is the weights as they were before they were rounded."""
        if self._root.half_weights is not None:
            self._root.half_weights.restore()


class _Replicated(Parallel):
    """A whole model on every rank."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients up over the ranks, a bucket at a time; a rank without one, as of an idle expert, adds zeros."""
        if self.ranks.size == 1:
            return
        bucket: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
                self._add_up(bucket)
                bucket = []
        if bucket:
            self._add_up(bucket)

    def _add_up(self, gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
