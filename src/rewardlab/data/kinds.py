"""What kind of conversations a dataset holds, counted while it is read, and where two datasets are of other kinds: a
model that learns the one is then judged on the other, and nothing in its numbers says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rewardlab.core.terminal import number_of
from rewardlab.core.types import Preference
from rewardlab.data.scripts import count_scripts

FEWEST: Final = 20
"""Rows of each of two datasets without which nothing is said. If they are alike, each of the shares below is then
reached by chance with a probability below 1e-4."""
MOST: Final = 0.9
"""Share of rows with a system turn from which nearly all have one; with as few without one, nearly none has."""
OFTEN: Final = 0.5
"""Share of the rows of one dataset that are in letters that the other does not use."""
SELDOM: Final = 0.02
"""Share of rows up to which a dataset does not use letters."""
LOOKED_AT: Final = 100
"""Characters of a row's first reply that are looked at."""
OF_JAPANESE: Final = frozenset(("Han", "Hiragana", "Katakana"))
"""Scripts that one text may have, now more of the one, now of another."""


@dataclass(kw_only=True)
class Kinds:
    """Counts over the rows of one dataset or of several."""

    rows: int = 0
    system_turns: int = 0
    """Rows whose prompt has a system turn."""
    scripts: Counter[str] = field(default_factory=Counter)
    """Script of most letters of the first reply -> rows."""

    def add(self, rows: int, system_turns: int, scripts: Mapping[str, int]) -> None:
        """Add the counts of more rows."""
        self.rows += rows
        self.system_turns += system_turns
        self.scripts.update(scripts)


def has_system_turn(preference: Preference) -> bool:
    """Return whether the prompt has a system turn."""
    return any(turn.role == "system" for turn in preference.prompt)


def script_of(text: str) -> str | None:
    """Return the script of most letters at the beginning of a text; None if it has no letters."""
    counts = count_scripts([text[:LOOKED_AT]])
    return max(counts, key=lambda script: (counts[script], script), default=None)


def unlike(train: Kinds, other: Kinds, name: str, *, fills_system: bool) -> Iterable[str]:
    """Yield a line for each way in which other data are of another kind than those for training.

    `fills_system` says that conversations without a system turn are given one, so that all have it.
    """
    if min(train.rows, other.rows) < FEWEST:
        return
    shares = sorted(kinds.system_turns / kinds.rows for kinds in (train, other))
    if not fills_system and shares[0] <= 1 - MOST and shares[1] >= MOST:
        yield (
            f"{other.system_turns} of {number_of(other.rows, f'{name} row')} have a system turn, and "
            f"{train.system_turns} of {number_of(train.rows, 'training row')}: the model learns conversations of one "
            f"form and is judged on those of another. --system-prompt gives a system turn to conversations that have "
            f"none, and so does a column `system`."
        )
    # Rows without letters, such as numbers and formulas, are of no language.
    of_train, of_other = (kinds.scripts.total() for kinds in (train, other))
    if min(of_train, of_other) < FEWEST:
        return
    for script, count in other.scripts.most_common():
        alike = OF_JAPANESE if script in OF_JAPANESE else {script}
        known = sum(train.scripts[one] for one in alike)
        if count >= OFTEN * of_other and known <= SELDOM * of_train:
            yield (
                f"{count} of {number_of(of_other, f'{name} row')} with letters are in {script} letters, and {known} of "
                f"{number_of(of_train, 'training row')}: numbers on them say what the model does in a language that it "
                f"did not learn in training. Is it the right file?"
            )
