"""Rows of the public suites: what one of each looks like, and the item that it becomes.

Each reader takes a row and its place, and returns its item, or the cause for which the suite's rule leaves the row out.
It raises `UnfitRowError` for a row that is not one of the suite, which `reading` turns into a DataError with the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rewardlab.core.files import is_number
from rewardlab.core.suites import SuiteItem, all_pairs
from rewardlab.core.types import Conversation, prompt_key
from rewardlab.data.rows import Row, UnusableRowError, read_conversation, read_prompt, show


class UnfitRowError(Exception):
    """A row that does not belong to its suite; the message says why. It never reaches the user as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a row."""

    path: PurePath
    """The file, relative to the folder that was named; for the hub the name of the dataset."""
    number: int
    """Line or row, from 1."""
    split: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


Read = SuiteItem | str
"""An item, or the cause for which the rule of the suite leaves the row out."""


def _item(
    place: Place,
    *,
    subset: str,
    prompt: object,
    replies: Sequence[object],
    pairs: Sequence[tuple[int, int]],
    id: object = None,
    cluster: str | None = None,
) -> SuiteItem:
    """Return an item, its texts checked. Raises UnfitRowError."""
    turns = _prompt(prompt)
    return SuiteItem(
        id=str(place) if id is None else str(id),
        subset=subset,
        cluster=prompt_key(turns) if cluster is None else cluster,
        prompt=turns,
        replies=tuple(_text(reply, "a reply") for reply in replies),
        pairs=tuple(pairs),
    )


def _prompt(value: object) -> Conversation:
    """Return the turns of a prompt, one user turn for a text, taken as it is."""
    try:
        if isinstance(value, str):
            return read_prompt(value, bare=True)
        return read_conversation(value)
    except UnusableRowError as error:
        raise UnfitRowError(f"its prompt cannot be used: {error.detail}") from error


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise UnfitRowError(f"{what} is {show(value)}, wanted text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnfitRowError(f"{what} has half a surrogate pair at character {error.start + 1}") from error
    return value


def _texts(value: object, what: str, *, number: int | None = None, of: str = "texts") -> list[object]:
    """Return a list of at least one entry. Raises UnfitRowError for anything else, a lone text among it."""
    entries = list(value) if isinstance(value, list | tuple) else []
    if not entries or (number is not None and len(entries) != number):
        raise UnfitRowError(f"{what} is {show(value)}, wanted a list of {of if number is None else f'{number} {of}'}")
    return entries


def _cell(value: object, what: str, place: Place) -> object:
    """Return a value, a cell of a CSV file that holds a list as that list. Raises UnfitRowError for one that seems to
    hold a list and is not JSON: as a text it would be one reply."""
    if (
        not isinstance(value, str)
        or not value.lstrip().startswith("[")
        or not {".csv", ".tsv"} & {*place.path.suffixes}
    ):
        return value
    try:
        found = json.loads(value)
    except ValueError as error:
        raise UnfitRowError(f'{what} is {show(value)}, wanted a list as JSON: ["…", "…"]') from error
    return found if isinstance(found, list) else value


def _one_of(value: object, what: str, choices: Mapping[Any, int]) -> int:
    if not isinstance(value, str | int) or value not in choices:
        raise UnfitRowError(f"{what} is {show(value)}, wanted {' or '.join(map(str, choices))}")
    return choices[value]


def _named(place: Place, names: Sequence[str]) -> str | None:
    """Return the name that is a word of the file's name, else of its folder's, and so on upwards; None if none is.

    A part with two of the names says nothing.
    """
    for part in reversed(place.path.parts):
        found = [name for name in names if re.search(rf"(?<![a-z]){name}(?![a-z])", part, re.IGNORECASE)]
        if len(found) == 1:
            return found[0]
    return None


def _known(value: object) -> object:
    """Return a value of a column, None if it is null, NaN or empty: rows without one have nothing in common."""
    return None if value == "" or (isinstance(value, float) and math.isnan(value)) else value


# --- suites --------------------------------------------------------------------------------------------------


def read_rewardbench(row: Row, place: Place) -> Read:
    """Return the pair of a row of RewardBench 1."""
    subset = _text(row["subset"], "subset")
    name = _FUNCTION.search(row["prompt"]) if subset.startswith("hep-") and isinstance(row["prompt"], str) else None
    return _item(
        place,
        subset=subset,
        prompt=row["prompt"],
        replies=[row["chosen"], row["rejected"]],
        pairs=all_pairs(1, 1),
        id=_known(row.get("id")),
        # The six hep- subsets are the same problems in six languages, drawn together.
        cluster=f"HumanEval {name[1].replace('_', '').casefold()}" if name else None,
    )


_FUNCTION = re.compile(r"\bfunction `[^`(]*?(\w+)\s*\(")
"""The name in a prompt of HumanEvalPack ("Write a Go function `HasCloseElements(numbers []float64 …"), which languages
spell with and without capitals and underscores."""


def read_rewardbench2(row: Row, place: Place) -> Read:
    """Return the comparison of a row of RewardBench 2: its correct replies and the others."""
    best = _cell(row["chosen"], "chosen", place)
    chosen: list[object] = [best] if isinstance(best, str) else _texts(best, "chosen")
    rejected = _texts(_cell(row["rejected"], "rejected", place), "rejected")
    subset = _text(row["subset"], "subset")
    cluster = None
    if subset.casefold() == "ties":
        match = re.fullmatch(r"(ref|tied):(\d+)", str(row.get("id")))
        if match is None:
            raise UnfitRowError(f"the id of a Ties row is {show(row.get('id'))}, wanted one such as ref:3 or tied:3")
        if (len(chosen) == 1) != (match[1] == "ref"):
            raise UnfitRowError(f"{match[0]} has {len(chosen)} correct replies, wanted one for ref, several for tied")
        # Both rows of a prompt are drawn together, since the rule joins them.
        subset, cluster = "Ties", f"ties {int(match[2])}"
    elif len(chosen) > 1:
        raise UnfitRowError(f"chosen has {len(chosen)} replies; only the Ties subset has more than one")
    return _item(
        place,
        subset=subset,
        prompt=row["prompt"],
        replies=[*chosen, *rejected],
        pairs=all_pairs(len(chosen), len(rejected)),
        id=row.get("id"),
        cluster=cluster,
    )


def read_rm_bench(row: Row, place: Place) -> Read:
    """Return the three better and three worse replies of a row of RM-Bench."""
    domain = _text(row["domain"], "domain") if row.get("domain") is not None else place.path.name
    known = [name for name in ("chat", "math", "code", "safety") if domain.startswith(name)]
    if not known:
        raise UnfitRowError(f"its domain is {show(domain)}, wanted one that begins with chat, math, code or safety")
    return _item(
        place,
        subset=known[0],
        prompt=row["prompt"],
        replies=[*_texts(row["chosen"], "chosen", number=3), *_texts(row["rejected"], "rejected", number=3)],
        pairs=all_pairs(3, 3),
        id=row.get("id"),
    )


MAIN_MODEL = "gpt-4o"
"""JudgeBench's published numbers are of the pairs that this model wrote."""

