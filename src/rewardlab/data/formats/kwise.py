"""Several replies to a prompt with scores, ratings, ranks or votes: own rows, Nectar, NeMo-RL, UltraFeedback,
CodeUltraFeedback, HelpSteer, Stack Exchange."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from rewardlab.core.files import to_float
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats.context import Asked, read_asked, require_one_context
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import (
    ParsedRow,
    Rules,
    compare_all,
    draw_replies,
    is_unrated,
    read_scores,
    reasons,
    require_two,
)
from rewardlab.data.rows import Row, UnusableRowError, is_absent, show

_HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
"""What stands between the turns of a HelpSteer2 prompt; the first turn has none before it."""


def _read_kwise(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + responses + scores or ranking. Every pair of replies with different scores becomes a comparison."""
    asked = read_asked(row, rules)
    responses = row["responses"]
    if not isinstance(responses, (list, tuple)):
        raise UnusableRowError("reply_not_text", f"responses is {show(responses)}, wanted a list of replies")
    scores = read_scores(row, len(responses))
    return compare_usable(asked, responses, scores, row, place, rules)


def compare_usable(
    asked: Asked,
    values: Sequence[object],
    scores: Sequence[float | None],
    row: Row,
    place: str,
    rules: Rules,
    *,
    by_difference: bool = False,
) -> ParsedRow:
    """Return the comparisons of the replies that can be used and have a score, as `compare_all` does.

    The others are left out alone. Raises UnusableRowError for the first of them if fewer than two are left, and as
    `draw_replies` and `compare_all` do.
    """
    replies, left_out = asked.replies(values)
    for number, score in enumerate(scores):
        if score is None and replies.pop(number, None) is not None:
            left_out[number] = UnusableRowError("bad_scores", "no score")
    require_two(replies, left_out)
    usable = [
        (replies[number], score) for number, score in enumerate(scores) if number in replies and score is not None
    ]
    drawn = [usable[position] for position in draw_replies(len(usable), place, rules)]
    kept, judged = [reply for reply, _ in drawn], [score for _, score in drawn]
    parsed = compare_all(kept, judged, asked.prompt, row, place, rules, by_difference=by_difference)
    return replace(parsed, left_out=reasons(left_out))


