"""A language model that says which of two replies to a prompt is better, asked in both orders."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from rewardlab.core.types import Conversation
from rewardlab.data.template_files import parse_arguments
from rewardlab.gold.judging.config import DEFAULT_JUDGE, JudgeConfig
from rewardlab.gold.judging.prompts import filled, question_of, read_template, share_of

Result = TypeVar("Result")
CAUSES: Final[Mapping[str, str]] = {
    "unparsed": "the answer does not end with a verdict",
    "cut": "the answer ended at the token limit, before a verdict",
    "refused": "the model or its server refused to answer",
    "failed": "no answer came",
}
"""Why a question has no verdict: cause -> meaning."""
REFUSALS: Final = ("content_filter", "refusal")
"""Words of servers for why an answer ended, where it is a refusal."""


@runtime_checkable
class ChatReply(Protocol):
    """What a chat API answers."""

    @property
    def text(self) -> str:
        """The answer."""

    @property
    def stop(self) -> str:
        """Why it ended: `stop`, `length`, …"""

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the question; None where the server does not say."""

    @property
    def tokens(self) -> int | None:
        """Tokens of the answer."""


@runtime_checkable
class Chat(Protocol):
    """Asks a language model."""

    async def __call__(self, messages: Sequence[Mapping[str, str]], **parameters: Any) -> ChatReply:
        """Return one answer to messages, drawn with parameters of the chat API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which of two replies is better: `first` is shown first."""

    prompt: Conversation
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """The answer to one question."""

    share: float | None
    """What the reply that was shown first wins: 1, ½ or 0; None without a verdict."""
    cause: str | None = None
    """Why there is none, see `CAUSES`."""
    detail: str = ""
    """The whole answer where it is kept, or the message of an error."""
    prompt_tokens: int | None = None
    tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, of which `Opinion(**values)` makes it again."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge says about a pair of replies."""

    orders: tuple[Opinion, ...]
    """(the first reply shown first, the second shown first); empty for equal replies, which no one is asked about."""

    @property
    def shares(self) -> tuple[float | None, ...]:
        """What the first reply of the pair wins in each order."""
        turned = [None if one.share is None else 1 - one.share for one in self.orders[1:]]
        return (*(one.share for one in self.orders[:1]), *turned)

    @property
    def label(self) -> float | None:
        """What the first reply wins: the mean over both orders. None if one is missing, since one order alone carries
        the bias of position."""
        if not self.orders:
            return 0.5
        first, second = self.shares
        return None if first is None or second is None else (first + second) / 2

    @property
    def agrees(self) -> bool | None:
        """Whether both orders say the same; None if one is missing, or no one was asked."""
        return None if not self.orders or self.label is None else len(set(self.shares)) == 1

    @property
    def causes(self) -> tuple[str, ...]:
        """Why verdicts are missing, one for each order that has none."""
        return tuple(one.cause for one in self.orders if one.cause is not None)


EQUAL: Final = Verdict(orders=())
"""The verdict on two replies of the same text."""


class Judge:
    """Asks about pairs. It remembers nothing: all that was answered is in its verdicts."""

    def __init__(
        self,
        chat: Chat,
        config: JudgeConfig = DEFAULT_JUDGE,
        *,
        lost: Mapping[type[Exception], str] = MappingProxyType({}),
    ) -> None:
        """Ask by `chat`. `lost` maps those of its exceptions that only cost the answer to one question to their cause;
        all others end the work.

        Raises ConfigError for a prompt that cannot be used.
        """
        assert set(lost.values()) <= set(CAUSES), lost
        self.config = config
        self.template = read_template(config.judge_prompt)
        self._chat, self._lost = chat, lost

    def decides(self) -> dict[str, object]:
        """Return what decides an opinion besides the model and the question, for the key under which it is kept."""
        return {"template": self.template, **self._parameters()}

    def _parameters(self) -> dict[str, object]:
        config = self.config
        given = parse_arguments(config.judge_template_arguments)
        asked: dict[str, object] = {
            "temperature": 0.0,
            "seed": config.judge_seed,
            "max_tokens": config.judge_max_tokens,
        }
        return {**asked, "chat_template_kwargs": given} if given else asked

    async def ask(self, question: Question) -> Opinion:
        """Return the opinion on one question. Raises whatever `chat` raises and `lost` does not name."""
        text = filled(self.template, question_of(question.prompt), question.first, question.second)
        try:
            reply = await self._chat([{"role": "user", "content": text}], **self._parameters())
        except tuple(self._lost) as error:
            return Opinion(share=None, cause=self._cause_of(error), detail=str(error))
        share = share_of(reply.text, is_cut=reply.stop == "length")
        cause = None
        if reply.stop in REFUSALS:
            share, cause = None, "refused"
        elif share is None:
            cause = "cut" if reply.stop == "length" else "unparsed"
        return Opinion(
            share=share,
            cause=cause,
            detail=reply.text if self.config.keep_answers else "",
            prompt_tokens=reply.prompt_tokens,
            tokens=reply.tokens,
        )

    def _cause_of(self, error: Exception) -> str:
        return next(cause for kind, cause in self._lost.items() if isinstance(error, kind))

    async def pairs(self, prompt: Conversation, first: str, second: str) -> Verdict:
        """Return the verdict on two replies to a prompt, from both orders. Raises as `ask`."""
        if first.strip() == second.strip():
            return EQUAL
        asked = questions(prompt, first, second)
        return Verdict(orders=tuple(await together([self.ask(question) for question in asked])))


async def together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of work that is done at the same time. Raises the first error, and then ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def questions(prompt: Conversation, first: str, second: str) -> tuple[Question, Question]:
    """Return the two questions about a pair of replies."""
    return (
        Question(prompt=prompt, first=first, second=second),
        Question(prompt=prompt, first=second, second=first),
    )
