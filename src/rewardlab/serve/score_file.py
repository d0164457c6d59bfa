"""Score the replies in a JSONL file with a saved reward model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewardlab.artifact.load import load
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.files import read_jsonl, write_jsonl
from rewardlab.core.spec import read_spec
from rewardlab.core.types import Conversation, Message
from rewardlab.data.chat import to_messages
from rewardlab.data.rows import UnusableRowError, is_open_transcript, parse_transcript
from rewardlab.model.config import DEFAULT_COMPUTE, ComputeConfig

logger = logging.getLogger("rewardlab")


def score_file(
    model: str,
    source: Path,
    target: Path,
    *,
    precision: str = "fp32",
    token_budget: int = 8192,
    compute: ComputeConfig = DEFAULT_COMPUTE,
) -> int:
    """Write `source`'s rows to `target` with `score`, or `scores` for several responses; returns how many replies.

    Raises DataError naming file and line for a row that holds no conversation.
    """
    if not source.is_file():
        raise DataError(f"{source}: no such file.")
    rows = [(f"{source}:{line}", row) for line, row in read_jsonl(source)]
    if not rows:
        raise DataError(f"{source}: no rows to score.")
    bare = read_spec(Path(model)).renderer.joins_texts
    conversations = [_conversations(row, where, bare=bare) for where, row in rows]
    scorer = load(model, precision=precision, compute=compute, log=logger.info)
    scorer.token_budget = token_budget
    for (where, _), several in zip(rows, conversations, strict=True):
        for conversation in several:
            try:  # rendered once more while scoring; what it costs is little beside the model
                scorer.renderer.render(conversation[:-1], conversation[-1:])
            except RenderError as error:
                raise DataError(f"{where}: {error}") from error
    scores = iter(scorer.score([conversation for several in conversations for conversation in several]))
    scored = []
    for (_, row), several in zip(rows, conversations, strict=True):
        values = [next(scores) for _ in several]
        scored.append(row | ({"scores": values} if "responses" in row else {"score": values[0]}))
    write_jsonl(target, scored)
    return sum(map(len, conversations))


def _prompt(value: Any, *, bare: bool) -> tuple[Conversation, bool]:
    """(the turns of a prompt, whether it is a transcript whose turns they are), read as training reads it."""
    if not bare and is_open_transcript(value):
        return parse_transcript(value)[:-1], True
    return ((Message("user", value),) if isinstance(value, str) else to_messages(value)), False


def _conversations(row: Mapping[str, Any], where: str, *, bare: bool) -> list[Conversation]:
    """The conversations that a row asks to score; `bare` models take texts as they are."""
    wanted = "Wanted `messages`, or `prompt` and `response`, or `prompt` and `responses`."
    if "messages" not in row and ("prompt" not in row or not {"response", "responses"} & set(row)):
        raise DataError(f"{where}: cannot be scored (its columns are {', '.join(row) or 'none'}). {wanted}")
    try:
        if "messages" in row:
            conversations = [to_messages(row["messages"])]
        else:
            turns, open_transcript = _prompt(row["prompt"], bare=bare)
            replies = row["responses"] if "responses" in row else [row["response"]]
            if not isinstance(replies, list) or not replies or not all(isinstance(reply, str) for reply in replies):
                raise TypeError("a response is not text")
            conversations = [
                (*turns, Message("assistant", reply.strip() if open_transcript else reply)) for reply in replies
            ]
    except UnusableRowError as error:
        raise DataError(f"{where}: cannot be scored ({error.detail}). {wanted}") from error
    except (RenderError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: cannot be scored ({error}). {wanted}") from error
    if any(not turns or turns[-1].role != "assistant" for turns in conversations):
        raise DataError(f"{where}: a conversation must end with an assistant turn, the reply to be scored.")
    return conversations
