"""Several adapters on one backbone: the base model's weights in memory once, a head and an adapter for each name.

A reward-model folder holds its adapter merged. So the base is computed from the merged weights of the first folder by
subtracting its update, which is exact to the last bit or two of float32. Every other folder has to give the same
weights when its own update is subtracted: that proves that its adapter was trained on this base, whatever the files are
called. Then its canaries are scored through the shared backbone, like those of any folder.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.schema import read_object
from rewardlab.core.spec import DAMAGED
from rewardlab.model.files import ADAPTER_CONFIG
from rewardlab.model.lora import PEFT_PREFIX
from rewardlab.model.reward import HEAD_ON_DISK, RewardModel, disk_name

ALIKE: Final = 1e-5
"""How far two weights of the base may differ by rounding, relative to the largest of their matrix."""
REMEDY: Final = "Serve it as a model of its own instead."


class NotSharedError(ArtifactError):
    """A folder whose model cannot be computed on the backbone of others."""

    def __init__(self, folder: Path, why: str) -> None:
        """`why` is a clause; the message puts the folder before it and the remedy after it."""
        super().__init__(f"{folder}: {why}. {REMEDY}")
        self.why = f"{folder}: {why}."


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter with its head, as a folder holds it."""

    folder: Path
    rank: int
    alpha: float
    rslora: bool
    down: dict[str, Tensor]
    """Name of an adapted weight on disk, without `.weight` -> A [rank, in]."""
    up: dict[str, Tensor]
    """The same names -> B [out, rank]."""

    @property
    def scale(self) -> float:
        """The factor of the update."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def update(self, layer: str, weight: Tensor) -> Tensor:
        """Return what merging added to a layer's `weight` [out, in], on the CPU.

        Raises NotSharedError if the layer's weight has another shape.
        """
        added = self.scale * (self.up[layer] @ self.down[layer])
        if added.shape != weight.shape:
            raise NotSharedError(
                self.folder,
                f"its adapter/ is damaged: the update of {layer} has shape {list(added.shape)}, the weight "
                f"{list(weight.shape)}",
            )
        return added


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter of a reward-model folder.

    Raises NotSharedError if it has no adapter, one that cannot be subtracted from the merged weights, or a damaged one.
    It does not raise ArtifactError itself, since the merged weights may be sound.
    """
    try:
        return _read_adapter(folder)
    except NotSharedError:
        raise
    except ArtifactError as error:
        what = str(error).removesuffix(DAMAGED.remedy).rstrip(" .")
        raise NotSharedError(folder, f"its adapter/ cannot be read ({what})") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotSharedError(folder, f"its adapter/ cannot be read ({type(error).__name__}: {error})") from error


def _read_adapter(folder: Path) -> Adapter:
    where = folder / "adapter"
    if not (where / ADAPTER_CONFIG).is_file():
        raise NotSharedError(folder, "no adapter/, so it was not trained with --lora")
    config: dict[str, Any] = read_object(where / ADAPTER_CONFIG, DAMAGED)
    for wrong, why in (
        (config.get("use_dora"), "DoRA scales whole rows, which cannot be taken off the merged weights"),
        (config.get("rank_pattern") or config.get("alpha_pattern"), "its layers have different ranks"),
        (config.get("bias", "none") != "none", "it has biases of its own"),
        (config.get("fan_in_fan_out"), "its weights are transposed"),
    ):
        if wrong:
            raise NotSharedError(folder, f"its adapter cannot share a backbone: {why}")
    down, up = {}, {}
    with safe_open(where / "adapter_model.safetensors", framework="pt") as file:
        for key in file.offset_keys():
            name = key.removeprefix(PEFT_PREFIX)
            if name.endswith(".lora_A.weight"):
                down[name.removesuffix(".lora_A.weight")] = file.get_tensor(key).float()
            elif name.endswith(".lora_B.weight"):
                up[name.removesuffix(".lora_B.weight")] = file.get_tensor(key).float()
            elif ".lora_embedding_" in name:
                layer = name.partition(".lora_embedding_")[0]
                raise NotSharedError(
                    folder,
                    f"its adapter cannot share a backbone: it adapts the embedding {layer} (--lora-target-modules), "
                    f"whose update has another form than that of a linear layer",
                )
            elif not name.startswith(f"{HEAD_ON_DISK}."):
                raise NotSharedError(
                    folder,
                    f"its adapter cannot share a backbone: {name} was trained whole (--lora-modules-to-save)",
                )
    rank = int(config["r"])
    _require_pairs(folder, rank, down, up)
    return Adapter(
        folder=folder,
        rank=rank,
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        down=down,
        up=up,
    )


def _require_pairs(folder: Path, rank: int, down: Mapping[str, Tensor], up: Mapping[str, Tensor]) -> None:
    """Raise NotSharedError unless every layer has A and B of this rank."""
    if not down or down.keys() != up.keys():
        raise NotSharedError(folder, "its adapter/ is damaged: not every A has its B")
    for layer, own in down.items():
        if not own.ndim == up[layer].ndim == 2 or not own.shape[0] == up[layer].shape[1] == rank:
            raise NotSharedError(folder, f"its adapter/ is damaged: A and B of {layer} are not of rank {rank}")


