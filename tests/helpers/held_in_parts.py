"""What ranks do with models that they hold in parts; run by many_ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import make_groups, make_tokenizer
from rewardlab.artifact import canaries
from rewardlab.artifact import weights as weights_module
from rewardlab.artifact.load import Where, assemble
from rewardlab.artifact.save import Trained, save_reward_model
from rewardlab.core.config import from_mapping
from rewardlab.core.spec import read_spec
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.distributed.ranks import Ranks
from rewardlab.distributed.sharding import Parts, joined_ranks, parts_of
from rewardlab.model.config import ModelConfig
from rewardlab.model.load import load_reward_model
from rewardlab.model.reward import RewardModel
from rewardlab.model.sharded_weights import whole_of
from rewardlab.score import ALONE, Together, score_groups
from rewardlab.training.checkpoints import shards
from rewardlab.training.checkpoints.resume import frozen_fingerprint

CPU = torch.device("cpu")


def settings_of(how: Mapping[str, Any]) -> ModelConfig:
    return from_mapping(ModelConfig, {"model": how["model"], **how.get("settings", {})}, where="settings")


def load_it(how: Mapping[str, Any], parts: Parts | None, said: list[str]) -> RewardModel:
    """The model that `how` names, as a run has it before its first step."""
    config = settings_of(how)
    layout = how.get("layout", "shared")
    return load_reward_model(config.model, config, seed=7, layout=layout, device=CPU, log=said.append, division=parts)


def walk(model: RewardModel) -> None:
    """Move everything that trains, in the same way however the model is held."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                step: torch.Tensor = torch.randn(parameter.shape, generator=draw) * 0.02
                if isinstance(parameter, DTensor):
                    step = distribute_tensor(step, parameter.device_mesh, parameter.placements)
                parameter.add_(step)


def save_it(folder: Path, model: RewardModel, how: Mapping[str, Any], parts: Parts | None) -> None:
    config = settings_of(how)
    save_reward_model(
        folder,
        model,
        build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128)),
        beta=1.0,
        save_dtype=getattr(torch, how.get("save_dtype", "float32")),
        provenance={},
        source=Trained(adapter=(config, config.model) if config.lora else None),
        division=parts,
    )


def differences(ours: RewardModel, theirs: RewardModel) -> list[str]:
    """Where a model in parts is not bit for bit the whole one. Every rank calls it."""
    found = []
    state, wanted = ours.state_dict(), theirs.state_dict()
    if list(state) != list(wanted):
        found.append(f"names: {sorted(set(state) ^ set(wanted))[:3]}")
    for name, tensor in wanted.items():
        gathered = whole_of(state[name])
        if gathered.dtype != tensor.dtype or not torch.equal(gathered, tensor):
            found.append(name)
    buffers = dict(ours.named_buffers())
    found += [
        name
        for name, buffer in theirs.named_buffers()
        if buffers[name].dtype != buffer.dtype or not torch.equal(buffers[name], buffer)
    ]
    trains = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (ours, theirs)]
    if trains[0] != trains[1]:
        found.append(f"trains: {sorted(trains[0] ^ trains[1])[:3]}")
    if (ours.read_originals is None) != (theirs.read_originals is None):
        found.append("originals")
    return found


def scores_of(model: RewardModel, ranks: Together) -> list[float]:
    scores = score_groups(model, make_groups(5), budget=60, ranks=ranks)
    return [float(score) for group in scores for score in group]


def beside_whole(folder: Path, how: Mapping[str, Any]) -> None:
    """A model in parts and whole: loaded, moved, saved, and loaded from what was saved."""
    with joined_ranks() as ranks:
        parts = parts_of(how.get("sharding", "full"), ranks)
        assert parts is not None
        said: list[str] = []
        ours, theirs = load_it(how, parts, said), load_it(how, None, [])
        told: dict[str, Any] = {"said": said, "loaded": differences(ours, theirs)}
        told["fingerprints"] = [frozen_fingerprint(ours), frozen_fingerprint(theirs)]
        walk(ours)
        walk(theirs)
        save_it(folder / "parts", ours, how, parts)
        told["still"] = differences(ours, theirs)
        ranks.by_first(lambda: save_it(folder / "whole", theirs, how, None))
        told["reloaded"], told["scores"] = reloaded(folder / "parts", ranks, parts)
        told = {key: ranks.gather(value) for key, value in told.items()}
        if ranks.is_first:
            (folder / "told.json").write_text(json.dumps(told))


