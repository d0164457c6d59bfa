"""The worst mistakes of a model, as conversations.

The score rows decide which comparisons these are. Their texts come from the file that an evaluation writes beside its
scores, or else from the data (`FindTexts`). If a text is not found, its place in the data is named instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.analysis.mistakes import WorstMistakes, margin_of, sides_of
from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import read_jsonl
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Conversation, Estimate, Message, Preference, ScoredComparison, ScoreRow, prompt_key
from rewardlab.report.document import Block, Mistake, Paragraph, Section, Turn

MOST_CHARACTERS: Final = 4000
"""Most characters of a message in the report; the rest is counted."""
MOST_TURNS: Final = 20
MOST_LINES: Final = 10_000
"""Most lines that are read from a file of mistakes; an evaluation writes fifty."""
Key = tuple[str, str]


@runtime_checkable
class FoundTexts(Protocol):
    """Conversations of preferences, such as evaluation.texts.Texts."""

    @property
    def preferences(self) -> Mapping[Key, Preference]:
        """Source and id -> preference."""

    @property
    def ceiling(self) -> Estimate | None:
        """Accuracy of a judge who knew the true probabilities; None if the data do not hold these."""

    @property
    def turns(self) -> Mapping[Key, int]:
        """Number of turns of every judged preference that was found, reply included."""

    @property
    def problems(self) -> Sequence[str]:
        """The reasons why texts are missing."""


FindTexts = Callable[[Mapping[str, Any], str, Collection[Key], Sequence[ScoreRow]], FoundTexts]
"""(settings of the run, name of the evaluation, preferences wanted, all its score rows) -> their texts."""


@dataclass(frozen=True, kw_only=True)
class KnownTexts:
    """Conversations of preferences, wherever they come from."""

    preferences: Mapping[Key, Preference]
    ceiling: Estimate | None
    turns: Mapping[Key, int]
    problems: Sequence[str]


def written_texts(path: Path, comparisons: Iterable[ScoredComparison]) -> dict[Key, Preference]:
    """Return the texts of `comparisons` that an evaluation wrote beside its scores, in `eval.mistakes.jsonl`.

    A line is used only if its prompt has the key and its replies have the scores of the judged rows. A preference is
    returned only if the texts of all its wanted comparisons are there; its other replies are empty. A file that is
    missing or incomplete gives none.
    """
    wanted: dict[Key, list[ScoredComparison]] = {}
    for joined in comparisons:
        wanted.setdefault((joined.source, joined.preference_id), []).append(joined)
    prompts: dict[Key, Conversation] = {}
    replies: dict[Key, dict[int, Conversation]] = {key: {} for key in wanted}
    try:
        lines = [line for _, line in islice(read_jsonl(path), MOST_LINES)] if path.is_file() else []
    except (RewardlabError, OSError):
        return {}
    for line in lines:
        key = (str(line.get("source")), str(line.get("preference_id")))
        prompt = _conversation(line.get("prompt"))
        for joined in wanted.get(key, ()):
            sides = [
                _written(line.get(name), row)
                for name, row in zip(("preferred", "other"), sides_of(joined), strict=True)
            ]
            if prompt is not None and prompt_key(prompt) == joined.prompt_key and all(sides):
                prompts[key] = prompt
                own = {row.reply: side for row, side in zip(sides_of(joined), sides, strict=True) if side}
                replies[key] |= own
    return {
        key: Preference(
            id=key[1],
            source=key[0],
            prompt=prompts[key],
            replies=tuple(replies[key].get(number, ()) for number in range(max(replies[key]) + 1)),
            comparisons=tuple(joined.comparison for joined in several),
        )
        for key, several in wanted.items()
        if all(row.reply in replies[key] for joined in several for row in sides_of(joined))
    }


def _written(entry: object, row: ScoreRow) -> Conversation | None:
    """Return the reply on one side of a written mistake; None if it does not belong to the score row or has no text."""
    if not isinstance(entry, dict) or (entry.get("reply"), entry.get("score")) != (row.reply, row.score):
        return None
    return _conversation(entry.get("messages"))


def _conversation(entry: object) -> Conversation | None:
    """Return a conversation from its JSON; None if it is not one."""
    if not isinstance(entry, list) or not entry:
        return None
    turns = [turn for turn in entry if isinstance(turn, dict)]
    found = [(turn.get("role"), turn.get("content")) for turn in turns]
    if len(turns) < len(entry) or not all(isinstance(part, str) for turn in found for part in turn):
        return None
    return tuple(Message(role=str(role), content=str(content)) for role, content in found)


def mistakes_section(mistakes: WorstMistakes, texts: FoundTexts | None, *, beta: float) -> Section:
    """Return the worst mistakes as conversations; for a missing text, its place in the data and the reason."""
    if not mistakes.comparisons:
        return Section(
            title="Worst mistakes", blocks=(Paragraph(text="No comparison is ranked against its label.", tone="good"),)
        )
    num, of = mistakes.num_wrong, len(mistakes.comparisons)
    largest = f"{plural(of, 'this is the one', f'these are the {of}')} with the largest difference"
    shown = largest if of < num else plural(of, "it is shown here", "all are shown here")
    blocks: list[Block] = [
        Paragraph(
            text=f"{number_of(num, 'comparison')} "
            f"{plural(num, 'is ranked against its', 'are ranked against their')} "
            f"label; {shown}. Look whether the label or the model is wrong."
        )
    ]
    if texts is not None:
        blocks += [Paragraph(text=f"Texts are missing: {problem}", tone="note") for problem in texts.problems]
    for number, joined in enumerate(mistakes.comparisons, start=1):
        blocks.append(_mistake(number, joined, texts, beta=beta))
    return Section(title="Worst mistakes", blocks=tuple(blocks))


def _mistake(number: int, joined: ScoredComparison, texts: FoundTexts | None, *, beta: float) -> Mistake:
    preferred, other = sides_of(joined)
    margin = margin_of(joined)
    # The exponential of a large difference overflows; beyond 700 the probability is 1 anyway.
    sure = 1 / (1 + math.exp(max(beta * margin, -700.0)))
    preference = None if texts is None else texts.preferences.get((joined.source, joined.preference_id))
    there = preference is not None and max(preferred.reply, other.reply) < len(preference.replies)
    return Mistake(
        title=f"{number}. {joined.source}, {joined.preference_id}",
        facts=(
            f"margin {margin:.2f}",
            f"reward {preferred.score:.2f} for the preferred reply, {other.score:.2f} for the other",
            f"the model is {sure:.1%} sure of the other",
            f"label {max(joined.comparison.label, 1 - joined.comparison.label):g}",
            f"{preferred.num_tokens - preferred.prompt_tokens} and {other.num_tokens - other.prompt_tokens} tokens",
            *(("the prompt was cut",) if preferred.truncated_tokens or other.truncated_tokens else ()),
            *(("a reply lost its middle",) if preferred.truncated_reply_tokens or other.truncated_reply_tokens else ()),
        ),
        prompt=_turns(preference.prompt) if there and preference else (),
        preferred=_turns(preference.replies[preferred.reply]) if there and preference else (),
        other=_turns(preference.replies[other.reply]) if there and preference else (),
        missing="" if there else "Its text was not found in the data that the settings name.",
    )


def _turns(conversation: Conversation) -> tuple[Turn, ...]:
    last = conversation[-MOST_TURNS:]
    turns = [
        Turn(
            role=message.role,
            text=message.content[:MOST_CHARACTERS],
            left_out=max(len(message.content) - MOST_CHARACTERS, 0),
        )
        for message in last
    ]
    if left := len(conversation) - len(last):
        turns.insert(0, Turn(role="", text=f"({left} {plural(left, 'earlier turn is', 'earlier turns are')} left out)"))
    return tuple(turns)


def keys_of(comparisons: Iterable[ScoredComparison]) -> list[Key]:
    """Return the distinct pairs (source, id) of comparisons."""
    return list(dict.fromkeys((joined.source, joined.preference_id) for joined in comparisons))
