"""The one scoring path: conversations -> groups -> batches -> rewards.

Evaluation during training, `rewardlab eval`, `rewardlab score` and a loaded model all score here, so none of them can
lay out or read a conversation differently from the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit
from torch import Tensor
from torch.distributed.tensor import DTensor

from rewardlab.batch import PackedBatch, first_alike, pack
from rewardlab.core.bars import bar
from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.terminal import plural
from rewardlab.core.types import Conversation, Message, Preference, ScoreRow, TokenGroup
from rewardlab.data.bulk import render_conversations
from rewardlab.data.chat import Overlong, Renderer
from rewardlab.data.layout import Rendered, lay_out
from rewardlab.data.merging import Limits, MergedGroups
from rewardlab.data.pack import Piece, halves_of, part_of, plan_replies
from rewardlab.data.prompts import conversations_in, conversations_of
from rewardlab.data.prompts import prompt_turns as prompt_turns
from rewardlab.model.config import DEFAULT_BUDGET, ComputeConfig
from rewardlab.model.forked import computing
from rewardlab.model.out_of_memory import release_cached, unless_out_of_memory
from rewardlab.model.reward import RewardModel

logger = logging.getLogger("rewardlab")
FloatArray = npt.NDArray[np.float32]
SPREAD: Final = 8
"""`Limits.spread` without gradients, where keys are copied for one layer at a time."""
BUDGET_ON_GPU: Final = 32_768
"""Tokens scored at a time by commands, which have a GPU to themselves: starting operations takes its time, and without
gradients few tensors are kept."""
SHORTEN: Final = (
    "The model was trained without such conversations. Shorten it, or let its old turns be cut all the same: "
    "scorer.renderer = scorer.renderer.that_cuts."
)


@runtime_checkable
class Together(Protocol):
    """The ranks that score together; each is given the same groups and gets all rewards."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def gather(self, thing: Any) -> list[Any]:
        """Return what every rank handed in, in the order of the ranks, on all of them."""


class _Alone:
    """A process by itself."""

    rank, size = 0, 1

    def gather(self, thing: Any) -> list[Any]:
        return [thing]


ALONE: Final[Together] = _Alone()


def budget_of(device: torch.device) -> int:
    """Return the tokens that are scored at a time on a device where nothing says otherwise."""
    return BUDGET_ON_GPU if device.type == "cuda" else DEFAULT_BUDGET


def score_groups(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    budget: int | None,
    progress: str | None = None,
    ranks: Together = ALONE,
    halves: bool = True,
) -> list[FloatArray]:
    """Return float32 rewards [K] for every group of K replies, in order, computed without gradients.

    At most `budget` tokens are computed at a time, by default `budget_of` the model's device. A larger group is
    computed in pieces, each with its own copy of the prompt; only a single conversation may exceed the budget. Where
    prompts are shared, those of groups with equal ones are computed once too, and equal replies to such a prompt once,
    as far as the budget holds them together. The rows are distributed over `ranks`. `progress` is the title of a
    progress bar, None for none.

    What memory does not hold is computed in halves, and from then on `model` computes fewer tokens at a time; with
    `halves=False`, and where ranks hold parts of the model, the error is raised at once.
    """
    return compute_groups(
        model, groups, lambda batch: model(batch).float(), budget=budget, progress=progress, ranks=ranks, halves=halves
    )


def compute_groups(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    forward: Callable[[PackedBatch], Tensor],
    *,
    budget: int | None,
    progress: str | None = None,
    ranks: Together = ALONE,
    merge: bool = True,
    halves: bool = True,
) -> list[FloatArray]:
    """Return what `forward` makes of every group, in order: an array [K, …] for each group of K replies.

    `forward` returns [R, …] for a batch of R replies. It runs with the model in evaluation mode and without gradients.
    The other arguments are as in `score_groups`: a group may reach `forward` in pieces, which have no judgements.
    With `merge=False` groups stay apart, and `indices` of a batch are the numbers of its groups in `groups`.
    """
    computing.begin()
    budget = budget_of(model.device) if budget is None else budget
    # The forward pass of a sharded model is a collective operation, which a rank cannot repeat alone.
    halves = halves and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    compute = partial(_compute, model, forward=forward, budget=budget, progress=progress, ranks=ranks, halves=halves)
    if merge and model.layout == "shared":
        together = MergedGroups(groups, Limits(tokens=budget, spread=SPREAD))
        return together.apart(compute(together))
    return compute(groups)


