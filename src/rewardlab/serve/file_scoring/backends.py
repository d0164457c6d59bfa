"""Backends, which score the rows of a file: the protocol of all, and a model in this process."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from rewardlab.analysis.ensembles import Combination, combinations
from rewardlab.core.errors import RenderError
from rewardlab.core.files import sha256_file
from rewardlab.core.spec import SPEC_FILE, RewardSpec, read_spec
from rewardlab.core.types import Conversation
from rewardlab.data.bulk import render_conversations
from rewardlab.data.chat import Overlong
from rewardlab.data.layout import Rendered
from rewardlab.data.prompts import conversations_of
from rewardlab.data.token_report import tell_typed
from rewardlab.model.config import DEFAULT_COMPUTE, ComputeConfig
from rewardlab.serve.file_scoring.rows import Asked

if TYPE_CHECKING:
    from rewardlab.artifact.adapters import Members
    from rewardlab.evaluation.ensembles import ScaledHeads
    from rewardlab.score import Scorer

logger = logging.getLogger("rewardlab")
PAUSE_S: Final = 0.002
"""Seconds that a part waits before it is computed: little against computing it, and enough for what the loop has to do
in between."""
Entry = float | str | list[float]
"""The outcome of a reply, one of: its score; [score, tokens cut from its prompt] if some were cut; [score, tokens cut
from its prompt, tokens cut from its middle] if some of the latter were; with bootstrap heads always [score, both
counts, standard deviation over the heads]; or, as a text, the reason why it has no score."""
Scores = list[Entry]
"""The entry of each reply of a row."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The scores of some rows."""

    scores: Sequence[Scores]
    """For each row, in order, one entry for each reply."""
    num_typed: int = 0
    """Replies in whose conversation a control token is typed."""
    num_tokens: Sequence[int] = ()
    """For each row the number of tokens of its conversations; empty where that is not known."""


@runtime_checkable
class Backend(Protocol):
    """An object that gives scores. Constructing it is cheap; `start` loads models and opens connections."""

    @property
    def identity(self) -> Mapping[str, object]:
        """Return everything that decides a score, by names for messages; a run resumes only with the same."""

    @property
    def bare(self) -> bool | None:
        """Return whether the model takes texts without a template; None if that is not known before `start`."""

    @property
    def num_parts(self) -> int:
        """Return how many parts of the rows may be asked for at the same time."""

    async def start(self, decided: Mapping[str, Any]) -> Mapping[str, Any]:
        """Get ready, with what an earlier start decided, and return what is decided. Raises RewardlabError."""

    async def score_rows(self, rows: Sequence[Asked]) -> Answer:
        """Return the scores of rows. A reply that cannot be scored has a cause; what ends the run is raised."""

    def tell(self, num_typed: int, num_replies: int, name: str) -> None:
        """Log what the user should know about a file, once all its rows are scored."""

    async def close(self) -> None:
        """Release what `start` opened."""


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A reward-model folder, and how it is to compute."""

    folder: str
    precision: str = "fp32"
    token_budget: int | None = None
    """Tokens computed at a time; None for the default of the device."""
    compute: ComputeConfig = DEFAULT_COMPUTE
    overlong: Literal["cut", "refuse"] = "cut"
    """What becomes of a conversation above the length limit: cut by the rule of training, or not scored."""
    max_length: int | None = None
    """A limit in tokens in place of the model's own, where it is smaller."""
    heads: Combination | None = None
    """How the scores of a probe's bootstrap heads, which then score in place of its head, are combined; None to use the
    head."""

    def spec(self) -> RewardSpec:
        """Return the spec of the folder. Raises ArtifactError."""
        return read_spec(Path(self.folder))

    def identity(self) -> dict[str, object]:
        """Return what decides its scores."""
        limit = self.limit_below(self.spec().renderer.max_length)
        return {
            "backend": "local",
            "model": sha256_file(Path(self.folder) / SPEC_FILE),
            "precision": self.precision,
            **({} if limit is None else {"limit": limit}),
            **({} if self.heads is None else {"heads": {"file": sha256_file(self._heads_file), **asdict(self.heads)}}),
        }

    def read_heads(self, width: int) -> ScaledHeads | None:
        """Return the bootstrap heads for states of this width, None if the head scores. Raises ArtifactError."""
        from rewardlab.evaluation.ensembles import read_scaled_heads

        return None if self.heads is None else read_scaled_heads(self._heads_file, width=width, spec=self.spec())

    @property
    def _heads_file(self) -> Path:
        from rewardlab.evaluation.ensembles import require_heads

        return require_heads(self.folder)

    def limit_below(self, own: int) -> int | None:
        """Return the limit that holds in place of the model's `own`; None if its own does."""
        return self.max_length if self.max_length is not None and self.max_length < own else None

    def with_decided(self, decided: Mapping[str, Any]) -> ComputeConfig:
        """Return the kernels: those that an earlier start decided on, if the settings that led to them are the same."""
        if decided.get("asked") != asdict(self.compute):
            return self.compute
        return ComputeConfig(**{field.name: decided["compute"][field.name] for field in fields(ComputeConfig)})


