"""The errors of a step that cannot be computed: what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewardlab.core.errors import DeviceMemoryError, NonFiniteError


@dataclass(frozen=True, kw_only=True)
class Nouns:
    """What a task calls the things that messages are about."""

    weighed: str
    """Those whose losses are weighed, in the plural."""
    whole: str
    """What is computed at once, whatever the token budget."""


def no_weight(step: int, total: float, examples: str, nouns: Nouns) -> NonFiniteError:
    """Return the error for a step whose total weight is not above 0."""
    return NonFiniteError(
        f"step {step}: the weights of its {nouns.weighed} add up to {total}. Examples: {examples}. Leave out rows of "
        f"weight 0, or raise --batch-size."
    )


def not_finite(
    step: int, grad_norm: float, told: Sequence[tuple[bool, str]], *, loss_scale: float | None
) -> NonFiniteError:
    """Return the error for a loss or gradient that is not finite.

    `told` has for each rank whether one of its own losses is not finite, and which examples it had. `loss_scale` is
    that of a run in float16, else None.
    """
    # A NaN spreads to the gradients of all ranks, so only those with a broken loss are shown, where there are any.
    by_loss = [text for is_guilty, text in told if is_guilty] or [text for _, text in told]
    scale = "" if loss_scale is None else f" with a loss scale of {loss_scale:g}"
    other = "; in bf16, use --precision fp32" if loss_scale is None else ", or use --precision fp32 or bf16"
    return NonFiniteError(
        f"step {step}: gradient norm {grad_norm}{scale}; stopped before the update, so the weights are those of step "
        f"{step - 1}. {' '.join(by_loss)} Look at these rows; otherwise lower --lr{other}."
    )


def no_memory_for_state(step: int) -> DeviceMemoryError:
    """Return the error for an optimiser state, created at the first update, that does not fit into memory."""
    return DeviceMemoryError(
        f"step {step}: out of memory for the optimiser's state; AdamW's is two float32 copies of every weight that "
        f"trains. Train with --lora, another --optimizer or a smaller model; --micro-token-budget does not change this."
    )


def no_memory_on_rank(step: int, rank: int, budget: int) -> DeviceMemoryError:
    """Return the error for a rank that ran out of memory where the step cannot be tried again.

    The other ranks are inside a layer, waiting for this one.
    """
    return DeviceMemoryError(
        f"step {step}: out of memory on rank {rank} with --micro-token-budget {budget}. Start again with "
        f"--micro-token-budget {budget // 2} --resume auto."
    )


def no_memory(step: int, budget: int, least: int, nouns: Nouns) -> DeviceMemoryError:
    """Return the error for a step that does not fit into memory even with this token budget."""
    smaller = f"Set a smaller one (at least {least}, the largest {nouns.whole}), lower" if budget > least else "Lower"
    return DeviceMemoryError(
        f"step {step}: out of memory, also with --micro-token-budget {budget}. {smaller} --max-seq-len, or turn on "
        f"--activation-checkpointing. The weights are those of step {step - 1}."
    )
