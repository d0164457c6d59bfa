"""Low-rank adapters on the backbone, by PEFT; the head gets none and is trained in full.

In memory the adapters are injected into the backbone, and modules to save in full are left trainable. On disk both
have the layout of PEFT's sequence-classification wrapper, together with the head, so that plain
`PeftModel.from_pretrained` reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rewardlab.core.errors import ModelError
from rewardlab.core.values import did_you_mean
from rewardlab.model.adaptable import not_adaptable, without_experts
from rewardlab.model.config import ModelConfig
from rewardlab.model.dropout import ConversationDropout, Draws
from rewardlab.model.frozen import is_held_half
from rewardlab.model.hub import at_revision, source_of
from rewardlab.model.quantization import far_from, is_quantized, round_sums, weight_shape
from rewardlab.model.reward import HEAD_ON_DISK, RewardModel, disk_name
from rewardlab.model.rounding import round_weights
from rewardlab.model.sharded_weights import Weight, drop_gathered, whole_of

ADAPTER: Final = "default"
PEFT_PREFIX: Final = "base_model.model."
HEAD_NAMES: Final = (HEAD_ON_DISK, "head", "classifier")
"""Usual names of the head; it trains and is saved whether it is named or not."""
WHOLE_CHOICES: Final[Mapping[str, str | None]] = {"all-linear": "all-linear", "peft-default": None}
"""Words that stand for a choice of layers to adapt -> PEFT's value for it."""


def add_adapters(backbone: nn.Module, config: ModelConfig) -> Draws | None:
    """Freeze the backbone, inject trainable float32 adapters, and leave the modules to save trainable.

    Returns what the RewardModel draws the adapters' dropout by, or None without dropout.

    Raises ModelError for a target name that no layer has, if one of them stands for joined experts, if the model
    has no module of a name to save, or if a layer is named both as a target and as a module to save.
    """
    backbone.requires_grad_(False)
    whole = modules_to_save(backbone, config.lora_modules_to_save)
    targets = list(config.lora_target_modules)
    word = len(targets) == 1 and targets[0] in WHOLE_CHOICES
    left_out = [*whole, *not_adaptable(backbone, named=not word)]
    if not word and (both := [path for path in whole if any(_is_called(path, target) for target in targets)]):
        raise ModelError(
            f"{both[0]} is named by --lora-target-modules and by --lora-modules-to-save: it gets an adapter or trains "
            f"whole. Leave it out of one of the two."
        )
    try:
        chosen = without_experts(backbone, WHOLE_CHOICES[targets[0]] if word else targets)
        if not word:
            _require_layers(backbone, targets)
        inject_adapter_in_model(
            _lora_config(config, chosen, exclude_modules=left_out or None), backbone, adapter_name=ADAPTER
        )
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
        )
        raise ModelError(
            f"--lora-target-modules {' '.join(targets)}: {error} Layers of this model: {', '.join(linear)}."
        ) from error
    round_sums(backbone)
    for path in whole:
        backbone.get_submodule(path).requires_grad_(True)
    for parameter in backbone.parameters():
        # In half precision most updates would be smaller than half a step between values, and so be lost.
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
    return _drop_by_conversation(backbone, config.lora_dropout) if config.lora_dropout else None


def _drop_by_conversation(backbone: nn.Module, rate: float) -> Draws:
    """Replace the dropout of adapters by one drawn by conversation; return what it draws by (model/dropout.py)."""
    draws = Draws()
    for path in adapted_layers(backbone):
        layer: Any = backbone.get_submodule(path)
        if isinstance(layer.lora_dropout[ADAPTER], nn.Dropout):
            layer.lora_dropout[ADAPTER] = ConversationDropout(path, rate, draws)
    return draws