Look = tuple[int, int, int]
"""Of a reply that can be scored: tokens cut from its prompt, tokens cut from its middle, tokens that are scored."""


@dataclass(frozen=True, slots=True)
class RenderedRows:
    """Rows on their way to scores, with all that needs no model done."""

    looks: Sequence[Sequence[Look | str]]
    """For each reply of each row what is known about it, or why it cannot be scored."""
    scorable: Sequence[Conversation]
    """The conversations to score, in order."""
    rendered: Mapping[Conversation, Rendered]
    """Their tokens."""
    num_typed: int
    """Replies in whose conversation a control token is typed."""


class LocalScorer:
    """A loaded model that scores rows. It is asked by one thread at a time."""

    def __init__(self, model: LocalModel, decided: Mapping[str, Any], members: Members | None = None) -> None:
        """Load the model, from the `members` of an ensemble if it is one of them.

        Raises ArtifactError if it fails its checks.
        """
        # Imported here, since a process that only distributes work needs neither torch nor transformers.
        from rewardlab.artifact.load import load
        from rewardlab.score import budget_of

        def loaded(folder: Path) -> Scorer:
            return load(folder, precision=model.precision, compute=model.with_decided(decided), log=logger.info)

        folder = Path(model.folder)
        self.scorer = loaded(folder) if members is None else members.open(folder, loaded)
        self.scorer.token_budget = model.token_budget or budget_of(self.scorer.model.device)
        self.scorer.tells_cuts = False  # every row says what was cut
        self.refuses = model.overlong == "refuse"
        if not self.refuses:
            self.scorer.renderer = self.scorer.renderer.that_cuts
        limit = model.limit_below(self.scorer.renderer.spec.max_length)
        if limit is not None:
            self.scorer.renderer = self.scorer.renderer.by(max_length=limit)
        self._combination, self._heads = model.heads, model.read_heads(self.scorer.model.head.in_features)
        assert self.scorer.compute is not None
        self.decided = {"asked": asdict(model.compute), "compute": asdict(self.scorer.compute)}

    def score(self, rows: Sequence[Asked]) -> Answer:
        """Return the scores of rows, computed together."""
        return self.compute(self.render(rows))

    def render(self, rows: Sequence[Asked]) -> RenderedRows:
        """Return what `compute` computes of these rows. Another thread may call it meanwhile."""
        renderer = self.scorer.renderer
        bare = renderer.spec.joins_texts
        conversations = [conversations_of(row.prompt, row.replies, bare=bare) for row in rows]
        outcomes = render_conversations((turns for several in conversations for turns in several), renderer)
        looks = [[self._look(outcomes[turns]) for turns in several] for several in conversations]
        scorable = [
            turns
            for several, seen in zip(conversations, looks, strict=True)
            for turns, look in zip(several, seen, strict=True)
            if isinstance(look, tuple)
        ]
        num_typed = sum(renderer.num_typed(turns) > 0 for several in conversations for turns in several)
        rendered = {turns: found for turns, found in outcomes.items() if isinstance(found, Rendered)}
        return RenderedRows(looks, scorable, rendered, num_typed)

    def compute(self, rows: RenderedRows) -> Answer:
        """Return the scores of rows that were rendered, computed together."""
        found = iter(self._scored(rows.scorable, rows.rendered))

        def made(look: Look) -> Entry:
            score, spread = next(found)
            return entry(score, *look[:2], spread=spread)

        scores = [[made(look) if isinstance(look, tuple) else look for look in seen] for seen in rows.looks]
        num_tokens = [sum(look[2] for look in seen if isinstance(look, tuple)) for seen in rows.looks]
        return Answer(scores, rows.num_typed, num_tokens)

    def _scored(
        self, conversations: Sequence[Conversation], rendered: Mapping[Conversation, Rendered]
    ) -> list[tuple[float, float | None]]:
        """Return (score, None) of each conversation; of bootstrap heads (combined score, standard deviation)."""
        if self._heads is None or self._combination is None:
            return [(score, None) for score in self.scorer.score(conversations, rendered=rendered)]
        scores_BR = self._heads.scores(self.scorer.final_states(conversations, rendered=rendered))
        scores_R = combinations(scores_BR, penalty=self._combination.penalty)[self._combination.how]
        return list(zip(scores_R.tolist(), scores_BR.std(axis=0, ddof=1).tolist(), strict=True))

    def _look(self, outcome: Rendered | RenderError) -> Look | str:
        """Return what is known about a reply before it is scored, or why it cannot be scored."""
        if isinstance(outcome, Overlong):
            return self._refusal(outcome.num_tokens)
        if isinstance(outcome, RenderError):
            return str(outcome)
        if self.refuses and outcome.full_length > len(outcome.token_ids):
            return self._refusal(outcome.full_length)
        return outcome.truncated_tokens, outcome.truncated_reply_tokens, len(outcome.token_ids)

    def _refusal(self, num_tokens: int | None) -> str:
        renderer = self.scorer.renderer
        untrained, by_rule = " The model was trained without such conversations.", " by the rule of training"
        return (
            f"it takes {num_tokens} tokens, above the model's limit of {renderer.spec.max_length}."
            f"{untrained if renderer.refuses else ''} Shorten it, or let {renderer.what_is_cut} be cut"
            f"{'' if renderer.refuses else by_rule}: --overlong cut."
        )