_WRITER = re.compile(r"response_model=([\w.-]*?)(\.[a-z]\w*)*$")
"""The response model in the name of a file."""


def _writer(place: Place) -> str:
    """Return which model wrote the replies of a file or split whose rows do not say."""
    if named := _WRITER.search(place.path.name):
        return named[1]
    return "claude" if "claude" in (place.split, *re.split(r"[^a-z]", place.path.name.lower())) else MAIN_MODEL


def read_judgebench(row: Row, place: Place) -> Read:
    """Return the pair of a row of JudgeBench."""
    source = _text(row["source"], "source")
    group = next((name for name in JUDGEBENCH_GROUPS if source.startswith(name)), source)
    model = str(row.get("response_model") or _writer(place))
    winner = _one_of(row["label"], "label", {"A>B": 0, "B>A": 1})
    return _item(
        place,
        subset=group if model.startswith(MAIN_MODEL) else f"{group} ({model})",
        prompt=row["question"],
        replies=[row["response_A"], row["response_B"]],
        pairs=[(winner, 1 - winner)],
        id=row.get("pair_id"),
    )


JUDGEBENCH_GROUPS = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")
BENCHMARKS = {"mmlu": "MMLU-Pro", "math": "MATH", "gpqa": "GPQA", "ifeval": "IFEval", "mbpp": "MBPP-Plus"}
"""Word in the name of a file or dataset of PPE -> the benchmark."""


def read_ppe(row: Row, place: Place) -> Read:
    """Return the vote or the sampled conflict pairs of a row of PPE."""
    return _ppe_vote(row, place) if "winner" in row else _ppe_best_of_k(row, place)


def _ppe_vote(row: Row, place: Place) -> Read:
    if str(row["winner"]).startswith("tie"):
        return "votes for a tie"
    winner = _one_of(row["winner"], "winner", {"model_a": 0, "model_b": 1})
    return _item(
        place,
        subset="human preference",
        prompt=row["prompt"],
        replies=[row["response_1"], row["response_2"]],
        pairs=[(winner, 1 - winner)],
        id=_known(row.get("question_id")),
    )


