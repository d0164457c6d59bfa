"""Datasets of pairs as they are published: columns of their own, and labels that say which reply is better.

Sources: the cards of HuggingFaceH4/ultrafeedback_binarized, PKU-Alignment/PKU-SafeRLHF, openai/webgpt_comparisons,
openai/summarize_from_feedback, lmsys/chatbot_arena_conversations, lmsys/lmsys-arena-human-preference-55k and
llm-blender/Unified-Feedback on the hub.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace

from rewardlab.core.files import to_float
from rewardlab.core.types import Conversation
from rewardlab.data.cells import SIDES, are_texts
from rewardlab.data.formats.context import read_asked, with_system
from rewardlab.data.formats.judged import read_judged
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.formats.plain import COLUMNS, part, read_explicit
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules, Vote, judge_pair
from rewardlab.data.rows import (
    Row,
    UnusableRowError,
    is_absent,
    read_conversation,
    read_name,
    read_number,
    show,
)

WINNERS = {"model_a": 1.0, "model_b": 0.0, "tie": 0.5, "tie (bothbad)": 0.5, "both_bad": 0.5}
"""Chatbot Arena's `winner` -> the probability that A is preferred."""
OUTCOMES = {"winner_model_a": 1.0, "winner_model_b": 0.0, "winner_tie": 0.5}
"""The column that is 1 in a row of the 55,000 battles -> the same."""
_FULL_TEXT = re.compile(r"""['"]full_text['"]""")
"""The key of WebGPT's question, in an object that was written as text."""