def modules_to_save(backbone: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the modules that own weights and are named by `names`, without the head.

    A name stands for the last words of a path: `norm` names a module called `norm`, not `input_layernorm`.

    Raises ModelError for a name that no module has, or whose modules have no weights.
    """
    paths = [path for path, _ in backbone.named_modules() if path]
    chosen: dict[str, None] = {}
    for name in names:
        if name in HEAD_NAMES:
            continue
        roots = [path for path in paths if _is_called(_full(backbone, path), name)]
        if not roots:
            called = sorted({word for path in paths if not (word := path.rpartition(".")[2]).isdecimal()})
            near = " The reward's head always trains and is saved." if "head" in name else did_you_mean(name, called)
            raise ModelError(
                f"--lora-modules-to-save {name}: this model has no module of that name.{near} "
                f"Its modules: {', '.join(called)}."
            )
        inside = {
            f"{root}.{path}".rstrip("."): None
            for root in roots
            for path, module in backbone.get_submodule(root).named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        if not inside:
            raise ModelError(f"--lora-modules-to-save {name}: it has no weights that could train. Leave it out.")
        chosen |= inside
    return list(chosen)


def _require_layers(backbone: nn.Module, targets: Sequence[str]) -> None:
    """Raise ModelError, with the nearest name, for a target that no layer is called by, though others are."""
    paths = [path for path, _ in backbone.named_modules() if path]
    unknown = [name for name in targets if not any(_is_called(path, name) for path in paths)]
    if unknown and len(unknown) < len(targets):
        near = did_you_mean(unknown[0], sorted({path.rpartition(".")[2] for path in paths}))
        raise ModelError(
            f"--lora-target-modules {' '.join(targets)}: this model has no layer called {unknown[0]}.{near} Correct "
            f"the name or leave it out."
        )


def _is_called(path: str, name: str) -> bool:
    """Return whether a path ends in `name`, by whole words."""
    return path == name or path.endswith(f".{name}")


def _full(backbone: Any, path: str) -> str:
    """Return the path in the sequence classifier of a path in the backbone."""
    return f"{backbone.base_model_prefix}.{path}"


def _lora_config(config: ModelConfig, targets: str | Sequence[str] | None, **more: Any) -> LoraConfig:
    """Return PEFT's configuration for these settings."""
    return LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        use_rslora=config.rslora,
        use_dora=config.dora,
        **more,
    )


def has_adapters(model: nn.Module) -> bool:
    """Return whether any layer of the model carries adapters."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the paths of the layers that carry adapters."""
    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def whole_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules that own trainable weights other than adapters."""
    owners = (
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_adapter(name)
    )
    return list(dict.fromkeys(owners))


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name is part of an adapter."""
    return ".lora_" in name


def require_adapter_gradients(model: nn.Module) -> None:
    """Raise ModelError if a backward pass left an adapter, or another weight that trains, without a gradient.

    A gradient of zeros counts as one: that of A is zero as long as B = 0. Experts are exempt, because a batch may send
    none of its tokens to one.
    """
    if not has_adapters(model):
        return
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missed = [name for name, parameter in trained.items() if parameter.grad is None and ".experts." not in name]
    if missed:
        raise ModelError(
            f"the first backward pass left {len(missed)} of {len(trained)} trained tensors without a gradient: "
            f"{', '.join(missed[:5])}{' …' if len(missed) > 5 else ''}. They would never move. Leave these layers out "
            f"of --lora-target-modules and --lora-modules-to-save, or use --activation-checkpointing none."
        )


def measure_lengths(model: RewardModel, originals: Mapping[str, Tensor]) -> None:
    """With DoRA, set the length of every weight row in the adapted layers of a model whose weights are not read yet.

    PEFT takes the lengths from the layer's weights when it adds the adapters. Here these are still empty, so the
    lengths are computed from the `originals`, which are read one at a time.
    """
    for path in adapted_layers(model):
        layer: Any = model.get_submodule(path)
        if ADAPTER in layer.lora_magnitude_vector:
            lengths = layer.lora_magnitude_vector[ADAPTER]
            update_OI = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight
            length_O = lengths.get_weight_norm(originals[f"{path}.weight"], update_OI, layer.scaling[ADAPTER])
            lengths.weight.data = length_O.detach()


