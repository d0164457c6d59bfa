"""The token budget of a run that names none: 8,192 tokens, and on a GPU as many more as surely fit.

The time of a small model on a GPU is the processor's, which starts as many operations for a micro-batch of few tokens
as for one of many. What is taken follows from the sizes of device, model and data alone, not from what is free or from
a trial, so the same command makes the same micro-batches on every GPU of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from rewardlab.core.types import TokenGroup
from rewardlab.data.pack import costs
from rewardlab.distributed.ranks import Ranks
from rewardlab.model.config import DEFAULT_BUDGET
from rewardlab.model.reward import RewardModel
from rewardlab.training.budget import Choice
from rewardlab.training.cost.activations import bytes_a_token
from rewardlab.training.cost.memory import total_memory
from rewardlab.training.cost.throughput import GIB
from rewardlab.training.loop.optimizer import state_bytes
from rewardlab.training.settings.config import RewardTrainerConfig

SIZES: Final = (DEFAULT_BUDGET, 16_384, 32_768, 65_536)
"""The budgets that are taken."""
ENOUGH: Final = 32_768
"""More is taken only where a step has more: what it leaves without gradients, evaluations, gains little beyond."""
SHARE: Final = 0.6
"""Share of the device's memory that a step may take by the formulas; the rest is for what they leave out, such as what
the backward pass makes on its way, and for other programs."""
FAMILIES: Final = {
    **dict.fromkeys(("llama", "ministral", "mistral", "qwen2", "smollm3", "starcoder2"), 1.0),
    "gpt_neox": 1.1,
    **dict.fromkeys(("exaone4", "gemma", "glm", "helium", "ministral3", "olmo", "olmo2", "olmo3"), 1.6),
    **dict.fromkeys(("phi3", "qwen3"), 1.6),
    **dict.fromkeys(("arcee", "gemma2", "gemma3_text", "glm4", "hunyuan_v1_dense"), 2.0),
    "phi": 2.2,
}
"""Families whose layers were counted without a device -> at most how many times what the formula says they keep."""
COMPILED: Final = 1.5
"""At most how many times as much layers keep that are compiled: 6 bytes for a token and each inner feature of the gated
part where the formula has 4. Counted 1.06 times in one shape, on a CPU."""
RAGGED: Final = ("varlen", "flash")
"""Kernels for which the formulas hold."""


def decided_early(config: RewardTrainerConfig, device: torch.device, ranks: Ranks) -> RewardTrainerConfig:
    """Return the configuration with the default budget where the size of a device decides nothing."""
    if config.run.micro_token_budget is not None:
        return config
    # Ranks that hold parts of a model cannot go on with less when one runs out of memory.
    parts = ranks.size > 1 and config.run.sharding != "none"
    open_yet = device.type == "cuda" and not parts and not config.model.cache_states
    return config if open_yet else config.replace(micro_token_budget=DEFAULT_BUDGET)


def budget_by_size(model: RewardModel, train: Sequence[TokenGroup], config: RewardTrainerConfig) -> Choice:
    """Return the budget for training on a GPU, by the size of its memory."""
    if why := _not_counted(model, config):
        return Choice(budget=DEFAULT_BUDGET, reason=f"memory is not predicted {why}")
    total = total_memory(model.device)
    step = np.sort(costs(train, model.layout))[-config.run.batch_size :].sum()
    wanted = next((size for size in SIZES if size >= max(step, ENOUGH)), SIZES[-1])
    fixed, each = _fixed_bytes(model, config), _bytes_a_token(model, train, config)
    has = f"{total / GIB:.1f} GiB"
    fitting = [size for size in SIZES[1:] if size <= wanted and fixed + each * size <= SHARE * total]
    if not fitting:
        return Choice(budget=DEFAULT_BUDGET, reason=f"by memory: more could take above {SHARE:.0%} of {has}")
    taken = (fixed + each * fitting[-1]) / GIB
    return Choice(budget=fitting[-1], reason=f"by memory: a step takes at most some {taken:.1f} of {has}")


def _not_counted(model: RewardModel, config: RewardTrainerConfig) -> str:
    """Return for what the formulas of docs/scaling.md do not hold; empty if they do."""
    asked, compute = config.model, config.compute
    cases = {
        f"for models of the type {model.config.model_type}": model.config.model_type not in FAMILIES,
        "for padded rows": model.layout == "padded",
        f"for the kernel {compute.attention_backend}": compute.attention_backend not in RAGGED,
        "with --quantization": asked.quantization != "none",
        "with --lora-dropout": bool(asked.lora_dropout),
        "with --dora": asked.dora,
        "with --liger": compute.liger,
        "with --activation-checkpointing selective": compute.activation_checkpointing == "selective",
    }
    return next((name for name, holds in cases.items() if holds), "")


def _fixed_bytes(model: RewardModel, config: RewardTrainerConfig) -> int:
    """Return the bytes of weights, gradients, optimiser and copies in half precision."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(parameter.nbytes for parameter in trained)
    copies = sum(2 * parameter.numel() for parameter in trained if parameter.ndim > 1)
    return weights + gradients + state_bytes(trained, config.optimizer.optimizer) + copies


def _bytes_a_token(model: RewardModel, train: Sequence[TokenGroup], config: RewardTrainerConfig) -> float:
    """Return the bytes that a step keeps for each token, with unfused norms: whether a machine fuses them is measured,
    and the budget must not depend on that."""
    shared, unshared = (np.array(costs(train, layout), float) for layout in ("shared", "unshared"))
    keys = float((unshared / shared).max()) if model.layout == "shared" else 1.0
    kept = bytes_a_token(
        model.config,
        lora_rank=config.model.lora_rank if config.model.lora else 0,
        checkpointing=config.compute.activation_checkpointing,
        # Rows of a prompt come together up to the keys that pairs have (`step_rows.SPREAD`).
        keys=max(keys, 2.0),
    )
    return FAMILIES[model.config.model_type] * kept * (COMPILED if config.compute.compile else 1.0)