def reloaded(folder: Path, ranks: Ranks, parts: Parts) -> tuple[list[str], list[list[float]]]:
    """(differences, scores) of a saved model in parts and whole."""
    ours, theirs = (
        assemble(
            folder,
            read_spec(folder),
            where=Where(device=CPU, division=division),
            precision="fp32",
            attention_mode="auto",
        )
        for division in (parts, None)
    )
    different = differences(ours.model, theirs.model)
    return different, [scores_of(ours.model, ranks), scores_of(theirs.model, ALONE)]


class Live(TorchDispatchMode):
    """The most bytes of tensors, other than views and empty ones, that were alive at any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._sum = 0
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                _, known = self._sizes.get(reference.cdata, (None, 0))
                self._sizes[reference.cdata] = (reference, storage.nbytes())
                self._sum += storage.nbytes() - known
        if self._sum > self.most:  # or so it seems: some may be gone, and FSDP empties those that it will fill again
            living = {key: (held[0], size_of(held[0])) for key, held in self._sizes.items() if not held[0].expired()}
            self._sizes, self._sum = living, sum(size for _, size in living.values())
            self.most = max(self.most, self._sum)
        return result


def size_of(reference: StorageWeakRef) -> int:
    """Bytes of a storage now; none once it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())


@contextmanager
def counted(told: dict[str, Any], name: str) -> Iterator[None]:
    with Live() as live:
        yield
    told[name] = live.most


def measured(folder: Path, how: Mapping[str, Any]) -> None:
    """The most bytes that a rank holds while it loads, saves and loads again."""
    canaries.CONVERSATIONS = canaries.CONVERSATIONS[:1]
    with joined_ranks() as ranks:
        parts = parts_of("full", ranks) if how["in_parts"] else None
        told: dict[str, Any] = {}
        with counted(told, "load"):
            model = load_it(how, parts, [])
        with counted(told, "save"):
            save_it(folder / "model", model, how, parts)
        model.to("meta")
        with counted(told, "judge"):
            scorer = assemble(
                folder / "model",
                read_spec(folder / "model"),
                where=Where(device=CPU, division=parts),
                precision="fp32",
                attention_mode="auto",
            )
            scores_of(scorer.model, ranks)
        told = {key: ranks.gather(value) for key, value in told.items()}
        told["whole"] = 4 * sum(parameter.numel() for parameter in scorer.model.parameters())
        told["largest"] = 4 * max(parameter.numel() for parameter in scorer.model.parameters())
        if ranks.is_first:
            (folder / "told.json").write_text(json.dumps(told))


def full_disk(folder: Path, how: Mapping[str, Any]) -> None:
    """The first rank cannot write the third weight."""
    with joined_ranks() as ranks:
        parts = parts_of("full", ranks)
        model = load_it(how, parts, [])
        save_it(folder / "model", model, how, parts)
        write, calls = weights_module._write, [0]

        def fails(*arguments: Any) -> str:
            calls[0] += 1
            if calls[0] == 3:
                raise OSError(28, "No space left on device")
            return write(*arguments)

        weights_module._write = fails
        try:
            save_it(folder / "model", model, how, parts)
        except OSError as error:
            (folder / f"told-{ranks.rank}").write_text(str(error))
        weights_module._write = write
        save_it(folder / "again", model, how, parts)


SHAPES = {"matrix": (7, 3), "row": (1, 5), "vector": (6,), "count": (), "empty": (0, 4), "cube": (5, 2, 2)}
"""Of tensors that no number of ranks divides evenly."""


def tensors_of() -> dict[str, torch.Tensor]:
    """One of each shape, and of each dtype that an optimiser may keep."""
    draw = torch.Generator().manual_seed(1)
    found = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)
    return found | {str(kind): (100 * torch.rand(9, 2, generator=draw)).to(kind) for kind in kinds}


def keep_tensors(folder: Path, how: Mapping[str, Any]) -> None:
    """Writes the tensors of `tensors_of`, divided as FSDP divides them, or reads them back and compares."""
    with joined_ranks() as ranks:
        parts = parts_of(how["sharding"], ranks)
        tensors = tensors_of() if how["write"] else {name: torch.zeros_like(t) for name, t in tensors_of().items()}
        if parts is not None:
            mesh = parts._mesh("cpu")
            places = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
            tensors |= {
                name: distribute_tensor(tensor, mesh, places) for name, tensor in tensors.items() if name != "count"
            }
        if how["write"]:
            if ranks.rank == how.get("full"):
                shards.header = no_room
            (folder / "tensors").mkdir(exist_ok=True)
            shards.write_shards(folder / "tensors", tensors, ranks)
        else:
            shards.read_shards(shards.open_shards(folder / "tensors"), tensors, where=folder)
            for name, wanted in tensors_of().items():
                assert torch.equal(whole_of(tensors[name]), wanted), name


def no_room(*_: object) -> bytes:
    raise OSError(28, "No space left on device")