def _ppe_best_of_k(row: Row, place: Place) -> Read:
    scores = row["scores"]
    if not isinstance(scores, list | tuple):
        raise UnfitRowError(f"scores is {show(scores)}, wanted a list of whether each reply is correct")
    pairs = []
    for pair in _texts(row["sampled_conflict_pairs"], "sampled_conflict_pairs", of="pairs of replies"):
        entries = list(pair) if isinstance(pair, list | tuple) else []
        if len(entries) != 2 or not all(type(entry) is int and 0 <= entry < len(scores) for entry in entries):
            raise UnfitRowError(f"a conflict pair is {show(pair)}, wanted two indices below {len(scores)}")
        first, second = entries
        unfit = [index for index in entries if not _is_score(scores[index])]
        if unfit:
            raise UnfitRowError(
                f"the score of response_{unfit[0] + 1} is {show(scores[unfit[0]])}, wanted true, false or a number"
            )
        if scores[first] == scores[second]:
            raise UnfitRowError(f"the conflict pair {show(pair)} is of two replies that are both right or both wrong")
        pairs.append((first, second) if scores[first] > scores[second] else (second, first))
    used = sorted({index for pair in pairs for index in pair})
    position = {index: number for number, index in enumerate(used)}
    word = _named(place, tuple(BENCHMARKS))
    if word is None:
        raise UnfitRowError(
            f"neither file nor folder is named after one benchmark of PPE ({', '.join(BENCHMARKS.values())})"
        )
    name = BENCHMARKS[word]
    question, model = _known(row.get("question_id")), _known(row.get("model_name"))
    missing = [index + 1 for index in used if f"response_{index + 1}" not in row]
    if missing:
        raise UnfitRowError(f"it has no column response_{missing[0]}, which a conflict pair names")
    return _item(
        place,
        subset=name,
        prompt=row["prompt"],
        replies=[row[f"response_{index + 1}"] for index in used],
        pairs=[(position[better], position[worse]) for better, worse in pairs],
        id=f"{name} {place if question is None else question} {place if model is None else model}",
        # One question is answered by several models, each in a row of its own.
        cluster=None if question is None else f"{name} {question}",
    )


def _is_score(value: object) -> bool:
    return isinstance(value, bool) or is_number(value)


RMB_GOALS = ("Helpfulness", "Harmlessness")


def read_rmb(row: Row, place: Place) -> Read:
    """Return the best-of-N comparison or the pair of a row of RMB."""
    named = [goal for goal in RMB_GOALS if goal in str(row.get("category_path"))]
    goal = named[0] if len(named) == 1 else _named(place, RMB_GOALS)
    if goal is None:
        raise UnfitRowError("neither category_path nor the folder says Helpfulness or Harmlessness")
    if "bon_best" in row:
        losers = _texts(row["loser_list"], "loser_list", of="objects with an answer")
        return _item(
            place,
            subset=f"{goal} BoN",
            prompt=row["conversation_input"],
            replies=[_answer(row["bon_best"], "bon_best"), *(_answer(loser, "a loser") for loser in losers)],
            pairs=all_pairs(1, len(losers)),
            id=f"{goal} BoN {row['bon_uid']}" if _known(row.get("bon_uid")) is not None else None,
        )
    return _item(
        place,
        subset=f"{goal} pairwise",
        prompt=row["conversation_input"],
        replies=[_answer(row["chosen"], "chosen"), _answer(row["reject"], "reject")],
        pairs=all_pairs(1, 1),
        id=f"{goal} pairwise {row['pair_uid']}" if _known(row.get("pair_uid")) is not None else None,
    )


def _answer(value: object, what: str) -> object:
    if not isinstance(value, Mapping) or "answer" not in value:
        raise UnfitRowError(f"{what} is {show(value)}, wanted an object with an answer")
    return value["answer"]


LLMBAR_SETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")


def read_llmbar(row: Row, place: Place) -> Read:
    """Return the pair of a row of LLMBar."""
    subset = _named(place, LLMBAR_SETS)
    if subset is None:
        raise UnfitRowError(f"neither file nor folder is named after one set of LLMBar ({', '.join(LLMBAR_SETS)})")
    winner = _one_of(row["label"], "label", {1: 0, 2: 1, "1": 0, "2": 1})
    return _item(
        place,
        subset=subset,
        prompt=row["input"],
        replies=[row["output_1"], row["output_2"]],
        pairs=[(winner, 1 - winner)],
    )


HHH_PARTS = ("harmless", "helpful", "honest", "other")


def _marked_replies(row: Row) -> tuple[list[Any], list[Any]]:
    """Return the replies of a row of HHH and the mark of each, from the columns of the hub or of BIG-bench's file."""
    if isinstance(scores := row.get("target_scores"), Mapping):
        return list(scores), list(scores.values())
    targets = row.get("targets")
    choices = targets.get("choices") if isinstance(targets, Mapping) else None
    labels = targets.get("labels") if isinstance(targets, Mapping) else None
    texts = _texts(choices, "choices of targets")
    return texts, _texts(labels, "labels of targets", number=len(texts), of="labels")


def read_hhh(row: Row, place: Place) -> Read:
    """Return the pairs of a row of HHH: each better reply with each worse one."""
    subset = _named(place, HHH_PARTS)
    if subset is None:
        raise UnfitRowError(f"neither file nor folder is named after its part ({', '.join(HHH_PARTS)})")
    texts, marks = _marked_replies(row)
    better = [number for number, mark in enumerate(marks) if mark == 1]
    worse = [number for number, mark in enumerate(marks) if mark == 0]
    if not better or not worse:
        raise UnfitRowError(f"labels are {show(marks)}, wanted at least one 1 and one 0")
    return _item(
        place,
        subset=subset,
        prompt=row["input"],
        replies=texts,
        pairs=[(one, other) for one in better for other in worse],
    )
