"""Two replies judged by several annotators, with one comparison for each annotator: HelpSteer2, HelpSteer3,
MultiPref, own rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rewardlab.core.files import to_float
from rewardlab.data.formats.context import read_asked
from rewardlab.data.formats.kwise import helpsteer_prompt
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.formats.plain import read_sides
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules, Vote, judge_pair
from rewardlab.data.rows import (
    Row,
    UnusableRowError,
    is_absent,
    label_word,
    read_name,
    read_number,
    show,
)

MOST = 3
"""HelpSteer's preferences go from -3 (the first reply is much better) over 0 to 3 (the second is)."""


def _read_labelled(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read chosen + rejected + labels, one an annotator: the probability that `chosen` is preferred."""
    prompt, replies = read_sides(row, rules)
    strength = read_number(row, "strength", "bad_strength")
    votes = []
    for who, said in _said(row):
        label = to_float(said)
        if not 0 <= label <= 1:
            raise UnusableRowError(
                "bad_label",
                f"the label of {who} is {show(said)}, wanted a number from 0 to 1 (--map-label turns others into such)",
                label=label_word(said),
            )
        votes.append(Vote(label=label, strength=strength, annotator=who))
    if not votes:
        raise UnusableRowError("missing_field", "nobody's label in 'labels'")
    return judge_pair(prompt, replies, votes, row, place, rules, is_named=True)


def _said(row: Row) -> list[tuple[str, object]]:
    """Return (annotator, label) for each annotator who gave a label. Without `annotators` they are numbered from 1.

    Raises UnusableRowError for labels that are neither a list nor a mapping, or do not fit the annotators.
    """
    labels = unpacked(row["labels"])
    if isinstance(labels, Mapping):
        pairs = [(read_name(who), said) for who, said in labels.items()]
    elif isinstance(labels, (list, tuple)):
        names = row.get("annotators")
        if is_absent(names):
            lone = len(labels) == 1 and not is_absent(row.get("annotator"))
            names = [row["annotator"]] if lone else range(1, len(labels) + 1)
        names = unpacked(names)
        if not isinstance(names, (list, tuple, range)) or len(names) != len(labels):
            raise UnusableRowError("bad_label", f"{len(labels)} labels by the annotators {show(row.get('annotators'))}")
        pairs = [(read_name(who), said) for who, said in zip(names, labels, strict=True)]
    else:
        raise UnusableRowError("bad_label", f"labels is {show(labels)}, wanted a list or annotator: label")
    return [(who, said) for who, said in pairs if not is_absent(said)]


def _holds_labels(row: Row) -> bool:
    """Return whether `labels` holds the labels of annotators, and not something else under that name, such as tags.

    A row in which no annotator gave a label counts too: if it were taken for tags, and it is the first row, the labels
    of all later rows would not be read.
    """
    labels = unpacked(row.get("labels"))
    if not isinstance(labels, (list, tuple)):
        return isinstance(labels, Mapping)
    return all(is_absent(said) or isinstance(said, bool) or math.isfinite(to_float(said)) for said in labels)


# --- MultiPref -----------------------------------------------------------------------------------------------

WORKERS: Final = ("normal_worker_annotations", "expert_worker_annotations")
"""MultiPref's columns of annotators: crowd workers, and experts."""
SAID: Final[Mapping[str, tuple[float, float]]] = {
    "a-is-clearly-better": (1.0, 2.0),
    "a-is-slightly-better": (1.0, 1.0),
    "tie": (0.5, 0.0),
    "b-is-slightly-better": (0.0, 1.0),
    "b-is-clearly-better": (0.0, 2.0),
}
"""What one of them says overall, in lower case -> (the probability that A is preferred, the strength)."""


def _read_multipref(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read MultiPref: two completions, and what each annotator said of them overall."""
    asked = read_asked({**row, "prompt": row["text"]}, rules)
    replies = (asked.reply(row["completion_a"]), asked.reply(row["completion_b"]))
    entries = [entry for column in WORKERS for entry in _annotations(row, column)]
    votes = []
    for number, entry in enumerate(entries, start=1):
        said, who = entry.get("overall_pref"), entry.get("evaluator")
        if is_absent(said):
            continue
        if not isinstance(said, str) or said.casefold() not in SAID:
            raise UnusableRowError("bad_label", f"overall_pref is {show(said)}, wanted one of {', '.join(SAID)}")
        label, strength = SAID[said.casefold()]
        votes.append(Vote(label=label, strength=strength, annotator=str(number) if is_absent(who) else read_name(who)))
    if not votes:
        raise UnusableRowError("missing_field", "nobody's 'overall_pref'")
    return judge_pair(asked.prompt, replies, votes, row, place, rules)


def _annotations(row: Row, column: str) -> list[Mapping[str, object]]:
    """Return the annotations in a column. Raises UnusableRowError unless they are a list of objects, or absent."""
    value = unpacked(row.get(column))
    if is_absent(value):
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in value):
        raise UnusableRowError("bad_label", f"{column} is {show(value)}, wanted a list of objects with 'overall_pref'")
    return list(value)


# --- HelpSteer -----------------------------------------------------------------------------------------------


def _read_helpsteer2(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read HelpSteer2-preference: `preference_strength`, or what each of the three most similar annotators said."""
    prompt = row["prompt"] if rules.bare else helpsteer_prompt(row["prompt"])
    said = _scores(row, "three_most_similar_preferences", "strength")
    return _read_scored(prompt, ("response_1", "response_2"), said, "preference_strength", row, place, rules)


def _read_helpsteer3(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read HelpSteer3: `overall_preference`, or what each annotator said."""
    said = _scores(row, "individual_preference", "score")
    return _read_scored(row["context"], ("response1", "response2"), said, "overall_preference", row, place, rules)


def _scores(row: Row, column: str, name: str) -> list[object]:
    """Return the annotators' scores; an empty list if the row does not hold them, or a note in their place.

    Raises UnusableRowError for a list that cannot be read: the votes in it would be left out.
    """
    value = unpacked(row.get(column))
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        raise UnusableRowError("bad_label", f"{column} is {show(value)}, wanted a list of objects with {name!r}")
    if not isinstance(value, (list, tuple)):
        return []
    return [entry[name] for entry in value if isinstance(entry, Mapping) and entry.get(name) is not None]


def _read_scored(
    prompt: object, columns: tuple[str, str], said: Sequence[object], overall: str, row: Row, place: str, rules: Rules
) -> ParsedRow:
    """Return the votes of annotators on two replies, or the one vote of all if theirs are not there.

    Below 0 the first reply is better, above 0 the second; how far from 0 is the strength.
    """
    asked = read_asked({**row, "prompt": prompt}, rules)
    replies = (asked.reply(row[columns[0]]), asked.reply(row[columns[1]]))
    votes = [_vote(score, overall, str(number)) for number, score in enumerate(said, start=1)]
    return judge_pair(asked.prompt, replies, votes or [_vote(row[overall], overall, None)], row, place, rules)


def _vote(value: object, column: str, annotator: str | None) -> Vote:
    score = to_float(value)
    if not -MOST <= score <= MOST:
        raise UnusableRowError("bad_label", f"{column} is {show(value)}, wanted a number from -{MOST} to {MOST}")
    label = 0.5 if score == 0 else 1.0 if score < 0 else 0.0
    return Vote(label=label, strength=abs(score), annotator=annotator)


LABELLED = Schema(
    name="pairs with several annotators",
    needed=("chosen", "rejected", "labels"),
    read=_read_labelled,
    suits=_holds_labels,
)
HELPSTEER2_PREFERENCE = Schema(
    name="HelpSteer2-preference",
    needed=("prompt", "response_1", "response_2", "preference_strength"),
    read=_read_helpsteer2,
    own_strength=True,
)
HELPSTEER3 = Schema(
    name="HelpSteer3",
    needed=("context", "response1", "response2", "overall_preference"),
    read=_read_helpsteer3,
    own_strength=True,
)
MULTIPREF = Schema(
    name="MultiPref",
    needed=("text", "completion_a", "completion_b"),
    one_of=WORKERS,
    read=_read_multipref,
    own_strength=True,
)
