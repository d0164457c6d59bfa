"""Judged replies: several replies to a prompt and any comparisons of them, a `Preference` as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rewardlab.core.types import Comparison, Preference
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats.context import read_asked
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import (
    LARGEST,
    SMALLEST,
    ParsedRow,
    Rules,
    draw_replies,
    make_comparison,
    reasons,
    require_two,
    seeded_generator,
)
from rewardlab.data.rows import Row, UnusableRowError, is_absent, read_integers, read_name, read_number, show, text_key


def read_judged(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + replies + comparisons, each of which names two replies: a `Preference` as JSON.

    Raises UnusableRowError for a comparison that cannot be used, and if none is left.
    """
    asked = read_asked(row, rules)
    replies, entries = row["replies"], row["comparisons"]
    if not isinstance(replies, (list, tuple)) or not isinstance(entries, (list, tuple)):
        raise UnusableRowError("bad_comparison", "replies and comparisons are lists")
    written = [_read_judgement(entry, len(replies), row, rules.reading) for entry in entries]
    usable, left_out = asked.replies(replies)
    require_two(usable, left_out)
    judged = [one for one in written if one.first in usable and one.second in usable]
    if left_out and written and not judged:
        raise left_out[min(left_out)]
    kept = _draw_judged(judged, list(usable), place, rules)
    read = [usable[k] for k in kept]
    texts = [text_key(reply) for reply in read]
    among = [
        replace(one, first=kept.index(one.first), second=kept.index(one.second))
        for one in judged
        if one.first in kept and one.second in kept
    ]
    different = [one for one in among if texts[one.first] != texts[one.second]]
    comparisons = tuple(one for one in different if one.weight > 0)
    if not comparisons:
        cause = "zero_weight" if different else "identical_replies" if among else "no_comparison"
        raise UnusableRowError(cause, f"{len(written)} comparisons among {len(replies)} replies")
    preference = Preference(
        id=place,
        source=rules.source,
        prompt=asked.prompt,
        replies=tuple(read),
        comparisons=comparisons,
        ranking=_ranking_of(row, kept, len(replies), comparisons),
    )
    if rules.kwise_loss == "plackett-luce":
        _require_strict_ranking(preference, texts)
    return ParsedRow(
        preference=preference,
        skipped_identical=len(among) - len(different),
        order=tuple(kept),
        left_out=reasons(left_out),
        second_preferred=sum(one.label < 0.5 for one in comparisons),
    )


def _read_judgement(entry: object, num_replies: int, row: Row, reading: ReadingConfig) -> Comparison:
    """Read one judgement: `first` against `second`, with optional label, weight, margin and strength.

    A strength, and the margin of `--margin-column`, may also stand in the row, for all of its comparisons.
    """
    if not isinstance(entry, Mapping):
        raise UnusableRowError("bad_comparison", f"a comparison is {show(entry)}, wanted first and second")
    pair = read_integers([entry.get("first"), entry.get("second")])
    if pair is None or pair[0] == pair[1] or not all(0 <= k < num_replies for k in pair):
        raise UnusableRowError(
            "bad_comparison", f"{show(entry.get('first'))} against {show(entry.get('second'))} of {num_replies} replies"
        )
    shared = {name: row[name] for name in ("strength", reading.margin_column) if name is not None and name in row}
    own = {name: value for name, value in entry.items() if not is_absent(value)}
    label = read_number(own, "label", "bad_label", high=1.0)
    label = 1.0 if label is None else label
    # Comparisons of weight 0 are left out later, and the others of the row stay.
    made = make_comparison(pair[0], pair[1], label, {**shared, **own}, reading, weightless=True)
    weight = read_number(own, "weight", "bad_strength", high=LARGEST)
    margin = None if reading.margin_column else read_number(own, "margin", "bad_margin", high=LARGEST)
    annotator = own.get("annotator")
    product = made.weight * (1.0 if weight is None else weight)
    if product > LARGEST:
        raise UnusableRowError("bad_strength", f"weight times strength is {product:g}, wanted at most {LARGEST:g}")
    return replace(
        made,
        annotator=None if annotator is None else read_name(annotator),
        weight=product if product >= SMALLEST else 0.0,
        margin=margin if margin is not None and made.label != 0.5 and not made.margin else made.margin,
    )


def _draw_judged(judged: Sequence[Comparison], usable: Sequence[int], place: str, rules: Rules) -> list[int]:
    """Return the replies that are kept: those that are usable, or as many of them as `--max-replies` allows, with two
    that were compared."""
    limit = rules.reading.max_replies
    if limit is None or len(usable) <= limit or not judged:
        return [usable[k] for k in draw_replies(len(usable), place, rules)]
    generator = seeded_generator(rules.seed, place)
    one = judged[int(generator.integers(len(judged)))]
    mixed = [usable[int(k)] for k in generator.permutation(len(usable))]
    others = [k for k in mixed if k not in (one.first, one.second)]
    return sorted([one.first, one.second, *others[: limit - 2]])


def _ranking_of(
    row: Row, kept: Sequence[int], num_replies: int, comparisons: Sequence[Comparison]
) -> tuple[int, ...] | None:
    """Return the kept replies from best to worst; None if the row does not say.

    Two replies that are compared for certain rank each other. Raises UnusableRowError for a ranking that does not fit
    the replies, or that contradicts a comparison.
    """
    if is_absent(row.get("ranking")):
        sure = [one for one in comparisons if one.label in (0.0, 1.0)]
        if len(kept) > 2 or len(comparisons) != 1 or not sure:
            return None
        return (sure[0].first, sure[0].second) if sure[0].label else (sure[0].second, sure[0].first)
    order = read_integers(row["ranking"])
    if order is None or sorted(order) != list(range(num_replies)):
        raise UnusableRowError(
            "bad_scores", f"ranking is {show(row['ranking'])}, wanted every index from 0 to {num_replies - 1} once"
        )
    ranking = tuple(kept.index(k) for k in order if k in kept)
    for one in comparisons:
        if (ranking.index(one.first) - ranking.index(one.second)) * (one.label - 0.5) > 0:
            raise UnusableRowError("bad_scores", f"ranking {show(row['ranking'])} contradicts a comparison")
    return ranking


def _require_strict_ranking(preference: Preference, texts: Sequence[object]) -> None:
    """Raise UnusableRowError for a preference that Plackett–Luce cannot rank: ties, equal texts, or no ranking.

    Margins and labels between 0 and 1 have no place in a ranking, and would be ignored.
    """
    if len(set(texts)) < len(texts):
        raise UnusableRowError("identical_replies", "two replies are the same text, and Plackett-Luce ranks all")
    if any(one.label == 0.5 for one in preference.comparisons):
        raise UnusableRowError("tied_ranking", "a comparison has the label 0.5")
    if preference.ranking is None:
        raise UnusableRowError("missing_field", "no 'ranking', which Plackett-Luce needs")
    if soft := [one for one in preference.comparisons if one.margin or one.label not in (0.0, 1.0)]:
        what = f"margin {soft[0].margin:g}" if soft[0].margin else f"label {soft[0].label:g}"
        raise UnusableRowError("soft_ranking", f"a comparison has the {what}; --kwise-loss pairs uses it")


JUDGED = Schema(name="judged replies", needed=("prompt", "replies", "comparisons"), read=read_judged)