def _read_nectar(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + answers, each with a rank of which 1 is the best. Equal ranks are ties."""
    answers = _entries(row["answers"], "answers", "answer")
    return _compare_ranked(row["prompt"], answers, "answer", row, place, rules)


def _compare_ranked(
    prompt: object, answers: Sequence[Mapping[str, object]], text: str, row: Row, place: str, rules: Rules
) -> ParsedRow:
    """Return the comparisons of answers, each with a reply in `text` and a `rank`, which is better the lower it is."""
    written = [answer.get("rank") for answer in answers]
    ranks = [None if is_unrated(rank) else to_float(rank) for rank in written]
    if not all(rank is None or math.isfinite(rank) for rank in ranks):
        raise UnusableRowError("bad_scores", f"the ranks are {show(written)}")
    ranked = {
        "prompt": prompt,
        "responses": [answer[text] for answer in answers],
        "scores": [None if rank is None else -rank for rank in ranks],
    }
    return _read_kwise({**row, **ranked, "ranking": None}, place, rules)


def _read_nemo(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read NeMo-RL's context + completions, each with a rank, the lowest of which is the best. Equal ranks are ties."""
    completions = _entries(row["completions"], "completions", "completion")
    return _compare_ranked(row["context"], completions, "completion", row, place, rules)


def _has_ranks(row: Row) -> bool:
    """Return whether the completions of a row have ranks; those of other datasets are texts, or have ratings."""
    completions = row.get("completions")
    first = completions[0] if isinstance(completions, (list, tuple)) and completions else None
    return isinstance(first, Mapping) and {"completion", "rank"} <= first.keys()


# --- ratings -------------------------------------------------------------------------------------------------


def _read_stack_exchange(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read question + answers, each with a `pm_score` made of its votes. The difference of these is the strength."""
    answers = _entries(row["answers"], "answers", "text")
    rated = [(answer["text"], answer) for answer in answers]
    return _compare_rated(row["question"], rated, rules.reading.attribute_weights or {VOTES: 1.0}, row, place, rules)


VOTES: Final = "pm_score"
"""Log base 2 of 1 + an answer's votes, 1 more if it was accepted, -1 below 0 votes."""


def _has_votes(row: Row) -> bool:
    """Return whether the answers of a row have votes; those of other datasets are texts of references."""
    answers = row.get("answers")
    first = answers[0] if isinstance(answers, (list, tuple)) and answers else None
    return isinstance(first, Mapping) and {"text", VOTES} <= first.keys()


def _read_ultrafeedback(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read instruction + completions with ratings. The difference of the ratings is the strength."""
    completions = _entries(row["completions"], "completions", "response")
    rated = [(completion["response"], _flat_ratings(completion)) for completion in completions]
    weights = rules.reading.attribute_weights
    if not weights:
        known = {name: sum(math.isfinite(to_float(one.get(name))) for _, one in rated) for name in _MEANS}
        # The first of those that most completions have, so one that all have, if there is one.
        name = max(_MEANS, key=known.__getitem__)
        if known[name] < 2:
            raise UnusableRowError("bad_scores", f"no one of {', '.join(_MEANS)} is there for two completions")
        weights = {name: 1.0}
    return _compare_rated(row["instruction"], rated, weights, row, place, rules)


_MEANS: Final = ("fine-grained_score", "overall_score", "mean of annotations")
"""UltraFeedback's ratings of a whole completion, in the order of preference."""


def _read_code_ultrafeedback(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read instruction + responses + annotations, each of which rates the response of the model that it names. The
    difference of the ratings is the strength."""
    responses = _entries(row["responses"], "responses", "response")
    annotations = _entries(row["annotations"], "annotations", "model")
    rated = {show(one["model"]): {**one, "rating": _unless_not_given(one.get("rating"))} for one in annotations}
    if len(rated) < len(annotations):
        raise UnusableRowError("bad_scores", "annotations name a model twice")
    pairs = [(one["response"], rated.get(show(one.get("model")), {})) for one in responses]
    return _compare_rated(
        row["instruction"], pairs, rules.reading.attribute_weights or {"rating": 1.0}, row, place, rules
    )


def _unless_not_given(rating: object) -> object:
    """Return a rating; None for the text that says that there is none."""
    return None if isinstance(rating, str) and rating.strip().upper() == "N/A" else rating


def _rates_models(row: Row) -> bool:
    """Return whether the responses of a row are of models, and its annotations rate at least two of these: those by one
    judge may name the judge as their model."""
    responses, annotations = (_models(row.get(name)) or set() for name in ("responses", "annotations"))
    return annotations <= responses and len(annotations) > 1


def _models(value: object) -> set[str] | None:
    """Return the models that entries name; None unless each names one."""
    entries = list(value) if isinstance(value, (list, tuple)) else []
    named = [show(entry["model"]) for entry in entries if isinstance(entry, Mapping) and "model" in entry]
    return set(named) if len(named) == len(entries) else None


def _flat_ratings(completion: Mapping[str, object]) -> dict[str, object]:
    """Return the ratings of a completion by name: those of the aspects, their mean, and the scores."""
    annotations = completion.get("annotations")
    aspects = annotations if isinstance(annotations, Mapping) else {}
    ratings = {name: held.get("Rating") if isinstance(held, Mapping) else held for name, held in aspects.items()}
    numbers = [number for rating in ratings.values() if math.isfinite(number := to_float(rating))]
    mean = sum(numbers) / len(numbers) if numbers else None
    scores = {name: completion.get(name) for name in ("fine-grained_score", "overall_score")}
    return {**ratings, **scores, "mean of annotations": mean}


def _join_rated(rows: Sequence[Row], place: str, rules: Rules) -> Row:
    """Return rows of one prompt, each with a rated reply, as one row.

    Raises UnusableRowError if `system` or `history` are not the same in all.
    """
    require_one_context(rows)
    return {**rows[0], "rows": list(rows)}


def _read_rated(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read what `_join_rated` made of the rows of a prompt. The difference of the ratings is the strength."""
    rows = row["rows"]
    assert isinstance(rows, list)
    if len(rows) < 2:
        raise UnusableRowError("no_comparison", "a lone reply to its prompt")
    weights = rules.reading.attribute_weights or {"helpfulness": 1.0}
    prompt = row["prompt"] if rules.bare else helpsteer_prompt(row["prompt"])
    parsed = _compare_rated(prompt, [(one["response"], one) for one in rows], weights, row, place, rules)
    return replace(parsed, order=None)


def _compare_rated(
    prompt: object,
    rated: Sequence[tuple[object, Mapping[str, object]]],
    weights: Mapping[str, float],
    row: Row,
    place: str,
    rules: Rules,
) -> ParsedRow:
    """Return the comparisons of (reply, its ratings by name), by the weighted sums of the ratings."""
    asked = read_asked({**row, "prompt": prompt}, rules)
    scores: list[float | None] = []
    for _, ratings in rated:
        if any(is_unrated(ratings.get(name)) for name in weights):
            scores.append(None)
            continue
        numbers = {name: rating_of(ratings.get(name)) for name in weights}
        if unrated := [name for name, number in numbers.items() if not math.isfinite(number)]:
            raise UnusableRowError("bad_scores", f"{unrated[0]} is {show(ratings.get(unrated[0]))}, wanted a number")
        # Rounded, so that equal sums of different ratings are ties.
        scores.append(round(sum(weights[name] * number for name, number in numbers.items()), 9))
    values = [reply for reply, _ in rated]
    return compare_usable(asked, values, scores, row, place, rules, by_difference=True)


def rating_of(value: object) -> float:
    """Return a rating as a number, of true or false 1 or 0 (also as a text, as in CSV); NaN for anything else."""
    return {"true": 1.0, "false": 0.0}.get(str(value).strip().lower(), to_float(value))


def helpsteer_prompt(value: object) -> object:
    """Return a HelpSteer2 prompt of several turns as messages, any other prompt as it is.

    Raises UnusableRowError if the turns do not end with the user.
    """
    if not isinstance(value, str) or not _HELPSTEER_TURN.search(value):
        return value
    first, *pieces = _HELPSTEER_TURN.split(value)
    speakers, texts = ["User", *pieces[::2]], [first, *pieces[1::2]]
    if not first.strip():
        speakers, texts = speakers[1:], texts[1:]
    if speakers[-1] != "User":
        raise UnusableRowError("bad_roles", f"the last turn of the prompt is by {speakers[-1]}, wanted User")
    return [{"role": who.lower(), "content": said} for who, said in zip(speakers, texts, strict=True)]


def _entries(value: object, column: str, text: str) -> list[Mapping[str, object]]:
    """Return a list of mappings that each have a `text`. Raises UnusableRowError for anything else."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, Mapping) and text in entry for entry in value):
        raise UnusableRowError("reply_not_text", f"{column} is {show(value)}, wanted a list of objects with {text!r}")
    return list(value)


def rated_by(reading: ReadingConfig) -> Schema:
    """Return the schema of rated replies whose ratings are in the columns that `--attributes` names.

    With `--prompt-column instruction`, rows of one instruction and different `input` are of different prompts.
    """
    names = tuple(reading.attribute_weights)
    schema = replace(RATED, key=_instruction) if reading.joins_input else RATED
    return schema if not names else replace(schema, needed=("prompt", "response", *names))


def _instruction(row: Row) -> object:
    """Return an instruction with its input; None for a row without one."""
    return None if is_absent(row.get("prompt")) else (row["prompt"], row.get("input") or None)


KWISE = Schema(name="K-wise", needed=("prompt", "responses"), one_of=("scores", "ranking"), read=_read_kwise)
NECTAR = Schema(name="Nectar, answers with ranks", needed=("prompt", "answers"), read=_read_nectar)
NEMO = Schema(
    name="NeMo-RL, completions with ranks", needed=("context", "completions"), read=_read_nemo, suits=_has_ranks
)
STACK_EXCHANGE = Schema(
    name="Stack Exchange, answers with votes",
    needed=("question", "answers"),
    read=_read_stack_exchange,
    suits=_has_votes,
    own_strength=True,
)
ULTRAFEEDBACK = Schema(
    name="UltraFeedback, completions with ratings",
    needed=("instruction", "completions"),
    read=_read_ultrafeedback,
    own_strength=True,
)
CODE_ULTRAFEEDBACK = Schema(
    name="CodeUltraFeedback, rated responses of models",
    needed=("instruction", "responses", "annotations"),
    read=_read_code_ultrafeedback,
    suits=_rates_models,
    own_strength=True,
)
RATED = Schema(
    name="HelpSteer, a rated reply a row",
    needed=("prompt", "response", "helpfulness"),
    read=_read_rated,
    group_by=("prompt",),
    join=_join_rated,
    of_replies=True,
    unit="prompt",
    own_strength=True,
)