def entry(
    score: float, truncated_tokens: int, truncated_reply_tokens: int = 0, *, spread: float | None = None
) -> Entry:
    """Return the outcome of a reply with a score; if that is not finite, the reason why it has none."""
    if not math.isfinite(score):
        return f"its score is {score}, which is not a finite number"
    if spread is not None:
        return [score, truncated_tokens, truncated_reply_tokens, spread]
    if truncated_reply_tokens:
        return [score, truncated_tokens, truncated_reply_tokens]
    return [score, truncated_tokens] if truncated_tokens else score


class LocalBackend:
    """A model in this process. While it computes, a thread renders the rows to come."""

    num_parts = 2
    """One part is computed while the next is rendered."""

    def __init__(self, model: LocalModel, members: Members | None = None) -> None:
        """Raises ArtifactError if the folder has no spec that can be read."""
        self.model = model
        self._members = members
        self.spec = model.spec()
        self.identity = model.identity()
        self.bare = self.spec.renderer.joins_texts
        self._scorer: LocalScorer | None = None
        self._renders: ThreadPoolExecutor | None = None
        self._computes = asyncio.Lock()

    async def start(self, decided: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load the model. Raises ArtifactError if it fails its checks."""
        self._scorer = LocalScorer(self.model, decided, self._members)
        # A single thread, since two may not use a tokenizer at once.
        self._renders = ThreadPoolExecutor(1, thread_name_prefix="rewardlab-render")
        return self._scorer.decided

    async def score_rows(self, rows: Sequence[Asked]) -> Answer:
        """Return the scores of rows, computed together."""
        assert self._scorer is not None, "start it first"
        rendered = await asyncio.get_running_loop().run_in_executor(self._renders, self._scorer.render, rows)
        async with self._computes:
            # Computing blocks the loop. Before that it keeps the scores of the last part and asks for the next one.
            await asyncio.sleep(PAUSE_S)
            # Not in a thread of its own, where Ctrl-C would have to wait for its end.
            return self._scorer.compute(rendered)

    def tell(self, num_typed: int, num_replies: int, name: str) -> None:
        """Warn if control tokens are typed in texts."""
        tell_typed(num_typed, num_replies, self.spec.renderer, name)

    async def close(self) -> None:
        """Let the model go."""
        if self._renders is not None:
            self._renders.shutdown(cancel_futures=True)
        self._scorer = self._renders = None