def _compute(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    forward: Callable[[PackedBatch], Tensor],
    budget: int,
    progress: str | None,
    ranks: Together,
    halves: bool,
) -> list[FloatArray]:
    """Return what `forward` makes of every group, in order; groups stay as they are."""
    layout = model.layout
    rows = plan_replies(groups, budget, layout=layout)
    own = rows[ranks.rank :: ranks.size]
    # Every rank gets the same number of rows, empty ones if need be (`pack` makes a dummy of them). The forward pass of
    # a sharded model is a collective operation: a rank with fewer rows would leave the others waiting.
    own += [[]] * (-(-len(rows) // ranks.size) - len(own))
    values_of_pieces: dict[Piece, FloatArray] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for row in bar(own, title=progress) if progress else own:
            for part, values in _values_of(model, groups, row, forward, halves):
                ends = np.cumsum([piece.stop - piece.first for piece in part])
                # A dummy has a value too, which belongs to no piece and is dropped.
                values_of_pieces |= zip(part, np.split(values, ends[:-1]) if part else [], strict=True)
    model.train(was_training)
    values_of_pieces = {piece: values for part in ranks.gather(values_of_pieces) for piece, values in part.items()}
    # Rows are planned by length and computed on several ranks. Sorting by group and first reply puts pieces in order.
    values_of: list[list[FloatArray]] = [[] for _ in range(len(groups))]
    for piece in sorted(values_of_pieces):
        values_of[piece.group].append(values_of_pieces[piece])
    return [values[0] if len(values) == 1 else _joined(values, groups[n]) for n, values in enumerate(values_of)]


def _values_of(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    row: list[Piece],
    forward: Callable[[PackedBatch], Tensor],
    halves: bool,
) -> Iterator[tuple[list[Piece], FloatArray]]:
    """Yield the pieces of a row, all together or in parts that memory holds, with the values of their replies."""
    share = model.layout != "unshared"

    def compute() -> FloatArray:
        parts = [part_of(groups[piece.group], piece) for piece in row]
        batch = pack(parts, share=share, indices=[piece.group for piece in row])
        values: FloatArray = forward(batch.to(model.device)).cpu().numpy()
        _make_equal(values, parts)
        return values

    found = halves_of(groups, row, model.layout) if halves and row else None
    if found is None:
        yield row, compute()
        return
    tokens = sum(piece.num_tokens for piece in row)
    if model.most_tokens is None or tokens <= model.most_tokens:
        if (values := unless_out_of_memory(compute)) is not None:
            yield row, values
            return
        release_cached(model.device)
        # Halves are not quite of one size, and the larger one is to be tried.
        model.most_tokens = tokens * 3 // 4
        logger.warning(
            "OUT OF MEMORY: %d tokens at once were too many to score; from here on at most %d. A smaller token budget "
            "(--micro-token-budget) saves the attempt",
            tokens,
            model.most_tokens,
        )
    for half in found:
        yield from _values_of(model, groups, half, forward, halves)


def _joined(pieces: Sequence[FloatArray], group: TokenGroup) -> FloatArray:
    """Return the values of a group that was computed in pieces."""
    values = np.concatenate(pieces)
    _make_equal(values, [group])
    return values


def _make_equal(values: FloatArray, parts: Sequence[TokenGroup]) -> None:
    """Give replies of the same tokens the same value, which kernels do but for rounding."""
    first_row = 0
    for part in parts:
        for reply, alike in enumerate(first_alike(part)):
            if alike != reply:
                values[first_row + reply] = values[first_row + alike]
        first_row += part.num_replies


def score_rows(groups: Sequence[TokenGroup], scores: Sequence[npt.NDArray[np.floating]]) -> list[ScoreRow]:
    """Return one row for each reply, in order; `scores` has an array [K] for each group.

    A row has the comparisons in which its reply comes first, so that every comparison is in exactly one row. Replies
    have their numbers in the data, so that models which lost other replies to a limit of length are told apart.
    """
    return [
        ScoreRow(
            preference_id=group.preference_id,
            source=group.source,
            prompt_key=group.prompt_key,
            reply=group.numbers[reply],
            score=float(rewards[reply]),
            num_tokens=group.lengths[reply],
            prompt_tokens=group.prompt_tokens[reply],
            truncated_tokens=group.truncated_tokens[reply],
            truncated_reply_tokens=group.truncated_reply_tokens[reply],
            comparisons=tuple(
                replace(c, first=group.numbers[reply], second=group.numbers[c.second])
                for c in group.comparisons
                if c.first == reply
            ),
        )
        for group, rewards in zip(groups, scores, strict=True)
        for reply in range(group.num_replies)
    ]


def calibrated(scores: Sequence[float], affine: tuple[float, float] | None) -> list[float]:
    """Return raw scores as log odds that a reply is a preferred one: scale · score + shift of a spec's `affine`.

    Raises ConfigError if there is none.
    """
    if affine is None:
        raise ConfigError(
            "the model holds no calibration. Fit one on held-out data and store it: `rewardlab calibrate MODEL "
            "--dataset PAIRS --store`."
        )
    scale, shift = affine
    return [scale * score + shift for score in scores]


def probabilities(scores: Sequence[float], affine: tuple[float, float] | None) -> list[float]:
    """Return the probability that a reply is a preferred one, for raw scores. Raises as `calibrated` does."""
    found: list[float] = expit(np.array(calibrated(scores, affine), dtype=np.float64)).tolist()
    return found


class _Turn:
    """A lock of one object; a copy of the object, in this process or another one, has a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, ()


class Scorer:
    """A reward model with its renderer. A conversation gets the same score whatever other ones it is scored with.

    Any number of threads may share it; one computes at a time.
    """

    def __init__(
        self,
        model: RewardModel,
        renderer: Renderer,
        *,
        beta: float = 1.0,
        token_budget: int = DEFAULT_BUDGET,
        compute: ComputeConfig | None = None,
        temperature: float = 1.0,
        affine: tuple[float, float] | None = None,
    ) -> None:
        self.model = model
        self.renderer = renderer
        self.beta = beta
        """σ(beta · (score of a − score of b)) is the probability that reply a is preferred to reply b."""
        self.token_budget = token_budget
        """Most tokens computed at a time, unless a single conversation has more; changes no score."""
        self.compute = compute
        """The kernels that the model computes with, every `auto` decided; None if it was not loaded from a folder."""
        self.temperature = temperature
        """σ(beta · difference / temperature) is the calibrated probability of a preference; 1 where none was fitted."""
        self.affine = affine
        """(scale, shift) of `rewardlab calibrate`, None where none was fitted; `score` never applies it."""
        self.tells_cuts = True
        """Whether a warning is logged where conversations are cut; `rewardlab score` says so of every row instead."""
        # No two threads may use a tokenizer at once, or a model: its hooks keep things from layer to layer.
        self._turn = _Turn()

    def score(
        self,
        conversations: Iterable[Sequence[Message | Mapping[str, str]]],
        *,
        rendered: Mapping[Conversation, Rendered] = MappingProxyType({}),
    ) -> list[float]:
        """Return one reward for each conversation, in order. A conversation must end with an assistant turn.

        Conversations with the same prompt are computed together, with one copy of the prompt for as many as the token
        budget holds. `rendered` are those that `renderer` has rendered already.

        Raises RenderError if the argument is not a list of conversations, or naming the conversation that does not end
        with an assistant turn or cannot be rendered.
        """
        with self._turn:
            scores = score_groups(self.model, self._groups(conversations, rendered), budget=self.token_budget)
        return [float(score) for piece in scores for score in piece]

    def final_states(
        self,
        conversations: Iterable[Sequence[Message | Mapping[str, str]]],
        *,
        rendered: Mapping[Conversation, Rendered] = MappingProxyType({}),
    ) -> FloatArray:
        """Return [R, W] what the head reads of each conversation, in order, in float32. `rendered` is as in `score`.

        Raises as `score` does.
        """
        with self._turn:
            states = compute_groups(
                self.model,
                self._groups(conversations, rendered),
                lambda batch: self.model.final_states(batch).float(),
                budget=self.token_budget,
            )
        return np.concatenate([np.zeros((0, self.model.head.in_features), np.float32), *states])

    def calibrated(self, scores: Sequence[float]) -> list[float]:
        """Return raw scores as log odds that a reply is a preferred one: scale · score + shift.

        Raises ConfigError if the model holds no calibration.
        """
        return calibrated(scores, self.affine)

    def probabilities(self, scores: Sequence[float]) -> list[float]:
        """Return the probability that a reply is a preferred one, for raw scores. Raises as `calibrated` does."""
        return probabilities(scores, self.affine)

    def score_replies(self, prompt: str | Sequence[Message | Mapping[str, str]], replies: Iterable[str]) -> list[float]:
        """Return one reward for each reply to one prompt.

        The prompt is a list of messages or a text, which is read as in training data (`prompt_turns`).

        Raises RenderError or UnusableRowError if `prompt` is not a prompt, and RenderError if `replies` is not a list
        of texts or a conversation cannot be rendered.
        """
        return self.score(conversations_of(prompt, replies, bare=self.renderer.spec.joins_texts))

    def _groups(
        self,
        conversations: Iterable[Sequence[Message | Mapping[str, str]]],
        known: Mapping[Conversation, Rendered],
    ) -> list[TokenGroup]:
        """Return the conversations as groups, neighbours with one prompt together. Raises as `score` does."""
        messages = conversations_in(conversations)
        rendered = {**known, **render_conversations((one for one in messages if one not in known), self.renderer)}
        # Only neighbours are grouped, so that groups, and with them the scores, come in the order of the argument.
        groups: list[TokenGroup] = []
        for _, numbers in groupby(range(len(messages)), key=lambda number: messages[number][:-1]):
            groups.append(_group(list(numbers), messages, rendered))
        num_cut = sum(
            prompt > 0 or reply > 0
            for group in groups
            for prompt, reply in zip(group.truncated_tokens, group.truncated_reply_tokens, strict=True)
        )
        if num_cut and self.tells_cuts:
            logger.warning(
                "%d of %d %s cut to the model's limit of %d tokens, as in its training; only what was kept is scored",
                num_cut,
                len(messages),
                plural(len(messages), "conversation was", "conversations were"),
                self.renderer.spec.max_length,
            )
        return groups


def _group(
    numbers: Sequence[int], messages: Sequence[Conversation], rendered: Mapping[Conversation, Rendered | RenderError]
) -> TokenGroup:
    """Lay out conversations of one prompt as a group. Raises RenderError naming one that could not be rendered."""
    kept: dict[int, Rendered] = {}
    for position, number in enumerate(numbers):
        outcome = rendered[messages[number]]
        if isinstance(outcome, RenderError):
            what_to_do = f" {SHORTEN}" if isinstance(outcome, Overlong) else ""
            raise RenderError(f"conversation {number}: {outcome}{what_to_do}") from outcome
        kept[position] = outcome
    preference = Preference(
        id=f"conversation {numbers[0]}",
        source="score",
        prompt=messages[numbers[0]][:-1],
        replies=tuple(messages[number][-1:] for number in numbers),
        comparisons=(),
    )
    return lay_out(preference, kept)
