"""Two columns of replies whose names differ in a place alone, as `answer_a` and `answer_b` do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import combinations, zip_longest
from typing import Final

from rewardlab.core.terminal import quoted
from rewardlab.data.rows import Row

PLACES: Final = ({"a", "b"}, {"0", "1"}, {"1", "2"}, {"first", "second"}, {"one", "two"}, {"left", "right"})
"""What two names differ in that say nothing of which reply is better."""
REPLIES: Final = frozenset({"answer", "completion", "message", "messages", "output", "reply", "response", "text"})
"""Words that people put into names of columns that hold replies."""
ASKED: Final = ("question", "instruction")
"""Columns that hold the prompt of such rows, if none is called so."""
VERDICT: Final = re.compile(
    r"(human_|gold_)?(better|choice|judge?ment|preference|preferred|verdict|vote|winner)"
    r"(_(id|index|label|side|answer|completion|output|reply|response))?",
    re.IGNORECASE,
)
"""Columns that say in other files which of two replies is preferred."""
CHOSEN_BY: Final = "pairwise"
"""The type of Label Studio's result of a choice between two."""


def words_of(name: str) -> list[str]:
    """Return the words of a name, numbers, and what stands between them."""
    return re.findall(r"[A-Z]?[a-z]+|[A-Z]|[0-9]+|.", name, re.DOTALL)


def place_of(first: str, second: str) -> tuple[str, str] | None:
    """Return what two names differ in, if that is a place, as in `answer_a` and `answer_b`; None otherwise."""
    pairs = list(zip_longest(words_of(first), words_of(second), fillvalue=""))
    other = [pair for pair in pairs if pair[0] != pair[1]]
    return other[0] if len(other) == 1 and set(map(str.casefold, other[0])) in PLACES else None


def two_replies(row: Row) -> tuple[str, str] | None:
    """Return the only two columns that hold replies, by their names and values; None if there are no such two."""
    held = [name for name, value in row.items() if isinstance(value, str | list) and isinstance(name, str)]
    named = [name for name in held if REPLIES & set(map(str.casefold, words_of(name)))]
    found = [both for both in combinations(named, 2) if place_of(*both)]
    return found[0] if len(found) == 1 else None


def flags_for(row: Row, misspelt: str | None = None) -> str | None:
    """Return the flags that name two replies, and the prompt of a row that has none called so: perhaps a column that is
    `misspelt`; None if there are no such two."""
    if (sides := two_replies(row)) is None:
        return None
    asked = next((name for name in ASKED if name in row), misspelt) if "prompt" not in row else None
    named = [] if asked is None else [f"--prompt-column {quoted(asked)}"]
    return " ".join([*named, f"--chosen-column {quoted(sides[0])} --rejected-column {quoted(sides[1])}"])


OF_DATASETS: Final[Mapping[frozenset[str], str]] = {
    frozenset(columns.split()): told
    for columns, told in (
        (
            "conversation_history opening_prompt",
            "These are conversations of PRISM, of which a function on {page} makes a row of each turn.",
        ),
        (
            "interaction_id user_prompt model_response if_chosen",
            "These are utterances of PRISM, which lack the turns "
            "before them: take its conversations, of which a function on {page} makes a row of each turn.",
        ),
        (
            "message_id parent_id text rank",
            "These are messages of OpenAssistant, of which a function on {page} makes a "
            "row of each message with ranked replies.",
        ),
        (
            "prompt completions labels",
            "These are steps of a solution with a label each, for a reward model of steps (PRM). Here whole replies "
            "are compared: write pairs, or a row for each whole solution with a label.",
        ),
        (
            "input label task",
            "These are Math-Shepherd's solutions, with a label for each step, for a reward model of steps (PRM). Here "
            "whole replies are compared: write pairs, or a row for each whole solution with a label.",
        ),
        (
            "orig_instruction orig_response_A orig_response_B orig_preference",
            "Give --prompt-column orig_instruction --chosen-column orig_response_A --rejected-column orig_response_B "
            "--label-column orig_preference --map-label A=1 B=0.",
        ),
        (
            "info summary worker",
            "These are the ratings of summarize-from-feedback, and {page} says which columns to make of them.",
        ),
        (
            "chosen_conversations rejected_conversations",
            "Give --chosen-column chosen_conversations --rejected-column rejected_conversations.",
        ),
        (
            "context good_edited_response bad_edited_response",
            "Give --prompt-column context --chosen-column good_edited_response --rejected-column bad_edited_response.",
        ),
        (
            "context original_response edited_response",
            "If the edited reply is to be the better one, give "
            "--prompt-column context --chosen-column edited_response --rejected-column original_response.",
        ),
    )
}
"""Columns that tell a public dataset -> what to do with it."""
PAGE: Final = "docs/more-datasets.md in rewardlab's repository"


def by_name(names: Iterable[str]) -> str | None:
    """Return what to do with rows of a public dataset that is known by these columns; None for any other."""
    columns = set(names)
    told = next((told.format(page=PAGE) for known, told in OF_DATASETS.items() if known <= columns), None)
    # Where there is a prompt, the context is something else.
    return told.replace(" --prompt-column context", "") if told and "prompt" in columns else told


def exported(row: Row) -> str | None:
    """Return what to do with a task as Label Studio's full export has it; None for any other row."""
    texts, annotations = row.get("data"), row.get("annotations")
    if not isinstance(texts, Mapping) or not isinstance(annotations, list):
        return None
    results = [
        result
        for annotation in annotations
        if isinstance(annotation, Mapping)
        for result in annotation.get("result") or ()
        if isinstance(result, Mapping)
    ]
    verdict = next((one.get("from_name") for one in results if one.get("type") == CHOSEN_BY), None)
    sides = flags_for(texts) or "--chosen-column LEFT --rejected-column RIGHT"
    return (
        f"This is Label Studio's full export, with the texts in 'data' and the choices in 'annotations': export "
        f"JSON_MIN instead, and give {sides} --label-column {quoted(str(verdict or 'RESULT'))} --map-label left=1 "
        f"right=0."
    )