def merged_weights(model: RewardModel, *, wanted: bool = True) -> dict[str, Weight]:
    """Return every weight, with adapters merged into its layer in float32, under the names of the bare model.

    A weight is computed when it is asked for. Frozen weights that the model holds rounded or quantised are replaced by
    their originals, read from the base model's files. The live model is not changed. `wanted` is False on the ranks
    that only help to gather a divided model.

    Raises ModelError, here or when a weight is asked for, if the originals are not those that the run started from.
    """
    drop_gathered(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}
    parameters = dict(model.named_parameters())
    adapted = {f"{path}.base_layer.weight": path for path in adapted_layers(model)}
    read: Mapping[str, Tensor] = {}
    if model.read_originals is not None and wanted:
        read = model.read_originals()
    if any(is_quantized(parameter) for parameter in parameters.values()):
        # Quantised layers also keep scales and the like, which the bare model does not have.
        state = {name: tensor for name, tensor in state.items() if bare_name(name) in read}
    weights: dict[str, Weight] = {}
    for name, tensor in state.items():
        held = parameters.get(name, tensor)
        has_original = model.read_originals is not None and name in parameters and not held.requires_grad
        weights[bare_name(name)] = Weight(
            shape=weight_shape(held),
            dtype=torch.float32 if has_original or name in adapted else tensor.dtype,
            whole=partial(_whole, model, name, held, read if has_original else None, adapted.get(name)),
        )
    return weights


def bare_name(name: str) -> str:
    """Return the name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def _whole(
    model: RewardModel,
    name: str,
    held: Tensor,
    read: Mapping[str, Tensor] | None,
    adapted: str | None,
    wanted: bool,
) -> Tensor | None:
    """Return a weight as it is saved, or None if it is not `wanted` on this rank.

    `held` is the parameter; `read` maps names to originals, if it has one; `adapted` is the path of its layer, if that
    carries adapters. All ranks that hold a part call this together, since gathering is a collective operation.
    """
    layer: Any = None if adapted is None else model.get_submodule(adapted)
    if layer is not None:
        parts: dict[int, Any] = {}
        for parameter in layer.parameters():
            gathered = whole_of(parameter)
            if gathered is not parameter and wanted:
                # A copy: what one rank of a node holds alone is gathered as it is, and would be merged in place.
                own = gathered.detach().to("cpu", copy=True)
                parts[id(parameter)] = nn.Parameter(own, parameter.requires_grad)
        gathered = parts.get(id(layer.get_base_layer().weight), held)
    else:
        gathered = whole_of(held.detach())
    if not wanted:
        return None
    original = None if read is None else _original(model, name, held, gathered, read[bare_name(name)])
    if layer is not None:
        return _merged(layer, original, parts)
    return gathered if original is None else original


def _merged(layer: Any, original: Tensor | None, gathered: dict[int, Any]) -> Tensor:
    """Return the weight of an adapted layer with its update added, in float32.

    `original`, if given, replaces the weight that the layer holds. `gathered` maps the ids of sharded parameters to
    their gathered values.
    """
    if is_quantized(layer.get_base_layer().weight):
        assert original is not None, "read_originals is set for every quantised model"
        return merge_update(layer, original)
    # `gathered` is deepcopy's memo: for a parameter whose id is in it, the copy gets the gathered value. PEFT merges in
    # place, so it gets the copy, and the live layer stays as it is.
    merged = copy.deepcopy(layer, gathered).float()
    weight = merged.get_base_layer().weight
    if original is not None:
        weight.data = original.to(weight.device)
    merged.merge()
    result: Tensor = merged.get_base_layer().weight.data
    return result


def merge_update(layer: Any, weight_OI: Tensor) -> Tensor:
    """Return W + scale · B A, as PEFT merges it; with DoRA every row is then scaled to the length trained for it."""
    update_OI: Tensor = layer.get_delta_weight(ADAPTER).detach().float()
    merged_OI = weight_OI.to(update_OI) + update_OI
    if ADAPTER in layer.lora_magnitude_vector:
        length_O = layer.lora_magnitude_vector[ADAPTER].weight.detach()
        merged_OI *= (length_O / merged_OI.norm(dim=1))[:, None]
    return merged_OI


def _original(model: RewardModel, name: str, held: Tensor, gathered: Tensor, original: Tensor) -> Tensor:
    """Return `original`, the value of a frozen weight before it was rounded or quantised.

    Raises ModelError if the weight that is `held` cannot have been made from it.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    if is_quantized(held):
        changed = far_from(owner, original)
    else:
        # Rounded as `half_frozen` did, then cast, since bitsandbytes may have changed the dtype of a bias.
        dtype = model.compute_dtype if is_held_half(owner, held) else torch.float32
        rounded = round_weights(original, dtype, bare_name(name)).to(gathered.dtype)
        changed = not torch.equal(rounded, gathered.cpu())
    if changed:
        raise ModelError(
            f"{name} of the base model is not what the run started from, so the trained update cannot be merged with "
            f"it. Do not change the files of --model while it trains."
        )
    return original


