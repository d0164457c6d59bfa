"""Says which settings of a run do nothing, or are not those of the reward model that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rewardlab.artifact.base import Base, spec_of
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import RenderError
from rewardlab.core.spec import TRUNCATION_OF, RewardSpec
from rewardlab.core.terminal import quoted, short
from rewardlab.core.types import TokenGroup
from rewardlab.data.chat import Renderer, to_messages
from rewardlab.data.groups import Datasets
from rewardlab.training.settings.config import RewardTrainerConfig, RunConfig

FEATURES: Final = {
    "diagnostic_": "diagnostic_mode",
    "lora_": "lora",
    "profile_steps": "profile",
    "publish_": "publish_to",
    "shuffle_buffer": "streaming",
}
"""Beginning of the names of settings -> the setting without which they do nothing."""
IDLE: Final = {
    **FEATURES,
    "checkpoint_": "checkpoints",
    "gpu_sample_interval_ms": "track_gpu",
    "regularization_type": "regularization_lambda",
}
"""FEATURES, and settings that are shown all the same."""


def idle_notices(config: RewardTrainerConfig) -> list[str]:
    """Return a line for each feature that is off though settings of it are given."""
    values, usual = to_mapping(config), to_mapping(RewardTrainerConfig.of(model=config.model.model))
    lines = []
    for start, switch in IDLE.items():
        if values[switch] not in (None, False, "none", 0):
            continue
        given = [name for name in values if name.startswith(start) and name != switch and values[name] != usual[name]]
        if given:
            told = " ".join(f"--{name.replace('_', '-')} {short(str(values[name]))}" for name in given)
            does = "does" if len(given) == 1 else "do"
            lines.append(f"{told} {does} nothing without --{switch.replace('_', '-')}. Add it, or leave this out.")
    return lines


def unjudged_notices(config: RewardTrainerConfig, data: Datasets, test: Sequence[TokenGroup]) -> list[str]:
    """Return a line for each setting that does nothing, since the data that it is about are missing."""
    if data.eval:
        return []
    metric, rows = config.run.early_stopping_metric, config.data.selection.train_eval_limit
    unused = {
        f"--train-eval-limit {rows}: training rows are compared with evaluation data": rows > 0,
        f"--early-stopping-metric {metric}: it chooses among evaluations": metric != RunConfig.early_stopping_metric,
        "--precision-card always: the card is made on evaluation or test data": (
            config.monitor.precision_card == "always" and not test
        ),
    }
    remedy = "Name some with --eval-dataset, --eval-split or --eval-fraction, or leave it out."
    return [f"{said}, and there are none. {remedy}" for said, is_unused in unused.items() if is_unused]


def continued_notices(config: RewardTrainerConfig, base: Base) -> list[str]:
    """Return a line if a reward model that is trained further was trained with another rendering, limit or β.

    Its template is in its tokenizer, with a system prompt that it was trained with. Limit, truncation and β are those
    of the run, so what is not given again is that of any new model.
    """
    if config.model.new_head or (spec := spec_of(base.path)) is None:
        return []
    before, now = spec.renderer, base.renderer.spec
    rules = {rule: name for name, rule in TRUNCATION_OF.items()}
    compared = {
        "--max-seq-len": (f"{before.max_length}", f"{now.max_length}"),
        # An older rule that cuts a token more is `prompt-left` too.
        "--truncation": (rules.get(before.truncation, "prompt-left"), rules.get(now.truncation, "prompt-left")),
        "--beta": (f"{spec.beta:g}", f"{config.loss.beta:g}"),
    }
    changed = [f"{flag} was {was}, now {is_now}" for flag, (was, is_now) in compared.items() if was != is_now]
    if not _is_rendered_alike(spec, base.renderer):
        changed.append("conversations become other tokens (--chat-template, --system-prompt)")
    if not changed:
        return []
    return [f"{quoted(base.path)} goes on with other settings than it was trained with: {'; '.join(changed)}."]


def _is_rendered_alike(spec: RewardSpec, renderer: Renderer) -> bool:
    """Return whether the conversations in a spec become the tokens that they became when it was written."""
    try:
        return all(
            renderer.token_ids(to_messages(canary.messages)).tolist() == canary.token_ids for canary in spec.canaries
        )
    except RenderError:
        return False
