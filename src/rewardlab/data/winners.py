"""What in the rows may name another reply as the better one than the one that is read, or another text as the reply:
told, since labels that are turned round in some rows or in all, and replies with more in them, train without an error.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from rewardlab.core.files import to_float
from rewardlab.core.terminal import number_of, quoted, short
from rewardlab.data.cells import are_texts, python_literal
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source
from rewardlab.data.formats.mapping import choice_of, unpacked
from rewardlab.data.formats.places import PLACES, VERDICT, place_of, words_of
from rewardlab.data.judgements import SCORES
from rewardlab.data.readers import read_source
from rewardlab.data.rows import Row, UnreadRow, is_open_transcript

logger = logging.getLogger("rewardlab")
ROWS: Final = 256
"""How many rows of a dataset are looked at."""
SAID: Final = frozenset(
    {"best", "better", "choice", "judgement", "judgment", "overall", "preference", "preferences", "preferred", "safer"}
    | {"verdict", "vote", "votes", "winner", "wins"}
)
"""Words of such columns, where the names of the two replies say nothing of which is better."""
COUNTS: Final = {"overall", "vote", "votes"}
"""Those that are in names of other numbers too, such as `num_votes`, which have many values."""
TIED: Final = re.compile("tie|both|neither|equal|none|same|draw|unsure|nopreference")
"""In a verdict that prefers neither reply."""
MOST_VERDICTS: Final = 4
"""A column with more values than the first, the second, a tie and none says something else, unless they are numbers,
which may tell how much better one reply is, and the names of the two replies say nothing."""
SHOWN: Final = 4
"""Values of a column that are shown."""
RATINGS: Final = frozenset({"elo", "grade", "rating", "reward", "score", "votes"})
"""Words of columns that say how good one reply is."""
LOWER: Final = frozenset(
    {
        "count",
        "counts",
        "error",
        "errors",
        "harm",
        "harmful",
        "harmfulness",
        "len",
        "length",
        "loss",
        "nll",
        "perplexity",
    }
    | {"ppl", "rank", "ranks", "tokens", "toxic", "toxicity"}
)
"""Words of numbers that are better the lower they are, or say nothing of which reply is better."""
MOST_AGAINST: Final = 0.1
"""Share of the rows in which the scores of `chosen` and `rejected` may be against the choice: labels by people differ
from any score, but these are as a rule what the choice was made by."""
RANK: Final = re.compile(r"(.*_)?ranks?", re.IGNORECASE)
"""Columns in which, as a rule, 1 is the best."""

LIST: Final = re.compile(r"""\s*\[\s*['"].*['"]\s*\]\s*""", re.DOTALL)
"""A text that may be a list of texts."""
LEAST: Final = 16
"""Characters of a prompt that two replies do not begin with by chance."""
NUMBER: Final = re.compile(r"(.*_)?(choice|id|idx|index)", re.IGNORECASE)
"""Columns that hold the number of the better reply, as a rule, where they hold 0 and 1."""


def tell_other_winners(source: Source, reading: ReadingConfig, rows: Sequence[Row] | None = None) -> None:
    """Log a warning for each thing in the first rows that may say another winner than the one that is read. `rows` are
    `first_of` the dataset, where these are known."""
    try:
        found = other_winners(first_of(source) if rows is None else rows, reading)
    except Exception:  # of any class: what is odd in rows is told by whoever reads all of them, and ends nothing here
        logger.debug("data: %s: its first rows could not be looked at", source.label, exc_info=True)
        return
    for said in found:
        logger.warning("data: %s: %s", source.label, said)


def first_of(source: Source) -> list[Row]:
    """Return the first rows of a dataset, as far as they can be read; none of a stream, which would begin anew."""
    rows: list[Row] = []
    if source.streaming:
        return rows
    with suppress(Exception):  # of any class: whoever reads all rows says so, or counts it
        for _, row in islice(read_source(source), ROWS):
            if not isinstance(row, UnreadRow):
                rows.append(row)
    return rows


def other_winners(rows: Sequence[Row], reading: ReadingConfig) -> list[str]:
    """Return a line for each thing in rows that may say another winner than the one that is read."""
    sides = reading.own_columns.get("chosen", "chosen"), reading.own_columns.get("rejected", "rejected")
    pairs = [row for row in rows if all(side in row for side in sides)]
    found = [*_ranks(rows, reading), *_names(pairs, sides), *_numbers(pairs, sides, reading), *_below_0(rows, reading)]
    found += [*_lists(pairs, sides), *_repeated(pairs, sides, reading)]
    if "label" in reading.own_columns or any({"label", "labels"} & row.keys() for row in pairs):
        return found
    return [*found, *_verdicts(pairs, sides, reading), *_ratings(pairs, sides)]


def _verdicts(rows: Sequence[Row], sides: tuple[str, str], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line for each column that may say which of two replies is preferred."""
    place = place_of(*sides)
    rated = {name for pair in _rated(rows, place) for name in pair} if place else set()
    read = {*reading.own_columns.values(), *reading.attribute_weights, reading.margin_column}
    for name in sorted({name for row in rows for name in row} - read - rated - set(sides)):
        said = SAID & set(map(str.casefold, words_of(name))) if place else set()
        values = {value for row in rows for value in _said(row.get(name))}
        named = place is not None and _name_the_sides(values, sides)
        if named:
            said |= {"winner"}
        elif not VERDICT.fullmatch(name) and not said:
            continue
        words = sorted((str(value) for value in values - {""}), key=lambda word: (to_float(word), word))
        is_scale = bool(place) and all(math.isfinite(to_float(word)) for word in words)
        few = named or len(words) <= MOST_VERDICTS
        known = VERDICT.fullmatch(name) or (few or said - COUNTS if is_scale else _name_a_place(words))
        if not known:
            continue
        if len(words) > 1 and (few or is_scale):
            shown = ", ".join(map(short, words[:SHOWN])) + (", …" if len(words) > SHOWN else "")
            yield (
                f"the column {short(name)} is not read: the reply in {sides[0]} counts as the better one in every row. "
                f"If {short(name)} ({shown}) says which of the two is, name it with --label-column "
                f"{quoted(name)}, and with --map-label VALUE=1 what means {sides[0]}, with VALUE=0 what means "
                f"{sides[1]}, with VALUE=0.5 a tie."
            )


def _said(value: object) -> list[str | bool | int | float]:
    """Return what a value may say of two replies: a text or a number, as it stands, or one from each annotator, as
    Argilla exports it (`["response_1"]`) and Label Studio (`[{"selected": "left"}]`)."""
    held = unpacked(value)
    entries = held if isinstance(held, list | tuple) else [value]
    return [one for one in map(choice_of, entries) if isinstance(one, str | bool | int | float)]


def _name_the_sides(values: Collection[object], sides: tuple[str, str]) -> bool:
    """Return whether values are the names of the two columns with the replies, or left and right, and besides at most
    words for ties. A column of any name with such values is a verdict."""
    words = {_letters(str(value)) for value in values}
    named = next((names for names in (set(map(_letters, sides)), {"left", "right"}) if names <= words), None)
    return named is not None and all(not word or TIED.search(word) for word in words - named)


def _letters(name: str) -> str:
    """Return a name without case and what stands between its words: `response_1` is `Response 1`."""
    return re.sub(r"[\W_]", "", name.casefold())


def _name_a_place(values: Sequence[str]) -> bool:
    """Return whether one of some values names a place, such as `first` or `answer 1`."""
    places = set().union(*PLACES)
    return any(places & set(map(str.casefold, words_of(value))) for value in values)


def _rated(rows: Sequence[Row], place: tuple[str, str]) -> list[tuple[str, str]]:
    """Return two columns for each rating of two replies, which differ as the names of these do."""
    names, found = {name for row in rows for name in row}, []
    for name in sorted(names):
        words = words_of(name)
        said = set(map(str.casefold, words))
        if not RATINGS & said or "model" in said:  # how good the models are that wrote the replies
            continue
        others = (
            "".join([*words[:at], place[1], *words[at + 1 :]]) for at, word in enumerate(words) if word == place[0]
        )
        found += [(name, other) for other in others if other in names]
    return found


def _ratings(rows: Sequence[Row], sides: tuple[str, str]) -> Iterator[str]:
    """Yield a line for each two columns that rate the second reply higher: in more than a few rows, or in any where the
    names of the replies do not say which is better; and for those that rate both alike in any row."""
    place = place_of(*sides)
    for pair in dict.fromkeys(
        (*SCORES, *_rated(rows, ("chosen", "rejected")), *(_rated(rows, place) if place else ()))
    ):
        # In lower case too, since words are told apart by it: `PPL` is one, and so is `Toxicity`.
        if not LOWER.isdisjoint([*map(str.casefold, words_of(pair[0])), *words_of(pair[0].casefold())]):
            continue
        numbers = [(to_float(row.get(pair[0])), to_float(row.get(pair[1]))) for row in rows]
        rated = [both for both in numbers if all(map(math.isfinite, both))]
        against = sum(first < second for first, second in rated)
        if against > (0 if place else MOST_AGAINST * len(rated)):
            yield (
                f"{pair[1]} is above {pair[0]} in {against} of the first {number_of(len(rated), 'row')}, and the reply "
                f"in {sides[0]} counts as the better one in every row. If the higher number is that of the better "
                f"reply, write both replies as `responses` and the numbers as `scores`, or turn such rows round."
            )
        elif equal := sum(first == second for first, second in rated):
            yield (
                f"{pair[1]} equals {pair[0]} in {equal} of the first {number_of(len(rated), 'row')}, and the reply in "
                f"{sides[0]} counts as the better one in every row. If these are ties, take such rows out, or give "
                f"them a `label` of 0.5 (and the others of 1)."
            )


def _numbers(rows: Sequence[Row], sides: tuple[str, str], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line if the label is, by its name, the number of the better reply: 0 would then mean the first."""
    name = reading.own_columns.get("label")
    if (
        name
        and not reading.map_label
        and NUMBER.fullmatch(name)
        and {to_float(row.get(name)) for row in rows} == {0, 1}
    ):
        yield (
            f"{name} is read as the probability that the reply in {sides[0]} is the better one: 1 means {sides[0]}, 0 "
            f"means {sides[1]}. If it is the number of the better reply, give --map-label 0=1 1=0; if it is not, "
            f"--map-label 1=1 0=0 says so."
        )


def _below_0(rows: Sequence[Row], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line for a column of margins or strengths that is below 0 in many rows."""
    for flag, name in (("margin", reading.margin_column), ("strength", reading.strength_column)):
        numbers = [number for row in rows if name and math.isfinite(number := to_float(row.get(name)))]
        below, above = sum(number < 0 for number in numbers), sum(number > 0 for number in numbers)
        if below > MOST_AGAINST * len(numbers):
            remedy = (
                "If a label says which reply that is, give the absolute value; if the other reply is the better one "
                "where it is below 0, turn the replies and the sign round in those rows alone."
                if above > MOST_AGAINST * len(numbers)
                else "If it is the other reply's score minus that reply's, turn its sign round; if the other reply is "
                "the better one there, turn the replies round."
            )
            yield (
                f"{name} is below 0 in {below} of the first {number_of(len(numbers), 'row')}, which are dropped: a "
                f"{flag} says by how much the better reply is better. {remedy}"
            )


def _ranks(rows: Sequence[Row], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line for each column of ranks in which the largest number counts as the best."""
    name = reading.own_columns.get("scores")
    if name and RANK.fullmatch(name) and any(_are_ranks(unpacked(row.get(name))) for row in rows):
        yield (
            f"{name} are read as scores: the reply with the largest number counts as the best one. If 1 is the best, "
            f"write them as negative numbers, or as `ranking`, the replies from best to worst, counted from 0."
        )
    for attribute, weight in reading.attribute_weights.items():
        if weight > 0 and RANK.fullmatch(attribute) and any(attribute in row for row in rows):
            yield (
                f"--attributes {attribute}={weight:g}: the reply with the largest {attribute} counts as the best one. "
                f"If 1 is the best, give --attributes {attribute}={-weight:g}."
            )


def _are_ranks(value: object) -> bool:
    """Return whether a value is a list of places, counted from 0 or 1."""
    numbers = [to_float(one) for one in value] if isinstance(value, list | tuple) else []
    return bool(numbers) and min(numbers) in (0, 1) and max(numbers) <= len(numbers)


def _names(rows: Sequence[Row], sides: tuple[str, str]) -> Iterator[str]:
    """Yield a line if the sides hold names of other columns, which hold the replies."""
    if rows and all(_is_name(row[side], row, sides) for row in rows for side in sides):
        first, second = (short(str(rows[0][side])) for side in sides)
        yield (
            f"{sides[0]} and {sides[1]} hold {first} and {second}, which are columns of the row: these words are read "
            f"as the replies, not what stands in the columns. Write the texts into {sides[0]} and {sides[1]}."
        )


def _lists(rows: Sequence[Row], sides: tuple[str, str]) -> Iterator[str]:
    """Yield a line if the sides are lists of texts that were written as text, as pandas writes them into CSV files."""
    found = [row for row in rows if all(_is_written_list(row[side]) for side in sides)]
    if 2 * len(found) > len(rows):
        yield (
            f"{sides[0]} and {sides[1]} hold lists that were written as text in {len(found)} of the first "
            f"{number_of(len(rows), 'row')}, such as {short(str(found[0][sides[0]]))}: each is read as one reply, "
            f"brackets and all. If these are several replies, write one text into each, or both replies as "
            f"`responses` with `scores`."
        )


def _is_written_list(value: object) -> bool:
    """Return whether a text is a list of texts as Python writes it; JSON, which a reply may well be, has double quotes
    alone."""
    if not isinstance(value, str) or not LIST.fullmatch(value):
        return False
    with suppress(ValueError):
        json.loads(value)
        return False
    return are_texts(python_literal(value))


def _repeated(rows: Sequence[Row], sides: tuple[str, str], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line if both replies begin with the text of their prompt, which is then read twice. Of a transcript
    reading takes it out."""
    name = reading.own_columns.get("prompt", "prompt")
    repeated = sum(all(_begins_with(row.get(name), row[side]) for side in sides) for row in rows)
    if 2 * repeated > len(rows):
        yield (
            f"{sides[0]} and {sides[1]} begin with the text of {name} in {repeated} of the first "
            f"{number_of(len(rows), 'row')}, so it is read twice, as the prompt and in each reply. If the replies do "
            f"not repeat it themselves, take it out of them."
        )


def _begins_with(prompt: object, reply: object) -> bool:
    are_texts_too = isinstance(prompt, str) and isinstance(reply, str) and not is_open_transcript(prompt)
    return are_texts_too and len(start := str(prompt).strip()) >= LEAST and str(reply).lstrip().startswith(start)


def _is_name(value: object, row: Row, sides: tuple[str, str]) -> bool:
    return isinstance(value, str) and value not in sides and isinstance(row.get(value), str)
