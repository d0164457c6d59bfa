"""Export of the adapters of a reward model, with its head, as a folder that PEFT loads beside their base model."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from rewardlab.analysis.faults import largest_distance
from rewardlab.artifact.config import older_rope
from rewardlab.artifact.load import load
from rewardlab.artifact.peft_folder import BASE, REVISION, WEIGHTS, find_base, load_base, put_on, scores_of
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, write_json
from rewardlab.core.folders import replacing_folder
from rewardlab.core.schema import read_object
from rewardlab.core.spec import DAMAGED, SCORE_TOLERANCE, RewardSpec, read_spec
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.disk_class import name_for_engines
from rewardlab.model.files import ADAPTER_CONFIG
from rewardlab.model.hub import source_of
from rewardlab.model.load import read_config
from rewardlab.model.reward import HEAD_ON_DISK
from rewardlab.serve.folders.export import require_apart

logger = logging.getLogger("rewardlab")
ADAPTER: Final = "adapter"
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True)
class ExportedAdapter:
    """The result of an export of adapters."""

    base: str
    """The base model, as PEFT will look for it."""
    distance: float
    """Largest distance of a canary from its canonical score, in units of max(1, |score|), by plain PEFT."""
    allowed: float
    num_canaries: int


def export_adapter(
    source: Path, target: Path, *, base: str | None = None, with_base: bool = False, overwrite: bool = False
) -> ExportedAdapter:
    """Write the adapters of the reward model in `source`, and its head, as the PEFT folder `target`.

    `base` names the base model where it is now, if that is not where the run found it. `with_base` also writes that as
    a sequence classifier with a head of zeros, into `base/`. The canaries are scored by plain
    PEFT on plain transformers before the folder gets its name.

    Raises ArtifactError if `source` fails verification or holds no adapters, if the base model cannot be loaded, or if
    a canary does not get its score; ConfigError as `export` does.
    """
    require_apart(source, target, overwrite=overwrite)
    spec = read_spec(source)
    adapter = source / ADAPTER
    if not (adapter / WEIGHTS).is_file() or not (adapter / ADAPTER_CONFIG).is_file():
        raise ArtifactError(
            f"{source}: it holds no adapters, only merged weights: it was trained without --lora, or imported. Export "
            f"it without --adapter."
        )
    load(source, device="cpu", attention="padded")
    settings = read_object(adapter / ADAPTER_CONFIG, DAMAGED)
    if base is not None:
        place_of_base = resolve_model_name(base, logger.info)
        settings[BASE], settings[REVISION] = source_of(place_of_base) or (place_of_base, None)
    base_path = find_base(settings, "--base" if base is not None else str(adapter / ADAPTER_CONFIG))
    _require_head(source, settings)
    _tell_engines(settings)
    with replacing_folder(target, is_result=True) as place:
        shutil.copy2(adapter / WEIGHTS, place / WEIGHTS)
        write_json(place / ADAPTER_CONFIG, settings)
        _copy_tokenizer(source, place)
        classifier = _classifier(source, base_path, final=spec.renderer.final_token_id)
        if with_base:
            _write_base(place / "base", source, classifier)
        distance = _distance(place, classifier, spec, base_path)
        allowed = SCORE_TOLERANCE[spec.save_dtype]
        if not distance <= allowed:
            raise ArtifactError(
                f"{source}: its canaries are {distance:.1e} away from their scores when PEFT puts the adapters on "
                f"{settings[BASE]}, and {allowed:g} is allowed. Is this the base model that they were trained on? "
                f"Name it with --base. Nothing was written."
            )
        require_apart(source, target, overwrite=overwrite)  # another process may have made it meanwhile
    return ExportedAdapter(
        base=str(settings[BASE]), distance=distance, allowed=allowed, num_canaries=len(spec.canaries)
    )


def _require_head(source: Path, settings: dict[str, Any]) -> None:
    """Raise ArtifactError unless the configuration tells PEFT to take the head from the adapters."""
    if settings.get("task_type") != "SEQ_CLS" or HEAD_ON_DISK not in (settings.get("modules_to_save") or []):
        raise ArtifactError(
            f"{source / ADAPTER / ADAPTER_CONFIG}: task_type is {settings.get('task_type')!r} and modules_to_save "
            f"{settings.get('modules_to_save')!r}, so PEFT would leave out the head `{HEAD_ON_DISK}`, and with it "
            f"every reward."
        )


def _tell_engines(settings: dict[str, Any]) -> None:
    """Warn about what PEFT can load and vLLM cannot."""
    others = sorted(set(settings["modules_to_save"]) - {HEAD_ON_DISK})
    if settings.get("use_dora"):
        logger.warning("vLLM loads no DoRA adapters; serve the merged folder there")
    if others:
        logger.warning(
            "vLLM takes no whole modules but the head from an adapter, and this one has %s; serve the merged folder "
            "there",
            ", ".join(others),
        )


def _pad(source: Path) -> int | None:
    """Return the pad token of the merged folder."""
    values = read_json(source / "config.json")
    assert isinstance(values, dict)
    pad: int | None = values.get("pad_token_id")
    return pad


def _classifier(source: Path, base: str, *, final: int | None) -> Any:
    """Return the base model in float32 as a sequence classifier with the pad token of the merged folder."""
    config = read_config(base)
    text_config, pad = config.get_text_config(), _pad(source)
    if final is not None and text_config.pad_token_id == final:
        logger.warning(
            "the pad token of %s ends every conversation, so transformers would read the score one token too early: "
            "set pad_token_id = %s in its configuration wherever these adapters are loaded with it",
            base,
            pad,
        )
    return load_base(base, pad=pad)


def _write_base(folder: Path, source: Path, classifier: Any) -> None:
    """Write the base model as a sequence classifier with a head of zeros, as vLLM wants the base of an adapter."""
    with torch.no_grad():
        classifier.get_submodule(HEAD_ON_DISK).weight.zero_()
    classifier.save_pretrained(folder)
    values = read_json(folder / "config.json")
    assert isinstance(values, dict)
    values |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}, "problem_type": "regression"}
    values["architectures"] = [name_for_engines(type(classifier))]
    write_json(folder / "config.json", values | older_rope(values))
    _copy_tokenizer(source, folder)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)


def _distance(adapter: Path, classifier: Any, spec: RewardSpec, base: str) -> float:
    """Return the largest distance of the canaries from their canonical scores, computed by PEFT in float32."""
    scores = scores_of(put_on(classifier, adapter, base), [one.token_ids for one in spec.canaries])
    return largest_distance([canary.score for canary in spec.canaries], scores)