def adapter_weights(model: RewardModel) -> dict[str, Weight]:
    """Return adapters, head and modules to save, under the names of PEFT's sequence-classification layout."""
    drop_gathered(model)
    inner: Any = get_peft_model_state_dict(model.backbone, adapter_name=ADAPTER, save_embedding_layers=False)
    state = {f"backbone.{name}": tensor for name, tensor in inner.items()}
    for path in whole_modules(model):
        state |= {f"{path}.{name}": tensor for name, tensor in model.get_submodule(path).state_dict().items()}
    return {
        PEFT_PREFIX + disk_name(name, model.disk_class): Weight(
            shape=tuple(tensor.shape), dtype=torch.float32, whole=partial(_plain, tensor)
        )
        for name, tensor in state.items()
    }


@torch.no_grad()
def _plain(tensor: Tensor, wanted: bool) -> Tensor | None:
    """Gather a weight; return it in float32, or None if it is not `wanted` on this rank."""
    gathered = whole_of(tensor.detach())
    return gathered.float() if wanted else None


def adapter_config(config: ModelConfig, model: RewardModel, base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`: rank and alpha, the adapted layers by name, the head among the
    modules to save, and the base model, by its name and commit if it is one of the hub: `base` is a name with a
    commit, or a folder of the hub's cache.
    """
    repository, commit = source_of(base) or at_revision(base) or (base, None)
    backbone: Any = model.backbone
    paths = {
        _full(backbone, path): None
        for path, _ in backbone.named_modules()
        if path and ".base_layer" not in path and not is_adapter(path)
    }
    adapted = {_full(backbone, path) for path in adapted_layers(backbone)}
    whole = {_full(backbone, path) for path in whole_modules(backbone)}
    # PEFT matches layers to adapt by the last words of their paths, and modules to save by the last letters. So names
    # that are unambiguous by words may still be ambiguous by letters.
    targets = _by_name(adapted, paths, _is_called, also=whole)
    saved = _by_name(whole, paths, str.endswith)
    peft_config = _lora_config(
        config,
        targets,
        modules_to_save=[HEAD_ON_DISK, *saved],
        base_model_name_or_path=repository,
        revision=commit,
        inference_mode=True,
    )
    values: Mapping[str, Any] = peft_config.to_dict()
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in values.items()
    }


def _by_name(
    wanted: Collection[str], paths: Collection[str], fits: Callable[[str, str], bool], *, also: Collection[str] = ()
) -> list[str]:
    """Return short names of the wanted paths: the last word if it fits no other path (but those in `also`), else the
    whole path.
    """
    named = set()
    for path in wanted:
        word = path.rpartition(".")[2]
        alone = all(other in wanted or other in also for other in paths if fits(other, word))
        named.add(word if alone else path)
    return sorted(named)