class SharedBackbone:
    """A backbone with adapters of which one is active at a time.

    `require_same_base` may be called from any thread, everything else only from the one that computes.
    """

    def __init__(self, merged: RewardModel, adapter: Adapter) -> None:
        """Take over a loaded model, whose folder's `adapter` is merged into it, and take the adapter off.

        Raises ConfigError for a model in half precision, whose weights were rounded after merging; NotSharedError for
        an adapter that is not one of this model.
        """
        if merged.compute_dtype is not torch.float32:
            raise ConfigError("adapters on one backbone are computed in fp32. Use --precision fp32, or serve models.")
        self._model = merged
        self._numbers = itertools.count()
        weights = self._weights()
        with torch.no_grad():
            for layer in adapter.down:
                weight = weights.get(f"{layer}.weight")
                if weight is None:
                    raise NotSharedError(
                        adapter.folder, f"its adapter/ is damaged: it names {layer}, which the model does not have"
                    )
                weight.sub_(adapter.update(layer, weight).to(weight.device))
        self._base = {name: tensor.detach() for name, tensor in weights.items()}

    def require_same_base(self, adapter: Adapter) -> None:
        """Raise NotSharedError unless the merged weights of the adapter's folder are this base and the adapter."""
        seen = set()
        for name, merged in _weights_of(adapter.folder):
            if name.startswith(f"{HEAD_ON_DISK}."):
                continue
            seen.add(name)
            base, layer = self._base.get(name), name.removesuffix(".weight")
            own = merged - adapter.update(layer, merged) if layer in adapter.down else merged
            if base is None or base.shape != own.shape:
                raise NotSharedError(
                    adapter.folder,
                    f"it was trained from another base: that of the first adapter has no {name} of shape "
                    f"{list(own.shape)}",
                )
            distance = float((base.cpu() - own).abs().max() / own.abs().max().clamp(min=1e-30))
            if not distance <= ALIKE:
                raise NotSharedError(
                    adapter.folder,
                    f"it was trained from another base, or is not saved in float32: {name} differs from that of the "
                    f"first adapter by {distance:.1e} of its largest entry",
                )
        if missing := sorted(self._base.keys() - seen):
            raise NotSharedError(adapter.folder, f"it was trained from another base: it has no {missing[0]}")

    def add(self, adapter: Adapter) -> AdaptedModel:
        """Return the model of the base with this adapter; the weights of the base are not copied."""
        name = f"adapter{next(self._numbers)}"
        disk_class: Any = self._model.disk_class
        prefix = f"{disk_class.base_model_prefix}."
        backbone: Any = self._model.backbone
        config = LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.rslora,
            target_modules=[layer.removeprefix(prefix) for layer in adapter.down],
            inference_mode=True,
        )
        # PEFT would warn that there are several adapters, which is what is wanted. Nothing here reads the attribute.
        vars(backbone).pop("peft_config", None)
        inject_adapter_in_model(config, backbone, adapter_name=name)
        for path, module in backbone.named_modules():
            if isinstance(module, BaseTunerLayer) and f"{prefix}{path}" in adapter.down:
                layer: Any = module
                layer.lora_A[name].weight.data = adapter.down[f"{prefix}{path}"].to(self._model.device)
                layer.lora_B[name].weight.data = adapter.up[f"{prefix}{path}"].to(self._model.device)
        # A shallow copy with its own dictionary of submodules, so that it can have another head.
        view = copy.copy(self._model)
        view._modules = dict(self._model._modules)
        view.head = _head_of(adapter.folder, self._model)
        return AdaptedModel(model=view, name=name, backbone=self)

    def activate(self, name: str) -> None:
        """Compute with this adapter from now on."""
        for layer in self._tuned():
            layer.set_adapter(name, inference_mode=True)

    def remove(self, name: str) -> None:
        """Free an adapter, which is never active again."""
        for layer in self._tuned():
            # PEFT would warn that it chooses another one in place of the one that was active.
            layer.set_adapter([], inference_mode=True)
            layer.delete_adapter(name)

    def _tuned(self) -> Iterator[Any]:
        return (module for module in self._model.backbone.modules() if isinstance(module, BaseTunerLayer))

    def _weights(self) -> dict[str, Tensor]:
        """Return name on disk -> weight of the backbone."""
        state = self._model.backbone.state_dict()
        return {disk_name(f"backbone.{name}", self._model.disk_class): tensor for name, tensor in state.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedModel:
    """One adapter's model, which shares its backbone."""

    model: RewardModel
    name: str
    backbone: SharedBackbone

    def activate(self) -> None:
        """Make the backbone compute with this adapter."""
        self.backbone.activate(self.name)

    def remove(self) -> None:
        """Free the adapter."""
        self.backbone.remove(self.name)


def _weights_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value in float32) of each weight in a folder, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name).float()


def _head_of(folder: Path, model: RewardModel) -> nn.Linear:
    """Return the head of a folder, on the model's device."""
    found = {name: tensor for name, tensor in _weights_of(folder) if name.startswith(f"{HEAD_ON_DISK}.")}
    head = nn.Linear(model.head.in_features, 1, bias=f"{HEAD_ON_DISK}.bias" in found)
    head.load_state_dict({name.removeprefix(f"{HEAD_ON_DISK}."): tensor for name, tensor in found.items()})
    return head.to(model.device).requires_grad_(False)
