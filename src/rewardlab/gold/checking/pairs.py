"""Built pairs against the rows that they belong to: same prompts and replies, the winner with the higher gold score.

Where a pair contradicts the scores, the scores are also looked up in other places: with the replies of a row reversed,
and one or two rows up or down. Pairs were made from the scores, so the right place agrees with all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import prompt_key
from rewardlab.gold.checking.reading import Built, Pair, Stages, bare_key, shown_system
from rewardlab.gold.files.rows import GoldRow, system_of
from rewardlab.gold.findings import Finding, further

SHIFTS: Final = (-2, -1, 1, 2)
AGREES: Final = 0.95
"""Least share of pairs that must agree with the scores in another place for that place to be named."""
COMPARED: Final = 0.5
"""Least share of pairs whose two scores must be known for them to be found in order."""
FEW: Final = 10
"""Rows with one reply up to which it is quicker to look through them than to keep which have another one too."""
MOST_PLACES: Final = 1_000_000
"""Places of pairs among the rows that may propose how far rows were moved."""
PROPOSED: Final = 20
"""Proposed distances, the most frequent first, that are looked up for every pair."""
BELONGING: Final = "pairs and rows"
BUILD_AGAIN: Final = "Build the pairs again from these rows."


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The place of a pair among the rows."""

    pair: Pair
    row: int
    chosen: int
    rejected: int