def _read_rewardbench(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read a pair, or lists of texts as RewardBench 2 and RM-Bench have them: each chosen one is preferred to each
    rejected one."""
    if not any(are_texts(row[side]) for side in SIDES):
        return read_explicit(row, place, rules)
    sides = []
    for name in SIDES:
        texts = [row[name]] if isinstance(row[name], str) else row[name]
        if not are_texts(texts):
            raise UnusableRowError("reply_not_text", f"{name} is {show(row[name])}, wanted texts as on the other side")
        sides.append(texts)
    chosen, rejected = sides
    comparisons = [
        {"first": better, "second": len(chosen) + worse}
        for better in range(len(chosen))
        for worse in range(len(rejected))
    ]
    judged = {"replies": [*chosen, *rejected], "comparisons": comparisons, "ranking": None}
    return replace(read_judged({**row, **judged}, place, rules), order=None)


def _has_lists(row: Row) -> bool:
    """Return whether both sides of a row are lists of texts, as RM-Bench has them; other rows may have a `domain`."""
    return all(are_texts(row.get(side)) for side in SIDES)


def _read_safe_rlhf(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read PKU-SafeRLHF: `better_response_id` is the number, 0 or 1, of the more helpful reply."""
    better = _number_of_reply(row, "better_response_id")
    return _pair(row["prompt"], (row["response_0"], row["response_1"]), Vote(label=1.0 - better), row, place, rules)


def _read_webgpt(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read WebGPT's comparisons: scores from -1 to 1 that add up to 0. Equal scores are a tie, the larger one is the
    strength."""
    held = unpacked(row["question"])
    # A question that happens to be JSON stays the text that it is.
    question = held if isinstance(held, Mapping) and "full_text" in held else row["question"]
    prompt = question.get("full_text") if isinstance(question, Mapping) else question
    if isinstance(question, str) and question.lstrip().startswith("{") and _FULL_TEXT.search(question):
        raise UnusableRowError("bad_roles", f"question is {show(prompt)}, wanted an object, as JSON if it is a text")
    first, second = (read_number(row, f"score_{number}", "bad_scores", low=-math.inf) for number in (0, 1))
    if first is None or second is None:
        raise UnusableRowError("missing_field", "no score of a reply")
    label = 0.5 if first == second else float(first > second)
    vote = Vote(label=label, strength=max(0.0, first, second))
    return _pair(prompt, (row["answer_0"], row["answer_1"]), vote, row, place, rules)


def _read_summaries(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read a comparison of summarize-from-feedback: `choice` is the number of the better summary, `worker` chose it."""
    info, summaries = unpacked(row["info"]), row["summaries"]
    if not isinstance(info, Mapping):
        raise UnusableRowError("bad_roles", f"info is {show(info)}, wanted an object with a post or an article")
    entries = summaries if isinstance(summaries, (list, tuple)) else []
    # Summaries begin with the white space that followed the last word of the prompt.
    texts = [entry["text"].strip() for entry in entries if isinstance(entry, Mapping) and _is_text(entry.get("text"))]
    if len(texts) != 2 or len(entries) != 2:
        raise UnusableRowError("reply_not_text", f"summaries is {show(summaries)}, wanted two objects with a text")
    worker = row.get("worker")
    vote = Vote(label=1.0 - _number_of_reply(row, "choice"), annotator=None if is_absent(worker) else read_name(worker))
    return _pair(summary_prompt(info), (texts[0], texts[1]), vote, row, place, rules)


def summary_prompt(info: Mapping[str, object]) -> str:
    """Return the prompt for a summary: what is to be summarised under its headings, then `TL;DR:`.

    Raises UnusableRowError if there is neither a post nor an article.
    """
    parts = [(heading, info.get(name)) for name, heading in (("subreddit", "SUBREDDIT: r/"), ("title", "TITLE: "))]
    post, article = info.get("post"), info.get("article")
    parts += [("POST: ", post)] if isinstance(post, str) and post.strip() else [("", article)]
    if not isinstance(parts[-1][1], str) or not parts[-1][1].strip():
        raise UnusableRowError("empty_prompt", "neither a post nor an article in 'info'")
    said = [f"{heading}{text.strip()}" for heading, text in parts if isinstance(text, str) and text.strip()]
    return "\n\n".join([*said, "TL;DR:"])


def _read_arena(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read Chatbot Arena and MT-bench's judgements: two conversations, `winner`, and `judge` as the annotator.

    `turn` says how many turns of the user were judged. Later turns are left out, as MT-bench requires.
    """
    winner = row["winner"]
    if not isinstance(winner, str) or winner not in WINNERS:
        raise UnusableRowError("bad_label", f"winner is {show(winner)}, wanted one of {', '.join(WINNERS)}")
    turns = read_number(row, "turn", "bad_roles", low=1.0)
    sides = [read_conversation(unpacked(row[name])) for name in ("conversation_a", "conversation_b")]
    _require_all_turns(row, sides[0])
    judged = [side if turns is None else _first_turns(side, int(turns)) for side in sides]
    prompt, replies = part(judged[0], judged[1])
    judge = row.get("judge")
    vote = Vote(label=WINNERS[winner], annotator=None if is_absent(judge) else read_name(judge))
    return judge_pair(with_system(prompt, row), replies, [vote], row, place, rules)


def _require_all_turns(row: Row, turns: Conversation) -> None:
    """Raise UnusableRowError for a later vote of a session, whose earlier turns are in `full_conversation` alone.

    Each vote of a session judges other models, and its conversations begin after the vote before.
    """
    order = to_float(row.get("evaluation_order"))
    if not order > 1:
        return
    full = unpacked(row.get("full_conversation"))
    users = sum(turn.role == "user" for turn in turns)
    if not isinstance(full, (list, tuple)) or len(full) > users:
        raise UnusableRowError(
            "context_differs", f"vote {order:g} of a session, whose earlier turns are in full_conversation alone"
        )


def _read_arena_55k(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read the 55,000 battles of Chatbot Arena: the turns of the user and of both sides in a list each, which may be
    JSON text, and one column for each outcome."""
    columns = list(OUTCOMES)
    said = [read_number(row, name, "bad_label") for name in columns]
    if sorted(said, key=lambda number: number or 0.0) != [0.0, 0.0, 1.0]:
        outcome = ", ".join(f"{name} {show(row[name])}" for name in columns)
        raise UnusableRowError("bad_label", f"{outcome}; wanted 1 once and 0 elsewhere")
    users = _list_of_texts(row, "prompt", "empty_prompt")
    sides = []
    for name in ("response_a", "response_b"):
        replies = _list_of_texts(row, name, "reply_not_text")
        if len(replies) != len(users):
            raise UnusableRowError("bad_roles", f"{name} has {len(replies)} turns and prompt has {len(users)}")
        sides.append(
            read_conversation(
                [
                    {"role": role, "content": text}
                    for turns in zip(users, replies, strict=True)
                    for role, text in zip(("user", "assistant"), turns, strict=True)
                ]
            )
        )
    prompt, after = part(*sides)
    vote = Vote(label=OUTCOMES[columns[said.index(1.0)]], annotator=None)
    return judge_pair(with_system(prompt, row), after, [vote], row, place, rules)


def _read_unified(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read Unified-Feedback: two conversations and the rating of each. The difference of the ratings is the strength,
    and equal ones are a tie."""
    ratings = [read_number(row, f"conv_{side}_rating", "bad_scores", low=-math.inf) for side in "AB"]
    first, second = ratings
    if first is None or second is None:
        raise UnusableRowError("missing_field", "no rating of a conversation")
    prompt, replies = part(*(read_conversation(unpacked(row[f"conv_{side}"])) for side in "AB"))
    label = 0.5 if first == second else float(first > second)
    vote = Vote(label=label, strength=round(abs(first - second), 9))
    return judge_pair(with_system(prompt, row), replies, [vote], row, place, rules)


def _list_of_texts(row: Row, column: str, cause: str) -> list[str]:
    """Return a list of texts, which may be written as JSON. Raises UnusableRowError with `cause` for another value."""
    value = row[column]
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UnusableRowError(cause, f"{column} is {show(value)}, no list in JSON") from error
    if not isinstance(value, list | tuple) or not value or not all(map(_is_text, value)):
        raise UnusableRowError(cause, f"{column} is {show(value)}, wanted a list of texts")
    return list(value)


def _first_turns(turns: Conversation, number: int) -> Conversation:
    """Return a conversation up to the reply to the user's turn of this number."""
    users = [place for place, turn in enumerate(turns) if turn.role == "user"]
    return turns[: users[number]] if number < len(users) else turns


# --- parts ---------------------------------------------------------------------------------------------------


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _number_of_reply(row: Row, column: str) -> float:
    number = read_number(row, column, "bad_label")
    if number not in (0.0, 1.0):
        raise UnusableRowError("bad_label", f"{column} is {show(row.get(column))}, wanted 0 or 1")
    return number


def _pair(prompt: object, replies: tuple[object, object], vote: Vote, row: Row, place: str, rules: Rules) -> ParsedRow:
    asked = read_asked({**row, "prompt": prompt}, rules)
    read = (asked.reply(replies[0]), asked.reply(replies[1]))
    strength = read_number(row, "strength", "bad_strength") if vote.strength is None else vote.strength
    judged = Vote(label=vote.label, strength=strength, annotator=vote.annotator)
    return judge_pair(asked.prompt, read, [judged], row, place, rules)


ULTRAFEEDBACK_BINARISED = Schema(
    name="pairs with scores, as UltraFeedback binarised",
    needed=(*COLUMNS, "score_chosen", "score_rejected"),
    read=read_explicit,
)
REWARDBENCH = Schema(name="reward-bench", needed=(*COLUMNS, "subset"), read=_read_rewardbench)
RM_BENCH = Schema(name="RM-Bench", needed=(*COLUMNS, "domain"), read=_read_rewardbench, suits=_has_lists)
SAFE_RLHF = Schema(
    name="PKU-SafeRLHF", needed=("prompt", "response_0", "response_1", "better_response_id"), read=_read_safe_rlhf
)
WEBGPT = Schema(
    name="WebGPT comparisons",
    needed=("question", "answer_0", "answer_1", "score_0", "score_1"),
    read=_read_webgpt,
    own_strength=True,
)
SUMMARIES = Schema(name="summarize-from-feedback", needed=("info", "summaries", "choice"), read=_read_summaries)
ARENA = Schema(name="Chatbot Arena", needed=("conversation_a", "conversation_b", "winner"), read=_read_arena)
ARENA_55K = Schema(
    name="Chatbot Arena, 55k", needed=("prompt", "response_a", "response_b", *OUTCOMES), read=_read_arena_55k
)
UNIFIED = Schema(
    name="Unified-Feedback",
    needed=("conv_A", "conv_B", "conv_A_rating", "conv_B_rating"),
    read=_read_unified,
    own_strength=True,
)
