"""A folder of PEFT: adapters beside their base model, put on it by PEFT itself.

Nothing here uses the scoring path of rewardlab: what this computes is what it is compared with.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from rewardlab.core.errors import ArtifactError, ModelError
from rewardlab.model.attention import padded_implementation
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.files import told
from rewardlab.model.load import read_classifier, read_config
from rewardlab.model.reward import HEAD_ON_DISK

logger = logging.getLogger("rewardlab")
ADAPTER: Final = "default"
"""PEFT's name of an adapter that was not given one."""
WEIGHTS: Final = "adapter_model.safetensors"
OLDER_WEIGHTS: Final = "adapter_model.bin"
BASE: Final = "base_model_name_or_path"
REVISION: Final = "revision"


def find_base(settings: Mapping[str, Any], named_by: str) -> str:
    """Return the name or the folder of the base model that the content of an `adapter_config.json` names.

    Raises ArtifactError, naming what names the base model, if that is not there.
    """
    name, revision = settings.get(BASE), settings.get(REVISION)
    if not name or not isinstance(name, str):
        raise ArtifactError(f"{named_by}: it names no base model ({BASE} is {name!r}). Name it with --base.")
    try:
        path = resolve_model_name(name if revision is None else f"{name}@{revision}", logger.info)
        read_config(path)
    except ModelError as error:
        raise ArtifactError(
            f"{named_by}: the base model of these adapters is not there: {error} Name it with --base, where it is now."
        ) from error
    return path


def load_base(base: str, *, pad: int | None) -> Any:
    """Return the base model in float32 as a sequence classifier with one label, whose pad token is `pad`.

    Its head is new, or that of the base if it is a reward model; that of the adapters is put on it.

    Raises ModelError if weights other than those of the head are missing or do not fit.
    """
    config = read_config(base)
    text_config = config.get_text_config()
    classifier, missing, _ = read_classifier(
        disk_class_of(config), base, padded_implementation(text_config), new_head=True
    )
    if lost := sorted(name for name in missing if not name.startswith(f"{HEAD_ON_DISK}.")):
        raise ModelError(
            f"{base}: weights are missing from the files: {_listed(lost)}. The base model is incomplete, or of another "
            f"architecture."
        )
    classifier.config.get_text_config().pad_token_id = pad
    return classifier.eval()


def put_on(classifier: Any, folder: Path, base: str) -> Any:
    """Return the model of PEFT: the adapters and the head in `folder` on a classifier of the base model.

    Raises ArtifactError unless every weight of the folder has its place there, and every place its weight: PEFT would
    leave weights out, or make them up.
    """
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    what = f"the adapters in {folder} do not fit it"
    with told(base, what), torch.no_grad(), warnings.catch_warnings():
        # PEFT asks by a name that transformers has deprecated, and warns of missing weights, which are looked for here.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        try:
            model: Any = PeftModel.from_pretrained(classifier, str(folder), adapter_name=ADAPTER)
            # Once more, since from_pretrained does not say which weights found no place.
            result = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), ADAPTER)
        except (RuntimeError, ValueError) as error:  # another shape; no layer of this name
            raise _unfit(folder, base, " ".join(str(error).split())[:300]) from error
    missing = [name for name in result.missing_keys if ADAPTER in name.split(".")]
    if missing:
        raise _unfit(folder, base, f"weights are missing from its file: {_listed(missing)}")
    if result.unexpected_keys:
        raise _unfit(folder, base, f"the base has no place for {_listed(result.unexpected_keys)}")
    return model.eval()


@torch.no_grad()
def scores_of(model: Any, sequences: Iterable[Sequence[int]], counts: Sequence[float] = (1.0,)) -> list[float]:
    """Return the logit that a classifier, with adapters or without, gives each sequence of tokens, one at a time; of
    several outputs the sum of what each counts."""
    scores, counts_O = [], torch.tensor(counts)
    for token_ids in sequences:
        ids_1L = torch.tensor([[int(token) for token in token_ids]])
        logits_1O = model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L)).logits
        scores.append(float(logits_1O[0] @ counts_O))
    return scores


def _unfit(folder: Path, base: str, why: str) -> ArtifactError:
    return ArtifactError(
        f"{folder}: its weights do not fit {base}: {why.rstrip('.')}. Is this the base model that the adapters were "
        f"trained on? Name it with --base."
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first of several names of weights."""
    return ", ".join(sorted(names)[:3]) + (f" … ({len(names)} in all)" if len(names) > 3 else "")
