"""The precision card with which a run ends. The run does not fail if it cannot be made, since the model is saved by
then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rewardlab.analysis.precision import PrecisionCard
from rewardlab.core.errors import RewardlabError
from rewardlab.core.types import TokenGroup
from rewardlab.distributed.ranks import Ranks
from rewardlab.evaluation.evaluate import EvalResult
from rewardlab.evaluation.precision import judge_precisions, write_card
from rewardlab.model.out_of_memory import is_out_of_memory
from rewardlab.score import Scorer
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")


def card_of_chosen(
    config: RewardTrainerConfig,
    scorer: Scorer,
    groups: Sequence[TokenGroup],
    result: EvalResult | None,
    saved_as: str,
    ranks: Ranks,
    *,
    is_sharded: bool,
) -> PrecisionCard | None:
    """Write and return the precision card of a model, whose `result` on the groups is known.

    None without a result and, with a warning, on all ranks, if memory or the model does not allow it on one of them.
    Ranks of a sharded model (`is_sharded`) wait for each other inside its layers, where none can be told that another
    one failed: there the error is raised. After a run in float32 its half precision is bf16. The model cannot be used
    afterwards.
    """
    if result is None:
        return None
    together = _Guarded(ranks)
    try:
        card = judge_precisions(
            scorer,
            groups,
            exact=result.rows,
            save_dtype=saved_as,
            precision="fp16" if config.model.precision == "fp16" else "bf16",
            budget=config.run.token_budget,
            seed=config.run.seed,
            ranks=together,
        )
        together.gather(None)  # A rank may fail after the last scores were exchanged.
    except _ElsewhereError as error:
        why = str(error)
    except Exception as error:
        if (is_sharded and ranks.size > 1) or not (isinstance(error, RewardlabError) or is_out_of_memory(error)):
            raise
        why = together.fail(error)
    else:
        if ranks.is_first:
            write_card(config.run.output_dir / "evals", card)
        return card
    if ranks.is_first:
        logger.warning("no precision card of the chosen model (--precision-card never leaves it out): %s", why)
    return None


class _ElsewhereError(Exception):
    """Some rank has failed, and all have heard of it."""


class _Guarded:
    """Ranks that score together. A rank that fails sends that to the others in place of its scores, so none waits."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def gather(self, thing: Any) -> list[Any]:
        """Return what every rank handed in, in their order. Raises _ElsewhereError if one of them has failed."""
        things = self._ranks.gather((None, thing))
        if failed := [why for why, _ in things if why is not None]:
            raise _ElsewhereError(failed[0])
        return [own for _, own in things]

    def fail(self, error: Exception) -> str:
        """Tell the other ranks, each of which calls `gather` or `fail` too; return the first error of all."""
        said = self._ranks.gather((f"{type(error).__name__}: {error}", None))
        return next(why for why, _ in said if why is not None)
