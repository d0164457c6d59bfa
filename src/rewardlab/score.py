"""The one scoring path: conversations -> groups -> batches -> rewards.

Training's evaluation, `rewardlab eval`, canaries and a loaded model all come through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rewardlab.batch import PackedBatch, pack
from rewardlab.core.bars import bar
from rewardlab.core.errors import RenderError
from rewardlab.core.types import Conversation, Message, Preference, ScoreRow, TokenGroup
from rewardlab.data.chat import Renderer, to_messages
from rewardlab.data.layout import Rendered, lay_out
from rewardlab.data.pack import Piece, part_of, plan_replies
from rewardlab.data.rows import is_open_transcript, parse_transcript
from rewardlab.model.config import ComputeConfig
from rewardlab.model.reward import RewardModel

FloatArray = npt.NDArray[np.float32]


@runtime_checkable
class Together(Protocol):
    """Processes that score together; each has the same groups and gets all rewards."""

    @property
    def rank(self) -> int:
        """Number of this one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, thing: Any) -> list[Any]:
        """What each of them hands in."""


class _Alone:
    rank, size = 0, 1

    def gather(self, thing: Any) -> list[Any]:
        return [thing]


ALONE: Final[Together] = _Alone()


def score_groups(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    budget: int,
    progress: str | None = None,
    ranks: Together = ALONE,
) -> list[FloatArray]:
    """Rewards of every reply of every group, in order, without gradients; `progress` names a progress bar.

    At most `budget` tokens are computed at a time: a larger group in pieces, each with its own copy of the prompt, and
    only a single conversation that is larger on its own. The rows are dealt to `ranks`.
    """
    return compute_groups(
        model, groups, lambda batch: model(batch).float(), budget=budget, progress=progress, ranks=ranks
    )


def compute_groups(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    forward: Callable[[PackedBatch], Tensor],
    *,
    budget: int,
    progress: str | None = None,
    ranks: Together = ALONE,
) -> list[FloatArray]:
    """What `forward` makes of every group, in order: one entry of [K, …] for each, K its replies.

    The model is in evaluation mode meanwhile, and nothing has a gradient. `budget` is as in `score_groups`: a group may
    reach `forward` in pieces, which have no judgements.
    """
    layout = model.layout
    rows = plan_replies(groups, budget, layout=layout)
    own = rows[ranks.rank :: ranks.size]
    # As many for all, dummies among them: a model that is sharded is computed by all ranks or by none.
    own += [[]] * (-(-len(rows) // ranks.size) - len(own))
    found: dict[Piece, FloatArray] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for row in bar(own, title=progress) if progress else own:
            parts = [part_of(groups[piece.group], piece) for piece in row]
            values = forward(pack(parts, share=layout != "unshared").to(model.device)).cpu().numpy()
            ends = np.cumsum([part.num_replies for part in parts])
            found |= zip(row, np.split(values, ends[:-1]) if row else [], strict=True)
    model.train(was_training)
    found = {piece: values for part in ranks.gather(found) for piece, values in part.items()}
    values_of: list[list[FloatArray]] = [[] for _ in range(len(groups))]
    for piece in sorted(found):
        values_of[piece.group].append(found[piece])
    return [values[0] if len(values) == 1 else np.concatenate(values) for values in values_of]


def score_rows(groups: Sequence[TokenGroup], scores: Sequence[npt.NDArray[np.floating]]) -> list[ScoreRow]:
    """One row a reply, with the comparisons in which it comes first."""
    return [
        ScoreRow(
            preference_id=group.preference_id,
            source=group.source,
            prompt_key=group.prompt_key,
            reply=reply,
            score=float(rewards[reply]),
            num_tokens=group.lengths[reply],
            prompt_tokens=group.prompt_tokens[reply],
            truncated_tokens=group.truncated_tokens[reply],
            comparisons=tuple(c for c in group.comparisons if c.first == reply),
        )
        for group, rewards in zip(groups, scores, strict=True)
        for reply in range(group.num_replies)
    ]


def prompt_turns(value: Any, *, bare: bool) -> tuple[Conversation, bool]:
    """(the turns of a prompt, whether it is a transcript whose turns they are), read as training reads it; `bare`
    models take texts as they are.

    Raises RenderError or UnusableRowError for what is no prompt.
    """
    if not bare and is_open_transcript(value):
        return parse_transcript(value)[:-1], True
    return ((Message("user", value),) if isinstance(value, str) else to_messages(value)), False


class Scorer:
    """A reward model with its renderer: the same conversation gets the same number, whatever it is scored with."""

    def __init__(
        self,
        model: RewardModel,
        renderer: Renderer,
        *,
        beta: float = 1.0,
        token_budget: int = 8192,
        compute: ComputeConfig | None = None,
    ) -> None:
        self.model = model
        self.renderer = renderer
        self.beta = beta
        """σ(beta · difference of two scores) is the probability that the first is preferred."""
        self.token_budget = token_budget
        self.compute = compute
        """Which kernels the model computes with, every `auto` decided; None for a model that nobody loaded."""

    def score(self, conversations: Iterable[Sequence[Message | Mapping[str, str]]]) -> list[float]:
        """One reward for each conversation, which must end with an assistant turn.

        Neighbours with the same prompt are computed together, the prompt once for as many as the token budget holds.

        Raises RenderError naming the conversation that cannot be rendered.
        """
        given: list[Any] = [] if isinstance(conversations, str | Mapping) else list(conversations)
        if isinstance(conversations, str | Mapping) or any(isinstance(one, Message | Mapping) for one in given):
            raise RenderError(
                "score takes a list of conversations, each a list of messages. Put a single one into a list; for "
                "replies to one prompt there is score_replies(prompt, replies)."
            )
        messages = [to_messages(conversation) for conversation in given]
        for number, conversation in enumerate(messages):
            if not conversation or conversation[-1].role != "assistant":
                raise RenderError(f"conversation {number} must end with an assistant turn, the reply to be scored.")
        groups = []
        for _, numbers in groupby(range(len(messages)), key=lambda number: messages[number][:-1]):
            groups.append(self._group(list(numbers), messages))
        scores = score_groups(self.model, groups, budget=self.token_budget)
        return [float(score) for piece in scores for score in piece]

    def score_replies(self, prompt: str | Sequence[Message | Mapping[str, str]], replies: Iterable[str]) -> list[float]:
        """One reward for each reply to one prompt: messages, or a text, which is read as in data (`prompt_turns`).

        Raises RenderError for what is no prompt or no list of texts.
        """
        texts = [replies] if isinstance(replies, str) else list(replies)
        if isinstance(replies, str) or not all(isinstance(reply, str) for reply in texts):
            raise RenderError("replies are a list of texts. Put a single one into a list.")
        turns, is_transcript = prompt_turns(prompt, bare=self.renderer.spec.joins_texts)
        replies = [reply.strip() for reply in texts] if is_transcript else texts
        return self.score([(*turns, Message("assistant", reply)) for reply in replies])

    def _group(self, numbers: Sequence[int], messages: Sequence[Conversation]) -> TokenGroup:
        rendered: dict[int, Rendered] = {}
        for position, number in enumerate(numbers):
            try:
                rendered[position] = self.renderer.render(messages[number][:-1], messages[number][-1:])
            except RenderError as error:
                raise RenderError(f"conversation {number}: {error}") from error
        preference = Preference(
            id=f"conversation {numbers[0]}",
            source="score",
            prompt=messages[numbers[0]][:-1],
            replies=tuple(messages[number][-1:] for number in numbers),
            comparisons=(),
        )
        return lay_out(preference, rendered)
