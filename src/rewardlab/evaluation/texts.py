"""Finds the texts of judged preferences again, in the data that a run read. Uses neither torch nor the network.

Score rows hold no texts. A preference's id names its file and line, and its prompt key proves that the line still holds
the same prompt: a file that has changed since gives no texts, and never those of another row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.core.errors import RewardlabError
from rewardlab.core.types import Estimate, Preference, ScoreRow
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.originals import Key, originals_in

TRUTH: Final = "true_probability"
"""Column of generated data: the probability that the first reply is preferred."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Conversations of preferences that were found again."""

    preferences: Mapping[Key, Preference]
    ceiling: Estimate | None
    """Mean of max(p, 1 − p) over all judged preferences: the accuracy of a judge who knew the true p of each. None if
    the data do not hold them."""
    turns: Mapping[Key, int]
    """Number of turns of every judged preference that was found, reply included."""
    problems: Sequence[str]
    """The reasons why texts are missing, in words."""


def find_texts(config: Mapping[str, Any], name: str, wanted: Iterable[Key], rows: Sequence[ScoreRow]) -> Texts:
    """Return the `wanted` preferences among score `rows` of the evaluation called `name`, from the data in `config`.

    Only files on this machine are read; data from the hub and rows in memory are not found again.
    """
    search = _Search(rows, wanted)
    reading = _reading(config)
    for names, split in _named(config, name):
        for source in search.sources(names, split):
            rules = Rules(
                source=source.name,
                reading=reading,
                seed=_whole(config.get("seed")),
                bare=config.get("chat_template") == "concat",
            )
            search.read(source, rules)
    # If everything was found, data that were searched in vain do not matter.
    problems = dict.fromkeys(search.problems) if search.missing else {}
    return Texts(
        preferences=search.found,
        ceiling=_ceiling(search.prompts, search.truths),
        turns=search.turns,
        problems=tuple(problems),
    )


class _Search:
    """A search: what is wanted, and what was found so far."""

    def __init__(self, rows: Sequence[ScoreRow], wanted: Iterable[Key]) -> None:
        self.prompts: dict[Key, str] = {(row.source, row.preference_id): row.prompt_key for row in rows}
        self.replies: dict[Key, list[int]] = {}
        for row in rows:
            self.replies.setdefault((row.source, row.preference_id), []).append(row.reply)
        self.missing = {key for key in wanted if key in self.prompts}
        self.found: dict[Key, Preference] = {}
        self.truths: dict[Key, float] = {}
        self.turns: dict[Key, int] = {}
        self.problems: list[str] = []

    def sources(self, names: Sequence[str], split: str) -> Iterator[Source]:
        """Yield the files of the data with these names. Data that cannot be read here become `problems`."""
        try:
            found = find_sources(names, split)
        except (RewardlabError, OSError) as error:
            self.problems.append(str(error))
            return
        for source in found:
            if source.path is None:
                self.problems.append(f"{source.label} is from the hub, so its texts are not read again.")
            else:
                yield source

    def read(self, source: Source, rules: Rules) -> None:
        """Look in a file for missing texts, and for the true probability and number of turns of each judged row."""
        try:
            for original in originals_in(source, rules, self.prompts.keys()):
                key, truth = original.key, original.columns.get(TRUTH)
                if isinstance(truth, (int, float)) and 0 <= truth <= 1:
                    self.truths[key] = float(truth)
                if original.preference.key != self.prompts[key]:
                    continue
                self.turns[key] = original.num_turns
                if key not in self.missing:
                    continue
                if _are_replies_of(self.replies[key], original.preference):
                    self.found[key] = original.preference
                else:
                    self.problems.append(f"{key[1]}: some of its replies were not scored, so it is unknown which were.")
        except (RewardlabError, OSError) as error:
            self.problems.append(str(error))
        self.missing -= self.found.keys()


def _are_replies_of(numbers: Sequence[int], preference: Preference) -> bool:
    """Return whether the numbers of score rows are those of the replies in the data.

    Rows of earlier versions number only the replies that were scored, so where some are lost, numbers without a
    gap may be theirs.
    """
    count, highest = len(preference.replies), max(numbers)
    return len(numbers) == count or len(numbers) <= highest < count


def _named(config: Mapping[str, Any], name: str) -> Iterator[tuple[Sequence[str], str]]:
    """Yield (names, split) of the data that an evaluation may have used, the most likely first."""
    training = _words(config.get("dataset"))
    if name.startswith("test"):
        yield _words(config.get("test_dataset")) or training, str(config.get("test_split") or "test")
    elif name == "eval":
        yield training, str(config.get("hf_split") or "test")
    else:
        if config.get("eval_dataset") or config.get("eval_split"):
            yield _words(config.get("eval_dataset")) or training, str(config.get("eval_split") or "test")
        yield training, str(config.get("hf_split") or "train")


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, (list, tuple)) else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _reading(config: Mapping[str, Any]) -> ReadingConfig:
    """Return the settings by which rows were read; the defaults if these settings cannot be used."""
    try:
        return ReadingConfig(
            **{field.name: config[field.name] for field in fields(ReadingConfig) if field.name in config}
        )
    except (TypeError, ValueError):
        return ReadingConfig()


def _ceiling(prompts: Mapping[Key, str], truths: Mapping[Key, float]) -> Estimate | None:
    """Return the accuracy of a judge who knew the true probabilities; None unless every preference has one."""
    if not prompts or len(truths) < len(prompts):
        return None
    truth_G = np.array([truths[key] for key in prompts])
    best = stats.mean(np.maximum(truth_G, 1 - truth_G), list(prompts.values()))
    if math.isnan(best.value):
        return None
    # Without an interval the limits stay NaN, for these comparisons are then false.
    return replace(best, low=0.5 if best.low < 0.5 else best.low, high=1.0 if best.high > 1 else best.high)