@dataclass(kw_only=True)
class Index:
    """Rows by prompt and by reply. Very many rows may have the same prompt, or the same reply."""

    by_prompt: Mapping[str, Sequence[int]]
    """Prompt without its system turn -> rows."""
    by_reply: Mapping[str, Sequence[int]]
    rows: Sequence[GoldRow]
    keys: Sequence[str]
    """Prompt of each row without its system turn."""
    with_both: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Two replies of more than `FEW` rows each -> rows that have both, kept as they are looked up."""

    def rows_asking(self, pair: Pair) -> Sequence[int]:
        """Return the rows with the prompt of a pair."""
        return self.by_prompt.get(bare_key(pair.prompt), ())

    def rows_with(self, pair: Pair) -> Sequence[int]:
        """Return the rows that have both replies of a pair."""
        both = pair.chosen, pair.rejected
        if both in self.with_both:
            return self.with_both[both]
        fewest = min((self.by_reply.get(text, ()) for text in both), key=len)
        found = [row for row in fewest if self.has_both(row, pair)]
        if len(fewest) > FEW:
            self.with_both[both] = found
        return found

    def has_both(self, row: int, pair: Pair) -> bool:
        """Return whether there is a row of this number, and it has both replies of a pair."""
        if not 0 <= row < len(self.rows):
            return False
        texts = self.rows[row].responses
        return pair.chosen in texts and pair.rejected in texts

    def is_moved(self, pair: Pair, by: int) -> bool:
        """Return whether both replies of a pair stand `by` rows below a row with its prompt."""
        here, there = self.rows_asking(pair), self.rows_with(pair)
        if len(here) <= len(there):
            return any(self.has_both(row + by, pair) for row in here)
        key = bare_key(pair.prompt)
        return any(0 <= row - by < len(self.keys) and self.keys[row - by] == key for row in there)


def pair_findings(stages: Stages) -> Iterator[Finding]:
    """Yield the findings on the built pairs, among themselves and beside the rows."""
    yield from _sides(stages.built)
    yield from _forms(stages.built)
    if not stages.rows:
        return
    index = _index(stages.rows)
    for built in stages.built:
        yield from _one_file(built, index, are_taken=stages.taken is not None)


def _index(rows: Sequence[GoldRow]) -> Index:
    by_prompt: dict[str, list[int]] = {}
    by_reply: dict[str, list[int]] = {}
    keys = [bare_key(row.prompt) for row in rows]
    for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
        by_prompt.setdefault(key, []).append(number)
        for text in dict.fromkeys(row.responses):
            if text is not None:
                by_reply.setdefault(text, []).append(number)
    return Index(by_prompt=by_prompt, by_reply=by_reply, rows=rows, keys=keys)


def _one_file(built: Built, index: Index, *, are_taken: bool) -> Iterator[Finding]:
    """Yield the findings on one file; `are_taken` says that the prompts of the rows were taken from the pairs."""
    about = built.path.name
    found = [_find(pair, index) for pair in built.pairs]
    known = [one for one in found if one is not None]
    lost = [pair for pair, one in zip(built.pairs, found, strict=True) if one is None]
    yield _replies_alone(about, built, index) if are_taken else _belonging(about, built, lost, index)
    turns = _system(about, known, index.rows)
    if turns is not None:
        yield turns
    scored = [one for one in known if index.rows[one.row].gold is not None]
    if scored:
        yield _agreement(about, scored, index.rows)


def _find(pair: Pair, index: Index) -> Found | None:
    # The first row that has the prompt and both replies. What fewer rows have is looked through.
    asking, key = index.rows_asking(pair), bare_key(pair.prompt)
    if len(asking) <= len(index.rows_with(pair)):
        found = (row for row in asking if index.has_both(row, pair))
    else:
        found = (row for row in index.rows_with(pair) if index.keys[row] == key)
    if (row := next(found, None)) is None:
        return None
    texts = index.rows[row].responses
    one, other = texts.index(pair.chosen), texts.index(pair.rejected)
    # A pair of one text twice belongs to two places of the row, if it has the text twice.
    if one == other and pair.chosen in texts[one + 1 :]:
        other = texts.index(pair.chosen, one + 1)
    return Found(pair=pair, row=row, chosen=one, rejected=other)


def _belonging(about: str, built: Built, lost: Sequence[Pair], index: Index) -> Finding:
    """Judge whether every pair belongs to a row, and if not, how pairs and rows differ."""
    name = BELONGING
    if not built.pairs:
        return _empty(about)
    if not lost:
        told = f"All {len(built.pairs):,} pairs have a prompt of the rows and two of its replies."
        return Finding(name=name, about=about, status="pass", evidence=told)
    told = f"{len(lost):,} of {len(built.pairs):,} pairs belong to no row, the first is row {lost[0].number}."
    no_prompt = sum(bare_key(pair.prompt) not in index.by_prompt for pair in lost)
    by, often = _most_often_moved(lost, index)
    if by and often >= AGREES * (len(lost) - no_prompt) > 0:
        return Finding(
            name=name,
            about=about,
            status="fail",
            evidence=f"{told} {often:,} have replies that stand {further(by)} than their prompt.",
            advice="The responses are shifted against the prompts, here or in the rows. Sample or build again, and do "
            "not sort or filter one file alone.",
        )
    what = (
        f"{no_prompt:,} {plural(no_prompt, 'has', 'have')} a prompt that no row has"
        if no_prompt
        else "Their prompts are known, their replies not"
    )
    return Finding(
        name=name,
        about=about,
        status="fail",
        evidence=f"{told} {what}.",
        advice=f"They were built from other rows, or texts were changed on the way. {BUILD_AGAIN}",
    )


def _replies_alone(about: str, built: Built, index: Index) -> Finding:
    """Judge whether the replies of every pair belong to one row, where the prompts of rows were taken from the pairs.

    The prompts themselves then agree in any case, so they are not compared.
    """
    if not built.pairs:
        return _empty(about)
    lost = [pair for pair in built.pairs if not index.rows_with(pair)]
    if lost:
        return Finding(
            name=BELONGING,
            about=about,
            status="fail",
            evidence=f"{len(lost):,} of {len(built.pairs):,} pairs have two replies that no row has together, the "
            f"first is row {lost[0].number}.",
            advice=f"They were built from other rows, or texts were changed on the way. {BUILD_AGAIN}",
        )
    return Finding(
        name=BELONGING,
        about=about,
        status="undecided",
        evidence=f"All {len(built.pairs):,} pairs have two replies of a row. Whether they have its prompt cannot be "
        f"seen, since the prompts of the rows were taken from the pairs.",
        advice="Name the prompts with --prompts-path.",
    )


def _empty(about: str) -> Finding:
    return Finding(name=BELONGING, about=about, status="fail", evidence="There are no pairs.", advice=BUILD_AGAIN)


def _most_often_moved(lost: Sequence[Pair], index: Index) -> tuple[int, int]:
    """Return by how many rows the replies of most pairs lie from a row with their prompt, and of how many they do.

    A pair whose prompt and replies many rows have lies from them by very many distances. So distances are proposed by
    the pairs that have the fewest, and the most frequent of these are looked up for all pairs.
    """
    proposed: Counter[int] = Counter()
    left = MOST_PLACES
    for here, there in sorted(
        ((index.rows_asking(pair), index.rows_with(pair)) for pair in lost),
        key=lambda rows: len(rows[0]) * len(rows[1]),
    ):
        left -= len(here) * len(there)
        if left < 0:
            break
        proposed.update({row - own for own in here for row in there})
    often = {by: sum(index.is_moved(pair, by) for pair in lost) for by, _ in proposed.most_common(PROPOSED)}
    return max(often.items(), key=lambda one: one[1], default=(0, 0))


def _system(about: str, known: Sequence[Found], rows: Sequence[GoldRow]) -> Finding | None:
    """Judge whether pairs have the system turn of their rows; with another one a model reads other texts."""
    if not known:
        return None
    turns = Counter((system_of(one.pair.prompt), system_of(rows[one.row].prompt)) for one in known)
    wrong = {both: count for both, count in turns.items() if both[0] != both[1]}
    if not wrong:
        return Finding(
            name="system turn",
            about=about,
            status="pass",
            evidence="Every pair has the system turn of its row, or none.",
        )
    (ours, theirs), count = max(wrong.items(), key=lambda one: one[1])
    harmless = all(not one and not other for one, other in wrong)
    return Finding(
        name="system turn",
        about=about,
        status="warn" if harmless else "fail",
        evidence=f"{sum(wrong.values()):,} of {len(known):,} pairs have another system turn than their rows, most "
        f"often {shown_system(ours)} beside {shown_system(theirs)} ({count:,}).",
        advice="Some templates render an empty system turn, some put a text of their own where there is none, so gold "
        "and proxy may see other texts. Give the same --system to every stage."
        if harmless
        else "Gold and proxy see other templates. Give the same --system to every stage, and build again.",
    )


def _agreement(about: str, known: Sequence[Found], rows: Sequence[GoldRow]) -> Finding:
    """Judge whether the chosen reply of each pair has the higher gold score; if not, where it would have."""
    name = "chosen and gold scores"
    here = _signs(known, rows, reverse=False, shift=0)
    ties = int(np.sum((here == 0) & np.array([not one.pair.is_tie for one in known])))
    wrong, unknown = int((here < 0).sum()), int(np.isnan(here).sum())
    told = f"{int((here > 0).sum()):,} of {len(known):,} pairs have the reply with the higher gold score as chosen"
    told += f", {wrong:,} the lower one" + (f", {ties:,} two equal ones" if ties else "")
    told += f", {unknown:,} {plural(unknown, 'has', 'have')} no score" if unknown else ""
    if not wrong and unknown > len(known) * (1 - COMPARED):
        return Finding(
            name=name,
            about=about,
            status="undecided",
            evidence=f"{told}. Too few could be compared.",
            advice="Label the rows again that have no score.",
        )
    if not wrong and not ties:
        return Finding(name=name, about=about, status="pass", evidence=f"{told}.")
    if not wrong:
        return Finding(
            name=name,
            about=about,
            status="warn",
            evidence=f"{told}.",
            advice="A tie has no winner: leave ties out, as `gold build` does, or mark them (label 0.5).",
        )
    fault, advice = _fault(known, rows, here)
    return Finding(name=name, about=about, status="fail", evidence=f"{told}. {fault}", advice=advice)


def _signs(known: Sequence[Found], rows: Sequence[GoldRow], *, reverse: bool, shift: int) -> np.ndarray:
    """Return for each pair the sign of the gold score of its chosen reply less that of the other, NaN where unknown."""
    found = np.full(len(known), np.nan)
    for number, one in enumerate(known):
        place = one.row + shift
        gold = rows[place].gold if 0 <= place < len(rows) else None
        if gold is None or max(one.chosen, one.rejected) >= len(gold):
            continue
        scores = gold[::-1] if reverse else gold
        first, second = scores[one.chosen], scores[one.rejected]
        if first is not None and second is not None:
            found[number] = 0.0 if one.pair.is_tie else np.sign(first - second)
    return found


def _fault(known: Sequence[Found], rows: Sequence[GoldRow], here: np.ndarray) -> tuple[str, str]:
    """Return what explains the pairs that contradict the scores, and what to do."""
    two = all(len(rows[one.row].responses) == 2 for one in known)
    decided = ~np.isnan(here) & (here != 0)
    if np.mean(here[decided] < 0) >= AGREES:
        other = " or the two scores of each row" if two else ", or the scores have the opposite sign"
        return (
            f"Chosen and rejected are swapped{other}.",
            "Look at which came first in building, and at a few rows below: which reply is better? Then build or label "
            "again.",
        )
    if not two:
        reverse = _signs(known, rows, reverse=True, shift=0)
        if _share(reverse) >= AGREES:
            return "The scores are in the reverse order of the replies: they are swapped.", "Label the rows again."
    for shift in sorted(SHIFTS, key=abs):
        there = _signs(known, rows, reverse=False, shift=shift)
        both = ~np.isnan(there) & ~np.isnan(here)
        if _share(there[both]) >= AGREES:
            return f"The scores are shifted: those that fit stand {further(shift)}.", _MOVED
        start, share = _from(known, here, there, both)
        if share >= AGREES:
            told = (
                f"Up to about row {start} the scores fit, then they are shifted: those that fit stand {further(shift)}."
            )
            return told, _MOVED
    share = float(np.mean(here[decided] < 0))
    if share > 1 / 3:
        return (
            f"They agree no better than by chance ({1 - share:.0%}): these are scores of another set, or of another "
            f"gold model, or the rows are in another order.",
            f"Find the scores that the pairs were built from, or: {BUILD_AGAIN.lower()}",
        )
    return (
        "Most agree, so some pairs were flipped or some scores changed after building.",
        f"{BUILD_AGAIN} Flips that were meant (noise, human votes) should be marked by a label.",
    )


_MOVED: Final = "A row is missing or double in one of the files. Label the rows again, then build again."


def _share(signs: np.ndarray) -> float:
    known = signs[~np.isnan(signs) & (signs != 0)]
    return float(np.mean(known > 0)) if known.size else 0.0


def _from(known: Sequence[Found], here: np.ndarray, there: np.ndarray, both: np.ndarray) -> tuple[int, float]:
    """Return the row from which on moved scores fit best, those before it staying, and the share that then agrees."""
    order = np.argsort([one.row for one in known], kind="stable")
    order = order[both[order]]
    if not order.size:
        return 0, 0.0
    ours, theirs = (here[order] > 0).astype(float), (there[order] > 0).astype(float)
    right = np.concatenate([[0.0], np.cumsum(ours)]) + np.concatenate([np.cumsum(theirs[::-1])[::-1], [0.0]])
    best = int(np.argmax(right))
    return (known[int(order[best])].row if best < order.size else len(known)), float(right[best] / order.size)


def _sides(built: Sequence[Built]) -> Iterator[Finding]:
    """Yield whether train and test share prompts."""
    sides: dict[str, set[str]] = {}
    for one in built:
        sides.setdefault(one.side, set()).update(bare_key(pair.prompt) for pair in one.pairs)
    if len(sides) < 2:
        return
    both = sides["train"] & sides["test"]
    yield Finding(
        name="train and test prompts",
        status="fail" if both else "pass",
        evidence=f"{number_of(len(sides['train']), 'prompt')} to train on, {len(sides['test']):,} to test "
        f"on, {len(both):,} in "
        f"both.",
        advice="What is trained on cannot test: build again, with a split by prompt." if both else "",
    )


def _forms(built: Sequence[Built]) -> Iterator[Finding]:
    """Yield whether the forms of one side hold the same pairs in the same order; ties are in our rows alone."""
    by_side: dict[str, list[Built]] = {}
    for one in built:
        by_side.setdefault(one.side, []).append(one)
    for side, several in by_side.items():
        if len(several) < 2:
            continue
        first, *others = several
        apart = [one.path.name for one in others if _texts(one) != _texts(first)]
        yield Finding(
            name=f"forms of {side}",
            status="fail" if apart else "pass",
            evidence=f"{', '.join(apart)}: other pairs than in {first.path.name}."
            if apart
            else f"{', '.join(one.path.name for one in several)} hold the same pairs.",
            advice=BUILD_AGAIN if apart else "",
        )


def _texts(built: Built) -> list[tuple[str, str, str]]:
    return [(prompt_key(pair.prompt), pair.chosen, pair.rejected) for pair in built.pairs if not pair.is_tie]
